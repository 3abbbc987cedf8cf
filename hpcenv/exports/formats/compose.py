"""Docker Compose and podman-compose: one service for each node, all on one machine (Compose Specification)."""

from __future__ import annotations

from typing import Any

from hpcenv.exports.engine import Claim, EngineFiles, Files, from_shell, variable_of, with_header, yaml_text
from hpcenv.exports.training import CHECK, CODE, LOCK, Training

_LOST = ("all nodes are containers of this machine", "a container that fails is not started again")


def render(training: Training, _files: Files, _claim: Claim | None) -> EngineFiles:
    """Return compose.yaml."""
    volumes = {_literal(one.name): {"external": True} for one in training.data}
    project = {
        "name": training.name,
        "services": {f"node{rank}": _service(training, rank) for rank in range(training.request.nodes)},
        **({"volumes": volumes} if volumes else {}),
    }
    start = "docker compose up"
    create = "docker volume create --opt type=none --opt o=bind --opt device=FOLDER"
    return EngineFiles(
        files={"compose.yaml": with_header(training, _LOST, start, yaml_text(project))},
        lost=_LOST,
        needs=(
            *(f"the volume {one.name} with the data {one.path}: {create} {one.name}" for one in training.data),
            *(from_shell(secret) for secret in training.secrets),
        ),
        start=start,
    )


def _service(training: Training, rank: int) -> dict[str, Any]:
    variables = {name: _literal(value) for name, value in training.variables.items()}
    # With `:?`, Compose refuses to start if the variable is not set.
    variables |= {one.name: f"${{{variable_of(one)}:?}}" for one in training.secrets}
    mounts = [f"./check:{CHECK}:ro", f"./lock:{LOCK}:ro", f"./code:{CODE}"]
    return {
        "image": training.image,
        "platform": training.platform,
        "hostname": f"node{rank}",
        "labels": training.labels,
        "entrypoint": [_literal(word) for word in training.check],
        "command": [_literal(word) for word in training.torchrun(*training.meeting("node0"))],
        "working_dir": _literal(f"{CODE}/{training.workdir}"),
        **({"environment": variables} if variables else {}),
        "volumes": [*mounts, *(_literal(f"{one.name}:{one.path}:ro") for one in training.data)],
        # The workers of a DataLoader pass batches through shared memory, whose default size is 64 MB.
        "shm_size": f"{training.memory or 8192}m",
        "restart": "no",
        **_resources(training, rank),
    }


def _resources(training: Training, rank: int) -> dict[str, Any]:
    request, limits, gpus = training.request, {}, training.request.gpus_per_node
    if request.cpus_per_task:
        limits["cpus"] = str(request.cpus_per_task)
    if training.memory:
        limits["memory"] = f"{training.memory}m"
    resources: dict[str, Any] = {"limits": limits} if limits else {}
    if gpus:
        ids = [str(rank * gpus + number) for number in range(gpus)]
        resources["reservations"] = {"devices": [{"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}]}
    # NCCL registers memory, and needs a large stack.
    limited = {"ulimits": {"memlock": -1, "stack": 67108864}} if gpus else {}
    return {**({"deploy": {"resources": resources}} if resources else {}), **limited}


def _literal(text: str) -> str:
    """Return text with each `$` escaped, so that Compose replaces no variable in it."""
    return text.replace("$", "$$")
