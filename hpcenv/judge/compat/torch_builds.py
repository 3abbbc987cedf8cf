"""Find out which torch builds exist, for which Python, and which builds would run. Pure; standard library only.

Runs on: LOGIN NODE, COMPUTE NODE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcenv.judge.compat.architectures import cubin_for
from hpcenv.judge.compat.compat_table import Compat, TorchRelease
from hpcenv.judge.compat.floors import driver_floor
from hpcenv.judge.compat.judgement import Judgement
from hpcenv.judge.compat.toolkits import check_driver_branch
from hpcenv.judge.compat.versions import Numbers, less, minor, numbers, older, sort_key

X86_64 = "x86_64"
AARCH64 = "aarch64"


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """A torch build that would run. `on_pypi` says whether the default index has this build."""

    torch: str
    cuda: str
    on_pypi: bool
    python: tuple[str, str]

    @property
    def build(self) -> str:
        """The name of the build in a version and in the address of an index: `cu118`."""
        return f"cu{self.cuda.replace('.', '')}"

    def __str__(self) -> str:
        return f"torch {minor(self.torch)} ({self.build})"


def suggest_torch(
    compat: Compat, driver: str, *, compute_capability: str = "", python: str = "", machine: str = X86_64
) -> tuple[Suggestion, ...]:
    """Return, for each minor release of torch, a build that runs on a driver; the newest release is first.

    Args:
        compat: the table.
        driver: driver version; "" for any driver.
        compute_capability: return only builds that are known to have kernels for this value; "" for all builds.
        python: return only releases with wheels for this Python version; "" for all releases.
        machine: architecture of the processors, `x86_64` or `aarch64`.
    """
    have = numbers(driver) if driver else (10**6,)
    if have is None:
        return ()
    if driver and compute_capability and _is_out_of_range(compat, driver, compute_capability):
        return ()
    found: dict[str, Suggestion] = {}
    for release in compat.torches:
        builds = builds_for(release, machine)
        runs = [cuda for cuda, kernels in builds.items() if _runs(compat, cuda, kernels, have, compute_capability)]
        if runs and installs_on(release, python, machine) and minor(release.version) not in found:
            default = default_cuda(release, machine)
            cuda = default if default in runs else max(runs, key=sort_key)
            found[minor(release.version)] = Suggestion(
                torch=release.version,
                cuda=cuda,
                on_pypi=cuda == default,
                python=python_range(release, machine),
            )
    return tuple(found.values())


def would_run(suggestions: Sequence[Suggestion], *, verb: str = "would run") -> str:
    """Name the newest build that a plain `pip install` installs, and the newest build of any index, with its index."""
    if not suggestions:
        return ""
    newest = suggestions[0]
    plain = next((one for one in suggestions if one.on_pypi), None)
    if newest is plain:
        return f"{newest} {verb}"
    index = f"of PyTorch's index {newest.build}, not the default one"
    if plain is None:
        return f"{newest} {verb}, {index}"
    return f"{plain} {verb}; newer: {newest}, {index}"


def builds_for(release: TorchRelease, machine: str) -> Mapping[str, tuple[str, ...]]:
    """Return CUDA version -> GPU architectures of the builds for a machine; empty if all builds are for CPUs."""
    return release.aarch64 if machine == AARCH64 else release.builds


def default_cuda(release: TorchRelease, machine: str) -> str:
    """Return the CUDA version of the build that a plain `pip install` installs; `cpu` for a build without CUDA."""
    return release.aarch64_pypi if machine == AARCH64 else release.pypi


def python_range(release: TorchRelease, machine: str) -> tuple[str, str]:
    """Return the first and the last Python version with wheels."""
    return release.aarch64_python if machine == AARCH64 else release.python


def check_python(compat: Compat, release: TorchRelease, python: str, *, machine: str = X86_64) -> Judgement:
    """Say whether a torch release has wheels for a Python version.

    Args:
        compat: the table.
        release: the release.
        python: `3.13`, `3.13.2`, or `3.13t` for a free-threaded build.
        machine: architecture of the processors.
    """
    first, last = python_range(release, machine)
    where = f" on {machine}" if machine == AARCH64 else ""
    wanted = numbers(minor(python.removesuffix("t")))
    if wanted is None:
        return Judgement(result="unknown", what=f"`{python}` is not a Python version")
    if python.endswith("t") and minor(python.removesuffix("t")) not in release.free_threaded:
        kept = ", ".join(f"{one}t" for one in release.free_threaded) or "no free-threaded Python"
        what = f"torch {release.version} has no wheel for Python {python}; it has wheels for {kept}"
        return Judgement(result="mismatch", what=what, why=release.source)
    if installs_on(release, python.removesuffix("t"), machine):
        why = f"wheels for Python {first} to {last}{where} ({release.source})"
        return Judgement(result="match", what=f"torch {release.version} runs on Python {python}", why=why)
    end = f"begin at {first}" if less(wanted, numbers(first) or ()) else f"end at {last}"
    newest = next((one for one in compat.torches if installs_on(one, python.removesuffix("t"), machine)), None)
    return Judgement(
        result="mismatch",
        what=f"torch {release.version} has no wheel for Python {python}{where}: its wheels {end}",
        why=release.source,
        hint="" if newest is None else f"torch {newest.version} has one",
    )


def installs_on(release: TorchRelease, python: str, machine: str = X86_64) -> bool:
    """Return whether a release has wheels for a Python version; True if no version is given."""
    if not python:
        return True
    have = numbers(minor(python))
    first, last = (numbers(end) or () for end in python_range(release, machine))
    return have is not None and not less(have, first) and not less(last, have)


def triton_note(release: TorchRelease, python: str) -> str:
    """Return a note if torch installs no triton on this Python version."""
    have, end = numbers(minor(python)), numbers(release.triton_before_python)
    if have is None or end is None or less(have, end):
        return ""
    return f"on Python {python} torch {release.version} installs no triton, which torch.compile needs"


def _is_out_of_range(compat: Compat, driver: str, compute_capability: str) -> bool:
    return check_driver_branch(compat, driver, compute_capability).result == "mismatch"


def _runs(compat: Compat, cuda: str, kernels: Sequence[str], driver: Numbers, compute_capability: str) -> bool:
    floor = driver_floor(compat, cuda)
    if floor is None or older(driver, floor.version):
        return False
    # A kernel is needed here. PTX does not count, because another function judges whether the driver can compile PTX.
    return not compute_capability or cubin_for(kernels, numbers(compute_capability) or ()) is not None
