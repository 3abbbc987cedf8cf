"""Say exactly which environment this Python is, in one line of JSON.

Runs on: inside the image (or in a bare host environment), alone: stdlib only, Python 3.8 to 3.14.

    python3 -B - --level record < probe.py        # how hpcenv starts it: nothing to mount
    python3 -B probe.py --level full

Below level deep it never imports torch or any other installed package. Its own first ``sys.path`` entry ('' or
the folder of this file) is dropped, so that it reports the path which a training process gets before the script's
own folder is put in front. Its own imports come from the standard library only, whatever PYTHONPATH says.

Every probe stands alone: when one fails, its fields go to ``unknown`` with the reason and the rest go on. A
field that belongs to the level is always in ``values`` or in ``unknown``, never in neither.

Code that runs at every start of Python (.pth, sitecustomize) may print before us: read the last line.

Levels
    record  reads every RECORD and lists the site directories; opens only the files that no RECORD lists, and of the
            libraries under torch what the dynamic loader reads of them. Their versions are asked in child processes.
    full    also reads and hashes every file that a RECORD lists, the standard library, and the libraries under
            torch wherever they are; lists the system's packages; asks cublas too, which takes 150 MiB to load.
    deep    also imports torch in a child and looks at which libraries are mapped then.

Digest ``hpcenv-env-v1`` (anyone can recompute it; text is UTF-8, undecodable bytes are kept as they are)
    A *dist* is a ``*.dist-info`` or ``*.egg-info`` on sys.path; per normalised name (PEP 503) the first one
    wins, in one folder the first by folder name; the others are ``shadowed``. pip's ``~*`` leftovers are not
    dists; their files are unlisted files.
    1. Take the rows of its RECORD (csv: path, hash, size). Drop the rows that are ``*.pyc`` or below
       ``__pycache__``, and in the dist-info root INSTALLER, REQUESTED, RECORD, RECORD.jws, RECORD.p7s,
       direct_url.json, provenance_url.json, uv_cache.json, uv_build.json: they depend on who installed.
    2. A path inside the site directory stays as it is, without ``.`` and ``..``. Of one that leaves it the
       leading ``../`` are removed (an absolute path inside the environment is taken relative to its prefix),
       and the rest ``bin/...`` is dropped (scripts hold an absolute shebang), ``include/[site/]pythonX.Y/...``
       becomes ``{headers}/...``, anything else ``{data}/...``. A path outside of the environment becomes
       ``{outside}/`` + the path as listed; such a file is never opened, and the content digest is unknown.
    3. ``record-sha256`` = sha256 of the distinct lines ``path NUL hash NUL size``, as listed, sorted by bytes,
       joined with LF. The same number comes from a wheel's own RECORD with ``X.data/{purelib,platlib}/`` taken
       away, ``X.data/data/`` as ``{data}/``, ``X.data/headers/`` as ``{headers}/NAME/`` and ``X.data/scripts/`` dropped.
    4. ``content-sha256`` is the same with the hash found in the file (in the algorithm of the row) in place of
       the listed one; a row without a hash stays so, a file that is not there has the hash ``missing``, and
       what is no regular file ``not-a-file``. A dropped ``bin/...`` row whose file differs from its own hash
       adds the line ``{scripts}/... NUL found NUL size``. So it equals ``record-sha256`` if and only if
       nothing that is listed was modified.
    5. ``packages.env-digest`` = "sha256:" + sha256 of ``hpcenv-env-v1`` LF and the sorted lines
       ``name NUL version NUL record-sha256`` joined with LF, with the version as PEP 440 writes it and the
       word ``unknown`` where a dist has no digest. ``packages.content-digest`` is the same over the
       content digests, so the two are equal if and only if nothing was modified.
    A dist has no digest, but a ``reason``, when it has no RECORD or one that cannot be parsed, no readable
    name, or is an editable install (its RECORD lists a .pth, not its code). Of that one, ``git`` names the commit of
    its tree and, as ``diff-sha256``, what differs from it (bare hex, ``none`` if nothing does): tag
    ``hpcenv-diff-v1``, lines ``path NUL sha256`` (and ``NUL target`` of a link), over the tracked files that git calls
    changed or was told not to look at, and the importable files that it does not track, ignored ones among them.
    hpcenv's own ``*.lock.toml`` do not count: they hold this number. Where git cannot tell, ``files`` has the same
    over all importable files, tag ``hpcenv-files-v1``. Importable files of a tree: those with the endings below, in
    folders that Python could import from (named by an identifier, or on sys.path) below the folder of direct_url.json,
    without environments and run folders; links to folders are not followed.
    A dist without RECORD whose files another list names (dpkg's, or installed-files.txt) has the
    ``digest-kind`` walk: tag ``hpcenv-walk-v1``, lines ``path NUL sha256``, over these files below the site
    directory but ``*.pyc`` and the files that step 1 drops; it is both its record and its content digest.
    ``packages.unlisted-digest`` = "sha256:" + the same construction with the tag ``hpcenv-unlisted-v1`` and
    lines ``path NUL sha256``, over the importable files (``.py .pth .so .so.* .pyd``, and a ``.pyc`` outside
    of ``__pycache__`` without a source beside it) below the site directories which no RECORD lists that
    counts in the env-digest: every importable file is covered by one of the two. Left out are the two files
    that virtualenv and uv put into each environment, known by their content (LAUNCHERS).
    ``python.stdlib-sha256`` (bare hex): tag ``hpcenv-stdlib-v1``, lines ``path NUL sha256``, over the ``*.py``
    of the standard library and the ``*.so`` of lib-dynload, without site-packages, tests and config-*.
    ``system.packages-digest``: "sha256:" + tag ``hpcenv-system-packages-v1``, lines ``name TAB version TAB arch``.
    ``packages.conda-digest``: the same with the tag ``hpcenv-conda-v1`` and lines
    ``name NUL version NUL build NUL algorithm=hash NUL channel``, of the records in conda-meta.
    ``torch.config-digest`` (bare hex): sha256 of torch.__config__.show() without its line on the CPU in use.

What it does not read
    Folders on sys.path that are neither in the prefix nor named site-packages or dist-packages (PYTHONPATH,
    .pth lines, editable sources) are the user's code: they stand in ``python.sys-path``, their dists are
    listed, their files are not scanned, but those of an editable install (see above). A link that leaves the environment is followed only where a RECORD
    lists what is behind it or where Python would import it, and that is said: ``linked-outside`` counts such
    files of a dist, ``link`` names the target of an unlisted file. Of compiled files in ``__pycache__`` only the
    headers are read, at level full: a pyc that was forged to fit the time and size of its source is not seen.

Paths are relative to the prefix, or start with ``{base-prefix}/`` or ``{user-base}/``, or are absolute.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    # Before any other import: '' or our own folder could hold a json.py.
    del sys.path[0]
_TRAINING_PATH = list(sys.path)

import os

_STDLIB = os.path.dirname(os.path.abspath(os.__file__))


def _is_stdlib(path: str) -> bool:
    if os.path.normpath(path) == _STDLIB:
        return True
    zipped = f"python{sys.version_info[0]}{sys.version_info[1]}.zip"
    own = path.startswith((sys.base_prefix + os.sep, sys.base_exec_prefix + os.sep))
    return own and os.path.basename(path) in ("lib-dynload", zipped)


if __name__ == "__main__":
    # PYTHONPATH may shadow the standard library: that is reported, and must not decide what we import.
    sys.path[:] = [p for p in sys.path if _is_stdlib(p)] or sys.path

import time

TYPE_CHECKING = False  # importing typing costs more than a probe; type checkers know the name
if TYPE_CHECKING:
    import re
    import subprocess
    from collections.abc import Callable, Iterator
    from typing import Any, TypeAlias

    Value: TypeAlias = "str | int | list[str] | Unknown"
    Found: TypeAlias = "dict[str, Value]"

SCHEMA = 1
LEVELS = ("record", "full", "deep")
SMALL_FILE = 1 << 20  # METADATA, direct_url.json, version.py: the largest seen is 150 KiB
RECORD_BYTES = 16 << 20  # the largest seen, torch with CUDA, is 1.5 MiB
RECORD_ROWS = 300_000
CSV_CELL = 131_072  # what the csv module takes at most
MODIFIED_SHOWN = 20
UNLISTED_SHOWN = 500  # a Debian dist-packages can have thousands; count and digest cover all
UNLISTED_NEWEST = 3
CONDA_BYTES = 64 << 20  # one package can list 100,000 files
SYSTEM_BYTES = 64 << 20  # a dpkg status of 3,000 packages has 4 MiB
SEARCH_PIECE = 1 << 20
SEARCH_BYTES = 64 << 20  # libtorch_python has 5 MiB of constants
SYSTEM_ROOT = "/"
DPKG_SECONDS = 20.0
GIT_SECONDS = 20.0
SOURCE_SECONDS = 60.0
SOURCE_FILES = 20_000
SOURCE_BYTES = 4 << 30  # a torch with CUDA that was built in its tree
SOURCE_ENTRIES = 1_000_000  # data beside the code
IMPORT_SECONDS = 300.0
LIBRARY_SECONDS = 20.0  # a cold 400 MB library on a slow shared file system
SCAN_SECONDS = 120.0
CONTENT_SECONDS = 1200.0
OUT_OF_TIME = "the time limit for hashing is over"

# Written by the installer, each in its own way: the same wheel must give the same digest.
UNHASHED_METADATA = frozenset(
    ("INSTALLER", "REQUESTED", "RECORD", "RECORD.jws", "RECORD.p7s", "direct_url.json")
    + ("provenance_url.json", "uv_cache.json", "uv_build.json")
)
IMPORTABLE = (".py", ".pth", ".so", ".pyd")
SITE_NAMES = ("site-packages", "dist-packages")
# Library -> file name stem, how its version is asked for, C function. None of these needs a GPU.
LIBRARIES = {
    "cudart": ("libcudart", "packed", "cudaRuntimeGetVersion"),
    "cublas": ("libcublas", "property", "cublasGetProperty"),
    "cublaslt": ("libcublasLt", "property", "cublasLtGetProperty"),
    "cudnn": ("libcudnn", "size_t", "cudnnGetVersion"),
    "nccl": ("libnccl", "packed", "ncclGetVersion"),
    "cufft": ("libcufft", "property", "cufftGetProperty"),
    "cusparse": ("libcusparse", "property", "cusparseGetProperty"),
    "cusparselt": ("libcusparseLt", "property", "cusparseLtGetProperty"),
    "nvrtc": ("libnvrtc", "pair", "nvrtcVersion"),
    "nvjitlink": ("libnvJitLink", "pair", "nvJitLinkVersion"),
    "nvshmem": ("libnvshmem_host", "triple", "nvshmemx_vendor_get_version_info"),
    # torch's own have no version but torch.version and torch.git-version
    "libtorch": ("libtorch", "", ""),
    "libtorch_cpu": ("libtorch_cpu", "", ""),
    "libtorch_cuda": ("libtorch_cuda", "", ""),
}

# At level record these are known by build-id and origin: to load libcublasLt takes 150 MiB and 70 ms.
HEAVY = ("cublas", "cublaslt")

# What virtualenv and uv put into the site directory of every environment that they make; all versions in their
# histories from 2020-03 to 2026-08. It only keeps distutils' configuration files from moving an installation, and
# is there or not by the tool that made the environment. Any other content counts as unlisted.
LAUNCHERS = {
    "_virtualenv.pth": frozenset(
        (
            "69ac3d8f27e679c81b94ab30b3b56e9cd138219b1ba94a1fa3606d5a76a1433d",
            "a18ec686bd69842888e68e43eade6c26cac183a1e4c98c40ae8992349f0a1a1c",
        )
    ),
    "_virtualenv.py": frozenset(
        (
            "095a1099733d28c837bca584f5fb3eb3724e357f8846c015083dc6e9a7b985f3",
            "65de6a7145016299fba5fc2f113d278b53db54fa9a4f32ff4b837d5ee2a4608a",
            "96245d9e9c0b16fdcd99b470abe101863858120c9bf57752278ec4d7f9b09a94",
            "82944bb74841efbcfdc3539e7d60df63f43cc023041eb183abbd56f44e071b45",
            "e3db5fe06ab41ca9b95dd6463b83836787028a1b55562cc383803bb83001a45c",
            "bd9633de3d8122488d66fcfa0c7f0c9cd0b58e9147938ddf1f8fa76ca12b6ad5",
            "684b8c07932ba4a84ac2e5ae9afe49ef04e92bac3d8d4191d455cf09d093e5fc",
            "ce57d5e0d9b5d7356cb42da7450ba8f9359bdf693e335f4c921626943c77e64d",
            "c9199315871b11b12df226f890a38e66e63191e1adbfb11a66e6861151b33fca",
            "f4dfaeb9efc1614890cfa94ed15bbe9b2ee15fbe76d569ef5e435e93e4987dc7",
            "119e4eb9c1a39e6ffd220840844bd326fa1bd3acf2f1c9fa0612949aedc228a5",
            "0aeb86546345c1d0fada097536e35525714d5cdbcc2d8eb3f9912a955044fcff",
            "956a757e912269c3a2537374d07e70b8faa04ace69b54df88a21f749c5fd4233",
            "0f20351ea7e90039c46d3fabdef991f28b1e3ff33eb13ee6f0d5cd21ea0e8b14",
            "7169dab6537491cb9c573ff83ea0112955fd5180d8535cac70d4c987398dbeef",
            "bec6155ff7bfc88f8e79e481f27fd7ee0a3b40eeca9bfeb41f4c4b997b2f8100",
            "02943e192823d75212f206e1f2991ac572119882683a95dfbb7a1b913d7b14b5",
            "e8c426ce260f866254ff35cefedc8b3efbd6d1446d99d7a4cdeb0095f98a8b8f",
            "460589e83387d4dfe5fd84d41c5f6979599f5cd080983d73c832549161c80435",
            "d1ea23a2be4bcbac5e75c69bc03926397bf53ae16e35c58d7c3b73306cb1a81e",
            "0278334cdcfab4c746b4416fbd5c2b6e7da937c81e132397d62c361d404ebe0e",
            "cfb3db86aaa53bb62b5ff764970bec2d71c9228590a0ebec57f6ec926cc0bf1a",
            "6cf30c56faf2a55228914dbbd17f8088ed371ebb08f5e7fa6fd931f913fcaf1d",
            "e3e10c8a19a62a49928c139b8e6824eac92dcdda7639953bcd10921011cbbdff",
            "ee52b2e2e720a40885a6b4b90c40e28e5c70e550af74d5efd169eaa5db2a6f6f",
        )
    ),
}


def main(argv: list[str]) -> int:
    """Print one JSON object on one line; status 2 only for wrong arguments."""
    level, problem = _level(argv)
    env = Environment(level)
    status = 0
    try:
        if problem:
            status = 2
            raise ValueError(problem)
        for name, fields, probe, levels in PROBES:
            if level in levels:
                _run(env, name, fields, probe)
    except BaseException as error:  # noqa: BLE001 - the reader must get JSON, also from an interrupt
        env.fail(_reason(error))
    _end_children(env)
    try:
        line = _json(env.report())
    except BaseException as error:  # noqa: BLE001
        line = _plain_json(level, _reason(error))
    _write_all(line)
    return status


def _level(argv: list[str]) -> tuple[str, str]:
    if not argv:
        return "record", ""
    words = argv[0].split("=", 1) if len(argv) == 1 else argv
    if len(words) == 2 and words[0] == "--level" and words[1] in LEVELS:
        return words[1], ""
    return "record", "usage: probe.py [--level record|full|deep], got " + " ".join(argv)


def _run(env: Environment, name: str, fields: tuple[str, ...], probe: Callable[[Environment], Found]) -> None:
    """Run one probe; whatever happens, each of its fields ends in values or in unknown."""
    start = time.perf_counter()
    try:
        found = probe(env)
    except Exception as error:  # noqa: BLE001
        found = {field: Unknown(_reason(error)) for field in fields}
    for field in fields:
        found.setdefault(field, Unknown("the probe gave no value"))
    for field, value in found.items():
        if isinstance(value, Unknown):
            env.unknown[field] = value.reason
        else:
            env.values[field] = value
    env.seconds[name] = round(time.perf_counter() - start, 6)


class Unknown:
    """In place of a value: it could not be read, and why."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Site:
    """A folder on sys.path that can hold dists, and how far up its RECORD rows may point."""

    __slots__ = ("base", "path", "scanned")

    def __init__(self, path: str, base: str, scanned: bool) -> None:
        self.path = path
        self.base = base
        self.scanned = scanned


