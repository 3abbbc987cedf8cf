"""The environment that the corpus changes, and the ways to look at it.

One real environment is built and locked once in a session: a virtual environment with pip's
own packages and a handful of wheels that pip installs, among them a `torch` whose libraries
are real ELF files with the real names, versions and search paths. Each change gets a copy of
its own, made of hard links: whatever writes into one goes through `Case.write`, which takes
the link away first.

Nothing of hpcenv is patched. Fakes stand at process boundaries only: shared libraries for the
NVIDIA driver, an `apptainer` on PATH that runs the host's Python, a registry that speaks HTTP.
"""

from __future__ import annotations

import base64
import csv
import functools
import gzip
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import http_server
import image_fakes
from lock_world import lock_project
from packaging.tags import sys_tags

from hpcenv.api.environment import diff
from hpcenv.container.probe_source import probe_source
from hpcenv.errors import HpcenvError, LockfileStale
from hpcenv.facts.facts import gather
from hpcenv.judge import decide
from hpcenv.machine import gpus
from hpcenv.machine.this_node import ThisNode
from hpcenv.project.context import Context
from hpcenv.project.workspace import open_workspace
from hpcenv.records.facts import Facts, Interface, Network, Route
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import Finding, Verdict
from hpcenv.submission import node_code
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions
from hpcenv.submission.verify_here import verify

TESTS = Path(__file__).resolve().parents[1]
GCC = shutil.which("gcc") or shutil.which("cc")
GIT = shutil.which("git")
UV = shutil.which("uv") or next((str(p) for p in [Path(sys.executable).with_name("uv")] if p.exists()), None)
OTHER_PYTHON = next(
    (p for p in ("/usr/bin/python3", "/usr/local/bin/python3") if Path(p).exists() and Path(p).resolve() != Path(sys._base_executable).resolve()),
    None,
)  # fmt: skip
NEEDS = {
    "gcc": (GCC, "no C compiler on this machine"),
    "git": (GIT, "no git on this machine"),
    "uv": (UV, "no uv on PATH or beside this Python"),
    "root": (os.geteuid() == 0, "this user is not root"),
    "user": (os.geteuid() != 0, "root may read everything"),
    "python": (OTHER_PYTHON, "no other Python on this machine"),
}
MINOR = f"python{sys.version_info[0]}.{sys.version_info[1]}"
PLATFORM = str(next(iter(sys_tags())))


def other_tests(name: str) -> ModuleType:
    """A test module, by its path below tests/unit, whose fakes are used here too."""
    path = TESTS / "unit" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"corpus_uses_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- wheels -------------------------------------------------------------------------------


