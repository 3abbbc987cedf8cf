"""Collect the parts of a run for its bundle: records, measured values and the copy of the code, without credentials.

Runs on: LOGIN NODE. An unpacked bundle has the file names of a run folder, so `hpcenv compare`, `report` and
`reproduce` can read it.

A bundle does not contain hpcenv's own code, samples, checkpoints, home folders of the ranks, and secrets. use.json has
a summary of the samples. The output of the job is in the bundle only with `--with-log`. A file of the code is in the
bundle if git tracks the file or `--include` names it. Any other file of the code is left out if git ignores it, or if
it looks like a credential.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcenv.errors import FileUnusable, RecordInvalid, UsageError
from hpcenv.records.code_listing import LINK, Listing, Untracked, content_of, is_importable, walk
from hpcenv.records.codec import encode_record
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record, read_file
from hpcenv.records.manifest import Manifest
from hpcenv.records.request import RequestRecord
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.variables import looks_like_credential, recorded_value
from hpcenv.reproduction.bundle.archive import BundleMember
from hpcenv.runs.use import report_use
from hpcenv.submission import credentials

# Shorter values are not searched, because they may be in files by chance.
_SHORTEST_CREDENTIAL = 8
_LONGEST_RECORD = 64 << 20


@dataclass(frozen=True, kw_only=True)
class _LeftOut:
    """A file that is left out, and why."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Content:
    """The members of a bundle that come from the run folder.

    Attributes:
        left_out: path in the run folder -> why it is not in the bundle.
    """

    members: tuple[BundleMember, ...]
    left_out: dict[str, str] = field(default_factory=dict)


def collect(run: RunFolder, *, log: bool = False) -> Content:
    """Return the members of a run's bundle that come from the run folder.

    Args:
        run: the run folder.
        log: whether job.log is included. The log may contain anything that the script prints: names of users, paths,
            credentials.

    Raises:
        RecordInvalid: the manifest or the list of the copied code cannot be read.
        FileUnusable: a file cannot be read.
        UsageError: one of the files contains the value of a credential.
    """
    manifest = load_record(Manifest, run.manifest)
    try:
        found = [*_records(run, manifest), *_code(run, manifest)]
        members = [one for one in found if isinstance(one, BundleMember)]
        left_out = {one.name: one.why for one in found if isinstance(one, _LeftOut)}
        private = _private_in_diff(members, run, left_out)
        if private:
            left_out[run.source_diff.name] = f"it has the content of {private}"
            members = [member for member in members if member.name != run.source_diff.name]
        if log and run.log.is_file():
            members.append(BundleMember(name=run.log.name, source=run.log))
        elif run.log.is_file():
            left_out[run.log.name] = "logs are left out; --with-log takes it"
        if run.checkpoints.is_dir():
            left_out[run.checkpoints.name] = "checkpoints are left out"
        _refuse_credentials(members, manifest)
    except OSError as error:
        raise FileUnusable(f"cannot read `{error.filename}`", why=error.strerror) from error
    return Content(members=tuple(members), left_out=left_out)


# -- records ------------------------------------------------------------------------------


def _records(run: RunFolder, manifest: Manifest) -> Iterator[BundleMember | _LeftOut]:
    yield _member(run.manifest.name, _clean_manifest(manifest))
    if run.request.is_file():
        yield _member(run.request.name, _clean_request(load_record(RequestRecord, run.request)))
    for path in (run.lockfile, run.submission, run.script, run.listing_after, run.source_diff):
        if _is_regular(path):
            yield BundleMember(name=path.name, source=path)
    yield from _of_attempt(run, "")
    if run.attempts.is_dir():
        for folder in sorted(run.attempts.iterdir(), key=lambda path: path.name):
            if folder.is_dir() and not folder.is_symlink():
                yield from _of_attempt(RunFolder(folder), f"{run.attempts.name}/{folder.name}/")
    for folder in (run.metrics, run.determinism, run.trace):
        yield from _files_below(run.path, folder)
    if (use := report_use(run, manifest)) is not None:
        yield _member(run.use.name, use)
    if run.samples.is_dir():
        yield _LeftOut(name=run.samples.name, why=f"{run.use.name} says what the samples show")


def _of_attempt(run: RunFolder, prefix: str) -> Iterator[BundleMember | _LeftOut]:
    """Yield the records of one attempt. The records of the newest attempt are in the run folder itself."""
    for path in (run.verdict, run.started, run.finished):
        if _is_regular(path):
            yield BundleMember(name=f"{prefix}{path.name}", source=path)
    if run.facts.is_dir():
        for path in sorted(run.facts.glob("*.json")):
            name = f"{prefix}{run.facts.name}/{path.name}"
            try:
                yield _member(name, _clean_facts(load_record(Facts, path)))
            except RecordInvalid as error:
                yield _LeftOut(name=name, why=error.what)
    for folder in (run.exits, run.preflight):
        for member in _files_below(run.path, folder):
            yield replace(member, name=f"{prefix}{member.name}")


