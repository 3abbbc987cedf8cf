"""Start the ranks of this node, forward signals to them, and record how they ended.

Runs on: COMPUTE NODE. Each node has one task and one container, in which torchrun or the user's program runs. With
`--launcher srun`, each rank has one task and one container.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from hpcenv import process
from hpcenv.container import secret
from hpcenv.container.start_command import StartCommand, build_start_command, let_through, opened, own_folders
from hpcenv.container.start_gate import StartGate, is_unchanged
from hpcenv.errors import FileUnusable, HpcenvError, NodeRejected, NodesUnknown, ToolMissing
from hpcenv.facts import loaded, second_look
from hpcenv.identity import code, sif_check
from hpcenv.identity.stage.staged import data_binds, staged_here
from hpcenv.judge import gpu_start
from hpcenv.judge.checks.check_table import active
from hpcenv.launch import node_exit, node_folders, processes, rank_errors, reserve, start_hook, starts
from hpcenv.launch.compiled_caches import cache_variables
from hpcenv.launch.current_attempt import AttemptWatch, is_current_attempt
from hpcenv.launch.run_variables import run_variables
from hpcenv.launch.stopping import Stop, fuse_that_outlives
from hpcenv.launch.supervise import Signals, caught_signals, supervise
from hpcenv.machine.limits import job_memory
from hpcenv.machine.network import port_errors
from hpcenv.machine.this_node import ThisNode, find_local_rank
from hpcenv.records.checked_sif import CheckedSif
from hpcenv.records.checks import CheckOutcome
from hpcenv.records.codec import SCHEMA, encode_record
from hpcenv.records.facts import Difference, Facts, Staged
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Bind, Manifest, Setting
from hpcenv.records.outcome import NodeExit
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import NodeSettings, Verdict
from hpcenv.watch.process import watched
from hpcenv.watch.watched_node import FOLDER, bind_of_ranks, folder_of_ranks, folders_prefix

# First bytes on the standard input of incontainer/agent.py. They tell the agent that its standard input is a pipe from
# this process. The agent ends the ranks when the pipe closes (PARENT_PIPE there).
PARENT_PIPE = b"hpcenv leash\n"

# The log names at most this many error counters; the exit record has all of them.
_MOST_COUNTERS = 8

_CODE = "code.digest"

# The path of a socket has at most 107 bytes (unix(7)). Our folder's name and Ray's names in it need up to 86 bytes.
_LONGEST_ABOVE_RAY = 20

GATE_STATUSES = (NodeRejected.exit_status, NodesUnknown.exit_status)


def launch(
    manifest: Manifest,
    this_node: ThisNode,
    environ: Mapping[str, str],
    *,
    say: Callable[[str], None],
) -> int:
    """Run the training on this node and return its exit status (128 + N for signal N).

    Args:
        manifest: manifest of the run.
        this_node: this node and this attempt.
        environ: environment variables of the job step.
        say: function that writes one line to the job's log.

    Raises:
        NodeRejected, NodesUnknown, RecordInvalid: the gate did not let this node start in
            this attempt. No line of the script has run.
        FileUnusable, ToolMissing: torchrun could not be started.
    """
    local_rank = find_local_rank(environ, cluster=manifest.cluster) if starts.starts_one_rank(manifest) else None
    node = _Node(manifest=manifest, this_node=this_node, environ=environ, say=say, local_rank=local_rank)
    with caught_signals() as signals, ExitStack() as stack:
        processes.adopt_orphans()
        if not local_rank:
            node_folders.remove_left()
        return _train(node, signals, stack)


@dataclass(frozen=True, kw_only=True)
class Begun:
    """An agent that was started and waits at its start gate.

    Attributes:
        child: apptainer, or the agent on the host.
        gate: the start gate of the agent.
        before: descendants of this process that ran before the agent was started.
    """

    child: subprocess.Popen[bytes]
    gate: StartGate
    before: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Node:
    """The launch on one node: run, node and ranks.

    Attributes:
        ranks: folder for the records and the output of the ranks; None for the folder of the training.
        local_rank: the only rank that this process starts (`--launcher srun`); None for all ranks of the node.
    """

    manifest: Manifest
    this_node: ThisNode
    environ: Mapping[str, str]
    say: Callable[[str], None]
    ranks: Path | None = None
    local_rank: int | None = None

    @property
    def run(self) -> RunFolder:
        return RunFolder(Path(self.manifest.run_folder))


def _train(node: _Node, signals: Signals, stack: ExitStack) -> int:
    """Start the training, wait for its end, and record it."""
    manifest, run, this_node, say = node.manifest, node.run, node.this_node, node.say
    stop = Stop(manifest, this_node, node.environ, asks=node.local_rank in (None, 0))
    started = time.time()
    killed_before = rank_errors.count_oom_kills(rank_errors.own_cgroup())
    at_gate = _AtGate(node)
    try:
        settings, nodes = _opened_by_gate(manifest, run, this_node)
        asked = signals.asked_to_end is not None
        at_gate.settings = settings
        begun = None if asked else _begin(node, settings, nodes, stack, judge=at_gate.may_start)
    except HpcenvError as error:
        # Without this record, the report would name another node's failure as the first failure.
        status = error.exit_status if error.exit_status in GATE_STATUSES else NodesUnknown.exit_status
        ended = _exit_record(manifest, this_node, status, started, signals)
        _record(node, replace(ended, detail=error.what, refused=True, differences=_changed_overlay(node)))
        raise
    if begun is None:
        status = 128 + (signals.asked_to_end or signal.SIGTERM)
        _record(node, _exit_record(manifest, this_node, status, started, signals))
        return status
    counters = _port_counters(node)
    # The watch must not belong to the training. At its end, all remaining processes of the training are killed.
    with watched(manifest, this_node, first=not node.local_rank, say=say):
        status = supervise(begun.child, signals, gate=begun.gate, stop=stop, watch=AttemptWatch(run, this_node))
    killed = processes.end_rest(begun.before)
    if killed:
        say(f"hpcenv: node {this_node.node}: killed {killed} processes that the training left running")
    gate = begun.gate
    refusal: HpcenvError | None = at_gate.error() if at_gate.blocking else None
    changed: tuple[Difference, ...] = ()
    if gate.refused or (status != 0 and not gate.is_open and not gate.is_same()):
        changed = _changed_overlay(node)
        of_sif = _sif_changed(this_node, f"{gate.path}, from which the container was started,")
        refusal = _overlay_changed(this_node, changed[0].found) if changed else of_sif
    status = status if refusal is None else refusal.exit_status
    ended = replace(
        _exit_record(manifest, this_node, status, started, signals),
        stopped=stop.stopped,
        saved=stop.saved,
        oom_kills=rank_errors.oom_since(killed_before, rank_errors.count_oom_kills(rank_errors.own_cgroup())),
        **_grown(node, counters),
    )
    if refusal is not None:
        refused = replace(ended, detail=refusal.what, refused=True, differences=at_gate.blocking or changed)
        _record(node, refused)
        raise refusal
    _record_end(node, ended, signals, stop)
    return status


def _record_end(node: _Node, ended: NodeExit, signals: Signals, stop: Stop) -> None:
    """Record how the ranks of this node ended, also in the log."""
    run, this_node, say = node.run, node.this_node, node.say
    ranks = rank_errors.read_ranks(run, this_node.node, status=ended.status, local_rank=node.local_rank)
    ended = replace(ended, ranks=ranks.failed, detail=ranks.detail, alone=ranks.alone)
    _record(node, ended)  # this is the first action, because Slurm may end this step soon
    for line in rank_errors.in_words(ranks, this_node.node) if signals.asked_to_end is None else ():
        say(line)
    if node.local_rank:
        return  # only the first task of the node does the rest
    asked = bool(stop.stopped) or signals.asked_to_end is not None

    again = second_look.look_again(node.manifest, _facts(run, this_node), node.environ, asked=asked)
    if again.changed or again.skipped:
        ended = replace(ended, changed=again.changed, not_looked_again=again.skipped)
        _record(node, ended)
        for line in second_look.in_words(again, this_node.node):
            say(line)


def _port_counters(node: _Node) -> port_errors.PortCounters | None:
    """Return the error counters of the RDMA ports; None if no check needs them, or if another task reads them."""
    asked = any(check.id == "ib.errors" for check in active(node.manifest))
    return port_errors.read_counters() if asked and not node.local_rank else None


def _grown(node: _Node, before: port_errors.PortCounters | None) -> dict[str, Any]:
    """Return the fields of the exit record about counters that grew; write growth above the limit to the log."""
    if before is None or not (before.values or before.unread):
        return {}
    growth = port_errors.compare(before, port_errors.read_counters())
    many = [port_errors.in_words(one) for one in growth.errors if one.many]
    if many:
        found = ", ".join(many[:_MOST_COUNTERS])
        node.say(f"hpcenv: node {node.this_node.node}: RDMA errors while the ranks ran: {found}")
    return {"port_errors": growth.errors, "port_errors_unknown": growth.unknown}


# -- before -------------------------------------------------------------------------------


def _opened_by_gate(manifest: Manifest, run: RunFolder, this_node: ThisNode) -> tuple[NodeSettings, int]:
    """Return this node's settings and the number of nodes that train.

    Raises:
        NodesUnknown: the verdict is not `match`, or verdict or settings belong to another attempt.
    """
    verdict = load_record(Verdict, run.verdict)
    if verdict.run != manifest.run or not verdict.allows(this_node.attempt):
        raise NodesUnknown(
            f"no matching verdict for attempt {this_node.attempt}",
            why=f"{run.verdict} has `{verdict.result}` for run {verdict.run}, attempt {verdict.attempt}",
            hint="start the run with its batch script, which checks the nodes first",
        )
    settings = load_record(NodeSettings, run.env_of(this_node.node))
    expected = (manifest.run, this_node.attempt, this_node.node, f"{this_node.job_id}.{this_node.attempt}")
    if (settings.run, settings.attempt, settings.node, settings.rendezvous.id) != expected:
        raise NodesUnknown(
            f"the settings of node {this_node.node} belong to another start of the job",
            why=f"{run.env_of(this_node.node)} belongs to run {settings.run}, attempt {settings.attempt}, "
            f"node {settings.node}, rendezvous {settings.rendezvous.id}",
            hint="do not start two jobs in one run folder",
        )
    return settings, len(verdict.launched or this_node.nodes)


def _what_to_load(node: _Node) -> dict[str, object]:
    """Return what the agent must load and report before it starts the ranks."""
    manifest = node.manifest
    # Only the ranks of the smoke test have another folder.
    gpus = gpu_start.wanted(manifest, node.local_rank) if node.ranks is None else {}
    libraries = {} if manifest.launch.launcher == "tasks" else loaded.wanted(manifest)
    # Without torchrun, torch is loaded only to see which libraries the loader chooses, and to try the GPUs.
    torch = manifest.launch.launcher == "torchrun" or bool(libraries) or bool(gpus)
    return {"torch": torch, "libraries": libraries, "gpus": gpus}


class _AtGate:
    """Judges what this node's agent reports at its start gate: the loaded libraries and the GPUs.

    The first node also checks the run's copy of the code again. This happens once per job, because the files may have
    changed since the check step.

    Attributes:
        settings: settings of this node; None until they are read.
        blocking: differences that forbid the start of every rank.
    """

    def __init__(self, node: _Node) -> None:
        self.settings: NodeSettings | None = None
        self.blocking: tuple[Difference, ...] = ()
        self._node = node

    def may_start(self, report: Mapping[str, object]) -> bool:
        """Return whether the agent's report lets the ranks start; differences go to the log."""
        manifest = self._node.manifest
        if manifest.launch.launcher != "tasks":
            found = loaded.compare(manifest, report)
            for line in loaded.in_words(found, self._node.this_node.node):
                self._node.say(line)
            self.blocking = loaded.blocking(found)
        if gpu_start.wanted(manifest, self._node.local_rank) and not self.blocking:
            answer = _judge_gpus(self._node, () if self.settings is None else self.settings.settings, report)
            self.blocking = () if answer.difference is None else (answer.difference,)
        is_first = self.settings is not None and self.settings.node_rank == 0 and not self._node.local_rank
        if is_first and not self.blocking:
            self.blocking = _changed_code(self._node)
        if manifest.session is not None and not self.blocking:
            # With this start record, users can connect to the session from now on (sessions/door.py).
            start = RunFolder(Path(manifest.run_folder)).session_start_of(self._node.this_node.node)
            start.parent.mkdir(exist_ok=True)
            start.touch()
        return not self.blocking

    def error(self) -> NodeRejected | NodesUnknown:
        """Return why no rank started."""
        node, first = self._node.this_node.node, self.blocking[0]
        if first.field == gpu_start.NAME:
            kind = NodesUnknown if first.unknown else NodeRejected
            return kind(first.found, why=first.note, hint=gpu_start.hint(self._node.manifest, first))
        if first.field == _CODE:
            return (NodesUnknown if first.unknown else NodeRejected)(
                f"the run's copy of the code is not what the check found: {first.found}",
                why="the ranks would run files that differ from the files of the verdict",
                hint="submit again; do not edit files in the run folder",
            )
        fields = ", ".join(difference.field for difference in self.blocking)
        if all(difference.unknown for difference in self.blocking):
            return NodesUnknown(
                f"node {node} cannot tell which libraries torch has loaded",
                why=self.blocking[0].found,
                hint="read the lines of this node above",
            )
        return NodeRejected(
            f"torch has loaded other libraries on node {node} than the locked ones: {fields}",
            why="; ".join(f"{d.found} in place of {d.locked}" for d in self.blocking if not d.unknown),
            hint="look at LD_LIBRARY_PATH, LD_PRELOAD, sitecustomize and what the site brings into containers",
        )


