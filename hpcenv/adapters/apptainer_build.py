"""Build SIFs with Apptainer: for hosts that cannot pack a layer stream, and for definition files.

Runs on: LOGIN NODE and, for `image build --on-cluster`, COMPUTE NODE.

`build_layout` converts an image whose blobs are at hand and verified; nothing is fetched.
Its result depends on the image, the labels and the epoch, and on the versions of Apptainer
and mksquashfs; not on who builds it, where or when, with one exception: root keeps the
owners, special files and capabilities that other users cannot.

`build_definition` runs a user's definition file. What it is made from is pinned or refused,
and recorded; what %post does is the user's.

Both write to a path that the caller gives and publishes; nobody else looks at it. Facts
marked "seen" were observed with Apptainer 1.4.5 (Debian 1.4.5-2, unprivileged, user
namespaces) on 2026-11-20.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from hpcenv.adapters import apptainer as start_line
from hpcenv.adapters import process, sif
from hpcenv.errors import FileUnusable, ImageMismatch, SpecError, ToolFailed, ToolMissing
from hpcenv.model import definition as definition_file
from hpcenv.model.image_record import Material
from hpcenv.model.runtime_files import RuntimeFiles, followed_links
from hpcenv.model.tree import Entry

__all__ = [
    "Built",
    "BuiltDefinition",
    "build_definition",
    "build_layout",
    "definition_digest",
    "materials",
    "space_needed",
    "write_layout",
]


def _say_nothing(_line: str) -> None:
    """Take progress lines that nobody wants."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """A finished SIF, not yet published, and what made it.

    Attributes:
        epoch: SOURCE_DATE_EPOCH of the build; None when the clock was used.
        builder: `root` or `unprivileged`; the two give different partitions.
        arguments: what was passed to mksquashfs.
    """

    path: Path
    architecture: str
    epoch: int | None
    apptainer_version: str
    builder: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BuiltDefinition(Built):
    """A SIF made from a definition file.

    Attributes:
        definition: the text that was built, with digests in place of tags.
        definition_digest: `sha256:HEX` of the user's text.
        materials: its sources and copied files, in order, then what was bound.
    """

    definition: str
    definition_digest: str
    materials: tuple[Material, ...]


# Level 3 makes the squashfs step 12 times faster than the default gzip -9 for 2 % more
# bytes, and reads faster (measured for a 1.2 GB torch image). Needs Apptainer 1.4.0
# (2025-03), the first with --mksquashfs-args.
_MKSQUASHFS = ("-comp", "zstd", "-Xcompression-level", "3")
_OLDEST = (1, 4, 0)


def space_needed(compressed: int, unpacked: int | None = None) -> int:
    """Return the bytes of temporary space that Apptainer needs to convert an image.

    The unpacked files, a squashfs of them, and a copy that Apptainer makes of the layers.

    Args:
        compressed: bytes of all layers as they are stored.
        unpacked: bytes of all files; None takes four times `compressed` (3.2 times for a
            torch image of 367 MB; more where there is more text).
    """
    files = 4 * compressed if unpacked is None else unpacked + unpacked // 10
    return files + 2 * compressed + (64 << 20)


# --- from an OCI layout ------------------------------------------------------------------


def build_layout(
    *,
    apptainer: str,
    manifest_digest: str,
    blobs: Mapping[str, Path],
    architecture: str,
    epoch: int,
    labels: Mapping[str, str],
    files: RuntimeFiles,
    entries: Iterable[Entry],
    destination: Path,
    temporary: Path,
    on_line: Callable[[str], None] = _say_nothing,
    environ: Mapping[str, str] | None = None,
    timeout: float = 7200.0,
) -> Built:
    """Convert an image whose blobs are on disk.

    The scripts that hold the image's environment and entry point are replaced by those of
    `files`, which are literal where Apptainer's are not.

    Args:
        manifest_digest: of the image's manifest, OCI or docker schema 2.
        blobs: for every digest of the image (manifest, configuration, layers) its file,
            verified by the caller.
        architecture: as OCI writes it; the result must be for it.
        epoch: SOURCE_DATE_EPOCH, seconds; not before the newest file of the image, or Python
            compiles its files again at every start (`apptainer.source_date_epoch`).
        labels: beside those of the image; must have `hpcenv.source.manifest-digest`.
        files: what `runtime_files` gives for the image.
        entries: the image's merged tree. Apptainer writes through certain links of an image
            into the host's files; images with such links are refused.
        destination: the SIF's path; replaced if it exists, removed after a failure.
        temporary: where to unpack, from `temporary.choose_temporary`.
        on_line: gets each line of Apptainer's output.
        environ: the caller's environment; None takes this process's.
        timeout: seconds.

    Raises:
        ToolMissing, ToolFailed: Apptainer is missing, too old, or failed; the hint says what to do.
        ImageMismatch: Apptainer's result is not what was asked for, or the image has links that
            it would write through.
        FileUnusable: a file cannot be written.
        SpecError: a label that cannot be written into a definition file.
    """
    _refuse_links(files, entries)
    made_by = _supported_version(apptainer)
    with _scratch(temporary, destination, on_line) as scratch:
        write_layout(scratch / "layout", manifest_digest, blobs)
        # A relative path: Apptainer stores it in the file system, and it must not tell where.
        text = f"Bootstrap: oci\nFrom: layout@{manifest_digest}\n\n" + _script_section(files, scratch)
        text += _label_section({"org.label-schema.build-date": _rfc3339(epoch), **labels})
        job = _Job(apptainer, destination, text, scratch, architecture, epoch, environ, on_line, timeout)
        _run_build(job, cwd=scratch)
        _check_labels(destination, labels)
        return Built(**_facts(destination, architecture, epoch, made_by))


def _refuse_links(files: RuntimeFiles, entries: Iterable[Entry]) -> None:
    found = followed_links(files, entries)
    if found:
        raise ImageMismatch(
            "apptainer must not convert this image",
            why=f"it would follow the image's link `/{found[0]}` and write to a file of this machine",
            hint="convert it where hpcenv can pack it itself (squashfs-tools 4.6 or newer), which follows no links",
        )


def write_layout(folder: Path, manifest_digest: str, blobs: Mapping[str, Path]) -> None:
    """Make an OCI layout of links to blobs; Apptainer takes docker's manifests there, too (seen).

    Args:
        folder: is made.
        blobs: for every digest of the image its file.

    Raises:
        OSError: something cannot be written.
    """
    place = folder / "blobs" / "sha256"
    place.mkdir(parents=True)
    for digest, blob in blobs.items():
        os.symlink(os.path.abspath(blob), place / digest.partition(":")[2])
    body = blobs[manifest_digest].read_bytes()
    media = json.loads(body).get("mediaType") or "application/vnd.oci.image.manifest.v1+json"
    descriptor = {"mediaType": media, "digest": manifest_digest, "size": len(body)}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [descriptor]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')


_REPLACED = (b".singularity.d/env/10-docker2singularity.sh", b".singularity.d/runscript")


def _script_section(files: RuntimeFiles, scratch: Path) -> str:
    """Write %files, which Apptainer copies after it has made its own scripts (seen)."""
    lines = ["%files"]
    for entry, content in files.members:
        if entry.path in _REPLACED:
            target = entry.path.decode()
            name = f"scripts/{Path(target).name}"
            place = scratch / name
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(content)
            place.chmod(entry.mode)
            lines.append(f"    {name} /{target}")
    return "\n".join(lines) + "\n\n"


# --- from a definition file ----------------------------------------------------------------


def build_definition(
    *,
    apptainer: str,
    text: str,
    folder: Path,
    architecture: str,
    destination: Path,
    temporary: Path,
    digests: Mapping[str, str] | None = None,
    allow_floating: bool = False,
    plain_http: bool = False,
    binds: Sequence[start_line.Bind] = (),
    epoch: int | None = None,
    labels: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] = _say_nothing,
    environ: Mapping[str, str] | None = None,
    timeout: float = 7200.0,
) -> BuiltDefinition:
    """Build a user's definition file, as far as its sources can be pinned.

    Without root, %post runs as root of a user namespace: with the user's range of
    /etc/subuid where there is one, else with that one id (seen; both need no setting here).

    Args:
        folder: where its relative paths begin; Apptainer runs there.
        architecture: as OCI writes it; the result must be for it.
        destination: the SIF's path; replaced if it exists, removed after a failure.
        temporary: where to unpack, from `temporary.choose_temporary`.
        digests: for images named by tag (`Source.origin`), what the caller resolved them to.
        allow_floating: build also what may be something else tomorrow: tags that were not
            resolved, distributions' package servers.
        plain_http: its registries speak http.
        binds: what of the host %post sees; the targets must be in the image's source.
        epoch: SOURCE_DATE_EPOCH; only for files without %post, whose files would else all
            look older than they are. None takes the clock.
        labels: more labels; `hpcenv.definition.digest` is always there.
        on_line: gets each line of Apptainer's output.
        environ: the caller's environment; None takes this process's.
        timeout: seconds.

    Raises:
        SpecError: the file names no source, or one that is not fixed; or a label cannot be written.
        ToolMissing, ToolFailed, ImageUnavailable: Apptainer is missing, too old, or failed.
        ImageMismatch: Apptainer's result is not what was asked for.
        FileUnusable: a file cannot be read or written.
    """
    pinned = _pinned(text, digests or {}, allow_floating=allow_floating)
    used = (*materials(pinned, folder), *map(_bound, binds))
    identity = definition_digest(text)
    added = {"hpcenv.definition.digest": identity, **(labels or {})}
    if epoch is not None:
        added["org.label-schema.build-date"] = _rfc3339(epoch)
    made_by = _supported_version(apptainer)
    with _scratch(temporary, destination, on_line) as scratch:
        recipe = f"{pinned.rstrip()}\n\n{_label_section(added)}"
        options = [*(["--no-https"] if plain_http else []), *_mounts(binds)]
        job = _Job(apptainer, destination, recipe, scratch, architecture, epoch, environ, on_line, timeout)
        _run_build(job, cwd=folder, options=options)
        _check_labels(destination, added)
        facts = _facts(destination, architecture, epoch, made_by)
        return BuiltDefinition(**facts, definition=pinned, definition_digest=identity, materials=used)


def _pinned(text: str, digests: Mapping[str, str], *, allow_floating: bool) -> str:
    """Return the file with digests in place of tags, unless something in it still may change."""
    pinned = definition_file.pin(text, digests)
    if not allow_floating:
        _refuse_floating(definition_file.sources(pinned))
    return pinned


def _mounts(binds: Sequence[start_line.Bind]) -> list[str]:
    return [word for bind in binds for word in ("--mount", start_line.mount(bind))]


def definition_digest(text: str) -> str:
    """Return what names a definition file: `sha256:HEX` of its bytes."""
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def materials(text: str, folder: Path) -> tuple[Material, ...]:
    """Return what a definition file is made from, with digests of the files as they are now.

    Args:
        text: the definition file, best with digests in place of tags.
        folder: where its relative paths begin.

    Raises:
        SpecError: the file names no source.
        FileUnusable: a file cannot be read.
    """
    return (*_sources(definition_file.sources(text), folder), *_copied(text, folder))


def _bound(bind: start_line.Bind) -> Material:
    mode = "ro" if bind.read_only else "rw"
    return Material(what="bind", name=f"{bind.source}:{bind.target}:{mode}", digest=None)


def _refuse_floating(found: Sequence[definition_file.Source]) -> None:
    for source in found:
        if not source.fixed:
            raise SpecError(
                f"line {source.line} of the definition file names something that changes",
                why=f"`{source.origin or source.bootstrap}` ({source.bootstrap}) is not pinned by a digest",
                hint="write IMAGE@sha256:DIGEST, or allow floating sources",
            )


def _sources(found: Sequence[definition_file.Source], folder: Path) -> Iterator[Material]:
    for source in found:
        digest = source.digest
        if source.kind == "file" and "{{" not in source.origin:
            digest = _content_digest(folder / source.origin)
        yield Material(what="source", name=f"{source.bootstrap}:{source.origin}", digest=digest)


def _copied(text: str, folder: Path) -> Iterator[Material]:
    for copy in definition_file.copies(text):
        yield Material(what="file", name=copy.path, digest=_content_digest(folder / copy.path))


def _content_digest(path: Path) -> str | None:
    """Return the digest of a file, or of a folder's names and contents; None for a pattern."""
    try:
        if path.is_file():
            return "sha256:" + sif.file_sha256(path)
        if not path.is_dir():
            return None
        total = hashlib.sha256()
        for place in sorted(path.rglob("*"), key=os.fsencode):
            if place.is_symlink():
                kind, content = "l", os.readlink(place)
            elif place.is_file():
                kind, content = "f", sif.file_sha256(place)
            else:
                kind, content = "d", ""
            total.update(os.fsencode(f"{kind}\0{place.relative_to(path)}\0{content}\0"))
        return f"sha256:{total.hexdigest()}"
    except OSError as error:
        raise FileUnusable(
            f"`{error.filename or path}` cannot be read",
            why=f"{error.strerror or error}; the definition file uses it",
            hint="check its permissions",
        ) from error


