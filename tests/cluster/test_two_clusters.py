"""A reader on another cluster, with another Slurm, reproduces an author's run from the bundle alone; then with changes.

HPCENV_TEST_LONG=1 runs it. The author is alice on the testbed of this checkout, the reader is bob on a second one that has
Slurm 26.05, which the test brings up and takes down.
"""

from __future__ import annotations

import json
import re
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .conftest import IMAGE, ROOT, TESTBED, Cluster, Done, Project

pytestmark = [pytest.mark.cluster, pytest.mark.long]

INSTANCE = "reader"
FOLDER = "/home/bob/reader"
SCRIPT = (ROOT / "tests" / "kinds" / "rounding.py").read_text(encoding="utf-8")
SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--cpus", "2", "--time", "5")
# A Python of each site at the same path, whose packages are those of the testbed but for one.
ENVIRONMENT = """
set -e
site=$1/lib/python3.11/site-packages
/shared/hostenv/bin/python -m venv --without-pip $1
echo /shared/hostenv/lib/python3.11/site-packages > $site/hostenv.pth
cp -r /shared/hostenv/lib/python3.11/site-packages/typing_extensions* $site/
cd $site
mv typing_extensions-*.dist-info typing_extensions-$2.dist-info
sed -i "s/^Version: .*/Version: $2/" typing_extensions-$2.dist-info/METADATA
sed -i "s#typing_extensions-[0-9.]*.dist-info#typing_extensions-$2.dist-info#; s#/METADATA,.*#/METADATA,,#" \
  typing_extensions-$2.dist-info/RECORD
"""


@dataclass(frozen=True)
class Reader:
    """Bob, in a folder of his on the second testbed."""

    def testbed(self, *words: str, stdin: Any = None, timeout: float = 900) -> Done:
        argv = [str(TESTBED), "--instance", INSTANCE, *words]
        done = subprocess.run(argv, stdin=stdin, capture_output=True, text=True, timeout=timeout)
        return Done(done.returncode, done.stdout, done.stderr)

    def run(self, *command: str, folder: str = FOLDER, stdin: Any = None) -> Done:
        return self.testbed("exec", "--user", "bob", "--cwd", folder, "--", *command, stdin=stdin)

    def reproduce(self, bundle: str, *words: str) -> tuple[Done, dict[str, Any]]:
        """Accept what is asked; return what came out, and the page."""
        argv = ("hpcenv", "reproduce", bundle, "--json", *words)
        done = self.run(*argv)
        if done.status == 29:
            done = self.run(*argv[:4], "--accept", asked_digest(done), *argv[4:])
        return done, json.loads(done.stdout).get("data")


def asked_digest(done: Done) -> str:
    """Return what to type after `--accept`."""
    found = re.search("--accept ([0-9a-f]{32})", done.text)
    assert found is not None, done.text
    return found[1]


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    made = Reader()
    try:
        for words in (("up", "--slurm", "26.05"), ("install",), ("exec", "--user", "bob", "--", "mkdir", FOLDER)):
            done = made.testbed(*words)
            assert done.status == 0, done.text
        yield made
    finally:
        down = made.testbed("down")
    assert down.status == 0, down.text


def publish(cluster: Cluster, reader: Reader, spec: str, run: str, folder: Path, *words: str) -> Project:
    """Let alice lock, train and make a bundle, and give bob this one file."""
    project = Project(cluster, f"/home/alice/hpcenv-tests/{run}-{uuid.uuid4().hex[:6]}")
    cluster.write(f"{project.folder}/hpcenv.toml", spec)
    cluster.write(f"{project.folder}/train.py", SCRIPT)
    project.must("lock", timeout=600)
    threads = ("--env", "OMP_NUM_THREADS=1")
    project.must("submit", "train.py", *SHAPE, *threads, "--determinism", "bitwise", "--name", run, "--wait")
    sif = (words[0], cluster.must("sh", "-c", words[1], cwd=project.folder).strip()) if words else ()
    project.must("bundle", "make", run, "-o", "bundle.zip", *sif)
    with open(folder / "bundle.zip", "wb") as file:
        fetch = [str(TESTBED), "exec", "--", "cat", f"{project.folder}/bundle.zip"]
        subprocess.run(fetch, stdout=file, check=True, timeout=300)
    with open(folder / "bundle.zip", "rb") as file:
        done = reader.run("sh", "-c", f"cat > {run}.hpcenv.zip", stdin=file)
    assert done.status == 0, done.text
    return project


