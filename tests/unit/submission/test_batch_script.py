"""The batch script: rendered purely, quoted in one place, and valid bash."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.errors import UsageError
from hpcenv.project.severities import resolve
from hpcenv.records.manifest import Environment, Manifest, PreflightOptions, SmokeOptions, StageRequest, StopOptions
from hpcenv.submission import batch_script
from hpcenv.submission.plan import Request, directives_of, render_script

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden"
TEMPLATE = (ROOT / "sbatch_templates" / "job.sbatch").read_text()
HOSTILE = "/data/my dir/$(id) `id` größe#1/runs"


def manifest(run_folder: str, **words: Any) -> Manifest:
    values: dict[str, Any] = {
        "schema": 1, "run": run_folder.rpartition("/")[2], "run_folder": run_folder, "cluster": "slurm", "nodes": 2,
        "nproc_per_node": 8, "gpus_per_node": 8, "cpus_per_task": 0, "backend": "nccl",
        "environment": Environment(kind="host", python="/venv/bin/python"), "script": "/home/alice/train.py",
        "script_sha256": "00", "args": (), "workdir": "/home/alice", "settings": (), "expectations": (), "packages": (),
        "probe_level": "full", "lockfile": "lockfiles/default.lock.toml", "lockfile_sha256": "00", "hpcenv_version": "0.1.0",
        "severities": resolve({}),
    }  # fmt: skip
    return Manifest(**{**values, **words})


CASES = {
    "gpus": (
        manifest("/home/alice/project/runs/gpus"),
        Request(nodes=2, gpus_per_node=8, nproc_per_node=8),
        ("hpcenv", "submit", "train.py", "--nodes", "2", "--gpus", "8", "--name", "gpus"),
    ),
    "gres-everything": (
        manifest("/home/alice/project/runs/all"),
        Request(
            nodes=4, gpus_per_node=4, nproc_per_node=4, cpus_per_task=64, mem="0", time="1-12:00:00", partition="gpu",
            account="project", qos="high", constraint="a100&ib", reservation="paper", exclude="n[07-09]",
            gpu_request="gres",
        ),
        ("hpcenv", "submit", "train.py", "--nodes", "4", "--", "--lr", "3e-4"),
    ),
    "cpu": (
        manifest("/home/alice/project/runs/cpu", nodes=1, gpus_per_node=0, backend="gloo"),
        Request(nodes=1, gpus_per_node=0, nproc_per_node=2),
        ("hpcenv", "submit", "train.py", "--gpus", "0", "--nproc", "2"),
    ),
    "staged": (
        manifest(
            "/home/alice/project/runs/staged",
            environment=Environment(kind="sif", python="python3", sif="/images/a.sif", apptainer="/usr/bin/apptainer"),
            stage=StageRequest(folder="", limit=10**11, sif_sha256="ab" * 32, sif_size=353 * 10**6),
        ),
        Request(nodes=2, gpus_per_node=8, nproc_per_node=8, cpus_per_task=32),
        ("hpcenv", "submit", "train.py", "--nodes", "2", "--gpus", "8", "--stage", "--name", "staged"),
    ),
    # What a careful user types, and every part that a script can have.
    "ordinary": (
        manifest("/home/alice/project/runs/llama-lr3e-4-20261125-181522"),
        Request(
            nodes=2, gpus_per_node=8, nproc_per_node=8, cpus_per_task=64, time="12:00:00", partition="gpu",
            account="project", fingerprint="lock:3f2a9c81d0b4",
        ),
        ("hpcenv", "submit", "train.py", "--nodes", "2", "--gpus", "8", "--time", "12:00:00", "--", "--lr", "3e-4"),
    ),
    "longest": (
        manifest(
            "/home/alice/project/runs/longest",
            nodes=4,
            gpus_per_node=4,
            environment=Environment(kind="sif", python="python3", sif="/images/a.sif", apptainer="/usr/bin/apptainer"),
            stage=StageRequest(folder="", limit=10**11, sif_sha256="ab" * 32, sif_size=353 * 10**6),
            modules=("cray-mpich/8.1", "lumi-aif-singularity-bindings"),
            module_paths=("/appl/local/laifs/modules",),
            unset=("NCCL_NET_GDR_LEVEL",),
            setup=("ulimit -l unlimited", 'export DATA="$SCRATCH/set one"'),
            preflight=PreflightOptions(level="full"),
            smoke=SmokeOptions(),
        ),
        Request(
            nodes=4, gpus_per_node=4, nproc_per_node=4, cpus_per_task=64, spare=1, mem="0", time="1-12:00:00",
            partition="gpu", account="project", qos="high", constraint="a100&ib", reservation="paper",
            exclude="n[07-09]", nodelist="n[01-06]", dependency="afterok:7", gpu_request="gres", comment="paper",
            fingerprint="lock:3f2a9c81d0b4", sbatch={"mail-type": "END", "licenses": "scratch"}, srun={"network": "single_node_vni"},
        ),
        ("hpcenv", "submit", "train.py", "--nodes", "4", "--spare", "1", "--preflight", "full", "--stage"),
    ),
    "verify": (
        manifest("/home/alice/project/runs/verify", script="", script_sha256=""),
        Request(nodes=2, gpus_per_node=8, nproc_per_node=8),
        ("hpcenv", "verify", "--nodes", "2"),
    ),
    "smoke": (
        manifest(
            "/home/alice/project/runs/smoke",
            smoke=SmokeOptions(),
        ),
        Request(nodes=2, gpus_per_node=8, nproc_per_node=8, cpus_per_task=32),
        ("hpcenv", "submit", "train.py", "--nodes", "2", "--gpus", "8", "--preflight", "full", "--name", "smoke"),
    ),
    "hostile": (
        manifest(f"{HOSTILE}/hostile", nodes=1),
        Request(nodes=1, gpus_per_node=1, nproc_per_node=1),
        ("hpcenv", "submit", "it's.py", "--", "new\nline", "$(id)", "\udcff", "größe", "\x1b[31m"),
    ),
}  # fmt: skip


def rendered(name: str) -> str:
    what, request, command = CASES[name]
    return render_script(what, request, python="/shared/hpcenv/bin/python", command=command)


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_as_recorded(name: str) -> None:
    """Whole scripts are reviewed as diffs: HPCENV_UPDATE_GOLDEN=1 pytest writes them anew."""
    path = GOLDEN / f"{name}.sbatch"
    text = rendered(name)
    if os.environ.get("HPCENV_UPDATE_GOLDEN"):
        path.write_text(text)
    recorded = path.read_text()
    diff = difflib.unified_diff(recorded.splitlines(), text.splitlines(), "recorded", "rendered", lineterm="")
    assert text == recorded, "\n".join(diff)


@pytest.mark.parametrize("name", CASES)
def test_bash_reads_the_script(name: str) -> None:
    done = subprocess.run(["bash", "-n"], input=rendered(name), text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", CASES)
def test_shellcheck_has_nothing_to_say(name: str, tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("NOT CHECKED: shellcheck is not on PATH (apt-get install shellcheck)")
    (tmp_path / "job.sbatch").write_text(rendered(name))
    # SC2016 is about `$(id)` in single quotes: exactly what must not expand here. SC1091: files of the run folder.
    done = subprocess.run(
        ["shellcheck", "--exclude=SC2016,SC1091", "job.sbatch"], cwd=tmp_path, text=True, capture_output=True
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_a_script_is_as_long_as_a_user_reads() -> None:
    lines = {name: len(rendered(name).splitlines()) for name in CASES}
    assert max(count for name, count in lines.items() if name != "longest") < 120
    assert lines["ordinary"] <= 110
    assert lines["longest"] <= 150


@pytest.mark.parametrize("name", ["modules.sh", "setup.sh"])
def test_shellcheck_has_nothing_to_say_about_what_the_script_sources(name: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("NOT CHECKED: shellcheck is not on PATH (apt-get install shellcheck)")
    # SC1090: the site's definition of `module`. SC2034, SC2154: variables of the script that sources the file.
    argv = ["shellcheck", "--exclude=SC1090,SC2034,SC2154", str(ROOT / "hpcenv" / "steps" / name)]
    done = subprocess.run(argv, text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_an_unrendered_template_is_bash_too() -> None:
    assert subprocess.run(["bash", "-n"], input=TEMPLATE, text=True).returncode == 0


def test_no_line_of_a_comment_can_become_code() -> None:
    script = rendered("hostile")
    assert "\n$(id)" not in script
    made_by = next(line for line in script.splitlines() if line.startswith("# Made by:"))
    assert "new\\nline" in made_by
    assert "\\x1b" in made_by


# -- holes --------------------------------------------------------------------------------


def test_bashs_own_dollars_stay_alone() -> None:
    text = 'x=@{x}; "$@" ${a[@]} $HOME user@host @(a|b) ${v@Q}'
    assert batch_script.render(text, {"x": "a b"}) == "x='a b'; \"$@\" ${a[@]} $HOME user@host @(a|b) ${v@Q}"


def test_a_hole_without_a_value_and_a_value_without_a_hole_are_refused() -> None:
    with pytest.raises(ValueError, match=r"without a value: \['Run'\]; values without a hole: \['run'\]"):
        batch_script.render("@{Run}", {"run": "x"})


@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_value_arrives_literally(value: str) -> None:
    line = batch_script.render("x=@{x}", {"x": value})
    assert shlex.split(line) == [f"x={value}"]


TWO_PARTS = "one\n#@if stage\nstage @{x}\n#@end\ntwo\n#@if other\nother\n#@end\n"


def test_only_the_parts_that_are_asked_for_are_kept() -> None:
    assert batch_script.render(TWO_PARTS, {}) == "one\ntwo\n"
    assert batch_script.render(TWO_PARTS, {"x": "a b"}, parts=("stage",)) == "one\nstage 'a b'\ntwo\n"
    with pytest.raises(ValueError, match="values without a hole"):
        batch_script.render("one\n", {"x": "1"}, parts=("stage",))


def test_staging_comes_before_the_check_and_only_when_asked_for() -> None:
    script = rendered("staged")
    assert 0 < script.index(" stage-look ") < script.index(" stage-send\n") < script.index(" check ")
    assert "stage-" not in rendered("gpus")
    assert "#@" not in script + rendered("gpus")


# -- #SBATCH lines ------------------------------------------------------------------------


@pytest.mark.parametrize("value", ['a"b', "a'b", "a\\b", "a\nb", "a\x1bb", "a\0b"])
def test_what_sbatchs_parser_would_misread_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="cannot be written into a batch script"):
        batch_script.directives([("output", value)])


def test_blanks_and_hashes_are_quoted() -> None:
    assert batch_script.directives([("chdir", "/a b"), ("output", "/a#b"), ("requeue", None)]).splitlines() == [
        '#SBATCH --chdir="/a b"',
        '#SBATCH --output="/a#b"',
        "#SBATCH --requeue",
    ]


@pytest.mark.parametrize(
    ("request_words", "lines"),
    [
        ({"gpus_per_node": 4, "gpu_type": "a100", "gpu_request": "gres"}, ["gres=gpu:a100:4,nvme:100"]),
        ({"gpus_per_node": 4}, ["gpus-per-node=4", "gres=nvme:100"]),
        ({"gpus_per_node": 0}, ["gres=nvme:100"]),
    ],
)
def test_other_resources_than_gpus_stand_in_one_line_with_those(
    request_words: dict[str, Any], lines: list[str]
) -> None:
    request = Request(nodes=1, nproc_per_node=1, sbatch={"gres": "nvme:100"}, **request_words)
    made = directives_of(manifest("/home/alice/project/runs/one"), request)
    assert [f"{name}={value}" for name, value in made if name in ("gres", "gpus-per-node")] == lines


@pytest.mark.parametrize(
    ("stop", "expedite", "line"),
    [
        (StopOptions(), False, ("requeue", None)),
        (StopOptions(), True, ("requeue", "expedite")),
        (StopOptions(requeue="never"), True, ("no-requeue", None)),
    ],
)
def test_a_job_whose_node_failed_comes_first_where_the_controller_offers_it(
    stop: StopOptions, expedite: bool, line: tuple[str, str | None]
) -> None:
    request = Request(nodes=1, nproc_per_node=1, gpus_per_node=0, expedite=expedite)
    made = directives_of(dataclasses.replace(manifest("/home/alice/project/runs/one"), stop=stop), request)
    assert [one for one in made if "requeue" in one[0]] == [line]
    assert f"#SBATCH --{line[0]}{'=expedite' if line[1] else ''}" in batch_script.directives(made).splitlines()


def test_a_percent_sign_in_the_logs_path_is_no_pattern() -> None:
    assert batch_script.filename_pattern("/100%/%j.log") == "/100%%/%%j.log"


# -- the shape ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "gpus", "nproc", "words"),
    [
        (2, 8, 8, "2 nodes x 8 GPUs = 16 ranks"),
        (1, 1, 1, "1 node x 1 GPU = 1 rank"),
        (2, 8, 2, "2 nodes x 8 GPUs, 2 ranks each = 4 ranks"),
        (3, 0, 4, "3 nodes x no GPU, 4 ranks each = 12 ranks"),
    ],
)
def test_the_shape_is_said_in_words(nodes: int, gpus: int, nproc: int, words: str) -> None:
    assert Request(nodes=nodes, gpus_per_node=gpus, nproc_per_node=nproc).shape == words


def test_the_time_limit_of_the_check_step_leaves_room_for_the_probe() -> None:
    assert "--time=7" in rendered("gpus")


# -- what it does -------------------------------------------------------------------------

# Writes down the step; ends as the variable of its name says.
STEP = """#!/bin/bash
[ "$3" = -c ] && exit 0 # whether this Python starts
name=$3
echo "$name ${5:-}" >> "$CALLS"
[ "$name" = run-tasks ] && exec "${@:5}"
[ "$name" = decide ] && [ -n "${PLAN:-}" ] && mkdir -p "$4/smoke" && touch "$4/smoke/plan.json"
[ "$name" = smoke-judge ] && [ -n "${PAIRS:-}" ] && mkdir -p "$4/smoke/pairs"
variable=END_${name//-/_}
[ "$(grep -c "^$name" "$CALLS")" = 2 ] && [ -n "${END_smoke_judge_later:-}" ] && variable=END_smoke_judge_later
exit "${!variable:-0}"
"""
# Starts the step, and sends what SIGNAL says to the batch script while the step AT runs.
SRUN = """#!/bin/bash
while [ "$1" != "$PYTHON" ]; do shift; done
[ "$4" = "${AT:-}" ] && kill "-$SIGNAL" "$BATCH"
exec "$@"
"""
CODE = ROOT / "hpcenv" / "steps" / "setup.sh"
CHECKED = ["begin", "stage-look", "stage-send", "stage-keep", "check"]
TRAINED = [*CHECKED, "decide", "run-tasks srun", "task"]


@pytest.mark.parametrize(
    ("said", "status", "steps"),
    [
        ({}, 0, [*TRAINED, "finish 0"]),
        ({"task": 7}, 7, [*TRAINED, "finish 7"]),
        ({"check": 1}, 0, [*TRAINED, "finish 0"]),
        ({"decide": 90}, 90, [*CHECKED, "decide", "finish 90"]),
        ({"decide": 137}, 91, [*CHECKED, "decide", "finish 91"]),
        # A step that was asked to stop, in whatever part: why is noted, and the script ends.
        ({"stage-look": 140}, 91, [*CHECKED[:2], "stopped 140", "finish 91"]),
        ({"stage-send": 140}, 91, [*CHECKED[:3], "stopped 140", "finish 91"]),
        ({"stage-keep": 138}, 91, [*CHECKED[:4], "stopped 138", "finish 91"]),
        ({"check": 140}, 91, [*CHECKED, "stopped 140", "finish 91"]),
        ({"decide": 140}, 91, [*CHECKED, "decide", "stopped 140", "finish 91"]),
        # TERM: cancelled; or for no reason that is known, and the gate says what it can.
        ({"check": 143, "stopped": 143}, 143, [*CHECKED, "stopped 143", "finish 143"]),
        ({"check": 143, "stopped": 0, "decide": 91}, 91, [*CHECKED, "stopped 143", "decide", "finish 91"]),
        # The script itself got it.
        ({"AT": "check", "SIGNAL": "USR2"}, 91, [*CHECKED, "stopped 140", "finish 91"]),
        ({"AT": "stage-look", "SIGNAL": "USR1"}, 91, [*CHECKED[:2], "stopped 138", "finish 91"]),
        ({"AT": "check", "SIGNAL": "TERM", "stopped": 143}, 143, [*CHECKED, "stopped 143", "finish 143"]),
        # Of what trains the launch step takes care.
        ({"AT": "task", "SIGNAL": "USR2"}, 0, [*TRAINED, "finish 0"]),
        ({"begin": 100, "former": 0}, 0, ["begin", "former"]),
    ],
)
def test_the_steps_in_their_order(tmp_path: Path, said: dict[str, Any], status: int, steps: list[str]) -> None:
    done, calls = run_script(tmp_path, rendered("staged"), said)
    assert (done.returncode, calls) == (status, steps), done.stderr


def run_script(tmp_path: Path, script: str, said: dict[str, Any]) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    run, calls, python = tmp_path / "run", tmp_path / "calls", tmp_path / "python"
    (run / "code").mkdir(parents=True)
    for name in ("manifest.json", "code/step.py"):
        (run / name).write_text("")
    shutil.copy(CODE, run / "code")
    for path, text in ((python, STEP), (tmp_path / "srun", SRUN)):
        path.write_text(text)
        path.chmod(0o755)
    script = re.sub(r"(?m)^run=.*", f"run={run}; export BATCH=$$", script)
    script = re.sub(r"(?m)^python=.*", f"python={python}", script)
    ends = {f"END_{name.replace('-', '_')}": str(value) for name, value in ({"stopped": 91} | said).items()}
    words = {name: value for name, value in said.items() if name.isupper()}
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(calls), "PYTHON": str(python), **ends, **words},
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done, [line.strip() for line in calls.read_text().splitlines()]


_SMOKED = ["begin", "check", "decide", "smoke"]
_JUDGED = [*_SMOKED, "smoke-judge"]


@pytest.mark.parametrize(
    ("said", "status", "steps"),
    [
        ({}, 0, [*_JUDGED, "run-tasks srun", "task", "finish 0"]),
        ({"smoke-judge": 90}, 90, [*_JUDGED, "finish 90"]),
        ({"smoke-judge": 137}, 91, [*_JUDGED, "finish 91"]),
        ({"PAIRS": "1", "smoke-judge-later": 90}, 90, [*_JUDGED, "smoke-pairs", "smoke-judge", "finish 90"]),
        # A node was asked to stop.
        ({"smoke": 140}, 91, [*_SMOKED, "stopped 140", "finish 91"]),
        ({"PAIRS": "1", "smoke-pairs": 140}, 91, [*_JUDGED, "smoke-pairs", "stopped 140", "finish 91"]),
        # The reason of TERM is unknown: the result is judged.
        (
            {"smoke": 143, "stopped": 0},
            0,
            [*_SMOKED, "stopped 143", "smoke-judge", "run-tasks srun", "task", "finish 0"],
        ),
    ],
)
def test_the_result_of_the_smoke_test_decides_whether_the_training_starts(
    tmp_path: Path, said: dict[str, Any], status: int, steps: list[str]
) -> None:
    done, calls = run_script(tmp_path, rendered("smoke"), {"PLAN": "1", **said})
    assert (done.returncode, calls) == (status, steps), done.stderr


def with_setup(tmp_path: Path, *lines: str, **said: Any) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    what, request, command = CASES["gpus"]
    what = dataclasses.replace(what, setup=lines)
    script = render_script(what, request, python="/shared/hpcenv/bin/python", command=command)
    return run_script(tmp_path, script, said)


def test_the_lines_of_setup_run_once_before_the_check_in_the_shell_of_the_script(tmp_path: Path) -> None:
    lines = ('export A="a b"', "B=$A-$UNSET; export B", f'echo "setup $B" >> {tmp_path}/calls', "ulimit -c 0")
    done, calls = with_setup(tmp_path, *lines)
    assert (done.returncode, done.stderr) == (0, "")
    assert calls == ["begin", "setup a b-", "check", "decide", "run-tasks srun", "task", "finish 0"]


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("false", 1),
        ("(exit 7)", 7),
        ("exit 3", 3),
        ("exit 0", 0),
        ("return 5", 5),
        ("nosuch-command", 127),
        ("if then", 2),
        ("python=/elsewhere", 1),
    ],
)
def test_a_line_of_setup_that_fails_ends_the_job_with_its_own_status_and_reason(
    tmp_path: Path, line: str, status: int
) -> None:
    done, calls = with_setup(tmp_path, "true", line, f"echo later >> {tmp_path}/calls")
    assert (done.returncode, calls) == (94, ["begin", "finish 94"])
    assert f": a line of `setup` ended with status {status}: {line}\nhint: " in done.stderr
    assert "error[setup-failed]: node " in done.stderr


def test_a_line_of_setup_that_succeeds_leaves_the_script_as_it_is(tmp_path: Path) -> None:
    done, calls = with_setup(tmp_path, "set -e; true", "set -u", "set +u", "return 0", "cd /", task=7)
    assert (done.returncode, calls[-1]) == (7, "finish 7"), done.stderr


def test_a_signal_that_ends_a_line_of_setup_is_no_failure_of_the_line(tmp_path: Path) -> None:
    """Slurm sends TERM to all processes of the batch script."""
    done, calls = with_setup(tmp_path, "kill -TERM $$; sh -c 'kill -TERM $$'", stopped=143)
    assert (done.returncode, calls) == (143, ["begin", "stopped 143", "finish 143"])
    assert "setup" not in done.stderr


@pytest.mark.parametrize("missing", ["manifest.json", "code/step.py"])
def test_a_run_folder_that_lost_something_is_named_before_the_first_step(tmp_path: Path, missing: str) -> None:
    run = tmp_path / "run"
    (run / "code").mkdir(parents=True)
    for name in {"manifest.json", "code/step.py"} - {missing}:
        (run / name).write_text("")
    script = re.sub(r"(?m)^run=.*", f"run={run}", rendered("cpu"))
    done = subprocess.run(["bash", "-c", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    first, hint = done.stderr.splitlines()
    assert done.returncode == 91
    assert first.startswith("error[run-folder-not-shared]: node ")
    assert first.endswith(f" cannot read {run}/{missing}")
    assert hint == (
        f"hint: look with `ls {run}` where you submitted: "
        "the file was removed while the job waited, or this node does not see the folder"
    )
