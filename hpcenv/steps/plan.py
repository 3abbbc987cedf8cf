"""Plan a run: decide everything about it, write nothing.

Runs on: LOGIN NODE. Whatever can be refused is refused here, before anything is queued;
`--dry-run` prints the plan that `submit` consumes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcenv import node, wire
from hpcenv.adapters import toml_files
from hpcenv.dataclass import dataclass
from hpcenv.errors import UsageError, WouldOverwrite
from hpcenv.model import document, stale
from hpcenv.model import lockfile as lock_model
from hpcenv.model.fields import Level
from hpcenv.model.lockfile import Lockfile
from hpcenv.model.plan import Call, Plan, Request, render_script
from hpcenv.model.site import Profile
from hpcenv.node.enter import enter
from hpcenv.steps import preflight, same_tree, site, snapshot
from hpcenv.steps.locked import (
    LockedSif,
    backend_of,
    compat_table,
    default_level,
    environment_of,
    gpu_needs,
    host_expectations,
    identify_sif,
    settings,
)
from hpcenv.steps.request import (
    Asked,
    Cluster,
    Surroundings,
    detect_cluster,
    launch_options,
    make_request,
    merge_values,
    passed_variables,
    require_literal,
    secrets,
    stop_options,
)
from hpcenv.steps.snapshot import Code
from hpcenv.steps.workspace import Workspace, lockfile_bytes, notes_on, parse_lockfile
from hpcenv.version import VERSION
from hpcenv.wire import Bind, DataFolder, Environment, Manifest, RunFolder, StageRequest

# A run of that name would hide the job: `hpcenv cancel 34` takes both.
_JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?\Z")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What was asked for, of which project, where."""

    workspace: Workspace
    asked: Asked
    around: Surroundings
    cluster: Cluster


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """What Slurm is asked for, with the origin of every value, and the site that had a say in it."""

    request: Request
    values: Mapping[str, str | int]
    origins: Mapping[str, str]
    profile: Profile | None


@dataclass(frozen=True, kw_only=True)
class _Locked:
    """The lockfile of a run as it was read."""

    path: Path
    content: bytes
    lockfile: Lockfile


@dataclass(frozen=True, kw_only=True)
class _Started:
    """What torchrun will start: `place` is where the ranks see it, None where it stays `script`."""

    script: Path | None
    content: bytes
    place: Path | None
    code: Code
    files: dict[str, bytes]
    environment: Environment


@dataclass(frozen=True, kw_only=True)
class _Gate:
    """What the nodes are checked for before they train."""

    environment: Environment
    level: Level
    table: dict[str, Any]
    sif: LockedSif


def plan_job(workspace: Workspace, asked: Asked, around: Surroundings) -> Plan:
    """Decide everything about a run; writes and submits nothing.

    Raises:
        HpcenvError: anything that would make the job fail and can be known here.
    """
    _require_no_import(around)
    cluster, notes = _cluster(asked, around)
    wanted = _Wanted(workspace=workspace, asked=asked, around=around, cluster=cluster)
    # Other programs answer while the rest is decided.
    with preflight.Question(around, needed=cluster == "slurm") as question, _look(asked, around) as look:
        shape = _shape(wanted, notes)
        require_literal(asked)
        _require_one_kind(asked, cluster)
        script, script_bytes = (None, b"") if asked.script is None else preflight.read_script(asked.script, around.cwd)
        locked = _locked(wanted)
        notes += notes_on(locked.lockfile, locked.path)
        if asked.script is not None:
            notes += preflight.compile_script(asked.script, script_bytes, locked.lockfile)
        gate = _gate(wanted, shape, locked.lockfile, notes)
        run_folder = _run_folder(wanted, asked.run or _run_name(script, asked.call, around))
        _preflight(wanted, shape, locked, gate, run_folder, question, notes)
        stage = _stage(wanted, gate, run_folder, notes)
        started = _started(wanted, script, script_bytes, gate.environment, run_folder, look, notes)
    manifest = _manifest(wanted, shape, locked, gate, started, run_folder, stage)
    _require_start_line(manifest)
    return Plan(
        manifest=manifest,
        request=shape.request,
        script="" if cluster == "local" else _render(wanted, manifest, shape.request, notes),
        lockfile_text=_run_lockfile(locked.content.decode(), locked.lockfile, manifest, started.code),
        command=around.command,
        notes=tuple(notes),
        asked=tuple(f"{n} = {shape.values[n]} ({shape.origins[n]})" for n in shape.values if n != "nproc"),
        source=started.code.source,
        files=started.files,
    )


