"""What runs with what: drivers, CUDA toolkits, torch builds and GPUs. Pure; standard library only.

Runs on: LOGIN NODE.

`compat.toml` beside this file holds the facts, each with its source and date; this module
holds the rules. It is given plain data (`parse`), so the caller reads the packaged file
(`PACKAGED`) or another one (`compat-file` under [submit]).

Three questions can be answered before a job waits in the queue:

- is the driver new enough for the CUDA toolkit in the image (`check_driver`),
- does the image's torch hold kernels for the GPU (`covers`),
- does the image's own rule, NVIDIA_REQUIRE_CUDA, hold (`evaluate_require`).

Each gives a `Judgement` with three values. What the table does not know is `unknown`; a
driver that is newer than anything in it is never refused.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hpcenv.errors import SpecError
from hpcenv.records.manifest import Value
from hpcenv.records.verdict import Result

# The table that comes with hpcenv. TOML: project/toml_files.py reads it.
PACKAGED = Path(__file__).with_name("compat.toml")

SCHEMA = 1

Numbers = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """An answer: `what` in one sentence, `why` with its origin, `hint` what would do instead."""

    result: Result
    what: str
    why: str = ""
    hint: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """The oldest driver for a CUDA toolkit.

    Attributes:
        cuda: the toolkit as asked.
        version: oldest driver, by minor-version compatibility.
        packaged: driver that was packaged with the toolkit, "" when the table has it not.
            From it on all features work; between the two the driver cannot compile PTX of
            this toolkit.
        source: where that is written, and when it was read.
    """

    cuda: str
    version: str
    packaged: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchRelease:
    """One torch release; `builds` has CUDA -> arch list, an empty one where it is not known."""

    version: str
    requires_python: str
    pypi: str
    builds: Mapping[str, tuple[str, ...]]
    source: str
    libraries: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuModel:
    """What the name of a GPU says about it; `sm_count` is None if the name is not enough."""

    name: str
    compute_capability: str
    data_centre: bool
    sm_count: int | None
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """A torch build that would run; `on_pypi` when it is the default index's own."""

    torch: str
    cuda: str
    on_pypi: bool
    requires_python: str

    def __str__(self) -> str:
        return f"torch {'.'.join(self.torch.split('.')[:2])} (cu{self.cuda.replace('.', '')})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """Which cuda-compat package works on which driver branch."""

    package: Mapping[str, Mapping[int, str]]
    data_centre_only: bool
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Compat:
    """The table. `gpus` has a name's comparable form -> model."""

    origin: str
    floors: Mapping[int, str]
    floors_source: str
    packaged: Mapping[Numbers, str]
    packaged_source: str
    forward: Forward
    torches: tuple[TorchRelease, ...]
    gpus: Mapping[str, GpuModel]


# -- driver and toolkit --------------------------------------------------------------------


def driver_floor(compat: Compat, cuda: str) -> Floor | None:
    """Return the oldest driver for a CUDA toolkit, None for a major release that is not in the table.

    Args:
        compat: the table.
        cuda: the CUDA runtime version, `13.0` or `13.0.1`.
    """
    toolkit = numbers(cuda)
    if toolkit is None or toolkit[0] not in compat.floors:
        return None
    release = _padded(toolkit, 3)[:3]
    packaged = compat.packaged.get(release) or compat.packaged.get((*release[:2], 0), "")
    source = f"{compat.floors_source}; {compat.packaged_source}" if packaged else compat.floors_source
    return Floor(cuda=cuda, version=compat.floors[toolkit[0]], packaged=packaged, source=source)


