"""Start torchrun on this node, pass signals on, and record how it ended.

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
from pathlib import Path

from hpcenv.adapters import process
from hpcenv.dataclass import replace
from hpcenv.errors import FileUnusable, HpcenvError, NodeRejected, NodesUnknown, ToolMissing
from hpcenv.node import failure, processes, secret, sif_check
from hpcenv.node.attempt import Watch, is_ours
from hpcenv.node.door import WAITING, Door
from hpcenv.node.enter import Entry, data_binds, enter, own_folders, staged_here
from hpcenv.node.place import Place
from hpcenv.node.stopping import Stop, fuse_that_outlives
from hpcenv.node.supervise import Signals, caught_signals, supervise
from hpcenv.wire import (
    SCHEMA,
    Bind,
    CheckedSif,
    Facts,
    Manifest,
    NodeExit,
    NodeSettings,
    RunFolder,
    Staged,
    Verdict,
    read,
    write,
)

# What tells incontainer/agent.py that its standard input is a pipe of ours (LEASH there).
LEASH = b"hpcenv leash\n"

GATE_STATUSES = (NodeRejected.exit_status, NodesUnknown.exit_status)


def launch(manifest: Manifest, place: Place, environ: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Run the training on this node and return torchrun's exit status (128 + N for signal N).

    Args:
        manifest: the run.
        place: this node.
        environ: the environment of the step.
        say: takes one line for the job's log.

    Raises:
        NodeRejected, NodesUnknown, RecordInvalid: the gate did not open for this attempt on
            this node; not a line of the script has run.
        FileUnusable, ToolMissing: torchrun could not be started.
    """
    run = RunFolder(Path(manifest.run_folder))
    stop = Stop(manifest, place, environ)
    with caught_signals() as signals, ExitStack() as stack:
        started = time.time()
        try:
            settings, nodes = _opened_by_gate(manifest, run, place)
            entry, descriptors, door = _prepare(manifest, run, place, settings, nodes, environ, stack)
        except HpcenvError as error:
            # Without a record the run would end with whatever the other nodes died of.
            status = error.exit_status if error.exit_status in GATE_STATUSES else NodesUnknown.exit_status
            ended = _exit_record(manifest, place, status, started, signals)
            _record(replace(ended, detail=error.what), run, place, say)
            raise
        if signals.asked_to_end is not None:
            status = 128 + signals.asked_to_end
            _record(_exit_record(manifest, place, status, started, signals), run, place, say)
            return status
        killed_before = failure.count_oom_kills(failure.own_cgroup())
        before = processes.below(os.getpid())
        processes.adopt_orphans()
        child = _start(entry, descriptors, stack)
        status = supervise(child, signals, door=door, stop=stop, watch=Watch(run, place))
        killed = processes.end_rest(before)
        if killed:
            say(f"hpcenv: node {place.node}: killed {killed} processes that torchrun left behind")
        swapped = door is not None and (door.refused or (status != 0 and not door.is_open and not door.is_same()))
        status = NodeRejected.exit_status if swapped else status
        ended = replace(
            _exit_record(manifest, place, status, started, signals),
            stopped=stop.stopped,
            saved=stop.saved,
            oom_kills=failure.oom_since(killed_before, failure.count_oom_kills(failure.own_cgroup())),
        )
        if door is not None and swapped:
            changed = _sif_changed(place, f"{door.path}, of which the container was made,")
            _record(replace(ended, detail=changed.what), run, place, say)
            raise changed
        ranks = failure.read_ranks(run, place.node, status=status)
        _record(replace(ended, ranks=ranks.failed, detail=ranks.detail), run, place, say)
        for line in failure.in_words(ranks, place.node) if signals.asked_to_end is None else ():
            say(line)
    return status


# -- before -------------------------------------------------------------------------------


def _opened_by_gate(manifest: Manifest, run: RunFolder, place: Place) -> tuple[NodeSettings, int]:
    """Return this node's settings and how many nodes train, but only if this very attempt was found to match."""
    verdict = read(Verdict, run.verdict)
    if (verdict.run, verdict.attempt, verdict.result) != (manifest.run, place.attempt, "match"):
        raise NodesUnknown(
            f"no matching verdict for attempt {place.attempt}",
            why=f"{run.verdict} says `{verdict.result}` for run {verdict.run}, attempt {verdict.attempt}",
            hint="start the run through its batch script, which checks the nodes first",
        )
    settings = read(NodeSettings, run.env_of(place.node))
    of_this = (manifest.run, place.attempt, place.node, f"{place.job_id}.{place.attempt}")
    if (settings.run, settings.attempt, settings.node, settings.rendezvous.id) != of_this:
        raise NodesUnknown(
            f"the settings of node {place.node} are not of this start",
            why=f"{run.env_of(place.node)} is of run {settings.run}, attempt {settings.attempt}, "
            f"node {settings.node}, rendezvous {settings.rendezvous.id}",
            hint="do not start two jobs in one run folder",
        )
    return settings, len(verdict.launched or place.nodes)


