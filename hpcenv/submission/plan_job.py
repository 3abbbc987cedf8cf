"""Plan a run: decide everything about it, write nothing.

Runs on: LOGIN NODE. Whatever can be refused is refused here, before anything is queued;
`--dry-run` prints the plan that `submit` consumes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcenv import process
from hpcenv.cluster import node_resources, node_types
from hpcenv.cluster.node_resources import ClusterResources
from hpcenv.cluster.node_types import Offer
from hpcenv.container.start_command import build_start_command, own_folders
from hpcenv.errors import UsageError, WouldOverwrite
from hpcenv.identity import data as data_state
from hpcenv.identity.data import DataState
from hpcenv.identity.stage import data_folder
from hpcenv.locking import same_tree
from hpcenv.locking.formats.requirements import requirements_text
from hpcenv.project import document, git, stale, toml_files
from hpcenv.project import lockfile as lock_model
from hpcenv.project.context import Context, state_folder
from hpcenv.project.fields import FieldLevel
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.site_profile import Profile
from hpcenv.project.workspace import Workspace, lockfile_bytes, notes_on, parse_lockfile
from hpcenv.records import secret_file
from hpcenv.records.codec import SCHEMA
from hpcenv.records.manifest import (
    Bind,
    DataCompare,
    DataFolder,
    Environment,
    Expectation,
    Manifest,
    RecordedData,
    Secret,
    Setting,
    StageRequest,
)
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.variables import looks_like_credential, recorded_command, recorded_value
from hpcenv.submission import (
    after,
    choose_site,
    credentials,
    determinism,
    entry_point,
    gpu_kernels,
    hub_cache,
    kept_secrets,
    module_file,
    node_share,
    preflight,
    resume,
    snapshot,
    typed_binds,
)
from hpcenv.submission.hub_cache import FetchedData, HubCache
from hpcenv.submission.locked import (
    add_own,
    backend_of,
    default_level,
    environment_of,
    gate_severities,
    gpu_needs,
    host_expectations,
    identify_sif,
    refuse_gpus_for_cpu_torch,
    settings,
    unlocked_binds,
)
from hpcenv.submission.locked_sif import LockedSif
from hpcenv.submission.node_code import start_hook_digest
from hpcenv.submission.node_share import NodeShare
from hpcenv.submission.plan import Call, EarlierRuns, Plan, Request, render_script
from hpcenv.submission.request import (
    Cluster,
    MergedOptions,
    SubmitOptions,
    detect_cluster,
    launch_options,
    make_request,
    merge,
    passed_variables,
    preflight_options,
    require_literal,
    secrets,
    smoke_options,
    stop_options,
    to_record,
)
from hpcenv.submission.script_notes import LaunchShape
from hpcenv.submission.snapshot import Code, CodePlace
from hpcenv.version import VERSION

# A run of that name would hide the job: `hpcenv cancel 34` accepts run names and job ids.
_JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?\Z")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


@dataclass(frozen=True, kw_only=True)
class _Given:
    """What is requested as it was typed, with secrets in place of credentials; for which project and where."""

    workspace: Workspace
    options: SubmitOptions
    context: Context
    cluster: Cluster
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Wanted(_Given):
    """What is requested, merged from all places.

    Attributes:
        profile: the site profile; its values are not yet those for this run.
        request: what Slurm is asked for, without the values of the site profile.
        earlier: the runs of `--after`.
        script, content: the file that the ranks start, None where it is not known, and its bytes.
    """

    merged: MergedOptions
    profile: Profile | None
    request: Request
    earlier: EarlierRuns
    script: Path | None
    content: bytes


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """What Slurm is asked for, with the origin of every value, and the lockfile and site profile behind it.

    Attributes:
        path, content: of the lockfile.
        profile: the site profile with the values for this run.
    """

    path: Path
    content: bytes
    lockfile: Lockfile
    request: Request
    origins: Mapping[str, str]
    profile: Profile | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Gate:
    """What the check compares on the nodes."""

    environment: Environment
    level: FieldLevel
    table: dict[str, Any]
    sif: LockedSif
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where the run is kept, and what it gets of the cluster.

    Attributes:
        request: what Slurm is asked for in the end.
        share: what of it is the share of the nodes.
        copies: what is copied to the nodes; None to use everything where it is.
    """

    run_folder: Path
    checkpoint: Path | None
    request: Request
    share: NodeShare
    copies: StageRequest | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Started:
    """What torchrun will start, its code and its data.

    Attributes:
        place: its path for the ranks; None if it is the script.
        environment: what the container sees of them, too.
        data: those that [[data]] names, as they are now.
    """

    content: bytes
    place: Path | None
    code: Code
    files: dict[str, bytes]
    environment: Environment
    data: tuple[RecordedData, ...]
    cache: HubCache
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Answers:
    """What other programs answer while the run is planned; None where they are not asked.

    Attributes:
        offers: what sinfo says of the cluster's nodes.
        resources: what scontrol says that the nodes have.
        tree: what git says of the folder of the code.
    """

    offers: Future[tuple[Offer, ...]] | None
    resources: Future[ClusterResources] | None
    tree: Future[git.ReadTree | None] | None