# --- what both do --------------------------------------------------------------------------

_LABEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# A label's value ends at the line's end, `{{` begins a template, `%` a section, `#` a
# comment: none of them, nor anything else that is not plainly a name or number.
_LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._:/@+,=~\[\]-]*[A-Za-z0-9\]._-])?")


def _label_section(labels: Mapping[str, str]) -> str:
    """Write %labels; several such sections of a file add up (seen)."""
    lines = ["%labels"]
    for name, value in sorted(labels.items()):
        if not _LABEL_NAME.fullmatch(name) or not _LABEL_VALUE.fullmatch(value):
            raise SpecError(
                f"the label {name[:100]!r} {value[:200]!r} cannot be written into a definition file",
                why="it has a character that could be read as more than a value",
            )
        lines.append(f"    {name} {value}")
    return "\n".join(lines) + "\n"


def _rfc3339(epoch: int) -> str:
    return datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _supported_version(apptainer: str) -> str:
    found = start_line.version(apptainer)
    if tuple(int(part) for part in re.findall(r"\d+", found)[:3]) < _OLDEST:
        raise ToolMissing(
            f"apptainer {found} is too old to build images",
            why="hpcenv chooses the compression with --mksquashfs-args, which 1.4.0 brought",
            hint="load a module with Apptainer 1.4 or newer, or build on another machine",
        )
    return found


