"""The check before an exported training: `python3 -I check.pyz LOCK -- COMMAND...` (exports/archive.py).

Runs on: INSIDE A CONTAINER that another engine has started: compose, Kubernetes or SkyPilot. This container is compared
with the lockfile. If the container matches, COMMAND replaces this process; else nothing of the training runs.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from hpcenv.container.probe_source import probe_source
from hpcenv.errors import HpcenvError, NodeRejected, NodesUnknown, UsageError
from hpcenv.facts import facts
from hpcenv.judge import decide, verdict_table
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.verdict import Verdict

_ALONE = "nodes: not compared with each other; outside Slurm each container is compared with the lockfile only"


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Check this container, and become the training.

    Args:
        arguments: the file of the lock, `--` and the command of the training.

    Returns:
        90 if the container differs, 91 if it is unknown whether the container differs. If the container matches, this
        function does not return.
    """
    try:
        if len(arguments) < 3 or arguments[1] != "--":
            raise UsageError("check.pyz takes the file of the lock, `--` and a command")
        manifest = load_record(Manifest, Path(arguments[0]))
        verdict = judge_container(manifest, environ)
        print(verdict_table.brief(verdict, lockfile=manifest.lockfile), flush=True)
        if verdict.result == "match":
            _become(arguments[2:], environ)
        return NodeRejected.exit_status if verdict.result == "mismatch" else NodesUnknown.exit_status
    except HpcenvError as error:
        print(f"error[{error.code}]: {error}", file=sys.stderr)
    except Exception:  # noqa: BLE001  (status 1 would say that the training failed, and it would be tried again)
        import traceback

        print(f"error[{HpcenvError.code}]: the check failed\nwhy: {traceback.format_exc().strip()}", file=sys.stderr)
    return NodesUnknown.exit_status


def judge_container(manifest: Manifest, environ: Mapping[str, str]) -> Verdict:
    """Return the verdict on this container.

    Args:
        manifest: the lock, made by exports/lock_of.py.
        environ: environment variables of this process. The ranks and the probe get all these variables.
    """
    python = shutil.which(manifest.environment.python, path=environ.get("PATH"))
    if python is None:
        raise NodesUnknown(f"there is no `{manifest.environment.python}` in this container")
    environment = replace(manifest.environment, python=python)
    manifest = replace(manifest, environment=environment, pass_env=tuple(environ))
    node = os.uname().nodename
    place = ThisNode(node=node, nodes=(node,), attempt=0, job_id="container")
    found = facts.gather(manifest, place, environ, probe=probe_source())
    verdict, _ = decide.judge(manifest, place.nodes, {node: found}, {}, attempt=0, job_id=place.job_id)
    return replace(verdict, rendezvous=None, settings={}, inherited={}, notes=(*verdict.notes, _ALONE))


def _become(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    # hpcenv.training is in the archive. The probe did not look into ~/.local, so the ranks must not use ~/.local.
    paths = [os.path.abspath(__file__).partition("/hpcenv/steps/")[0], environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONNOUSERSITE": "1"}
    try:
        os.execvpe(command[0], list(command), {**environ, **own})  # noqa: S606  (it is given by the export)
    except OSError as error:
        raise NodesUnknown(f"cannot start `{command[0]}` in this container", why=error.strerror) from error
