"""A small torch with GPUs that are not there, and a driver's library that starts, fails or is slow."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

GCC = shutil.which("gcc") or shutil.which("cc")

# FAULT is what is wrong: `crash`, `hang`, `busy:3` (the third GPU), `touched` (CUDA is in use), or the text of an error.
TORCH = """\
import os, time, types
FAULT, _, which = os.environ.get("FAULT", {fault!r}).partition(":")
GPUS = int(os.environ.get("GPUS", "{gpus}"))
made = []

def zeros(count, device):
    if FAULT == "busy" and device == "cuda:" + which:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\\nMore lines")
    made.append(device)

def init():
    if FAULT == "crash":
        os.abort()
    if FAULT == "hang":
        time.sleep(1000)
    if FAULT and FAULT not in ("busy", "touched"):
        raise RuntimeError(FAULT)

def properties(index):
    uuid = "0000000%d-0000-0000-0000-000000000000" % index
    return types.SimpleNamespace(name="NVIDIA H100 80GB HBM3", uuid=uuid)

version = types.SimpleNamespace(cuda="13.0", hip=None)
_C = types.SimpleNamespace(_cuda_getDeviceCount=lambda: GPUS)
cuda = types.SimpleNamespace(
    init=init, device_count=lambda: 8, synchronize=lambda index: None, is_initialized=lambda: FAULT == "touched",
    get_device_properties=properties,
)
"""
RUN = "import os\ndef main(args): open({trained!r}, 'w').write(' '.join(args))\n"

DRIVER = """\
#include <stdio.h>
#include <unistd.h>
int cuInit(unsigned flags) {{ sleep({seconds}); return {status}; }}
int cuDeviceGet(int *device, int index) {{ *device = index; return 0; }}
int cuDeviceGetPCIBusId(char *text, int length, int device) {{
  snprintf(text, length, "0000:%02X:00.0", device + 27);
  return 0;
}}
"""


def write_torch(folder: Path, *, trained: Path | None = None, fault: str = "", gpus: int = 8) -> Path:
    """Write the package; its torchrun writes its arguments to `trained`."""
    package = folder / "torch" / "distributed"
    package.mkdir(parents=True, exist_ok=True)
    text = TORCH.replace("{fault!r}", repr(fault)).replace("{gpus}", str(gpus))
    (package.parent / "__init__.py").write_text(text)
    (package / "__init__.py").touch()
    (package / "run.py").write_text(RUN.format(trained=str(trained)))
    return folder


def write_driver(folder: Path, *, status: int = 0, seconds: int = 0) -> Path:
    """Compile libcuda.so.1, whose cuInit takes so long and returns this."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cuda.c").write_text(DRIVER.format(status=status, seconds=seconds))
    subprocess.run([str(GCC), "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    return folder