class Row:
    """One line of a RECORD after step 2 of the digest; ``file`` is None when it must not be opened."""

    __slots__ = ("claim", "file", "path", "script", "size")

    def __init__(self, path: str, claim: str, size: str, file: str | None, script: bool) -> None:
        self.path = path
        self.claim = claim
        self.size = size
        self.file = file
        self.script = script


class Dist:
    """One installed distribution as its metadata folder describes it."""

    def __init__(self, site: Site, folder: str) -> None:
        self.site = site
        self.folder = folder
        self.name = ""
        self.version = ""
        self.installer: str | None = None
        self.build = ""
        self.tags: list[str] = []
        self.source = "unknown"
        self.direct_url: dict[str, Any] = {}
        self.git: dict[str, Any] = {}
        self.files: dict[str, str] = {}
        self.kind = "record"
        self.no_record = ""  # the reason, if that is why it has no digest
        self.rows: list[Row] = []  # empty where _read_plain_record could do without
        self.plain_digest = ""
        self.listed: list[str] = []
        self.record: str | None = None
        self.content: str | None = None
        self.modified: list[dict[str, str]] = []
        self.modified_count: int | None = None  # None: not looked at
        self.linked_outside = 0
        self.reasons: list[str] = []


class Environment:
    """Where things are, and what the probes have found so far."""

    def __init__(self, level: str) -> None:
        self.level = level
        self.prefix = os.path.normpath(sys.prefix)
        self.base_prefix = os.path.normpath(sys.base_prefix)
        self.path = [os.path.normpath(os.path.abspath(p)) for p in _TRAINING_PATH]
        self.values: dict[str, Any] = {}
        self.unknown: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.sites: list[Site] = []
        self.roots: list[str] = []
        self.dists: list[Dist] | None = None
        self.shadowed: list[Dist] = []
        self.listed: set[str] = set()
        self.unlisted: list[dict[str, str]] = []
        self.newest: list[str] = []  # of the unlisted files
        self.trees: dict[str, tuple[bytes, bytes] | Exception] = {}  # what git says of them
        self.source_deadline = 0.0  # of all editable installs together
        self.conda: list[dict[str, str]] = []
        self.system_packages: list[tuple[str, str, str]] = []
        self.hashed: dict[str, str] = {}
        self.torch: str | None = None
        self.libraries: dict[str, Library] = {}  # which torch would load
        self.at_import: set[str] = set()  # of these: already when it is imported
        self.missing_libraries: dict[str, str] = {}
        self.torch_incomplete = False
        self.answers: dict[str, Value] = {}  # their versions
        self.no_libraries = ""  # why it could not be found out
        self.children: dict[str, subprocess.Popen[bytes] | Unknown] = {}
        self._elves: dict[str, Elf | None] = {}
        self._folders: dict[str, list[str]] = {}
        self._listed_sorted: list[str] = []
        self._inside: dict[str, bool] = {}

    def fail(self, reason: str) -> None:
        for _, fields, _, levels in PROBES:
            for field in fields if self.level in levels else ():
                if field not in self.values:
                    self.unknown.setdefault(field, reason)

    def user_base(self) -> str:
        import site

        return os.path.normpath(site.getuserbase() or "")

    def placed(self, path: str) -> tuple[str, str]:
        """Which prefix a path belongs to ('' for none), and the rest; a venv may lie below its base, or above."""
        roots = [("{prefix}", self.prefix), ("{base-prefix}", self.base_prefix)]
        for mark, root in sorted(roots, key=lambda r: -len(r[1])):
            if _below(path, root):
                return mark, path[len(root.rstrip("/")) + 1 :]
        return "", path

    def shown(self, path: str) -> str:
        """A path as the report writes it: the same for every place that the environment is moved to."""
        mark, rest = self.placed(path)
        if mark == "{prefix}":
            return rest or "."
        base = self.user_base()
        if not mark and _below(path, base):
            mark, rest = "{user-base}", path[len(base) + 1 :]
        return mark + "/" + rest if mark else path

    def inside(self, folder: str) -> bool:
        """Whether a folder, with its links resolved, is in the environment."""
        known = self._inside.get(folder)
        if known is None:
            real = os.path.realpath(folder)
            known = self._inside[folder] = any(_below(real, root) for root in self.roots)
        return known

    def names(self, folder: str) -> list[str]:
        """A folder's entries; empty when it cannot be read."""
        if folder not in self._folders:
            self._folders[folder] = _names(folder)
        return self._folders[folder]

    def elf(self, path: str) -> Elf | None:
        """What the loader reads of a file; None when it is no ELF file that can be opened."""
        if path not in self._elves:
            self._elves[path] = None
            try:
                descriptor, _ = _open_regular(self, path)
                try:
                    self._elves[path] = Elf(descriptor)
                finally:
                    os.close(descriptor)
            except (OSError, ValueError):
                pass  # the loader goes on to the next folder
        return self._elves[path]

    def lists_below(self, folder: str) -> bool:
        """Whether some RECORD lists a file in this folder or deeper."""
        if not self._listed_sorted:
            self._listed_sorted = sorted(self.listed)  # links are rare: sorted only when there is one
        from bisect import bisect_left

        index = bisect_left(self._listed_sorted, folder + "/")
        return index < len(self._listed_sorted) and self._listed_sorted[index].startswith(folder + "/")

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = {
            "schema": SCHEMA,
            "level": self.level,
            "values": self.values,
            "unknown": self.unknown,
            "packages": [_package(self, dist) for dist in self.dists or ()],
            "unlisted": self.unlisted[:UNLISTED_SHOWN],
            "unlisted-newest": self.newest,
            "shadowed": [
                {"name": d.name, "version": d.version, "location": _clean(self.shown(d.site.path))}
                for d in self.shadowed
            ],
            "conda-packages": self.conda,
            "seconds": self.seconds,
        }
        if self.level != "record":
            report["system-packages"] = [
                {"name": name, "version": version, "arch": arch} for name, version, arch in self.system_packages
            ]
        return report


def _package(env: Environment, dist: Dist) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": dist.name,
        "version": dist.version,
        "record-sha256": dist.record,
        "content-sha256": dist.content,
        "modified": dist.modified,
        "modified-count": dist.modified_count,
        "location": _clean(env.shown(dist.site.path)),
        "installer": dist.installer,
        "build": dist.build,
        "tags": dist.tags,
        "source": dist.source,
    }
    if dist.record and dist.kind != "record":
        entry["digest-kind"] = dist.kind
    if dist.direct_url:
        entry["direct-url"] = dist.direct_url
    if dist.git:
        entry["git"] = dist.git
    if dist.files:
        entry["files"] = dist.files
    if not dist.site.scanned:
        entry["scanned"] = False
    if dist.linked_outside:
        entry["linked-outside"] = dist.linked_outside
    if dist.reasons:
        entry["reason"] = "; ".join(dist.reasons)
    return entry


# ---- python ------------------------------------------------------------------------------------------------


def probe_python(env: Environment) -> Found:
    return {
        "python.version": sys.version.split()[0],
        "python.implementation": sys.implementation.name,
        "python.soabi": _soabi(),
        "python.executable": _clean(sys.executable or ""),
        "python.prefix": _clean(env.prefix),
    }


def _soabi() -> Value:
    # The suffix that the import system uses; sysconfig says the same and costs 10 ms more.
    from importlib.machinery import EXTENSION_SUFFIXES

    for suffix in EXTENSION_SUFFIXES:
        parts = suffix.split(".")
        if len(parts) == 3 and parts[1] != "abi3":
            return parts[1]
    return Unknown("the import system knows no extension suffix with an ABI tag")


def probe_path(env: Environment) -> Found:
    import site

    for path in env.path:
        if not _is_stdlib(path):
            _add_site(env, path)
    env.roots = sorted({os.path.realpath(p) for s in env.sites for p in (s.path, s.base)})
    env.roots += [os.path.realpath(env.prefix), os.path.realpath(env.base_prefix), os.path.realpath(_STDLIB)]
    user_site = os.path.normpath(site.getusersitepackages() or "")
    # What counts is whether it is importable: an enabled user site that does not exist is not on the path.
    user_on = bool(site.getusersitepackages()) and os.path.realpath(user_site) in {
        os.path.realpath(p) for p in env.path
    }
    return {
        "python.sys-path": [_braced(env, path) for path in env.path],
        "python.user-site": "on: " + _clean(user_site) if user_on else "off",
        "python.path-variable": _clean(os.environ.get("PYTHONPATH", "")),
    }


def _add_site(env: Environment, path: str) -> None:
    if not os.path.isdir(path):
        return
    real = os.path.realpath(path)
    if any(os.path.realpath(known.path) == real for known in env.sites):
        return  # Fedora has lib and lib64, the same folder: nothing shadows itself
    owners = [r for r in (env.prefix, env.base_prefix, env.user_base()) if _below(path, r)]
    base = max(owners, key=len) if owners else path
    env.sites.append(Site(path, base, bool(owners) or os.path.basename(path) in SITE_NAMES))


def _braced(env: Environment, path: str) -> str:
    mark, rest = env.placed(path)
    return _clean((mark + "/" + rest).rstrip("/") if mark else path)


def probe_stdlib(env: Environment) -> Found:
    """Hash the standard library's sources and extension modules."""
    deadline = time.monotonic() + CONTENT_SECONDS
    files = {}
    dynload = [p for p in _TRAINING_PATH if os.path.basename(p) == "lib-dynload"]
    for root in dict.fromkeys([_STDLIB, *dynload]):
        for path in _stdlib_files(root):
            inner = os.path.relpath(path, root)
            files[inner if root == _STDLIB else "lib-dynload/" + inner] = path
    if not files:
        return {"python.stdlib-sha256": Unknown("no source files in " + _STDLIB)}
    names = sorted(files)
    results = _hash_all(env, [(files[n], "sha256", 0) for n in names], deadline)
    for name, result in zip(names, results):
        if result.digest is None:
            return {"python.stdlib-sha256": Unknown(f"{_clean(name)}: {result.problem}")}
    lines = [n + "\0" + result.word() for n, result in zip(names, results)]
    return {"python.stdlib-sha256": _digest("hpcenv-stdlib-v1", lines)}


def _stdlib_files(root: str) -> Iterator[str]:
    skipped = {"__pycache__", "test", "tests", "idle_test", *SITE_NAMES}
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in skipped and not f.startswith("config-")]
        extensions = os.path.basename(folder) == "lib-dynload"
        for name in files:
            if name.endswith(".py") or (extensions and name.endswith(".so")):
                yield os.path.join(folder, name)


# ---- system ------------------------------------------------------------------------------------------------


def probe_system(env: Environment) -> Found:
    return {"system.os-release": _os_release(env), "system.glibc": _glibc(), "system.machine": os.uname().machine}


def _os_release(env: Environment) -> Value:
    for path in ("/etc/os-release", "/usr/lib/os-release"):
        try:
            text = _read_small(env, path)[0].decode("utf-8", "replace")
        except (OSError, ValueError):
            continue
        pairs = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        words = [pairs.get(key, "").strip().strip("\"'") for key in ("ID", "VERSION_ID")]
        return " ".join(w for w in words if w) or Unknown("neither ID nor VERSION_ID in " + path)
    return Unknown("no readable os-release")


def _glibc() -> Value:
    try:
        words = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
    except (ValueError, OSError):
        words = []
    return words[1] if len(words) == 2 else Unknown("the C library is not glibc")


# ---- system packages ---------------------------------------------------------------------------------------


def probe_system_packages(env: Environment) -> Found:
    """Packages of the operating system: of the first package manager that has a database here."""
    readers: tuple[tuple[str, Callable[[Environment], list[tuple[str, str, str]] | None]], ...] = (
        ("dpkg", _dpkg),
        ("rpm", _rpm),
        ("apk", _apk),
    )
    fields = ("system.packages-count", "system.packages-digest")
    for manager, reader in readers:
        try:
            packages = reader(env)
        except Exception as error:  # noqa: BLE001 - sqlite3.Error among them
            return {"system.packages-manager": manager, **dict.fromkeys(fields, Unknown(_reason(error)))}
        if packages is not None:
            env.system_packages = sorted(set(packages))
            lines = ["\t".join(package) for package in env.system_packages]
            digest = "sha256:" + _digest("hpcenv-system-packages-v1", lines)
            return {"system.packages-manager": manager, fields[0]: len(lines), fields[1]: digest}
    return {"system.packages-manager": "none", fields[0]: 0, fields[1]: "none"}


