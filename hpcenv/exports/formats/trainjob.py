"""Kubeflow Trainer 2: a TrainJob with a TrainingRuntime of its own, in its namespace (`v1alpha1`)."""

from __future__ import annotations

from hpcenv.exports.engine import Claim, Files, Rendered, with_header, yaml_text
from hpcenv.exports.pods import APPLY, config_maps, needs, pod, policy, retries
from hpcenv.exports.training import Training

_API = "trainer.kubeflow.org/v1alpha1"
# Names that the Trainer expects of a job that trains, and of its container.
_JOB, _CONTAINER = "node", "node"


def render(training: Training, files: Files, claim: Claim | None) -> Rendered:
    """Return trainjob.yaml, and the ConfigMaps that it mounts."""
    name, nodes = training.name, training.request.nodes
    maps = config_maps(training, files, claim)
    spec = pod(training, maps, files, claim, container=_CONTAINER, host=f"{name}-{_JOB}-0-0.{name}")
    job = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": {
            "backoffLimit": retries(training),
            "podFailurePolicy": policy(_CONTAINER),
            "template": {"metadata": {"labels": training.labels}, "spec": spec},
        },
    }
    runtime = {
        "apiVersion": _API,
        "kind": "TrainingRuntime",
        "metadata": {"name": name, "labels": training.labels},
        "spec": {
            # torchrun has all it needs in its arguments.
            "mlPolicy": {"numNodes": nodes},
            "template": {
                "spec": {
                    "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                    "failurePolicy": {
                        "rules": [
                            {"name": "check", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
                        ]
                    },
                    "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": job}],
                }
            },
        },
    }
    train_job = {
        "apiVersion": _API,
        "kind": "TrainJob",
        "metadata": {"name": name, "labels": training.labels},
        "spec": {
            "runtimeRef": {"apiGroup": _API.partition("/")[0], "kind": "TrainingRuntime", "name": name},
            "trainer": {"numNodes": nodes},
        },
    }
    lost, start = ("ulimits: those of the cluster's nodes",), APPLY.format("trainjob")
    return Rendered(
        files={
            "configmaps.yaml": yaml_text(*maps.values()),
            "trainjob.yaml": with_header(training, lost, start, yaml_text(runtime, train_job)),
        },
        lost=lost,
        needs=("Kubeflow Trainer 2.3 in the cluster", *needs(training, claim)),
        start=start,
    )
