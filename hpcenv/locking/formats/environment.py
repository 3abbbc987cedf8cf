"""environment.yml for conda: the version of Python, and the pins for pip in the conda environment.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import json

from hpcenv.locking.export_notes import (
    comment_on,
    has_header,
    header_lines,
    left_out_entry,
    notes_on_indexes,
    notes_on_modified,
    plain_text,
    summary_notes,
)
from hpcenv.locking.export_packages import (
    MODIFIED,
    is_modified,
    judged_packages,
    pin_of,
    proved_sha256,
    python_version,
    why_no_pin,
)
from hpcenv.locking.exporter import Exporter, LeftOut, Rendered
from hpcenv.project.lockfile import Lockfile


def environment(lockfile: Lockfile, *, name: str) -> Rendered:
    """Return conda's environment.yml.

    The file names no channel, because the user's configuration of conda chooses channels.
    """
    lines = header_lines("environment", lockfile)
    left_out: list[LeftOut] = []
    pinned = []
    pins = []
    for dist, problem in judged_packages(lockfile, why_no_pin):
        if problem:
            left_out.append(left_out_entry(dist, problem))
            lines.append(comment_on(dist, problem))
            continue
        if is_modified(dist):
            lines.append(comment_on(dist, MODIFIED))
        pin = pin_of(dist)
        direct = " @ " in pin
        # A JSON string is a valid YAML string. Unquoted, `#` would begin a comment.
        pins.append("      - " + (json.dumps(f"{pin}#sha256={proved_sha256(dist)}") if direct else pin))
        pinned.append(dist)
    lines += [f"name: {json.dumps(name)}", "dependencies:"]
    notes = [*summary_notes(lockfile, left_out), *notes_on_indexes(pinned), *notes_on_modified(pinned)]
    python, implementation = python_version(lockfile), lockfile.facts.get("python.implementation", "cpython")
    if python and implementation == "cpython":
        lines.append(f"  - python={python}")
    else:
        lines.append("  - python")
        notes.append(f"Python is not pinned: the lockfile has {plain_text(f'{implementation} {python}')}")
    lines.append("  - pip")
    if pins:
        lines += ["  - pip:", *pins]
    return Rendered(text="\n".join(lines) + "\n", count=len(pins), left_out=tuple(left_out), notes=tuple(notes))


EXPORTER = Exporter(
    name="environment",
    help="environment.yml, for conda",
    render=lambda lockfile, request: environment(lockfile, name=request.name),
    is_ours=has_header("environment"),
)
