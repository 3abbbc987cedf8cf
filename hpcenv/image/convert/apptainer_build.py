"""Build SIFs with Apptainer from definition files, and from images if the host has no suitable squashfs-tools.

Runs on: LOGIN NODE.

`build_layout` converts an image whose verified blobs are on disk; it downloads nothing. The SIF depends on the image,
the labels, the epoch, and the versions of Apptainer and mksquashfs. The SIF does not depend on the user, the machine or
the time, with one exception: only root can preserve owners, special files and capabilities.

`build_definition` builds a user's definition file, and returns a record of all sources. It refuses a source that can
change later, such as a tag, unless the caller allows floating sources. hpcenv does not control what %post does.

Both functions write the SIF to a path that the caller chooses. The caller publishes the SIF later. Facts marked "seen"
were observed with Apptainer 1.4.5 (Debian 1.4.5-2, unprivileged, user namespaces) on 2026-11-20.
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

from hpcenv import process
from hpcenv.container import apptainer as start_line
from hpcenv.container import runtime
from hpcenv.errors import FileUnusable, ImageMismatch, SpecError, ToolFailed, ToolMissing
from hpcenv.identity import sif
from hpcenv.image.content.tree import TreeEntry
from hpcenv.image.convert import definition as definition_file
from hpcenv.image.convert import temporary_folder
from hpcenv.image.convert.runtime_files import RuntimeFiles, followed_links
from hpcenv.image.store.sif_record import Material

__all__ = [
    "CUDA_BYTES",
    "Built",
    "BuiltDefinition",
    "build_definition",
    "build_layout",
    "definition_digest",
    "materials",
    "space_needed",
    "write_layout",
]


def _ignore_line(_line: str) -> None:
    """Ignore a line of output."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """A finished SIF, not yet published, and how it was made.

    Attributes:
        epoch: SOURCE_DATE_EPOCH of the build; None if the build used the clock.
        builder: `root` or `unprivileged`. The bytes of the partition depend on `builder`.
        arguments: the arguments of mksquashfs.
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
        definition: the text that was built, with digests instead of tags.
        definition_digest: `sha256:HEX` of the user's text.
        materials: the sources and the copied files of the definition file, in order, then the bind mounts.
    """

    definition: str
    definition_digest: str
    materials: tuple[Material, ...]


# zstd level 3 makes the squashfs step 12 times faster than the default gzip -9, with 2 % more
# bytes, and reading the result is faster (measured for a 1.2 GB torch image). The option --mksquashfs-args needs
# Apptainer 1.4.0 (2025-03).
_MKSQUASHFS = ("-comp", "zstd", "-Xcompression-level", "3")
_OLDEST = (1, 4, 0)


# Temporary bytes of a build that installs a CUDA build of torch with pip: its files in two stages, its wheels and
# its squashfs. 16.7 GB were seen for torch 2.14.1 with CUDA 13.0 on 2026-11-23.
CUDA_BYTES = 20 << 30


def space_needed(compressed: int, unpacked: int | None = None) -> int:
    """Return how many bytes of temporary space Apptainer needs to convert an image.

    Apptainer needs space for the unpacked files, for their squashfs, and for its own copy of the layers.

    Args:
        compressed: size of all stored layers, in bytes.
        unpacked: size of all files, in bytes. If `unpacked` is None, four times `compressed` is assumed (the factor of
            a torch image of 367 MB is 3.2; text has a higher factor).
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
    entries: Iterable[TreeEntry],
    destination: Path,
    temporary: Path,
    on_line: Callable[[str], None] = _ignore_line,
    environ: Mapping[str, str],
    timeout: float = 7200.0,
) -> Built:
    """Convert an image whose blobs are on disk.

    The scripts with the image's environment and entry point are replaced by the scripts in `files`, because Apptainer's
    scripts do not use all values literally.

    Args:
        apptainer: path of the program.
        manifest_digest: the digest of the image's manifest (OCI or docker schema 2).
        blobs: the file of each digest of the image (manifest, configuration, layers), verified by the caller.
        architecture: the required architecture, by its OCI name.
        epoch: SOURCE_DATE_EPOCH in seconds. This time must not be earlier than the newest file of the image. Otherwise
            Python would compile the image's files again at each start (`apptainer.source_date_epoch`).
        labels: labels that are added to the image's labels; they must contain `hpcenv.source.manifest-digest`.
        files: the result of `runtime_files` for the image.
        entries: the image's merged tree. Apptainer follows certain links of an image and writes to
            files of the host; images with such links are refused.
        destination: the SIF's path. An existing file is replaced. After a failure, no file is at this path.
        temporary: where to unpack, from `temporary_folder.choose_temporary`.
        on_line: called with each line of Apptainer's output.
        environ: the caller's environment.
        timeout: seconds.

    Raises:
        ToolMissing, ToolFailed: Apptainer is missing, too old, or failed; the hint says what to do.
        ImageMismatch: Apptainer's result is wrong, or the image has links that Apptainer would follow.
        FileUnusable: a file cannot be written.
        SpecError: a label cannot be written into a definition file.
    """
    _refuse_links(files, entries)
    made_by = _supported_version(apptainer, environ)
    with _scratch(temporary, destination, on_line) as scratch:
        write_layout(scratch / "layout", manifest_digest, blobs)
        # Use a relative path, because Apptainer stores the path in the SIF. The SIF must not contain our folder's name.
        text = f"Bootstrap: oci\nFrom: layout@{manifest_digest}\n\n" + _script_section(files, scratch)
        text += _label_section({"org.label-schema.build-date": _rfc3339(epoch), **labels})
        job = _ApptainerBuild(apptainer, destination, text, scratch, architecture, epoch, environ, on_line, timeout)
        _run_build(job, cwd=scratch)
        _check_labels(destination, labels)
        return Built(**_facts(destination, architecture, epoch, made_by))


