"""A stand-in for the NVIDIA driver's library on the nodes: what Slurm hands out as GPUs, NVML lists too.

stub_nvml.c says how the file looks that it answers from. To change what a node has:

    scripts/testbed exec --node n2 --user root -- sed -i 's/^name = .*/name = NVIDIA A100/' /etc/stub-nvml.conf
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from . import machine
from .instance import Instance, Layout
from .process import SYSTEM_PATH, Runner
from .progress import Progress

LIBRARY = "libnvidia-ml.so.1"
_SOURCE = Path(__file__).with_name("stub_nvml.c")
_MEGABYTES, _MULTIPROCESSORS = 81559, 132

_DRIVER = """\
driver = 580.95.05
cuda = 13000
nvml = 13.580.95.05
"""
_GPU = """\

[gpu]
name = NVIDIA H100 80GB HBM3
uuid = {uuid}
bus = 00000000:{bus:02x}:00.0
minor = {index}
compute-capability = 9.0
cores = {cores}
brand = 14
memory-mib = {megabytes} 0
mig = 0
ecc = 1
ecc-corrected = 0
ecc-uncorrected = 0
remapped-rows = 0 0 0 0
persistence = 1
compute-mode = 0
clock = 1980 1980 2619 1545
clock-max = 1980 1980 2619 1545
power-limit = 700000
power-limit-default = 700000
temperature = 31
throttle = 0
pcie-generation = 5
pcie-generation-max = 5
pcie-width = 16
pcie-width-max = 16
pcie-replays = 0
nvlink = 1
fabric = 3 0 0 0
peer-status = 0
field-230 = 0
"""


def prepare(instance: Instance, layout: Layout, runner: Runner, progress: Progress) -> None:
    """Compile the library and write each node's file, where the machines copy them from when they start."""
    folder = instance.etc / "nvml"
    folder.mkdir(parents=True, exist_ok=True)
    compiler = shutil.which("cc", path=SYSTEM_PATH)
    if compiler is None:
        progress.say("NO C COMPILER (`cc`, package gcc): the nodes have NO NVML; hpcenv will read 0 GPUs on them")
        return
    aside = folder / f"{LIBRARY}.new"
    runner.run([compiler, "-shared", "-fPIC", "-O1", "-o", aside, _SOURCE])
    aside.rename(folder / LIBRARY)
    for one in machine.machines(layout):
        if one.role == "compute":
            (folder / f"{one.name}.conf").write_text(conf(instance.name, one.name, machine.GPUS))


def conf(instance: str, node: str, gpus: int) -> str:
    """What the library answers on one node."""
    return _DRIVER + "".join(
        _GPU.format(
            uuid=f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{instance}.{node}.{index}')}",
            bus=index + 1,
            index=index,
            cores=_MULTIPROCESSORS * 128,
            megabytes=_MEGABYTES,
        )
        for index in range(gpus)
    )
