"""How the ranks of a run applied its determinism profile. Runs on: LOGIN NODE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcenv.records.determinism import RankDeterminism, read_run_determinism
from hpcenv.records.manifest import DeterminismProfile, Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.runs.attempts import read_finished
from hpcenv.text import listed, visible

_MOST_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class OverriddenSwitch:
    """A switch whose value differed from the value in the profile.

    Attributes:
        found: the values that were read and differ from the profile.
        ranks: the ranks that read these values.
        changed_at: `file:line` of the script that changed the switch; empty if hpcenv did not see the change.
    """

    name: str
    asked: str
    found: tuple[str, ...]
    ranks: tuple[int, ...]
    changed_at: str = ""


@dataclass(frozen=True, kw_only=True)
class DeterminismReport:
    """The values of the determinism switches that the ranks of one attempt read back.

    Attributes:
        profile: the determinism profile that the run requests.
        seeds: whether the run requests only seeds, and no profile.
        attempt: the newest attempt with records; None if no attempt has records.
        ranks: how many ranks the run has.
        applied: how many ranks have recorded that they applied the profile.
        not_applied: ranks without such a record. Whether these ranks applied the profile is unknown.
        overridden: switches that a script or a variable set to another value.
        without_deterministic_kernel: operation -> how many times torch warned that it is not deterministic, over all
            ranks.
        problems: what ranks could not apply or record, and which records cannot be read.
        stopped_after: the number of optimizer steps after which the start hook ended the training; 0 if the start
            hook did not end the training.
        apart: whether each rank trained alone: all ranks recorded optimizer steps, but no collective operation.
        unseen: whether the run has completed, but no program that `--launcher none` started had the variable RANK
            when it loaded torch.
    """

    profile: DeterminismProfile
    seeds: bool = False
    attempt: int | None
    ranks: int
    applied: int
    not_applied: tuple[int, ...] = ()
    overridden: tuple[OverriddenSwitch, ...] = ()
    without_deterministic_kernel: dict[str, int]
    problems: tuple[str, ...] = ()
    stopped_after: int = 0
    apart: bool = False
    unseen: bool = False


def report_determinism(run: RunFolder, manifest: Manifest) -> DeterminismReport | None:
    """Return what the ranks of the newest attempt read back; None if the run has no start hook."""
    if not manifest.start_hook_sha256:
        return None
    found, unreadable = read_run_determinism(run)
    attempts = {rank.attempt for rank in found} | {rank.attempt for rank in unreadable}
    newest = max(attempts, default=None)
    ranks = [rank for rank in found if rank.attempt == newest]
    count = manifest.nodes * manifest.nproc_per_node
    applied = {rank.rank for rank in ranks if rank.applied_by}
    problems = [f"rank {rank.rank}: {text}" for rank in ranks for text in rank.problems]
    problems += [f"rank {rank.rank}: {rank.why}" for rank in unreadable if rank.attempt == newest]
    kernels: Counter[str] = Counter()
    for rank in ranks:
        kernels.update({one.operation: one.count for one in rank.without_deterministic_kernel})
    asked = manifest.determinism.profile != "off" or manifest.determinism.seeds
    return DeterminismReport(
        profile=manifest.determinism.profile,
        seeds=manifest.determinism.seeds,
        attempt=newest,
        ranks=count,
        applied=len(applied),
        not_applied=tuple(rank for rank in range(count) if rank not in applied) if asked else (),
        overridden=tuple(_overridden(ranks)),
        without_deterministic_kernel=dict(kernels),
        problems=tuple(problems),
        stopped_after=max((rank.stopped_after for rank in ranks), default=0),
        apart=len(ranks) == count and all(rank.apart for rank in ranks),
        unseen=newest is None and _starts_alone(manifest) and read_finished(run).get("status") == 0,
    )


def _starts_alone(manifest: Manifest) -> bool:
    torch = any(package.name == "torch" for package in manifest.packages)
    return torch and manifest.launch.launcher == "none" and manifest.nodes > 1


def _overridden(ranks: Sequence[RankDeterminism]) -> Iterator[OverriddenSwitch]:
    names = dict.fromkeys(switch.name for rank in ranks for switch in rank.switches if switch.overridden)
    for name in names:
        rows = [(rank.rank, switch) for rank in ranks for switch in rank.switches if switch.name == name]
        rows = [(rank, switch) for rank, switch in rows if switch.overridden]
        values = {v for _, s in rows for v in (s.at_start, s.after_first_step, s.at_end) if v not in (None, s.asked)}
        yield OverriddenSwitch(
            name=name,
            asked=rows[0][1].asked or "",
            found=tuple(sorted(value for value in values if value is not None)),
            ranks=tuple(rank for rank, _ in rows),
            changed_at=next((switch.changed_at for _, switch in rows if switch.changed_at), ""),
        )


def apart_lines(report: DeterminismReport | None) -> Sequence[str]:
    """Return a line if each rank trained alone, or if it is unknown whether the ranks trained together."""
    if report is not None and report.unseen:
        what = "no program had the variable RANK when it loaded torch"
        return (f"{what}: whether the programs of the nodes trained one model is not known",)
    if report is None or not report.apart:
        return ()
    what = f"the {report.ranks} ranks trained, and no collective operation of torch.distributed ran between them"
    return (f"{what}: each trained its own model (Accelerate on CPUs needs --env ACCELERATE_USE_CPU=true)",)


def lines(report: DeterminismReport) -> Iterator[str]:
    """Yield the report as text for `hpcenv report`. If there is nothing to report, no line is yielded. Pure."""
    if report.profile != "off" or report.seeds:
        what = "seeded, kernels not deterministic" if report.seeds else f"determinism {report.profile}"
        yield f"  switches  {what}: applied by {report.applied} of {report.ranks} ranks"
        if report.not_applied:
            yield f"            not applied, as far as is known: {_ranks(report.not_applied)}"
    for switch in report.overridden:
        place = f" ({visible(switch.changed_at)})" if switch.changed_at else ""
        found = visible(", ".join(switch.found))
        what = f"{visible(switch.name)} is {found}, asked {visible(switch.asked)}"
        yield f"            overridden: {what}, {_ranks(switch.ranks)}{place}"
    kernels = report.without_deterministic_kernel
    if kernels:
        shown = listed([f"{visible(name)} ({count} times)" for name, count in kernels.items()], _MOST_SHOWN)
        yield f"            without a deterministic kernel: {shown}"
    for text in report.problems[:_MOST_SHOWN]:
        yield f"            {visible(text)}"
    for line in apart_lines(report):
        yield f"  ranks     {line}"
    if report.stopped_after:
        yield f"  stopped   after optimizer step {report.stopped_after}, as asked for"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {listed([str(rank) for rank in ranks], 8)}"
