"""The proofs of `reproduce --rung 0`: from the files alone, without Slurm, GPU, container or network.

Runs on: LOGIN NODE, or any laptop. A proof has one of three results: `proved`, `differs`, or `unknown` with the reason.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcenv.errors import HpcenvError, RecordInvalid
from hpcenv.image.registry.manifests import chain_id
from hpcenv.judge import decide
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.stale import edited_content
from hpcenv.project.workspace import notes_on, read_lockfile
from hpcenv.records.code_listing import LINK, Listing, content_of, digest_of
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record, open_regular, read_json, sha256_of
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import Verdict
from hpcenv.reproduction.measured import OF_RANKS, Measured

ProofOutcome = Literal["proved", "differs", "unknown"]

# The largest size of copied code that is hashed, in bytes. A larger copy contains more than code.
_MOST_CODE = 4 << 30
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class StatementProof:
    """One statement about a run, and whether the run's files prove the statement.

    Attributes:
        what: the statement.
        result: `proved`, `differs` or `unknown`.
        why: the evidence, or what is missing.
    """

    what: str
    result: ProofOutcome
    why: str


def prove_lockfile(path: Path) -> tuple[StatementProof, ...]:
    """Return what a lockfile proves about itself."""
    what = "the lockfile is complete and was not edited"
    try:
        locked = read_lockfile(path)
    except HpcenvError as error:
        return (StatementProof(what=what, result="differs", why=error.what),)
    found = edited_content(locked)
    if found is not None:
        why = f"it says {locked.fingerprint}, its content is {found}"
        return (StatementProof(what=what, result="differs", why=why), *_image_chain(locked))
    notes = "".join(f"; {note}" for note in notes_on(locked, path))
    return (StatementProof(what=what, result="proved", why=f"{locked.fingerprint}{notes}"), *_image_chain(locked))


def _image_chain(locked: Lockfile) -> Iterator[StatementProof]:
    """Try to prove that the image's layers give the identity of the image."""
    what = "the layers in the lockfile give the identity of the image"
    container = locked.container
    if container is None:
        yield StatementProof(what=what, result="unknown", why="the environment is on a host, without an image")
    elif not container.layers or container.rootfs_chain_id is None:
        yield StatementProof(what=what, result="unknown", why="the lockfile is for a SIF without layers")
    else:
        found = chain_id([layer.diff_id for layer in container.layers])
        same = found == container.rootfs_chain_id
        why = f"ChainID {found[:19]}..." + ("" if same else f", the lockfile says {container.rootfs_chain_id[:19]}...")
        yield StatementProof(what=what, result="proved" if same else "differs", why=why)


def prove_run(run: RunFolder, measured: Measured) -> tuple[StatementProof, ...]:
    """Return what the folder of a run proves about its environment, code, verdict and metrics."""
    try:
        manifest = load_record(Manifest, run.manifest)
    except RecordInvalid as error:
        return (StatementProof(what="the manifest of the run can be read", result="differs", why=error.what),)
    return (
        *prove_lockfile(run.lockfile),
        _fits_manifest(run, manifest),
        _code(run, manifest),
        _verdict(run, manifest),
        _metrics(manifest, measured),
    )


def _fits_manifest(run: RunFolder, manifest: Manifest) -> StatementProof:
    """Try to prove that the manifest requires the values of the lockfile from the nodes."""
    what = "the manifest has the environment of the lockfile"
    try:
        locked = read_lockfile(run.lockfile)
    except HpcenvError as error:
        return StatementProof(what=what, result="unknown", why=error.what)
    expected = {one.field: one.value for one in manifest.expectations if one.rule == "equal"}
    wrong = sorted(name for name, value in locked.facts.items() if name in expected and expected[name] != value)
    packages = {dist.name: dist.version for dist in locked.packages.dist}
    wrong += sorted(one.name for one in manifest.packages if packages.get(one.name) != one.version)
    if wrong:
        return StatementProof(what=what, result="differs", why=f"they differ in {', '.join(wrong[:_NAMED])}")
    compared = len(expected.keys() & locked.facts.keys()) + len(manifest.packages)
    if not compared:
        return StatementProof(what=what, result="unknown", why="the manifest expects nothing")
    return StatementProof(what=what, result="proved", why=f"{compared} fields and packages agree")


def _code(run: RunFolder, manifest: Manifest) -> StatementProof:
    """Try to prove that the copy of the code is the code with which the run was submitted."""
    what = "the copy of the code is the code that the run was submitted with"
    source = manifest.source
    if source is None:
        return StatementProof(what=what, result="unknown", why="the script ran from its own place (--workdir live)")
    if not source.digest:
        return StatementProof(what=what, result="unknown", why="the run recorded no digest of its code")
    try:
        listed = load_record(Listing, run.listing).files
    except RecordInvalid as error:
        return StatementProof(what=what, result="unknown", why=error.what)
    if digest_of(listed) != source.digest:
        return StatementProof(what=what, result="differs", why=f"`{run.listing.name}` is not the list in the manifest")
    if not listed:
        return StatementProof(what=what, result="unknown", why="the list of the run's files is empty")
    try:
        wrong, missing = _changed_files(run, listed)
    except OSError as error:
        return StatementProof(what=what, result="unknown", why=f"{error.filename}: {error.strerror}")
    if wrong:
        return StatementProof(what=what, result="differs", why=f"changed: {', '.join(wrong[:_NAMED])}")
    if missing:
        return StatementProof(what=what, result="unknown", why=f"{len(missing)} of {len(listed)} files are not here")
    return StatementProof(what=what, result="proved", why=f"{len(listed)} files, digest {source.digest[:12]}...")


