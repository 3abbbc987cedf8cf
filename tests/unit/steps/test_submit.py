"""Planning and submitting: what is refused and with which code, and that nothing half-made stays."""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from hpcenv import wire
from hpcenv.errors import HpcenvError, ToolMissing
from hpcenv.model import lockfile as lock_model
from hpcenv.model.plan import Plan
from hpcenv.steps.plan import plan_job
from hpcenv.steps.request import Asked, Surroundings
from hpcenv.steps.runs import find_run
from hpcenv.steps.submit import copy_code, submit
from hpcenv.steps.workspace import open_workspace

Make = Callable[..., Plan]


def around(project: Path, environ: Mapping[str, str]) -> Surroundings:
    command = ("hpcenv", "submit", "train.py")
    return Surroundings(environ=environ, cwd=project, now=time.localtime(0), token="beef", command=command)


@pytest.fixture
def plan(project: Path, fake_slurm: Any) -> Make:
    """Plan a run of the tiny project on the fake cluster; tests lie in /tmp, hence assume_shared."""

    def make(script: str = "train.py", environ: Mapping[str, str] | None = None, **words: Any) -> Plan:
        asked = Asked(script=script, **{"nproc": 1, "assume_shared": True, "run": "a", **words})
        return plan_job(open_workspace(project), asked, around(project, {**fake_slurm.environ, **(environ or {})}))

    return make


def refused(make: Callable[[], Any], code: str) -> HpcenvError:
    with pytest.raises(HpcenvError) as caught:
        make()
    assert caught.value.code == code, caught.value
    return caught.value


def edit_lockfile(project: Path, table: str, key: str, value: str) -> None:
    """Change a lockfile as if another environment had been locked."""
    path = project / "lockfiles" / "default.lock.toml"
    data = tomlkit.parse(path.read_text()).unwrap()
    data[table][key] = value
    data["fingerprint"] = lock_model.fingerprint(data)
    path.write_text(tomlkit.dumps(data))


# -- refusals: the script -----------------------------------------------------------------


def test_a_missing_script(plan: Make, project: Path) -> None:
    error = refused(lambda: plan("nosuch.py"), "script-unusable")
    assert error.what == "there is no script `nosuch.py`"
    assert error.why == f"looked for {project}/nosuch.py"


def test_a_script_that_is_a_folder(plan: Make, project: Path) -> None:
    (project / "folder.py").mkdir()
    assert refused(lambda: plan("folder.py"), "script-unusable").what == "`folder.py` is not a file"


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"def f(:\n", "line 1: invalid syntax"), (b"x = 1\n  y = 2\n", "line 2: unexpected indent"), (b"\xff\xfe\x00", ""), (b"#!/bin/bash\necho hi\n", "line 2: ")],
    ids=["typo", "indent", "binary", "shell"],
)  # fmt: skip
def test_a_script_that_does_not_compile(plan: Make, project: Path, content: bytes, why: str) -> None:
    (project / "bad.py").write_bytes(content)
    error = refused(lambda: plan("bad.py"), "script-unusable")
    assert error.what == "the script `bad.py` does not compile"
    assert why in str(error.why)


def test_a_script_for_a_newer_python_than_hpcenvs_is_not_refused(plan: Make, project: Path) -> None:
    edit_lockfile(project, "python", "version", "3.99.1")
    (project / "new.py").write_text("frobnicate match await:\n")
    note, in_place = plan("new.py").notes
    assert in_place.endswith(f"{project} is not under git")
    assert "line 1" in note
    assert "may be Python 3.99.1" in note


def test_a_warning_of_the_compiler_is_no_refusal(plan: Make, project: Path) -> None:
    (project / "escape.py").write_text("x = '\\d'\n")
    assert not [note for note in plan("escape.py").notes if "escape.py" in note]


# -- refusals: words ----------------------------------------------------------------------


def test_how_many_ranks_must_be_said(plan: Make) -> None:
    error = refused(lambda: plan(nproc=None), "usage")
    assert error.what == "how many ranks per node?"
    assert "--gpus" in str(error.hint)


