"""What is mounted over an image: seen on real nodes with the real Apptainer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .conftest import Cluster, Project

pytestmark = pytest.mark.cluster

PACKAGES = "/usr/local/lib/python3.11/dist-packages"
CONF = "/etc/apptainer/apptainer.conf"


@contextmanager
def bound_by_the_site(cluster: Cluster, node: str, source: str, target: str) -> Iterator[None]:
    """An administrator's `bind path` on one node."""
    line = f"bind path = {source}:{target}"
    cluster.must("sh", "-c", 'echo "$1" >> "$2"', "sh", line, CONF, node=node, user="root")
    try:
        yield
    finally:
        cluster.must("sed", "-i", "$d", CONF, node=node, user="root")


def findings(project: Project, *words: str, status: int = 90) -> list[tuple[str, str]]:
    done = project.hpcenv("verify", *words, "--json")
    assert done.status == status, done.text
    found = json.loads(done.stdout)["data"]["verdict"]["findings"]
    return [(f["node"], f["field"]) for f in found if f["severity"] == "must"]


@pytest.fixture
def source(cluster: Cluster) -> str:
    path = f"/home/alice/hpcenv-tests/bind-{uuid.uuid4().hex[:6]}.py"
    cluster.write(path, "X = 1\n")
    return path


def test_a_bind_of_the_site_on_one_node_is_named(sif_project: Project, cluster: Cluster, source: str) -> None:
    with bound_by_the_site(cluster, "n2", source, f"{PACKAGES}/filelock/__init__.py"):
        assert findings(sif_project, "--nodes", "2") == [("n2", "container.mounts")]


def test_a_bind_of_the_site_where_the_image_has_nothing_is_no_finding(
    sif_project: Project, cluster: Cluster, source: str
) -> None:
    with bound_by_the_site(cluster, "login", source, "/opt/site/x"):
        assert findings(sif_project, status=0) == []


def test_verify_sees_a_bind_of_the_project_and_its_content(sif_project: Project, cluster: Cluster, source: str) -> None:
    spec = cluster.must("cat", f"{sif_project.folder}/hpcenv.toml")
    lockfile = cluster.must("cat", f"{sif_project.folder}/lockfiles/default.lock.toml")
    target = f"{PACKAGES}/filelock/__init__.py"
    cluster.write(f"{sif_project.folder}/hpcenv.toml", f'{spec}[[bind]]\nsource = "{source}"\ntarget = "{target}"\n')
    try:
        stale = sif_project.hpcenv("verify")
        assert (stale.status, "bind-changed" in stale.text) == (7, True), stale.text
        sif_project.must("lock", "--no-wheels")
        assert findings(sif_project, status=0) == []
        cluster.write(source, "X = 2\n")
        assert ("login", "container.bind-content") in findings(sif_project)
    finally:
        cluster.write(f"{sif_project.folder}/hpcenv.toml", spec)
        cluster.write(f"{sif_project.folder}/lockfiles/default.lock.toml", lockfile)


@pytest.mark.long
@pytest.mark.parametrize(
    "target", ["/usr/lib/python3.11/statistics.py", "/lib/x86_64-linux-gnu/libm.so.6", "/etc/ld.so.preload",
               f"{PACKAGES}/torch/nn/functional.py", f"{PACKAGES}/new_module.py"],
)  # fmt: skip
def test_other_places_of_code_are_named_too(sif_project: Project, cluster: Cluster, source: str, target: str) -> None:
    if "libm" in target:
        source = "/lib/x86_64-linux-gnu/libm.so.6"
    if "preload" in target:
        cluster.write(source, "")
    with bound_by_the_site(cluster, "n2", source, target):
        assert ("n2", "container.mounts") in findings(sif_project, "--nodes", "2")
