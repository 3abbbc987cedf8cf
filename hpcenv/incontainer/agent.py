"""Start torchrun, and record how each of its ranks ended.

Runs on: inside the image (or in a host environment). Needs only the standard library and torch, Python 3.8 to 3.14.

    python3 agent.py RECORD [--start-gate FOLDER] -- TORCHRUN-ARGUMENTS...
    python3 agent.py RECORD [--start-gate FOLDER] --tasks ARGUMENTS...   # tasks.py starts the program, not torchrun
    python3 agent.py RECORD [--start-gate FOLDER] --tasks --ray ARGUMENTS...   # ray_node.py starts Ray and the program

With --start-gate, the agent imports torch, and then waits for the answer of the launch step, which runs outside. Both
use files in FOLDER (start_gate.py in this folder; container/start_gate.py in the launch step).

The agent calls the function that `python3 -m torch.distributed.run` calls (torch 1.10 to 2.13). The agent ends with the
status of the rank that failed first (128 + N if signal N ended the rank). torchrun itself would end with 1 in every
case. The agent finds out itself which rank failed first, because torch checks its ranks only ten times a second. For a
rank without an error file, torch gives the time of that check, in whole seconds (torch 2.13,
elastic/multiprocessing/errors). If the order cannot be determined, the agent behaves as torchrun does, and the record
has no times.

RECORD is a JSON file. The agent writes RECORD after a failure. It also writes RECORD if no rank joined a process group:
`joined` is then 0. RECORD has `status`, `error` (why torchrun itself failed), `asked` (name of the signal that
requested the end) and `ranks`, in the order of their ends. Each rank has `rank`, `local_rank`, `pid`, `status`, `ended`
and `error_file`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import signal
import stat
import sys
import threading
import time
from typing import Any, Dict, List, Optional, Tuple

_CHECK_SECONDS = 0.02
_CHECK_ENDED_SECONDS = 0.005
_SECONDS_TO_KNOW_RANKS = 60.0

# The first bytes in the pipe that the launch step gives as standard input (PARENT_PIPE in launch/launch.py). The
# launch step keeps the pipe open as long as it runs.
PARENT_PIPE = b"hpcenv leash\n"
_SECONDS_TO_KILL = 5.0

# The exit status of an agent that the gate refused (errors.py, NODE_REJECTED). The launch step knows why.
_REFUSED = 90

# The statuses of ranks that torchrun ended because another rank had failed: TERM, then KILL.
_ENDED_BY_TORCHRUN = (143, 137)


def _beside(name: str) -> Any:
    """Load a module from the folder of this file."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py")
    spec = importlib.util.spec_from_file_location("hpcenv_" + name, path)
    module: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


_proc = _beside("proc")


