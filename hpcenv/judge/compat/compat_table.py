"""The compatibility table as dataclasses.

Runs on: LOGIN NODE, COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcenv.judge.compat.versions import Numbers, numbers, public

# The table that is installed with hpcenv. It is a TOML file, which project/toml_files.py reads.
PACKAGED = Path(__file__).with_name("table.toml")

SCHEMA = 2

# torch and CUDA each have a new release about every two months. So after half a year, the table lacks three releases of
# torch and three of CUDA.
OLD_AFTER_DAYS = 180


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchRelease:
    """One torch release for Linux.

    Attributes:
        uploaded: date on which the wheels were uploaded, such as `2026-10-28`.
        python: the first and the last Python version with wheels on the default index.
        free_threaded: Python versions with wheels for their free-threaded build.
        requires_python: the requirement on Python in the metadata, which has no upper limit.
        pypi: CUDA version of the build on the default index.
        builds: CUDA version -> architectures in the build for x86_64; empty if the value is unknown.
        aarch64: CUDA version -> architectures in the build for aarch64; empty if all builds are for CPUs.
        aarch64_pypi: like `pypi`, for aarch64; `cpu` if the build is for CPUs.
        aarch64_python: like `python`, for aarch64.
        libraries: name -> version that the metadata of the `pypi` build requires.
        triton_before_python: the first Python version for which torch installs no triton; "" without such a version.
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
    """The properties that follow from the name of a GPU.

    Attributes:
        sm_count: number of multiprocessors; None if the name alone does not tell this number.
        memory_gb: the sizes of memory with which the GPU is sold, in 10^9 bytes; empty if the value is unknown.
        machine: architecture of the processors, if the GPU is built together with processors; otherwise "".
        first_driver: the first driver that runs the GPU; empty if no source names this driver.
        listed_driver: the first driver with this GPU in its list of GPUs. It is unknown whether older drivers run the
            GPU. Empty if no source names this driver.
        driver_source: the source of `first_driver` and `listed_driver`.
    """

    name: str
    compute_capability: str
    data_centre: bool
    sm_count: int | None
    source: str
    memory_gb: tuple[int, ...] = ()
    machine: str = ""
    first_driver: str = ""
    listed_driver: str = ""
    driver_source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """Which cuda-compat package works on which driver branch."""

    package: Mapping[str, Mapping[int, str]]
    data_centre_only: bool
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """The toolkits and driver branches that support a compute capability.

    Attributes:
        first_toolkit: the first toolkit that supports this compute capability.
        last_toolkit: the last toolkit, as a major release (`12`) or a release; "" if it is still supported.
        last_driver: the last driver branch; "" if it is still supported.
    """

    first_toolkit: str
    last_toolkit: str
    last_driver: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A package such as torchvision: each version of the package is made for one torch version.

    Attributes:
        torch: version of the package -> requirement on torch.
        doubt: version of the package -> requirement on torch, and why it is unknown whether that torch works.
    """

    name: str
    torch: Mapping[str, str]
    source: str
    doubt: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compat:
    """The table.

    Attributes:
        origin: the file of the table, for messages.
        dated: date at which the oldest part of the table was read, such as `2026-11-20`.
        floors: major release of CUDA -> oldest driver.
        packaged: toolkit -> the driver that came with the toolkit.
        toolkits: every known toolkit.
        gpus: normalized name -> model.
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
        """Return a torch release by its version, `2.7.1` or `2.7.1+cu118`; None if it is not in the table."""
        return next((one for one in self.torches if one.version == public(version)), None)

    def knows_toolkit(self, cuda: str) -> bool:
        """Return whether a CUDA release exists. `12.6` means any update of 12.6; `12.6.3` means exactly this update."""
        wanted = numbers(cuda)
        return wanted is not None and any(one[: len(wanted)] == wanted for one in self.toolkits)

    @property
    def newest_branch(self) -> int:
        """The newest driver branch that the table names."""
        branches = {branch for row in self.forward.package.values() for branch in row}
        return max(branches | {(numbers(driver) or (0,))[0] for driver in self.packaged.values()}, default=0)

    def missing(self, what: str) -> str:
        """Return a sentence that says that something is not in the table."""
        return f"{what} is not in the table (dated {self.dated})"

    def age_note(self, today: dt.date) -> str:
        """Return a note if the table is old, otherwise an empty text."""
        days = (today - dt.date.fromisoformat(self.dated)).days
        if days <= OLD_AFTER_DAYS:
            return ""
        return (
            f"the compatibility table ({self.origin}) is {days} days old: newer torch, CUDA and GPUs are missing in it"
        )
