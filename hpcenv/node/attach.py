"""A shell, or one command, in the environment of a run that is running on this node.

Runs on: COMPUTE NODE, in a job step beside the training's. The same SIF or host
environment, binds, data and variables as the ranks have; secrets only where they are asked
for. RANK and its like are not set: this is no rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

from hpcenv.adapters import process
from hpcenv.errors import FileUnusable, NodesUnknown
from hpcenv.node import secret, sif_check
from hpcenv.node.enter import Entry, data_binds, enter, own_folders, staged_here
from hpcenv.node.manifest import open_manifest
from hpcenv.node.place import LOCAL_NODE, Place
from hpcenv.wire import Bind, Facts, Manifest, NodeSettings, RunFolder, read

# bash where the image has it.
SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")


def attach(run: RunFolder, environ: Mapping[str, str], command: Sequence[str], *, secrets: bool) -> int:
    """Run `command`, or a shell without one, on this terminal; return its exit status.

    Args:
        secrets: also read the run's secrets for it.

    Raises:
        NodesUnknown: this node does not train for this run now, or its SIF has changed.
    """
    manifest = open_manifest(run)
    place = _place(manifest, run, environ)
    settings = read(NodeSettings, run.env_of(place.node))
    if (settings.run, settings.attempt, settings.node) != (manifest.run, place.attempt, place.node):
        raise NodesUnknown(
            f"the settings of node {place.node} are not of attempt {place.attempt}", why=str(run.env_of(place.node))
        )
    variables = {
        **{setting.name: setting.value for setting in settings.settings},
        "HPCENV_RUN_FOLDER": str(run.path),
        "HPCENV_STOP_FOLDER": str(run.stopping),
        "HPCENV_CHECKPOINTS": str(run.checkpoints),
        "HPCENV_ATTEMPT": str(place.attempt),
        **({"TERM": environ["TERM"]} if "TERM" in environ else {}),
        **(secret.read_all(manifest.secrets, environ, node=place.node) if secrets else {}),
    }
    with ExitStack() as stack:
        entry, descriptors = _enter(manifest, run, place, tuple(command) or SHELL, variables, environ, stack)
        return process.talk(entry.argv, env=entry.env, cwd=entry.cwd, pass_fds=descriptors)


def _place(manifest: Manifest, run: RunFolder, environ: Mapping[str, str]) -> Place:
    """Return where this is, in the words of the attempt that runs: a step from outside has none of its own."""
    try:
        started = json.loads(run.started.read_text(encoding="utf-8"))
        job_id, nodes, attempt = str(started["job_id"]), tuple(map(str, started["nodes"])), int(started["attempt"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NodesUnknown(f"`{run.started}` does not say which attempt runs", why=str(error)) from error
    node = environ.get("SLURMD_NODENAME" if manifest.cluster == "slurm" else LOCAL_NODE, "")
    if manifest.cluster == "slurm" and environ.get("SLURM_JOB_ID") != job_id:
        raise NodesUnknown(f"this is job {environ.get('SLURM_JOB_ID')}, the run is job {job_id}")
    if node not in nodes:
        raise NodesUnknown(f"`{node}` is no node of this run", why=f"its nodes: {', '.join(nodes)}")
    return Place(node=node, nodes=nodes, attempt=attempt, job_id=job_id)


def _enter(
    manifest: Manifest,
    run: RunFolder,
    place: Place,
    command: Sequence[str],
    variables: Mapping[str, str],
    environ: Mapping[str, str],
    stack: ExitStack,
) -> tuple[Entry, tuple[int, ...]]:
    """Return how to start the command as the ranks were started, and the open files that it needs."""
    if manifest.environment.kind == "host":
        entry = enter(
            manifest.environment, command, workdir=manifest.workdir, variables=variables, inherited=environ,
            passed=manifest.pass_env,
        )  # fmt: skip
        return entry, ()
    descriptor = stack.enter_context(_same_sif(manifest, run, place))
    private_tmp = Bind(source=stack.enter_context(_tmp(place)), target="/tmp")  # noqa: S108  (in the container)
    entry = enter(
        manifest.environment,
        command,
        workdir=manifest.workdir,
        variables=variables,
        inherited=environ,
        passed=manifest.pass_env,
        image=f"/proc/self/fd/{descriptor}",
        home=str(run.home_of(place.node)),
        binds=[private_tmp, *own_folders(manifest)],
        data=data_binds(manifest, staged_here(manifest, place)),
    )
    return entry, (descriptor,)


@contextlib.contextmanager
def _same_sif(manifest: Manifest, run: RunFolder, place: Place) -> Iterator[int]:
    """Open the SIF that this node checked for this attempt."""
    facts = read(Facts, run.facts_of(place.node))
    path = manifest.environment.sif if facts.sif is None else facts.sif.path
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NodesUnknown(f"node {place.node} cannot open the SIF any more", why=str(error)) from error
    try:
        if facts.attempt != place.attempt or facts.sif is None or sif_check.identity_of(descriptor) != facts.sif.file:
            raise NodesUnknown(
                f"the SIF is not the one that runs on node {place.node}",
                why=f"{path} was changed since it was checked for attempt {place.attempt}",
            )
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _tmp(place: Place) -> Iterator[str]:
    """Return the folder that is /tmp for the ranks on this node; one of its own where that is not to be found."""
    prefix, found = f"hpcenv-{place.job_id}-", []
    for folder in {tempfile.gettempdir(), "/tmp"}:  # noqa: S108  (where the launch step may have made it)
        with contextlib.suppress(OSError):
            found += [entry.path for entry in os.scandir(folder) if entry.name.startswith(prefix) and _is_own(entry)]
    if len(found) == 1:
        yield found[0]
        return
    try:
        with tempfile.TemporaryDirectory(prefix="hpcenv-attach-", ignore_cleanup_errors=True) as own:
            yield own
    except OSError as error:
        raise FileUnusable(f"node {place.node} cannot make a temporary folder", why=str(error)) from error


def _is_own(entry: os.DirEntry[str]) -> bool:
    status = entry.stat(follow_symlinks=False)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
