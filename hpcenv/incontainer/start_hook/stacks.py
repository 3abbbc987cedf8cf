"""Write the Python stacks of this rank, and torch's record of its collective operations, at the watcher's request.

A thread waits for a real-time signal that only this thread gets (tgkill). This thread takes Python's lock, and writes
the stacks of all threads and the record of operations. The other threads are not interrupted. A signal to the whole
process would interrupt a read that hangs on a network file system, and then the stacks would not show that read.

If a C call holds the lock, the thread waits. Only in this case the watcher sends a second signal. The handler of this
signal is C code of faulthandler, which writes the stacks without the lock. If Python code ran at this time, the handler
would read frames that change, and could end the process with SIGSEGV (github.com/python/cpython issue 116008; about one
signal in 1000 with three busy threads, measured with Python 3.11). While a C call holds the lock, no frame changes.
"""

import faulthandler
import json
import os
import re
import signal
import sys
import threading
from typing import Any, Dict, List

from .pulse import start_ticks
from .writer import replace_file

# The two real-time signals from this offset on are free for programs with glibc and musl. torch, NCCL, Python and Slurm
# do not use them.
_OFFSET = 7
# Signals for errors of the thread itself. The kernel sends these signals even if they are blocked.
_OF_THREAD = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_MOST_ENTRIES = 512


def begin_stacks(folder: str, rank: int) -> None:
    """Start the thread, whose files are in `folder`. If the start fails, the training continues without the thread."""
    number, without_lock = signal.SIGRTMIN + _OFFSET, signal.SIGRTMIN + _OFFSET + 1
    path = os.path.join(folder, "rank-%d.stacks" % rank)
    try:
        for one in (number, without_lock):
            if signal.getsignal(one) != signal.SIG_DFL:
                raise OSError("signal %d is in use" % one)
        # The file is opened to append, because the watcher empties the file before each request.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # The thread waits for the first signal with sigwait, and no handler runs. The signal has a handler only for the
        # case that another thread gets it: without a handler, the signal would end the process.
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        faulthandler.register(number, file=nowhere, all_threads=False, chain=False)
        faulthandler.register(without_lock, file=descriptor, all_threads=True, chain=False)
        words = (folder, rank, number, without_lock, descriptor)
        threading.Thread(target=_answer, args=words, name="hpcenv-stacks", daemon=True).start()
    except (OSError, RuntimeError, AttributeError) as error:
        sys.stderr.write("hpcenv: rank %d: its stacks cannot be read: %s\n" % (rank, error))


def _answer(folder: str, rank: int, number: int, without_lock: int, descriptor: int) -> None:
    """Write the file that marks this process, then answer each request until the process ends."""
    signal.pthread_sigmask(signal.SIG_SETMASK, set(signal.valid_signals()) - {without_lock, *_OF_THREAD})
    mark = {
        "pid": os.getpid(),
        "tid": threading.get_native_id(),
        "main": "0x%016x" % (threading.main_thread().ident or 0),
        "start": start_ticks(),
        "signal": number,
        "signal-without-lock": without_lock,
        "rank": rank,
    }
    replace_file(os.path.join(folder, "rank-%d.mark" % rank), mark)
    while True:
        signal.sigwait({number})
        while number in signal.sigpending():
            signal.sigwait({number})  # one answer for all requests until now
        faulthandler.dump_traceback(file=descriptor, all_threads=True)
        replace_file(os.path.join(folder, "rank-%d.operations" % rank), operations(sys.modules.get("torch")))


def operations(torch: Any) -> Dict[str, Any]:
    """Return the last operations and the ranks of each process group, or why they are unknown."""
    if torch is None:
        return {"unknown": "torch is not imported"}
    try:
        # This is a private function of torch 2.5 to 2.13. Its result contains gloo's operations since 2.9.
        text = torch._C._distributed_c10d._dump_fr_trace_json()
        return summary(json.loads(text), _members(torch))
    except Exception as error:
        return {"unknown": "%s: %s" % (type(error).__name__, error)}


def _members(torch: Any) -> Dict[str, List[int]]:
    """Return the ranks of each process group, because torch's record has these ranks for NCCL only."""
    world = torch.distributed.distributed_c10d._world
    return {str(world.pg_names[group]): sorted(ranks) for group, ranks in world.pg_group_ranks.items()}


def summary(dump: Dict[str, Any], members: Dict[str, List[int]]) -> Dict[str, Any]:
    """Return for each group its ranks, shortest time-out, last collective and first unfinished operation."""
    groups = {}  # type: Dict[str, Dict[str, Any]]
    unfinished = {}  # type: Dict[str, Dict[Any, Any]]
    for entry in (dump.get("entries") or [])[-_MOST_ENTRIES:]:
        name, about = (list(entry["process_group"]) + ["", ""])[:2]
        group = groups.setdefault(str(name), {"about": str(about), "ranks": members.get(str(name), [])})
        number, word = int(entry["collective_seq_id"]), str(entry["profiling_name"]).split(":")[-1]
        one = {"number": number, "name": word}
        key = (entry.get("p2p_seq_id"), number)
        if entry.get("is_p2p"):
            # Each rank counts its own sends and receives, so their numbers cannot be compared between ranks.
            one = {"number": 0, "name": _with_peer(word, group["ranks"])}
            group["own"] = max(group.get("own", 0), int(entry.get("p2p_seq_id") or 0))
        elif number >= group.get("last", one)["number"]:
            group["last"] = one
        # The operations of a batch have one number, and only the last entry with this number gets a new state.
        waits = unfinished.setdefault(str(name), {})
        if not entry.get("retired") and entry.get("state") != "completed":
            waits.setdefault(key, one)
        else:
            waits.pop(key, None)
        timeout = entry.get("timeout_ms")
        if timeout:
            group["timeout"] = min(float(timeout) / 1000, group.get("timeout", float("inf")))
    for name, waits in unfinished.items():
        if waits:
            groups[name]["waits"] = next(iter(waits.values()))
    return {"groups": groups}


def _with_peer(name: str, ranks: List[int]) -> str:
    """Return torch's name of a send or receive, such as `recv 0<-1`, with the other rank's number in the whole run."""
    found = re.match(r"(send|recv) \d+(?:->|<-)(\d+)$", name)
    if found is None:
        return name
    peer = int(found.group(2))
    return "%s %s rank %d" % (
        found.group(1),
        "to" if found.group(1) == "send" else "from",
        ranks[peer] if peer < len(ranks) else peer,
    )