@pytest.mark.parametrize(
    ("words", "environ", "why"),
    [
        ({"time": "soon"}, {}, "(from --time)"),
        ({"partition": "a b"}, {}, "`partition` = 'a b': must be one word without blanks, quotes or backslashes (from --partition)"),
        ({"partition": ""}, {}, "(from --partition)"),
        ({}, {"SBATCH_TIMELIMIT": "x"}, "(from SBATCH_TIMELIMIT)"),
        ({"nodes": 0}, {}, "`nodes` = 0: must be at least 1 (from --nodes)"),
    ],
)  # fmt: skip
def test_a_value_that_slurm_would_misread_names_its_origin(plan: Make, words: Any, environ: Any, why: str) -> None:
    assert why in str(refused(lambda: plan(environ=environ, **words), "usage").why)


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", "a b", "latest", "größe", "x" * 101, "a\nb", "a\n"])
def test_a_name_that_cannot_be_a_runs(plan: Make, name: str) -> None:
    if name == "":
        assert plan(run=name).manifest.run.startswith("train-")
        return
    assert "is not a run name" in refused(lambda: plan(run=name), "usage").what


@pytest.mark.parametrize("folder", ["a'b", 'a"b', "a\\b", "a\nb", "100%", "%j"])
def test_a_folder_that_slurm_would_misread(plan: Make, folder: str) -> None:
    error = refused(lambda: plan(runs=folder), "usage")
    assert "--runs DIR" in str(error.hint)


@pytest.mark.parametrize("name", ["A B", "1A", "", "Ü", "A\n"])
def test_a_variable_that_cannot_be_set(plan: Make, name: str) -> None:
    assert "is not a variable name" in refused(lambda: plan(env={name: "x"}), "usage").what


@pytest.mark.parametrize("argument", ["a\0b", "\ud800"])
def test_an_argument_that_no_program_can_be_given(plan: Make, argument: str) -> None:
    assert "cannot be passed to a program" in refused(lambda: plan(args=(argument,)), "usage").what


@pytest.mark.parametrize("name", ["../x", "", ".x", "a\nb"])
def test_a_lockfile_name_that_leads_elsewhere(plan: Make, name: str) -> None:
    assert "is not a lockfile name" in refused(lambda: plan(lock=name), "usage").what


# -- refusals: project, lockfile, environment ---------------------------------------------


def test_no_lockfile(plan: Make) -> None:
    assert refused(lambda: plan(lock="paper"), "lockfile-missing").hint == "hpcenv lock --name paper"


@pytest.mark.parametrize(
    ("content", "code"),
    [("schema = 1\n[", "lockfile-invalid"), ("schema = 'x'\n", "lockfile-invalid"), ("schema = 2\n", "lockfile-newer")],
)
def test_a_lockfile_that_cannot_be_used(plan: Make, project: Path, content: str, code: str) -> None:
    (project / "lockfiles" / "default.lock.toml").write_text(content)
    refused(plan, code)


def test_a_python_that_is_gone(plan: Make, project: Path) -> None:
    (project / "hpcenv.toml").write_text('image = "host"\npython = "."\n')
    edit_lockfile(project, "asked", "python", ".")
    error = refused(plan, "spec-invalid")
    assert "is not an executable Python" in error.what
    assert f"`python` in {project}/hpcenv.toml" in str(error.why)


def test_a_bind_source_that_is_not_there(plan: Make, project: Path) -> None:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write('[[bind]]\nsource = "/no/such/data"\n')
    error = refused(plan, "spec-invalid")
    assert error.what == "bind source `/no/such/data` does not exist"
    assert error.why == f"[[bind]] in {project}/hpcenv.toml"


def test_a_run_folder_that_nodes_cannot_see(plan: Make) -> None:
    error = refused(lambda: plan(assume_shared=False), "run-folder-not-shared")
    assert "local to" in str(error.why)
    assert "--assume-shared" in str(error.hint)


@pytest.mark.parametrize("what", ["folder", "file", "dangling link"])
def test_a_run_folder_that_is_in_the_way(plan: Make, project: Path, what: str) -> None:
    place = project / "runs" / "a"
    place.parent.mkdir()
    {"folder": place.mkdir, "file": place.touch, "dangling link": lambda: place.symlink_to("nowhere")}[what]()
    refused(plan, "would-overwrite")
    assert os.path.lexists(place)


