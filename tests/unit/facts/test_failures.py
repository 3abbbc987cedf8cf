"""Every quick check fails once, on real processes and files, with the right severity, owner and remedy.

GPUs are those of the testbed's stub NVML (scripts/_testbed/stub_nvml.c), compiled here and read by the real pynvml in
the real child process. Cases that need root, a C compiler or a kernel feature say loudly that they did not run.
"""

import contextlib
import ctypes
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hpcenv.facts import fabric_checks, gpu_checks, net_checks, pci_checks, places
from hpcenv.incontainer.cores import count_cores
from hpcenv.judge.checks import check_results
from hpcenv.judge.checks.check_table import BY_ID, CHECKS
from hpcenv.machine import gpus, host_glibc, job_cgroup, limits
from hpcenv.machine.network import port_errors
from hpcenv.machine.network.port_errors import PortGrowth
from hpcenv.machine.this_node import ThisNode
from hpcenv.machine.tree import HostTree
from hpcenv.project.severities import severities
from hpcenv.records.checks import CheckOutcome, NodeChecks
from hpcenv.records.facts import Network
from hpcenv.records.manifest import Bind, Environment, Expectation, PreflightOptions, RecordedData, Setting
from hpcenv.records.network import Fabric, GpuPlace, RdmaPort

ROOT = Path(__file__).resolve().parents[3]
GCC = shutil.which("gcc") or shutil.which("cc")
needs_gcc = pytest.mark.skipif(GCC is None, reason="NOT RUN: NO C COMPILER for the stub NVML")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="NOT RUN: mounting a file system needs root")
QUICK = PreflightOptions(level="quick")
FIRST = ThisNode(node="n1", nodes=("n1", "n2"), attempt=0, job_id="7")
SECOND = ThisNode(node="n2", nodes=("n1", "n2"), attempt=0, job_id="7")


def assert_failed(outcome, word, *, state="failed"):
    """The outcome is a failure that names what was found, and its finding has what the table says."""
    assert outcome.state == state and word in f"{outcome.found} {outcome.note}", outcome
    (finding,) = check_results.findings("n1", [outcome], severities({}))
    check = BY_ID[outcome.id]
    assert (finding.severity, finding.owner, finding.remedy) == (check.severity, check.owner, check.hint)
    assert check.hint and check.source


def assert_unknown_for_information(outcome, word):
    """The outcome is unknown, and that stops no job and is no warning."""
    assert outcome.state == "unknown" and word in outcome.found, outcome
    (finding,) = check_results.findings("n1", [outcome], severities({}))
    assert (finding.severity, finding.result) == ("info", "unknown")


def of(outcomes, name):
    (one,) = [one for one in outcomes if one.id == name]
    return one


# -- GPUs -----------------------------------------------------------------------------------

HEALTHY = {
    "name": "NVIDIA H100 80GB HBM3", "bus": "00000000:{n}:00.0", "uuid": "GPU-0000000{n}-1111-2222-3333-444444444444",
    "minor": "9{n}", "compute-capability": "9.0", "cores": "16896", "brand": "14", "memory-mib": "81559 0", "mig": "0",
    "ecc": "1", "ecc-corrected": "0", "ecc-uncorrected": "0", "remapped-rows": "0 0 0 0", "retired-pending": "0",
    "persistence": "1", "compute-mode": "0", "throttle": "0", "pcie-width": "16", "pcie-width-max": "16",
    "nvlink": "1", "fabric": "3 0 0 0", "field-230": "0",
}  # fmt: skip


