"""Plan a run: decide everything about it, and write nothing.

Runs on: LOGIN NODE. Every request that can be refused is refused here, before anything is queued.
`--dry-run` prints the same plan that `submit` carries out.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcenv.cluster.node_types import Offer
from hpcenv.errors import UsageError
from hpcenv.locking.formats.requirements import requirements_text
from hpcenv.project import lockfile as lock_model
from hpcenv.project.context import Context
from hpcenv.project.fields import FieldLevel
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.site_profile import Profile
from hpcenv.project.workspace import Workspace, notes_on
from hpcenv.records.codec import SCHEMA
from hpcenv.records.manifest import Bind, Environment, Manifest, RecordedData, Setting, StageRequest
from hpcenv.records.variables import recorded_command
from hpcenv.submission import (
    after,
    capacity,
    choose_site,
    credentials,
    determinism,
    early_checks,
    entry_point,
    gpu_kernels,
    hub_cache,
    kept_secrets,
    module_file,
    node_share,
    resume,
    run_data,
    run_place,
    shell_script,
    snapshot,
    typed_binds,
)
from hpcenv.submission.answers import Answers, asked
from hpcenv.submission.hidden_names import hidden_names
from hpcenv.submission.hub_cache import HubCache
from hpcenv.submission.locked import (
    add_own,
    backend_of,
    default_level,
    environment_of,
    expectations,
    gate_severities,
    gpu_needs,
    read_fresh,
    refuse_gpus_for_cpu_torch,
    settings,
    unlocked_binds,
)
from hpcenv.submission.locked_container import LockedSif, identify_sif
from hpcenv.submission.node_code import start_hook_digest
from hpcenv.submission.node_share import NodeShare
from hpcenv.submission.plan import Call, EarlierRuns, Plan, Request, render_script
from hpcenv.submission.ray_options import require_locked_ray
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
    require_one_kind,
    smoke_options,
    stop_options,
    to_record,
)
from hpcenv.submission.run_lockfile import run_lockfile
from hpcenv.submission.script_notes import LaunchShape
from hpcenv.submission.snapshot import Code, CodePlace
from hpcenv.version import VERSION


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """The merged options, the project and the site profile of a run.

    Attributes:
        profile: the site profile. Its values for this run are not yet selected.
        request: what is requested from Slurm, without the values of the site profile.
        earlier: the runs of `--after`.
        script: the file that the ranks start; None if it is not known.
        content: the content of this file, as bytes.
    """

    workspace: Workspace
    options: SubmitOptions
    context: Context
    cluster: Cluster
    merged: MergedOptions
    profile: Profile | None
    request: Request
    earlier: EarlierRuns
    script: Path | None
    content: bytes
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """What is requested from Slurm, with the origin of every value, the lockfile and the site profile.

    Attributes:
        path: the path of the lockfile.
        content: the content of the lockfile, as bytes.
        edited: the fingerprint of the lockfile's content, if the lockfile names another fingerprint; else empty.
        profile: the site profile with the values for this run.
    """

    path: Path
    content: bytes
    lockfile: Lockfile
    edited: str
    request: Request
    origins: Mapping[str, str]
    profile: Profile | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Gate:
    """The values that the check compares on the nodes."""

    environment: Environment
    level: FieldLevel
    table: dict[str, Any]
    sif: LockedSif
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The place of the run, and its resources on the cluster.

    Attributes:
        request: the final request to Slurm.
        share: the CPUs and memory that were computed from the resources of the nodes.
        copies: what is copied to the disks of the nodes; None if nothing is copied.
    """

    run_folder: Path
    checkpoint: Path | None
    request: Request
    share: NodeShare
    copies: StageRequest | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Started:
    """The program that torchrun will start, its code and its data.

    Attributes:
        content: the content of the program, as bytes.
        place: the path at which the ranks find the program; None if the ranks use the script at its original path.
        environment: the environment, with the binds for code and data.
        data: the folders and files of [[data]] in their current state.
    """

    content: bytes
    place: Path | None
    code: Code
    files: dict[str, bytes]
    environment: Environment
    data: tuple[RecordedData, ...]
    cache: HubCache
    notes: tuple[str, ...]