@pytest.fixture(scope="module")
def paper(cluster: Cluster, reader: Reader, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The run of a container, with its SIF in the bundle: bob has no other way to it."""
    spec = f'image = "{IMAGE}"\nplain-http = ["registry:5000"]\n[paths]\nstore = "store"\n'
    publish(cluster, reader, spec, "paper", tmp_path_factory.mktemp("a"), "--with-sif", "ls store/images/*.sif")
    return "paper.hpcenv.zip"


def first_cause(page: dict[str, Any]) -> tuple[str, list[str]]:
    cause = page["comparison"]["causes"][0]
    return cause["group"], [field for field, _, _ in cause["changes"]]


def test_bob_reproduces_the_bundle_to_the_last_bit(cluster: Cluster, reader: Reader, paper: str) -> None:
    versions = [cluster.must("sinfo", "--version"), reader.run("sinfo", "--version").stdout]
    assert " 24.11." in versions[0] and " 26.05." in versions[1]
    proofs = reader.run("hpcenv", "reproduce", paper)
    assert proofs.status == 0 and proofs.stdout.startswith("proved from the files: 6 of 6"), proofs.text

    done, page = reader.reproduce(paper, "--rung", "3")

    assert (done.status, page["verdict"]) == (0, "reproduced-bitwise"), done.text
    assert page["headline"] == "reproduced, bitwise: equal to the last bit: 48 values, weights too"
    assert page["image"].startswith("from the bundle, sha256 ")
    parameters = page["comparison"]["parameters"]
    assert parameters["compared"] > 0 and parameters["first"] is None
    group, fields = first_cause(page)
    assert group == "for the record" and "host.slurm" in fields
    answers = {one["question"]: one["answer"] for one in page["comparison"]["answers"]}
    assert answers == {"equals-reference": "yes", "repeats-here": "yes", "restart-replays": "not-asked"}
    # One page for people, which a log or a terminal of 80 columns shows.
    text = reader.run("hpcenv", "compare", "paper", "paper-code/runs/paper-rung-3")
    assert text.status == 0 and text.stdout.startswith("equal to the last bit: 48 values, weights too")


def test_another_hyper_parameter_is_not_reproduced_and_is_named(reader: Reader, paper: str) -> None:
    done, page = reader.reproduce(paper, "--rung", "2", "--steps", "6", "--", "--lr", "0.011")
    assert (done.status, page["verdict"], page["expected"]["best"]) == (41, "not-reproduced", "nothing"), done.text
    assert "it is another experiment: arguments: run.arguments" in page["headline"]
    assert first_cause(page) == ("arguments", ["run.arguments"])
    assert page["comparison"]["first"]["step"] == 2, "the first step has no update yet"


def test_another_world_size_is_named(reader: Reader, paper: str) -> None:
    done, page = reader.reproduce(paper, "--rung", "2", "--steps", "6", "--nproc", "1")
    assert (done.status, page["verdict"], page["expected"]["best"]) == (41, "not-reproduced", "within"), done.text
    assert "2 ranks in place of 4: each rank has different data" in page["headline"]
    assert first_cause(page) == ("number of ranks", ["run.nproc-per-node"])


def test_other_cpu_kernels_are_within_the_tolerance_and_named(reader: Reader, paper: str) -> None:
    done, page = reader.reproduce(paper, "--rung", "2", "--steps", "6", "--env", "ATEN_CPU_CAPABILITY=default")
    assert (done.status, page["verdict"], page["expected"]["best"]) == (40, "reproduced-within", "within"), done.text
    assert "the last bit was not to be expected: ATEN_CPU_CAPABILITY: (not set) -> default" in page["headline"]
    group, fields = first_cause(page)
    assert group == "CPU kernels" and "determinism.torch.cpu-capability" in fields


def test_another_package_is_rejected_by_the_gate_and_named_if_the_reader_locks_it(
    cluster: Cluster, reader: Reader, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = f"/shared/paper-env-{uuid.uuid4().hex[:6]}"
    cluster.must("sh", "-c", ENVIRONMENT, "sh", place, "4.90.0", user="root")
    made = reader.testbed("exec", "--user", "root", "--", "sh", "-c", ENVIRONMENT, "sh", place, "4.91.0")
    assert made.status == 0, made.text
    spec = f'image = "host"\npython = "{place}/bin/python"\n'
    publish(cluster, reader, spec, "host", tmp_path_factory.mktemp("b"))
    words = ("--rung", "2", "--steps", "6")

    done, page = reader.reproduce("host.hpcenv.zip", *words)
    assert done.status == 24, done.text
    assert "n[1-2]: packages.typing-extensions: locked 4.90.0, found 4.91.0" in done.text

    # What this project asks for was accepted for the reproduction above.
    locked = reader.run("hpcenv", "lock", folder=f"{FOLDER}/host-code")
    assert locked.status == 0, locked.text
    done, page = reader.reproduce("host.hpcenv.zip", *words, "--copy", "host-code", "--lock", "default")
    # typing-extensions has no part in the numbers: equal, and the page says that this was not promised.
    assert (done.status, page["verdict"], page["expected"]["best"]) == (0, "reproduced-bitwise", "within"), done.text
    assert "packages: packages.typing-extensions: 4.90.0 -> 4.91.0" in " ".join(page["expected"]["reasons"])
    causes = {one["group"]: one["changes"] for one in page["comparison"]["causes"]}
    assert ["packages.typing-extensions", "4.90.0", "4.91.0"] in causes["packages"]
    assert any("not in the run's lockfile" in note for note in page["notes"])
