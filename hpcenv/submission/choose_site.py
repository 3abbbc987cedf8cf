"""Choose the site profile of a run.

Runs on: LOGIN NODE. --site, HPCENV_SITE or `site` in hpcenv.toml names the profile. Without a name, the profile for
this cluster is used, from the user's folder, the project, the folders of the machine, or the folders in HPCENV_SITES.
The example profiles in hpcenv are used only if the user names one, because they were not tested on this cluster.
"""

from __future__ import annotations

import datetime as dt
import difflib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from hpcenv import filesystem
from hpcenv.cluster import node_types
from hpcenv.errors import Command, Hint, HpcenvError, SpecError, SubmitRejected
from hpcenv.project import lockfile as lock_model
from hpcenv.project import native_options, site_files
from hpcenv.project.context import Context
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.site import OWN_OPTIONS
from hpcenv.project.site_profile import Profile, profile
from hpcenv.project.site_when import RunFacts
from hpcenv.project.workspace import SPEC_NAME, Workspace
from hpcenv.submission.plan import Request
from hpcenv.submission.request import Cluster, SubmitOptions, detect_cluster

NO_SITE = "none"
NotedProfile = tuple[Profile | None, tuple[str, ...]]


def choose(workspace: Workspace, options: SubmitOptions, context: Context, cluster: Cluster) -> NotedProfile:
    """Return the named profile or the profile for this cluster, and notes. The profile is None if no profile fits.

    Raises:
        SpecError: the named profile does not exist, or the profile is not valid.
        FileUnusable: the profile cannot be read, or other users can change it.
    """
    outside = named_outside(workspace.root, workspace.project.site, context.environ)
    named, origin = outside if options.site is None else (options.site, "--site")
    if cluster == "local" and not options.site_here:
        if options.site not in (None, NO_SITE):
            return None, (f"without Slurm no site profile is used: --site {options.site}",)
        return None, ()
    if cluster == "local" and named is None and detect_cluster(context.environ) == "local":
        return None, ()  # without Slurm, the cluster has no name to search for
    found, notes = find(named, origin, workspace.root, context)
    return found, notes if found is None else (*notes, f"site profile {found.name} ({found.path})")


def find(named: str | None, origin: str, root: Path | None, context: Context) -> NotedProfile:
    """Return the named profile, else the profile for this cluster; None for the name `none`, or if there is no profile.

    Raises:
        SpecError, FileUnusable: as for `choose`.
    """
    if named == NO_SITE:
        return None, ()
    return by_cluster(root, context) if named is None else (by_name(named, origin, root, context), ())


