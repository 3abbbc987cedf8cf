"""Checks of the folders that a run uses: do they answer, is there free space, does their clock agree with this node?

Runs on: COMPUTE NODE. Standard library only.

A file system that hangs blocks each process that uses it. So a child process looks at the folders, with a time limit.
This process itself does not use a folder that hangs. If the child survives SIGKILL (state D), this process stops
waiting at the time limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcenv import process
from hpcenv.errors import EnvironmentUnreadable
from hpcenv.judge.checks.check_table import BY_ID
from hpcenv.records.checks import CheckOutcome, CheckState
from hpcenv.records.manifest import Manifest
from hpcenv.text import plural

# The child process. Its arguments are `write=FOLDER` or `look=FOLDER` for each folder, and `lustre=ROOT` or `gpfs=ROOT`
# for a kind of file system (ROOT contains proc and sys). Each argument has its own thread. So a folder that hangs does
# not block the other folders. The child prints a line of JSON for each argument that got an answer.
_CHILD = """\
import glob, json, os, sys, threading, time
lock = threading.Lock()
def text(path):
    with open(path) as file:
        return file.read(4096).strip()
def lustre(root, answer):
    answer["states"], answer["unread"] = {}, []
    for path in ("sys/fs/lustre/health_check", "proc/fs/lustre/health_check"):
        if os.path.exists(os.path.join(root, path)):
            answer["health"] = text(os.path.join(root, path))
            break
    for kind in ("osc", "mdc"):
        for folder in glob.glob(root + "/[ps][ry][os]*/fs/lustre/" + kind + "/*/"):  # proc or sys
            name = os.path.basename(folder[:-1])
            try:
                words = text(folder + "state").split()
                answer["states"][name] = words[words.index("current_state:") + 1]
            except (OSError, ValueError, IndexError):
                answer["unread"].append(name)
    answer["unread"] = sorted(set(answer["unread"]) - set(answer["states"]))
def gpfs(root, answer):
    # A private /proc does not show kthreadd, nor does a /proc that hides the processes of other users.
    kernel = root + "/proc/2/comm"
    answer["all"], answer["daemon"] = os.path.exists(kernel) and text(kernel) == "kthreadd", False
    for path in glob.glob(root + "/proc/[0-9]*/comm"):
        try:
            answer["daemon"] = answer["daemon"] or text(path) == "mmfsd"
        except OSError:
            pass
def look(what, place):
    answer = {}
    try:
        if what in ("lustre", "gpfs"):
            {"lustre": lustre, "gpfs": gpfs}[what](place, answer)
            with lock:
                print(json.dumps([what, answer]), flush=True)
            return
        os.stat(place)
        room = os.statvfs(place)
        answer["free"], answer["files"] = room.f_frsize * room.f_bavail, room.f_favail if room.f_files else None
        if what == "write":
            write(place, answer)
    except OSError as error:
        answer["problem"] = error.strerror or str(error)
    with lock:
        sys.stdout.write(json.dumps([place, answer]) + "\\n")
        sys.stdout.flush()
def write(place, answer):
    name = os.path.join(place, ".hpcenv-check-%s-%d" % (os.uname().nodename, os.getpid()))
    number = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        before = time.time()
        os.write(number, b"x" * 4096)
        os.fsync(number)
        after = time.time()
        answer["clock"] = (before + after) / 2 - os.fstat(number).st_mtime
        os.lseek(number, 0, 0)
        if os.read(number, 4097) != b"x" * 4096:
            answer["problem"] = "what was written cannot be read back"
    finally:
        os.close(number)
        os.unlink(name)
threads = [threading.Thread(target=look, args=one.split("=", 1)) for one in sys.argv[1:]]
for thread in threads:
    thread.start()
