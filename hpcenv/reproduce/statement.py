"""The verdict of a reproduction as an in-toto statement, which names its rung.

Runs on: LOGIN NODE, or any computer.

The predicate is the test result of in-toto (https://github.com/in-toto/attestation, spec/predicates/test-result.md
0.1, read 2026-11-23), so tools that know nothing of hpcenv read the result. The key `hpcenv` in it has the rest;
readers ignore what they do not know. The statement is signed as a file, by `hpcenv sign` (decision 0023).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcenv import filesystem
from hpcenv.errors import SignatureInvalid, UsageError, WouldOverwrite
from hpcenv.image.store.record import utc_now
from hpcenv.node.check.sif import file_sha256
from hpcenv.records.codec import encode_record
from hpcenv.reproduce.reproduction import Reproduction, ReproductionVerdict, Target
from hpcenv.version import VERSION

__all__ = ["PREDICATE", "ReproductionClaim", "parse_statement", "write_statement"]

TYPE = "https://in-toto.io/Statement/v1"
PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"
# Verdict -> result. What was not judged (planned, not-comparable) has no result, so no statement.
_RESULTS: dict[ReproductionVerdict, str] = {
    "proved": "PASSED",
    "reproduced-bitwise": "PASSED",
    "reproduced-within": "WARNED",
    "not-proved": "FAILED",
    "not-reproduced": "FAILED",
}
_LISTS = {"PASSED": "passedTests", "WARNED": "warnedTests", "FAILED": "failedTests"}


@dataclass(frozen=True, kw_only=True)
class ReproductionClaim:
    """What a statement says: who signed it vouches for it; the file alone proves nothing.

    Attributes:
        subjects: name -> sha256 of what was reproduced: bundle, lockfile, manifest of the run.
        headline: the verdict in one sentence.
    """

    rung: int
    verdict: str
    headline: str
    created: str
    subjects: dict[str, str]


def write_statement(page: Reproduction, target: Target, path: Path, *, bundle: Path | None) -> None:
    """Write the statement about a reproduction.

    Args:
        page: the reproduction.
        target: what was reproduced.
        path: the file; it must not exist.
        bundle: the file that `target` was unpacked from, if it was.

    Raises:
        UsageError: nothing was judged, so there is nothing to state.
        WouldOverwrite: the file exists.
        FileUnusable: a file cannot be read or written.
    """
    if page.verdict not in _RESULTS:
        raise UsageError("there is no verdict to state", why=page.headline)
    text = statement_text(page, _subjects(target, bundle), created=utc_now())
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise WouldOverwrite(f"`{path}` exists", hint="--statement FILE names another file") from error
    except OSError as error:
        raise filesystem.refused(path, error) from error


def _subjects(target: Target, bundle: Path | None) -> dict[str, str]:
    files = [bundle, target.lockfile, None if target.run is None else target.run.manifest]
    return {file.name: file_sha256(file) for file in files if file is not None}


def statement_text(page: Reproduction, subjects: dict[str, str], *, created: str) -> str:
    """Return the statement as JSON text. Pure.

    Args:
        page: the reproduction, with a verdict.
        subjects: name -> sha256 of what was reproduced.
        created: RFC 3339.
    """
    result = _RESULTS[page.verdict]
    described = [{"name": name, "digest": {"sha256": digest}} for name, digest in subjects.items()]
    more: dict[str, Any] = {
        "version": VERSION,
        "created": created,
        "target": page.target,
        "rung": page.rung,
        "verdict": page.verdict,
        "headline": page.headline,
        "run": page.run,
        "image": page.image,
        "proofs": [json.loads(encode_record(proof)) for proof in page.proofs],
    }
    predicate = {
        "result": result,
        "configuration": described,
        _LISTS[result]: [f"hpcenv reproduce --rung {page.rung}"],
        "hpcenv": more,
    }
    statement = {"_type": TYPE, "subject": described, "predicateType": PREDICATE, "predicate": predicate}
    return json.dumps(statement, indent=1, sort_keys=True) + "\n"


def parse_statement(text: str, name: str) -> ReproductionClaim:
    """Return what a statement says.

    Args:
        text: the content of the file; it may be somebody else's.
        name: of the file, for the error.

    Raises:
        SignatureInvalid: it is no statement about a reproduction.
    """
    try:
        statement = json.loads(text)
        predicate = statement["predicate"]
        about = predicate["hpcenv"]
        subjects = {str(one["name"]): str(one["digest"]["sha256"]) for one in statement["subject"]}
        claim = ReproductionClaim(
            rung=int(about["rung"]), verdict=str(about["verdict"]), headline=str(about["headline"]),
            created=str(about["created"]), subjects=subjects,
        )  # fmt: skip
        types = (statement["_type"], statement["predicateType"])
        fits = types == (TYPE, PREDICATE) and predicate["result"] == _RESULTS.get(about["verdict"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SignatureInvalid(f"`{name}` is no statement about a reproduction", why=str(error)[:200]) from error
    if not fits:
        why = f"its types are {str(types)[:200]}, its verdict is {claim.verdict[:40]!r}"
        raise SignatureInvalid(f"`{name}` is no statement about a reproduction", why=why)
    return claim
