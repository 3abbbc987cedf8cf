"""SkyPilot (0.14): a task, which can run on any cloud of SkyPilot."""

from __future__ import annotations

import shlex
from typing import Any

from hpcenv.errors import UsageError
from hpcenv.exports.engine import Claim, EngineFiles, Files, from_shell, variable_of, with_header, yaml_text
from hpcenv.exports.training import CHECK, LOCK, PORT, Training
from hpcenv.records.manifest import Secret

_LOST = ("shared memory and ulimits: those of SkyPilot's container", "a failed run is not started again")


def render(training: Training, _files: Files, _claim: Claim | None) -> EngineFiles:
    """Return task.yaml.

    Raises:
        UsageError: the type of the GPUs is not known.
    """
    task: dict[str, Any] = {
        "name": training.name,
        "num_nodes": training.request.nodes,
        "resources": _resources(training),
        "workdir": "./code",
        "file_mounts": {CHECK: "./check", LOCK: "./lock"},
        **({"envs": dict(training.variables)} if training.variables else {}),
        **({"secrets": {one.name: None for one in training.secrets}} if training.secrets else {}),
        "run": _run(training),
    }
    # The option has no value, because every user of the machine could read this value in the list of processes.
    # SkyPilot reads the value from the variable.
    given = "".join(f" --secret {one.name}" for one in training.secrets)
    start = f"sky launch{given} task.yaml"
    return EngineFiles(
        files={"task.yaml": with_header(training, _LOST, start, yaml_text(task))},
        lost=_LOST,
        needs=(
            *(f"the data in {one.path} on each node (file_mounts or volumes in task.yaml)" for one in training.data),
            *(_from_shell(secret) for secret in training.secrets),
        ),
        start=start,
    )


def _from_shell(secret: Secret) -> str:
    variable, text = variable_of(secret), from_shell(secret)
    return text if variable == secret.name else f'{text}: export {secret.name}="${variable}"'


def _resources(training: Training) -> dict[str, Any]:
    request = training.request
    # SkyPilot checks a label against the rules of every cloud that it knows, and a key on GCP cannot have a dot.
    labels = {key.replace(".", "-"): value for key, value in training.labels.items()}
    resources: dict[str, Any] = {"image_id": f"docker:{training.image}", "labels": labels}
    if request.gpus_per_node:
        if request.gpu_type is None:
            raise UsageError(
                "SkyPilot needs the type of the GPUs", why="its clouds rent GPUs by name", hint="--gpu-type H100"
            )
        resources["accelerators"] = f"{request.gpu_type.upper()}:{request.gpus_per_node}"
    if request.cpus_per_task:
        resources["cpus"] = f"{request.cpus_per_task}+"
    if training.memory:
        resources["memory"] = f"{-(-training.memory // 1024)}+"
    return resources


def _run(training: Training) -> str:
    """Return the shell code that SkyPilot runs on each node, in the copy of the code."""
    first = '"$(printf %s "$SKYPILOT_NODE_IPS" | head -n 1)"'
    host = "@FIRST@"
    words = [*training.check, *training.torchrun(*training.meeting(host))]
    command = shlex.join(words).replace(
        shlex.quote(f"--rdzv-endpoint={host}:{PORT}"), f"--rdzv-endpoint={first}:{PORT}"
    )
    return f"cd {shlex.quote(training.workdir)}\nexec {command}\n"
