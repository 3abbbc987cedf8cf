"""Planning and submitting: what is refused and with which code, and that nothing half-made stays."""

from __future__ import annotations

import ast
import compileall
import errno
import hashlib
import io
import os
import py_compile
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from hpcenv.api.submit import plan_job as plan_job_in_python
from hpcenv.errors import FileUnusable, HpcenvError, ToolMissing
from hpcenv.project import lockfile as lock_model
from hpcenv.project.context import Context
from hpcenv.project.workspace import open_workspace
from hpcenv.records.codec import decode_record, encode_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.severities import Severities
from hpcenv.runs.find import find_run
from hpcenv.submission import node_code
from hpcenv.submission.node_code import copy_node_code, package_folder
from hpcenv.submission.plan import Plan
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions
from hpcenv.submission.submit import submit
from tests.lock_world import edit_lockfile

Make = Callable[..., Plan]


def context(project: Path, environ: Mapping[str, str]) -> Context:
    command = ("hpcenv", "submit", "train.py")
    return Context(environ=environ, cwd=project, now=time.localtime(0), token="beef", command=command)


@pytest.fixture
def plan(project: Path, fake_slurm: Any) -> Make:
    """Plan a run of the tiny project on the fake cluster; tests lie in /tmp, hence assume_shared."""

    def make(script: str = "train.py", environ: Mapping[str, str] | None = None, **words: Any) -> Plan:
        options = SubmitOptions(script=script, **{"nproc": 1, "assume_shared": True, "name": "a", **words})
        return plan_job(open_workspace(project), options, context(project, {**fake_slurm.environ, **(environ or {})}))

    return make


def refused(make: Callable[[], Any], code: str) -> HpcenvError:
    with pytest.raises(HpcenvError) as caught:
        make()
    assert caught.value.code == code, caught.value
    return caught.value


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
    [(b"def f(:\n", "line 1: invalid syntax"), (b"x = 1\n  y = 2\n", "line 2: unexpected indent"), (b"\xff\xfe\x00", "")],
    ids=["typo", "indent", "binary"],
)  # fmt: skip
def test_a_script_that_does_not_compile(plan: Make, project: Path, content: bytes, why: str) -> None:
    (project / "bad.py").write_bytes(content)
    error = refused(lambda: plan("bad.py"), "script-unusable")
    assert error.what == "the script `bad.py` does not compile"
    assert why in str(error.why)


def test_a_script_for_a_newer_python_than_hpcenvs_is_not_refused(plan: Make, project: Path) -> None:
    edit_lockfile(project, "python", "version", "3.99.1")
    (project / "new.py").write_text("frobnicate match await:\n")
    note, _one_cpu = plan("new.py").notes
    assert "line 1" in note
    assert "may be Python 3.99.1" in note


def test_a_warning_of_the_compiler_is_no_refusal(plan: Make, project: Path) -> None:
    (project / "escape.py").write_text("x = '\\d'\n")
    assert not [note for note in plan("escape.py").notes if "escape.py" in note]


def test_torchrun_without_torch_is_refused_before_the_queue(plan: Make, project: Path) -> None:
    edit_lockfile(project, "torch", "version", "absent")
    error = refused(plan, "submit-rejected")
    assert error.what == "the locked environment has no torch, and torchrun is a program of torch"
    assert "--launcher none" in str(error.hint)
    for launcher in ("none", "srun"):
        assert plan(launcher=launcher).manifest.launch.launcher == launcher


def test_a_program_that_starts_ranks_is_not_started_by_each_rank(plan: Make) -> None:
    error = refused(lambda: plan("torchrun", entry=True), "script-unusable")
    assert error.what == "`torchrun` starts the ranks, and so does torchrun, the default launcher"
    assert "--launcher none" in str(error.hint)
    looked_for = refused(lambda: plan("torchrun", entry=True, launcher="none"), "script-unusable")
    assert looked_for.what == "the environment has no console script `torchrun`"


# -- refusals: words ----------------------------------------------------------------------


def test_how_many_ranks_must_be_said(plan: Make) -> None:
    error = refused(lambda: plan(nproc=None), "usage")
    assert error.what == "the number of ranks per node is not known"
    assert "--gpus" in str(error.hint)
    assert error.why == "neither --gpus nor --nproc is given, here or in [submit] of hpcenv.toml"
    without_gpus = refused(lambda: plan(nproc=None, gpus=0), "usage").why
    assert without_gpus == (
        "there is a rank for each GPU, --gpus is 0, and no --nproc is given, here or in [submit] of hpcenv.toml"
    )


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
        assert plan(name=name).manifest.run.startswith("train-")
        return
    assert "is not a run name" in refused(lambda: plan(name=name), "usage").what


