"""`hpcenv doctor`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click

from hpcenv.cli import _accept, _render
from hpcenv.cli._submit_options import table_option
from hpcenv.cli.submit import context_of
from hpcenv.errors import HpcenvError, UsageError
from hpcenv.hostlist import expand_hostlist
from hpcenv.project.store_config import StorePlace, default_store
from hpcenv.project.workspace import SPEC_NAME, Workspace
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.submission.request import SubmitOptions, parse_flags, preflight_options
from hpcenv.submission.submit import SubmitResult
from hpcenv.submission.verify_here import outcome
from hpcenv.submission.verify_nodes import verify_nodes
from hpcenv.survey.checked import of_job, render
from hpcenv.survey.here import check_this_machine
from hpcenv.survey.machine import record_this_machine, write_recording
from hpcenv.survey.report import Diagnosis, doctor
from hpcenv.survey.site_profile import write
from hpcenv.text import columns, wrap


@click.command("doctor")
@click.option(
    "--write",
    "write_to",
    is_flag=False,
    flag_value="",
    metavar="[PATH]",
    help="Write this cluster's site profile.",
)
@click.option(
    "--record",
    "record_to",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Only write a file that describes the network and the GPUs of this machine.",
)
@click.option("--force", is_flag=True, help="Replace an existing profile or recording.")
@click.option(
    "--nodes", type=click.IntRange(min=1), help="Check this number of nodes in a Slurm job, instead of this machine."
)
@table_option("nodelist", "Without --nodes, exactly these nodes are checked.")
@table_option("gpus", "Only with --nodes or --nodelist.")
@table_option("lock", "Only with --nodes or --nodelist.")
@table_option("partition", "Only with --nodes or --nodelist.")
@table_option("account", "Only with --nodes or --nodelist.")
@table_option("time", "Only with --nodes or --nodelist.")
@table_option("preflight", "On this machine itself, only the quick checks run.")
@table_option("skip_check")
@_accept.option
@_render.json_option
def command(
    write_to: str | None,
    record_to: str | None,
    force: bool,
    nodes: int | None,
    accept: str | None,
    as_json: bool,
    **params: Any,
) -> int:
    """Describe this cluster, name what will cause problems for a run, and say what to do.

    This command also runs the quick preflight checks that apply to this machine. With --nodes N or --nodelist NAMES,
    a Slurm job runs the checks on compute nodes instead, in the same way as before a training.

    With --write, hpcenv writes what it found into a site profile, by default in ~/.config/hpcenv/sites. Every later
    submit on this cluster uses this profile.

    With --record, hpcenv copies the system files that describe the network and the GPUs of this machine into one
    file, by default machine.json, without serial numbers and addresses. Run this command on a compute node: srun
    hpcenv doctor --record. `hpcenv net explain --from FILE` computes the network settings for such a machine.

    Exit status: 0 if all checks of severity `must` passed; 90 if such a check failed; 91 if such a check could not be
    measured. With --nodes, the other exit statuses of hpcenv verify are possible, too.
    """
    values = parse_flags(params)
    if record_to is not None:
        if write_to is not None:
            raise UsageError("--record and --write cannot be used together", hint="give one of them")
        _record(_render.cwd() / (record_to or "machine.json"), force=force, as_json=as_json)
        return 0
    if nodes is not None or values["nodelist"]:
        if write_to is not None:
            raise UsageError("--write cannot be used with --nodes or --nodelist", hint="give one of them")
        return _check_nodes(nodes, values, accept, as_json=as_json)
    _refuse_without_nodes(values)
    return _look_around(write_to, values, force=force, as_json=as_json)


def _refuse_without_nodes(values: dict[str, Any]) -> None:
    """Refuse options that have an effect only if a job checks nodes."""
    of_jobs = ("gpus", "partition", "account", "time")
    given = [f"--{name}" for name in of_jobs if values[name] is not None]
    given += [f"--preflight {values['preflight']}"] if values["preflight"] == "full" else []
    if given:
        raise UsageError(
            f"`{given[0]}` goes with --nodes or --nodelist only",
            why="without them, hpcenv checks this machine",
            hint="add --nodes N",
        )


def _look_around(write_to: str | None, values: dict[str, Any], *, force: bool, as_json: bool) -> int:
    """Describe this cluster, and check this machine."""
    context, place = context_of(), _store_place()
    workspace = _project()
    found = doctor(context, store=place)
    skipped = preflight_options(SubmitOptions(script=None, **values)).skipped
    checked = None
    if values["preflight"] != "off":
        checked = check_this_machine(context, workspace, store=place.root, skipped=skipped)
    written = None
    if write_to is not None:
        written = write(found, context, path=write_to, force=force)
    status = 0 if checked is None else checked.exit_status
    if as_json:
        facts = ("facts", "partitions", "troubles", "cluster", "accounts")
        data = {**{name: getattr(found, name) for name in facts}, "checks": checked, "written": written}
        _render.verdict_on("doctor", data, ok=status == 0)
        return status
    _show(found)
    if checked is not None:
        _render.say(f"\n{render(checked)}")
    if written is not None:
        _render.say(f"\nwrote {written}: edit it as you like")
    else:
        _render.tell("\nnext: hpcenv doctor --write; hpcenv doctor --nodes 2")
    return status


def _store_place() -> StorePlace:
    """Return the folder of images.

    If the site profile cannot be used, return the default folder, because doctor may write a new profile.
    """
    try:
        return _render.Where().place()
    except HpcenvError as error:
        root, why = default_store(os.environ, _render.cache_folder())
        return StorePlace(root=root, origin=f"the default: {why}; what a site profile names is unknown: {error.what}")


def _project() -> Workspace | None:
    """Return the project around the current folder; None if there is no project."""
    here = _render.cwd()
    inside = any((folder / SPEC_NAME).is_file() for folder in (here, *here.parents))
    return _render.open_project() if inside else None


def _check_nodes(nodes: int | None, values: dict[str, Any], accept: str | None, *, as_json: bool) -> int:
    """Check nodes in a job, and print the result of each check."""
    workspace = _render.open_project()
    _accept.require(workspace, accept, as_json=as_json)
    if values["preflight"] == "off":
        raise UsageError("`--preflight off` leaves nothing to check", hint="quick or full")
    try:
        count = nodes or len(expand_hostlist(values["nodelist"]))
    except ValueError as error:
        raise UsageError(f"`--nodelist {values['nodelist']}`: {error}", hint="for example n1,n[3-5]") from error
    options = SubmitOptions(script=None, nodes=count, **values)

    def say(job: SubmitResult) -> None:
        _render.tell(f"checking {count} nodes, job {job.job_id}, {job.run_folder}")

    found = verify_nodes(workspace, options, context_of(), on_submitted=say)
    checked = of_job(load_record(Manifest, RunFolder(found.job.run_folder).manifest), found.verdict, found.facts)
    result, status = outcome(found.verdict, strict=False)
    if as_json:
        job = {"job_id": found.job.job_id, "run_folder": found.job.run_folder}
        _render.verdict_on("doctor", {**job, "outcome": result, "checks": checked}, ok=status == 0)
        return status
    _render.say(render(checked))
    if status and checked.result == "match":
        _render.say(f"\nthe checks are fine; the environment is not as locked ({result})")
    _render.tell(f"{result}; next: hpcenv report {found.job.run}" if status else result)
    return status


def _record(path: Path, *, force: bool, as_json: bool) -> None:
    """Write a file that describes the network and the GPUs of this machine (--record)."""
    date = time.strftime("%Y-%m-%d", _render.local_time())
    recording = record_this_machine(os.environ, name=path.stem, date=date)
    write_recording(recording, path, force=force)
    if as_json:
        _render.success("doctor", {"recorded": str(path), "files": len(recording.files)})
        return
    _render.say(
        f"wrote {path}: {len(recording.files)} files, without serial numbers and addresses; read it, then share it"
    )
    _render.tell(f"next: hpcenv net explain --from {path}")


def _show(found: Diagnosis) -> None:
    """Print the problems first, then every fact with its source."""
    for trouble in found.troubles:
        mark = "problem" if trouble.blocking else "note"
        _render.say(wrap(f"{mark}: {trouble.what} ({trouble.why})"))
        _render.say(wrap(f"  do: {trouble.todo}", indent=6))
    if not found.troubles:
        _render.say("no problem found")
    group = ""
    for fact in found.facts:
        if fact.group != group:
            group = fact.group
            _render.say(f"\n{group}")
        _render.say(wrap(f"  {fact.name:<26}{fact.value}  [{fact.how}]", indent=28))
    if found.partitions:
        _render.say("\nPartitions [sinfo, scontrol show partition]; * is the default")
        rows = [("name", "nodes", "CPUs", "MiB", "GPUs", "time limit", "preempt", "grace")]
        rows += [
            (
                part.name + "*" * part.default + ("" if part.state == "up" else f" ({part.state})"),
                str(part.nodes),
                part.cpus or "?",
                part.memory or "?",
                part.gpus or "?",
                part.max_time or "?",
                part.preempt_mode or "?",
                "?" if part.grace_time is None else str(part.grace_time),
            )
            for part in found.partitions
        ]
        for line in columns(rows):
            _render.say(f"  {line}")
