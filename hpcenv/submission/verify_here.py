"""`hpcenv verify`: compare an environment, a SIF or nodes with the lockfile.

Runs on: LOGIN NODE, or on any machine that is verified. This module uses the same facts and the same rules as the gate
of a job. To verify nodes, `verify_nodes.py` submits a job that ends after the verdict.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from hpcenv.container import site_values
from hpcenv.container.probe_source import probe_source
from hpcenv.errors import (
    FileUnusable,
    NodeRejected,
    NodesDisagree,
    NodesUnknown,
    SpecError,
    VerifyWarned,
)
from hpcenv.facts import facts
from hpcenv.judge import decide
from hpcenv.judge.compat.compat_table import PACKAGED
from hpcenv.judge.decide import DIFFERS_BETWEEN_NODES
from hpcenv.locking import same_tree
from hpcenv.locking.environment import container_environment, host_environment
from hpcenv.locking.image_source import locked_sif
from hpcenv.machine.this_node import ThisNode
from hpcenv.project import lockfile as lock_model
from hpcenv.project import stale, toml_files
from hpcenv.project.context import Context
from hpcenv.project.fields import FieldLevel
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.site_profile import Profile
from hpcenv.project.spec import DEFAULT_LOCK
from hpcenv.project.workspace import Workspace, notes_on, read_lockfile
from hpcenv.records.codec import SCHEMA
from hpcenv.records.facts import Facts
from hpcenv.records.manifest import Bind, Environment, Manifest
from hpcenv.records.verdict import Finding, Result, Verdict
from hpcenv.submission import choose_site, import_check
from hpcenv.submission.import_check import PackageImport
from hpcenv.submission.locked import (
    default_level,
    expectations,
    gate_severities,
    gpu_needs,
    project_binds,
    refuse_gpus_for_cpu_torch,
    refuse_stale,
    settings,
    unlocked_binds,
)
from hpcenv.submission.locked_container import LockedSif, program_of, with_locked_overlay, with_wrapper
from hpcenv.submission.request import SubmitOptions, detect_cluster
from hpcenv.version import VERSION

_SECONDS = 1800


def verify(
    workspace: Workspace,
    *,
    environ: Mapping[str, str],
    lock: str = DEFAULT_LOCK,
    level: FieldLevel | None = None,
    sif: Path | None = None,
    gpus: int | None = None,
    imports: bool = False,
) -> tuple[Verdict, Facts, tuple[PackageImport, ...]]:
    """Compare an environment on this machine with a lockfile; return the verdict, the facts, and the imports.

    Args:
        lock: name of the lockfile.
        level: how many details of the environment are compared; None for the default level of this kind of environment.
        sif: a SIF to verify instead of the SIF of the project.
        gpus: how many GPUs this machine must have for the environment; None for the number that a submission requests.
        imports: also import each locked package, if the environment matches the lockfile.

    Raises:
        LockfileMissing, LockfileInvalid, LockfileNewer: the lockfile is missing or cannot be read.
        LockfileStale: the lockfile was edited, or was made from another hpcenv.toml.
        SubmitRejected: GPUs are requested, but the locked torch cannot use GPUs.
    """
    path = workspace.lockfile_path(lock)
    workspace = workspace.for_lock(lock)
    locked = read_lockfile(path)
    refuse_stale(workspace, lock, stale.compare_spec(workspace.project, locked))
    profile = _profile(workspace, environ, locked)
    count, origin = (_gpus(workspace, profile), f"[submit] in {workspace.spec}") if gpus is None else (gpus, "--gpus")
    hint = "verify with --gpus 0, or lock a torch built for CUDA or ROCm"
    refuse_gpus_for_cpu_torch(locked, gpus=count, origin=origin, hint=hint)
    environment, absent = _environment(workspace, locked, sif, environ, profile, gpus=count)
    manifest = manifest_of_one_node(
        workspace, locked, path, environment, level or default_level(environment), count, profile
    )
    manifest = site_values.complete(manifest, None, environ)
    untried = ["GPUs: not tried (hpcenv verify --nodes N does)"] if count else []
    manifest = replace(manifest, imported=(*manifest.imported, *_without_modules(profile), *untried))
    place = ThisNode(node=socket.gethostname(), nodes=(socket.gethostname(),), attempt=0, job_id="verify")
    found = facts.gather(manifest, place, environ, probe=probe_source())
    other = found.sif if locked.container is not None else None
    if other is not None and locked.container is not None and other.sha256 != locked.container.sif.sha256:
        image = Path(environment.sif)
        if same_tree.stands_for(locked.container, image, other.sha256, place=workspace.store_place):
            manifest = replace(manifest, expectations=same_tree.expecting(manifest.expectations, other.sha256, locked))
            found = facts.gather(manifest, place, environ, probe=probe_source())
    verdict, _ = decide.judge(manifest, place.nodes, {place.node: found}, {}, attempt=0, job_id=place.job_id)
    verdict = replace(
        verdict,
        rendezvous=None,
        settings={},
        inherited={},
        findings=(*verdict.findings, *_without_source(absent, locked, place.node)),
    )
    verdict = with_notes(verdict, workspace, lock)
    # If the environment differs, a test of its imports does not show whether the locked environment works.
    tried = import_check.import_packages(manifest, environ) if imports and verdict.result == "match" else ()
    return verdict, found, tried


def _profile(workspace: Workspace, environ: Mapping[str, str], locked: Lockfile) -> Profile | None:
    """Return the site profile that a submission uses here."""
    # The time of the context is used only for names of runs. No such name is needed here.
    context = Context(environ=environ, cwd=workspace.root, now=time.gmtime(0), token="", command=())
    profile, _notes = choose_site.choose(workspace, SubmitOptions(script=None), context, detect_cluster(environ))
    return None if profile is None else choose_site.for_run(profile, locked, nodes=1)


def _without_modules(profile: Profile | None) -> tuple[str, ...]:
    """Return a note if jobs load modules.

    `verify` does not load modules, because it does not start the user's shell.
    """
    if profile is None or not profile.modules:
        return ()
    names = ", ".join(profile.modules)
    return (f"site profile {profile.name}: jobs load {names}; here they are not loaded: hpcenv verify --nodes N does",)


def _gpus(workspace: Workspace, profile: Profile | None) -> int:
    """Return how many GPUs per node a submission without --gpus requests."""
    asked = workspace.project.submit.gpus
    if asked is None and profile is not None:
        default = profile.default_of("gpus")
        asked = default if isinstance(default, int) else None
    return asked or 0


def _without_source(binds: Sequence[Bind], locked: Lockfile, node: str) -> list[Finding]:
    """Return a finding for each bind of the site profile if its source does not exist on this machine."""
    severity = lock_model.severities_of(locked).of("container.binds")
    return [
        Finding(
            node=node,
            field="container.binds",
            locked=bind.target,
            found=f"{bind.source} is not on this machine",
            result="unknown",
            severity="warn" if severity == "must" else severity,
            note="the site profile binds it on compute nodes: hpcenv verify --nodes N looks there",
        )
        for bind in binds
    ]


def with_notes(verdict: Verdict, workspace: Workspace, lock: str) -> Verdict:
    """Return the verdict, with warnings about parts of the lockfile that this hpcenv does not know.

    Raises:
        LockfileMissing, LockfileInvalid, LockfileNewer: the lockfile is missing or can no longer be read.
    """
    path = workspace.lockfile_path(lock)
    locked = read_lockfile(path)
    findings = tuple(
        Finding(
            node=verdict.nodes[0].node if verdict.nodes else "",
            field="lockfile.revision",
            locked=str(locked.revision),
            found=str(lock_model.REVISION),
            result="unknown",
            severity=lock_model.severities_of(locked).of("lockfile.revision"),
            note=note,
        )
        for note in notes_on(locked, path)
    )
    return replace(verdict, findings=(*verdict.findings, *findings))


def _environment(
    workspace: Workspace,
    locked: Lockfile,
    sif: Path | None,
    environ: Mapping[str, str],
    profile: Profile | None,
    *,
    gpus: int,
) -> tuple[Environment, tuple[Bind, ...]]:
    """Return the environment as for a submission, and the site profile's binds whose source does not exist here."""
    binds = project_binds(workspace)
    if locked.container is None:
        if sif is not None:
            raise FileUnusable(f"`{sif}` cannot be verified", why="the lockfile is for a host environment, not a SIF")
        return replace(host_environment(workspace, environ), revision=locked.revision), ()
    image = sif or locked_sif(workspace, locked.container)
    wanted = gpus > 0 and lock_model.gpu_support(locked) != "hip"
    program = program_of(workspace.project.submit.runtime, profile, environ)
    environment = container_environment(workspace, image, gpus=wanted, program=program)
    environment = with_wrapper(with_locked_overlay(environment, workspace, locked.container), profile)
    of_site = () if profile is None else profile.binds
    absent = tuple(bind for bind in of_site if not os.path.exists(bind.source))
    binds = (*binds, *(bind for bind in of_site if bind not in absent))
    return replace(environment, binds=binds, revision=locked.revision), absent


