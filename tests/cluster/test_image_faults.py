"""Whatever breaks while an image is made: it is right or absent, the message says why, and the next call succeeds.

What breaks it runs on the nodes: faults_on_node.py. A SIF's bytes follow from its image, so
"right" is the digest that a call without a fault gave.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from error_text import unwrapped

from .conftest import TESTBED, Cluster

# The whole campaign takes minutes; the test command makes a short one of it.
LONG = bool(os.environ.get("HPCENV_TEST_LONG"))
KILLS = 10 if LONG else 3
pytestmark = pytest.mark.cluster

PYTHON = "/shared/hpcenv/venv/bin/python"
REGISTRY = "registry:5000"
Begin = Callable[..., "subprocess.Popen[str]"]


class Faults:
    """The program that breaks conversions, its folder, and what a good store holds."""

    def __init__(self, cluster: Cluster, folder: str) -> None:
        self.cluster = cluster
        self.folder = folder
        self.store = f"{folder}/store-{uuid.uuid4().hex[:6]}"
        self.image: dict[str, Any] = {}

    def argv(self, verb: str, *words: str, store: str | None = None) -> list[str]:
        return [PYTHON, f"{self.folder}/faults.py", verb, f"{self.folder}/image.json", store or self.store, *words]

    def make(self, verb: str, *words: str, **where: Any) -> Any:
        return json.loads(self.cluster.must(*self.argv(verb, *words), **where))

    def pull(self, *words: str, store: str | None = None, **where: Any) -> Any:
        argv = [
            "hpcenv",
            "image",
            "pull",
            "--plain-http",
            REGISTRY,
            "--store",
            store or self.store,
            self.image["reference"],
        ]
        return self.cluster.run(*argv, *words, **where)


@pytest.fixture(scope="module")
def prepared(cluster: Cluster) -> Iterator[Faults]:
    folder = f"/home/alice/hpcenv-tests/faults-{uuid.uuid4().hex[:6]}"
    cluster.write(f"{folder}/faults.py", Path(__file__).with_name("faults_on_node.py").read_text(encoding="utf-8"))
    faults = Faults(cluster, folder)
    said = cluster.must(PYTHON, f"{folder}/faults.py", "prepare", folder, REGISTRY)
    cluster.write(f"{folder}/image.json", said)
    faults.image = json.loads(said)
    assert faults.image["left"] == []
    yield faults
    cluster.must("rm", "-rf", folder, user="root")


@pytest.fixture
def faults(prepared: Faults) -> Faults:
    prepared.store = f"{prepared.folder}/store-{uuid.uuid4().hex[:6]}"
    return prepared


@pytest.fixture(scope="module")
def begin(prepared: Faults) -> Iterator[Begin]:
    """Start a fault on a node and go on."""
    children: list[subprocess.Popen[str]] = []

    def start(node: str, *argv: str) -> subprocess.Popen[str]:
        whole = [str(TESTBED), "exec", "--node", node, "--user", "alice", "--", *argv]
        children.append(subprocess.Popen(whole, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.communicate()


@pytest.fixture(scope="module")
def stopped_holder(prepared: Faults, begin: Begin) -> subprocess.Popen[str]:
    """Takes the 30 s after which a lease is stale, and hardly any processor: the other tests go on meanwhile."""
    return begin("n2", *prepared.argv("holder_stops", store=f"{prepared.folder}/stopped"))


@pytest.fixture(autouse=True)
def _early(stopped_holder: object) -> None:
    pass


def good(after: dict[str, Any]) -> bool:
    """Whether the next call made the image, whole and right, and left nothing else."""
    assert after["status"] == 0, after["stderr"]
    assert (after["wrong"], after["missing"], after["left"]) == ([], [], []), after
    assert "Traceback" not in after["stderr"]
    return True


def test_a_registry_that_dies_in_mid_blob(faults: Faults) -> None:
    done = faults.make("registry_dies")
    assert done["fault"]["status"] == 10
    assert done["fault"]["wrong"] == []
    assert not any(name.startswith("images/") for name in done["fault"]["there"])
    said = unwrapped(done["fault"]["stderr"])
    assert "is down\n  why: no program listens at 127.0.0.1:" in said
    assert "hint: start the registry, or check its port" in said
    assert good(done["after"])
    assert ": continuing after " in done["after"]["stderr"]


def test_a_registry_that_breaks_every_transfer_off_is_asked_for_the_rest(faults: Faults) -> None:
    done = faults.make("registry_lies", "cut")
    assert done["fault"]["status"] == 0, done["fault"]["stderr"]
    assert done["fault"]["wrong"] == []
    assert good(done["after"])


def test_wrong_bytes_from_a_registry(faults: Faults) -> None:
    done = faults.make("registry_lies", "flip")
    assert done["fault"]["status"] == 10
    assert done["fault"]["wrong"] == []
    said = unwrapped(done["fault"]["stderr"])
    assert "arrived twice with wrong bytes\n  why: expected sha256:" in said
    assert "hint: a proxy or mirror may change it; do not use this image from there" in said
    assert good(done["after"])


def test_what_the_store_keeps_is_damaged(faults: Faults) -> None:
    found = faults.make("damaged", f"{faults.folder}/good")
    assert len(found) == 7
    for name, after in found.items():
        assert good(after), name
    for name in ("blob flipped, index kept", "blob flipped, no index"):
        assert f"the stored layer {faults.image['layers'][1][:19]} is damaged" in found[name]["stderr"]
        assert "; fetching it again" in found[name]["stderr"]


@pytest.fixture
def disk(cluster: Cluster) -> Iterator[Callable[..., str]]:
    """A file system of a size, alice's, on the login node."""
    place = f"/mnt/faults-{uuid.uuid4().hex[:6]}"
    cluster.must("mkdir", "-p", place, user="root")

    def size(amount: str, *, again: bool = False) -> str:
        options = f"{'remount,' if again else ''}size={amount},mode=0755,uid=alice,gid=alice"
        cluster.must("mount", "-t", "tmpfs", "-o", options, "tmpfs", place, user="root")
        return place

    yield size
    cluster.run("umount", place, user="root")
    cluster.run("rmdir", place, user="root")