@pytest.fixture(scope="session")
def stub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvml")
    source = ROOT / "scripts" / "_testbed" / "stub_nvml.c"
    subprocess.run([GCC, "-shared", "-fPIC", "-O1", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder


@pytest.fixture
def look(stub, tmp_path):
    """Look at two GPUs of which the second has other values, as a node does."""

    def _look(*, wanted=2, gpus_listed=2, kmsg="", environ=None, second=None):
        conf, dev = tmp_path / "nvml.conf", tmp_path / "dev"
        text = "driver = 580.95.05\ncuda = 13000\n"
        for number in range(1, gpus_listed + 1):
            rows = HEALTHY | (second or {} if number == 2 else {})
            text += "[gpu]\n" + "".join(f"{key} = {value.format(n=number)}\n" for key, value in rows.items())
        conf.write_text(text)
        dev.mkdir(exist_ok=True)
        (dev / "nvidiactl").touch()
        (tmp_path / "kmsg").write_text(kmsg)
        env = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(stub), "STUB_NVML": str(conf)} | (environ or {})
        found = gpus.read(environ=env, dev=dev, seconds=20)
        node = gpu_checks.GpuNode(found=found, wanted=wanted, environ=env, kmsg=tmp_path / "kmsg")
        return list(gpu_checks.check_gpus(node))

    return _look


@needs_gcc
def test_healthy_gpus_fail_no_check(look):
    states = {one.id: one.state for one in look()}
    assert set(states.values()) == {"fine"}, states
    assert set(states) == {check.id for check in CHECKS if check.id.startswith("gpu.")}


@needs_gcc
@pytest.mark.parametrize(
    ("name", "changed", "word"),
    [
        ("gpu.recovery", {"field-230": "2"}, "reboot the node"),
        ("gpu.ecc.uncorrected", {"ecc-uncorrected": "3"}, "3 uncorrected"),
        ("gpu.ecc.corrected", {"ecc-corrected": "2000000"}, "2000000 corrected"),
        ("gpu.remap.failed", {"remapped-rows": "0 2 0 1"}, "could not be replaced"),
        ("gpu.remap.pending", {"remapped-rows": "0 2 1 0"}, "at the next reset"),
        ("gpu.retired", {"retired-pending": "1"}, "retired"),
        ("gpu.throttle", {"throttle": "0x48"}, "hardware slowdown, too hot"),
        ("gpu.pcie.width", {"pcie-width": "8"}, "x8 instead of x16"),
        ("gpu.nvlink", {"nvlink": "1 1 1 0"}, "3 links"),
        ("gpu.fabric", {"fabric": "2 0 0 0"}, "state 2"),
        ("gpu.compute-mode", {"compute-mode": "2"}, "prohibited"),
        ("gpu.persistence", {"persistence": "0"}, "is off"),
    ],
)
def test_a_sick_gpu_is_named(look, name, changed, word):
    outcomes = look(second=changed)
    assert_failed(of(outcomes, name), word)
    assert "GPU 1 (0000:02:00.0" in of(outcomes, name).note and "GPU 0" not in of(outcomes, name).note
    assert [one.id for one in outcomes if one.state != "fine"] == [name]


@needs_gcc
def test_a_query_that_fails_is_unknown_and_one_that_is_not_supported_is_not_run(look):
    assert_failed(of(look(second={"ecc-uncorrected": "!999"}), "gpu.ecc.uncorrected"), "Unknown", state="unknown")
    one = of(look(gpus_listed=1, wanted=1), "gpu.nvlink")
    assert (one.state, one.found) == ("not-run", "one GPU")


@needs_gcc
def test_a_missing_and_a_lost_gpu(look):
    assert_failed(of(look(wanted=3), "gpu.count"), "2")
    outcomes = look(second={"handle": "!15"})
    assert_failed(of(outcomes, "gpu.lost"), "GPU is lost")
    assert_failed(of(outcomes, "gpu.recovery"), "GPU is lost", state="unknown")


@needs_gcc
@pytest.mark.parametrize(("mib", "name"), [("4096", "gpu.stray"), ("100", "gpu.shared")])
def test_a_stray_process_is_named(look, mib, name):
    stray = subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"]})
    try:
        outcomes = look(second={"process": f"{stray.pid} {mib}"}, environ={"SLURM_JOB_ID": "7"})
    finally:
        stray.kill()
        stray.wait()
    assert_failed(of(outcomes, name), f"pid {stray.pid} (sleep): {mib} MiB")


@needs_gcc
def test_a_process_of_this_job_is_no_stray_one(look):
    own = subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7"})
    try:
        outcomes = look(second={"process": f"{own.pid} 4096"}, environ={"SLURM_JOB_ID": "7"})
    finally:
        own.kill()
        own.wait()
    assert of(outcomes, "gpu.stray").state == "fine"


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("/system.slice/slurmstepd.scope/job_7/step_0/user/task_0", True),
        ("/system.slice/slurmstepd.scope/job_77/step_0/user/task_0", False),
        ("/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_0/user/task_0", True),
        ("/system.slice/slurmstepd.scope/s5K1KKYAYG5D01/step_0/user/task_0", False),
    ],
)
def test_the_cgroup_says_whether_a_process_is_of_this_job(path, own):
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_SLUID": "s5K1KKYAYG5D00"}
    assert job_cgroup.is_of(f"0::{path}\n", environ) is own
    assert not job_cgroup.is_of(f"0::{path}\n", {})


@needs_gcc
def test_an_xid_that_needs_a_reset(look):
    line = "4,1,2,-;NVRM: Xid (PCI:0000:02:00): {}, pid=1, name=python\n"
    assert_failed(of(look(kmsg=line.format(79)), "gpu.xid"), "Xid 79")
    assert of(look(kmsg=line.format(31)), "gpu.xid").state == "fine"  # a fault of the program


# -- limits, in a process that has them -------------------------------------------------------


