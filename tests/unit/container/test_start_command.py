"""The one start line for probe and ranks, on the host and in a SIF."""

import dataclasses
import os
import shlex
import subprocess

import pytest

from hpcenv.container.start_command import (
    CONTAINER_HOME,
    build_start_command,
    needed_binds,
    opened,
    record_variables,
)
from hpcenv.records.manifest import Bind, Environment, Overlay, Secret, Setting
from hpcenv.records.variables import WITHHELD

HOST = Environment(kind="host", python="/env/bin/python")
SIF = Environment(kind="sif", python="python3", sif="/images/a.sif", apptainer="/usr/bin/apptainer")


def on_host(inherited, variables=None):
    return build_start_command(
        HOST, ["/env/bin/python", "x.py"], workdir="/w", variables=variables or {}, inherited=inherited
    )


def inside(entry):
    """The variables that the command gets."""
    if not entry.variables:
        return entry.env
    return dict(word.split("=", 1) for word in shlex.split(entry.variables))


def bind(source, target=None, *, read_only=False):
    return Bind(source=source, target=target or source, read_only=read_only)


# -- on the host --------------------------------------------------------------------------


def test_the_environment_on_the_host_is_as_if_it_were_active():
    entry = on_host({"PATH": "/usr/bin", "HOME": "/home/a"}, {"NCCL_DEBUG": "WARN"})
    assert entry.argv == ("/env/bin/python", "x.py")
    assert str(entry.cwd) == "/w"
    assert entry.env == {
        "PATH": "/env/bin:/usr/bin",
        "HOME": "/home/a",
        "PYTHONNOUSERSITE": "1",
        "NCCL_DEBUG": "WARN",
    }


def test_without_a_path_the_current_folder_does_not_become_one():
    assert on_host({}).env["PATH"] == "/env/bin"
    assert on_host({"PATH": ""}).env["PATH"] == "/env/bin"


@pytest.mark.parametrize(
    "name",
    [
        "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "CONDA_PREFIX", "VIRTUAL_ENV", "LD_PRELOAD",
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PET_NNODES", "GROUP_RANK",
        "TORCHELASTIC_RUN_ID", "SUBMITIT_EXECUTOR", "SBATCH_TIMELIMIT", "HPCENV_LOCAL_NODE", "PMI_RANK",
        "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "APPTAINER_BIND", "SINGULARITYENV_X",
    ],
)  # fmt: skip
def test_what_changes_the_code_or_belongs_to_an_outer_launcher_is_dropped(name):
    assert name not in on_host({name: "x"}).env


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "HOME", "LC_ALL", "TZ", "LOADEDMODULES",
        "XDG_RUNTIME_DIR", "NCCL_IB_HCA", "UCX_TLS", "FI_PROVIDER", "https_proxy", "KRB5CCNAME", "SLURM_ARRAY_TASK_ID",
    ],
)  # fmt: skip
def test_what_a_login_gives_and_tuning_stays(name):
    assert on_host({name: "x"}).env[name] == "x"


def test_a_proxy_comes_without_its_password_unless_it_is_asked_for():
    proxy = {"https_proxy": "http://me:secret@proxy:3128", "NO_PROXY": "localhost"}
    assert on_host(proxy).env["https_proxy"] == "http://proxy:3128"
    assert on_host(proxy).env["NO_PROXY"] == "localhost"
    asked = build_start_command(HOST, ["python3"], workdir="/w", variables={}, inherited=proxy, passed=("https_proxy",))
    assert asked.env["https_proxy"] == proxy["https_proxy"]


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_TASKS_PER_NODE", "SLURM_NNODES",
        "RANKING", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "BASH_FUNC_module%%", "BASH_ENV",
    ],
)  # fmt: skip
def test_nothing_else_of_the_job_gets_in_unasked(name):
    assert name not in on_host({name: "x"}).env


@pytest.mark.parametrize("kind", [HOST, SIF])
def test_what_is_asked_for_by_name_or_beginning_gets_in(kind):
    inherited = {"HF_HOME": "/h", "HF_TOKEN": "a,b\n$(id)", "HFX": "no", "WANDB_MODE": "offline", "PATH": "/usr/bin"}
    entry = build_start_command(
        kind, ["python3"], workdir="/w", variables={"WANDB_MODE": "online"}, inherited=inherited,
        passed=("HF_*", "WANDB_MODE"),
    )  # fmt: skip
    seen = inside(entry)
    assert (seen["HF_HOME"], seen["HF_TOKEN"], seen["WANDB_MODE"]) == ("/h", "a,b\n$(id)", "online")
    assert "HFX" not in seen


