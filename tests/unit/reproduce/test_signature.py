"""Signatures with real SSH keys: the right person, the right file, the right kind; everything else is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcenv.errors import FileUnusable, SignatureInvalid, ToolFailed, WouldOverwrite
from hpcenv.reproduce.bundle.archive import BundleMember, write_archive
from hpcenv.reproduce.bundle.make import make
from hpcenv.reproduce.cost import proofs_cost
from hpcenv.reproduce.reproduction import Reproduction, ReproductionVerdict
from hpcenv.reproduce.signature import NAMESPACES, sign, verify_signature
from hpcenv.reproduce.statement import parse_statement, statement_text
from tests import measured_runs

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="NOT RUN: ssh-keygen is not installed")


def new_key(folder: Path, name: str) -> Path:
    key = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(key)], check=True)
    return key


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    return {name: new_key(tmp_path, name) for name in ("alice", "mallory")}


@pytest.fixture
def signers(tmp_path: Path, keys: dict[str, Path]) -> Path:
    path = tmp_path / "signers"
    public = " ".join((keys["alice"].with_suffix(".pub")).read_text().split()[:2])
    path.write_text(f'alice@example.org namespaces="lock@hpcenv,bundle@hpcenv,reproduction@hpcenv" {public}\n')
    return path


@pytest.fixture
def lockfile(tmp_path: Path) -> Path:
    return Path(shutil.copy(ROOT / "lockfiles" / "default.lock.toml", tmp_path / "paper.lock.toml"))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "paper.hpcenv.zip"
    write_archive(path, "paper", [BundleMember(name="x", source=b"x")])
    return path


@pytest.mark.parametrize("kind", ["lockfile", "bundle"])
def test_what_alice_signed_is_hers_also_under_another_name(
    kind: str, keys: dict[str, Path], signers: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path: Path = request.getfixturevalue(kind)
    signed = sign(path, keys["alice"])
    verified = verify_signature(path, signers)
    assert verified.identity == "alice@example.org"
    assert verify_signature(path, signers, identity="alice@example.org") == verified
    with pytest.raises(WouldOverwrite):
        sign(path, keys["alice"])
    # Stock OpenSSH says the same.
    argv = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", "alice@example.org", "-n", NAMESPACES[signed.kind]]
    with open(signed.statement, "rb") as statement:
        subprocess.run([*argv, "-s", str(signed.signature)], stdin=statement, check=True, capture_output=True)
    other = tmp_path / "elsewhere"
    other.mkdir()
    for file in (path, signed.statement, signed.signature):
        shutil.copy(file, other / file.name.replace("paper", "figure-2"))
    assert verify_signature(other / path.name.replace("paper", "figure-2"), signers).identity == "alice@example.org"


def test_a_key_that_is_not_accepted_is_refused(keys: dict[str, Path], signers: Path, lockfile: Path) -> None:
    sign(lockfile, keys["mallory"])
    with pytest.raises(SignatureInvalid, match="not one of anybody in"):
        verify_signature(lockfile, signers)
    with pytest.raises(SignatureInvalid, match="not one of alice@example.org"):
        verify_signature(lockfile, signers, identity="alice@example.org")


def test_a_file_that_was_changed_after_it_was_signed_is_refused(
    keys: dict[str, Path], signers: Path, lockfile: Path
) -> None:
    sign(lockfile, keys["alice"])
    lockfile.write_text(lockfile.read_text() + "# one more line\n")
    with pytest.raises(SignatureInvalid, match="is not the file that was signed"):
        verify_signature(lockfile, signers)


def test_a_statement_that_was_changed_is_refused(keys: dict[str, Path], signers: Path, lockfile: Path) -> None:
    signed = sign(lockfile, keys["alice"])
    signed.statement.write_text(signed.statement.read_text().replace("hpc1-", "hpc2-"))
    with pytest.raises(SignatureInvalid, match="not one of"):
        verify_signature(lockfile, signers)


def test_the_signature_of_one_kind_does_not_stand_for_another(
    keys: dict[str, Path], signers: Path, lockfile: Path, bundle: Path
) -> None:
    of_lock, of_bundle = sign(lockfile, keys["alice"]), sign(bundle, keys["alice"])
    shutil.copy(of_lock.statement, of_bundle.statement)
    shutil.copy(of_lock.signature, of_bundle.signature)
    with pytest.raises(SignatureInvalid):
        verify_signature(bundle, signers)


def test_a_statement_of_another_file_of_the_same_signer_is_refused(
    keys: dict[str, Path], signers: Path, bundle: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.hpcenv.zip"
    write_archive(other, "other", [BundleMember(name="x", source=b"y")])
    signed, of_bundle = sign(other, keys["alice"]), sign(bundle, keys["alice"])
    shutil.copy(signed.statement, of_bundle.statement)
    shutil.copy(signed.signature, of_bundle.signature)
    with pytest.raises(SignatureInvalid, match="is not the file that was signed"):
        verify_signature(bundle, signers)


def test_without_signature_signers_or_key_each_is_named(
    keys: dict[str, Path], signers: Path, lockfile: Path, tmp_path: Path
) -> None:
    with pytest.raises(SignatureInvalid, match="has no signature that can be read"):
        verify_signature(lockfile, signers)
    with pytest.raises(ToolFailed):
        sign(lockfile, tmp_path / "no-key")
    assert not lockfile.with_name(f"{lockfile.name}.statement.json").exists()
    sign(lockfile, keys["alice"])
    with pytest.raises(FileUnusable, match="no file of signers"):
        verify_signature(lockfile, tmp_path / "none")


# -- the verdict of a reproduction ------------------------------------------------------------


def reproduced(hpcenv: Any, folder: Path, *more: str) -> Any:
    """Make a bundle of a run, prove it, and state the verdict."""
    run = measured_runs.make(folder / "runs", "paper", losses=(3.0, 1 / 3))
    shutil.copy(ROOT / "lockfiles" / "default.lock.toml", run.lockfile)
    bundle = make(run.path, folder / "b.hpcenv.zip").path
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    return hpcenv("reproduce", str(bundle), "--statement", "verdict.json", *more, cwd=folder, environ=environ)


def test_a_verdict_is_stated_and_signed(keys: dict[str, Path], signers: Path, tmp_path: Path, hpcenv: Any) -> None:
    done = reproduced(hpcenv, tmp_path, "--key", str(keys["alice"]))
    assert done.status == 0, done.stderr
    path = tmp_path / "verdict.json"
    statement = json.loads(path.read_text())
    assert (statement["_type"], statement["predicateType"]) == (
        "https://in-toto.io/Statement/v1", "https://in-toto.io/attestation/test-result/v0.1",
    )  # fmt: skip
    assert statement["predicate"]["result"] == "PASSED"
    assert statement["predicate"]["passedTests"] == ["hpcenv reproduce --rung 0"]
    subjects = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
    assert set(subjects) == {"b.hpcenv.zip", "lock.toml", "manifest.json"}
    assert subjects["b.hpcenv.zip"] == hashlib.sha256((tmp_path / "b.hpcenv.zip").read_bytes()).hexdigest()

    verified = verify_signature(path, signers)
    assert (verified.kind, verified.identity) == ("reproduction", "alice@example.org")
    assert verified.claim is not None
    assert (verified.claim.rung, verified.claim.verdict, verified.claim.subjects) == (0, "proved", subjects)
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    words = ("verify", "--signature", "verdict.json", "--signers", str(signers))
    said = hpcenv(*words, cwd=tmp_path, environ=environ).stdout
    assert said.startswith("reproduction signed by alice@example.org, sha256 ")
    assert "rung 0, proved, " in said
    assert hpcenv(*words, "--json", cwd=tmp_path, environ=environ).envelope["data"]["claim"]["rung"] == 0
    # Stock OpenSSH says the same.
    argv = ["ssh-keygen", "-Y", "verify", "-f", signers, "-I", "alice@example.org", "-n", "reproduction@hpcenv"]
    subprocess.run([*argv, "-s", f"{path}.sig"], input=path.read_bytes(), check=True)


def test_a_changed_verdict_is_refused(keys: dict[str, Path], signers: Path, tmp_path: Path, hpcenv: Any) -> None:
    reproduced(hpcenv, tmp_path)
    path = tmp_path / "verdict.json"
    with pytest.raises(SignatureInvalid, match="has no signature that can be read"):
        verify_signature(path, signers)
    sign(path, keys["alice"])  # also later
    assert verify_signature(path, signers).kind == "reproduction"
    text = path.read_text()
    path.write_text(text.replace('"rung": 0', '"rung": 3'))
    with pytest.raises(SignatureInvalid, match="for a reproduction"):
        verify_signature(path, signers)
    path.write_text(text.replace("PASSED", "FAILED"))
    with pytest.raises(SignatureInvalid, match="is no statement about a reproduction"):
        verify_signature(path, signers)
    # The signature of another kind of file does not stand for a verdict.
    (tmp_path / "verdict.json.sig").unlink()
    path.write_text(text)
    argv = ["ssh-keygen", "-Y", "sign", "-q", "-f", keys["alice"], "-n", "bundle@hpcenv"]
    signed = subprocess.run(argv, input=text.encode(), capture_output=True, check=True).stdout
    (tmp_path / "verdict.json.sig").write_bytes(signed)
    with pytest.raises(SignatureInvalid, match="for a reproduction"):
        verify_signature(path, signers)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"_type": 1, "subject": [], "predicate": {"hpcenv": {}}}'])
def test_what_is_no_verdict_is_not_signed(text: str, keys: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(SignatureInvalid, match="is no statement about a reproduction"):
        sign(tmp_path / "x.json", keys["alice"])
    assert not (tmp_path / "x.json.sig").exists()


@pytest.mark.parametrize(
    ("verdict", "result", "key"),
    [
        ("reproduced-bitwise", "PASSED", "passedTests"), ("reproduced-within", "WARNED", "warnedTests"),
        ("not-reproduced", "FAILED", "failedTests"), ("not-proved", "FAILED", "failedTests"),
    ],
)  # fmt: skip
def test_each_verdict_has_its_result(verdict: ReproductionVerdict, result: str, key: str) -> None:
    page = Reproduction(target="paper", rung=2, verdict=verdict, headline="x", proofs=(), cost=proofs_cost())
    text = statement_text(page, {"lock.toml": "0" * 64}, created="2026-11-23T00:00:00Z")
    predicate = json.loads(text)["predicate"]
    assert (predicate["result"], predicate[key]) == (result, ["hpcenv reproduce --rung 2"])
    assert parse_statement(text, "x").verdict == verdict


def test_options_without_effect_are_refused(tmp_path: Path, hpcenv: Any) -> None:
    for words, why in (
        (("--key", "k"), "goes with `--statement` only"),
        (("--statement", "a.json", "--dry-run"), "without a run there is no verdict"),
        (("--statement", "a.txt"), "does not end in .json"),
    ):
        done = hpcenv("reproduce", "nosuch", *words, cwd=tmp_path)
        assert (done.status, why in done.stderr) == (2, True), done.stderr
    (tmp_path / "a.json").write_text("mine")
    assert "exists" in hpcenv("reproduce", "nosuch", "--statement", "a.json", cwd=tmp_path).stderr
