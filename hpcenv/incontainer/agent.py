"""Start torchrun, and write down how each of its ranks ended.

Runs on: inside the image (or in a bare host environment), alone: stdlib and torch only, Python 3.8 to 3.14.

    python3 agent.py [--door FIFO] RECORD -- TORCHRUN-WORDS...

With --door (and Python's -S) it first waits until FIFO says `go`, and ends with 90 if it says anything else
(node/door.py); only then it looks for site-packages.
It calls what `python3 -m torch.distributed.run` calls (torch 1.10 to 2.13) and ends with the status of the rank that
failed first, 128 + N for signal N; torchrun itself would end with 1 whatever happened. Which one was first it sees for
itself: torch only looks ten times a second, and for a rank without an error file it takes the time of looking, in whole
seconds (torch 2.13, elastic/multiprocessing/errors). Where something of this cannot be had it behaves as torchrun does,
and the record leaves it out.

RECORD is JSON: `status`, `error` (what torchrun itself failed of), `asked` (name of the signal that it was told to end
with), and `ranks`, each with `rank`, `local_rank`, `pid`, `status`, `ended`, `error_file`, in the order of their ends.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import site
import stat
import sys
import threading
import time
from typing import Any, Dict, List, Optional, Tuple

_LOOK_FOR_RANKS = 0.02
_LOOK_AT_ENDED = 0.005
_SECONDS_TO_KNOW_RANKS = 60.0

# What the launch step writes into the pipe that it gives as standard input, and then keeps open.
LEASH = b"hpcenv leash\n"
_SECONDS_TO_KILL = 5.0

# With which torchrun ends the other ranks when one has failed: TERM, then KILL.
_ENDED_BY_TORCHRUN = (143, 137)


class Ends(threading.Thread):
    """Notes when the children of this process end, without taking their status from whoever waits for them.

    Attributes:
        ended: pid -> (seconds since the epoch, exit status or 128 + number of the signal).
        ranks: pid -> (rank, local rank).
    """

    def __init__(self, nproc: int) -> None:
        super().__init__(name="hpcenv-ends", daemon=True)
        self.ended: Dict[int, Tuple[float, int]] = {}
        self.ranks: Dict[int, Tuple[int, int]] = {}
        self._nproc = nproc
        self._looked_until: Optional[float] = None

    def run(self) -> None:
        """Look until the process ends: asleep while all ranks are known and run."""
        while True:
            children = self._note_ranks()
            try:
                waits = children and not self._looks_for_ranks()
                some = self._note(os.P_ALL, 0, block=bool(waits))
                for pid in children if some else ():
                    self._note(os.P_PID, pid, block=False)
            except ChildProcessError:
                some = False
                self._looked_until = None
            # One that ended is seen again and again until torchrun takes its status.
            time.sleep(_LOOK_AT_ENDED if some else _LOOK_FOR_RANKS)

    def _looks_for_ranks(self) -> bool:
        """Whether a rank may not yet be known as one: it is told by its environment, after it has begun."""
        if self._looked_until is None:
            self._looked_until = time.monotonic() + _SECONDS_TO_KNOW_RANKS
        known = sum(1 for pid in self.ranks if pid not in self.ended)
        return known < self._nproc and time.monotonic() < self._looked_until

    def _note(self, kind: int, pid: int, block: bool) -> bool:
        """Note a child that has ended; return whether there is one."""
        flags = os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG)
        try:
            found = os.waitid(kind, pid, flags)  # type: ignore[arg-type,unused-ignore]
        except ChildProcessError:
            if kind == os.P_ALL:
                raise
            return False
        if found is None or found.si_pid == 0:
            return False
        status = found.si_status if found.si_code == os.CLD_EXITED else 128 + found.si_status
        self.ended.setdefault(found.si_pid, (time.time(), status))
        return True

    def _note_ranks(self) -> List[int]:
        """Return the children, and note which ranks they are."""
        children = _children()
        for pid in children:
            if pid not in self.ranks and pid not in self.ended:
                rank = _rank_of(pid)
                if rank is not None:
                    self.ranks[pid] = rank
        return children


def _children(pid: str = "self") -> List[int]:
    """Return the children of a process: proc_pid_task_tid_children(5)."""
    found: List[int] = []
    try:
        for thread in os.listdir("/proc/%s/task" % pid):
            with open("/proc/%s/task/%s/children" % (pid, thread), encoding="ascii") as file:
                found += [int(word) for word in file.read().split()]
    except (OSError, ValueError):
        pass
    return found


# -- the launch step outside --------------------------------------------------------------


def _follow_launch_step() -> None:
    """End with the launch step, also when it is killed: nobody is left then who would end or record the ranks.

    Slurm does not always: where it follows processes by their parents (proctrack/linuxproc) it loses those whose
    parent died. The launch step holds the other end of our standard input; the ranks get an empty one, as ever.
    """
    try:
        leash = os.dup(0)
        empty = os.open(os.devnull, os.O_RDONLY)
        if not stat.S_ISFIFO(os.fstat(leash).st_mode):
            os.close(leash)
            return
        os.dup2(empty, 0)
        os.close(empty)
    except OSError:
        return
    threading.Thread(target=_wait_for_end, args=(leash,), name="hpcenv-leash", daemon=True).start()


def _wait_for_end(leash: int) -> None:
    said = b""
    try:
        while len(said) < len(LEASH):
            more = os.read(leash, len(LEASH) - len(said))
            if not more:
                return  # somebody else's pipe
            said += more
        if said != LEASH:
            return
        while os.read(leash, 1):
            pass
    except OSError:
        return
    until = time.monotonic() + _SECONDS_TO_KILL
    while True:
        # Again and again: what is killed has children, and torchrun may start ranks anew.
        left = _below("self")
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        if not left or time.monotonic() > until:
            os._exit(128 + signal.SIGKILL)
        time.sleep(_LOOK_FOR_RANKS)


def _below(pid: str) -> List[int]:
    """Return the children of a process that still run, their children and so on."""
    found: List[int] = []
    for child in _children(pid):
        found += [child, *_below(str(child))]
    return [one for one in found if not _is_zombie(one)]


def _is_zombie(pid: int) -> bool:
    try:
        with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except (OSError, IndexError):
        return True


def _rank_of(pid: int) -> Optional[Tuple[int, int]]:
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            variables = dict(item.split(b"=", 1) for item in file.read().split(b"\0") if b"=" in item)
        return int(variables[b"RANK"]), int(variables[b"LOCAL_RANK"])
    except (OSError, ValueError, KeyError):
        return None


# -- the record ---------------------------------------------------------------------------


def _status_of(code: Any) -> Optional[int]:
    if not isinstance(code, int):
        return None
    return code if code >= 0 else 128 - code


def _rank(rank: int, failure: Any, ends: Ends) -> Dict[str, Any]:
    """Return one of ChildFailedError's failures; its own time is that of the last look, so ours goes first."""
    pid = getattr(failure, "pid", -1)
    file = getattr(failure, "error_file", "")
    has_file = isinstance(file, str) and os.path.isfile(file)
    status = _status_of(getattr(failure, "exitcode", None))
    seen = ends.ended.get(pid)
    time_of_torch = getattr(failure, "timestamp", None)
    ended = seen[0] if seen else None
    # The time in an error file is that of an exception, in whole seconds. One that torchrun ended may have met one
    # before, as others had failed: its own end, which nobody saw, came after theirs.
    if ended is None and has_file and status not in _ENDED_BY_TORCHRUN and isinstance(time_of_torch, (int, float)):
        ended = float(time_of_torch)
    return {
        "rank": rank,
        "local_rank": getattr(failure, "local_rank", -1),
        "pid": pid,
        "status": status,
        "ended": ended,
        "error_file": file if has_file else "",
    }