@pytest.mark.parametrize(
    ("size", "what", "why"),
    [
        ("4k", "cannot be used", "No space left on device"),
        ("10m", "there is not enough space in `", "free; nothing was downloaded"),
        ("60m", "there is not enough space in `", "MB must be downloaded, and the SIF needs up to "),
    ],
)
def test_the_stores_disk_is_too_small(faults: Faults, disk: Callable[..., str], size: str, what: str, why: str) -> None:
    store = f"{disk(size)}/store"
    done = faults.pull(store=store)
    assert done.status == 19, done.text
    assert what in done.stderr
    assert why in done.stderr
    if "fetched" in why:
        assert faults.cluster.must("ls", "-A", f"{store}/blobs/sha256") == ""
        assert f"hint: hpcenv image prune --store {store}," in done.stderr
    assert "image" in done.stderr[done.stderr.index("hint: ") :]
    disk("200m", again=True)
    assert good(json.loads(faults.cluster.must(*faults.argv("after", store=store))))


def test_the_disk_fills_up_while_the_image_is_written(faults: Faults, disk: Callable[..., str]) -> None:
    store = f"{disk('130m')}/store"
    done = json.loads(faults.cluster.must(*faults.argv("disk_fills", store=store)))
    assert done["fault"]["status"] == 19, done["fault"]["stderr"]
    assert done["fault"]["wrong"] == []
    assert "could not be written: the file system is full" in done["fault"]["stderr"]
    assert "hint: free space there, or choose another folder for the images" in done["fault"]["stderr"]
    assert good(done["after"])


def test_the_temporary_folder_is_full(faults: Faults, disk: Callable[..., str]) -> None:
    place = disk("64k")
    faults.cluster.run("dd", "if=/dev/zero", f"of={place}/filler", "bs=4k")
    pull = ["hpcenv", "image", "pull", "--plain-http", REGISTRY, "--store", faults.store, faults.image["reference"]]
    # What is streamed needs no temporary folder; `apptainer build` does, and looks for another one.
    done = faults.cluster.run("env", f"TMPDIR={place}", *pull)
    assert done.status == 0, done.text
    assert "made by hpcenv" in done.stderr
    assert good(faults.make("after"))


