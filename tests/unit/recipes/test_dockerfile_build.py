"""What builds a Dockerfile: buildah or podman; small programs play them here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import image_fakes
import pytest
from click.testing import CliRunner
from image_fakes import sha

from hpcenv.cli._command_line import cli
from hpcenv.errors import HpcenvError, ToolFailed, ToolMissing
from hpcenv.image.pull import ConvertOptions
from hpcenv.image.reference import Platform
from hpcenv.image.store.store_folder import open_place
from hpcenv.project.store_config import StorePlace
from hpcenv.recipes.dockerfile_build import DockerfileBuild, build_dockerfile, is_dockerfile

# It builds nothing: it writes down its words, and saves an archive of one layer.
ENGINE = r"""#!{python} -IS
import json, os, sys, tarfile
words = sys.argv[1:]
with open({folder!r} + "/calls", "a") as file:
    file.write(json.dumps(words) + "\n")
if os.path.exists({folder!r} + "/fails"):
    print(open({folder!r} + "/fails").read())
    sys.exit(1)
if words[0] == "build":
    open(words[words.index("--iidfile") + 1], "w").write("sha256:image-id")
else:
    place = words[-1].partition("oci-archive:")[2] or words[words.index("--output") + 1]
    with tarfile.open(place, "w") as archive:
        archive.add({layout!r}, ".")
"""

# It packs the image where the squashfs-tools of this machine are too old for hpcenv.
APPTAINER = r"""#!{python} -IS
import os, sys
{build}
words = sys.argv[1:]
if words == ["--version"]:
    print("apptainer version 1.4.5")
else:
    build(words, {folder!r} + "/salt", {folder!r} + "/builds")
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    folder = tmp_path / "tools"
    folder.mkdir()
    write_layout(tmp_path / "layout")
    words = {"python": sys.executable, "folder": str(folder)}
    (folder / "apptainer").write_text(APPTAINER.format(build=image_fakes.BUILD, **words))
    (folder / "apptainer").chmod(0o755)
    (folder / "salt").write_bytes(b"files")
    return folder


