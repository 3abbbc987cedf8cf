"""Start torchrun on this node, forward signals to the ranks, and record how torchrun ended.

Runs on: COMPUTE NODE. One task per node, one container per node, torchrun inside it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from hpcenv import process
from hpcenv.errors import FileUnusable, HpcenvError, NodeRejected, NodesUnknown, ToolMissing
from hpcenv.node.check import second_look, sif_check
from hpcenv.node.container import secret
from hpcenv.node.container.start_command import StartCommand, build_start_command, own_folders
from hpcenv.node.container.start_gate import GATE_OPTIONS, StartGate
from hpcenv.node.launch import processes, rank_errors, reserve, start_hook
from hpcenv.node.launch.current_attempt import AttemptWatch, is_current_attempt
from hpcenv.node.launch.stopping import Stop, fuse_that_outlives
from hpcenv.node.launch.supervise import Signals, caught_signals, supervise
from hpcenv.node.stage.staged import data_binds, staged_here
from hpcenv.node.this_node import ThisNode
from hpcenv.records.codec import SCHEMA, encode_record
from hpcenv.records.facts import CheckedSif, Facts, Staged
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Bind, Manifest
from hpcenv.records.outcome import NodeExit
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import NodeSettings, Verdict

# First bytes on the standard input of incontainer/agent.py. They tell the agent that its standard input is a
# pipe from this process. The agent ends the ranks when the pipe closes (PARENT_PIPE there).
PARENT_PIPE = b"hpcenv leash\n"

GATE_STATUSES = (NodeRejected.exit_status, NodesUnknown.exit_status)


def launch(manifest: Manifest, this_node: ThisNode, environ: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Run the training on this node and return torchrun's exit status (128 + N for signal N).

    Args:
        manifest: manifest of the run.
        this_node: this node and this attempt.
        environ: environment variables of the job step.
        say: called with one line for the job's log.

    Raises:
        NodeRejected, NodesUnknown, RecordInvalid: the gate did not pass this node in this
            attempt. No line of the script has run.
        FileUnusable, ToolMissing: torchrun could not be started.
    """
    run = RunFolder(Path(manifest.run_folder))
    stop = Stop(manifest, this_node, environ)
    with caught_signals() as signals, ExitStack() as stack:
        started = time.time()
        try:
            settings, nodes = _opened_by_gate(manifest, run, this_node)
            start, descriptors, gate = prepare(manifest, run, this_node, settings, nodes, environ, stack)
        except HpcenvError as error:
            # Without this record, the report would name a failure of another node as the first one.
            status = error.exit_status if error.exit_status in GATE_STATUSES else NodesUnknown.exit_status
            ended = _exit_record(manifest, this_node, status, started, signals)
            _record(replace(ended, detail=error.what, refused=True), run, this_node, say)
            raise
        if signals.asked_to_end is not None:
            status = 128 + signals.asked_to_end
            _record(_exit_record(manifest, this_node, status, started, signals), run, this_node, say)
            return status
        killed_before = rank_errors.count_oom_kills(rank_errors.own_cgroup())
        before = process.below(os.getpid())
        processes.adopt_orphans()
        child = start_agent(start, descriptors, stack)
        status = supervise(child, signals, gate=gate, stop=stop, watch=AttemptWatch(run, this_node))
        killed = processes.end_rest(before)
        if killed:
            say(f"hpcenv: node {this_node.node}: killed {killed} processes that torchrun left running")
        swapped = gate is not None and (gate.refused or (status != 0 and not gate.is_open and not gate.is_same()))
        status = NodeRejected.exit_status if swapped else status
        ended = replace(
            _exit_record(manifest, this_node, status, started, signals),
            stopped=stop.stopped,
            saved=stop.saved,
            oom_kills=rank_errors.oom_since(killed_before, rank_errors.count_oom_kills(rank_errors.own_cgroup())),
        )
        if gate is not None and swapped:
            changed = _sif_changed(this_node, f"{gate.path}, from which the container was started,")
            _record(replace(ended, detail=changed.what, refused=True), run, this_node, say)
            raise changed
        ranks = rank_errors.read_ranks(run, this_node.node, status=status)
        ended = replace(ended, ranks=ranks.failed, detail=ranks.detail, alone=ranks.alone)
        _record(ended, run, this_node, say)  # first of all: Slurm may end this step soon
        asked = bool(stop.stopped) or signals.asked_to_end is not None
        again = second_look.look_again(manifest, _facts(run, this_node), environ, asked=asked)
        if again.changed or again.skipped:
            ended = replace(ended, changed=again.changed, not_looked_again=again.skipped)
            _record(ended, run, this_node, say)
            for line in second_look.in_words(again, this_node.node):
                say(line)
        for line in rank_errors.in_words(ranks, this_node.node) if signals.asked_to_end is None else ():
            say(line)
    return status


