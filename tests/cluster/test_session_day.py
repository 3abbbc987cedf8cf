"""The day of docs/how-to/sessions.md as it is written: its commands on a login node, its pages in a browser of a laptop."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from .browser import Browser, browsing
from .conftest import ROOT, TESTBED, Cluster, Project
from .laptop import Laptop
from .test_session_services import WHEELS
from .test_sessions import ON_NODE, laptop

__all__ = ["laptop"]  # a fixture
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on PATH"),
]

LOCK = ROOT / "tests/packages/python3.11.txt"
# It trains until a file is there, and says which variables it was given.
TRAIN = """\
import os, sys, time
from pathlib import Path
from hpcenv import training
if os.environ["RANK"] == "0":
    print("GIVEN", sys.argv[1:], os.environ["HOME"], os.environ.get("TMPDIR"), os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
for step in range(1, 2000):
    training.log_metrics(step, loss=2.0 / step)
    time.sleep(0.2)
    if Path("ENOUGH").exists():
        break
"""


def section(page: str, title: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def code(page: str, title: str, language: str) -> list[str]:
    """Return the lines of the code blocks of a section."""
    return "".join(re.findall(rf"^```{language}\n(.*?)^```", section(page, title), re.M | re.S)).splitlines()


def _needs_of_hpcenv() -> str:
    """Return the part of the lock with what hpcenv needs, but for pip."""
    names, left = set(), ["hpcenv"]
    while left:
        for line in importlib.metadata.requires(left.pop()) or ():
            one = Requirement(line)
            if one.name not in {*names, "pip"} and (one.marker is None or one.marker.evaluate({"extra": ""})):
                names.add(one.name)
                left.append(one.name)
    blocks = re.findall(r"^[a-z0-9._-]+==.*?(?=^\S|\Z)", LOCK.read_text(encoding="utf-8"), re.M | re.S)
    return "".join(block for block in blocks if block.partition("==")[0] in names)


@pytest.fixture(scope="module")
def day(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project on the host, in whose Python JupyterLab, TensorBoard and hpcenv are installed; its torch is that
    of the testbed, which cannot use GPUs: `--allow-cpu-torch` stands beside `--gpus`."""
    place = tmp_path_factory.mktemp("day")
    (place / "needs.txt").write_text(_needs_of_hpcenv())
    pip = (sys.executable, "-m", "pip")
    into = ("-d", str(place / "wheels"))
    for words in (WHEELS, ("-r", str(place / "needs.txt"), *WHEELS[2:])):
        subprocess.run([*pip, "download", "-qq", "--python-version", "3.11", *words, *into], check=True, timeout=600)
    own = [*pip, "wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", str(place / "wheels"), str(ROOT)]
    subprocess.run(own, check=True, timeout=300)
    made = Project(cluster, f"/home/alice/hpcenv-tests/day-{uuid.uuid4().hex[:6]}")
    cluster.write(f"{made.folder}/train.py", TRAIN.replace("ENOUGH", f"{made.folder}/enough"))
    packed = subprocess.run(["tar", "-C", str(place), "-c", "wheels"], capture_output=True, check=True).stdout
    unpack = [str(TESTBED), "exec", "--node", "login", "--user", "alice", "--cwd", made.folder, "--", "tar", "-x"]
    subprocess.run(unpack, input=packed, check=True, timeout=300)
    install = "/shared/python3.11/bin/python3.11 -m venv venv && venv/bin/pip install -qq --no-index --no-deps wheels/*.whl && rm -r wheels && echo /shared/hostenv/lib/python3.11/site-packages > venv/lib/python3.11/site-packages/torch.pth"
    cluster.must("sh", "-c", install, cwd=made.folder, timeout=600)
    spec = 'image = "host"\npython = "venv/bin/python"\n'
    cluster.write(f"{made.folder}/hpcenv.toml", spec)
    made.must("lock", "--no-wheels", timeout=600)
    return made


@contextmanager
def forwarded(laptop: Laptop, line: str) -> Iterator[None]:
    """Leave a line that `session open` prints running on the laptop."""
    words = ["bash", "-c", f"exec {line.replace('ssh ', 'ssh -o BatchMode=yes ', 1)}"]
    ssh = subprocess.Popen(laptop.command(*words), stdin=subprocess.DEVNULL)
    port = re.search(r"-L 127\.0\.0\.1:(\d+):", line)[1]  # type: ignore[index]
    listens = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
    try:
        until = time.monotonic() + 60
        while laptop.run("python3", "-c", listens).status != 0:
            assert ssh.poll() is None, line
            assert time.monotonic() < until, line
            time.sleep(0.5)
        yield
    finally:
        ssh.terminate()
        ssh.wait()


def know(laptop: Laptop, project: Project, name: str) -> None:
    """Type the line of the page with which a laptop learns of a session."""
    line = code("docs/how-to/sessions.md", "ssh and editors", "bash")[0]
    program = project.cluster.must("sh", "-c", "command -v hpcenv").strip()
    typed = line.replace(" lab ", f" {name} ").replace("LOGIN", "login").replace("PROJECT", project.folder)
    done = laptop.run("bash", "-c", typed.replace("&& hpcenv", f"&& {program}"))
    assert done.status == 0, done.text


def pictures(name: str, otherwise: Path) -> Path:
    """Return where a picture is kept: HPCENV_TEST_PICTURES names a folder for those who want to look at it."""
    return Path(os.environ.get("HPCENV_TEST_PICTURES", str(otherwise))) / name


def run_cell(browser: Browser, address: str, notebook: str, said: str) -> None:
    """Open JupyterLab, and in it a notebook with one cell; run the cell, and wait for its output."""
    browser.open(address)
    browser.wait_for("document.querySelector('#jp-main-dock-panel') !== null")
    root = address.partition("/?")[0]
    browser.open(f"{root}/lab/tree/{notebook}")
    browser.wait_for("document.querySelector('.jp-Notebook .cm-content') !== null")
    browser.wait_for("""document.querySelector('.jp-Notebook-ExecutionIndicator[data-status="idle"]') !== null""")
    until = time.monotonic() + 120
    while browser.value("document.querySelector('.jp-InputPrompt').innerText.trim() === '[ ]:'"):
        assert time.monotonic() < until, "the cell does not run"
        # JupyterLab asks which kernel, though there is one.
        browser.value("document.querySelectorAll('.jp-Dialog .jp-mod-accept').forEach(button => button.click())")
        time.sleep(2)
        browser.value("document.querySelector('.jp-Notebook .cm-content').focus()")
        browser.press_shift_enter()
        time.sleep(3)
    browser.wait_for(f"document.querySelector('.jp-OutputArea').innerText.includes({json.dumps(said)})", 300)


def notebook(source: str) -> str:
    cell = {"cell_type": "code", "id": "one", "metadata": {}, "execution_count": None, "outputs": [], "source": source}
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return json.dumps({"cells": [cell], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})


def wait_until(project: Project, run: str, state: str) -> None:
    until = time.monotonic() + 120
    while (found := project.json("status", run)["data"]["state"]) != state:
        assert time.monotonic() < until, f"{run} is {found}\n{project.hpcenv('logs', run).text}"
        time.sleep(1)


def submit_in_a_notebook(day: Project, browser: Browser, address: str, tmp_path: Path) -> None:
    """The cell of the page submits a job; it gets nothing of the session's own job."""
    cell = "\n".join(code("docs/how-to/session-services.md", "Submit from a notebook", "python"))
    fits = cell.replace("gpus=8", "gpus=4, allow_cpu_torch=True")
    day.cluster.write(f"{day.folder}/notes.ipynb", notebook(f"{fits}\nprint('SUBMITTED', job.run.name)"))
    run_cell(browser, address, "notes.ipynb", "SUBMITTED train-")
    browser.picture(pictures("day-notebook.png", tmp_path))
    said = browser.value("document.querySelector('.jp-OutputArea').innerText")
    run = re.search(r"SUBMITTED (\S+)", said)[1]  # type: ignore[index]
    day.cluster.must("touch", "enough", cwd=day.folder)
    wait_until(day, run, "completed")
    day.cluster.must("rm", "enough", cwd=day.folder)
    log = day.must("logs", run)
    given = re.search(r"GIVEN \['--lr', '3e-4'\] (\S+) (\S+) (\S+)", log)
    assert given is not None, log
    assert given[1] == "/home/alice"
    assert "hpcenv-session" not in given[2]
    assert len(given[3].split(",")) in (1, 4), given[3]


def see_curves(browser: Browser, address: str) -> None:
    """Open TensorBoard until it shows the loss: its page does not look again by itself."""
    until = time.monotonic() + 180
    while not browser.value("document.body.innerText.includes('loss')"):
        assert time.monotonic() < until, browser.value("document.body.innerText")
        browser.open(address)
        time.sleep(15)


@pytest.mark.long
def test_the_day_of_the_page(day: Project, laptop: Laptop, cluster: Cluster, tmp_path: Path) -> None:
    """But for `--gpus 8`: the testbed has two nodes with 8 GPUs, and the notebook has one of them."""
    run, seen = "", []
    for line in code("docs/how-to/sessions.md", "A day", "bash"):
        words = shlex.split(
            re.sub(
                r"--gpus [14]",
                r"\g<0> --allow-cpu-torch",
                line.replace(" RUN", f" {run}").replace("--gpus 8", "--gpus 4"),
            )
        )
        verb = words[2] if words[1] == "session" else words[1]
        seen.append(verb)
        if verb == "shell":
            typed = "echo on $SLURMD_NODENAME with $CUDA_VISIBLE_DEVICES\nexit\n"
            done = cluster.run("script", "-qec", shlex.join(words), "/dev/null", cwd=day.folder, stdin=typed)
            assert done.status == 0, done.text
            assert re.search(r"[\r\n]on n[12] with \d\r?$", done.stdout, re.M), done.text
            continue
        said = day.must(*words[1:], timeout=400)
        if verb == "submit":
            run = re.search(r"submitted (\S+):", said)[1]  # type: ignore[index]
            wait_until(day, run, "running")
        if verb == "open":
            know(laptop, day, words[3])
            forward, address = said.splitlines()
            with forwarded(laptop, forward), browsing(laptop) as browser:
                if words[3] == "lab":
                    submit_in_a_notebook(day, browser, address, tmp_path)
                else:
                    see_curves(browser, address)
                    browser.picture(pictures("day-curves.png", tmp_path))
                    assert day.json("status", run)["data"]["state"] == "running"
    assert seen == ["shell", "start", "open", "submit", "start", "open", "cancel"]
    cluster.must("touch", "enough", cwd=day.folder)
    wait_until(day, run, "completed")
    for node in ("n1", "n2"):
        assert cluster.run("sh", "-c", ON_NODE, node=node, user="root").stdout == ""


TORCH_CELL = """\
import torch
model = torch.nn.Linear(2, 1)
model(torch.ones(4, 2)).sum().backward()
print('TORCH', torch.__version__, model.bias.grad)
"""


@pytest.mark.long
def test_a_program_that_knows_tcp_only_is_used_in_a_browser(day: Project, laptop: Laptop, tmp_path: Path) -> None:
    """JupyterLab, started by the user with a port and kernels that use TCP. (The newest code-server needs another
    Node.js than Debian 12 has.) It needs no token: only its user reaches it."""
    lab = ("venv/bin/jupyter-lab", "--ip=127.0.0.1", "--port=8899", "--no-browser", "--IdentityProvider.token=")
    day.must("session", "start", "own", "--gpus", "0", "--cpus", "2", "--time", "20", "--serve", "8899", "--", *lab)
    try:
        know(laptop, day, "own")
        day.cluster.write(f"{day.folder}/torch.ipynb", notebook(TORCH_CELL))
        forward, address = day.must("session", "open", "own").splitlines()
        with forwarded(laptop, forward), browsing(laptop) as browser:
            run_cell(browser, address.rstrip("/"), "torch.ipynb", "TORCH 2.")
            browser.picture(pictures("day-torch.png", tmp_path))
            said = browser.value("document.querySelector('.jp-OutputArea').innerText")
        assert "tensor([4.])" in said, said
    finally:
        day.must("cancel", "own")