def _require_no_import(around: Surroundings) -> None:
    """Refuse a program that submits again because each rank of its own job imports it (incontainer/call.py)."""
    file = around.environ.get(_IMPORTING)
    if file is not None:
        raise UsageError(
            "a rank does not submit while it imports the file of its function",
            why=f"each rank imports `{file}`, and each would submit once more",
            hint='put what submits under `if __name__ == "__main__":`',
        )


_IMPORTING = "HPCENV_IMPORTING"


def _look(asked: Asked, around: Surroundings) -> snapshot.Look:
    """Begin to ask git about the folder of what torchrun will start."""
    if asked.call is not None:
        return snapshot.Look(asked.call.module, around.environ)
    script = None if asked.script is None else Path(os.path.abspath(around.cwd / asked.script))
    return snapshot.Look(script, around.environ)


def _shape(wanted: _Wanted, notes: list[str]) -> _Shape:
    workspace, asked, around = wanted.workspace, wanted.asked, wanted.around
    profile = site.choose(workspace, asked, around, wanted.cluster, notes)
    values, origins = merge_values(workspace, asked, around.environ, wanted.cluster, profile, notes)
    request = make_request(values, origins, workspace.accepted)
    profile = None if profile is None else profile.for_nodes(request.nodes)
    return _Shape(request=request, values=values, origins=origins, profile=profile)


def _locked(wanted: _Wanted) -> _Locked:
    workspace, asked = wanted.workspace, wanted.asked
    path = asked.lockfile or workspace.lockfile_path(asked.lock)
    content = lockfile_bytes(path)
    locked = parse_lockfile(content, path, workspace.accepted)
    if not asked.frozen:
        preflight.refuse_stale(workspace, asked, wanted.around.environ, stale.compare_spec(workspace.project, locked))
    return _Locked(path=path, content=content, lockfile=locked)


def _gate(wanted: _Wanted, shape: _Shape, locked: Lockfile, notes: list[str]) -> _Gate:
    asked, around, request = wanted.asked, wanted.around, shape.request
    environment = environment_of(wanted.workspace, locked, request, shape.profile, around.environ)
    sif = identify_sif(environment, locked, wanted.workspace.store_place, around.cache, notes)
    needed = request.gpus_per_node > 0 and lock_model.cuda_of(locked) is not None
    return _Gate(
        environment=environment,
        level=asked.level or default_level(environment),
        table=compat_table(asked, around, needed=needed),
        sif=sif,
    )


def _preflight(
    wanted: _Wanted,
    shape: _Shape,
    locked: _Locked,
    gate: _Gate,
    run_folder: Path,
    question: preflight.Question,
    notes: list[str],
) -> None:
    """Refuse what the cluster, or this machine, could not run."""
    workspace, asked, around, request = wanted.workspace, wanted.asked, wanted.around, shape.request
    # Who submits an exported folder has an environment of their own; without a script no secret is read.
    if not asked.handover and (asked.script is not None or asked.call is not None):
        modules = () if shape.profile is None else shape.profile.modules
        as_here = not modules and template_path(workspace, asked, around) == built_in("job.sbatch")
        named = secrets(workspace, asked)
        notes += preflight.require_secrets(named, around, local=wanted.cluster == "local", as_here=as_here)
    if wanted.cluster == "local":
        preflight.require_cpus_for_local(request, shape.origins, typed=asked.cluster is not None)
        return
    # What is known here first: sinfo takes its time.
    shared = preflight.require_shared(run_folder, asked, around, gate.environment)
    offers = question.answer(notes)
    notes += preflight.refuse_gpu_without_kernels(workspace, locked.lockfile, request, gate.table, offers)
    notes += shared
    notes += preflight.check_cluster(request, shape.origins, offers)
    notes += preflight.check_space(run_folder)
    notes += preflight.check_warning(request.time_minutes, stop_options(workspace, asked, request).grace)
    if request.gpus_per_node and request.cpus_per_task is None:
        many = request.nproc_per_node != 1
        ranks = f"{request.nproc_per_node} ranks share" if many else "1 rank has"
        notes.append(f"no --cpus: {ranks} the CPUs that Slurm gives by default")


