"""Choose the folder of images, from the site profile or the default, if the user and the project name no folder.

Runs on: LOGIN NODE. HPCENV_SITE or `site` in hpcenv.toml names the profile; without a name, the profile for this
cluster is used. The option `--site` of a submission has no effect here, because all submissions share the images, and
`lock` and `image build` have no such option.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpcenv import filesystem
from hpcenv.project import site_files
from hpcenv.project.context import Context, cache_folder
from hpcenv.project.store_config import default_store, site_store
from hpcenv.submission import choose_site


def find_store(context: Context, root: Path | None, site: str | None) -> tuple[Path, str]:
    """Return the folder of images, and a text that says why this folder was chosen.

    Args:
        root: folder of hpcenv.toml; None outside a project.
        site: `site` in hpcenv.toml.

    Raises:
        SpecError: the named profile does not exist, or the profile for this cluster is not valid.
        FileUnusable: the profile cannot be read, or other users can change it.
    """
    default, why = default_store(context.environ, cache_folder(context.environ))
    reasons = [f"the default: {why}"]
    if _may_be_named(context, root, site):
        place, said = _of_site(context, root, site)
        if place is not None:
            kept = default != place and default.is_dir()
            return place, said + (f"; images from before are in {default}" if kept else "")
        reasons += [said] if said else []
    return default, "; ".join(reasons)


def _may_be_named(context: Context, root: Path | None, site: str | None) -> bool:
    """Return whether a site profile may exist. Most users have no profile, and a search takes time."""
    if site is not None or context.environ.get("HPCENV_SITE"):
        return True
    return any(site_files.in_folder(folder) for folder in site_files.folders(root, context.environ))


def _of_site(context: Context, root: Path | None, site: str | None) -> tuple[Path | None, str]:
    """Return the image folder that the site profile names, and its origin; None and a note if no folder can be used."""
    named, origin = choose_site.named_outside(root, site, context.environ)
    profile, notes = choose_site.find(named, origin, root, context)
    if profile is None or profile.file.store is None:
        return None, "; ".join(notes)
    user = filesystem.user_name(os.getuid())
    place, problem = site_store(profile.file.store.folder, context.environ, user)
    table = f"[store] of site profile {profile.name} ({profile.path})"
    if place is None:
        return None, f"{table} names {profile.file.store.folder}, which is not used: {problem}"
    return place, table
