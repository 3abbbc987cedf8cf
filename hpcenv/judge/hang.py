"""Judge from two looks at all ranks whether the ranks hang, and for which rank the other ranks wait. Pure.

Runs on: COMPUTE NODE and LOGIN NODE. Standard library only. The use of a CPU or GPU proves nothing, because a rank that
waits in NCCL uses both fully. Equal lines in both looks do not prove a hang: a rank of JAX computes for minutes on one
line. A hang therefore needs evidence from torch (an operation that does not end, or a record without a new operation)
or from the kernel (a process that cannot run). Without evidence, hpcenv says that the state is unknown, and ends no
process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hpcenv.hostlist import fold_hostlist
from hpcenv.records.hangs import (
    LOCK_HELD,
    Frame,
    GroupState,
    HangFound,
    ProcessState,
    RankStacks,
    StackAnswer,
    StackRequest,
)

_Key = TypeVar("_Key", bound=Hashable)

# A rank that reads or writes this many bytes between two looks is working, because it saves or loads data.
_LEAST_BYTES = 1 << 20
# A rank whose children use this share of a CPU is working: the children are a compiler, or workers that compute. The
# second share is for the rank's own main thread. While this thread waits, it uses no CPU at all. While it computes, it
# may get only a small part of a CPU, because other processes share the CPU.
_LEAST_SHARE = 0.1
_LEAST_OWN_SHARE = 0.02
_MOST_FRAMES = 8
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "in a call that cannot be interrupted", "Z": "ended"}
_STOPPED = frozenset("Tt")
# The process has ended: its parent has not waited for it yet ("Z", "X"), or it is gone.
_ENDED = frozenset(("", "Z", "X"))
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3|/start-hook/|\A<")
_STANDARD = re.compile(r"/lib(64)?/python3[^/]*/(?!(site|dist)-packages/)|\A<")
_LOADER = "torch/utils/data/dataloader.py"
# Functions of torch that wait for other ranks. torch before 2.9 does not record the operations of gloo.
_WAITS = re.compile(r"/torch/distributed/(distributed_c10d|rendezvous)\.py\Z")
# A rank with such a line waits for a child process, or for a worker thread that itself waits for a child process.
_NEEDS_CHILDREN = re.compile(rf"{_LOADER}\Z|/torch/_inductor/|/(subprocess\.py\Z|multiprocessing/|concurrent/futures/)")


def judge(
    request: StackRequest, answers: Sequence[StackAnswer], *, nodes: Sequence[str], ranks: int, at: float
) -> HangFound:
    """Return a judgement of the answers to a request.

    Args:
        nodes: all nodes that train.
        ranks: number of ranks that were started; 0 if hpcenv did not start them itself.
        at: the present time, in seconds since the epoch.
    """
    first, second = (_by_rank(answers, look) for look in (1, 2))
    silent = sorted(set(nodes) - {answer.node for answer in answers if answer.look == 2})
    missing = [f"node {node} did not answer" for node in silent]
    missing += not_asked(second, 0 if silent else ranks)
    still = f"no optimizer step for {duration(request.stalled or 0.0)}"
    if any(_works(first.get(rank), look, request.gap) for rank, look in second.items()):
        lines: tuple[str, ...] = (f"{still}, the ranks are working", *missing)
        return HangFound(id=request.id, kind="working", at=at, lines=lines)
    lines = (*_answer(second), *stack_lines(second.values())) if second else ()
    why = "; ".join(missing or _no_evidence(first, second, request.gap))
    if not second or why:
        return HangFound(id=request.id, kind="unknown", at=at, lines=(f"{still}; {why or 'no rank answered'}", *lines))
    return HangFound(id=request.id, kind="hang", at=at, lines=lines)


def not_asked(looks: Iterable[int], ranks: int) -> list[str]:
    """Return a line with the ranks that hpcenv started, but that no node has asked; empty if all were asked."""
    missing = sorted(set(range(ranks)) - set(looks))
    return [f"{ranks_in_words(missing)} could not be asked (no mark of the start hook)"] if missing else []


def _by_rank(answers: Iterable[StackAnswer], look: int) -> dict[int, RankStacks]:
    return {one.rank: one for answer in answers if answer.look == look for one in answer.ranks}


def duration(seconds: float) -> str:
    """Return a length of time as text, such as `40 s` or `12 min`."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _works(before: RankStacks | None, now: RankStacks, gap: float) -> bool:
    """Whether a rank saves its state, or did any work between two looks."""
    if before is None or before.process.pid != now.process.pid or now.saving or before.saving or now.moves:
        return True  # the rank saves, has just started, or its stack changes
    if now.process.state in _ENDED or {before.process.state, now.process.state} <= _STOPPED:
        return False
    moved = bool(before.stack and now.stack) and lines_of(before.stack) != lines_of(now.stack)
    operations = before.groups is not None and now.groups is not None and _entered(before) != _entered(now)
    # A rank may be in one long call that computes. But a rank that waits for other ranks in NCCL also uses the CPU.
    computes = now.groups is not None and not _waits(now) and _uses_cpu(before, now, gap)
    written = (now.process.written or 0) - (before.process.written or 0) >= _LEAST_BYTES
    return moved or operations or computes or written or (_needs_children(now) and _children_work(before, now, gap))


