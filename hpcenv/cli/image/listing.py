"""`hpcenv image list`."""

from __future__ import annotations

import os
import time

import click

from hpcenv.cli import _render
from hpcenv.model import size


@click.command("list")
@_render.store_option
@_render.json_option
def command(where: _render.Where, as_json: bool) -> None:
    """List the store's images, the latest used first, and who needs them.

    NEEDED BY are lockfiles, and runs that have not ended, as far as they said so: `hpcenv
    lock`, `image build` and `submit` do.
    """
    from hpcenv.steps.image.listing import ListedImage, list_images

    found = list_images(where.place(), os.environ)
    if as_json:
        _render.success("image list", found)
        return
    if not found.exists:
        _render.tell(where.in_commands(f"there is no store in {found.store} yet; hpcenv image pull makes one"))
        return
    now = time.time()

    def row(image: ListedImage) -> tuple[str, ...]:
        return (
            image.digest[7:19],
            size.shown(image.size),
            _shortest(image.references),
            image.platform or "-",
            age(now - image.used),
            image.problem or _needed_by(image.used_by),
        )

    for line in columns((("DIGEST", "SIZE", "REFERENCE", "PLATFORM", "USED", "NEEDED BY"), *map(row, found.images))):
        _render.say(line)
    parts = {"pulled files": found.blobs, "indexes": found.indexes, "unfinished": found.unfinished}
    total = sum(image.size for image in found.images) + sum(part.size for part in parts.values())
    said = [f"images: {len(found.images)}"]
    said += [f"{name}: {part.count} ({size.shown(part.size)})" for name, part in parts.items() if part.count]
    _render.tell(f"{found.store}: {size.shown(total)}; {', '.join(said)}" + ("" if found.writable else "; read-only"))


def _shortest(references: tuple[str, ...]) -> str:
    """Return the reference that a person would type: the digest stands in the first column."""
    return next((name for name in references if "@" not in name), references[0] if references else "-")


def _needed_by(used_by: tuple[str, ...]) -> str:
    if not used_by:
        return "-"
    return used_by[0] + (f" and {len(used_by) - 1} more" if len(used_by) > 1 else "")


def columns(rows: tuple[tuple[str, ...], ...]) -> list[str]:
    """Return rows as lines with aligned columns."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def age(seconds: float) -> str:
    """Return how long ago something was, for people."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name} ago"
    return "now"