def plan_job(workspace: Workspace, options: SubmitOptions, context: Context) -> Plan:
    """Decide everything about a run. This function does not write or submit anything.

    It does not start programs that the project names, because the user may not have accepted them yet (`--dry-run`).

    Raises:
        HpcenvError: hpcenv found a reason why the job would fail.
    """
    _require_no_import(context)
    workspace = workspace.for_lock(options.lock)
    cluster, alone = _cluster(options, context)
    options, context, hidden = kept_secrets.hide_credentials(options, context)
    with asked(workspace, options, context, cluster) as answers:
        wanted = _merge(workspace, options, context, cluster)
        shape = _shape(wanted)
        gate = _gate(wanted, shape)
        place = _place(wanted, shape, gate, answers)
        started = _started(wanted, gate, place, answers)
    manifest, notes = _manifest(wanted, shape, gate, place, started)
    early_checks.require_start_line(manifest)
    early_checks.require_hpcenv_chooses_gpus(manifest)
    command, python = recorded_command(context.command), sys.executable
    request = place.request
    share, of_site = place.share.words(), choose_site.options_in_words(shape.profile)
    return Plan(
        manifest=manifest,
        request=request,
        script="" if cluster == "local" else render_script(manifest, request, python=python, command=command),
        lockfile_text=run_lockfile(shape.content.decode(), shape.lockfile, manifest, started.code),
        requirements=requirements_text(shape.lockfile),
        command=command,
        notes=(*alone, *hidden, *wanted.notes, *shape.notes, *gate.notes, *place.notes, *started.notes, *notes),
        requested=(*wanted.merged.requested(), *share, *of_site),
        source=started.code.source,
        record=to_record(options),
        files=started.files,
        hub=started.cache,
        after=wanted.earlier,
        secret_values=kept_secrets.values_of(manifest.secrets, context.environ),
    )


def _require_no_import(context: Context) -> None:
    """Refuse a submission by a rank while the rank imports the file of its function (incontainer/call.py)."""
    file = context.environ.get("HPCENV_IMPORTING")
    if file is not None:
        raise UsageError(
            "a rank does not submit while it imports the file of its function",
            why=f"each rank imports `{file}`, and each would submit once more",
            hint='put the lines that submit under `if __name__ == "__main__":`',
        )


def _cluster(options: SubmitOptions, context: Context) -> tuple[Cluster, tuple[str, ...]]:
    cluster = options.cluster or detect_cluster(context.environ)
    if cluster == "local" and options.cluster is None:
        return cluster, ("there is no sbatch on PATH: the run is on this machine (--cluster local)",)
    return cluster, ()


def _merge(workspace: Workspace, options: SubmitOptions, context: Context, cluster: Cluster) -> _Wanted:
    """Merge the options from all sources. Refuse options that contradict each other, or that name missing things."""
    profile, of_site = choose_site.choose(workspace, options, context, cluster)
    merged = merge(options, workspace, context.environ, cluster, profile)
    # The script is read before the request is made. If it is a shell script with `#SBATCH` lines, the error about this
    # must be the first error, because its hint is a complete hpcenv command line.
    script, content = _script(merged.options, context)
    request = make_request(merged.options)
    require_literal(merged.options)
    require_one_kind(merged.options, cluster)
    earlier = after.find(merged.options, context, cluster)
    request = after.with_dependency(request, earlier)
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
        notes=(*of_site, *merged.notes, *after.notes_on(earlier)),
    )


