"""Locking an image: a small registry over HTTP, and an executable that plays Apptainer."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import image_fakes
import pytest
from http_server import QuietServer
from image_fakes import sha
from lock_world import check_project, lock_project
from probe_world import Venv
from torch_world import ANSWERS, install_cuda_torch

from hpcenv.errors import ImageMismatch
from hpcenv.image.store.store_folder import open_place
from hpcenv.locking.lock import LockResult
from hpcenv.locking.project_image import _move_aside, registry_access
from hpcenv.progress import Event
from hpcenv.project.workspace import open_workspace, read_lockfile
from hpcenv.submission.verify_here import verify

OCI = "application/vnd.oci.image."

# `apptainer build` makes a small SIF of the layers, `apptainer exec` runs the Python that
# the test gives it: what is read "inside" is a real environment.
APPTAINER = r"""#!{python} -IS
import os, sys
{build}
words = sys.argv[1:]
if words == ["--version"]:
    print("apptainer version 1.4.5")
elif words[0] == "build":
    build(words, {folder!r} + "/salt", {folder!r} + "/builds")
elif "exec" in words[:2]:
    start = words.index("python3")
    os.execv({inside!r}, [{inside!r}, *words[start + 1 :]])
else:
    sys.exit(1)
"""
LAYER = image_fakes.tar_layer({"opt/a": b"one", "opt/b": b"two"})


class Registry:
    """A registry in a thread: `paths` maps a path to media type and body."""

    def __init__(self) -> None:
        self.paths: dict[str, tuple[str, bytes]] = {"/v2/": ("application/json", b"{}")}
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.asked.append(self.path)
                media, body = outer.paths.get(self.path.partition("?")[0], ("", b""))
                self.send_response(200 if body else 404)
                self.send_header("Content-Type", media or "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = QuietServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.host = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def image(self, *, tag: str = "1", env: tuple[str, ...] = ()) -> str:
        """Store an image under a tag; return its manifest's digest."""
        config = {
            "architecture": "amd64", "os": "linux", "created": "2026-01-02T03:04:05Z",
            "config": {"Env": ["PATH=/bin", *env], "Cmd": ["sh"]},
            "rootfs": {"type": "layers", "diff_ids": [sha(LAYER)]},
        }  # fmt: skip
        blob = json.dumps(config).encode()
        layer = {"mediaType": OCI + "layer.v1.tar", "digest": sha(LAYER), "size": len(LAYER)}
        of_config = {"mediaType": OCI + "config.v1+json", "digest": sha(blob), "size": len(blob)}
        manifest = {"schemaVersion": 2, "mediaType": OCI + "manifest.v1+json", "config": of_config, "layers": [layer]}
        body = json.dumps(manifest).encode()
        for data in (blob, LAYER):
            self.paths[f"/v2/lab/img/blobs/{sha(data)}"] = ("application/octet-stream", data)
        for name in (tag, sha(body)):
            self.paths[f"/v2/lab/img/manifests/{name}"] = (OCI + "manifest.v1+json", body)
        return sha(body)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Registry]:
    """A registry, with an empty home so that no user's credentials are used."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    it = Registry()
    yield it
    it.server.shutdown()
    it.server.server_close()


@pytest.fixture
def project(registry: Registry, python_with_torch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tools = tmp_path / "tools"
    tools.mkdir()
    program = tools / "apptainer"
    image_fakes.require_mksquashfs()
    words = {"python": sys.executable, "folder": str(tools), "inside": str(python_with_torch)}
    program.write_text(APPTAINER.format(build=image_fakes.BUILD, **words))
    program.chmod(0o755)
    (tools / "salt").write_bytes(b"files")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    folder = tmp_path / "project"
    folder.mkdir()
    spec = f'image = "docker://{registry.host}/lab/img:1"\nplain-http = ["{registry.host}"]\n'
    # This Apptainer starts its command beside the mounts of the machine, for example those of a testbed.
    spec += '[policy]\n"container.mounts" = "info"\n'
    (folder / "hpcenv.toml").write_text(spec)
    return folder


def lock_here(folder: Path, **words: Any) -> LockResult:
    return lock_project(folder, dict(os.environ), **words)


def sif_path(folder: Path, manifest_digest: str) -> Path:
    return open_workspace(folder).store / "images" / f"{manifest_digest.replace(':', '-')}.sif"


def with_store(folder: Path) -> dict[str, str]:
    return {**os.environ, "HPCENV_STORE": str(open_workspace(folder).store)}


def digest(result: LockResult) -> str:
    assert result.lockfile.container is not None
    return result.lockfile.container.manifest_digest


# -- what is locked -----------------------------------------------------------------------


def test_the_whole_chain_from_tag_to_packages(project: Path, registry: Registry) -> None:
    expected = registry.image(env=("NVIDIA_REQUIRE_CUDA=cuda>=12.8", "CUDA_VERSION=12.8.1", "SECRET=x"))
    locked = lock_here(project).lockfile
    container = locked.container
    assert container is not None
    assert (locked.kind, container.manifest_digest, container.platform) == ("sif", expected, "linux/amd64")
    assert container.rootfs_chain_id == sha(LAYER)
    assert container.nvidia == {"CUDA_VERSION": "12.8.1", "NVIDIA_REQUIRE_CUDA": "cuda>=12.8"}
    assert locked.host.nvidia_require == {"NVIDIA_REQUIRE_CUDA": "cuda>=12.8"}
    assert container.sif.built_with == "apptainer 1.4.5"
    assert locked.facts["torch.version"] == "2.13.0+cpu"
    image = sif_path(project, expected)
    assert container.sif.sha256 == hashlib.sha256(image.read_bytes()).hexdigest()


def test_locking_again_gives_the_same_bytes_and_makes_nothing(
    project: Path, registry: Registry, tmp_path: Path
) -> None:
    registry.image()
    first = lock_here(project).path.read_bytes()
    result = lock_here(project)
    assert (result.changed, result.path.read_bytes()) == (False, first)
    assert len((tmp_path / "tools" / "builds").read_text().split()) == 1


def test_what_the_image_lacks_for_fast_networks_is_a_note(
    project: Path, registry: Registry, python_with_torch: Path, tmp_path: Path
) -> None:
    registry.image()
    assert not [note for note in lock_here(project).notes if "NCCL" in note]  # this torch has no NCCL
    inside = Venv(tmp_path / "inside")
    version = {"nccl/lib/libnccl.so.2": "int ncclGetVersion(int *v) { *v = 22602; return 0; }"}
    install_cuda_torch(inside, answers={**ANSWERS, **version})
    program = tmp_path / "tools" / "apptainer"
    program.write_text(program.read_text().replace(str(python_with_torch), str(inside.path / "bin/python3")))
    notes = lock_here(project).notes
    assert any(note.startswith("NCCL 2.26.2 is known to fail: ends with `Could not find NET") for note in notes), notes


# -- keeping and upgrading ----------------------------------------------------------------


def test_a_moved_tag_changes_nothing_until_upgrade(project: Path, registry: Registry) -> None:
    old = registry.image()
    lock_here(project)
    new = registry.image(env=("A=new",))
    assert old != new
    kept = lock_here(project)
    assert (digest(kept), kept.changed) == (old, False)
    upgraded = lock_here(project, upgrade=True)
    assert digest(upgraded) == new
    assert f"image {old} -> {new}" in upgraded.changes
    assert sorted(p.name for p in (project / ".hpcenv" / "store" / "images").glob("*.sif")) == sorted(
        f"{d.replace(':', '-')}.sif" for d in (old, new)
    )


def test_upgrade_of_a_tag_that_stayed_changes_nothing(project: Path, registry: Registry) -> None:
    registry.image()
    lock_here(project)
    assert lock_here(project, upgrade=True).changed is False


def test_keeping_asks_for_the_digest_not_for_the_tag(project: Path, registry: Registry) -> None:
    registry.image()
    lock_here(project)
    registry.asked.clear()
    lock_here(project)
    assert "/v2/lab/img/manifests/1" not in registry.asked


def test_another_request_is_resolved_anew(project: Path, registry: Registry) -> None:
    registry.image()
    lock_here(project)
    second = registry.image(tag="2", env=("A=2",))
    spec = project / "hpcenv.toml"
    spec.write_text(spec.read_text().replace("/img:1", "/img:2"))
    assert digest(lock_here(project)) == second


# -- the SIF on disk ----------------------------------------------------------------------


def other_packer(tmp_path: Path) -> None:
    """Let the next SIF of an image have other bytes, as another version of squashfs-tools does."""
    (tmp_path / "tools" / "salt").write_bytes(b"filez")


def test_a_sif_made_anew_with_other_bytes_and_the_same_tree_stands_for_the_locked_one(
    project: Path, registry: Registry, tmp_path: Path
) -> None:
    image = sif_path(project, registry.image())
    first = lock_here(project)
    image.unlink()
    other_packer(tmp_path)
    result = lock_here(project)
    assert hashlib.sha256(image.read_bytes()).hexdigest() != first.lockfile.container.sif.sha256
    assert (result.changed, result.lockfile.container) == (False, first.lockfile.container)
    assert any("has different bytes than the locked SIF, and the same file tree" in note for note in result.notes)
    workspace = open_workspace(project)
    assert check_project(workspace.root, dict(os.environ)).fresh
    verdict, *_ = verify(workspace, environ=dict(os.environ))
    assert verdict.result == "match"
    (told,) = [finding for finding in verdict.findings if finding.field == "container.sif.sha256"]
    assert (told.severity, told.locked) == ("info", first.lockfile.container.sif.sha256)
    assert told.note == "made again from the locked image: other bytes, the same tree"


def swap(image: Path) -> None:
    """Change one byte at the end of the SIF's packed files: it still opens, and its record does not fit any more."""
    swapped = bytearray(image.read_bytes())
    swapped[-1] ^= 1
    image.chmod(0o644)
    image.write_bytes(swapped)
    image.chmod(0o444)


