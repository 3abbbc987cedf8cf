"""Every kind of `image` that is in files: locked, checked, verified, planned, compared and exported.

A registry has test_lock_image.py. Apptainer is an executable that makes small real SIFs, see image_fakes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import image_fakes
import pytest
from http_server import Served, SifServed
from image_fakes import sha
from lock_world import check_project, lock_project

from hpcenv.api.environment import diff
from hpcenv.errors import ImageMismatch, ImageUnavailable, SpecError, UsageError
from hpcenv.image.registry.source import Access
from hpcenv.image.sif_proof import read_tree_digest
from hpcenv.image.store.store_folder import open_place
from hpcenv.locking.definition_build import DefinitionBuild, build_definition, parse_bind, read_definition
from hpcenv.locking.export_packages import why_no_wheel
from hpcenv.locking.formats.cyclonedx import cyclonedx
from hpcenv.locking.formats.requirements import requirements
from hpcenv.locking.image_path import find_locked
from hpcenv.locking.lock import LockResult
from hpcenv.locking.project_image import BuildOptions, build
from hpcenv.progress import Event
from hpcenv.project.context import Context
from hpcenv.project.lockfile import ContainerTable
from hpcenv.project.workspace import open_workspace, read_lockfile
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions
from hpcenv.submission.verify_here import verify

OCI = "application/vnd.oci.image."
LAYER = image_fakes.tar_layer({"opt/a": b"one"})

APPTAINER = r"""#!{python} -IS
import os, sys
{build}
words = sys.argv[1:]
if words == ["--version"]:
    print("apptainer version 1.4.5")
elif words[0] == "build":
    open({folder!r} + "/words", "w").write("\n".join(words))
    print("INFO: begins", flush=True)
    build(words, {folder!r} + "/salt", {folder!r} + "/builds")
elif "exec" in words[:2]:
    start = words.index("python3")
    os.execv({inside!r}, [{inside!r}, *words[start + 1 :]])
else:
    sys.exit(1)
"""


@pytest.fixture
def folder(python_with_torch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder, with the program that plays Apptainer on PATH."""
    image_fakes.require_mksquashfs()
    tools = tmp_path / "tools"
    tools.mkdir()
    program = tools / "apptainer"
    words = {"python": sys.executable, "folder": str(tools), "inside": str(python_with_torch)}
    program.write_text(APPTAINER.format(build=image_fakes.BUILD, **words))
    program.chmod(0o755)
    (tools / "salt").write_bytes(b"files")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    place = tmp_path / "project"
    place.mkdir()
    (place / "train.py").write_text("")
    return place


def config(*env: str, layer: bytes = LAYER) -> bytes:
    return json.dumps(
        {
            "architecture": "amd64", "os": "linux", "created": "2026-01-02T03:04:05Z",
            "config": {"Env": ["PATH=/bin", *env], "Cmd": ["sh"]},
            "rootfs": {"type": "layers", "diff_ids": [sha(layer)]},
        }
    ).encode()  # fmt: skip