@pytest.mark.parametrize(
    ("text", "why"), [("@{nosuch}", "@{nosuch} is unknown"), (None, "No such file"), (b"\xff", "utf-8")]
)
def test_a_template_that_does_not_fit(plan: Make, project: Path, text: Any, why: str) -> None:
    if text is not None:
        (project / "my.sbatch").write_bytes(text if isinstance(text, bytes) else text.encode())
    error = refused(lambda: plan(template="my.sbatch"), "usage")
    assert why in str(error.why) or "there is no template" in error.what


def test_emulated_nodes_have_no_gpus(plan: Make) -> None:
    refused(lambda: plan(cluster="local", nodes=2, gpus=1), "usage")


# -- plans --------------------------------------------------------------------------------


def test_a_plan_touches_nothing(plan: Make, project: Path) -> None:
    before = sorted(project.rglob("*"))
    plan()
    assert sorted(project.rglob("*")) == before


def test_a_flag_wins_over_the_file_and_the_file_over_sbatchs_variables(plan: Make, project: Path) -> None:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write('[submit]\npartition = "file"\ntime = "10"\n')
    made = plan(
        partition="flag",
        environ={"SBATCH_PARTITION": "v", "SBATCH_TIMELIMIT": "20", "SBATCH_ACCOUNT": "acc", "SBATCH_EXPORT": "NONE"},
    )
    assert (made.request.partition, made.request.time, made.request.account) == ("flag", "10", "acc")
    assert set(made.asked) == {
        "partition = flag (--partition)",
        f"time = 10 ([submit] in {project}/hpcenv.toml)",
        "account = acc (SBATCH_ACCOUNT)",
    }
    assert "account = acc comes from SBATCH_ACCOUNT" in made.notes
    assert "left out, they would change the job unseen: SBATCH_EXPORT" in made.notes


def test_zero_gpus_on_the_command_line_win_over_the_file(plan: Make, project: Path) -> None:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write("[submit]\ngpus = 8\n")
    made = plan(gpus=0)
    assert made.request.gpus_per_node == 0
    assert "--gpus-per-node" not in made.script


def test_hostile_paths_and_arguments_are_carried_literally(plan: Make, project: Path) -> None:
    folder = project / "my dir $(id) größe"
    folder.mkdir()
    script = folder / 'it\'s "new"\nline %j.py'
    script.write_text("")
    arguments = ("a b", "$(id)", "new\nline", "-x", "--", "", "\udcff", "größe", "'\"")
    made = plan(str(script), args=arguments, runs=str(folder), env={"A": "b=c\n$(id)"})
    again = wire.loads(wire.Manifest, wire.dumps(made.manifest), origin="test")
    assert (again.args, again.script) == (arguments, str(script))
    assert [(s.name, s.value, s.origin) for s in again.settings] == [("A", "b=c\n$(id)", "--env")]
    assert subprocess.run(["bash", "-n"], input=made.script, text=True).returncode == 0
    assert f'#SBATCH --chdir="{folder}/a"' in made.script


def test_without_sbatch_what_only_slurm_can_give_is_refused(plan: Make) -> None:
    """Nobody typed `--cluster local`: the missing sbatch is what has to be said."""
    for asked in ({"partition": "gpu"}, {"nodes": 2, "gpus": 8}):
        with pytest.raises(ToolMissing) as caught:
            plan(environ={"PATH": "/usr/bin:/bin"}, **asked)
        assert caught.value.what == "`sbatch` is not on PATH"
        assert "only be had from Slurm" in str(caught.value.why)


def test_without_sbatch_the_run_is_on_this_machine_and_says_so(plan: Make, project: Path) -> None:
    spec = project / "hpcenv.toml"
    spec.write_text(spec.read_text() + '[submit]\npartition = "gpu"\n')
    made = plan(environ={"PATH": "/usr/bin:/bin"})
    assert made.manifest.cluster == "local"
    assert made.script == ""
    assert "there is no sbatch on PATH: the run is on this machine (--cluster local)" in made.notes
    assert f"without Slurm nothing comes of partition = gpu ([submit] in {spec})" in made.notes


def test_a_template_of_the_project_is_used_and_named(plan: Make, project: Path) -> None:
    own = project / "sbatch_templates" / "job.sbatch"
    own.parent.mkdir()
    source = Path(__file__).resolve().parents[3] / "sbatch_templates" / "job.sbatch"
    own.write_text(source.read_text() + "# ours\n")
    made = plan()
    assert made.script.endswith("# ours\n")
    assert f"the batch script is made from {own}" in made.notes


