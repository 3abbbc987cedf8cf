"""`hpcenv status`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from hpcenv.cli import _render
from hpcenv.cli._terminal import harmless

if TYPE_CHECKING:
    from hpcenv.steps.runs import RunStatus, Sweep, Unrecorded
    from hpcenv.wire import NodeExit


@click.command("status")
@_render.run_argument
@_render.json_option
def command(run: str | None, runs: str | None, as_json: bool) -> None:
    """Say what a run is doing: RUN is a folder, a name or a job id; default the latest."""
    from hpcenv.steps.runs import Sweep, Unrecorded, find_any, read_status

    where = find_any(_render.cwd(), run, runs=runs)
    if isinstance(where, Sweep):
        _show_sweep(where, as_json=as_json)
        return
    if isinstance(where, Unrecorded):
        _show_unrecorded(where, as_json=as_json)
        return
    found = read_status(where, os.environ)
    if as_json:
        _render.success("status", found)
        return
    show(found)


def _show_sweep(sweep: Sweep, *, as_json: bool) -> None:
    from hpcenv.cli.listing import table
    from hpcenv.steps.listing import lines_of

    whole = lines_of([sweep], os.environ, within=sweep.folder.parent)[0]
    runs = lines_of(sweep.elements, os.environ, within=sweep.folder, values=sweep.values)
    if as_json:
        _render.success("status", {"sweep": whole, "names": sweep.names, "runs": runs})
        return
    _render.say(f"{whole.run}: {whole.detail}")
    _render.say(f"  job       {whole.job_id}")
    for line in table(runs, names=sweep.names, margin=2):
        _render.say(f"  {line}")
    _render.say(f"  folder    {whole.run_folder}")


def _show_unrecorded(entry: Unrecorded, *, as_json: bool) -> None:
    from hpcenv.steps.listing import lines_of

    line = lines_of([entry], os.environ, within=entry.folder.path.parent)[0]
    if as_json:
        _render.success("status", line)
        return
    _render.say(f"{line.run}: {line.state} ({harmless(line.detail)})")
    _render.say(f"  folder    {line.run_folder}")


# Failed ranks that are told one by one; `hpcenv report` tells all.
_RANKS = 4


def show(found: RunStatus) -> None:
    """Print a status, one fact a line."""
    detail = f" ({harmless(found.detail)})" if found.detail else ""
    ended = f", exit status {found.exit_status}" if found.exit_status is not None else ""
    _render.say(f"{found.run}: {found.state}{detail}{ended}")
    _render.say(f"  job       {found.job_id}" + (f", attempt {found.attempt}" if found.attempt else ""))
    if found.chain:
        link = f"link {found.chain.index(found.job_id) + 1} of " if found.job_id in found.chain else ""
        _render.say(f"  chain     {link}{len(found.chain)} jobs: {', '.join(found.chain)}")
    if found.nodes:
        _render.say(f"  nodes     {', '.join(harmless(node) for node in found.nodes)}")
    if found.elapsed:
        _render.say(f"  elapsed   {found.elapsed}")
    if found.failure is not None and found.failure.cause != "cancelled":
        _render.say(f"  failure   {found.failure.headline}")
    _show_verdict(found)
    for record in found.exits:
        _show_exit(record)
    for line in found.earlier:
        _render.say(f"  earlier   {harmless(line)}")
    _render.say(f"  folder    {found.run_folder}")


def _show_verdict(found: RunStatus) -> None:
    """Print the gate's decision, with every node that did not match or does not train."""
    if found.verdict is None:
        return
    nodes = found.verdict.nodes
    before = f", of attempt {found.verdict.attempt}, before it was queued again" if found.waits_again else ""
    _render.say(f"  verdict   {found.verdict.result}, {len(nodes)} node{'s' if len(nodes) != 1 else ''}{before}")
    for node in nodes:
        left_out = bool(found.verdict.launched) and node.node not in found.verdict.launched
        if node.result != "match" or left_out:
            _render.say(f"  {harmless(node.node):<8}  {node.result}" + (", left out" if left_out else ""))


def _show_exit(node: NodeExit) -> None:
    """Print how one node ended, and which of its ranks failed."""
    signal = f" ({node.signal})" if node.signal else ""
    if node.asked_to_end:
        signal = f", asked to end by {harmless(node.asked_to_end)}"
    if node.stopped:
        signal += f", stopped: {node.stopped}" + (", saved" if node.saved else "")
    if node.oom_kills:
        signal += f", {node.oom_kills} processes killed for lack of memory"
    _render.say(
        f"  {harmless(node.node):<8}  exit status {node.status}{signal} after {node.ended - node.started:.0f} s"
    )
    if node.asked_to_end:
        return  # its ranks ended because of that
    for rank in node.ranks[:_RANKS]:
        name = f"rank {rank.rank}" if rank.rank >= 0 else f"local rank {rank.local_rank}"
        status = "" if rank.status is None else f", exit {rank.status}" + (f" ({rank.signal})" if rank.signal else "")
        message = harmless(rank.message)
        _render.say(f"            {name}{status}" + (f", {message[:200]}" if message else ""))
    if len(node.ranks) > _RANKS:
        _render.say(f"            and {len(node.ranks) - _RANKS} ranks more")
