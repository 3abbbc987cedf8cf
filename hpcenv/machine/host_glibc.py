"""Find the glibc version that the host's libraries in a container need: libraries of the driver, and of binds.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

With `--nv` and `--rocm`, Apptainer and SingularityCE bind libraries of the host into the container. Apptainer and
SingularityCE find the libraries in the output of `ldconfig -p`, by the names in nvliblist.conf and rocmliblist.conf
(1.4.5, 4.5.1). These libraries then use the glibc of the container. If this glibc is older than the glibc with which
the libraries were linked, the loader refuses them: version `GLIBC_2.34' not found (apptainer issues 598, 2421).
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpcenv import process
from hpcenv.errors import HpcenvError
from hpcenv.incontainer.probe.elf import Elf
from hpcenv.records.checks import CheckOutcome
from hpcenv.records.manifest import Bind, Manifest

IMAGE_GLIBC = "system.glibc"

# The bound libraries that a training loads. Libraries for graphics are left out.
_OF_NVIDIA = ("libcuda.so", "libnvidia-ml.so", "libnvidia-ptxjitcompiler.so", "libnvidia-nvvm", "libnvidia-gpucomp.so")
_OF_AMD = ("libamd", "libhip", "libhsa-runtime64.so", "libroc", "librccl.so", "libdrm.so", "libdrm_amdgpu.so")
_LDCONFIG = ("/usr/sbin", "/sbin", "/usr/bin", "/bin")
_SECONDS = 5.0
_MOST_LIBRARIES = 256
_ROW = re.compile(r"\s+(\S+) \(([^)]*)\) => (/.*)")
_WORD_OF_MACHINE = {"x86_64": "x86-64", "aarch64": "AArch64"}
_VERSION = re.compile(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?")
# A marker that the loader supports since glibc 2.36 (glibc NEWS, DT_RELR).
_MARKERS = {"GLIBC_ABI_DT_RELR": (2, 36)}

_Glibc = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class HostLibraries:
    """The versions that were read from the host's libraries.

    Attributes:
        needs: path of a library -> the newest glibc that the library needs.
        problem: why some libraries could not be read; empty if all were read.
    """

    needs: Mapping[str, _Glibc]
    problem: str = ""

    def too_new(self, image: _Glibc) -> tuple[str, ...]:
        """Return texts about the libraries that need a newer glibc than the image has, the newest glibc first."""
        rows = sorted(self.needs.items(), key=lambda row: row[1], reverse=True)
        return tuple(f"{path} needs glibc {_words(need)}" for path, need in rows if need > image)


def check_glibc(
    manifest: Manifest, environ: Mapping[str, str], *, hanging: Callable[[str], str] = lambda _path: ""
) -> Iterator[CheckOutcome]:
    """Yield the outcomes of the checks `glibc.*` on this node.

    Args:
        manifest: the manifest of the run.
        environ: environment variables of the step.
        hanging: a function that returns the folder of a path if this folder does not answer; else an empty text.
    """
    environment = manifest.environment
    locked = next((one.value for one in manifest.expectations if one.field == IMAGE_GLIBC), None)
    if environment.kind != "sif" or locked is None:
        # If the image has no Python, or another C library, no glibc version is locked.
        on_host = "the ranks run in an environment of the host"
        why = on_host if environment.kind != "sif" else "the lockfile does not say which glibc the image has"
        for name in ("glibc.driver", "glibc.binds"):
            yield CheckOutcome(id=name, state="not-run", found=why)
        return
    image = parse_glibc(locked)
    yield _outcome(
        "glibc.driver", image, read_driver(nvidia=environment.gpus, amd=environment.rocm, path=environ.get("PATH", ""))
    )
    variables = {setting.name: setting.value for setting in manifest.settings}
    yield _outcome("glibc.binds", image, read_binds(environment.binds, variables.get("LD_LIBRARY_PATH", ""), hanging))


_NOTHING = {
    "glibc.driver": "no libraries of the driver were found with ldconfig",
    "glibc.binds": "no bind brings libraries",
}


def _outcome(name: str, image: _Glibc | None, found: HostLibraries) -> CheckOutcome:
    if not found.needs and not found.problem:
        return CheckOutcome(id=name, state="not-run", found=_NOTHING[name])
    if image is None:
        return CheckOutcome(id=name, state="unknown", found="the lockfile's `system.glibc` is no version number")
    limit = f"at most glibc {_words(image)}, which the image has"
    bad = found.too_new(image)
    if bad:
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        return CheckOutcome(id=name, state="failed", found=f"{bad[0]}{more}", limit=limit)
    if found.problem:
        return CheckOutcome(id=name, state="unknown", found=found.problem, limit=limit)
    newest = max(found.needs.values())
    return CheckOutcome(
        id=name, state="fine", found=f"{len(found.needs)} libraries need glibc {_words(newest)} or less"
    )


def parse_glibc(value: object) -> _Glibc | None:
    """Parse a version such as `2.36`; return None for another text."""
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.\d+)?", value) if isinstance(value, str) else None
    return None if match is None else (int(match[1]), int(match[2]))


def _words(version: _Glibc) -> str:
    return f"{version[0]}.{version[1]}"


def read_driver(*, nvidia: bool, amd: bool, path: str = "") -> HostLibraries:
    """Return which glibc the libraries of the driver need that Apptainer binds into a container.

    Args:
        nvidia, amd: whether the container gets libraries of NVIDIA's driver, and of ROCm.
        path: a PATH. ldconfig is searched in its absolute folders first, and then in the folders of the system.
    """
    names = (*(_OF_NVIDIA if nvidia else ()), *(_OF_AMD if amd else ()))
    if not names:
        return HostLibraries(needs={})
    folders = (*(part for part in path.split(":") if part.startswith("/")), *_LDCONFIG)
    program = shutil.which("ldconfig", path=":".join(folders))
    if program is None:
        return HostLibraries(needs={}, problem="this machine has no ldconfig")
    try:
        listed = process.run([program, "-p"], timeout=_SECONDS, env={"LC_ALL": "C"}).stdout
    except HpcenvError as error:
        return HostLibraries(needs={}, problem=f"ldconfig does not list the libraries of this machine: {error.what}")
    paths = listed_libraries(listed, names, machine=os.uname().machine)
    return read_needs(paths)


def listed_libraries(listed: str, names: Sequence[str], *, machine: str) -> tuple[str, ...]:
    """Return the paths of libraries in the output of `ldconfig -p`, only the first path of each name. Pure."""
    found: dict[str, str] = {}
    for line in listed.splitlines():
        match = _ROW.fullmatch(line)
        if match is not None and match[1].startswith(tuple(names)) and _WORD_OF_MACHINE.get(machine, "") in match[2]:
            found.setdefault(match[1], match[3])
    return tuple(dict.fromkeys(found.values()))


def read_binds(
    binds: Iterable[Bind], library_path: str, hanging: Callable[[str], str] = lambda _path: ""
) -> HostLibraries:
    """Return which glibc the libraries of binds need. A bind is a file, or a folder that the loader searches first.

    Args:
        binds: the binds of project, user and site.
        library_path: LD_LIBRARY_PATH in the container.
        hanging: as for `check_glibc`. A folder that does not answer is not read, because this process would hang.
    """
    searched = [os.path.normpath(part) for part in library_path.split(":") if part.startswith("/")]
    paths: list[str] = []
    problem = ""
    for bind in binds:
        target = os.path.normpath(bind.target)
        folders = [one for one in searched if os.path.join(one, "").startswith(os.path.join(target, ""))]
        if not folders and not _is_library(bind.target):
            continue
        if place := hanging(bind.source):
            problem = f"not read: {place} does not answer"
            continue
        paths += [bind.source] if _is_library(bind.target) else []
        for folder in folders:
            try:
                paths += _libraries_in(bind.source + folder[len(target) :])
            except OSError as error:
                problem = f"{bind.source}: {error.strerror}"
    found = read_needs([path for path in dict.fromkeys(paths) if os.path.lexists(path)])
    return replace(found, problem=found.problem or problem)


def _libraries_in(folder: str) -> list[str]:
    try:
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if _is_library(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_library(path: str) -> bool:
    return re.search(r"\.so(\.[\w.]+)?\Z", path) is not None


def read_needs(paths: Iterable[str]) -> HostLibraries:
    """Return the newest glibc that each library needs. If a library cannot be read, `problem` names it."""
    needs: dict[str, _Glibc] = {}
    problem = ""
    for number, path in enumerate(paths):
        if number == _MOST_LIBRARIES:
            problem = f"only the first {_MOST_LIBRARIES} libraries were read"
            break
        try:
            need = _need(path)
        except (OSError, ValueError, OverflowError) as error:
            problem = f"{path}: {error.strerror if isinstance(error, OSError) else error}"
            continue
        if need is not None:
            needs[path] = need
    return HostLibraries(needs=needs, problem=problem)


def _need(path: str) -> _Glibc | None:
    """Return the newest glibc that a library needs; None for a linker script, or a library that needs no version."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a file")
        if os.pread(descriptor, 4, 0) != b"\x7fELF":
            return None
        versions = Elf(descriptor).needed_versions(descriptor)
    finally:
        os.close(descriptor)
    found = [(int(m[1]), int(m[2])) for name in versions if (m := _VERSION.fullmatch(name))]
    return max([*found, *(_MARKERS[name] for name in versions if name in _MARKERS)], default=None)