def write_layout(place: Path, *env: str, layer: bytes = LAYER) -> str:
    """Write an OCI layout of one image; return its manifest's digest."""
    blobs = place / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    described = {"mediaType": OCI + "layer.v1.tar", "digest": sha(layer), "size": len(layer)}
    about = config(*env, layer=layer)
    of_config = {"mediaType": OCI + "config.v1+json", "digest": sha(about), "size": len(about)}
    body = json.dumps(
        {"schemaVersion": 2, "mediaType": OCI + "manifest.v1+json", "config": of_config, "layers": [described]}
    ).encode()
    for data in (layer, about, body):
        (blobs / sha(data)[7:]).write_bytes(data)
    entry = {"mediaType": OCI + "manifest.v1+json", "digest": sha(body), "size": len(body)}
    entry["annotations"] = {"org.opencontainers.image.ref.name": "1"}
    (place / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (place / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return sha(body)


def write_docker_archive(file: Path, scratch: Path) -> None:
    scratch.mkdir()
    (scratch / "layer.tar").write_bytes(LAYER)
    name = f"{sha(config())[7:]}.json"
    (scratch / name).write_bytes(config())
    entry = {"Config": name, "RepoTags": ["lab/img:1"], "Layers": ["layer.tar"]}
    (scratch / "manifest.json").write_text(json.dumps([entry]))
    with tarfile.open(file, "w") as tar:
        for each in sorted(scratch.iterdir()):
            tar.add(each, each.name)


def spec(folder: Path, image: str, more: str = "") -> None:
    # The Apptainer of this test starts its command beside the mounts of the machine, for example those of a testbed.
    policy = '[policy]\n"container.mounts" = "info"\n'
    (folder / "hpcenv.toml").write_text(f'image = "{image}"\n{more}{policy}')


def lock_here(folder: Path, **words: Any) -> LockResult:
    return lock_project(folder, dict(os.environ), **words)


def container(result: LockResult) -> ContainerTable:
    assert result.lockfile.container is not None
    return result.lockfile.container


def builds(folder: Path) -> int:
    said = folder.parent / "tools" / "builds"
    return len(said.read_text().split()) if said.exists() else 0


def a_sif(folder: Path) -> Path:
    """Make a SIF as somebody else would have."""
    write_layout(folder / "lay")
    spec(folder, "oci:lay:1")
    made = lock_here(folder)
    assert made.sif is not None
    (folder / "some.sif").write_bytes(made.sif.read_bytes())
    made.path.unlink()
    return folder / "some.sif"


def make(folder: Path, kind: str) -> None:
    """Write an image of a kind, and the hpcenv.toml that names it."""
    if kind == "sif":
        a_sif(folder)
        spec(folder, "some.sif")
    elif kind == "oci":
        write_layout(folder / "lay")
        spec(folder, "oci:lay:1")
    elif kind == "oci-archive":
        write_layout(folder / "lay")
        with tarfile.open(folder / "image.tar", "w") as tar:
            tar.add(folder / "lay", ".")
        spec(folder, "oci-archive:image.tar")
    elif kind == "docker-archive":
        write_docker_archive(folder / "saved.tar", folder / "parts")
        spec(folder, "docker-archive:saved.tar:lab/img:1")
    else:
        (folder / "recipe.def").write_text("Bootstrap: scratch\n")
        spec(folder, "recipe.def")


@pytest.mark.parametrize("kind", ["oci", "oci-archive", "docker-archive", "sif", "definition"])
def test_a_kind_from_lock_to_submit(kind: str, folder: Path, fake_slurm: Any) -> None:
    make(folder, kind)
    first = lock_here(folder)
    table = container(first)
    assert first.sif is not None
    assert table.sif.sha256 == hashlib.sha256(first.sif.read_bytes()).hexdigest()
    in_layers = kind not in ("sif", "definition")
    assert (table.manifest_digest is not None) == in_layers
    assert str(folder) not in first.path.read_text()

    before = builds(folder)
    again = lock_here(folder)
    assert (again.changed, builds(folder)) == (False, before)

    workspace = open_workspace(folder)
    assert check_project(workspace.root, dict(os.environ)).fresh
    verdict, facts, _ = verify(workspace, environ=dict(os.environ))
    assert verdict.result == "match", verdict.findings
    assert facts.values["container.sif.sha256"] == table.sif.sha256

    where = workspace.lockfile_path("default")
    assert find_locked(workspace.store_place, first.lockfile, origin=where, root=folder) == first.sif

    environ = {**fake_slurm.environ, "PATH": f"{folder.parent / 'tools'}:{fake_slurm.environ['PATH']}"}
    options = SubmitOptions(script="train.py", nproc=1, assume_shared=True, name="a")
    context = Context(environ=environ, cwd=folder, now=time.localtime(0), token="beef", command=("hpcenv",))
    plan = plan_job(workspace, options, context)
    assert plan.manifest.environment.sif == str(first.sif)

    assert not diff("default", "lockfiles/default.lock.toml", project=folder).changes
    sbom = json.loads(cyclonedx(first.lockfile).text)
    (image,) = [part for part in sbom["components"] if part["bom-ref"] == "image"]
    assert (image["name"], "purl" in image) == (table.reference, False)
    assert table.digest in requirements(first.lockfile).text

    first.sif.chmod(0o644)
    data = first.sif.read_bytes()
    first.sif.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert [reason.name for reason in check_project(workspace.root, dict(os.environ)).reasons] == ["sif-differs"]


def test_a_layout_that_holds_another_image_now_is_refused_until_upgrade(folder: Path) -> None:
    old = write_layout(folder / "lay")
    spec(folder, "oci:lay:1")
    assert container(lock_here(folder)).manifest_digest == old
    new = write_layout(folder / "lay", "A=1")
    with pytest.raises(ImageMismatch, match="is not the image that was locked"):
        lock_here(folder)
    upgraded = lock_here(folder, upgrade=True)
    assert container(upgraded).manifest_digest == new
    assert f"image {old} -> {new}" in upgraded.changes


def test_a_layout_below_the_home_folder(folder: Path) -> None:
    digest = write_layout(folder.parent / "lay")
    spec(folder, "oci:~/lay")
    assert container(lock_here(folder)).manifest_digest == digest


def test_another_sif_under_the_name_is_stale_and_locked_anew(folder: Path) -> None:
    image = a_sif(folder)
    spec(folder, "some.sif")
    old = container(lock_here(folder)).sif.sha256
    write_layout(folder / "lay", "NVIDIA_REQUIRE_CUDA=cuda>=12.8")
    spec(folder, "oci:lay:1")
    other = lock_here(folder, upgrade=True).sif
    assert other is not None
    image.write_bytes(other.read_bytes())
    spec(folder, "some.sif")
    locked = lock_here(folder)
    assert container(locked).sif.sha256 != old
    assert container(locked).digest == f"sha256:{hashlib.sha256(image.read_bytes()).hexdigest()}"


def report(*wheels: tuple[str, str, str]) -> bytes:
    entries = [
        {
            "metadata": {"name": name, "version": version},
            "download_info": {
                "url": f"https://example.org/{name}-{version}-py3-none-any.whl",
                "archive_info": {"hashes": {"sha256": digest}},
            },
        }
        for name, version, digest in wheels
    ]
    return json.dumps({"version": "1", "install": entries}).encode()


@pytest.mark.parametrize(
    ("said", "proof"),
    [(report(("torch", "2.13.0+cpu", "a" * 64)), "install-report"), (b'{"version": "9"}', None), (b"\xff", None)],
    ids=["a-report", "another-version", "not-json"],
)
def test_pips_report_in_the_image_names_the_wheels(
    said: bytes, proof: str | None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    write_layout(folder / "lay", layer=image_fakes.tar_layer({"usr/share/hpcenv/pip-report.json": said}))
    spec(folder, "oci:lay")
    locked = lock_here(folder, cache=tmp_path).lockfile
    (torch,) = [dist for dist in locked.packages.dist if dist.name == "torch"]
    found = torch.wheel.proof if torch.wheel and torch.wheel.proof != "none" else None
    assert found == proof
    if proof is not None:
        assert torch.wheel is not None
        assert torch.wheel.sha256 == "a" * 64


def built(**more: object) -> bytes:
    package = {"name": "torch", "version": "2.13.0+cpu", "filename": "torch-2.13.0+cpu-py3-none-any.whl"}
    package |= {"sha256": "a" * 64, "source-sha256": "b" * 64}
    said = {"version": 1, "compiler": "c++ (Debian 12.2.0-14) 12.2.0", "nvcc": "13.0.88", "arch-list": "8.0"}
    return json.dumps({**said, "packages": [package], **more}).encode()


@pytest.mark.parametrize(
    ("said", "known"),
    [
        (built(), True),
        (built(version=2), False),
        (built(compiler="two\nlines"), False),
        (built(packages=[{"name": "torch"}]), False),
        (b"[" * 100_000, False),
        (b"\xff", False),
    ],
    ids=["a-report", "another-version", "two-lines", "no-digest", "deep", "no-text"],
)
def test_a_build_in_the_image_says_what_it_compiled_and_by_what(
    said: bytes, known: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    write_layout(folder / "lay", layer=image_fakes.tar_layer({"usr/share/hpcenv/built.json": said}))
    spec(folder, "oci:lay")
    made = lock_here(folder, cache=tmp_path)
    (torch,) = [dist for dist in made.lockfile.packages.dist if dist.name == "torch"]
    assert (torch.wheel is not None and torch.wheel.proof == "built") == known
    if known:
        assert torch.wheel is not None and torch.wheel.built is not None
        assert (torch.wheel.sha256, torch.wheel.built.source_sha256) == ("a" * 64, "b" * 64)
        assert (torch.wheel.built.nvcc, torch.wheel.built.arch_list) == ("13.0.88", "8.0")
        assert read_lockfile(made.path).packages == made.lockfile.packages
        # No index has the wheel: it cannot be installed by its hash, and an export says so.
        assert "compiled in its image" in why_no_wheel(torch)
        again = lock_here(folder).lockfile
        assert again.packages == made.lockfile.packages


# -- definition files -----------------------------------------------------------------------


def recipe(folder: Path, text: str = "Bootstrap: scratch\n") -> None:
    (folder / "recipe.def").write_text(text)
    spec(folder, "recipe.def")


def reasons(folder: Path) -> list[str]:
    found = check_project(folder, dict(os.environ)).reasons
    return [f"{reason.name}: {reason.note}" for reason in found]


def test_a_changed_definition_file_is_stale_and_built_anew(folder: Path) -> None:
    recipe(folder)
    old = container(lock_here(folder)).digest
    recipe(folder, "Bootstrap: scratch\n# more\n")
    assert reasons(folder) == ["image-changed: `recipe.def` was changed"]
    assert container(lock_here(folder)).digest != old
    assert (reasons(folder), builds(folder)) == ([], 2)
    (folder / "recipe.def").unlink()
    assert reasons(folder) == []


def test_a_file_that_it_copies_counts(folder: Path) -> None:
    (folder / "data").write_text("1")
    recipe(folder, "Bootstrap: scratch\n\n%files\n    data /data\n")
    lock_here(folder)
    lock_here(folder)
    assert builds(folder) == 1
    (folder / "data").write_text("2")
    lock_here(folder)
    assert builds(folder) == 2


def test_a_damaged_sif_is_not_taken_for_the_one_that_was_made(folder: Path) -> None:
    recipe(folder)
    image = lock_here(folder).sif
    assert image is not None
    good = image.read_bytes()
    image.chmod(0o644)
    image.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    made = lock_here(folder)
    assert builds(folder) == 2
    assert made.sif is not None
    assert hashlib.sha256(made.sif.read_bytes()).hexdigest() == container(made).sif.sha256


def test_lock_takes_what_image_build_made_with_a_bind(folder: Path) -> None:
    recipe(folder)
    (folder / "site").mkdir()
    workspace = open_workspace(folder)
    bind = parse_bind("site:/mnt:ro", folder)
    made = build(
        workspace, before=None, environ=dict(os.environ), on_event=lambda _: None, options=BuildOptions(binds=(bind,))
    )
    words = (folder.parent / "tools" / "words").read_text().split("\n")
    assert words[words.index("--mount") + 1] == f'type=bind,"source={folder}/site","destination=/mnt",ro'
    assert [(m.what, m.name) for m in made.record.made.materials if m.what == "bind"] == [
        ("bind", f"{folder}/site:/mnt:ro")
    ]
    locked = lock_here(folder)
    assert (locked.sif, builds(folder)) == (made.path, 1)


def test_a_definition_file_that_floats_is_refused_before_anything_is_asked(folder: Path) -> None:
    recipe(folder, "Bootstrap: debootstrap\nOSVersion: trixie\n")
    with pytest.raises(SpecError, match="line 1 of the definition file"):
        lock_here(folder)
    recipe(folder, "Bootstrap: docker\nFrom: 127.0.0.1:9/a\n")
    with pytest.raises(SpecError, match="has no tag"):
        lock_here(folder)
    assert builds(folder) == 0


def test_one_file_cannot_have_registries_with_and_without_tls(folder: Path) -> None:
    recipe(folder, "Bootstrap: docker\nFrom: a.example.org:5000/x:1\n\nBootstrap: docker\nFrom: b.example.org/y:1\n")
    spec(folder, "recipe.def", 'plain-http = ["a.example.org:5000"]\n')
    with pytest.raises(SpecError, match="with and without TLS"):
        lock_here(folder)


@pytest.mark.parametrize("text", ["site", "site:", ":/mnt", "site:/mnt:rx", "site:/mnt:ro:x", "site:mnt", "no:/mnt"])
def test_what_is_no_bind(text: str, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    with pytest.raises(UsageError):
        parse_bind(text, tmp_path)


def test_a_bind_is_read_only_when_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    assert parse_bind("site:/mnt", tmp_path).read_only is False
    assert parse_bind("site:/mnt:ro", tmp_path).read_only is True
    assert parse_bind("site:/mnt:ro", tmp_path).source == str(tmp_path / "site")


def test_a_sif_in_a_registry_is_locked_by_its_own_digest(folder: Path, fake_slurm: Any) -> None:
    some, served = a_sif(folder), SifServed()
    try:
        kept = served.keep(some)
        spec(folder, kept.reference, f'plain-http = ["{served.host}"]\n')
        locked = lock_here(folder)
        table = container(locked)
        assert (table.sif.sha256, table.manifest_digest) == (kept.sha256, None)
        assert table.tree_sha256 == read_tree_digest(some)
        assert locked.sif is not None
        assert locked.sif.name == f"sha256-{kept.sha256}.sif"
        assert reasons(folder) == []

        # The tag moves. A clone without a store gets the locked SIF, by its sha256.
        other = folder / "other.sif"
        other.write_bytes(some.read_bytes() + b"\0" * 512)
        moved = served.keep(other)
        assert moved.sha256 != kept.sha256
        shutil.rmtree(open_workspace(folder).store)
        workspace, environ = open_workspace(folder), dict(os.environ)
        made = build(workspace, before=locked.lockfile, environ=environ, on_event=lambda _: None)
        assert (made.path.name, made.container) == (locked.sif.name, table)
        # One changed byte in the registry: refused, and nothing is in the store.
        shutil.rmtree(open_workspace(folder).store)
        key = ("lab/train", f"sha256:{kept.sha256}")
        served.blobs[key] = served.blobs[key][:-1] + b"x"
        with pytest.raises(ImageUnavailable):
            build(workspace, before=locked.lockfile, environ=environ, on_event=lambda _: None)
        assert open_place(workspace.store_place).list_images() == ()
        assert container(lock_here(folder, upgrade=True)).sif.sha256 == moved.sha256
    finally:
        served.close()


def test_only_definition_files_see_the_host(folder: Path) -> None:
    write_layout(folder / "lay")
    spec(folder, "oci:lay:1")
    (folder / "site").mkdir()
    options = BuildOptions(binds=(parse_bind("site:/mnt", folder),))
    with pytest.raises(UsageError, match="only the build of a definition file"):
        build(open_workspace(folder), before=None, environ={}, on_event=lambda _: None, options=options)


@pytest.fixture
def registry() -> Iterator[Served]:
    it = Served()
    yield it
    it.close()


def test_a_tag_is_resolved_and_the_digest_is_built(folder: Path, registry: Served) -> None:
    host, digest = registry.host, registry.image()["digest"]
    (folder / "recipe.def").write_text(f"Bootstrap: docker\nFrom: {host}/lab/img:1\n")
    spec(folder, "host")
    store = open_place(open_workspace(folder).store_place, create=True)
    events: list[Event] = []
    held: list[str] = []

    def take(event: Event) -> None:
        events.append(event)
        if event.phase == "build":
            held.extend(os.listdir(store.leases))

    path = folder / "recipe.def"
    access = Access(plain_http=(host,), environ=dict(os.environ))
    definition = DefinitionBuild(path=path, text=read_definition(path), name="recipe.def", access=access)
    made = build_definition(definition, store, dict(os.environ), take)
    # By its lease others know that the unfinished work in the store is somebody's.
    assert [name.startswith("definition-") for name in sorted(set(held))] == [True]
    assert os.listdir(store.leases) == os.listdir(store.tmp) == []
    assert (folder.parent / "tools" / "builds").read_text().split() == [digest]
    assert "--no-https" in (folder.parent / "tools" / "words").read_text().split("\n")
    (source,) = made.record.made.materials
    assert (source.name, source.digest) == (f"docker:{host}/lab/img@{digest}", digest)
    assert [event.what for event in events if event.phase == "note"] == [f"docker://{host}/lab/img:1 is {digest}"]


def test_a_moved_tag_is_built_anew_only_when_asked(folder: Path, registry: Served) -> None:
    registry.image()
    recipe(folder, f"Bootstrap: docker\nFrom: {registry.host}/lab/img:1\n")
    spec(folder, "recipe.def", f'plain-http = ["{registry.host}"]\n')
    lock_here(folder)
    registry.image(env=("A=1",))
    registry.requests.clear()
    lock_here(folder)
    assert (builds(folder), registry.requests) == (1, [])
    lock_here(folder, upgrade=True)
    assert builds(folder) == 2
    lock_here(folder, upgrade=True)
    assert builds(folder) == 2


def test_the_verb_builds_a_file_from_any_folder(folder: Path, tmp_path: Path, hpcenv: Any) -> None:
    (folder / "site").mkdir()
    (folder / "recipe.def").write_text("Bootstrap: scratch\n")
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    words = ("image", "build", "project/recipe.def", "--bind", "project/site:/mnt:ro", "--store", "store")
    done = hpcenv(*words, cwd=tmp_path, environ=environ)
    assert done.status == 0, done.stderr
    made = Path(done.stdout.strip())
    assert made.parent == tmp_path / "store" / "images"
    assert "made by apptainer from a definition file, which has no layers to compare with, " in done.stderr
    said = hpcenv(*words, "--json", cwd=tmp_path, environ=environ).envelope["data"]
    assert said["record"]["made"]["materials"][-1]["name"] == f"{folder}/site:/mnt:ro"

    # --plain-http goes with a project, too: it lets a saved password go there.
    refused = hpcenv("image", "build", "--platform", "linux/arm64", cwd=tmp_path, environ=environ)
    assert (refused.status, "needs FILE.def" in refused.stderr) == (2, True)