def _read_database(env: Environment, path: str) -> str | None:
    try:
        return _read_small(env, SYSTEM_ROOT + path, SYSTEM_BYTES)[0].decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def _dpkg(env: Environment) -> list[tuple[str, str, str]] | None:
    import re

    text = _read_database(env, "var/lib/dpkg/status")
    folder = "var/lib/dpkg/status.d"  # distroless images have one file per package
    names = [n for n in sorted(_names(SYSTEM_ROOT + folder)) if not n.endswith(".md5sums")]
    texts = [t for t in [text] + [_read_database(env, f"{folder}/{n}") for n in names] if t]
    if not texts:
        return None
    found: list[dict[str, str]] = []
    # Fields start at the beginning of a line; 'Status: want flag status' is of dpkg only.
    for key, value in re.findall(r"^(Package|Status|Version|Architecture): *(.*)$", "\n".join(texts), re.MULTILINE):
        if key == "Package":
            found.append({})
        if found:
            found[-1].setdefault(key, _clean(value.strip()))
    # A removed package whose configuration is left is not installed.
    there = [
        f for f in found if f.get("Status", "installed").endswith("installed") and "not-" not in f.get("Status", "")
    ]
    return [(f.get("Package", ""), f.get("Version", ""), f.get("Architecture", "")) for f in there] or None


def _stanza(block: str, separator: str, keys: tuple[str, str, str]) -> tuple[str, str, str]:
    values = dict.fromkeys(keys, "")
    for line in block.split("\n"):
        key, found, value = line.partition(separator)
        if found and key in values:
            values[key] = _clean(value.strip())
    return values[keys[0]], values[keys[1]], values[keys[2]]


def _apk(env: Environment) -> list[tuple[str, str, str]] | None:
    text = _read_database(env, "lib/apk/db/installed") or _read_database(env, "usr/lib/apk/db/installed")
    if text is None:
        return None
    found = [_stanza(block, ":", ("P", "V", "A")) for block in text.split("\n\n")]
    return [keys for keys in found if keys[0]]


def _rpm(env: Environment) -> list[tuple[str, str, str]] | None:
    folders = [SYSTEM_ROOT + f for f in ("usr/lib/sysimage/rpm", "var/lib/rpm")]
    for folder in folders:
        if os.path.isfile(folder + "/rpmdb.sqlite"):
            return _rpm_sqlite(folder + "/rpmdb.sqlite")
    if any(os.path.isfile(f"{folder}/{name}") for folder in folders for name in ("Packages", "Packages.db")):
        return _rpm_query()
    return None


def _rpm_sqlite(path: str) -> list[tuple[str, str, str]]:
    import sqlite3
    from urllib.parse import quote

    try:
        unmerged = os.path.getsize(path + "-wal")
    except OSError:
        unmerged = 0
    # An image is read-only, where sqlite could not make its lock; what is in the log is only seen without that.
    options = "mode=ro" if unmerged else "mode=ro&immutable=1"
    database = sqlite3.connect(f"file:{quote(path)}?{options}", uri=True)
    try:
        rows = database.execute("SELECT blob FROM Packages LIMIT 100000").fetchall()
    finally:
        database.close()
    found = [_rpm_header(bytes(row[0])) for row in rows]
    return [package for package in found if package[0] != "gpg-pubkey"]


def _rpm_header(blob: bytes) -> tuple[str, str, str]:
    """Name, [epoch:]version-release and architecture of a header as rpm stores it: index, then data."""
    import struct

    count, _ = struct.unpack_from(">II", blob)
    if count > 100_000:
        raise ValueError("an rpm header with more than 100000 entries")
    start = 8 + 16 * count
    values: dict[int, str] = {}
    for tag, kind, offset, _ in struct.iter_unpack(">IIiI", blob[8:start]):
        if tag in (1000, 1001, 1002, 1022) and kind == 6:  # NAME, VERSION, RELEASE, ARCH: strings
            end = blob.index(b"\0", start + offset)
            values[tag] = _clean(blob[start + offset : end].decode("utf-8", "replace"))
        elif tag == 1003 and kind == 4:  # EPOCH: a number
            values[tag] = str(struct.unpack_from(">I", blob, start + offset)[0]) + ":"
    version = values.get(1003, "") + values.get(1001, "") + "-" + values.get(1002, "")
    return values.get(1000, ""), version, values.get(1022, "")


def _rpm_query() -> list[tuple[str, str, str]]:
    """Older databases have rpm's own formats: only rpm reads them."""
    import shutil
    import subprocess

    rpm = shutil.which("rpm")
    if rpm is None:
        raise ValueError("an rpm database that is no sqlite file, and no rpm here to read it")
    pattern = r"%{NAME}\t%|EPOCH?{%{EPOCH}:}|%{VERSION}-%{RELEASE}\t%|ARCH?{%{ARCH}}|\n"
    command = [rpm, *(["--root", SYSTEM_ROOT] if SYSTEM_ROOT != "/" else []), "-qa", "--qf", pattern]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60, check=True
    )
    rows = [_clean_row(line) for line in done.stdout.decode("utf-8", "replace").splitlines()]
    return [row for row in rows if row[0] != "gpg-pubkey"]


def _clean_row(line: str) -> tuple[str, str, str]:
    parts = [_clean(part) for part in (line + "\t\t").split("\t")]
    return parts[0], parts[1], parts[2]


# ---- torch and the libraries under it ----------------------------------------------------------------------


def probe_torch(env: Environment) -> Found:
    """Read torch's build facts from torch/version.py, which its build writes, without importing it."""
    fields = {
        "torch.version": "__version__",
        "torch.git-version": "git_version",
        "torch.cuda": "cuda",
        "torch.debug": "debug",
    }
    folder = env.torch = _module_folder(env, "torch")
    if folder is None:
        if any(d.name == "torch" for d in env.dists or ()):
            reason = Unknown("the dist is installed, but no folder 'torch' is on sys.path (an editable build?)")
            return dict.fromkeys(fields, reason)
        return dict.fromkeys((*fields, "torch.hip"), "absent")
    facts = _constants(_read_small(env, os.path.join(folder, "version.py"))[0])
    found: Found = {}
    for field, name in fields.items():
        if name not in facts:
            found[field] = Unknown("torch/version.py has no " + name)
        else:
            found[field] = _torch_word(facts[name])
    found["torch.hip"] = _torch_word(facts.get("hip"))
    return found


