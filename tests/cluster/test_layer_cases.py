"""Awkward and hostile images through `hpcenv image pull` on the real cluster.

Awkward ones: the tree in the SIF is what umoci unpacks, as hpcenv's reader reads it and as
unsquashfs unpacks it. Hostile ones: refused, or contained, within limits of time and memory.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import layer_cases
import pytest
from blake3 import blake3
from layer_cases import CASES, HOSTILE, Case, Hostile, from_folder

from hpcenv.identity import sif
from hpcenv.image.content import tree
from hpcenv.image.content.tree import TreeEntry
from hpcenv.image.convert import squashfs_reader

from .conftest import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ON_NODE = Path(__file__).parent / "layers_on_node.py"
# A program for x86-64 without libraries: write(1, "ran\n", 4), exit(0).
_CODE = bytes.fromhex("b801000000bf01000000488d3510000000ba040000000f05b83c00000031ff0f05") + b"ran\n"
_ELF = bytes.fromhex(
    "7f454c46020101000000000000000000 02003e0001000000 7800400000000000 4000000000000000 0000000000000000"
    "00000000 4000 3800 0100 0000 0000 0000"
    "01000000 05000000 0000000000000000 0000400000000000 0000400000000000"
)
PROGRAM = _ELF + 2 * (120 + len(_CODE)).to_bytes(8, "little") + (4096).to_bytes(8, "little") + _CODE
RUNS = Case(
    layers=layer_cases.over(layer_cases.file(b"bin/ran", PROGRAM, mode=0o755), layer_cases.whiteout(b"etc/app.d"))
)
# What `apptainer build` converts from the same layers, if it is asked to.
OTHER_BUILDER = ("one-layer", "docker-schema-2", "whiteout-and-back", "opaque-twice", "hard-links", "below-symlink")

# docs/explanation/images.md and docs of Apptainer 1.4.5: what is added where an image lacks it.
_FOLDERS = [b"dev", b"etc", b"home", b"proc", b"root", b"sys", b"tmp", b"var", b"var/tmp"]
_FILES = [b".exec", b".run", b".shell", b".test", b"environment", b"singularity", b"etc/hosts", b"etc/resolv.conf"]
ADDED = {*_FOLDERS, *_FILES, b".singularity.d"}

# At their full size, with the limits as they come.
LARGE: dict[str, Hostile] = {
    "million-files": Hostile(blobs=lambda: layer_cases.empty_files(1_000_000), says="`entries`"),
    "million-files-in-one-folder": Hostile(
        blobs=lambda: layer_cases.empty_files(1_000_000, folders=1), says="`entries`"
    ),
    "folder-of-150000": Hostile(blobs=lambda: layer_cases.empty_files(150_000, folders=1), says="`folder_entries`"),
    "bomb-of-gzip": Hostile(blobs=lambda: layer_cases.bomb(1100 << 20), says="`ratio`"),
    "bomb-of-zstd": Hostile(blobs=lambda: layer_cases.bomb(1100 << 20, "zstd"), says="`ratio`"),
}
# Refused before any layer is looked at: ImageUnavailable.
FROM_THE_CONFIG = {"no-diff-id": "not a sha256 one"}
# Processor seconds of all its processes: on a machine that runs other tests beside, the wall says nothing. What hangs
# is ended by `pull_all`.
CPU_SECONDS = 60.0
PEAK_MIB = 768.0


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What layers_on_node.py said, and where the SIFs are on this machine."""

    results: dict[str, dict[str, Any]]
    changed: list[str]
    processes: list[int]
    folder: str
    here: Path

    def sif(self, name: str) -> Path:
        return self.here / Path(self.results[name]["path"]).relative_to(self.folder)


