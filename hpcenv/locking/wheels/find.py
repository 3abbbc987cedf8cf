"""Find the wheel of each installed package.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from hpcenv.locking.wheels.cache import cached_proof, pip_configuration_digest, proof_key, write_entry
from hpcenv.locking.wheels.judge import judge
from hpcenv.locking.wheels.names import package_key, parse_wheel_name
from hpcenv.locking.wheels.pip_request import ask_for_wheels
from hpcenv.locking.wheels.proof import HEX_SHA256, Index, InstalledDist, KnownFile, WheelProof, no_proof


def find_wheels(
    dists: Sequence[InstalledDist],
    *,
    sources: Sequence[KnownFile] = (),
    index: Index | None,
    cache: Path,
    timeout: float = 60.0,
    workers: int = 8,
) -> tuple[WheelProof, ...]:
    """Return one proof per package, in the same order. An index that fails is a reason in the proof, not an error.

    Args:
        dists: the installed packages.
        sources: wheels that lockfiles and reports inside the image name.
        index: how to ask the index; None asks no index (offline).
        cache: a folder for results. It is created if it is missing; any entry in it may be deleted.
        timeout: seconds for all packages together.
        workers: number of connections at a time.
    """
    known = _by_package(sources)
    setting = pip_configuration_digest(index)
    proofs: list[WheelProof | None] = []
    for dist in dists:
        key = proof_key(dist, known.get(package_key(dist), ()), setting)
        proofs.append(
            _decided_here(dist, known.get(package_key(dist), ()))
            or (cached_proof(dist, cache, key) if setting else None)
        )
    unproved = [number for number, proof in enumerate(proofs) if proof is None]
    requested = [dists[number] for number in unproved if dists[number].record_sha256 is not None]
    reply: dict[str, Any] = {}
    if requested and index is not None:
        reply = ask_for_wheels(requested, index=index, cache=cache, timeout=timeout, workers=workers)
    answers = iter(reply.get("dists", ()))
    for number in unproved:
        dist = dists[number]
        answer: Mapping[str, Any] = next(answers, {}) if dist.record_sha256 is not None else {}
        claims = known.get(package_key(dist), ())
        proof = judge(dist, answer, claims, problem=reply.get("error", ""))
        proofs[number] = proof
        if proof.proof == "record":
            write_entry(cache, "proof", proof_key(dist, claims, setting), {"proof": asdict(proof)})
    return tuple(proof for proof in proofs if proof is not None)


def _by_package(sources: Sequence[KnownFile]) -> dict[tuple[str, str], tuple[KnownFile, ...]]:
    by_package: dict[tuple[str, str], tuple[KnownFile, ...]] = {}
    for source in sources:
        by_package[package_key(source)] = (*by_package.get(package_key(source), ()), source)
    return by_package


def _decided_here(dist: InstalledDist, claims: Sequence[KnownFile]) -> WheelProof | None:
    """Return the proof, or why nothing is proved, where no index needs to be asked."""
    if None not in (dist.content_sha256, dist.record_sha256) and dist.content_sha256 != dist.record_sha256:
        return no_proof(dist, "its files were changed after it was installed")
    found = _from_direct_url(dist)
    if found is not None and any(claim.proof == "built" and claim.sha256 == found.sha256 for claim in claims):
        # pip installed the very file that the build left.
        return WheelProof(name=found.name, filename=found.filename, sha256=found.sha256, proof="built")
    return found


def _from_direct_url(dist: InstalledDist) -> WheelProof | None:
    """Return the proof of what the installer itself recorded (PEP 610); None if an index may still have it."""
    origin = dist.direct_url
    if not isinstance(origin, Mapping):
        return None
    filename = unquote(urlsplit(str(origin.get("url", ""))).path.rsplit("/", 1)[-1])
    algorithm, _, digest = str(origin.get("hash", "")).partition("=")
    if not algorithm and not filename.endswith(_ARCHIVES):
        kind = "a version control system" if origin.get("commit-id") else "a directory"
        return no_proof(dist, f"installed from {kind}, not from a wheel")
    wheel = parse_wheel_name(filename)
    if wheel is None or (wheel.name, wheel.version) != package_key(dist):
        return no_proof(dist, "installed from an archive that is not a wheel of this name and version")
    if algorithm != "sha256" or not HEX_SHA256.fullmatch(digest):
        return None
    return WheelProof(name=dist.name, filename=filename, sha256=digest, proof="direct-url")


_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar")