def manifest_of_one_node(
    workspace: Workspace,
    locked: Lockfile,
    path: Path,
    environment: Environment,
    level: FieldLevel,
    gpus: int,
    profile: Profile | None,
) -> Manifest:
    """Return the manifest of a run that only checks this machine, as one node."""
    return Manifest(
        schema=SCHEMA,
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
        settings=settings(workspace, {}, profile),
        expectations=expectations(workspace, locked, LockedSif(), level=level, gpus=gpus, origin=workspace.shown(path)),
        packages=lock_model.package_expectations(locked),
        severities=gate_severities(locked, gpus=gpus),
        probe_level=level,
        lockfile=workspace.shown(path),
        lockfile_sha256="",
        hpcenv_version=VERSION,
        gpu_needs=gpu_needs(locked, gpus=gpus, table=toml_files.read(PACKAGED, error=SpecError) if gpus else {}),
        check_seconds=_SECONDS,
        unlocked_binds=unlocked_binds(locked, environment),
    )


VerifyOutcome = Literal[Result, "warned", "nodes-disagree", "imports-fail"]


def outcome(verdict: Verdict, *, strict: bool, imports: Sequence[PackageImport] = ()) -> tuple[VerifyOutcome, int]:
    """Return the outcome of a verdict, with its exit status.

    Args:
        strict: whether a difference in a field of severity `warn` also counts as a mismatch.
        imports: the imports of the locked packages. A failed import gives the same exit status as a field that differs.
    """
    if verdict.result == "unknown":
        return "unknown", NodesUnknown.exit_status
    blocking = [f for f in verdict.findings if f.severity == "must" and f.result == "mismatch"]
    if blocking and all(finding.note == DIFFERS_BETWEEN_NODES for finding in blocking):
        return "nodes-disagree", NodesDisagree.exit_status
    if blocking:
        return "mismatch", NodeRejected.exit_status
    if any(one.failed for one in imports):
        return "imports-fail", NodeRejected.exit_status
    if strict and any(f.severity == "warn" for f in verdict.findings):
        return "warned", VerifyWarned.exit_status
    return "match", os.EX_OK
