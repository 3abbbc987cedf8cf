"""What the GPUs do: the real pynvml, with the stand-in of the driver's library from the testbed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
GCC = shutil.which("gcc")
LOOK = """
import dataclasses, json, sys
from hpcenv.machine.gpu_use import GpuWatch
watch = GpuWatch(lambda: {int(pid): 3 for pid in sys.argv[1:]})
for line in sys.stdin:
    found = watch.look(float(line))
    print(json.dumps(found if isinstance(found, str) else [dataclasses.asdict(one) for one in found]), flush=True)
"""
# What an H200 answered under load on 2026-11-28 (docs/gpu-checks.md), and a GPU that is idle.
BUSY = """
[gpu]
uuid = GPU-1
bus = 00000000:06:00.0
utilization = 100 24
memory-mib = 143771 21978
power = 388894
power-limit = 700000
temperature = 58
clock = 1515 1515 3201 1545
clock-max = 1980 1980 3201 1545
throttle = 4
ecc-uncorrected = 0
pcie-replays = 0
energy = 3840736
process = 4711 21978
gpm = 1
gpm-2 = 95
gpm-5 = 93
gpm-10 = 16
"""
IDLE = """
[gpu]
uuid = GPU-0
bus = 00000000:05:00.0
utilization = 0 0
memory-mib = 143771 615
throttle = 1
process = 99 1
temperature = !15
"""


class Looker:
    """A process that watches, with the stand-in."""

    def __init__(self, folder: Path) -> None:
        assert GCC
        library = folder / "libnvidia-ml.so.1"
        source = ROOT / "scripts" / "_testbed" / "stub_nvml.c"
        subprocess.run([GCC, "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True)
        self.conf = folder / "stub.conf"
        env = {"LD_LIBRARY_PATH": str(folder), "STUB_NVML": str(self.conf), "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        self.child = subprocess.Popen([sys.executable, "-c", LOOK, "4711"], stdin=pipe, stdout=pipe, text=True, env=env)

    def look(self, seconds: float = 10) -> object:
        assert self.child.stdin and self.child.stdout
        self.child.stdin.write(f"{seconds}\n")
        self.child.stdin.flush()
        return json.loads(self.child.stdout.readline())


@pytest.fixture
def looker(tmp_path: Path):
    if not GCC:
        pytest.skip("NOT TESTED: gcc is not installed")
    made = Looker(tmp_path)
    yield made
    made.child.kill()
    made.child.communicate()


def test_each_figure_has_its_unit_and_what_is_not_supported_is_unknown(looker: Looker) -> None:
    looker.conf.write_text("driver = 580.159.04\n" + BUSY + IDLE)
    idle, busy = looker.look()
    assert (idle["uuid"], busy["uuid"]) == ("GPU-0", "GPU-1"), "in the order of the bus"
    assert (busy["use"], busy["power"], busy["power_limit"], busy["energy"]) == (100, 388.894, 700, 3840.736)
    assert {type(busy[name]) for name in ("use", "memory", "temperature", "clock", "ecc")} == {float}, "for their means"
    assert (busy["memory"], busy["memory_total"]) == (21978 << 20, 143771 << 20)
    assert (busy["clock"], busy["clock_limit"], busy["slow"]) == (1515, 1980, ["power-cap"])
    assert (busy["ranks"], busy["others"]) == ([3], 0)
    assert (idle["ranks"], idle["others"], idle["slow"]) == ([], 1, []), "counted, not named; idle is no reason"
    assert idle["temperature"] is None and "GPU is lost" in idle["unknown"]["temperature"]
    assert idle["power"] is None and "Not Supported" in idle["unknown"]["power"]


def test_the_counters_of_the_sms_are_those_between_two_looks(looker: Looker) -> None:
    looker.conf.write_text("driver = 580.159.04\n" + BUSY + IDLE)
    first, second = looker.look()[1], looker.look()[1]
    assert (first["sm"], first["tensor"], first["dram"]) == (None, None, None)
    assert (second["sm"], second["tensor"], second["dram"]) == (95, 93, 16)
    assert looker.look()[0]["sm"] is None, "this GPU has none"


# A split GPU with two parts of this job, and one of another job. The NVML of some drivers answers 0 for a part.
SPLIT = (
    BUSY.replace("process = 4711 21978", "process = 77 40000")
    + """
mig = 1 1
[part]
uuid = MIG-0
instance = 3
memory-mib = 18000 900
utilization = 0 0
power = 0
process = 4711 900
gpm-2 = 40
[part]
uuid = MIG-1
handle = !4
[part]
uuid = MIG-2
instance = 5
memory-mib = 18000 10
"""
)


def test_parts_of_a_split_gpu_are_the_gpus_and_their_use_is_unknown(looker: Looker) -> None:
    looker.conf.write_text("driver = 580.159.04\n" + SPLIT + IDLE)
    whole, *parts = looker.look()
    assert [one["uuid"] for one in (whole, *parts)] == ["GPU-0", "MIG-0", "MIG-2"]
    assert [one["index"] for one in parts] == [1, 2]
    for part, memory in zip(parts, (900, 10), strict=True):
        assert (part["memory"], part["memory_total"]) == (memory << 20, 18000 << 20), "of the part, not of the GPU"
        assert {part[name] for name in ("use", "power", "energy", "clock", "ecc", "temperature")} == {None}
        (why,) = (why for names, why in part["unknown"].items() if "use" in names.split(", "))
        assert why == "NVML does not give this value for a part of a GPU (MIG)"
    assert [(part["ranks"], part["others"]) for part in parts] == [([3], 0), ([], 0)]
    assert [part["sm"] for part in looker.look()[1:]] == [40, None], "NVML counts the SMs of a part"


def test_a_change_is_seen_and_a_driver_that_hangs_delays_nobody(looker: Looker) -> None:
    looker.conf.write_text("driver = 580.159.04\n" + BUSY)
    assert looker.look()[0]["use"] == 100
    looker.conf.write_text(
        "driver = 580.159.04\n" + BUSY.replace("100 24", "7 1").replace("power = 388894", "power = !hang")
    )
    began = time.monotonic()
    assert looker.look(0.3) == looker.look(0.3) == "the driver does not answer"
    assert time.monotonic() - began < 5


def test_processes_with_other_numbers_accuse_no_gpu(looker: Looker) -> None:
    looker.conf.write_text("driver = 580.159.04\n" + BUSY.replace("process = 4711", "process = 1") + IDLE)
    for gpu in looker.look():
        assert (gpu["ranks"], gpu["others"]) == ([], None)
        assert "no process of the ranks" in gpu["unknown"]["ranks"]


def test_without_a_driver_the_reason_is_told(looker: Looker) -> None:
    looker.conf.write_text("init = !9\n")
    assert looker.look() == "NVML: Driver Not Loaded"
