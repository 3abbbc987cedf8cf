"""The store between users and nodes: other people's stores, and leases of killed holders."""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from .conftest import TESTBED, Cluster

pytestmark = pytest.mark.cluster

PYTHON = "/shared/hpcenv/venv/bin/python"
DIGEST = "sha256:" + "a" * 64

PUBLISH = """
import hashlib, sys
from pathlib import Path
from hpcenv.image.store.store_folder import open_place
from hpcenv.image.store.store_folder import open_store
from hpcenv.image.store.sif_record import ImageRecord, Provenance, SifFacts
store = open_store(Path(sys.argv[1]), create=True, shared=len(sys.argv) > 3)
record = ImageRecord(
    digest=sys.argv[2], references=("docker://registry.example/x:1",), platform="linux/amd64",
    sif=SifFacts(sha256=hashlib.sha256(b"SIF").hexdigest(), size=3, partition_sha256="0" * 64, partition_size=1,
                 compression="zstd", architecture="amd64"),
    made=Provenance(builder="hpcenv", tools={}),
)
with store.lease(record.digest, purpose="tests", timeout=30), store.scratch(0) as folder:
    (folder / "x").write_bytes(b"SIF")
    print(store.publish_image(folder / "x", record).path)
"""

READ = """
import sys
from pathlib import Path
from hpcenv.project.store_config import StorePlace
from hpcenv.image.store.store_folder import open_place
from hpcenv.errors import HpcenvError
from hpcenv.locking.image_path import find_path
try:
    place = StorePlace(root=Path(sys.argv[1]), trusted_owners=tuple(sys.argv[2:]))
    store = open_place(place, create=True)
    print(store.writable, find_path(place, "docker://registry.example/x:1"))
    store.require_writable("pull")
except HpcenvError as error:
    print(error.what, "|", error.why, "|", error.hint)
"""

# Holds the lease argv[1] until it is killed; stale after 3 s instead of 30, to save time.
HOLD = """
import os, sys, time
from pathlib import Path
from hpcenv.image.store.lease import lease
with lease(Path(sys.argv[1]), purpose="converts x", timeout=60, beat=0.2, stale_after=3, on_event=lambda e: print(e.what, flush=True)) as held:
    print("held", os.getpid(), flush=True)
    if len(sys.argv) == 2:
        time.sleep(600)
    assert held.still_mine()
"""


@pytest.fixture
def place(cluster: Cluster) -> Iterator[str]:
    """A folder that alice and bob both may enter, as a project folder of a group is."""
    folder = f"/shared/scratch/store-{uuid.uuid4().hex[:6]}"
    cluster.must("install", "-d", "-m", "1777", folder, user="root")
    yield folder
    cluster.must("rm", "-rf", folder, user="root")


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program of alice's on a node and go on."""
    children: list[subprocess.Popen[str]] = []

    def begin(program: str, *words: str, node: str) -> subprocess.Popen[str]:
        argv = [str(TESTBED), "exec", "--node", node, "--user", "alice", "--", PYTHON, "-c", program, *words]
        children.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True))
        return children[-1]

    yield begin
    for child in children:
        child.kill()
        child.communicate()


def test_a_store_of_bobs_is_read_by_alice_when_she_trusts_him(cluster: Cluster, place: str) -> None:
    store = f"{place}/bobs"
    path = cluster.must(PYTHON, "-c", PUBLISH, store, DIGEST, user="bob").strip()
    refused = cluster.must(PYTHON, "-c", READ, store)
    assert refused == (
        f"`{store}` is not trusted | `bob` could change what is in it (mode 0755, owner bob:bob)"
        " | if you trust `bob`: --trust bob, or HPCENV_STORE_OWNERS=bob\n"
    )
    read = cluster.must(PYTHON, "-c", READ, store, "bob").splitlines()
    assert read[0] == f"False {path}"
    assert read[1].startswith(
        f"the store `{store}` cannot be written to | it belongs to bob; write access is needed to pull |"
    )
    assert cluster.run("sh", "-c", f"echo x > {path}").status != 0