def plan_job(workspace: Workspace, options: SubmitOptions, context: Context) -> Plan:
    """Decide everything about a run; writes and submits nothing.

    It starts no program that the project names, because the user may not have accepted them yet (`--dry-run`).

    Raises:
        HpcenvError: anything that would make the job fail, as far as the login node can know it.
    """
    _require_no_import(context)
    given = _given(workspace.for_lock(options.lock), options, context)
    with _asked(given) as answers:
        wanted = _merge(given)
        shape = _shape(wanted)
        gate = _gate(wanted, shape)
        place = _place(wanted, shape, gate, answers)
        started = _started(wanted, gate, place, answers)
    manifest, notes = _manifest(wanted, shape, gate, place, started)
    _require_start_line(manifest)
    command = recorded_command(context.command)
    share, of_site = place.share.words(), choose_site.options_in_words(shape.profile)
    return Plan(
        manifest=manifest,
        request=place.request,
        script="" if given.cluster == "local" else _render(manifest, place.request, command),
        lockfile_text=_run_lockfile(shape, manifest, started.code),
        requirements=requirements_text(shape.lockfile),
        command=command,
        notes=(*wanted.notes, *shape.notes, *gate.notes, *place.notes, *started.notes, *notes),
        requested=(*wanted.merged.requested(), *share, *of_site),
        source=started.code.source,
        record=to_record(given.options),
        files=started.files,
        hub=started.cache,
        after=wanted.earlier,
        secret_values=kept_secrets.values_of(manifest.secrets, given.context.environ),
    )


def _given(workspace: Workspace, options: SubmitOptions, context: Context) -> _Given:
    cluster = options.cluster or detect_cluster(context.environ)
    here = cluster == "local" and options.cluster is None
    alone = ("there is no sbatch on PATH: the run is on this machine (--cluster local)",) * here
    options, context, hidden = kept_secrets.hide_credentials(options, context)
    return _Given(workspace=workspace, options=options, context=context, cluster=cluster, notes=(*alone, *hidden))


def _merge(given: _Given) -> _Wanted:
    """Merge the options of all places; refuse those that contradict each other or name what is not there."""
    workspace, context, cluster = given.workspace, given.context, given.cluster
    profile, of_site = choose_site.choose(workspace, given.options, context, cluster)
    merged = merge(given.options, workspace, context.environ, cluster, profile)
    request = make_request(merged.options)
    require_literal(merged.options)
    _require_one_kind(merged.options, cluster)
    earlier = after.find(merged.options, context, cluster)
    request = after.with_dependency(request, earlier)
    script, content = _script(merged.options, context)
    return _Wanted(
        workspace=workspace,
        options=merged.options,
        context=context,
        cluster=cluster,
        merged=merged,
        profile=profile,
        request=request,
        earlier=earlier,
        script=script,
        content=content,
        notes=(*given.notes, *of_site, *merged.notes, *after.notes_on(earlier)),
    )