def _waits(look: RankStacks) -> bool:
    """Whether a rank waits for other ranks in an operation of torch."""
    if look.groups:
        return any(group.waits for group in look.groups)
    # This rank has no record of operations, but the stack may show the operation.
    lines = lines_of(look.stack)
    return bool(lines) and _WAITS.search(lines[0].file) is not None


def _uses_cpu(before: RankStacks, now: RankStacks, gap: float) -> bool:
    """Whether the main thread of a rank, or all of its threads together, used a CPU between two looks."""
    own, total = now.process.cpu - before.process.cpu, now.process.total - before.process.total
    return own >= _LEAST_OWN_SHARE * max(gap, 1.0) or total >= _LEAST_SHARE * max(gap, 1.0)


def _needs_children(look: RankStacks) -> bool:
    """Whether the work of a rank's children can end its wait.

    If a rank waits for other ranks, its children cannot end the wait.
    """
    return not _waits(look) or any(_NEEDS_CHILDREN.search(frame.file) for frame in look.stack)


def _children_work(before: RankStacks, now: RankStacks, gap: float) -> bool:
    busy = now.process.busy - before.process.busy >= _LEAST_SHARE * max(gap, 1.0)
    return busy or bool(_running(before) & _running(now)) or _bytes(now) - _bytes(before) >= _LEAST_BYTES


def _no_evidence(first: Mapping[int, RankStacks], second: Mapping[int, RankStacks], gap: float) -> list[str]:
    """Return why ranks without visible work may still compute; empty if the looks prove that the ranks hang."""
    proven = {rank for rank, look in second.items() if look.groups or _waits(look) or _is_held(first[rank], look)}
    # A C call that holds Python's lock may compute, or may never end. If other ranks wait for it, it counts as a hang.
    unsure = [
        look
        for rank, look in second.items()
        if rank not in proven and (not proven or (look.unknown != LOCK_HELD and _uses_cpu(first[rank], look, gap)))
    ]
    found = _ranks_by(lambda look: look.unknown, unsure)
    return [
        f"{ranks_in_words(ranks)} {'has' if len(ranks) == 1 else 'have'} no operation in torch's flight recorder"
        + (f" ({why})" if why else "")
        for why, ranks in found.items()
    ]


def _is_held(before: RankStacks, now: RankStacks) -> bool:
    """Whether a process could not run: at both looks, it was stopped, or waited in the same system call for a file."""
    one, two = before.process, now.process
    # A process that reads a mapped file is often in state D too, but it is not in a system call.
    same = one.state == two.state == "D" and bool(two.call) and (one.call, one.file) == (two.call, two.file)
    return same or {one.state, two.state} <= _STOPPED


def _running(look: RankStacks) -> set[int]:
    """Return the children that are running. If many processes share a CPU, a running child may use little of it."""
    return {worker.pid for worker in look.workers if worker.state == "R"}