def check_driver(
    compat: Compat,
    cuda: str,
    driver: str,
    *,
    node: str = "",
    forward_compat: str | None = None,
    gpus: Sequence[str] = (),
    compute_capability: str = "",
) -> Judgement:
    """Say whether a driver runs a CUDA toolkit.

    Args:
        compat: the table.
        cuda: CUDA runtime version of the image, as torch was built for.
        driver: driver version of the node, or `absent`.
        node: its name, for the message.
        forward_compat: CUDA version of the cuda-compat package that the job will put first on
            the loader's path, None when it will not.
        gpus: GPU models of the node; forward compatibility is for data-centre GPUs only.
        compute_capability: of those GPUs, so that no torch without kernels is suggested.
    """
    has = f"node {node} has" if node else "the driver here is"
    if driver == "absent":
        who = f"node {node}" if node else "this node"
        return Judgement(result="mismatch", what=f"{who} has no NVIDIA driver, CUDA {cuda} in the image needs one")
    floor, have = driver_floor(compat, cuda), numbers(driver)
    if have is None:
        return Judgement(result="unknown", what=f"`{driver}` is not a driver version")
    if floor is None:
        what = f"which driver CUDA {cuda} needs is not known to {compat.origin}"
        return Judgement(
            result="unknown", what=what, hint="name a newer table: `compat-file` under [submit] in hpcenv.toml"
        )
    too_old = f"this driver is too old for CUDA {cuda} in the image: needs >= {floor.version}, {has} {driver}"
    without = _older(have, floor.version)
    hint = _would_run(suggest_torch(compat, driver, compute_capability=compute_capability)) if without else ""
    if forward_compat is None and without:
        return Judgement(result="mismatch", what=too_old, why=compat.floors_source, hint=hint)
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
    """Return what a driver above the floor still cannot do."""
    if not floor.packaged:
        return f"CUDA {floor.cuda} itself is unknown to the table; the floor of its major release counts"
    if _older(have, floor.packaged):
        return (
            "by minor-version compatibility: not every feature of the toolkit, and no PTX compiled by "
            f"the driver, which needs >= {floor.packaged}"
        )
    return ""


def _judge_forward(
    compat: Compat, package: str, *, cuda: str, driver: Numbers, gpus: Sequence[str]
) -> tuple[Result, str]:
    """Say whether a cuda-compat package lifts this driver to this toolkit."""
    name, source = f"cuda-compat {package}", compat.forward.source
    has, wants = numbers(package), numbers(cuda)
    if has is None or wants is None:
        return "unknown", f"`{package}` is not a CUDA version"
    if has[:2] < wants[:2]:
        return "mismatch", f"{name} is older than CUDA {cuda}"
    branches = compat.forward.package.get(".".join(map(str, has[:2])), {})
    word = branches.get(driver[0])
    if word is None:
        return "unknown", f"nothing is said about {name} on driver branch {driver[0]} ({source})"
    if word == "no":
        return "mismatch", f"{name} does not work on driver branch {driver[0]} ({source})"
    return _judge_forward_gpus(compat, name, gpus)


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


def suggest_torch(
    compat: Compat, driver: str, *, compute_capability: str = "", python: str = ""
) -> tuple[Suggestion, ...]:
    """Return one build per torch release that runs on a driver, newest release first.

    Args:
        compat: the table.
        driver: driver version; "" for any.
        compute_capability: only builds that are known to hold kernels for it.
        python: only releases that this Python version may install.
    """
    have = numbers(driver) if driver else (10**6,)
    if have is None:
        return ()
    found = []
    for release in compat.torches:
        runs = [cuda for cuda in release.builds if _runs(compat, release, cuda, have, compute_capability)]
        if runs and _may_install(release.requires_python, python):
            cuda = release.pypi if release.pypi in runs else max(runs, key=_sort_key)
            found.append(_suggestion(release, cuda))
    return tuple(found)


def _suggestion(release: TorchRelease, cuda: str) -> Suggestion:
    on_pypi = cuda == release.pypi
    return Suggestion(torch=release.version, cuda=cuda, on_pypi=on_pypi, requires_python=release.requires_python)


