"""`hpcenv image build` of thirty real Dockerfiles: the SIF has the tree and the variables of buildah's own image.

The files were drawn by chance from tests/dockerfiles. The testbed has no network: tests/dockerfiles/README.md says what
stands in for their bases, for what they copy, and for what their lines would fetch.
"""

from __future__ import annotations

import csv
import json
import random
import shutil
import tarfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcenv.identity import sif
from hpcenv.recipes import dockerfile

from .conftest import IMAGE, Cluster
from .test_cuda_image import give_to_alice
from .test_image_init import PUSH
from .test_layer_cases import ADDED

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

FILES = Path(__file__).parents[1] / "dockerfiles"
ON_NODE = Path(__file__).parent / "trees_on_node.py"
HOST = IMAGE.removeprefix("docker://").split("/", 1)[0]
# What the images of jupyter and of others set, and their files use.
BASE_ENV = {"CONDA_DIR": "/opt/conda", "NB_USER": "jovyan", "NB_UID": "1000", "NB_GID": "100"}
# Small, for the thirty conversions: what the lines of Dockerfiles use of Debian, without Python, Perl and documents.
BASE = f"""
FROM @BASE@ AS all
COPY shell functions /usr/lib/stand-in/
RUN rm -rf /usr/lib/python3* /usr/local/lib /usr/include /usr/share /usr/lib/gcc /usr/lib/apt /var/lib /var/cache \\
 && find /usr/lib/x86_64-linux-gnu /usr/bin /usr/sbin -xdev -size +1500k ! -name 'libc*' -delete ; \\
 find /usr/lib/x86_64-linux-gnu -mindepth 1 -maxdepth 1 -type d -exec rm -rf {{}} + ; mkdir -p /usr/share /var/lib
RUN mv /bin/bash /usr/lib/stand-in/ && cp /usr/lib/stand-in/shell /bin/bash && ln -sf bash /bin/sh \\
 && useradd --uid 1000 --gid 100 --create-home jovyan && touch /var/log/stand-in && chmod 666 /var/log/stand-in
FROM scratch
COPY --from=all / /
ENV {" ".join(f"{name}={value}" for name, value in BASE_ENV.items())}
"""


def drawn() -> list[str]:
    """Return the names of thirty files, always the same ones."""
    with (FILES / "list.tsv").open(newline="", encoding="utf-8") as file:
        names = sorted(f"{row['repository']}/{row['path']}" for row in csv.DictReader(file, delimiter="\t"))
    return sorted(random.Random(20261128).sample(names, 30))


@dataclass(frozen=True)
class Needed:
    """What a Dockerfile takes from elsewhere: images, paths of its context, paths of images and of earlier stages."""

    images: frozenset[str]
    context: frozenset[str]
    made: frozenset[str]


def needed(text: str) -> Needed:
    parsed = dockerfile.parse(text)
    stages = {stage.name.lower() for stage in parsed.stages} | {str(n) for n in range(len(parsed.stages))}
    images = {stage.base for stage in parsed.stages if stage.parent is None and stage.base != "scratch"}
    values = dict(BASE_ENV)
    context: set[str] = set()
    made: set[str] = set()
    for instruction in (*parsed.global_arguments, *(one for stage in parsed.stages for one in stage.instructions)):
        if instruction.name in ("ARG", "ENV"):
            for name, value in dockerfile.assignments(instruction):
                if value is not None:
                    values[name] = dockerfile.expand(value, values)[0]
        taken = []
        if instruction.name in ("COPY", "ADD") and not instruction.heredocs:
            words = instruction.argv or dockerfile.split_words(instruction.arguments)
            taken = [(instruction.flag("from"), word) for word in words[:-1] if "://" not in word]
        for flag, value in instruction.flags:
            mount = dict(part.partition("=")[::2] for part in value.split(","))
            if flag == "mount" and mount.get("type", "bind") == "bind":
                taken.append((mount.get("from"), mount.get("source") or mount.get("src") or "."))
        for source, word in taken:
            path = dockerfile.expand(word, values)[0].replace("*", "x").strip("/")
            (context if source is None else made).add(path)
            if source is not None and source.lower() not in stages:
                images.add(dockerfile.expand(source, values)[0])
    return Needed(frozenset(images), frozenset(context), frozenset(made))


def make(root: Path, paths: frozenset[str]) -> None:
    """Make a file of what looks like one, and otherwise a folder with a file, a program and a link."""
    root.mkdir(parents=True, exist_ok=True)
    for path in sorted(paths):
        place = root / path
        if place.suffix and not place.is_dir():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f"{path}\n")
            continue
        place.mkdir(parents=True, exist_ok=True)
        (place / "text.txt").write_text(f"{path}\n")
        (place / "program").write_text("#!/bin/sh\n")
        (place / "program").chmod(0o750)
        if not (place / "link").is_symlink():
            (place / "link").symlink_to("text.txt")


