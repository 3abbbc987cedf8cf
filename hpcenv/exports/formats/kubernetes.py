"""Kubernetes: an Indexed Job (`batch/v1`) with a headless Service, and ConfigMaps for check, lock and code."""

from __future__ import annotations

from hpcenv.exports.engine import Claim, EngineFiles, Files
from hpcenv.exports.pods import job_spec, labels, rendered
from hpcenv.exports.training import PORT, Training


def render(training: Training, files: Files, claim: Claim | None) -> EngineFiles:
    """Return kubernetes.yaml, and the ConfigMaps that it mounts."""
    name, nodes = training.name, training.request.nodes
    metadata = {"name": name, "labels": labels(training)}
    # With these values, pods find each other by name before they are ready, and the service gets no IP address.
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"app.kubernetes.io/name": name},
        "ports": [{"port": PORT}],
    }
    spec = job_spec(training, files, claim, "training", f"{name}-0.{name}")
    spec["template"]["spec"]["subdomain"] = name
    job = {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes, **spec}
    documents = (
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job},
    )
    return rendered(training, files, claim, "kubernetes", documents)
