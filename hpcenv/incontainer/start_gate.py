"""The inner side of the start gate: the agent loads torch, reports what was loaded, and waits.

Runs on: inside the image (or in a host environment), beside agent.py. Standard library only, Python 3.8 to 3.14.
container/start_gate.py is the outer side, and explains why the gate is needed.

The folder has a file and two FIFOs.

    load.json   libraries to load and GPUs to try: {"torch", "libraries", "gpus"}, written before the agent starts
    reports     agent -> launch step: one line of JSON: what was loaded
    answers     launch step -> agent: `start`; with any other line, or without a line, the agent ends
"""

import importlib
import importlib.util
import json
import os
import sys
import time
from typing import Any, Dict

# Modules that torchrun imports when it starts; they are loaded before the launch step allows the start.
_TORCHRUN = (
    "torch.distributed.run",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
)


def may_start(folder: str) -> bool:
    """Load the requested libraries, report them, and wait; return whether the training may start.

    Args:
        folder: folder of the gate.
    """
    with open(os.path.join(folder, "load.json"), encoding="utf-8") as file:
        wanted = json.load(file)
    try:
        with open(os.path.join(folder, "reports"), "w", encoding="utf-8") as reports:
            reports.write(json.dumps(_load(wanted)) + "\n")
    except BrokenPipeError:  # the launch step has ended, because the start was refused
        return False
    # The launch step has this FIFO open for writing as long as it runs.
    with open(os.path.join(folder, "answers"), encoding="utf-8") as answers:
        return answers.readline() == "start\n"


def _load(wanted: Dict[str, Any]) -> Dict[str, Any]:
    """Import torchrun; report which libraries the loader has mapped, and whether torch can use the GPUs."""
    if not wanted.get("torch"):
        return {}
    try:
        for name in _TORCHRUN:
            importlib.import_module(name)
    except Exception as error:
        # An old torch may lack one of these modules. If torchrun needs this module, torchrun itself fails with its own
        # message.
        if "torch" not in sys.modules:
            return {"problem": "torch cannot be imported: %s: %s" % (type(error).__name__, error)}
    report = _mapped(wanted["libraries"]) if wanted.get("libraries") else {}
    # The GPUs are tried last: the child loads the driver, and the driver does not belong to the libraries above.
    return {**report, "gpus": beside("gpu_start").read(wanted["gpus"])} if wanted.get("gpus") else report


def _mapped(libraries: Dict[str, Any]) -> Dict[str, Any]:
    """Return which files the loader has mapped for these libraries."""
    started = time.monotonic()
    elf = beside("probe/elf")

    def build_id(path: str) -> str:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return str(elf.Elf(descriptor).build_id)
        finally:
            os.close(descriptor)

    report = dict(beside("mapped_libraries").read(libraries, build_id))
    return {**report, "seconds": round(time.monotonic() - started, 4)}


def beside(name: str) -> Any:
    """Load a module from the folder of this file; `name` may start with a subfolder."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py")
    spec = importlib.util.spec_from_file_location("hpcenv_" + name.replace("/", "_"), path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module
