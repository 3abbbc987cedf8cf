"""`hpcenv export`: write the lockfile in another tool's format.

Runs on: LOGIN NODE; needs the lockfile, not the environment. The formats are in locking/formats/.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from hpcenv.errors import WouldOverwrite
from hpcenv.locking import formats
from hpcenv.locking.exporter import Exporter, ExportRequest, LeftOut
from hpcenv.project.spec import DEFAULT_LOCK
from hpcenv.project.workspace import find_lockfile, read_lockfile
from hpcenv.records import files


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """An export.

    Attributes:
        kind: the format's name.
        lockfile: the lockfile that was exported.
        fingerprint: the lockfile's fingerprint.
        text: the whole export.
        count: number of packages in the export.
        left_out: packages that are not in the export, with reasons.
        notes: notes for the user about the export.
        path: the file that was written; None if no file was written.
        replaced: whether an earlier export of this format was replaced.
    """

    kind: str
    lockfile: Path
    fingerprint: str
    text: str
    count: int
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()
    path: Path | None = None
    replaced: bool = False


def exporters() -> dict[str, Exporter]:
    """Return every export format by name, in alphabetical order."""
    names = sorted(module.name for module in pkgutil.iter_modules(formats.__path__))
    return {name: import_module(f"{formats.__name__}.{name}").EXPORTER for name in names}


def export(
    start: Path,
    kind: str,
    *,
    environ: Mapping[str, str],
    lock: str = DEFAULT_LOCK,
    output: Path | None = None,
) -> ExportResult:
    """Export a lockfile.

    Args:
        start: a folder in the project.
        kind: the format's name, one of `exporters()`.
        environ: the user's environment; pip finds its configuration through it.
        lock: the name of a lockfile of the project, or the path of any lockfile (it ends with `.lock.toml`).
        output: the file to write. If `output` is None, the text is only returned.

    Raises:
        LockfileMissing, LockfileInvalid, LockfileNewer: there is no usable lockfile.
        WouldOverwrite: `output` exists, and it is not an export of this format.
        ToolFailed: pip's index gave no URLs; nothing is written.
    """
    exporter = exporters()[kind]
    lockfile_path = find_lockfile(start, lock)
    lockfile = read_lockfile(lockfile_path)
    path = None if output is None else Path(os.path.realpath(output))
    # This is checked before the index is asked. If the file cannot be written, the index need not be asked.
    replaced = path is not None and _is_replaceable(path, exporter)
    request = ExportRequest(name=lockfile_path.name.removesuffix(".lock.toml"), environ=environ)
    rendered = exporter.render(lockfile, request)
    notes = rendered.notes
    if path is not None:
        files.write_text(rendered.text, path)
        notes = (*notes, *exporter.path_notes(path))
    return ExportResult(
        kind=kind,
        lockfile=lockfile_path,
        fingerprint=lockfile.fingerprint,
        text=rendered.text,
        count=rendered.count,
        left_out=rendered.left_out,
        notes=notes,
        path=path,
        replaced=replaced,
    )


def _is_replaceable(path: Path, exporter: Exporter) -> bool:
    """Return whether an export of this format exists at the path; False if nothing exists there.

    Raises:
        WouldOverwrite: the path names something else.
    """
    if not os.path.lexists(path):
        return False
    hint = "choose another name, or move it away"
    if not path.is_file():
        raise WouldOverwrite(f"`{path}` is not a file", hint=hint)
    if not exporter.is_ours(path.read_text(encoding="utf-8", errors="replace")):
        raise WouldOverwrite(
            f"`{path}` exists", why=f"it was not written by `hpcenv export {exporter.name}`", hint=hint
        )
    return True
