"""Judge whether a driver runs a CUDA toolkit. Pure; standard library only.

Runs on: LOGIN NODE, COMPUTE NODE.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcenv.judge.compat.compat_table import Compat
from hpcenv.judge.compat.floors import Floor, driver_floor
from hpcenv.judge.compat.gpu_names import gpu_by_name
from hpcenv.judge.compat.judgement import Judgement
from hpcenv.judge.compat.toolkits import check_driver_branch
from hpcenv.judge.compat.torch_builds import X86_64, suggest_torch, would_run
from hpcenv.judge.compat.versions import Numbers, numbers, older
from hpcenv.records.verdict import Result


def check_driver(
    compat: Compat,
    cuda: str,
    driver: str,
    *,
    node: str = "",
    holder: str = " in the image",
    forward_compat: str | None = None,
    gpus: Sequence[str] = (),
    compute_capability: str = "",
    machine: str = X86_64,
) -> Judgement:
    """Say whether a driver runs a CUDA toolkit.

    Args:
        compat: the table.
        cuda: CUDA runtime version of the image, for which torch was built.
        driver: driver version of the node, or `absent`.
        node: name of the node, for the message.
        holder: the thing that contains this CUDA, for the message; "" without an image.
        forward_compat: CUDA version of the cuda-compat package that the job puts first on the loader's path; None
            without such a package.
        gpus: GPU models of the node, because forward compatibility is for data-centre GPUs only.
        compute_capability, machine: GPUs and processors of the node, which a suggested torch build must support.
    """
    has = f"node {node} has" if node else "the driver here is"
    if driver == "absent":
        who = f"node {node}" if node else "this node"
        return Judgement(result="mismatch", what=f"{who} has no NVIDIA driver, CUDA {cuda}{holder} needs one")
    floor, have = driver_floor(compat, cuda), numbers(driver)
    if have is None:
        return Judgement(result="unknown", what=f"`{driver}` is not a driver version")
    if floor is None:
        what = f"which driver CUDA {cuda} needs is not in the table (dated {compat.dated})"
        return Judgement(result="unknown", what=what, hint="install a newer hpcenv, which has a newer table")
    too_old = f"this driver is too old for CUDA {cuda}{holder}: needs >= {floor.version}, {has} {driver}"
    without = older(have, floor.version)
    others = suggest_torch(compat, driver, compute_capability=compute_capability, machine=machine) if without else ()
    hint = would_run(others)
    if forward_compat is None and without:
        return Judgement(result="mismatch", what=too_old, why=compat.floors_source, hint=hint)
    ended = check_driver_branch(compat, driver, compute_capability, gpu=gpus[0] if gpus else "")
    # The driver of a node reports the GPU of the node, so the driver runs that GPU.
    asked = bool(gpus and not node and compute_capability in compat.capabilities)
    if ended.result == "mismatch" or (ended.result == "unknown" and asked):
        return ended
    if forward_compat is None:
        return Judgement(result="match", what=f"driver {driver} runs CUDA {cuda}", why=_limits(floor, have))
    result, why = _judge_forward(compat, forward_compat, cuda=cuda, driver=have, gpus=gpus)
    if result == "match":
        return Judgement(result="match", what=f"driver {driver} runs CUDA {cuda} by forward compatibility", why=why)
    if without:
        return Judgement(result=result, what=too_old, why=why, hint=hint)
    what = f"cuda-compat {forward_compat} cannot be used with driver {driver}"
    leave = f"leave it off the loader's path: driver {driver} runs CUDA {cuda} without it"
    return Judgement(result=result, what=what, why=why, hint=leave)


def _limits(floor: Floor, have: Numbers) -> str:
    """Return the features that do not work with a driver, although the driver is newer than the floor."""
    if not floor.packaged:
        return f"CUDA {floor.cuda} itself is unknown to the table; the floor of its major release counts"
    if older(have, floor.packaged):
        return (
            "by minor-version compatibility: not every feature of the toolkit, and no PTX compiled by "
            f"the driver, which needs >= {floor.packaged}"
        )
    return ""


def _judge_forward(
    compat: Compat, package: str, *, cuda: str, driver: Numbers, gpus: Sequence[str]
) -> tuple[Result, str]:
    """Say whether a driver can run a toolkit together with a cuda-compat package."""
    name, source = f"cuda-compat {package}", compat.forward.source
    has, wants = numbers(package), numbers(cuda)
    if has is None or wants is None:
        return "unknown", f"`{package}` is not a CUDA version"
    if has[:2] < wants[:2]:
        return "mismatch", f"{name} is older than CUDA {cuda}"
    branches = compat.forward.package.get(".".join(map(str, has[:2])), {})
    word = branches.get(driver[0])
    by_gpu = _judge_forward_gpus(compat, name, gpus)
    if word is None and by_gpu[0] != "mismatch":
        return "unknown", f"nothing is said about {name} on driver branch {driver[0]} ({source})"
    if word == "no":
        return "mismatch", f"{name} does not work on driver branch {driver[0]} ({source})"
    return by_gpu


def _judge_forward_gpus(compat: Compat, name: str, gpus: Sequence[str]) -> tuple[Result, str]:
    source = compat.forward.source
    if compat.forward.data_centre_only:
        models = {gpu: gpu_by_name(compat, gpu) for gpu in gpus}
        consumer = [gpu for gpu, model in models.items() if model is not None and not model.data_centre]
        if consumer:
            return "mismatch", f"{name} is for data-centre GPUs only, {consumer[0]} is none ({source})"
        unsure = [gpu for gpu, model in models.items() if model is None] or ([] if gpus else ["the GPU"])
        if unsure:
            return "unknown", f"{name} is for data-centre GPUs only, whether {unsure[0]} is one is not known"
    return "match", f"{name} must come before the host's libcuda on the loader's path ({source})"