@pytest.mark.parametrize("kind", [HOST, SIF])
def test_a_star_brings_no_launcher_along_a_name_does(kind):
    inherited = {"SLURM_NTASKS": "4", "RANK": "1", "PYTHONPATH": "/x", "LD_PRELOAD": "/x", "MINE": "1", "SLURM_X": "2"}
    entry = build_start_command(
        kind, ["python3"], workdir="/w", variables={}, inherited=inherited, passed=("*", "SLURM_X")
    )
    seen = inside(entry)
    assert (seen["MINE"], seen["SLURM_X"]) == ("1", "2")
    assert not {"SLURM_NTASKS", "RANK", "PYTHONPATH", "LD_PRELOAD"} & set(seen)


def test_settings_win_over_what_is_inherited_and_over_defaults():
    assert on_host({"A": "1"}, {"A": "2", "PYTHONNOUSERSITE": "0"}).env["A"] == "2"


# -- in a SIF -----------------------------------------------------------------------------


def in_sif(**changes):
    given = {"workdir": "/w", "variables": {}, "inherited": {"PATH": "/usr/bin"}} | changes
    return build_start_command(SIF, ["python3", "-m", "x", "$(id)"], **given)


def test_nothing_of_the_home_the_current_folder_or_the_environment_gets_in():
    entry = in_sif(inherited={"PATH": "/usr/bin", "SECRET": "x", "APPTAINER_BIND": "/etc", "SLURM_JOB_ID": "7"})
    assert entry.argv == (
        "/usr/bin/apptainer", "-q", "exec", "--cleanenv", "--no-eval", "--no-mount", "cwd", "--no-home",
        "--pwd", "/w", "/images/a.sif", "python3", "-m", "x", "$(id)",
    )  # fmt: skip
    assert entry.cwd is None
    assert "SECRET" not in str(entry.env)
    assert "APPTAINER_BIND" not in entry.env
    assert inside(entry)["SLURM_JOB_ID"] == "7"


def test_the_open_file_that_was_verified_is_what_starts():
    assert "/proc/self/fd/5" in in_sif(image="/proc/self/fd/5").argv
    assert "/images/a.sif" not in in_sif(image="/proc/self/fd/5").argv


