"""GPUs of a node, also with drivers that report nonsense, hang or crash.

The driver is a real shared library (libnvidia-ml.so.1, compiled here) that the real pynvml loads, and a
`nvidia-smi` on PATH.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hpcenv.machine import gpus

GCC = shutil.which("gcc") or shutil.which("cc")
needs_gcc = pytest.mark.skipif(GCC is None, reason="NO C COMPILER: the fake driver libraries cannot be built")

NVML_C = r"""
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
typedef void *dev;
static int number(const char *name, int fallback) { char *v = getenv(name); return v ? atoi(v) : fallback; }
/* comma-separated list, one per GPU; the last one counts for all that follow */
static void item(const char *name, const char *fallback, int n, char *into) {
    char text[1024], *rest = text, *one;
    snprintf(text, sizeof text, "%s", getenv(name) ? getenv(name) : fallback);
    one = strsep(&rest, ",");
    while (n-- > 0 && rest) one = strsep(&rest, ",");
    strcpy(into, one);
}
static int integer(const char *name, const char *fallback, dev d) {
    char text[1024]; item(name, fallback, (int)(long)d - 1, text); return atoi(text);
}
int nvmlSystemGetCudaDriverVersion(int *v) { *v = number("FAKE_CUDA", 13000); return number("FAKE_CUDA_STATUS", 0); }
int nvmlInitWithFlags(unsigned f) {
    if (getenv("FAKE_HANG")) sleep(100);
    if (getenv("FAKE_CRASH")) abort();
    return number("FAKE_INIT", 0);
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *t, unsigned n) { item("FAKE_DRIVER", "580.95.05", 0, t); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = number("FAKE_COUNT", 2); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, dev *d) {
    if ((int)i == number("FAKE_FORBIDDEN", -1)) return 4;
    if ((int)i == number("FAKE_LOST", -1)) return 15;
    *d = (dev)(long)(i + 1); return 0;
}
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char busid[32]; };
int nvmlDeviceGetPciInfo_v3(dev d, struct pci *p) {
    memset(p, 0, sizeof *p); p->bus = integer("FAKE_BUS", "1,2,3,4,5,6,7,8", d); return 0;
}
int nvmlDeviceGetName(dev d, char *t, unsigned n) { item("FAKE_NAME", "NVIDIA H100 80GB HBM3", (int)(long)d - 1, t); return 0; }
int nvmlDeviceGetUUID(dev d, char *t, unsigned n) {
    if (getenv("FAKE_UUID")) { item("FAKE_UUID", "", 0, t); return 0; }
    sprintf(t, "GPU-0000000%d-1111-2222-3333-444444444444", (int)(long)d); return 0;
}
int nvmlDeviceGetCudaComputeCapability(dev d, int *a, int *b) {
    *a = integer("FAKE_MAJOR", "9", d); *b = integer("FAKE_MINOR", "0", d); return 0;
}
struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(dev d, struct memory *m) {
    m->total = (unsigned long long)integer("FAKE_MIB", "81559", d) << 20; m->free = m->used = 0;
    return number("FAKE_MEMORY_STATUS", 0);
}
int nvmlDeviceGetNumGpuCores(dev d, unsigned *n) { *n = integer("FAKE_CORES", "16896", d); return 0; }
int nvmlDeviceGetMigMode(dev d, unsigned *a, unsigned *b) {
    *a = *b = integer("FAKE_MIG", "0", d); return number("FAKE_MIG_STATUS", 0);
}
int nvmlDeviceGetEccMode(dev d, unsigned *a, unsigned *b) {
    *a = *b = integer("FAKE_ECC", "1", d); return number("FAKE_ECC_STATUS", 0);
}
int nvmlDeviceGetBrand(dev d, unsigned *b) { *b = integer("FAKE_BRAND", "14", d); return 0; }
"""

UUIDS = ("GPU-00000001-1111-2222-3333-444444444444", "GPU-00000002-1111-2222-3333-444444444444")
FIELDS = {
    "host.driver-version": "580.95.05",
    "host.cuda-driver-version": "13.0",
    "host.gpu-count": 2,
    "host.gpu-models": ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
    "host.gpu-uuids": UUIDS,
    "host.gpu-compute-capabilities": ("9.0", "9.0"),
    "host.gpu-memory-mib": ("81559", "81559"),
    "host.gpu-sm-counts": ("132", "132"),
    "host.gpu-mig": ("disabled", "disabled"),
    "host.gpu-ecc": ("enabled", "enabled"),
    "host.gpu-brands": ("nvidia", "nvidia"),
}


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """Folders with a fake driver library each."""
    made = {}
    for name, source in (("libnvidia-ml.so.1", NVML_C),):
        folder = tmp_path_factory.mktemp("driver")
        (folder / "fake.c").write_text(source)
        argv = [GCC, "-shared", "-fPIC", "-w", "-o", str(folder / name), str(folder / "fake.c")]
        subprocess.run(argv, check=True, capture_output=True)
        made[name] = str(folder)
    return made


class Node:
    """A node with the parts of a driver that a test gives it."""

    def __init__(self, folder, libraries):
        self.folder, self.libraries = folder, libraries
        self.proc, self.dev, self.bin = folder / "proc", folder / "dev", folder / "bin"
        for one in (self.proc / "driver/nvidia", self.dev, self.bin):
            one.mkdir(parents=True)

    def kernel(self, text="NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"):
        (self.proc / "driver/nvidia/version").write_text(text)

    def smi(self, script):
        path = self.bin / "nvidia-smi"
        path.write_text("#!/bin/sh\n" + textwrap.dedent(script))
        path.chmod(0o755)

    def read(self, *names, seconds=30.0, **environ):
        loaded = ":".join(self.libraries[name] for name in names)
        path = f"{self.bin}:{os.environ['PATH']}"
        env = {"PATH": path, "LD_LIBRARY_PATH": loaded} | {k: str(v) for k, v in environ.items()}
        return gpus.read(environ=env, proc=self.proc, dev=self.dev, seconds=seconds)


@pytest.fixture
def node(tmp_path, request):
    made = request.getfixturevalue("libraries") if GCC else {}
    return Node(tmp_path, made)


NVML = "libnvidia-ml.so.1"


def test_a_node_without_driver_is_absent_and_has_no_gpus(node):
    facts = node.read()

    assert facts.unknown == {}
    assert facts.values["host.driver-version"] == "absent"
    assert facts.values["host.cuda-driver-version"] == "absent"
    assert facts.values["host.gpu-count"] == 0
    assert {facts.values[name] for name in FIELDS if name.startswith("host.gpu-") and name != "host.gpu-count"} == {()}


def test_a_driver_that_nothing_answers_for_is_unknown_not_absent(node):
    node.kernel()
    facts = node.read()

    assert facts.values == {}
    assert set(facts.unknown) == set(FIELDS)
    why = facts.unknown["host.gpu-count"]
    assert "NVML: NVML Shared Library Not Found" in why
    assert "`nvidia-smi` is not on PATH" in why


def test_a_control_device_alone_means_a_driver(node):
    (node.dev / "nvidiactl").touch()
    facts = node.read()

    assert "NVML Shared Library Not Found" in facts.unknown["host.driver-version"]


@needs_gcc
def test_nvml_gives_every_field(node):
    node.kernel()
    facts = node.read(NVML)

    assert facts.unknown == {}
    assert facts.values == FIELDS


@needs_gcc
def test_reading_leaves_nothing_in_this_process(node):
    node.kernel()
    node.read(NVML)

    assert "libnvidia-ml" not in Path("/proc/self/maps").read_text()


@needs_gcc
def test_the_cuda_driver_version_is_known_though_nvml_does_not_start(node):
    node.kernel()
    facts = node.read(NVML, FAKE_INIT=9)

    assert facts.values == {"host.cuda-driver-version": "13.0"}
    assert "NVML: Driver Not Loaded" in facts.unknown["host.gpu-count"]


@needs_gcc
@pytest.mark.parametrize("number", [-1, 0, 13, 13005, 130000, 2**31 - 1])
def test_an_implausible_cuda_driver_version_is_refused(node, number):
    node.kernel()
    facts = node.read(NVML, FAKE_CUDA=number)

    assert "host.cuda-driver-version" not in facts.values
    assert "is not a CUDA driver API version" in facts.unknown["host.cuda-driver-version"]
    assert facts.values["host.gpu-count"] == 2


@needs_gcc
@pytest.mark.parametrize(
    ("environ", "field"),
    [
        ({"FAKE_MIB": "1"}, "host.gpu-memory-mib"),
        ({"FAKE_MAJOR": "0"}, "host.gpu-compute-capabilities"),
        ({"FAKE_MAJOR": "-3"}, "host.gpu-compute-capabilities"),
        ({"FAKE_CORES": "0"}, "host.gpu-sm-counts"),
        ({"FAKE_CORES": "16897"}, "host.gpu-sm-counts"),
        ({"FAKE_MAJOR": "13"}, "host.gpu-sm-counts"),
        ({"FAKE_MIG": "7"}, "host.gpu-mig"),
        ({"FAKE_ECC": "2"}, "host.gpu-ecc"),
        ({"FAKE_BRAND": "99"}, "host.gpu-brands"),
        ({"FAKE_NAME": ""}, "host.gpu-models"),
        ({"FAKE_UUID": "GPU-x"}, "host.gpu-uuids"),
        ({"FAKE_MEMORY_STATUS": "3"}, "host.gpu-memory-mib"),
    ],
)
def test_a_value_that_no_gpu_has_is_unknown_and_spoils_no_other(node, environ, field):
    node.kernel()
    facts = node.read(NVML, **environ)

    assert field in facts.unknown
    assert facts.unknown[field]
    assert "host.gpu-count" in facts.values
    assert "host.driver-version" in facts.values


@needs_gcc
def test_one_gpu_without_a_value_makes_the_list_unknown(node):
    node.kernel()
    facts = node.read(NVML, FAKE_MIB="81559,1")

    assert "'1' cannot be a GPU's memory-mib" in facts.unknown["host.gpu-memory-mib"]


@needs_gcc
def test_mig_and_ecc_say_what_a_gpu_has_not(node):
    node.kernel()
    facts = node.read(NVML, FAKE_MIG_STATUS=3, FAKE_ECC_STATUS=3)

    assert facts.values["host.gpu-mig"] == ("unsupported", "unsupported")
    assert facts.values["host.gpu-ecc"] == ("unsupported", "unsupported")


@needs_gcc
def test_mig_on_one_gpu_is_seen(node):
    node.kernel()
    assert node.read(NVML, FAKE_MIG="0,1").values["host.gpu-mig"] == ("disabled", "enabled")


@needs_gcc
@pytest.mark.parametrize(
    ("major", "minor", "cores", "count"),
    [(7, 0, 5120, "80"), (8, 0, 6912, "108"), (8, 6, 10752, "84"), (8, 9, 18176, "142"), (10, 0, 18944, "148")],
)
def test_multiprocessors_follow_from_cores(node, major, minor, cores, count):
    node.kernel()
    facts = node.read(NVML, FAKE_COUNT=1, FAKE_MAJOR=major, FAKE_MINOR=minor, FAKE_CORES=cores)

    assert facts.values["host.gpu-sm-counts"] == (count,)


@needs_gcc
def test_gpus_stand_in_the_order_of_the_bus(node):
    node.kernel()
    assert node.read(NVML, FAKE_BUS="9,3").values["host.gpu-uuids"] == UUIDS[::-1]


@needs_gcc
def test_a_gpu_of_another_job_is_not_counted(node):
    node.kernel()
    facts = node.read(NVML, FAKE_COUNT=3, FAKE_FORBIDDEN=1)

    assert facts.unknown == {}
    assert facts.values["host.gpu-count"] == 2


@needs_gcc
def test_a_lost_gpu_is_told_and_not_counted_away(node):
    node.kernel()
    facts = node.read(NVML, FAKE_LOST=1)

    assert "GPU 1: GPU is lost" in facts.unknown["host.gpu-count"]
    assert facts.values["host.driver-version"] == "580.95.05"


@needs_gcc
def test_no_gpu_at_all_is_a_fact(node):
    node.kernel()
    facts = node.read(NVML, FAKE_COUNT=0)

    assert facts.unknown == {}
    assert facts.values["host.gpu-count"] == 0
    assert facts.values["host.gpu-models"] == ()


@needs_gcc
def test_a_driver_that_hangs_is_left_at_the_time_limit(node):
    node.kernel()
    node.smi("touch asked; sleep 100")
    started = time.monotonic()
    facts = node.read(NVML, seconds=1.0, FAKE_HANG=1)

    assert time.monotonic() - started < 5
    assert facts.unknown["host.gpu-count"] == "NVML: no answer within 1 s"
    assert facts.values == {}


@needs_gcc
def test_a_driver_that_crashes_takes_only_the_child_along(node):
    node.kernel()
    facts = node.read(NVML, FAKE_CRASH=1)

    assert "NVML: ended by signal 6" in facts.unknown["host.gpu-count"]


# -- nvidia-smi ---------------------------------------------------------------------------

ROWS = "".join(f"{uuid}, NVIDIA H100 80GB HBM3, 580.95.05, 81559, Enabled, Disabled, 9.0\\n" for uuid in UUIDS)
SMI = f"""
case "$*" in
    *--query-gpu=uuid,name,driver_version,memory.total,ecc.mode.current,mig.mode.current,compute_cap*) printf '{ROWS}' ;;
    *) exit 2 ;;
