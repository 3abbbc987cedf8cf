"""`hpcenv image list`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import time

import click

from hpcenv import size
from hpcenv.cli import _render
from hpcenv.errors import Command
from hpcenv.runs.store_listing import ListedImage, list_images
from hpcenv.text import columns


@click.command("list")
@_render.store_option
@_render.json_option
def command(where: _render.Where, as_json: bool) -> None:
    """List the images in the store, the most recently used first."""
    listing = list_images(where.place())
    if as_json:
        _render.success("image list", listing)
        return
    if not listing.exists:
        pull = Command("hpcenv", "image", "pull", "REFERENCE")
        _render.tell(where.text(f"{listing.store} has no store yet (origin: {listing.origin}); ", pull, " creates one"))
        return
    now = time.time()

    def row(image: ListedImage) -> tuple[str, ...]:
        return (
            image.digest[7:19],
            size.shown(image.size),
            _shortest(image.references),
            image.platform or "-",
            age(now - image.used),
            image.problem or "-",
        )

    for line in columns((("DIGEST", "SIZE", "REFERENCE", "PLATFORM", "USED", "PROBLEM"), *map(row, listing.images))):
        _render.say(line)
    parts = {"pulled files": listing.blobs, "indexes": listing.indexes, "unfinished": listing.unfinished}
    total = sum(image.size for image in listing.images) + sum(part.size for part in parts.values())
    counts = [f"images: {len(listing.images)}"]
    counts += [f"{name}: {part.count} ({size.shown(part.size)})" for name, part in parts.items() if part.count]
    _render.tell(
        f"{listing.store}: {size.shown(total)}; {', '.join(counts)}" + ("" if listing.writable else "; read-only")
    )
    _render.tell(f"origin: {listing.origin}")


def _shortest(references: tuple[str, ...]) -> str:
    """Return a reference without a digest, if the image has one, because the first column already has the digest."""
    return next((name for name in references if "@" not in name), references[0] if references else "-")


def age(seconds: float) -> str:
    """Return a text that says for how long something was not used."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name} ago"
    return "now"
