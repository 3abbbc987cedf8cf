"""A reader on another cluster, with another Slurm, reproduces an author's run from the bundle alone; then with changes.

HPCENV_TEST_LONG=1 runs it. The author is alice on the testbed of this checkout, whose project is in git, with its lockfiles
committed, or not. The reader is bob on a second testbed that has Slurm 26.05, which the test brings up and takes down. He also
runs the bundles that an older hpcenv made.
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
COMMIT = "git init -q && git add -A && git -c user.name=alice -c user.email=a@b commit -qm paper"
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

    def take(self, bundle: Path) -> None:
        """Put a bundle into bob's folder."""
        with open(bundle, "rb") as file:
            done = self.run("sh", "-c", f"cat > {bundle.name}", stdin=file)
        assert done.status == 0, done.text

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


def project_of(cluster: Cluster, name: str, spec: str) -> Project:
    """Return a locked project of alice's."""
    project = Project(cluster, f"/home/alice/hpcenv-tests/{name}-{uuid.uuid4().hex[:6]}")
    files = {"hpcenv.toml": spec, "train.py": SCRIPT, ".gitignore": "runs/\nstore/\n*.zip\n", "table.csv": "1,2\n"}
    for path, text in files.items():
        cluster.write(f"{project.folder}/{path}", text)
    project.must("lock", timeout=600)
    return project


def publish(project: Project, reader: Reader, run: str, folder: Path, *words: str) -> str:
    """Let alice train and make a bundle, and give bob this one file. Return its name."""
    bundle = f"{run}.hpcenv.zip"
    threads = ("--env", "OMP_NUM_THREADS=1")
    project.must("submit", "train.py", *SHAPE, *threads, "--determinism", "bitwise", "--name", run, "--wait")
    sif = (words[0], project.cluster.must("sh", "-c", words[1], cwd=project.folder).strip()) if words else ()
    project.must("bundle", "make", run, "-o", bundle, *sif)
    with open(folder / bundle, "wb") as file:
        fetch = [str(TESTBED), "exec", "--", "cat", f"{project.folder}/{bundle}"]
        subprocess.run(fetch, stdout=file, check=True, timeout=300)
    reader.take(folder / bundle)
    return bundle


