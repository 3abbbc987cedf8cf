"""What the parameters of an executor mean for a run."""

from __future__ import annotations

from typing import Any

import pytest

from hpcenv.api.parameters import translate
from hpcenv.errors import UsageError
from hpcenv.project.options import in_place

KEYWORDS = frozenset(option.name for option in in_place("python"))


@pytest.mark.parametrize(
    ("parameters", "keywords"),
    [
        ({}, {"nproc": 1}),
        ({"time": 5, "mem": "4GB"}, {"time": "5", "mem": "4GB", "nproc": 1}),
        ({"ntasks_per_node": 4, "cpus_per_task": 2}, {"nproc": 4, "cpus": 8}),
        ({"gpus_per_node": 8}, {"gpus": 8, "nproc": 1}),
        ({"setup": ["module purge"]}, {"setup": ["module purge"], "nproc": 1}),
        ({"gpus_per_node": 8, "call": "rank"}, {"gpus": 8, "nproc": 8}),
        ({"gpus_per_node": "a100:4"}, {"gpus": 4, "gpu_type": "a100", "nproc": 1}),
        ({"gres": "gpu:2"}, {"gpus": 2, "nproc": 1}),
        ({"gres": "gpu:a100:2"}, {"gpus": 2, "gpu_type": "a100", "nproc": 1}),
        ({"gres": "gpu:1,nvme:100"}, {"gpus": 1, "sbatch": {"gres": "nvme:100"}, "nproc": 1}),
        ({"gres": "nvme:100"}, {"sbatch": {"gres": "nvme:100"}, "nproc": 1}),
        (
            {"additional_parameters": {"gres": "nvme:10", "nice": 5}},
            {"sbatch": {"gres": "nvme:10", "nice": 5}, "nproc": 1},
        ),
        (
            {
                "time": 5,
                "additional_parameters": {"time": "0-01:00:00", "account": "a", "cpus-per-gpu": 2, "reservation": "r"},
            },
            {"time": "0-01:00:00", "account": "a", "cpus": 2, "reservation": "r", "nproc": 1},
        ),
        ({"gpus_per_task": 1, "ntasks_per_node": 4, "cpus_per_gpu": 3}, {"gpus": 4, "nproc": 4, "cpus": 12}),
        ({"signal_delay_s": 30, "partition": None}, {"grace": 30, "nproc": 1}),
        (
            {"comment": "c", "mail_type": "END", "exclusive": True},
            {"comment": "c", "sbatch": {"mail-type": "END", "exclusive": True}, "nproc": 1},
        ),
        ({"additional_parameters": {"mail-user": "a"}}, {"sbatch": {"mail-user": "a"}, "nproc": 1}),
        ({"srun_args": ["--cpu-bind=none", "--exact"]}, {"srun": {"cpu-bind": "none", "exact": True}, "nproc": 1}),
        ({"lock": "big", "env": {"A": "1"}}, {"lock": "big", "env": {"A": "1"}, "nproc": 1}),
    ],
)
def test_parameters_of_submitit_and_keywords(parameters: dict[str, Any], keywords: dict[str, Any]) -> None:
    assert translate(parameters, KEYWORDS).keywords == keywords


def test_what_is_not_a_keyword_of_a_run() -> None:
    options = translate(
        {"job_name": "sweep", "array_parallelism": 3, "stderr_to_stdout": True, "call": "rank"}, KEYWORDS
    )
    assert (options.name, options.max_parallel, options.stderr_to_stdout, options.call) == ("sweep", 3, True, "rank")


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"partitoin": "x"}, "did you mean `partition`?"),
        ({"teardown": ["rm -r /scratch/x"]}, "let the function clean up"),
        ({"use_srun": False}, "srun"),
        ({"call": "node"}, 'call="task" or call="rank"'),
        ({"gres": "gpu:a100:1,gpu:h100:1"}, "gpu_type"),
        ({"gpus_per_node": 4, "gpus": 2}, "contradict"),
        ({"srun_args": ["-n", "4"]}, "--cpu-bind"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason(parameters: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        translate(parameters, KEYWORDS)
    assert text in str(caught.value)