def _runs(compat: Compat, release: TorchRelease, cuda: str, driver: Numbers, compute_capability: str) -> bool:
    floor = driver_floor(compat, cuda)
    if floor is None or _older(driver, floor.version):
        return False
    # PTX does not count here: whether this driver may compile it is another question.
    return not compute_capability or _cubin_for(release.builds[cuda], numbers(compute_capability) or ()) is not None


def _may_install(requires_python: str, python: str) -> bool:
    """Return whether a Python fits `>=3.10`, the only form in the table. Another form counts as not fitting."""
    have, least = numbers(python), numbers(requires_python.removeprefix(">="))
    return not python or (have is not None and least is not None and not _less(have, least))


def _would_run(suggestions: Sequence[Suggestion], *, verb: str = "would run") -> str:
    """Name the newest build; one that a plain `pip install` gives comes first."""
    if not suggestions:
        return ""
    best = next((one for one in suggestions if one.on_pypi), suggestions[0])
    return f"{best} {verb}"


# -- kernels and GPU ------------------------------------------------------------------------

# Architectures of Jetson and other Tegra chips: no binary compatibility with any other, nor
# among each other (CUDA Programming Guide, Binary Compatibility).
_TEGRA = {(5, 3), (6, 2), (7, 2), (8, 7)}

_ARCH = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


def covers(
    compat: Compat,
    arch_list: Sequence[str],
    compute_capability: str,
    *,
    gpu: str = "",
    cuda: str = "",
    driver: str = "",
) -> Judgement:
    """Say whether torch holds kernels for a GPU.

    Args:
        compat: the table, for what would run instead.
        arch_list: as `torch.cuda.get_arch_list()` gives it: `sm_80`, `compute_90`.
        compute_capability: of the GPU, `9.0`.
        gpu: its name, for the message.
        cuda, driver: of the image and the node; with both it can be said whether the driver
            compiles PTX of this toolkit, where no kernel but PTX fits.
    """
    wanted = numbers(compute_capability)
    if wanted is None or len(wanted) != 2:
        return Judgement(result="unknown", what=f"`{compute_capability}` is not a compute capability")
    this = f"{gpu}, compute capability {compute_capability}" if gpu else f"compute capability {compute_capability}"
    kernel = _cubin_for(arch_list, wanted)
    if kernel is not None:
        return Judgement(result="match", what=f"this image's torch has kernels for this GPU ({this}: {kernel})")
    ptx = _ptx_for(arch_list, wanted)
    if ptx is not None:
        return _judge_ptx(compat, ptx, this=this, cuda=cuda, driver=driver)
    strange = [arch for arch in arch_list if not _ARCH.fullmatch(arch)]
    if strange:
        what = f"whether this image's torch has kernels for this GPU ({this}) is not known"
        return Judgement(result="unknown", what=what, why=f"`{strange[0]}` is no CUDA architecture that hpcenv knows")
    return Judgement(
        result="mismatch",
        what=f"this image's torch has no kernels for this GPU ({this}; it has {_range(arch_list)})",
        why="a kernel runs on GPUs of the same major and the same or a higher minor compute capability",
        hint=_would_run(
            suggest_torch(compat, driver, compute_capability=compute_capability),
            verb="would run" if driver else "has kernels for it",
        ),
    )


def _cubin_for(arch_list: Iterable[str], wanted: Numbers) -> str | None:
    """Return the kernel that runs on a GPU: same major, minor not above the GPU's.

    `sm_90a` holds what only that very architecture has; `sm_100f` what its family has, which
    is the same major with the same or a higher minor.
    """
    for kind, arch, suffix, name in _architectures(arch_list):
        exact = suffix == "a" or arch in _TEGRA or wanted in _TEGRA
        newer = arch[:1] == wanted[:1] and arch <= wanted
        if kind == "sm" and (arch == wanted or (newer and not exact)):
            return name
    return None