@pytest.fixture(scope="module")
def papers(cluster: Cluster, reader: Reader, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two bundles of one project, before and after it is in git. The SIF is in both: bob has no other way to it."""
    spec = f'image = "{IMAGE}"\nplain-http = ["registry:5000"]\n[paths]\nstore = "store"\n'
    project = project_of(cluster, "paper", spec + '[reproduce]\none-node = ["--accumulate", "{factor}"]\n')
    sif, folder = ("--with-sif", "ls store/images/*.sif"), tmp_path_factory.mktemp("a")
    found = {"without-git": publish(project, reader, "paper", folder, *sif)}
    cluster.must("sh", "-c", COMMIT, cwd=project.folder)
    assert "lockfiles/default.lock.toml" in cluster.must("git", "ls-files", cwd=project.folder)
    return {**found, "with-git": publish(project, reader, "paper-in-git", folder, *sif)}


@pytest.fixture(scope="module")
def paper(papers: dict[str, str]) -> str:
    return papers["without-git"]


def first_cause(page: dict[str, Any]) -> tuple[str, list[str]]:
    cause = page["comparison"]["causes"][0]
    return cause["group"], [field for field, _, _ in cause["changes"]]


# Options of each rung. Only with as many ranks as the run had can one node give equal bits.
FIRST_STEPS = ("--steps", "6")
RUNGS = {"1": ("--nproc", "4", "--cpus", "4", *FIRST_STEPS), "2": FIRST_STEPS, "3": ()}


@pytest.mark.parametrize("kept", ["without-git", "with-git"])
def test_bob_proves_the_bundle_from_its_files(
    cluster: Cluster, reader: Reader, papers: dict[str, str], kept: str
) -> None:
    versions = [cluster.must("sinfo", "--version"), reader.run("sinfo", "--version").stdout]
    assert " 24.11." in versions[0] and " 26.05." in versions[1]
    proofs = reader.run("hpcenv", "reproduce", papers[kept])
    assert proofs.status == 0 and proofs.stdout.startswith("proved from the files: 7 of 7"), proofs.text


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("kept", ["without-git", "with-git"])
def test_bob_reproduces_the_bundle_to_the_last_bit(
    reader: Reader, papers: dict[str, str], kept: str, rung: str
) -> None:
    done, page = reader.reproduce(papers[kept], "--rung", rung, *RUNGS[rung])
    assert done.status == 0, done.text
    assert page["verdict"] == "reproduced-bitwise"
    # The hashes of the weights are those after the last step of a run.
    whole = "reproduced, bitwise: equal to the last bit: 48 values, weights too"
    part = f"reproduced, bitwise in the first steps (rung {rung}): equal to the last bit: 24 values"
    assert page["headline"].startswith(whole if rung == "3" else part)
    assert "another experiment" not in done.text and "differ from those of the run" not in done.text
    assert page["image"].startswith("from the bundle, sha256 ")
    answers = {one["question"]: one["answer"] for one in page["comparison"]["answers"]}
    same_shape = "not-asked" if rung == "1" else "yes"
    assert answers == {"equals-reference": "yes", "repeats-here": same_shape, "restart-replays": "not-asked"}
    if rung != "3":
        return
    parameters = page["comparison"]["parameters"]
    assert parameters["compared"] > 0 and parameters["first"] is None
    group, fields = first_cause(page)
    assert group == "for the record" and "host.slurm" in fields
    # One page for people, which a log or a terminal of 80 columns shows.
    run = papers[kept].removesuffix(".hpcenv.zip")
    text = reader.run("hpcenv", "compare", run, f"{run}-code/runs/{run}-rung-3")
    assert text.status == 0 and text.stdout.startswith("equal to the last bit: 48 values, weights too")


def test_one_node_with_fewer_ranks_is_within_the_tolerance(reader: Reader, paper: str) -> None:
    done, page = reader.reproduce(paper, "--rung", "1", *FIRST_STEPS)
    assert (done.status, page["verdict"], page["expected"]["best"]) == (40, "reproduced-within", "within"), done.text
    assert "2 ranks in place of 4, with the same global batch by accumulation" in page["headline"]


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
    publish(project_of(cluster, "host", spec), reader, "host", tmp_path_factory.mktemp("b"))
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


OLD_PYTHON = """
set -e
if ! [ -e /shared/paper ]; then
  /shared/hostenv/bin/python -m venv --without-pip /shared/paper/env
  echo /shared/hostenv/lib/python3.11/site-packages > /shared/paper/env/lib/python3.11/site-packages/hostenv.pth
fi
ln -s /shared/paper /tmp/paper
"""


@pytest.fixture(scope="module")
def old_site(reader: Reader) -> Reader:
    """Bob's site with a Python where the runs of tests/recorded_bundles had theirs. Each machine has its own /tmp."""
    for node in ("login", "n1", "n2"):
        made = reader.testbed("exec", "--user", "root", "--node", node, "--", "sh", "-c", OLD_PYTHON)
        assert made.status == 0, made.text
    return reader


@pytest.mark.parametrize("name", ["with-git", "without-git"])
def test_bob_runs_a_bundle_of_an_older_version(old_site: Reader, name: str) -> None:
    bundle = ROOT / "tests" / "recorded_bundles" / f"{name}.hpcenv.zip"
    old_site.take(bundle)
    # No other machine has their Python with their torch: the gate refuses it, and bob locks his own.
    done, _ = old_site.reproduce(bundle.name, "--rung", "3")
    assert done.status == 24 and "packages.filelock: locked absent, found" in done.text, done.text
    locked = old_site.run("hpcenv", "lock", folder=f"{FOLDER}/{name}-code")
    assert locked.status == 0, locked.text
    for rung in ("1", "2", "3"):
        words = ("--rung", rung, "--copy", f"{name}-code", "--lock", "default")
        done, page = old_site.reproduce(bundle.name, *words)
        assert done.status == 0, done.text
        assert page["verdict"] == "reproduced-bitwise"
        assert "equal to the last bit: 5 values" in page["headline"] and "another experiment" not in page["headline"]
        assert "differ from those of the run" not in done.text
        assert "options for the authors' cluster are left out: --cluster local" in page["notes"]
