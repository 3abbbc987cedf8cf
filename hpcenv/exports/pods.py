"""Parts that the formats for Kubernetes share: the pod of one node, ConfigMaps, and the rules for retries.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcenv.errors import NodeRejected, NodesUnknown, UsageError
from hpcenv.exports.engine import USE_A_CLAIM, Claim, EngineFiles, Files, with_header, yaml_text
from hpcenv.exports.training import CHECK, CODE, LOCK, Training

# The largest ConfigMap that Kubernetes accepts, in bytes.
_LARGEST = 1 << 20
_RETRIES = 3


def _config_maps(training: Training, files: Files, claim: Claim | None) -> Iterator[dict[str, Any]]:
    """Yield the ConfigMaps with the check and the lock, and with the code if no volume claim has the code."""
    for name, path in (("check", files.archive), ("lock", files.lock)):
        yield _config_map(training, name, {path.name: path.read_bytes()})
    if claim is None:
        code = {_key(number): path.read_bytes() for number, path in enumerate(files.code_files())}
        yield _config_map(training, "code", code)


def _key(number: int) -> str:
    # A key cannot have a `/`, so the pod names the path for each key.
    return f"file-{number}"


def _config_map(training: Training, name: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    size = sum(map(len, files.values()))
    if size > _LARGEST:
        raise UsageError(
            f"the {name} has {size / _LARGEST:.1f} MiB, and Kubernetes accepts 1 MiB in a ConfigMap",
            why=f"{len(files)} files"
            if name == "code"
            else "the lockfile of the environment is large, or hpcenv's own code is large",
            hint=USE_A_CLAIM if name == "code" else "use --format compose, or lock an environment with fewer packages",
        )
    text, binary = {}, {}
    for key, content in files.items():
        try:
            text[key] = content.decode()
        except UnicodeDecodeError:
            binary[key] = base64.b64encode(content).decode()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{training.name}-{name}", "labels": labels(training)},
        **({"data": text} if text else {}),
        **({"binaryData": binary} if binary else {}),
    }


def job_spec(training: Training, files: Files, claim: Claim | None, container: str, host: str) -> dict[str, Any]:
    """Return the spec of the job whose pods are the nodes. If a container differs from the lockfile, there is no retry.

    Args:
        container: name of the container.
        host: name of the first pod.
    """
    final = [NodeRejected.exit_status, NodesUnknown.exit_status]
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": container, "operator": "In", "values": final}},
        # A pod that the cluster evicts does not count as a failure.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    pod = _pod(training, files, claim, container, host)
    return {
        # If one node fails, all pods fail, so each retry counts once for each node.
        "backoffLimit": _RETRIES * training.request.nodes,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": labels(training)}, "spec": pod},
    }


def labels(training: Training) -> dict[str, str]:
    """Return the labels of all objects. The label with the name of the training selects the pods."""
    return {"app.kubernetes.io/name": training.name, **training.labels}


def _pod(training: Training, files: Files, claim: Claim | None, container: str, host: str) -> dict[str, Any]:
    mounts = [
        {"name": "check", "mountPath": CHECK, "readOnly": True},
        {"name": "lock", "mountPath": LOCK, "readOnly": True},
        {"name": "code", "mountPath": CODE if claim is None else claim.path, "readOnly": claim is None},
        # The workers of a DataLoader pass batches through this folder.
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  (in the container)
        *({"name": _volume(one.name), "mountPath": one.path, "readOnly": True} for one in training.data),
    ]
    code = {"persistentVolumeClaim": {"claimName": claim.name}} if claim else _code_volume(training, files)
    volumes = [
        *({"name": name, "configMap": {"name": f"{training.name}-{name}"}} for name in ("check", "lock")),
        {"name": "code", **code},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        *(
            {"name": _volume(one.name), "persistentVolumeClaim": {"claimName": _volume(one.name), "readOnly": True}}
            for one in training.data
        ),
    ]
    environment: list[dict[str, Any]] = [
        {"name": name, "value": _literal(value)} for name, value in training.variables.items()
    ]
    environment += [
        {"name": one.name, "valueFrom": {"secretKeyRef": {"name": _secrets(training), "key": one.name}}}
        for one in training.secrets
    ]
    return {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": container,
                "image": training.image,
                "command": [_literal(word) for word in training.check],
                "args": [_literal(word) for word in training.torchrun(*training.meeting(host))],
                "workingDir": f"{CODE if claim is None else claim.path}/{training.workdir}",
                **({"env": environment} if environment else {}),
                **_resources(training),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _code_volume(training: Training, files: Files) -> dict[str, Any]:
    items = []
    for number, path in enumerate(files.code_files()):
        mode = {"mode": 0o555} if os.access(path, os.X_OK) else {}
        items.append({"key": _key(number), "path": str(path.relative_to(files.code.path)), **mode})
    return {"configMap": {"name": f"{training.name}-code", "items": items}}


def _resources(training: Training) -> dict[str, Any]:
    request = training.request
    asked: dict[str, object] = {}
    if request.cpus_per_task:
        asked["cpu"] = str(request.cpus_per_task)
    if training.memory:
        asked["memory"] = f"{training.memory}Mi"
    if request.gpus_per_node:
        asked["nvidia.com/gpu"] = str(request.gpus_per_node)
    # If only limits are given, Kubernetes uses them as requests, too.
    return {"resources": {"limits": asked}} if asked else {}


def rendered(
    training: Training, files: Files, claim: Claim | None, name: str, documents: Sequence[Mapping[str, Any]]
) -> EngineFiles:
    """Return the files: NAME.yaml with the documents, and the ConfigMaps that its pods mount."""
    lost = ("ulimits: those of the cluster's nodes",)
    # `kubectl apply` is not used: it keeps a second copy in an annotation, which can have only 256 KiB.
    start = f"kubectl create -f configmaps.yaml -f {name}.yaml"
    return EngineFiles(
        files={
            "configmaps.yaml": yaml_text(*_config_maps(training, files, claim)),
            f"{name}.yaml": with_header(training, lost, start, yaml_text(*documents)),
        },
        lost=lost,
        needs=tuple(_needs(training, claim)),
        start=start,
    )


def _needs(training: Training, claim: Claim | None) -> Iterator[str]:
    if claim is not None:
        yield f"the claim {claim.name} with the content of code/: kubectl cp code/. POD:{claim.path}"
    for one in training.data:
        yield f"the claim {_volume(one.name)} with the data {one.path}"
    if training.secrets:
        words = " ".join(_from(one.name, one.source) for one in training.secrets)
        yield f"in bash: kubectl create secret generic {_secrets(training)} {words}"


def _from(name: str, source: str) -> str:
    """Return an argument for kubectl without the secret itself, because all users can read command lines."""
    kind, _, place = source.partition(":")
    return f"--from-file={name}=" + (f'<(printf %s "${place}")' if kind == "env" else place)


def _secrets(training: Training) -> str:
    return f"{training.name}-secrets"


def _volume(data: str) -> str:
    return "data-" + re.sub(r"[^a-z0-9]+", "-", data.lower()).strip("-")[:50].rstrip("-")


def _literal(text: str) -> str:
    """Return text in which Kubernetes replaces no `$(VARIABLE)`."""
    # A `$` alone is not changed, because podman keeps `$$` in the value of a variable.
    return re.sub(r"\$(?=[$(])", "$$", text)