def _ptx_for(arch_list: Iterable[str], wanted: Numbers) -> str | None:
    """Return the PTX that can be compiled for a GPU: of any older architecture, or its own."""
    for kind, arch, suffix, name in _architectures(arch_list):
        fits = {"": arch <= wanted, "a": arch == wanted, "f": arch[0] == wanted[0] and arch <= wanted}[suffix]
        if kind == "compute" and fits:
            return name
    return None


def _architectures(arch_list: Iterable[str]) -> Iterable[tuple[str, Numbers, str, str]]:
    """Return the newest first: of several kernels that fit, the GPU runs that one."""
    found = [match for arch in arch_list if (match := _ARCH.fullmatch(arch))]
    parts = [(m[1], (int(m[2]), int(m[3])), m[4], m[0]) for m in found]
    return sorted(parts, key=lambda part: part[1], reverse=True)


def _judge_ptx(compat: Compat, ptx: str, *, this: str, cuda: str, driver: str) -> Judgement:
    compiled = f"this image's torch has no kernels for this GPU ({this}) but {ptx}, which the driver compiles"
    why = "this takes minutes at first use"
    if not cuda or not driver:
        return Judgement(result="match", what=compiled, why=f"{why} and needs a driver as new as the CUDA toolkit")
    floor, have = driver_floor(compat, cuda), numbers(driver)
    if floor is None or have is None or not floor.packaged:
        what = f"whether driver {driver} can compile {ptx} of CUDA {cuda} for this GPU ({this}) is not known"
        return Judgement(result="unknown", what=what)
    if not _older(have, floor.packaged):
        return Judgement(result="match", what=compiled, why=why)
    capability = this.rpartition(" ")[2]
    return Judgement(
        result="mismatch",
        what=f"driver {driver} cannot compile {ptx} of CUDA {cuda} for this GPU ({this}): needs >= {floor.packaged}",
        why=f"minor-version compatibility excludes PTX ({compat.packaged_source})",
        hint=_would_run(suggest_torch(compat, driver, compute_capability=capability)),
    )


def _range(arch_list: Sequence[str]) -> str:
    if not arch_list:
        return "none: it was built without CUDA"
    return ", ".join(arch_list) if len(arch_list) <= 3 else f"{arch_list[0]} ... {arch_list[-1]}"


# -- GPUs by name ---------------------------------------------------------------------------


def gpu_by_name(compat: Compat, name: str) -> GpuModel | None:
    """Return what is known of a GPU from its name, None when that is nothing or ambiguous.

    Args:
        compat: the table.
        name: as NVML gives it (`NVIDIA H100 80GB HBM3`), or a Slurm GRES or its type
            (`gpu:h100:8`, `gres/gpu:nvidia_a100-sxm4-80gb=4`, `a100`, `rtx3090`).
    """
    words = re.findall(r"[a-z0-9]+", _gres_type(name).lower())
    runs = ["".join(words[start:end]) for start in range(len(words)) for end in range(start + 1, len(words) + 1)]
    known = sorted((run for run in runs if run in compat.gpus), key=len)
    if not known:
        return None
    longest = {compat.gpus[run].compute_capability for run in known if len(run) == len(known[-1])}
    if len(longest) != 1:
        return None
    model = compat.gpus[known[-1]]
    # `a100_1g.5gb` and `A100-SXM4-40GB MIG 1g.5gb` are slices, with fewer multiprocessors.
    is_slice = any(re.fullmatch(r"mig|[1-9]g", word) for word in words)
    return replace(model, sm_count=None) if is_slice else model


def _gres_type(name: str) -> str:
    """Return the type in a GRES: between `gpu:` and the count; another name as it is."""
    match = re.fullmatch(r"(?:gres[/:])?(?:gpu|shard|mps)[:/]([^:=(,]+?)(?:[:=]\d+.*)?(?:\(.*)?", name.strip())
    return match.group(1) if match else name