def write_layout(place: Path) -> None:
    kind, layer = "application/vnd.oci.image.", image_fakes.tar_layer({"opt/a": b"one"})
    config = {"architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/bin"]}}
    about = json.dumps({**config, "rootfs": {"type": "layers", "diff_ids": [sha(layer)]}}).encode()
    described = {"mediaType": f"{kind}layer.v1.tar", "digest": sha(layer), "size": len(layer)}
    of_config = {"mediaType": f"{kind}config.v1+json", "digest": sha(about), "size": len(about)}
    manifest = {"schemaVersion": 2, "mediaType": f"{kind}manifest.v1+json", "config": of_config, "layers": [described]}
    body = json.dumps(manifest).encode()
    (place / "blobs" / "sha256").mkdir(parents=True)
    for data in (layer, about, body):
        (place / "blobs" / "sha256" / sha(data)[7:]).write_bytes(data)
    entry = {"mediaType": f"{kind}manifest.v1+json", "digest": sha(body), "size": len(body)}
    (place / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (place / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')


def install(tools: Path, name: str) -> None:
    layout = str(tools.parent / "layout")
    (tools / name).write_text(ENGINE.format(python=sys.executable, folder=str(tools), layout=layout))
    (tools / name).chmod(0o755)


def made(tools: Path, *, only_these: bool = False, **more):
    image_fakes.require_mksquashfs()
    context = tools.parent / "context"
    context.mkdir(exist_ok=True)
    (context / "Dockerfile").write_text("FROM base:1\nRUN true\n")
    build = DockerfileBuild(path=context / "Dockerfile", name="Dockerfile", context=context, **more)
    place = StorePlace(root=tools.parent / "store")
    environ = {**os.environ, "PATH": str(tools) if only_these else f"{tools}:{os.environ['PATH']}"}
    return build_dockerfile(build, ConvertOptions(), open_place(place, create=True), environ, lambda _: None)


@pytest.mark.parametrize("engine", ["buildah", "podman"])
def test_the_image_of_an_engine_becomes_a_proved_sif(tools, engine):
    install(tools, engine)
    result = made(tools, arguments={"A": "b c"}, target="last")
    build, save = map(json.loads, (tools / "calls").read_text().splitlines())
    assert build[:3] == ["build", "--format", "docker"]
    assert build[build.index("--build-arg") + 1] == "A=b c"
    assert build[build.index("--target") + 1] == "last"
    assert build[-1] == str(tools.parent / "context")
    assert ("--platform" in build) == (os.uname().machine != "x86_64")
    assert "sha256:image-id" in save
    assert result.record.references == ("Dockerfile",)
    assert result.record.tree_sha256 is not None
    assert result.path.is_file()


def test_another_platform_than_that_of_the_machine_is_named(tools):
    install(tools, "buildah")
    with pytest.raises(HpcenvError):  # what the fake saves is for linux/amd64
        made(tools, platform=Platform(architecture="s390x"))
    build = json.loads((tools / "calls").read_text().splitlines()[0])
    assert build[build.index("--platform") + 1] == "linux/s390x"


def test_buildah_comes_before_podman(tools):
    install(tools, "buildah")
    install(tools, "podman")
    made(tools)
    assert json.loads((tools / "calls").read_text().splitlines()[1])[0] == "push"


def test_a_failed_build_says_what_the_engine_printed(tools):
    install(tools, "buildah")
    (tools / "fails").write_text("Error: building at STEP RUN false: exit status 1")
    with pytest.raises(ToolFailed) as caught:
        made(tools)
    assert "STEP RUN false" in caught.value.why
    assert "BUILDAH_ISOLATION" not in str(caught.value.hint)


def test_where_containers_cannot_start_another_isolation_is_named(tools):
    """What podman 5.4.2 printed on the testbed's login node, as a user without root."""
    install(tools, "podman")
    said = (
        "error running container: from /usr/bin/crun creating container for [/bin/sh -c true]: "
        "invalid file system type on `/sys/fs/cgroup`\n: exit status 1\n"
    )
    (tools / "fails").write_text(said)
    with pytest.raises(ToolFailed) as caught:
        made(tools)
    assert "BUILDAH_ISOLATION=chroot" in str(caught.value.hint)


def test_an_engine_that_is_not_installed_is_named(tools):
    with pytest.raises(ToolMissing, match="podman is not on PATH"):
        made(tools, engine="podman", only_these=True)


def test_without_an_engine_the_error_says_how_else_to_get_an_image(tools):
    with pytest.raises(ToolMissing, match="neither buildah nor podman is on PATH") as caught:
        made(tools, only_these=True)
    hint = str(caught.value.hint)
    assert "build the image on another machine, push it to a registry" in hint
    assert "`hpcenv image pull docker://HOST/NAME:TAG`" in hint
    assert "`hpcenv image init --torch VERSION`" in hint


@pytest.mark.parametrize(
    ("text", "name", "is_one"),
    [
        ("# syntax=docker/dockerfile:1\n\nFROM x\n", "Dockerfile", True),
        ("ARG A=b\nFROM $A\n", "train.docker", True),
        ("Bootstrap: docker\nFrom: x\n", "recipe", False),
        ("from x\n", "odd.def", False),
        ("", "empty", False),
    ],
)
def test_a_dockerfile_is_known_by_its_first_word(text, name, is_one):
    assert is_dockerfile(text, name) is is_one


# -- the command ----------------------------------------------------------------------------------------------------


def run(folder: Path, *words: str):
    (folder / "Dockerfile").write_text('FROM scratch\nCOPY a.txt /a.txt\nCMD ["/a.txt"]\n')
    (folder / "a.txt").write_text("a")
    here = os.getcwd()
    os.chdir(folder)
    try:
        return CliRunner().invoke(cli, ["image", "build", *words])
    finally:
        os.chdir(here)


@pytest.mark.parametrize(
    "words", [("--engine", "podman"), ("--target", "x"), ("--build-arg", "A=b"), ("--context", ".")]
)
def test_options_of_a_dockerfile_need_one(tmp_path, words):
    (tmp_path / "x.def").write_text("Bootstrap: scratch\n")
    done = run(tmp_path, "x.def", *words)
    assert done.exit_code == 2
    assert "needs a DOCKERFILE" in done.output


def test_a_bind_has_no_effect_on_a_dockerfile(tmp_path):
    done = run(tmp_path, "Dockerfile", "--bind", f"{tmp_path}:/mnt:ro")
    assert done.exit_code == 2
    assert "--bind needs FILE.def" in done.output