@pytest.mark.parametrize("folder", ["a'b", 'a"b', "a\\b", "a\nb", "100%", "%j"])
def test_a_folder_that_slurm_would_misread(plan: Make, folder: str) -> None:
    error = refused(lambda: plan(runs_dir=folder), "usage")
    assert "--runs-dir DIR" in str(error.hint)


@pytest.mark.parametrize("name", ["A B", "1A", "", "Ü", "A\n"])
def test_a_variable_that_cannot_be_set(plan: Make, name: str) -> None:
    assert "is not a variable name (from --env)" in str(refused(lambda: plan(env={name: "x"}), "usage").why)


@pytest.mark.parametrize("argument", ["a\0b", "\ud800"])
def test_an_argument_that_no_program_can_be_given(plan: Make, argument: str) -> None:
    assert "cannot be passed to a program" in refused(lambda: plan(args=(argument,)), "usage").what


@pytest.mark.parametrize("name", ["../x", "", ".x", "a\nb"])
def test_a_lockfile_name_that_leads_elsewhere(plan: Make, name: str) -> None:
    assert "is not a lockfile name" in refused(lambda: plan(lock=name), "usage").what


def test_the_path_of_a_lockfile_leads_to_its_name(plan: Make) -> None:
    assert refused(lambda: plan(lock="lockfiles/other.lock.toml"), "usage").hint == "--lock other"


# -- refusals: project, lockfile, environment ---------------------------------------------


def test_no_lockfile(plan: Make) -> None:
    assert refused(lambda: plan(lock="paper"), "lockfile-missing").hint == "hpcenv lock --lock paper"


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
    assert "`assume-shared = true` under [submit]" in str(error.hint)


@pytest.mark.parametrize("what", ["folder", "file", "dangling link"])
def test_a_run_folder_that_is_in_the_way(plan: Make, project: Path, what: str) -> None:
    place = project / "runs" / "a"
    place.parent.mkdir()
    {"folder": place.mkdir, "file": place.touch, "dangling link": lambda: place.symlink_to("nowhere")}[what]()
    refused(plan, "would-overwrite")
    assert os.path.lexists(place)


def test_emulated_nodes_have_no_gpus(plan: Make) -> None:
    refused(lambda: plan(cluster="local", nodes=2, gpus=1, allow_cpu_torch=True), "usage")


def test_a_variable_that_names_other_gpus_than_the_run_takes_is_refused(plan: Make) -> None:
    chosen = {"cluster": "local", "gpus": 1, "allow_cpu_torch": True, "env": {"CUDA_VISIBLE_DEVICES": "1"}}
    error = refused(lambda: plan(**chosen), "usage")
    assert error.what == "CUDA_VISIBLE_DEVICES=1 (--env) names GPUs that the run may not have"
    assert plan(**{**chosen, "gpus": 0, "nproc": 1}).manifest.gpus_per_node == 0


# -- GPUs and the build of torch ----------------------------------------------------------


@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_gpus_that_the_locked_torch_cannot_use_are_refused(plan: Make, project: Path, cluster: str) -> None:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write("[submit]\ngpus = 8\n")
    error = refused(lambda: plan(cluster=cluster), "submit-rejected")
    assert error.what.startswith("torch 2.13.0+cpu cannot use GPUs: ")
    assert "8 GPUs on each node would stay idle" in str(error.why)
    assert "[submit] in" in str(error.why)
    assert "--gpus 0 --nproc R" in str(error.hint)
    assert "--allow-cpu-torch" in str(error.hint)
    checked = refused(lambda: plan(script=None, cluster=cluster), "submit-rejected")
    assert str(checked.hint).startswith("leave out --gpus (in an allocation with GPUs: --gpus 0), or lock")


def test_gpus_that_are_allowed_to_be_idle_are_recorded_and_not_compared(plan: Make) -> None:
    made = plan(nodes=2, gpus=8, allow_cpu_torch=True)
    assert made.request.gpus_per_node == 8
    assert [e.field for e in made.manifest.expectations if e.field.startswith("host.")] == []
    assert Severities(made.manifest.severities).of("host.gpu-models") == "info"
    assert made.manifest.gpu_needs is None
    assert made.manifest.backend == "gloo"
    assert any("the 8 GPUs of each node: they are recorded, not compared" in note for note in made.notes)
    assert "recorded" not in "".join(plan(gpus=0, allow_cpu_torch=True).notes)


