"""The archive `check.pyz`: what compares a container with the lockfile, in one file that its Python runs.

Runs on: LOGIN NODE. It holds the rooms that travel to nodes, without what only Slurm needs.
"""

from __future__ import annotations

import io
import zipfile

from hpcenv.submission.node_code import node_modules, package_folder

# Kubernetes refuses an object of more than 1 MiB (a ConfigMap, and what etcd stores).
LARGEST = 500_000

_ROOMS = ("container", "facts", "identity", "incontainer", "judge", "machine", "records")
_STEPS = ("steps/__init__.py", "steps/container_check.py")
# What the launch in a job, its watching and its end need.
_NOT_HERE = (
    "facts/loaded.py", "facts/second_look.py", "identity/stage/stage.py", "incontainer/agent.py", "incontainer/call.py",
    "incontainer/node_checks.py", "incontainer/rank_", "incontainer/rendezvous_store.py", "incontainer/smoke.py",
    "incontainer/submitit_job.py", "incontainer/tasks.py", "judge/first_failure.py", "judge/hang.py", "judge/smoke/",
    "judge/use.py",
)  # fmt: skip

# Any Python 3 reads this. The modules need 3.10; without it the check cannot find out anything.
_MAIN = """\
import os, sys

if sys.version_info < (3, 10):
    sys.stderr.write("error: the check needs Python 3.10 or later; this container has %d.%d\\n" % sys.version_info[:2])
    sys.exit(91)
from hpcenv.steps.container_check import main
sys.exit(main(sys.argv[1:], os.environ))
"""


def check_archive() -> bytes:
    """Return the archive. The same hpcenv gives the same bytes.

    Raises:
        OSError: a module cannot be read.
    """
    package, content = package_folder(), io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        _add(archive, "__main__.py", _MAIN.encode())
        for name in node_modules():
            if _is_needed(name):
                _add(archive, f"hpcenv/{name}", (package / name).read_bytes())
    return content.getvalue()


def _is_needed(name: str) -> bool:
    room, slash, _ = name.partition("/")
    return (room in _ROOMS or not slash or name in _STEPS) and not name.startswith(_NOT_HERE)


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    # Its time is 1980-01-01. Compressed, unlike the archive of a run: it travels through an API, not a file system.
    archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, compresslevel=9)
