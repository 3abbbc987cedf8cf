"""`image = "oci:..."` and `image = "PATH.sif"` on the real cluster: locked, checked, verified, planned and run."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

import pytest

from .conftest import IMAGE, STORE, Cluster, Project, copy_examples

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long]

# Copies an image of the registry into an OCI layout, as `skopeo copy` would.
FETCH = """
import json, os, shutil, sys, urllib.request
host, name, folder = sys.argv[1:]
repository, tag = name.split(":")
kind = "application/vnd.oci.image.manifest.v1+json"
blobs = os.path.join(folder, "blobs", "sha256")
os.makedirs(blobs)
request = urllib.request.Request(f"http://{host}/v2/{repository}/manifests/{tag}", headers={"Accept": kind})
with urllib.request.urlopen(request, timeout=60) as answer:
    body, digest, media = answer.read(), answer.headers["Docker-Content-Digest"], answer.headers["Content-Type"]
open(os.path.join(blobs, digest[7:]), "wb").write(body)
manifest = json.loads(body)
for blob in (manifest["config"], *manifest["layers"]):
    with urllib.request.urlopen(f"http://{host}/v2/{repository}/blobs/{blob['digest']}", timeout=60) as answer:
        with open(os.path.join(blobs, blob["digest"][7:]), "wb") as file:
            shutil.copyfileobj(answer, file, 1 << 20)
entry = {"mediaType": media, "digest": digest, "size": len(body)}
entry["annotations"] = {"org.opencontainers.image.ref.name": "torch"}
json.dump({"schemaVersion": 2, "manifests": [entry]}, open(os.path.join(folder, "index.json"), "w"))
open(os.path.join(folder, "oci-layout"), "w").write('{"imageLayoutVersion":"1.0.0"}')
print(digest)
"""


@pytest.fixture(scope="module")
def project(cluster: Cluster) -> Iterator[Project]:
    folder = f"/home/alice/hpcenv-tests/kinds-{uuid.uuid4().hex[:6]}"
    copy_examples(cluster, folder)
    yield Project(cluster, folder)
    cluster.run("rm", "-rf", folder)


def spec(project: Project, image: str) -> None:
    project.cluster.write(f"{project.folder}/hpcenv.toml", f'image = "{image}"\n[paths]\nstore = "{STORE}"\n')


def lock_and_look(project: Project) -> dict:
    """Lock what hpcenv.toml names; check, verify and plan a job; return `lock --json`'s data."""
    locked = json.loads(project.must("lock", "--no-wheels", "--json", timeout=600))["data"]
    project.must("lock", "--check")
    verdict = project.json("verify")
    assert verdict["ok"], verdict
    assert verdict["data"]["verdict"]["result"] == "match"
    words = ("submit", "examples/train.py", "--nodes", "1", "--nproc", "1")
    planned = project.must(*words, "--dry-run")
    assert "#SBATCH" in planned
    return locked


def test_a_layout_and_then_its_sif(project: Project) -> None:
    cluster = project.cluster
    host, name = IMAGE.removeprefix("docker://").split("/", 1)
    layout = f"{project.folder}/layout"
    digest = cluster.must("python3", "-", host, name, layout, stdin=FETCH).strip()

    spec(project, "oci:layout:torch")
    locked = lock_and_look(project)
    text = cluster.must("cat", f"{project.folder}/lockfiles/default.lock.toml")
    assert f'manifest-digest = "{digest}"' in text
    assert 'digest-origin = "layout"' in text
    assert locked["sif"] == f"{STORE}/images/{digest.replace(':', '-')}.sif"

    cluster.must("rm", "-rf", layout)
    project.must("lock", "--check")

    cluster.must("cp", locked["sif"], f"{project.folder}/some.sif")
    spec(project, "some.sif")
    sha256 = cluster.must("sha256sum", f"{project.folder}/some.sif").split()[0]
    assert lock_and_look(project)["sif"] == f"{project.folder}/some.sif"
    text = cluster.must("cat", f"{project.folder}/lockfiles/default.lock.toml")
    assert f'sha256 = "{sha256}"' in text
    assert "manifest-digest" not in text
    assert project.folder not in text
    words = ("submit", "examples/train.py", "--nodes", "1", "--nproc", "1", "--wait", "--", "--steps", "3")
    done = project.hpcenv(*words, timeout=300)
    assert done.status == 0, done.text

    cluster.must("sh", "-c", 'chmod u+w "$1" && printf x >> "$1"', "sh", f"{project.folder}/some.sif")
    done = project.hpcenv("lock", "--check")
    assert done.status != 0
    assert "sif-differs" in done.text
