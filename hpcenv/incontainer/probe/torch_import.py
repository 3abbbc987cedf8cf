"""Level deep: the libraries that a real import of torch maps.

Runs on: inside the image.
"""

from __future__ import annotations

import os

from hpcenv.incontainer.probe.children import start_child, wait_for_child
from hpcenv.incontainer.probe.libraries import describe_origin
from hpcenv.incontainer.probe.table import DEEP, Probe
from hpcenv.incontainer.probe.values import Unknown
from hpcenv.incontainer.probe.text import printable
from hpcenv.incontainer.probe.library_versions import LIBRARIES
from hpcenv.incontainer.probe.torch_libraries import has_stem
from hpcenv.incontainer.probe.torch_version import build_fact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts, Value

IMPORT_SECONDS = 300.0
# Field -> its key in the child's answer. These fields are compared with the values that were read without importing
# torch.
RUNNING = {
    "torch.version": "version",
    "torch.git-version": "git",
    "torch.cuda": "cuda",
    "torch.debug": "debug",
    "torch.cxx11-abi": "abi",
    "torch.arch-list": "arch",
}
MAPPED = {  # in addition to LIBRARIES
    "libgomp": "libgomp",
    "libiomp": "libiomp5",
    "libomp": "libomp",
    "mkl": "libmkl_core",
    "mkl-rt": "libmkl_rt",
    "openblas": "libopenblas",
    "libcuda": "libcuda",
}
LOADED_FIELDS = (*(f"loaded.{name}" for name in (*LIBRARIES, *MAPPED)), "loaded.differs")
RUNNING_FIELDS = ("torch.running-differs", "torch.config-digest", "torch.cpu-capability")

_IMPORT = """
import sys
sys.path[:] = [p for p in sys.path if p]
import torch, json, os
def answer(read):
    try:
        return read()
    except Exception as error:
        return {"problem": type(error).__name__ + ": " + str(error)[:300]}
answers = {
    "version": answer(lambda: str(torch.__version__)),
    "git": answer(lambda: torch.version.git_version),
    "cuda": answer(lambda: torch.version.cuda),
    "debug": answer(lambda: torch.version.debug),
    "abi": answer(lambda: bool(torch._C._GLIBCXX_USE_CXX11_ABI)),
    "arch": answer(lambda: torch._C._cuda_getArchFlags() if hasattr(torch._C, "_cuda_getArchFlags") else None),
    "cpu": answer(lambda: torch.backends.cpu.get_cpu_capability()),
    "config": answer(lambda: torch.__config__.show()),
    "mapped": answer(lambda: sorted({line.split(None, 5)[5].rstrip() for line in
        open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") if ".so" in line})),
}
sys.stdout.flush()
os.write(1, (chr(10) + "hpcenv-torch " + json.dumps(answers) + chr(10)).encode())
os._exit(0)
"""


def probe_import(env: ProbedEnvironment) -> Facts:
    """Import torch in a child process with this environment, and return which libraries are then mapped."""
    if env.values.get("torch.version") == "absent":
        facts: Facts = {field: [] for field in LOADED_FIELDS}
        return {**facts, **dict.fromkeys(("torch.config-digest", "torch.cpu-capability"), "absent")}
    running = _import_torch(env)
    if isinstance(running, Unknown):
        return dict.fromkeys(LOADED_FIELDS + RUNNING_FIELDS, running)
    facts = {"torch.running-differs": _running_differs(env, running)}
    for field, name in (("torch.cpu-capability", "cpu"), ("torch.config-digest", "config")):
        reported = running.get(name)
        if not isinstance(reported, str):
            facts[field] = Unknown(printable(str(reported)))
        else:
            facts[field] = _config_digest(reported) if name == "config" else printable(reported)
    mapped = running.get("mapped")
    if not isinstance(mapped, list):
        return {**facts, **dict.fromkeys(LOADED_FIELDS, Unknown("/proc/self/maps: " + printable(str(mapped))))}
    return {**facts, **_loaded(env, [str(path) for path in mapped])}


def _import_torch(env: ProbedEnvironment) -> dict[str, Any] | Unknown:
    import json
    import subprocess

    start_child(env, "import", ["-c", _IMPORT], own_path=False)
    child = env.children["import"]
    if isinstance(child, Unknown):
        return child
    try:
        output, errors = wait_for_child(child, IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return Unknown(f"import torch took longer than {IMPORT_SECONDS:g} s")
    mark = b"\nhpcenv-torch "
    if mark not in output:
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        return Unknown(
            f"import torch ended with status {child.returncode}: {printable(lines[-1])[:300] if lines else ''}"
        )
    answer: dict[str, Any] = json.loads(output.rsplit(mark, 1)[1].split(b"\n")[0])
    return answer


def _config_digest(text: str) -> str:
    """Return the sha256 of torch.__config__.show() without the line that names this machine's CPU."""
    import hashlib

    lines = [line for line in text.splitlines() if "CPU capability usage" not in line]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _running_differs(env: ProbedEnvironment, running: dict[str, Any]) -> list[str]:
    """Return the fields in which the running torch differs from its files. Fields without a value are skipped."""
    differs = []
    for field, name in RUNNING.items():
        reported = running.get(name)
        if field not in env.values or isinstance(reported, dict):
            continue
        now: Value = str(reported).split(" ") if field == "torch.arch-list" and reported else build_fact(reported)
        if now != env.values[field]:
            differs.append(
                f"{field}: {printable(str(env.values[field]))} in its files, {printable(str(now))} when it runs"
            )
    return differs


def _loaded(env: ProbedEnvironment, mapped: list[str]) -> Facts:
    """Return the mapped file of each library, or several files if the process has several copies."""
    facts: Facts = {}
    differs = []
    stems = {**{name: stem for name, (stem, _, _) in LIBRARIES.items()}, **MAPPED}
    for name, stem in stems.items():
        paths = [path for path in mapped if has_stem(stem, os.path.basename(path))]
        system = {path for library in env.libraries.values() if library.system for path in (library.path,)}
        origins = sorted(describe_origin(env, os.path.normpath(path), path in system) for path in paths)
        facts["loaded." + name] = list(dict.fromkeys(origins))
        expected = env.libraries.get(name)
        if name in LIBRARIES and (paths or name in env.at_import):
            wanted = expected.real if expected else "nothing"
            if wanted not in {os.path.realpath(path) for path in paths}:
                differs.append(
                    f"{name}: {', '.join(origins) or 'nothing'} mapped, {_shown_library(env, name)} expected"
                )
    facts["loaded.differs"] = differs
    return facts


def _shown_library(env: ProbedEnvironment, name: str) -> str:
    library = env.libraries.get(name)
    return describe_origin(env, library.path, library.system) if library else "nothing"


PROBES: tuple[Probe, ...] = (Probe("import", (*LOADED_FIELDS, *RUNNING_FIELDS), probe_import, DEEP),)