@dataclass(frozen=True)
class Lab:
    """alice's folder: each Dockerfile in a context of its own, and what her base images are made from."""

    cluster: Cluster
    folder: str
    here: Path

    def buildah(self, *words: str, cwd: str = "") -> str:
        argv = ("env", "BUILDAH_ISOLATION=chroot", "buildah", *words)
        return self.cluster.must(*argv, cwd=f"{self.folder}/{cwd}", timeout=600)

    def images(self) -> set[str]:
        return set(self.buildah("images", "--quiet", "--no-trunc").split())


@pytest.fixture(scope="module")
def lab(cluster: Cluster) -> Iterator[Lab]:
    inside = f"/home/alice/hpcenv-tests/real-{uuid.uuid4().hex[:6]}"
    place = Path(json.loads(cluster.testbed("status", "--json").stdout)["state"]) / inside.lstrip("/")
    with tarfile.open(FILES / "files.tar.xz") as archive:
        for number, name in enumerate(drawn()):
            file = archive.extractfile(name)
            assert file is not None
            text = file.read().decode()
            wanted = needed(text)
            make(place / str(number) / "context", wanted.context)
            make(place / str(number) / "base" / "made", wanted.made)
            (place / str(number) / "context" / "Dockerfile").write_text(text)
            (place / str(number) / "base" / "Dockerfile").write_text("FROM stand-in\nCOPY made /\n")
    shutil.copytree(FILES / "stand_ins", place / "stand_ins")
    (place / "stand_ins" / "shell").chmod(0o755)
    shutil.copy(ON_NODE, place)
    base = cluster.must("python3", "-", HOST, IMAGE.removeprefix(f"docker://{HOST}/"), stdin=PUSH).strip()
    (place / "stand_ins" / "Dockerfile").write_text(BASE.replace("@BASE@", f"{HOST}/hpcenv/base@{base}"))
    give_to_alice(place)
    lab = Lab(cluster, inside, place)
    lab.buildah("build", "--tls-verify=false", "--tag", "stand-in", "stand_ins")
    yield lab
    lab.buildah("rmi", "--all", "--force")
    cluster.run("sh", "-c", f"chmod -R u+w {inside}; rm -rf {inside}", timeout=600)


SHORT = (
    "jupyter/docker-stacks/images/tensorflow-notebook/cuda/Dockerfile",
    "huggingface/text-generation-inference/Dockerfile_llamacpp",
    "axolotl-ai-cloud/axolotl/.runpod/Dockerfile",
)
# The line for which a build is refused: buildah itself fetches what ADD names, and there is no network.
REFUSED = {"huggingface/text-generation-inference/Dockerfile_llamacpp": "ADD https://github.com/ggml-org/llama.cpp/"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, id=name, marks=() if name in SHORT else pytest.mark.long) for name in drawn()]
)
def test_the_sif_has_the_tree_and_the_variables_of_the_image(lab: Lab, name: str) -> None:
    number = str(drawn().index(name))
    bases = [
        word
        for image in needed((lab.here / number / "context" / "Dockerfile").read_text()).images
        for word in ("--tag", image)
    ]
    lab.buildah("build", "--pull-never", *bases, "base", cwd=number)
    before = lab.images()
    words = ("image", "build", "Dockerfile", "--engine", "buildah", "--store", f"{lab.folder}/store")
    argv = ("env", "BUILDAH_ISOLATION=chroot", "hpcenv", *words)
    done = lab.cluster.run(*argv, cwd=f"{lab.folder}/{number}/context", timeout=600)
    if name in REFUSED:
        assert done.status != 0
        assert REFUSED[name] in done.stderr
        return
    assert done.status == 0, done.text[-6000:]
    path = done.stdout.split()[-1]
    (image,) = lab.images() - before
    offset = sif.read_header(lab.here / Path(path).relative_to(lab.folder)).runs.offset
    compared = json.loads(lab.buildah("unshare", "python3", ON_NODE.name, image, path, str(offset)))
    unlike = {
        path: pair
        for path, pair in compared["different"].items()
        if not (pair[0] is None and (path.encode() in ADDED or path.startswith(".singularity.d/")))
    }
    assert unlike == {}
    assert compared["paths"] > 500
    said = lab.cluster.must("apptainer", "-q", "exec", "--cleanenv", path, "env", "-0")
    inside = dict(entry.split("=", 1) for entry in said.split("\0") if entry)
    expected = dict(entry.split("=", 1) for entry in compared["config"]["Env"])
    # Apptainer adds the folder in which --nv puts the driver.
    inside["LD_LIBRARY_PATH"] = inside.get("LD_LIBRARY_PATH", "").removesuffix(":/.singularity.d/libs")
    assert {key: inside.get(key) for key in expected} == expected
