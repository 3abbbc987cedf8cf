"""A bundle in a registry: with the referrers API and without, beside its image, its SIF, or alone."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from http_server import OCI, PushServed, sha

from hpcenv.errors import BundleInvalid, ImageUnavailable, SpecError, WouldOverwrite
from hpcenv.image.reference import parse_sif_reference
from hpcenv.image.registry.source import Access
from hpcenv.project import lockfile as lock_model
from hpcenv.project import toml_files
from hpcenv.project.workspace import read_lockfile
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduce.bundle.make import make
from hpcenv.reproduce.bundle.registry import PulledBundle, PushedBundle, pull_bundle, push_bundle
from hpcenv.reproduce.bundle.verify import verify_bundle
from hpcenv.reproduce.signature import sign, verify_signature
from tests import measured_runs

ROOT = Path(__file__).resolve().parents[4]
SIF = b"SIF" * 1000
KINDS = ["lock", "proof", "record", "sbom"]


@pytest.fixture(params=[True, False], ids=["api", "tag-schema"])
def registry(request: pytest.FixtureRequest) -> Iterator[PushServed]:
    it = PushServed(referrers=request.param)
    yield it
    it.close()


def a_run(folder: Path, *, image: str | None = None, sif: bytes | None = None) -> RunFolder:
    """Make a run whose lockfile names this image and this SIF."""
    run = measured_runs.make(folder / "runs", "paper", losses=(3.0, 1 / 3))
    locked = read_lockfile(ROOT / "lockfiles" / "default.lock.toml")
    assert locked.container is not None
    container = locked.container
    if image is not None:
        container = replace(container, manifest_digest=image)
    if sif is not None:
        facts = replace(container.sif, sha256=hashlib.sha256(sif).hexdigest(), size=len(sif))
        container = replace(container, sif=facts)
    changed = replace(locked, container=container)
    changed = replace(changed, fingerprint=lock_model.fingerprint(lock_model.to_data(changed)))
    run.lockfile.write_text(toml_files.dumps(lock_model.to_data(changed), header=""))
    return run


def access(served: PushServed) -> Access:
    return Access(plain_http=(served.host,), environ={"HOME": "/none"})


def push(served: PushServed, bundle: Path, tag: str = "v1") -> PushedBundle:
    target = parse_sif_reference(f"oras://{served.host}/lab/paper:{tag}")
    return push_bundle(bundle, target, access(served), on_event=lambda _: None)


def pull(served: PushServed, reference: str, folder: Path, target: Path | None = None) -> PulledBundle:
    wanted = parse_sif_reference(reference)
    return pull_bundle(wanted, target, folder, access(served), on_event=lambda _: None)


def document(served: PushServed, digest: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(served.manifests["lab/paper", digest][1])
    return read


def test_a_bundle_comes_back_with_what_belongs_to_it(registry: PushServed, tmp_path: Path) -> None:
    made = make(a_run(tmp_path).path, tmp_path / "paper.hpcenv.zip")
    pushed = push(registry, made.path)
    assert (pushed.sha256, pushed.subject_is) == (made.sha256, "bundle")
    assert sorted(one.kind for one in pushed.attached) == KINDS
    assert pushed.left_out == {"signature": "the bundle is not signed (hpcenv sign)"}
    for n, reference in enumerate((pushed.reference, pushed.by_digest)):
        (tmp_path / str(n)).mkdir()
        pulled = pull(registry, reference, tmp_path / str(n))
        assert pulled.path == tmp_path / str(n) / "paper.hpcenv.zip"
        assert pulled.path.read_bytes() == made.path.read_bytes()
        assert [path.name for path in (tmp_path / str(n)).iterdir()] == ["paper.hpcenv.zip"]
        assert sorted((one.kind, one.result) for one in pulled.attached) == [
            ("lock", "match"), ("proof", ""), ("record", "match"), ("sbom", ""),
        ]  # fmt: skip
        assert verify_bundle(pulled.path).result == verify_bundle(made.path).result != "mismatch"


def test_the_attached_files(registry: PushServed, tmp_path: Path) -> None:
    run = a_run(tmp_path)
    pushed = push(registry, make(run.path, tmp_path / "paper.hpcenv.zip").path)
    contents = {}
    for one in pushed.attached:
        about = document(registry, one.digest)
        assert about["subject"]["digest"] == pushed.subject
        assert about["config"] == {"mediaType": OCI.replace("image.", "empty.v1+json"), "digest": sha(b"{}"), "size": 2}
        (layer,) = about["layers"]
        contents[one.kind] = registry.blobs["lab/paper", layer["digest"]]
    assert contents["lock"] == run.lockfile.read_bytes()
    assert json.loads(contents["sbom"])["bomFormat"] == "CycloneDX"
    locked = read_lockfile(run.lockfile).container
    assert locked is not None
    proof = json.loads(contents["proof"])
    assert proof["subject"][0]["digest"] == {"sha256": locked.sif.sha256}
    assert (proof["predicate"]["tree"], proof["predicate"]["image"]["digest"]) == (
        locked.tree_sha256, locked.manifest_digest,
    )  # fmt: skip


def test_two_pushes_make_one_list(registry: PushServed, tmp_path: Path) -> None:
    bundle = make(a_run(tmp_path).path, tmp_path / "paper.hpcenv.zip").path
    first, second = push(registry, bundle), push(registry, bundle)
    assert first == second
    tag = first.subject.replace(":", "-")
    if registry.referrers:
        assert ("lab/paper", tag) not in registry.manifests
    else:
        media, body = registry.manifests["lab/paper", tag]
        assert media == OCI + "index.v1+json"
        assert sorted(one["digest"] for one in json.loads(body)["manifests"]) == sorted(
            one.digest for one in first.attached
        )


def test_it_refers_to_its_image(registry: PushServed, tmp_path: Path) -> None:
    image = json.dumps({"schemaVersion": 2, "mediaType": OCI + "manifest.v1+json", "config": {}, "layers": []}).encode()
    registry.manifests["lab/paper", sha(image)] = (OCI + "manifest.v1+json", image)
    pushed = push(registry, make(a_run(tmp_path, image=sha(image)).path, tmp_path / "paper.hpcenv.zip").path)
    assert (pushed.subject, pushed.subject_is) == (sha(image), "image")
    expected = {"mediaType": OCI + "manifest.v1+json", "digest": sha(image), "size": len(image)}
    assert document(registry, "v1")["subject"] == expected
    # Another run of the same image: each pull finds its own.
    other = measured_runs.make(tmp_path / "other", "second", losses=(2.0,))
    shutil.copy(tmp_path / "runs" / "paper" / "lock.toml", other.lockfile)
    again = push(registry, make(other.path, tmp_path / "second.hpcenv.zip").path, "v2")
    assert again.subject == pushed.subject
    for reference, of in ((pushed.reference, pushed), (again.reference, again)):
        found = pull(registry, reference, tmp_path, tmp_path / f"{of.sha256}.zip")
        assert {one.digest for one in found.attached} == {one.digest for one in of.attached}
        assert found.same


def test_its_sif_is_the_subject(registry: PushServed, tmp_path: Path) -> None:
    (tmp_path / "a.sif").write_bytes(SIF)
    made = make(a_run(tmp_path, sif=SIF).path, tmp_path / "paper.hpcenv.zip", sif=tmp_path / "a.sif")
    pushed = push(registry, made.path)
    assert pushed.subject_is == "sif"
    assert registry.blobs["lab/paper", sha(SIF)] == SIF
    # `apptainer pull oras://.../paper:v1-sif` gets it.
    assert sha(registry.manifests["lab/paper", "v1-sif"][1]) == pushed.subject
    # A later bundle without the SIF finds it there.
    small = make(tmp_path / "runs" / "paper", tmp_path / "small.hpcenv.zip")
    assert push(registry, small.path).subject == pushed.subject


def test_a_signature_comes_along(registry: PushServed, tmp_path: Path) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("NOT CHECKED: no ssh-keygen on PATH")
    made = make(a_run(tmp_path).path, tmp_path / "paper.hpcenv.zip")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    public = " ".join((tmp_path / "key.pub").read_text().split()[:2])
    (tmp_path / "signers").write_text(f'jane@example.org namespaces="bundle@hpcenv" {public}\n')
    sign(made.path, tmp_path / "key")
    pushed = push(registry, made.path)
    assert pushed.left_out == {}
    pulled = pull(registry, pushed.reference, tmp_path, tmp_path / "other-name.hpcenv.zip")
    assert verify_signature(pulled.path, tmp_path / "signers").identity == "jane@example.org"


def test_what_is_attached_and_says_something_else(registry: PushServed, tmp_path: Path) -> None:
    pushed = push(registry, make(a_run(tmp_path).path, tmp_path / "paper.hpcenv.zip").path)
    lock = next(one for one in pushed.attached if one.kind == "lock")
    forged = document(registry, lock.digest)
    registry.blobs["lab/paper", sha(b"forged")] = b"forged"
    forged["layers"][0] |= {"digest": sha(b"forged"), "size": 6}
    body = json.dumps(forged).encode()
    registry.manifests["lab/paper", sha(body)] = (forged["mediaType"], body)
    entry = {"mediaType": forged["mediaType"], "digest": sha(body), "size": len(body)}
    entry |= {"artifactType": forged["artifactType"], "annotations": forged["annotations"]}
    if not registry.referrers:
        tag = ("lab/paper", pushed.subject.replace(":", "-"))
        index = json.loads(registry.manifests[tag][1])
        index["manifests"].append(entry)
        registry.manifests[tag] = (OCI + "index.v1+json", json.dumps(index).encode())
    pulled = pull(registry, pushed.reference, tmp_path, tmp_path / "got.zip")
    assert [one.result for one in pulled.attached if one.digest == sha(body)] == ["mismatch"]
    assert not pulled.same


def test_a_next_page_of_referrers_without_an_address_is_refused(tmp_path: Path) -> None:
    registry = PushServed(referrers=True)
    try:
        pushed = push(registry, make(a_run(tmp_path).path, tmp_path / "paper.hpcenv.zip").path)
        index = json.dumps({"schemaVersion": 2, "mediaType": OCI + "index.v1+json", "manifests": []}).encode()
        headers = {"Content-Type": OCI + "index.v1+json", "Link": '<http://[>; rel="next"'}
        registry.paths[f"/v2/lab/paper/referrers/{pushed.subject}"] = (200, headers, index)
        with pytest.raises(ImageUnavailable) as caught:
            pull(registry, pushed.reference, tmp_path, tmp_path / "got.zip")
        assert "next page of its referrers is not valid" in str(caught.value.why)
    finally:
        registry.close()


def test_an_entry_that_refers_to_something_else_is_ignored(tmp_path: Path) -> None:
    registry = PushServed(referrers=False)
    try:
        pushed = push(registry, make(a_run(tmp_path).path, tmp_path / "paper.hpcenv.zip").path)
        sbom = next(one for one in pushed.attached if one.kind == "sbom")
        moved = document(registry, sbom.digest)
        moved["subject"]["digest"] = "sha256:" + "0" * 64
        body = json.dumps(moved).encode()
        registry.manifests["lab/paper", sha(body)] = (moved["mediaType"], body)
        tag = ("lab/paper", pushed.subject.replace(":", "-"))
        index = json.loads(registry.manifests[tag][1])
        for entry in index["manifests"]:
            if entry["digest"] == sbom.digest:
                entry["digest"] = sha(body)
        registry.manifests[tag] = (OCI + "index.v1+json", json.dumps(index).encode())
        pulled = pull(registry, pushed.reference, tmp_path, tmp_path / "got.zip")
        assert sorted(one.kind for one in pulled.attached) == ["lock", "proof", "record"]
    finally:
        registry.close()


def test_what_is_refused(registry: PushServed, tmp_path: Path) -> None:
    bundle = make(a_run(tmp_path).path, tmp_path / "paper.hpcenv.zip").path
    pushed = push(registry, bundle)
    with pytest.raises(WouldOverwrite):
        pull(registry, pushed.reference, tmp_path)
    # A byte in the registry.
    key = ("lab/paper", f"sha256:{pushed.sha256}")
    whole = registry.blobs[key]
    registry.blobs[key] = whole[:-1] + b"x"
    (tmp_path / "new").mkdir()
    with pytest.raises(ImageUnavailable):
        pull(registry, pushed.reference, tmp_path / "new")
    assert not (tmp_path / "new" / "paper.hpcenv.zip").exists()
    # A bundle that was changed here.
    (tmp_path / "bad.hpcenv.zip").write_bytes(whole[:200] + b"x" + whole[201:])
    with pytest.raises(BundleInvalid):
        push(registry, tmp_path / "bad.hpcenv.zip")
    with pytest.raises(SpecError, match="cannot push to"):
        push_bundle(bundle, parse_sif_reference(pushed.by_digest), access(registry), on_event=lambda _: None)
    registry.image()
    with pytest.raises(ImageUnavailable, match="is no bundle"):
        pull(registry, f"oras://{registry.host}/lab/img:1", tmp_path)


def test_a_name_that_climbs_out_is_not_used(registry: PushServed, tmp_path: Path) -> None:
    pushed = push(registry, make(a_run(tmp_path).path, tmp_path / "paper.hpcenv.zip").path)
    about = document(registry, "v1")
    about["layers"][0]["annotations"]["org.opencontainers.image.title"] = "../../.bashrc"
    body = json.dumps(about).encode()
    registry.manifests["lab/paper", "v1"] = (about["mediaType"], body)
    (tmp_path / "new").mkdir()
    assert pull(registry, pushed.reference, tmp_path / "new").path == tmp_path / "new" / "bundle.hpcenv.zip"


def test_the_verbs(registry: PushServed, tmp_path: Path, hpcenv: Any) -> None:
    run = a_run(tmp_path)
    environ = {"PATH": "/nonexistent", "HOME": str(tmp_path)}
    name = f"oras://{registry.host}/lab/paper:v1"
    done = hpcenv("bundle", "push", str(run.path), name, "--plain-http", cwd=tmp_path, environ=environ)
    assert done.status == 0, done.stderr
    assert "its image is not in this repository: lock, sbom, record, proof" in done.stderr
    by_digest = done.stdout.strip()
    words = ("bundle", "pull", by_digest, "--plain-http")
    done = hpcenv(*words, cwd=tmp_path, environ=environ)
    assert (done.status, done.stdout.strip()) == (0, str(tmp_path / "paper.hpcenv.zip")), done.stderr
    done = hpcenv("reproduce", "paper.hpcenv.zip", cwd=tmp_path, environ=environ)
    assert "proved" in done.stdout
    said = hpcenv(*words, "-o", "other.zip", "--json", cwd=tmp_path, environ=environ).envelope
    assert (said["ok"], {one["kind"] for one in said["data"]["attached"]}) == (True, set(KINDS))
