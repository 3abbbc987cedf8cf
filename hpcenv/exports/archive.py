"""The archive `check.pyz`: the program that compares a container with the lockfile. The container's Python runs it.

Runs on: LOGIN NODE. The archive contains the node code, without the modules that only a Slurm job needs.
"""

from __future__ import annotations

import io
import zipfile

from hpcenv.submission.node_code import node_modules, package_folder

# The limit for the archive, in bytes. Kubernetes refuses objects of more than 1 MiB. This limit applies to a ConfigMap,
# and to every object in etcd.
LARGEST = 500_000

_ROOMS = ("container", "facts", "identity", "incontainer", "judge", "machine", "records")
_STEPS = ("steps/__init__.py", "steps/container_check.py")
# Modules that only the launch, the watching and the end of a Slurm job need.
_NOT_HERE = (
    "facts/loaded.py", "facts/second_look.py", "identity/stage/stage.py", "incontainer/agent.py", "incontainer/call.py",
    "incontainer/gpu_start.py", "incontainer/node_checks.py", "incontainer/rank_", "incontainer/ray_node.py",
    "incontainer/rendezvous_store.py", "incontainer/service.py", "incontainer/smoke.py", "incontainer/submitit_job.py",
    "incontainer/tasks.py", "judge/first_failure.py", "judge/hang.py", "judge/smoke/", "judge/use.py",
)  # fmt: skip

# Any Python 3 can run this text. The modules need Python 3.10: an older Python cannot run the check.
_MAIN = """\
import os, sys

if sys.version_info < (3, 10):
    sys.stderr.write("error: the check needs Python 3.10 or later; this container has %d.%d\\n" % sys.version_info[:2])
    sys.exit(91)
from hpcenv.steps.container_check import main
sys.exit(main(sys.argv[1:], os.environ))
"""


def check_archive() -> bytes:
    """Return the content of the archive. One version of hpcenv always makes the same bytes.

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
    # The time of each file is 1980-01-01. The files are compressed, because the archive is sent through an API. The
    # archive of a run is read from a file system, and is not compressed.
    archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, compresslevel=9)