def _script(options: SubmitOptions, context: Context) -> tuple[Path | None, bytes]:
    """Return the file that the ranks start, and its bytes; None if it is not known."""
    if options.script is None:
        return None, b""
    if options.entry:
        entry_point.require_name(options.script)
        entry_point.refuse_starter(options.script, options.launcher)
        return None, b""
    shell_script.refuse_starter(options.script, options.args, context.cwd, context.command)
    if options.module:
        return early_checks.read_module(options.script, context.cwd, context.command)
    return early_checks.read_script(options.script, context.cwd)


def _in_environment(wanted: _Wanted, environment: Environment) -> tuple[str, ...]:
    """Refuse a module or console script that the environment lacks; return a note if this cannot be checked."""
    options, context = wanted.options, wanted.context
    if options.entry and options.script is not None:
        return entry_point.require_in_environment(options.script, environment)
    if wanted.script is not None or not options.module or options.script is None:
        return ()
    variables = {**context.environ, **wanted.workspace.project.env, **options.env}
    return module_file.require_in_environment(options.script, context.cwd, environment, variables)


def _shape(wanted: _Wanted) -> _Shape:
    """Read the lockfile and return the request. Refuse a request that does not fit the locked environment."""
    workspace, options = wanted.workspace, wanted.options
    read = read_fresh(workspace, options.lock, options.lockfile, frozen=options.frozen)
    path, content, lockfile, edited = read.path, read.content, read.lockfile, read.edited
    why = f"its fingerprint {lockfile.fingerprint} does not fit its content (--frozen)"
    notes = [f"`{workspace.shown(path)}` was edited: {why}"] if edited else []
    # The lockfile decides about overlays. This note is needed, because the command line does not show that an overlay
    # is not mounted, or is mounted at another place.
    notes += [f"{one}: the lockfile counts (--frozen)" for one in read.reasons if one.name == "overlay-changed"]
    profile = _for_this_run(wanted, lockfile)
    notes += [] if profile is None else [*profile.notes, *profile.left_out]
    notes += notes_on(lockfile, path, data=bool(workspace.project.data))
    request = choose_site.with_options(wanted.request, profile)
    request = replace(request, fingerprint=edited or lockfile.fingerprint)
    origins = choose_site.with_origins(wanted.merged.origins, profile)
    notes += _idle_gpus(options, request, origins, lockfile)
    if options.launcher == "ray":
        require_locked_ray(lockfile)
    if options.script is not None and wanted.script is not None:
        nodes, nproc, launcher = request.nodes, request.nproc_per_node, options.launcher or "torchrun"
        ranks = LaunchShape(launcher=launcher, nodes=nodes, nproc_per_node=nproc)
        notes += early_checks.compile_script(options.script, wanted.content, lockfile, ranks)
    return _Shape(
        path=path,
        content=content,
        lockfile=lockfile,
        edited=edited,
        request=request,
        origins=origins,
        profile=profile,
        notes=tuple(notes),
    )


def _for_this_run(wanted: _Wanted, lockfile: Lockfile) -> Profile | None:
    """Return the site profile with the values that are for this run. Refuse a run that the site cannot start."""
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


def _idle_gpus(options: SubmitOptions, request: Request, origins: Mapping[str, str], locked: Lockfile) -> list[str]:
    """Refuse GPUs that the locked torch cannot use; with --allow-cpu-torch return a note."""
    gpus = request.gpus_per_node
    if not options.allow_cpu_torch:
        ranks = options.trains and options.session is None
        without = "--gpus 0 --nproc R" if ranks else "leave out --gpus (in an allocation with GPUs: --gpus 0)"
        hint = f"{without}, or lock a torch built for CUDA or ROCm; if something else uses them: --allow-cpu-torch"
        refuse_gpus_for_cpu_torch(locked, gpus=gpus, origin=origins.get("gpus", "--gpus"), hint=hint)
    elif gpus and not lock_model.compares_gpus(locked, gpus):
        return [f"the locked torch cannot use the {gpus} GPUs of each node: they are recorded, not compared"]
    return []


