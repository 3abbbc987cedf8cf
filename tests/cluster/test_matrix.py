"""The same training on every Slurm that hpcenv is for, and on a site without accounting, each on a testbed of its own.

HPCENV_TEST_LONG=1 runs it: bringing one up takes up to a minute, and the shared one has Slurm 24.11.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from .conftest import ACCEPT, HOST_PYTHON, IMAGE, ROOT, TESTBED

pytestmark = [pytest.mark.cluster, pytest.mark.long]

INSTANCE = "matrix"
FOLDER = "/home/alice/matrix"
SHAPE = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--time", "10")
SPECS = {
    "sif": f'image = "{IMAGE}"\nplain-http = ["registry:5000"]\n',
    "host": f'image = "host"\npython = "{HOST_PYTHON}"\n',
}


@dataclass(frozen=True)
class Site:
    """A testbed of one kind, with a locked project of alice's in FOLDER."""

    def run(self, *words: str, stdin: str = "", timeout: float = 600) -> subprocess.CompletedProcess[str]:
        argv = [str(TESTBED), "--instance", INSTANCE, *words]
        return subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout)

    def must(self, *words: str, stdin: str = "", timeout: float = 600) -> str:
        done = self.run(*words, stdin=stdin, timeout=timeout)
        assert done.returncode == 0, f"{words} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def alice(self, *command: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        return self.run("exec", "--cwd", FOLDER, "--", *command, timeout=timeout)

    def put(self, path: str, text: str) -> None:
        self.must("exec", "--", "sh", "-c", 'mkdir -p "$(dirname "$1")" && cat > "$1"', "sh", path, stdin=text)

    def lock(self, kind: str) -> None:
        self.put(f"{FOLDER}/hpcenv.toml", SPECS[kind])
        for name in ("train.py", "data/as_you_like_it.txt"):
            self.put(f"{FOLDER}/{name}", (ROOT / "examples" / name).read_text(encoding="utf-8"))
        self.alice("/shared/hpcenv/venv/bin/python", "-c", ACCEPT)
        done = self.alice("hpcenv", "lock")
        assert done.returncode == 0, done.stdout + done.stderr

    def record(self, run: str, name: str) -> dict[str, object]:
        return json.loads(self.alice("cat", f"runs/{run}/{name}").stdout)


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Bring up a testbed as `request.param` says: (kind of environment, words for `up`)."""
    kind, words = request.param
    made = Site()
    try:
        made.must("up", *words)
        made.must("install")
        made.lock(kind)
        yield made
    finally:
        down = made.run("down")
    assert down.returncode == 0, down.stdout + down.stderr


def trained(site: Site, run: str, done: subprocess.CompletedProcess[str]) -> None:
    """Two nodes and four ranks trained, verified, and the loss fell."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(re.findall(r"rank (\d) .*world_size 4 .*host (n\d)", done.stdout)) == {
        ("0", "n1"),
        ("1", "n1"),
        ("2", "n2"),
        ("3", "n2"),
    }
    seen = [float(loss) for loss in re.findall(r"^\[0\] step +\d+ +loss ([0-9.]+)", done.stdout, re.MULTILINE)]
    assert seen[-1] < 0.9 * seen[0], seen
    verdict = site.record(run, "verdict.json")
    assert verdict["result"] == "match"
    assert site.record(run, "finished.json")["status"] == 0


