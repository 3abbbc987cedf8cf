"""`hpcenv doctor`."""

from __future__ import annotations

import os
import textwrap
import time
from pathlib import Path

import click

from hpcenv.cli import _render
from hpcenv.cli.submit import context_of
from hpcenv.doctor.report import Diagnosis, doctor
from hpcenv.doctor.site_profile import write
from hpcenv.errors import UsageError


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
    help="Write what network and GPUs this machine has, instead.",
)
@click.option("--force", is_flag=True, help="Replace a profile or a recording that is there.")
@_render.json_option
def command(write_to: str | None, record_to: str | None, force: bool, as_json: bool) -> None:
    """Say what this cluster is like, what will get in the way, and what to do.

    With --write the answers become a site profile, by default in
    ~/.config/hpcenv/sites, which every later submit on this cluster uses.

    With --record the files that hpcenv reads of network and GPUs are written into one file,
    by default machine.json, without serial numbers and addresses. Run it on a compute node:
    srun hpcenv doctor --record. `hpcenv net explain --from FILE` decides for such a machine.
    """
    if record_to is not None:
        if write_to is not None:
            raise UsageError("--record and --write exclude each other", hint="give one of them")
        _record(_render.cwd() / (record_to or "machine.json"), force=force, as_json=as_json)
        return
    context = context_of()
    found = doctor(context, store=_render.Where().place().root)
    written = None
    if write_to is not None:
        written = write(found, context, path=write_to, force=force)
    if as_json:
        facts = ("facts", "partitions", "troubles", "cluster", "accounts")
        _render.success("doctor", {**{name: getattr(found, name) for name in facts}, "written": written})
        return
    _show(found)
    if written is not None:
        _render.say(f"\nwrote {written}: edit it as you like")
    else:
        _render.tell("\nnext: hpcenv doctor --write")


def _record(path: Path, *, force: bool, as_json: bool) -> None:
    """Write a recording of this machine."""
    from hpcenv.doctor.machine import record_this_machine, write_recording  # what only this needs

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


_WIDTH = 80


def _show(found: Diagnosis) -> None:
    """Print problems first, then every fact with how it was found."""
    for trouble in found.troubles:
        mark = "problem" if trouble.blocking else "note"
        _wrapped(f"{mark}: {trouble.what} ({trouble.why})", indent=2)
        _wrapped(f"  do: {trouble.todo}", indent=6)
    if not found.troubles:
        _render.say("no problem found")
    group = ""
    for fact in found.facts:
        if fact.group != group:
            group = fact.group
            _render.say(f"\n{group}")
        _wrapped(f"  {fact.name:<26}{fact.value}  [{fact.how}]", indent=28)
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
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        for row in rows:
            _render.say("  " + "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())


def _wrapped(line: str, *, indent: int) -> None:
    for part in textwrap.wrap(
        line, _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    ):
        _render.say(part)
