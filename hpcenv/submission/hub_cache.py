"""A cache folder of huggingface_hub for the ranks of one run. It has the repositories of [[data]] at their commits.

Runs on: LOGIN NODE. The cache has the layout of huggingface_hub 2.4 (docs/source/en/guides/manage-cache.md):

    RUN/hub/models--ORG--NAME/refs/main            the commit: used by a script that names no revision
    RUN/hub/models--ORG--NAME/snapshots/COMMIT     a link to the folder in the store

Each run has a cache, so `main` always means the same commit for its script. The cache contains only repositories that
hpcenv.toml names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcenv.hub import tree
from hpcenv.identity.data import DataState
from hpcenv.image.store import store_folder
from hpcenv.project.hub_reference import HubReference, parse_locked
from hpcenv.project.spec import DataTable
from hpcenv.project.store_config import StorePlace
from hpcenv.records.manifest import Bind, Environment, Setting
from hpcenv.records.run_folder import RunFolder

_ORIGIN = "[[data]] hub in hpcenv.toml"
# Without these variables, the libraries first ask the hub. On a node without network, they wait until a time limit.
# Sources: huggingface_hub 2.4 (constants.py), transformers 4, datasets 2 and later (config.py). An older library reads
# only the variable with its own name.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_WHY_OFFLINE = "the libraries read the fetched files and do not ask the hub"
_WHY_CACHE = "the fetched repositories of this run"


@dataclass(frozen=True, kw_only=True)
class HubCache:
    """The cache of one run, as `submit` will write it.

    Attributes:
        refs: path of a file in the cache -> the commit that it contains.
        links: path of a link in the cache -> the folder in the store to which it leads.
        notes: a note for each repository for which the script must name the revision.
    """

    refs: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def binds(self) -> tuple[Bind, ...]:
        """Return the folders that a container must see, each at its own path."""
        return tuple(Bind(source=path, target=path, read_only=True) for path in sorted(set(self.links.values())))


@dataclass(frozen=True, kw_only=True)
class FetchedData:
    """A repository of [[data]] in the store. The repository has not changed since it was fetched."""

    wanted: HubReference
    folder: Path
    state: DataState


def find_fetched(one: DataTable, place: StorePlace) -> FetchedData:
    """Return the fetched repository that `hub` of a [[data]] table names.

    Raises:
        DataUnavailable: the repository is not fetched, or has changed since it was fetched.
        FileUnusable: the store is not trusted.
    """
    wanted = parse_locked(one.hub or "")
    located = tree.locate(place.root, wanted, one.files)
    if store_folder.place_exists(place):
        store_folder.open_place(place)
    return FetchedData(wanted=wanted, folder=located.folder, state=tree.require_unchanged(located, one.compare))


def plan_cache(fetched: Sequence[FetchedData]) -> HubCache:
    """Return the cache of a run. Pure."""
    commits: dict[str, list[str]] = {}
    links: dict[str, str] = {}
    for one in fetched:
        folder = one.wanted.cache_folder
        commits.setdefault(folder, []).append(one.wanted.revision)
        links[f"{folder}/snapshots/{one.wanted.revision}"] = str(one.folder)
    notes = tuple(
        f"{folder}: [[data]] names {len(named)} commits: the script has to name the revision"
        for folder, named in commits.items()
        if len(named) > 1
    )
    refs = {f"{folder}/refs/main": named[0] for folder, named in commits.items() if len(named) == 1}
    return HubCache(refs=refs, links=links, notes=notes)


def variables(cache: HubCache, run_folder: Path) -> tuple[Setting, ...]:
    """Return the variables that make the ranks use the cache instead of the hub."""
    if not cache.links:
        return ()
    place = Setting(name="HF_HUB_CACHE", value=str(RunFolder(run_folder).hub), origin=_ORIGIN, reason=_WHY_CACHE)
    offline = (Setting(name=n, value=v, origin=_ORIGIN, reason=_WHY_OFFLINE) for n, v in _OFFLINE.items())
    return (*offline, place)


def with_binds(environment: Environment, cache: HubCache) -> Environment:
    """Return the environment with the folders of the cache as binds. A host environment needs no binds."""
    if environment.kind != "sif" or not cache.links:
        return environment
    return replace(environment, binds=(*environment.binds, *cache.binds()))


def write(cache: HubCache, run: RunFolder) -> None:
    """Write the cache into a run folder.

    Raises:
        OSError: the cache cannot be written.
    """
    for name, commit in cache.refs.items():
        path = run.hub / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # The file has no line end, because the library compares the whole content with a commit.
        path.write_text(commit, encoding="ascii")
    for name, folder in cache.links.items():
        path = run.hub / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(folder, path)
