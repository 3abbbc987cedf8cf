"""AMD GPUs from trees as the drivers amdkfd and amdgpu make them (synthesised from the kernel's sources)."""

import json
import os
import subprocess

import pytest

from hpcenv.facts import gpu_checks
from hpcenv.judge.checks import check_results
from hpcenv.judge.checks.check_table import BY_ID
from hpcenv.machine import gpus
from hpcenv.project.severities import severities

BUSES = ("0000:c1:00.0", "0000:c6:00.0")
NODE = "sys/class/kfd/kfd/topology/nodes"


class AmdNode:
    """A node with a CPU and two MI250X dies; `change` writes another content into files of the second one."""

    def __init__(self, root):
        self.root = root
        self.write(f"{NODE}/0/properties", "cpu_cores_count 64\nsimd_count 0\n")
        for number, where in ((4, 0xC100), (5, 0xC600)):
            properties = f"simd_count 440\nsimd_per_cu 4\ndomain 0\nlocation_id {where}\ngfx_target_version 90010\n"
            self.write(f"{NODE}/{number}/properties", properties)
            self.write(f"{NODE}/{number}/gpu_id", f"{number * 1000}\n")
        for number, bus in enumerate(BUSES):
            device = {
                "mem_info_vram_total": 68702699520, "mem_info_vram_used": 10 << 20, "current_link_width": 16,
                "max_link_width": 16, "unique_id": f"b9f2f6a1c5e3d4{number:02d}", "product_name": "AMD Instinct MI250X",
                "ras/umc_err_count": "ue: 0\nce: 0", "ras/gfx_err_count": "ue: 0\nce: 12", "ras/gpu_vram_bad_pages": "",
                "config": "\x02\x10",
            }  # fmt: skip
            for name, text in device.items():
                self.write(f"sys/bus/pci/devices/{bus}/{name}", text)
        (root / "dev").mkdir()
        (root / "dev/kfd").touch()
        (root / "sys/class/kfd/kfd/proc").mkdir()

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(str(text))

    def change(self, name, text):
        self.write(f"sys/bus/pci/devices/{BUSES[1]}/{name}", text)

    def read(self, **environ):
        found = {"PATH": f"{self.root}/bin:/usr/bin:/bin", **environ}
        return gpus.read(environ=found, proc=self.root / "proc", dev=self.root / "dev", root=self.root)

    def checks(self, **environ):
        node = gpu_checks.GpuNode(found=self.read(), wanted=2, environ=environ, kmsg=self.root / "kmsg")
        return {one.id: one for one in gpu_checks.check_gpus(node)}

    def program(self, name, answer):
        self.write(f"bin/{name}", f"#!/bin/sh\ncat {self.root}/{name}.json\n")
        (self.root / "bin" / name).chmod(0o755)
        self.write(f"{name}.json", json.dumps(answer))


@pytest.fixture
def node(tmp_path):
    return AmdNode(tmp_path)


def test_what_the_gpus_are(node):
    facts = node.read()
    assert facts.vendor == "amd"
    assert facts.values == {
        "host.driver-version": "absent",
        "host.cuda-driver-version": "absent",
        "host.gpu-count": 2,
        "host.gpu-models": ("AMD Instinct MI250X",) * 2,
        "host.gpu-uuids": ("b9f2f6a1c5e3d400", "b9f2f6a1c5e3d401"),
        "host.gpu-compute-capabilities": ("gfx90a", "gfx90a"),
        "host.gpu-memory-mib": ("65520", "65520"),
        "host.gpu-sm-counts": ("110", "110"),
        "host.gpu-mig": ("unsupported", "unsupported"),
        "host.gpu-ecc": ("enabled", "enabled"),
    }
    assert set(facts.unknown) == {"host.gpu-brands"}
    assert [place.bus for place in facts.places] == list(BUSES)


def test_gpus_of_other_jobs_are_not_counted(node):
    if os.getuid() == 0:  # root reads every file: the kernel's EPERM is an empty file here
        node.write(f"{NODE}/5/properties", "")
    else:
        (node.root / NODE / "5/properties").chmod(0)
    assert node.read().values["host.gpu-count"] == 1


def test_what_the_driver_does_not_tell_is_unknown(node):
    for name in ("product_name", "unique_id", "mem_info_vram_total"):
        (node.root / f"sys/bus/pci/devices/{BUSES[1]}/{name}").unlink()
    unknown = node.read().unknown
    assert set(unknown) == {"host.gpu-brands", "host.gpu-models", "host.gpu-uuids", "host.gpu-memory-mib"}
    assert unknown["host.gpu-models"] == "the driver of AMD does not report it"


def test_a_driver_that_hangs_is_a_lost_gpu(node):
    """The file of a sick GPU keeps its reader: here a FIFO does."""
    (node.root / f"sys/bus/pci/devices/{BUSES[1]}/unique_id").unlink()
    os.mkfifo(node.root / f"sys/bus/pci/devices/{BUSES[1]}/unique_id")
    found = gpus.read(environ={}, proc=node.root / "proc", dev=node.root / "dev", root=node.root, seconds=3)
    asked = gpu_checks.GpuNode(found=found, wanted=2, environ={}, kmsg=node.root / "kmsg")
    (one,) = [one for one in gpu_checks.check_gpus(asked) if one.id == "gpu.lost"]
    assert (one.state, "could not be read" in one.found) == ("failed", True)


