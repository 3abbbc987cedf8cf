"""The articles' list of packages as one line of `image init`: resolved, built, locked with proved hashes, trained in.

The image has 5 GB: torch 2.1.2 with CUDA 12.1, which trains on the CPUs here, because nothing here has a GPU.
tests/unit/recipes/test_init.py has the short test, with torch 2.1.2 as a small wheel.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomlkit

from tests.conftest import hpcenv

from .conftest import IMAGE, Cluster, Project
from .test_cuda_image import download, give_to_alice, make_site
from .test_image_init import DEBS, PUSH, debian_packages

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]

ASKED = ("transformers==4.36.0", "accelerate==0.25.0", "datasets==2.16.0", "wandb==0.16.1", "torchvision")
# What pip does not know of these old releases, and a note of `image init` says: pyarrow 26 refuses NumPy 1, and wandb
# needs pkg_resources.
OLD = ("pyarrow<26", "setuptools<82")
APT = ("libibverbs1", "libgl1", "libglib2.0-0")

TRAIN = """
import platform, tempfile, accelerate, datasets, numpy, torch, torchvision, wandb
from transformers import GPT2Config, GPT2LMHeadModel
state = accelerate.PartialState(cpu=True)
torch.manual_seed(0)
wandb.init(mode="offline", dir=tempfile.mkdtemp(), project="seeds")
rows = datasets.Dataset.from_dict({"x": [[(7 * n + k) % 50 for k in range(8)] for n in range(32)]}).with_format("torch")
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=8))
model = torch.nn.parallel.DistributedDataParallel(model)
steps = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for n in range(12):
    x = rows[(n % 4) * 8 + state.process_index * 4 : (n % 4) * 8 + state.process_index * 4 + 4]["x"]
    loss = model(input_ids=x, labels=x).loss
    steps.zero_grad(); loss.backward(); steps.step()
    losses.append(loss.item())
    wandb.log({"loss": loss.item()})
wandb.finish()
print(f"rank {state.process_index} on {platform.node()}: numpy {numpy.__version__}, fell {losses[-1] < losses[0]}", flush=True)
"""


@pytest.fixture(scope="module")
def project(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """alice's project with the recipe, her index, and the SIF that she builds."""
    host, name = IMAGE.removeprefix("docker://").split("/", 1)
    digest = cluster.must("python3", "-", host, name, stdin=PUSH).strip()
    here = tmp_path_factory.mktemp("seeds")
    words = ("image", "init", "--torch", "2.1.2", "--base", f"{host}/hpcenv/base@{digest}")
    more = [word for one in (*ASKED, *OLD) for word in ("--with", one)] + [
        word for one in APT for word in ("--apt", one)
    ]
    done = hpcenv(*words, *more, cwd=here, environ=dict(os.environ), timeout=900)
    assert done.status == 0, done.stderr
    wheels = download(here / "image" / "requirements.lock")

    inside = f"/home/alice/hpcenv-tests/seeds-{uuid.uuid4().hex[:6]}"
    folder = Path(json.loads(cluster.testbed("status", "--json").stdout)["state"]) / inside.lstrip("/")
    shutil.copytree(here / "image", folder / "image")
    make_site(folder / "image" / "site", wheels, debian_packages("seeds-debs", (*DEBS, *APT)))
    (folder / "train.py").write_text(TRAIN)
    spec = f'image = "image/image.def"\nplain-http = ["{host}"]\n[paths]\nstore = "{inside}/store"\n'
    (folder / "hpcenv.toml").write_text(spec)
    give_to_alice(folder)
    made = Project(cluster, inside)
    build = ("image", "build", "image/image.def", "--bind", "image/site:/mnt:ro", "--plain-http", host)
    made.must(*build, timeout=2400)
    yield made
    cluster.run("sh", "-c", f"chmod -R u+w {inside}; rm -rf {inside}", timeout=600)


@pytest.fixture(scope="module")
def locked(project: Project) -> dict:
    """The lock, with alice's index as pip's default one; it ends with 47 where a hash is not proved."""
    words = ("hpcenv", "lock", "--require-hashes")
    done = project.cluster.run("env", index_variable(project), *words, cwd=project.folder, timeout=1800)
    assert done.status == 0, done.text
    return tomlkit.parse(project.cluster.must("cat", f"{project.folder}/lockfiles/default.lock.toml")).unwrap()


def index_variable(project: Project) -> str:
    return f"PIP_INDEX_URL=file://{project.folder}/image/site/index/simple"


def test_each_package_of_the_list_is_locked_with_a_proved_hash(project: Project, locked: dict) -> None:
    found = {one["name"]: (one["version"], one["wheel"]["proof"]) for one in locked["packages"]["dist"]}
    assert {f"{name}=={version}" for name, (version, _) in found.items()} >= {
        *ASKED[:-1],
        "torch==2.1.2",
        "torchvision==0.16.2",
    }
    assert found["numpy"][0].startswith("1.")
    assert {proof for _, proof in found.values()} == {"record"}


def test_two_nodes_train_with_them(project: Project, locked: dict) -> None:
    words = ("--nodes", "2", "--gpus", "0", "--nproc", "1", "--wait")
    done = project.cluster.run("hpcenv", "submit", "train.py", *words, cwd=project.folder, timeout=900)
    run = re.search(r"submitted (\S+):", done.text)[1]
    log = project.cluster.must("cat", f"{project.folder}/runs/{run}/job.log")
    assert done.status == 0, done.text + log[-4000:]
    assert sorted(re.findall(r"rank (\d) on (n\d): numpy 1\.26\.4, fell (\w+)", log)) == [
        ("0", "n1", "True"),
        ("1", "n2", "True"),
    ]