def other_record(image: Path) -> None:
    record = image.with_suffix(".json")
    text = record.read_text()
    record.chmod(0o644)
    record.write_text(text.replace(json.loads(text)["sif"]["sha256"], "0" * 64))


@pytest.mark.parametrize("change", [swap, other_record])
def test_what_the_store_did_not_make_stands_for_nothing(
    project: Path, registry: Registry, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    image = sif_path(project, registry.image())
    lock_here(project)
    image.unlink()
    other_packer(tmp_path)
    lock_here(project)
    change(image)
    workspace = open_workspace(project)
    assert [reason.name for reason in check_project(workspace.root, dict(os.environ)).reasons] == ["sif-differs"]
    assert verify(workspace, environ=dict(os.environ))[0].result == "mismatch"


def test_a_sif_with_another_tree_of_the_same_image_is_refused(project: Path, registry: Registry) -> None:
    """Its tree was proved, and is not the locked one: the lockfile has another definition of trees, say."""
    registry.image()
    path = lock_here(project).path
    text = path.read_text()
    container = read_lockfile(path).container
    other = text.replace(container.tree_sha256, "sha256:" + "1" * 64).replace(container.sif.sha256, "2" * 64)
    path.write_text(other)
    with pytest.raises(ImageMismatch, match="is not the SIF that was locked"):
        lock_here(project)
    assert path.read_text() == other


def test_a_removed_sif_is_made_again_as_it_was(project: Path, registry: Registry) -> None:
    image = sif_path(project, registry.image())
    lock_here(project)
    image.unlink()
    assert lock_here(project).changed is False


def test_the_check_hashes_the_sif(project: Path, registry: Registry) -> None:
    image = sif_path(project, registry.image())
    lock_here(project)
    workspace = open_workspace(project)
    assert check_project(workspace.root, dict(os.environ)).fresh
    image.chmod(0o644)
    swapped = bytearray(image.read_bytes())
    swapped[-1] ^= 1
    image.write_bytes(swapped)
    assert [reason.name for reason in check_project(workspace.root, dict(os.environ)).reasons] == ["sif-differs"]


def test_a_damaged_sif_is_moved_aside_and_made_again(
    project: Path, registry: Registry, hpcenv: Any, tmp_path: Path
) -> None:
    image = sif_path(project, registry.image())
    lock_here(project)
    good = image.read_bytes()
    image.chmod(0o644)
    image.write_bytes(good[:-1] + b"!")
    image.chmod(0o444)
    done = hpcenv("image", "build", cwd=project, environ=with_store(project))
    assert done.status == 0, done.stderr
    assert f"`{image}` has changed since it was made: it is moved aside and made again" in done.stderr
    assert image.read_bytes() == good
    # Where it was moved to it stays: a job may run from it.
    (aside,) = (project / ".hpcenv" / "store" / "tmp").glob("damaged.*")
    assert aside.read_bytes() == good[:-1] + b"!"
    again = hpcenv("image", "build", cwd=project, environ=with_store(project))
    assert "already in the store, its bytes are those in the record" in again.stderr
    assert len((tmp_path / "tools" / "builds").read_text().split()) == 2


def test_a_sif_that_another_process_has_made_again_stays_where_it_is(project: Path, registry: Registry) -> None:
    digest = registry.image()
    image = sif_path(project, digest)
    lock_here(project)
    events: list[Event] = []
    store = open_place(open_workspace(project).store_place)
    _move_aside(digest, store, events.append)
    assert (image.exists(), events) == (True, [])
    image.unlink()
    _move_aside(digest, store, events.append)
    assert events == []
    assert list(store.tmp.iterdir()) == list(store.leases.iterdir()) == []


def test_a_locked_image_is_built_without_its_registry(project: Path, registry: Registry, hpcenv: Any) -> None:
    image = sif_path(project, registry.image())
    lock_here(project)
    registry.server.server_close()
    registry.asked.clear()
    done = hpcenv("image", "build", cwd=project, environ=with_store(project))
    assert (done.status, done.stdout) == (0, f"{image}\n"), done.stderr
    assert "its manifest is in the store; the registry was not asked for it" in done.stderr
    image.unlink()  # and made again from the layers that are kept
    assert hpcenv("image", "build", cwd=project, environ=with_store(project)).status == 0
    assert image.exists()
    assert registry.asked == []


def test_a_build_counts_as_use_of_the_image(project: Path, registry: Registry, hpcenv: Any) -> None:
    image = sif_path(project, registry.image())
    lock_here(project)
    for path in (image, image.with_suffix(".json")):
        os.utime(path, (1, 1))
    done = hpcenv("image", "build", cwd=project, environ=with_store(project))
    assert done.status == 0, done.stderr
    assert image.with_suffix(".json").stat().st_mtime > 1


# -- verifying it -------------------------------------------------------------------------


def test_the_locked_sif_matches_and_another_one_does_not(project: Path, registry: Registry, tmp_path: Path) -> None:
    image = sif_path(project, registry.image())
    lock_here(project)
    workspace = open_workspace(project)
    verdict, facts, _ = verify(workspace, environ=dict(os.environ))
    assert verdict.result == "match", verdict.findings
    assert facts.values["container.sif.sha256"] == hashlib.sha256(image.read_bytes()).hexdigest()

    other = tmp_path / "other.sif"
    other.write_bytes(image.read_bytes()[:-1] + b"!")
    os.utime(other, ns=(image.stat().st_atime_ns, image.stat().st_mtime_ns))
    verdict, *_ = verify(workspace, environ=dict(os.environ), sif=other)
    assert verdict.result == "mismatch"
    assert [f.field for f in verdict.findings if f.severity == "must"] == ["container.sif.sha256"]


def test_a_sif_that_is_not_there_is_unknown(project: Path, registry: Registry) -> None:
    registry.image()
    lock_here(project)
    verdict, *_ = verify(open_workspace(project), environ=dict(os.environ), sif=Path("/no/such.sif"))
    assert verdict.result == "unknown"


def test_a_registry_of_hpcenv_toml_gets_a_password_only_if_the_user_types_it(project: Path, registry: Registry) -> None:
    workspace = open_workspace(project)
    access = registry_access(workspace, {})
    assert (access.plain_http, access.without_password) == ((registry.host,), (registry.host,))
    assert registry_access(workspace, {}, typed=(registry.host,)).without_password == ()
