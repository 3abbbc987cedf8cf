"""How well the results of a repeated run can agree with the original, and what limits the agreement. Pure.

Runs on: LOGIN NODE.

Sources: cuBLAS promises equal bits only for one toolkit, one architecture and one number of SMs (cuBLAS documentation,
"Results reproducibility"). PyTorch does not promise equal results across releases or platforms, or between CPU and GPU
(PyTorch notes, "Reproducibility", 2.13). CPU: vector kernels and thread counts changed results in trials (torch 2.13,
2026-11-22).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpcenv.records.manifest import Value
from hpcenv.reproduction.causes import Cause
from hpcenv.reproduction.run_record import RunRecord
from hpcenv.text import cut

Best = Literal["equal", "within", "nothing"]

# Facts of nodes that decide whether results can agree to the last bit, each with words for messages.
_HARDWARE = {
    "host.machine": "another processor architecture",
    "host.gpu-models": "another GPU model",
    "host.gpu-compute-capabilities": "another GPU architecture",
    "host.gpu-sm-counts": "a different number of SMs",
    "host.gpu-mig": "a different division of the GPU (MIG)",
}
_SWITCHES = ("threads", "capability")
# With these groups of differences, results can still be equal to the last bit, but no source promises equal results.
_UNPROMISED = ("ranks per node", "torch and its libraries", "packages", "Python")
# The largest number of characters of a value in a sentence.
_LONGEST = 80


@dataclass(frozen=True, kw_only=True)
class Attainable:
    """The best agreement that can be expected.

    Attributes:
        best: `equal` to the last bit, `within` the tolerance, or `nothing` if the new run is a different experiment.
        reasons: if `best` is `equal`, the conditions for equal results; otherwise why `equal` cannot be expected.
    """

    best: Best
    reasons: tuple[str, ...]


def expect(
    record: RunRecord,
    *,
    world_size: int,
    accumulated: bool = False,
    args: Sequence[str] | None = None,
    lockfile: str = "",
) -> Attainable:
    """Return the agreement that can be expected before a job runs, from the record and the options of the job.

    Args:
        world_size: number of ranks of the new job.
        accumulated: whether fewer ranks keep the same global batch, with the authors' setting `[reproduce] one-node`.
        args: script arguments that the user typed instead of the run's arguments; None for the run's arguments.
        lockfile: path of the lockfile that replaces the run's own lockfile; empty if the run's own lockfile is used.
    """
    reasons = []
    if args is not None and tuple(args) != record.args:
        now, before = (" ".join(words) or "none" for words in (args, record.args))
        return Attainable(best="nothing", reasons=(f"the script gets different arguments: {now}, not {before}",))
    if world_size != record.shape.world_size:
        reasons.append(_other_ranks(record, world_size, accumulated=accumulated))
    if lockfile:
        reasons.append(f"the environment is locked in {lockfile}, not in the run's lockfile")
    profile = _profile(record)
    if profile != "bitwise" and record.determinism:
        reasons.append(f"the run used the determinism profile `{profile or 'off'}`, which does not promise equal bits")
    elif profile != "bitwise":
        reasons.append("no rank recorded which determinism profile the run used")
    if reasons:
        return Attainable(best="within", reasons=tuple(reasons))
    need = "the same CPU kernels and thread count"
    if record.shape.gpus_per_node:
        need = "the same GPU model, number of SMs and libraries"
    return Attainable(best="equal", reasons=(f"on {need}; otherwise within the tolerance",))


def _other_ranks(record: RunRecord, world_size: int, *, accumulated: bool) -> str:
    ranks = f"{world_size} ranks in place of {record.shape.world_size}"
    if accumulated:
        return f"{ranks}, with the same global batch by accumulation: sums have a different order"
    return f"{ranks}: each rank has different data, and the global batch differs unless the script keeps it"


def expect_after(
    reference: RunRecord, other: RunRecord, causes: Iterable[Cause] = (), *, accumulated: bool = False
) -> Attainable:
    """Return the agreement that can be expected between two ended runs, from their records.

    Args:
        reference, other: the records of the two runs.
        causes: the differences between the runs.
        accumulated: whether the arguments differ only in the option with which fewer ranks keep the global batch.
    """
    found = _of_records(reference, other, accumulated=accumulated)
    causes = [replace(one, changes=_unplanned(one, accumulated=accumulated)) for one in causes]
    others = _first_changes(one for one in causes if one.likelihood == "another-experiment")
    if others:
        return Attainable(best="nothing", reasons=(*others, *found.reasons))
    loose = _first_changes(one for one in causes if one.group in _UNPROMISED)
    return Attainable(best="within" if loose else found.best, reasons=(*found.reasons, *loose))


def _unplanned(cause: Cause, *, accumulated: bool) -> tuple[tuple[str, str, str], ...]:
    return tuple(one for one in cause.changes if not (accumulated and one[0] == "run.arguments"))


def _first_changes(causes: Iterable[Cause]) -> tuple[str, ...]:
    """Return one sentence for each group: its first difference, and the number of further differences."""
    found = []
    for one in causes:
        if one.changes:
            field, left, right = one.changes[0]
            more = f", and {len(one.changes) - 1} more" if len(one.changes) > 1 else ""
            found.append(f"{one.group}: {field}: {cut(left, _LONGEST)} -> {cut(right, _LONGEST)}{more}")
    return tuple(found)


def _of_records(reference: RunRecord, other: RunRecord, *, accumulated: bool) -> Attainable:
    reasons = []
    if reference.shape.world_size != other.shape.world_size:
        reasons.append(_other_ranks(reference, other.shape.world_size, accumulated=accumulated))
    for name, words in _HARDWARE.items():
        before, now = _of_nodes(reference, name), _of_nodes(other, name)
        if before and now and before != now:
            reasons.append(f"{words}: {_shown(before)} -> {_shown(now)}")
    before_switches, now_switches = _switches(reference), _switches(other)
    both = sorted(before_switches.keys() & now_switches.keys())
    changed = [name for name in both if before_switches[name] != now_switches[name]]
    reasons += [f"{name}: {before_switches[name]} -> {now_switches[name]}" for name in changed]
    loose = [record for record in (reference, other) if _profile(record) != "bitwise"]
    reasons += [f"{record.run} used the determinism profile `{_profile(record) or 'off'}`" for record in loose]
    return Attainable(best="within" if reasons else "equal", reasons=tuple(reasons))


def _profile(record: RunRecord) -> str:
    """Return the determinism profile that the ranks applied. If it is not known, return the profile in the lockfile."""
    applied = {str(values["profile"]) for values in record.determinism.values() if values.get("profile")}
    return applied.pop() if len(applied) == 1 else "" if record.lock is None else record.lock.determinism


def _of_nodes(record: RunRecord, name: str) -> frozenset[Value]:
    return frozenset(node.values[name] for node in record.nodes if name in node.values)


def _switches(record: RunRecord) -> dict[str, Value]:
    values = record.determinism.get("0", {})
    return {
        name: value
        for name, value in values.items()
        if value is not None and any(word in name.lower() for word in _SWITCHES)
    }


def _shown(values: Iterable[Value]) -> str:
    return ", ".join(sorted({"+".join(one) if isinstance(one, tuple) else str(one) for one in values}))
