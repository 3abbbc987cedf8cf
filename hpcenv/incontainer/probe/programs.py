"""Programs that distributions put into bin/.

Runs on: inside the image.
"""

from __future__ import annotations

import os

from hpcenv.incontainer.probe.environment import Program
from hpcenv.incontainer.probe.files import read_metadata
from hpcenv.incontainer.probe.paths import NotAFile, open_regular
from hpcenv.incontainer.probe.hashing import digest_of_lines
from hpcenv.incontainer.probe.table import HASHING, Probe
from hpcenv.incontainer.probe.text import describe_error, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.environment import Dist, ProbedEnvironment
    from hpcenv.incontainer.probe.environment import Row
    from hpcenv.incontainer.probe.values import Facts

# The start of a script, where an installer writes the path of the environment's Python. Usually this is one line
# (`#!`). If that line would be too long or contain a blank, the installer writes a shell command inside a Python string
# (distlib, pip, uv).
SHEBANG = (
    rb"#![^\n]*(?:python|pypy)[^\n/]*\n"
    rb"|#!/bin/sh\r?\n'''exec' [^\n]*(?:python|pypy)[^\n/]*\n' '''\n"
)
# The launcher of an entry point, as all versions of pip (distlib), uv, installer and conda write it.
LAUNCHER = (
    r"(?:# -\*- coding: utf-8 -\*-\n)?\s*(?:import (?:re|sys)\n|\n)*"
    r"from (?P<module>[\w.]+) import (?P<name>\w+)\n\s*"
    r"if __name__ == ['\"]__main__['\"]:\n"
    r"(?:    sys\.argv\[0\] = re\.sub\(r['\"]\(-script\\\.pyw\??\|\\\.exe\)\?\$['\"], ['\"]['\"], sys\.argv\[0\]\)\n"
    r"|    sys\.argv\[0\] = sys\.argv\[0\]\.removesuffix\(['\"]\.exe['\"]\)\n"
    r"|    if sys\.argv\[0\]\.endswith\(['\"]-script\.pyw['\"]\):\n        sys\.argv\[0\] = sys\.argv\[0\]\[:-11\]\n"
    r"    elif sys\.argv\[0\]\.endswith\(['\"]\.exe['\"]\):\n        sys\.argv\[0\] = sys\.argv\[0\]\[:-4\]\n)?"
    r"    sys\.exit\((?P<function>[\w.]+)\(\)\)\s*"
)
HEAD = 1 << 16  # a launcher has less than 1 KiB


def probe_programs(env: ProbedEnvironment) -> Facts:
    """Read the programs of each distribution. The answer has the programs in the entry of the distribution."""
    for dist in env.dists or ():
        unhashed = env.has("unhashed-rows")
        rows = [row for row in dist.rows if row.script and (row.claim or unhashed) and row.file is not None]
        try:
            points = _entry_points(env, dist) if rows else {}
            read = (_read_program(env, row, points) for row in rows)
            dist.programs = sorted((program for program in read if program is not None), key=lambda p: p.name)
        except (OSError, ValueError) as error:
            dist.reasons.append("programs: " + describe_error(error))
    return {}


def programs_digest(programs: list[Program]) -> str:
    """Return the digest of a distribution's programs; `none` if it has no programs."""
    if not programs:
        return "none"
    return digest_of_lines("hpcenv-programs-v1", [program.name + "\0" + program.digest for program in programs])


def _read_program(env: ProbedEnvironment, row: Row, points: dict[str, str]) -> Program | None:
    """Return a program; None for the launcher of an entry point of the dist, because the entry defines the launcher."""
    import hashlib
    from base64 import urlsafe_b64encode

    name = row.path.partition("/")[2]
    try:
        descriptor, _ = open_regular(str(row.file), env.inside)
    except NotAFile:
        return Program(name, "not-a-file", True)
    except FileNotFoundError:
        return Program(name, "missing", True)
    with os.fdopen(descriptor, "rb") as file:
        head = file.read(HEAD)
        bare = without_shebang(head)
        launched = launched_by(bare) if len(head) < HEAD else ""
        if launched and launched == (points.get(name) or points.get(name.rstrip("0123456789."))):
            return None
        digest, whole = hashlib.sha256(bare), hashlib.sha256(head)
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
            whole.update(piece)
    claim = "sha256=" + urlsafe_b64encode(whole.digest()).rstrip(b"=").decode()
    modified = bool(row.claim) and claim != row.claim
    return Program(name, "entry-point " + launched if launched else digest.hexdigest(), modified)


def without_shebang(data: bytes) -> bytes:
    """Return a script without the line that names its Python. Other content is returned unchanged."""
    import re

    match = re.match(SHEBANG, data) if data.startswith(b"#!") else None
    return data[match.end() :] if match else data


def launched_by(script: bytes) -> str:
    """Return `MODULE:FUNCTION` of the launcher of an entry point; empty for another program."""
    import re

    try:
        match = re.fullmatch(LAUNCHER, script.decode("utf-8").replace("\r\n", "\n"))
    except UnicodeDecodeError:
        return ""
    if match is None or match["function"].split(".")[0] != match["name"]:
        return ""
    return match["module"] + ":" + match["function"]


def _entry_points(env: ProbedEnvironment, dist: Dist) -> dict[str, str]:
    """Return name -> MODULE:FUNCTION of the dist's entry points."""
    try:
        data = read_metadata(env, dist, os.path.join(dist.site.path, dist.folder, "entry_points.txt"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    points, section = {}, ""
    for line in data.decode("utf-8", "surrogateescape").splitlines():
        text = line.strip()
        if text.startswith("["):
            section = text.strip("[] ")
        elif section in ("console_scripts", "gui_scripts") and "=" in text and text[0] not in "#;":
            name, _, target = text.partition("=")
            points[name.strip()] = "".join(target.partition("[")[0].split())
    return points


def program_entry(dist: Dist) -> dict[str, object]:
    """Return a distribution's programs as the report shows them."""
    programs = dist.programs or []
    return {
        "sha256": programs_digest(programs),
        "files": {printable(program.name): program.digest for program in programs[:1000]},
        "modified": [printable(program.name) for program in programs if program.modified][:20],
    }


PROBES: tuple[Probe, ...] = (Probe("programs", (), probe_programs, HASHING),)
