"""Make the network decision without a run, for a recorded machine or for this node. Pure.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpcenv.judge.network import rendezvous
from hpcenv.machine.network.recording import MachineRecording, addressed_of, fabric_of, networks_of
from hpcenv.records.codec import SCHEMA
from hpcenv.records.facts import Facts
from hpcenv.records.manifest import Environment, Manifest, Setting, Value
from hpcenv.records.network import FABRIC_SCHEMA, Fabric, NetworkDecision

Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True, kw_only=True)
class SeenMachine:
    """A node for which the decision is made.

    Attributes:
        label: the source of the node's data: `recorded`, `synthesised`, `facts of a run` or `this node`.
        addressed: see `MachineRecording`.
        cpus: CPUs that a job step may use; None in a recording, which does not contain them.
    """

    name: str
    label: str
    fabric: Fabric
    addressed: tuple[str, ...]
    cpus: int | None = None


def seen_in_recording(recording: MachineRecording) -> SeenMachine:
    """Return the machine of a recording."""
    return SeenMachine(
        name=recording.name, label=recording.label, fabric=fabric_of(recording), addressed=recording.addressed
    )


def seen_in_facts(facts: Facts) -> SeenMachine | None:
    """Return the machine that a node of a run reported; None if the facts contain no network hardware."""
    if facts.fabric is None or facts.fabric.schema != FABRIC_SCHEMA:
        return None
    first = next((route.interface for route in facts.network.routes if route.interface != "lo"), "")
    addressed = addressed_of(facts.network.interfaces, first=first)
    cpus = facts.values.get("host.cpus")
    return SeenMachine(
        name=facts.node, label="facts of a run", fabric=facts.fabric, addressed=addressed,
        cpus=cpus if isinstance(cpus, int) else None,
    )  # fmt: skip


def explain_machine(
    machine: SeenMachine,
    *,
    nodes: int,
    backend: Backend,
    settings: Sequence[Setting] = (),
    values: dict[str, Value] | None = None,
    container: bool = True,
) -> NetworkDecision | None:
    """Return the decision for a job on several nodes of one kind; None if the nodes cannot reach each other.

    Args:
        machine: one node. If the number of its CPUs is not known, eight CPUs for each GPU are assumed.
        nodes: how many nodes of this kind the job has.
        backend: backend of torch.distributed.
        settings: the given variables, with their origins.
        values: more facts, for example the image's `libs.nccl.version`.
        container: whether the ranks run in a SIF.
    """
    names = tuple(f"n{rank}" for rank in range(1, nodes + 1))
    fabric = machine.fabric
    networks = networks_of(machine.addressed, names)
    gpus = max(1, len(fabric.gpus))
    cpus = 8 * gpus if machine.cpus is None else machine.cpus
    facts = {
        name: Facts(
            schema=SCHEMA, run="explain", node=name, attempt=0, values={"host.cpus": cpus, **(values or {})},
            unknown={}, network=networks[name], fabric=fabric,
        )
        for name in names
    }  # fmt: skip
    manifest = _manifest(nodes, backend, gpus if backend == "nccl" else 0, gpus, tuple(settings), container=container)
    return rendezvous.choose(manifest, names, facts, job_id="0", attempt=0).network


def _manifest(
    nodes: int, backend: Backend, gpus: int, nproc: int, settings: tuple[Setting, ...], *, container: bool
) -> Manifest:
    """Return the manifest of an imagined run. The manifest has only the values that the decision needs."""
    return Manifest(
        schema=SCHEMA, run="explain", run_folder="", cluster="slurm", nodes=nodes, nproc_per_node=nproc,
        gpus_per_node=gpus, cpus_per_task=0, backend=backend,
        environment=Environment(kind="sif" if container else "host", python="python3"),
        script="", script_sha256="", args=(), workdir="", settings=settings, expectations=(), packages=(),
        probe_level="record", lockfile="", lockfile_sha256="", hpcenv_version="",
    )  # fmt: skip
