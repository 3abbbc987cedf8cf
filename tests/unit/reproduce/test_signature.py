"""Signatures with real SSH keys: the right person, the right file, the right kind; everything else is refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hpcenv.errors import FileUnusable, SignatureInvalid, ToolFailed, WouldOverwrite
from hpcenv.reproduce.bundle.archive import BundleMember, write_archive
from hpcenv.reproduce.signature import NAMESPACES, sign, verify_signature

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
    path.write_text(f'alice@example.org namespaces="lock@hpcenv,bundle@hpcenv" {public}\n')
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