# -- before -------------------------------------------------------------------------------


def _opened_by_gate(manifest: Manifest, run: RunFolder, this_node: ThisNode) -> tuple[NodeSettings, int]:
    """Return this node's settings and the number of nodes that train.

    Raises:
        NodesUnknown: there is no matching verdict for this attempt.
    """
    verdict = load_record(Verdict, run.verdict)
    if (verdict.run, verdict.attempt, verdict.result) != (manifest.run, this_node.attempt, "match"):
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


def prepare(
    manifest: Manifest,
    run: RunFolder,
    this_node: ThisNode,
    settings: NodeSettings,
    nodes: int,
    environ: Mapping[str, str],
    stack: ExitStack,
    *,
    ranks: Path | None = None,
) -> tuple[StartCommand, tuple[int, ...], StartGate | None]:
    """Return the command that starts torchrun, the open files that it inherits, and its start gate.

    Args:
        manifest: of the run; the smoke test changes its program.
        run: the run folder.
        this_node: this node and this attempt.
        settings: of this node.
        nodes: number of nodes that take part.
        environ: environment variables of the job step.
        stack: closes and removes everything that is opened here.
        ranks: folder for the records and the output of the ranks; None for that of the training.

    Raises:
        NodeRejected, NodesUnknown, FileUnusable: the container cannot be started from the checked SIF.
    """
    variables = _variables(manifest, run, this_node, settings, environ)
    if manifest.environment.kind == "host":
        start = build_start_command(
            manifest.environment,
            agent_argv(manifest, settings, nodes=nodes, ranks=ranks),
            workdir=manifest.workdir,
            variables=variables,
            inherited=environ,
            passed=manifest.pass_env,
        )
        return start, (), None
    descriptor, checked = stack.enter_context(_verified_sif(manifest, run, this_node))
    staged = staged_here(manifest, this_node)
    _hold(staged, stack)
    home = run.home_of(this_node.node)
    try:
        home.mkdir(parents=True, exist_ok=True)
        tmp, outside = (
            stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True))
            for prefix in (f"hpcenv-{this_node.job_id}-", "hpcenv-gate-")
        )
        gate = StartGate(Path(outside), descriptor, checked)
    except OSError as error:
        raise FileUnusable(
            f"node {this_node.node} cannot make the container's folders",
            why=str(error),
            hint="check free space and quota of the run folder and of the node's temporary folder (TMPDIR)",
        ) from error
    start = build_start_command(
        manifest.environment,
        agent_argv(manifest, settings, nodes=nodes, gate_options=GATE_OPTIONS, ranks=ranks),
        workdir=manifest.workdir,
        variables=variables,
        inherited=environ,
        passed=manifest.pass_env,
        image=f"/proc/self/fd/{descriptor}",
        home=str(home),
        binds=[gate.bind, *_binds(manifest, tmp), *settings.binds],
        data=data_binds(manifest, staged),
    )
    fuse = Path(outside, "fuse")
    fuse.mkdir()
    first = fuse_that_outlives(fuse, start.env)
    if first is not None:
        start = replace(start, env={**start.env, "PATH": f"{first}:{start.env.get('PATH', '')}"})
    return start, (descriptor,), gate


