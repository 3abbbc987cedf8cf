"""Verify a bundle: check its checksums, and check that its lockfile, its code and its image belong together.

Runs on: LOGIN NODE, or any computer. The check needs no Slurm, no container runtime and no GPU, and executes no code
from the bundle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from hpcenv.errors import BundleInvalid, HpcenvError
from hpcenv.progress import OnEvent, ignore
from hpcenv.project import stale
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.workspace import parse_lockfile
from hpcenv.records.code_listing import LINK, Listing, digest_of
from hpcenv.records.codec import decode_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import Result
from hpcenv.reproduction.bundle.archive import SUMS, Archive, counted
from hpcenv.reproduction.bundle.make import ABOUT, IMAGE, RECORD, About
from hpcenv.reproduction.bundle.same_record import differences, record_again, repeated
from hpcenv.text import listed

PartResult = Literal[Result, "absent"]

_LONGEST_LOCKFILE = 4 << 20
_LONGEST_RECORD = 64 << 20
_RUN = RunFolder(Path())
_LISTED = 5

_Record = TypeVar("_Record")


@dataclass(frozen=True, kw_only=True)
class BundleCheck:
    """The check of one part of a bundle.

    Attributes:
        name: a short name for the check.
        result: the result. `absent` means that the bundle does not have this part, so nothing was compared. `absent` is
            no error.
        detail: a sentence about what was compared.
    """

    name: str
    result: PartResult
    detail: str


@dataclass(frozen=True, kw_only=True)
class VerifiedBundle:
    """What the files of a bundle prove. Only a signature with `ssh-keygen -Y sign` can prove who made the bundle.

    Attributes:
        checks: the checks, in the order in which they were made.
        left_out: path -> why, for files that the bundle names as left out.
    """

    path: Path
    run: str
    fingerprint: str
    checks: tuple[BundleCheck, ...]
    left_out: dict[str, str]

    @property
    def result(self) -> Result:
        """The worst result of all checks. The result `absent` does not count."""
        results = {check.result for check in self.checks}
        return "mismatch" if "mismatch" in results else "unknown" if "unknown" in results else "match"


def verify_bundle(path: Path, *, on_event: OnEvent = ignore) -> VerifiedBundle:
    """Read a bundle and compare its parts with each other.

    Raises:
        FileUnusable: the file cannot be read.
        BundleInvalid: the file is not a bundle, or the checksum of a file in it is wrong.
    """
    with Archive(path) as archive:
        archive.verify(step=counted(on_event, "verify", path.name, archive.size))
        about = _record(archive, About, ABOUT)
        manifest = _record(archive, Manifest, _RUN.manifest.name)
        locked = _lockfile(archive)
        checks = (
            _sums(archive),
            _fingerprint(locked, about),
            *_code(archive, manifest),
            _image(archive, locked),
            *_same_record(archive, about),
        )
    return VerifiedBundle(
        path=path, run=about.run, fingerprint=about.fingerprint, checks=checks, left_out=about.left_out
    )


def _sums(archive: Archive) -> BundleCheck:
    detail = f"{len(archive.sums)} files have the sha256 that {SUMS} lists"
    return BundleCheck(name="sums", result="match", detail=detail)


def _record(archive: Archive, kind: type[_Record], name: str) -> _Record:
    text = archive.read(name, most=_LONGEST_RECORD)
    try:
        return decode_record(kind, text.decode("utf-8"), origin=f"{archive.path.name}/{name}")
    except (HpcenvError, UnicodeDecodeError) as error:
        what = error.what if isinstance(error, HpcenvError) else str(error)
        raise BundleInvalid(f"`{name}` in `{archive.path.name}` cannot be read", why=what) from error


def _lockfile(archive: Archive) -> Lockfile:
    name = _RUN.lockfile.name
    try:
        return parse_lockfile(archive.read(name, most=_LONGEST_LOCKFILE), Path(archive.path.name) / name)
    except BundleInvalid:
        raise
    except HpcenvError as error:
        why = "\n".join(filter(None, (error.what, error.why)))
        raise BundleInvalid(f"the lockfile in `{archive.path.name}` cannot be read", why=why) from error


def _fingerprint(locked: Lockfile, about: About) -> BundleCheck:
    edited = stale.edited_content(locked)
    if edited is not None:
        detail = f"it says {locked.fingerprint}, its content has {edited}: it was edited"
        return BundleCheck(name="lockfile", result="mismatch", detail=detail)
    if locked.fingerprint != about.fingerprint:
        detail = f"it is {locked.fingerprint}, the bundle was made for {about.fingerprint}"
        return BundleCheck(name="lockfile", result="mismatch", detail=detail)
    return BundleCheck(name="lockfile", result="match", detail=f"its content has the fingerprint {locked.fingerprint}")


def _code(archive: Archive, manifest: Manifest) -> Iterator[BundleCheck]:
    source = manifest.source
    if source is None:
        yield BundleCheck(name="code", result="unknown", detail="the run kept no copy of its code")
        return
    listing = _record(archive, Listing, _RUN.listing.name)
    if source.digest and digest_of(listing.files) != source.digest:
        detail = f"the digest of the list of its files is not {source.digest[:16]}..., which the nodes compared"
        yield BundleCheck(name="code", result="mismatch", detail=detail)
        return
    found = {**archive.sums, **{name: LINK + target for name, target in archive.links.items()}}
    other = sorted(path for path, content in listing.files.items() if path in found and found[path] != content)
    missing = sorted(path for path in listing.files if path not in found)
    if other:
        detail = f"not what the nodes compared: {listed(other, _LISTED)}"
        yield BundleCheck(name="code", result="mismatch", detail=detail)
    elif missing:
        yield BundleCheck(name="code", result="unknown", detail=f"not in the bundle: {listed(missing, _LISTED)}")
    elif not source.digest:
        yield BundleCheck(name="code", result="unknown", detail="the run recorded no digest of its code")
    else:
        detail = f"{len(listing.files)} files, those that every node compared (digest {source.digest[:16]}...)"
        yield BundleCheck(name="code", result="match", detail=detail)


def _same_record(archive: Archive, about: About) -> Iterator[BundleCheck]:
    """Yield the checks that compare record.json, and the files that repeat its values, with the other files."""
    again = record_again(archive, [IMAGE, RECORD])
    if isinstance(again, str):
        yield BundleCheck(name="record", result="unknown", detail=f"it cannot be made again: {again}")
        return
    other, unmade = differences(archive.read(RECORD, most=_LONGEST_RECORD), again)
    other = (*other, *([] if about.run == again.run else [f"run in {ABOUT}"]))
    if other:
        detail = f"{RECORD} does not have the values of the run's files: {listed(other, _LISTED)}"
        yield BundleCheck(name="record", result="mismatch", detail=detail)
    elif unmade:
        detail = f"{unmade} metrics of {RECORD} are from files of the training, which no bundle has; the rest matches"
        yield BundleCheck(name="record", result="absent", detail=detail)
    else:
        yield BundleCheck(name="record", result="match", detail=f"{RECORD} was made again from the files of the run")
    for name in ("README.md", "CITATION.cff"):
        values = repeated(archive, name, again)
        if values:
            yield BundleCheck(name=name, result="mismatch", detail=f"not of this run: {listed(values, _LISTED)}")


def _image(archive: Archive, locked: Lockfile) -> BundleCheck:
    container = locked.container
    if container is None:
        return BundleCheck(name="image", result="absent", detail="no image: the environment is the host's own")
    if IMAGE not in archive.sums:
        named = container.manifest_digest or f"sha256:{container.sif.sha256}"
        return BundleCheck(name="image", result="absent", detail=f"the lockfile names {named}")
    if archive.sums[IMAGE] != container.sif.sha256:
        detail = f"its sha256 is {archive.sums[IMAGE]}, the lockfile has {container.sif.sha256}"
        return BundleCheck(name="image", result="mismatch", detail=detail)
    return BundleCheck(name="image", result="match", detail="its sha256 is the locked one")