@pytest.mark.parametrize(
    ("site", "version", "kind"),
    [
        (("host", ("--slurm", "22.05")), "22.05", "host"),
        (("sif", ("--slurm", "24.11")), "24.11", "sif"),
        (("sif", ("--slurm", "26.05")), "26.05", "sif"),
    ],
    indirect=["site"],
    ids=["22.05", "24.11", "26.05"],
)
def test_two_nodes_four_ranks_on_every_slurm(site: Site, version: str, kind: str) -> None:
    assert f" {version}." in site.must("exec", "--", "sinfo", "--version")

    words = ("hpcenv", "submit", "train.py", *SHAPE, "--wait", "--name", "first", "--", "--steps", "60")
    done = site.alice(*words)

    trained(site, "first", done)
    manifest = json.dumps(site.record("first", "manifest.json"))
    assert f'"kind": "{kind}"' in manifest
    job = site.record("first", "submission.json")["job_id"]
    states = site.must("exec", "--", "sacct", "-X", "-n", "-P", "-j", str(job), "--format=State,ExitCode")
    assert states.strip() == "COMPLETED|0:0"
    report = site.alice("hpcenv", "report", "first")
    assert "completed" in report.stdout
    # And a rank that fails is the job's own status, whatever this Slurm makes of srun's.
    site.put(f"{FOLDER}/fails.py", "import os, sys\nsys.exit(7 if os.environ['RANK'] == '3' else 0)\n")
    failed = site.alice("hpcenv", "submit", "fails.py", *SHAPE, "--wait", "--name", "seven")
    assert failed.returncode == 7, failed.stdout + failed.stderr
    assert re.search(r"first failure: node n2, rank 3, exit 7", failed.stdout), failed.stdout
    _gets_gpus_and_disks(site, kind)


def _gets_gpus_and_disks(site: Site, kind: str) -> None:
    """Ask for GPUs in both forms, each with the disk of the node: 26.05 refuses `--gres=gpu:N` beside --gpus-per-node."""
    site.put(f"{FOLDER}/works.py", "print('WORKS', flush=True)\n")
    shape = "--nodes 2 --gpus 2 --allow-cpu-torch --nproc 1 --sbatch gres=nvme:10 --time 5".split()
    for form in ("gpus-per-node", "gres"):
        site.put(f"{FOLDER}/hpcenv.toml", f'{SPECS[kind]}[submit]\ngpu-request = "{form}"\n')
        done = site.alice("hpcenv", "submit", "works.py", *shape, "--wait", "--name", form)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("WORKS") == 2
        job = str(site.record(form, "submission.json")["job_id"])
        shown = site.must("exec", "--", "scontrol", "show", "job", job)
        assert re.search(r"TresPerNode=\S*gpu:2\b", shown) and re.search(r"TresPerNode=\S*nvme:10\b", shown), shown


@pytest.mark.parametrize("site", [("host", ("--no-accounting",))], indirect=True, ids=["no-accounting"])
def test_without_accounting_all_of_it_works_and_says_what_is_so(site: Site) -> None:
    assert "disabled" in site.run("exec", "--", "sacct").stderr
    done = site.alice("hpcenv", "submit", "train.py", *SHAPE, "--wait", "--name", "first", "--", "--steps", "60")

    trained(site, "first", done)
    status = json.loads(site.alice("hpcenv", "status", "first", "--json").stdout)["data"]
    assert (status["state"], status["exit_status"]) == ("completed", 0)
    assert "completed" in site.alice("hpcenv", "report", "first").stdout
    # One that is cancelled while it runs: Slurm forgets it (MinJobAge), the files do not.
    site.put(f"{FOLDER}/sleeps.py", "import time\nprint('asleep', flush=True)\ntime.sleep(600)\n")
    started = site.alice("hpcenv", "submit", "sleeps.py", *SHAPE, "--name", "second")
    assert started.returncode == 0, started.stderr
    followed = "for i in $(seq 200); do hpcenv logs second | grep -q asleep && exit 0; sleep 0.5; done; exit 1"
    assert site.alice("sh", "-c", followed).returncode == 0
    cancelled = site.alice("hpcenv", "cancel", "second")
    assert cancelled.returncode == 0, cancelled.stdout + cancelled.stderr
    status = json.loads(site.alice("hpcenv", "status", "second", "--json").stdout)["data"]
    assert status["state"] == "cancelled"
    assert site.must("exec", "--", "squeue", "--noheader") == ""
    assert site.alice("hpcenv", "wait", "second").returncode != 0
    assert "second" in site.alice("hpcenv", "list", "--all").stdout
