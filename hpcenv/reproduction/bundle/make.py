"""Make the bundle of a run: the run's files, its record, and files for a data repository.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote

from hpcenv.errors import FileUnusable, UsageError
from hpcenv.identity.sif import file_sha256
from hpcenv.progress import OnEvent, ignore
from hpcenv.project.workspace import read_lockfile
from hpcenv.records.codec import SCHEMA, encode_record
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction.bundle import citation
from hpcenv.reproduction.bundle.archive import BundleMember, counted, write_archive
from hpcenv.reproduction.bundle.content import Content, collect
from hpcenv.reproduction.run_record import RunRecord, read_record
from hpcenv.runs.entries import Sweep
from hpcenv.runs.find import find_submitted
from hpcenv.submission import credentials
from hpcenv.text import Shown
from hpcenv.version import VERSION

RECORD = "record.json"
ABOUT = "bundle.json"
IMAGE = "image.sif"
SUFFIX = ".hpcenv.zip"


@dataclass(frozen=True, kw_only=True)
class About:
    """A description of a bundle (`bundle.json`).

    Attributes:
        made_by: the version of hpcenv that made the bundle.
        fingerprint: the lockfile's fingerprint.
        image: name of the SIF in the bundle; empty without a SIF.
        left_out: path in the run folder -> why the file is left out.
    """

    schema: int
    made_by: str
    run: str
    fingerprint: str
    image: str = ""
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, repr=False)
class MadeBundle(Shown):
    """A bundle that was written.

    Attributes:
        sha256: the sha256 of the bundle file.
        size: size of the file in bytes.
        files: the number of files and links in the bundle.
        left_out: path in the run folder -> why the file is left out.
        notes: what to check before the bundle is published.
    """

    path: Path
    sha256: str
    size: int
    files: int
    left_out: dict[str, str]
    notes: tuple[str, ...] = ()


def bundle(
    run: str | Path,
    output: str | Path | None = None,
    *,
    with_sif: str | Path | None = None,
    with_log: bool = False,
    author: Sequence[str] = (),
    project: str | Path = ".",
    runs_dir: str | None = None,
    on_event: OnEvent = ignore,
) -> MadeBundle:
    """Make one archive of a run with its lockfile, code, command, records and measured values: `hpcenv bundle`.

    Args:
        run: a run folder, name or job id.
        output: the file to write; None for NAME.hpcenv.zip in `project`.
        with_sif: the SIF to include; it must be the locked SIF.
        with_log: whether job.log is included. Read the log first, because it may contain credentials.
        author: names for CITATION.cff, each as `Family, Given`.
        project: a folder of the project whose runs are searched.
        runs_dir: folder of runs; None for the project's folder of runs.
        on_event: function that is called with each progress event.

    Raises:
        RunNotFound: there is no run with this name.
        UsageError: `run` is a sweep, or a file contains the value of a credential.
        HpcenvError: as for `make`.
    """
    entry = find_submitted(Path(project), str(run), runs=runs_dir)
    if isinstance(entry, Sweep):
        raise UsageError(
            f"`{run}` is a sweep", why="a bundle has one run", hint=f"name one of its runs: {quote(f'{run}/0000')}"
        )
    folder = entry.folder.path
    target = Path(output) if output else Path(project) / f"{folder.name}{SUFFIX}"
    sif = None if with_sif is None else Path(with_sif)
    return make(folder, target, sif=sif, log=with_log, authors=author, on_event=on_event)


def make(
    folder: Path,
    target: Path,
    *,
    sif: Path | None = None,
    log: bool = False,
    authors: Sequence[str] = (),
    on_event: OnEvent = ignore,
) -> MadeBundle:
    """Write the bundle of a run.

    Args:
        folder: the run folder.
        target: the file to write; no file with this path may exist.
        sif: the SIF to include; its sha256 must be the locked sha256.
        log: whether job.log is included.
        authors: names for CITATION.cff, each as `Family, Given` or in another form.
        on_event: function that is called with each progress event.

    Raises:
        RecordInvalid: the records of the run cannot be read.
        FileUnusable: a file cannot be read, the SIF is not the locked SIF, or the archive cannot be written.
        UsageError: a file contains the value of a credential.
        WouldOverwrite: `target` exists.
    """
    run = RunFolder(folder)
    if sif is not None:
        _require_locked(sif, run)
    record = read_record(folder)
    content = _without_overlay(collect(run, log=log), run)
    about = About(
        schema=SCHEMA,
        made_by=VERSION,
        run=record.run,
        fingerprint="" if record.lock is None else record.lock.fingerprint,
        image="" if sif is None else IMAGE,
        left_out=content.left_out,
    )
    members = [*content.members, *_described(record, about, authors)]
    if sif is not None:
        members.append(BundleMember(name=IMAGE, source=sif, compressed=False))
    step = counted(on_event, "pack", target.name, sum(_size(member) for member in members))
    digest = write_archive(target, _folder_name(record.run), members, step=step)
    return MadeBundle(
        path=target,
        sha256=digest,
        size=target.stat().st_size,
        files=len(members) + 1,
        left_out=content.left_out,
        notes=_notes(record),
    )


def _notes(record: RunRecord) -> tuple[str, ...]:
    notes = []
    if record.outcome != "completed":
        notes.append(f"the run is not completed ({record.outcome}): the bundle has no result to compare with")
    if names := credentials.arguments(record.args):
        what = f"{', '.join(names)}: an argument of the script that looks like a credential"
        notes.append(f"{what}; its value is in manifest.json, request.json and record.json of the bundle")
    return tuple(notes)


def _folder_name(run: str) -> str:
    """Return the name of the folder in the archive. The archive's file name does not change it, so bytes stay equal."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", run).lstrip(".-")[:100] or "run"


