"""Run the checks inside the environment on this node, after the verdict (`--preflight full`).

Runs on: COMPUTE NODE, one task per node. The container is started as for the training: from the checked file, and with
the same variables and binds. But the container gets no secrets.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from hpcenv import process
from hpcenv.container.start_command import StartCommand, build_start_command, opened
from hpcenv.container.start_gate import leads_to
from hpcenv.errors import HpcenvError
from hpcenv.identity.stage.staged import data_binds, staged_here
from hpcenv.judge.checks.check_table import Check, at_level
from hpcenv.launch.launch import container_binds, verified_sif
from hpcenv.machine.this_node import ThisNode
from hpcenv.records.checks import CheckOutcome, CheckReport, NodeChecks
from hpcenv.records.codec import SCHEMA
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import NodeSettings

FAMILY = "container"

# The check groups of incontainer/node_checks.py have their own limits; this limit includes the start of the container.
_SECONDS = 300.0
_STATES = ("fine", "failed", "unknown", "not-run")


def asked(manifest: Manifest) -> tuple[Check, ...]:
    """Return the checks inside the environment that a run requests."""
    return at_level(manifest.preflight, gpus=manifest.gpus_per_node > 0, places=("container",))


def run(manifest: Manifest, this_node: ThisNode, environ: Mapping[str, str]) -> CheckReport:
    """Run the checks. The result of a check that reports nothing is `unknown`, with the reason."""
    started = time.monotonic()
    found: dict[str, CheckOutcome] = {}
    why = "the check printed no result"
    try:
        with ExitStack() as stack:
            found = {one.id: one for one in _run(manifest, this_node, environ, stack)}
    except (HpcenvError, OSError) as error:
        why = error.what if isinstance(error, HpcenvError) else str(error)
    outcomes = [
        found.get(check.id) or CheckOutcome(id=check.id, state="unknown", found=why) for check in asked(manifest)
    ]
    checks = NodeChecks.of(outcomes, seconds=time.monotonic() - started)
    return CheckReport(schema=SCHEMA, run=manifest.run, node=this_node.node, attempt=this_node.attempt, checks=checks)


def _run(
    manifest: Manifest, this_node: ThisNode, environ: Mapping[str, str], stack: ExitStack
) -> Iterator[CheckOutcome]:
    folder = RunFolder(Path(manifest.run_folder))
    settings = load_record(NodeSettings, folder.env_of(this_node.node))
    argv = _argv(manifest, folder)
    variables = {setting.name: setting.value for setting in settings.settings}
    if manifest.environment.kind == "host":
        start = build_start_command(
            manifest.environment,
            argv,
            workdir=manifest.workdir,
            variables=variables,
            inherited=environ,
            passed=manifest.pass_env,
        )
        return _parse(_output(start, ()))
    descriptor, checked = stack.enter_context(verified_sif(manifest, this_node))
    tmp, home = (
        stack.enter_context(tempfile.TemporaryDirectory(prefix="hpcenv-checks-", ignore_cleanup_errors=True))
        for _ in range(2)
    )
    start = build_start_command(
        manifest.environment,
        argv,
        workdir=manifest.workdir,
        variables=variables,
        inherited=environ,
        passed=manifest.pass_env,
        image=f"/proc/self/fd/{descriptor}",
        home=home,
        binds=[*container_binds(manifest, tmp), *settings.binds],
        data=data_binds(manifest, staged_here(manifest, this_node)),
    )
    output = _output(start, (descriptor,))
    if not leads_to(checked, descriptor):
        # Apptainer opens the file by its name (container/start_gate.py), so the container may have used another file.
        raise HpcenvError("the SIF was replaced while it was checked")
    return _parse(output)


def _argv(manifest: Manifest, folder: RunFolder) -> list[str]:
    return [
        manifest.environment.python,
        "-B",
        str(folder.code / "hpcenv" / "incontainer" / "node_checks.py"),
        f"--gpus={manifest.gpus_per_node}",
        f"--ranks={manifest.nproc_per_node}",
        f"--backend={manifest.backend}",
    ]


def _output(start: StartCommand, descriptors: Sequence[int]) -> str:
    with opened(start) as (argv, files):
        return process.run(argv, timeout=_SECONDS, env=start.env, cwd=start.cwd, pass_fds=(*descriptors, *files)).stdout


def _parse(text: str) -> Iterator[CheckOutcome]:
    """Yield the outcomes in the output. The output may also contain lines of torch."""
    for line in text.splitlines():
        try:
            one = json.loads(line)
            if one["state"] in _STATES:
                yield CheckOutcome(id=str(one["id"]), state=one["state"], found=str(one["found"])[:500])
        except (ValueError, KeyError, TypeError):
            continue


def reports(manifest: Manifest, nodes: Sequence[str], family: str, *, wait: float) -> tuple[CheckReport, ...]:
    """Return the reports of the nodes; wait a short time for files that another node has just written.

    Args:
        manifest: manifest of the run.
        nodes: names of the nodes.
        family: family of the checks, which is the name of their folder.
        wait: seconds to wait for missing files.
    """
    folder = RunFolder(Path(manifest.run_folder))
    until = time.monotonic() + wait
    paths = [folder.checks_of(family, node) for node in nodes]
    while not all(map(os.path.exists, paths)) and time.monotonic() < until:
        time.sleep(0.2)
    found = []
    for path in paths:
        try:
            found.append(load_record(CheckReport, path))
        except HpcenvError:
            continue  # judge/ treats this node as a node without a report
    return tuple(found)