def test_variables_reach_the_runtime_in_an_open_file_that_no_command_line_and_no_environment_shows(tmp_path):
    program = tmp_path / "apptainer"
    program.write_text('#!/bin/sh\ntr "\\0" " " < /proc/$$/cmdline\nenv\ncat "$4"; cat "$4" >&2\n')
    program.chmod(0o755)
    start = build_start_command(
        Environment(kind="sif", python="python3", sif="/a.sif", apptainer=str(program)),
        ["python3"], workdir="/w", variables={"TOKEN": "hush\n'x'"}, inherited={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    with opened(start) as (argv, files):
        done = subprocess.run(argv, env=start.env, pass_fds=files, capture_output=True, text=True, check=True)
    # The second reading begins at the start again.
    assert done.stderr == start.variables
    assert "hush" not in done.stdout.removesuffix(start.variables)
    assert inside(start)["TOKEN"] == "hush\n'x'"
    for number in files:
        with pytest.raises(OSError):
            os.fstat(number)


def test_the_sites_wrapper_comes_before_every_program_in_a_container():
    through = dataclasses.replace(SIF, wrapper=("/host/adapt.sh", "-q"))
    start = build_start_command(through, ["python3", "x.py"], workdir="/w", variables={}, inherited={})
    assert start.argv[-5:] == ("/images/a.sif", "/host/adapt.sh", "-q", "python3", "x.py")


def with_packages(python_path="", **variables):
    overlay = Overlay(source="/p/extra.sqsh", use="packages", target="/opt/extra", python_path=python_path)
    environment = dataclasses.replace(SIF, overlay=overlay)
    return build_start_command(environment, ["x"], workdir="/w", variables=variables, inherited={"PATH": "/usr/bin"})


def test_the_packages_of_an_overlay_come_before_the_images_pythonpath_and_after_the_users_which_replaces_that():
    assert inside(with_packages())["PYTHONPATH"] == "/opt/extra"
    assert inside(with_packages("/opt/extra:/image"))["PYTHONPATH"] == "/opt/extra:/image"
    assert inside(with_packages("/opt/extra:/image", PYTHONPATH="/mine"))["PYTHONPATH"] == "/mine:/opt/extra"


def test_a_virtual_environment_is_as_if_it_were_active():
    overlay = Overlay(source="/p/venv.sqsh", use="venv", target="/p/venv")
    environment = dataclasses.replace(SIF, overlay=overlay)
    start = build_start_command(environment, ["x"], workdir="/w", variables={}, inherited={"PATH": "/usr/bin"})
    found = inside(start)
    assert "PYTHONPATH" not in found
    # Both runtimes put it before the image's PATH.
    assert (found["VIRTUAL_ENV"], found["PREPEND_PATH"]) == ("/p/venv", "/p/venv/bin")


def test_on_the_host_there_is_no_file_of_variables():
    with opened(on_host({"PATH": "/usr/bin"}, {"A": "1"})) as (argv, files):
        assert (argv, files) == (("/env/bin/python", "x.py"), ())


def test_the_home_is_a_folder_of_the_run():
    assert f"/runs/r1/home/n1:{CONTAINER_HOME}" in in_sif(home="/runs/r1/home/n1").argv


def test_settings_win_over_what_the_job_says():
    entry = in_sif(inherited={"CUDA_VISIBLE_DEVICES": "0"}, variables={"CUDA_VISIBLE_DEVICES": "1"})
    assert inside(entry)["CUDA_VISIBLE_DEVICES"] == "1"


# -- binds --------------------------------------------------------------------------------


def test_a_folder_inside_another_one_that_is_bound_needs_no_bind():
    assert needed_binds([bind("/w/run"), bind("/w"), bind("/w/sub/deep")]) == (bind("/w"),)


def test_a_name_that_only_begins_alike_is_not_inside():
    assert needed_binds([bind("/j"), bind("/job")]) == (bind("/j"), bind("/job"))


def test_outer_folders_are_mounted_first():
    binds = needed_binds([bind("/data", "/a/b/c"), bind("/x", "/a"), bind("/", "/host")])
    assert [b.target for b in binds] == ["/a", "/host", "/a/b/c"]


def test_a_folder_inside_that_differs_in_access_or_source_is_bound():
    inner = bind("/w/data", read_only=True)
    other = bind("/elsewhere", "/w/other")
    assert needed_binds([bind("/w"), inner, other]) == (bind("/w"), inner, other)


def test_a_bind_in_between_hides_the_outer_one():
    binds = needed_binds([bind("/w"), bind("/scratch", "/w/runs"), bind("/w/runs/r1")])
    assert [b.target for b in binds] == ["/w", "/w/runs", "/w/runs/r1"]


def test_of_two_binds_for_one_target_the_users_wins():
    entry = build_start_command(
        Environment(kind="sif", python="python3", sif="/a.sif", apptainer="/apptainer", binds=(bind("/z", "/tmp/"),)),
        ["python3"],
        workdir="/",
        variables={},
        inherited={},
        binds=[bind("/private", "/tmp")],
    )
    mounts = [word for word in entry.argv if word.startswith("type=bind")]
    assert mounts == ['type=bind,"source=/z","destination=/tmp/"']


def test_the_same_bind_twice_is_one():
    assert needed_binds([bind("/w"), bind("/w"), bind("/w/")]) == (bind("/w"),)


def _recorded(manifest, environ):
    return {v.name: (v.value, v.origin) for v in record_variables(manifest, environ)}


def test_all_variables_of_the_job_that_reach_the_ranks_are_recorded(make_manifest):
    manifest = make_manifest(
        pass_env=("HF_*", "PYTHONHASHSEED"),
        secrets=(Secret(name="API", source="file:/x", origin="--secret"),),
        settings=(Setting(name="MKL_CBWR", value="AVX2", origin="--env"),),
    )
    environ = {
        "MKL_CBWR": "COMPATIBLE", "TORCH_HOME": "/t", "HF_TOKEN": "abc", "HF_HOME": "/h", "PYTHONHASHSEED": "7",
        "EDITOR": "vi", "https_proxy": "http://a:b@p:1", "SLURM_JOB_ID": "7", "PATH": "/usr/bin",
    }  # fmt: skip
    found = _recorded(manifest, environ)
    passed = "environment of the job, by --pass-env"
    assert found["TORCH_HOME"] == ("/t", "environment of the job")
    assert found["HF_HOME"] == ("/h", passed)
    assert found["HF_TOKEN"] == (WITHHELD, passed)
    assert found["PYTHONHASHSEED"] == ("7", passed)
    assert found["https_proxy"][0] == "http://p:1"
    assert found["API"] == (WITHHELD, "--secret, file:/x")
    assert found["SLURM_JOB_ID"][0] == "7"
    assert "MKL_CBWR" not in found, "the setting replaces it"
    assert "EDITOR" not in found, "it does not reach the ranks"
    start = build_start_command(
        manifest.environment, ["x"], workdir="/", variables={}, inherited=environ, passed=manifest.pass_env
    )
    assert set(start.env) - {"MKL_CBWR"} == set(found) - {"API"}
