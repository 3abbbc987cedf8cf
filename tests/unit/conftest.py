"""Records as a small run has them, and run folders as submit makes them."""

import dataclasses
import hashlib
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcenv.launch import processes
from hpcenv.machine.this_node import ThisNode
from hpcenv.process import below
from hpcenv.project.severities import resolve
from hpcenv.records.facts import Facts, Interface, Network, Route
from hpcenv.records.files import save_record
from hpcenv.records.manifest import Environment, Expectation, Manifest, Setting
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import NodeSettings, NodeVerdict, Rendezvous, Verdict
from hpcenv.submission.node_code import copy_node_code

SCRIPT = "print('hello')\n"
SCRIPT_SHA256 = hashlib.sha256(SCRIPT.encode()).hexdigest()


def _manifest(**changes):
    base = Manifest(
        schema=1,
        run="r1",
        run_folder="/runs/r1",
        cluster="slurm",
        nodes=2,
        nproc_per_node=2,
        gpus_per_node=0,
        cpus_per_task=8,
        backend="gloo",
        environment=Environment(kind="host", python="/env/bin/python"),
        script="/job/train.py",
        script_sha256=SCRIPT_SHA256,
        args=(),
        workdir="/job",
        settings=(),
        expectations=(Expectation(field="python.version", value="3.11.7", severity="must"),),
        packages=(),
        probe_level="full",
        lockfile="lockfiles/default.lock.toml",
        lockfile_sha256="0" * 64,
        hpcenv_version="0.1.0",
    )
    changed = dataclasses.replace(base, **changes)
    severities = changes.get("severities") or resolve({}, gpus=changed.gpus_per_node > 0)
    return dataclasses.replace(changed, severities=severities)


_ADDRESS = {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}


def _facts(node="n1", *, values=None, interface="eth0", **changes):
    address = _ADDRESS.get(node, "10.0.0.9")
    network = Network(
        first_node="n1",
        first_node_addresses=("10.0.0.1",),
        interfaces=(
            Interface(name="lo", addresses=("127.0.0.1", "::1")),
            Interface(name=interface, addresses=(address,)),
        ),
        routes=(Route(target="10.0.0.1", source=address, interface=interface),),
        free_port=23456,
    )
    found = {"python.version": "3.11.7", "code.script-sha256": SCRIPT_SHA256, "host.machine": "x86_64", "host.cpus": 8}
    base = Facts(schema=1, run="r1", node=node, attempt=0, values=found | (values or {}), unknown={}, network=network)
    return dataclasses.replace(base, **changes)


@pytest.fixture
def make_manifest():
    return _manifest


@pytest.fixture
def make_facts():
    return _facts


FAKE_PYTHON = """\
#!/bin/sh
# Stands for the locked Python: `-B -` is the probe, `.../agent.py RECORD -- WORDS` is torchrun.
here=${0%/*}
case "$1" in
  -B) cat > /dev/null; exec sh "$here/probe.sh" "$@" ;;
  */agent.py) exec sh "$here/torchrun.sh" "$@" ;;
esac
"""

PROBE = '{"schema": 1, "level": "full", "values": {"python.version": "3.11.7"}, "unknown": {}, "packages": [], "seconds": {}, "mountinfo": "1 0 0:1 / / rw - overlay overlay rw"}'


def write_sif(path: Path, payload: bytes = b"files") -> Path:
    """Write the smallest SIF: header, one descriptor, a squashfs that is never mounted."""
    superblock = struct.pack("<4sIIIIHHHHHHQQ", b"hsqs", 1, 0, 131072, 0, 6, 17, 0, 1, 4, 0, 0, 96 + len(payload))
    body = superblock.ljust(96, b"\0") + payload
    extra = struct.pack("<ii3s", 1, 2, b"02\0")
    row = struct.pack(
        "<iBIIIqqqqqqq128s384s", 0x4004, 1, 1, 0xF0000001, 0, 4096, len(body), len(body), 0, 0, 0, 0, b"", extra
    )
    numbers = (0, 0, 0, 1, 128, len(row), 4096, len(body))
    header = struct.pack("<32s10s3s3s16s8q", b"", b"SIF_MAGIC\0", b"01\0", b"02\0", bytes(16), *numbers)
    path.write_bytes((header + row).ljust(4096, b"\0") + body)
    return path


@pytest.fixture
def make_sif():
    return write_sif