def _prepare(
    manifest: Manifest,
    run: RunFolder,
    place: Place,
    settings: NodeSettings,
    nodes: int,
    environ: Mapping[str, str],
    stack: ExitStack,
) -> tuple[Entry, tuple[int, ...], Door | None]:
    """Return how to start torchrun, the open files that it needs and its door; `stack` cleans up."""
    variables = _variables(manifest, run, place, settings, environ)
    if manifest.environment.kind == "host":
        entry = enter(
            manifest.environment,
            agent_argv(manifest, settings, nodes=nodes),
            workdir=manifest.workdir,
            variables=variables,
            inherited=environ,
            passed=manifest.pass_env,
        )
        return entry, (), None
    descriptor, checked = stack.enter_context(_verified_sif(manifest, run, place))
    staged = staged_here(manifest, place)
    _hold(staged, stack)
    home = run.home_of(place.node)
    try:
        home.mkdir(parents=True, exist_ok=True)
        tmp, outside = (
            stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True))
            for prefix in (f"hpcenv-{place.job_id}-", "hpcenv-door-")
        )
        door = Door(Path(outside), descriptor, checked)
    except OSError as error:
        raise FileUnusable(
            f"node {place.node} cannot make the container's folders",
            why=str(error),
            hint="check space and quota of the run folder and of the node's temporary folder (TMPDIR)",
        ) from error
    entry = enter(
        manifest.environment,
        agent_argv(manifest, settings, nodes=nodes, waiting=WAITING),
        workdir=manifest.workdir,
        variables=variables,
        inherited=environ,
        passed=manifest.pass_env,
        image=f"/proc/self/fd/{descriptor}",
        home=str(home),
        binds=[door.bind, *_binds(manifest, tmp)],
        data=data_binds(manifest, staged),
    )
    fuse = Path(outside, "fuse")
    fuse.mkdir()
    first = fuse_that_outlives(fuse, entry.env)
    if first is not None:
        entry = replace(entry, env={**entry.env, "PATH": f"{first}:{entry.env.get('PATH', '')}"})
    return entry, (descriptor,), door


