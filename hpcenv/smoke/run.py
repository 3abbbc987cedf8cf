"""Run the smoke test on this node: start its ranks like the ranks of the training, and enforce the limits.

Runs on: COMPUTE NODE, one task per node. This process does not take part in the collective operations, because a rank
that hangs in such an operation cannot end itself.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv.container.start_gate import StartGate
from hpcenv.errors import HpcenvError, NodesUnknown
from hpcenv.judge.smoke import nccl_log
from hpcenv.judge.smoke.plan import PAIR_SECONDS, rounds
from hpcenv.launch import launch, processes
from hpcenv.launch.launch import Begun
from hpcenv.launch.supervise import Signals, caught_signals
from hpcenv.machine.this_node import ThisNode
from hpcenv.process import below
from hpcenv.records.codec import SCHEMA
from hpcenv.records.files import load_record, read_end, save_record, write_text
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.smoke import SmokeEnd, SmokePlan, SmokeReport
from hpcenv.records.verdict import NodeSettings
from hpcenv.smoke import ras
from hpcenv.smoke.reach import Reach
from hpcenv.smoke.watch import Counter, Others, Watch

_SECONDS_BETWEEN_LOOKS = 0.05
# The files of the ranks are not read more often, because all nodes share their file system.
_SECONDS_BETWEEN_READS = 1.0
# The interface's traffic in these last seconds shows whether a link is slow or broken.
_COUNTED_SECONDS = 5.0
_SECONDS_TO_END = 10.0
_SAID_BYTES = 2000
_DIAGNOSTICS_BYTES = 1 << 20


def run(
    manifest: Manifest,
    this_node: ThisNode,
    environ: Mapping[str, str],
    *,
    pairs: bool,
) -> SmokeReport:
    """Run the test on this node and write its record.

    Args:
        manifest: manifest of the run.
        this_node: this node and this attempt.
        environ: environment variables of the job step.
        pairs: whether to test pairs of nodes instead of all ranks together.

    Raises:
        RecordInvalid, NodesUnknown: there is no plan for this attempt.
        OSError: the record cannot be written.
    """
    folder = RunFolder(Path(manifest.run_folder))
    plan = load_record(SmokePlan, folder.smoke_plan)
    if (plan.run, plan.attempt) != (manifest.run, this_node.attempt):
        raise NodesUnknown(f"`{folder.smoke_plan}` belongs to attempt {plan.attempt}, this is {this_node.attempt}")
    test = _Test(manifest, folder, plan, this_node, environ, pairs=pairs)
    started = time.monotonic()
    with caught_signals() as signals, ExitStack() as stack:
        try:
            report = test.run(signals, stack)
        except (HpcenvError, OSError) as error:
            report = test.report("not-started", problem=str(error))
        report = replace(report, seconds=round(time.monotonic() - started, 3))
        save_record(report, folder.smoke_of(this_node.node, pairs=pairs))
        # If a pair fails, the other pairs continue: each pair has its own limit.
        if not pairs and report.ended not in ("done", "other-ended"):
            save_record(replace(report, ranks=()), folder.smoke_ended)
    return report


@dataclass(frozen=True, kw_only=True)
class _End:
    """How the watch over the ranks ended."""

    ended: SmokeEnd
    problem: str = ""


class _Test:
    """One start of the test on one node."""

    def __init__(
        self,
        manifest: Manifest,
        folder: RunFolder,
        plan: SmokePlan,
        this_node: ThisNode,
        environ: Mapping[str, str],
        *,
        pairs: bool,
    ) -> None:
        self._run, self._plan, self._this_node, self._environ, self._pairs = folder, plan, this_node, environ, pairs
        self._manifest = manifest
        self._settings = load_record(NodeSettings, folder.env_of(this_node.node))
        self._number = self._settings.node_rank
        self._node = plan.nodes[self._number]
        ranks = folder.smoke / ("pair-ranks" if pairs else "ranks")
        self._ranks, self._place = ranks, ranks / this_node.node
        self._log = self._place / "output.log"
        local = (self._number,) if pairs else range(self._number * self._per_node, (self._number + 1) * self._per_node)
        # Each pair has its own limit; the rounds of all pairs are one phase here.
        seconds = PAIR_SECONDS * (len(rounds(len(plan.nodes))) + 1) if pairs else plan.seconds
        self._watch = Watch(self._place, tuple(local), seconds=seconds, start_seconds=plan.start_seconds)
        self._counter = Counter(self._node.interface, seconds=_COUNTED_SECONDS)
        self._others = Others(folder.smoke_ended, run=plan.run, attempt=plan.attempt, node=this_node.node)
        self._next_read = 0.0

    @property
    def _per_node(self) -> int:
        return self._plan.nproc_per_node

    @property
    def _nccl(self) -> str:
        """The locked version of NCCL; empty if it is unknown, or if another backend is used."""
        expected = self._manifest.expectations if self._plan.backend == "nccl" else ()
        return next((str(one.value) for one in expected if one.field == "libs.nccl.version"), "")

    def run(self, signals: Signals, stack: ExitStack) -> SmokeReport:
        """Run the test; at the end of `stack`, processes of the test that still run are ended."""
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir(parents=True)
        manifest, settings = self._changed()
        nodes = len(self._plan.nodes)
        processes.adopt_orphans()
        output = stack.enter_context(self._log.open("wb"))
        begun = launch.begin(
            manifest,
            self._this_node,
            self._environ,
            settings,
            nodes,
            stack,
            ranks=self._ranks,
            output=output,
        )
        stack.callback(_end, begun)
        end = self._attend(begun, signals)
        answer = self._ask_ras() if end.ended == "timeout" else ""
        moved = self._counter.moved()
        _end(begun)
        return replace(self.report(end.ended, problem=end.problem), moved_bytes=moved, ras=answer)

    def _changed(self) -> tuple[Manifest, NodeSettings]:
        """Return manifest and settings as for the training, but with the test's own program and rendezvous."""
        plan = self._plan
        arguments = [f"--folder={self._place}", f"--backend={plan.backend}"]
        if self._pairs:
            arguments += [f"--seconds={PAIR_SECONDS}", f"--pairs={self._write_rounds()}"]
        else:
            arguments += [f"--seconds={plan.seconds}"]
            arguments += ["--diagnostics"] if nccl_log.has_diagnostics(self._nccl) else []
        launch = self._manifest.launch
        # A failed rank is a result of the test, so torchrun must not start it again.
        words = (*launch.torchrun_args, "--max-restarts=0")
        options = replace(launch, launcher="tasks" if self._pairs else "torchrun", torchrun_args=words, expand=False)
        manifest = replace(
            self._manifest,
            script=str(self._run.code / "hpcenv" / "incontainer" / "smoke.py"),
            module="",
            entry="",
            args=tuple(arguments),
            nproc_per_node=1 if self._pairs else plan.nproc_per_node,
            secrets=(),
            launch=options,
        )
        rendezvous = self._settings.rendezvous
        own = replace(rendezvous, port=plan.port, id=f"{rendezvous.id}.smoke")
        return manifest, replace(self._settings, rendezvous=own)

    def _write_rounds(self) -> Path:
        path = self._place / "rounds.json"
        nodes = [{"host": node.address, "port": node.pair_port} for node in self._plan.nodes]
        write_text(json.dumps({"nodes": nodes, "rounds": rounds(len(nodes))}) + "\n", path)
        return path

    def _attend(self, begun: Begun, signals: Signals) -> _End:
        """Wait until the ranks end, or until one of the limits is reached."""
        reach = None
        if self._number > 0 and not self._pairs:
            reach = Reach(self._settings.rendezvous.host, self._plan.port)
            reach.start()
        try:
            while True:
                begun.gate.wait(_SECONDS_BETWEEN_LOOKS)
                status = begun.child.poll()
                if status is not None:
                    return self._ended(status, begun.gate)
                end = self._look(signals, reach)
                if end is not None:
                    return end
        finally:
            if reach is not None:
                reach.close()

    def _look(self, signals: Signals, reach: Reach | None) -> _End | None:
        self._counter.look()
        if signals.asked_to_end is not None or signals.warned:
            number = signals.asked_to_end or signal.SIGUSR2
            return _End(ended="stopped", problem=f"got {signal.Signals(number).name}")
        now = time.monotonic()
        if now < self._next_read:
            return None
        self._next_read = now + _SECONDS_BETWEEN_READS
        ranks_run = self._watch.begun()
        if reach is not None and ranks_run:
            reach.close()  # The agents have met: from now on, the limits of the phases apply.
        elif reach is not None and reach.silent_for() > self._plan.seconds:
            target = f"{self._settings.rendezvous.host}, port {self._plan.port}"
            return _End(ended="unreachable", problem=f"nothing came back from {target}: {reach.problem}")
        late = self._watch.late()
        if late is None:
            other = None if self._pairs else self._others.ended(ranks_run=ranks_run)
            return None if other is None else _End(ended="other-ended", problem=f"{other.node}: {other.problem}")
        if late.phase == "start":
            return _End(ended="not-started", problem=f"rank {late.rank} did not start within {late.seconds:.0f} s")
        if late.phase == "all":
            return _End(ended="timeout", problem=f"rank {late.rank} gave its result, but its process did not end")
        return _End(ended="timeout", problem=f"rank {late.rank}: {late.phase} did not end within {late.seconds:.0f} s")

    def _all_done(self) -> bool:
        return all(rank.done for rank in self._watch.ranks(nccl=False))

    def _ended(self, status: int, gate: StartGate) -> _End:
        """Return the result that follows from the end of the agent. An agent may fail although its ranks are done."""
        if gate.refused:
            return _End(ended="not-started", problem="the SIF changed after it was checked")
        if self._all_done():
            return _End(ended="done")
        if not self._watch.started():
            return _End(ended="not-started", problem=f"the ranks ended with {status}: {self._said()}")
        return _End(ended="failed", problem=f"the ranks ended with {status}")

    def _said(self) -> str:
        """Return the last line with content in the output of the ranks and of torchrun."""
        try:
            text = read_end(self._log, most=_SAID_BYTES).decode(errors="replace")
        except OSError:
            return "they wrote nothing"
        lines = [line.strip() for line in text.splitlines() if line.strip(" =-\n")]
        return lines[-1] if lines else "they wrote nothing"

    def _ask_ras(self) -> str:
        if self._plan.backend != "nccl":
            return ""
        versions = {rank.transport.version for rank in self._watch.ranks(nccl=True) if rank.transport is not None}
        address = next((s.value for s in self._settings.settings if s.name == "NCCL_RAS_ADDR"), "")
        return ras.ask(max(versions, default=""), address)

    def report(
        self,
        ended: SmokeEnd,
        *,
        problem: str = "",
    ) -> SmokeReport:
        return SmokeReport(
            schema=SCHEMA,
            run=self._manifest.run,
            node=self._this_node.node,
            attempt=self._this_node.attempt,
            ended=ended,
            problem=problem,
            ranks=self._watch.ranks(nccl=self._plan.backend == "nccl"),
            diagnostics=self._diagnostics(),
        )

    def _diagnostics(self) -> tuple[str, ...]:
        if self._pairs or not nccl_log.has_diagnostics(self._nccl):
            return ()
        # The files of the ranks are read, because torchrun copies them to its own output about 0.1 s later.
        found = sorted(self._place.glob("*/attempt_*/*/stdout.log"))[: self._per_node]
        return nccl_log.read_diagnostics(line for path in found for line in _last_lines(path))


def _last_lines(path: Path) -> list[str]:
    try:
        return read_end(path, most=_DIAGNOSTICS_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []


def _end(begun: Begun) -> None:
    """End the agent and its ranks. They have no state to save."""
    child = begun.child
    if child.poll() is None:
        processes.send((*below(child.pid), child.pid), signal.SIGKILL)
        # A process that hangs in the kernel does not end here; Slurm ends it with the step.
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_SECONDS_TO_END)
    processes.end_rest(begun.before)
