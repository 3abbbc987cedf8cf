"""Start a shell or a command in the environment of an active run on this node.

Runs on: COMPUTE NODE, in a second job step next to the training. The command has the same SIF or host environment,
binds, data and variables as the ranks. The command gets secrets only on request. RANK and similar variables are not
set, because this process is not a rank.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hpcenv import process
from hpcenv.container import apptainer, secret
from hpcenv.container.manifest import open_manifest
from hpcenv.container.start_command import StartCommand, build_start_command, opened, own_folders
from hpcenv.container.start_gate import is_unchanged
from hpcenv.errors import FileUnusable, NodesUnknown
from hpcenv.identity import sif_check
from hpcenv.identity.stage.staged import data_binds, staged_here
from hpcenv.launch.node_folders import JOB
from hpcenv.launch.run_variables import run_variables
from hpcenv.machine.this_node import LOCAL_NODE, ThisNode
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record, read_json
from hpcenv.records.manifest import Bind, Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.session import SessionFolder
from hpcenv.records.verdict import NodeSettings

# Start bash if the image has bash, else sh.
SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The values with which a command starts in the environment of the ranks.

    Attributes:
        pass_fds: open files that the program inherits under the same numbers.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path | None
    pass_fds: tuple[int, ...]


def attach(
    run: RunFolder,
    environ: Mapping[str, str],
    command: Sequence[str],
    *,
    secrets: bool,
    given: Mapping[str, str] | None = None,
    binds: Sequence[Bind] = (),
) -> int:
    """Run `command`, or a shell if `command` is empty, on this terminal; return the exit status.

    The arguments and errors are those of `prepared`.
    """
    with prepared(run, environ, tuple(command) or SHELL, secrets=secrets, given=given, binds=binds) as start:
        return process.run_in_terminal(start.argv, env=start.env, cwd=start.cwd, pass_fds=start.pass_fds)


@contextlib.contextmanager
def prepared(
    run: RunFolder,
    environ: Mapping[str, str],
    command: Sequence[str],
    *,
    secrets: bool,
    given: Mapping[str, str] | None = None,
    binds: Sequence[Bind] = (),
    own_network: bool = False,
) -> Iterator[Prepared]:
    """Yield the values with which `command` starts like a rank. Its folders and open files exist inside the block.

    Args:
        run: the run folder.
        environ: environment variables of this job step.
        command: argv of the command.
        secrets: whether the command gets the run's secrets.
        given: further variables of the command.
        binds: further binds, for a SIF only.
        own_network: in a SIF, start the command in a private network namespace, which has 127.0.0.1 only.

    Raises:
        NodesUnknown: this node does not train for this run now, or its SIF has changed.
    """
    manifest = open_manifest(run, environ)
    this_node = _this_node(manifest, run, environ)
    settings = load_record(NodeSettings, run.env_of(this_node.node))
    if (settings.run, settings.attempt, settings.node) != (manifest.run, this_node.attempt, this_node.node):
        raise NodesUnknown(
            f"the settings of node {this_node.node} do not belong to attempt {this_node.attempt}",
            why=str(run.env_of(this_node.node)),
        )
    variables = {
        **{setting.name: setting.value for setting in settings.settings},
        **run_variables(manifest, attempt=this_node.attempt),
        **({"TERM": environ["TERM"]} if "TERM" in environ else {}),
        **(
            secret.read_all(manifest.secrets, environ, node=this_node.node, kept=manifest.secret_values)
            if secrets
            else {}
        ),
        **(given or {}),
    }
    with ExitStack() as stack:
        if manifest.session is not None and manifest.environment.kind == "host":
            variables["HOME"] = str(_home(manifest, run, this_node))
        start, descriptors = _start_command(manifest, run, this_node, command, variables, environ, stack, binds)
        argv, files = stack.enter_context(opened(start))
        if own_network and descriptors:
            argv = apptainer.with_own_network(argv)
        yield Prepared(argv=argv, env=start.env, cwd=start.cwd, pass_fds=(*descriptors, *files))


def _this_node(manifest: Manifest, run: RunFolder, environ: Mapping[str, str]) -> ThisNode:
    """Return this node, with job and attempt from the run's start record.

    This step has no variables for job and attempt.
    """
    try:
        started = read_json(run.started)
        job_id, nodes, attempt = str(started["job_id"]), tuple(map(str, started["nodes"])), int(started["attempt"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NodesUnknown(f"`{run.started}` does not name the attempt that runs", why=str(error)) from error
    node = environ.get("SLURMD_NODENAME" if manifest.cluster == "slurm" else LOCAL_NODE, "")
    if manifest.cluster == "slurm" and environ.get("SLURM_JOB_ID") != job_id:
        raise NodesUnknown(f"this is job {environ.get('SLURM_JOB_ID')}, the run is job {job_id}")
    if node not in nodes:
        raise NodesUnknown(f"`{node}` is not a node of this run", why=f"its nodes: {', '.join(nodes)}")
    return ThisNode(node=node, nodes=nodes, attempt=attempt, job_id=job_id)


def _start_command(
    manifest: Manifest,
    run: RunFolder,
    this_node: ThisNode,
    command: Sequence[str],
    variables: Mapping[str, str],
    environ: Mapping[str, str],
    stack: ExitStack,
    binds: Sequence[Bind],
) -> tuple[StartCommand, tuple[int, ...]]:
    """Return the command line that starts the command like a rank, and the open files that the command inherits."""
    if manifest.environment.kind == "host":
        start = build_start_command(
            manifest.environment, command, workdir=manifest.workdir, variables=variables, inherited=environ,
            passed=manifest.pass_env,
        )  # fmt: skip
        return start, ()
    descriptor = stack.enter_context(_same_sif(manifest, run, this_node))
    private_tmp = Bind(source=stack.enter_context(_tmp(this_node)), target="/tmp")  # noqa: S108  (in the container)
    start = build_start_command(
        manifest.environment,
        command,
        workdir=manifest.workdir,
        variables=variables,
        inherited=environ,
        passed=manifest.pass_env,
        image=f"/proc/self/fd/{descriptor}",
        home=str(_home(manifest, run, this_node)),
        binds=[private_tmp, *own_folders(manifest), *binds],
        data=data_binds(manifest, staged_here(manifest, this_node)),
    )
    return start, (descriptor,)


def _home(manifest: Manifest, run: RunFolder, this_node: ThisNode) -> Path:
    """Return the folder that is HOME for a command. The home folder of a session is kept after the job."""
    return (
        run.home_of(this_node.node) if manifest.session is None else SessionFolder(Path(manifest.session.folder)).home
    )


@contextlib.contextmanager
def _same_sif(manifest: Manifest, run: RunFolder, this_node: ThisNode) -> Iterator[int]:
    """Open the SIF and check that it is the file that this node checked in this attempt."""
    facts = load_record(Facts, run.facts_of(this_node.node))
    path = manifest.environment.sif if facts.sif is None else facts.sif.path
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NodesUnknown(f"node {this_node.node} can no longer open the SIF", why=str(error)) from error
    try:
        if (
            facts.attempt != this_node.attempt
            or facts.sif is None
            or sif_check.identity_of(descriptor) != facts.sif.file
        ):
            raise NodesUnknown(
                f"the SIF is not the one that runs on node {this_node.node}",
                why=f"{path} was changed since it was checked for attempt {this_node.attempt}",
            )
        if facts.overlay is not None and not is_unchanged(facts.overlay):
            raise NodesUnknown(
                f"the overlay is not the one that runs on node {this_node.node}",
                why=f"{facts.overlay.path} was changed since it was checked for attempt {this_node.attempt}",
            )
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _tmp(this_node: ThisNode) -> Iterator[str]:
    """Return the folder that is /tmp for the ranks on this node. If it is not found, return a new folder."""
    folders: list[str] = []
    prefix = f"{JOB}{this_node.job_id}-"
    for folder in {tempfile.gettempdir(), "/tmp"}:  # noqa: S108  (where the launch step may have made it)
        with contextlib.suppress(OSError):
            folders += [e.path for e in os.scandir(folder) if e.name.startswith(prefix) and _is_own(e)]
    if len(folders) == 1:
        yield folders[0]
        return
    try:
        with tempfile.TemporaryDirectory(prefix="hpcenv-attach-", ignore_cleanup_errors=True) as own:
            yield own
    except OSError as error:
        raise FileUnusable(f"node {this_node.node} cannot make a temporary folder", why=str(error)) from error


def _is_own(start: os.DirEntry[str]) -> bool:
    status = start.stat(follow_symlinks=False)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
