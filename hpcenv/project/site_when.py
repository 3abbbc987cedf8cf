"""The condition `when` of a value in a site profile. It says for which runs the value is used.

Runs on: LOGIN NODE. Pure.
"""

import fnmatch
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from hpcenv.project.document import Document
from hpcenv.project.option_values import Text, Word
from hpcenv.records.network import YesNo

SiteGpuVendor = Literal["nvidia", "amd", "none"]

_BOUND = re.compile(r"\s*(>=|<=|==|<|>)?\s*([0-9]+(?:\.[0-9]+)*)\s*\Z")


def _bounds(value: str) -> str:
    for part in value.split(","):
        if not _BOUND.match(part):
            raise ValueError('must be bounds such as ">=2" or ">=2.27,<2.30"')
    return value


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else value


BoundsText = Annotated[Text, AfterValidator(_bounds)]
Words = Annotated[tuple[Word, ...], BeforeValidator(_listed, json_schema_input_type=tuple[Word, ...] | str)]


class WhenTable(Document):
    """`when` of a value. A run must fulfil all keys of this table. A missing key is no condition.

    Attributes:
        partition: one of these Slurm partitions.
        nodes: bounds of the number of nodes, for example ">=2".
        gpu_vendor: the vendor of the GPUs that the locked torch was built for. `none` means a CPU build.
        gpu: patterns of the GPU's type, as Slurm or the lockfile names it, for example "h100*".
        nccl, rocm: bounds of the locked version, for example ">=2.27".
    """

    partition: Words = ()
    nodes: BoundsText | None = None
    gpu_vendor: SiteGpuVendor | None = None
    gpu: Words = ()
    nccl: BoundsText | None = None
    rocm: BoundsText | None = None


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The values of a run that the conditions of a site profile can check. None means unknown.

    Attributes:
        partition: the requested partition, or several partitions, separated by commas.
        gpu_vendor, gpu, nccl, rocm: values of the lockfile. `gpu` may also be the requested type. `rocm` is `none` if
            torch is not built for ROCm.
    """

    nodes: int
    partition: str | None = None
    gpu_vendor: SiteGpuVendor | None = None
    gpu: str | None = None
    nccl: str | None = None
    rocm: str | None = None


def judge(when: WhenTable | None, run: RunFacts) -> tuple[YesNo, str]:
    """Return whether a run fulfils a condition.

    If the answer is unknown, also return the keys without a known value.
    """
    if when is None:
        return "yes", ""
    answers: dict[str, bool | None] = {}
    if when.partition:
        answers["partition"] = _in_partition(when.partition, run.partition)
    if when.nodes is not None:
        answers["nodes"] = is_within(str(run.nodes), when.nodes)
    if when.gpu_vendor is not None:
        answers["gpu-vendor"] = None if run.gpu_vendor is None else run.gpu_vendor == when.gpu_vendor
    if when.gpu:
        answers["gpu"] = None if run.gpu is None else _fits(run.gpu, when.gpu)
    for key, bounds, version in (("nccl", when.nccl, run.nccl), ("rocm", when.rocm, run.rocm)):
        if bounds is not None:
            answers[key] = None if version is None else is_within(version, bounds)
    if False in answers.values():
        return "no", ""
    unknown = [key for key, answer in answers.items() if answer is None]
    return ("unknown", ", ".join(unknown)) if unknown else ("yes", "")


def _in_partition(wanted: tuple[str, ...], requested: str | None) -> bool | None:
    """Return whether the job will be in one of the partitions; None if Slurm still has to choose the partition."""
    if requested is None:
        return None
    fits = {name in wanted for name in requested.split(",")}
    return None if len(fits) > 1 else fits.pop()


def _fits(gpu: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(gpu.lower(), pattern.lower()) for pattern in patterns)


def is_within(version: str, bounds: str) -> bool | None:
    """Return whether a version or number is within bounds; None if the text does not start with a number."""
    found = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    if found is None:
        return False if version == "none" else None
    return all(_is_in(found[0], part) for part in bounds.split(","))


def _is_in(version: str, bound: str) -> bool:
    match = _BOUND.match(bound)
    assert match is not None
    sign, limit = match[1] or "==", match[2]
    length = max(version.count("."), limit.count(".")) + 1
    one, other = _padded(version, length), _padded(limit, length)
    answers = {">=": one >= other, "<=": one <= other, ">": one > other, "<": one < other, "==": one == other}
    return answers[sign]


def _padded(version: str, length: int) -> tuple[int, ...]:
    numbers = [int(part) for part in version.split(".")]
    return tuple(numbers + [0] * (length - len(numbers)))


def in_words(when: WhenTable | None) -> str:
    """Return a condition in one line; empty if there is no condition."""
    if when is None:
        return ""
    parts = {
        "partition": " or ".join(when.partition),
        "nodes": when.nodes,
        "gpu-vendor": when.gpu_vendor,
        "gpu": " or ".join(when.gpu),
        "nccl": when.nccl,
        "rocm": when.rocm,
    }
    return ", ".join(f"{key} {value}" for key, value in parts.items() if value)