def _changed_code(node: _Node) -> tuple[Difference, ...]:
    """Return how the run's copy of the code differs from what the check found."""
    manifest, source = node.manifest, node.manifest.source
    if source is None or not source.digest:
        return ()
    # With torchrun, no rank of another node starts before this node is ready, because this node has the rendezvous.
    extent: code.Extent = "own-modules" if manifest.launch.launcher != "torchrun" else "all"
    try:
        found = code.find_digest(source, node.run, "new-modules" if manifest.setup and extent == "all" else extent)
    except (HpcenvError, OSError) as error:
        return (Difference(field=_CODE, locked=source.digest, found=str(error), unknown=True),)
    return () if found == source.digest else (Difference(field=_CODE, locked=source.digest, found=found),)


def _judge_gpus(node: _Node, settings: tuple[Setting, ...], report: Mapping[str, object]) -> gpu_start.GpuAnswer:
    """Judge and record whether torch can use the GPUs; the log says what hides GPUs."""
    this_node = node.this_node
    place = gpu_start.AskedNode(
        node=this_node.node,
        attempt=this_node.attempt,
        local_rank=node.local_rank,
        environ=node.environ,
        settings=settings,
        facts=_facts(node.run, this_node),
    )
    answer = gpu_start.judge(node.manifest, place, report)
    for note in answer.notes:
        node.say(f"hpcenv: node {this_node.node}: {note}")
    try:
        path = node.run.gpus_of(this_node.node, node.local_rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_record(answer.record, path)
    except OSError as error:
        node.say(f"hpcenv: node {this_node.node}: cannot record the GPUs: {error}")
    return answer


def try_gpus(
    manifest: Manifest, this_node: ThisNode, environ: Mapping[str, str], *, say: Callable[[str], None]
) -> CheckOutcome:
    """Start the agent of this node as for a training, but no rank; return whether torch can use the node's GPUs.

    Args:
        manifest, this_node, environ, say: as for `launch`.

    Raises:
        NodeRejected, NodesUnknown, FileUnusable, ToolMissing: the agent cannot be started.
    """
    node = _Node(manifest=manifest, this_node=this_node, environ=environ, say=say)
    settings, nodes = _opened_by_gate(manifest, node.run, this_node)
    reports: list[Mapping[str, object]] = []

    def refuse(report: Mapping[str, object]) -> bool:
        reports.append(report)
        return False

    with caught_signals() as signals, ExitStack() as stack:
        processes.adopt_orphans()
        begun = _begin(node, settings, nodes, stack, judge=refuse)
        status = supervise(begun.child, signals, gate=begun.gate, watch=AttemptWatch(node.run, this_node))
        processes.end_rest(begun.before)
    ended = {"problem": f"the agent ended with status {status} before it reported"}
    answer = _judge_gpus(node, settings.settings, reports[0] if reports else ended)
    found = f"{answer.what}: {answer.why}" if answer.why else answer.what
    return CheckOutcome(id=gpu_start.NAME, state=answer.state, found=found, seconds=answer.record.seconds)


def begin(
    manifest: Manifest,
    this_node: ThisNode,
    environ: Mapping[str, str],
    settings: NodeSettings,
    nodes: int,
    stack: ExitStack,
    *,
    ranks: Path,
    output: IO[bytes],
) -> Begun:
    """Start the ranks of the smoke test in the same way as the ranks of the training.

    The caller must call `gate.wait()` until the gate is open.

    Args:
        manifest: manifest of the run, with the smoke test as its program.
        this_node: this node and this attempt.
        environ: environment variables of the job step.
        settings: settings of this node.
        nodes: number of nodes that take part.
        stack: stack of the caller; at its end, everything that this function opens is closed and removed.
        ranks: folder for the records and the output of the ranks.
        output: file for the output of the agent and its ranks.

    Raises:
        NodeRejected, NodesUnknown, FileUnusable, ToolMissing: the ranks cannot be started from the checked SIF.
    """
    node = _Node(manifest=manifest, this_node=this_node, environ=environ, say=lambda _line: None, ranks=ranks)
    return _begin(node, settings, nodes, stack, output=output)


def _begin(
    node: _Node,
    settings: NodeSettings,
    nodes: int,
    stack: ExitStack,
    *,
    judge: Callable[[Mapping[str, object]], bool] = lambda _loaded: True,
    output: IO[bytes] | None = None,
) -> Begun:
    """Start the agent, which waits at its gate.

    Args:
        node: the launch on this node.
        settings: settings of this node.
        nodes: number of nodes that take part.
        stack: stack of the caller; at its end, everything that this function opens is closed and removed.
        judge: function that gets the report of the agent and returns whether the ranks may start.
        output: file for the output of the agent and its ranks; None for the output of this process.
    """
    manifest, sif = node.manifest, None
    if manifest.environment.kind == "sif":
        checked = _checked_sif(node)
        _require_checked_overlay(node)
        sif = (stack.enter_context(_opened_sif(node, checked)), checked)
    gate, outside, tmp = _make_gate(node, sif, stack, judge)
    # Only the ranks of the smoke test have another folder.
    watched_in = folder_of_ranks(outside, in_container=sif is not None) if manifest.watch and not node.ranks else ""
    variables = _variables(node, settings, watched_in)
    words = starts.launcher_words(
        manifest,
        settings,
        nodes=nodes,
        ranks=node.ranks,
        local_rank=node.local_rank,
        memory=job_memory(node.environ),
        ray_folder=_ray_folder(node, settings, stack) if manifest.launch.launcher == "ray" else "",
    )
    argv = agent_argv(
        manifest,
        node.this_node.node,
        words=words,
        gate_options=gate.options,
        ranks=node.ranks,
        local_rank=node.local_rank,
    )
    if sif is None:
        start = build_start_command(
            manifest.environment,
            argv,
            workdir=manifest.workdir,
            variables=variables,
            inherited=node.environ,
            passed=manifest.pass_env,
        )
    else:
        watch = [bind_of_ranks(outside)] if watched_in else []
        binds = [gate.bind, *watch, *container_binds(manifest, tmp), *settings.binds]
        start = _outliving(_in_container(node, argv, variables, binds, sif[0], stack), outside)
    before = process.below(os.getpid())
    what = "torchrun" if manifest.launch.launcher == "torchrun" else "the training"
    child = _start(start, () if sif is None else (sif[0],), stack, output, what=what)
    return Begun(child=child, gate=gate, before=before)


def _ray_folder(node: _Node, settings: NodeSettings, stack: ExitStack) -> str:
    """Return the path of a folder for Ray's files. The agent makes and removes the folder.

    On the host, `stack` removes the folder if the agent was killed. Other users cannot guess the path. The path is the
    same on all nodes, because some versions of Ray use the head's path on every node. Emulated nodes have different
    paths, because they share one machine.
    """
    token = Path(f"{node.run.ray_of(settings.rendezvous.id)}.token").read_text()
    own = node.this_node.node if node.manifest.cluster == "local" else ""
    name = f"hpcenv-{hashlib.sha256(f'{token}{own}'.encode()).hexdigest()[:12]}"
    if node.manifest.environment.kind == "sif":
        return f"/tmp/{name}"  # noqa: S108  (a path in the container, whose /tmp is removed)
    above = tempfile.gettempdir()
    folder = f"{above if len(above) <= _LONGEST_ABOVE_RAY else '/tmp'}/{name}"  # noqa: S108
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _variables(node: _Node, settings: NodeSettings, watched_in: str) -> dict[str, str]:
    """Return the variables of the ranks: settings from the gate, paths for `hpcenv.training`, secrets."""
    manifest = node.manifest
    given = {setting.name: setting.value for setting in settings.settings}
    kept = let_through(node.environ, manifest.pass_env, on_host=True)
    return {
        **cache_variables(manifest, {**kept, **given}, node=node.this_node.node),
        **given,
        # Slurm (26.05) numbers all nodes of a step by the topology, including spare nodes. The ranks get the number of
        # hpcenv instead, because the node of MASTER_ADDR must have number 0.
        **({"SLURM_NODEID": str(settings.node_rank)} if "SLURM_NODEID" in node.environ else {}),
        **_own_variables(node, watched_in),
        **secret.read_all(manifest.secrets, node.environ, node=node.this_node.node, kept=manifest.secret_values),
    }


def _make_gate(
    node: _Node, sif: tuple[int, CheckedSif] | None, stack: ExitStack, judge: Callable[[Mapping[str, object]], bool]
) -> tuple[StartGate, Path, str]:
    """Make the folders of the container and its start gate; return the gate, its folder, and the folder for /tmp."""
    this_node = node.this_node
    try:
        if sif is not None:
            node.run.home_of(this_node.node).mkdir(parents=True, exist_ok=True)
        prefix = folders_prefix(this_node)
        outside = stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True))
        (Path(outside) / FOLDER).mkdir()
        tmp = stack.enter_context(_tmp(node))
        overlay = None if sif is None else _checked_overlay(node)
        gate = StartGate(Path(outside), sif, overlay, load=_what_to_load(node), judge=judge)
    except OSError as error:
        raise FileUnusable(
            f"node {this_node.node} cannot make the container's folders",
            why=str(error),
            hint="check free space and quota of the run folder and of the node's temporary folder (TMPDIR)",
        ) from error
    stack.callback(gate.close)
    return gate, Path(outside), tmp