def _refuse_links(files: RuntimeFiles, entries: Iterable[TreeEntry]) -> None:
    links = followed_links(files, entries)
    if links:
        raise ImageMismatch(
            "apptainer must not convert this image",
            why=f"it would follow the image's link `/{links[0]}` and write to a file of this machine",
            hint="convert it on a machine with squashfs-tools 4.6 or newer: hpcenv then follows no links",
        )


def write_layout(folder: Path, manifest_digest: str, blobs: Mapping[str, Path]) -> None:
    """Write an OCI layout whose blobs are symbolic links; Apptainer also accepts docker's manifests in a layout (seen).

    Args:
        folder: the layout; it must not exist.
        manifest_digest: the digest of the image's manifest.
        blobs: the file of each digest of the image.

    Raises:
        OSError: a file cannot be written.
    """
    blob_folder = folder / "blobs" / "sha256"
    blob_folder.mkdir(parents=True)
    for digest, blob in blobs.items():
        os.symlink(os.path.abspath(blob), blob_folder / digest.partition(":")[2])
    body = blobs[manifest_digest].read_bytes()
    media = json.loads(body).get("mediaType") or "application/vnd.oci.image.manifest.v1+json"
    descriptor = {"mediaType": media, "digest": manifest_digest, "size": len(body)}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [descriptor]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')


_REPLACED = (b".singularity.d/env/10-docker2singularity.sh", b".singularity.d/runscript")


def _script_section(files: RuntimeFiles, scratch: Path) -> str:
    """Return a %files section with hpcenv's scripts; Apptainer copies them over its own scripts (seen)."""
    lines = ["%files"]
    for entry, content in files.members:
        if entry.path in _REPLACED:
            target = entry.path.decode()
            name = f"scripts/{Path(target).name}"
            path = scratch / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            path.chmod(entry.mode)
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
    binds: Sequence[start_line.BindMount] = (),
    epoch: int | None = None,
    labels: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] = _ignore_line,
    environ: Mapping[str, str],
    timeout: float = 7200.0,
) -> BuiltDefinition:
    """Build a user's definition file whose sources are pinned (named by a digest).

    If the caller is not root, %post runs as root of a user namespace. The namespace has the user's range of ids from
    /etc/subuid. If the user has no range, the namespace has only one id (seen). In both cases, the build needs no
    setting of hpcenv.

    Args:
        apptainer: path of the program.
        text: the definition file.
        folder: the folder that relative paths in the file start from; Apptainer runs in this folder.
        architecture: the required architecture, by its OCI name.
        destination: the SIF's path. An existing file is replaced. After a failure, no file is at this path.
        temporary: where to unpack, from `temporary_folder.choose_temporary`.
        digests: the resolved digest of each image that is named by a tag. The keys are `DefinitionSource.origin`.
        allow_floating: whether to accept sources that can change: tags that were not resolved, package servers of
            distributions.
        plain_http: whether the registries in the file use http.
        binds: folders of the host that %post can use; the targets must exist in the source image.
        epoch: SOURCE_DATE_EPOCH. Set `epoch` only if the definition file has no %post, because otherwise the files that
            %post writes would get an older time. If `epoch` is None, the build uses the clock.
        labels: more labels, in addition to `hpcenv.definition.digest`.
        on_line: called with each line of Apptainer's output.
        environ: the caller's environment.
        timeout: seconds.

    Raises:
        SpecError: the file names no source, or a source that can change; or a label cannot be written.
        ToolMissing, ToolFailed, ImageUnavailable: Apptainer is missing, too old, or failed.
        ImageMismatch: Apptainer's result is wrong.
        FileUnusable: a file cannot be read or written.
    """
    pinned = _pinned(text, digests or {}, allow_floating=allow_floating)
    used = (*materials(pinned, folder), *map(_bound, binds))
    identity = definition_digest(text)
    added = {"hpcenv.definition.digest": identity, **(labels or {})}
    if epoch is not None:
        added["org.label-schema.build-date"] = _rfc3339(epoch)
    made_by = _supported_version(apptainer, environ)
    with _scratch(temporary, destination, on_line) as scratch:
        recipe = f"{pinned.rstrip()}\n\n{_label_section(added)}"
        options = [*(["--no-https"] if plain_http else []), *_mounts(binds)]
        job = _ApptainerBuild(apptainer, destination, recipe, scratch, architecture, epoch, environ, on_line, timeout)
        _run_build(job, cwd=folder, options=options)
        _check_labels(destination, added)
        facts = _facts(destination, architecture, epoch, made_by)
        return BuiltDefinition(**facts, definition=pinned, definition_digest=identity, materials=used)


