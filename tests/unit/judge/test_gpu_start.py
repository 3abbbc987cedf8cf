"""What the agent's report about GPUs means."""

import pytest

from hpcenv.judge import gpu_start
from hpcenv.judge.gpu_start import AskedNode
from hpcenv.records.manifest import Environment, Expectation, FieldSeverity, PreflightOptions, Setting

GPUS = [{"index": n, "model": "NVIDIA H100", "uuid": f"GPU-{n}", "bus": f"0000:0{n}:00.0"} for n in range(8)]
FILES = [*(f"nvidia{n}" for n in range(8)), "nvidia-uvm", "nvidiactl"]


def report(count=8, gpus=None, **more):
    answer = {"count": count, "gpus": GPUS[:count] if gpus is None else gpus, "ended": "", "seconds": 2.5}
    return {"gpus": {"status": 0, "files": FILES, "variables": {}, **answer, **more}}


@pytest.fixture
def judge(make_manifest, make_facts):
    def run(found, *, environ=(), settings=(), facts=(), local_rank=None, **changes):
        sif = Environment(kind="sif", python="python3", sif="/a.sif", apptainer="apptainer", gpus=True)
        manifest = make_manifest(**{"gpus_per_node": 8, "environment": sif, **changes})
        place = AskedNode(
            node="n2",
            attempt=0,
            local_rank=local_rank,
            environ=dict(environ),
            settings=tuple(Setting(name=name, value=value, origin="--env") for name, value in dict(settings).items()),
            facts=make_facts("n2", values=dict(facts)),
        )
        return gpu_start.judge(manifest, place, found)

    return run


def test_eight_of_eight(judge):
    answer = judge(report())
    assert (answer.state, answer.what, answer.notes) == ("fine", "torch can use 8 of 8 GPUs in the container on n2", ())
    assert (answer.difference, answer.record.seconds, answer.record.gpus[0].bus) == (None, 2.5, "0000:00:00.0")


REASONS = {
    "libcuda is missing": (
        {"missing": "libcuda.so.1: no such file"},
        "library is not there (libcuda.so.1: no such file)",
    ),
    "what --nv did": ({"missing": "libcuda.so.1"}, "--nv did not bring it from the node"),
    "device files": ({"status": 100, "files": ["nvidiactl"]}, "/dev has 0 device files of GPUs"),
    "uvm": ({"status": 999, "files": FILES[:8]}, "/dev/nvidia-uvm is not there"),
    "fabric manager": ({"status": 802}, "nvidia-fabricmanager has to run (cuInit: 802"),
    "forward compatibility": (
        {"status": 804, "library": "/compat/libcuda.so.1"},
        "does not allow (cuInit: 804, /compat/",
    ),
    "another status": ({"status": 46}, "the driver does not start (cuInit: 46"),
    "torch's own words": ({"problem": "RuntimeError: too old"}, "RuntimeError: too old"),
}


@pytest.mark.parametrize(("more", "text"), REASONS.values(), ids=REASONS)
def test_fewer_gpus_are_a_mismatch_with_the_reason(judge, more, text):
    answer = judge(report(0, **more))
    assert (answer.state, answer.what) == ("failed", "torch sees 0 of 8 GPUs in the container on n2")
    assert text in answer.why
    assert not answer.difference.unknown


def test_a_container_without_nv_and_a_host_environment(judge):
    sif = Environment(kind="sif", python="python3", sif="/a.sif", apptainer="apptainer")
    assert "without --nv" in judge(report(0, missing="libcuda.so.1"), environment=sif).why
    host = judge(report(7), environment=Environment(kind="host", python="/env/bin/python"))
    assert host.what == "torch sees 7 of 8 GPUs on n2"


def test_a_gpu_without_a_context_is_named_with_its_compute_mode(judge):
    busy = {"index": 3, "problem": "RuntimeError: CUDA-capable device(s) is/are busy or unavailable"}
    answer = judge(report(8, gpus=[*GPUS[:3], busy, *GPUS[4:]]))
    assert answer.what == "torch can use 7 of 8 GPUs in the container on n2"
    assert "compute mode" in answer.why and "GPU 3: RuntimeError" in answer.why


def test_split_gpus_are_a_reason(judge):
    assert "MIG" in judge(report(1), facts={"host.gpu-mig": ("enabled",) * 8}).why


def test_slurm_gives_each_task_its_own_gpu(judge):
    one = {"CUDA_VISIBLE_DEVICES": "3"}
    answer = judge(report(1, variables=one), environ=one, local_rank=3)
    assert (answer.state, answer.record.expected, answer.notes) == ("fine", 1, ())
    assert answer.what == "torch can use 1 of 1 GPUs in the container on n2"
    assert judge(report(0, variables=one), environ=one, local_rank=3).what.startswith("torch sees 0 of 1 GPUs")


def test_a_variable_that_hides_gpus_is_named_with_its_origin(judge):
    two = {"CUDA_VISIBLE_DEVICES": "0,1"}
    by_user = judge(report(2, variables=two), settings=two, environ={"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"})
    assert (by_user.state, by_user.notes) == ("fine", ("CUDA_VISIBLE_DEVICES='0,1' (--env) hides 6 of 8 GPUs",))
    assert "(the image) hides 6 of 8" in judge(report(2, variables=two)).notes[0]


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_a_variable_that_hides_all_gpus_stops_the_job(judge, value):
    none = {"CUDA_VISIBLE_DEVICES": value}
    answer = judge(report(0, variables=none), environ=none)
    assert (answer.state, answer.what) == ("failed", "torch sees 0 of 8 GPUs in the container on n2")
    assert f"CUDA_VISIBLE_DEVICES={value!r} (the job's own environment) hides 8 of 8 GPUs" in answer.why
    assert "leave the variable out" in gpu_start.hint(None, answer.difference)


def test_the_variables_of_hip_count_for_hip(judge):
    variables = {"ROCR_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "0,1"}
    assert judge(report(2, hip=True, variables=variables), environ=variables).record.expected == 2
    assert judge(report(8, variables=variables), environ=variables).record.expected == 8


def test_no_answer_is_unknown_with_the_node_and_the_place(judge):
    answer = judge(report(ended="no answer within 120 s", at="GPU 3"))
    assert (answer.state, answer.record.seen) == ("unknown", None)
    assert answer.what == "torch does not say which GPUs it can use in the container on n2"
    assert answer.why.endswith("no answer within 120 s, at GPU 3")
    assert answer.difference.unknown
    assert "torch cannot be imported" in judge({"problem": "torch cannot be imported: x"}).why


INFO = (FieldSeverity(field="cuda.start", severity="info"), FieldSeverity(field="**", severity="must"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"gpus_per_node": 0, "severities": INFO}, ""),
        ({"preflight": PreflightOptions(skipped=("cuda.start",))}, "--skip-check cuda.start"),
        ({"preflight": PreflightOptions(allow_cpu_torch=True)}, "--allow-cpu-torch"),
        ({"severities": INFO}, '[policy]: "cuda.start" is `info`'),
        (
            {"expectations": (Expectation(field="torch.version", value="absent", severity="must"),)},
            "the locked environment has no torch",
        ),
    ],
)
def test_why_gpus_are_not_tried(make_manifest, changes, words):
    assert gpu_start.why_not_tried(make_manifest(**{"gpus_per_node": 8, **changes})) == words