def _in_container(
    node: _Node,
    argv: Sequence[str],
    variables: Mapping[str, str],
    binds: Sequence[Bind],
    descriptor: int,
    stack: ExitStack,
) -> StartCommand:
    """Return the command that starts `argv` in a container of the open SIF."""
    manifest = node.manifest
    staged = staged_here(manifest, node.this_node)
    _hold(staged, stack)
    return build_start_command(
        manifest.environment,
        argv,
        workdir=manifest.workdir,
        variables=variables,
        inherited=node.environ,
        passed=manifest.pass_env,
        image=f"/proc/self/fd/{descriptor}",
        home=str(node.run.home_of(node.this_node.node)),
        binds=binds,
        data=data_binds(manifest, staged),
    )


def _outliving(start: StartCommand, outside: Path) -> StartCommand:
    """Return the start command. If needed, change it so that its FUSE server survives the signals of Slurm."""
    fuse = outside / "fuse"
    fuse.mkdir()
    first = fuse_that_outlives(fuse, start.env)
    if first is None:
        return start
    return replace(start, env={**start.env, "PATH": f"{first}:{start.env.get('PATH', '')}"})


def _own_variables(node: _Node, watched_in: str) -> dict[str, str]:
    """Return the variables by which `hpcenv.training` finds the run."""
    return {
        **run_variables(node.manifest, attempt=node.this_node.attempt),
        "HPCENV_NODE": node.this_node.node,
        **start_hook.variables(node.manifest, node=node.this_node.node, cpus=_cpus_of_ranks(node), watch=watched_in),
        **starts.task_variables(node.manifest, node.environ),
    }


