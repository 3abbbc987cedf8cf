"""Fuzz the rendered batch script: run it in bash, and compare what its commands are given with what was meant.

srun and the steps' Python are replaced by programs that write down their arguments: what bash made of the script
is judged by what arrives, not by how it looks. A word that cannot stand in a script may be refused instead.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from hpcenv.errors import UsageError
from hpcenv.project import native_options
from hpcenv.records.manifest import Environment, Manifest
from hpcenv.submission.plan import Request, render_script

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (ROOT / "sbatch_templates" / "job.sbatch").read_text(encoding="utf-8")
LONG = os.environ.get("HPCENV_TEST_LONG") == "1"
EXAMPLES = 3000 if LONG else 60
# 80 s of processor time each in their long form, and many processes: ten minutes beside a busy machine's other work.
pytestmark = pytest.mark.timeout(1800 if LONG else 300)

# What bash, sbatch's own parser and the template's renderer give a meaning to.
PIECES = (
    *("$(touch canary)", "`touch canary`", ";touch canary;", "&touch canary&", "|touch canary", "\ntouch canary\n"),
    *("'", '"', "\\", "\\'", "$", "${IFS}", "$HOME", "$'\\n'", "<(touch canary)", ">canary", "canary", "*", "?", "~"),
    *("#", "\n#SBATCH --wrap=touch", "#SBATCH", "%j", "%%", "@{run}", "@{", "}", "#@if stage\n", "#@end\n", "!!", "-"),
    *(" ", "\t", "\n", "\r", "größe", "\u2028", "\u202e", "\x1b[31m", "\x07", "a", "b", "--", "=", ",", "(", ")", "[", "]"),
)  # fmt: skip
WORDS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join)
# Names and values of options that are passed on: --sbatch NAME[=VALUE] and --srun NAME[=VALUE].
NAMES = st.sampled_from(("comment", "mail-type", "cpu-bind", "output", "outp", "export", "kill-on-bad-exit", "label"))
VALUES = st.one_of(st.none(), WORDS, st.sampled_from(("END", "a b", "x#y", "none")))
NUMBERS = itertools.count()

RECORD = """#!/bin/bash
printf '%s\\0' {name} "$@" >>"$HPCENV_FUZZ_RECORD"
printf 'END OF CALL\\0' >>"$HPCENV_FUZZ_RECORD"
exit 0
"""


@pytest.fixture(scope="module")
def place() -> Any:
    with tempfile.TemporaryDirectory(prefix="hpcenv-script-") as folder:
        tools = Path(folder) / "bin"
        tools.mkdir()
        for name in ("srun", "touch", "scontrol", "sbatch", "scancel"):
            (tools / name).write_text(RECORD.format(name=name))
            (tools / name).chmod(0o755)
        yield Path(folder)


def execute(place: Path, script: str) -> list[list[str]]:
    """Run a batch script; return what each command was given, its name first."""
    record = place / "record"
    record.write_bytes(b"")
    (place / "job.sbatch").write_bytes(os.fsencode(script))
    done = subprocess.run(
        ["/bin/bash", str(place / "job.sbatch")],
        cwd=place,
        env={"PATH": f"{place / 'bin'}:/usr/bin:/bin", "HPCENV_FUZZ_RECORD": str(record), "SLURM_JOB_ID": "1"},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode in range(128), done.stderr
    calls = os.fsdecode(record.read_bytes()).split("END OF CALL\0")
    return [call.split("\0")[:-1] for call in calls if call]


def directives(script: str) -> list[str]:
    """Return the names of the options that sbatch would read: up to the first line that is no comment."""
    head = itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), script.split("\n"))
    return [m[1] for line in head if (m := re.match(r"#SBATCH\s+--([a-z-]+)", line))]


KNOWN = set(
    "job-name nodes ntasks-per-node cpus-per-task mem time partition account qos constraint reservation exclude nodelist "
    "dependency gpus-per-node gres chdir output open-mode export requeue no-requeue wait-all-nodes signal array".split()
)  # fmt: skip


def accepted(program: str, name: str, value: str | None) -> dict[str, str | None]:
    """The option, where it may be passed on."""
    try:
        native_options.check(program, name, value)
    except ValueError:
        return {}
    event(f"{program} gets an option")
    return {name: value}


COMMON = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.generate, Phase.reuse, Phase.explicit, Phase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@COMMON
@given(option=st.one_of(NAMES, WORDS), passed=VALUES)
def test_an_option_that_is_passed_on_arrives_or_is_refused(place: Path, option: str, passed: str | None) -> None:
    render_and_run(place, "r", "f", "a", "v", "python3", option, passed)


@COMMON
@given(
    name=WORDS, folder=WORDS, argument=WORDS, value=WORDS, python=WORDS, option=st.one_of(NAMES, WORDS), passed=VALUES
)
def test_what_is_given_arrives_or_is_refused(
    place: Path, name: str, folder: str, argument: str, value: str, python: str, option: str, passed: str | None
) -> None:
    render_and_run(place, name, folder, argument, value, python, option, passed)


def render_and_run(
    place: Path, name: str, folder: str, argument: str, value: str, python: str, option: str, passed: str | None
) -> None:
    base = place / f"{next(NUMBERS)}"
    run_folder = f"{base}/runs/{folder.replace('/', '_')}/run"
    interpreter = f"{base}/bin/{python.replace('/', '_')}"
    manifest = Manifest(
        schema=1, run=name, run_folder=run_folder, cluster="slurm", nodes=2, nproc_per_node=2, gpus_per_node=0,
        cpus_per_task=0, backend="gloo", environment=Environment(kind="host", python="/venv/bin/python"),
        script=f"/home/{argument}", script_sha256="00", args=(argument, value), workdir="/", settings=(),
        expectations=(), packages=(), probe_level="full", lockfile=value, lockfile_sha256="00", hpcenv_version="0.1.0",
    )  # fmt: skip
    native = {program: accepted(program, option, passed) for program in ("sbatch", "srun")}
    request = Request(
        nodes=2, gpus_per_node=0, nproc_per_node=2, partition=value if len(value) < 20 else None,
        sbatch=native["sbatch"], srun=native["srun"],
    )  # fmt: skip
    try:
        script = render_script(
            manifest, request, python=interpreter, command=("hpcenv", "submit", argument, "--", value)
        )
    except UsageError:
        event("refused")
        return
    event("rendered")
    Path(run_folder).mkdir(parents=True)
    Path(run_folder, "manifest.json").write_text("{}")
    Path(run_folder, "code").mkdir(exist_ok=True)
    Path(run_folder, "code", "step.py").write_text("")
    Path(interpreter).parent.mkdir()
    Path(interpreter).write_text(RECORD.format(name="step"))
    Path(interpreter).chmod(0o755)
    assert set(directives(script)) <= KNOWN | set(native["sbatch"])
    assert len(set(directives(script))) == len(directives(script))
    calls = execute(place, script)
    assert [call for call in calls if call[0] == "touch"] == []
    assert not (place / "canary").exists()
    steps = [call[1:] for call in calls if call[0] == "step"]
    assert ["-I", f"{run_folder}/code/step.py", "begin", run_folder] in steps
    assert [step for step in steps if step[1:2] == ["-c"] or step[3:4] == [run_folder]] == steps
    # The batch script starts srun for the check; the step run-tasks starts it for the tasks, with the words it is given.
    sruns = [call for call in calls if call[0] == "srun"]
    sruns += [step[4:] for step in steps if step[2] == "run-tasks"]
    assert [call[call.index(interpreter) :][3:5] for call in sruns] == [["check", run_folder], ["task", run_folder]]
    given_to_srun = [call[1 : call.index(interpreter)] for call in sruns]
    assert [words[-1] for words in given_to_srun] == [
        "--job-name=check", *(native_options.options_of(native["srun"]) or ["--job-name=launch"]),
    ]  # fmt: skip


def test_a_hole_that_is_not_quoted_would_be_found(place: Path) -> None:
    """The fuzzer's own test: a template that forgets its quotes is caught."""
    broken = TEMPLATE.replace("set -u\n", "set -u\neval echo $run\n", 1).replace(
        "run=@{run_folder}", "run=@{run_folder}"
    )
    run_folder = f"{place}/own/$(touch canary)"
    script = broken.replace("eval echo $run", f"eval echo {run_folder}")
    Path(run_folder).mkdir(parents=True)
    calls = execute(place, re.sub(r"@\{[a-z_-]+\}", "x", script))
    assert ["touch", "canary"] in calls
