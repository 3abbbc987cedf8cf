"""Complete a manifest on a node with values that modules set, and with site profile values that only a node knows.

Runs on: COMPUTE NODE, and on the login node while verifying. Standard library only.

All steps of a job read the manifest through this module, so that check, gate and launch see the same values.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hpcenv.records.manifest import Bind, Expectation, Manifest, Setting
from hpcenv.records.modules import ModuleEffects
from hpcenv.records.variables import OLD_VALUE

_LIBRARY_PATH = "LD_LIBRARY_PATH"
_LIBRARY_FIELD = "libs.ld-library-path"
# Apptainer adds this folder itself.
_OWN_LIBRARIES = "/.singularity.d/libs"
# In a container, /tmp is a folder of this job on the node (launch/launch.py); on the host, it is the node's /tmp.
_NODE_LOCAL = "/tmp"  # noqa: S108


def complete(manifest: Manifest, effects: ModuleEffects | None, environ: Mapping[str, str]) -> Manifest:
    """Add the values that only this node knows to the manifest. Site profile, project and user override modules.

    Args:
        effects: the variables and binds of the job's modules; None without modules, or before they are loaded.
        environ: environment variables of the job, for `${jobid}` and for old values on the host.
    """
    given = {setting.name: setting for setting in manifest.settings}
    of_modules = {s.name: s for s in (() if effects is None else effects.settings) if s.name not in manifest.unset}
    binds, lost = _on_this_node(manifest.environment.binds, environ)
    imported: list[str] = []
    if effects is not None and manifest.environment.kind == "sif":
        binds, more, imported = _with_modules(binds, effects)
        lost += more
    replaced = {name for name in of_modules if name in given and not given[name].expands}
    settings = {**of_modules, **given}
    old = _old_values(manifest, of_modules, environ)
    settings = {name: _expanded(setting, old.get(name), environ) for name, setting in settings.items()}
    notes = () if effects is None else effects.notes
    if settings == given and binds == manifest.environment.binds and not notes:
        return manifest
    imported += [f"{of_modules[name].origin}: {name} is replaced by {given[name].origin}" for name in sorted(replaced)]
    return replace(
        manifest,
        settings=tuple(settings[name] for name in sorted(settings)),
        environment=replace(manifest.environment, binds=binds),
        expectations=_lightened(manifest.expectations, settings),
        unlocked_binds=_unlocked(manifest, binds),
        imported=(*imported, *lost, *notes),
    )


# -- binds --------------------------------------------------------------------------------


def _on_this_node(binds: Sequence[Bind], environ: Mapping[str, str]) -> tuple[tuple[Bind, ...], list[str]]:
    """Return the binds with the files that match the site's patterns here, and notes on files that this node lacks."""
    found: list[Bind] = []
    lost: list[str] = []
    for bind in binds:
        if not bind.origin:
            found.append(bind)
            continue
        source = _with_job(bind.source, environ)
        paths = sorted(glob.glob(source)) if glob.has_magic(source) else [source]
        paths = [path for path in paths if not bind.optional or os.path.lexists(path)]
        if not paths:
            lost.append(f"{bind.origin}: nothing is bound at {bind.target}: this node does not have {source}")
        target = _with_job(bind.target, environ)
        for path in paths:
            at = path if bind.target == bind.source else target
            found.append(replace(bind, source=path, target=at + os.path.basename(path) if at.endswith("/") else at))
    return tuple(found), lost


def _with_modules(binds: tuple[Bind, ...], effects: ModuleEffects) -> tuple[tuple[Bind, ...], list[str], list[str]]:
    """Add the binds of modules; return all binds, notes on unused module binds, and notes on used module binds."""
    taken = {os.path.normpath(bind.target) for bind in binds}
    new = tuple(bind for bind in effects.binds if os.path.normpath(bind.target) not in taken)
    here = tuple(bind for bind in new if os.path.lexists(bind.source))
    lost = [f"{b.origin}: {b.source} is not bound: this node does not have it" for b in new if b not in here]
    lost += [
        f"{bind.origin}: {bind.source} is not bound: something else is bound at {bind.target}"
        for bind in effects.binds
        if bind not in new
    ]
    shown = [f"{bind.origin}: {bind.source} is bound{_as_target(bind)}" for bind in here]
    return (*binds, *here), lost, shown


def _as_target(bind: Bind) -> str:
    return (f" at {bind.target}" if bind.target != bind.source else "") + (", read-only" if bind.read_only else "")


def _unlocked(manifest: Manifest, binds: Iterable[Bind]) -> tuple[str, ...]:
    """Return the targets of binds that the lockfile does not have. This node's paths replace the patterns."""
    patterns = {os.path.normpath(bind.target) for bind in manifest.environment.binds if bind.origin}
    of_site = {os.path.normpath(bind.target) for bind in binds if bind.origin}
    return tuple(sorted((set(manifest.unlocked_binds) - patterns) | of_site))


# -- variables ----------------------------------------------------------------------------


def _old_values(
    manifest: Manifest, of_modules: Mapping[str, Setting], environ: Mapping[str, str]
) -> dict[str, Setting]:
    """Return the old values of variables that a setting extends: from modules, otherwise from the image or the job."""
    names = [setting.name for setting in manifest.settings if setting.expands and OLD_VALUE in setting.value]
    found: dict[str, Setting] = {}
    for name in names:
        if name in of_modules:
            found[name] = of_modules[name]
        elif manifest.environment.kind == "host":
            found[name] = Setting(name=name, value=environ.get(name, ""), origin="environment of the job")
        elif name == _LIBRARY_PATH:
            locked = next((e.value for e in manifest.expectations if e.field == _LIBRARY_FIELD), ())
            folders = locked if isinstance(locked, tuple) else ()
            value = ":".join(folder for folder in folders if folder != _OWN_LIBRARIES)
            found[name] = Setting(name=name, value=value, origin="image")
    return found


def _expanded(setting: Setting, old: Setting | None, environ: Mapping[str, str]) -> Setting:
    if not setting.expands:
        return setting
    value = _with_job(setting.value, environ).replace("${node-local}", _NODE_LOCAL)
    if OLD_VALUE not in value:
        return replace(setting, value=value, expands=False)
    if old is None or not old.value:
        start, _, end = value.partition(OLD_VALUE)
        # Without an old value, the separator is removed, too, because an empty entry would mean the working directory.
        return replace(setting, value=start[:-1] if start and not end else start + end[1:], expands=False)
    reason = f"{setting.reason}; it extends {old.value} ({old.origin})"
    return replace(setting, value=value.replace(OLD_VALUE, old.value), reason=reason, expands=False)


def _with_job(text: str, environ: Mapping[str, str]) -> str:
    return text.replace("${jobid}", environ.get("SLURM_JOB_ID", ""))


def _lightened(expectations: Sequence[Expectation], settings: Mapping[str, Setting]) -> tuple[Expectation, ...]:
    """Allow a site's library path to differ from the locked path. The libraries that are found are still compared."""
    of_site = (settings.get(f"{how}{_LIBRARY_PATH}") for how in ("", "PREPEND_", "APPEND_"))
    found = next((one for one in of_site if one and one.origin.startswith(("site profile ", "module "))), None)
    if found is None:
        return tuple(expectations)
    note = f"{found.origin} sets {found.name}; the libraries that are found with it are still compared"
    return tuple(
        replace(one, severity="warn", note=note) if one.field == _LIBRARY_FIELD and one.severity == "must" else one
        for one in expectations
    )