def _files_below(folder: Path, part: Path) -> Iterator[BundleMember]:
    if not part.is_dir() or part.is_symlink():
        return
    for path, entry in walk(folder, part.name):
        if entry.is_file(follow_symlinks=False):
            yield BundleMember(name=path, source=folder / path)


def _member(name: str, record: object) -> BundleMember:
    return BundleMember(name=name, source=encode_record(record).encode())


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


# -- without credentials ------------------------------------------------------------------


def _clean_manifest(manifest: Manifest) -> Manifest:
    settings = tuple(replace(one, value=recorded_value(one.name, one.value)) for one in manifest.settings)
    return replace(manifest, settings=settings, secret_values="")


def _clean_request(request: RequestRecord) -> RequestRecord:
    given = request.options.get("env")
    if not isinstance(given, dict):
        return request
    env: dict[str, str | None] = {
        name: value if value is None else recorded_value(name, value) for name, value in given.items()
    }
    return replace(request, options={**request.options, "env": env})


def _clean_facts(facts: Facts) -> Facts:
    values = {
        name: recorded_value(name.removeprefix("env."), value)
        if name.startswith("env.") and isinstance(value, str)
        else value
        for name, value in facts.values.items()
    }
    return replace(facts, values=values)


def _refuse_credentials(members: list[BundleMember], manifest: Manifest) -> None:
    """Refuse a bundle with a file that contains the value of a credential of this run.

    Raises:
        UsageError: a file contains such a value. The message names file and variable, but never the value.
    """
    values = {
        setting.value.encode(): setting.name
        for setting in manifest.settings
        if looks_like_credential(setting.name) and len(setting.value) >= _SHORTEST_CREDENTIAL
    }
    if not values:
        return
    for member in members:
        content = read_file(member.source, most=_LONGEST_RECORD) if isinstance(member.source, Path) else member.source
        for value, name in values.items():
            if value in content:
                raise UsageError(
                    f"`{member.name}` holds the value of {name}, which looks like a credential",
                    why="a bundle is for other people",
                    hint=f"give {name} with --secret in the next run, or remove the value from the file",
                )


# -- code ---------------------------------------------------------------------------------


def _code(run: RunFolder, manifest: Manifest) -> Iterator[BundleMember | _LeftOut]:
    """Yield the copied code's files as they were at submission. Files that have changed since then are left out."""
    source = manifest.source
    if source is None:
        return
    holder = RunFolder(Path(source.shared)) if source.shared else run
    listing = load_record(Listing, holder.listing)
    yield BundleMember(name=run.listing.name, source=holder.listing)
    for path, content in sorted(listing.files.items()):
        place = holder.path / path
        if content.startswith(LINK):
            yield BundleMember(name=path, link=content.removeprefix(LINK))
        elif content_of(str(place)) != content:
            yield _LeftOut(name=path, why="it was changed after the submission")
        elif why := _private(listing, path, place):
            yield _LeftOut(name=path, why=why)
        else:
            yield BundleMember(name=path, source=place, executable=bool(place.stat().st_mode & 0o100))
    for path in listing.live:
        why = _LINKED.get((listing.untracked or {}).get(path, "other"), "the copy only links to it")
        yield _LeftOut(name=path, why=why)


def _private_in_diff(members: Sequence[BundleMember], run: RunFolder, left_out: Collection[str]) -> str | None:
    """Return a left-out file whose content is in the recorded difference from the commit, for example a new script."""
    if not any(member.name == run.source_diff.name for member in members):
        return None
    diff = read_file(run.source_diff, most=_LONGEST_RECORD)
    return next((path for path in left_out if b"+++ b/" + os.fsencode(path.partition("/")[2]) in diff), None)


_LINKED: dict[Untracked, str] = {
    "ignored": "git ignores it, and the copy only links to it",
    "credential": "it looks like a credential, and the copy only links to it",
}


def _private(listing: Listing, path: str, place: Path) -> str:
    """Return why a copied file must not be published; empty if it may be published.

    Files that git tracks and files that `--include` names may be published. For other files, the name and the content
    of the file decide. If the listing of the run does not say which files git tracks, name and content decide for all
    files.
    """
    if listing.untracked is not None and listing.untracked.get(path, "include") == "include":
        return ""
    unknown = "" if listing.untracked is not None else "; the run does not say whether git tracks it"
    if not is_importable(path) and credentials.is_named_like_one(path.partition("/")[2]):
        return f"its name is typical of a file with credentials{unknown}"
    line = credentials.line_of(path, read_file(place, most=_LONGEST_RECORD))
    return f"line {line} looks like a credential{unknown}" if line else ""