esac
"""


def test_nvidia_smi_gives_what_it_knows(node):
    (node.dev / "nvidiactl").touch()
    node.smi(SMI)
    facts = node.read()

    without = ("host.gpu-sm-counts", "host.gpu-brands", "host.cuda-driver-version")
    assert facts.values == {name: value for name, value in FIELDS.items() if name not in without}
    assert set(facts.unknown) == set(without)


def test_an_old_nvidia_smi_is_asked_for_less(node):
    node.kernel()
    node.smi(
        """
        case "$*" in
            *compute_cap*) echo 'Field "compute_cap" is not a valid field to query.'; exit 2 ;;
            *mig.mode*) echo 'Field "mig.mode.current" is not a valid field to query.'; exit 2 ;;
            *--query-gpu*) echo 'GPU-00000001-1111-2222-3333-444444444444, Tesla V100, 440.33.01, 16160, [N/A]' ;;
            *) exit 1 ;;
        esac
        """
    )
    facts = node.read()

    assert facts.values["host.gpu-models"] == ("Tesla V100",)
    assert facts.values["host.gpu-ecc"] == ("unsupported",)
    assert facts.values["host.driver-version"] == "440.33.01"
    assert {"host.gpu-compute-capabilities", "host.gpu-mig", "host.cuda-driver-version"} <= set(facts.unknown)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            "echo 'NVIDIA-SMI has failed because it could not talk to the driver'; exit 9",
            "could not talk to the driver",
        ),
        ("echo 'Unable to determine the device handle: Unknown Error' >&2; exit 15", "Unknown Error"),
        ("echo half a line", "cannot read 'half a line'"),
        ("kill -9 $$", "ended by signal 9"),
    ],
)
def test_an_nvidia_smi_that_fails_gives_its_reason(node, script, why):
    node.kernel()
    node.smi(script)
    assert why in node.read().unknown["host.gpu-count"]


def test_nvidia_smi_that_hangs_is_left_at_the_time_limit(node):
    node.kernel()
    node.smi("exec sleep 100")
    started = time.monotonic()
    facts = node.read(seconds=2.0)

    assert time.monotonic() - started < 10
    assert "nvidia-smi: no answer within 2 s" in facts.unknown["host.gpu-count"]


def test_nvidia_smi_without_devices_means_no_gpu(node):
    node.kernel()
    node.smi("echo 'No devices were found'; exit 6")
    assert node.read().values["host.gpu-count"] == 0


# -- what the child says ------------------------------------------------------------------


def test_without_pynvml_the_reason_says_so(libraries):
    code = (
        "import json, sys; sys.path[:] = [p for p in json.loads(sys.argv[1])]; sys.modules['pynvml'] = None;"
        "from hpcenv.machine import gpus; gpus.report_nvml()"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, json.dumps(sys.path)],
        capture_output=True,
        text=True,
        env={"LD_LIBRARY_PATH": libraries[NVML]},
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"reason": "pynvml is not installed for this Python"}
    ]


test_without_pynvml_the_reason_says_so = needs_gcc(test_without_pynvml_the_reason_says_so)
