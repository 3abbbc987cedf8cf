"""`hpcenv image lint`: look for trouble in recipes and finished images.

Runs on: LOGIN NODE. Nothing is run, mounted or unpacked; nobody is asked.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpcenv.adapters import layers, oci_layout, references, sif, squashfs_reader, tar_stream, toml_files
from hpcenv.adapters.manifests import ResolvedImage
from hpcenv.adapters.references import LocalImage
from hpcenv.errors import FileUnusable, ImageMismatch, SpecError, UsageError
from hpcenv.model import image_content, image_lint, recipe_lint
from hpcenv.model.image_content import ImageContents, ImageFile, ImageLayer
from hpcenv.model.image_lint import SEVERITIES, Finding, Severity, Trouble

Kind = Literal["dockerfile", "definition", "sif", "image"]

_RECIPE_LIMIT = 4 * 1024 * 1024
# As squashfs_reader.MOST_ENTRIES: more paths are no image that anybody runs.
_MOST_ENTRIES = 8_000_000
_SAMPLES = 32 * 1024 * 1024
_STALL_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What was looked at, and as what."""

    path: str
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class LintResult:
    """What was found.

    Attributes:
        findings: in the order of the paths; suppressed ones have `allowed`.
        counts: findings that are not suppressed, by severity.
    """

    checked: tuple[Checked, ...]
    findings: tuple[Finding, ...]
    counts: dict[str, int]

    def bad(self, fail_on: Severity) -> int:
        """Return how many findings are as bad as `fail_on`, or worse."""
        return sum(self.counts[one] for one in SEVERITIES[: SEVERITIES.index(fail_on) + 1])


def lint(paths: Sequence[str], *, here: Path, allow: Iterable[str] = (), platform: str = "linux/amd64") -> LintResult:
    """Judge recipes and images.

    Args:
        paths: Dockerfiles, definition files, SIFs, folders with an OCI layout, or `oci:`,
            `oci-archive:` and `docker-archive:` references.
        here: what relative paths are relative to.
        allow: rules that are accepted everywhere, `RULE` or `RULE=reason`.
        platform: which image of several.

    Raises:
        UsageError: a rule that is none.
        SpecError: a recipe that cannot be parsed.
        FileUnusable, ImageUnavailable, ImageMismatch, EnvironmentUnreadable: an image that cannot be read.
    """
    accepted = _accepted(allow)
    troubles = image_lint.parse_troubles(toml_files.read(image_lint.PACKAGED_TROUBLES, error=SpecError))
    checked: list[Checked] = []
    found: list[Finding] = []
    for path in paths:
        kind, findings = _lint_one(path, here, troubles, platform)
        checked.append(Checked(path=path, kind=kind))
        found += [replace(one, allowed=one.allowed or accepted.get(one.rule)) for one in findings]
    counts: dict[str, int] = {one: sum(f.severity == one and f.allowed is None for f in found) for one in SEVERITIES}
    return LintResult(checked=tuple(checked), findings=tuple(found), counts=counts)


def _accepted(allow: Iterable[str]) -> dict[str, str]:
    found = {}
    for one in allow:
        rule, _, reason = one.partition("=")
        if rule not in image_lint.RULES:
            raise UsageError(f"`{rule}` is no rule", why="rules are " + ", ".join(sorted(image_lint.RULES)))
        found[rule] = reason or "on the command line"
    return found


def _lint_one(path: str, here: Path, troubles: Sequence[Trouble], platform: str) -> tuple[Kind, tuple[Finding, ...]]:
    transport = re.match(r"(oci|oci-archive|docker-archive):", path)
    place = here / path
    if transport is None and place.is_dir():
        if not (place / "oci-layout").is_file():
            raise UsageError(f"`{path}` is a folder without an OCI layout", hint="name the recipe or image in it")
        transport, path = re.match(r"(oci):", "oci:"), f"oci:{place}"
    if transport is not None:
        source = references.parse_source(path)
        assert isinstance(source, LocalImage)
        source = replace(source, path=str(here / source.path))
        contents = _image_contents(path, source, platform)
        return "image", image_content.lint_contents(contents, troubles=troubles)
    head = _head(place)
    if head[32:41] == b"SIF_MAGIC" or path.endswith(".sif"):
        return "sif", image_content.lint_contents(_sif_contents(path, place), troubles=troubles)
    text = _recipe_text(path, place)
    if path.endswith(".def") or re.search(r"^\s*bootstrap\s*:", text, re.IGNORECASE | re.MULTILINE):
        return "definition", recipe_lint.lint_definition(text, origin=path, troubles=troubles)
    return "dockerfile", recipe_lint.lint_dockerfile(text, origin=path, troubles=troubles)


