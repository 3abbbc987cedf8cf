"""Kubernetes: an Indexed Job (`batch/v1`) with a headless Service, and ConfigMaps for check, lock and code."""

from __future__ import annotations

from hpcenv.exports.engine import Claim, Files, Rendered, with_header, yaml_text
from hpcenv.exports.pods import APPLY, config_maps, needs, pod, policy, retries
from hpcenv.exports.training import PORT, Training

_CONTAINER = "training"


def render(training: Training, files: Files, claim: Claim | None) -> Rendered:
    """Return kubernetes.yaml, and the ConfigMaps that it mounts."""
    name, nodes, label = training.name, training.request.nodes, {"app.kubernetes.io/name": training.name}
    selected = {**label, **training.labels}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": selected},
        # Pods find each other before they are ready, and none gets an address of the service.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": label, "ports": [{"port": PORT}]},
    }
    maps = config_maps(training, files, claim)
    template = pod(training, maps, files, claim, container=_CONTAINER, host=f"{name}-0.{name}")
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": selected},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": retries(training),
            "podFailurePolicy": policy(_CONTAINER),
            "template": {"metadata": {"labels": selected}, "spec": {"subdomain": name, **template}},
        },
    }
    lost: tuple[str, ...] = ("ulimits: those of the cluster's nodes",)
    return Rendered(
        files={
            "configmaps.yaml": yaml_text(*maps.values()),
            "kubernetes.yaml": with_header(training, lost, APPLY.format("kubernetes"), yaml_text(service, job)),
        },
        lost=lost,
        needs=tuple(needs(training, claim)),
        start=APPLY.format("kubernetes"),
    )
