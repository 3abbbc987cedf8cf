"""The staged copies of this node, in the form that its start commands need.

Runs on: COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpcenv.errors import RecordInvalid
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.codec import SCHEMA
from hpcenv.records.facts import Staged
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Bind, Manifest
from hpcenv.records.run_folder import RunFolder


def staged_here(manifest: Manifest, this_node: ThisNode) -> Staged:
    """Return the copies on this node's own disk for this attempt; empty without staging."""
    nothing = Staged(schema=SCHEMA, run=manifest.run, node=this_node.node, attempt=this_node.attempt)
    if manifest.stage is None:
        return nothing
    try:
        staged = load_record(Staged, RunFolder(Path(manifest.run_folder)).staged_of(this_node.node))
    except RecordInvalid as error:
        return replace(nothing, problems=(f"{error.what}: {error.why}" if error.why else error.what,))
    if (staged.run, staged.node, staged.attempt) != (manifest.run, this_node.node, this_node.attempt):
        return replace(nothing, problems=(f"the copies belong to attempt {staged.attempt} of {staged.run}",))
    return staged


def data_binds(manifest: Manifest, staged: Staged) -> tuple[Bind, ...]:
    """Return read-only binds of the data folders at their own paths: the node's copy, otherwise the shared folder."""
    folders = () if manifest.stage is None else manifest.stage.data
    return tuple(
        Bind(source=staged.data.get(folder.source, folder.source), target=folder.source, read_only=True)
        for folder in folders
    )