def pull_all(
    cluster: Cluster, user: str, here: Path, write: dict[str, Callable[[Path], str]], jobs: list[dict[str, Any]]
) -> Ran:
    """Carry layouts to a node, run all jobs there in one go, and bring the SIFs here."""
    for name, make in write.items():
        make(here / "layouts" / name)
    (here / "jobs.json").write_text(json.dumps(jobs))
    shutil.copy(ON_NODE, here)
    sent = io.BytesIO()
    with tarfile.open(fileobj=sent, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in ("layouts", "jobs.json", ON_NODE.name):
            archive.add(here / name, name)
    folder = f"/home/{user}/layers-{uuid.uuid4().hex[:6]}"
    where = {"node": "n2", "user": user}
    cluster.must("sh", "-c", 'mkdir "$1" && tar xf - --no-same-owner -C "$1"', "sh", folder,
                 stdin=os.fsdecode(sent.getvalue()), **where)  # fmt: skip
    try:
        python = 'exec "$(dirname "$(command -v hpcenv)")/python" -P "$1"'
        said = json.loads(cluster.must("sh", "-c", python, "sh", ON_NODE.name, cwd=folder, timeout=500, **where))
        packed = 'find stores -name "*.sif" -print0 | tar cf - --null -T -'
        brought = os.fsencode(cluster.must("sh", "-c", packed, cwd=folder, **where))
    finally:
        cluster.run("rm", "-rf", folder, **where)
    with tarfile.open(fileobj=io.BytesIO(brought)) as archive:
        archive.extractall(here)
    return Ran(**said, folder=folder, here=here)


# -- awkward images -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[TreeEntry]]:
    """What umoci makes of each case, or of its plain form where umoci refuses the case."""
    if shutil.which("umoci") is None or os.geteuid() != 0:
        pytest.skip("THE COMPARISON WITH UMOCI DID NOT RUN: it needs umoci, and root for devices and owners")
    found = {}
    for name, case in {**CASES, "runs": RUNS}.items():
        if not case.unlike_umoci:
            folder = tmp_path_factory.mktemp("umoci")
            found[name] = layer_cases.umoci_unpacks(case.layers(), folder)
            shutil.rmtree(folder)
    return found | {name: found[case.same_as] for name, case in CASES.items() if case.unlike_umoci}


@pytest.fixture(scope="module")
def converted(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    here = tmp_path_factory.mktemp("cases")
    write = {
        name: lambda folder, case=case: layer_cases.write_case(folder, case)
        for name, case in {**CASES, "runs": RUNS}.items()
    }
    jobs = [{"name": name, "layout": name, "store": "ours", "words": ["--builder", "hpcenv"]} for name in write]
    jobs += [
        {"name": f"{name} by apptainer", "layout": name, "store": "apptainer", "words": ["--builder", "apptainer"]}
        for name in (*OTHER_BUILDER, "runs")
    ]
    return pull_all(cluster, "alice", here, write, jobs)


def storable(entry: TreeEntry) -> TreeEntry:
    """Return what squashfs can hold of an entry: times from 1970 to 2106, xattrs of three name spaces."""
    kept = tuple(pair for pair in entry.xattrs if pair[0].startswith((b"user.", b"trusted.", b"security.")))
    return replace(entry, mtime=min(max(entry.mtime, 0), 2**32 - 1), xattrs=kept)


def differences(name: str, expected: list[TreeEntry], found: list[TreeEntry]) -> list[tree.TreeDifference]:
    """Compare every field, apart from what is added and from times that umoci did not set."""
    known = {entry.path for entry in expected}
    own = [
        entry
        for entry in found
        if entry.path in known or not (entry.path in ADDED or entry.path.startswith(b".singularity.d/"))
    ]
    untimed = CASES[name].untimed if name in CASES else ()
    return [
        difference
        for difference in tree.compare(map(storable, expected), own, exact=True)
        if not (difference.field == "mtime" and difference.path in untimed)
    ]


@pytest.mark.parametrize("name", [*CASES, "runs"])
def test_the_sif_holds_what_umoci_unpacks(
    name: str, converted: Ran, unpacked: dict[str, list[TreeEntry]], tmp_path: Path
) -> None:
    assert converted.results[name]["status"] == 0, converted.results[name]
    file = converted.sif(name)
    part = sif.read_header(file).runs
    read = list(squashfs_reader.read_tree(file, offset=part.offset, size=part.size))
    assert differences(name, unpacked[name], read) == []

    argv = ["unsquashfs", "-n", "-q", "-o", str(part.offset), "-d", str(tmp_path / "root"), str(file)]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    assert differences(name, unpacked[name], from_folder(tmp_path / "root")) == []


@pytest.mark.parametrize("name", [*OTHER_BUILDER, "runs"])
def test_apptainer_makes_the_same_of_the_same_layers(
    name: str, converted: Ran, unpacked: dict[str, list[TreeEntry]]
) -> None:
    """An unprivileged `apptainer build` keeps types, permissions, content and targets."""
    result = converted.results[f"{name} by apptainer"]
    assert result["status"] == 0, result
    file = converted.sif(f"{name} by apptainer")
    part = sif.read_header(file).runs
    read = squashfs_reader.read_tree(file, offset=part.offset, size=part.size)
    assert tree.compare(unpacked[name], read, exact=False) == ()


def test_apptainer_runs_either_sif(cluster: Cluster, converted: Ran) -> None:
    for name in ("runs", "runs by apptainer"):
        sent = os.fsdecode(converted.sif(name).read_bytes())
        place = f"/home/alice/{uuid.uuid4().hex[:8]}.sif"
        try:
            cluster.must("sh", "-c", 'cat > "$1"', "sh", place, stdin=sent)
            assert cluster.must("apptainer", "exec", place, "/bin/ran") == "ran\n"
        finally:
            cluster.run("rm", "-f", place)


# -- hostile images -----------------------------------------------------------------------


LONG = bool(os.environ.get("HPCENV_TEST_LONG"))
# Each takes half a second and more: the test command takes those that are contained, and every fifth of the rest.
ATTACKS = {
    name: hostile
    for number, (name, hostile) in enumerate((HOSTILE | LARGE).items())
    if LONG or hostile.contained or number % 5 == 0
}


@pytest.fixture(scope="module")
def attacked(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """All of them as bob on n2: what is his there and on shared folders is looked at before and after."""
    here = tmp_path_factory.mktemp("hostile")
    every = ATTACKS
    write = {
        name: lambda folder, hostile=hostile: layer_cases.write_hostile(folder, hostile)
        for name, hostile in every.items()
    }
    jobs = [
        {"name": name, "layout": name, "store": name, "words": [f"--limit={word}" for word in hostile.limits]}
        for name, hostile in every.items()
    ]
    # At a user's first start, Apptainer makes a folder in the user's home.
    cluster.must("apptainer", "buildcfg", user="bob", node="n2")
    return pull_all(cluster, "bob", here, write, jobs)


@pytest.mark.parametrize("name", [name for name, hostile in ATTACKS.items() if hostile.says])
def test_a_hostile_image_is_refused(name: str, attacked: Ran) -> None:
    result, hostile = attacked.results[name], ATTACKS[name]
    assert result["status"] == (10 if name in FROM_THE_CONFIG else 11), result
    said = json.loads(result["out"])["error"]
    assert re.search(FROM_THE_CONFIG.get(name, hostile.says), f"{said['what']}\n{said['why']}"), said
    assert said["hint"]
    assert "Traceback" not in result["err"]
    assert set(result["left"]) <= {"store.json", "README", "CACHEDIR.TAG", ".gitignore"}


@pytest.mark.parametrize("name", [name for name, hostile in ATTACKS.items() if hostile.contained])
def test_an_image_that_points_outside_is_contained(name: str, attacked: Ran) -> None:
    assert attacked.results[name]["status"] == 0, attacked.results[name]
    file = attacked.sif(name)
    part = sif.read_header(file).runs
    found = {entry.path: entry for entry in squashfs_reader.read_tree(file, offset=part.offset, size=part.size)}
    for path, content in HOSTILE[name].contained.items():
        assert found[path].blake3 == blake3(content).hexdigest()


def test_nothing_outside_the_store_changes_and_no_process_stays(attacked: Ran) -> None:
    assert attacked.changed == []
    assert attacked.processes == []


@pytest.mark.long
def test_every_attack_went_through_the_whole_command() -> None:
    """Without HPCENV_TEST_LONG=1 only some do; tests/unit/image/convert/test_layers.py reads each of them."""
    assert set(ATTACKS) == {*HOSTILE, *LARGE}


def test_attacks_end_soon_and_in_little_memory(attacked: Ran) -> None:
    costly = {
        name: (result["cpu_seconds"], result["peak_mib"])
        for name, result in attacked.results.items()
        if result["cpu_seconds"] > CPU_SECONDS or result["peak_mib"] > PEAK_MIB
    }
    assert costly == {}


@pytest.fixture(scope="module", autouse=True)
def leave_nothing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield
    for name in ("cases", "hostile"):
        for folder in tmp_path_factory.getbasetemp().glob(f"{name}*"):
            shutil.rmtree(folder, ignore_errors=True)