def _pinned(text: str, digests: Mapping[str, str], *, allow_floating: bool) -> str:
    """Return the file with digests instead of tags; refuse sources that can change later."""
    pinned = definition_file.pin(text, digests)
    if not allow_floating:
        _refuse_floating(definition_file.sources(pinned))
    return pinned


def _mounts(binds: Sequence[start_line.BindMount]) -> list[str]:
    return [word for bind in binds for word in ("--mount", start_line.mount(bind))]


def definition_digest(text: str) -> str:
    """Return the identity of a definition file: `sha256:HEX` of its bytes."""
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def materials(text: str, folder: Path) -> tuple[Material, ...]:
    """Return the inputs of a definition file, with the digests that its files have now.

    Args:
        text: the definition file, preferably with digests instead of tags.
        folder: the folder that its relative paths start from.

    Raises:
        SpecError: the file names no source.
        FileUnusable: a file cannot be read.
    """
    return (*_sources(definition_file.sources(text), folder), *_copied(text, folder))


def _bound(bind: start_line.BindMount) -> Material:
    mode = "ro" if bind.read_only else "rw"
    return Material(what="bind", name=f"{bind.source}:{bind.target}:{mode}", digest=None)


def _refuse_floating(found: Sequence[definition_file.DefinitionSource]) -> None:
    for source in found:
        if not source.fixed:
            raise SpecError(
                f"line {source.line} of the definition file names a source that can change",
                why=f"`{source.origin or source.bootstrap}` ({source.bootstrap}) is not pinned by a digest",
                hint="write IMAGE@sha256:DIGEST, or accept floating sources",
            )


def _sources(found: Sequence[definition_file.DefinitionSource], folder: Path) -> Iterator[Material]:
    for source in found:
        digest = source.digest
        if source.kind == "file" and "{{" not in source.origin:
            digest = _content_digest(folder / source.origin)
        yield Material(what="source", name=f"{source.bootstrap}:{source.origin}", digest=digest)


def _copied(text: str, folder: Path) -> Iterator[Material]:
    for copy in definition_file.copies(text):
        yield Material(what="file", name=copy.path, digest=_content_digest(folder / copy.path))


def _content_digest(path: Path) -> str | None:
    """Return the digest of a file, or of a folder's names and contents. The result is None for a pattern."""
    try:
        if path.is_file():
            return "sha256:" + sif.file_sha256(path)
        if not path.is_dir():
            return None
        total = hashlib.sha256()
        for inner in sorted(path.rglob("*"), key=os.fsencode):
            if inner.is_symlink():
                kind, content = "l", os.readlink(inner)
            elif inner.is_file():
                kind, content = "f", sif.file_sha256(inner)
            else:
                kind, content = "d", ""
            total.update(os.fsencode(f"{kind}\0{inner.relative_to(path)}\0{content}\0"))
        return f"sha256:{total.hexdigest()}"
    except OSError as error:
        raise FileUnusable(
            f"`{error.filename or path}` cannot be read",
            why=f"{error.strerror or error}; the definition file uses it",
            hint="check its permissions",
        ) from error


# --- shared by both ------------------------------------------------------------------------

_LABEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# A label's value ends at the line's end, `{{` begins a template, `%` a section, `#` a
# comment. Therefore only names and numbers are allowed.
_LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._:/@+,=~\[\]-]*[A-Za-z0-9\]._-])?")


def _label_section(labels: Mapping[str, str]) -> str:
    """Return a %labels section; Apptainer merges several such sections (seen)."""
    lines = ["%labels"]
    for name, value in sorted(labels.items()):
        if not _LABEL_NAME.fullmatch(name) or not _LABEL_VALUE.fullmatch(value):
            raise SpecError(
                f"the label {name[:100]!r} {value[:200]!r} cannot be written into a definition file",
                why="it has a character with a special meaning in definition files",
            )
        lines.append(f"    {name} {value}")
    return "\n".join(lines) + "\n"


def _rfc3339(epoch: int) -> str:
    return datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _supported_version(apptainer: str, environ: Mapping[str, str]) -> str:
    version = runtime.identify(apptainer, environ).version
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < _OLDEST:
        raise ToolMissing(
            f"apptainer {version} is too old to build images",
            why="hpcenv sets the compression with --mksquashfs-args, an option since 1.4.0",
            hint="load a module with Apptainer 1.4 or newer, or build on another machine",
        )
    return version


class _ApptainerBuild(NamedTuple):
    """One call of `apptainer build`."""

    apptainer: str
    destination: Path
    recipe: str
    scratch: Path
    architecture: str
    epoch: int | None
    environ: Mapping[str, str]
    on_line: Callable[[str], None]
    timeout: float


def _run_build(job: _ApptainerBuild, *, cwd: Path, options: Sequence[str] = ()) -> None:
    written = job.scratch / "image.def"
    written.write_text(job.recipe, encoding="utf-8", errors="surrogateescape")
    # Without --force, %labels cannot replace the build date (seen).
    argv = [job.apptainer, "build", "--force", "--disable-cache", "--arch", job.architecture, *options]
    argv += ["--mksquashfs-args", " ".join(_MKSQUASHFS), os.path.abspath(job.destination), str(written)]
    env = _build_environment(job.environ, job.scratch, job.epoch)
    lines: list[str] = []
    place = f"temporary files are in {temporary_folder.describe(job.scratch.parent)}"
    job.on_line(f"hpcenv: {place}")

    def keep(line: str) -> None:
        lines.append(line)
        del lines[:-100]
        job.on_line(line)

    limit = max(job.timeout, 1.0)
    begin = time.monotonic()
    try:
        # %post inherits the umask. With the umask of the caller, the modes of its files would be different for
        # different callers.
        process.stream(argv, on_line=keep, timeout=limit, env=env, cwd=cwd, umask=0o022)
    except ToolFailed as error:
        status = None if time.monotonic() - begin >= limit else error.status
        raise start_line.explain("\n".join(lines), argv=argv, status=status, place=place) from error
    sif.normalise(job.destination)


# Variables of the host that a pull needs too: proxies, certificates and credentials.
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
        # Builds that share a cache remove each other's files (seen: 3 of 28 builds failed).
        APPTAINER_CACHEDIR=str(scratch / "cache"),
        # Apptainer 1.5 and later: do not use PRoot. Owners are then the same as in older versions, and
        # the first two releases with PRoot made corrupt SIFs (apptainer issues 3486, 3560, 3577).
        APPTAINER_IGNORE_PROOT="1",
    )
    if epoch is not None:
        env["SOURCE_DATE_EPOCH"] = str(epoch)
    return env


def _check_labels(file: Path, expected: Mapping[str, str]) -> None:
    labels = sif.labels(file, sif.read_header(file))
    for name, value in expected.items():
        if labels.get(name) != value:
            raise ImageMismatch(
                "apptainer built a SIF with wrong labels",
                why=f"its label {name} is {labels.get(name) or 'missing'}, not {value}",
                hint="remove labels that begin with `hpcenv.` from the image or definition file",
            )


def _facts(file: Path, architecture: str, epoch: int | None, made_by: str) -> dict[str, Any]:
    header = sif.read_header(file)
    if header.architecture != architecture:
        raise ImageMismatch(
            f"apptainer built an image for {header.architecture}",
            why=f"requested was {architecture}",
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
    """Context manager: a temporary folder. After a failure the destination is removed too."""
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
    """Remove a tree that may contain directories without permissions, as images do."""
    for folder, names, _ in os.walk(path):
        for name in names:
            child = os.path.join(folder, name)
            if not os.path.islink(child):
                with contextlib.suppress(OSError):
                    os.chmod(child, 0o700)
    shutil.rmtree(path, ignore_errors=True)