def in_process(code, **limits_of_it):
    """Run code in a Python with these limits; return the JSON that it prints."""

    def apply():
        for name, value in limits_of_it.items():
            resource.setrlimit(getattr(resource, name), (value, value))

    program = "import json, sys; sys.path[:0] = json.loads(sys.argv[1])\n" + textwrap.dedent(code)
    argv = [sys.executable, "-c", program, json.dumps([str(ROOT), *sys.path])]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, preexec_fn=apply)
    return CheckOutcome(**json.loads(done.stdout))


MANIFEST = """
from types import SimpleNamespace
import dataclasses
def show(one): print(json.dumps(dataclasses.asdict(one)))
manifest = SimpleNamespace(nodes=2, nproc_per_node=4, backend="nccl")
"""


def test_few_open_files():
    code = MANIFEST + "from hpcenv.machine import limits; show(limits.check_open_files(manifest))"
    assert_failed(of([in_process(code, RLIMIT_NOFILE=256)], "sys.nofile"), "256")
    assert in_process(code, RLIMIT_NOFILE=4096).state == "fine"


def test_few_processes():
    code = MANIFEST + "import os; from hpcenv.machine import limits\n"
    code += "os.setuid(65534) if os.getuid() == 0 else None; show(limits.check_processes(manifest))"
    assert_failed(of([in_process(code, RLIMIT_NPROC=1024)], "sys.nproc"), "1024")
    assert in_process(code, RLIMIT_NPROC=60000).state == "fine"


def test_running_threads_count(tmp_path):
    (tmp_path / "7" / "task" / "7").mkdir(parents=True)
    (tmp_path / "7" / "task" / "8").mkdir()
    assert limits._threads_of_user(tmp_path) == 2


def test_a_stack_without_a_limit():
    code = MANIFEST + (
        "import resource; from hpcenv.machine import limits\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "manifest.expectations = [SimpleNamespace(field='libs.nccl.version', value='{}')]\n"
        "show(limits.check_stack(manifest))"
    )
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    if hard != resource.RLIM_INFINITY and os.getuid() != 0:
        pytest.skip("NOT RUN: this user may not remove the limit of the stack")
    assert_failed(of([in_process(code.format("2.27.5"))], "sys.stack"), "unlimited, with NCCL 2.27.5")
    assert in_process(code.format("2.28.9")).state == "fine"  # it gives its threads a larger stack
    assert in_process(code.format("")).state == "not-run"
    limited = MANIFEST + "from hpcenv.machine import limits; show(limits.check_stack(manifest))"
    assert in_process(limited, RLIMIT_STACK=8 * 2**20).state == "fine"


def test_one_core_for_all_ranks():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" + MANIFEST
    code += "from hpcenv.machine import limits; show(limits.check_affinity(manifest))"
    assert_failed(of([in_process(code)], "sys.affinity"), "1 for 4")


def test_threads_of_one_core_are_one_core(tmp_path):
    for cpu, siblings in enumerate(("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7")):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
    assert count_cores({0, 4, 1, 5}, str(tmp_path)) == 2
    assert count_cores({0, 1, 2}, str(tmp_path)) == 3
    assert count_cores({0, 4, 90, 91}, str(tmp_path)) == 3, "a CPU of which the machine says nothing is one core"


def test_little_locked_memory_with_rdma():
    code = (
        MANIFEST
        + """
from hpcenv.facts import fabric_checks
from hpcenv.records.network import Fabric, RdmaPort
port = RdmaPort(device="mlx5_0", port=1, state="ACTIVE", layer="InfiniBand", rate_gbit=400)
show([one for one in fabric_checks.check_fabric(manifest, Fabric(ports=(port,))) if one.id == "ib.memlock"][0])
"""
    )
    assert_failed(in_process(code, RLIMIT_MEMLOCK=64 * 1024), "64 KiB")