class HandMadeRun:
    """A run folder with the node code in it, whose Python is two small shell programs."""

    def __init__(self, base: Path, manifest: Manifest) -> None:
        self.base = base
        self.folder = RunFolder(base / "runs" / "r1")
        self.bin = base / "env" / "bin"
        self.bin.mkdir(parents=True)
        (self.bin / "python").write_text(FAKE_PYTHON)
        (self.bin / "python").chmod(0o755)
        self.probe(f"echo '{PROBE}'")
        self.torchrun("exit 0")
        script = base / "train.py"
        script.write_text(SCRIPT)
        self.manifest = dataclasses.replace(
            manifest,
            run_folder=str(self.folder.path),
            script=str(script),
            workdir=str(base),
            environment=Environment(kind="host", python=str(self.bin / "python")),
        )
        self._started: list[subprocess.Popen[Any]] = []
        copy_node_code(self.folder)
        self.save()

    def module(self, name: str) -> Path:
        """Replace the archive of the node code by files, and return the one of a module, which a test changes."""
        copy_node_code(self.folder, as_files=True)
        self.folder.archive.unlink(missing_ok=True)
        return self.folder.code / "hpcenv" / name

    def save(self, **changes) -> None:
        self.manifest = dataclasses.replace(self.manifest, **changes)
        save_record(self.manifest, self.folder.manifest)

    def probe(self, program: str) -> None:
        (self.bin / "probe.sh").write_text(program + "\n")

    def torchrun(self, program: str) -> None:
        (self.bin / "torchrun.sh").write_text(program + "\n")

    def place(self, *, attempt: int = 0) -> ThisNode:
        """The batch node, in this attempt."""
        nodes = ("n1", "n2")[: self.manifest.nodes]
        return ThisNode(node="n1", nodes=nodes, attempt=attempt, job_id="77", restarts=attempt)

    def environ(self, node: str = "n1", **more: str) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.base),
            "TMPDIR": str(self.tmp),
            "SLURM_JOB_NODELIST": "n[1-2]" if self.manifest.nodes == 2 else "n1",
            "SLURM_JOB_ID": "77",
            "SLURMD_NODENAME": node,
            **more,
        }

    @property
    def tmp(self) -> Path:
        path = self.base / "tmp"
        path.mkdir(exist_ok=True)
        return path

    def argv(self, step: str, *arguments: str) -> list[str]:
        return [sys.executable, "-I", str(self.folder.step), step, str(self.folder.path), *arguments]

    def step(self, step: str, *arguments: str, node: str = "n1", **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(step, *arguments),
            env=self.environ(node, **more),
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
        )

    def start(self, step: str, node: str = "n1", **options: Any) -> subprocess.Popen[Any]:
        """Start a step; the fixture ends what still runs after the test."""
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        wanted = {"env": self.environ(node), "cwd": "/", **(options or pipe)}
        child = subprocess.Popen(self.argv(step), **wanted)
        self._started.append(child)
        return child

    def end(self) -> None:
        """End what a failed test left running: an unfinished Popen object would fail one of the next tests."""
        for child in self._started:
            if child.poll() is None:
                processes.send((*below(child.pid), child.pid), signal.SIGKILL)
                child.wait()
            if child.stdout is not None:
                child.stdout.close()

    def open_gate(self, *, attempt: int = 0, run: str = "r1", result: str = "match", rendezvous: str = "77.0") -> None:
        """Write what the decide step writes when all is well."""
        meeting = Rendezvous(host="127.0.0.1", port=23456, id=rendezvous)
        verdict = Verdict(
            schema=1,
            run=run,
            attempt=attempt,
            result=result,
            nodes=(NodeVerdict(node="n1", result=result, compared=2),),
            findings=(),
            rendezvous=meeting,
            settings={},
        )
        save_record(verdict, self.folder.verdict)
        settings = NodeSettings(
            schema=1,
            run=run,
            node="n1",
            attempt=attempt,
            node_rank=0,
            local_address="127.0.0.1",
            rendezvous=meeting,
            settings=(Setting(name="NCCL_DEBUG", value="WARN", origin="detected"),),
        )
        save_record(settings, self.folder.env_of("n1"))


@pytest.fixture
def run(tmp_path):
    made = HandMadeRun(tmp_path, _manifest(nodes=1))
    yield made
    made.end()


@pytest.fixture
def run_of_two(tmp_path):
    made = HandMadeRun(tmp_path, _manifest(nodes=2))
    yield made
    made.end()


@pytest.fixture
def local_run(tmp_path):
    made = HandMadeRun(tmp_path, _manifest(nodes=2, cluster="local", cpus_per_task=0))
    yield made
    made.end()