def _head(place: Path) -> bytes:
    try:
        # O_NONBLOCK: opening a FIFO must not hang.
        fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.read(fd, 64)
        finally:
            os.close(fd)
    except OSError as error:
        raise FileUnusable(f"cannot read `{place}`", why=error.strerror) from error


def _recipe_text(path: str, place: Path) -> str:
    if not place.is_file() or place.stat().st_size > _RECIPE_LIMIT:
        raise SpecError(f"`{path}` is no recipe and no SIF", why="it is too large, or no plain file")
    try:
        return place.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"`{path}` is no recipe and no SIF", why="it is not UTF-8 text") from error


# -- a SIF ----------------------------------------------------------------------------------------------------------


def _sif_contents(origin: str, place: Path) -> ImageContents:
    header = sif.read_header(place)
    partition = header.runs
    if partition.partition is None or partition.partition.filesystem != "squashfs":
        raise ImageMismatch(f"`{origin}` cannot be looked into", why="its file system is not a plain squashfs")
    offset, size = partition.offset, partition.size
    files, read = [], 0
    for entry in squashfs_reader.read_tree(place, offset=offset, size=size, content=False):
        path = _text(entry.path)
        text = None
        if entry.kind == "file" and entry.size and read < _SAMPLES and image_content.wanted(path, entry.size):
            raw = squashfs_reader.read_file(place, entry.path, offset=offset, size=size)
            read += len(raw)
            text = raw.decode("utf-8", "replace")
        files.append(ImageFile(path=path, kind=entry.kind, mode=entry.mode, size=entry.size, text=text))
    return ImageContents(origin=origin, layers=(ImageLayer(name="", files=files),))


def _text(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


# -- an image of layers ---------------------------------------------------------------------------------------------


def _image_contents(origin: str, source: LocalImage, platform: str) -> ImageContents:
    image = oci_layout.resolve(source, platform=platform)
    config: dict[str, Any] = dict(image.config.get("config") or {})
    found = []
    count = 0
    for number, layer in enumerate(image.layers, start=1):
        name = f"layer {number} of {len(image.layers)} ({layer.digest[:19]})"
        with _blob(source, image, number - 1) as blob:
            found.append(_read_layer(blob, layer.media_type, name))
        count += len(found[-1].files)
        if count > _MOST_ENTRIES:
            raise ImageMismatch(f"`{origin}` has more than {_MOST_ENTRIES} paths", why="that is no image to run")
    pairs = (str(entry).partition("=") for entry in config.get("Env") or ())
    history = image.config.get("history")
    return ImageContents(
        origin=origin,
        layers=tuple(found),
        environment={name: value for name, _, value in pairs},
        user=str(config.get("User") or ""),
        history=tuple(str(one.get("created_by", "")) for one in _list(history) if isinstance(one, dict)),
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


@contextmanager
def _blob(source: LocalImage, image: ResolvedImage, number: int) -> Iterator[Path]:
    """Give a layer as a file: where it lies, or copied out of an archive for the time being."""
    layer = image.layers[number]
    if source.kind == "oci":
        yield Path(source.path) / "blobs" / "sha256" / layer.digest.partition(":")[2]
        return
    with (
        tempfile.TemporaryDirectory(prefix="hpcenv-") as scratch,
        closing(oci_layout.open_source(source, image)) as blobs,
    ):
        path = Path(scratch) / "layer"
        with path.open("wb") as out:
            for chunk in blobs.fetch(layer.digest, layer.size, 0, stall=_STALL_SECONDS).chunks:
                out.write(chunk)
        yield path


def _read_layer(blob: Path, media_type: str, name: str) -> ImageLayer:
    """Read a layer's table of contents, and the few files whose content is judged."""
    files: list[ImageFile] = []
    removed, opaque = set(), set()
    samples = 0
    with layers.open_blob(blob, media_type) as stream:
        reader = tar_stream.Reader(iter(lambda: stream.read(1 << 20), b""))
        for member in reader:
            path = _text(os.path.normpath(b"/" + member.name).lstrip(b"/"))
            folder, _, last = path.rpartition("/")
            if last == ".wh..wh..opq":
                opaque.add(folder)
                continue
            if last.startswith(".wh."):
                removed.add(f"{folder}/{last[4:]}".lstrip("/"))
                continue
            text = None
            if member.kind == "file" and samples < _SAMPLES and image_content.wanted(path, member.size):
                raw = b"".join(bytes(piece) for piece in reader.stored())
                samples += len(raw)
                text = raw.decode("utf-8", "replace")
            files.append(ImageFile(path=path, kind=member.kind, mode=member.mode, size=member.size, text=text))
            if len(files) > _MOST_ENTRIES:
                raise ImageMismatch(f"{name} has more than {_MOST_ENTRIES} paths", why="that is no image to run")
    return ImageLayer(name=name, files=files, removed=frozenset(removed), opaque=frozenset(opaque))
