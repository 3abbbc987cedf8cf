"""The data of a run: the folders and files of [[data]], and the copies on the nodes. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hpcenv.errors import UsageError
from hpcenv.identity import data as data_state
from hpcenv.identity.data import DataState
from hpcenv.identity.stage import data_folder
from hpcenv.incontainer.probe.rules import has_rule
from hpcenv.project.workspace import Workspace
from hpcenv.records.manifest import DataCompare, DataFolder, Environment, RecordedData, StageRequest
from hpcenv.submission import hub_cache, snapshot
from hpcenv.submission.hub_cache import FetchedData, HubCache
from hpcenv.submission.locked_container import LockedSif
from hpcenv.submission.request import Cluster, SubmitOptions

# The default limit for the copies on a node, in bytes. This is enough for a few images. The disk of a node is usually
# ten times larger.
_STAGE_LIMIT = 100 * 10**9


def find_copies(
    options: SubmitOptions, cwd: Path, cluster: Cluster, environment: Environment, sif: LockedSif, run_folder: Path
) -> tuple[StageRequest | None, tuple[str, ...]]:
    """Return the copies to make on the disks of the nodes (None if nothing is copied), and notes."""
    if not options.stage and not options.stage_data:
        if options.stage_dir is not None:
            raise UsageError("nothing is staged", why="--stage-dir is for copies on the nodes", hint="--stage")
        return None, ()
    if environment.kind != "sif":
        raise UsageError("there is no SIF to stage", why="the lockfile is for a host environment")
    folder = options.stage_dir or ""
    if folder and not os.path.isabs(folder):
        raise UsageError(f"`--stage-dir {folder}` is not an absolute path", why="it names a folder on the nodes")
    if cluster == "local":
        return None, ("on this machine nothing is staged: the SIF is on this machine",)
    overlay = environment.overlay
    notes = () if overlay is None else (f"the overlay is not copied to the nodes: they read {overlay.source}",)
    data = tuple(_data_folder(source, run_folder, cwd) for source in options.stage_data)
    request = StageRequest(
        folder=folder,
        limit=_STAGE_LIMIT if options.stage_limit is None else options.stage_limit,
        sif_sha256=sif.sha256 if options.stage else "",
        sif_size=os.stat(environment.sif).st_size if options.stage else 0,
        data=data,
    )
    return request, notes


def _data_folder(given: str, run_folder: Path, cwd: Path) -> DataFolder:
    source = os.path.abspath(cwd / os.path.expanduser(given))
    if not os.path.isdir(source):
        raise UsageError(f"`--stage-data {given}` is not a folder", why=f"looked for {source}")
    real = os.path.realpath(source)
    for what, place in (("working directory", cwd), ("run folder", run_folder)):
        # In the job, the staged folder is a read-only copy.
        if Path(os.path.realpath(place)).is_relative_to(real):
            raise UsageError(f"`--stage-data {given}` holds the {what}", why=f"{place} must stay writable")
    return data_folder.find(source, packed_folder(run_folder))


def find_data(workspace: Workspace, revision: int) -> tuple[tuple[RecordedData, ...], HubCache]:
    """Return the folders and files of [[data]] in their current state, and the cache with the data of a hub.

    Args:
        revision: the revision of the lockfile.
    """
    folders = has_rule("empty-folders", revision)
    found: dict[str, RecordedData] = {}
    fetched: list[FetchedData] = []
    for one in workspace.project.data:
        if one.path is None:
            repository = hub_cache.find_fetched(one, workspace.store_place)
            fetched.append(repository)
            path, state, stem = str(repository.folder), repository.state, repository.wanted.name
        else:
            path = snapshot.data_path(workspace.root, one.path)
            state, stem = _state_of(one.path, path, one.compare, workspace, folders), os.path.basename(path)
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


def _state_of(given: str, path: str, compare: DataCompare, workspace: Workspace, folders: bool) -> DataState:
    try:
        return data_state.read_state(path, compare, folders=folders)
    except OSError as error:
        raise UsageError(
            f"cannot read the data `{given}`",
            why=f"[[data]] in {workspace.spec} names it: {error.filename or path}: {error.strerror}",
            hint="copy the data to this place, or remove the table from hpcenv.toml",
        ) from error


def packed_folder(run_folder: Path) -> Path:
    """Return the folder for packed data. It is in the folder of runs, and all runs share it."""
    return run_folder.parent / ".data"