# -- submitting ---------------------------------------------------------------------------


def test_what_submit_writes_is_what_the_plan_said(plan: Make, project: Path, fake_slurm: Any) -> None:
    made = plan()
    result = submit(made, around(project, fake_slurm.environ))
    run = wire.RunFolder(result.run_folder)
    assert run.script.read_text() == made.script == fake_slurm.calls("sbatch")[0].script
    assert run.manifest.read_text() == wire.dumps(made.manifest)
    assert run.lockfile.read_text() == made.lockfile_text
    assert find_run(project, None).submission.job_id == "4242"
    assert find_run(project, "4242").manifest.run == "a"


def test_the_code_in_the_run_folder_runs_alone(plan: Make, project: Path, fake_slurm: Any) -> None:
    result = submit(plan(), around(project, fake_slurm.environ))
    code = result.run_folder / "code"
    for path in code.rglob("*.py"):
        ast.parse(path.read_bytes())
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(code / "step.py"), "check", str(result.run_folder)],
        capture_output=True,
        text=True,
        env={},
    )
    assert done.returncode == 91, done.stderr
    assert "does not run inside a Slurm job" in done.stderr


def test_a_refused_job_leaves_nothing_and_touches_nothing_else(plan: Make, project: Path, fake_slurm: Any) -> None:
    other = project / "runs" / "other"
    other.mkdir(parents=True)
    fake_slurm.replays("sbatch", "sbatch-nosuch-partition")
    error = refused(lambda: submit(plan(partition="nosuch"), around(project, fake_slurm.environ)), "submit-rejected")
    assert "asked for partition = nosuch (--partition)" in str(error.why)
    assert [path.name for path in (project / "runs").iterdir()] == ["other"]
    assert fake_slurm.calls("scancel") == []


def test_a_job_that_got_queued_without_an_answer_is_cancelled(plan: Make, project: Path, fake_slurm: Any) -> None:
    fake_slurm.answers("sbatch", err="sbatch: error: Socket timed out on send/recv operation\n", status=1)
    fake_slurm.answers("squeue", f"6|PENDING|/elsewhere/a\n7|PENDING|{project}/runs/a\n")
    refused(lambda: submit(plan(), around(project, fake_slurm.environ)), "submit-uncertain")
    assert [call.argv for call in fake_slurm.calls("scancel")] == [("7",)]
    assert list((project / "runs").iterdir()) == []


def test_if_nobody_can_tell_the_folder_is_kept_and_named(plan: Make, project: Path, fake_slurm: Any) -> None:
    fake_slurm.answers("sbatch", "queued, I think\n")
    fake_slurm.answers("squeue", err="Unable to contact slurm controller\n", status=1)
    error = refused(lambda: submit(plan(), around(project, fake_slurm.environ)), "submit-uncertain")
    assert "`squeue --name=a` lists it if it is" in str(error.hint)
    assert (project / "runs" / "a" / "manifest.json").exists()
    assert refused(lambda: find_run(project, "a"), "run-not-found")
    assert refused(lambda: find_run(project, str(project / "runs" / "a")), "run-not-found").what.endswith(
        "was not submitted"
    )


def test_without_srun_nothing_is_left(plan: Make, project: Path, fake_slurm: Any, tmp_path: Path) -> None:
    made, tools = plan(), tmp_path / "bin"
    tools.mkdir()
    (tools / "sbatch").symlink_to("/bin/true")
    environ = {**fake_slurm.environ, "PATH": str(tools)}
    refused(lambda: submit(made, around(project, environ)), "tool-missing")
    assert list((project / "runs").iterdir()) == []


def test_two_submissions_of_one_name_do_not_mix(plan: Make, project: Path, fake_slurm: Any) -> None:
    first, second = plan(), plan()
    submit(first, around(project, fake_slurm.environ))
    refused(lambda: submit(second, around(project, fake_slurm.environ)), "would-overwrite")
    assert find_run(project, "a").submission.job_id == "4242"
    assert len(fake_slurm.calls("sbatch")) == 1


# -- --locked and --frozen ----------------------------------------------------------------


