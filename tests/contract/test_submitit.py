"""What hpcenv overrides in submitit is private there: names, arguments and callers must be as they were."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.auto import auto as submitit_auto
from submitit.core import plugins, submission, utils
from submitit.core.core import Executor as BaseExecutor
from submitit.core.core import InfoWatcher, Job, PicklingExecutor
from submitit.core.job_environment import JobEnvironment, SignalHandler
from submitit.slurm.slurm import SlurmJobEnvironment

import hpcenv
from hpcenv.api.parameters import SUBMITIT
from hpcenv.submission.submitit_executor import ScriptExecutor

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_the_one_that_was_read() -> None:
    assert tuple(int(part) for part in submitit.__version__.split(".")[:2]) == (1, 5)


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (submitit.SlurmExecutor, "_internal_process_submissions", ["self", "delayed_submissions"]),
        (submitit.SlurmExecutor, "_internal_update_parameters", ["self", "kwargs"]),
        (submitit.SlurmExecutor, "_make_submission_file_text", ["self", "command", "uid"]),
        (submitit.SlurmExecutor, "_make_submission_command", ["self", "submission_file_path"]),
        (submitit.SlurmExecutor, "_get_job_id_from_submission_command", ["string"]),
        (submitit.SlurmExecutor, "_valid_parameters", []),
        (submitit.SlurmExecutor, "_equivalence_dict", []),
        (submitit.SlurmExecutor, "_convert_parameters", ["self", "params"]),
        (submitit.AutoExecutor, "_internal_update_parameters", ["self", "kwargs"]),
        (submitit.AutoExecutor, "_typed_parameters", []),
        (Job, "_register_in_watcher", ["self"]),
        (Job, "_get_outcome_and_result", ["self"]),
        (InfoWatcher, "update", ["self"]),
        (InfoWatcher, "is_done", ["self", "job_id", "mode"]),
        (InfoWatcher, "get_info", ["self", "job_id", "mode"]),
        (JobEnvironment, "_handle_signals", ["self", "paths", "submission"]),
        (SlurmJobEnvironment, "_requeue", ["self", "countdown"]),
        (SignalHandler, "checkpoint_and_try_requeue", ["self", "signum", "frame"]),
        (submitit_auto, "_convert_deprecated_args", ["kwargs", "deprecated_args"]),
        (plugins, "_iter_submitit_entrypoints", []),
        (submission, "process_job", ["folder"]),
        (utils, "cloudpickle_dump", ["obj", "filename"]),
        (utils.DelayedSubmission, "set_timeout", ["self", "timeout_min", "max_num_timeout"]),
        (utils.JobPaths, "move_temporary_file", ["self", "tmp_path", "name", "keep_as_symlink"]),
    ],
)
def test_a_method_that_is_overridden_or_called(owner: Any, name: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(owner, name)).parameters) == parameters


def test_every_way_to_submit_goes_through_the_method_that_is_overridden() -> None:
    for name in ("submit", "map_array", "submit_array", "_submit_delayed_batch"):
        assert "self._internal_process_submissions(" in inspect.getsource(getattr(BaseExecutor, name)), name
    assert "self._executor._internal_process_submissions(" in inspect.getsource(submitit.AutoExecutor)
    assert "_make_submission_file_text(" in inspect.getsource(PicklingExecutor._submit_command)


def test_the_constructor_sets_what_the_parent_class_sets(tmp_path: Path) -> None:
    """`ScriptExecutor` leaves out the constructor of SlurmExecutor, which refuses a machine without srun."""
    names = list(inspect.signature(submitit.SlurmExecutor.__init__).parameters)
    assert names == ["self", "folder", "max_num_timeout", "max_pickle_size_gb", "python"]
    assert inspect.getsource(submitit.SlurmExecutor.__init__).count("self.") == 2, "self.python and self.affinity"
    executor = ScriptExecutor(tmp_path)
    assert vars(executor).keys() == {
        *("folder", "parameters", "_delayed_batch", "_allow_implicit_submissions"),
        *("max_num_timeout", "max_pickle_size_gb", "_throttling", "_last_job_submitted", "python"),
    }


def test_every_parameter_of_submitit_is_known() -> None:
    assert submitit.SlurmExecutor._valid_parameters() <= SUBMITIT


# -- the plug-in --------------------------------------------------------------------------


@pytest.fixture
def plugin(plugin_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let submitit find the plug-in of this checkout."""
    monkeypatch.syspath_prepend(plugin_path)
    caches = (plugins._get_plugins, plugins.get_executors, plugins.get_job_environments)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_submitit_finds_the_executor_by_name_and_never_by_itself(plugin: None) -> None:
    executors = plugins.get_executors()
    assert executors["hpcenv"] is hpcenv.Executor
    assert hpcenv.Executor.affinity() == 0
    assert submitit.AutoExecutor.which() != "hpcenv"


