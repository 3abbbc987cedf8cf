"""The table of the steps: all that the batch script calls exist, and each one loads only what it needs."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcenv.steps import local
from hpcenv.steps.main import STEPS

ROOT = Path(__file__).resolve().parents[3]
BATCH_SCRIPT = (ROOT / "sbatch_templates" / "job.sbatch").read_text()


@pytest.mark.parametrize("name", STEPS)
def test_each_step_exists_and_takes_what_it_is_given(name):
    step = STEPS[name]
    parameters = list(inspect.signature(step.load()).parameters)
    assert parameters == ["run", "environ", *([] if step.takes == "nothing" else [step.takes])]


def test_the_batch_script_and_local_call_steps_of_the_table():
    words = set(re.findall(r"^.*\b(?:record|run_step|gate) ([a-z-]+)(?= |$)", BATCH_SCRIPT, re.MULTILINE))
    words |= set(re.findall(r'"\$run/code/step.py" ([a-z-]+) "\$run"', BATCH_SCRIPT))
    assert {"begin", "check", "decide", "task", "finish"} < words <= set(STEPS)
    assert set(re.findall(r'\.(?:one|all)\("([a-z-]+)"', inspect.getsource(local))) <= set(STEPS)


def loaded_by(name: str) -> set[str]:
    code = f"import json, sys; from hpcenv.steps.main import STEPS; STEPS[{name!r}].load(); print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    return set(json.loads(done.stdout))


# What is large, and belongs to another step. (`decide` loads most of what compares and judges.)
OTHERS = {
    "begin": {"subprocess", "hpcenv.records.facts", "hpcenv.facts.facts"},
    "check": {"hpcenv.judge.decide", "hpcenv.launch.launch"},
    "task": {"hpcenv.incontainer.probe.loader", "hpcenv.judge.network.rules", "hpcenv.smoke.run"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_step_that_training_waits_for_loads_only_its_own(name):
    loaded = loaded_by(name)
    assert STEPS[name].module in loaded
    assert loaded.isdisjoint(OTHERS[name]), loaded & OTHERS[name]