def _started(
    wanted: _Wanted,
    script: Path | None,
    content: bytes,
    environment: Environment,
    run_folder: Path,
    look: snapshot.Look,
    notes: list[str],
) -> _Started:
    call = wanted.asked.call
    module = script if call is None else call.module
    code = Code(reason="no script")
    if module is not None:
        code = snapshot.find(module, look, run_folder, wanted.asked, wanted.around, notes)
    place = None if code.source is None else code.source.script
    if call is None:
        return _Started(script=script, content=content, place=place, code=code, files={}, environment=environment)
    return _Started(
        script=script,
        content=call.files[call.script],
        place=run_folder / call.script,
        code=code,
        files=_call_files(call, place),
        environment=_seeing(environment, call, code),
    )


def _manifest(
    wanted: _Wanted,
    shape: _Shape,
    locked: _Locked,
    gate: _Gate,
    started: _Started,
    run_folder: Path,
    stage: StageRequest | None,
) -> Manifest:
    workspace, asked, request = wanted.workspace, wanted.asked, shape.request
    lockfile, origin = locked.lockfile, workspace.shown(locked.path)
    expectations = lock_model.expectations(lockfile, level=gate.level, origin=origin)
    gpus = request.gpus_per_node
    return Manifest(
        schema=wire.SCHEMA,
        run=run_folder.name,
        run_folder=str(run_folder),
        cluster=wanted.cluster,
        nodes=request.nodes,
        nproc_per_node=request.nproc_per_node,
        gpus_per_node=gpus,
        cpus_per_task=request.cpus_per_task or 0,
        backend=backend_of(lockfile, request),
        environment=started.environment,
        script=str(started.place or started.script or ""),
        script_sha256=hashlib.sha256(started.content).hexdigest() if started.script or asked.call else "",
        args=asked.args,
        workdir=str(wanted.around.cwd),
        settings=settings(workspace, asked.env, shape.profile),
        expectations=(
            *(same_tree.expecting(expectations, gate.sif.sha256) if gate.sif.same_tree else expectations),
            *host_expectations(lockfile, gpus=gpus),
        ),
        packages=lock_model.package_expectations(lockfile),
        probe_level=gate.level,
        lockfile=origin,
        lockfile_sha256=hashlib.sha256(locked.content).hexdigest(),
        hpcenv_version=VERSION,
        gpu_needs=gpu_needs(lockfile, gpus=gpus, table=gate.table),
        sif=gate.sif.identity,
        stage=stage,
        launch=launch_options(asked, request, torch=str(lockfile.facts.get("torch.version", ""))),
        stop=stop_options(workspace, asked, request),
        pass_env=passed_variables(workspace, asked),
        secrets=secrets(workspace, asked),
        spare=request.spare,
        retry_excluding=asked.retry_excluding or 0,
        modules=() if shape.profile is None else shape.profile.modules,
        source=None if started.code.source is None else started.code.source.record,
        chain=asked.chain or 0,
    )


def _require_one_kind(asked: Asked, cluster: Cluster) -> None:
    """Refuse what contradicts itself or needs Slurm."""
    if asked.locked and asked.frozen:
        raise UsageError("`--locked` and `--frozen` contradict each other", why="one checks the lockfile, one does not")
    if asked.chain is not None and (asked.sweep or asked.array is not None):
        raise UsageError(
            "`--chain` is for one run", why="a sweep or array is many", hint="submit each of them by itself"
        )
    if asked.sweep and asked.array is not None:
        raise UsageError("`--sweep` and `--array` contradict each other", hint="--sweep NAME=0..9 gives both")
    if asked.max_parallel is not None and not asked.sweep and asked.array is None:
        raise UsageError("`--max-parallel` is for a sweep or array", hint="--sweep NAME=V1,V2 or --array 0-9")
    several = "--chain" if asked.chain is not None else "--sweep" if asked.sweep else "--array"
    if cluster == "local" and (asked.chain is not None or asked.sweep or asked.array is not None):
        raise UsageError(f"`{several}` needs Slurm", why="on this machine one run is started at once (--cluster local)")


