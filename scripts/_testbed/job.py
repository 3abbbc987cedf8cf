"""The processes of Slurm's jobs on a machine: agents (a step's task), ranks, and slurmstepd.

Read from /proc alone: a step is what a slurmstepd calls itself, a rank is what torchrun put
into a process's environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import machine
from .errors import Status, TestbedError
from .instance import Instance, Layout

# slurmstepd's title: `slurmstepd: [7.0]`, `slurmstepd: [7.batch]`, `slurmstepd: [7.extern]`.
_STEP = re.compile(rb"slurmstepd: \[(\d+)\.(\w+)\]")
_WORD = re.compile(r"(?P<what>agent|slurmstepd|rank(?P<rank>\d{1,6}))(?:@(?P<node>\w+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobProcess:
    """One process of a job, as the host sees it."""

    pid: int
    machine: str
    job: str
    step: str
    what: str  # "slurmstepd", "agent", "rank3", or "" for anything else

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.what}@{self.machine} of job {self.job} (step {self.step}, pid {self.pid} on the host)"


def is_target(word: str) -> bool:
    """Whether a word of `fault` means processes of jobs."""
    return _WORD.fullmatch(word) is not None


def find(instance: Instance, layout: Layout, word: str, job: str | None) -> list[JobProcess]:
    """`rank3`, `rank3@n2`, `agent@n2`, `slurmstepd@n2`: exactly one job's, or an error that lists what there is."""
    asked = _WORD.fullmatch(word)
    assert asked is not None
    nodes = [one.name for one in machine.machines(layout) if one.role == "compute"]
    if asked["node"] is not None and asked["node"] not in nodes:
        raise TestbedError(f"no node {asked['node']!r}", why=f"there are {', '.join(nodes)}", status=Status.NOT_UP)
    places = nodes if asked["node"] is None else [asked["node"]]
    running = [one for name in places for one in processes(instance, name) if one.what]
    found = [one for one in running if one.what == asked["what"] and job in (None, one.job)]
    if not found:
        known = "\n".join(sorted(one.label for one in running)) or f"no job step runs on {', '.join(places)}"
        raise TestbedError(f"no {word}{f' of job {job}' if job else ''}", why=known, status=Status.NOT_UP)
    if len({(one.job, one.machine) for one in found}) > 1:
        raise TestbedError(
            f"{word!r} means {len(found)} processes",
            why="\n".join(one.label for one in found),
            hint=f"say which: scripts/testbed fault KIND {found[0].what}@{found[0].machine} --job {found[0].job}",
            status=Status.USAGE,
        )
    return found


def processes(instance: Instance, name: str) -> list[JobProcess]:
    """All processes of job steps on a machine."""
    return classify(name, [one.pid for one in machine.processes(instance, name) if one.state != "Z"])


def classify(name: str, pids: Iterable[int]) -> list[JobProcess]:
    """Those of the processes that belong to a step (a batch script has no agent and no rank)."""
    parents = {pid: _parent(pid) for pid in pids}
    steps = {pid: found_step for pid in parents if (found_step := _step_of(pid)) is not None}
    ranks = {pid: _rank_of(pid) for pid in parents}
    found = []
    for pid in parents:
        daemon = next((one for one in _ancestors(pid, parents) if one in steps), None)
        if daemon is None:
            continue
        job, step = steps[daemon]
        what = _what(pid, daemon, parents, ranks) if step.isdigit() else ""
        found.append(JobProcess(pid=pid, machine=name, job=job, step=step, what=what))
    return found


def _what(pid: int, daemon: int, parents: dict[int, int], ranks: dict[int, str | None]) -> str:
    if pid == daemon:
        return "slurmstepd"
    rank = ranks.get(pid)
    # Its children (data loaders) inherit the variable.
    if rank is not None and ranks.get(parents[pid]) != rank:
        return f"rank{rank}"
    return "agent" if parents[pid] == daemon else ""


def _ancestors(pid: int, parents: dict[int, int]) -> Iterable[int]:
    """A process, its parent, and so on."""
    seen: set[int] = set()
    while pid in parents and pid not in seen:
        seen.add(pid)
        yield pid
        pid = parents[pid]


def _parent(pid: int) -> int:
    try:
        return int(machine.status_fields(pid).get("PPid", "0"))
    except (OSError, ValueError):
        return 0


def _step_of(pid: int) -> tuple[str, str] | None:
    found = _STEP.match(_read(pid, "cmdline"))
    return (found[1].decode(), found[2].decode()) if found else None


def _rank_of(pid: int) -> str | None:
    words = dict(word.partition(b"=")[::2] for word in _read(pid, "environ").split(b"\0"))
    # Both, because a site or a user may set RANK for reasons of its own.
    rank = words.get(b"RANK", b"")
    return rank.decode() if rank.isdigit() and b"LOCAL_RANK" in words else None


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
