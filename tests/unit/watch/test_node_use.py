"""What the job uses of a node, from trees of files as kernels and Slurm make them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcenv.watch.node_use import NodePlaces, NodeWatch

GIB = float(1 << 30)
DEVICES = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 900       5    0    0    0     0          0         0      900       5    0    0    0     0       0          0
  eth0: 1000     10    0    0    0     0          0         0     2000      20    0    0    0     0       0          0
  ib0:   50       1    0    0    0     0          0         0       70       1    0    0    0     0       0          0
"""
V2 = {
    "cpu.stat": "usage_usec 12000000\nuser_usec 11000000\n",
    "memory.current": str(2 << 30),
    "memory.stat": f"anon 5\nactive_file {1 << 29}\ninactive_file {1 << 29}\n",
    "memory.max": "max",
    "cpu.pressure": "some avg10=12.50 avg60=1.00 avg300=0.10 total=5\n",
    "memory.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    "io.pressure": "some avg10=3.00 avg60=0.00 avg300=0.00 total=0\n",
    "io.stat": "8:0 rbytes=100 wbytes=20 rios=1 wios=1 dbytes=0 dios=0\n8:16 rbytes=1 wbytes=2 rios=1 wios=1\n",
}


def tree(root: Path, own: str, files: dict[str, str]) -> NodeWatch:
    for name, text in {"proc/self/cgroup": own, "proc/net/dev": DEVICES, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "dev/shm").mkdir(parents=True)
    return NodeWatch(NodePlaces(root=root, tmp=root))


# Slurm 24.11, and 26.05 with CgroupJobIdPaths=yes; 26.05, recorded.
@pytest.mark.parametrize("job", ["slurmstepd.scope/job_77", "n1_slurmstepd.scope/sEX9M8H6JEHJ00"])
def test_version_2_has_the_figures_of_the_step_and_the_lowest_limit_above_it(tmp_path: Path, job: str) -> None:
    step = f"system.slice/{job}/step_0"
    files = {f"sys/fs/cgroup/{step}/{name}": text for name, text in V2.items()}
    files[f"sys/fs/cgroup/{step}/../memory.max"] = str(4 << 30)
    (tmp_path / f"sys/fs/cgroup/{step}").mkdir(parents=True)
    watch = tree(tmp_path, f"0::/{step}/user/task_0\n", files)
    first = watch.look(100.0)
    (tmp_path / f"sys/fs/cgroup/{step}/cpu.stat").write_text("usage_usec 42000000\n")
    (tmp_path / f"sys/fs/cgroup/{step}/memory.stat").write_text(f"active_file {1 << 30}\ninactive_file {1 << 29}\n")
    second = watch.look(110.0)
    assert (first.cpu, second.cpu) == (None, 3.0), "30 s of CPU in 10 s"
    assert (second.memory, second.memory_peak, second.memory_limit) == (GIB / 2, GIB, 4 * GIB), "without cached files"
    assert (second.pressure_cpu, second.pressure_memory, second.pressure_io) == (12.5, 0.0, 3.0)
    assert (second.read, second.written) == (101.0, 22.0)
    assert (second.received, second.sent) == (1050.0, 2070.0), "without loopback"
    assert (second.rdma_received, second.rdma_sent) == (None, None)
    assert second.unknown == {}


# Recorded from a step of Slurm 26.05.5 on Linux 6.18, which has the memory controller in version 1.
STEP_26_05 = "system.slice/n1_slurmstepd.scope/sEX9M8H6JEHJ00/step_0"
OWN_26_05 = (
    "9:name=systemd:/\n8:pids:/\n7:blkio:/\n6:freezer:/\n5:devices:/\n4:memory:/\n3:cpuset:/\n2:cpuacct:/\n1:cpu:/\n"
    f"0::/{STEP_26_05}/user/task_special\n"
)
FILES_26_05 = {
    "cpu.stat": "usage_usec 926751\nuser_usec 875700\nsystem_usec 51051\nnice_usec 0\n",
    "cpu.pressure": "some avg10=12.68 avg60=2.29 avg300=0.47 total=2316649\nfull avg10=12.68 avg60=2.29 avg300=0.47 total=2264745\n",
    "memory.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    "io.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=627\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=120\n",
}  # fmt: skip