def _advice(manifest: Manifest, origins: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note where several nodes will use NCCL and no level of the checks was chosen."""
    chosen = "preflight" in origins or manifest.preflight.level != "quick"
    if chosen or manifest.backend != "nccl" or manifest.nodes < 2 or not manifest.launches:
        return ()
    what = "the network between the nodes is not tested before the training"
    return (f"{what}: --preflight full (or `preflight` under [submit]) does that",)


def _credential_notes(manifest: Manifest) -> tuple[str, ...]:
    """Return notes where a setting or an argument looks like a credential: the manifest has the value."""
    notes = []
    names = [setting.name for setting in manifest.settings if looks_like_credential(setting.name)]
    if names:
        what = f"{', '.join(names)}: records have the name only, because it looks like that of a credential"
        notes.append(f"{what}; manifest.json has the value. To keep it out of there: --secret {names[0]}=file:PATH")
    arguments = credentials.arguments(manifest.args)
    if arguments:
        what = (
            f"{', '.join(arguments)}: an argument that looks like a credential; the records and a bundle have its value"
        )
        notes.append(f"{what}. To keep it out of them: --secret NAME=file:PATH, which the script reads as a variable")
    return tuple(notes)


def _require_no_import(context: Context) -> None:
    """Refuse a submission from a rank that imports the file of its function (incontainer/call.py)."""
    file = context.environ.get(_IMPORTING)
    if file is not None:
        raise UsageError(
            "a rank does not submit while it imports the file of its function",
            why=f"each rank imports `{file}`, and each would submit once more",
            hint='put what submits under `if __name__ == "__main__":`',
        )


_IMPORTING = "HPCENV_IMPORTING"


@contextlib.contextmanager
def _asked(given: _Given) -> Iterator[_Answers]:
    """Ask sinfo, scontrol and git beside the planning; the end of the block kills those that still run."""
    options, environ, stop = given.options, given.context.environ, threading.Event()
    on_slurm = given.cluster == "slurm"
    folder = None if options.copied is not None else _code_folder(options, given.context)
    with ThreadPoolExecutor(3, initializer=process.stop_with, initargs=(stop,)) as pool:
        try:
            yield _Answers(
                offers=pool.submit(node_types.offers, environ) if on_slurm and not options.allocated else None,
                resources=pool.submit(node_resources.ask, environ)
                if on_slurm and _may_want_share(given.workspace, options)
                else None,
                tree=None if folder is None else pool.submit(git.read_tree, folder, environ),
            )
        finally:
            stop.set()


def _code_folder(options: SubmitOptions, context: Context) -> Path | None:
    """Return where Python looks for the code first; None without code."""
    if options.call is not None:
        return None if options.call.module is None else options.call.module.parent
    if options.script is None or options.module or options.entry:
        return None if options.script is None else context.cwd
    return Path(os.path.abspath(context.cwd / options.script)).parent


def _script(options: SubmitOptions, context: Context) -> tuple[Path | None, bytes]:
    """Return the file that the ranks start, and its bytes; None where it is not known."""
    if options.script is None:
        return None, b""
    if options.entry:
        entry_point.require_name(options.script)
        return None, b""
    if options.module:
        return preflight.read_module(options.script, context.cwd, context.command)
    return preflight.read_script(options.script, context.cwd)


def _in_environment(wanted: _Wanted, environment: Environment) -> tuple[str, ...]:
    """Look for a module that the project does not have, or a console script; return a note where it is not known."""
    options, context = wanted.options, wanted.context
    if options.entry and options.script is not None:
        return entry_point.require_in_environment(options.script, environment)
    if wanted.script is not None or not options.module or options.script is None:
        return ()
    variables = {**context.environ, **wanted.workspace.project.env, **options.env}
    return module_file.require_in_environment(options.script, context.cwd, environment, variables)


def _shape(wanted: _Wanted) -> _Shape:
    """Read the lockfile, and return the request for this run; refuse what the locked environment cannot do."""
    workspace, options = wanted.workspace, wanted.options
    path = options.lockfile or workspace.lockfile_path(options.lock)
    content = lockfile_bytes(path)
    lockfile = parse_lockfile(content, path)
    notes = _compare_spec(workspace, options, lockfile, path)
    profile = _for_this_run(wanted, lockfile)
    notes += [] if profile is None else [*profile.notes, *profile.left_out]
    notes += notes_on(lockfile, path)
    request = choose_site.with_options(wanted.request, profile)
    request = replace(request, fingerprint=_edited(lockfile) or lockfile.fingerprint)
    origins = choose_site.with_origins(wanted.merged.origins, profile)
    notes += _gpus_of_cpu_torch(options, request, origins, lockfile)
    if options.script is not None and wanted.script is not None:
        nodes, nproc, launcher = request.nodes, request.nproc_per_node, options.launcher or "torchrun"
        ranks = LaunchShape(launcher=launcher, nodes=nodes, nproc_per_node=nproc)
        notes += preflight.compile_script(options.script, wanted.content, lockfile, ranks)
    return _Shape(
        path=path,
        content=content,
        lockfile=lockfile,
        request=request,
        origins=origins,
        profile=profile,
        notes=tuple(notes),
    )


def _compare_spec(workspace: Workspace, options: SubmitOptions, lockfile: Lockfile, path: Path) -> list[str]:
    """Refuse a stale lockfile; with --frozen return notes."""
    reasons = stale.compare_spec(workspace.project, lockfile)
    if not options.frozen:
        preflight.refuse_stale(workspace, options, reasons)
        return []
    what = f"`{workspace.shown(path)}` was edited: its fingerprint {lockfile.fingerprint} is not that of its content"
    edited = stale.edited_content(lockfile) is not None
    # The lockfile counts. An overlay that is not mounted, or elsewhere, is not seen from the command.
    left = [f"{one}: the lockfile counts (--frozen)" for one in reasons if one.name == "overlay-changed"]
    return [*[f"{what} (--frozen)"] * edited, *left]


def _for_this_run(wanted: _Wanted, lockfile: Lockfile) -> Profile | None:
    """Return the site profile with the values that are for this run; refuse a run that the site cannot start."""
    request = wanted.request
    if wanted.profile is None:
        return None
    found = choose_site.for_run(
        wanted.profile,
        lockfile,
        nodes=request.nodes,
        partition=request.partition,
        gpu_type=request.gpu_type,
        now=wanted.context.now,
    )
    if lockfile.container is not None:
        choose_site.require_runtime(found)
    return found


def _gpus_of_cpu_torch(
    options: SubmitOptions, request: Request, origins: Mapping[str, str], locked: Lockfile
) -> list[str]:
    """Refuse GPUs that the locked torch cannot use; with --allow-cpu-torch return a note."""
    gpus = request.gpus_per_node
    if not options.allow_cpu_torch:
        no_ranks = options.script is None and options.call is None
        without = "leave out --gpus" if no_ranks else "--gpus 0 --nproc R"
        hint = f"{without}, or lock a torch built for CUDA or ROCm; if something else uses them: --allow-cpu-torch"
        refuse_gpus_for_cpu_torch(locked, gpus=gpus, origin=origins.get("gpus", "--gpus"), hint=hint)
    elif gpus and not lock_model.compares_gpus(locked, gpus):
        return [f"the locked torch cannot use the {gpus} GPUs of each node: they are recorded, not compared"]
    return []


def _gate(wanted: _Wanted, shape: _Shape) -> _Gate:
    """Return the environment that the nodes must have; refuse one that is not the locked one here already."""
    options, context, lockfile = wanted.options, wanted.context, shape.lockfile
    lock = options.lock if options.lockfile is None else str(options.lockfile)
    environment = environment_of(
        wanted.workspace, lockfile, shape.request, shape.profile, context.environ, lock=lock, runtime=options.runtime
    )
    environment, absent = typed_binds.add(environment, options.bind, context.cwd)
    sif = identify_sif(environment, lockfile, wanted.workspace, context.cache, lock=lock)
    needed = shape.request.gpus_per_node > 0 and lock_model.cuda_of(lockfile) is not None
    return _Gate(
        environment=environment,
        level=options.level or default_level(environment),
        table=gpu_kernels.compat_table() if needed else {},
        sif=sif,
        notes=(*absent, *sif.notes, *_in_environment(wanted, environment)),
    )


def _place(wanted: _Wanted, shape: _Shape, gate: _Gate, answers: _Answers) -> _Place:
    """Return where the run is kept, and what it gets of the cluster; refuse what could not run there."""
    options, context = wanted.options, wanted.context
    run_folder = _run_folder(wanted, options.name or _run_name(wanted.script, options, context))
    checkpoint = resume.find_checkpoint(options, context, wanted.earlier)
    share, notes = _preflight(wanted, shape, gate, run_folder, checkpoint, answers)
    copies, on_copies = _copies(wanted, gate, run_folder)
    return _Place(
        run_folder=run_folder,
        checkpoint=checkpoint,
        request=share.added_to(shape.request),
        share=share,
        copies=copies,
        notes=(*notes, *on_copies),
    )


def _preflight(
    wanted: _Wanted, shape: _Shape, gate: _Gate, run_folder: Path, checkpoint: Path | None, answers: _Answers
) -> tuple[NodeShare, list[str]]:
    """Refuse what the cluster, or this machine, could not run; return the share of the nodes, and notes."""
    options, context, request, lockfile = wanted.options, wanted.context, shape.request, shape.lockfile
    notes = _check_secrets(wanted, shape)
    if wanted.cluster == "local":
        preflight.require_cpus_for_local(request, shape.origins, typed=options.cluster is not None)
        return NodeShare(), notes
    # First the checks without sinfo, which may take seconds.
    shared = preflight.require_shared(run_folder, options, context, gate.environment, checkpoint)
    offers, unknown = ((), ()) if options.allocated else preflight.read_offers(answers.offers)
    notes += unknown
    if gate.table:
        notes += gpu_kernels.judge_libraries(lockfile, request, gate.table)
        notes += gpu_kernels.refuse_gpu_without_kernels(wanted.workspace, lockfile, request, gate.table, offers)
    notes += shared
    if options.allocated:
        return NodeShare(), notes + preflight.check_space(run_folder)
    notes += preflight.check_cluster(request, shape.origins, offers)
    notes += preflight.check_space(run_folder)
    notes += preflight.require_known_srun_options(request, context)
    notes += preflight.check_warning(request.time_minutes, stop_options(options, request).grace)
    share = _share(wanted, shape, offers, answers.resources)
    return share, [*notes, share.note] if share.note else notes


def _check_secrets(wanted: _Wanted, shape: _Shape) -> list[str]:
    """Refuse secrets that the nodes cannot read; return notes where that is not known."""
    options, context = wanted.options, wanted.context
    # An exported folder is submitted in another environment. Without a script no secret is read.
    if options.handover or (options.script is None and options.call is None):
        return []
    modules = () if shape.profile is None else shape.profile.modules
    named = _secrets(wanted)
    local, as_here = wanted.cluster == "local", not modules and not options.setup
    notes = preflight.require_secrets(named, context, local=local, as_here=as_here)
    return notes if local or options.assume_shared else notes + kept_secrets.require_visible(named, context)


def _may_want_share(workspace: Workspace, options: SubmitOptions) -> bool:
    """Return whether a share of the nodes may have to be computed; a site profile may still have the values."""
    project = workspace.project.submit
    gpus = project.gpus if options.gpus is None else options.gpus
    given = [(getattr(options, name), getattr(project, name)) for name in ("cpus", "mem")]
    return bool(gpus) and not all(any(pair) for pair in given) and not options.handover and not options.allocated


def _has_ranks(options: SubmitOptions) -> bool:
    """Return whether the job starts ranks: of the training, or of the smoke test."""
    return options.script is not None or options.call is not None or options.preflight == "full"


def _share(
    wanted: _Wanted, shape: _Shape, offers: Sequence[Offer], resources: Future[ClusterResources] | None
) -> NodeShare:
    """Return CPUs and memory of each node; refuse ranks that would share a core."""
    options, request = wanted.options, shape.request
    if not _has_ranks(options):
        return NodeShare()
    share = node_share.choose(request, offers, resources, handover=options.handover)
    origin = node_share.origin_of(shape.origins, share)
    launcher, skipped = options.launcher or "torchrun", options.skip_check
    node_share.refuse_shared_cores(share.added_to(request), origin, offers, launcher=launcher, skipped=skipped)
    return share


def _started(wanted: _Wanted, gate: _Gate, place: _Place, answers: _Answers) -> _Started:
    """Return what the ranks start and what they read; refuse code that cannot be copied, and data that are not here."""
    options, call, environment = wanted.options, wanted.options.call, gate.environment
    code = Code(workdir=wanted.context.cwd, reason="no script")
    if options.script is not None or call is not None:
        code = snapshot.find(_code_place(wanted, wanted.script, place.run_folder), answers.tree)
    data, cache = _data(wanted.workspace)
    script = None if code.source is None else code.source.script
    content, files = wanted.content, {}
    if call is not None:
        environment = _seeing(environment, call, code)
        files = _call_files(call, None if script is None else script.relative_to(place.run_folder))
        script, content = place.run_folder / call.script, call.files[call.script]
    return _Started(
        content=content,
        place=script,
        code=code,
        files=files,
        environment=hub_cache.with_binds(environment, cache),
        data=data,
        cache=cache,
        notes=(*code.notes, *cache.notes),
    )


def _code_place(given: _Given, script: Path | None, run_folder: Path) -> CodePlace:
    call = given.options.call
    return CodePlace(
        script=script if call is None else call.module,
        folder=_code_folder(given.options, given.context),
        run_folder=run_folder,
        workspace=given.workspace,
        options=given.options,
        context=given.context,
        skipped=() if call is None or call.folder is None else (call.folder,),
    )


def plan_code(workspace: Workspace, options: SubmitOptions, context: Context) -> tuple[Code, str]:
    """Decide only what a run of a script has of the project: for a comparison before anything else is done.

    Neither the image nor Slurm is needed, and nothing but git is started.

    Returns:
        What is copied, and the sha256 of the script; empty where there is no file.

    Raises:
        HpcenvError: the code cannot be copied.
    """
    workspace = workspace.for_lock(options.lock)
    options = merge(options, workspace, {}, "local", None).options
    script, content = _script(options, context)
    given = _Given(workspace=workspace, options=options, context=context, cluster="local")
    with _asked(given) as answers:
        code = snapshot.find(_code_place(given, script, workspace.runs / "new"), answers.tree)
    return code, hashlib.sha256(content).hexdigest() if script is not None else ""


def _manifest(
    wanted: _Wanted, shape: _Shape, gate: _Gate, place: _Place, started: _Started
) -> tuple[Manifest, tuple[str, ...]]:
    """Return what the nodes will read, and notes about it."""
    given = settings(wanted.workspace, wanted.options.env, shape.profile)
    own = hub_cache.variables(started.cache, place.run_folder)
    ranks, replaced = add_own(given, own, ": the ranks may not find the data of [[data]]")
    manifest = _described(wanted, shape, gate, place, started, ranks)
    compared = resume.compare(place.checkpoint, shape.lockfile, shape.request, manifest)
    manifest, strict = _with_determinism(manifest, wanted, shape.lockfile)
    notes = (*replaced, *compared, *strict, *_credential_notes(manifest), *_advice(manifest, wanted.merged.origins))
    return manifest, notes


def _described(
    wanted: _Wanted, shape: _Shape, gate: _Gate, place: _Place, started: _Started, ranks: tuple[Setting, ...]
) -> Manifest:
    """Return the manifest without what determinism adds; `ranks` are the variables of the ranks."""
    workspace, options, request, share = wanted.workspace, wanted.options, place.request, place.share
    lockfile, origin, run_folder = shape.lockfile, workspace.shown(shape.path), place.run_folder
    named = _secrets(wanted)
    gpus = request.gpus_per_node
    return Manifest(
        schema=SCHEMA,
        run=run_folder.name,
        run_folder=str(run_folder),
        cluster=wanted.cluster,
        nodes=request.nodes,
        nproc_per_node=request.nproc_per_node,
        gpus_per_node=gpus,
        cpus_per_task=request.cpus_per_task or 0,
        cpus_origin=shape.origins.get("cpus", share.cpus_origin),
        mem=request.mem or "",
        mem_origin=shape.origins.get("mem", share.mem_origin),
        backend=backend_of(lockfile, request),
        environment=started.environment,
        script=str(started.place or wanted.script or ""),
        module=options.script if options.module and options.script is not None else "",
        entry=options.script if options.entry and options.script is not None else "",
        script_sha256=hashlib.sha256(started.content).hexdigest() if wanted.script or options.call else "",
        args=options.args,
        workdir=str(started.code.workdir),
        submitted_in=str(wanted.context.cwd),
        settings=ranks,
        expectations=_expectations(workspace, lockfile, gate, gpus=gpus, origin=origin),
        packages=lock_model.package_expectations(lockfile),
        probe_level=gate.level,
        lockfile=origin,
        lockfile_sha256=hashlib.sha256(shape.content).hexdigest(),
        hpcenv_version=VERSION,
        gpu_needs=gpu_needs(lockfile, gpus=gpus, table=gate.table),
        sif=gate.sif.identity,
        overlay_file=gate.sif.overlay,
        stage=place.copies,
        launch=launch_options(options, torch=str(lockfile.facts.get("torch.version", ""))),
        stop=stop_options(options, request),
        preflight=preflight_options(options),
        smoke=smoke_options(options),
        pass_env=passed_variables(options),
        secrets=named,
        secret_values=_secret_values(named, run_folder, wanted.context),
        spare=request.spare,
        retry_excluding=options.retry_excluding or 0,
        modules=() if shape.profile is None else shape.profile.modules,
        module_paths=() if shape.profile is None else shape.profile.module_paths,
        unset=() if shape.profile is None else shape.profile.unset,
        setup=options.setup,
        rendezvous_host="" if shape.profile is None else shape.profile.rendezvous_host,
        source=None if started.code.source is None else started.code.source.record,
        data=started.data,
        chain=options.chain or 0,
        unlocked_binds=unlocked_binds(lockfile, gate.environment),
        lockfile_edited=_edited(lockfile),
        fingerprint=request.fingerprint,
        resume_from="" if place.checkpoint is None else str(place.checkpoint),
    )


def _with_determinism(manifest: Manifest, wanted: _Wanted, locked: Lockfile) -> tuple[Manifest, tuple[str, ...]]:
    """Return the manifest with the severities of the gate, and with what the ranks apply and record; and notes."""
    options, project, gpus = wanted.options, wanted.workspace.project, manifest.gpus_per_node
    if not manifest.launches:
        return replace(manifest, severities=gate_severities(locked, gpus=gpus)), ()
    strict = determinism.determinism_options(options, project, locked, gpus=gpus, backend=manifest.backend)
    but = f" of the {determinism.origin_of(strict)}: runs may differ"
    ranks, replaced = add_own(manifest.settings, determinism.variables(strict), but)
    manifest = replace(
        manifest,
        settings=ranks,
        severities=gate_severities(locked, gpus=gpus, profile=strict.profile),
        determinism=strict,
        recording=determinism.recording_options(options, project),
        start_hook_sha256=start_hook_digest(),
    )
    return manifest, replaced


def _expectations(
    workspace: Workspace, lockfile: Lockfile, gate: _Gate, *, gpus: int, origin: str
) -> tuple[Expectation, ...]:
    """Return what the nodes must find."""
    locked = lock_model.expectations(lockfile, level=gate.level, origin=origin)
    return (
        *(same_tree.expecting(locked, gate.sif.sha256, lockfile) if gate.sif.same_tree else locked),
        *lock_model.env_expectations(lockfile, workspace.project.env, origin=origin),
        *lock_model.bind_expectations(lockfile, origin=origin),
        *host_expectations(lockfile, gpus=gpus),
    )


def _secret_values(named: tuple[Secret, ...], run_folder: Path, context: Context) -> str:
    """Return the path of the file with the values of secrets; empty where none is kept."""
    if not any(secret.kept for secret in named):
        return ""
    return str(secret_file.path_of(state_folder(context.environ), str(run_folder)))


def _secrets(wanted: _Wanted) -> tuple[Secret, ...]:
    """Return the secrets of the run; those that the submission has the value of are kept for the nodes."""
    named = secrets(wanted.workspace, wanted.options)
    if wanted.options.handover or (wanted.options.script is None and wanted.options.call is None):
        return named
    return kept_secrets.mark_kept(named, wanted.context.environ)


def _edited(locked: Lockfile) -> str:
    """Return the fingerprint of the lockfile's content where the file says another one; else nothing."""
    content = stale.edited_content(locked)
    return "" if content is None else content


def _require_one_kind(options: SubmitOptions, cluster: Cluster) -> None:
    """Refuse options that contradict each other or need Slurm."""
    if options.module and options.entry:
        raise UsageError("`--module` and `--entry` contradict each other", why="SCRIPT is one of the two")
    if options.chain is not None and (options.sweep or options.array is not None):
        raise UsageError(
            "`--chain` is for one run", why="a sweep or array has many runs", hint="submit each of them by itself"
        )
    if options.sweep and options.array is not None:
        raise UsageError("`--sweep` and `--array` contradict each other", hint="--sweep NAME=0..9 gives both")
    if options.max_parallel is not None and not options.sweep and options.array is None:
        raise UsageError("`--max-parallel` is for a sweep or array", hint="--sweep NAME=V1,V2 or --array 0-9")
    if cluster == "local" and options.setup and not options.site_here:
        raise UsageError(
            "`setup` needs Slurm",
            why="its lines run in the batch script, and a run on this machine has no batch script (--cluster local)",
            hint="type the lines in this shell, and leave `setup` out",
        )
    for line in options.setup:
        if not line.isprintable():
            raise UsageError(f"a line of `setup` is not one line of text: {line!r}", hint="write each line by itself")
    several = "--chain" if options.chain is not None else "--sweep" if options.sweep else "--array"
    if cluster == "local" and (options.chain is not None or options.sweep or options.array is not None):
        raise UsageError(f"`{several}` needs Slurm", why="on this machine one run is started at once (--cluster local)")


def _call_files(call: Call, module: Path | None) -> dict[str, bytes]:
    """Return the files of a function's call, with the place of its module: in the run folder, or absolute."""
    place = module or call.module
    spec = {**call.spec, "file": "" if place is None else str(place)}
    beside = str(Path(call.script).with_name("call.json"))
    return {**call.files, beside: (json.dumps(spec, indent=1, sort_keys=True) + "\n").encode()}


def _seeing(environment: Environment, call: Call, code: Code) -> Environment:
    """Return the environment with what a function needs: its pickles, and the folder of its module or of the copy."""
    if environment.kind != "sif":
        return environment
    folders = [] if call.folder is None else [str(call.folder)]
    if call.module is not None and code.source is None:
        folders.append(str(call.module.parent))
    return replace(environment, binds=(*environment.binds, *(Bind(source=path, target=path) for path in folders)))


def _run_lockfile(shape: _Shape, manifest: Manifest, code: Code) -> str:
    """Return the lockfile as the run keeps it: with the state of the code, command and shape."""
    locked = shape.lockfile
    run = lock_model.RunTable(
        argv=tuple(_as_text(word) for word in (*manifest.program, *manifest.args)),
        nodes=manifest.nodes,
        gpus_per_node=manifest.gpus_per_node,
        nproc_per_node=manifest.nproc_per_node,
        backend=manifest.backend,
        env={s.name: recorded_value(s.name, _as_text(s.value)) for s in manifest.settings},
    )
    header = f"The lockfile of run {manifest.run}, with its code and command."
    table = code.table(manifest.script_sha256)
    data = {
        one.name: lock_model.LockedDataTable(path=one.path, compare=one.compare, state=one.state, hub=one.hub or None)
        for one in manifest.data
    }
    if locked.code is None and locked.run is None:
        tables = {name: document.plain(part) for name, part in (("code", table), ("run", run))}
        tables |= {f"data.{name}": document.plain(part) for name, part in data.items()}
        return toml_files.extended(shape.content.decode(), tables, header=header)
    # The lockfile is the copy of another run.
    copy = lock_model.to_data(locked.model_copy(update={"code": table, "run": run, "data": data}))
    return toml_files.dumps(copy, header=header)


def _as_text(word: str) -> str:
    r"""Return an argument as TOML can hold it: bytes that are no UTF-8 as `\xff`; the manifest has them literally."""
    return os.fsencode(word).decode("utf-8", "backslashreplace")


# Enough for a few images; the disk of a node is usually ten times larger.
_STAGE_LIMIT = 100 * 10**9


def _copies(wanted: _Wanted, gate: _Gate, run_folder: Path) -> tuple[StageRequest | None, tuple[str, ...]]:
    """Return what is copied to the nodes, None to use everything where it is, and notes."""
    options = wanted.options
    if not options.stage and not options.stage_data:
        if options.stage_dir is not None:
            raise UsageError("nothing is staged", why="--stage-dir is for copies on the nodes", hint="--stage")
        return None, ()
    if gate.environment.kind != "sif":
        raise UsageError("there is no SIF to stage", why="the lockfile is of a host environment")
    folder = options.stage_dir or ""
    if folder and not os.path.isabs(folder):
        raise UsageError(f"`--stage-dir {folder}` is not an absolute path", why="it names a folder on the nodes")
    if wanted.cluster == "local":
        return None, ("on this machine nothing is staged: the SIF is on this machine",)
    overlay = gate.environment.overlay
    notes = () if overlay is None else (f"the overlay is not copied to the nodes: they read {overlay.source}",)
    data = tuple(_data_folder(source, run_folder, wanted.context) for source in options.stage_data)
    request = StageRequest(
        folder=folder,
        limit=_STAGE_LIMIT if options.stage_limit is None else options.stage_limit,
        sif_sha256=gate.sif.sha256 if options.stage else "",
        sif_size=os.stat(gate.environment.sif).st_size if options.stage else 0,
        data=data,
    )
    return request, notes


def _data_folder(given: str, run_folder: Path, context: Context) -> DataFolder:
    source = os.path.abspath(context.cwd / os.path.expanduser(given))
    if not os.path.isdir(source):
        raise UsageError(f"`--stage-data {given}` is not a folder", why=f"looked for {source}")
    real = os.path.realpath(source)
    for what, place in (("working directory", context.cwd), ("run folder", run_folder)):
        # In the job the folder is a read-only copy.
        if Path(os.path.realpath(place)).is_relative_to(real):
            raise UsageError(f"`--stage-data {given}` holds the {what}", why=f"{place} must stay writable")
    return data_folder.find(source, packed_folder(run_folder))


def _data(workspace: Workspace) -> tuple[tuple[RecordedData, ...], HubCache]:
    """Return the data that [[data]] names, as they are now, and the cache with those of a hub."""
    found: dict[str, RecordedData] = {}
    fetched: list[FetchedData] = []
    for one in workspace.project.data:
        if one.path is None:
            repository = hub_cache.find_fetched(one, workspace.store_place)
            fetched.append(repository)
            path, state, stem = str(repository.folder), repository.state, repository.wanted.name
        else:
            path = snapshot.data_path(workspace.root, one.path)
            state, stem = _state_of(one.path, path, one.compare, workspace), os.path.basename(path)
        name = _name_of_data(stem, found)
        found[name] = RecordedData(name=name, path=path, compare=one.compare, state=str(state), hub=one.hub or "")
    return tuple(found.values()), hub_cache.plan_cache(fetched)


def _name_of_data(stem: str, known: Mapping[str, RecordedData]) -> str:
    name = stem = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-") or "data"
    number = 1
    while name in known:
        number += 1
        name = f"{stem}-{number}"
    return name


def _state_of(given: str, path: str, compare: DataCompare, workspace: Workspace) -> DataState:
    try:
        return data_state.read_state(path, compare)
    except OSError as error:
        raise UsageError(
            f"cannot read the data `{given}`",
            why=f"[[data]] in {workspace.spec} names it: {error.filename or path}: {error.strerror}",
            hint="bring them here, or take them out of hpcenv.toml",
        ) from error


def packed_folder(run_folder: Path) -> Path:
    """Return the folder for packed data, in the folder of runs: all runs share it."""
    return run_folder.parent / ".data"


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "run"


def _run_name(script: Path | None, options: SubmitOptions, context: Context) -> str:
    entry = options.script if options.entry and options.script is not None else "verify"
    stem = script.stem if script is not None else entry if options.call is None else options.call.name
    return f"{_word(stem)}-{time.strftime('%Y%m%d-%H%M%S', context.now)}-{context.token}"


def _run_folder(wanted: _Wanted, run: str) -> Path:
    options = wanted.options
    means = "the newest run" if run == "latest" else "a job id" if _JOB_ID.match(run) and not options.handover else None
    if not _RUN_NAME.match(run) or means:
        raise UsageError(
            f"{run!r} is not a run name",
            why=f"`{run}` means {means}" if means else None,
            hint="use letters, digits, '.', '_' and '-', at most 100, a letter or digit first",
        )
    parent = (
        wanted.workspace.runs
        if options.runs_dir is None
        else Path(os.path.abspath(wanted.context.cwd / options.runs_dir))
    )
    # submitit replaces %j in the path of its folder as Slurm does in that of the log.
    misread = r"[\"'\\%]" if wanted.cluster == "slurm" else r"[\"'\\]"
    if not str(parent).isprintable() or re.search(misread, str(parent)):
        raise UsageError(
            f"runs cannot be kept in {str(parent)!r}",
            why="Slurm would misread quotes, backslashes, `%` and control characters in the log's path",
            hint="choose another place: --runs-dir DIR, or `runs` under [paths] in hpcenv.toml",
        )
    folder = parent / run
    if os.path.lexists(folder):
        raise WouldOverwrite(f"the run folder `{folder}` exists", hint="choose another name: --name NAME")
    return folder


def _require_start_line(manifest: Manifest) -> None:
    """Refuse here what the start command of the container cannot contain; otherwise the nodes refuse it."""
    run = RunFolder(Path(manifest.run_folder))
    build_start_command(
        manifest.environment,
        [manifest.environment.python, *manifest.program, *manifest.args],
        workdir=manifest.workdir,
        variables={
            **{setting.name: setting.value for setting in manifest.settings},
            **{secret.name: "" for secret in manifest.secrets},
        },
        inherited={name: "" for name in manifest.pass_env if not name.endswith("*")},
        passed=manifest.pass_env,
        home=str(run.home_of("NODE")),
        binds=own_folders(manifest),
    )


def _render(manifest: Manifest, request: Request, command: tuple[str, ...]) -> str:
    return render_script(manifest, request, python=sys.executable, command=command)