def _gate(wanted: _Wanted, shape: _Shape) -> _Gate:
    """Return the environment that the nodes must have. Refuse a run if this machine already shows a difference."""
    options, context, lockfile = wanted.options, wanted.context, shape.lockfile
    lock = options.lock if options.lockfile is None else str(options.lockfile)
    environment = environment_of(
        wanted.workspace, lockfile, shape.request, shape.profile, context.environ, lock=lock, runtime=options.runtime
    )
    environment, absent = typed_binds.add(environment, options.bind, context.cwd)
    sif = LockedSif()
    if lockfile.container is not None:
        place = wanted.workspace.store_place
        sif = identify_sif(environment, lockfile, lockfile.container, place, context.cache, lock=lock)
    needed = shape.request.gpus_per_node > 0 and lock_model.cuda_of(lockfile) is not None
    return _Gate(
        environment=environment,
        level=options.level or default_level(environment),
        table=gpu_kernels.compat_table() if needed else {},
        sif=sif,
        notes=(*absent, *sif.notes, *_in_environment(wanted, environment)),
    )


def _place(wanted: _Wanted, shape: _Shape, gate: _Gate, answers: Answers) -> _Place:
    """Return the place of the run and its resources on the cluster. Refuse a run that cannot work on this cluster."""
    options, context = wanted.options, wanted.context
    run_folder = run_place.run_folder(wanted.workspace, options, context, wanted.cluster, wanted.script)
    checkpoint = resume.find_checkpoint(options, context, wanted.earlier)
    share, notes = _early_checks(wanted, shape, gate, run_folder, checkpoint, answers)
    environment, cluster = gate.environment, wanted.cluster
    copies, on_copies = run_data.find_copies(options, context.cwd, cluster, environment, gate.sif, run_folder)
    return _Place(
        run_folder=run_folder,
        checkpoint=checkpoint,
        request=share.added_to(shape.request),
        share=share,
        copies=copies,
        notes=(*notes, *on_copies),
    )


def _early_checks(
    wanted: _Wanted, shape: _Shape, gate: _Gate, run_folder: Path, checkpoint: Path | None, answers: Answers
) -> tuple[NodeShare, list[str]]:
    """Refuse a run that the cluster or this machine cannot run. Return the run's share of the nodes, and notes."""
    options, context, request, lockfile = wanted.options, wanted.context, shape.request, shape.lockfile
    notes = _check_secrets(wanted, shape)
    if wanted.cluster == "local":
        early_checks.require_cpus_for_local(request, shape.origins, typed=options.cluster is not None)
        return NodeShare(), notes
    # The first checks do not need the answer of sinfo. sinfo may take some seconds.
    shared = early_checks.require_shared(run_folder, options, context, gate.environment, checkpoint)
    offers, unknown = ((), ()) if options.allocated else early_checks.read_offers(answers.offers)
    notes += unknown
    notes += gpu_kernels.judge_libraries(lockfile, request, gate.table)
    notes += gpu_kernels.refuse_gpu_without_kernels(wanted.workspace, lockfile, request, gate.table, offers)
    notes += shared
    if options.allocated:
        return NodeShare(), notes + early_checks.check_space(run_folder)
    notes += capacity.judge(request, shape.origins, offers) if offers else []
    notes += early_checks.check_space(run_folder)
    notes += early_checks.require_known_srun_options(request, context)
    notes += early_checks.check_warning(request.time_minutes, stop_options(options, request).grace)
    share = _share(wanted, shape, offers, answers)
    return share, [*notes, share.note] if share.note else notes


def _check_secrets(wanted: _Wanted, shape: _Shape) -> list[str]:
    """Refuse secrets that the nodes cannot read. Return notes about secrets that the nodes possibly cannot read."""
    options, context = wanted.options, wanted.context
    # An exported folder will be submitted with other variables and files. A job without a training does not read
    # secrets.
    if options.handover or not options.trains:
        return []
    modules = () if shape.profile is None else shape.profile.modules
    named = kept_secrets.secrets_of(wanted.workspace, options, context.environ)
    local, as_here = wanted.cluster == "local", not modules and not options.setup
    notes = early_checks.require_secrets(named, context, local=local, as_here=as_here)
    return notes if local or options.assume_shared else notes + kept_secrets.require_visible(named, context)


