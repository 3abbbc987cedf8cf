"""Versions, origins and digests of the libraries under torch.

Runs on: inside the image.
"""

from __future__ import annotations

import os
import time

from hpcenv.incontainer.probe.children import start_child, wait_for_child
from hpcenv.incontainer.probe.paths import is_below
from hpcenv.incontainer.probe.hashing import CONTENT_SECONDS, hash_files
from hpcenv.incontainer.probe.loader import split_path, without_own_list
from hpcenv.incontainer.probe.system import glibc_version
from hpcenv.incontainer.probe.table import HASHING, Probe
from hpcenv.incontainer.probe.values import Unknown
from hpcenv.incontainer.probe.variables import preloaded
from hpcenv.incontainer.probe.text import describe_error, printable
from hpcenv.incontainer.probe.library_versions import HEAVY, LIBRARIES, version_in_words
from hpcenv.incontainer.probe.torch_libraries import find_torch_libraries, has_stem, with_needs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hpcenv.incontainer.probe.environment import ProbedEnvironment
    from hpcenv.incontainer.probe.values import Facts, Value

LIBRARY_SECONDS = 20.0  # enough to read 400 MB from a slow shared file system without a cache
LIBRARY_FIELDS = tuple(
    f"libs.{name}.{part}"
    for name in LIBRARIES
    for part in ("version", "origin", "build-id")
    if part != "version" or (LIBRARIES[name][2] and name not in HEAVY)
)
HEAVY_FIELDS = tuple(f"libs.{name}.version" for name in HEAVY)


def start_libraries(env: ProbedEnvironment) -> Facts:
    """Find the libraries that torch would load, and start the child that asks for their versions.

    The child works while the other probes read files; `probe_libraries` collects its answers.
    """
    if env.values.get("torch.version") == "absent":
        return {}
    try:
        if env.torch is None:
            raise ValueError("torch's folder was not found")
        if isinstance(glibc_version(), Unknown):
            raise ValueError("the search order of a C library other than glibc is not known here")
        find_torch_libraries(env, env.torch)
    except Exception as error:  # noqa: BLE001
        env.no_libraries = describe_error(error) if not isinstance(error, ValueError) else str(error)
        return {}
    questions = []
    for name, (_, how, function) in LIBRARIES.items():
        library = env.libraries.get(name)
        if library is not None and function and (env.level != "record" or name not in HEAVY):
            questions.append([name, how, function, [p.path for p in with_needs(library)]])
    if questions:
        _ask_libraries(env, questions)
    return {}


# The child forks once for each library. So if the code of one library crashes or hangs, only one answer is missing. The
# argument of the child is a JSON list of (name, how, function, files to open; the last file has the function). os._exit
# skips the libraries' exit handlers. The output of the libraries is discarded.
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


def _ask_libraries(env: ProbedEnvironment, questions: list[list[Any]]) -> None:
    import json

    start_child(env, "libraries", ["-S", "-c", _CHILD, json.dumps([LIBRARY_SECONDS, questions])])


def probe_libraries(env: ProbedEnvironment) -> Facts:
    """Return version, origin and build-id of each library, and the variables that affect the loader."""
    env.answers = _library_answers(env)
    folders = without_own_list(env, split_path(_variable("LD_LIBRARY_PATH")))
    facts: Facts = {
        "libs.ld-library-path": [printable(env.shown(p)) if p else "" for p in folders],
        "libs.ld-preload": preloaded(env, _variable("LD_PRELOAD").replace(":", " ").split()),
    }
    for field in LIBRARY_FIELDS:
        _, name, part = field.split(".")
        facts[field] = _library_fact(env, name, part)
    return facts


def _variable(name: str) -> str:
    return os.environ.get(name, "")