def _without_overlay(content: Content, run: RunFolder) -> Content:
    """Add to `left_out` that the overlay is not included, because the lockfile has only its digest."""
    container = read_lockfile(run.lockfile).container
    if container is None or container.overlay is None:
        return content
    why = f"not included; its digest is {container.overlay.digest}: give the file to others as well"
    return replace(content, left_out={**content.left_out, "overlay": why})


def _require_locked(sif: Path, run: RunFolder) -> None:
    """Refuse a file that is not the image of the run."""
    locked = read_lockfile(run.lockfile).container
    if locked is None:
        raise FileUnusable(
            f"`{sif}` does not belong to this run", why="its environment is the host's, without an image"
        )
    digest = file_sha256(sif)
    if digest != locked.sif.sha256:
        why = f"its sha256 is {digest}, the lockfile has {locked.sif.sha256}"
        raise FileUnusable(f"`{sif}` is not the locked image", why=why)


def _described(record: RunRecord, about: About, authors: Sequence[str]) -> list[BundleMember]:
    """Return the members that are made from the record."""
    return [
        BundleMember(name=RECORD, source=encode_record(record).encode()),
        BundleMember(name=ABOUT, source=encode_record(about).encode()),
        BundleMember(name="CITATION.cff", source=citation.citation(record, tuple(authors)).encode()),
        BundleMember(name="README.md", source=_readme(record, about).encode()),
    ]


def _readme(record: RunRecord, about: About) -> str:
    shape = record.shape
    image = f"The image is in it: {about.image}." if about.image else "The image is fetched by its digest."
    return f"""# Run {record.run}

Made with hpcenv {about.made_by}: environment `{about.fingerprint}`, code, command and results of one training run on
{shape.nodes} nodes with {shape.world_size} ranks. {image}

Check that nothing was changed, and run it again:

    hpcenv bundle verify FILE
    hpcenv reproduce FILE

Without hpcenv: unpack the file, then `sha256sum -c SHA256SUMS`. `lock.toml` names the image by its digest and every
Python package by its hash; `source/` is the code; `record.json` has the command, the nodes and the results.
"""


def _size(member: BundleMember) -> int:
    return len(member.source) if isinstance(member.source, bytes) else member.source.stat().st_size