@pytest.fixture
def small(tmp_path):
    """A file system of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=200", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@needs_root
def test_small_shared_memory(small, make_manifest):
    outcomes = list(limits.check_shm(make_manifest(backend="nccl"), small))
    for name in ("sys.shm", "sys.shm.ranks"):
        assert_failed(of(outcomes, name), "MiB")


def test_little_memory(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 4096000 kB\nMemAvailable:    1024000 kB\n")
    assert limits.job_memory({"SLURM_MEM_PER_CPU": "1000", "SLURM_CPUS_ON_NODE": "4"}) == 4000
    assert limits.job_memory({"SLURM_MEM_PER_NODE": "0", "SLURM_CPUS_ON_NODE": "4"}) == 0, "all memory of the node"
    assert limits.job_memory({"SLURM_MEM_PER_CPU": "1000"}) == 0
    one = limits.check_memory({"SLURM_MEM_PER_NODE": "4000"}, tmp_path)
    assert_failed(of([one], "sys.memory"), "1000 MiB")


# -- folders and clocks -----------------------------------------------------------------------


@pytest.fixture
def folders(make_manifest, tmp_path):
    """Look at the folders of a run."""

    def _folders(*, environ=None, **changes):
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        environment = Environment(kind="host", python=sys.executable)
        manifest = make_manifest(
            run_folder=str(run), workdir=str(tmp_path), environment=environment, preflight=QUICK, **changes
        )
        env = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)} | (environ or {})
        names, _ = places.folders_of(manifest, env)
        found = places.start(manifest, env)
        return list(places.check_places(found, names)), found

    return _folders


def test_good_folders_fail_no_check(folders, tmp_path):
    outcomes, _ = folders()
    bad = [one for one in outcomes if one.state != "fine"]
    assert {one.state for one in bad} <= {"not-run"} and {one.id.split(".")[1] for one in bad} <= {"lustre", "gpfs"}, (
        bad
    )
    assert os.listdir(tmp_path / "run") == []


@needs_root
def test_a_full_disk(folders, small):
    outcomes, _ = folders(environ={"TMPDIR": str(small)})
    assert_failed(of(outcomes, "fs.full"), str(small))


@needs_root
def test_little_space(folders, tmp_path):
    place = tmp_path / "little"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", place], check=True)
    try:
        outcomes, _ = folders(environ={"TMPDIR": str(place)})
    finally:
        subprocess.run(["umount", "-l", place], check=True)
    assert_failed(of(outcomes, "fs.space"), "200 MiB")


def test_a_folder_that_cannot_be_written(folders, tmp_path):
    (tmp_path / "file").touch()
    outcomes, _ = folders(environ={"TMPDIR": str(tmp_path / "file")})
    assert_failed(of(outcomes, "fs.usable"), "Not a directory")


# -- Lustre and GPFS, from trees as their clients make them ------------------------------------------


@pytest.fixture
def on_system(make_manifest, tmp_path):
    """Look at a run folder that a parallel file system holds, as its mounts say; `files` are those of proc and sys."""

    def _on_system(kind, files):
        run, root = tmp_path / "run", tmp_path / "root"
        run.mkdir(exist_ok=True)
        mounts = f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:9 / {tmp_path} rw - {kind} server:/fs rw\n"
        for name, text in {"proc/self/mountinfo": mounts, **files}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        environment = Environment(kind="host", python=sys.executable)
        manifest = make_manifest(run_folder=str(run), workdir=str(tmp_path), environment=environment, preflight=QUICK)
        env = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
        found = places.start(manifest, env, root=root)
        outcomes = list(places.check_places(found, places.folders_of(manifest, env)[0]))
        shutil.rmtree(root)
        return outcomes

    return _on_system


LUSTRE = {
    "sys/fs/lustre/health_check": "healthy\n",
    "proc/fs/lustre/osc/scratch-OST0000-osc-ff11/state": "current_state: FULL\nstate_history:\n - [1, CONNECTING]\n",
    "proc/fs/lustre/mdc/scratch-MDT0000-mdc-ff11/state": "current_state: IDLE\n",
}


def test_a_healthy_lustre(on_system):
    outcomes = on_system("lustre", LUSTRE)
    assert {one.id: one.state for one in outcomes if one.state != "fine"} == {"fs.gpfs": "not-run"}
    assert of(outcomes, "fs.lustre.servers").found == "2 servers"


def test_a_lustre_client_that_has_met_a_bug(on_system):
    outcomes = on_system("lustre", LUSTRE | {"sys/fs/lustre/health_check": "LBUG\nNOT HEALTHY\n"})
    assert_failed(of(outcomes, "fs.lustre"), "LBUG")


def test_a_server_of_lustre_that_is_not_connected(on_system):
    name = "proc/fs/lustre/osc/scratch-OST0000-osc-ff11/state"
    outcomes = on_system("lustre", LUSTRE | {name: "current_state: DISCONN\n"})
    assert_failed(of(outcomes, "fs.lustre.servers"), "scratch-OST0000-osc-ff11 DISCONN")


def test_states_that_only_root_may_read_are_unknown_and_stop_no_job(on_system):
    files = {"sys/fs/lustre/health_check": "healthy\n", "sys/fs/lustre/osc/scratch-OST0000-osc-ff11/active": "1\n"}
    one = of(on_system("lustre", files), "fs.lustre.servers")
    assert (one.state, one.found) == ("unknown", "only root may read the states")
    (finding,) = check_results.findings("n1", [one], severities({}))
    assert finding.severity == "info"


def test_gpfs_without_its_daemon(on_system):
    node = {"proc/2/comm": "kthreadd\n", "proc/900/comm": "slurmd\n"}
    assert_failed(of(on_system("gpfs", node), "fs.gpfs"), "mmfsd does not run")
    assert of(on_system("gpfs", node | {"proc/901/comm": "mmfsd\n"}), "fs.gpfs").state == "fine"
    # With hidepid a user sees no processes of others.
    assert of(on_system("gpfs", {"proc/900/comm": "python\n"}), "fs.gpfs").state == "not-run"


@contextlib.contextmanager
def hanging_file_system(place):
    """A FUSE file system whose server never answers: every process that touches it waits (fuse(4))."""
    place.mkdir()
    server = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"hpcenv-test", str(place).encode(), b"fuse", 0, options) != 0:
        os.close(server)
        pytest.skip(f"NOT RUN: no FUSE here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        os.close(server)  # every waiting process gets an error now
        libc.umount2(str(place).encode(), 2)


@needs_root
@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="NOT RUN: NO /dev/fuse for a file system that hangs")
def test_a_file_system_that_hangs_is_named_and_not_touched_again(folders, tmp_path):
    data = RecordedData(name="set", path=str(tmp_path / "hangs"), compare="list", state="")
    with hanging_file_system(tmp_path / "hangs"):
        outcomes, found = folders(data=(data,))
        assert_failed(of(outcomes, "fs.answers"), f"data set {tmp_path}/hangs")
        assert of(outcomes, "fs.usable").state == "fine"
        assert found.hanging(str(tmp_path / "hangs" / "train.bin")) == str(tmp_path / "hangs")
        assert found.hanging(str(tmp_path / "run")) == ""


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
/* As libfaketime with NO_FAKE_STAT: the clock is an hour ahead, and times of files stay as they are. */
int clock_gettime(clockid_t id, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, now);
    if (id == CLOCK_REALTIME) now->tv_sec += 3600;
    return status;
}
"""


