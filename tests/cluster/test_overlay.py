"""Packages on top of an image: locked, mounted and checked on real nodes with the real Apptainer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from .conftest import Cluster, Project

pytestmark = pytest.mark.cluster

# A package with its RECORD, and one that the image has, too.
PACKAGES = """\
import base64, hashlib, os, sys
for name, version in (("extra_pkg", "1.0"), ("filelock", "99.0")):
    info = f"{name}-{version}.dist-info"
    texts = {
        f"{name}/__init__.py": f'VERSION = "{version}"\\n',
        f"{info}/METADATA": f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n",
    }
    rows = [f"{info}/RECORD,,"]
    for path, text in texts.items():
        os.makedirs(os.path.dirname(f"{sys.argv[1]}/{path}"), exist_ok=True)
        open(f"{sys.argv[1]}/{path}", "w").write(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text)}")
    open(f"{sys.argv[1]}/{info}/RECORD", "w").write("\\n".join(rows) + "\\n")
"""
SCRIPT = """\
import extra_pkg, torch.distributed as dist
dist.init_process_group("gloo")
try:
    open(extra_pkg.__file__, "a")
except OSError as error:
    print("rank", dist.get_rank(), extra_pkg.__file__, extra_pkg.VERSION, error.strerror, flush=True)
dist.barrier()
dist.destroy_process_group()
"""
SITE = "lib/python3.11/site-packages"


@dataclass(frozen=True)
class Kind:
    """How an overlay is made in the folder of a project, and where its package is then found.

    Attributes:
        make: shell; `$SIF` is the image, `put FOLDER` writes the packages.
        changed: the file in which one byte is changed.
    """

    overlay: str
    make: str
    found: str
    changed: str


VENV = (
    'apptainer -q exec -B "$PWD" "$SIF" python3 -m venv --system-site-packages --without-pip "$PWD/venv"; put venv/'
    + SITE
)
FIELD = "container.overlay.sha256"
KINDS = {
    "venv-squashfs": Kind(
        "venv.sqsh:/user-software",
        f"{VENV}; mksquashfs venv venv.sqsh -quiet -no-progress; rm -r venv",
        f"/user-software/{SITE}",
        "venv.sqsh",
    ),
    "packages": Kind(
        "target.sqsh:/opt/extra",
        "put target; mksquashfs target target.sqsh -quiet -no-progress",
        "/opt/extra",
        "target.sqsh",
    ),
}


@contextmanager
def other_content(cluster: Cluster, node: str, path: str) -> Iterator[None]:
    """One changed byte in a file, seen by one node only."""
    program = 'cp "$1" "$2" && printf X | dd of="$2" bs=1 seek=5 conv=notrunc status=none && mount --bind "$2" "$1"'
    copy = f"/tmp/{uuid.uuid4().hex}"  # noqa: S108  (on the node)
    cluster.must("sh", "-c", program, "sh", path, copy, node=node, user="root")
    try:
        yield
    finally:
        cluster.must("umount", path, node=node, user="root")


@pytest.mark.parametrize(
    "name",
    ["venv-squashfs", *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind != "venv-squashfs")],
)
def test_ranks_import_from_the_overlay_and_one_changed_byte_is_named_with_its_layer(
    cluster: Cluster, sif_project: Project, name: str
) -> None:
    kind, folder = KINDS[name], f"/home/alice/hpcenv-tests/overlay-{name}-{uuid.uuid4().hex[:6]}"
    project = Project(cluster, folder)
    spec = cluster.must("cat", f"{sif_project.folder}/hpcenv.toml")
    cluster.write(f"{folder}/hpcenv.toml", f'overlay = "{kind.overlay}"\n{spec}')
    cluster.write(f"{folder}/train.py", SCRIPT)
    cluster.write(f"{folder}/packages.py", PACKAGES)
    put = 'put() { mkdir -p "$1"; python3 packages.py "$1"; }'
    cluster.must("sh", "-ec", f"{put}; SIF=$1; {kind.make}; rm packages.py", "sh", sif_project.sif(), cwd=folder)

    said = project.hpcenv("lock", "--no-wheels")
    assert said.status == 0, said.text
    assert "packages from the overlay: extra-pkg, filelock" in said.text
    assert "the overlay hides packages of the image: filelock" in said.text

    done = project.hpcenv("submit", "train.py", "--nodes", "2", "--nproc", "1", "--wait")
    assert done.status == 0, done.text
    for rank in (0, 1):
        assert f"rank {rank} " in done.text
    assert f"{kind.found}/extra_pkg/__init__.py 1.0 Read-only file system" in done.text

    with other_content(cluster, "n2", f"{folder}/{kind.changed}"):
        checked = project.hpcenv("verify", "--nodes", "2", "--json")
    found = json.loads(checked.stdout)["data"]["verdict"]["findings"]
    assert checked.status == 90, checked.text
    assert [(f["node"], f["field"]) for f in found if f["severity"] == "must"] == [("n2", FIELD)]