def _cpus_of_ranks(node: _Node) -> tuple[str, ...]:
    """Return the CPUs that each rank is bound to; empty if no rank is bound."""
    if not node.manifest.gpus_per_node or node.manifest.launch.cpu_binding == "off":
        return ()
    found = _facts(node.run, node.this_node)
    return () if found is None or found.rank_cpus is None else found.rank_cpus.cpus


def _hold(staged: Staged, stack: ExitStack) -> None:
    """Lock the `.used` files of the copies on this node's disk. So no other job removes a copy that is in use."""
    for mark in staged.marks:
        try:
            descriptor = os.open(mark, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # the copy is already open, or the code that uses the copy will report that it is missing
        stack.callback(os.close, descriptor)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def agent_argv(
    manifest: Manifest,
    node: str,
    *,
    words: Sequence[str],
    gate_options: Sequence[str] = (),
    ranks: Path | None = None,
    local_rank: int | None = None,
) -> list[str]:
    """Return the command line of the agent, which starts ranks on one node and records how they end. Pure.

    Args:
        manifest: manifest of the run.
        node: name of the node.
        words: what the agent starts, see `starts.launcher_words`.
        gate_options: options that make the agent wait at its start gate.
        ranks: folder for the records and the output of the ranks; None for the folder of the training.
        local_rank: the only rank that the agent starts; None for all ranks of the node.
    """
    run = RunFolder(Path(manifest.run_folder))
    return [
        manifest.environment.python,
        str(run.code / "hpcenv" / "incontainer" / "agent.py"),
        str((ranks or run.ranks) / node / rank_errors.agent_record(local_rank)),
        *gate_options,
        *words,
    ]


def _checked_sif(node: _Node) -> CheckedSif:
    """Return which SIF the check step of this attempt verified on this node."""
    facts = load_record(Facts, node.run.facts_of(node.this_node.node))
    wanted = (node.manifest.run, node.this_node.attempt, node.this_node.node)
    if facts.sif is None or (facts.run, facts.attempt, facts.node) != wanted:
        raise _sif_changed(node.this_node, node.manifest.environment.sif)
    return facts.sif


@contextmanager
def verified_sif(manifest: Manifest, this_node: ThisNode) -> Iterator[tuple[int, CheckedSif]]:
    """Open the SIF and make sure that it is the file that the check step verified; yield descriptor and check record.

    Raises:
        NodeRejected, NodesUnknown: the SIF is another file, or cannot be opened.
    """
    ranks = RunFolder(Path(manifest.run_folder)).ranks
    node = _Node(manifest=manifest, this_node=this_node, environ={}, say=lambda _line: None, ranks=ranks)
    checked = _checked_sif(node)
    _require_checked_overlay(node)
    with _opened_sif(node, checked) as descriptor:
        yield descriptor, checked


def _opened_sif(node: _Node, checked: CheckedSif) -> AbstractContextManager[int]:
    """Open the SIF and make sure that it is the file that the check step verified; yield the descriptor."""
    return _opened(node, checked, "SIF", _sif_changed(node.this_node, checked.path))


@contextmanager
def _opened(node: _Node, checked: CheckedSif, name: str, changed: NodeRejected) -> Iterator[int]:
    """Open a file and make sure that it is the file that the check step verified; yield the descriptor.

    Args:
        node: the launch on this node.
        checked: path and identity of the file that the check step verified.
        name: the name of the file in messages.
        changed: error to raise if the opened file is another file.
    """
    try:
        descriptor = os.open(checked.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NodesUnknown(
            f"node {node.this_node.node} can no longer open the {name}",
            why=str(error),
            hint=f"do not move or remove the {name} until the job has ended",
        ) from error
    try:
        if not _is_checked_file(descriptor, checked):
            raise changed
        yield descriptor
    finally:
        os.close(descriptor)


def _facts(run: RunFolder, this_node: ThisNode) -> Facts | None:
    """Return what the check step of this attempt found on this node."""
    try:
        facts = load_record(Facts, run.facts_of(this_node.node))
    except HpcenvError:
        return None
    return facts if facts.attempt == this_node.attempt else None


def _sif_changed(this_node: ThisNode, what: str) -> NodeRejected:
    return NodeRejected(
        f"the SIF changed on node {this_node.node} after it was checked",
        why=f"{what} is not the file that was checked",
        hint="do not replace SIF files in place; submit again",
    )


def _checked_overlay(node: _Node) -> CheckedSif | None:
    """Return the overlay that this attempt's check step verified on this node; None if the run has no overlay."""
    overlay = node.manifest.environment.overlay
    if overlay is None:
        return None
    facts = _facts(node.run, node.this_node)
    if facts is None or facts.overlay is None:
        raise _overlay_changed(node.this_node, f"{overlay.source} was not checked")
    return facts.overlay


def _require_checked_overlay(node: _Node) -> None:
    """Make sure that the squashfs over the SIF is the file that the check step verified.

    Raises:
        NodeRejected, NodesUnknown: the squashfs is another file, or cannot be opened.
    """
    checked = _checked_overlay(node)
    if checked is None:
        return
    changed = _overlay_changed(node.this_node, f"{checked.path} is not the file that was checked")
    with _opened(node, checked, "overlay", changed):
        pass


def _changed_overlay(node: _Node) -> tuple[Difference, ...]:
    """Return a difference if the squashfs over the SIF is no longer the checked file, otherwise an empty tuple."""
    with suppress(HpcenvError):
        checked = _checked_overlay(node)
        if checked is not None and not is_unchanged(checked):
            found = f"{checked.path} is not the file that was checked"
            field = "container.overlay.sha256"
            return (Difference(field=field, locked="the file that was checked", found=found),)
    return ()


def _overlay_changed(this_node: ThisNode, why: str) -> NodeRejected:
    return NodeRejected(
        f"the overlay changed on node {this_node.node} after it was checked",
        why=why,
        hint="do not replace overlays in place while a job uses them; submit again",
    )


def _is_checked_file(descriptor: int, checked: CheckedSif) -> bool:
    if sif_check.identity_of(descriptor) != checked.file:
        return False
    if checked.lasting:
        return True
    try:
        # On this file system, `stat` may not show a change, so all bytes are hashed.
        return sif_check.full_sha256(descriptor)[0] == checked.sha256
    except HpcenvError:
        return False


def container_binds(manifest: Manifest, tmp: str) -> list[Bind]:
    """Return the binds of every container: the run's folders at their own paths, and a private /tmp."""
    private_tmp = Bind(source=tmp, target="/tmp")  # noqa: S108  (a path in the container)
    return [private_tmp, *own_folders(manifest)]


@contextmanager
def _tmp(node: _Node) -> Iterator[str]:
    """Make the folder that is /tmp in the container. Tasks of one node share the folder; the last task removes it."""
    job_id = node.this_node.job_id
    if node.local_rank is None:
        prefix = f"{node_folders.JOB}{job_id}-"
        with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as own, node_folders.in_use(own):
            yield own
        return
    name = hashlib.sha256(f"{node.run.path}\n{node.this_node.attempt}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"{node_folders.JOB}{job_id}-{name}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise FileExistsError(f"{folder} exists, and is not a private folder of this user")
    with node_folders.in_use(folder):
        yield str(folder)
    count = node.manifest.nproc_per_node
    if len(node_exit.read_tasks(node.run, node.this_node, count=count)) == count:
        shutil.rmtree(folder, ignore_errors=True)


# -- while it runs ------------------------------------------------------------------------


def _start(
    start: StartCommand, descriptors: tuple[int, ...], stack: ExitStack, output: IO[bytes] | None, *, what: str
) -> subprocess.Popen[bytes]:
    parent_pipe, end = os.pipe()
    # The pipe closes when this process ends in any way. incontainer/agent.py then ends the ranks.
    stack.callback(os.close, end)
    os.write(end, PARENT_PIPE)
    try:
        with opened(start) as (argv, files):
            return process.start(
                argv,
                env=start.env,
                cwd=start.cwd,
                stdin=parent_pipe,
                stdout=output,
                stderr=output,
                pass_fds=(*descriptors, *files),
                # These signals would kill torchrun before it sets its handlers. Ranks inherit this.
                ignored=(signal.SIGUSR1, signal.SIGUSR2),
            )
    except (OSError, ValueError) as error:
        raise ToolMissing(
            f"{what} cannot be started",
            why=f"{start.argv[0]} in {start.cwd or 'the container'}: {error}",
            hint="check that this node can see the environment and the working directory",
        ) from error
    finally:
        os.close(parent_pipe)


# -- after --------------------------------------------------------------------------------


def _record(node: _Node, record: NodeExit) -> None:
    """Write the exit record of this node. A full disk must not change the exit status of the training."""
    run, this_node, say = node.run, node.this_node, node.say
    path = run.exit_of(this_node.node)
    if not is_current_attempt(run, this_node):
        say(f"hpcenv: node {this_node.node}: attempt {this_node.attempt} writes no record: a later attempt has begun")
        return
    # A node that ended well must not count as failed only because the disk is full.
    record = replace(record, full=reserve.why_full(run) if record.status != 0 else "")
    try:
        if node.local_rank is None:
            reserve.write(run, this_node.node, encode_record(record), path)
        else:
            node_exit.write(record, run, this_node, node.local_rank, count=node.manifest.nproc_per_node)
    except OSError as error:
        say(f"hpcenv: node {record.node}: cannot write {path}: {error}")


def _exit_record(manifest: Manifest, this_node: ThisNode, status: int, started: float, signals: Signals) -> NodeExit:
    asked, now = signals.asked_to_end, time.time()
    return NodeExit(
        schema=SCHEMA,
        run=manifest.run,
        node=this_node.node,
        attempt=this_node.attempt,
        status=status,
        signal=rank_errors.signal_name(status),
        started=started,
        ended=now,
        launcher=manifest.launch.launcher,
        asked_to_end="" if asked is None else signal.Signals(asked).name,
        asked_at=None if asked is None else now - (time.monotonic() - signals.since),
    )
