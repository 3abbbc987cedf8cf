"""Sign a lockfile, a bundle or the verdict of a reproduction with an SSH key, and verify who signed it.

Runs on: LOGIN NODE, or any computer with OpenSSH 8.1 or newer (`ssh-keygen -Y`, release notes of 8.1, 2019-10-09).

What is signed is a small statement that names the file by its sha256: an in-toto Statement v1
(https://github.com/in-toto/attestation, spec/v1/statement.md, read 2026-11-23). Two files lie beside the signed one:
`FILE.statement.json`, and `FILE.statement.json.sig`, which stock OpenSSH verifies:

    ssh-keygen -Y verify -f SIGNERS -I WHO -n lock@hpcenv -s FILE.statement.json.sig < FILE.statement.json

The verdict of a reproduction (`hpcenv reproduce --statement FILE`) is such a statement itself: only `FILE.sig` is
added.

The namespace names the kind of the file, so the signature of a lockfile cannot stand for that of a bundle. There is no
DSSE envelope: `ssh-keygen` signs its own wrapper, so no other tool could verify one (decision 0023).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpcenv import filesystem, process
from hpcenv.errors import FileUnusable, SignatureInvalid, ToolFailed, WouldOverwrite
from hpcenv.node.check.sif import file_sha256
from hpcenv.project.workspace import lockfile_bytes, parse_lockfile
from hpcenv.records.files import read_file
from hpcenv.reproduce.bundle.archive import Archive
from hpcenv.reproduce.statement import ReproductionClaim, parse_statement

Signed = Literal["lock", "bundle", "reproduction"]
NAMESPACES: dict[Signed, str] = {
    "lock": "lock@hpcenv",
    "bundle": "bundle@hpcenv",
    "reproduction": "reproduction@hpcenv",
}
_STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
_PREDICATE_TYPES = {"lock": "urn:hpcenv:lock:1", "bundle": "urn:hpcenv:bundle:1"}
_VERDICT_SUFFIX = ".json"
_LONGEST_STATEMENT = 1 << 20
_LONGEST_SIGNATURE = 64 << 10
# A key in an agent that asks its user, or on a hardware token, takes a while.
_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class SignatureFiles:
    """The two files of a signature, and what was signed."""

    kind: Signed
    statement: Path
    signature: Path
    sha256: str


@dataclass(frozen=True, kw_only=True)
class VerifiedSignature:
    """A signature that is valid.

    Attributes:
        identity: who signed, as the file of signers names the key.
        sha256: of the signed file.
        claim: of the verdict of a reproduction: what was signed.
    """

    kind: Signed
    identity: str
    sha256: str
    claim: ReproductionClaim | None = None


def sign(path: Path, key: Path) -> SignatureFiles:
    """Sign a lockfile, a bundle or the verdict of a reproduction.

    Args:
        path: the file: `*.lock.toml`, a bundle, or a statement `*.json`.
        key: a private SSH key; or a public one, whose private key is in the user's agent.

    Raises:
        WouldOverwrite: it is signed already.
        BundleInvalid, LockfileInvalid: the file is neither a bundle nor a lockfile.
        SignatureInvalid: the file `*.json` is no statement about a reproduction.
        ToolMissing, ToolFailed: no ssh-keygen, or it refused the key.
        FileUnusable: a file cannot be read or written.
    """
    kind, text, digest = _statement_of(path)
    files = _files(path, kind, digest)
    new = [files.signature] if kind == "reproduction" else [files.statement, files.signature]
    for file in new:
        if os.path.lexists(file):
            raise WouldOverwrite(f"`{file}` exists", hint="move it away to sign again")
    keygen = process.find_tool("ssh-keygen", needed_for="sign a file", path=os.environ.get("PATH"))
    # Without a file name, ssh-keygen signs its input and asks nothing about existing files.
    argv = [keygen, "-Y", "sign", "-q", "-f", str(key), "-n", NAMESPACES[kind]]
    signature = process.run(argv, timeout=_SECONDS, stdin=text).stdout
    try:
        for file in new:
            with open(file, "x", encoding="utf-8") as target:
                target.write(signature if file == files.signature else text)
    except OSError as error:
        raise filesystem.refused(path, error) from error
    return files


def verify_signature(path: Path, signers: Path, *, identity: str = "") -> VerifiedSignature:
    """Verify who signed a lockfile, a bundle or a verdict, and that the file is still the signed one.

    Args:
        path: the signed file; statement and signature lie beside it.
        signers: OpenSSH's file of allowed signers (ssh-keygen(1), ALLOWED SIGNERS).
        identity: who must have signed; empty accepts every signer in that file.

    Raises:
        SignatureInvalid: no signature, another key, another file, or a changed statement.
        ToolMissing: no ssh-keygen.
        FileUnusable: a file cannot be read.
    """
    kind, expected, digest = _statement_of(path)
    files = _files(path, kind, digest)
    text = _read(files.statement, _LONGEST_STATEMENT, path)
    signature = _read(files.signature, _LONGEST_SIGNATURE, path)
    if not (signers.is_file() and os.access(signers, os.R_OK)):
        raise FileUnusable(
            f"there is no file of signers `{signers}`", hint="--signers FILE; ssh-keygen(1) has its form"
        )
    signer = _verify(text, signature, signers, kind, identity)
    if kind == "reproduction":
        # The file is the statement; it was read twice.
        if text != expected:
            raise SignatureInvalid(f"`{path.name}` changed while it was read", hint="type the command again")
        claim = parse_statement(text, path.name)
        return VerifiedSignature(kind=kind, identity=signer, sha256=digest, claim=claim)
    _require_same(text, expected, path)
    return VerifiedSignature(kind=kind, identity=signer, sha256=digest)


def _verify(text: str, signature: str, signers: Path, kind: Signed, identity: str) -> str:
    """Return who signed `text`."""
    keygen = process.find_tool("ssh-keygen", needed_for="verify a signature", path=os.environ.get("PATH"))
    with tempfile.TemporaryDirectory(prefix="hpcenv-signature-") as folder:
        # A copy that only this user can write: the file beside the bundle could change between two commands.
        sig = Path(folder) / "signature"
        sig.write_text(signature, encoding="utf-8")
        common = ["-s", str(sig), "-f", str(signers)]
        try:
            if not identity:
                found = process.run([keygen, "-Y", "find-principals", *common], timeout=_SECONDS, stdin=text)
                identity = found.stdout.splitlines()[0] if found.stdout.strip() else ""
            argv = [keygen, "-Y", "verify", "-q", "-I", identity, "-n", NAMESPACES[kind], *common]
            process.run(argv, timeout=_SECONDS, stdin=text)
        except ToolFailed as error:
            named = f" of {identity}" if identity else f" of anybody in `{signers}`"
            raise SignatureInvalid(
                f"the signature is not one{named} for a {kind}",
                why=error.why,
                hint=f"`{signers}` has the keys that are accepted; ask the authors for theirs",
            ) from error
    return identity


def _statement_of(path: Path) -> tuple[Signed, str, str]:
    """Return the kind of a file, the statement about it as it is now, and its sha256."""
    predicate: dict[str, Any]
    kind: Signed
    if path.suffix == _VERDICT_SUFFIX:
        text = _read(path, _LONGEST_STATEMENT, path)
        parse_statement(text, path.name)
        return "reproduction", text, hashlib.sha256(text.encode()).hexdigest()
    if path.name.endswith(".toml"):
        content = lockfile_bytes(path)
        locked = parse_lockfile(content, path)
        kind, digest, predicate = "lock", hashlib.sha256(content).hexdigest(), {"fingerprint": locked.fingerprint}
    else:
        with Archive(path) as archive:
            predicate = {"files": len(archive.sums)}
        kind, digest = "bundle", file_sha256(path)
    statement = {
        "_type": _STATEMENT_TYPE,
        "subject": [{"name": path.name, "digest": {"sha256": digest}}],
        "predicateType": _PREDICATE_TYPES[kind],
        "predicate": predicate,
    }
    return kind, json.dumps(statement, indent=1, sort_keys=True) + "\n", digest


def _files(path: Path, kind: Signed, digest: str) -> SignatureFiles:
    statement = path if kind == "reproduction" else path.with_name(f"{path.name}.statement.json")
    return SignatureFiles(
        kind=kind, statement=statement, signature=statement.with_name(f"{statement.name}.sig"), sha256=digest
    )


def _read(file: Path, most: int, path: Path) -> str:
    try:
        return read_file(file, most=most).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise SignatureInvalid(f"`{path.name}` has no signature that can be read", why=f"`{file}`: {why}") from error


def _require_same(text: str, expected: str, path: Path) -> None:
    """Refuse a statement, although it is signed, that is about another file. Its name may differ."""
    try:
        signed, now = json.loads(text), json.loads(expected)
        same = all(signed.get(key) == now[key] for key in ("_type", "predicateType"))
        digests = [subject["digest"]["sha256"] for subject in signed["subject"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SignatureInvalid(f"the statement of `{path.name}` cannot be read", why=str(error)) from error
    digest = now["subject"][0]["digest"]["sha256"]
    if not same or digests != [digest]:
        raise SignatureInvalid(
            f"`{path.name}` is not the file that was signed",
            why=f"its sha256 is {digest}, the statement names {', '.join(map(str, digests))[:200]}",
        )
