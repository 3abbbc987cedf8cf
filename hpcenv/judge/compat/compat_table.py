"""The compatibility table as dataclasses.

Runs on: LOGIN NODE, COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcenv.judge.compat.versions import Numbers, numbers, public

# The table that comes with hpcenv. TOML: project/toml_files.py reads it.
PACKAGED = Path(__file__).with_name("table.toml")

SCHEMA = 2

# New releases of torch and of CUDA come every two months or so: after half a year three of each are missing.
OLD_AFTER_DAYS = 180


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchRelease:
    """One torch release, Linux.

    Attributes:
        uploaded: date of the wheels, `2026-10-28`.
        python: the first and the last Python that the default index has wheels for.
        free_threaded: Python versions with wheels for their free-threaded build.
        requires_python: what the metadata says; it has no upper end.
        pypi: CUDA of the build on the default index.
        builds: CUDA -> kernels of each build for x86_64, empty where they are not known.
        aarch64: the same for aarch64; empty where there are builds for CPUs only.
        aarch64_pypi: as `pypi`, for aarch64; `cpu` for a build for CPUs.
        aarch64_python: as `python`, for aarch64.
        libraries: name -> what the metadata of the `pypi` build requires.
        triton_before_python: from that Python on, this torch installs no triton; "" for no end.
    """

    version: str
    uploaded: str
    python: tuple[str, str]
    requires_python: str
    pypi: str
    builds: Mapping[str, tuple[str, ...]]
    aarch64: Mapping[str, tuple[str, ...]]
    aarch64_pypi: str
    aarch64_python: tuple[str, str]
    source: str
    free_threaded: tuple[str, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)
    triton_before_python: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuModel:
    """What the name of a GPU says about it.

    Attributes:
        sm_count: multiprocessors; None if the name is not enough.
        memory_gb: the sizes that are sold, in 10^9 bytes; empty if not known.
        machine: architecture of the processors that it is built with; "" for any.
        first_driver: the oldest driver that its maker names, and the source; empty where no source has one.
    """

    name: str
    compute_capability: str
    data_centre: bool
    sm_count: int | None
    source: str
    memory_gb: tuple[int, ...] = ()
    machine: str = ""
    first_driver: tuple[str, str] = ("", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """Which cuda-compat package works on which driver branch."""

    package: Mapping[str, Mapping[int, str]]
    data_centre_only: bool
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """First and last toolkit, and last driver branch, of a compute capability; "" for no end.

    Attributes:
        last_toolkit: a major release (`12`) or a release.
    """

    first_toolkit: str
    last_toolkit: str
    last_driver: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A package that is made for one torch, and what each of its versions requires.

    Attributes:
        torch: version -> requirement on torch.
        doubt: version -> requirement on torch, and why it is not known whether that torch does.
    """

    name: str
    torch: Mapping[str, str]
    source: str
    doubt: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compat:
    """The table.

    Attributes:
        origin: the file, for messages.
        dated: when its oldest part was read, `2026-11-20`.
        floors: major release of CUDA -> oldest driver.
        packaged: toolkit -> the driver that came with it.
        toolkits: every toolkit that is known.
        gpus: a name's comparable form -> model.
    """

    origin: str
    dated: str
    floors: Mapping[int, str]
    floors_source: str
    packaged: Mapping[Numbers, str]
    packaged_source: str
    toolkits: frozenset[Numbers]
    capabilities: Mapping[str, Capability]
    forward: Forward
    torches: tuple[TorchRelease, ...]
    pairs: Mapping[str, Pair]
    gpus: Mapping[str, GpuModel]

    def torch(self, version: str) -> TorchRelease | None:
        """Return a torch release, `2.7.1` or `2.7.1+cu118`; None if it is not in the table."""
        return next((one for one in self.torches if one.version == public(version)), None)

    def knows_toolkit(self, cuda: str) -> bool:
        """Return whether a CUDA release exists: `12.6` with any update, `12.6.3` exactly."""
        wanted = numbers(cuda)
        return wanted is not None and any(one[: len(wanted)] == wanted for one in self.toolkits)

    @property
    def newest_branch(self) -> int:
        """The newest driver branch that the table names."""
        branches = {branch for row in self.forward.package.values() for branch in row}
        return max(branches | {(numbers(driver) or (0,))[0] for driver in self.packaged.values()}, default=0)

    def missing(self, what: str) -> str:
        """Return the sentence for something that the table does not have."""
        return f"{what} is not in the table (dated {self.dated})"

    def age_note(self, today: dt.date) -> str:
        """Return a note if the table is old, otherwise an empty text."""
        days = (today - dt.date.fromisoformat(self.dated)).days
        if days <= OLD_AFTER_DAYS:
            return ""
        return (
            f"the compatibility table ({self.origin}) is {days} days old: newer torch, CUDA and GPUs are missing in it"
        )