def claim(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, bytes],
    *,
    build: str = "",
    tag: str = "py3-none-any",
    unhashed: tuple[str, ...] = (),
) -> Path:
    """Write a wheel byte by byte; `unhashed` files stand in its RECORD without a hash."""
    info = f"{name}-{version}.dist-info"
    pure = "false" if tag == PLATFORM else "true"
    wheel = f"Wheel-Version: 1.0\nGenerator: corpus\nRoot-Is-Purelib: {pure}\nTag: {tag}\n"
    wheel += f"Build: {build}\n" if build else ""
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\nSummary: of the corpus\n"
    content = dict(files) | {f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": wheel.encode()}
    rows = [[path, *(("", "") if path in unhashed else (claim(data), len(data)))] for path, data in content.items()]
    record = io.StringIO()
    csv.writer(record, lineterminator="\n").writerows([*rows, [f"{info}/RECORD", "", ""]])
    path = folder / f"{name}-{version}-{build + '-' if build else ''}{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for entry, data in {**content, f"{info}/RECORD": record.getvalue().encode()}.items():
            archive.writestr(entry, data)
    return path


# -- libraries ----------------------------------------------------------------------------

_PROPERTY = "int %s(int which, int *v) { static int n[] = {%s}; *v = n[which]; return 0; }"
NCCL = "int ncclGetVersion(int *v) { *v = %d; return 0; }"
VENDOR = {
    "cu13/lib/libcudart.so.13": "int cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }",
    "cu13/lib/libcublasLt.so.13": _PROPERTY % ("cublasLtGetProperty", "13,1,2"),
    "cu13/lib/libcublas.so.13": _PROPERTY % ("cublasGetProperty", "13,1,1"),
    "cu13/lib/libnvJitLink.so.13": "int nvJitLinkVersion(unsigned *a, unsigned *b) { *a = 13; *b = 2; return 0; }",
    "nccl/lib/libnccl.so.2": NCCL % 22907,
    "cudnn/lib/libcudnn.so.9": "size_t cudnnGetVersion(void) { return 92000; }",
}
ARCHS = 'const char *archs(void) { return "%s"; }'
_ABI = 'void fail(void) __asm__("_ZN3c106detail14torchCheckFailEPKcS2_jRK%s"); void fail(void) {}'
NEW_ABI = _ABI % "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
OLD_ABI = _ABI % "Ss"
SEARCH = ("$ORIGIN", *sorted({"$ORIGIN/../../nvidia/" + os.path.dirname(name) for name in VENDOR}))

_TORCH = {
    "torch/__init__.py": """\
import ctypes, glob, os, types
from . import version, __config__
from .version import __version__
_here = os.path.dirname(os.path.abspath(__file__))
def _preload_cuda_deps(err=None):
    cuda_libs = [
        ("cu13", "libcudart.so.*[0-9]"),
        ("nccl", "libnccl.so.*[0-9]"),
    ]
def _load_global_deps():
    ctypes.CDLL(_here + "/lib/libtorch_global_deps.so", mode=ctypes.RTLD_GLOBAL)
_load_global_deps()
for _name in glob.glob(_here + "/_C.*.so"):
    ctypes.CDLL(_name)
_python = ctypes.CDLL(_here + "/lib/libtorch_python.so")
_python.archs.restype = ctypes.c_char_p
_C = types.SimpleNamespace(
    _GLIBCXX_USE_CXX11_ABI=b"7__cxx11" in open(_here + "/lib/libc10.so", "rb").read(),
    _cuda_getArchFlags=lambda: _python.archs().decode(),
)
_capability = os.environ.get("ATEN_CPU_CAPABILITY", "avx2").upper()
backends = types.SimpleNamespace(cpu=types.SimpleNamespace(get_cpu_capability=lambda: _capability))
""",
    "torch/__config__.py": 'def show():\n    return "PyTorch built with:\\n  - GCC 13.3\\n  - MKL 2024.2\\n"\n',
    "torch/version.py": """\
from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'xpu']
__version__ = '2.13.0+cu130'
debug = False
cuda: Optional[str] = '13.0'
git_version = 'cf30153c4c131c8164ee7798e5022d810682e2cb'
hip: Optional[str] = None
xpu: Optional[str] = None
""",
    "torch/nn/__init__.py": "def relu(x):\n    return max(x, 0)\n",
}


class Libraries:
    """Compiled once each, by name of the variant."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[str, Path] = {}

    def build(
        self, name: str, body: str, *, variant: str = "", needs: tuple[Path, ...] = (), flags: tuple[str, ...] = ()
    ) -> Path:
        """A shared library `name`; variants of it lie in folders of their own."""
        key = f"{variant}/{name}"
        if key not in self._made:
            path = self.folder / (variant or "base") / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if GCC is None:
                path.write_bytes(f"no compiler: {key} {body}".encode())
            else:
                source = path.with_name(path.name + ".c")
                source.write_text(
                    "#include <stddef.h>\n" + body + f'\nconst char corpus_note[] = "note of {name}: one";\n'
                )
                options = [
                    "-shared",
                    "-fPIC",
                    "-w",
                    "-Wl,--no-as-needed",
                    "-Wl,--build-id=sha1",
                    f"-Wl,-soname,{path.name}",
                ]
                subprocess.run([GCC, *options, *flags, "-o", path, source, *needs], check=True, capture_output=True)
            self._made[key] = path
        return self._made[key]

    def vendor(self, name: str, body: str, variant: str = "", flags: tuple[str, ...] = ()) -> Path:
        return self.build(os.path.basename(name), body, variant=variant, flags=flags)

    def torch(self, suffix: str) -> dict[str, Path]:
        """Everything below torch/lib, and the extension module, in the order of who needs whom."""
        path = ("-Wl,--enable-new-dtags", f"-Wl,-rpath,{':'.join(SEARCH)}")
        vendor = {name: self.vendor(name, body) for name, body in VENDOR.items()}
        cudart = vendor["cu13/lib/libcudart.so.13"]
        made = {"libtorch_global_deps.so": self.build("libtorch_global_deps.so", "", needs=(cudart,), flags=path)}
        made["libc10.so"] = c10 = self.build("libc10.so", NEW_ABI)
        made["libtorch_cpu.so"] = cpu = self.build("libtorch_cpu.so", "", needs=(c10,), flags=path)
        made["libtorch_cuda.so"] = gpu = self.build("libtorch_cuda.so", "", needs=(cpu, *vendor.values()), flags=path)
        made["libtorch.so"] = torch = self.build("libtorch.so", "", needs=(cpu, gpu), flags=path)
        archs = ARCHS % "sm_80 sm_90"
        made["libtorch_python.so"] = python = self.build("libtorch_python.so", archs, needs=(torch, gpu), flags=path)
        inner = ("-Wl,--enable-new-dtags", "-Wl,-rpath,$ORIGIN/lib")
        found = {f"torch/lib/{name}": file for name, file in made.items()}
        found[f"torch/_C{suffix}"] = self.build(f"_C{suffix}", "", needs=(python,), flags=inner)
        return found

    def torch_variant(self, name: str, body: str, variant: str, flags: tuple[str, ...] = ()) -> Path:
        """One of torch's libraries built otherwise, with the same needs and search path."""
        base = {path.name: path for path in (self.folder / "base").iterdir()}
        needs = {
            "libc10.so": (),
            "libtorch_cpu.so": ("libc10.so",),
            "libtorch_cuda.so": ("libtorch_cpu.so", *(os.path.basename(n) for n in VENDOR)),
            "libtorch_python.so": ("libtorch.so", "libtorch_cuda.so"),
        }[name]
        path = ("-Wl,--enable-new-dtags", f"-Wl,-rpath,{':'.join(SEARCH)}")
        return self.build(name, body, variant=variant, needs=tuple(base[n] for n in needs), flags=(*path, *flags))


# -- the base -----------------------------------------------------------------------------

CONDA = {"name": "mkl", "version": "2024.2.1", "build": "h_1", "sha256": "a" * 64, "channel": "https://h/conda-forge/"}
_BACKEND = """\
import os, zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "editpkg-1.0-py3-none-any.whl"
    files = {
        "__editable__.editpkg.pth": os.path.abspath("src") + "\\n",
        "editpkg-1.0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: editpkg\\nVersion: 1.0\\n",
        "editpkg-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    rows = "".join(f"{path},,\\n" for path in [*files, "editpkg-1.0.dist-info/RECORD"])
    with zipfile.ZipFile(os.path.join(folder, name), "w") as archive:
        for path, text in {**files, "editpkg-1.0.dist-info/RECORD": rows}.items():
            archive.writestr(path, text)
    return name
build_wheel = build_editable
"""
SPEC = 'image = "host"\npython = "env/bin/python"\n'


class World:
    """What is built once: wheels, libraries, the locked project, and copies of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self.libraries = Libraries(folder / "libraries")
        self.base = folder / "base"
        self.environ = {"PATH": "/usr/bin:/bin", "HOME": str(folder / "home"), "LANG": "C.UTF-8"}
        (folder / "home").mkdir()
        self.trash = folder / "trash"
        self.trash.mkdir()
        self._removing: list[subprocess.Popen[bytes]] = []
        self._facts: dict[tuple[object, ...], Facts] = {}
        self._build()
        self._lock()

    # -- building -------------------------------------------------------------------------

    def _build(self) -> None:
        env = self.base / "env"
        venv.create(env, with_pip=True, symlinks=True)
        self.site_name = f"lib/{MINOR}/site-packages"
        suffix = subprocess.run(
            [env / "bin/python", "-c", "import importlib.machinery as m; print(m.EXTENSION_SUFFIXES[0])"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        self.suffix = suffix
        self._make_wheels()
        names = [w.name.split("-")[0] for w in self.wheels.glob("*.whl")]
        self.pip(env, "install", *sorted(names))
        self._editable()
        self.pip(env, "install", "--no-build-isolation", "--editable", str(self.source))
        site = env / self.site_name
        for which in "ab":
            (env / f"share/linked_{which}").mkdir(parents=True)
            (env / f"share/linked_{which}/inside.py").write_text(f"WHICH = {which!r}\n")
        (site / "linked").symlink_to("../../../share/linked_a")
        (env / "conda-meta").mkdir()
        (env / "conda-meta/mkl-2024.2.1-h_1.json").write_text(json.dumps(CONDA))
        (self.base / "train.py").write_text("print('trains')\n")

    def _make_wheels(self) -> None:
        make = functools.partial(make_wheel, self.wheels)
        make(
            "purepkg",
            "1.0",
            {**PURE, "purepkg-1.0.dist-info/entry_points.txt": b"[console_scripts]\npure = purepkg.core:main\n"},
        )
        ext = self.libraries.build(f"native{self.suffix}", "int answer(void) { return 42; }")
        make(
            "extpkg", "2.1", {"extpkg/__init__.py": b"", f"extpkg/native{self.suffix}": ext.read_bytes()}, tag=PLATFORM
        )
        data = "datapkg-0.3.data"
        make(
            "datapkg",
            "0.3",
            {
                "datapkg/__init__.py": b"X = 1\n",
                "datapkg/table.csv": b"a,b\n1,2\n",
                f"{data}/data/share/datapkg/words.txt": b"one\ntwo\n",
                f"{data}/headers/datapkg.h": b"#define DATAPKG 3\n",
                f"{data}/scripts/datapkg-tool": b"#!python\nprint('tool')\n",
            },
        )
        make("ns_alpha", "1.0", {"nspkg/alpha/__init__.py": b"A = 1\n"})
        make("ns_beta", "1.0", {"nspkg/beta/__init__.py": b"B = 1\n"})
        make(
            "nohash",
            "1.0",
            {
                "nohash/__init__.py": b"N = 1\n",
                "nohash/more.py": b"M = 1\n",
                "nohash/table.json": b"1\n",
                "nohash-1.0.data/scripts/nohash-tool": b"#!/bin/sh\necho one\n",
            },
            unhashed=("nohash/__init__.py", "nohash/table.json", "nohash-1.0.data/scripts/nohash-tool"),
        )
        vendor = {f"nvidia/{name}": self.libraries.vendor(name, body) for name, body in VENDOR.items()}
        groups = {
            "nvidia_cuda": ("13.0.48", "cu13"),
            "nvidia_nccl": ("2.29.7", "nccl"),
            "nvidia_cudnn": ("9.20.0.48", "cudnn"),
        }
        for name, (version, folder) in groups.items():
            files = {path: lib.read_bytes() for path, lib in vendor.items() if path.split("/")[1] == folder}
            make(name, version, files, tag=PLATFORM)
        make("torch", "2.13.0", self.torch_files(), build="3", tag=PLATFORM)

    def torch_files(self) -> dict[str, bytes]:
        files = {path: text.encode() for path, text in _TORCH.items()}
        return files | {path: file.read_bytes() for path, file in self.libraries.torch(self.suffix).items()}

    def _editable(self) -> None:
        self.source = self.folder / "source"
        (self.source / "src/editpkg").mkdir(parents=True)
        (self.source / "src/editpkg/__init__.py").write_text("E = 1\n")
        (self.source / "backend.py").write_text(_BACKEND)
        text = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        (self.source / "pyproject.toml").write_text(text + '[project]\nname = "editpkg"\nversion = "1.0"\n')
        (self.source / ".gitignore").write_text("__pycache__/\n*.egg-info/\nbuild/\n")
        self.git("init", "-q")
        self.git("add", ".")
        self.git("commit", "-q", "-m", "first")

    def git(self, *words: str) -> None:
        if GIT is not None:
            who = {f"GIT_{role}_{what}": "c@x" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
            subprocess.run([GIT, *words], cwd=self.source, check=True, capture_output=True, env={**self.environ, **who})

    def pip(self, env: Path, *words: str) -> None:
        """pip of the environment itself, with nothing but the corpus' own wheels."""
        plain = ["--isolated", "--disable-pip-version-check", "--quiet", "--no-input"]
        local = ["--no-index", "--no-deps", "--find-links", str(self.wheels)] if words[0] == "install" else []
        argv = [str(env / "bin/python"), "-m", "pip", *plain, words[0], *local, *words[1:]]
        done = subprocess.run(argv, capture_output=True, text=True, env=self.environ)
        assert done.returncode == 0, done.stdout + done.stderr

    def _lock(self) -> None:
        spec = self.base / "hpcenv.toml"
        spec.write_text(SPEC)
        self.lock(self.base)
        self.lock(self.base, name="deep", level="deep")
        spec.write_text(SPEC + '[determinism]\nprofile = "bitwise"\n')
        self.lock(self.base, name="bitwise")
        self.lock(self.base, name="bitwise-deep", level="deep")
        spec.write_text(SPEC)

    def lock(self, root: Path, *, environ: Mapping[str, str] | None = None, **words: Any) -> Any:
        return lock_project(root, environ or self.environ, **words)

    # -- copies ---------------------------------------------------------------------------

    def copy(self, place: Path) -> Case:
        """The whole project at another place; files are shared until they are written."""
        shutil.copytree(self.base, place, symlinks=True, copy_function=os.link)
        return Case(self, place)

    def throw_away(self, root: Path) -> None:
        """Remove a copy while the next one is looked at."""
        root.rename(self.trash / str(len(self._removing)))
        self._removing.append(subprocess.Popen(["rm", "-rf", str(self.trash / str(len(self._removing)))]))

    def close(self) -> None:
        for process in self._removing:
            process.wait()

    def base_facts(self, manifest: Manifest) -> Facts:
        """What a node with the locked environment finds; looked up once for each level and set of variables."""
        key = (manifest.probe_level, manifest.settings)
        if key not in self._facts:
            place = ThisNode(node="n1", nodes=("n1", "n2"), attempt=0, job_id="1")
            self._facts[key] = gather(manifest, place, self.environ, probe=probe_source())
        return self._facts[key]

    @functools.cached_property
    def driver(self) -> Path:
        """Folder of a fake NVML."""
        folder = self.folder / "driver"
        folder.mkdir()
        source = folder / "nvml.c"
        source.write_text(other_tests("machine/test_gpus").NVML_C)
        subprocess.run([str(GCC), "-shared", "-fPIC", "-w", "-o", folder / "libnvidia-ml.so.1", source], check=True)
        return folder

    @functools.cached_property
    def interpreter(self) -> Path:
        """The base interpreter moved to another place, with a standard library of its own."""
        base, place = Path(sys.base_prefix), self.folder / "interpreter"
        unwanted = shutil.ignore_patterns(
            "test", "tests", "idle_test", "site-packages", "dist-packages", "config-*", "__pycache__"
        )
        stdlib = Path(os.__file__).parent
        shutil.copytree(stdlib, place / stdlib.relative_to(base), symlinks=True, ignore=unwanted)
        for library in [*(base / "lib").glob("libpython*"), *(base / "lib").glob(f"*/lib{MINOR}*")]:
            if library.is_file():
                target = place / library.relative_to(base)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(library, target, follow_symlinks=False)
        (place / stdlib.relative_to(base) / "site-packages").mkdir()
        (place / "bin").mkdir()
        shutil.copy2(os.path.realpath(sys._base_executable), place / "bin" / MINOR)
        return place


PURE = {
    "purepkg/__init__.py": b"from .core import main\n",
    "purepkg/core.py": b"LIMIT = 100\n\n\ndef main():\n    return LIMIT\n",
    "purepkg/util.py": b"def twice(x):\n    return 2 * x\n",
}


# -- what was seen ------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """One finding of the judge, of a stale lockfile, or of a refusal."""

    field: str
    severity: str
    result: str
    text: str = ""


def of_finding(finding: Finding) -> Seen:
    text = f"{finding.node}: {finding.locked[:60]} -> {finding.found[:100]} {finding.note[:160]}"
    return Seen(finding.field, finding.severity, finding.result, text)


def of_verdict(verdict: Verdict) -> list[Seen]:
    seen = [of_finding(finding) for finding in verdict.findings]
    blocks = any(s.severity == "must" for s in seen)
    assert (verdict.result != "match") == blocks, "a verdict that is not that of its findings"
    return seen


def shown_in(verdict: Verdict) -> list[Seen]:
    """The variables that a verdict shows beside its findings."""
    shown = [v for per_node in (verdict.settings, verdict.inherited) for each in per_node.values() for v in each]
    return [Seen(f"shown.{v.name}", "info", "mismatch", f"{v.value} ({v.origin})") for v in shown]


def of_error(error: HpcenvError) -> list[Seen]:
    """A refusal: a stale lockfile's reasons by name, else the error's code."""
    if isinstance(error, LockfileStale):
        return [
            Seen("stale." + line.partition(":")[0], "must", "mismatch", line) for line in (error.why or "").splitlines()
        ]
    return [Seen("error." + error.code, "must", "mismatch", str(error))]


def network(node: str) -> Network:
    address = f"10.0.0.{node[1:]}"
    return Network(
        first_node="n1",
        first_node_addresses=("10.0.0.1",),
        interfaces=(Interface(name="eth0", addresses=(address,)),),
        routes=(Route(target="10.0.0.1", source=address, interface="eth0"),),
        free_port=23456,
    )


# -- one changed environment --------------------------------------------------------------


@dataclass
class Host:
    """A node of a job: its driver, and what else its facts say."""

    driver: dict[str, str] = field(default_factory=dict)
    kernel_module: bool = True
    libraries: bool = True
    case: Case | None = None  # whose environment it has; None for the locked one
    change: Callable[[Facts], Facts | None] = lambda facts: facts


class Case:
    """A copy of the locked project in which one thing is changed, and ways to look at it."""

    def __init__(self, world: World, root: Path) -> None:
        self.world = world
        self.place = self.root = root
        self.env = root / "env"
        self.site = self.env / world.site_name
        self.environ = dict(world.environ, HOME=str(root / "home"))
        self.name = "default"
        self.options: dict[str, Any] = {"nproc": 1}
        self.hosts = {"n1": Host(), "n2": Host()}
        self.undo: list[Callable[[], None]] = []
        self.stored: dict[str, Any] = {}

    # -- changing -------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        """A file of the environment: relative to site-packages, or to the environment with `/`."""
        return self.env / name[1:] if name.startswith("/") else self.site / name

    def write(self, name: str | bytes, data: bytes | str, *, keep_times: bool = False) -> Path:
        path = Path(os.fsdecode(os.fsencode(self.site) + b"/" + name)) if isinstance(name, bytes) else self.path(name)
        before = os.lstat(path) if os.path.lexists(path) else None
        path.parent.mkdir(parents=True, exist_ok=True)
        if before is not None:
            path.unlink()
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        if before is not None:
            path.chmod(before.st_mode & 0o7777)
        if keep_times and before is not None:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return path

    def edit(self, name: str, old: str | bytes, new: str | bytes, *, keep_times: bool = False) -> None:
        old, new = (text.encode() if isinstance(text, str) else text for text in (old, new))
        data = self.path(name).read_bytes()
        assert old in data, f"{old!r} is not in {name}"
        self.write(name, data.replace(old, new, 1), keep_times=keep_times)

    def install(
        self, name: str, version: str, files: Mapping[str, bytes], *, into: Path | None = None, rows: str = ""
    ) -> None:
        """What an installer leaves of a wheel, without starting one."""
        site = into or self.site
        info = f"{name}-{version}.dist-info"
        content = dict(files) | {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
        }
        for path, data in content.items():
            target = site / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            target.write_bytes(data)
        listed = "".join(f"{path},{claim(data)},{len(data)}\n" for path, data in content.items())
        (site / info / "RECORD").write_text(listed + f"{info}/RECORD,,\n" + rows)

    def remove(self, *names: str) -> None:
        for name in names:
            path = self.path(name)
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def spec(self, text: str) -> None:
        """Add to hpcenv.toml."""
        path = self.root / "hpcenv.toml"
        before = path.read_text()
        path.unlink()
        path.write_text(before + text)

    def variable(self, name: str, value: str) -> None:
        """Set a variable for the ranks with --env."""
        self.options["env"] = {**self.options.get("env", {}), name: value}

    def project_variable(self, name: str, value: str) -> None:
        """Set a variable for the ranks in hpcenv.toml."""
        self.spec(f"[env]\n{name} = {json.dumps(value)}\n")

    def lockfile(self, name: str = "default") -> Path:
        return self.root / "lockfiles" / f"{name}.lock.toml"

    def edit_lockfile(self, change: Callable[[str], str]) -> None:
        path = self.lockfile()
        text = change(path.read_text())
        path.unlink()
        path.write_text(text)

    def bitwise(self) -> None:
        self.spec('[determinism]\nprofile = "bitwise"\n')
        for source, target in (("bitwise", "default"), ("bitwise-deep", "deep")):
            os.replace(self.lockfile(source), self.lockfile(target))

    def clean_up(self) -> None:
        for step in reversed(self.undo):
            step()
        self.world.throw_away(self.place)

    # -- looking --------------------------------------------------------------------------

    def look(self, level: str) -> list[Seen]:
        """What hpcenv says, at the level that is asked for."""
        ways = {"gate": self.gate, "nodes": self.nodes, "submit": self.submit, "diff": self.diff, "relock": self.relock}
        try:
            if level in ways:
                return ways[level]()
            return self.verify(level)
        except HpcenvError as error:
            return of_error(error)

    def verify(self, level: str) -> list[Seen]:
        words: dict[str, Any] = {"level": None if level in ("sif", "lockfile") else level}
        name = "deep" if level == "deep" else self.name
        if "sif" in self.stored:
            words["sif"] = self.stored["sif"]
        verdict, *_ = verify(open_workspace(self.root), environ=self.environ, lock=name, **words)
        return of_verdict(verdict)

    def plan(self, *, environ: Mapping[str, str] | None = None, **words: Any) -> Manifest:
        given = environ or self.environ
        context = Context(environ=given, cwd=self.root, now=time.localtime(), token="t", command=("corpus",))
        # The copy of the code has separate tests (tests/unit/identity/test_code.py): here the script stays in place.
        usual = {"script": "train.py", "cluster": "local", "name": "corpus", "workdir": "live"}
        options = SubmitOptions(**{**usual, **self.options, **words})
        manifest = plan_job(open_workspace(self.root), options, context).manifest
        # A node finds the run folder with the start hook in it.
        node_code.copy_start_hook(RunFolder(Path(manifest.run_folder)).start_hook)
        return manifest

    def gate(self) -> list[Seen]:
        """What a job of one node does before it starts: plan, check, decide."""
        level = self.options.get("level")
        manifest = self.plan(lock="deep" if level == "deep" else self.name)
        self.stored.get("between", lambda: None)()
        place = ThisNode(node="n1", nodes=("n1",), attempt=0, job_id="1")
        found = gather(manifest, place, self.environ, probe=probe_source())
        verdict = decide.judge(manifest, place.nodes, {"n1": found}, {}, attempt=0, job_id="1")[0]
        return of_verdict(verdict) + shown_in(verdict)

    def plan_two_nodes(self) -> Manifest:
        """A job of two nodes with two GPUs each, planned for a Slurm that is played by fakes."""
        (self.root / "slurm").mkdir(exist_ok=True)
        slurm = {"PATH": f"{TESTS / 'fakes/bin'}:/usr/bin:/bin", "FAKE_SLURM": str(self.root / "slurm")}
        words = {name: value for name, value in self.options.items() if name != "nproc"}
        # The preflight checks would look at this machine, which has no GPU; tests/unit/facts has theirs.
        played = {"cluster": "slurm", "nodes": 2, "gpus": 2, "nproc": None, "assume_shared": True, "preflight": "off"}
        wanted = {**played, **words}
        return self.plan(environ={**self.environ, **slurm}, **wanted)

    def nodes(self) -> list[Seen]:
        """What a job of two nodes with two GPUs each decides.

        One machine has one environment, one network and no GPU: the facts are those of a real
        check step here, with the node's name, two hand-written networks that reach each other,
        and what the real reader says of a fake driver.
        """
        manifest = self.stored.get("manifest", lambda m: m)(self.plan_two_nodes())
        reported: dict[str, Facts] = {}
        for name, host in self.hosts.items():
            changed = host.change(self._facts(name, host, manifest))
            if changed is not None:
                reported[name] = changed
        verdict, _ = decide.judge(manifest, tuple(self.hosts), reported, {}, attempt=0, job_id="1")
        return of_verdict(verdict)

    def submit(self) -> list[Seen]:
        """What `hpcenv submit` refuses before the job waits."""
        self.plan_two_nodes()
        return []

    def _facts(self, name: str, host: Host, manifest: Manifest) -> Facts:
        if host.case is None:
            facts = self.world.base_facts(manifest)
        else:
            place = ThisNode(node=name, nodes=tuple(self.hosts), attempt=0, job_id="1")
            facts = gather(host.case.plan_two_nodes(), place, host.case.environ, probe=probe_source())
        gpu = self._gpu(name, host)
        values = {k: v for k, v in facts.values.items() if not k.startswith(("host.gpu-", "host.driver", "host.cuda-"))}
        unknown = {k: v for k, v in facts.unknown.items() if k != "network"} | gpu.unknown
        return replace(facts, node=name, values=values | gpu.values, unknown=unknown, network=network(name))

    def _gpu(self, name: str, host: Host) -> gpus.GpuFacts:
        proc, dev = self.root / f"hosts/{name}/proc", self.root / f"hosts/{name}/dev"
        for folder in (proc / "driver/nvidia", dev):
            folder.mkdir(parents=True, exist_ok=True)
        if host.kernel_module:
            version = host.driver.get("FAKE_DRIVER", "580.95.05").split(",")[0]
            text = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build"
            (proc / "driver/nvidia/version").write_text(text)
        environ = {"PATH": "/usr/bin:/bin", **host.driver}
        if host.libraries:
            environ["LD_LIBRARY_PATH"] = str(self.world.driver)
        return gpus.read(environ=environ, proc=proc, dev=dev)

    def diff(self) -> list[Seen]:
        """`hpcenv diff` of two lockfiles, `before` and `after`."""
        result = diff("before", "after", project=self.root, determinism=self.stored.get("profile", "off"))
        return [Seen(c.field, c.severity, "mismatch", f"{c.left[:60]} -> {c.right[:60]}") for c in result.changes]

    def relock(self) -> list[Seen]:
        """What a second `hpcenv lock` says it changed."""
        result = self.world.lock(self.root, environ=self.environ)
        return [
            Seen(
                "relock." + line.split(" -> ")[0].rpartition(" ")[0].replace("package ", "packages."),
                "must",
                "mismatch",
                line,
            )
            for line in result.changes
        ]


# -- the same environment in an image -----------------------------------------------------

APPTAINER = """\
#!{python} -I
# Stands for apptainer: `build` makes a small SIF, `exec` runs the host's Python as the image's.
import json, os, shutil, subprocess, sys
{build}
conf = json.load(open(os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "apptainer.json")))
words = [word for word in sys.argv[1:] if word != "-q"]
if words == ["--version"]:
    print("apptainer version 1.4.5")
    sys.exit(0)
if words[0] == "build":
    build(words, conf["salt"], os.devnull)
    sys.exit(0)
assert words.pop(0) == "exec", words
import csv
given, binds = {{}}, []
while words[0].startswith("-"):
    word = words.pop(0)
    given[word] = words.pop(0) if word in ("--home", "--mount", "--pwd", "--no-mount", "--env-file") else ""
    binds += [next(csv.reader([given[word]]))] if word == "--mount" else []
image = words.pop(0)
with open(image, "rb") as file:
    if file.read(42)[32:] != b"SIF_MAGIC\\0":
        sys.exit("FATAL:   image format not recognized")
assert "--cleanenv" in given and ("--home" in given or "bind-paths" in given["--no-mount"]), given
import shlex
env = dict(word.split("=", 1) for word in shlex.split(open(given["--env-file"]).read()))
if "bind-paths" in given["--no-mount"]:
    # The look at the image without binds: its files are those below `root`.
    print(json.dumps([path for path in json.loads(words[-1]) if os.path.exists(conf["root"] + path)]))
    sys.exit(0)
mounts = [line for line in open("/proc/self/mountinfo") if line.split()[4] == "/"]
for record in binds:
    fields = dict(field.partition("=")[::2] for field in record)
    if "source" in fields:
        place = os.path.realpath(fields["source"])
        holding = max(
            (line.split() for line in open("/proc/self/mountinfo") if (place + "/").startswith(line.split()[4].rstrip("/") + "/")),
            key=lambda parts: len(parts[4]),
        )
        rest = place[len(holding[4].rstrip("/")):]
        mounts.append(f"9 9 {{holding[2]}} {{(holding[3].rstrip('/') + rest) or '/'}} {{fields['destination']}} rw - ext4 x rw\\n")
os.makedirs(conf["root"] + "proc/self", exist_ok=True)
with open(conf["root"] + "proc/self/mountinfo", "w") as file:
    file.write("".join(mounts + conf.get("mounts", [])))
source = sys.stdin.read()
assert source.count('SYSTEM_ROOT = "/"') == 1
source = source.replace('SYSTEM_ROOT = "/"', "SYSTEM_ROOT = " + json.dumps(conf["root"]))
words[0] = conf["python"] if words[0] == "python3" else words[0]
done = subprocess.run(words, input=source, text=True, cwd=given["--pwd"], env={{"PATH": "/usr/bin:/bin", "HOME": "/", **env}})
sys.exit(done.returncode)
"""
DPKG = "".join(
    f"Package: {name}\nStatus: install ok installed\nArchitecture: amd64\nVersion: {version}\n\n"
    for name, version in (("libc6", "2.36-9"), ("libopenblas0", "5.0.0-1"), ("openssl", "3.0.17-1"))
)


class ImageWorld:
    """A project whose environment is an image in a registry, locked once."""

    def __init__(self, world: World) -> None:
        self.world = world
        image_fakes.require_mksquashfs()
        self.served = http_server.Served()
        self.base = world.folder / "base-image"
        (self.base / "bin").mkdir(parents=True)
        program = self.base / "bin/apptainer"
        program.write_text(APPTAINER.format(python=sys.executable, build=image_fakes.BUILD))
        program.chmod(0o755)
        (self.base / "root/var/lib/dpkg").mkdir(parents=True)
        (self.base / "root/var/lib/dpkg/status").write_text(DPKG)
        (self.base / "train.py").write_text("print('trains')\n")
        self.spec = f'image = "docker://{self.served.host}/lab/img:1"\nplain-http = ["{self.served.host}"]\n'
        (self.base / "hpcenv.toml").write_text(self.spec)
        self.configure(self.base, world.base / "env")
        self.put(self.base)
        with environment_variable("PATH", f"{self.base / 'bin'}:/usr/bin:/bin"):
            self.lock(self.base)
            (self.base / "hpcenv.toml").write_text(self.spec + '[determinism]\nprofile = "bitwise"\n')
            self.lock(self.base, name="bitwise")
        (self.base / "hpcenv.toml").write_text(self.spec)
        shutil.copy2(self.base / "lockfiles/bitwise.lock.toml", self.base / "lockfiles/bitwise-deep.lock.toml")
        shutil.copy2(self.base / "lockfiles/bitwise.lock.toml", self.base / "lockfiles/deep.lock.toml")

    def environ(self, root: Path) -> dict[str, str]:
        return {**self.world.environ, "PATH": f"{root / 'bin'}:/usr/bin:/bin"}

    def lock(self, root: Path, **words: Any) -> Any:
        return self.world.lock(root, environ=self.environ(root), **words)

    def configure(self, root: Path, env: Path) -> None:
        conf = {"python": str(env / "bin/python"), "root": str(root / "root") + "/", "salt": str(root / "salt")}
        (root / "bin/apptainer.json").unlink(missing_ok=True)
        (root / "bin/apptainer.json").write_text(json.dumps(conf))

    def put(
        self,
        root: Path,
        *,
        env: tuple[str, ...] = (),
        layers: tuple[bytes, ...] = (b"one", b"two", b"three"),
        entrypoint: list[str] | None = None,
        compress: Callable[[bytes], bytes] = functools.partial(gzip.compress, mtime=0),
        media: str = "tar+gzip",
    ) -> None:
        """Give the tag an image; each layer holds one file."""
        sha = image_fakes.sha
        tars = [image_fakes.tar_layer({f"opt/{n}": content}) for n, content in enumerate(layers)]
        blobs = [compress(tar) for tar in tars]
        for blob in blobs:
            self.served.paths[f"/v2/lab/img/blobs/{sha(blob)}"] = (200, {}, blob)
        config: dict[str, Any] = {"rootfs": {"type": "layers", "diff_ids": [sha(tar) for tar in tars]}}
        if entrypoint:
            config["config"] = {"Env": ["PATH=/bin", *env], "Cmd": ["sh"], "WorkingDir": "/w", "Entrypoint": entrypoint}
        kind = f"{http_server.OCI}layer.v1.{media}"
        document = {"layers": [{"mediaType": kind, "digest": sha(b), "size": len(b)} for b in blobs]}
        digest = self.served.image("1", env=env, config=config, manifest=document)["digest"]
        # What Apptainer adds lies in the file system too, so other bytes come of another digest.
        (root / "salt").unlink(missing_ok=True)
        (root / "salt").write_text(digest)

    def copy(self, place: Path) -> Case:
        case = self.world.copy(place)
        for name in ("hpcenv.toml", "lockfiles"):
            case.remove("/../" + name)
        shutil.copytree(self.base, place, symlinks=True, dirs_exist_ok=True, copy_function=replace_by_copy)
        self.configure(place, case.env)
        [image] = (place / ".hpcenv/store/images").glob("*.sif")
        case.environ = self.environ(place)
        case.stored.update(file=image, root=place / "root", moved=functools.partial(self.moved, case))
        return case

    def moved(self, case: Case, name: str, **image: Any) -> None:
        """The tag names another image now; lock it beside the first one."""
        self.put(case.root, **image)
        try:
            with environment_variable("PATH", case.environ["PATH"]):
                self.lock(case.root, name="after", upgrade=True)
            shutil.copy2(case.lockfile(), case.lockfile("before"))
        finally:
            self.put(self.base)


def replace_by_copy(source: str, target: str) -> str:
    if os.path.lexists(target):
        os.unlink(target)
    return shutil.copy2(source, target, follow_symlinks=False)


class environment_variable:  # noqa: N801
    """One variable of this process for a while: some of hpcenv's own steps look for apptainer there."""

    def __init__(self, name: str, value: str) -> None:
        self.name, self.value, self.before = name, value, os.environ.get(name)

    def __enter__(self) -> None:
        os.environ[self.name] = self.value

    def __exit__(self, *args: object) -> None:
        if self.before is None:
            del os.environ[self.name]
        else:
            os.environ[self.name] = self.before