def test_the_plug_in_loads_little(plugin_path: Path) -> None:
    """submitit loads it for every AutoExecutor: a program for another cluster must not wait for it."""
    code = "import json, sys, submitit; import hpcenv.api.executor; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert loaded.isdisjoint({"pydantic", "requests", "tomlkit", "hpcenv.submission.plan_job", "hpcenv.runs"})


def test_generic_parameters_and_those_of_hpcenv(tmp_path: Path, plugin: None) -> None:
    auto = submitit.AutoExecutor(tmp_path, cluster="hpcenv", hpcenv_max_num_timeout=7)
    auto.update_parameters(
        timeout_min=5, nodes=2, tasks_per_node=2, gpus_per_node=4, cpus_per_task=3, mem_gb=1.5, name="n",
        stderr_to_stdout=True, hpcenv_partition="p", hpcenv_lock="big", hpcenv_call="rank", slurm_partition="other",
    )  # fmt: skip
    assert auto._executor.max_num_timeout == 7
    assert auto._executor.parameters == {
        "time": 5, "nodes": 2, "ntasks_per_node": 2, "gpus_per_node": 4, "cpus_per_task": 3, "mem": "1536MB",
        "job_name": "n", "stderr_to_stdout": True, "partition": "p", "lock": "big", "call": "rank",
    }  # fmt: skip
    with pytest.raises(NameError, match="hpcenv_partitoin"):
        auto.update_parameters(hpcenv_partitoin="p")


def test_our_auto_executor_takes_the_parameters_of_slurm(tmp_path: Path, plugin: None) -> None:
    auto = hpcenv.AutoExecutor(tmp_path, cluster="slurm", slurm_max_num_timeout=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        auto.update_parameters(
            slurm_partition="p", slurm_time=9, timeout_min=5, qos="q", slurm_array_parallelism=3, slurm_account="a",
            hpcenv_account="b",
        )  # fmt: skip
    assert auto._executor.max_num_timeout == 5
    assert type(auto._executor) is hpcenv.Executor
    assert auto._executor.parameters == {
        "partition": "p", "time": 9, "qos": "q", "array_parallelism": 3, "account": "b",
    }  # fmt: skip
    with pytest.warns(UserWarning, match="Use 'slurm_max_num_timeout' instead"):
        assert hpcenv.AutoExecutor(tmp_path, max_num_timeout=6)._executor.max_num_timeout == 6
    assert type(hpcenv.AutoExecutor(tmp_path, cluster="local")._executor) is submitit.LocalExecutor


PROGRAM = """
    import sys, warnings, submitit
    from submitit.core import plugins
    warnings.simplefilter("ignore")
    if sys.argv[1] == "without":
        found = plugins._iter_submitit_entrypoints
        plugins._iter_submitit_entrypoints = lambda: [e for e in found() if not e.value.startswith("hpcenv")]
    executor = submitit.AutoExecutor(folder="/jobs", cluster="slurm")
    executor.update_parameters(timeout_min=5, partition="gpu", slurm_qos="q", account="a", nodes=2, time=7)
    print(sorted(plugins.get_executors()))
    print(executor._executor._make_submission_file_text("command", "0"))
"""


def test_a_program_for_slurm_makes_the_same_script_with_and_without_hpcenv(fake_slurm: Any, plugin_path: Path) -> None:
    def script(word: str) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), word],
            env={**os.environ, **fake_slurm.environ, "PYTHONPATH": f"{plugin_path}:{ROOT}"}, text=True, capture_output=True, check=True,
        )  # fmt: skip
        names, _, text = done.stdout.partition("\n")
        return names, text

    with_names, with_text = script("with")
    without_names, without_text = script("without")
    assert "hpcenv" in with_names
    assert "hpcenv" not in without_names
    assert with_text == without_text
    for line in ("--partition=gpu", "--qos=q", "--account=a", "--time=7"):
        assert f"#SBATCH {line}\n" in with_text
