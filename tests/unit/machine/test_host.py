"""host: what a node says of itself, from folders and programs that a test gives it."""

import os
import resource
import subprocess
import sys

import pytest

from hpcenv.machine import host
from hpcenv.project import fields

# The files that a fact reads on every node, by path: one row each.
FILES = {
    "proc/sys/kernel/osrelease": "5.14.0-427.el9.x86_64\n",
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 7763 64-Core Processor\ncpu MHz\t\t: 2445.4\n",
}


class Node:
    """Folders for /sys, /proc, /dev and PATH, with `FILES` in them."""

    def __init__(self, folder):
        self.sys, self.proc, self.dev, self.bin = (folder / name for name in ("sys", "proc", "dev", "bin"))
        for one in (self.sys / "class", self.dev / "shm", self.bin):
            one.mkdir(parents=True)
        for name, text in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    def program(self, name, script):
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def port(self, device, port="1", state="4: ACTIVE", rate="400 Gb/sec (4X NDR)", link="InfiniBand"):
        folder = self.sys / "class/infiniband" / device / "ports" / port
        folder.mkdir(parents=True)
        for name, text in (("state", state), ("rate", rate), ("link_layer", link)):
            if text is not None:
                (folder / name).write_text(text + "\n")

    def host(self, environ, *, seconds):
        environ = {"PATH": str(self.bin), **environ}
        return host.Host(environ=environ, sys=self.sys, proc=self.proc, dev=self.dev, seconds=seconds)

    def read(self, **environ):
        return host.read(self.host(environ, seconds=5.0))


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_an_empty_node_is_known(node):
    facts = node.read()

    assert facts.unknown == {}
    assert facts.values["host.kernel"] == "5.14.0-427.el9.x86_64"
    assert facts.values["host.apptainer"] == "absent"
    assert facts.values["host.slurm"] == "absent"
    assert facts.values["host.rdma"] == ()
    assert set(facts.values) == set(host.FACTS)


def test_every_fact_has_a_row_in_the_table_of_fields():
    assert [name for name in host.FACTS if not fields.has_row(name)] == []


def test_this_very_machine_answers():
    facts = host.read(host.Host(environ=os.environ))

    assert facts.values["host.kernel"] == os.uname().release
    assert "host.glibc" in facts.values or facts.unknown["host.glibc"] == "the C library is not glibc"


@pytest.mark.parametrize(
    ("printed", "version"),
    [("apptainer version 1.5.3", "1.5.3"), ("singularity-ce version 4.2.1-jammy", "singularity-ce 4.2.1-jammy")],
)
def test_the_version_of_apptainer(node, printed, version):
    node.program("apptainer", f"echo '{printed}'")
    assert node.read().values["host.apptainer"] == version


def test_apptainer_by_its_path(node, tmp_path):
    node.program("other", "echo apptainer version 1.4.0")
    facts = host.read(host.Host(environ={"PATH": "/nowhere"}, apptainer=str(node.bin / "other"), seconds=5.0))
    assert facts.values["host.apptainer"] == "1.4.0"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo hello", "printed 'hello'"),
        ("true", "printed ''"),
        ("echo 'no license' >&2; exit 3", "ended with status 3: no license"),
        ("exec /bin/sleep 30", "did not answer within 1 s"),
    ],
)
def test_an_apptainer_that_does_not_say_is_unknown_with_the_reason(node, script, why):
    node.program("apptainer", script)
    facts = host.read(node.host({}, seconds=1.0))

    assert why in facts.unknown["host.apptainer"]
    assert list(facts.unknown) == ["host.apptainer"]


@pytest.mark.parametrize("program", ["scontrol", "srun"])
def test_the_version_of_slurm(node, program):
    node.program(program, "echo slurm-wlm 22.05.8")
    assert node.read().values["host.slurm"] == "22.05.8"


def test_slurm_in_a_job_without_its_programs_is_unknown_not_absent(node):
    facts = node.read(SLURM_JOB_ID="7")

    assert "host.slurm" not in facts.values
    assert facts.unknown["host.slurm"] == "neither scontrol nor srun is on PATH"


def test_memlock_is_the_limit_of_this_step(node):
    code = (
        "import resource, sys; _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK);"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * 1024, hard));"
        "from hpcenv.machine import host; import os; print(host._memlock(host.Host(environ=os.environ)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "64 KiB\n"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    expected = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB"
    assert node.read().values["host.memlock"] == expected


def test_shared_memory_is_the_size_of_its_file_system(node):
    status = os.statvfs(node.dev / "shm")
    assert node.read().values["host.shm-mib"] == status.f_frsize * status.f_blocks // 2**20


CPUS = {
    "AMD EPYC 7763 64-Core Processor": (
        "processor\t: 0\nmodel name\t: AMD EPYC 7763 64-Core Processor\ncpu MHz\t\t: 2445.4\ncpu cores\t: 64\n\n"
        "processor\t: 1\nmodel name\t: AMD EPYC 7763  64-Core Processor\ncpu MHz\t\t: 3100.0\ncpu cores\t: 64\n\n"
    ),
    "0x41 0xd4f 0x0": (  # NVIDIA Grace, Linux 6.8
        "processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd sve2\nCPU implementer\t: 0x41\n"
        "CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd4f\nCPU revision\t: 0\n\n"
    ),
    "POWER9, altivec supported": "processor\t: 0\ncpu\t\t: POWER9, altivec supported\nclock\t\t: 3.8GHz\n\ntimebase\t: 512\n",
    "A, B": "model name\t: B\n\nmodel name\t: A\n\nmodel name\t: B\n",
}


@pytest.mark.parametrize("model", CPUS)
def test_the_type_of_the_processor_is_named_without_what_changes_every_second(node, model):
    (node.proc / "cpuinfo").write_text(CPUS[model])
    assert node.read().values["host.cpu-model"] == model


def test_a_processor_without_a_name_is_unknown(node):
    (node.proc / "cpuinfo").write_text("processor\t: 0\n")
    assert node.read().unknown["host.cpu-model"].endswith("cpuinfo names no processor")


def test_missing_folders_are_unknown_one_by_one(node):
    (node.dev / "shm").rmdir()
    (node.sys / "class").rmdir()
    (node.proc / "sys/kernel/osrelease").write_text("")
    facts = node.read()

    assert set(facts.unknown) == {"host.kernel", "host.shm-mib", "host.rdma"}
    assert facts.unknown["host.shm-mib"].endswith("No such file or directory")
    assert facts.unknown["host.kernel"].endswith("is empty")


def test_every_rdma_port_in_the_order_of_people(node):
    node.port("mlx5_10")
    node.port("mlx5_2", port="1")
    node.port("mlx5_2", port="2", state="1: DOWN", rate="100 Gb/sec (4X EDR)", link="Ethernet")
    node.port("bnxt_re0", link="Ethernet")

    assert node.read().values["host.rdma"] == (
        "bnxt_re0:1 ACTIVE 400 Gb/sec (4X NDR) Ethernet",
        "mlx5_2:1 ACTIVE 400 Gb/sec (4X NDR) InfiniBand",
        "mlx5_2:2 DOWN 100 Gb/sec (4X EDR) Ethernet",
        "mlx5_10:1 ACTIVE 400 Gb/sec (4X NDR) InfiniBand",
    )


def test_a_port_that_cannot_be_read_is_unknown_with_its_file(node):
    node.port("mlx5_0")
    node.port("mlx5_1", rate=None)

    assert "mlx5_1/ports/1/rate: No such file" in node.read().unknown["host.rdma"]