"""

_FULL_BYTES = 64 * 2**20
_FULL_FILES = 100
_LITTLE_BYTES = 2**30
_SKEW_SECONDS = 2.0
# Kinds of file systems whose client reports its health, with their names in /proc/self/mountinfo.
_WATCHED = ("lustre", "gpfs")
# States of a Lustre connection that need no action (Lustre Operations Manual, import).
_CONNECTED = ("FULL", "IDLE")


@dataclass(frozen=True, kw_only=True)
class FolderAnswer:
    """The answer of one folder.

    Attributes:
        hangs: whether no answer came within the time limit.
        problem: why the folder could not be used; empty if the folder could be used.
        free: how many bytes this user may still write; None if the value is unknown.
        files: how many more files fit into the file system; None without a limit, or if the value is unknown.
        clock: this node's clock minus the clock that sets the times of the folder's files, in seconds; None if nothing
            was written.
    """

    hangs: bool = False
    problem: str = ""
    free: int | None = None
    files: int | None = None
    clock: float | None = None


@dataclass(kw_only=True)
class FolderLook:
    """A child process that looks at folders. The child process is started at once, and its answers are read later.

    Attributes:
        places: the folders.
        written: the folders to which the run writes.
        child: the child process; None if there is no folder to look at, or if the child could not be started.
        kinds: kind of file system (`lustre`, `gpfs`) -> a folder on it.
        systems: kind of file system -> the child's answer about it. `systems` is complete after a call of `answers`.
    """

    places: tuple[str, ...]
    written: frozenset[str]
    child: subprocess.Popen[bytes] | None
    started: float = field(default_factory=time.monotonic)
    kinds: Mapping[str, str] = field(default_factory=dict)
    systems: dict[str, dict[str, Any]] = field(default_factory=dict)
    _answers: dict[str, FolderAnswer] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answers(self) -> dict[str, FolderAnswer]:
        """Return the answers. The first call waits for the answers, at most until the time limit."""
        with self._lock:
            if self._answers is None:
                self._answers = {} if self.child is None else self._wait(self.child)
            return self._answers

    def _wait(self, child: subprocess.Popen[bytes]) -> dict[str, FolderAnswer]:
        until = self.started + BY_ID["fs.answers"].seconds
        lines = _read_lines(child, count=len(self.places) + len(self.kinds), until=until)
        missing = (
            FolderAnswer(hangs=True)
            if time.monotonic() >= until
            else FolderAnswer(problem="the check of this folder ended early")
        )
        answers = dict.fromkeys(self.places, missing)
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):
                place, found = json.loads(line)
                if place in self.kinds:
                    self.systems[place] = found
                else:
                    answers[place] = FolderAnswer(**found)
        return answers

    def within(self, path: str) -> Callable[[], None]:
        """Return a function that raises EnvironmentUnreadable if a path is in a folder that hangs.

        Reading a path in this folder would hang, too.
        """

        def require_answer() -> None:
            place = self.hanging(path)
            if place:
                raise EnvironmentUnreadable(f"not read: {place} does not answer")

        return require_answer

    def hanging(self, path: str) -> str:
        """Return the folder that hangs and contains a path; empty if there is no such folder."""
        return next((place for place, one in self.answers().items() if one.hangs and _is_below(path, place)), "")


def folders_of(manifest: Manifest, environ: Mapping[str, str]) -> tuple[dict[str, str], frozenset[str]]:
    """Return the folders that a run uses, each with its purpose, and the folders to which the run writes."""
    temporary = environ.get("TMPDIR") or "/tmp"  # noqa: S108  (where the ranks' programs put their files)
    written = {manifest.run_folder: "run folder", temporary: "temporary folder"}
    read = {manifest.workdir: "working directory"}
    read |= {one.path: f"data {one.name}" for one in manifest.data}
    read |= {os.path.dirname(manifest.environment.sif or manifest.environment.python): "environment"}
    if manifest.environment.overlay is not None:
        read |= {os.path.dirname(manifest.environment.overlay.source): "overlay"}
    read |= {bind.source: f"bind {bind.target}" for bind in manifest.environment.binds}
    places = {path: what for path, what in {**read, **written}.items() if os.path.isabs(path)}
    return places, frozenset(written)


def kinds_of(places: Iterable[str], mountinfo: str) -> dict[str, str]:
    """Return the kinds of parallel file systems on which the folders are: kind -> the first folder on it.

    Args:
        places: the folders.
        mountinfo: the text of /proc/self/mountinfo (proc(5)). The file systems themselves are not read.
    """
    mounts = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        words, kind = before.split(), after.split()
        if len(words) > 4 and kind:
            mounts[re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), words[4])] = kind[0]
    found: dict[str, str] = {}
    for place in places:
        above = [point for point in mounts if _is_below(place, point)]
        system = mounts[max(above, key=len)] if above else ""
        if system in _WATCHED:
            found.setdefault(system, place)
    return found


def start(manifest: Manifest, environ: Mapping[str, str], *, root: Path = Path("/")) -> FolderLook:
    """Start a child that looks at the folders of a run. If no checks are requested, no child is started.

    Args:
        root: the folder that contains proc and sys.
    """
    names, written = folders_of(manifest, environ)
    asked = tuple(names) if manifest.preflight.level != "off" else ()
    child = None
    kinds: dict[str, str] = {}
    if asked:
        with contextlib.suppress(OSError):
            kinds = kinds_of(asked, (root / "proc/self/mountinfo").read_text("utf-8", "backslashreplace"))
        words = [f"{'write' if place in written else 'look'}={place}" for place in asked]
        words += [f"{kind}={root}" for kind in kinds]
        argv = [sys.executable, "-I", "-S", "-c", _CHILD, *words]
        with contextlib.suppress(OSError):
            child = process.start(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return FolderLook(places=asked, written=written, child=child, kinds=kinds)


def _read_lines(child: subprocess.Popen[bytes], *, count: int, until: float) -> list[bytes]:
    """Return the lines of a child until there are `count` lines, the child ends, or the time is over. End the child."""
    assert child.stdout is not None
    output = bytearray()
    ready = select.poll()
    ready.register(child.stdout, select.POLLIN | select.POLLHUP)
    while output.count(b"\n") < count and (left := until - time.monotonic()) > 0:
        if ready.poll(left * 1000):
            part = os.read(child.stdout.fileno(), 1 << 16)
            if not part:
                break
            output += part
    if output.count(b"\n") < count:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=0.5)
    child.stdout.close()
    return bytes(output).splitlines()


def _is_below(path: str, place: str) -> bool:
    return os.path.normpath(path) == os.path.normpath(place) or path.startswith(place.rstrip("/") + "/")


# -- checks ---------------------------------------------------------------------------------


def check_places(look: FolderLook, names: Mapping[str, str]) -> Iterator[CheckOutcome]:
    """Yield the outcomes about folders.

    Args:
        names: folder -> its purpose.
    """
    answers = look.answers()
    hangs = [f"{names.get(place, 'folder')} {place}" for place, one in answers.items() if one.hangs]
    limit = f"an answer within {BY_ID['fs.answers'].seconds:g} s"
    yield _listed("fs.answers", hangs, limit, "no answer from ", fine=plural(len(answers), "folder"))
    broken = [
        f"{names.get(place, 'folder')} {place}: {one.problem}"
        for place, one in answers.items()
        if one.problem and place in look.written  # the gate compares the folders that the run only reads
    ]
    yield _listed("fs.usable", broken, "", "", fine=plural(len(look.written), "folder"))
    yield from _room(look.written, answers, names)
    yield from _lustre(look)
    yield _gpfs(look)
    yield _clock(answers)


def _listed(name: str, wrong: Iterable[str], limit: str, before: str, *, fine: str) -> CheckOutcome:
    found = "; ".join(wrong)
    if found:
        return CheckOutcome(id=name, state="failed", found=before + found, limit=limit)
    return CheckOutcome(id=name, state="fine", found=fine)


def _room(
    written: frozenset[str], answers: Mapping[str, FolderAnswer], names: Mapping[str, str]
) -> Iterator[CheckOutcome]:
    known = {place: one for place, one in answers.items() if place in written and one.free is not None}
    full, little = [], []
    for place, one in known.items():
        what = f"{names.get(place, 'folder')} {place}: {(one.free or 0) >> 20} MiB"
        what += "" if one.files is None else f", {one.files} files"
        if (one.free or 0) < _FULL_BYTES or (one.files is not None and one.files < _FULL_FILES):
            full.append(what)
        elif (one.free or 0) < _LITTLE_BYTES:
            little.append(what)
    if not known:
        for name in ("fs.full", "fs.space"):
            yield CheckOutcome(id=name, state="unknown", found="no folder reported how much space is free")
        return
    least = min(one.free or 0 for one in known.values()) >> 20
    yield _listed("fs.full", full, "", "", fine=f"{least} MiB at least")
    yield _listed("fs.space", little, "", "", fine=f"{least} MiB at least")


def _lustre(look: FolderLook) -> Iterator[CheckOutcome]:
    names = ("fs.lustre", "fs.lustre.servers")
    if "lustre" not in look.kinds:
        yield from (CheckOutcome(id=name, state="not-run", found="no folder of the run is on Lustre") for name in names)
        return
    where, found = f"folder {look.kinds['lustre']}", look.systems.get("lustre")
    if found is None:
        yield from (CheckOutcome(id=name, state="unknown", found="Lustre's client did not answer") for name in names)
        return
    health = str(found.get("health", ""))
    if health:
        state: CheckState = "fine" if health.lower() == "healthy" else "failed"
        yield CheckOutcome(id=names[0], state=state, found=health.splitlines()[0][:80], note=where)
    else:
        yield CheckOutcome(id=names[0], state="not-run", found="this Lustre has no health_check that a user may read")
    yield _servers(found, where)


def _servers(found: Mapping[str, Any], where: str) -> CheckOutcome:
    states, unread = found["states"], found["unread"]
    apart = [f"{server} {state}" for server, state in sorted(states.items()) if state not in _CONNECTED]
    if apart:
        return CheckOutcome(id="fs.lustre.servers", state="failed", found=", ".join(apart[:8]), note=where)
    if unread or not states:  # since 2.12 these files are in debugfs, which only root may read
        return CheckOutcome(id="fs.lustre.servers", state="unknown", found="only root may read the states")
    return CheckOutcome(id="fs.lustre.servers", state="fine", found=f"{len(states)} servers")


def _gpfs(look: FolderLook) -> CheckOutcome:
    name = "fs.gpfs"
    if "gpfs" not in look.kinds:
        return CheckOutcome(id=name, state="not-run", found="no folder of the run is on GPFS")
    found = look.systems.get("gpfs")
    if found is not None and found["daemon"]:
        return CheckOutcome(id=name, state="fine", found="mmfsd runs")
    if found is None:
        return CheckOutcome(id=name, state="unknown", found="/proc did not answer")
    if not found["all"]:
        return CheckOutcome(id=name, state="not-run", found="this user does not see the processes of the node")
    return CheckOutcome(id=name, state="failed", found="mmfsd does not run", note=f"folder {look.kinds['gpfs']}")


def clock_offset(outcomes: Iterable[CheckOutcome]) -> float | None:
    """Return this node's clock minus the clock of the shared file system, from the check `time.filesystem`."""
    for one in outcomes:
        if one.id == "time.filesystem" and one.state in ("fine", "failed"):
            with contextlib.suppress(ValueError):
                return float(one.found.split()[0])
    return None


def _clock(answers: Mapping[str, FolderAnswer]) -> CheckOutcome:
    """Compare this node's clock with the clock that sets the times of files (on NFS, the clock of the server)."""
    offset = next((one.clock for one in answers.values() if one.clock is not None), None)
    if offset is None:
        return CheckOutcome(id="time.filesystem", state="unknown", found="no file could be written")
    wrong = abs(offset) > _SKEW_SECONDS
    return CheckOutcome(id="time.filesystem", state="failed" if wrong else "fine", found=f"{offset:+.3f} s")