@needs_gcc
def test_a_wrong_clock_in_the_process_of_the_check(folders, tmp_path):
    (tmp_path / "clock.c").write_text(CLOCK)
    argv = [GCC, "-shared", "-fPIC", "-o", tmp_path / "clock.so", tmp_path / "clock.c", "-ldl"]
    subprocess.run(argv, check=True)
    outcomes, _ = folders(environ={"LD_PRELOAD": str(tmp_path / "clock.so")})
    assert_failed(of(outcomes, "time.filesystem"), "+3600")
    assert places.clock_offset(outcomes) == pytest.approx(3600, abs=5)


def test_clocks_of_nodes_that_differ(make_manifest, make_facts):
    def facts(node, clock, written=100.0):
        return make_facts(node, checks=NodeChecks(clock=clock), written=written)

    manifest = make_manifest(preflight=QUICK)
    by_files = check_results.compare_clocks(
        manifest, {"n1": facts("n1", 0.0), "n2": facts("n2", 3600.0)}, (99.0, 101.0)
    )
    assert by_files["n1"].state == "fine"
    assert_failed(of([by_files["n2"]], "time.nodes"), "3600")
    by_batch = check_results.compare_clocks(
        manifest, {"n1": facts("n1", 0.0), "n2": facts("n2", 0.0, 9000.0)}, (99.0, 101.0)
    )
    assert_failed(by_batch["n2"], "8899")


HOUR = 3600.0
# What the clocks of n1 (the batch node), n2 ... are ahead; what the file server's clock is ahead, None where the nodes
# stamp the files themselves -> the nodes that are named, and whether it is certain.
CLOCKS = {
    "n2 is behind": ((0.0, -HOUR), 0.0, {"n2": "behind"}, True),
    "n2 is ahead": ((0.0, HOUR), 0.0, {"n2": "ahead"}, True),
    "the batch node is behind": ((-HOUR, 0.0), 0.0, {"n1": "behind"}, True),
    "the file server": ((0.0, 0.0), HOUR, {}, True),
    "n2 by the batch node's clock alone": ((0.0, -HOUR), None, {"n2": "behind"}, False),
    "one of two, and the batch node is the measure": ((-HOUR, 0.0), None, {"n2": "ahead"}, False),
    "three clocks and three times": ((-HOUR, HOUR), 0.0, {"n1": "behind", "n2": "ahead"}, False),
    "the batch node against two": ((HOUR, 0.0, 0.0), None, {"n1": "ahead"}, True),
    "the last of three": ((0.0, 0.0, -HOUR), None, {"n3": "behind"}, True),
    "two of four": ((0.0, 0.0, HOUR, HOUR), 0.0, {"n3": "ahead", "n4": "ahead"}, True),
}