@pytest.mark.parametrize(("table", "if_unknown"), [({"cuda": "none", "hip": "6.4"}, "warn"), ({"cuda": "12.8"}, None)])
def test_as_many_gpus_as_requested_must_be_seen(plan: Make, project: Path, table: Any, if_unknown: Any) -> None:
    """AMD GPUs that cannot be read are a warning; that there are fewer is a mismatch."""
    for key, value in table.items():
        edit_lockfile(project, "torch", key, value)
    manifest = plan(nodes=2, gpus=8).manifest
    count = [e for e in manifest.expectations if e.field == "host.gpu-count"]
    assert [(e.value, e.rule, e.severity, e.if_unknown) for e in count] == [("8", "at-least", "must", if_unknown)]
    assert manifest.backend == "nccl"


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
    assert set(made.requested) == {
        "partition = flag (--partition)",
        f"time = 10 ([submit] in {project}/hpcenv.toml)",
        "account = acc (SBATCH_ACCOUNT)",
        "cpus = 1 (one for each rank)",
    }
    assert "account = acc comes from SBATCH_ACCOUNT" in made.notes
    assert "not used, because they would change the job without a trace in its script: SBATCH_EXPORT" in made.notes


def test_options_of_other_programs_are_merged_name_by_name(plan: Make, project: Path, fake_slurm: Any) -> None:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write('[sbatch]\nmail-type = "END"\nwckey = "of the file"\nexclusive = true\n[srun]\ncpu-bind = "cores"\n')
    sites = project / "sites"
    sites.mkdir()
    (sites / "here.toml").write_text('name = "here"\n[sbatch]\nnice = 5\nmail-type = "ALL"\n[srun]\nmpi = "none"\n')
    made = plan(site="here", sbatch={"wckey": "a b"}, srun={"cpu-bind": "none"})
    lines = made.script.splitlines()
    assert [line for line in lines if "mail" in line or "nice" in line or "wckey" in line or "exclusive" in line] == [
        "#SBATCH --nice=5", "#SBATCH --mail-type=END", '#SBATCH --wckey="a b"', "#SBATCH --exclusive",
    ]  # fmt: skip
    (check,) = (line for line in lines if line.startswith("run_step check "))
    (launch,) = (line for line in lines if 'step.py" task' in line)
    assert "--mpi=none --cpu-bind=none " in launch
    assert "cpu-bind" not in check
    (origin,) = (text for text in made.requested if text.startswith("--sbatch"))
    assert origin.endswith(f"(--sbatch, [sbatch] in {project}/hpcenv.toml, {sites}/here.toml)")


def test_the_jobs_comment_ends_with_the_fingerprint_of_the_lockfile(plan: Make, project: Path) -> None:
    fingerprint = next(
        line.split('"')[1] for line in plan().lockfile_text.splitlines() if line.startswith("fingerprint = ")
    )
    assert f"#SBATCH --comment=hpcenv:{fingerprint}" in plan().script.splitlines()
    assert f'#SBATCH --comment="paper 3 hpcenv:{fingerprint}"' in plan(comment="paper 3").script.splitlines()


def test_an_option_that_hpcenv_sets_is_refused_wherever_it_is_given(plan: Make, project: Path) -> None:
    error = refused(lambda: plan(sbatch={"output": "x"}), "usage")
    assert error.why == "`sbatch`: `output`: the log of a run is job.log in its folder (from --sbatch)"
    (project / "sites").mkdir()
    (project / "sites" / "here.toml").write_text('name = "here"\n[srun]\nlabel = true\n')
    assert "`label`: hpcenv writes the rank before each line" in str(
        refused(lambda: plan(site="here"), "spec-invalid").why
    )
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write('[sbatch]\nexport = "NONE"\n')
    assert "`export`: the variables of the ranks are --env" in str(refused(plan, "spec-invalid").why)