def named_outside(root: Path | None, site: str | None, environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the name of the profile from HPCENV_SITE or hpcenv.toml, and which of these two gave the name.

    Args:
        root: folder of hpcenv.toml; None outside a project.
        site: `site` in hpcenv.toml.
    """
    if environ.get("HPCENV_SITE"):
        return environ["HPCENV_SITE"], "HPCENV_SITE"
    return (None, "") if site is None else (site, f"`site` in {root}/{SPEC_NAME}")


def by_name(named: str, origin: str, root: Path | None, context: Context) -> Profile:
    """Return the profile with a given name or path.

    Args:
        named: the name or the path.
        origin: the option, variable or file that names the profile.
        root: folder of hpcenv.toml; None outside a project.

    Raises:
        SpecError, FileUnusable: as for `choose`.
    """
    if site_files.is_path(named):
        # A path on the command line is relative to the current folder. A path in hpcenv.toml is relative to the folder
        # of hpcenv.toml.
        base = root if root is not None and origin.startswith("`site`") else context.cwd
        path = Path(os.path.abspath(base / os.path.expanduser(named)))
        if not os.path.lexists(path):
            raise SpecError(f"there is no site profile `{named}`", why=f"{origin} names it; looked for {path}")
        return _load(path)
    places = (*site_files.folders(root, context.environ), site_files.shipped())
    known: list[str] = []
    for folder in places:
        paths = site_files.in_folder(folder)
        known += [path.stem for path in paths]
        for path in paths:
            if path.stem == named:
                return _load(path, trusted=folder == site_files.shipped())

    near = difflib.get_close_matches(named, known, n=1)
    raise SpecError(
        f"there is no site profile `{named}`",
        why=f"{origin} names it; looked in " + ", ".join(str(folder) for folder in places),
        hint=f"--site {quote(near[0])}" if near else _instead(known),
    )


def _instead(known: Sequence[str]) -> Hint:
    """Return a hint with the names of all known profiles."""
    return (
        Command("hpcenv", "doctor"),
        f" shows which profile fits; --site none uses no profile. Known profiles: {', '.join(known)}",
    )


def _load(path: Path, *, trusted: bool = False) -> Profile:
    """Read a profile. Refuse a profile that other users can change, unless it is part of hpcenv (`trusted`)."""
    site, refusal = site_files.read(path)
    if refusal is not None and not trusted:
        raise refusal
    return profile(site, str(path))


def by_cluster(project: Path | None, context: Context) -> NotedProfile:
    """Return the first profile for this cluster, and notes. The profile is None if no profile is for this cluster.

    This function looks up the name of the cluster only if there are profiles.

    Raises:
        SpecError, FileUnusable: one of the user's profiles is not valid, or the profile for this
            cluster must not be used.
    """
    paths = [path for folder in site_files.folders(project, context.environ) for path in site_files.in_folder(folder)]
    if not paths:
        return None, ()
    here = node_types.cluster_name(context.environ, cache=context.cache)
    if not here.value:
        return None, (f"no site profile is used: this cluster's name is not known ({here.how})",)

    notes: tuple[str, ...] = ()
    for path in paths:
        try:
            site, refusal = site_files.read(path)
        except HpcenvError as error:
            # If the user cannot correct the file (for example a file of the administrator), the error becomes a note.
            if os.access(path, os.W_OK):
                raise
            notes += (f"profile not used: {error.what}",)
            continue
        if site.match is None or site.match.cluster.lower() != here.value:
            continue
        if refusal is not None:
            raise refusal
        return profile(site, str(path)), notes
    return None, notes


# -- what it means for a run --------------------------------------------------------------


def for_run(
    profile: Profile,
    locked: Lockfile,
    *,
    nodes: int,
    partition: str | None = None,
    gpu_type: str | None = None,
    now: time.struct_time | None = None,
) -> Profile:
    """Return the profile with the values that are for this run.

    Args:
        nodes, partition, gpu_type: as requested; None if Slurm chooses.
        now: the current date. `left_out` of the result names the values that should have been checked again before this
            date. If `now` is None, `left_out` does not name them.
    """
    support = lock_model.gpu_support(locked)
    gpu = gpu_type or locked.host.gpu or None
    run = RunFacts(
        nodes=nodes,
        partition=partition or profile.default_partition,
        gpu_vendor={"cuda": "nvidia", "hip": "amd", "none": "none", "unknown": None}[support],
        gpu=None if gpu is None else str(gpu),
        nccl=_version(locked, "libs.nccl.version"),
        rocm=_version(locked, "torch.hip"),
    )
    today = None if now is None else dt.date(*now[:3])
    return profile.for_run(run, today=today, user=filesystem.user_name(os.getuid()))


def _version(locked: Lockfile, field: str) -> str | None:
    found = locked.facts.get(field)
    return None if found is None else str(found)


def require_runtime(profile: Profile) -> None:
    """Refuse a run with a SIF at a site where hpcenv cannot start a SIF.

    Raises:
        SubmitRejected: the site profile says that no container program works, and why.
    """
    if profile.no_runtime:
        raise SubmitRejected(
            f"the site {profile.name} has no program that can start a SIF for hpcenv",
            why=f"{profile.no_runtime} ([runtime] in {profile.path})",
            hint='`image = "host"` in hpcenv.toml locks an environment of the host; --site none uses no profile',
        )


def with_options(request: Request, profile: Profile | None) -> Request:
    """Return the request with the options of sbatch and srun from the profile.

    Values of other sources have precedence.
    """
    if profile is None:
        return request
    sbatch, srun = (_passed_on(profile, program) for program in ("sbatch", "srun"))
    # The values have type Any, because the attributes have several types. site.py has checked the values.
    own: dict[str, Any] = {n: v for n, v in _own_options(profile).items() if getattr(request, n) is None}
    return replace(request, sbatch={**sbatch, **request.sbatch}, srun={**srun, **request.srun}, **own)


def _passed_on(profile: Profile, program: str) -> native_options.NativeOptions:
    options = [(one.name.removeprefix("--"), one.value) for one in profile.used if one.kind == program]
    own = _own_options(profile) if program == "sbatch" else {}
    return {name: value or None for name, value in options if name not in own}


def _own_options(profile: Profile) -> dict[str, str]:
    """Return the sbatch options of [[option]] that are attributes of a `Request`."""
    options = {one.name.removeprefix("--"): one.value for one in profile.used if one.kind == "sbatch"}
    return {name: value for name, value in options.items() if name in OWN_OPTIONS}


def with_origins(origins: Mapping[str, str], profile: Profile | None) -> Mapping[str, str]:
    """Return the origins of a request's values, including the values from [[option]] of the profile."""
    if profile is None:
        return origins
    return {**dict.fromkeys(_own_options(profile), f"[[option]] in {profile.path}"), **origins}


def options_in_words(profile: Profile | None) -> tuple[str, ...]:
    """Return the sbatch and srun options that the profile has for this run, each with its origin."""
    if profile is None:
        return ()
    return tuple(
        f"--{one.kind} {one.name.removeprefix('--')}{f'={one.value}' if one.value else ''} ({profile.path})"
        for one in profile.used
        if one.kind in ("sbatch", "srun")
    )
