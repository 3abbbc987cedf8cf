"""Judge whether a CUDA toolkit or a driver branch supports a GPU. Pure; standard library only.

Runs on: LOGIN NODE, COMPUTE NODE.
"""

from __future__ import annotations

from hpcenv.judge.compat.compat_table import Capability, Compat
from hpcenv.judge.compat.floors import driver_floor
from hpcenv.judge.compat.gpu_names import gpu_by_name
from hpcenv.judge.compat.judgement import Judgement
from hpcenv.judge.compat.versions import less, numbers, older


def check_toolkit(compat: Compat, cuda: str, compute_capability: str, *, gpu: str = "") -> Judgement:
    """Say whether a CUDA toolkit compiles for a compute capability.

    Args:
        compat: the table.
        cuda: the toolkit, `12.6`.
        compute_capability: compute capability of the GPU, `9.0`.
        gpu: name of the GPU, for the message.
    """
    this = _this(gpu, compute_capability)
    row, wanted = compat.capabilities.get(compute_capability), numbers(cuda)
    if wanted is None:
        return Judgement(result="unknown", what=f"`{cuda}` is not a CUDA version")
    if row is None:
        return Judgement(result="unknown", what=compat.missing(f"the compute capability of {this}"))
    if less(wanted, numbers(row.first_toolkit) or ()):
        what = f"CUDA {cuda} has no target for {this}: the first is CUDA {row.first_toolkit}"
        return Judgement(result="mismatch", what=what, why=row.source)
    last = numbers(row.last_toolkit)
    if last is not None and wanted[: len(last)] > last:
        what = f"CUDA {cuda} has dropped {this}: the last is CUDA {_with_updates(row.last_toolkit)}"
        return Judgement(result="mismatch", what=what, why=row.source)
    return Judgement(result="match", what=f"CUDA {cuda} supports {this}", why=_until(row))


def check_driver_branch(compat: Compat, driver: str, compute_capability: str, *, gpu: str = "") -> Judgement:
    """Say whether a driver runs a GPU: the driver must not be too old for the GPU, and must still support the GPU.

    If no source names the first driver of a GPU, the driver of the first toolkit for the GPU is used instead.

    Args:
        compat: the table.
        driver: version of the driver, `580.95.05`.
        compute_capability: compute capability of the GPU, `7.0`.
        gpu: name of the GPU, for the message.
    """
    this = _this(gpu, compute_capability)
    row, have = compat.capabilities.get(compute_capability), numbers(driver)
    if have is None:
        return Judgement(result="unknown", what=f"`{driver}` is not a driver version")
    if row is None:
        return Judgement(result="unknown", what=compat.missing(f"the compute capability of {this}"))
    if row.last_driver and have[0] > int(row.last_driver):
        what = f"driver {driver} does not run {this}: the last branch for it is R{row.last_driver}"
        return Judgement(result="mismatch", what=what, why=row.source, hint=f"install a driver of R{row.last_driver}")
    first = driver_floor(compat, row.first_toolkit)
    branch = (numbers(first.packaged) or (0,))[0] if first else 0
    if have[0] < branch:
        what = f"driver {driver} is older than {this}: the first CUDA for it, {row.first_toolkit}, came with R{branch}"
        why = f"{row.source}; {compat.packaged_source}"
        return Judgement(result="mismatch", what=what, why=why, hint=f"install a driver of R{branch} or newer")
    model = gpu_by_name(compat, gpu)
    if model is not None and model.first_driver and older(have, model.first_driver):
        first_for_it = model.first_driver if "." in model.first_driver else f"of R{model.first_driver}"
        what = f"driver {driver} is older than {this}: the first for it is {first_for_it}"
        return Judgement(result="mismatch", what=what, why=model.driver_source)
    if model is not None and model.listed_driver and older(have, model.listed_driver):
        listed = model.listed_driver
        what = f"it is not known whether driver {driver} runs {this}: the first driver that lists it is {listed}"
        return Judgement(result="unknown", what=what, why=model.driver_source, hint=f"take driver {listed} or newer")
    return Judgement(result="match", what=f"driver {driver} supports {this}", why=row.source)


def _this(gpu: str, compute_capability: str) -> str:
    return f"{gpu} (compute capability {compute_capability})" if gpu else f"compute capability {compute_capability}"


def _with_updates(toolkit: str) -> str:
    return toolkit if "." in toolkit else f"{toolkit}.x"


def _until(row: Capability) -> str:
    last = f"to {_with_updates(row.last_toolkit)}" if row.last_toolkit else "on"
    return f"from CUDA {row.first_toolkit} {last} ({row.source})"
