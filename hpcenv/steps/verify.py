"""`hpcenv verify`: is this environment, this SIF, are these nodes what the lockfile says?

Runs on: LOGIN NODE, or whatever machine is asked about. The same facts and the same judge
as in a job; on nodes it is a job of its own that ends after the verdict.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from hpcenv import wire
from hpcenv.adapters import toml_files
from hpcenv.errors import (
    FileUnusable,
    LockfileStale,
    NodeRejected,
    NodesDisagree,
    NodesUnknown,
    SpecError,
    VerifyWarned,
)
from hpcenv.model import compat, stale
from hpcenv.model import lockfile as lock_model
from hpcenv.model.fields import Level
from hpcenv.model.lockfile import Lockfile
from hpcenv.node import decide, facts
from hpcenv.node.decide import DIFFERS_BETWEEN_NODES
from hpcenv.node.place import Place
from hpcenv.steps import same_tree
from hpcenv.steps.environment import container_environment, host_environment, locked_sif
from hpcenv.steps.locked import default_level, gpu_needs, host_expectations, settings
from hpcenv.steps.workspace import DEFAULT_LOCK, Workspace, notes_on, read_lockfile
from hpcenv.version import VERSION
from hpcenv.wire import Environment, Facts, Finding, Manifest, Verdict

_SECONDS = 1800


def verify(
    workspace: Workspace,
    *,
    environ: Mapping[str, str],
    name: str = DEFAULT_LOCK,
    level: Level | None = None,
    sif: Path | None = None,
    gpus: int = 0,
) -> tuple[Verdict, Facts]:
    """Compare an environment on this machine with a lockfile.

    Args:
        name: which lockfile.
        level: how deep to look; None for the environment's default.
        sif: another file than the project's own SIF.
        gpus: how many GPUs this machine must offer to the environment.

    Raises:
        LockfileMissing, LockfileInvalid, LockfileNewer: there is nothing to compare with.
        LockfileStale: the lockfile was edited, or answers another hpcenv.toml.
    """
    path = workspace.lockfile_path(name)
    locked = read_lockfile(path)
    reasons = stale.compare_spec(workspace.project, locked)
    if reasons:
        why = "\n".join(str(reason) for reason in reasons)
        raise LockfileStale(f"`{workspace.shown(path)}` is stale", why=why, hint="hpcenv lock")
    environment = _environment(workspace, locked, sif, environ, gpus=gpus)
    manifest = _manifest(workspace, locked, path, environment, level or default_level(environment), gpus)
    place = Place(node=socket.gethostname(), nodes=(socket.gethostname(),), attempt=0, job_id="verify")
    source = Path(facts.__file__).parents[1] / "incontainer" / "probe.py"
    probe = source.read_text(encoding="utf-8")
    found = facts.gather(manifest, place, environ, probe=probe)
    other = found.sif if locked.container is not None else None
    if other is not None and locked.container is not None and other.sha256 != locked.container.sif.sha256:
        image = Path(environment.sif)
        if same_tree.stands_for(locked.container, image, other.sha256, place=workspace.store_place):
            manifest = replace(manifest, expectations=same_tree.expecting(manifest.expectations, other.sha256))
            found = facts.gather(manifest, place, environ, probe=probe)
    verdict, _ = decide.judge(manifest, place.nodes, {place.node: found}, {}, attempt=0, job_id=place.job_id)
    return with_notes(replace(verdict, rendezvous=None, settings={}), workspace, name), found


def with_notes(verdict: Verdict, workspace: Workspace, name: str) -> Verdict:
    """Return a verdict that also warns of what of the lockfile nobody could look at here.

    Raises:
        LockfileMissing, LockfileInvalid, LockfileNewer: it is not there any more.
    """
    path = workspace.lockfile_path(name)
    locked = read_lockfile(path)
    findings = tuple(
        Finding(
            node=verdict.nodes[0].node if verdict.nodes else "",
            field="lockfile.revision",
            locked=str(locked.revision),
            found=str(lock_model.REVISION),
            result="unknown",
            severity="warn",
            note=note,
        )
        for note in notes_on(locked, path)
    )
    return replace(verdict, findings=(*verdict.findings, *findings))


def _environment(
    workspace: Workspace, locked: Lockfile, sif: Path | None, environ: Mapping[str, str], *, gpus: int
) -> Environment:
    if locked.container is None:
        if sif is not None:
            raise FileUnusable(f"`{sif}` cannot be verified", why="the lockfile is of a host environment, not of a SIF")
        return host_environment(workspace, environ)
    image = sif or locked_sif(workspace, locked.container)
    wanted = gpus > 0 and lock_model.cuda_of(locked) is not None
    return container_environment(workspace, image, gpus=wanted)


def _manifest(
    workspace: Workspace, locked: Lockfile, path: Path, environment: Environment, level: Level, gpus: int
) -> Manifest:
    """Return the manifest of a run that never launches: one node, this one."""
    return Manifest(
        schema=wire.SCHEMA,
        run="verify",
        run_folder=str(workspace.root),
        cluster="local",
        nodes=1,
        nproc_per_node=1,
        gpus_per_node=gpus,
        cpus_per_task=0,
        backend="gloo",
        environment=environment,
        script="",
        script_sha256="",
        args=(),
        workdir=str(workspace.root),
        settings=settings(workspace, {}),
        expectations=(
            *lock_model.expectations(locked, level=level, origin=workspace.shown(path)),
            *host_expectations(locked, gpus=gpus),
        ),
        packages=lock_model.package_expectations(locked),
        probe_level=level,
        lockfile=workspace.shown(path),
        lockfile_sha256="",
        hpcenv_version=VERSION,
        gpu_needs=gpu_needs(locked, gpus=gpus, table=toml_files.read(compat.PACKAGED, error=SpecError) if gpus else {}),
        check_seconds=_SECONDS,
    )


Outcome = Literal["match", "warned", "mismatch", "unknown", "nodes-disagree"]


def outcome(verdict: Verdict, *, strict: bool) -> tuple[Outcome, int]:
    """Return a verdict in one word with its exit status.

    Args:
        strict: a difference that is only warned of is bad news too.
    """
    if verdict.result == "unknown":
        return "unknown", NodesUnknown.exit_status
    blocking = [f for f in verdict.findings if f.severity == "must" and f.result == "mismatch"]
    if blocking and all(finding.note == DIFFERS_BETWEEN_NODES for finding in blocking):
        return "nodes-disagree", NodesDisagree.exit_status
    if blocking:
        return "mismatch", NodeRejected.exit_status
    if strict and any(f.severity == "warn" for f in verdict.findings):
        return "warned", VerifyWarned.exit_status
    return "match", os.EX_OK
