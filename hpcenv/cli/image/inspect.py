"""`hpcenv image inspect`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from hpcenv.cli import _render
from hpcenv.cli._complete import lockfile_names
from hpcenv.errors import Command, UsageError
from hpcenv.locking.image_inspect import InspectedImage, SifOrigin, inspect
from hpcenv.locking.image_path import find_locked, find_sif
from hpcenv.locking.image_source import registry_name
from hpcenv.project.spec import DEFAULT_LOCK
from hpcenv.project.workspace import read_lockfile
from hpcenv.text import cut, printable

# Longer values of labels and settings are cut in text output. --json has the whole values.
_LONG = 100


@click.command("inspect")
@click.argument("image", required=False)
@click.option(
    "--lock", metavar="NAME", help="Describe the image of lockfiles/NAME.lock.toml.", shell_complete=lockfile_names
)
@click.option("--path", "path_only", is_flag=True, help="Print only the path of the SIF.")
@click.option("--reference", is_flag=True, help="Print only NAME@sha256:DIGEST of the locked image, for docker pull.")
@click.option("--hash", "hashes", is_flag=True, help="Read the whole file and print its digests.")
@_render.store_option
@_render.json_option
def command(
    image: str | None,
    lock: str | None,
    path_only: bool,
    reference: bool,
    hashes: bool,
    where: _render.Where,
    as_json: bool,
) -> None:
    """Describe a SIF and its origin, without Apptainer.

    IMAGE is the path of a SIF, or an image in the store: its reference, its digest, or the
    first digits of its digest. Without IMAGE, hpcenv describes the image of the project's lockfile. hpcenv ends with
    10 if the image is not in the store. hpcenv counts signatures, but does not verify them; to verify them, use
    apptainer verify.
    """
    if image is not None and lock is not None:
        raise UsageError(
            "IMAGE and --lock cannot be used together", hint=Command("hpcenv", "image", "inspect", "--help")
        )
    if reference:
        _show("reference", _reference(image, where, lock or DEFAULT_LOCK), as_json=as_json)
        return
    path = _locked(where, lock or DEFAULT_LOCK) if image is None else find_sif(image, _render.cwd(), where.place())
    if path_only:
        _show("path", str(path), as_json=as_json)
        return
    inspected = inspect(path, hashes=hashes)
    if as_json:
        _render.success("image inspect", inspected)
        return
    _render.say(str(path))
    for name, value in (*_file(inspected), *_origin(inspected.source), *_content(inspected)):
        _render.say(f"  {name:<13} {value}")
    for kind, values in (("label", inspected.labels), ("config", _settings(inspected.config))):
        for name, value in sorted(values.items()):
            _render.say(f"  {kind:<13} {_cut(name)} = {_cut(value)}")
    for note in inspected.notes:
        _render.tell(f"note: cannot be read: {_cut(note)}")


def _locked(where: _render.Where, lock: str) -> Path:
    workspace = where.project()
    origin = workspace.lockfile_path(lock)
    return find_locked(workspace.store_place, read_lockfile(origin), origin=origin, root=workspace.root)


def _reference(image: str | None, where: _render.Where, lock: str) -> str:
    """Return the name of the locked image in its registry. The SIF need not be on this machine."""
    if image is not None:
        raise UsageError(
            "IMAGE and --reference cannot be used together", hint="--reference reads a lockfile: --lock NAME"
        )
    origin = where.project().lockfile_path(lock)
    container = read_lockfile(origin).container
    name = None if container is None else registry_name(container)
    if name is None:
        what = "a host environment" if container is None else f"`{container.reference}`"
        raise UsageError("the locked environment is in no registry", why=f"{origin} locks {what}")
    return name


def _show(name: str, value: str, *, as_json: bool) -> None:
    if as_json:
        _render.success("image inspect", {name: value})
        return
    _render.say(value)


def _file(inspected: InspectedImage) -> list[tuple[str, str]]:
    header = inspected.header
    lines = [("size", f"{inspected.size} bytes"), ("architecture", header.architecture)]
    if inspected.sha256 is not None:
        lines.append(("sha256", inspected.sha256))
    if inspected.partition_sha256 is not None:
        lines.append(("partition", f"sha256 {inspected.partition_sha256}"))
    for entry in header.objects:
        what = entry.name or (f"{entry.partition.filesystem}, {entry.partition.role}" if entry.partition else "")
        lines.append(
            (f"object {entry.id}", f"{entry.kind}, {entry.size} bytes at {entry.offset}  {_cut(what)}".rstrip())
        )
    lines.append(("signatures", f"{inspected.signatures}, not verified" if inspected.signatures else "none"))
    return lines


def _origin(source: SifOrigin) -> list[tuple[str, str]]:
    lines = [("made from", source.digest or "unknown: the SIF names no digest")]
    if source.digest is not None:
        lines.append(("", f"{source.digest_of} digest, from {source.origin}"))
    more = {"reference": source.reference, "index": source.index_digest, "config": source.config_digest}
    return lines + [(name, _cut(value)) for name, value in more.items() if value is not None]


def _content(inspected: InspectedImage) -> list[tuple[str, str]]:
    lines = []
    if inspected.squashfs is not None:
        fs = inspected.squashfs
        made = datetime.fromtimestamp(fs.created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        lines.append(
            ("file system", f"{fs.compression}, blocks of {fs.block_size} bytes, {fs.inodes} inodes, dated {made}")
        )
    if inspected.lock is not None:
        fields = ", ".join(f"{key} {_cut(value)}" for key, value in sorted(inspected.lock.fields.items()))
        lines.append(("lockfile", f"inside, {inspected.lock.size} bytes: {fields or 'its format is unknown'}"))
    return lines


def _settings(config: Any) -> dict[str, str]:
    """Return the run-time settings of an OCI configuration that have a value."""
    inner = config.get("config", config) if isinstance(config, dict) else None
    return {str(key): str(value) for key, value in inner.items() if value} if isinstance(inner, dict) else {}


def _cut(text: str) -> str:
    return cut(printable(text), _LONG)