def _bytes(look: RankStacks) -> int:
    """Return the bytes that the workers of a rank have read and written."""
    return sum(worker.written or 0 for worker in look.workers)


def lines_of(stack: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return a stack without the innermost frames of Python's library and torch's DataLoader, which only wait."""
    frames = list(stack)
    for number, frame in enumerate(frames):
        if frame.file.endswith(_LOADER) and frame.function in ("_try_get_data", "_get_data"):
            del frames[: number + 1]
            break
    while frames and _STANDARD.search(frames[0].file):
        del frames[0]
    return tuple(frames)


def _entered(look: RankStacks) -> tuple[tuple[str, int, int], ...]:
    return tuple((group.name, group.last.number if group.last else 0, group.own) for group in look.groups or ())


# -- in words ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wait:
    """An operation in which ranks wait."""

    group: GroupState
    number: int
    name: str

    @property
    def key(self) -> tuple[str, int, str]:
        return self.group.name, self.number, self.name


def _wait_of(look: RankStacks) -> _Wait | None:
    found = [_Wait(group, group.waits.number, group.waits.name) for group in look.groups or () if group.waits]
    # If several operations are unfinished, choose the operation whose name is in the stack.
    names = {frame.function for frame in look.stack}
    return next((wait for wait in found if wait.name.split(" ")[0] in names), found[0] if found else None)


def _answer(looks: Mapping[int, RankStacks]) -> Iterator[str]:
    """Yield one line that says which ranks wait in which operation, and where the other ranks are."""
    waits = {rank: wait for rank, look in looks.items() if (wait := _wait_of(look)) is not None}
    keys = _ranks_by(lambda look: waits[look.rank].key, (looks[rank] for rank in waits))
    named = len({key[0] for key in keys}) > 1
    if not keys:
        places = _ranks_by(_place, looks.values())
        yield "; ".join(
            f"{ranks_in_words(ranks)} {'is' if len(ranks) == 1 else 'are'} {place}" for place, ranks in places.items()
        )
        return
    main = max(keys, key=lambda key: (len(keys[key]), -keys[key][0]))
    wait, inside = waits[keys[main][0]], keys[main]
    text = f"{ranks_in_words(inside)} {'waits' if len(inside) == 1 else 'wait'} in {_operation(wait, named=named)}"
    parts = [text + _at([looks[rank] for rank in inside])]
    others = _ranks_by(
        lambda look: _other(look, waits.get(look.rank), wait, named=named),
        (look for rank, look in looks.items() if rank not in inside),
    )
    for words, ranks in others.items():
        parts.append(f"{ranks_in_words(ranks)} {_of_several(words) if len(ranks) > 1 else words}")
    yield "; ".join(parts)


def _of_several(words: str) -> str:
    """Change words about one rank into words about several ranks."""
    pairs = (("is not in", "are not in"), ("is elsewhere", "are elsewhere"), ("has left", "have left"))
    for one, several in (*pairs, ("it is", "they are"), ("it waits", "they wait")):
        words = words.replace(one, several, 1)
    return words


def _operation(wait: _Wait, *, named: bool) -> str:
    about = wait.group.about if wait.group.about not in ("", "undefined") else wait.group.name
    number = f" no. {wait.number}" if wait.number else ""
    return f"{wait.name}{number}" + (f" of group {about}" if named else "")


def _other(look: RankStacks, own: _Wait | None, wait: _Wait, *, named: bool) -> str:
    """Return what a rank does, if it is not in the operation in which most ranks wait."""
    where = f"it waits in {_operation(own, named=named)}{_at([look])}" if own else f"it is {_place(look)}"
    if wait.group.ranks and look.rank not in wait.group.ranks:
        return f"is not in this group: {where}"
    if not wait.number:
        # A send or receive has no number that can be compared with the numbers of other ranks.
        return "ended" if look.process.state in _ENDED else f"is elsewhere: {where}"
    if look.groups is None:
        return "ended" if look.process.state in _ENDED else f"did not say whether it entered it: {where}"
    last = next((group.last for group in look.groups if group.name == wait.group.name), None)
    if last is None or last.number < wait.number:
        return f"never entered it: {where}"
    if last.number == wait.number and last.name != wait.name:
        return f"called {last.name} in its place: {where}"
    return f"has left it: {where}"


def _at(looks: Sequence[RankStacks]) -> str:
    lines = dict.fromkeys(line for look in looks if (line := _own_line(look.stack)[1]))
    return f" ({', '.join([*lines][:4])})" if lines else ""


def _ranks_by(key: Callable[[RankStacks], _Key], looks: Iterable[RankStacks]) -> dict[_Key, list[int]]:
    """Return key -> the ranks with this key, the lowest rank first."""
    found: dict[_Key, list[int]] = {}
    for look in sorted(looks, key=lambda one: one.rank):
        found.setdefault(key(look), []).append(look.rank)
    return found


def _place(look: RankStacks) -> str:
    """Return where a rank is: the function and the line of the script, and the state of a process that cannot run."""
    process = look.process
    if process.state in _ENDED:
        return "gone: its process has ended"
    held = ", which holds Python's lock" if look.unknown == LOCK_HELD else ""
    function, line = _own_line(look.stack)
    where = f"in {function}" + (f" ({line})" if line else "") + held if function else ""
    words = ", ".join(filter(None, (where, _state_and_call(process))))
    return words or f"silent: {look.unknown or 'no stack'}, {_kernel_view(process)}"


def _kernel_view(process: ProcessState) -> str:
    """Return the kernel's data about a process that gives no stack."""
    state = f"state {process.state}" + (f" ({words})" if (words := _STATES.get(process.state)) else "")
    file = f" of {process.file}" + (f" on {process.mount}" if process.mount else "") if process.file else ""
    call = f"system call {process.call.removeprefix('system call ') or 'unknown'}{file}"
    return f"{state}, kernel function {process.wchan or 'unknown'}, {call}"


def _state_and_call(process: ProcessState) -> str:
    return ", ".join(filter(None, (_STATES.get(process.state, ""), _call(process))))


def _call(process: ProcessState) -> str:
    """Return the system call of a process, if the call is about a file."""
    if not process.file or process.file.startswith(("socket:", "pipe:", "anon_inode:")):
        return f"in the kernel at {process.wchan}" if process.state == "D" and process.wchan else ""
    return f"{process.call} of {process.file}" + (f" on {process.mount}" if process.mount else "")


def _own_line(stack: Sequence[Frame]) -> tuple[str, str]:
    """Return the function that the script called, and the innermost line of the script."""
    loads = any(frame.file.endswith(_LOADER) and frame.function == "__next__" for frame in stack)
    called = ""
    for frame in stack:
        if not _LIBRARY.search(frame.file):
            return "DataLoader.__next__" if loads else called or frame.function, _short(frame)
        # Wrappers around torch's own functions have names that tell a reader nothing, so they are skipped.
        called = frame.function if frame.function not in ("wrapper", "inner") else called
    return called, ""


def _short(frame: Frame) -> str:
    return f"{frame.file.rpartition('/')[2]}:{frame.line}"


def stack_lines(looks: Iterable[RankStacks]) -> list[str]:
    """Return one line for each different stack, with its ranks, and then lines on child processes that are blocked."""
    looks = sorted(looks, key=lambda one: one.rank)
    lines = [f"{ranks_in_words(ranks)}: {text}" for text, ranks in _ranks_by(_stack_line, looks).items()]
    for look in looks:
        stuck = [(worker, words) for worker in look.workers if (words := _state_and_call(worker))]
        lines += [f"rank {look.rank}, its process {worker.pid}: {words}" for worker, words in stuck[:4]]
    return lines


def _stack_line(look: RankStacks) -> str:
    frames = " < ".join(f"{_short(frame)} in {frame.function}" for frame in look.stack[:_MOST_FRAMES])
    silent = not frames and look.process.state not in _ENDED
    kernel = _kernel_view(look.process) if silent else _state_and_call(look.process)
    return "; ".join(filter(None, (frames or "no stack", look.unknown, kernel)))


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as `rank 3` or `ranks 0-6, 9`."""
    folded = fold_hostlist(map(str, ranks)).strip("[]").replace(",", ", ")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {folded}"
