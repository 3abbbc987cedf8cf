"""The copy of the lockfile in a run folder. Runs on: LOGIN NODE."""

from __future__ import annotations

import os

from hpcenv.project import document, toml_files
from hpcenv.project import lockfile as lock_model
from hpcenv.project.lockfile import Lockfile
from hpcenv.records.manifest import Manifest
from hpcenv.records.variables import recorded_value
from hpcenv.submission.snapshot import Code


def run_lockfile(text: str, locked: Lockfile, manifest: Manifest, code: Code) -> str:
    """Return the lockfile for the run folder. It also has code, data, command, and the numbers of nodes and ranks."""
    run = lock_model.RunTable(
        argv=tuple(_as_text(word) for word in (*manifest.program, *manifest.args)),
        nodes=manifest.nodes,
        gpus_per_node=manifest.gpus_per_node,
        nproc_per_node=manifest.nproc_per_node,
        backend=manifest.backend,
        env={s.name: recorded_value(s.name, _as_text(s.value)) for s in manifest.settings},
    )
    header = f"The lockfile of run {manifest.run}, with its code and command."
    table = code.table(manifest.script_sha256)
    data = {
        one.name: lock_model.LockedDataTable(path=one.path, compare=one.compare, state=one.state, hub=one.hub or None)
        for one in manifest.data
    }
    if locked.code is None and locked.run is None:
        tables = {name: document.plain(part) for name, part in (("code", table), ("run", run))}
        tables |= {f"data.{name}": document.plain(part) for name, part in data.items()}
        return toml_files.extended(text, tables, header=header)
    # This lockfile already has these tables, because it is the copy of another run.
    copy = lock_model.to_data(locked.model_copy(update={"code": table, "run": run, "data": data}))
    return toml_files.dumps(copy, header=header)


def _as_text(word: str) -> str:
    r"""Return an argument as text for TOML. Bytes that are not UTF-8 become `\xff`; the manifest has the real bytes."""
    return os.fsencode(word).decode("utf-8", "backslashreplace")
