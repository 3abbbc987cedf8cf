"""`hpcenv image lint` on files: what each path is, SIFs and layouts read without unpacking, one verdict."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import shutil
import subprocess
import tarfile

import layer_cases as cases
import pytest

from hpcenv.errors import FileUnusable, HpcenvError, ImageMismatch, SpecError, UsageError
from hpcenv.identity import sif
from hpcenv.recipes import image_reader
from hpcenv.recipes.lint import lint

AT = "@sha256:" + "a" * 64
KEY = b"-----BEGIN OPENSSH PRIVATE KEY-----\nxxx\n"


def run(paths, **options):
    return lint(paths, **options)


def rules(result):
    return {one.rule for one in result.findings if one.allowed is None}


def layers(user_key=b"root/.ssh/id_ed25519"):
    low = cases.tar(
        cases.directory(b"root", mode=0o700),
        cases.file(user_key, KEY),
        cases.file(b"var/lib/apt/lists/x", bytes(2_000_000)),
        cases.directory(b"usr/lib/python3/dist-packages", mode=0o700),
    )
    return [low, cases.tar(cases.whiteout(user_key), cases.file(b"etc/libibverbs.so.1"))]


CONFIG = {"Env": ["PATH=/bin", "WANDB_API_KEY=abc"], "User": ""}
EXPECTED = {
    "root-user",
    "secret-in-environment",
    "secret-in-lower-layer",
    "cache-left",
    "private-folder",
    "no-fabric",
    "no-python",
    "old-base",
}


@pytest.fixture
def layout(tmp_path):
    cases.write_layout(tmp_path / "layout", layers(), packed=("gzip", "plain"), config=CONFIG)
    return tmp_path / "layout"


def test_a_layout_is_judged_by_layer(layout, tmp_path):
    result = run(["layout"], here=tmp_path)
    assert [one.kind for one in result.checked] == ["image"]
    assert rules(result) == EXPECTED
    key = next(one for one in result.findings if one.rule == "secret-in-lower-layer")
    assert key.place.startswith("layer 1 of 2 (sha256:")
    assert "root/.ssh/id_ed25519" in key.what
    assert result.counts == {"error": 2, "warn": 5, "info": 1}
    assert (result.count_from("error"), result.count_from("info")) == (2, 8)


def test_the_same_image_in_an_archive(layout, tmp_path):
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        archive.add(layout, ".")
    assert rules(run(["oci-archive:image.tar"], here=tmp_path)) == EXPECTED
    assert rules(run([f"oci:{layout}"], here=tmp_path)) == EXPECTED


def test_a_layer_that_is_damaged_is_no_crash(layout, tmp_path):
    for blob in (layout / "blobs/sha256").iterdir():
        raw = blob.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            blob.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(HpcenvError):
        run(["layout"], here=tmp_path)


def test_the_age_of_a_layout_and_of_a_sif(layout, tmp_path):
    def ages(path, today):
        found = run([path], here=tmp_path, today=today).findings
        return [one.what for one in found if one.rule == "old-base"]

    assert ages("layout", dt.date(2024, 6, 11)) == ["the base is 210 days old (made 2023-11-14)"]
    assert ages("layout", dt.date(2024, 1, 1)) == []
    assert image_reader._iso_date("Thursday_20_November_2025_12:30:00_UTC") == "2025-11-20"
    assert image_reader._iso_date("2025-11-20T12:30:00Z") == "2025-11-20T12:30:00Z"
    assert image_reader._iso_date("Noday_99_Nomonth_2025_12:30:00_UTC") == ""


def test_a_history_that_is_none_is_no_crash(layout, tmp_path):
    blobs = layout / "blobs/sha256"

    def changed(digest, **words):
        text = json.dumps({**json.loads((blobs / digest[7:]).read_bytes()), **words}).encode()
        digest = hashlib.sha256(text).hexdigest()
        (blobs / digest).write_bytes(text)
        return {"digest": f"sha256:{digest}", "size": len(text)}

    index = json.loads((layout / "index.json").read_text())
    (manifest,) = index["manifests"]
    config = json.loads((blobs / manifest["digest"][7:]).read_bytes())["config"]
    config.update(changed(config["digest"], history=5))
    manifest.update(changed(manifest["digest"], config=config))
    (layout / "index.json").write_text(json.dumps(index))
    assert rules(run(["layout"], here=tmp_path)) == EXPECTED


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/x", "a/../../b"])
def test_paths_that_climb_stay_inside(tmp_path, name):
    low = cases.tar(cases.file(name.encode(), b"x"))
    cases.write_layout(tmp_path / "layout", [low], config={"User": "1"})
    assert rules(run(["layout"], here=tmp_path)) == {"no-fabric", "no-python", "old-base", "size"}


@pytest.fixture
def image(tmp_path):
    if shutil.which("mksquashfs") is None:
        pytest.skip("mksquashfs is not installed")
    root = tmp_path / "root"
    site = root / "opt/venv/lib/python3.11/site-packages/torch-2.7.0.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Name: torch\nRequires-Dist: nvidia-nccl-cu12==2.26.2\n")
    (root / "opt/venv/lib/python3.11/site-packages/nvidia_nccl_cu12-2.27.3.dist-info").mkdir()
    (root / "opt/venv/lib/python3.11/site-packages/nvidia_nccl_cu12-2.27.3.dist-info/METADATA").write_text("x")
    (root / "home/u").mkdir(parents=True)
    (root / "home/u/deploy.key").write_bytes(KEY)
    (root / ".singularity.d/env").mkdir(parents=True)
    (root / ".singularity.d/env/90-environment.sh").write_text("export HF_TOKEN='hf_abc'\n")
    os.chmod(root / "opt/venv", 0o700)
    path = tmp_path / "a.sif"
    path.write_bytes(bytes(65536))
    words = ["mksquashfs", str(root), str(path), "-offset", "65536", "-noappend", "-quiet", "-comp", "gzip"]
    subprocess.run(words, check=True, capture_output=True)
    sif.write(path, architecture="amd64", squashfs_offset=65536, objects=())
    return path


def test_a_sif_is_judged_without_apptainer(image, tmp_path):
    result = run(["a.sif"], here=tmp_path)
    assert [one.kind for one in result.checked] == ["sif"]
    assert rules(result) == {
        "known-trouble",
        "library-mismatch",
        "no-fabric",
        "no-python",
        "no-install-report",
        "private-folder",
        "secret-in-environment",
        "secret-in-file",
        "size",
    }


def test_a_sif_that_is_damaged(image, tmp_path):
    image.write_bytes(image.read_bytes()[:66_000])
    with pytest.raises(ImageMismatch):
        run(["a.sif"], here=tmp_path)


def test_recipes_are_told_apart_by_what_they_say(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM a:1\nUSER 1\n")
    (tmp_path / "x.def").write_text("Bootstrap: docker\nFrom: a:1\n")
    (tmp_path / "recipe").write_text("# x\nBootStrap: docker\nFrom: a:1\n")
    result = run(["Dockerfile", "x.def", "recipe"], here=tmp_path)
    assert [one.kind for one in result.checked] == ["dockerfile", "definition", "definition"]
    assert rules(result) == {"base-no-digest"}
    assert {one.origin for one in result.findings} == {"Dockerfile", "x.def", "recipe"}


def test_rules_that_are_allowed_do_not_count(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM a\nRUN pip install x\n")
    result = run(["Dockerfile"], here=tmp_path, allow=["base-floating=test", "pip-no-hashes"])
    assert result.count_from("info") == 0
    assert {one.allowed for one in result.findings} == {"test", "on the command line"}
    with pytest.raises(UsageError, match="no rule `no-such`"):
        run(["Dockerfile"], here=tmp_path, allow=["no-such"])


@pytest.mark.parametrize("bad", ["text", "missing", "layout"])
def test_the_other_files_are_judged_after_one_that_cannot_be_read(tmp_path, bad, hpcenv):
    (tmp_path / "a").write_text("FROM a\n")
    (tmp_path / "text").write_text("apiVersion: v1\n")
    (tmp_path / "layout").mkdir()
    result = run(["a", bad, "a"], here=tmp_path)
    assert [one.path for one in result.checked] == ["a", "a"]
    assert [(one.path, bad in one.what) for one in result.unread] == [(bad, True)]
    assert len([one for one in result.findings if one.rule == "base-floating"]) == 2
    done = hpcenv("image", "lint", "a", bad, "a", cwd=tmp_path)
    assert done.status == 19
    assert done.stdout.count("base-floating") == 2
    assert "1 of 3 paths could not be checked" in done.stderr


def test_what_cannot_be_judged(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for name, error in (
        ("binary", SpecError),
        ("fifo", SpecError),
        ("folder", UsageError),
        ("missing", FileUnusable),
        ("oci:missing", HpcenvError),
    ):
        with pytest.raises(error):
            run([name], here=tmp_path)