def _changed_files(run: RunFolder, listed: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the listed files whose content differs, and the listed files that are missing.

    Raises:
        OSError: a file cannot be read, or the files together are too large.
    """
    wrong, missing, left = [], [], _MOST_CODE
    for path, content in sorted(listed.items()):
        place = safe_place(run, path)
        if place is None:
            wrong.append(path)
            continue
        if content.startswith(LINK):
            if not place.is_symlink():
                missing.append(path)
            elif content_of(str(place)) != content:
                wrong.append(path)
            continue
        if not place.is_file() or place.is_symlink():
            missing.append(path)
            continue
        left -= place.stat().st_size
        if left < 0:
            raise OSError(errno.EFBIG, "the copy is too large to hash", str(run.source))
        if file_sha256(place) != content:
            wrong.append(path)
    return wrong, missing


def safe_place(run: RunFolder, path: str) -> Path | None:
    """Return the path of a listed file; None if the path leads out of the run folder, directly or through a link."""
    parts = path.split("/")
    if path.startswith("/") or not {"", ".", ".."}.isdisjoint(parts) or "\0" in path:
        return None
    place = run.path
    for part in parts[:-1]:
        place = place / part
        if place.is_symlink():
            return None
    return place / parts[-1]


def file_sha256(path: Path) -> str:
    """Return the sha256 of a regular file.

    Raises:
        OSError: the file cannot be read.
    """
    return sha256_of(open_regular(path))


def _verdict(run: RunFolder, manifest: Manifest) -> StatementProof:
    """Try to prove the recorded verdict: judge the recorded facts of the nodes again."""
    what = "the facts of all nodes give the recorded verdict"
    try:
        recorded = load_record(Verdict, run.verdict)
        started = read_json(run.started)
        nodes, job_id = [str(node) for node in started["nodes"]], str(started["job_id"])
    except (RecordInvalid, OSError, ValueError, KeyError, TypeError) as error:
        return StatementProof(
            what=what, result="unknown", why=getattr(error, "what", None) or f"`{run.started.name}`: {error}"
        )
    if not nodes:
        return StatementProof(what=what, result="unknown", why=f"no node is named in `{run.started.name}`")
    facts: dict[str, Facts] = {}
    for node in nodes:
        try:
            facts[node] = load_record(Facts, run.facts / f"{Path(node).name}.json")
        except RecordInvalid:
            continue
    try:
        problems = {node: "it reported nothing" for node in nodes if node not in facts}
        found, _ = decide.judge(manifest, nodes, facts, problems, attempt=recorded.attempt, job_id=job_id)
    except HpcenvError as error:
        return StatementProof(what=what, result="unknown", why=error.what)
    if found.result == "unknown" and recorded.result == "match":
        # Some facts are missing in this copy, or a rule of this hpcenv is newer than the run. Such a rule can need
        # facts that the run did not record.
        rows = (f"{row.node}, {row.field}: {row.found}" for row in found.findings if row.result == "unknown")
        return StatementProof(what=what, result="unknown", why=next(rows, "not all nodes can be judged again"))
    if found.result != recorded.result:
        why = f"judged again it is {found.result}, recorded is {recorded.result}"
        return StatementProof(what=what, result="differs", why=why)
    why = f"{found.result} on {len(facts)} nodes, judged again"
    return StatementProof(what=what, result="proved" if recorded.result == "match" else "differs", why=why)


def _metrics(manifest: Manifest, measured: Measured) -> StatementProof:
    """Try to prove that every rank recorded its losses."""
    what = "every rank has recorded its losses to the last bit"
    ranks = {one.rank for one in measured.series if one.source in OF_RANKS and one.rank is not None}
    world = manifest.nodes * manifest.nproc_per_node
    if not ranks:
        return StatementProof(
            what=what, result="unknown", why="nothing was recorded (`--determinism off`, or an older hpcenv)"
        )
    missing = sorted(set(range(world)) - ranks)
    if missing:
        return StatementProof(what=what, result="differs", why=f"ranks {', '.join(map(str, missing[:8]))} have none")
    if measured.problems:
        return StatementProof(what=what, result="unknown", why=measured.problems[0])
    steps = max((one.steps[-1] for one in measured.series if one.source in OF_RANKS), default=0)
    return StatementProof(what=what, result="proved", why=f"{world} ranks, up to step {steps}")
