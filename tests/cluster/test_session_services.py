"""Services of a session on a real node, in a SIF with the real Apptainer and on the host, seen by another user.

The services are started here by a small program, in the place of the session's own: `hpcenv.sessions.services.serving`
is what both call.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.kernel_client import CONNECTED, START_KERNEL

from .conftest import ROOT, TESTBED, Cluster, Project

pytestmark = pytest.mark.cluster

# In an allocation: the check of `hpcenv run`, then the services on the first node until the file `done` is there.
IN_ALLOCATION = """\
hpcenv run --lock "$2" -- true || exit
run=$(ls -td "$PWD"/runs/run-*/ | head -n 1)
exec srun --overlap --nodelist n1 --nodes 1 --ntasks 1 python3 serve.py "${run%/}" "$1"
"""
SERVE = """\
import json, os, subprocess, sys, tempfile, time
run, requests = sys.argv[1:]
sys.path.insert(0, f"{run}/code/hpcenv.zip")
from pathlib import Path
from hpcenv.errors import HpcenvError
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.session import SessionService
from hpcenv.sessions.services import serving

def listeners():
    return sorted(line.split()[3] for line in subprocess.run(["ss", "-Hltn"], capture_output=True, text=True).stdout.splitlines())

wanted = [SessionService(kind=kind, argv=tuple(argv), port=port) for kind, argv, port in json.loads(requests)]
folder = Path(tempfile.mkdtemp(prefix="hs-", dir="/tmp"))
here = Path(run).parents[1]
before = listeners()
try:
    with serving(wanted, run=RunFolder(Path(run)), environ=os.environ, folder=folder, settings=here / "lab",
                 logs=here / "logs", say=print, is_over=lambda seconds: time.sleep(seconds) or False) as running:
        said = {"folder": str(folder), "sockets": running.sockets, "run": run, "token": str(running.token_file or "")}
        (here / "open.new").write_text(json.dumps({**said, "before": before}))
        os.rename(here / "open.new", here / "open")
        while not (here / "done").exists():
            time.sleep(0.2)
    (here / "left").write_text(json.dumps(sorted(os.listdir(folder))))
    folder.rmdir()
except HpcenvError as error:
    print(f"REFUSED: {error}", flush=True)