def _failed(failures: Any, ends: Ends) -> List[Dict[str, Any]]:
    """Return the ranks that failed, the first one first.

    Of those whose end nobody saw, the ones that torchrun ended itself (TERM, then KILL) go last.
    """
    ranks = [_rank(rank, failure, ends) for rank, failure in dict(failures).items()]
    known = {rank["pid"] for rank in ranks}
    for pid, (number, local) in ends.ranks.items():
        seen = ends.ended.get(pid)
        if pid not in known and seen is not None and seen[1] != 0:
            ranks.append(
                {"rank": number, "local_rank": local, "pid": pid, "status": seen[1], "ended": seen[0], "error_file": ""}
            )
    newest: Dict[int, Dict[str, Any]] = {}
    for rank in ranks:
        # With --max_restarts a rank may have failed before: its last end is what counts.
        other = newest.get(rank["rank"])
        if other is None or (rank["ended"] or 0) >= (other["ended"] or 0):
            newest[rank["rank"]] = rank
    unseen = float("inf")
    return sorted(
        newest.values(),
        key=lambda rank: (unseen if rank["ended"] is None else rank["ended"], rank["status"] in _ENDED_BY_TORCHRUN),
    )


def _write(path: str, record: Dict[str, Any]) -> None:
    aside = "%s.%d.tmp" % (path, os.getpid())
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(aside, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1, sort_keys=True)
            file.write("\n")
        os.replace(aside, path)
    except OSError as error:
        print("hpcenv: cannot write %s: %s" % (path, error), file=sys.stderr, flush=True)


# -- torchrun -----------------------------------------------------------------------------