def _call_files(call: Call, module: Path | None) -> dict[str, bytes]:
    """Return the files of a function's call, with the place of its module as the ranks see it."""
    place = module or call.module
    spec = {**call.spec, "file": "" if place is None else str(place)}
    beside = str(Path(call.script).with_name("call.json"))
    return {**call.files, beside: (json.dumps(spec, indent=1, sort_keys=True) + "\n").encode()}


def _seeing(environment: Environment, call: Call, code: Code) -> Environment:
    """Return the environment with the module's own folder in sight, where no copy of it is."""
    if environment.kind != "sif" or call.module is None or code.source is not None:
        return environment
    folder = str(call.module.parent)
    return replace(environment, binds=(*environment.binds, Bind(source=folder, target=folder)))


def _cluster(asked: Asked, around: Surroundings) -> tuple[Cluster, list[str]]:
    cluster = asked.cluster or detect_cluster(around.environ)
    if cluster == "local" and asked.cluster is None:
        return cluster, ["there is no sbatch on PATH: the run is on this machine (--cluster local)"]
    return cluster, []


def _run_name(script: Path | None, call: Call | None, around: Surroundings) -> str:
    stem = script.stem if script is not None else "verify" if call is None else call.name
    return f"{_word(stem)}-{time.strftime('%Y%m%d-%H%M%S', around.now)}-{around.token}"


def _run_lockfile(text: str, locked: Lockfile, manifest: Manifest, code: Code) -> str:
    """Return the lockfile as the run keeps it: with the state of the code, command and shape."""
    run = lock_model.RunTable(
        argv=tuple(_as_text(word) for word in (manifest.script, *manifest.args)),
        nodes=manifest.nodes,
        gpus_per_node=manifest.gpus_per_node,
        nproc_per_node=manifest.nproc_per_node,
        backend=manifest.backend,
        env={setting.name: _as_text(setting.value) for setting in manifest.settings},
    )
    header = f"The lockfile of run {manifest.run}, with its code and command."
    table = code.table(manifest.script_sha256)
    if locked.code is None and locked.run is None:
        tables = {name: document.plain(part) for name, part in (("code", table), ("run", run))}
        return toml_files.extended(text, tables, header=header)
    # The lockfile of another run is taken for this one.
    data = lock_model.to_data(replace(locked, code=table, run=run))
    return toml_files.dumps(data, header=header)


def _as_text(word: str) -> str:
    r"""Return an argument as TOML can hold it: bytes that are no UTF-8 as `\xff`; the manifest has them literally."""
    return os.fsencode(word).decode("utf-8", "backslashreplace")


# Copies of a few images of the usual size; a node's disk has ten times that.
_STAGE_LIMIT = 100 * 10**9


def _stage(wanted: _Wanted, gate: _Gate, run_folder: Path, notes: list[str]) -> StageRequest | None:
    """Return what is copied to the nodes; None to use everything where it is."""
    asked = wanted.asked
    if not asked.stage and not asked.stage_data:
        if asked.stage_dir is not None or asked.stage_limit is not None:
            raise UsageError("nothing is staged", why="--stage-dir or --stage-limit without --stage", hint="--stage")
        return None
    if gate.environment.kind != "sif":
        raise UsageError("there is no SIF to stage", why="the lockfile is of a host environment")
    folder = asked.stage_dir or ""
    if folder and not os.path.isabs(folder):
        raise UsageError(f"`--stage-dir {folder}` is not an absolute path", why="it names a folder on the nodes")
    if wanted.cluster == "local":
        notes.append("on this machine nothing is staged: the SIF is here already")
        return None
    data = tuple(_data_folder(source, run_folder, wanted.around) for source in asked.stage_data)
    return StageRequest(
        folder=folder,
        limit=_STAGE_LIMIT if asked.stage_limit is None else asked.stage_limit,
        sif_sha256=gate.sif.sha256 if asked.stage else "",
        sif_size=os.stat(gate.environment.sif).st_size if asked.stage else 0,
        data=data,
    )