@pytest.mark.parametrize("place", ["command line", "hpcenv.toml", "site profile", "Python"])
def test_an_option_of_the_table_works_in_all_four_places(
    project: Path, hpcenv: Any, fake_slurm: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--reservation has nothing but its row."""
    spec, site = project / "hpcenv.toml", project / "sites" / "here.toml"
    table = 'reservation = "course"\n' if place == "hpcenv.toml" else ""
    spec.write_text(f"{spec.read_text()}[submit]\nassume-shared = true\n{table}")
    site.parent.mkdir()
    site.write_text('name = "here"\n' + ('[submit]\nreservation = "course"\n' if place == "site profile" else ""))
    if place == "Python":
        monkeypatch.chdir(project)
        for name, value in fake_slurm.environ.items():
            monkeypatch.setenv(name, value)
        script = plan_job_in_python("train.py", nproc=1, site="here", reservation="course").script
    else:
        words = ("--reservation", "course") if place == "command line" else ()
        argv = ("submit", "train.py", "--nproc", "1", "--site", "here", *words, "--dry-run", "--json")
        done = hpcenv(*argv, cwd=project, environ=fake_slurm.environ)
        assert done.status == 0, done.stderr
        script = done.envelope["data"]["script"]
    assert [line for line in script.splitlines() if "--reservation=" in line] == ["#SBATCH --reservation=course"]


def test_an_option_that_srun_does_not_know_is_refused_before_the_queue(plan: Make, fake_slurm: Any) -> None:
    fake_slurm.answers("srun", "", err="srun: unrecognized option '--cpu-bnid=none'\n", status=255)
    error = refused(lambda: plan(srun={"cpu-bnid": "none"}), "usage")
    assert error.why == "srun: unrecognized option '--cpu-bnid=none'"
    (call,) = fake_slurm.calls("srun")
    assert call.argv == ("--cpu-bnid=none", "--help")


def test_srun_is_asked_only_about_options_that_are_passed_on(plan: Make, fake_slurm: Any) -> None:
    plan()
    assert fake_slurm.calls("srun") == []
    assert not [note for note in plan(srun={"cpu-bind": "none"}).notes if "whether srun accepts" in note]


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
    made = plan(str(script), args=arguments, runs_dir=str(folder), env={"A": "b=c\n$(id)"})
    again = decode_record(Manifest, encode_record(made.manifest), origin="test")
    assert (again.args, again.script) == (arguments, f"{folder}/a/source/my dir $(id) größe/{script.name}")
    assert [(s.name, s.value, s.origin) for s in again.settings] == [("A", "b=c\n$(id)", "--env")]
    assert subprocess.run(["bash", "-n"], input=made.script, text=True).returncode == 0
    assert f'#SBATCH --chdir="{folder}/a"' in made.script


def test_without_sbatch_what_only_slurm_can_give_is_refused(plan: Make) -> None:
    """The user did not type `--cluster local`, so the error must name the missing sbatch."""
    for options in ({"partition": "gpu"}, {"nodes": 2, "gpus": 8, "allow_cpu_torch": True}):
        with pytest.raises(ToolMissing) as caught:
            plan(environ={"PATH": "/usr/bin:/bin"}, **options)
        assert caught.value.what == "`sbatch` is not on PATH"
        assert "needs Slurm" in str(caught.value.why)


def test_without_sbatch_the_run_is_on_this_machine_and_says_so(plan: Make, project: Path) -> None:
    spec = project / "hpcenv.toml"
    spec.write_text(spec.read_text() + '[submit]\npartition = "gpu"\n')
    made = plan(environ={"PATH": "/usr/bin:/bin"})
    assert made.manifest.cluster == "local"
    assert made.script == ""
    assert "there is no sbatch on PATH: the run is on this machine (--cluster local)" in made.notes
    assert f"without Slurm these options have no effect: partition = gpu ([submit] in {spec})" in made.notes


def test_the_lines_of_setup_are_joined_the_site_profiles_first(plan: Make, project: Path) -> None:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write('[submit]\nsetup = ["export B=1"]\n')
    (project / "sites").mkdir()
    (project / "sites" / "here.toml").write_text('name = "here"\n[submit]\nsetup = ["module purge"]\n')
    made = plan(site="here", setup=("export C=1",))
    assert made.manifest.setup == ("module purge", "export B=1", "export C=1")
    lines = " \\\n  'module purge' \\\n  'export B=1' \\\n  'export C=1'\n"
    assert f'\n. "$run/code/setup.sh"{lines}' in made.script
    assert made.record is not None and made.record.options["setup"] == ("export C=1",)
    assert "not one line of text" in refused(lambda: plan(setup=("true\nfalse",)), "usage").what


# -- submitting ---------------------------------------------------------------------------


def test_what_submit_writes_is_what_the_plan_said(plan: Make, project: Path, fake_slurm: Any) -> None:
    made = plan()
    result = submit(made, context(project, fake_slurm.environ))
    run = RunFolder(result.run_folder)
    assert run.script.read_text() == made.script == fake_slurm.calls("sbatch")[0].script
    assert run.manifest.read_text() == encode_record(made.manifest)
    assert run.lockfile.read_text() == made.lockfile_text
    assert find_run(project, None).submission.job_id == "4242"
    assert find_run(project, "4242").manifest.run == "a"


def test_the_code_in_the_run_folder_runs_alone(plan: Make, project: Path, fake_slurm: Any) -> None:
    result = submit(plan(), context(project, fake_slurm.environ))
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
    error = refused(lambda: submit(plan(partition="nosuch"), context(project, fake_slurm.environ)), "submit-rejected")
    assert "requested: partition = nosuch (--partition)" in str(error.why)
    assert [path.name for path in (project / "runs").iterdir()] == ["other"]
    assert fake_slurm.calls("scancel") == []


class Disk:
    """Notes each file and folder that is waited for until it is on the disk, and whether sbatch was called before."""

    def __init__(self, slurm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has: list[str] = []
        self.late: list[str] = []
        self.refuses = ""
        self._slurm, self._fsync = slurm, os.fsync
        monkeypatch.setattr(os, "fsync", self._wait)

    def _wait(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if self.refuses and path.endswith(self.refuses):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        (self.late if self._slurm.calls("sbatch") else self.has).append(path)
        self._fsync(descriptor)


def test_what_the_first_step_reads_is_on_the_disk_before_slurm_has_the_job(
    plan: Make, project: Path, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(fake_slurm, monkeypatch)
    result = submit(plan(), context(project, fake_slurm.environ))
    run = RunFolder(result.run_folder)
    files = {run.manifest, run.script, run.lockfile, run.request, run.step, run.archive}
    folders = {run.path, run.code, run.path.parent, project}
    assert {str(path) for path in files | folders} <= set(disk.has)
    assert len(disk.has) < 20
    assert [path for path in disk.late if path != str(run.path) and "submission.json" not in path] == []


def test_a_disk_that_refuses_a_file_refuses_the_job(
    plan: Make, project: Path, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(fake_slurm, monkeypatch).refuses = "/a/manifest.json"
    error = refused(lambda: submit(plan(), context(project, fake_slurm.environ)), "file-unusable")
    assert "manifest.json` cannot be written" in error.what
    assert "Disk quota exceeded" in str(error.why)
    assert fake_slurm.calls("sbatch") == []
    assert list((project / "runs").iterdir()) == []


def test_a_job_that_got_queued_without_an_answer_is_cancelled(plan: Make, project: Path, fake_slurm: Any) -> None:
    fake_slurm.answers("sbatch", err="sbatch: error: Socket timed out on send/recv operation\n", status=1)
    fake_slurm.answers("squeue", f"6|PENDING|/elsewhere/a\n7|PENDING|{project}/runs/a\n")
    refused(lambda: submit(plan(), context(project, fake_slurm.environ)), "submit-uncertain")
    assert [call.argv for call in fake_slurm.calls("scancel")] == [("7",)]
    assert list((project / "runs").iterdir()) == []


def test_if_nobody_can_tell_the_folder_is_kept_and_named(plan: Make, project: Path, fake_slurm: Any) -> None:
    fake_slurm.answers("sbatch", "queued, I think\n")
    fake_slurm.answers("squeue", err="Unable to contact slurm controller\n", status=1)
    error = refused(lambda: submit(plan(), context(project, fake_slurm.environ)), "submit-uncertain")
    assert "`squeue --name=a` lists the job if it is queued" in str(error.hint)
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
    refused(lambda: submit(made, context(project, environ)), "tool-missing")
    assert list((project / "runs").iterdir()) == []


def test_two_submissions_of_one_name_do_not_mix(plan: Make, project: Path, fake_slurm: Any) -> None:
    first, second = plan(), plan()
    submit(first, context(project, fake_slurm.environ))
    refused(lambda: submit(second, context(project, fake_slurm.environ)), "would-overwrite")
    assert find_run(project, "a").submission.job_id == "4242"
    assert len(fake_slurm.calls("sbatch")) == 1


# -- --frozen ----------------------------------------------------------------


def test_frozen_takes_a_stale_lockfile(plan: Make, project: Path) -> None:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write('[policy]\n"system.glibc" = "must"\n')
    refused(plan, "lockfile-stale")
    assert plan(frozen=True).manifest.lockfile == "lockfiles/default.lock.toml"


def test_frozen_says_that_an_overlay_is_not_mounted(plan: Make, project: Path) -> None:
    named = (project / "hpcenv.toml").read_text()
    assert not [note for note in plan(frozen=True).notes if "overlay" in note]
    (project / "hpcenv.toml").write_text(f'overlay = "extra:/opt/extra"\n{named}')
    found = [note for note in plan(frozen=True).notes if "overlay" in note]
    assert found == ["overlay-changed: locked no overlay, now extra:/opt/extra: the lockfile counts (--frozen)"]


def test_without_frozen_a_stale_lockfile_ends_a_dry_run_too(hpcenv: Any, project: Path) -> None:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write('[policy]\n"system.glibc" = "must"\n')
    words = ("submit", "train.py", "--nproc", "1", "--cluster", "local", "--dry-run")
    assert hpcenv(*words, cwd=project).status == 7
    assert hpcenv(*words, "--frozen", cwd=project).status == 0


def test_a_manifest_without_a_script_only_checks(plan: Make, fake_slurm: Any) -> None:
    options = SubmitOptions(script=None, nproc=1, assume_shared=True, name="v")
    project = Path(plan().manifest.submitted_in)
    made = plan_job(open_workspace(project), options, context(project, fake_slurm.environ))
    assert (made.manifest.script, made.manifest.script_sha256) == ("", "")
    assert made.script.endswith("\ngate decide\n\nend 0\n")
    assert not plan().script.endswith("\nend 0\n")


def test_the_copy_of_the_lockfile_says_code_and_command(plan: Make, project: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    text = tomlkit.parse(plan(args=("--lr", "\udcff"), env={"A": "b"}).lockfile_text).unwrap()
    assert text["run"]["argv"] == [str(project / "runs" / "a" / "source" / "train.py"), "--lr", "\\xff"]
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
    ],
)
def test_staging_needs_something_to_stage(plan: Make, words: Any, says: str) -> None:
    assert says in refused(lambda: plan(**words), "usage").what


def test_what_python_has_compiled_of_the_node_code_comes_along(tmp_path: Path) -> None:
    """A node with this Python compiles nothing; what was compiled of another source does not come along."""
    compileall.compile_dir(package_folder(), quiet=1)  # so that it is compiled
    run = RunFolder(tmp_path / "run")
    copy_node_code(run)
    with zipfile.ZipFile(run.archive) as packed:
        assert packed.testzip() is None
        names = set(packed.namelist())
    sources = {name for name in names if name.endswith(".py")}
    assert {"hpcenv/steps/step.py", "hpcenv/records/manifest.py", "hpcenv/incontainer/agent.py"} <= sources
    assert names - sources == {f"{name}c" for name in sources}


def archive_of(parent: Path, name: str) -> Path:
    run = RunFolder(parent / name)
    copy_node_code(run)
    node_code.share_archive(run)
    return run.archive


def test_runs_share_one_archive_and_each_is_complete(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first, second = archive_of(runs, "first"), archive_of(runs, "second")
    (shared,) = (runs / ".data").iterdir()
    assert shared.name == f"sha256-{hashlib.sha256(first.read_bytes()).hexdigest()}.zip"
    assert first.samefile(second) and first.samefile(shared) and first.stat().st_nlink == 3
    # A copy, and a tar of one run, have the content.
    copied = shutil.copytree(runs / "second", tmp_path / "copied")
    subprocess.run(["tar", "-cf", tmp_path / "a.tar", "-C", runs, "second"], check=True)
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "a.tar", "-C", tmp_path / "out"], check=True)
    for one in (copied, tmp_path / "out/second"):
        assert RunFolder(one).archive.read_bytes() == first.read_bytes()
        assert RunFolder(one).archive.stat().st_nlink == 1


def test_a_shared_archive_with_another_content_is_not_used_and_replaced(tmp_path: Path) -> None:
    first = archive_of(tmp_path, "first")
    good = first.read_bytes()
    (shared,) = (tmp_path / ".data").iterdir()
    shared.write_bytes(good[:1000])  # as after a failure of the machine; it is the first run's file, too
    second = archive_of(tmp_path, "second")
    assert second.read_bytes() == good and first.read_bytes() == good[:1000]
    assert archive_of(tmp_path, "third").samefile(second) and shared.samefile(second)
    # The same run once more: what others link to is not written.
    assert archive_of(tmp_path, "first").read_bytes() == second.read_bytes() == good


def test_a_link_in_the_place_of_the_shared_archive_is_not_followed(tmp_path: Path) -> None:
    first = archive_of(tmp_path, "first")
    (shared,) = (tmp_path / ".data").iterdir()
    aside = shared.rename(tmp_path / "elsewhere.zip")
    shared.symlink_to(aside)
    second = archive_of(tmp_path, "second")
    assert not second.is_symlink() and second.read_bytes() == first.read_bytes() and not shared.is_symlink()


def test_where_links_fail_each_run_has_a_copy(tmp_path: Path) -> None:
    (tmp_path / ".data").write_text("a file: nothing can be linked there")
    first, second = archive_of(tmp_path, "first"), archive_of(tmp_path, "second")
    assert first.read_bytes() == second.read_bytes() and first.stat().st_nlink == second.stat().st_nlink == 1


@pytest.mark.ordinary_user
def test_a_shared_archive_that_may_not_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / ".data").mkdir(mode=0o555)
    assert archive_of(tmp_path, "first").stat().st_nlink == 1


def test_a_submission_that_is_killed_leaves_no_torn_archive_to_others(tmp_path: Path) -> None:
    whole = archive_of(tmp_path / "reference", "run").read_bytes()
    code = (
        "import os, sys; from pathlib import Path; from hpcenv.submission import node_code;"
        "from hpcenv.records.run_folder import RunFolder;"
        "run = RunFolder(Path(sys.argv[1])); node_code.copy_node_code(run); node_code.share_archive(run)"
    )
    for number in range(4):
        victim = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / f"runs/killed-{number}")])
        deadline = time.monotonic() + 30
        while not RunFolder(tmp_path / f"runs/killed-{number}").archive.exists() and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(number * 0.001)
        victim.kill()
        victim.wait()
        for shared in (tmp_path / "runs/.data").glob("*"):
            assert shared.read_bytes() == whole
    assert archive_of(tmp_path / "runs", "next").read_bytes() == whole


@pytest.mark.parametrize("mode", list(py_compile.PycInvalidationMode))
def test_only_what_was_compiled_of_this_source_comes_along(
    mode: py_compile.PycInvalidationMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("WHAT = 1\n")

    def packed() -> dict[str, bytes]:
        (tmp_path / "a.zip").write_bytes(node_code.packed(tmp_path, ["a.py"]))
        with zipfile.ZipFile(tmp_path / "a.zip") as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    assert packed() == {"hpcenv/a.py": b"WHAT = 1\n"}
    compiled = Path(py_compile.compile("a.py", invalidation_mode=mode))
    assert packed()["hpcenv/a.pyc"][16:] == compiled.read_bytes()[16:]
    importing = "import sys; sys.path.insert(0, 'a.zip/hpcenv'); import a; print(a.WHAT)"
    done = subprocess.run([sys.executable, "-I", "-c", importing], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    (tmp_path / "a.py").write_text("WHAT = 22\n")
    assert list(packed()) == ["hpcenv/a.py"]
    compiled.write_bytes(b"of no Python")
    assert list(packed()) == ["hpcenv/a.py"]


def test_a_file_of_the_nodes_that_cannot_be_copied_is_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    (run.code / "hpcenv").mkdir(parents=True)
    (run.code / "hpcenv" / "incontainer").write_text("a file where a folder is needed")
    with pytest.raises(FileUnusable, match="cannot copy the code of the nodes") as caught:
        copy_node_code(run)
    assert f"{run.code}/hpcenv/incontainer" in str(caught.value.why)
    other = RunFolder(tmp_path / "other")
    other.archive.mkdir(parents=True)
    with pytest.raises(FileUnusable) as caught:
        copy_node_code(other)
    assert caught.value.why == f"Is a directory: {other.archive}"


def test_a_full_disk_is_named_with_the_hint_that_helps(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.code.mkdir(parents=True)
    run.step.symlink_to("/dev/full")
    with pytest.raises(FileUnusable, match="cannot copy the code of the nodes") as caught:
        copy_node_code(run)
    assert caught.value.why == f"No space left on device: {run.step}"
    assert "prune" in str(caught.value.hint)


def test_a_source_that_is_missing_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"b\.py"):
        node_code.packed(tmp_path, ["b.py"])


def test_equal_modules_give_equal_bytes(tmp_path: Path) -> None:
    modules = {"b.py": "B = 1\n", "a.py": "A = 1\n", "room/c.py": "C = 1\n"}
    for folder, names in (("one", sorted(modules)), ("other", sorted(modules, reverse=True))):
        for name in names:
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(modules[name])
            os.utime(path, (len(folder), 1e9 * len(folder) / 3))
            path.chmod(0o600 if folder == "one" else 0o755)
    one, other = (node_code.packed(tmp_path / folder, list(modules)) for folder in ("one", "other"))
    assert one == other
    assert zipfile.ZipFile(io.BytesIO(one)).namelist() == ["hpcenv/a.py", "hpcenv/b.py", "hpcenv/room/c.py"]
    (tmp_path / "other" / "a.py").write_text("A = 2\n")
    assert node_code.packed(tmp_path / "other", list(modules)) != one


# -- CPUs and memory ----------------------------------------------------------------------

_NODES = """\
SelectTypeParameters    = CR_CORE_MEMORY
PartitionName=batch Default=YES
PartitionName=gpu JobDefaults=DefCpuPerGPU=3
NodeName=n1 CoresPerSocket=32 CPUTot=64 Sockets=2 Gres=gpu:8 RealMemory=512000 Partitions=batch,gpu
"""


def test_the_share_of_the_gpus_is_requested_printed_and_recorded(plan: Make, fake_slurm: Any) -> None:
    fake_slurm.answers("scontrol", _NODES)
    made = plan(gpus=2, nproc=None, allow_cpu_torch=True)
    assert "#SBATCH --cpus-per-task=16\n" in made.script
    assert "#SBATCH --mem=128000M\n" in made.script
    assert [note for note in made.notes if "requested" in note] == [
        (
            "requested on each node, as scontrol shows it: 16 CPUs (2 of the 8 GPUs of n1, which has 64 CPUs), "
            "128000M of memory (2 of the 8 GPUs of n1, which has 512000 MiB)"
        )
    ]
    assert "cpus = 16 (2 of the 8 GPUs of n1, which has 64 CPUs)" in made.requested
    found = decode_record(Manifest, encode_record(made.manifest), origin="x")
    assert (found.cpus_per_task, found.cpus_origin) == (16, "2 of the 8 GPUs of n1, which has 64 CPUs")
    assert (found.mem, found.mem_origin) == ("128000M", "2 of the 8 GPUs of n1, which has 512000 MiB")
    assert len(fake_slurm.calls("scontrol")) == 1


def test_what_is_given_is_not_computed(plan: Make, project: Path, fake_slurm: Any) -> None:
    fake_slurm.answers("scontrol", _NODES)
    made = plan(gpus=2, nproc=None, allow_cpu_torch=True, cpus=4, mem="0", partition="gpu")
    assert "#SBATCH --cpus-per-task=4\n" in made.script
    assert not fake_slurm.calls("scontrol")
    assert not [note for note in made.notes if "requested" in note]
    assert (made.manifest.cpus_origin, made.manifest.mem_origin) == ("--cpus", "--mem")
    made = plan(gpus=2, nproc=None, allow_cpu_torch=True, mem="0", partition="gpu")
    assert "cpus = 6 (2 GPUs x DefCpuPerGPU=3 of partition gpu)" in made.requested
    (project / "hpcenv.toml").write_text((project / "hpcenv.toml").read_text() + '[submit]\ncpus = 5\nmem = "9G"\n')
    made = plan(gpus=2, nproc=None, allow_cpu_torch=True, frozen=True)
    assert "#SBATCH --cpus-per-task=5\n" in made.script
    assert "#SBATCH --mem=9G\n" in made.script


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"err": "slurm_load_node error: Access/permission denied", "status": 1}, "`scontrol` ended with status 1"),
        ({"out": ""}, "`scontrol show node` lists no nodes"),
    ],
)
def test_without_an_answer_nothing_is_requested(plan: Make, fake_slurm: Any, said: Any, reason: str) -> None:
    fake_slurm.answers("scontrol", **said)
    made = plan(gpus=2, nproc=None, allow_cpu_torch=True)
    assert "cpus-per-task" not in made.script.partition("set -u")[0]
    assert "--mem" not in made.script
    (note,) = (note for note in made.notes if "left to Slurm" in note)
    assert note == f"CPUs and memory are left to Slurm's defaults (--cpus and --mem request them): {reason}"
    assert (made.manifest.cpus_per_task, made.manifest.cpus_origin) == (0, "")


def test_ranks_without_gpus_get_a_cpu_each_and_scontrol_is_not_asked(plan: Make, fake_slurm: Any) -> None:
    made = plan(nproc=3)
    assert "#SBATCH --cpus-per-task=3\n" in made.script
    assert made.notes == ("requested on each node: 3 CPUs (one for each rank)",)
    assert not fake_slurm.calls("scontrol")


def test_ranks_that_would_share_a_core_are_refused(plan: Make, fake_slurm: Any) -> None:
    error = refused(lambda: plan(nproc=4, cpus=2), "usage")
    assert (error.what, error.why) == (
        "2 CPUs on each node for 4 ranks",
        "ranks that share a core wait for each other in every operation; the CPUs come from --cpus",
    )
    assert plan(nproc=4, cpus=2, skip_check=("sys.affinity",)).manifest.cpus_per_task == 2
    fake_slurm.answers("scontrol", _NODES)
    error = refused(lambda: plan(nproc=9, gpus=1, allow_cpu_torch=True), "usage")
    assert error.why is not None
    assert error.why.endswith("; the number of CPUs is computed: 1 of the 8 GPUs of n1, which has 64 CPUs")
    assert str(error.hint).startswith("--cpus 9 or more")


def test_a_job_that_only_checks_its_nodes_asks_for_no_share(plan: Make, fake_slurm: Any) -> None:
    fake_slurm.answers("scontrol", _NODES)
    made = plan(script=None, gpus=2, nproc=None, allow_cpu_torch=True)
    assert made.manifest.cpus_per_task == 0
    made = plan(script=None, gpus=2, nproc=None, allow_cpu_torch=True, preflight="full")
    assert made.manifest.cpus_per_task == 16
