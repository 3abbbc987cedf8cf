"""Find the wheel of each installed package.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from hpcenv.errors import HpcenvError
from hpcenv.locking.wheels.cache import cached_proof, pip_configuration_digest, proof_key, write_entry
from hpcenv.locking.wheels.judge import judge
from hpcenv.locking.wheels.names import fits, package_key, parse_wheel_name
from hpcenv.locking.wheels.pip_request import ask_for_wheels
from hpcenv.locking.wheels.pip_session import Unreachable
from hpcenv.locking.wheels.proof import DIRECT, Index, InstalledDist, KnownFile, WheelProof, no_proof
from hpcenv.locking.wheels.wheel_file import read_local
from hpcenv.locking.wheels.wheel_record import NotAWheel

OpenWheel = Callable[[str], BinaryIO]


def open_here(path: str) -> BinaryIO:
    """Open a wheel on this machine. Raises OSError."""
    return open(path, "rb")


def find_wheels(
    dists: Sequence[InstalledDist],
    *,
    sources: Sequence[KnownFile] = (),
    index: Index | None,
    cache: Path,
    timeout: float = 60.0,
    workers: int = 8,
    open_wheel: OpenWheel = open_here,
) -> tuple[WheelProof, ...]:
    """Return one proof per package, in the same order. If an index fails, the proof has the reason; no error is raised.

    Args:
        dists: the installed packages.
        sources: wheels that lockfiles and reports inside the image name.
        index: how to ask the index. If `index` is None, no index is asked (offline).
        cache: a folder for results. A missing folder is created, and any entry in the folder may be deleted.
        timeout: seconds for all packages together.
        workers: number of connections at a time.
        open_wheel: opens a local wheel that a package was installed from, by its path in the environment.
    """
    known = _by_package(sources)
    claims = [(*known.get(package_key(dist), ()), *_claimed(dist)) for dist in dists]
    setting = pip_configuration_digest(index)
    proofs: list[WheelProof | None] = []
    for dist, claimed in zip(dists, claims, strict=True):
        key = proof_key(dist, claimed, setting)
        proofs.append(_decided_here(dist, claimed) or (cached_proof(dist, cache, key) if setting else None))
    unproved = [number for number, proof in enumerate(proofs) if proof is None]
    requested = [dists[number] for number in unproved if dists[number].record_sha256 is not None]
    reply: dict[str, Any] = {}
    if requested and index is not None:
        reply = ask_for_wheels(requested, index=index, cache=cache, timeout=timeout, workers=workers)
    answers = iter(reply.get("dists", ()))
    for number in unproved:
        dist = dists[number]
        answer: Mapping[str, Any] = next(answers, {}) if dist.record_sha256 is not None else {}
        own = _own_wheel(dist, open_wheel, timeout) if dist.wheel_file else []
        files = [*_comparable(dist, [*own, *answer.get("files", ())])]
        if files or answer:
            answer = {**answer, "files": files}
        proof = judge(dist, answer, claims[number], problem=reply.get("error", ""))
        proofs[number] = proof
        if proof.proof == "record":
            write_entry(cache, "proof", proof_key(dist, claims[number], setting), {"proof": asdict(proof)})
    return tuple(proof for proof in proofs if proof is not None)


def _by_package(sources: Sequence[KnownFile]) -> dict[tuple[str, str], tuple[KnownFile, ...]]:
    by_package: dict[tuple[str, str], tuple[KnownFile, ...]] = {}
    for source in sources:
        by_package[package_key(source)] = (*by_package.get(package_key(source), ()), source)
    return by_package


def _decided_here(dist: InstalledDist, claims: Sequence[KnownFile]) -> WheelProof | None:
    """Return the result for a package if no index needs to be asked; None for other packages."""
    if None not in (dist.content_sha256, dist.record_sha256) and dist.content_sha256 != dist.record_sha256:
        return no_proof(dist, "its files were changed after it was installed")
    claimed = [claim for claim in claims if claim.proof == "claimed"]
    for claim in claims:
        if claim.proof == "built" and any(claim.sha256 == one.sha256 for one in claimed):
            # pip installed exactly the file that the build left.
            return WheelProof(name=dist.name, filename=claimed[0].filename, sha256=claim.sha256, proof="built")
    filename, algorithm, _ = _origin(dist)
    wheel = parse_wheel_name(filename)
    if not isinstance(dist.direct_url, Mapping) or (wheel and (wheel.name, wheel.version) == package_key(dist)):
        return None
    if algorithm or filename.endswith(_ARCHIVES):
        return no_proof(dist, "installed from an archive that is not a wheel of this name and version")
    kind = "a version control system" if dist.direct_url.get("commit-id") else "a directory"
    return no_proof(dist, f"installed from {kind}, not from a wheel")


def _origin(dist: InstalledDist) -> tuple[str, str, str]:
    """Return name, kind of hash, and hash of the file that was installed, as the installer recorded them (PEP 610)."""
    origin = dist.direct_url if isinstance(dist.direct_url, Mapping) else {}
    algorithm, _, digest = str(origin.get("hash", "")).partition("=")
    return unquote(urlsplit(str(origin.get("url", ""))).path.rsplit("/", 1)[-1]), algorithm, digest


def _claimed(dist: InstalledDist) -> tuple[KnownFile, ...]:
    """Return the wheel that direct_url.json names. The name proves nothing, as a user can edit direct_url.json."""
    filename, algorithm, digest = _origin(dist)
    if algorithm != "sha256":
        return ()
    return (KnownFile(name=dist.name, version=dist.version, filename=filename, sha256=digest, proof="claimed"),)


def _comparable(dist: InstalledDist, files: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the files with which the package is compared. A direct file with a different hash is left out."""
    digest = _origin(dist)[2]
    for seen in files:
        if seen["label"] != DIRECT or (seen["sha256"] and digest in ("", seen["sha256"])):
            yield seen
        elif seen["sha256"] is None and dist.record_sha256 not in seen["records"]:
            yield {**seen, "sha256": digest}  # a large file at a URL was not downloaded: its RECORD differs


def _own_wheel(dist: InstalledDist, open_wheel: OpenWheel, seconds: float) -> list[dict[str, Any]]:
    """Read the local wheel that the package was installed from. Return nothing if the wheel cannot be read."""
    filename = _origin(dist)[0]
    try:
        with open_wheel(dist.wheel_file) as file:
            read = read_local(file, filename, time.monotonic() + seconds)
    except (OSError, HpcenvError, NotAWheel, Unreachable):
        return []
    return [asdict(read) | {"label": DIRECT, "filename": filename, "exact": fits(dist, filename)}]


_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar")
