"""`hpcenv image inspect`."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from hpcenv.cli import _render

if TYPE_CHECKING:
    from hpcenv.steps.image.inspect import InspectedImage, Source

# Longer values of labels and settings are cut in text; --json has all of them.
_LONG = 100


@click.command("inspect")
@click.argument("image")
@click.option("--hash", "hashes", is_flag=True, help="Read the whole file, for its digests.")
@_render.store_option
@_render.json_option
def command(image: str, hashes: bool, where: _render.Where, as_json: bool) -> None:
    """Say what a SIF is and where it came from, without Apptainer.

    IMAGE is the path of a SIF, or a reference or digest of one in the store. Signatures
    are counted, not verified: apptainer verify does that.
    """
    from hpcenv.steps.image.inspect import inspect

    found = inspect(image, cwd=_render.cwd(), place=where.place(), hashes=hashes)
    if as_json:
        _render.success("image inspect", found)
        return
    _render.say(str(found.path))
    for name, value in (*_file(found), *_origin(found.source), *_content(found)):
        _render.say(f"  {name:<13} {value}")
    for kind, values in (("label", found.labels), ("config", _of_config(found.config))):
        for name, value in sorted(values.items()):
            _render.say(f"  {kind:<13} {_cut(name)} = {_cut(value)}")
    for note in found.notes:
        _render.tell(f"note: cannot be read: {_cut(note)}")


def _file(found: InspectedImage) -> list[tuple[str, str]]:
    header = found.header
    lines = [("size", f"{found.size} bytes"), ("architecture", header.architecture)]
    if found.sha256 is not None:
        lines.append(("sha256", found.sha256))
    if found.partition_sha256 is not None:
        lines.append(("partition", f"sha256 {found.partition_sha256}"))
    for entry in header.objects:
        what = entry.name or (f"{entry.partition.filesystem}, {entry.partition.role}" if entry.partition else "")
        lines.append(
            (f"object {entry.id}", f"{entry.kind}, {entry.size} bytes at {entry.offset}  {_cut(what)}".rstrip())
        )
    lines.append(("signatures", f"{found.signatures}, not verified" if found.signatures else "none"))
    return lines


def _origin(source: Source) -> list[tuple[str, str]]:
    lines = [("made from", source.digest or "unknown: it names no digest")]
    if source.digest is not None:
        lines.append(("", f"{source.digest_of} digest, from {source.origin}"))
    more = {"reference": source.reference, "index": source.index_digest, "config": source.config_digest}
    return lines + [(name, _cut(value)) for name, value in more.items() if value is not None]


def _content(found: InspectedImage) -> list[tuple[str, str]]:
    lines = []
    if found.squashfs is not None:
        fs = found.squashfs
        made = datetime.fromtimestamp(fs.created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        lines.append(
            ("file system", f"{fs.compression}, blocks of {fs.block_size} bytes, {fs.inodes} inodes, dated {made}")
        )
    if found.lock is not None:
        says = ", ".join(f"{key} {_cut(value)}" for key, value in sorted(found.lock.says.items()))
        lines.append(("lockfile", f"inside, {found.lock.size} bytes: {says or 'not understood'}"))
    return lines


def _of_config(config: Any) -> dict[str, str]:
    inner = config.get("config", config) if isinstance(config, dict) else None
    return {str(key): str(value) for key, value in inner.items() if value} if isinstance(inner, dict) else {}


def _cut(text: str) -> str:
    plain = "".join(c if c.isprintable() else "?" for c in text)
    return plain if len(plain) <= _LONG else plain[: _LONG - 3] + "..."
