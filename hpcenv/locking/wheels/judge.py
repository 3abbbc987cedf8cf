"""Decide which wheel was installed, from the reports about the index and the image.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcenv.locking.wheels.names import fits
from hpcenv.locking.wheels.proof import (
    DIRECT,
    HEX_SHA256,
    InstalledDist,
    KnownFile,
    SeenWheel,
    WheelProof,
    no_proof,
    other_program,
)


def _claimed_file(dist: InstalledDist, claims: Sequence[KnownFile]) -> KnownFile | None:
    """Return the only file to which a lock or report in the image can refer; None if several are possible."""
    fitting = [claim for claim in claims if fits(dist, claim.filename) and HEX_SHA256.fullmatch(claim.sha256)]
    if len({(claim.filename, claim.sha256) for claim in fitting}) != 1:
        return None
    return min(fitting, key=lambda claim: (claim.proof == "claimed", claim.proof))


def judge(dist: InstalledDist, answer: Mapping[str, Any], claims: Sequence[KnownFile], *, problem: str) -> WheelProof:
    """Return the wheel that was certainly installed, with its proof.

    Args:
        dist: the installed package.
        answer: the report of the process beside pip about the package; empty if no index was asked.
        claims: the wheels that lockfiles and reports in the image name for the package.
        problem: why the index could not be asked at all, "" for no problem.
    """
    files = [SeenWheel(**seen) for seen in answer.get("files", ())]
    alike = [seen for seen in files if dist.record_sha256 in seen.records and not seen.problem]
    same = [seen for seen in alike if not other_program(dist, seen.programs)]
    hashes = {seen.sha256 for seen in same if seen.sha256 is not None}
    if len(hashes) > 1:
        # The same content was zipped twice. Only a lockfile or a report can say which of the two files was installed.
        hashes = (hashes & {claim.sha256 for claim in claims if fits(dist, claim.filename)}) or hashes
    if len(hashes) == 1:
        seen = min((s for s in same if s.sha256 in hashes), key=_preference)
        if seen.label == DIRECT:
            return WheelProof(name=dist.name, filename=seen.filename, sha256=seen.sha256, proof="direct-url")
        return WheelProof(name=dist.name, filename=seen.filename, sha256=seen.sha256, index=seen.label, proof="record")
    if hashes:
        return no_proof(dist, f"{len(hashes)} wheels with different sha256 have this RECORD", same[0].filename)
    if same:
        reason = f"the wheel has this RECORD, but the index states no sha256 and {same[0].unread or 'it was not read'}"
        return no_proof(dist, reason, same[0].filename)
    claim = _claimed_file(dist, claims)
    contradicted = [seen for seen in files if seen.records or seen.problem]
    if claim is not None and claim.sha256 not in {seen.sha256 for seen in contradicted}:
        said = "only direct_url.json names this sha256: " if claim.proof == "claimed" else ""
        return WheelProof(
            name=dist.name,
            filename=claim.filename,
            sha256=claim.sha256,
            proof=claim.proof,
            reason=said + _why_not(dist, answer, files, problem),
        )
    exact = [seen for seen in files if seen.exact and seen.label != DIRECT]
    stated = {seen.sha256 for seen in exact}
    if exact and not any(s.records or s.problem for s in exact) and len(stated) == 1 and None not in stated:
        seen = min(exact, key=_preference)
        return WheelProof(
            name=dist.name,
            filename=seen.filename,
            sha256=seen.sha256,
            index=seen.label,
            proof="index-only",
            reason=seen.unread,
        )
    return no_proof(dist, _why_not(dist, answer, files, problem), files[0].filename if len(files) == 1 else None)


def _preference(seen: SeenWheel) -> tuple[int, int, str]:
    """Return a sort key: the default index first, then the extra indexes in order, find-links, and the direct URL."""
    kinds = ("pypi", "extra", "find-links", DIRECT)
    kind, _, number = (seen.label, "", "") if seen.label == "find-links" else seen.label.partition("-")
    return kinds.index(kind), int(number or 0), seen.filename


def _place(seen: SeenWheel) -> str:
    return "that it was installed from" if seen.label == DIRECT else "in the index"


def _why_not(dist: InstalledDist, answer: Mapping[str, Any], files: Sequence[SeenWheel], problem: str) -> str:
    """Return why no wheel is confirmed by its RECORD."""
    if dist.record_sha256 is None:
        return "it has no RECORD digest that a wheel could be compared with"
    if problem:
        return problem
    if not answer:
        return "no index was asked"
    for seen in files:
        if seen.problem:
            return f"`{seen.filename}`: {seen.problem}"
    trouble = "; ".join(answer.get("trouble", ()))
    for seen in files:
        name = other_program(dist, seen.programs) if dist.record_sha256 in seen.records else ""
        if name:
            return f"the program `{name}` of `{seen.filename}` {_place(seen)} is not the installed one"
    read = [seen for seen in files if seen.records]
    if read and (read[0].exact or not dist.tags):
        reason = f"the RECORD of `{read[0].filename}` {_place(read[0])} is not the installed one"
        more = f" (and of {len(read) - 1} more wheels)" if len(read) > 1 else ""
        return reason + more + (f"; {trouble}" if trouble else "")
    unread = [seen for seen in files if seen.unread]
    if unread:
        return f"`{unread[0].filename}` was not read: {unread[0].unread}" + (f"; {trouble}" if trouble else "")
    if trouble:
        return trouble
    tags = " with its build and tags" if files else ""
    return f"no index lists a wheel of {dist.name} {dist.version}{tags}"
