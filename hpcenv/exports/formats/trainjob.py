"""Kubeflow Trainer 2: a TrainJob and its TrainingRuntime, in one namespace (`v1alpha1`)."""

from __future__ import annotations

from hpcenv.exports.engine import Claim, EngineFiles, Files
from hpcenv.exports.pods import job_spec, labels, rendered
from hpcenv.exports.training import Training

_GROUP = "trainer.kubeflow.org"
# The Trainer expects this name for the job that trains, and for its container.
_NODE = "node"


def render(training: Training, files: Files, claim: Claim | None) -> EngineFiles:
    """Return trainjob.yaml, and the ConfigMaps that it mounts."""
    name, nodes = training.name, training.request.nodes
    common = {"apiVersion": f"{_GROUP}/v1alpha1", "metadata": {"name": name, "labels": labels(training)}}
    job = {
        "metadata": {"labels": {f"{_GROUP}/trainjob-ancestor-step": "trainer"}},
        "spec": job_spec(training, files, claim, _NODE, f"{name}-{_NODE}-0-0.{name}"),
    }
    rule = {"name": "check", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    job_set = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"rules": [rule]},
        "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": job}],
    }
    # The command line gives torchrun all options that it needs, so the Trainer's own policy for torch is not used.
    runtime = {"mlPolicy": {"numNodes": nodes}, "template": {"spec": job_set}}
    reference = {"apiGroup": _GROUP, "kind": "TrainingRuntime", "name": name}
    documents = (
        {**common, "kind": "TrainingRuntime", "spec": runtime},
        {**common, "kind": "TrainJob", "spec": {"runtimeRef": reference, "trainer": {"numNodes": nodes}}},
    )
    return rendered(training, files, claim, "trainjob", documents)
