"""A small program in the place of Ray, for tests of what hpcenv does around it, and Ray from the index for long ones."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

# Ray from the index, beside torch (tests/packages/ray.in).
PYTHON = os.environ.get("HPCENV_TEST_RAY_PYTHON", "")

_INIT = """\
import json, os, socket

def ask(word, address=None, token=None):
    address = address or os.environ["RAY_ADDRESS"]
    token = token or open(os.environ["RAY_AUTH_TOKEN_PATH"]).read()
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as peer, peer.makefile("rw") as lines:
        lines.write(json.dumps([token, word]) + "\\n")
        lines.flush()
        answer = json.loads(lines.readline())
    if answer is None:
        raise PermissionError("wrong token")
    return answer

def init(**_options):
    ask("")

def nodes():
    return [{"NodeName": name, "Alive": True} for name in ask("")]
"""
# `ray start` with a daemon in a separate session, which a parent does not end, and a socket in its folder.
_CLI = """\
import json, os, pathlib, socket, subprocess, sys, threading, time
import ray

def main():
    words = sys.argv[2:]
    given = dict(word[2:].partition("=")[::2] for word in words)
    folder = pathlib.Path(given["temp-dir"])
    above = folder.parent
    seen = {name: value for name, value in os.environ.items() if name.startswith(("RAY_", "AUTOSCALER", "DASHBOARD"))}
    modes = [oct(path.stat().st_mode & 0o777) for path in (above, above / "token")]
    at = pathlib.Path(os.environ["SEEN"]) / given["node-name"]
    with open(at, "a") as file:
        file.write(json.dumps({"command": sys.argv[1], "options": given, "env": seen, "modes": modes}) + "\\n")
    if at.with_suffix(".slow").exists():
        at.with_suffix(".slow").unlink()
        sys.exit("The current node timed out during startup.")
    logs = folder / "session_1" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("a line of raylet")
    (folder / "session_latest").symlink_to(folder / "session_1")
    local = socket.socket(socket.AF_UNIX)
    local.bind(str(folder / "raylet"))
    raylet = subprocess.Popen(["sleep", "300"], start_new_session=True)
    at.with_suffix(".raylet").write_text(str(raylet.pid))
    token, joined = open(os.environ["RAY_AUTH_TOKEN_PATH"]).read(), [given["node-name"]]

    def serve(listening):
        while True:
            peer, _ = listening.accept()
            with peer, peer.makefile("rw") as lines:
                line = lines.readline()
                if not line:
                    continue
                their, word = json.loads(line)
                if their == token and word:
                    joined.append(word)
                lines.write(json.dumps(joined if their == token else None) + "\\n")

    if "head" in given:
        listening = socket.create_server((given["node-ip-address"], int(given["port"])))
        threading.Thread(target=serve, args=[listening], daemon=True).start()
    else:
        ray.ask(given["node-name"], given["address"])
    print("Ray runtime started.", flush=True)
    while True:
        time.sleep(1)
        if raylet.poll() is not None:
            sys.exit("Remaining processes will be killed.")
"""


def stand_in(version: str = "2.60.0") -> dict[str, str]:
    """Return the files of a distribution `ray` that is the small program."""
    info = f"ray-{version}.dist-info"
    return {
        "ray/__init__.py": _INIT,
        "ray/cli.py": _CLI,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: ray\nVersion: {version}\n",
        f"{info}/entry_points.txt": "[console_scripts]\nray = ray.cli:main\n",
    }


@cache
def site_packages() -> Path:
    """Return the folder with Ray from the index."""
    words = [PYTHON or "false", "-c", "import ray, torch, pyarrow; print(ray.__path__[0])"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("NOT RUN: no Ray (HPCENV_TEST_RAY_PYTHON names a Python that has it beside torch)")
    return Path(done.stdout.strip()).parent