class Ends(threading.Thread):
    """Record when the children of this process end. torchrun, which waits for them, still gets their status.

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
        """Watch the children until this process ends. The thread sleeps while all ranks are known and running."""
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
            # A child that ended is reported repeatedly until torchrun takes its status.
            time.sleep(_CHECK_ENDED_SECONDS if some else _CHECK_SECONDS)

    def _looks_for_ranks(self) -> bool:
        """Return whether a child may be a rank that is not known yet.

        The environment of a child shows its rank only some time after the child was started.
        """
        if self._looked_until is None:
            self._looked_until = time.monotonic() + _SECONDS_TO_KNOW_RANKS
        known = sum(1 for pid in self.ranks if pid not in self.ended)
        return known < self._nproc and time.monotonic() < self._looked_until

    def _note(self, kind: int, pid: int, block: bool) -> bool:
        """Record a child that has ended; return whether a child has ended."""
        flags = os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG)
        try:
            result = os.waitid(kind, pid, flags)  # type: ignore[arg-type,unused-ignore]
        except ChildProcessError:
            if kind == os.P_ALL:
                raise
            return False
        if result is None or result.si_pid == 0:
            return False
        status = result.si_status if result.si_code == os.CLD_EXITED else 128 + result.si_status
        self.ended.setdefault(result.si_pid, (time.time(), status))
        return True

    def _note_ranks(self) -> List[int]:
        """Return the children, and record which ranks they are."""
        children: List[int] = _proc.children(os.getpid())
        for pid in children:
            if pid not in self.ranks and pid not in self.ended:
                rank = _rank_of(pid)
                if rank is not None:
                    self.ranks[pid] = rank
        return children


# -- the launch step outside --------------------------------------------------------------


def _follow_launch_step() -> None:
    """End the ranks and this process when the launch step ends, even if the launch step is killed.

    Without a launch step, no other process would end or record the ranks. Slurm does not always end the ranks: if Slurm
    tracks processes by their parents (proctrack/linuxproc), Slurm loses processes whose parent died. Our standard input
    is a pipe, and the launch step has its other end. The ranks get an empty standard input.
    """
    try:
        pipe = os.dup(0)
        empty = os.open(os.devnull, os.O_RDONLY)
        if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
            os.close(pipe)
            return
        os.dup2(empty, 0)
        os.close(empty)
    except OSError:
        return
    threading.Thread(target=_end_with_pipe, args=(pipe,), name="hpcenv-parent-pipe", daemon=True).start()


def _end_with_pipe(pipe: int) -> None:
    """Wait until the pipe is closed, then kill everything below this process, and end."""
    received = b""
    try:
        while len(received) < len(PARENT_PIPE):
            more = os.read(pipe, len(PARENT_PIPE) - len(received))
            if not more:
                return  # this pipe is not from the launch step
            received += more
        if received != PARENT_PIPE:
            return
        while os.read(pipe, 1):
            pass
    except OSError:
        return
    until = time.monotonic() + _SECONDS_TO_KILL
    while True:
        # This is repeated, because a killed process may have children, and torchrun may start ranks again.
        left = [pid for pid, _ in _proc.descendants(os.getpid()) if _proc.state(pid)[0] not in ("Z", "X", "")]
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        if not left or time.monotonic() > until:
            os._exit(128 + signal.SIGKILL)
        time.sleep(_CHECK_SECONDS)


def _rank_of(pid: int) -> Optional[Tuple[int, int]]:
    variables = _proc.variables(pid)
    try:
        return int(variables[b"RANK"]), int(variables[b"LOCAL_RANK"])
    except (ValueError, KeyError):
        return None


# -- the record ---------------------------------------------------------------------------


def _status_of(code: Any) -> Optional[int]:
    if not isinstance(code, int):
        return None
    return code if code >= 0 else 128 - code


def _rank(rank: int, failure: Any, ends: Ends) -> Dict[str, Any]:
    """Return the record of a failure in ChildFailedError.

    The time in `ends` is more exact than the failure's own time.
    """
    pid = getattr(failure, "pid", -1)
    file = getattr(failure, "error_file", "")
    has_file = isinstance(file, str) and os.path.isfile(file)
    status = _status_of(getattr(failure, "exitcode", None))
    seen = ends.ended.get(pid)
    time_of_torch = getattr(failure, "timestamp", None)
    ended = seen[0] if seen else None
    # The time in an error file is the time of an exception, in whole seconds. This time is not used for a rank that
    # torchrun ended: such a rank ended after the failed ranks, although its exception may be older.
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

    Ranks without a time follow. Among the ranks without a time, those that torchrun itself ended (TERM, then KILL) are
    last.
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
        # With --max-restarts a rank may have failed before: only its last end counts.
        other = newest.get(rank["rank"])
        if other is None or (rank["ended"] or 0) >= (other["ended"] or 0):
            newest[rank["rank"]] = rank
    return _in_order(list(newest.values()))


def _in_order(ranks: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Return the ranks in the order of their ends.

    torchrun may take the status of a rank before this process has seen its end. Such a rank has no time. But torch
    (1.10 to 2.13) first lists the ranks that it finds ended, and then the ranks that it ends itself. So the rank
    without a time ended before each later rank in the list that got TERM or KILL.
    """
    unseen = float("inf")

    def key(number: int) -> Tuple[float, bool]:
        own = ranks[number]["ended"]
        later = [rank["ended"] for rank in ranks[number + 1 :] if rank["status"] in _ENDED_BY_TORCHRUN]
        before = min([time for time in later if time is not None], default=unseen)
        return before if own is None else own, ranks[number]["status"] in _ENDED_BY_TORCHRUN

    return [ranks[number] for number in sorted(range(len(ranks)), key=key)]


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
    """Return an exception class of torch. If torch lacks this class, return an empty tuple, which catches nothing."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return ()


def _own_import_path() -> None:
    """Let the ranks import hpcenv.training, and prevent this process from importing modules of hpcenv by accident.

    The folder of hpcenv.training is the last entry of PYTHONPATH, so that it hides no modules of the image or the user.
    """
    # Python resolves symbolic links in the path of the script. The run folder of an array's element can contain such
    # links, and so can the path of a file system.
    here = os.path.dirname(os.path.realpath(__file__))
    if not sys.path or os.path.realpath(sys.path[0]) != here:
        return  # done before
    del sys.path[0]
    inside = os.path.join(os.environ.get("HPCENV_RUN_FOLDER", ""), "inside")
    if os.path.isabs(inside) and os.path.isdir(inside):
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = "%s:%s" % (before, inside) if before else inside
    hook = os.path.join(os.environ.get("HPCENV_RUN_FOLDER", ""), "start-hook")
    if os.path.isabs(hook) and "HPCENV_START_HOOK" in os.environ:
        # This folder is first in PYTHONPATH, because Python imports only the first `sitecustomize`. Our `sitecustomize`
        # then runs the `sitecustomize` of the image.
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = "%s:%s" % (hook, before) if before else hook


_signals_seen: List[int] = []


def _outlive(names: Tuple[str, ...]) -> Any:
    """Record these signals without any other effect on this process; return their handler."""

    def note(number: int, _frame: Any) -> None:
        _signals_seen.append(number)

    for name in names:
        signal.signal(getattr(signal, name), note)
    return note


def _outlive_signals() -> None:
    """Keep torchrun running when a signal is sent to every process of the job.

    Slurm sends such a signal before the time limit and before a preemption if Slurm tracks processes by their parents
    (proctrack/linuxproc). The ranks then have time to save checkpoints; without this function, torchrun would end the
    ranks at once. The process outside (launch/supervise.py) ends the ranks. A signal that has a handler in this process
    has its default action in the ranks. So TERM ends a rank that has no handler.
    """

    note = _outlive(("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"))
    try:
        api: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    except ImportError:
        return
    # torch 1.10 to 2.13: PContext.start makes this function the handler of the four signals.
    if hasattr(api, "_terminate_process_handler"):
        api._terminate_process_handler = note


def _known_options(torchrun: Any, argv: List[str]) -> List[str]:
    """Remove our --local_addr if torchrun does not have this option: torchrun then uses the first node's host name.

    torch 1.10 does not have this option, 2.0 has it.
    """
    try:
        known = vars(torchrun.get_args_parser())["_option_string_actions"]
    except (AttributeError, KeyError):
        return argv
    end = argv.index("--") if "--" in argv else len(argv)
    ours = [word for word in argv[:end] if word.startswith("--local_addr=")]
    if not ours or "--local_addr" in known:
        return argv
    print("hpcenv: torchrun of this torch does not know %s" % ours[0], file=sys.stderr, flush=True)
    return [word for word in argv[:end] if word not in ours] + argv[end:]


def run(record_path: str, argv: List[str]) -> int:
    """Run torchrun with the arguments `argv`; write the record and return the exit status.

    The agent with the store of the rendezvous ends after the agents of the other nodes (rendezvous_store.py).
    """
    _own_import_path()
    _outlive_signals()
    rendezvous_store = _beside("rendezvous_store")
    endpoint = rendezvous_store.endpoint_hosted_here(argv)
    store = None if endpoint is None else rendezvous_store.hold(*endpoint)
    stores_of_ranks = rendezvous_store.note_stores_of_ranks()
    status = _run_torchrun(record_path, argv)
    if status == 0 and rendezvous_store.has_joined(stores_of_ranks) is False:
        _write(record_path, {"schema": 1, "status": 0, "joined": 0, "error": "", "asked": "", "ranks": []})
    if store is not None:
        limit = None if status == 0 else rendezvous_store.SECONDS_AFTER_FAILURE
        seen = len(_signals_seen)
        rendezvous_store.wait_for_others(*endpoint, limit, lambda: len(_signals_seen) > seen)
    return status


def _run_torchrun(record_path: str, argv: List[str]) -> int:
    nproc = [int(match.group(1)) for match in (re.match(r"--nproc[_-]per[_-]node=(\d+)\Z", w) for w in argv) if match]
    ends = Ends(nproc[0] if nproc else 1)
    if hasattr(os, "waitid"):
        ends.start()
    torchrun = importlib.import_module("torch.distributed.run")
    child_failed = _exception("torch.distributed.elastic.multiprocessing.errors", "ChildFailedError")
    signalled = _exception("torch.distributed.elastic.multiprocessing.api", "SignalException")
    # `main` is wrapped by @record, which would only report that torchrun itself has no error file.
    main = getattr(torchrun.main, "__wrapped__", torchrun.main)
    record: Dict[str, Any] = {"schema": 1, "status": 0, "error": "", "asked": "", "ranks": []}
    try:
        main(_known_options(torchrun, argv))
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
        record["error"] = "torchrun refused its arguments" if record["status"] == 2 else "torchrun ended itself"
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr, flush=True)
    except BaseException as error:  # torchrun itself failed, for example at the rendezvous
        import traceback

        traceback.print_exc()
        record["error"] = "%s: %s" % (type(error).__name__, error)
        record["ranks"] = _failed({}, ends)
        record["status"] = 1
    if record["status"] != 0:
        _write(record_path, record)
    return int(record["status"])


def run_tasks(record_path: str, argv: List[str]) -> int:
    """Start the program without torchrun (tasks.py); write the record and return the exit status."""
    _own_import_path()
    tasks = _beside("tasks")
    _outlive(("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"))
    if argv[:1] == ["--ray"]:
        record = _beside("ray_node").run(argv, tasks, _proc)
    else:
        record = tasks.run(argv, _beside("rank_watch"), _proc)
    if record["status"] != 0:
        _write(record_path, record)
    return int(record["status"])


def main(arguments: List[str]) -> int:
    """Wait at the start gate, if --start-gate is given. Then run torchrun or the tasks."""
    # These signals may reach every process of a job (launch/supervise.py), even before the ranks exist. This process
    # ignores the signals. The ranks also ignore them until they set their own handlers.
    for name in ("SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    _follow_launch_step()
    record_path, words = arguments[:1], arguments[1:]
    if words[:1] == ["--start-gate"] and len(words) > 1:
        _own_import_path()
        if not _beside("start_gate").may_start(words[1]):
            return _REFUSED
        words = words[2:]
    if not record_path or words[:1] not in (["--"], ["--tasks"]):
        print("usage: agent.py RECORD [--start-gate FOLDER] -- TORCHRUN-ARGUMENTS...", file=sys.stderr)
        return 2
    if words[0] == "--tasks":
        return run_tasks(record_path[0], words[1:])
    return run(record_path[0], words[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