def _share(wanted: _Wanted, shape: _Shape, offers: Sequence[Offer], answers: Answers) -> NodeShare:
    """Return the CPUs and memory to request on each node. Refuse a request in which ranks would share a core."""
    options, request = wanted.options, shape.request
    # Only a training and the smoke test (level `full`) have ranks.
    if not options.trains and options.preflight != "full":
        return NodeShare()
    share = node_share.choose(request, offers, answers.resources, handover=options.handover)
    origin = node_share.origin_of(shape.origins, share)
    launcher, skipped = options.launcher or "torchrun", options.skip_check
    node_share.refuse_shared_cores(share.added_to(request), origin, offers, launcher=launcher, skipped=skipped)
    return share


def _started(wanted: _Wanted, gate: _Gate, place: _Place, answers: Answers) -> _Started:
    """Return the program of the ranks, its code and its data. Raise an error if code or data cannot be used."""
    options, call, environment = wanted.options, wanted.options.call, gate.environment
    code = Code(workdir=wanted.context.cwd, reason="no script")
    # A session works in the project itself.
    if options.trains and options.session is None:
        file = wanted.script if call is None else call.module
        run, workspace, context = place.run_folder, wanted.workspace, wanted.context
        where = CodePlace(script=file, run_folder=run, workspace=workspace, options=options, context=context)
        code = snapshot.find(where, answers.tree)
    data, cache = run_data.find_data(wanted.workspace, environment.revision)
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


def plan_code(
    workspace: Workspace, options: SubmitOptions, context: Context, run_folder: Path | None = None
) -> tuple[Code, str]:
    """Decide only which files of the project are for a run of a script.

    The caller needs this for a comparison, or for an engine other than Slurm. This function starts only git. It does
    not need the image or Slurm.

    Args:
        run_folder: the folder into which the code will be copied; None if it will not be copied.

    Returns:
        The files to copy, and the sha256 of the script. The sha256 is empty if the file of the script is not known.

    Raises:
        HpcenvError: the code cannot be copied.
    """
    workspace = workspace.for_lock(options.lock)
    options = merge(options, workspace, {}, "local", None).options
    script, content = _script(options, context)
    run_folder = run_folder or workspace.runs / "new"
    place = CodePlace(script=script, run_folder=run_folder, workspace=workspace, options=options, context=context)
    with asked(workspace, options, context, "local") as answers:
        code = snapshot.find(place, answers.tree)
    return code, hashlib.sha256(content).hexdigest() if script is not None else ""


def _manifest(
    wanted: _Wanted, shape: _Shape, gate: _Gate, place: _Place, started: _Started
) -> tuple[Manifest, tuple[str, ...]]:
    """Return the manifest that the nodes will read, and notes about the manifest."""
    given = settings(wanted.workspace, wanted.options.env, shape.profile)
    own = hub_cache.variables(started.cache, place.run_folder)
    ranks, replaced = add_own(given, own, ": the ranks may not find the data of [[data]]")
    manifest = _described(wanted, shape, gate, place, started, ranks)
    compared = resume.compare(place.checkpoint, shape.lockfile, shape.request, manifest)
    manifest, strict = _with_determinism(manifest, wanted, shape.lockfile, shape.profile)
    hides = (f"{one}: the ranks import it" for one in manifest.hides)
    notes = (
        *hides,
        *replaced,
        *compared,
        *strict,
        *credentials.notes_on(manifest),
        *_advice(manifest, wanted.merged.origins),
    )
    return manifest, notes


