"""The inner side of the start gate: what the agent may load and start is said by the launch step outside.

Runs on: inside the image (or in a host environment), beside agent.py. Standard library only, Python 3.8 to 3.14.
node/container/start_gate.py is the other side, and says why there is a gate.

The folder has two FIFOs, `asks` and `answers`. Each message is one line of JSON.

    agent                                       launch step
    {"at": "gate", "mountinfo", "code"}   -->
                                          <--   {"do": "load", "torch", "elsewhere", "libraries"}
    {"at": "loaded", ...}                 -->                                (or {"at": "gate"} again: not loaded)
                                          <--   {"do": "start", "variables", "unset", "words"}

`{"do": "end"}`, or the end of `answers`, ends the agent.
"""

import importlib
import importlib.util
import json
import os
import site
import sys
import sysconfig
import time
from typing import Any, Callable, Dict, List, Optional

# Where the loader looks for libraries, in addition to folders that variables of the image name.
_LOADER = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.conf.d", "/etc/ld.so.preload")

# What torchrun imports when it starts; loaded before it is known whether it may start.
_TORCHRUN = (
    "torch.distributed.run",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
)


class Gate:
    """The gate as the agent sees it."""

    def __init__(self, folder: str) -> None:
        self._has_site = False
        self._asks = open(os.path.join(folder, "asks"), "w", encoding="utf-8")
        # The launch step has this FIFO open for writing as long as it runs.
        self._answers = open(os.path.join(folder, "answers"), encoding="utf-8")

    def load(self, before_site: Callable[[], None]) -> bool:
        """Import what is needed to start the training, as soon as that is allowed; return False if it never is.

        Args:
            before_site: called when code may be imported, before site-packages are searched.
        """
        while True:
            self._tell({"at": "gate", "mountinfo": _mountinfo(), "code": _code_folders()})
            order = self._hear()
            if order.get("do") != "load":
                return False
            before_site()
            if sys.flags.no_site and not self._has_site:
                # What Python does at its start without -S: it searches for site-packages, and runs sitecustomize.
                self._has_site = True
                site.main()
            elsewhere = [path for path in sys.path if _overlaps(path, order.get("elsewhere") or ())]
            if not elsewhere:
                break
        self._tell({"at": "loaded", **_load(order)})
        return True

    def wait_for_release(self) -> Optional[List[str]]:
        """Wait until the training may start; set its variables and return the words of its command, None if not."""
        order = self._hear()
        if order.get("do") != "start":
            return None
        for name in order.get("unset") or ():
            os.environ.pop(name, None)
        os.environ.update(order.get("variables") or {})
        return list(order.get("words") or ())

    def _tell(self, message: Dict[str, Any]) -> None:
        self._asks.write(json.dumps(message) + "\n")
        self._asks.flush()

    def _hear(self) -> Dict[str, Any]:
        line = self._answers.readline()
        return dict(json.loads(line)) if line.endswith("\n") else {}


def _mountinfo() -> str:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="backslashreplace") as file:
            return file.read()
    except OSError:
        return ""


def _code_folders() -> List[str]:
    """Return the folders from which Python and the loader take code, with the links in their paths resolved too."""
    here = os.path.dirname(os.path.realpath(__file__))
    packages = [*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = [path for path in sys.path if path and os.path.realpath(path) != here]
    found += [*packages, os.path.dirname(os.path.realpath(sys.executable)), *_LOADER]
    return sorted({*found, *(os.path.realpath(path) for path in found)})


def _overlaps(path: str, others: Any) -> bool:
    """Return whether a path is one of the others, below one of them, or above one of them."""
    own = os.path.realpath(path).rstrip("/") + "/"
    return any(own.startswith(o.rstrip("/") + "/") or o.startswith(own) for o in others)


def _load(order: Dict[str, Any]) -> Dict[str, Any]:
    """Import torchrun, and report which libraries the loader has mapped."""
    if not order.get("torch"):
        return {}
    try:
        for name in _TORCHRUN:
            importlib.import_module(name)
    except Exception as error:
        # An old torch may lack one of them. What torchrun needs, it imports again, and fails with its own message.
        if "torch" not in sys.modules:
            return {"problem": "torch cannot be imported: %s: %s" % (type(error).__name__, error)}
    if not order.get("libraries"):
        return {}
    started = time.monotonic()
    elf = beside("probe/elf")

    def build_id(path: str) -> str:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return str(elf.Elf(descriptor).build_id)
        finally:
            os.close(descriptor)

    report = dict(beside("mapped_libraries").read(order["libraries"], build_id))
    return {**report, "seconds": round(time.monotonic() - started, 4)}


def beside(name: str) -> Any:
    """Load a module that lies beside this file; `name` may have a folder in front."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py")
    spec = importlib.util.spec_from_file_location("hpcenv_" + name.replace("/", "_"), path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module
