"""`hpcenv status`: show what a run is doing now. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from hpcenv.cli import _render
from hpcenv.cli._terminal import escape_control
from hpcenv.cli.listing import table
from hpcenv.errors import RunNotFound
from hpcenv.hostlist import fold_hostlist
from hpcenv.records.session import SessionNode
from hpcenv.runs.entries import Sweep, Unrecorded
from hpcenv.runs.find import find_any
from hpcenv.runs.lost import LostRun, find_lost
from hpcenv.runs.report_text import state_lines
from hpcenv.runs.run_list import lines_of
from hpcenv.runs.status import RunStatus, read_status, with_queue


@click.command("status")
@_render.run_argument
@_render.json_option
def command(run: str | None, runs: str | None, as_json: bool) -> None:
    """Show what a run is doing now: state, job, nodes, elapsed time.

    RUN is a run folder, a run name or a job id; the default is the latest run. For a sweep,
    one line per run is shown. `hpcenv report` shows how a run ended.
    """
    try:
        entry = find_any(_render.cwd(), run, runs=runs)
    except RunNotFound:
        lost = find_lost(run, os.environ)
        if lost is None:
            raise
        show_lost(lost, "status", as_json=as_json)
        return
    if isinstance(entry, Sweep):
        _show_sweep(entry, as_json=as_json)
        return
    if isinstance(entry, Unrecorded):
        _show_unrecorded(entry, as_json=as_json)
        return
    status = with_queue(read_status(entry, os.environ), os.environ)
    if as_json:
        _render.success("status", status)
        return
    show(status)
    if status.session:
        _show_session(status.session)


def _show_session(nodes: Sequence[SessionNode]) -> None:
    """Print on which node a session is open, and the ports that its programs have opened."""
    first = nodes[0]
    services = f", with {', '.join(first.sockets)}" if first.sockets else ""
    _render.say(f"  session   open on {first.node}{services}")
    for node in nodes:
        place = "" if node is first else f" on {node.node}"
        for port in node.ports:
            _render.say(f"  port      {escape_control(port)}{place}: other users can connect to it")


def _show_sweep(sweep: Sweep, *, as_json: bool) -> None:
    summary = lines_of([sweep], os.environ, within=sweep.folder.parent)[0]
    runs = lines_of(sweep.elements, os.environ, within=sweep.folder, values=sweep.values)
    if as_json:
        _render.success("status", {"sweep": summary, "names": sweep.names, "runs": runs})
        return
    _render.say(f"{summary.run}: {summary.detail}")
    _render.say(f"  job       {summary.job_id}")
    for line in table(runs, names=sweep.names, margin=2):
        _render.say(f"  {line}")
    _render.say(f"  folder    {summary.run_folder}")


def _show_unrecorded(entry: Unrecorded, *, as_json: bool) -> None:
    line = lines_of([entry], os.environ, within=entry.folder.path.parent)[0]
    if as_json:
        _render.success("status", line)
        return
    _render.say(f"{line.run}: {line.state} ({escape_control(line.detail)})")
    _render.say(f"  folder    {line.run_folder}")


def show_lost(lost: LostRun, command_name: str, *, as_json: bool) -> None:
    """Print the state of a job. Its run folder no longer exists."""
    if as_json:
        _render.success(command_name, lost)
        return
    _render.say(f"{escape_control(lost.run)}: {lost.state} (its run folder is gone)")
    _render.say(f"  job       {lost.job_id}")
    if lost.nodes:
        _render.say(f"  nodes     {escape_control(lost.nodes)}")
    _render.say(f"  folder    {escape_control(str(lost.run_folder))} (gone)")


def show(status: RunStatus) -> None:
    """Print the state of a run, one fact per line. For a failed run, one line names the command for its report."""
    show_state(status)
    if status.nodes:
        _render.say(f"  nodes     {escape_control(fold_hostlist(status.nodes))}")
    if status.elapsed:
        _render.say(f"  elapsed   {status.elapsed}")
    _render.say(f"  folder    {status.run_folder}")
    if status.has_failed:
        _render.say("  report    " + _render.quoted(("hpcenv", "report", str(status.run_folder))))


def show_state(status: RunStatus) -> None:
    """Print the state of a run with its reason and exit status, and its jobs."""
    for line in state_lines(status):
        _render.say(line)