def _variables(
    manifest: Manifest, run: RunFolder, this_node: ThisNode, settings: NodeSettings, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of the ranks: settings from the gate, paths for `hpcenv.training`, secrets."""
    return {
        **{setting.name: setting.value for setting in settings.settings},
        "HPCENV_RUN_FOLDER": str(run.path),
        "HPCENV_STOP_FOLDER": str(run.stopping),
        "HPCENV_CHECKPOINTS": str(run.checkpoints),
        "HPCENV_ATTEMPT": str(this_node.attempt),
        "HPCENV_NODE": this_node.node,
        **start_hook.variables(manifest),
        **secret.read_all(manifest.secrets, environ, node=this_node.node, kept=manifest.secret_values),
    }


def _hold(staged: Staged, stack: ExitStack) -> None:
    """Lock the marks of the copies on this node's disk, so that no other job removes a copy while it is used."""
    for mark in staged.marks:
        try:
            descriptor = os.open(mark, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # the copy is open already, or its use reports that it is missing
        stack.callback(os.close, descriptor)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def agent_argv(
    manifest: Manifest,
    settings: NodeSettings,
    *,
    nodes: int,
    gate_options: Sequence[str] = (),
    ranks: Path | None = None,
) -> list[str]:
    """Return the command line of the agent, which starts torchrun on one node and records how its ranks end. Pure.

    Args:
        manifest: manifest of the run.
        settings: settings of this node.
        nodes: number of nodes that train.
        gate_options: options that make the agent wait at the start gate; empty outside a container.
        ranks: as for `prepare`.
    """
    run = RunFolder(Path(manifest.run_folder))
    folder = (ranks or run.ranks) / settings.node
    return [
        manifest.environment.python,
        *(["-S"] if gate_options else []),
        str(run.code / "hpcenv" / "incontainer" / "agent.py"),
        *gate_options,
        str(folder / rank_errors.AGENT_RECORD),
        *_launcher_options(manifest, settings, nodes=nodes, log_dir=str(folder)),
    ]


def _launcher_options(manifest: Manifest, settings: NodeSettings, *, nodes: int, log_dir: str) -> list[str]:
    if manifest.launch.launcher == "torchrun":
        return ["--", *torchrun_argv(manifest, settings, nodes=nodes, log_dir=log_dir)]
    return [
        "--tasks",
        f"--nodes={nodes}",
        f"--node-rank={settings.node_rank}",
        f"--tasks-per-node={manifest.nproc_per_node}",
        f"--log-dir={log_dir}",
        "--",
        manifest.script,
        *manifest.args,
    ]


def torchrun_argv(manifest: Manifest, settings: NodeSettings, *, nodes: int, log_dir: str) -> list[str]:
    """Return the arguments of torchrun on one node. Pure.

    `is_host` and `--local-addr` are given because torch compares host names to find them, and
    that fails with several network cards (pytorch#73656). torch 1.10 to 2.15 accepts the option
    names with underscores, except `--local_addr` (see incontainer/agent.py). The output of each
    rank goes to a separate file and, with the rank as prefix, to the log. The user's options
    come first: argparse uses the last value of a repeated option.
    """
    return [
        *manifest.launch.torchrun_args,
        f"--nnodes={nodes}",
        f"--nproc_per_node={manifest.nproc_per_node}",
        *_rendezvous_options(manifest, settings),
        f"--max_restarts={manifest.launch.max_restarts}",
        f"--log_dir={log_dir}",
        "--tee=3",
        *(["--module"] if manifest.module else []),
        # argparse removes the first `--`. With this one, a `--` among the script's arguments arrives.
        "--",
        manifest.module or manifest.script,
        *manifest.args,
    ]


def _rendezvous_options(manifest: Manifest, settings: NodeSettings) -> list[str]:
    """Return the rendezvous options of torchrun. A standalone agent uses localhost and a port that the system chooses.

    torchrun's `--standalone` is not used: up to torch 1.13 it has the fixed port 29400.
    """
    rendezvous = settings.rendezvous
    host = f"[{rendezvous.host}]" if ":" in rendezvous.host else rendezvous.host
    standalone = manifest.launch.standalone
    return [
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint={'localhost:0' if standalone else f'{host}:{rendezvous.port}'}",
        f"--rdzv_id={rendezvous.id}",
        f"--rdzv_conf=is_host={int(settings.node_rank == 0)}",
        f"--local_addr={'localhost' if standalone else settings.local_address}",
    ]


@contextmanager
def _verified_sif(manifest: Manifest, run: RunFolder, this_node: ThisNode) -> Iterator[tuple[int, CheckedSif]]:
    """Open the SIF and prove that it is the file that the check step verified; yield descriptor and check record."""
    facts = load_record(Facts, run.facts_of(this_node.node))
    checked = facts.sif
    path = manifest.environment.sif if checked is None else checked.path
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NodesUnknown(
            f"node {this_node.node} can no longer open the SIF",
            why=str(error),
            hint="do not move or remove the SIF until the job has ended",
        ) from error
    try:
        is_current = (facts.run, facts.attempt, facts.node) == (manifest.run, this_node.attempt, this_node.node)
        if not is_current or checked is None or not _is_checked_file(descriptor, checked):
            raise _sif_changed(this_node, path)
        yield descriptor, checked
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


def _is_checked_file(descriptor: int, checked: CheckedSif) -> bool:
    if sif_check.identity_of(descriptor) != checked.file:
        return False
    if checked.lasting:
        return True
    try:
        # On this file system, `stat` may not show a change: compare the bytes.
        return sif_check.full_sha256(descriptor)[0] == checked.sha256
    except HpcenvError:
        return False


def _binds(manifest: Manifest, tmp: str) -> list[Bind]:
    """Return the binds of every container: the run's folders at their own paths, and a private /tmp."""
    private_tmp = Bind(source=tmp, target="/tmp")  # noqa: S108  (a path in the container)
    return [private_tmp, *own_folders(manifest)]


# -- while it runs ------------------------------------------------------------------------


def start_agent(
    start: StartCommand, descriptors: tuple[int, ...], stack: ExitStack, *, output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start the agent; it ends its ranks when `stack` closes.

    Args:
        output: for what the agent and its ranks print; None for this process's own.

    Raises:
        ToolMissing: it cannot be started.
    """
    parent_pipe, end = os.pipe()
    # The pipe closes when this process ends in any way. incontainer/agent.py then ends the ranks.
    stack.callback(os.close, end)
    os.write(end, PARENT_PIPE)
    try:
        return process.start(
            start.argv,
            env=start.env,
            cwd=start.cwd,
            stdin=parent_pipe,
            stdout=output,
            stderr=output,
            pass_fds=descriptors,
            # These signals would kill torchrun before it sets its handlers. Ranks inherit this.
            ignored=(signal.SIGUSR1, signal.SIGUSR2),
        )
    except (OSError, ValueError) as error:
        raise ToolMissing(
            "torchrun cannot be started",
            why=f"{start.argv[0]} in {start.cwd or 'the container'}: {error}",
            hint="check that this node can see the environment and the working directory",
        ) from error
    finally:
        os.close(parent_pipe)


# -- after --------------------------------------------------------------------------------


def _record(record: NodeExit, run: RunFolder, this_node: ThisNode, say: Callable[[str], None]) -> None:
    """Write the exit record of this node. A full disk must not change the exit status of the training."""
    path = run.exit_of(this_node.node)
    if not is_current_attempt(run, this_node):
        say(f"hpcenv: node {this_node.node}: attempt {this_node.attempt} writes no record: a later attempt has begun")
        return
    # A node that ended well is not told to have failed because others fill the disk.
    record = replace(record, full=reserve.why_full(run) if record.status != 0 else "")
    try:
        reserve.write(run, this_node.node, encode_record(record), path)
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
        asked_to_end="" if asked is None else signal.Signals(asked).name,
        asked_at=None if asked is None else now - (time.monotonic() - signals.since),
    )