def _described(
    wanted: _Wanted, shape: _Shape, gate: _Gate, place: _Place, started: _Started, ranks: tuple[Setting, ...]
) -> Manifest:
    """Return the manifest without the determinism options; `ranks` are the variables of the ranks."""
    workspace, options, request, share = wanted.workspace, wanted.options, place.request, place.share
    lockfile, origin, run_folder = shape.lockfile, workspace.shown(shape.path), place.run_folder
    named = kept_secrets.secrets_of(workspace, options, wanted.context.environ)
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
        expectations=expectations(workspace, lockfile, gate.sif, level=gate.level, gpus=gpus, origin=origin),
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
        secret_values=kept_secrets.file_of(named, run_folder, wanted.context.environ),
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
        hides=_hidden(wanted, lockfile, gate.environment),
        lockfile_edited=shape.edited,
        fingerprint=request.fingerprint,
        resume_from="" if place.checkpoint is None else str(place.checkpoint),
        session=options.session,
    )


def _hidden(wanted: _Wanted, lockfile: Lockfile, environment: Environment) -> tuple[str, ...]:
    """Return the files of the project that hide locked modules from the ranks.

    A console script does not import modules from the folder of the code.
    """
    options, context = wanted.options, wanted.context
    folder = None if options.entry else snapshot.code_folder(options, context.cwd)
    packages = module_file.only_packages(
        environment, {**context.environ, **wanted.workspace.project.env, **options.env}
    )
    return hidden_names(folder, lockfile, packages)


def _with_determinism(
    manifest: Manifest, wanted: _Wanted, locked: Lockfile, profile: Profile | None
) -> tuple[Manifest, tuple[str, ...]]:
    """Return the manifest with the severities of the gate and the determinism options of the ranks, and notes."""
    options, project, gpus = wanted.options, wanted.workspace.project, manifest.gpus_per_node
    if not manifest.launches:
        return replace(manifest, severities=gate_severities(locked, gpus=gpus)), ()
    strict = determinism.determinism_options(
        options, project, locked, gpus=gpus, backend=manifest.backend, launcher=manifest.launch.launcher
    )
    but = f" of the {determinism.origin_of(strict)}: runs may differ"
    ranks, replaced = add_own(manifest.settings, determinism.variables(strict), but)
    manifest = replace(
        manifest,
        settings=ranks,
        severities=gate_severities(locked, gpus=gpus, profile=strict.profile),
        determinism=strict,
        recording=determinism.recording_options(options, project),
        watch=project.watch.options(
            ("" if profile is None else profile.file.watch.prometheus) or "", idle_end=options.idle_end or 0
        ),
        start_hook_sha256=start_hook_digest(),
    )
    return manifest, replaced


def _call_files(call: Call, module: Path | None) -> dict[str, bytes]:
    """Return the files for the call of a function. call.json has the path of the function's module.

    Args:
        module: the path relative to the run folder; None to use the module at its own path.
    """
    place = module or call.module
    spec = {**call.spec, "file": "" if place is None else str(place)}
    beside = str(Path(call.script).with_name("call.json"))
    return {**call.files, beside: (json.dumps(spec, indent=1, sort_keys=True) + "\n").encode()}


def _seeing(environment: Environment, call: Call, code: Code) -> Environment:
    """Return the environment with binds for a function: its pickles, its outputs, and a module that is not copied."""
    if environment.kind != "sif":
        return environment
    folders = [str(folder) for folder in call.folders]
    if call.module is not None and code.source is None:
        folders.append(str(call.module.parent))
    return replace(environment, binds=(*environment.binds, *(Bind(source=path, target=path) for path in folders)))


def _advice(manifest: Manifest, origins: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note if several nodes will use NCCL and the user chose no level of checks."""
    chosen = "preflight" in origins or manifest.preflight.level != "quick"
    if chosen or manifest.backend != "nccl" or manifest.nodes < 2 or not manifest.launches:
        return ()
    what = "the network between the nodes is not tested before the training"
    return (f"{what}: --preflight full (or `preflight` under [submit]) does that",)