@pytest.mark.parametrize("case", CLOCKS)
def test_the_node_whose_clock_is_wrong_is_named_and_no_other(make_manifest, make_facts, case):
    ahead, server, named, certain = CLOCKS[case]
    facts = {}
    for number, seconds in enumerate(ahead, 1):
        own = NodeChecks(clock=0.0 if server is None else seconds - server)
        facts[f"n{number}"] = make_facts(f"n{number}", checks=own, written=1000.0 + seconds)
    window = (1000.0 + ahead[0], 1000.0 + ahead[0])
    found = check_results.compare_clocks(make_manifest(preflight=QUICK), facts, window)
    failed = {node: one for node, one in found.items() if one.state == "failed"}
    assert {node: one.found for node, one in failed.items()} == {node: f"3600.0 s {way}" for node, way in named.items()}
    assert all(("cannot be told" in one.note) is not certain for one in failed.values())


# -- network ----------------------------------------------------------------------------------


@needs_root
def test_a_name_that_leads_to_loopback(tmp_path):
    code = (
        MANIFEST
        + """
import socket
from hpcenv.facts import net_checks
manifest.cluster, manifest.spare = "slurm", 0
show(net_checks._own_name(manifest))
"""
    )
    program = "import json, sys; sys.path[:0] = json.loads(sys.argv[1])\n" + code
    (tmp_path / "hosts").write_text("127.0.1.1 hpcenv-node\n")
    (tmp_path / "run.sh").write_text('mount --bind "$1" /etc/hosts; hostname hpcenv-node; shift; exec "$@"\n')
    argv = ["unshare", "--mount", "--uts", "sh", tmp_path / "run.sh", tmp_path / "hosts"]
    argv += [sys.executable, "-c", program, json.dumps([str(ROOT), *sys.path])]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert_failed(of([CheckOutcome(**json.loads(done.stdout))], "net.loopback"), "127.0.1.1")


def test_libraries_of_the_host_that_need_a_newer_glibc(make_manifest, tmp_path):
    library = next(iter([*Path("/lib").glob("*/libm.so.6"), *Path("/lib64").glob("libm.so.6")]))
    ldconfig = tmp_path / "ldconfig"
    ldconfig.write_text(f"#!/bin/sh\nprintf '\\tlibcuda.so.1 (libc6,x86-64,AArch64) => {library}\\n'\n")
    ldconfig.chmod(0o755)
    environment = Environment(
        kind="sif", python="python3", gpus=True, binds=(Bind(source=str(library), target="/usr/lib/libfabric.so.1"),)
    )
    for glibc, state in (("2.1", "failed"), ("99.0", "fine")):
        locked = (Expectation(field="system.glibc", value=glibc, severity="info"),)
        manifest = make_manifest(environment=environment, expectations=locked)
        outcomes = list(host_glibc.check_glibc(manifest, {"PATH": str(tmp_path)}))
        for name in ("glibc.driver", "glibc.binds"):
            if state == "failed":
                assert_failed(of(outcomes, name), f"{library} needs glibc 2.")
            else:
                assert of(outcomes, name).state == "fine"


def test_a_busy_port(make_manifest):
    with socket.socket() as busy:
        busy.bind(("0.0.0.0", 0))  # noqa: S104
        busy.listen()
        port = str(busy.getsockname()[1])
        manifest = make_manifest(settings=(Setting(name="MASTER_PORT", value=port, origin="--env"),))
        outcomes = list(net_checks.check_network(manifest, FIRST, Network(first_node="n1")))
    assert_failed(of(outcomes, "net.port"), f"port {port} is in use")
    outcomes = list(net_checks.check_network(manifest, SECOND, Network(first_node="n1")))
    assert of(outcomes, "net.port").state == "not-run"


def test_the_port_of_ras_is_busy(make_manifest):
    with socket.socket() as busy:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        busy.bind(("0.0.0.0", 28028))  # noqa: S104
        busy.listen()
        outcomes = list(net_checks.check_network(make_manifest(backend="nccl"), FIRST, Network(first_node="n1")))
    assert_failed(of(outcomes, "net.ras-port"), "28028")


@needs_root
def test_a_first_node_that_does_not_answer():
    # In a network namespace without any interface but loopback.
    code = (
        MANIFEST
        + """
from hpcenv.facts import net_checks
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.facts import Network, Route
manifest.cluster, manifest.spare, manifest.settings = "slurm", 0, ()
place = ThisNode(node="n2", nodes=("n1", "n2"), attempt=0, job_id="7")
network = Network(first_node="n1", routes=(Route(target="10.9.0.2", source="10.9.0.1", interface="d0"),))
show(net_checks._first_node_answers(manifest, place, network))
"""
    )
    program = "import json, sys; sys.path[:0] = json.loads(sys.argv[1])\n" + code
    argv = ["unshare", "--net", sys.executable, "-c", program, json.dumps([str(ROOT), *sys.path])]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert_failed(of([CheckOutcome(**json.loads(done.stdout))], "net.reach"), "ENETUNREACH")