def _variables(
    manifest: Manifest, run: RunFolder, place: Place, settings: NodeSettings, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of the ranks: what the gate settled, where their run is (`hpcenv.training`), secrets."""
    return {
        **{setting.name: setting.value for setting in settings.settings},
        "HPCENV_RUN_FOLDER": str(run.path),
        "HPCENV_STOP_FOLDER": str(run.stopping),
        "HPCENV_CHECKPOINTS": str(run.checkpoints),
        "HPCENV_ATTEMPT": str(place.attempt),
        "HPCENV_NODE": place.node,
        **secret.read_all(manifest.secrets, environ, node=place.node),
    }


def _hold(staged: Staged, stack: ExitStack) -> None:
    """Lock the marks of what is used from this node's disk: no other job removes it meanwhile."""
    for mark in staged.marks:
        try:
            descriptor = os.open(mark, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # what it marks is open, or its absence is said where it is used
        stack.callback(os.close, descriptor)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def agent_argv(manifest: Manifest, settings: NodeSettings, *, nodes: int, waiting: Sequence[str] = ()) -> list[str]:
    """Return the command line that starts torchrun on one node and records how its ranks end. Pure.

    Args:
        nodes: how many nodes train.
        waiting: the words for where it waits before it does anything.
    """
    run = RunFolder(Path(manifest.run_folder))
    return [
        manifest.environment.python,
        *(["-S"] if waiting else []),
        str(run.code / "hpcenv" / "incontainer" / "agent.py"),
        *waiting,
        str(failure.record_of(run, settings.node)),
        "--",
        *torchrun_words(manifest, settings, nodes=nodes, log_dir=str(run.ranks / settings.node)),
    ]


def torchrun_words(manifest: Manifest, settings: NodeSettings, *, nodes: int, log_dir: str) -> list[str]:
    """Return the words for torchrun on one node. Pure.

    `is_host` and `--local-addr` are explicit because torch's own guess, comparing host
    names, fails with secondary network cards (pytorch#73656); the underscored option names
    are understood by torch 1.10 to 2.15, all but `--local_addr` (see incontainer/agent.py).
    Each rank's lines go to a file of its own and, prefixed with the rank, to the log. The
    user's own words come before ours: of an option that is given twice argparse takes the last.
    """
    return [
        *manifest.launch.torchrun_args,
        f"--nnodes={nodes}",
        f"--nproc_per_node={manifest.nproc_per_node}",
        *_rendezvous_words(manifest, settings),
        f"--max_restarts={manifest.launch.max_restarts}",
        f"--log_dir={log_dir}",
        "--tee=3",
        # argparse takes the first `--` of what follows for itself: give it one of its own,
        # so that a `--` among the script's arguments arrives.
        "--",
        manifest.script,
        *manifest.args,
    ]


def _rendezvous_words(manifest: Manifest, settings: NodeSettings) -> list[str]:
    """Return where the agents meet; one alone meets itself, on a port that the system chooses as it opens it.

    Not torchrun's own --standalone: up to torch 1.13 that is the fixed port 29400.
    """
    meeting = settings.rendezvous
    host = f"[{meeting.host}]" if ":" in meeting.host else meeting.host
    alone = manifest.launch.standalone
    return [
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint={'localhost:0' if alone else f'{host}:{meeting.port}'}",
        f"--rdzv_id={meeting.id}",
        f"--rdzv_conf=is_host={int(settings.node_rank == 0)}",
        f"--local_addr={'localhost' if alone else settings.local_address}",
    ]


@contextmanager
def _verified_sif(manifest: Manifest, run: RunFolder, place: Place) -> Iterator[tuple[int, CheckedSif]]:
    """Open the SIF and make sure that it is the file which the check step proved; yields both."""
    facts = read(Facts, run.facts_of(place.node))
    checked = facts.sif
    path = manifest.environment.sif if checked is None else checked.path
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NodesUnknown(
            f"node {place.node} cannot open the SIF any more",
            why=str(error),
            hint="keep the SIF where it was locked until the job has ended",
        ) from error
    try:
        of_this = (facts.run, facts.attempt, facts.node) == (manifest.run, place.attempt, place.node)
        if not of_this or checked is None or not _is_what_was_checked(descriptor, checked):
            raise _sif_changed(place, path)
        yield descriptor, checked
    finally:
        os.close(descriptor)


def _sif_changed(place: Place, what: str) -> NodeRejected:
    return NodeRejected(
        f"the SIF changed on node {place.node} after it was checked",
        why=f"{what} is not the file that was checked",
        hint="do not replace SIF files in place; submit again",
    )


def _is_what_was_checked(descriptor: int, checked: CheckedSif) -> bool:
    if sif_check.identity_of(descriptor) != checked.file:
        return False
    if checked.lasting:
        return True
    try:
        # Where `stat` may hide a change, only the bytes tell.
        return sif_check.full_sha256(descriptor)[0] == checked.sha256
    except HpcenvError:
        return False


def _binds(manifest: Manifest, tmp: str) -> list[Bind]:
    """What every run needs to see: its folders at their own paths, and a /tmp of its own."""
    private_tmp = Bind(source=tmp, target="/tmp")  # noqa: S108  (a path in the container)
    return [private_tmp, *own_folders(manifest)]


# -- while it runs ------------------------------------------------------------------------


def _start(entry: Entry, descriptors: tuple[int, ...], stack: ExitStack) -> subprocess.Popen[bytes]:
    leash, end = os.pipe()
    # Held until this process ends, however it does: incontainer/agent.py then ends the ranks.
    stack.callback(os.close, end)
    os.write(end, LEASH)
    try:
        return process.start(
            entry.argv,
            env=entry.env,
            cwd=entry.cwd,
            stdin=leash,
            pass_fds=descriptors,
            new_session=True,
            # torchrun would die of them before it can say what it wants; ranks inherit it.
            ignored=(signal.SIGUSR1, signal.SIGUSR2),
        )
    except (OSError, ValueError) as error:
        raise ToolMissing(
            "torchrun cannot be started",
            why=f"{entry.argv[0]} in {entry.cwd or 'the container'}: {error}",
            hint="check that this node sees the environment and the working directory",
        ) from error
    finally:
        os.close(leash)


# -- after --------------------------------------------------------------------------------


def _record(record: NodeExit, run: RunFolder, place: Place, say: Callable[[str], None]) -> None:
    """Write how it ended. The training's own status must not be lost to a full disk."""
    path = run.exit_of(place.node)
    if not is_ours(run, place):
        say(f"hpcenv: node {place.node}: attempt {place.attempt} ends when another one has begun: it leaves no record")
        return
    try:
        write(record, path)
    except OSError as error:
        say(f"hpcenv: node {record.node}: cannot write {path}: {error}")


def _exit_record(manifest: Manifest, place: Place, status: int, started: float, signals: Signals) -> NodeExit:
    asked, now = signals.asked_to_end, time.time()
    return NodeExit(
        schema=SCHEMA,
        run=manifest.run,
        node=place.node,
        attempt=place.attempt,
        status=status,
        signal=failure.signal_name(status),
        started=started,
        ended=now,
        asked_to_end="" if asked is None else signal.Signals(asked).name,
        asked_at=None if asked is None else now - (time.monotonic() - signals.since),
    )