def test_frozen_takes_a_stale_lockfile(plan: Make, project: Path) -> None:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write('[policy]\n"system.glibc" = "must"\n')
    refused(plan, "lockfile-stale")
    assert plan(frozen=True).manifest.lockfile == "lockfiles/default.lock.toml"


def test_locked_looks_into_the_environment_first(plan: Make, project: Path, python_without_torch: Path) -> None:
    assert plan(locked=True).manifest.run == "a"
    (project / "hpcenv.toml").write_text(f'image = "host"\npython = "{python_without_torch}"\n')
    edit_lockfile(project, "asked", "python", str(python_without_torch))
    assert plan().manifest.run == "a", "hpcenv.toml and lockfile agree, so only the nodes would see it"
    error = refused(lambda: plan(locked=True), "lockfile-stale")
    assert "environment-differs: locked packages.torch 2.13.0+cpu, now absent" in str(error.why)


def test_locked_and_frozen_contradict_each_other(plan: Make) -> None:
    assert "contradict" in refused(lambda: plan(locked=True, frozen=True), "usage").what


def test_both_words_stand_on_the_command_line(hpcenv: Any, project: Path) -> None:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write('[policy]\n"system.glibc" = "must"\n')
    words = ("submit", "train.py", "--nproc", "1", "--cluster", "local", "--dry-run")
    assert hpcenv(*words, cwd=project).status == 7
    assert hpcenv(*words, "--locked", cwd=project).status == 7
    assert hpcenv(*words, "--frozen", cwd=project).status == 0
    assert hpcenv(*words, "--locked", "--frozen", cwd=project).status == 2


def test_a_manifest_without_a_script_only_checks(plan: Make, fake_slurm: Any) -> None:
    asked = Asked(script=None, nproc=1, assume_shared=True, run="v")
    project = Path(plan().manifest.workdir)
    made = plan_job(open_workspace(project), asked, around(project, fake_slurm.environ))
    assert (made.manifest.script, made.manifest.script_sha256) == ("", "")
    assert "\nlaunches=no" in made.script
    assert "\nlaunches=yes" in plan().script


def test_the_copy_of_the_lockfile_says_code_and_command(plan: Make, project: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    text = tomlkit.parse(plan(args=("--lr", "\udcff"), env={"A": "b"}).lockfile_text).unwrap()
    assert text["run"]["argv"] == [str(project / "train.py"), "--lr", "\\xff"]
    assert (text["run"]["nodes"], text["run"]["env"]) == (1, {"A": "b"})
    assert text["code"]["script-sha256"] == hashlib.sha256((project / "train.py").read_bytes()).hexdigest()
    assert text["fingerprint"] == lock_model.fingerprint(text)


# -- staging ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"stage": True}, "there is no SIF to stage"),
        ({"stage_data": ("data",)}, "there is no SIF to stage"),
        ({"stage_dir": "/local"}, "nothing is staged"),
        ({"stage_limit": 10}, "nothing is staged"),
    ],
)
def test_staging_needs_something_to_stage(plan: Make, words: Any, says: str) -> None:
    assert says in refused(lambda: plan(**words), "usage").what


def test_what_python_has_compiled_of_the_node_code_comes_along(tmp_path: Path) -> None:
    """A node with this Python compiles nothing; a source that was changed since counts, not what was compiled."""
    run = wire.RunFolder(tmp_path / "run")
    importing = (
        "import sys; sys.path.insert(0, sys.argv[1]); import hpcenv.node.main, hpcenv.node.launch, hpcenv.version"
    )

    def loaded(folder: Path) -> list[str]:
        argv = [sys.executable, "-I", "-v", "-c", importing, str(folder)]
        said = subprocess.run(argv, capture_output=True, text=True, check=True).stderr.splitlines()
        return [line for line in said if f"{folder}/hpcenv/" in line]

    loaded(Path(wire.__file__).parents[1])  # so that it is compiled
    copy_code(run)
    assert len([line for line in loaded(run.code) if " matches " in line]) > 15
    assert [line for line in loaded(run.code) if line.startswith("# created")] == []
    (run.code / "hpcenv" / "version.py").write_text("VERSION = 'of another file'\n")
    assert [line for line in loaded(run.code) if line.startswith("# created")] != []