def test_a_refusal_is_an_answer():
    assert net_checks.connect_all(["127.0.0.1"], 9, seconds=1) == (("127.0.0.1",), {})


@needs_root
def test_a_lost_packet_is_no_firewall_and_a_silent_address_beside_a_good_one_costs_little():
    # The first packet to 127.0.0.3 is lost, as when a thousand nodes ask at once; none to 127.0.0.2 arrives.
    rules = (
        "ip link set lo up; iptables -A INPUT -p tcp -d 127.0.0.2 -j DROP; "
        "iptables -A INPUT -p tcp --syn -d 127.0.0.3 -m statistic --mode nth --every 100000 --packet 0 -j DROP || exit 77;"
    )
    program = """
import json, sys, time
sys.path[:0] = json.loads(sys.argv[1])
from hpcenv.facts import net_checks
begun = time.monotonic()
lost = net_checks.connect_all(["127.0.0.3"], 9, seconds=net_checks._CONNECT_SECONDS)
middle = time.monotonic()
beside = net_checks.connect_all(["127.0.0.1", "127.0.0.2"], 9, seconds=4)
print(json.dumps([lost, middle - begun, beside, time.monotonic() - middle]))
"""
    argv = ["unshare", "--net", "sh", "-c", rules + ' exec "$@"', "sh", sys.executable, "-c", program]
    done = subprocess.run([*argv, json.dumps([str(ROOT), *sys.path])], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip(f"NOT RUN: THIS KERNEL CANNOT DROP ONE PACKET: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    lost, lost_took, beside, beside_took = json.loads(done.stdout)
    assert lost == [["127.0.0.3"], {}]
    assert 0.9 < lost_took < 4
    assert beside == [["127.0.0.1"], {"127.0.0.2": "no answer within 4 s"}]
    assert beside_took < 1


# -- RDMA -------------------------------------------------------------------------------------


def port(number, **changes):
    usual = {"state": "ACTIVE", "layer": "InfiniBand", "rate_gbit": 400.0, "driver": "mlx5_core"}
    return RdmaPort(device=f"mlx5_{number}", port=1, **(usual | changes))


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [("ib.ports", {"state": "DOWN"}, "mlx5_1:1 DOWN"), ("ib.rate", {"rate_gbit": 100.0}, "mlx5_1:1 100")],
)
def test_a_bad_port(make_manifest, name, changes, word):
    fabric = Fabric(ports=(port(0), port(1, **changes)))
    assert_failed(of(fabric_checks.check_fabric(make_manifest(), fabric), name), word)
    good = fabric_checks.check_fabric(make_manifest(), Fabric(ports=(port(0), port(1))))
    assert of(good, name).state == "fine"


# -- error counters of RDMA, before and after the ranks ran ---------------------------------------


def counters(root, **values):
    """The error counters of one port, as sysfs has them."""
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    usual = {"counters/link_downed": 0, "counters/symbol_error": 3, "hw_counters/local_ack_timeout_err": 7}
    for name, value in {**usual, "counters/port_xmit_data": 5, **values}.items():
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(f"{value}\n")
    return port_errors.read_counters(HostTree(root))


def test_errors_of_a_port_that_grow_while_the_ranks_run(tmp_path):
    before = counters(tmp_path)
    assert port_errors.compare(before, counters(tmp_path, **{"counters/port_xmit_data": 10**9})) == PortGrowth()
    after = counters(tmp_path, **{"counters/link_downed": 1, "counters/symbol_error": 90})
    growth = port_errors.compare(before, after)
    assert [port_errors.in_words(one) for one in growth.errors] == [
        "mlx5_0:1 link_downed +1",
        "mlx5_0:1 symbol_error +87",
    ]
    assert [one.many for one in growth.errors] == [True, False]  # a few symbol errors are usual
    (many,) = port_errors.compare(before, counters(tmp_path, **{"hw_counters/local_ack_timeout_err": 500})).errors
    assert (many.counter, many.grown, many.many) == ("local_ack_timeout_err", 493, True)
    check = BY_ID["ib.errors"]
    assert (check.severity, check.owner, check.place) == ("warn", "node", "run")


def test_counters_that_cannot_be_compared_are_unknown(tmp_path):
    full = counters(tmp_path, **{"counters/symbol_error": 65535})
    assert port_errors.compare(full, full).unknown == "mlx5_0:1 symbol_error had reached its end before"
    growth = port_errors.compare(full, counters(tmp_path))
    assert growth.unknown == "mlx5_0:1 symbol_error was reset while the ranks ran"
    hidden = tmp_path / "hidden"
    (hidden / "sys/class/infiniband/mlx5_2/ports/1").mkdir(parents=True)
    read = port_errors.read_counters(HostTree(hidden))
    assert port_errors.compare(read, read).unknown == "no error counter of mlx5_2:1 can be read"
    assert port_errors.read_counters(HostTree(tmp_path / "nothing")) == port_errors.PortCounters()


# -- the PCI bus ------------------------------------------------------------------------------


def configuration(*, kind=6, control=0):
    """The configuration space of a PCI bridge: capability 0x10 at 0x40, access control at 0x150 after another one."""
    space = bytearray(4096)
    space[0x34] = 0x40
    struct.pack_into("<BBH", space, 0x40, 0x10, 0, kind << 4 | 2)
    struct.pack_into("<I", space, 0x100, 0x150 << 20 | 1 << 16 | 0x0001)
    struct.pack_into("<IHH", space, 0x150, 1 << 16 | 0x000D, 0x1F, control)
    return bytes(space)


def pci_tree(root, *, kind="identity", config=None, flags="fpu vme"):
    """Two GPUs below a PCI switch (root port, upstream port, two downstream ports), with IOMMU groups."""
    top = root / "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    for number in (0, 1):
        bridge = top / f"0000:02:0{number}.0"
        gpu = bridge / f"0000:0{number + 3}:00.0"
        group = root / f"sys/kernel/iommu_groups/{number}"
        gpu.mkdir(parents=True)
        group.mkdir(parents=True)
        (group / "type").write_text(f"{kind}\n")
        (gpu / "iommu_group").symlink_to(group)
        (bridge / "config").write_bytes(configuration() if config is None else config)
        for folder in (gpu, bridge):
            (root / "sys/bus/pci/devices" / folder.name).symlink_to(folder)
    (top / "config").write_bytes(configuration(kind=5))
    (root / "sys/bus/pci/devices/0000:01:00.0").symlink_to(top)
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\n")
    return HostTree(root)


GPUS = Fabric(gpu_vendor="nvidia", gpus=(GpuPlace(bus="0000:03:00.0"), GpuPlace(bus="0000:04:00.0")))


def pci(tree, *, machine="x86_64", fabric=GPUS):
    return {one.id: one for one in pci_checks.check_pci(fabric, tree, machine=machine)}


def test_a_good_pci_bus(tmp_path):
    assert {name: one.state for name, one in pci(pci_tree(tmp_path)).items()} == {
        "pci.iommu": "fine",
        "pci.acs": "fine",
    }


def test_an_iommu_that_translates(tmp_path):
    tree = pci_tree(tmp_path, kind="DMA-FQ")
    assert_failed(pci(tree)["pci.iommu"], "of 2 of 2 GPUs")
    assert pci(tree, machine="aarch64")["pci.iommu"].state == "not-run"
    (tmp_path / "proc/cpuinfo").write_text("flags\t\t: fpu hypervisor vme\n")
    assert pci(tree)["pci.iommu"].state == "not-run"


def test_access_control_that_redirects(tmp_path):
    outcomes = pci(pci_tree(tmp_path, config=configuration(control=0x1D)))
    assert_failed(outcomes["pci.acs"], "2 of 3 bridges redirect to the CPU")
    assert "0000:02:00.0, 0000:02:01.0" in outcomes["pci.acs"].note


def test_what_only_root_may_read_of_the_pci_bus_is_unknown(tmp_path):
    one = pci(pci_tree(tmp_path, config=configuration()[:64]))["pci.acs"]
    assert_unknown_for_information(one, "only root may read it, of 2 bridges")


def test_a_kernel_that_does_not_tell_the_kind_of_an_iommu_group(tmp_path):
    tree = pci_tree(tmp_path, kind="")
    assert_unknown_for_information(pci(tree)["pci.iommu"], "does not tell the kind")


def test_a_pci_bus_that_cannot_be_read_is_unknown(tmp_path):
    for outcome in pci(HostTree(tmp_path)).values():
        assert_unknown_for_information(outcome, "/sys/bus/pci/devices does not show 0000:03:00.0")


def test_one_gpu_needs_no_bus_to_others(tmp_path):
    one = Fabric(gpu_vendor="nvidia", gpus=GPUS.gpus[:1])
    assert {found.state for found in pci(pci_tree(tmp_path), fabric=one).values()} == {"not-run"}


# -- all of them ------------------------------------------------------------------------------


def test_every_quick_check_fails_in_this_file():
    text = Path(__file__).read_text()
    missing = [check.id for check in CHECKS if check.level == "quick" and f'"{check.id}"' not in text]
    assert missing == []