def test_a_step_of_slurm_26_05_without_a_controller_for_memory(tmp_path: Path) -> None:
    """Its CPU time is that of the step, not of the node above it; its memory is unknown, and says why."""
    files = {f"sys/fs/cgroup/{STEP_26_05}/{name}": text for name, text in FILES_26_05.items()}
    above = {"sys/fs/cgroup/cpu.stat": "usage_usec 1110482\nuser_usec 1000246\nsystem_usec 110236\nnice_usec 0\n"}
    watch = tree(tmp_path, OWN_26_05, {**files, **above})
    watch.look(100.0)
    later = FILES_26_05["cpu.stat"].replace("926751", "2926751")
    (tmp_path / f"sys/fs/cgroup/{STEP_26_05}/cpu.stat").write_text(later)
    found = watch.look(110.0)
    assert found.cpu == pytest.approx(0.2)
    assert (found.pressure_cpu, found.pressure_memory, found.pressure_io) == (12.68, 0.0, 0.0)
    assert (found.memory, found.memory_peak, found.memory_limit, found.read) == (None, None, None, None)
    assert set(found.unknown) == {"memory", "read, written"}
    assert "memory.current" in found.unknown["memory"]


# 26.05: recorded.
@pytest.mark.parametrize("step", ["slurm/uid_2001/job_77/step_0", "slurm_n1/uid_2001/job_1/step_0"])
def test_version_1_has_a_folder_for_each_controller(tmp_path: Path, step: str) -> None:
    own = f"5:memory:/{step}/task_0\n4:blkio:/{step}\n3:cpuacct:/{step}/task_0\n1:freezer:/{step}\n"
    files = {
        f"sys/fs/cgroup/memory/{step}/memory.usage_in_bytes": str(1 << 30),
        f"sys/fs/cgroup/memory/{step}/memory.stat": "active_file 9\ntotal_active_file 24\ntotal_inactive_file 1000\n",
        f"sys/fs/cgroup/memory/{step}/memory.limit_in_bytes": "9223372036854771712",
        f"sys/fs/cgroup/memory/{step}/../memory.limit_in_bytes": str(8 << 30),
        f"sys/fs/cgroup/cpuacct/{step}/cpuacct.usage": "5000000000",
        f"sys/fs/cgroup/blkio/{step}/blkio.throttle.io_service_bytes": "8:0 Read 7\n8:0 Write 3\n8:16 Read 1\nTotal 11\n",
    }
    for controller in ("memory", "cpuacct", "blkio"):
        (tmp_path / f"sys/fs/cgroup/{controller}/{step}").mkdir(parents=True)
    found = tree(tmp_path, own, files).look(0.0)
    assert (found.memory, found.memory_peak, found.memory_limit) == (GIB - 1024, GIB - 1024, 8 * GIB)
    assert (found.read, found.written) == (8.0, 3.0)
    assert (found.pressure_cpu, found.unknown) == (None, {})


def test_without_a_cgroup_of_the_job_its_figures_are_unknown_and_not_those_of_the_node(tmp_path: Path) -> None:
    found = tree(tmp_path, "0::/user.slice/session-1.scope\n", {"sys/fs/cgroup/memory.current": "99"}).look(0.0)
    assert (found.cpu, found.memory, found.memory_limit, found.read) == (None, None, None, None)
    assert list(found.unknown.values()) == ["this job step has no cgroup"]
    assert found.shm_total and found.disk_total


def test_a_file_that_cannot_be_read_is_unknown_with_its_reason(tmp_path: Path) -> None:
    step = "job_1/step_0"
    files = {f"sys/fs/cgroup/{step}/{name}": text for name, text in V2.items() if not name.endswith("pressure")}
    found = tree(tmp_path, f"0::/{step}\n", files).look(0.0)
    assert found.pressure_cpu is None and found.memory == GIB
    assert set(found.unknown) == {"pressure_cpu", "pressure_memory", "pressure_io"}
    assert all("No such file" in why for why in found.unknown.values())


def test_the_ports_of_rdma_adapters_count_words_of_four_bytes(tmp_path: Path) -> None:
    ports = "sys/class/infiniband/mlx5_0/ports/1/counters"
    files = {f"{ports}/port_rcv_data": "250", f"{ports}/port_xmit_data": "10"}
    found = tree(tmp_path, "0::/\n", files).look(0.0)
    assert (found.rdma_received, found.rdma_sent) == (1000.0, 40.0)


def test_without_a_cgroup_the_cpu_time_of_the_jobs_processes_counts(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/user.slice\n")
    watch = NodeWatch(NodePlaces(root=tmp_path, tmp=tmp_path), lambda: [os.getpid()])
    watch.look(100.0)
    # What a process used that has ended and was waited for counts, too.
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 1: pass"], check=True)
    found = watch.look(110.0)
    assert found.cpu is not None and 0.08 < found.cpu < 1, "1 s of CPU in 10 s"
    assert found.unknown["memory, pressure, read, written"] == "this job step has no cgroup"
