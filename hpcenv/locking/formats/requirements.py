"""requirements.txt: `NAME==VERSION --hash=sha256:...` for every package whose wheel is confirmed.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from hpcenv.locking.export_notes import (
    comment_on,
    has_header,
    header_lines,
    left_out_entry,
    notes_on_indexes,
    notes_on_modified,
    summary_notes,
)
from hpcenv.locking.export_packages import MODIFIED, is_modified, judged_packages, pin_of, proved_sha256, why_no_wheel
from hpcenv.locking.exporter import Exporter, LeftOut, Rendered
from hpcenv.project.lockfile import DistTable, Lockfile


def requirements(lockfile: Lockfile) -> Rendered:
    """Return the input of `pip install --no-deps --require-hashes -r FILE`."""
    text, pinned, left_out = _render(lockfile)
    notes = (*summary_notes(lockfile, left_out), *notes_on_indexes(pinned), *notes_on_modified(pinned))
    return Rendered(text=text, count=len(pinned), left_out=tuple(left_out), notes=notes)


def requirements_text(lockfile: Lockfile) -> str:
    """Return the same text, but without notes, for the run folder.

    Comments in the text name the packages that are left out.
    """
    return _render(lockfile)[0]


def _render(lockfile: Lockfile) -> tuple[str, list[DistTable], list[LeftOut]]:
    """Return the text, the packages in it, and the packages that are left out."""
    lines = [*header_lines("requirements", lockfile), "# pip install --no-deps --require-hashes -r FILE"]
    left_out: list[LeftOut] = []
    pinned = []
    for dist, problem in judged_packages(lockfile, why_no_wheel):
        if problem:
            left_out.append(left_out_entry(dist, problem))
            lines.append(comment_on(dist, problem))
            continue
        if is_modified(dist):
            lines.append(comment_on(dist, MODIFIED))
        lines.append(f"{pin_of(dist)} --hash=sha256:{proved_sha256(dist)}")
        pinned.append(dist)
    return "\n".join(lines) + "\n", pinned, left_out


EXPORTER = Exporter(
    name="requirements",
    help="requirements.txt with hashes, for `pip install`",
    render=lambda lockfile, _request: requirements(lockfile),
    is_ours=has_header("requirements"),
)
