"""The values that a run would get from a site profile. No run is submitted.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcenv import filesystem
from hpcenv.errors import HpcenvError
from hpcenv.project import site_files
from hpcenv.project.context import Context
from hpcenv.project.site_profile import Profile
from hpcenv.project.site_when import RunFacts
from hpcenv.submission import choose_site


@dataclass(frozen=True, kw_only=True)
class FoundProfile:
    """A site profile that --site can name.

    Attributes:
        cluster: the cluster on which the profile is used automatically; empty if the profile is only used by name.
        problem: why the profile cannot be used; empty if it can be used.
    """

    name: str
    path: str
    cluster: str = ""
    problem: str = ""


def list_profiles(project: Path | None, environ: Mapping[str, str]) -> tuple[FoundProfile, ...]:
    """Return the profiles in all searched folders. If several profiles have the same name, --site uses the first."""
    shipped = site_files.shipped()
    folders = (*site_files.folders(project, environ), shipped)
    return tuple(_look(path, trusted=folder == shipped) for folder in folders for path in site_files.in_folder(folder))


def _look(path: Path, *, trusted: bool) -> FoundProfile:
    try:
        site, refusal = site_files.read(path)
    except HpcenvError as error:
        return FoundProfile(name=path.stem, path=str(path), problem=error.what)
    problem = "" if refusal is None or trusted else refusal.what
    cluster = "" if site.match is None else site.match.cluster
    return FoundProfile(name=path.stem, path=str(path), cluster=cluster, problem=problem)


def values_for(named: str, project: Path | None, context: Context, run: RunFacts) -> Profile:
    """Return a profile with its values for a run.

    Raises:
        SpecError: no profile has this name or path, or the profile is not valid.
        FileUnusable: the profile cannot be read, or other users can change it.
    """
    found = choose_site.by_name(named, "NAME", project, context)
    today = dt.date(*context.now[:3])
    return found.for_run(run, today=today, user=filesystem.user_name(os.getuid()))