def test_gpus_that_cannot_be_listed_are_unknown_not_absent(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    facts = gpus.read(environ={}, proc=tmp_path / "proc", dev=tmp_path / "dev", root=tmp_path)
    assert "host.gpu-count" not in facts.values
    assert "AMD GPUs" in facts.unknown["host.gpu-count"]


AMD_SMI = [
    {"gpu": n, "asic": {"market_name": "MI250X of amd-smi"}, "bus": {"bdf": bus.upper()}} for n, bus in enumerate(BUSES)
]
ROCM_SMI = {f"card{n}": {"Card Series": "MI250X of rocm-smi", "PCI Bus": bus.upper()} for n, bus in enumerate(BUSES)}


@pytest.mark.parametrize(
    ("name", "answer", "model"),
    [
        ("amd-smi", AMD_SMI, "MI250X of amd-smi"),
        ("amd-smi", {"gpu_data": AMD_SMI}, "MI250X of amd-smi"),
        ("rocm-smi", ROCM_SMI, "MI250X of rocm-smi"),
    ],
)
def test_a_program_of_rocm_knows_the_name(node, name, answer, model):
    node.change("product_name", "")
    node.program(name, answer)
    assert node.read().values["host.gpu-models"] == ("AMD Instinct MI250X", model)


def test_a_broken_program_of_rocm_leaves_the_name_unknown(node):
    node.change("product_name", "")
    node.program("amd-smi", "no list")
    assert "host.gpu-models" in node.read().unknown


def test_a_gpu_that_is_split(node):
    node.change("current_compute_partition", "CPX")
    assert node.read().values["host.gpu-mig"] == ("unsupported", "enabled")


# -- health -----------------------------------------------------------------------------------


def test_healthy_gpus_fail_no_check(node):
    states = {name: one.state for name, one in node.checks().items()}
    measured = {"gpu.count", "gpu.lost", "gpu.ecc.uncorrected", "gpu.ecc.corrected", "gpu.remap.failed"}
    measured |= {"gpu.remap.pending", "gpu.retired", "gpu.pcie.width", "gpu.stray", "gpu.shared"}
    assert {name for name, state in states.items() if state == "fine"} == measured
    assert {state for name, state in states.items() if name not in measured} == {"not-run"}


@pytest.mark.parametrize(
    ("name", "file", "text", "word"),
    [
        ("gpu.ecc.uncorrected", "ras/umc_err_count", "ue: 3\nce: 0", "3 uncorrected"),
        ("gpu.ecc.corrected", "ras/umc_err_count", "ue: 0\nce: 2000000", "2000012 corrected"),
        ("gpu.remap.failed", "ras/gpu_vram_bad_pages", "0x00000001 : 0x00001000 : F\n", "could not be replaced"),
        ("gpu.retired", "ras/gpu_vram_bad_pages", "0x00000001 : 0x00001000 : P\n", "retired"),
        ("gpu.pcie.width", "current_link_width", "8", "x8 instead of x16"),
    ],
)
def test_a_sick_gpu_is_named(node, name, file, text, word):
    node.change(file, text)
    outcomes = node.checks()
    assert (outcomes[name].state, word in outcomes[name].found) == ("failed", True), outcomes[name]
    assert "GPU 1 (0000:c6:00.0" in outcomes[name].note and "GPU 0" not in outcomes[name].note
    assert [one.id for one in outcomes.values() if one.state == "failed"] == [name]
    (finding,) = check_results.findings("n1", [outcomes[name]], severities({}))
    check = BY_ID[name]
    assert (finding.severity, finding.owner, finding.remedy) == (check.severity, check.owner, check.hint)


def test_a_gpu_that_has_left_the_bus(node):
    (node.root / f"sys/bus/pci/devices/{BUSES[1]}/config").write_bytes(b"\xff\xff\xff\xff")
    outcomes = node.checks()
    assert (outcomes["gpu.lost"].state, outcomes["gpu.lost"].found) == (
        "failed",
        "GPU 0000:c6:00.0 does not answer on the PCI bus",
    )
    assert outcomes["gpu.count"].state == "unknown"


def test_a_missing_gpu(node):
    node.write(f"{NODE}/5/properties", "")
    one = node.checks()["gpu.count"]
    assert (one.state, one.found, one.limit) == ("failed", "1", ">= 2")


def test_a_process_outside_of_the_job_that_uses_a_gpu(node):
    stray = subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"]})
    try:
        node.write(f"sys/class/kfd/kfd/proc/{stray.pid}/vram_5000", 4 << 30)
        outcomes = node.checks(SLURM_JOB_ID="7")
    finally:
        stray.kill()
        stray.wait()
    assert outcomes["gpu.stray"].state == "failed"
    assert f"pid {stray.pid} (sleep): 4096 MiB" in outcomes["gpu.stray"].found