class _Job(NamedTuple):
    """One call of `apptainer build`."""

    apptainer: str
    destination: Path
    recipe: str
    scratch: Path
    architecture: str
    epoch: int | None
    environ: Mapping[str, str] | None
    on_line: Callable[[str], None]
    timeout: float


def _run_build(job: _Job, *, cwd: Path, options: Sequence[str] = ()) -> None:
    written = job.scratch / "image.def"
    written.write_text(job.recipe, encoding="utf-8", errors="surrogateescape")
    # --force: only so can %labels replace the build date (seen).
    argv = [job.apptainer, "build", "--force", "--disable-cache", "--arch", job.architecture, *options]
    argv += ["--mksquashfs-args", " ".join(_MKSQUASHFS), os.path.abspath(job.destination), str(written)]
    env = _build_environment(os.environ if job.environ is None else job.environ, job.scratch, job.epoch)
    lines: list[str] = []

    def keep(line: str) -> None:
        lines.append(line)
        del lines[:-100]
        job.on_line(line)

    limit = max(job.timeout, 1.0)
    begin = time.monotonic()
    try:
        process.stream(argv, on_line=keep, timeout=limit, env=env, cwd=cwd)
    except ToolFailed as error:
        status = None if time.monotonic() - begin >= limit else error.status
        raise start_line.explain("\n".join(lines), argv=argv, status=status) from error
    sif.normalise(job.destination)


