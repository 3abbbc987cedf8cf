"""Record this machine, and read recorded machines from files: `hpcenv doctor --record` and `hpcenv net explain`.

Runs on: LOGIN NODE or COMPUTE NODE.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpcenv.errors import RecordInvalid, UsageError, WouldOverwrite
from hpcenv.machine import gpus
from hpcenv.machine.network import reach
from hpcenv.machine.network.explain import Backend, SeenMachine, explain_machine, seen_in_facts, seen_in_recording
from hpcenv.machine.network.recording import MachineRecording, record
from hpcenv.machine.tree import TracedTree
from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record, read_json, save_record
from hpcenv.records.manifest import Setting
from hpcenv.records.network import NetworkDecision
from hpcenv.records.variables import is_tuning


def record_this_machine(environ: Mapping[str, str], *, name: str, date: str) -> MachineRecording:
    """Return a recording of this machine, without serial numbers and addresses.

    Args:
        environ: environment variables for the program that is started (ip).
        name: the machine's name in the recording.
        date: today's date.
    """
    seen = reach.observe(socket.gethostname(), environ)
    first = next((route.interface for route in seen.routes if route.interface != "lo"), "")
    found = gpus.read(environ=environ)
    return record(TracedTree(), name=name, date=date, gpus=found.places, interfaces=seen.interfaces, first=first)


def write_recording(recording: MachineRecording, path: Path, *, force: bool) -> None:
    """Write a recording to a file.

    Raises:
        WouldOverwrite: the file exists.
        FileUnusable: the file cannot be written.
    """
    if path.exists() and not force:
        raise WouldOverwrite(f"`{path}` exists", hint="name another file, or add --force")
    save_record(recording, path)


def seen_here(environ: Mapping[str, str], *, date: str) -> SeenMachine:
    """Return the data of this node that `net explain` needs."""
    recording = record_this_machine(environ, name="this node", date=date)
    found = seen_in_recording(recording)
    return replace(found, label="this node", cpus=len(os.sched_getaffinity(0)))


def seen_in_file(path: Path) -> SeenMachine:
    """Return the machine in a recording, or the node in a file `facts/NODE.json` of a run.

    Raises:
        RecordInvalid: the file is neither a recording nor the facts of a node.
    """
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        raise RecordInvalid(f"`{path}` cannot be read", why=str(error)) from error
    if isinstance(data, dict) and "files" in data:
        return seen_in_recording(load_record(MachineRecording, path))
    found = seen_in_facts(load_record(Facts, path))
    if found is None:
        raise RecordInvalid(
            f"`{path}` has no data about the node's network hardware",
            why="an older hpcenv wrote this file, and did not record the network hardware",
        )
    return found


def given_settings(environ: Mapping[str, str], pairs: Sequence[str]) -> tuple[Setting, ...]:
    """Return the variables that tune the network, from an environment and from --env (NAME=VALUE).

    If a variable is in the environment and in --env, the value in --env is used.

    Raises:
        UsageError: a pair has no `=`.
    """
    found = {
        name: Setting(name=name, value=value, origin="environment")
        for name, value in environ.items()
        if is_tuning(name)
    }
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise UsageError(f"`--env {pair}` is not NAME=VALUE")
        found[name] = Setting(name=name, value=value, origin="--env")
    return tuple(found[name] for name in sorted(found))


def decide_for(
    machine: SeenMachine, *, nodes: int, backend: Backend, settings: Sequence[Setting], container: bool
) -> NetworkDecision:
    """Return the network decision for a job on several nodes of this kind.

    Raises:
        RecordInvalid: these nodes could not reach each other.
    """
    decision = explain_machine(machine, nodes=nodes, backend=backend, settings=settings, container=container)
    if decision is None:
        raise RecordInvalid(
            f"{machine.name} has no interface with an address",
            why="several nodes of this kind could not reach each other",
            hint="add --nodes 1",
        )
    return decision