def test_a_store_that_everybody_may_write_to_is_refused(cluster: Cluster, place: str) -> None:
    store = f"{place}/open"
    cluster.must(PYTHON, "-c", PUBLISH, store, DIGEST)
    cluster.must("chmod", "o+w", f"{store}/images")
    done = cluster.run("hpcenv", "image", "list", "--store", store)
    assert done.status == 19, done.text
    assert f"error[file-unusable]: `{store}/images` is not trusted" in done.stderr
    assert "everybody may write to it (mode 0757, owner alice:alice)" in done.stderr
    assert f"hint: chmod o-w {store}/images" in done.stderr
    cluster.must("chmod", "o-w", f"{store}/images")
    assert "docker://registry.example/x:1" in cluster.must("hpcenv", "image", "list", "--store", store)


def test_a_group_shares_a_store_for_writing(cluster: Cluster, place: str) -> None:
    store = f"{place}/group"
    # alice and bob share no group here: bob's own stands for it, and root acts for alice.
    cluster.must("install", "-d", "-m", "2775", "-g", "bob", store, user="root")
    cluster.must("sh", "-c", f'umask 077; exec {PYTHON} -c "$1" {store} {DIGEST} shared', "sh", PUBLISH, user="root")
    other = "sha256:" + "b" * 64
    path = cluster.must(PYTHON, "-c", PUBLISH, store, other, "shared", user="bob").strip()
    assert cluster.must("stat", "-c", "%U:%G %a", path).strip() == "bob:bob 444"
    listed = cluster.must("ls", f"{store}/images", f"{store}/tmp", user="bob")
    assert listed.count(".sif") == 2


def test_a_holder_killed_on_n1_lets_a_waiter_on_n2_go_on(cluster: Cluster, place: str, start: Start) -> None:
    lease = f"{place}/lease"
    holder = start(HOLD, lease, node="n1")
    assert holder.stdout is not None
    pid = holder.stdout.readline().split()[1]
    waiter = start(HOLD, lease, "then go", node="n2")
    assert waiter.stdout is not None
    told = waiter.stdout.readline()
    assert told.startswith(f"pid {pid} on n1 converts x since "), told
    cluster.must("kill", "-9", pid, node="n1")
    killed = time.monotonic()
    rest = waiter.stdout.read()
    assert waiter.wait(30) == 0
    assert rest.startswith("held ")
    assert 2 < time.monotonic() - killed < 20
    assert holder.wait(10) != 0
    assert cluster.must("ls", "-A", place) == ""


CONTEND = """
import os, sys
from pathlib import Path
from hpcenv.image.store.lease import lease
folder = Path(sys.argv[1])
for turn in range(2):
    with lease(folder / "lease", purpose="counts", timeout=100, beat=0.2, stale_after=4) as held:
        inside = os.open(folder / "inside", os.O_CREAT | os.O_EXCL)  # fails where two are inside
        (folder / "count").write_text(str(int((folder / "count").read_text()) + 1))
        if (sys.argv[2], turn) == ("n1-0", 1):
            os.unlink(folder / "inside")
            os.kill(os.getpid(), 9)
        assert held.still_mine()
        os.close(inside)
        os.unlink(folder / "inside")
"""


def test_eight_contenders_on_two_nodes_one_of_them_killed(cluster: Cluster, place: str, start: Start) -> None:
    cluster.must("sh", "-c", f"echo 0 > {place}/count")
    children = [start(CONTEND, place, f"{node}-{number}", node=node) for number in range(4) for node in ("n1", "n2")]
    ended = [child.wait(120) for child in children]
    assert sorted(status == 0 for status in ended) == [False, *[True] * 7], ended
    # The killed one may have been the last of all: its lease then stays until somebody asks.
    began = time.monotonic()
    assert start(CONTEND, place, "n1-late", node="n1").wait(60) == 0
    assert time.monotonic() - began < 20
    assert cluster.must("cat", f"{place}/count").strip() == str(7 * 2 + 2 + 2)
    assert cluster.must("ls", "-A", place).split() == ["count"]
