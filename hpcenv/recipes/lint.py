"""`hpcenv image lint`: check recipes and finished images.

Runs on: LOGIN NODE. No command of a recipe or image is run, nothing is mounted or unpacked, and no server is contacted.
"""

from __future__ import annotations

import datetime as dt
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hpcenv.errors import FileUnusable, HpcenvError, SpecError, UsageError
from hpcenv.image.reference import LocalImage, Platform, parse_source
from hpcenv.judge.compat.compat_table import Compat
from hpcenv.project import compatibility, toml_files
from hpcenv.recipes import image_content, image_lint, image_reader, recipe_lint
from hpcenv.recipes.image_lint import SEVERITIES, KnownTrouble, LintFinding, LintSeverity

RecipeOrImage = Literal["dockerfile", "definition", "sif", "image"]

# Bytes.
_RECIPE_LIMIT = 4 * 1024 * 1024
_DEFAULT_PLATFORM = Platform()


@dataclass(frozen=True, kw_only=True)
class LintedPath:
    """A path that was checked, and the kind of recipe or image that this path names."""

    path: str
    kind: RecipeOrImage


@dataclass(frozen=True, kw_only=True)
class UnreadPath:
    """A path that could not be checked, and why."""

    path: str
    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class LintResult:
    """The findings of all paths.

    Attributes:
        findings: the findings in the order of the paths; accepted findings have `allowed`.
        counts: number of findings that are not accepted, by severity.
        unread: paths that could not be checked, if several paths were given.
    """

    checked: tuple[LintedPath, ...]
    findings: tuple[LintFinding, ...]
    counts: dict[str, int]
    unread: tuple[UnreadPath, ...] = ()

    def count_from(self, severity: LintSeverity) -> int:
        """Return the number of findings that have this severity or a worse severity."""
        return sum(self.counts[one] for one in SEVERITIES[: SEVERITIES.index(severity) + 1])


def lint(
    paths: Sequence[str],
    *,
    here: Path,
    allow: Iterable[str] = (),
    platform: Platform = _DEFAULT_PLATFORM,
    today: dt.date | None = None,
) -> LintResult:
    """Check recipes and images.

    Args:
        paths: Dockerfiles, definition files, SIFs, folders with an OCI layout, or `oci:`,
            `oci-archive:` and `docker-archive:` references.
        here: the folder that relative paths start from.
        allow: rules whose findings are accepted everywhere, `RULE` or `RULE=reason`.
        platform: the platform of the image to check, if an index has images for several platforms.
        today: the present date, for the age of images. None means the date of this machine.

    Returns:
        The findings.

    Raises:
        UsageError: `allow` names a rule that does not exist.
        SpecError: only one path was given, and the recipe at this path cannot be parsed.
        FileUnusable, ImageUnavailable, ImageMismatch, EnvironmentUnreadable: only one path was given, and the file or
            image at this path cannot be read.
    """
    reasons = _reasons(allow)
    linter = _Linter(
        here=here,
        platform=platform,
        troubles=image_lint.parse_troubles(toml_files.read(image_lint.PACKAGED_TROUBLES, error=SpecError)),
        table=compatibility.table(),
        today=today or dt.datetime.now(dt.timezone.utc).date(),
    )
    checked: list[LintedPath] = []
    findings: list[LintFinding] = []
    unread: list[UnreadPath] = []
    for path in paths:
        try:
            kind, path_findings = _lint_path(path, linter)
        except HpcenvError as error:
            if len(paths) == 1:
                raise
            unread.append(UnreadPath(path=path, what=error.what, why=error.why or ""))
            continue
        checked.append(LintedPath(path=path, kind=kind))
        findings += [replace(one, allowed=one.allowed or reasons.get(one.rule)) for one in path_findings]
    rejected = [one.severity for one in findings if one.allowed is None]
    return LintResult(
        checked=tuple(checked),
        findings=tuple(findings),
        counts={severity: rejected.count(severity) for severity in SEVERITIES},
        unread=tuple(unread),
    )


@dataclass(frozen=True, kw_only=True)
class _Linter:
    """The settings with which every path is checked."""

    here: Path
    platform: Platform
    troubles: tuple[KnownTrouble, ...]
    table: Compat
    today: dt.date


def _reasons(allow: Iterable[str]) -> dict[str, str]:
    """Return the rules whose findings the command line accepts, each with the reason."""
    reasons = {}
    for option in allow:
        rule, _, reason = option.partition("=")
        if rule not in image_lint.RULES:
            rules = ", ".join(sorted(image_lint.RULES))
            raise UsageError(f"there is no rule `{rule}`", why=f"the rules are {rules}; hadolint checks its own")
        reasons[rule] = reason or "on the command line"
    return reasons


def _lint_path(path: str, linter: _Linter) -> tuple[RecipeOrImage, tuple[LintFinding, ...]]:
    transport = re.match(r"(oci|oci-archive|docker-archive):", path)
    file = linter.here / path
    if transport is None and file.is_dir():
        if not (file / "oci-layout").is_file():
            raise UsageError(f"`{path}` is a folder without an OCI layout", hint="name the recipe or image in it")
        transport, path = re.match(r"(oci):", "oci:"), f"oci:{file}"
    if transport is not None:
        source = parse_source(path)
        assert isinstance(source, LocalImage)
        source = replace(source, path=str(linter.here / source.path))
        contents = image_reader.layer_contents(path, source, linter.platform)
        return "image", _lint_contents(contents, linter)
    head = _head(file)
    if head[32:41] == b"SIF_MAGIC" or path.endswith(".sif"):
        return "sif", _lint_contents(image_reader.sif_contents(path, file), linter)
    text = _recipe_text(path, file)
    if path.endswith(".def") or re.search(r"^\s*bootstrap\s*:", text, re.IGNORECASE | re.MULTILINE):
        return "definition", recipe_lint.lint_definition(text, origin=path, troubles=linter.troubles)
    return "dockerfile", recipe_lint.lint_dockerfile(text, origin=path, troubles=linter.troubles)


def _lint_contents(contents: image_content.ImageContents, linter: _Linter) -> tuple[LintFinding, ...]:
    return image_content.lint_contents(contents, troubles=linter.troubles, table=linter.table, today=linter.today)


def _head(file: Path) -> bytes:
    try:
        # Without O_NONBLOCK, opening a FIFO would wait.
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.read(fd, 64)
        finally:
            os.close(fd)
    except OSError as error:
        raise FileUnusable(f"cannot read `{file}`", why=error.strerror) from error


def _recipe_text(path: str, file: Path) -> str:
    if not file.is_file() or file.stat().st_size > _RECIPE_LIMIT:
        raise SpecError(f"`{path}` is neither a recipe nor a SIF", why="it is too large, or not a plain file")
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"`{path}` is neither a recipe nor a SIF", why="it is not UTF-8 text") from error