# What a pull needs of the host besides: the way out, whom to trust, and who asks.
_PULL_NAMES = (
    *("http_proxy", "https_proxy", "no_proxy", "all_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("APPTAINER_CONFIGDIR", "APPTAINER_AUTHFILE", "APPTAINER_DOCKER_USERNAME", "APPTAINER_DOCKER_PASSWORD"),
    *("SINGULARITY_DOCKER_USERNAME", "SINGULARITY_DOCKER_PASSWORD", "DOCKER_CONFIG"),
)


def _build_environment(environ: Mapping[str, str], scratch: Path, epoch: int | None) -> dict[str, str]:
    env = start_line.host_environment(environ)
    env.update({name: environ[name] for name in _PULL_NAMES if name in environ})
    env.update(
        TMPDIR=str(scratch),
        APPTAINER_TMPDIR=str(scratch),
        # Several builders sharing a cache lose each other's files (seen: 3 of 28 failed).
        APPTAINER_CACHEDIR=str(scratch / "cache"),
        # From 1.5 on: owners as without it, so that versions agree, and no PRoot, whose
        # first two releases left corrupt SIFs (apptainer issues 3486, 3560, 3577).
        APPTAINER_IGNORE_PROOT="1",
    )
    if epoch is not None:
        env["SOURCE_DATE_EPOCH"] = str(epoch)
    return env


def _check_labels(file: Path, expected: Mapping[str, str]) -> None:
    found = sif.labels(file, sif.read_header(file))
    for name, value in expected.items():
        if found.get(name) != value:
            raise ImageMismatch(
                "what apptainer built is not what it was asked for",
                why=f"its label {name} says {found.get(name) or 'nothing'}, not {value}",
                hint="look for `hpcenv.` labels in the image or definition file, and remove them",
            )


def _facts(file: Path, architecture: str, epoch: int | None, made_by: str) -> dict[str, Any]:
    header = sif.read_header(file)
    if header.architecture != architecture:
        raise ImageMismatch(
            f"what apptainer built is an image for {header.architecture}",
            why=f"asked for {architecture}",
            hint=f"build it on a {architecture} machine",
        )
    return {
        "path": file,
        "architecture": header.architecture,
        "epoch": epoch,
        "apptainer_version": made_by,
        "builder": "root" if os.geteuid() == 0 else "unprivileged",
        "arguments": _MKSQUASHFS,
    }


@contextlib.contextmanager
def _scratch(parent: Path, destination: Path, on_line: Callable[[str], None]) -> Iterator[Path]:
    """Give a folder that disappears afterwards; after a failure the destination does, too."""
    path: Path | None = None
    done = False
    try:
        path = Path(tempfile.mkdtemp(prefix="hpcenv-build-", dir=parent))
        yield path
        done = True
    except OSError as error:
        raise FileUnusable(
            f"`{destination}` cannot be built",
            why=f"{error.strerror or error}: {error.filename or parent}",
            hint="check that the folders can be written to, have space, and that your quota is not used up",
        ) from error
    finally:
        if not done:
            with contextlib.suppress(OSError):
                destination.unlink()
        if path is not None:
            _remove_tree(path)
            if path.exists():
                on_line(f"hpcenv: {path} could not be removed completely")


def _remove_tree(path: Path) -> None:
    """Remove a tree that may hold directories without permissions, as images do."""
    for folder, names, _ in os.walk(path):
        for name in names:
            child = os.path.join(folder, name)
            if not os.path.islink(child):
                with contextlib.suppress(OSError):
                    os.chmod(child, 0o700)
    shutil.rmtree(path, ignore_errors=True)