def _exception(module: str, name: str) -> Any:
    """Return an exception class of torch; an empty tuple, which catches nothing, where it is not there."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return ()


def _own_import_path() -> None:
    """Let ranks import what hpcenv offers them, and this process nothing of it.

    Last, so that it hides nothing of the image's or the user's PYTHONPATH.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    if sys.path and os.path.abspath(sys.path[0]) == here:
        del sys.path[0]
    inside = os.path.join(os.environ.get("HPCENV_RUN_FOLDER", ""), "inside")
    if os.path.isabs(inside) and os.path.isdir(inside):
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = "%s:%s" % (before, inside) if before else inside


def _outlive_signals() -> None:
    """Let torchrun end when its ranks have ended, not when somebody signals every process of the job.

    Slurm does that where it follows processes by their parents (proctrack/linuxproc), before the time limit and before
    a preemption: the ranks then have time to save themselves, which torchrun would end. Who ends the ranks is the
    process outside (node/supervise.py). What has a handler here is back at its default in the ranks, so TERM ends one
    that does not listen.
    """

    def nothing(_number: int, _frame: Any) -> None:
        pass

    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), nothing)
    try:
        api: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    except ImportError:
        return
    # torch 1.10 to 2.13: what PContext.start makes the handler of those four, looked up when it does.
    if hasattr(api, "_terminate_process_handler"):
        api._terminate_process_handler = nothing


def _understood(torchrun: Any, words: List[str]) -> List[str]:
    """Leave out our --local_addr where torchrun does not know it: ranks then meet at the host name of the first node.

    torch 1.10 has no such option, 2.0 has.
    """
    try:
        known = vars(torchrun.get_args_parser())["_option_string_actions"]
    except (AttributeError, KeyError):
        return words
    end = words.index("--") if "--" in words else len(words)
    ours = [word for word in words[:end] if word.startswith("--local_addr=")]
    if not ours or "--local_addr" in known:
        return words
    print("hpcenv: torchrun of this torch does not know %s" % ours[0], file=sys.stderr, flush=True)
    return [word for word in words[:end] if word not in ours] + words[end:]


def run(record_path: str, words: List[str]) -> int:
    """Run torchrun with `words`; write the record and return the exit status."""
    _own_import_path()
    _outlive_signals()
    nproc = [int(match.group(1)) for match in (re.match(r"--nproc[_-]per[_-]node=(\d+)\Z", w) for w in words) if match]
    ends = Ends(nproc[0] if nproc else 1)
    if hasattr(os, "waitid"):
        ends.start()
    torchrun = importlib.import_module("torch.distributed.run")
    child_failed = _exception("torch.distributed.elastic.multiprocessing.errors", "ChildFailedError")
    signalled = _exception("torch.distributed.elastic.multiprocessing.api", "SignalException")
    # `main` is wrapped by @record, which would only complain that torchrun has no error file itself.
    main = getattr(torchrun.main, "__wrapped__", torchrun.main)
    record: Dict[str, Any] = {"schema": 1, "status": 0, "error": "", "asked": "", "ranks": []}
    try:
        main(_understood(torchrun, words))
        return 0
    except child_failed as error:
        record["ranks"] = _failed(getattr(error, "failures", {}), ends)
        statuses = [rank["status"] for rank in record["ranks"] if rank["status"]]
        record["status"] = statuses[0] if statuses else 1
    except signalled as error:
        number = int(getattr(error, "sigval", 15))
        record["asked"] = str(getattr(getattr(error, "sigval", None), "name", number))
        record["ranks"] = _failed({}, ends)
        record["status"] = 128 + number
    except SystemExit as end:
        record["status"] = end.code if isinstance(end.code, int) else (0 if end.code is None else 1)
        record["error"] = "torchrun did not take its command line" if record["status"] == 2 else "torchrun ended itself"
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr, flush=True)
    except BaseException as error:  # torchrun's own failure: a rendezvous that nobody joined, say
        import traceback

        traceback.print_exc()
        record["error"] = "%s: %s" % (type(error).__name__, error)
        record["ranks"] = _failed({}, ends)
        record["status"] = 1
    if record["status"] != 0:
        _write(record_path, record)
    return int(record["status"])


def main(arguments: List[str]) -> int:
    """Take the command line apart, and wait at the door."""
    # They may reach every process of a job (node/supervise.py), also before there is anything to stop. Ranks inherit
    # that they are ignored, until they set a handler of their own.
    for name in ("SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    _follow_launch_step()
    if arguments[:1] == ["--door"]:
        with open(arguments[1], encoding="utf-8") as door:
            if door.read() != "go":
                return 90
        arguments = arguments[2:]
        # Started with -S: until now nothing of the image has run but Python itself, no `.pth` and no sitecustomize.
        if sys.flags.no_site:
            site.main()
    if len(arguments) < 2 or arguments[1] != "--":
        print("usage: agent.py [--door FIFO] RECORD -- TORCHRUN-WORDS...", file=sys.stderr)
        return 2
    return run(arguments[0], arguments[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