"""
ASK = """\
import http.client, json, socket, sys
connected = socket.socket(socket.AF_UNIX)
connected.connect(sys.argv[1])
connection = http.client.HTTPConnection("localhost")
connection.sock = connected
method, url, token = sys.argv[2:5]
connection.request(method, url, headers={"Authorization": f"token {token}"} if token else {})
answer = connection.getresponse()
print(answer.status, answer.read().decode())
"""
WEB = "import http.server as h; h.ThreadingHTTPServer(('127.0.0.1', 8501), h.SimpleHTTPRequestHandler).serve_forever()"


@dataclass(frozen=True)
class Open:
    """Services that are open on n1.

    Attributes:
        before: addresses on which n1 listened before.
    """

    cluster: Cluster
    project: Project
    folder: str
    run: str
    sockets: dict[str, str]
    token: str
    before: list[str]

    def ask(self, name: str, url: str = "/", *, method: str = "GET", token: str = "", user: str = "alice") -> str:
        """Return status and body. The token stands in this command line: of the test, not of the session."""
        words = ("python3", "-c", ASK, self.sockets[name], method, url, token)
        return self.cluster.run(*words, node="n1", user=user).text

    def listeners(self) -> list[str]:
        lines = self.cluster.must("ss", "-Hltn", node="n1", user="root").splitlines()
        return sorted(line.split()[3] for line in lines)


@contextmanager
def opened(
    project: Project, *requests: tuple[str, tuple[str, ...], int | None], lock: str = "default"
) -> Iterator[Open]:
    cluster = project.cluster
    cluster.must("rm", "-f", "open", "done", "left", cwd=project.folder)
    cluster.write(f"{project.folder}/serve.py", SERVE)
    job_options = ("--nodelist=n1", "--cpus-per-task=2", "--time=15")
    words = ("salloc", *job_options, "bash", "-c", IN_ALLOCATION, "bash", json.dumps(requests), lock)
    argv = [str(TESTBED), "exec", "--node", "login", "--user", "alice", "--cwd", project.folder, "--", *words]
    job = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while cluster.run("test", "-e", "open", cwd=project.folder).status != 0:
        assert job.poll() is None, job.stdout.read()  # type: ignore[union-attr]
        time.sleep(0.5)
    said = json.loads(cluster.must("cat", "open", cwd=project.folder))
    try:
        yield Open(cluster=cluster, project=project, **said)
    finally:
        cluster.must("touch", "done", cwd=project.folder)
        out, _ = job.communicate(timeout=120)
    assert job.returncode == 0, out
    assert json.loads(cluster.must("cat", "left", cwd=project.folder)) == [], out
    assert said["folder"] not in cluster.must("ps", "-eo", "args", node="n1", user="root")


@pytest.mark.parametrize("kind", ["sif", "host"])
def test_a_program_that_knows_tcp_only_is_reached_by_its_user_only(
    cluster: Cluster, request: pytest.FixtureRequest, kind: str
) -> None:
    """In a separate network namespace: of Apptainer in a SIF, of hpcenv on the host."""
    project: Project = request.getfixturevalue(f"{kind}_project")
    with opened(project, ("command", ("python3", "-c", WEB), 8501)) as session:
        assert session.ask("port-8501").startswith("200 ")
        assert session.listeners() == session.before
        connect = "import socket; socket.create_connection(('127.0.0.1', 8501))"
        assert "ConnectionRefused" in cluster.run("python3", "-c", connect, node="n1").text
        assert "PermissionError" in session.ask("port-8501", user="bob")
        assert "Permission denied" in cluster.run("ls", session.folder, node="n1", user="bob").text


# -- Jupyter and TensorBoard over an image ------------------------------------------------

WHEELS = ("-r", str(ROOT / "tests/packages/sessions.txt"), "--require-hashes", "--no-deps", "--only-binary", ":all:")
IN_KERNEL = (
    CONNECTED
    + """\
code = "import sys, os, torch; print('SAID', sys.prefix, os.environ['HPCENV_RUN'], torch.ones(2).sum().item())"
client.execute_interactive(code, timeout=120)
client.execute_interactive("import hpcenv; hpcenv.submit('train.py')", timeout=60)
"""
)


@pytest.fixture(scope="module")
def tools_project(cluster: Cluster, sif_project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project over whose image `hpcenv image init --tools` has put Jupyter and TensorBoard."""
    wheels = tmp_path_factory.mktemp("wheels")
    pip = (sys.executable, "-m", "pip", "download", "-qq", *WHEELS, "-d", str(wheels / "wheels"))
    subprocess.run(pip, check=True, timeout=600)
    site = f"{sif_project.folder}/image/site"
    cluster.write(f"{site}/pip.conf", "[global]\nno-index = true\nfind-links = /mnt/wheels\n")
    packed = subprocess.run(["tar", "-C", str(wheels), "-c", "wheels"], capture_output=True, check=True).stdout
    unpack = [str(TESTBED), "exec", "--node", "login", "--user", "alice", "--cwd", site, "--", "tar", "-x"]
    subprocess.run(unpack, input=packed, check=True, timeout=300)
    add_tools(sif_project)
    return sif_project


def add_tools(project: Project) -> None:
    cluster = project.cluster
    assert "next: sh image/add-tools.sh" in project.must("image", "init", "--tools", "jupyter,tensorboard").replace(
        "`", ""
    )
    cluster.must("sh", "image/add-tools.sh", cwd=project.folder, timeout=600)
    spec = cluster.must("cat", "hpcenv.toml", cwd=project.folder)
    assert '[environment.tools]\noverlay = "image/tools.sqsh:/opt/tools"\n' in spec
    said = project.hpcenv("lock", "--lock", "tools", "--no-wheels", timeout=600)
    assert said.status == 0, said.text
    assert "the overlay hides packages" not in said.text