def test_a_limit_on_the_size_of_files(faults: Faults) -> None:
    pull = f"hpcenv image pull --plain-http {REGISTRY} --store {faults.store} {faults.image['reference']}"
    done = faults.cluster.run("bash", "-c", f"ulimit -f 18000; {pull}")  # KiB: the layers pass, the SIF does not
    assert done.status == 9, done.text
    assert "error[tool-failed]: `mksquashfs` was killed by signal 25" in done.stderr
    assert "a limit on the size of files stopped it (ulimit -f)" in done.stderr
    assert good(faults.make("after"))


def test_killed_at_random_moments(faults: Faults, begin: Begin) -> None:
    # Of the time that a pull took when the machine was perhaps busier: most kills must come before the end.
    seconds = faults.image["seconds"] * 0.6
    half = [
        begin(node, *faults.argv("broken_by", seed, str(KILLS), "KILL", str(seconds), store=f"{faults.store}-{node}"))
        for node, seed in (("n1", "1"), ("n2", "2"))
    ]
    rounds = [found for child in half for found in json.loads(child.communicate(timeout=200)[0])]
    assert len(rounds) == 2 * KILLS
    for found in rounds:
        assert found["wrong"] == [], found
        assert good(found["after"]), found
    # Not all of them before there was anything to break.
    assert sum(found["status"] == -9 for found in rounds) >= KILLS
    assert sum(bool(found["left_by_fault"]) for found in rounds) >= (2 if LONG else 0)


def test_interrupted_and_the_packer_killed(faults: Faults) -> None:
    for found in faults.make("broken_by", "3", "4" if LONG else "2", "INT,CHILD", str(faults.image["seconds"] * 1.2)):
        assert found["wrong"] == [], found
        assert good(found["after"]), found
        assert found["left_by_fault"] == [] or all(".part" in name for name in found["left_by_fault"]), found
        if found["kind"] == "INT" and found["status"] == 130:
            assert "error[interrupted]: interrupted" in found["stderr"]
        if found["status"] == 9:
            assert "error[tool-failed]: `mksquashfs` was killed by signal 9\n  why: " in found["stderr"]
            assert "hint: on a login node, convert in a job: `srun -c 8 hpcenv image pull" in found["stderr"]


def test_eight_converters_on_two_nodes_convert_once(faults: Faults, begin: Begin) -> None:
    both = [begin(node, *faults.argv("many", "4")) for node in ("n1", "n2")]
    found = [one for child in both for one in json.loads(child.communicate(timeout=200)[0])]
    assert [one["status"] for one in found] == [0] * 8, found
    assert sum("pack" in one["phases"] for one in found) == 1
    assert sum("fetch" in one["phases"] for one in found) == 1
    assert sorted(json.loads(one["out"])["data"]["reused"] for one in found) == [False, *[True] * 7]
    assert good(faults.make("after"))


def test_a_store_that_others_may_write_to_is_refused_before_anything_is_fetched(faults: Faults) -> None:
    faults.cluster.must("sh", "-c", f"mkdir -p {faults.store}/blobs/sha256 && chmod o+w {faults.store}/blobs/sha256")
    done = faults.pull()
    assert done.status == 19, done.text
    assert f"`{faults.store}/blobs/sha256` is not trusted" in done.stderr
    assert f"hint: chmod o-w {faults.store}/blobs/sha256" in done.stderr
    assert faults.cluster.must("find", faults.store, "-type", "f", "-path", "*/sha256/*") == ""
    faults.cluster.must("chmod", "o-w", f"{faults.store}/blobs/sha256")
    assert good(faults.make("after"))


@pytest.mark.long
@pytest.mark.parametrize("when", ["2001-01-01", "2099-01-01"])
def test_clocks_that_are_off(faults: Faults, when: str) -> None:
    """All machines here have one clock: files of a machine whose clock is off carry its times."""
    found = faults.make("times", when)
    assert found["fault"]["wrong"] == []
    assert good(found["after"])


def test_a_stopped_holder_loses_its_lease_and_does_no_harm_when_it_wakes(
    faults: Faults, stopped_holder: subprocess.Popen[str]
) -> None:
    done = json.loads(stopped_holder.communicate(timeout=200)[0])
    assert done["second"]["status"] == 0, done["second"]["stderr"]
    assert done["second"]["wrong"] == []
    assert "on n2 converts sha256:" in done["second"]["stderr"]
    assert done["first"]["status"] == 0, done["first"]["stderr"]
    assert "another process has taken over this conversion; publishing is still safe" in done["first"]["stderr"]
    assert good(done["after"])