def _data_folder(asked: str, run_folder: Path, around: Surroundings) -> DataFolder:
    source = os.path.abspath(around.cwd / os.path.expanduser(asked))
    if not os.path.isdir(source):
        raise UsageError(f"`--stage-data {asked}` is not a folder", why=f"looked for {source}")
    real = os.path.realpath(source)
    for what, place in (("working directory", around.cwd), ("run folder", run_folder)):
        # In the job the folder is a read-only copy.
        if Path(os.path.realpath(place)).is_relative_to(real):
            raise UsageError(f"`--stage-data {asked}` holds the {what}", why=f"{place} must stay writable")
    from hpcenv.node import data_folder

    return data_folder.find(source, packed_folder(run_folder))


def packed_folder(run_folder: Path) -> Path:
    """Return where packed data folders are kept: beside the runs, for all of them."""
    return run_folder.parent / ".data"


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "run"


def _run_folder(wanted: _Wanted, run: str) -> Path:
    asked = wanted.asked
    means = "the newest run" if run == "latest" else "a job id" if _JOB_ID.match(run) and not asked.handover else None
    if not _RUN_NAME.match(run) or means:
        raise UsageError(
            f"{run!r} is not a run name",
            why=f"`{run}` means {means}" if means else None,
            hint="use letters, digits, '.', '_' and '-', at most 100, a letter or digit first",
        )
    parent = wanted.workspace.runs if asked.runs is None else Path(os.path.abspath(wanted.around.cwd / asked.runs))
    # submitit replaces %j in the path of its folder as Slurm does in that of the log.
    misread = r"[\"'\\%]" if wanted.cluster == "slurm" else r"[\"'\\]"
    if not str(parent).isprintable() or re.search(misread, str(parent)):
        raise UsageError(
            f"runs cannot be kept in {str(parent)!r}",
            why="Slurm would misread quotes, backslashes, `%` and control characters in the log's path",
            hint="choose another place: --runs DIR, or `runs` under [paths] in hpcenv.toml",
        )
    folder = parent / run
    if os.path.lexists(folder):
        raise WouldOverwrite(f"the run folder `{folder}` exists", hint="choose another --run name")
    return folder


def _require_start_line(manifest: Manifest) -> None:
    """Let what cannot stand in the container's start line be refused here, not on the nodes."""
    run = RunFolder(Path(manifest.run_folder))
    own = [manifest.workdir, manifest.run_folder]
    if manifest.script:
        own.append(str(Path(manifest.script).parent))
    enter(
        manifest.environment,
        [manifest.environment.python, manifest.script, *manifest.args],
        workdir=manifest.workdir,
        variables={
            **{setting.name: setting.value for setting in manifest.settings},
            **{secret.name: "" for secret in manifest.secrets},
        },
        inherited={name: "" for name in manifest.pass_env if not name.endswith("*")},
        passed=manifest.pass_env,
        home=str(run.home_of("NODE")),
        binds=[Bind(source=path, target=path) for path in own],
    )


def _render(wanted: _Wanted, manifest: Manifest, request: Request, notes: list[str]) -> str:
    path = template_path(wanted.workspace, wanted.asked, wanted.around)
    if path != built_in("job.sbatch"):
        notes.append(f"the batch script is made from {path}")
    return render_script(
        read_template(path),
        manifest,
        request,
        python=sys.executable,
        command=wanted.around.command,
    )


def read_template(path: Path) -> str:
    """Return the text of a batch template.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return wire.read_file(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the batch template `{path}`", why=str(error)) from error


def template_path(workspace: Workspace, asked: Asked, around: Surroundings) -> Path:
    """Return the batch template: the flag's, the project's, else the built-in one."""
    if asked.template is not None:
        path = Path(os.path.abspath(around.cwd / asked.template))
        if not path.is_file():
            hint = "--template FILE, or none for the project's or the built-in one"
            raise UsageError(f"there is no template `{asked.template}`", why=f"looked for {path}", hint=hint)
        return path
    own = workspace.root / "sbatch_templates" / "job.sbatch"
    return own if own.is_file() else built_in("job.sbatch")


def built_in(name: str) -> Path:
    """Return where a template lies that comes with hpcenv."""
    package = Path(node.__file__).parents[1]
    installed = package / "_data" / "sbatch_templates" / name
    return installed if installed.exists() else package.parent / "sbatch_templates" / name