def _torch_word(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else _clean(str(value))


def probe_torch_binary(env: Environment) -> Found:
    """What only the binaries say: which GPUs they have kernels for, and which C++ ABI they were built with."""
    fields = ("torch.arch-list", "torch.cxx11-abi")
    if env.values.get("torch.version") == "absent":
        return dict.fromkeys(fields, "absent")
    if env.torch is None:
        return dict.fromkeys(fields, Unknown("torch's folder was not found"))
    found: Found = {}
    questions: tuple[tuple[str, Callable[[Environment], Value]], ...] = (
        ("torch.arch-list", _arch_list),
        ("torch.cxx11-abi", _cxx11_abi),
    )
    for field, question in questions:
        try:
            found[field] = question(env)
        except (OSError, ValueError) as error:
            found[field] = Unknown(_reason(error))
    return found


def _arch_list(env: Environment) -> Value:
    """The C string that torch.cuda.get_arch_list() splits: 'sm_80 sm_90 compute_90' in libtorch_python."""
    import re

    if env.values.get("torch.cuda") == "none":
        return "none"
    pattern = re.compile(rb"\0((?:sm|compute)_[0-9]+[a-z]?(?: (?:sm|compute)_[0-9]+[a-z]?)*)\0")
    texts = set(_strings(env, str(env.torch) + "/lib/libtorch_python.so", (b"\0sm_", b"\0compute_"), pattern))
    if len(texts) != 1:
        return Unknown(f"{len(texts)} strings in libtorch_python.so could be the list of architectures")
    return texts.pop().decode("ascii").split(" ")


def _strings(env: Environment, path: str, starts: tuple[bytes, ...], pattern: re.Pattern[bytes]) -> Iterator[bytes]:
    """Search the constants of a library (its segments that are neither written nor run) piece by piece."""
    overlap = 4096
    descriptor, _ = _open_regular(env, path)
    try:
        elf = Elf(descriptor)
        for start, size in elf.constants:
            for offset in range(start, start + min(size, SEARCH_BYTES), SEARCH_PIECE):
                # With one byte in front: a string begins behind a NUL, or where the segment begins.
                piece = os.pread(descriptor, 1 + SEARCH_PIECE + overlap, offset - 1) if offset > start else b""
                piece = piece or b"\0" + os.pread(descriptor, SEARCH_PIECE + overlap, offset)
                for word in starts:
                    at = piece.find(word)
                    while at >= 0:
                        match = pattern.match(piece, at)
                        if match:
                            yield match.group(1)
                        at = piece.find(word, at + 1)
    finally:
        os.close(descriptor)


def _cxx11_abi(env: Environment) -> Value:
    """libc10 names std::string in the symbol of its most used function, in the way of its C++ ABI."""
    path = str(env.torch) + "/lib/libc10.so"
    descriptor, _ = _open_regular(env, path)
    try:
        symbols = Elf(descriptor).symbol_names(descriptor)
    finally:
        os.close(descriptor)
    name = b"_ZN3c106detail14torchCheckFailEPKcS2_jRK"
    if name + b"NSt7__cxx1112basic_string" in symbols:
        return "true"
    return "false" if name + b"Ss\0" in symbols else Unknown("libc10.so does not define torchCheckFail")


def _module_folder(env: Environment, name: str) -> str | None:
    for path in env.path:
        if os.path.isfile(os.path.join(path, name, "__init__.py")):
            return os.path.join(path, name)
    return None


def _constants(source: bytes) -> dict[str, object]:
    import ast

    found: dict[str, object] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            continue
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            found[target.id] = value.value
    return found


# ---- which file torch gets for a library ---------------------------------------------------------------------


class Elf:
    """What the dynamic loader reads of a file before it maps it. Nothing here trusts the file."""

    __slots__ = ("_strings", "build_id", "constants", "kind", "needed", "rpath", "runpath", "soname")

    def __init__(self, descriptor: int) -> None:
        import struct

        head = os.pread(descriptor, 64, 0)
        if len(head) < 64 or head[:4] != b"\x7fELF" or head[4] not in (1, 2) or head[5] not in (1, 2):
            raise ValueError("not an ELF file")
        wide, order = head[4] == 2, "<" if head[5] == 1 else ">"
        machine = struct.unpack_from(order + "H", head, 18)[0]
        self.kind = (head[4], head[5], machine)  # the loader passes over files of another kind
        if wide:
            at, size, count = struct.unpack_from(order + "Q", head, 32) + struct.unpack_from(order + "HH", head, 54)
        else:
            at, size, count = struct.unpack_from(order + "I", head, 28) + struct.unpack_from(order + "HH", head, 42)
        table = _pread(descriptor, size * min(count, 256), at)
        segments = [
            _segment(order, wide, table[i : i + size])
            for i in range(0, len(table) - 31, size)
            if size >= (32, 56)[wide]
        ]
        self._strings = (0, 0)
        self.soname = self.rpath = self.runpath = self.build_id = ""
        self.needed: list[str] = []
        self.constants = [(s[2], s[4]) for s in segments if s[0] == 1 and s[1] & 3 == 0]
        self._read_dynamic(descriptor, segments, order + ("qQ" if wide else "iI"))
        for kind, _, offset, _, length in segments:
            if kind == 4 and not self.build_id:
                self.build_id = _build_id(_pread(descriptor, min(length, 1 << 16), offset), order)

    def _read_dynamic(self, descriptor: int, segments: list[tuple[int, ...]], pair: str) -> None:
        import struct

        tags: list[tuple[int, int]] = []
        for kind, _, offset, _, length in segments:
            if kind == 2:
                data = _pread(descriptor, min(length, 1 << 16), offset)
                tags = list(
                    struct.iter_unpack(pair, data[: len(data) // struct.calcsize(pair) * struct.calcsize(pair)])
                )
                break
        if (0, 0) in tags:
            tags = tags[: tags.index((0, 0))]
        table = dict(tags)
        for kind, _, offset, address, length in segments:
            if kind == 1 and address <= table.get(5, -1) < address + length:  # DT_STRTAB
                self._strings = (offset + table[5] - address, min(table.get(10, 0), 64 << 20))

        def text(index: int) -> str:
            data = os.pread(descriptor, 4096, self._strings[0] + index) if index < self._strings[1] else b""
            return os.fsdecode(data.partition(b"\0")[0])

        self.needed = [text(value) for tag, value in tags if tag == 1][:256]
        self.soname = text(table[14]) if 14 in table else ""
        self.runpath = text(table[29]) if 29 in table else ""
        # If both are there, RPATH is ignored (ld.so(8)).
        self.rpath = text(table[15]) if 15 in table and 29 not in table else ""

    def symbol_names(self, descriptor: int) -> bytes:
        return _pread(descriptor, self._strings[1], self._strings[0])


def _segment(order: str, wide: bool, row: bytes) -> tuple[int, ...]:
    """Type, flags, offset in the file, address and size in the file of one program header."""
    import struct

    if wide:
        return struct.unpack_from(order + "IIQQ8xQ", row.ljust(56, b"\0"))
    kind, offset, address, _, size, _, flags = struct.unpack_from(order + "7I", row)
    return kind, flags, offset, address, size


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    if offset >= 1 << 62:
        raise ValueError("an offset beyond any file")
    return os.pread(descriptor, size, offset)


def _build_id(notes: bytes, order: str) -> str:
    import struct

    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from(order + "III", notes, at)
        start = at + 12 + (name_size + 3) // 4 * 4
        if kind == 3 and notes[at + 12 : at + 12 + name_size] == b"GNU\0":
            return notes[start : start + min(size, 64)].hex()
        at = start + (size + 3) // 4 * 4
    return ""


class Library:
    """One file that the dynamic loader has mapped, and for whom."""

    __slots__ = ("elf", "names", "needs", "parent", "path", "real", "system")

    def __init__(self, path: str, elf: Elf, parent: Library | None, system: bool) -> None:
        self.path = path
        self.real = os.path.realpath(path)
        self.elf = elf
        self.parent = parent
        self.system = system  # found in ld.so.cache or in the default folders
        self.names: set[str] = set()
        self.needs: list[Library] = []


class Loader:
    """glibc's ld.so(8), as far as it decides which file a name becomes. It reads; it loads nothing.

    Not modelled: glibc-hwcaps subfolders (no CUDA library comes in them), LD_AUDIT, dlmopen, and what code
    in .pth or sitecustomize may load before torch does; level ``deep`` looks at what is really mapped.
    """

    def __init__(self, env: Environment) -> None:
        self.env = env
        self.loaded: list[Library] = []
        self.missing: dict[str, str] = {}  # a needed name that was not found -> the file that needs it
        self._done: set[str] = set()
        self._cache: LoaderCache | None = None
        self._main: Library | None = None
        path = os.path.realpath("/proc/self/exe" if os.path.exists("/proc/self/exe") else sys.executable)
        elf = env.elf(path)
        if elf is None:
            raise ValueError(f"{path} is not an ELF file")
        self._main = main = self._add(path, elf, None, False)
        self._library_path = [
            d for part in _split(os.environ.get("LD_LIBRARY_PATH", "")) for d in self._expand(part, main)
        ]
        first = [main]
        for name in os.environ.get("LD_PRELOAD", "").replace(":", " ").split():
            preloaded = self._get(name, main)
            first += [preloaded] if preloaded else []
        self._load_needed(first)
        self.missing.clear()  # of Python itself: it runs, so they were found

    def open(self, path: str, parent: Library | None = None) -> Library | None:
        """Like dlopen."""
        library = self._get(path, parent or self._main)
        if library:
            self._load_needed([library])
        return library

    def _load_needed(self, queue: list[Library]) -> None:
        queue = list(queue)
        while queue:  # breadth first, as ld.so does
            library = queue.pop(0)
            if library.path in self._done:
                continue
            self._done.add(library.path)
            for name in library.elf.needed:
                found = self._get(name, library)
                if found is None:
                    self.missing.setdefault(name, library.path)
                else:
                    library.needs.append(found)
                    queue.append(found)

    def _get(self, name: str, requester: Library | None) -> Library | None:
        for library in self.loaded[1:]:
            if name in library.names or ("/" not in name and name == library.elf.soname):
                return library
        for path, system in self._places(name, requester):
            elf = self.env.elf(path)
            if elf is None or (self._main and elf.kind != self._main.elf.kind):
                continue
            real = os.path.realpath(path)
            for library in self.loaded[1:]:
                if library.real == real:
                    library.names.add(name)
                    return library
            added = self._add(path, elf, requester, system)
            added.names.add(name)
            return added
        return None

    def _add(self, path: str, elf: Elf, parent: Library | None, system: bool) -> Library:
        library = Library(path, elf, parent, system)
        self.loaded.append(library)
        if len(self.loaded) > 2000:
            raise ValueError("more than 2000 libraries")
        return library

    def _places(self, name: str, requester: Library | None) -> Iterator[tuple[str, bool]]:
        """Where ld.so looks for a name, in its order; True for the system's own places."""
        if "/" in name:
            yield os.path.normpath(name), False
            return
        if requester is not None and not requester.elf.runpath:
            chain: Library | None = requester
            while chain is not None:
                for folder in self._folders(chain.elf.rpath, chain):
                    yield os.path.normpath(folder + "/" + name), False
                chain = chain.parent
        for folder in self._library_path:
            yield os.path.normpath(folder + "/" + name), False
        if requester is not None:
            for folder in self._folders(requester.elf.runpath, requester):
                yield os.path.normpath(folder + "/" + name), False
        if self._cache is None:
            self._cache = LoaderCache(self.env)
        for path in self._cache.find(name):
            yield path, True
        for folder in _default_folders():
            yield folder + "/" + name, True

    def _folders(self, text: str, library: Library) -> list[str]:
        return [folder for part in text.split(":") if part for folder in self._expand(part, library)]

    def _expand(self, part: str, library: Library) -> list[str]:
        """ld.so's own variables. A relative folder depends on where the training is started: not followed."""
        import re

        part = re.sub(r"\$(?:ORIGIN\b|\{ORIGIN\})", lambda _: os.path.dirname(library.path), part)
        part = re.sub(r"\$(?:PLATFORM\b|\{PLATFORM\})", os.uname().machine, part)
        libs = ("lib/" + os.uname().machine + "-linux-gnu", "lib64", "lib")
        parts = [re.sub(r"\$(?:LIB\b|\{LIB\})", lib, part) for lib in libs] if "$" in part else [part]
        return [p for p in parts if p.startswith("/")]


def _split(text: str) -> list[str]:
    return text.replace(";", ":").split(":") if text else []


def _default_folders() -> list[str]:
    triple = os.uname().machine + "-linux-gnu"
    return ["/lib/" + triple, "/usr/lib/" + triple, "/lib64", "/usr/lib64", "/lib", "/usr/lib"]


class LoaderCache:
    """/etc/ld.so.cache, in the format glibc-ld.so.cache1.1, the only one since glibc 2.32."""

    def __init__(self, env: Environment) -> None:
        import struct

        self._data = b""
        self._places: dict[bytes, list[int]] = {}
        try:
            data = _read_small(env, "/etc/ld.so.cache", SYSTEM_BYTES)[0]
        except (OSError, ValueError):
            return
        start = data.find(b"glibc-ld.so.cache1.1")
        if start < 0:
            return
        self._data = data = data[start:] + b"\0"
        count = min(struct.unpack_from("=I", data, 20)[0], (len(data) - 48) // 24)
        for _, key, place, _, hwcap in struct.iter_unpack("=iIIIQ", data[48 : 48 + 24 * count]):
            if hwcap == 0 and max(key, place) < len(data):
                self._places.setdefault(self._text(key), []).append(place)

    def _text(self, at: int) -> bytes:
        return self._data[at : self._data.index(b"\0", at)]

    def find(self, name: str) -> list[str]:
        return [os.fsdecode(self._text(place)) for place in self._places.get(os.fsencode(name), ())]


def start_libraries(env: Environment) -> Found:
    """Find out which libraries torch would load, and start the child that asks them; it works while we read."""
    if env.values.get("torch.version") == "absent":
        return {}
    try:
        if env.torch is None:
            raise ValueError("torch's folder was not found")
        if isinstance(_glibc(), Unknown):
            raise ValueError("the search order of a C library other than glibc is not known here")
        _load_torch(env, env.torch)
    except Exception as error:  # noqa: BLE001
        env.no_libraries = _reason(error) if not isinstance(error, ValueError) else str(error)
        return {}
    questions = []
    for name, (_, how, function) in LIBRARIES.items():
        library = env.libraries.get(name)
        if library is not None and function and (env.level != "record" or name not in HEAVY):
            questions.append([name, how, function, [p.path for p in _needs_first(library)]])
    if questions:
        _ask_libraries(env, questions)
    return {}


def _load_torch(env: Environment, folder: str) -> None:
    """Do what ``import torch`` does: its global dependencies, its preloads, its extension module."""
    lib = folder + "/lib/"
    extensions = sorted(n for n in _names(folder) if n.startswith("_C.") and n.endswith(".so"))
    own = [n for n in extensions if n == f"_C.{env.values.get('python.soabi')}.so"] or extensions
    if not own:
        raise ValueError("no such library found: torch has no extension module _C")
    source = _read_small(env, folder + "/__init__.py")[0].decode("utf-8", "replace")
    loader = Loader(env)
    global_deps = lib + "libtorch_global_deps.so"
    if os.path.isfile(global_deps):
        loader.open(global_deps)
        if loader.missing:  # then torch opens all that it can find itself, and tries again
            loader = Loader(env)
            _preload(env, loader, _preload_names(source, "_preload_cuda_deps"))
            loader.open(global_deps)
        else:
            _preload(env, loader, _eager_preloads(source, loader))
    loader.open(os.path.join(folder, own[0]))
    at_import = list(loader.loaded)
    env.torch_incomplete = bool(loader.missing)
    # What torch opens later, when it needs it.
    cuda = next((mapped for mapped in loader.loaded if os.path.basename(mapped.path) == "libtorch_cuda.so"), None)
    for name in ("libcaffe2_nvrtc.so", "libtorch_nvshmem.so"):
        if cuda is not None and os.path.isfile(lib + name):
            loader.open(lib + name, cuda)
    env.missing_libraries = loader.missing
    for name, (stem, _, _) in LIBRARIES.items():
        found = next((mapped for mapped in loader.loaded[1:] if _is_library(stem, mapped)), None)
        if found is not None:
            env.libraries[name] = found
            if found in at_import:
                env.at_import.add(name)


def _is_library(stem: str, library: Library) -> bool:
    return any(_has_stem(stem, os.path.basename(n)) for n in (library.path, library.elf.soname, *library.names))


def _has_stem(stem: str, name: str) -> bool:
    import re

    return name.startswith(stem) and bool(re.match(re.escape(stem) + r"(-[0-9a-f]+)?\.so(\.[0-9]+)*$", name))


def _preload_names(source: str, function: str) -> list[tuple[str, str]]:
    """The (folder, file pattern) pairs that a function of torch/__init__.py names, in its order."""
    import re

    body = re.search(rf"^def {function}\(.*?(?=^\S)", source, re.MULTILINE | re.DOTALL)
    return re.findall(r"""["'](\w+)["']\s*[,:]\s*["'](lib[^"'/]+\.so[^"'/]*)["']""", body.group()) if body else []


def _eager_preloads(source: str, loader: Loader) -> list[tuple[str, str]]:
    """What this torch version opens by path although its global dependencies were found."""
    import re

    body = re.search(r"^def _load_global_deps\(.*?(?=^\S)", source, re.MULTILINE | re.DOTALL)
    text = body.group() if body else ""
    condition = re.search(r"""if ["']([^"']+)["'] not in _maps""", text)
    if condition is None or not any(condition.group(1) in mapped.path for mapped in loader.loaded):
        return []
    if re.search(r"^\s*_preload_cuda_deps\(\)", text, re.MULTILINE):
        return _preload_names(source, "_preload_cuda_deps")
    return _preload_names(source, "_load_global_deps")


def _preload(env: Environment, loader: Loader, pairs: list[tuple[str, str]]) -> None:
    """Like torch's _preload_cuda_lib: the first folder on sys.path that has the file."""
    from fnmatch import fnmatchcase

    cuda = "cu" + str(env.values.get("torch.cuda", "")).split(".")[0]
    for folder, pattern in pairs:
        for path in env.path:
            for place in (f"nvidia/{folder}/lib", f"nvidia/{cuda}/lib", f"{folder}/lib"):
                names = sorted(n for n in env.names(os.path.join(path, place)) if fnmatchcase(n, pattern))
                if names:
                    break
            if names:
                loader.open(os.path.join(path, place, names[0]))
                break


def _needs_first(library: Library) -> list[Library]:
    """What must be open before a library opens as it does under torch, and at the end itself."""
    found: list[Library] = []
    seen: set[int] = set()

    def visit(item: Library) -> None:
        if id(item) not in seen and not item.system:
            seen.add(id(item))
            for need in item.needs:
                visit(need)
            found.append(item)

    visit(library)
    return found or [library]


# The child forks once for each library: vendor code can crash or hang, alone. Its argument is the JSON list of
# (name, how, function, files to open, the last one to ask). os._exit: a library's own exit handlers have
# nothing to say to us. What it prints itself goes nowhere.
_CHILD = """
import sys
sys.path[:] = [p for p in sys.path if p]
import ctypes, json, os, signal
limit, questions = json.loads(sys.argv[1])
answers = os.dup(1)
nothing = os.open(os.devnull, os.O_WRONLY)
os.dup2(nothing, 1)
def die_with_parent():
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except Exception:
        pass
def ask(how, function, files):
    for file in files[:-1]:
        try:
            ctypes.CDLL(file)
        except OSError:
            pass
    call = getattr(ctypes.CDLL(files[-1]), function)
    if how == "size_t":
        call.restype = ctypes.c_size_t
        return [call()]
    numbers = [ctypes.c_int(0) for _ in range({"packed": 1, "pair": 2}.get(how, 3))]
    if how == "property":  # libraryPropertyType: MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
        statuses = [call(which, ctypes.byref(number)) for which, number in enumerate(numbers)]
    else:
        statuses = [call(*map(ctypes.byref, numbers))]
    if any(statuses) and how != "triple":  # nvshmemx_vendor_get_version_info returns nothing
        raise ValueError("status " + str(statuses))
    return [number.value for number in numbers]
die_with_parent()
children = {}
for name, how, function, files in questions:
    child = os.fork()
    if child == 0:
        try:
            die_with_parent()
            os.dup2(nothing, 2)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, limit)
            answer = {"numbers": ask(how, function, files)}
        except Exception as error:
            answer = {"problem": str(error)[:300]}
        os.write(answers, (chr(10) + "hpcenv-library " + json.dumps([name, answer]) + chr(10)).encode())
        os._exit(0)
    children[child] = name
while children:
    child, status = os.wait()
    if status != 0:
        line = json.dumps([children[child], {"status": status}])
        os.write(answers, (chr(10) + "hpcenv-library " + line + chr(10)).encode())
    del children[child]
os._exit(0)
"""


def _start_child(env: Environment, name: str, arguments: list[str], *, own_path: bool = True) -> None:
    import subprocess

    if not sys.executable:
        env.children[name] = Unknown("sys.executable is empty: cannot start a child")
        return
    variables = dict(os.environ)
    if own_path:
        variables.pop("PYTHONPATH", None)  # it could shadow ctypes
    try:
        env.children[name] = subprocess.Popen(
            [sys.executable, "-B", *arguments],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        env.children[name] = Unknown(_reason(error))


def _ask_libraries(env: Environment, questions: list[list[Any]]) -> None:
    import json

    _start_child(env, "libraries", ["-S", "-c", _CHILD, json.dumps([LIBRARY_SECONDS, questions])])


def _end_children(env: Environment) -> None:
    """A probe that was cut short leaves no library loading behind it."""
    for child in env.children.values():
        if not isinstance(child, Unknown) and child.poll() is None:
            child.kill()
            child.wait()


def probe_libraries(env: Environment) -> Found:
    env.answers = _library_answers(env)
    found: Found = {
        "libs.ld-library-path": [_clean(env.shown(p)) if p else "" for p in _split(_variable("LD_LIBRARY_PATH"))],
        "libs.ld-preload": [_clean(env.shown(p)) for p in _variable("LD_PRELOAD").replace(":", " ").split()],
    }
    for field in LIBRARY_FIELDS:
        _, name, part = field.split(".")
        found[field] = _library_fact(env, name, part)
    return found


def _variable(name: str) -> str:
    return os.environ.get(name, "")


def _library_answers(env: Environment) -> dict[str, Value]:
    """What the libraries said of their versions."""
    import json
    import subprocess

    child = env.children.get("libraries")
    asked = [n for n in env.libraries if LIBRARIES[n][2]]
    if child is None or isinstance(child, Unknown):
        return {name: child or Unknown("it was not asked") for name in asked}
    try:
        output, errors = child.communicate(timeout=LIBRARY_SECONDS + 5)
    except subprocess.TimeoutExpired:
        child.kill()
        output, errors = child.communicate()
    said = errors.decode("utf-8", "replace").strip()[-300:] or "no message"
    answers: dict[str, Value] = {
        name: Unknown(f"its child process ended with status {child.returncode}: {said}") for name in asked
    }
    for line in output.split(b"\n"):
        if line.startswith(b"hpcenv-library "):
            name, answer = json.loads(line.partition(b" ")[2])
            answers[name] = _library_version(name, answer)
    return answers


def _library_version(name: str, answer: dict[str, Any]) -> Value:
    status = answer.get("status")
    if status == 14:  # SIGALRM
        return Unknown(f"loading it took longer than {LIBRARY_SECONDS:g} s")
    if status is not None:
        status = -(status & 127) if status & 127 else status >> 8
        return Unknown(f"its child process ended with status {status}")
    if "problem" in answer:
        return Unknown(_clean(str(answer["problem"])))
    numbers = [int(number) for number in answer["numbers"]]
    if len(numbers) > 1:
        plausible = any(numbers) and all(0 <= n < 1_000_000 for n in numbers)
        return ".".join(map(str, numbers)) if plausible else Unknown(f"the library says {numbers}, which is no version")
    return _dotted(name, numbers[0])


def _dotted(name: str, number: int) -> Value:
    """Some libraries pack their version into one integer, each in its own way and changed once."""
    if number < 1000:
        return Unknown(f"the library says {number}, which is no version")
    if name == "cudart":  # 13000 is 13.0, 12080 is 12.8
        return f"{number // 1000}.{number % 1000 // 10}"
    # NCCL until 2.8 and cuDNN until 8 used thousands: 2708 is 2.7.8, 8902 is 8.9.2; then 22907, 92000.
    unit = 1000 if number < 10000 else 10000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"


def _library_fact(env: Environment, name: str, part: str) -> Value:
    library = env.libraries.get(name)
    if library is None:
        return _no_library(env, name)
    if part == "version":
        return env.answers.get(name, Unknown("it was not asked"))
    if part == "build-id":
        return library.elf.build_id or "none"
    return _origin(env, library.path, library.system)


def _no_library(env: Environment, name: str) -> Value:
    cuda = env.values.get("torch.cuda")
    if cuda == "absent" or (cuda == "none" and name not in ("libtorch", "libtorch_cpu")):
        return "absent"  # also where the system has it: a CPU build never loads it
    if env.no_libraries:
        return Unknown(f"{env.no_libraries} (torch.cuda is {cuda or 'unknown'})")
    stem = LIBRARIES[name][0]
    for missing, needed_by in env.missing_libraries.items():
        if _has_stem(stem, missing):
            where = _clean(env.shown(needed_by))
            return Unknown(f"no such library found: {where} needs {_clean(missing)}, and the loader finds none")
    if env.torch_incomplete:
        first = _clean(", ".join(sorted(env.missing_libraries)[:3]))
        return Unknown(f"not every library under torch was found: {first} is missing")
    return "absent"


def _origin(env: Environment, path: str, system: bool = False) -> str:
    """Class and path of a library: ``prefix:`` and ``base-prefix:`` move with the environment."""
    mark, rest = env.placed(path)
    root = {"{prefix}": env.prefix, "{base-prefix}": env.base_prefix}.get(mark, "/usr")
    in_site = any(_below(path, site.path) for site in env.sites if site.scanned)
    if mark and not system and (in_site or root not in ("/", "/usr", "/usr/local")):
        return _clean(mark[1:-1] + ":" + rest)
    places = ("/lib", "/usr/lib", "/lib64", "/usr/lib64")
    return ("system:" if system or any(_below(path, p) for p in places) else "other:") + _clean(path)


def probe_library_files(env: Environment) -> Found:
    """Level full: the libraries' own bytes (those of a RECORD were just hashed), and the heavy ones' versions."""
    found: Found = {field: _library_fact(env, field.split(".")[1], "version") for field in HEAVY_FIELDS}
    fields = {name: f"libs.{name}.sha256" for name in LIBRARIES}
    jobs = []
    for name, field in fields.items():
        library = env.libraries.get(name)
        if library is None:
            found[field] = _no_library(env, name)
            continue
        known = env.hashed.get(library.real)
        if known:
            found[field] = known
        else:
            jobs.append((field, library.path))
    deadline = time.monotonic() + CONTENT_SECONDS
    for (field, _), result in zip(jobs, _hash_all(env, [(path, "sha256", 0) for _, path in jobs], deadline)):
        found[field] = result.digest.hex() if isinstance(result.digest, bytes) else Unknown(result.problem)
    return found


# ---- level deep: what a real import of torch maps ----------------------------------------------------------------

# Compared with what was read without importing: field -> what the running torch calls it.
RUNNING = {
    "torch.version": "version",
    "torch.git-version": "git",
    "torch.cuda": "cuda",
    "torch.debug": "debug",
    "torch.cxx11-abi": "abi",
    "torch.arch-list": "arch",
}
MAPPED = {  # beside LIBRARIES
    "libgomp": "libgomp",
    "libiomp": "libiomp5",
    "libomp": "libomp",
    "mkl": "libmkl_core",
    "mkl-rt": "libmkl_rt",
    "openblas": "libopenblas",
    "libcuda": "libcuda",
}
_IMPORT = """
import sys
sys.path[:] = [p for p in sys.path if p]
import torch, json, os
def tell(ask):
    try:
        return ask()
    except Exception as error:
        return {"problem": type(error).__name__ + ": " + str(error)[:300]}
found = {
    "version": tell(lambda: str(torch.__version__)),
    "git": tell(lambda: torch.version.git_version),
    "cuda": tell(lambda: torch.version.cuda),
    "debug": tell(lambda: torch.version.debug),
    "abi": tell(lambda: bool(torch._C._GLIBCXX_USE_CXX11_ABI)),
    "arch": tell(lambda: torch._C._cuda_getArchFlags() if hasattr(torch._C, "_cuda_getArchFlags") else None),
    "cpu": tell(lambda: torch.backends.cpu.get_cpu_capability()),
    "config": tell(lambda: torch.__config__.show()),
    "mapped": tell(lambda: sorted({line.split(None, 5)[5].rstrip() for line in
        open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") if ".so" in line})),
}
sys.stdout.flush()
os.write(1, (chr(10) + "hpcenv-torch " + json.dumps(found) + chr(10)).encode())
os._exit(0)
"""


def probe_import(env: Environment) -> Found:
    """Import torch for real, in a child that has this environment, and look at what is mapped then."""
    if env.values.get("torch.version") == "absent":
        found: Found = {field: [] for field in LOADED_FIELDS}
        return {**found, **dict.fromkeys(("torch.config-digest", "torch.cpu-capability"), "absent")}
    running = _import_torch(env)
    if isinstance(running, Unknown):
        return dict.fromkeys(LOADED_FIELDS + RUNNING_FIELDS, running)
    found = {"torch.running-differs": _running_differs(env, running)}
    for field, name in (("torch.cpu-capability", "cpu"), ("torch.config-digest", "config")):
        told = running.get(name)
        if not isinstance(told, str):
            found[field] = Unknown(_clean(str(told)))
        else:
            found[field] = _config_digest(told) if name == "config" else _clean(told)
    mapped = running.get("mapped")
    if not isinstance(mapped, list):
        return {**found, **dict.fromkeys(LOADED_FIELDS, Unknown("/proc/self/maps: " + _clean(str(mapped))))}
    return {**found, **_loaded(env, [str(path) for path in mapped])}


def _import_torch(env: Environment) -> dict[str, Any] | Unknown:
    import json
    import subprocess

    _start_child(env, "import", ["-c", _IMPORT], own_path=False)
    child = env.children["import"]
    if isinstance(child, Unknown):
        return child
    try:
        output, errors = child.communicate(timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return Unknown(f"import torch took longer than {IMPORT_SECONDS:g} s")
    mark = b"\nhpcenv-torch "
    if mark not in output:
        said = errors.decode("utf-8", "replace").strip().splitlines()
        return Unknown(f"import torch ended with status {child.returncode}: {_clean(said[-1])[:300] if said else ''}")
    answer: dict[str, Any] = json.loads(output.rsplit(mark, 1)[1].split(b"\n")[0])
    return answer


def _config_digest(text: str) -> str:
    """sha256 of torch.__config__.show() without the line that names this machine's CPU."""
    import hashlib

    lines = [line for line in text.splitlines() if "CPU capability usage" not in line]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _running_differs(env: Environment, running: dict[str, Any]) -> list[str]:
    """Fields in which the running torch is not what its files say; a field that was not read is not compared."""
    differs = []
    for field, name in RUNNING.items():
        told = running.get(name)
        if field not in env.values or isinstance(told, dict):
            continue
        now: Value = str(told).split(" ") if field == "torch.arch-list" and told else _torch_word(told)
        if now != env.values[field]:
            differs.append(f"{field}: {_clean(str(env.values[field]))} in its files, {_clean(str(now))} when it runs")
    return differs


def _loaded(env: Environment, mapped: list[str]) -> Found:
    """Which file each library really is, several where a process holds several copies."""
    found: Found = {}
    differs = []
    stems = {**{name: stem for name, (stem, _, _) in LIBRARIES.items()}, **MAPPED}
    for name, stem in stems.items():
        paths = [path for path in mapped if _has_stem(stem, os.path.basename(path))]
        system = {path for library in env.libraries.values() if library.system for path in (library.path,)}
        places = sorted(_origin(env, os.path.normpath(path), path in system) for path in paths)
        found["loaded." + name] = list(dict.fromkeys(places))
        expected = env.libraries.get(name)
        if name in LIBRARIES and (paths or name in env.at_import):
            wanted = expected.real if expected else "nothing"
            if wanted not in {os.path.realpath(path) for path in paths}:
                differs.append(f"{name}: {', '.join(places) or 'nothing'} mapped, {_shown_library(env, name)} expected")
    found["loaded.differs"] = differs
    return found


def _shown_library(env: Environment, name: str) -> str:
    library = env.libraries.get(name)
    return _origin(env, library.path, library.system) if library else "nothing"


# ---- packages: names, versions, RECORD digests ---------------------------------------------------------------


def probe_packages(env: Environment) -> Found:
    first: dict[str, Dist] = {}
    env.shadowed = []
    for site in env.sites:
        for folder in _metadata_folders(site.path):
            dist = _read_dist(env, site, folder)
            if first.setdefault(dist.name, dist) is not dist:
                env.shadowed.append(dist)
    env.dists = [first[name] for name in sorted(first)]
    _walk_unrecorded(env)
    # Only a RECORD that the digest covers may vouch for a file; all others are for the unlisted digest.
    env.listed = {file for dist in env.dists if dist.record for file in dist.listed}
    lines = [_dist_line(d, d.record) for d in env.dists]
    return {"packages.count": len(env.dists), "packages.env-digest": "sha256:" + _digest("hpcenv-env-v1", lines)}


def _dist_line(dist: Dist, digest: str | None) -> str:
    return "\0".join((dist.name, dist.version, digest or "unknown"))


def _metadata_folders(path: str) -> list[str]:
    if path.endswith(".egg"):
        return [n for n in _names(path) if n == "EGG-INFO"]
    return sorted(n for n in _names(path) if n.endswith((".dist-info", ".egg-info")) and n[0] != "~")


def _read_dist(env: Environment, site: Site, folder: str) -> Dist:
    """One dist; whatever is wrong with it becomes a reason, and its digest is unknown."""
    dist = Dist(site, folder)
    for part in (_read_identity, _read_record, _read_origin):
        try:
            part(env, dist)
        except Exception as error:  # noqa: BLE001 - csv.Error among them; one bad dist must not hide the others
            dist.reasons.append(part.__name__.split("_")[-1] + ": " + _reason(error))
            if part is _read_record and isinstance(error, FileNotFoundError):
                dist.no_record = dist.reasons[-1]
    dist.record = None if dist.reasons else dist.plain_digest or _record_digest(dist.rows)
    return dist


def _read_identity(env: Environment, dist: Dist) -> None:
    """Name, version and installer; from the folder's name when METADATA cannot say."""
    info = os.path.join(dist.site.path, dist.folder)
    stem = dist.folder.rsplit(".", 1)[0].split("-")
    dist.name, dist.version = _normal_name(_clean(stem[0])), _clean(stem[1] if len(stem) > 1 else "")
    try:
        lines = _read_metadata(env, dist, os.path.join(info, "INSTALLER"))[:200].split(b"\n")
        dist.installer = _clean(lines[0].decode("utf-8", "surrogateescape").strip()) or None
    except (OSError, ValueError):
        dist.installer = None  # informative only
    try:
        name = "METADATA" if dist.folder.endswith(".dist-info") else "PKG-INFO"
        head = _head(_read_metadata(env, dist, os.path.join(info, name)))
    except NotADirectoryError:
        head = _head(_read_metadata(env, dist, info))  # an egg-info may be one file
    if not head.get("name") or not head.get("version"):
        raise ValueError("no Name and Version in the metadata")
    if len(head["name"]) > 255 or len(head["version"]) > 255:
        raise ValueError("a name or version of more than 255 characters")
    dist.name, dist.version = _normal_name(_clean(head["name"])), _normal_version(_clean(head["version"]))


def _head(data: bytes) -> dict[str, str]:
    """The header block of METADATA; the email package would cost 20 ms to import."""
    found: dict[str, str] = {}
    # A description of any length may follow.
    header = data.partition(b"\n\n")[0]
    for line in header.decode("utf-8", "surrogateescape").splitlines():
        if not line.strip():
            break
        key, colon, value = line.partition(":")
        if colon and key[:1].strip():  # a line that starts with space continues another
            found.setdefault(key.lower(), value.strip())
    return found


def _normal_name(name: str) -> str:
    import re

    return re.sub(r"[-_.]+", "-", name).lower()


def _normal_version(version: str) -> str:
    """PEP 440's normal form; a version that is none stays as it is."""
    import re

    match = re.match(
        r"v?(?:([0-9]+)!)?([0-9]+(?:\.[0-9]+)*)"
        r"(?:[-_.]?(alpha|a|beta|b|preview|pre|c|rc)[-_.]?([0-9]*))?"
        r"(?:-([0-9]+)|[-_.]?(post|rev|r)[-_.]?([0-9]*))?"
        r"(?:[-_.]?(dev)[-_.]?([0-9]*))?"
        r"(?:\+([a-z0-9]+(?:[-_.][a-z0-9]+)*))?$",
        version.strip().lower(),
    )
    if not match:
        return version
    epoch, release, pre, pre_number, bare_post, post, post_number, dev, dev_number, local = match.groups()

    def number(digits: str | None) -> str:
        return (digits or "").lstrip("0") or "0"  # not int(): it refuses absurdly long digits

    text = number(epoch) + "!" if number(epoch) != "0" else ""
    text += ".".join(number(part) for part in release.split("."))
    if pre:
        short = {"alpha": "a", "beta": "b", "c": "rc", "pre": "rc", "preview": "rc"}
        text += short.get(pre, pre) + number(pre_number)
    if bare_post or post:
        text += ".post" + number(bare_post or post_number)
    if dev:
        text += ".dev" + number(dev_number)
    if local:
        text += "+" + ".".join(number(p) if p.isdigit() else p for p in re.split(r"[-_.]", local))
    return text


def _read_record(env: Environment, dist: Dist) -> None:
    if not dist.folder.endswith(".dist-info"):
        dist.no_record = "no RECORD: installed as egg-info (by a system package, setup.py or develop)"
        dist.reasons.append(dist.no_record)
        return
    path = os.path.join(dist.site.path, dist.folder, "RECORD")
    data = _read_metadata(env, dist, path, RECORD_BYTES)
    if env.level == "record" and _read_plain_record(dist, data):
        return
    rows: list[Row] = []
    for raw, claim, size in _cells(data.decode("utf-8", "surrogateescape")):
        row = _counted(dist, raw, claim, size, dist.listed)
        if row is not None:
            rows.append(row)
    dist.rows = rows


def _counted(dist: Dist, raw: str, claim: str, size: str, listed: list[str]) -> Row | None:
    """Step 1 of the digest for one row: the row if it counts, its file into ``listed`` if it vouches for one."""
    if raw.endswith(".pyc") and "__pycache__/" in raw:
        return None  # half of all rows; neither hashed nor looked for
    row = _row(dist.site, raw, claim, size)
    if row.file is not None and claim:  # a row without a hash vouches for nothing: its file is unlisted
        listed.append(row.file)
    if raw.endswith(".pyc") or "__pycache__" in raw.split("/"):
        return None
    folder, _, name = row.path.rpartition("/")
    return None if folder == dist.folder and name in UNHASHED_METADATA else row


def _read_plain_record(dist: Dist, data: bytes) -> bool:
    """Steps 1 to 3 for a RECORD in plain ASCII, most lines of it taken as they are: several times as fast as by row.

    False, and nothing is changed, if it holds anything that needs csv or is an error. No rows are kept: below level
    full nobody opens the files.
    """
    if not data.isascii() or b'"' in data or b"\0" in data:
        return False
    end = b"\r\n" if b"\r\n" in data else b"\n"  # pip writes the one, uv the other
    breaks = data.count(end)
    if data.count(b"\n") != breaks or data.count(b"\r") != breaks * (len(end) - 1) or breaks >= RECORD_ROWS:
        return False
    # The separators of the digest in place of the commas.
    lines = data.decode("ascii").replace(",", "\0").split(end.decode("ascii"))
    if len(max(lines, key=len)) >= CSV_CELL:
        return False
    counted: list[str] = []
    listed: list[str] = []
    base, metadata = dist.site.path + "/", dist.folder + "/"
    for line in lines:
        cells = line.split("\0")
        path = cells[0]
        if len(cells) != 3 or not path:
            if line:
                return False
        elif (
            "__pycache__" in path
            or "/." in path
            or "//" in path
            or path[0] in "./"
            or not cells[1]
            or path.endswith(".pyc")
            or path.startswith(metadata)
        ):
            row = _counted(dist, path, cells[1], cells[2], listed)
            if row is not None and not row.script:
                counted.append("\0".join((row.path, row.claim, row.size)))
        else:
            listed.append(base + path)
            counted.append(line)
    dist.listed = listed
    dist.plain_digest = _digest("", list(dict.fromkeys(counted)))
    return True


def _cells(text: str) -> Iterator[list[str]]:
    import csv
    import io

    if "\0" in text:
        raise ValueError("it holds a NUL byte")
    quoted = '"' in text  # without a quote no cell can hold a line break
    for number, cells in enumerate(csv.reader(io.StringIO(text, newline="")), 1):
        if number > RECORD_ROWS:
            raise ValueError(f"more than {RECORD_ROWS} rows")
        if len(cells) > 3 or (quoted and any("\n" in cell or "\r" in cell for cell in cells)):
            # A line break in a cell could imitate another line of the digest.
            raise ValueError(f"row {number} is not path, hash, size")
        if cells and cells[0]:
            yield cells if len(cells) == 3 else (cells + ["", ""])[:3]


def _row(site: Site, raw: str, claim: str, size: str) -> Row:
    """Step 2 of the digest: where a row's file is, and the path that does not depend on the place."""
    if raw[0] not in "./" and "/." not in raw and "//" not in raw:  # 99 of 100 rows
        return Row(raw, claim, size, site.path + "/" + raw, False)
    file = os.path.normpath(os.path.join(site.path, raw))
    if _below(file, site.path):
        return Row(os.path.relpath(file, site.path), claim, size, file, False)
    inside = _below(file, site.base)
    if raw.startswith("/"):
        rest = os.path.relpath(file, site.base) if inside else raw
    else:
        rest = os.path.normpath(raw)
        while rest.startswith("../"):
            rest = rest[3:]
    if rest.startswith("bin/"):
        return Row("{scripts}/" + rest[4:], claim, size, file if inside else None, True)
    if not inside:
        return Row("{outside}/" + raw, claim, size, None, False)
    return Row(_headers(rest), claim, size, file, False)


def _headers(rest: str) -> str:
    import re

    match = re.match(r"include/(?:site/)?python[0-9][^/]*/", rest)
    return "{headers}/" + rest[match.end() :] if match else "{data}/" + rest


def _record_digest(rows: list[Row], claims: dict[int, str] | None = None) -> str:
    """Step 3, or with the found hashes by row index, step 4."""
    found = claims or {}
    lines = set()
    for index, row in enumerate(rows):
        if not row.script or index in found:
            lines.add("\0".join((row.path, found.get(index, row.claim), row.size)))
    return _digest("", list(lines))


def _digest(tag: str, lines: list[str]) -> str:
    import hashlib

    text = "\n".join(sorted(lines))
    if text.isascii():
        data = text.encode("ascii")
    else:  # undecodable bytes sort elsewhere than the characters that stand for them
        data = b"\n".join(sorted(line.encode("utf-8", "surrogateescape") for line in lines))
    return hashlib.sha256((tag + "\n").encode() + data if tag else data).hexdigest()


# ---- packages: where they came from ------------------------------------------------------------------------------


def _read_origin(env: Environment, dist: Dist) -> None:
    """Source, direct URL (PEP 610), build and tags; an editable install has no digest (PEP 610 lists its .pth)."""
    info = os.path.join(dist.site.path, dist.folder)
    wheel = {}
    try:
        wheel = _all_values(_read_metadata(env, dist, os.path.join(info, "WHEEL")))
    except (OSError, ValueError):
        pass  # an egg-info, or dist-info that a system package cut down
    dist.build = " ".join(wheel.get("build", [])[:1])
    dist.tags = sorted(set(wheel.get("tag", [])))[:100]
    dist.source = "wheel" if wheel.get("wheel-version") else "unknown"
    if dist.installer == "conda":
        dist.source = "conda"
    elif os.path.isfile(os.path.join(info, "installed-files.txt")):
        dist.source = "sdist"  # pip wrote it for setup.py install, its way without wheels
    try:
        data = _read_metadata(env, dist, os.path.join(info, "direct_url.json"))
    except (FileNotFoundError, NotADirectoryError):
        return
    _read_direct_url(env, dist, data)


def _all_values(data: bytes) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in data.decode("utf-8", "surrogateescape").splitlines()[:1000]:
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip().lower(), []).append(_clean(value.strip())[:255])
    return found


def _read_direct_url(env: Environment, dist: Dist, data: bytes) -> None:
    import json

    origin = json.loads(data)
    url = str(origin.get("url", "?"))
    shown = _clean(_safe_url(url))[:2000]
    direct: dict[str, Any] = {"url": shown}
    if "vcs_info" in origin:
        dist.source = "vcs"
        direct["commit-id"] = _clean(str(origin["vcs_info"].get("commit_id", "")))[:255]
    elif "archive_info" in origin:
        dist.source = "wheel" if _url_path(url).endswith(".whl") else "archive"
        digest = _archive_hash(origin["archive_info"])
        if digest:
            direct["hash"] = digest
    else:
        dist.source = "directory"
    dist.direct_url = direct
    if origin.get("dir_info", {}).get("editable") is True:
        dist.source = "editable"
        direct["editable"] = True
        dist.reasons.append("editable install of " + shown)
        if url.startswith("file:"):
            _read_source(env, dist, os.path.normpath(_url_path(url)))


def _archive_hash(info: dict[str, Any]) -> str:
    hashes = info.get("hashes")
    if isinstance(hashes, dict) and hashes:
        algorithm = "sha256" if "sha256" in hashes else sorted(map(str, hashes))[0]
        return _clean(f"{algorithm}={hashes[algorithm]}")[:255]
    return _clean(str(info.get("hash") or ""))[:255]


def _safe_url(url: str) -> str:
    """Without user, password and query; of a file: URL only the last part: the rest is a place on one machine."""
    scheme, colon, rest = url.partition(":")
    rest = rest.partition("?")[0].partition("#")[0]
    if scheme == "file":
        return "file:" + rest.rstrip("/").rpartition("/")[2]
    if not colon or not rest.startswith("//"):
        return "?"
    host, slash, path = rest[2:].partition("/")
    return scheme + "://" + host.rpartition("@")[2] + slash + path


def _url_path(url: str) -> str:
    from urllib.parse import unquote

    rest = url.partition(":")[2].partition("?")[0].partition("#")[0]
    return unquote("/" + rest[2:].partition("/")[2] if rest.startswith("//") else rest)


def _read_source(env: Environment, dist: Dist, folder: str) -> None:
    """The code that an editable install runs: by git, or by its files where git does not tell all."""
    dist.git = _git_state(env, folder)
    if "dirty" in dist.git:
        return
    try:
        deadline = _source_deadline(env)
        files = _modules(env, folder, deadline)
        dist.files = {"sha256": _source_digest(env, "hpcenv-files-v1", folder, files, deadline)}
    except (OSError, ValueError) as error:
        dist.files = {"reason": _reason(error)}


def _source_deadline(env: Environment) -> float:
    env.source_deadline = env.source_deadline or time.monotonic() + SOURCE_SECONDS
    return env.source_deadline


def _git_state(env: Environment, folder: str) -> dict[str, Any]:
    """Commit of the working tree that an editable install runs, whether it is changed, and a digest of how."""
    import subprocess

    top = folder
    while not os.path.exists(os.path.join(top, ".git")):
        if top == os.path.dirname(top) or not top.startswith("/"):
            return {"reason": "no .git above its folder"}
        top = os.path.dirname(top)
    found: dict[str, Any] = {}
    step = "its commit is unknown: "
    try:
        found["commit"] = _git_commit(env, os.path.join(top, ".git"))
        step = "whether it is changed is unknown: "
        status, tracked = _ask_git(env, top)
        found["dirty"] = bool(status)
        step = "what differs from its commit is unknown: "
        found["diff-sha256"] = _diff_digest(env, top, folder, status, tracked)
    except subprocess.TimeoutExpired:
        found["reason"] = f"{step}git took longer than {GIT_SECONDS:g} s"
    except (OSError, ValueError, IndexError) as error:
        found["reason"] = step + (str(error) if isinstance(error, GitRefused) else _reason(error))
    return found


def _git_commit(env: Environment, git: str) -> str:
    """Read HEAD without running git: gitrepository-layout(5)."""
    import re

    common = git
    if os.path.isfile(git):  # a worktree or submodule: 'gitdir: PATH'
        pointer = os.fsdecode(_read_small(env, git)[0]).partition("gitdir:")[2].strip()
        common = git = os.path.normpath(os.path.join(os.path.dirname(git), pointer))
        if os.path.isfile(git + "/commondir"):
            common = os.path.join(git, os.fsdecode(_read_small(env, git + "/commondir")[0]).strip())
    head = os.fsdecode(_read_small(env, git + "/HEAD")[0]).strip()
    for _ in range(5):
        if not head.startswith("ref:"):
            break
        name = head[4:].strip()
        if not re.match(r"refs/[^\0]+$", name) or ".." in name.split("/"):
            raise ValueError("HEAD names no branch")
        head = _git_reference(env, git, common, name)
    if not re.match(r"[0-9a-f]{40}([0-9a-f]{24})?$", head):
        raise ValueError("HEAD leads to no commit")
    return head


def _git_reference(env: Environment, git: str, common: str, name: str) -> str:
    for place in (git, common):
        if os.path.isfile(os.path.join(place, name)):
            return os.fsdecode(_read_small(env, os.path.join(place, name))[0]).strip()
    packed = os.fsdecode(_read_small(env, os.path.join(common, "packed-refs"), RECORD_BYTES)[0])
    found = [line.split(" ", 1)[0] for line in packed.splitlines() if line.endswith(" " + name)]
    if not found:
        raise ValueError("no commit yet, or a reference format that is not known here")
    return found[0]


class GitRefused(ValueError):
    """git is not there, or does not answer; the message says why."""


def _ask_git(env: Environment, top: str) -> tuple[bytes, bytes]:
    """What differs from the commit (git-status(1), porcelain) and what is tracked (git-ls-files(1)), once for a tree."""
    if top not in env.trees:
        deadline = time.monotonic() + GIT_SECONDS
        status = ("status", "--porcelain", "-z", "--untracked-files=normal", "--ignore-submodules=all")
        try:
            env.trees[top] = _run_git(top, deadline, *status), _run_git(top, deadline, "ls-files", "-z", "-v")
        except Exception as error:  # noqa: BLE001 - the next package of this tree need not wait for it again
            env.trees[top] = error
    said = env.trees[top]
    if isinstance(said, Exception):
        raise said
    return said


def _run_git(top: str, deadline: float, *words: str) -> bytes:
    import shutil
    import subprocess

    git = shutil.which("git")
    if git is None:
        raise GitRefused("no git here")
    variables = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    variables.update(GIT_OPTIONAL_LOCKS="0", GIT_TERMINAL_PROMPT="0", LC_ALL="C")
    # A repository's own configuration could name programs to run.
    quiet = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "submodule.recurse=false"]
    done = subprocess.run(
        [git, "-C", top, *quiet, *words],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=max(0.0, deadline - time.monotonic()),
        check=False,
    )
    if done.returncode != 0:
        raise GitRefused(_clean(done.stderr.decode("utf-8", "replace").strip())[:200])
    return done.stdout


def _diff_digest(env: Environment, top: str, folder: str, status: bytes, tracked: bytes) -> str:
    """Digest ``hpcenv-diff-v1`` of a working tree. Not git's own diff: its text depends on version and settings."""
    deadline = _source_deadline(env)
    known, unwatched = _tracked(tracked)
    differing = {path for path in _changed(status) if not path.endswith(".lock.toml")}
    differing.update(path for path in unwatched if os.path.lexists(top + "/" + path))
    start = len(top.rstrip("/")) + 1
    differing.update(path[start:] for path in _modules(env, folder, deadline) if path[start:] not in known)
    if not differing:
        return "none"
    return _source_digest(env, "hpcenv-diff-v1", top, [top + "/" + path for path in sorted(differing)], deadline)


def _changed(status: bytes) -> Iterator[str]:
    """The tracked files among what git calls changed; a renamed one also has its old name."""
    entries = iter(status.split(b"\0"))
    for entry in entries:
        if len(entry) < 4 or entry[:2] == b"??":
            continue
        yield os.fsdecode(entry[3:])
        if b"R" in entry[:2] or b"C" in entry[:2]:
            yield os.fsdecode(next(entries, b""))


def _tracked(listed: bytes) -> tuple[set[str], set[str]]:
    """All tracked files, and those whose changes git was told not to look for."""
    known = set()
    unwatched = set()
    for entry in listed.split(b"\0"):
        tag, _, name = entry.partition(b" ")
        path = os.fsdecode(name)
        known.add(path)
        if tag.islower() or tag == b"S":  # assume-unchanged, skip-worktree
            unwatched.add(path)
    return known - unwatched, unwatched


def _modules(env: Environment, folder: str, deadline: float) -> list[str]:
    """The importable files of an editable install's tree."""
    found: list[str] = []
    seen: set[str] = set()
    stack = [folder, *(path for path in env.path if _below(path, folder))]
    count = 0
    while stack:
        place = stack.pop()
        if place in seen:
            continue
        seen.add(place)
        if time.monotonic() > deadline:
            raise TimeoutError(f"reading the editable installs took longer than {SOURCE_SECONDS:g} s")
        folders, names = _listing(place, SOURCE_ENTRIES - count)
        count += len(folders) + len(names)
        if place != folder and _is_apart(env, place, names):
            continue
        stack += [place + "/" + name for name in folders if name.isidentifier() and name != "__pycache__"]
        for name in names:
            lone = name.endswith(".pyc") and name[:-1] not in names
            if lone or name.endswith(IMPORTABLE) or ".so." in name:
                found.append(place + "/" + name)
    return found


def _listing(folder: str, limit: int) -> tuple[list[str], set[str]]:
    """Folders and other names in a folder; nothing where Python could not look either."""
    folders = []
    names = set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                else:
                    names.add(entry.name)
                if len(folders) + len(names) > limit:
                    raise ValueError(f"more than {SOURCE_ENTRIES} files and folders below its folder")
    except (PermissionError, FileNotFoundError, NotADirectoryError):
        return [], set()
    return folders, names


def _is_apart(env: Environment, folder: str, names: set[str]) -> bool:
    """Whether a folder in the tree is an environment, or what hpcenv keeps of a run: both change without the code."""
    return folder == env.prefix or "pyvenv.cfg" in names or {"manifest.json", "lock.toml"} <= names


def _source_digest(env: Environment, tag: str, top: str, files: list[str], deadline: float) -> str:
    if len(files) > SOURCE_FILES:
        raise ValueError(f"more than {SOURCE_FILES} files to hash")
    sizes = [_size_on_disk(file) for file in files]
    if sum(sizes) > SOURCE_BYTES:
        raise ValueError(f"more than {SOURCE_BYTES >> 30} GiB to hash")
    lines = []
    jobs = [(file, "sha256", size) for file, size in zip(files, sizes)]
    for file, result in zip(files, _hash_all(env, jobs, deadline)):
        shown = file[len(top.rstrip("/")) + 1 :]
        if result.digest is None:
            raise ValueError(f"{_clean(shown)}: {result.problem}")
        target = "\0" + os.readlink(file) if os.path.islink(file) else ""
        lines.append(shown + "\0" + result.word() + target)
    return _digest(tag, lines)


def _size_on_disk(file: str) -> int:
    try:
        return os.stat(file).st_size
    except OSError:
        return 0  # removed: that is what differs


# ---- packages without a RECORD: Debian's, and other systems' ------------------------------------------------------


def _walk_unrecorded(env: Environment) -> None:
    """Give a dist that a system package manager installed a digest over its files (kind ``walk``)."""
    debian = [d for d in env.dists or () if os.path.basename(d.site.path) == "dist-packages"]
    owners = _dpkg_files(env, [d for d in debian if d.no_record or d.installer in (None, "debian")])
    for dist in env.dists or ():
        files = owners.get(id(dist))
        if files is not None:
            dist.source = "dpkg"
        elif dist.no_record:
            files = _installed_files(env, dist)
        if files is None or not dist.no_record or dist.direct_url:
            continue
        try:
            _walk(env, dist, sorted(files))
        except (OSError, ValueError) as error:
            dist.reasons.append("walk: " + _reason(error))


def _dpkg_files(env: Environment, dists: list[Dist]) -> dict[int, set[str]]:
    """The files of the Debian packages that own these dists, from dpkg's lists."""
    folder = SYSTEM_ROOT + "var/lib/dpkg/info"
    lists = sorted((n for n in _names(folder) if n.endswith(".list")), key=lambda n: not n.startswith("python"))
    wanted = {os.path.join(d.site.path, d.folder): d for d in dists}
    found: dict[int, set[str]] = {}
    deadline = time.monotonic() + DPKG_SECONDS
    for name in lists:
        if len(found) == len(wanted) or time.monotonic() > deadline:
            break
        try:
            data = _read_small(env, os.path.join(folder, name), SYSTEM_BYTES)[0]
        except (OSError, ValueError):
            continue
        if b"-packages/" not in data:
            continue
        paths = set(os.fsdecode(data).split("\n"))
        for place in wanted.keys() & paths:
            found[id(wanted[place])] = paths
    return found


def _installed_files(env: Environment, dist: Dist) -> set[str] | None:
    """What setup.py install listed; its paths are relative to the egg-info."""
    info = os.path.join(dist.site.path, dist.folder)
    try:
        text = os.fsdecode(_read_metadata(env, dist, info + "/installed-files.txt", RECORD_BYTES))
    except (OSError, ValueError):
        return None
    return {os.path.normpath(os.path.join(info, line)) for line in text.splitlines() if line}


def _walk(env: Environment, dist: Dist, files: list[str]) -> None:
    """Digest ``hpcenv-walk-v1``: lines ``path NUL sha256`` of the files below the site directory."""
    skipped = {dist.folder + "/" + name for name in UNHASHED_METADATA}
    inner = [f for f in files if _below(f, dist.site.path) and not f.endswith(".pyc")]
    jobs = [f for f in inner if f[len(dist.site.path) + 1 :] not in skipped and not os.path.isdir(f)]
    if not jobs:
        return
    lines = []
    results = _hash_all(env, [(f, "sha256", 0) for f in jobs], time.monotonic() + SCAN_SECONDS)
    for file, result in zip(jobs, results):
        if result.digest is None:
            raise ValueError(f"{_clean(file)}: {result.problem}")
        dist.linked_outside += result.outside
        lines.append(file[len(dist.site.path) + 1 :] + "\0" + result.word())
    dist.listed = jobs
    dist.reasons.remove(dist.no_record)
    if not dist.reasons:
        dist.record = dist.content = _digest("hpcenv-walk-v1", lines)
        dist.kind = "walk"


# ---- conda -----------------------------------------------------------------------------------------------------------


def probe_conda(env: Environment) -> Found:
    """What conda installed, Python or not (MKL, CUDA): its own records in conda-meta."""
    packages: dict[str, dict[str, str]] = {}
    for root in dict.fromkeys((env.prefix, env.base_prefix)):
        for name in sorted(n for n in env.names(root + "/conda-meta") if n.endswith(".json")):
            entry = _conda_entry(_read_small(env, f"{root}/conda-meta/{name}", CONDA_BYTES)[0])
            packages.setdefault(entry["name"], entry)
    env.conda = [packages[name] for name in sorted(packages)]
    if not env.conda:
        return {"packages.conda-count": 0, "packages.conda-digest": "none"}
    lines = ["\0".join(e[k] for k in ("name", "version", "build", "hash", "channel")) for e in env.conda]
    digest = "sha256:" + _digest("hpcenv-conda-v1", lines)
    return {"packages.conda-count": len(env.conda), "packages.conda-digest": digest}


def _conda_entry(data: bytes) -> dict[str, str]:
    """Name, version, build, hash and channel name; of a URL no host is kept, it may be a mirror or hold a token."""
    import json

    record = json.loads(data)

    def text(key: str) -> str:
        return _clean(str(record.get(key) or ""))[:255]

    if not text("name") or not text("version"):
        raise ValueError("a record in conda-meta without name or version")
    digest = "sha256=" + text("sha256") if text("sha256") else "md5=" + text("md5") if text("md5") else ""
    parts = [p for p in (text("channel") or text("url")).partition("?")[0].split("/") if p]
    if parts and parts[-1].endswith((".conda", ".bz2")):
        parts.pop()
    if parts and (parts[-1] == "noarch" or parts[-1].startswith(("linux-", "osx-", "win-"))):
        parts.pop()
    channel = parts[-1] if parts else ""
    return {
        "name": text("name"),
        "version": text("version"),
        "build": text("build") or text("build_string"),
        "hash": digest,
        "channel": channel.rpartition("@")[2],
    }


# ---- what runs before the training does ----------------------------------------------------------------------------


def probe_startup(env: Environment) -> Found:
    """Files whose code Python runs at every start: .pth of the site directories, sitecustomize, usercustomize."""
    import site

    folders = [os.path.normpath(p) for p in getattr(site, "getsitepackages", list)()]
    folders += [s.path for s in env.sites if s.scanned]
    files = []
    for folder in dict.fromkeys(f for f in folders if f in env.path):
        files += [folder + "/" + n for n in env.names(folder) if n.endswith(".pth")]
    for folder in dict.fromkeys(env.path):
        for name in env.names(folder):
            if name.split(".")[0] in ("sitecustomize", "usercustomize"):
                files += _module_files(folder + "/" + name)
    found = []
    for path in dict.fromkeys(files):
        result = _hash_file(env, path, "sha256", bytearray(1 << 16), time.monotonic() + SCAN_SECONDS)
        if result.digest is None:
            return {"python.startup-files": Unknown(f"{_clean(env.shown(path))}: {result.problem}")}
        if result.word() not in LAUNCHERS.get(os.path.basename(path), ()):
            found.append(_clean(env.shown(path)) + " " + result.word()[:16])
    return {"python.startup-files": sorted(found)}


def _module_files(path: str) -> list[str]:
    if os.path.isdir(path):
        return [path + "/__init__.py"] if os.path.isfile(path + "/__init__.py") else []
    return [path] if path.endswith((".py", ".pyc", ".so")) else []


def probe_pyc(env: Environment) -> Found:
    """Level full: compiled files that Python loads without a look at their source, and that are not of it.

    A pyc of the 'unchecked hash' kind (PEP 552) is loaded whatever its source says; here the hash of the source in
    its header is compared. Other kinds Python itself drops when their source changed. That a pyc's *code* is what
    its source compiles to is not checked: compiling 13,000 files takes a minute.
    """
    found = []
    deadline = time.monotonic() + SCAN_SECONDS
    tag = "." + (sys.implementation.cache_tag or "?")
    for site in env.sites:
        for folder, folders, files in os.walk(site.path) if site.scanned else ():
            if time.monotonic() > deadline:
                raise TimeoutError(f"looking for compiled files took longer than {SCAN_SECONDS:g} s")
            if os.path.basename(folder) != "__pycache__":
                continue
            folders[:] = []
            for name in files:
                stem, _, rest = name.partition(tag)
                source = os.path.dirname(folder) + "/" + stem + ".py"
                if rest in (".pyc", ".opt-1.pyc", ".opt-2.pyc") and _is_unbacked(env, folder + "/" + name, source):
                    found.append(_clean(env.shown(folder + "/" + name)))
    return {"python.unchecked-pyc": sorted(found)}


def _is_unbacked(env: Environment, path: str, source: str) -> bool:
    from importlib.util import source_hash

    try:
        descriptor, _ = _open_regular(env, path)
        with os.fdopen(descriptor, "rb") as file:
            head = file.read(16)
        if int.from_bytes(head[4:8], "little") != 1:  # not 'hash-based and not checked'
            return False
        data = _read_small(env, source, RECORD_BYTES)[0]
    except FileNotFoundError:
        return False  # without a source Python does not look into __pycache__
    return source_hash(data) != head[8:16]


# ---- packages: what the files really hold ----------------------------------------------------------------------


def probe_content(env: Environment) -> Found:
    """Level full: hash every listed file and compare it with its RECORD."""
    if env.dists is None:
        raise RuntimeError("the packages could not be read")
    deadline = time.monotonic() + CONTENT_SECONDS
    jobs = []
    owners = []
    for dist in env.dists:
        for index, row in enumerate(dist.rows):
            if row.claim and row.file is not None:
                jobs.append((row.file, row.claim.partition("=")[0], _size(row.size)))
                owners.append((dist, index))
    found: dict[int, dict[int, Hashed]] = {id(dist): {} for dist in env.dists}
    libraries = {os.path.realpath(library.path) for library in env.libraries.values()}
    names = {os.path.basename(path) for path in libraries}
    for (dist, index), (file, algorithm, _), result in zip(owners, jobs, _hash_all(env, jobs, deadline)):
        found[id(dist)][index] = result
        is_library = os.path.basename(file) in names and os.path.realpath(file) in libraries
        if is_library and algorithm == "sha256" and isinstance(result.digest, bytes):
            env.hashed[os.path.realpath(file)] = result.digest.hex()
    for dist in env.dists:
        if dist.rows:  # also of an editable install: its .pth runs code at every start
            _compare(dist, found[id(dist)])
    open_questions = [d.name for d in env.dists if d.record and not d.content]
    if open_questions:
        return {"packages.content-digest": Unknown("not all files could be read of " + ", ".join(open_questions[:10]))}
    lines = [_dist_line(d, d.content) for d in env.dists]
    return {"packages.content-digest": "sha256:" + _digest("hpcenv-env-v1", lines)}


def _size(text: str) -> int:
    try:
        return int(text[:18])
    except ValueError:
        return 0  # only the order of work depends on it


def _compare(dist: Dist, found: dict[int, Hashed]) -> None:
    """Fill in content digest and modified files of one dist."""
    claims: dict[int, str] = {}
    problems = []
    for index, row in enumerate(dist.rows):
        result = found.get(index)
        if result is None:
            if row.claim and not row.script:  # a script outside is dropped, any other file there is a question
                problems.append(f"{_clean(row.path)} lies outside of the environment and was not read")
            continue
        dist.linked_outside += result.outside
        if result.digest is None:
            problems.append(f"{_clean(row.path)}: {result.problem}")
        elif not _same(row.claim, result.digest):
            claims[index] = _claim(row.claim, result.digest)
    dist.modified_count = len(claims)
    rows = sorted(claims, key=lambda i: dist.rows[i].path)[:MODIFIED_SHOWN]
    dist.modified = [
        {"path": _clean(dist.rows[i].path), "locked": _clean(dist.rows[i].claim), "found": claims[i]} for i in rows
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        dist.reasons.append("content unknown: " + problems[0] + more)
    elif dist.record:
        dist.content = _record_digest(dist.rows, claims)


def _claim(listed: str, digest: bytes | str) -> str:
    from base64 import urlsafe_b64encode

    if isinstance(digest, str):
        return digest
    return listed.partition("=")[0] + "=" + urlsafe_b64encode(digest).rstrip(b"=").decode()


def _same(listed: str, digest: bytes | str) -> bool:
    """Whether a RECORD's claim is this digest; old tools wrote padding, the other alphabet, or hex."""
    if isinstance(digest, str):
        return False
    claim = _claim(listed, digest)
    if claim == listed:
        return True
    text = listed.partition("=")[2].rstrip("=")
    return text.replace("+", "-").replace("/", "_") == claim.partition("=")[2] or text.lower() == digest.hex()


class Hashed:
    """One hashed file: its digest, a word in its place (missing, not-a-file), or None and the problem."""

    __slots__ = ("digest", "outside", "problem")

    def __init__(self, digest: bytes | str | None, problem: str = "", outside: bool = False) -> None:
        self.digest = digest
        self.problem = problem
        self.outside = outside

    def word(self) -> str:
        return self.digest.hex() if isinstance(self.digest, bytes) else self.digest or "unknown"


def _hash_all(env: Environment, jobs: list[tuple[str, str, int]], deadline: float) -> list[Hashed]:
    """Hash (file, algorithm, expected size) in parallel; memory is one buffer per thread."""
    import threading
    from collections import deque

    results = [Hashed(None, "not reached")] * len(jobs)
    # Largest first, or one thread is left alone with libtorch_cuda.so at the end.
    queue = deque(sorted(range(len(jobs)), key=lambda i: -jobs[i][2]))

    def work() -> None:
        buffer = bytearray(1 << 20)
        while True:
            try:
                index = queue.popleft()
            except IndexError:
                return
            file, algorithm, _ = jobs[index]
            results[index] = _hash_file(env, file, algorithm, buffer, deadline)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(_thread_count())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _thread_count() -> int:
    try:
        processors = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        processors = os.cpu_count() or 1
    return max(4, min(16, processors))  # more than processors: reads from a shared file system wait


def _hash_file(env: Environment, file: str, algorithm: str, buffer: bytearray, deadline: float) -> Hashed:
    import hashlib

    if time.monotonic() > deadline:
        return Hashed(None, OUT_OF_TIME)
    try:
        # md5 is in old RECORDs; new() also knows what OpenSSL knows. An extendable hash has no length here.
        hasher = hashlib.sha256() if algorithm == "sha256" else hashlib.new(algorithm)
        if not hasher.digest_size:
            raise ValueError("no fixed length")
    except Exception as error:  # noqa: BLE001
        return Hashed(None, f"hash algorithm {_clean(algorithm)[:40]!r}: {_reason(error)}")
    try:
        descriptor, outside = _open_regular(env, file)
    except NotAFile:
        return Hashed("not-a-file")
    except (OSError, ValueError) as error:
        return _unopened(error)
    view = memoryview(buffer)
    try:
        while True:
            count = os.readv(descriptor, [buffer])
            if not count:
                return Hashed(hasher.digest(), outside=outside)
            hasher.update(view[:count])
            if count == len(buffer) and time.monotonic() > deadline:
                return Hashed(None, OUT_OF_TIME)
    except OSError as error:
        return Hashed(None, _reason(error))
    finally:
        os.close(descriptor)


def _unopened(error: Exception) -> Hashed:
    import errno

    # A loop of links or a name that is too long can be opened by nobody: not there, as far as Python goes.
    gone = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
    if isinstance(error, OSError) and error.errno in gone:
        return Hashed("missing")
    return Hashed(None, _reason(error))


# ---- packages: what no RECORD lists ------------------------------------------------------------------------------


def probe_unlisted(env: Environment) -> Found:
    """Importable files in the site directories that no RECORD lists."""
    if env.dists is None:
        raise RuntimeError("the packages could not be read")
    deadline = time.monotonic() + SCAN_SECONDS
    files: dict[str, str] = {}  # path -> what it is: 'file' or 'link'
    for site in env.sites:
        if site.scanned:
            _scan(env, site.path, files, deadline)
    for path in env.path:
        if os.path.isfile(path) and not _is_stdlib(path):
            files[path] = "file"  # a zip or egg on sys.path
    entries, problems = _describe(env, files, deadline)
    sites = {_clean(env.shown(site.path)) for site in env.sites}
    entries = [e for e in entries if not _is_launcher(e, sites)]
    env.unlisted = entries
    changed = {_clean(env.shown(path)): _changed_at(path) for path in files}
    paths = (entry["path"] for entry in entries)
    env.newest = sorted(paths, key=lambda path: (-changed[path], path))[:UNLISTED_NEWEST]
    if problems:
        why = Unknown(f"{len(problems)} files could not be read, among them {problems[0]}")
        return {"packages.unlisted-digest": why, "packages.unlisted-count": len(entries)}
    lines = [e["path"] + "\0" + e["sha256"] for e in entries]
    return {
        "packages.unlisted-digest": "sha256:" + _digest("hpcenv-unlisted-v1", lines),
        "packages.unlisted-count": len(entries),
    }


def _changed_at(path: str) -> int:
    """When a file came to be as it is; a copy keeps its mtime, not this."""
    try:
        return os.lstat(path).st_ctime_ns
    except OSError:
        return 0


def _is_launcher(entry: dict[str, str], sites: set[str]) -> bool:
    """Whether a file is what virtualenv or uv put into each environment: by its content, only in that place."""
    folder, _, name = entry["path"].rpartition("/")
    return folder in sites and "link" not in entry and entry["sha256"] in LAUNCHERS.get(name, ())


def _scan(env: Environment, top: str, files: dict[str, str], deadline: float) -> None:
    """Walk one site directory without a stat per file; the path of a file is as Python would import it."""
    listed = env.listed
    followed = {os.path.realpath(top)}
    stack = [top]
    while stack:
        folder = stack.pop()
        if time.monotonic() > deadline:
            raise TimeoutError(f"listing {top} took longer than {SCAN_SECONDS:g} s")
        names = set()
        lone = []
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if entry.is_dir(follow_symlinks=False):
                    if name != "__pycache__":
                        stack.append(folder + "/" + name)
                elif name.endswith(IMPORTABLE) or ".so." in name:
                    names.add(name)
                    if folder + "/" + name not in listed:
                        files[folder + "/" + name] = "file"
                elif name.endswith(".pyc"):
                    lone.append(name)
                elif entry.is_symlink() and os.path.isdir(entry.path):  # a link to itself is none
                    _follow(env, folder + "/" + name, followed, stack, files)
        for name in lone:
            # Beside its source it is a copy; without one it is a module of its own.
            if name[:-1] not in names and folder + "/" + name not in listed:
                files[folder + "/" + name] = "file"


def _follow(env: Environment, link: str, followed: set[str], stack: list[str], files: dict[str, str]) -> None:
    """Go behind a linked folder once; one that leads out, or in a circle, is itself the finding."""
    real = os.path.realpath(link)
    is_listed = env.lists_below(link)
    circle = _below(os.path.realpath(os.path.dirname(link)), real)
    if real not in followed and not circle and (is_listed or env.inside(real)):
        followed.add(real)
        stack.append(link)
    elif not is_listed:
        files[link] = "link"


def _describe(env: Environment, files: dict[str, str], deadline: float) -> tuple[list[dict[str, str]], list[str]]:
    import hashlib

    entries = []
    problems = []
    buffer = bytearray(1 << 20)
    for path, kind in files.items():
        entry = {"path": _clean(env.shown(path))}
        if os.path.islink(path) and not env.inside(os.path.realpath(path)):
            entry["link"] = _clean(os.path.realpath(path))
        if kind == "link":
            target = env.shown(os.path.realpath(path)).encode("utf-8", "surrogateescape")
            entry["sha256"] = hashlib.sha256(b"link\0" + target).hexdigest()
        else:
            result = _hash_file(env, path, "sha256", buffer, deadline)
            if result.digest is None:
                problems.append(f"{entry['path']}: {result.problem}")
            entry["sha256"] = result.word()
        entries.append(entry)
    entries.sort(key=lambda e: e["path"])
    return entries, problems


# ---- reading untrusted files ---------------------------------------------------------------------------------------


class NotAFile(ValueError):
    """A folder, device, socket or pipe where a file was expected."""


def _open_regular(env: Environment, path: str) -> tuple[int, bool]:
    """Open a regular file, never waiting on a pipe; also say whether links led out of the environment."""
    import errno
    import stat

    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    outside = not env.inside(os.path.dirname(path))
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise NotAFile("not a regular file") from None
        if error.errno != errno.ELOOP:
            raise
        outside = not env.inside(os.path.dirname(os.path.realpath(path)))
        descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFile("not a regular file")
    return descriptor, outside


def _read_small(env: Environment, path: str, limit: int = SMALL_FILE) -> tuple[bytes, bool]:
    descriptor, outside = _open_regular(env, path)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"larger than {limit} bytes")
    return data, outside


def _read_metadata(env: Environment, dist: Dist, path: str, limit: int = SMALL_FILE) -> bytes:
    data, outside = _read_small(env, path, limit)
    dist.linked_outside += outside
    return data


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _below(path: str, root: str) -> bool:
    return bool(root) and (path == root or path.startswith(root.rstrip("/") + "/"))


# ---- the answer ------------------------------------------------------------------------------------------------------


def _clean(text: str) -> str:
    """Text that every JSON reader takes: no lone surrogates, no control characters."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c >= " " and c != "\x7f" else f"\\x{ord(c):02x}" for c in text)


def _reason(error: BaseException) -> str:
    return _clean(f"{type(error).__name__}: {error}")[:500]


def _json(report: dict[str, Any]) -> str:
    import json

    return json.dumps(report, sort_keys=True)


def _plain_json(level: str, reason: str) -> str:
    """The report of last resort, for when even json cannot be imported."""
    quoted = '"' + "".join(c if " " <= c <= "~" and c not in '"\\' else "?" for c in reason) + '"'
    fields = sorted(f for _, names, _, levels in PROBES if level in levels for f in names)
    unknown = ", ".join(f'"{field}": {quoted}' for field in fields)
    return (
        f'{{"level": "{level}", "packages": [], "schema": {SCHEMA}, "seconds": {{}}, "shadowed": [], '
        f'"unknown": {{{unknown}}}, "unlisted": [], "values": {{}}}}'
    )


def _write_all(line: str) -> None:
    data = (line + "\n").encode("ascii")
    while data:
        data = data[os.write(1, data) :]


LIBRARY_FIELDS = tuple(
    f"libs.{name}.{part}"
    for name in LIBRARIES
    for part in ("version", "origin", "build-id")
    if part != "version" or (LIBRARIES[name][2] and name not in HEAVY)
)
HEAVY_FIELDS = tuple(f"libs.{name}.version" for name in HEAVY)
LOADED_FIELDS = (*(f"loaded.{name}" for name in (*LIBRARIES, *MAPPED)), "loaded.differs")
RUNNING_FIELDS = ("torch.running-differs", "torch.config-digest", "torch.cpu-capability")
_HASHING = ("full", "deep")

# Name, the fields that it must answer, the function, the levels. Order matters in four places: path finds
# the sites, torch says which CUDA to look for, libraries are started early and collected last, and the import
# is compared with all that was found before.
PROBES: tuple[tuple[str, tuple[str, ...], Callable[[Environment], Found], tuple[str, ...]], ...] = (
    (
        "python",
        ("python.version", "python.implementation", "python.soabi", "python.executable", "python.prefix"),
        probe_python,
        LEVELS,
    ),
    ("path", ("python.sys-path", "python.user-site", "python.path-variable"), probe_path, LEVELS),
    ("system", ("system.os-release", "system.glibc", "system.machine"), probe_system, LEVELS),
    ("packages", ("packages.count", "packages.env-digest"), probe_packages, LEVELS),
    ("torch", ("torch.version", "torch.git-version", "torch.cuda", "torch.debug"), probe_torch, LEVELS),
    ("libraries-start", (), start_libraries, LEVELS),
    ("torch-binary", ("torch.arch-list", "torch.cxx11-abi"), probe_torch_binary, LEVELS),
    ("unlisted", ("packages.unlisted-digest", "packages.unlisted-count"), probe_unlisted, LEVELS),
    ("startup", ("python.startup-files",), probe_startup, LEVELS),
    ("conda", ("packages.conda-count", "packages.conda-digest"), probe_conda, LEVELS),
    (
        "system-packages",
        ("system.packages-manager", "system.packages-count", "system.packages-digest"),
        probe_system_packages,
        LEVELS,
    ),
    ("content", ("packages.content-digest",), probe_content, _HASHING),
    ("stdlib", ("python.stdlib-sha256",), probe_stdlib, _HASHING),
    ("pyc", ("python.unchecked-pyc",), probe_pyc, _HASHING),
    ("libraries", (*LIBRARY_FIELDS, "libs.ld-library-path", "libs.ld-preload"), probe_libraries, LEVELS),
    (
        "library-files",
        (*HEAVY_FIELDS, *(f"libs.{name}.sha256" for name in LIBRARIES)),
        probe_library_files,
        _HASHING,
    ),
    ("import", (*LOADED_FIELDS, *RUNNING_FIELDS), probe_import, ("deep",)),
)


if __name__ == "__main__":
    import gc

    gc.disable()  # 27,000 rows make no garbage cycles, and looking for them takes a third of the time
    _status = main(sys.argv[1:])
    # Not sys.exit: exit handlers that a .pth or sitecustomize registered could print behind our line.
    os._exit(_status)
