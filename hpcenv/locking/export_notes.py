"""Comments in an export, and notes for the user about the export.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcenv.locking.export_packages import MODIFIED, is_modified, of_one_machine
from hpcenv.locking.exporter import LeftOut
from hpcenv.project import lockfile as lock_model
from hpcenv.project.lockfile import DistTable, Lockfile
from hpcenv.text import printable


def has_header(name: str) -> Callable[[str], bool]:
    """Return a function that checks whether a text begins like an export of this format."""
    return lambda text: text.startswith(_first_line(name))


def _first_line(name: str) -> str:
    return f"# Written by `hpcenv export {name}`"


def header_lines(name: str, lockfile: Lockfile) -> list[str]:
    """Return the comment at the top of an export, which names the lockfile that the export was made from."""
    python = plain_text(f"{lockfile.facts.get('python.implementation', '')} {lockfile.facts['python.version']}")
    lines = [
        f"{_first_line(name)} from the lockfile {plain_text(lockfile.fingerprint)}; do not edit.",
        f"# For {python} on {plain_text(lockfile.asked.platform)}.",
    ]
    if lockfile.container is not None:
        image = f"{plain_text(lockfile.container.reference)}, {plain_text(lockfile.container.digest)}"
        lines.append(f"# Locked in the image {image}. This file does not contain the image.")
        if lockfile.container.overlay is not None:
            names = ", ".join(plain_text(dist.name) for dist in lockfile.packages.dist if dist.layer == "overlay")
            lines.append(f"# From the overlay over the image: {plain_text(names) or 'no package'}.")
    return lines


def comment_on(dist: DistTable, text: str) -> str:
    """Return a comment line about a package."""
    return f"# {plain_text(dist.name)}=={plain_text(dist.version)}: {plain_text(text)}"


def plain_text(text: str) -> str:
    """Return untrusted text as ASCII on one line of at most 400 characters."""
    line = " ".join(text.split()).encode("ascii", "backslashreplace").decode()
    return printable(line[:400])


def left_out_entry(dist: DistTable, reason: str) -> LeftOut:
    """Return the entry for a package that is not in the export."""
    return LeftOut(name=plain_text(dist.name), version=plain_text(dist.version), reason=plain_text(reason))


def summary_notes(lockfile: Lockfile, left_out: Sequence[LeftOut]) -> tuple[str, ...]:
    """Return notes on the parts that the export does not contain."""
    notes = [*notes_on_edits(lockfile)]
    if left_out:
        names = ", ".join(package.name for package in left_out[:5]) + (", ..." if len(left_out) > 5 else "")
        notes.append(f"{len(left_out)} of {len(lockfile.packages.dist)} packages are left out: {names}")
    if lockfile.packages.unlisted_count:
        notes.append(f"{lockfile.packages.unlisted_count} files that belong to no package are left out")
    if lockfile.container is not None:
        notes.append("the export contains the image's Python packages only, not the image")
    return tuple(notes)


def notes_on_edits(lockfile: Lockfile) -> tuple[str, ...]:
    """Return a note if the lockfile was edited by hand."""
    content = lock_model.fingerprint(lock_model.to_data(lockfile))
    # This version of hpcenv does not know all fields of a newer revision, so it cannot compute the fingerprint.
    if lockfile.revision > lock_model.REVISION or content == lockfile.fingerprint:
        return ()
    return (f"the lockfile was edited: it names {plain_text(lockfile.fingerprint)}, its content has {content}",)


def notes_on_indexes(pinned: Sequence[DistTable]) -> tuple[str, ...]:
    """Return notes on the packages that the default index may not have."""
    by_origin: dict[str, list[str]] = {}
    for dist in pinned:
        if dist.wheel is not None and dist.wheel.index not in (None, "pypi"):
            by_origin.setdefault(plain_text(str(dist.wheel.index)), []).append(dist.name)
        elif of_one_machine(dist):
            by_origin.setdefault("a file, and an index may have a different file of this version", []).append(dist.name)
    return tuple(
        f"pip must be configured to find {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}: "
        f"installed from {origin}"
        for origin, names in sorted(by_origin.items())
    )


def notes_on_modified(pinned: Sequence[DistTable]) -> tuple[str, ...]:
    """Return notes on the packages that were modified after their installation."""
    return tuple(f"{dist.name} {dist.version} was {MODIFIED}" for dist in pinned if is_modified(dist))
