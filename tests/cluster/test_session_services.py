"""Services of a session on a real node, in a SIF with the real Apptainer and on the host, seen by another user."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.kernel_client import CONNECTED, START_KERNEL

from .conftest import ROOT, TESTBED, Cluster, Project
from .test_sessions import ON_NODE

pytestmark = pytest.mark.cluster

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
    """A session with services, which is open on n1.

    Attributes:
        folder: its folder on n1.
        before: the TCP sockets that listened on n1 before.
    """

    cluster: Cluster
    project: Project
    folder: str
    run: str
    job_id: str
    sockets: dict[str, str]
    token_file: str
    before: set[str]

    def ask(self, name: str, url: str = "/", *, method: str = "GET", token: str = "", user: str = "alice") -> str:
        """Return status and body. The token stands in this command line: of the test, not of the session."""
        words = ("python3", "-c", ASK, self.sockets[name], method, url, token)
        return self.cluster.run(*words, node="n1", user=user).text

    def new_listeners(self) -> set[str]:
        return listeners(self.cluster) - self.before


def listeners(cluster: Cluster) -> set[str]:
    """The addresses on which programs listen on n1. srun listens for its own steps."""
    lines = cluster.must("ss", "-Hltnp", node="n1", user="root").splitlines()
    return {line.split()[3] for line in lines if '(("srun",' not in line}


@contextmanager
def opened(project: Project, *options: str, after: tuple[str, ...] = ()) -> Iterator[Open]:
    cluster = project.cluster
    before = listeners(cluster)
    words = ("--nodelist", "n1", "--cpus", "2", "--time", "15", *options)
    project.must("session", "start", "web", *words, *after, timeout=500)
    try:
        said = project.json("status", "web")["data"]
        names = ("folder", "sockets", "token_file")
        node = {name: said["session"][0][name] for name in names}
        yield Open(
            cluster=cluster, project=project, before=before, run=said["run_folder"], job_id=said["job_id"], **node
        )
    finally:
        project.hpcenv("cancel", "web")
    assert cluster.run("sh", "-c", ON_NODE, node="n1", user="root").stdout == ""


@pytest.mark.parametrize("kind", ["sif", "host"])
def test_a_program_that_knows_tcp_only_is_reached_by_its_user_only(
    cluster: Cluster, request: pytest.FixtureRequest, kind: str
) -> None:
    """In a separate network namespace: of Apptainer in a SIF, of hpcenv on the host."""
    project: Project = request.getfixturevalue(f"{kind}_project")
    with opened(project, "--serve", "8501", after=("--", "python3", "-c", WEB)) as session:
        assert session.ask("port-8501").startswith("200 ")
        assert session.new_listeners() == set()
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
    with opened(project, "--jupyter", "--tensorboard", shown_run, "--lock", "tools") as session:
        token = cluster.must("cat", session.token_file, node="n1")
        assert f"/?token={token}\n" in project.must("session", "open", "web")
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
        assert "SAID /opt/tools web-" in said
        assert said.rstrip().endswith("2.0") or " 2.0\n" in said
        assert "submit from a login node, in the project: `hpcenv submit SCRIPT" in said

        assert session.new_listeners() == set()
        assert "PermissionError" in session.ask("jupyter", user="bob")
        assert "Permission denied" in cluster.run("cat", session.token_file, node="n1", user="bob").text
        assert "Permission denied" in cluster.run("ls", session.folder, node="n1", user="bob").text
        assert _where_it_stands(session, token) == []


SHOWN = """\
cat > /root/token
cat /proc/[0-9]*/cmdline /var/log/slurm* 2>/dev/null | tr '\\0' '\\n' | grep -F -f /root/token
scontrol show job -dd "$1" | grep -F -f /root/token
scontrol write batch_script "$1" - | grep -F -f /root/token
grep -rlF -f /root/token "$2"
rm /root/token
"""


def _where_it_stands(session: Open, token: str) -> list[str]:
    """Where other users, or readers of a log or record, would see the token: command lines, logs, Slurm, the project."""
    found = []
    for node in ("n1", "login"):
        words = ("sh", "-c", SHOWN, "sh", session.job_id, session.project.folder)
        found += session.cluster.run(*words, node=node, user="root", stdin=token).stdout.splitlines()
    return found


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
