"""A real cluster for the tests: scripts/testbed, as user alice unless said otherwise.

The tests here run where the testbed is up (`scripts/testbed up`, or ./scripts/test.sh which
does that) and say loudly that they did not run where it is not.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import tempfile
import time
import uuid
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from error_text import unwrapped

ROOT = Path(__file__).resolve().parents[2]
TESTBED = ROOT / "scripts" / "testbed"
IMAGE = "docker://registry:5000/hpcenv/torch:2.13.0-cpu"
OTHER_IMAGE = "docker://registry:5000/hpcenv/torch:other"
HOST_PYTHON = "/shared/hostenv/bin/python"
# The user has accepted what the project asks of this machine: that is kept by the project's path.
ACCEPT = """\
import os
from pathlib import Path
from hpcenv.project import acceptance
from hpcenv.project.workspace import open_workspace
here = Path.cwd()
acceptance.keep(acceptance.asked_by(open_workspace(here)), here, os.environ)
"""
# One store of SIFs for all test projects: a conversion takes most of a minute.
STORE = "/home/alice/hpcenv-tests/store"


def pytest_configure(config: pytest.Config) -> None:
    """Let every pytest-xdist worker have a testbed for itself: what one test breaks must not meet another.

    HPCENV_TEST_TESTBEDS names them, one for each worker; without it there is one testbed and one process. A worker holds
    a lock: when a test has ended its process, the next worker takes over the testbed.
    """
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    names = os.environ.get("HPCENV_TEST_TESTBEDS", "").split()
    if config.getoption("dist", "no") != "no" or (not names and processes == 1):
        return
    for name in names:
        lock = (Path(tempfile.gettempdir()) / f"hpcenv-tests-on-{name}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        os.environ["HPCENV_TESTBED_INSTANCE"] = name
        config.add_cleanup(lock.close)
        return
    raise pytest.UsageError(f"{len(names) or 1} testbed(s) for more processes: HPCENV_TEST_TESTBEDS='NAME NAME'")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A job waits for others, and the first test of a worker converts an image: these tests have more time."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


@dataclass(frozen=True)
class Done:
    status: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        return self.stdout + self.stderr


class Cluster:
    """The testbed as a user sees it: commands on its nodes."""

    def run(
        self,
        *command: str,
        node: str = "login",
        user: str = "alice",
        cwd: str | None = None,
        stdin: str = "",
        timeout: float = 300,
        accepts: bool = True,
    ) -> Done:
        """Run a command on a node.

        Args:
            accepts: the user reads what a project asks, and types the command of hpcenv again with `--accept`.
        """
        where = ["--node", node, "--user", user, *(["--cwd", cwd] if cwd else [])]
        done = subprocess.run(
            [str(TESTBED), "exec", *where, "--", *command],
            input=os.fsencode(stdin),
            capture_output=True,
            timeout=timeout,
        )
        result = Done(done.returncode, os.fsdecode(done.stdout), unwrapped(os.fsdecode(done.stderr)))
        digest = re.search("--accept ([0-9a-f]{32})", result.text)
        if not (accepts and "hpcenv" in command and result.status == 29 and digest):
            return result
        verb = command.index("hpcenv") + 1
        place = verb + (2 if command[verb] == "image" else 1)
        again = (*command[:place], "--accept", digest[1], *command[place:])
        return self.run(*again, node=node, user=user, cwd=cwd, stdin=stdin, timeout=timeout, accepts=False)

    def must(self, *command: str, **where: object) -> str:
        done = self.run(*command, **where)  # type: ignore[arg-type]
        assert done.status == 0, f"{command} ended with {done.status}\n{done.text}"
        return done.stdout

    def write(self, path: str, text: str, **where: object) -> None:
        self.must("sh", "-c", 'mkdir -p "$(dirname "$1")" && cat > "$1"', "sh", path, stdin=text, **where)

    def start_again_soon(self, job: str) -> None:
        """Let a job that was queued again start within seconds, and not only when its old credential has expired.

        When a job ends, slurmd revokes its credentials: all that were made in that second or before. So a job that
        starts again within the same second is refused ("Job N already killed, do not launch batch job"), and has
        failed without a line in its log (seen: 24.11, three of four tries). And a start time that is set while the job
        still ends is overwritten.
        """
        until = time.monotonic() + 120
        while self.run("squeue", "-h", "-o", "%T", "-j", job).stdout.strip() in ("COMPLETING", "REQUEUED"):
            assert time.monotonic() < until, f"job {job} has not ended within 120 s"
            time.sleep(0.5)
        # On a slow machine it has started by itself.
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2seconds")

    def testbed(self, *words: str, timeout: float = 300) -> Done:
        done = subprocess.run([str(TESTBED), *words], capture_output=True, text=True, timeout=timeout)
        return Done(done.returncode, done.stdout, done.stderr)


def before_step(project: Project, step: str, program: str) -> tuple[str, ...]:
    """Return words of `submit` with which a shell program runs on each node of a step, right before that step.

    A line of `setup`, of a site profile that is typed, writes it into the run's step.py.
    """
    name = f"before-{uuid.uuid4().hex[:6]}"
    path = f"{project.folder}/{name}"
    project.cluster.write(f"{path}.sh", f"{program}\n")
    call = f'import os, sys; sys.argv[1] == "{step}" and os.system("sh {path}.sh")'
    line = f"sed -i '1i {call}' \"$run/code/step.py\""
    project.cluster.write(f"{path}.toml", f'name = "{name}"\n[submit]\nsetup = [{json.dumps(line)}]\n')
    return ("--site", f"{path}.toml")


_NEWEST_RUNS = """\
ls -td /home/*/hpcenv-tests/*/runs/*/ | head -n 3 | while read -r run; do
  echo "== $run"
  for file in "$run"/started.json "$run"/finished.json; do tr -s ' \\n' ' ' < "$file"; echo; done
  echo "-- the end of its log"
  tail -c 3000 "$run/job.log"
done
"""
# What says why a job did not do what its test waited for: Slurm's words, its daemons' words, and the newest runs.
_SAID = {
    "Slurm's queue and nodes": ("login", "squeue -a -l; sinfo -R; sinfo -N -l"),
    "Slurm's last jobs": ("login", "scontrol show job | tail -n 90"),
    "slurmctld's log": ("ctl", "tail -n 40 /var/log/slurmctld.log"),
    "slurmd's log on n1": ("n1", "tail -n 15 /var/log/slurmd.log"),
    "slurmd's log on n2": ("n2", "tail -n 15 /var/log/slurmd.log"),
    "the newest runs": ("login", _NEWEST_RUNS),
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to what is printed of a failed test what the cluster says at that moment."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and report.when == "call" and isinstance(cluster, Cluster):
        for title, (node, script) in _SAID.items():
            try:
                said = cluster.run("sh", "-c", script, node=node, user="root", timeout=20).text
            except subprocess.TimeoutExpired:
                said = "no answer within 20 s"
            report.sections.append((title, said))
    return report


@dataclass(frozen=True)
class Project:
    """A project folder of alice's on the shared file system."""

    cluster: Cluster
    folder: str

    def hpcenv(self, *words: str, timeout: float = 300) -> Done:
        return self.cluster.run("hpcenv", *words, cwd=self.folder, timeout=timeout)

    def must(self, *words: str, timeout: float = 300) -> str:
        done = self.hpcenv(*words, timeout=timeout)
        assert done.status == 0, f"hpcenv {words} ended with {done.status}\n{done.text}"
        return done.stdout

    def json(self, *words: str) -> dict:
        return json.loads(self.hpcenv(*words, "--json").stdout)

    def record(self, run: str, name: str) -> dict:
        return json.loads(self.cluster.must("cat", f"{self.folder}/runs/{run}/{name}"))

    def sif(self) -> str:
        lines = self.cluster.must("sh", "-c", f"grep ^manifest-digest {self.folder}/lockfiles/default.lock.toml")
        return f"{STORE}/images/{lines.split(chr(34))[1].replace(':', '-')}.sif"


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    state = subprocess.run([str(TESTBED), "status"], capture_output=True, text=True)
    if state.returncode != 0:
        said = (state.stdout + state.stderr).strip().splitlines()
        pytest.skip(f"NOT RUN: the testbed is not up ({said[0] if said else 'no message'}); scripts/testbed up")
    return Cluster()


def copy_examples(cluster: Cluster, folder: str) -> None:
    """Put the repository's examples into a folder of alice's."""
    for source in (ROOT / "examples").rglob("*"):
        if source.is_file() and source.suffix in (".py", ".txt"):
            cluster.write(f"{folder}/{source.relative_to(ROOT)}", source.read_text(encoding="utf-8"))


def _project(cluster: Cluster, name: str, spec: str) -> Project:
    folder = f"/home/alice/hpcenv-tests/{name}"
    copy_examples(cluster, folder)
    cluster.write(f"{folder}/hpcenv.toml", spec)
    return Project(cluster, folder)


@pytest.fixture(scope="session")
def sif_project(cluster: Cluster) -> Project:
    """A project locked to the test image; the SIF is made once."""
    project = _project(
        cluster,
        f"sif-{uuid.uuid4().hex[:6]}",
        f'image = "{IMAGE}"\nplain-http = ["registry:5000"]\n[paths]\nstore = "{STORE}"\n',
    )
    project.must("lock", timeout=600)
    return project


@pytest.fixture(scope="session")
def host_project(cluster: Cluster) -> Project:
    """A project without a container: a Python 3.11 with torch on the shared directory."""
    project = _project(cluster, f"host-{uuid.uuid4().hex[:6]}", f'image = "host"\npython = "{HOST_PYTHON}"\n')
    project.must("lock", timeout=600)
    return project


@pytest.fixture
def all_nodes_busy(cluster: Cluster) -> Iterator[object]:
    """Fill the cluster; call the value to let the next job start."""
    job = cluster.must("sbatch", "--parsable", "--nodes=2", "--exclusive", "--wrap=sleep 600").strip()
    for _ in range(60):
        if cluster.must("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING":
            break
        cluster.run("sleep", "0.5")

    def release() -> None:
        cluster.run("scancel", job)

    yield release
    release()