def _names(name: str) -> tuple[str, ...]:
    """Return a GPU's name as people and Slurm shorten it: `GeForce RTX 3090` -> rtx3090, 3090; nothing for no name."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    shorter = [words] if words else []
    if words[:1] == ["geforce"]:
        shorter += [words[1:], words[2:]]
    elif len(words) == 2 and (words[0] == "quadro" or name.startswith("RTX A")):
        shorter += [words[1:]]
    return tuple("".join(one) for one in shorter)


# -- NVIDIA_REQUIRE_CUDA --------------------------------------------------------------------
#
# As NVIDIA's container tools judge it: nvidia-container-toolkit 1.20.0 collects the variables
# (internal/config/image/cuda_image.go) and hands each to nvidia-container-cli, which parses and
# evaluates it (libnvidia-container, src/cli/dsl.c and configure.c). Blanks part alternatives,
# commas part what must hold together; from left to right the first alternative that holds
# decides, and a condition that cannot be read before that refuses the container. All variables
# must hold, for every GPU. (The toolkit's CDI mode, default since 1.18, asks none of this.)
#
# It differs in one thing: what the tools take for granted when they cannot see it (a GPU's
# brand, the driver), is `unknown` here.

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_VERSIONS = {"cuda": "host.cuda-driver-version", "driver": "host.driver-version"}
_PER_GPU = {"arch": "host.gpu-compute-capabilities", "brand": "host.gpu-brands"}

# What Go's strconv.ParseBool takes for true.
_TRUE = ("1", "t", "T", "TRUE", "true", "True")


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """`driver>=570`; `problem` says why it cannot be read, if so."""

    text: str
    name: str = ""
    operator: str = ""
    value: str = ""
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """One NVIDIA_REQUIRE_* variable: one of `alternatives` must hold, each with all its conditions."""

    variable: str
    text: str
    alternatives: tuple[tuple[Condition, ...], ...]


def requirements(environ: Mapping[str, str]) -> tuple[Requirement, ...]:
    """Return what an image asks for in its environment.

    An image without NVIDIA_REQUIRE_CUDA but with CUDA_VERSION asks for that CUDA, and one
    with NVIDIA_DISABLE_REQUIRE for nothing.
    """
    if environ.get("NVIDIA_DISABLE_REQUIRE") in _TRUE:
        return ()
    asked = {
        name: text
        for name, text in environ.items()
        if name.startswith("NVIDIA_REQUIRE_") and not name.startswith("NVIDIA_REQUIRE_JETPACK")
    }
    version = environ.get("CUDA_VERSION", "")
    if version and not environ.get("NVIDIA_REQUIRE_CUDA"):
        asked["CUDA_VERSION"] = f"cuda>={'.'.join(version.split('.')[:2])}"
    return tuple(parse_require(text, variable=name) for name, text in sorted(asked.items()))


def parse_require(text: str, *, variable: str = "NVIDIA_REQUIRE_CUDA") -> Requirement:
    """Return the conditions of one variable; what cannot be read is kept with its problem."""
    alternatives = (
        tuple(_parse_condition(part) for part in alternative.split(",") if part) for alternative in text.split(" ")
    )
    return Requirement(variable=variable, text=text, alternatives=tuple(one for one in alternatives if one))


def _parse_condition(text: str) -> Condition:
    match = re.fullmatch(r"([^<>=!]*)([<>=!]*)(.*)", text, re.DOTALL)
    assert match is not None
    # nvidia-container-cli takes upper case for lower case here.
    name, sign, value = match[1].lower(), match[2], match[3]
    problem = ""
    if sign not in _OPERATORS:
        problem = f"`{sign}` is no operator" if sign else "it has no operator"
    elif name not in _VERSIONS and name not in _PER_GPU:
        problem = f"`{match[1]}` is unknown"
    elif name == "brand" and sign not in ("=", "!="):
        problem = "brands have no order"
    elif not value or (name != "brand" and numbers(value) is None):
        problem = f"`{value}` is not a version"
    return Condition(text=text, name=name, operator=sign, value=value, problem=problem)


def evaluate_require(requirement: Requirement, facts: Mapping[str, Value]) -> Judgement:
    """Say whether a node fulfils what an image asks for.

    Args:
        requirement: of the image.
        facts: of the node: `host.cuda-driver-version`, `host.driver-version`,
            `host.gpu-compute-capabilities` and `host.gpu-brands`; what is not there is unknown.
    """
    asked = f"the image's {requirement.variable} ({_shown(requirement)})"
    if not requirement.alternatives:
        return Judgement(result="match", what=f"{asked} asks for nothing")
    judged = dict(reversed([_judge_alternatives(requirement, s) for s in _gpus(facts)]))
    if "mismatch" in judged:
        return Judgement(result="mismatch", what=f"{asked} does not hold", why=judged["mismatch"])
    if "unknown" in judged:
        return Judgement(result="unknown", what=f"whether {asked} holds is not known", why=judged["unknown"])
    return Judgement(result="match", what=f"{asked} holds", why=judged["match"])


def _shown(requirement: Requirement) -> str:
    first = ",".join(condition.text for condition in requirement.alternatives[0]) if requirement.alternatives else ""
    others = len(requirement.alternatives) - 1
    return f"{first} or {others} other{'s' if others > 1 else ''}" if others > 0 else first


def _gpus(facts: Mapping[str, Value]) -> list[dict[str, str]]:
    """Return what the conditions see: the driver, and one GPU after the other."""
    driver = {name: str(facts[key]) for name, key in _VERSIONS.items() if key in facts}
    columns = {name: facts.get(key) for name, key in _PER_GPU.items()}
    lists = {name: column for name, column in columns.items() if isinstance(column, tuple)}
    rows = [dict(zip(lists, row, strict=True)) for row in zip_longest(*lists.values())]
    return [driver | {name: value for name, value in row.items() if value} for row in rows] or [driver]


def _judge_alternatives(requirement: Requirement, seen: Mapping[str, str]) -> tuple[Result, str]:
    doubts = []
    for alternative in requirement.alternatives:
        result, why, broken = _judge_all(alternative, seen)
        if result == "match" or broken:
            return result, why
        if result == "unknown":
            doubts.append(why)
    if doubts:
        return "unknown", doubts[0]
    has = ", ".join(f"{name} {value}" for name, value in sorted(seen.items()))
    return "mismatch", f"this node has {has}"


def _judge_all(alternative: Sequence[Condition], seen: Mapping[str, str]) -> tuple[Result, str, bool]:
    """Judge conditions that must all be met. The last part of the result: a condition itself is not valid."""
    doubt = ""
    for condition in alternative:
        if condition.problem:
            return "unknown", f"`{condition.text}` cannot be judged: {condition.problem}", True
        have = seen.get(condition.name)
        holds = None if have is None else _holds(condition, have)
        if holds is None:
            doubt = doubt or f"`{condition.text}` cannot be judged: this node's {condition.name} is not known"
        elif not holds:
            return "mismatch", f"`{condition.text}` does not hold", False
    if doubt:
        return "unknown", doubt, False
    return "match", ",".join(condition.text for condition in alternative), False


def _holds(condition: Condition, have: str) -> bool | None:
    if have == "absent":
        return False
    compare = _OPERATORS[condition.operator]
    if condition.name == "brand":
        return compare(have.lower(), condition.value.lower())
    left, right = numbers(have), numbers(condition.value)
    if left is None or right is None:
        return None
    length = max(len(left), len(right))
    return compare(_padded(left, length), _padded(right, length))


# -- versions -------------------------------------------------------------------------------


def numbers(version: str) -> Numbers | None:
    """Return `580.65.06` as numbers; None for other texts."""
    if len(version) > 64 or not re.fullmatch(r"[0-9]+(\.[0-9]+)*", version):
        return None
    return tuple(int(part) for part in version.split("."))


def _padded(version: Numbers, length: int) -> Numbers:
    return version + (0,) * (length - len(version))


def _less(left: Numbers, right: Numbers) -> bool:
    """Compare as versions: 12 and 12.0 are the same."""
    length = max(len(left), len(right))
    return _padded(left, length) < _padded(right, length)


def _older(have: Numbers, floor: str) -> bool:
    return _less(have, numbers(floor) or ())


def _sort_key(version: str) -> Numbers:
    return numbers(version) or ()


# -- reading the table ----------------------------------------------------------------------


def parse(data: Mapping[str, Any], *, origin: str = "compat.toml") -> Compat:
    """Return the table from the plain data of its file.

    Args:
        data: what the TOML parser returned.
        origin: the file, for messages.

    Raises:
        SpecError: another schema, a key that is missing or not what it should be.
    """
    table = _Table(data, origin=origin)
    if table.integer("schema") != SCHEMA:
        raise SpecError(f"`{origin}` has schema {data['schema']}, this hpcenv reads schema {SCHEMA}")
    cuda = table.table("cuda")
    floor, packaged = cuda.table("floor"), cuda.table("packaged")
    return Compat(
        origin=origin,
        floors={int(major): version for major, version in floor.table("driver").versions().items() if major.isdigit()},
        floors_source=floor.source(),
        packaged={_padded(_sort_key(k), 3): v for k, v in packaged.table("driver").versions().items()},
        packaged_source=packaged.source(),
        forward=_parse_forward(cuda.table("forward")),
        torches=_parse_torches(table.table("torch")),
        gpus=_parse_gpus(table.table("gpu")),
    )


class _Table:
    """A table of the file that knows its place, so that a problem names the key."""

    def __init__(self, data: Any, *, origin: str, path: str = "", source: str = "") -> None:
        self.data, self.origin, self.path, self._source = data, origin, path, source
        if not isinstance(data, Mapping):
            raise self.problem("", "a table")

    def problem(self, key: str, expected: str) -> SpecError:
        where = f"{self.path}.{key}".strip(".")
        return SpecError(f"`{self.origin}`: `{where}` is missing or not {expected}")

    def table(self, key: str) -> _Table:
        inner = self.data.get(key)
        if not isinstance(inner, Mapping):
            raise self.problem(key, "a table")
        return _Table(inner, origin=self.origin, path=f"{self.path}.{key}".strip("."), source=self._source)

    def tables(self, key: str, *, source: str) -> list[_Table]:
        rows = self.data.get(key)
        if not isinstance(rows, list):
            raise self.problem(key, "a list of tables")
        path = f"{self.path}.{key}".strip(".")
        return [_Table(r, origin=self.origin, path=f"{path}[{n}]", source=source) for n, r in enumerate(rows)]

    def text(self, key: str) -> str:
        value = self.data.get(key)
        if not isinstance(value, str) or not value:
            raise self.problem(key, "text")
        return value

    def integer(self, key: str) -> int:
        value = self.data.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.problem(key, "a whole number")
        return value

    def version(self, key: str) -> str:
        if numbers(str(self.data.get(key))) is None:
            raise self.problem(key, "a version")
        return self.text(key)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.data.get(key)
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise self.problem(key, "a list of text")
        return tuple(value)

    def versions(self) -> dict[str, str]:
        """Return a table of version -> version."""
        for key in self.data:
            if numbers(key) is None:
                raise self.problem(key, "a version as the key")
        return {key: self.version(key) for key in self.data}

    def source(self) -> str:
        """Return where the rows come from and when that was read; a row may have its own."""
        if self._source and "source" not in self.data:
            return self._source
        return f"{self.text('source')}, read {self.text('retrieved')}"


def _parse_forward(table: _Table) -> Forward:
    branches = [int(branch) for branch in table.texts("branches") if branch.isdigit()]
    packages = table.table("package")
    rows: dict[str, dict[int, str]] = {}
    for cuda in packages.data:
        words = packages.texts(cuda)
        if numbers(cuda) is None or len(words) != len(branches) or set(words) - {"yes", "no", "same"}:
            raise packages.problem(cuda, "one of `yes`, `no`, `same` for each branch")
        rows[cuda] = dict(zip(branches, words, strict=True))
    only = table.data.get("data-centre-only")
    if not isinstance(only, bool):
        raise table.problem("data-centre-only", "true or false")
    return Forward(package=rows, data_centre_only=only, source=table.source())


def _parse_torches(table: _Table) -> tuple[TorchRelease, ...]:
    releases = [_parse_torch(row) for row in table.tables("release", source=table.source())]
    return tuple(sorted(releases, key=lambda release: _sort_key(release.version), reverse=True))


def _parse_torch(row: _Table) -> TorchRelease:
    builds = row.table("builds")
    return TorchRelease(
        version=row.version("version"),
        requires_python=row.text("requires-python"),
        pypi=row.version("pypi"),
        builds={cuda: _parse_arch_list(builds, cuda) for cuda in builds.data},
        source=row.source(),
        libraries={name: row.version(name) for name in ("cudnn", "nccl", "cublas", "triton") if name in row.data},
    )


def _parse_arch_list(builds: _Table, cuda: str) -> tuple[str, ...]:
    """Return `8.0 9.0+PTX` as torch names them: sm_80 sm_90 compute_90."""
    text = builds.data[cuda]
    words = text.split() if isinstance(text, str) else ["?"]
    found = [re.fullmatch(r"([0-9]+)\.([0-9])([af]?)(\+PTX)?", word) for word in words]
    if numbers(cuda) is None or not all(found):
        raise builds.problem(cuda, "compute capabilities such as `8.0 9.0+PTX`")
    kernels = [f"sm_{m[1]}{m[2]}{m[3]}" for m in found if m]
    return (*kernels, *(f"compute_{m[1]}{m[2]}{m[3]}" for m in found if m and m[4]))


def _parse_gpus(table: _Table) -> dict[str, GpuModel]:
    counts = table.table("sm-count").table("number")
    variants = table.table("variants")
    blocks = [
        (table.table("other"), False, table.source()),
        (table.table("data-centre"), True, table.source()),
        (variants.table("data-centre"), True, variants.source()),
    ]
    gpus: dict[str, GpuModel] = {}
    for block, data_centre, source in blocks:
        for capability in block.data:
            if len(numbers(capability) or ()) != 2:
                raise block.problem(capability, "a compute capability as the key")
            for name in block.texts(capability):
                if not _names(name):
                    raise block.problem(capability, f"a list of GPU names; {name!r} is not one")
                model = GpuModel(
                    name=name,
                    compute_capability=capability,
                    data_centre=data_centre,
                    sm_count=counts.integer(name) if name in counts.data else None,
                    source=source,
                )
                gpus.update(dict.fromkeys(_names(name), model))
    return gpus | _longer_names(gpus, counts)


def _longer_names(gpus: Mapping[str, GpuModel], counts: _Table) -> dict[str, GpuModel]:
    """Return the GPUs whose name must say more for a number of multiprocessors: `H100 PCIe`."""
    found: dict[str, GpuModel] = {}
    for name in counts.data:
        first = next(iter(name.split()), "")
        base = gpus.get("".join(re.findall(r"[a-z0-9]+", first.lower())))
        if base is not None and base.name != name:
            longer = GpuModel(
                name=name,
                compute_capability=base.compute_capability,
                data_centre=base.data_centre,
                sm_count=counts.integer(name),
                source=base.source,
            )
            found[_names(name)[0]] = longer
    return found
