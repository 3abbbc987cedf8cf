"""Which site profile a run uses.

Runs on: LOGIN NODE. Named by --site, HPCENV_SITE or `site` in hpcenv.toml; else the one that
is for this cluster, looked for in the project, then in the user's and the machine's folders.
Examples that come with hpcenv are used by name only: nobody here has tried them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hpcenv.adapters.accepted import NOTHING, Accepted
from hpcenv.errors import HpcenvError, SpecError
from hpcenv.model.site import Profile
from hpcenv.steps.request import Asked, Cluster, Surroundings
from hpcenv.steps.workspace import Workspace

NO_SITE = "none"


def choose(
    workspace: Workspace, asked: Asked, around: Surroundings, cluster: Cluster, notes: list[str]
) -> Profile | None:
    """Return the profile that is asked for or fits this cluster, None without one.

    Raises:
        SpecError: the one that is asked for is not there, or one that fits is not valid.
        FileUnusable: it cannot be read, or others could change it.
    """
    named, origin = _named(workspace, asked, around.environ)
    if cluster == "local":
        if asked.site not in (None, NO_SITE):
            notes.append(f"without Slurm no site profile is used: --site {asked.site}")
        return None
    if named == NO_SITE:
        return None
    if named is not None:
        found = by_name(named, origin, workspace, around)
    else:
        matching = by_cluster(workspace.root, around, notes, workspace.accepted)
        if matching is None:
            return None
        found = matching
    notes.append(f"site profile {found.name} ({found.path})")
    return found


def _named(workspace: Workspace, asked: Asked, environ: Mapping[str, str]) -> tuple[str | None, str]:
    candidates = (
        (asked.site, "--site"),
        (environ.get("HPCENV_SITE") or None, "HPCENV_SITE"),
        (workspace.project.site, f"`site` in {workspace.spec}"),
    )
    return next(((name, origin) for name, origin in candidates if name is not None), (None, ""))


def by_name(named: str, origin: str, workspace: Workspace, around: Surroundings) -> Profile:
    """Return the profile of that name or path.

    Raises:
        SpecError, FileUnusable: as `choose`.
    """
    from hpcenv.adapters import site_files

    if "/" in named or named.endswith(site_files.SUFFIX):
        # A path on the command line is from where the user is, one in hpcenv.toml from there.
        base = workspace.root if origin.startswith("`site`") else around.cwd
        path = Path(os.path.abspath(base / os.path.expanduser(named)))
        if not os.path.lexists(path):
            raise SpecError(f"there is no site profile `{named}`", why=f"{origin} names it; looked for {path}")
        return _load(path, workspace.accepted)
    places = (*site_files.folders(workspace.root, around.environ), site_files.shipped())
    known: list[str] = []
    for folder in places:
        paths = site_files.in_folder(folder)
        known += [path.stem for path in paths]
        for path in paths:
            if path.stem == named:
                return _load(path, workspace.accepted, trusted=folder == site_files.shipped())
    import difflib

    near = difflib.get_close_matches(named, known, n=1)
    raise SpecError(
        f"there is no site profile `{named}`",
        why=f"{origin} names it; looked in " + ", ".join(str(folder) for folder in places),
        hint=f"--site {near[0]}" if near else "hpcenv doctor --write makes one for this cluster; --site none uses none",
    )


def _load(path: Path, accepted: Accepted, *, trusted: bool = False) -> Profile:
    """Read a profile that is meant; one that came with hpcenv is trusted as its code is."""
    from hpcenv.adapters import site_files
    from hpcenv.model.site_file import profile

    site, refusal = site_files.read(path, accepted)
    if refusal is not None and not trusted:
        raise refusal
    return profile(site, str(path))


def by_cluster(
    project: Path | None, around: Surroundings, notes: list[str], accepted: Accepted = NOTHING
) -> Profile | None:
    """Return the nearest profile that is for this cluster, None without one.

    The cluster is asked for its name only if there are profiles at all.

    Args:
        accepted: which documents were valid before.

    Raises:
        SpecError, FileUnusable: one of the user's own is not valid, or one that fits is not
            to be used.
    """
    from hpcenv.adapters import site_files, slurm_cluster

    paths = [path for folder in site_files.folders(project, around.environ) for path in site_files.in_folder(folder)]
    if not paths:
        return None
    here = slurm_cluster.cluster_name(around.environ, cache=around.cache)
    if not here.value:
        notes.append(f"no site profile is used: this cluster's name is not known ({here.how})")
        return None
    from hpcenv.model.site_file import profile

    for path in paths:
        try:
            site, refusal = site_files.read(path, accepted)
        except HpcenvError as error:
            # The machine's administrator may put right what the user cannot.
            if os.access(path, os.W_OK):
                raise
            notes.append(f"left out: {error.what}")
            continue
        if site.match is None or site.match.cluster.lower() != here.value:
            continue
        if refusal is not None:
            raise refusal
        return profile(site, str(path))
    return None
