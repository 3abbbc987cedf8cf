"""A Jupyter kernel that starts in the locked environment, for the Jupyter server of a site. Pure. Runs on: LOGIN NODE.

`hpcenv run` starts the kernel, so each start of the kernel is checked like a job. If the machine differs from the
lockfile, the kernel does not start, and Jupyter's log has the table of differences.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

# The arguments of this shell code are the project, hpcenv, the lockfile, the Python of the environment, and the
# connection file. The folder of the connection file also has the kernel's sockets (transport `ipc`), so a container
# needs a bind for this folder.
_START = 'cd "$1" && exec "$2" run --nodes 1 --lock "$3"{bind} -- "$4" -m ipykernel_launcher -f "$5"'
_BIND = ' --bind "${5%/*}"'


def folder_name(project: str, lock: str) -> str:
    """Return the name of the kernel's folder. Jupyter finds the kernel by this name."""
    return re.sub(r"[^a-z0-9._]+", "-", f"hpcenv-{project}-{lock}".lower())


def kernel_json(*, project: Path, lock: str, program: str, python: str, on_host: bool) -> str:
    """Return the text of kernel.json.

    Args:
        project: the folder of the project.
        lock: the name of the lockfile.
        program: the path of the program hpcenv.
        python: the interpreter of the environment.
        on_host: whether the environment is a host environment.
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
