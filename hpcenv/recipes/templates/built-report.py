"""Write /usr/share/hpcenv/built.json: which packages were compiled here, from which source, and by which compilers."""

import hashlib
import json
import os
import pathlib
import re

FOLDER = pathlib.Path("/usr/share/hpcenv")
# One package per line, as `hpcenv image init` wrote it: NAME==VERSION --hash=sha256:...
LOCKED = (FOLDER / "requirements.sources.lock").read_text().replace("\\\n", "")
SOURCES = {line.split("==")[0]: re.findall(r"sha256:(\w+)", line) for line in LOCKED.splitlines() if "==" in line}


def describe(wheel: pathlib.Path) -> dict[str, str]:
    """Return name, version and digests of a wheel that was compiled."""
    name, version = wheel.name.split("-")[:2]
    found = {"name": name, "version": version, "filename": wheel.name}
    found["sha256"] = hashlib.sha256(wheel.read_bytes()).hexdigest()
    sources = SOURCES.get(re.sub(r"[-_.]+", "-", name).lower(), [])
    return {**found, "source-sha256": sources[0]} if len(sources) == 1 else found


report = {"version": 1, "compiler": os.environ["COMPILER_SAYS"].splitlines()[0]}
if "NVCC_SAYS" in os.environ:
    release = re.search(r"V(\d+[\d.]*)", os.environ["NVCC_SAYS"])
    report["nvcc"] = release.group(1) if release else "unknown"
    report["arch-list"] = os.environ["TORCH_CUDA_ARCH_LIST"]
report["packages"] = [describe(path) for path in sorted(pathlib.Path("/opt/wheels").glob("*.whl"))]
(FOLDER / "built.json").write_text(json.dumps(report, indent=1) + "\n")