def _library_answers(env: ProbedEnvironment) -> dict[str, Value]:
    """Return the versions that the libraries reported."""
    import json
    import subprocess

    child = env.children.get("libraries")
    requested = [n for n in env.libraries if LIBRARIES[n][2]]
    if child is None or isinstance(child, Unknown):
        return {name: child or Unknown("its version was not requested") for name in requested}
    try:
        output, errors = wait_for_child(child, LIBRARY_SECONDS + 5)
    except subprocess.TimeoutExpired as late:
        output, errors = late.stdout or b"", late.stderr or b""
    stderr = errors.decode("utf-8", "replace").strip()[-300:] or "no message"
    answers: dict[str, Value] = {
        name: Unknown(f"its child process ended with status {child.returncode}: {stderr}") for name in requested
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
        return Unknown(printable(str(answer["problem"])))
    return version_in_words(name, [int(number) for number in answer["numbers"]])


def _library_fact(env: ProbedEnvironment, name: str, part: str) -> Value:
    library = env.libraries.get(name)
    if library is None:
        return _no_library(env, name)
    if part == "version":
        return env.answers.get(name, Unknown("its version was not requested"))
    if part == "build-id":
        return library.elf.build_id or "none"
    return describe_origin(env, library.path, library.system)


def _no_library(env: ProbedEnvironment, name: str) -> Value:
    cuda = env.values.get("torch.cuda")
    if cuda == "absent" or (cuda == "none" and name not in ("libtorch", "libtorch_cpu")):
        return "absent"  # even if the system has this library, because a CPU build never loads it
    if env.no_libraries:
        return Unknown(f"{env.no_libraries} (torch.cuda is {cuda or 'unknown'})")
    stem = LIBRARIES[name][0]
    for missing, needed_by in env.missing_libraries.items():
        if has_stem(stem, missing):
            where = printable(env.shown(needed_by))
            return Unknown(f"no such library found: {where} needs {printable(missing)}, and the loader finds none")
    if env.torch_incomplete:
        first = printable(", ".join(sorted(env.missing_libraries)[:3]))
        return Unknown(f"not every library under torch was found: {first} is missing")
    return "absent"


def describe_origin(env: ProbedEnvironment, path: str, system: bool = False) -> str:
    """Return class and path of a library. A path after ``prefix:`` or ``base-prefix:`` is relative to that prefix."""
    mark, rest = env.placed(path)
    root = {"{prefix}": env.prefix, "{base-prefix}": env.base_prefix}.get(mark, "/usr")
    in_site = any(is_below(path, site.path) for site in env.sites if site.scanned)
    if mark and not system and (in_site or root not in ("/", "/usr", "/usr/local")):
        return printable(mark[1:-1] + ":" + rest)
    places = ("/lib", "/usr/lib", "/lib64", "/usr/lib64")
    return ("system:" if system or any(is_below(path, p) for p in places) else "other:") + printable(path)


def probe_library_files(env: ProbedEnvironment) -> Facts:
    """Return the libraries' sha256, and the versions of the libraries that need much memory for the question.

    The probe `content` has already hashed the libraries that a RECORD lists.
    """
    facts: Facts = {field: _library_fact(env, field.split(".")[1], "version") for field in HEAVY_FIELDS}
    fields = {name: f"libs.{name}.sha256" for name in LIBRARIES}
    jobs = []
    for name, field in fields.items():
        library = env.libraries.get(name)
        if library is None:
            facts[field] = _no_library(env, name)
            continue
        known = env.hashed.get(library.real)
        if known:
            facts[field] = known
        else:
            jobs.append((field, library.path))
    deadline = time.monotonic() + CONTENT_SECONDS
    for (field, _), result in zip(jobs, hash_files(env, [(path, "sha256", 0) for _, path in jobs], deadline)):
        facts[field] = result.digest.hex() if isinstance(result.digest, bytes) else Unknown(result.problem)
    return facts


EARLY_PROBES: tuple[Probe, ...] = (Probe("libraries-start", (), start_libraries),)
PROBES: tuple[Probe, ...] = (
    Probe("libraries", (*LIBRARY_FIELDS, "libs.ld-library-path", "libs.ld-preload"), probe_libraries),
    Probe(
        "library-files",
        (*HEAVY_FIELDS, *(f"libs.{name}.sha256" for name in LIBRARIES)),
        probe_library_files,
        HASHING,
    ),
)