@pytest.mark.long
def test_jupyter_and_tensorboard_over_an_image_open_no_port_and_show_no_token(tools_project: Project) -> None:
    check_jupyter(tools_project)


def check_jupyter(project: Project) -> None:
    cluster = project.cluster
    project.must("run", "--", "true")
    shown_run = cluster.must("sh", "-c", "ls -d $PWD/runs/run-* | head -n 1", cwd=project.folder).strip()
    with opened(project, ("jupyter", (), None), ("tensorboard", (shown_run,), None), lock="tools") as session:
        token = cluster.must("cat", session.token, node="n1")
        assert session.ask("jupyter", "/api/contents").startswith("403 ")
        assert session.ask("jupyter", "/api/contents", token=token).startswith("200 ")
        kernel = json.loads(session.ask("jupyter", "/api/kernels", method="POST", token=token).partition(" ")[2])
        assert session.ask("tensorboard").startswith("200 ")
        connection = f"{session.folder}/jupyter/kernel-{kernel['id']}.json"
        client = (
            "apptainer",
            "-q",
            "exec",
            "-B",
            session.folder,
            "-B",
            f"{project.folder}/image/tools.sqsh:/opt/tools:image-src=/",
        )
        words = (*client, project.sif(), "/opt/tools/bin/python", "-c", IN_KERNEL, connection)
        said = cluster.run(*words, node="n1", timeout=200).text
        assert "SAID /opt/tools run-" in said
        assert said.rstrip().endswith("2.0") or " 2.0\n" in said
        assert "submit from a login node, in the project: `hpcenv submit SCRIPT" in said

        assert session.listeners() == session.before
        assert "PermissionError" in session.ask("jupyter", user="bob")
        assert "Permission denied" in cluster.run("cat", session.token, node="n1", user="bob").text
        shown = "cat /proc/*/cmdline /var/log/slurm* 2>/dev/null | tr '\\0' '\\n' | grep -cF -f /dev/stdin"
        here = cluster.run(
            "sh",
            "-c",
            f"cp /dev/stdin /root/t; {shown.replace('/dev/stdin', '/root/t')}; rm /root/t",
            node="n1",
            user="root",
            stdin=token,
        )
        assert here.stdout.strip() == "0", here.text
        found = cluster.run("grep", "-rlF", "-f", session.token, ".", node="n1", cwd=project.folder).text
        assert found == "", found


@pytest.mark.long
def test_a_jupyter_of_the_site_starts_a_kernel_in_the_image_or_refuses_it(tools_project: Project) -> None:
    """As JupyterHub does where it submits jobs: Jupyter runs in a batch job, and starts the kernel on its node."""
    project, cluster = tools_project, tools_project.cluster
    install = "/shared/python3.11/bin/python3.11 -m venv hub && hub/bin/pip install -qq --no-index --no-deps image/site/wheels/*.whl"
    cluster.must("sh", "-c", install, cwd=project.folder, timeout=600)
    name = project.json("kernel", "install", "--lock", "tools", "--prefix", "hub")["data"]["name"]
    cluster.write(f"{project.folder}/start.py", START_KERNEL)
    start = f"timeout 300 hub/bin/python start.py {name}"

    def started() -> str:
        cluster.run("sbatch", "--wait", "--nodelist=n1", "--cpus-per-task=2", "--time=10", "-o", "kernel.log", "--wrap", start,
                    cwd=project.folder, timeout=400)  # fmt: skip
        return cluster.must("cat", "kernel.log", cwd=project.folder)

    said = started()
    assert "SAID /opt/tools run-" in said, said
    cluster.must("sh", "-c", "cp image/tools.sqsh kept && printf x >> image/tools.sqsh", cwd=project.folder)
    try:
        said = started()
    finally:
        cluster.must("mv", "kept", "image/tools.sqsh", cwd=project.folder)
    assert "SAID" not in said
    assert "image/tools.sqsh" in said
