"""What the agent does around Ray, with two nodes on this machine and a small program in the place of Ray."""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import hpcenv.incontainer
from tests import ray_world
from tests.conftest import make_python

AGENT = Path(hpcenv.incontainer.__file__).parent / "agent.py"
SCRIPT = """\
import os, sys, time, ray
ray.init()
print("SCRIPT", len(ray.nodes()), os.environ["RAY_AUTH_MODE"], "RANK" in os.environ, sys.argv[1:], flush=True)
open(os.environ["SEEN"] + "/began", "w").close()
while "wait" in sys.argv and not os.path.exists(os.environ["SEEN"] + "/go"):
    time.sleep(0.05)
if "fail" in sys.argv:
    raise ValueError("the loss is nan")
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return make_python(tmp_path_factory.mktemp("with-ray") / "venv", ray_world.stand_in())


class Job:
    """A job of two nodes on this machine."""

    def __init__(self, folder, python, count=2):
        self.folder, self.python, self.count = folder, python, count
        (folder / "seen").mkdir(parents=True)
        (folder / "script.py").write_text(SCRIPT)
        self.token = secrets.token_hex(32)
        (folder / "meet.token").write_text(self.token)
        with socket.create_server(("127.0.0.2", 0)) as free:
            self.port = free.getsockname()[1]
        self.agents = []

    def start(self, *words, memory=0):
        for rank in range(self.count):
            options = [
                *("--ray", f"--nodes={self.count}", "--tasks-per-node=1", f"--node-rank={rank}", f"--node=n{rank}"),
                *(f"--address=127.0.0.1:{self.port}", "--local-address=127.0.0.1", "--gpus=0", f"--memory={memory}"),
                *(f"--meet={self.folder}/meet", f"--log-dir={self.folder}/logs/n{rank}"),
                f"--folder={tempfile.gettempdir()}/hpcenv-{self.token[:9]}-{rank}",
            ]
            argv = [
                self.python,
                AGENT,
                self.folder / f"agent{rank}.json",
                "--tasks",
                *options,
                "--",
                "script.py",
                *words,
            ]
            environ = {**os.environ, "SEEN": str(self.folder / "seen"), "RAY_AUTH_TOKEN": "another"}
            pipe = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            self.agents.append(subprocess.Popen(argv, cwd=self.folder, env=environ, **pipe))
        return self

    def wait_for(self, name):
        end = time.monotonic() + 40
        while not (self.folder / "seen" / name).exists():
            assert time.monotonic() < end, [agent.poll() for agent in self.agents]
            time.sleep(0.02)

    def clean(self):
        (self.folder / "seen" / "go").touch()  # a script whose agent is killed ends by itself
        for agent in self.agents:
            agent.kill()
            agent.communicate()
        for path in (self.folder / "seen").glob("*.raylet"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        for path in Path(tempfile.gettempdir()).glob(f"hpcenv-{self.token[:9]}-*"):
            shutil.rmtree(path)

    def end(self, rank=0):
        said = self.agents[rank].communicate(timeout=40)[0]
        path = self.folder / f"agent{rank}.json"
        return self.agents[rank].returncode, said, json.loads(path.read_text()) if path.exists() else None

    def seen(self, rank):
        return [json.loads(line) for line in (self.folder / "seen" / f"n{rank}").read_text().splitlines()]

    def raylet(self, rank):
        return int((self.folder / "seen" / f"n{rank}.raylet").read_text())


def is_alive(pid):
    return os.path.exists(f"/proc/{pid}") and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]


@pytest.fixture
def job(tmp_path, python):
    made = Job(tmp_path / "job", python)
    yield made
    made.clean()


def test_the_script_runs_on_the_head_when_all_nodes_are_there_and_nothing_is_left(job):
    job.start("one", memory=1000)
    status, said, record = job.end(0)
    assert (status, record) == (0, None), said
    assert "hpcenv: Ray has 2 nodes: n0 n1\nSCRIPT 2 token False ['one']\n" in said
    assert job.end(1) == (0, "", None)
    for rank in (0, 1):
        (seen,) = job.seen(rank)
        assert seen["command"] == "start"
        assert seen["modes"] == ["0o700", "0o600"]
        assert seen["env"]["RAY_AUTH_MODE"] == "token"
        assert "RAY_AUTH_TOKEN" not in seen["env"], "it would win over the file"
        options = seen["options"]
        assert options.keys() >= {"block", "disable-usage-stats"}
        assert (options["num-cpus"], options["num-gpus"]) == (str(len(os.sched_getaffinity(0))), "0")
        assert int(options["memory"]) + int(options["object-store-memory"]) == 1000 << 20
        assert options["node-ip-address"] == "127.0.0.2", "Ray takes 127.0.0.1 for a network's address"
        folder = Path(options["temp-dir"])
        assert len(f"{folder}/session_2026-11-28_13-39-51_589301_1581999/sockets/plasma_store") <= 107
        assert not folder.parent.exists()
        assert not is_alive(job.raylet(rank))
    head = job.seen(0)[0]["options"]
    assert (head["port"], head["include-dashboard"]) == (str(job.port), "false")
    assert sorted(path.name for path in job.folder.glob("meet*")) == ["meet.ended"]


def ports_of(seen):
    options, env = seen["options"], seen["env"]
    own = {int(options[name]) for name in options if name.endswith("-port") and "worker" not in name}
    own |= {int(env[name]) for name in env if name.endswith("_METRIC_PORT")}
    return own | set(range(int(options["min-worker-port"]), int(options["max-worker-port"]) + 1))


def test_two_jobs_on_one_node_share_no_port_and_no_folder_and_one_ends_alone(job, tmp_path, python):
    other = Job(tmp_path / "other", python)
    try:
        job.start("wait")
        other.start("wait")
        job.wait_for("began")
        other.wait_for("began")
        four = [made.seen(rank)[0] for made in (job, other) for rank in (0, 1)]
        ports = [ports_of(seen) for seen in four]
        assert len(set.union(*ports)) == sum(map(len, ports))
        assert len({seen["options"]["temp-dir"] for seen in four}) == 4
        (job.folder / "seen" / "go").touch()
        assert [job.end(rank)[0] for rank in (0, 1)] == [0, 0]
        assert is_alive(other.raylet(0))
        assert is_alive(other.raylet(1))
        (other.folder / "seen" / "go").touch()
        assert [other.end(rank)[0] for rank in (0, 1)] == [0, 0]
    finally:
        other.clean()


def test_a_stranger_without_the_token_is_refused(job):
    job.start("wait")
    job.wait_for("began")
    said = {}
    for token in (job.token, "ee" * 32):
        words = [job.python, "-c", f"import ray; print(ray.ask('', '127.0.0.2:{job.port}', '{token}'))"]
        said[token == job.token] = subprocess.run(words, capture_output=True, text=True).stdout
    assert said == {True: "['n0', 'n1']\n", False: ""}


def test_the_node_whose_ray_dies_is_named(job):
    job.start("wait")
    job.wait_for("began")
    os.kill(job.raylet(1), signal.SIGKILL)
    status, said, record = job.end(1)
    assert status == 1
    assert said == "hpcenv: node n1: sleep ended with 137\n"
    assert record["error"] == "sleep ended with 137"
    assert (job.folder / "logs" / "n1" / "ray-logs" / "raylet.out").read_text() == "a line of raylet"
    assert not Path(job.seen(1)[0]["options"]["temp-dir"]).exists()


def test_a_script_that_fails_has_its_status_and_the_other_nodes_end_well(job):
    status, said, record = job.start("fail").end(0)
    assert status == 1
    assert "ValueError: the loss is nan" in said
    assert [(row["rank"], row["status"]) for row in record["ranks"]] == [(-1, 1)]
    assert job.end(1)[0] == 0
    assert "ValueError" in (job.folder / "logs" / "n0" / "program" / "stderr.log").read_text()


def test_a_ray_that_does_not_start_in_its_time_is_started_again(job):
    (job.folder / "seen" / "n1.slow").touch()
    status, said, _ = job.start().end(0)
    assert status == 0, said
    assert "`ray start` ended with 1: The current node timed out during startup.; it is started again" in job.end(1)[1]
    assert len(job.seen(1)) == 2


@pytest.mark.parametrize(
    ("version", "error"),
    [("2.51.2", "Ray 2.51.2 has no token authentication; 2.52 or later has"), ("", "the environment has no Ray")],
)
def test_a_ray_without_a_token_is_not_started(tmp_path, version, error):
    files = ray_world.stand_in(version) if version else {}
    old = Job(tmp_path / "job", make_python(tmp_path / "venv", files), count=1).start()
    status, _, record = old.end()
    assert (status, record["error"]) == (1, error)
    assert not (old.folder / "seen" / "n0").exists()


def test_the_ray_of_a_killed_agent_gives_its_ports_back(tmp_path):
    """The kernel takes the names away with the process."""
    program = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('r', sys.argv[1]); m = u.module_from_spec(s)"
    )
    program += "; s.loader.exec_module(m); m._FIRST_PORT, m._END_OF_PORTS = 20096, 20480; p = m.Ports(200); print(p.first, p.count, flush=True)"
    argv = [sys.executable, "-c", program + "; input()", AGENT.with_name("ray_node.py")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert re.fullmatch("(20096|20224) 256\n", first.stdout.readline())
        second = subprocess.run(argv, input="\n", capture_output=True, text=True)
        assert "RayFailed: no 256 free TCP ports one after the other (20096 to 20479)" in second.stderr
        first.kill()
    assert subprocess.run(argv, input="\n", capture_output=True, text=True).returncode == 0
