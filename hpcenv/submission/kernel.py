"""A Jupyter kernel that starts in the locked environment, for a Jupyter of the site. Pure. Runs on: LOGIN NODE.

The kernel is `hpcenv run`: each start is checked as a job is, and a machine that differs is refused with the table,
which Jupyter's log then has.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

# The words after it: project, hpcenv, lockfile, Python of the environment, and the connection file, whose
# folder also has the kernel's sockets (transport `ipc`). A container sees that folder only if it is bound.
_START = 'cd "$1" && exec "$2" run --nodes 1 --lock "$3"{bind} -- "$4" -m ipykernel_launcher -f "$5"'
_BIND = ' --bind "${5%/*}"'


def folder_name(project: str, lock: str) -> str:
    """Return the name by which Jupyter finds the kernel."""
    return re.sub(r"[^a-z0-9._]+", "-", f"hpcenv-{project}-{lock}".lower())


def kernel_json(*, project: Path, lock: str, program: str, python: str, on_host: bool) -> str:
    """Return the text of kernel.json.

    Args:
        program: path of hpcenv.
        python: the interpreter of the environment.
        on_host: whether it is a host environment.
    """
    start = _START.format(bind="" if on_host else _BIND)
    words = (str(project), program, lock, python, "{connection_file}")
    spec: dict[str, Any] = {
        "argv": ["/bin/sh", "-c", start, "sh", *words],
        "display_name": f"{project.name} ({lock}, locked)",
        "language": "python",
        # A signal would reach hpcenv and the container runtime, not the kernel.
        "interrupt_mode": "message",
        "metadata": {"debugger": False},
    }
    return json.dumps(spec, indent=1) + "\n"
