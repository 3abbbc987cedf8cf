"""Slurm's commands: what they said on a real cluster is understood, the rest is `unknown`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.cluster import slurm, slurm_command
from hpcenv.errors import ToolFailed, ToolMissing

RECORDED = Path(__file__).resolve().parents[2] / "fakes" / "outputs"
# Of some versions only what `doctor` asks is recorded.
VERSIONS = sorted(path.name for path in RECORDED.iterdir() if (path / "squeue-nosuch.out").exists())


def recorded_id(version: str, name: str) -> str:
    return (RECORDED / version / f"{name}.out").read_text().partition("|")[0]


# -- states -------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "state", "reason"),
    [("running", "running", ""), ("pending", "pending", "JobHeldUser")],
)
def test_a_queued_job_is_what_squeue_says(fake_slurm: Any, version: str, name: str, state: str, reason: str) -> None:
    fake_slurm.replays("squeue", f"squeue-{name}", version)
    job = slurm.job_state(recorded_id(version, f"squeue-{name}"), fake_slurm.environ)
    assert (job.state, job.reason, job.source, job.ended) == (state, reason, "squeue", False)
    assert fake_slurm.calls("sacct") == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "state", "status"),
    [("completed", "completed", 0), ("failed", "failed", 3), ("cancelled", "cancelled", 0), ("cancelled-running", "cancelled", 0)],
)  # fmt: skip
def test_an_ended_job_is_what_sacct_says(fake_slurm: Any, version: str, name: str, state: str, status: int) -> None:
    fake_slurm.replays("squeue", "squeue-nosuch", version)
    fake_slurm.replays("sacct", f"sacct-{name}", version)
    job = slurm.job_state(recorded_id(version, f"sacct-{name}"), fake_slurm.environ)
    assert (job.state, job.exit_status, job.source) == (state, status, "sacct")


def test_a_job_that_lacked_memory_is_what_sacct_of_26_05_says(fake_slurm: Any) -> None:
    """Recorded where the kernel ended the batch script: if it ends a step only, sacct says FAILED of the job."""
    fake_slurm.replays("squeue", "squeue-nosuch")
    fake_slurm.replays("sacct", "sacct-out-of-memory", "26.05")
    job = slurm.job_state(recorded_id("26.05", "sacct-out-of-memory"), fake_slurm.environ)
    assert (job.state, job.ended, job.source) == ("out-of-memory", True, "sacct")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_that_slurm_forgot_is_unknown_and_gone(fake_slurm: Any, version: str) -> None:
    fake_slurm.replays("squeue", "squeue-nosuch", version)
    fake_slurm.replays("sacct", "sacct-nosuch", version)
    job = slurm.job_state("99999", fake_slurm.environ)
    assert (job.state, job.gone, job.ended) == ("unknown", True, False)
    assert job.reason == "squeue does not know this job; sacct does not know this job"


def test_without_squeue_and_sacct_nothing_is_guessed(fake_slurm: Any, tmp_path: Path) -> None:
    job = slurm.job_state("7", {**fake_slurm.environ, "PATH": str(tmp_path)})
    assert (job.state, job.gone) == ("unknown", False)
    assert "`squeue` is not on PATH" in job.reason
    assert "`sacct` is not on PATH" in job.reason


def test_without_accounting_squeue_alone_tells(fake_slurm: Any) -> None:
    fake_slurm.answers("squeue", "7|COMPLETED|None|n1|0:05\n")
    fake_slurm.answers("sacct", err="Slurm accounting storage is disabled\n", status=1)
    job = slurm.job_state("7", fake_slurm.environ)
    assert (job.state, job.exit_status, job.source) == ("completed", None, "squeue")


def test_accounting_that_lags_behind_does_not_bring_a_job_back(fake_slurm: Any) -> None:
    fake_slurm.answers("squeue", "7|FAILED|NonZeroExitCode|n1|0:05\n")
    fake_slurm.answers("sacct", "7|RUNNING|0:0|n1|00:00:05\n")
    assert slurm.job_state("7", fake_slurm.environ).state == "failed"
    fake_slurm.replays("squeue", "squeue-nosuch")
    job = slurm.job_state("7", fake_slurm.environ)
    assert (job.state, job.gone) == ("unknown", True)
    assert "sacct says running, which squeue does not confirm" in job.reason


def test_a_controller_that_is_down_is_unknown_and_not_gone(fake_slurm: Any) -> None:
    down = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
    fake_slurm.answers("squeue", err=down, status=1)
    fake_slurm.answers("sacct")
    job = slurm.job_state("7", fake_slurm.environ)
    assert (job.state, job.gone) == ("unknown", False)
    assert "Unable to contact slurm controller" in job.reason


def test_what_sacct_says_of_a_running_job_is_unconfirmed_while_the_controller_is_down(fake_slurm: Any) -> None:
    down = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
    fake_slurm.answers("squeue", err=down, status=1)
    fake_slurm.answers("sacct", "7|RUNNING|0:0|n1|00:00:05\n")
    job = slurm.job_state("7", fake_slurm.environ)
    assert (job.state, job.unconfirmed, job.gone) == ("running", True, False)
    assert job.reason.startswith("so says sacct; ")
    assert "Unable to contact slurm controller" in job.reason
    fake_slurm.answers("sacct", "7|COMPLETED|0:0|n1|00:00:05\n")
    assert slurm.job_state("7", fake_slurm.environ).unconfirmed is False


def test_a_word_that_slurm_invents_later_is_kept_but_not_believed(fake_slurm: Any) -> None:
    fake_slurm.answers("squeue", "7|QUANTUM|None|n1|0:05\n")
    job = slurm.job_state("7", fake_slurm.environ)
    assert (job.state, job.reason, job.ended) == ("unknown", "Slurm says QUANTUM", False)


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("CANCELLED by 1001", "cancelled"), ("CANCELLED+", "cancelled"), ("OUT_OF_ME+", "unknown"), ("", "unknown"),
        ("completed", "completed"), ("NODE_FAIL", "node-fail"), ("PREEMPTED", "preempted"), ("REQUEUE_HOLD", "requeued"),
    ],
)  # fmt: skip
def test_slurms_words_for_states(word: str, state: str) -> None:
    assert slurm.parse_state(word) == state


@given(st.text())
def test_no_other_word_means_that_a_job_is_over(word: str) -> None:
    known = {"COMPLETED", "FAILED", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL", "CANCELLED", "REVOKED", "DEADLINE",
             "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY"}  # fmt: skip
    if word.strip().split(" ")[0].rstrip("+").upper() not in known:
        assert slurm.parse_state(word) not in slurm.ENDED


def test_lines_about_other_jobs_and_banners_are_passed_over(fake_slurm: Any) -> None:
    fake_slurm.answers("squeue", "Welcome|to|our|nice|site\n70|FAILED|None|n1|0:05\n7|RUNNING|None|n[1-2]|0:05\n")
    job = slurm.job_state("7", fake_slurm.environ)
    assert (job.state, job.nodelist) == ("running", "n[1-2]")


# -- the environment of Slurm's commands --------------------------------------------------


def test_a_submission_from_inside_a_job_does_not_inherit_that_job() -> None:
    outer = {
        "SLURM_JOB_ID": "1", "SLURM_CPU_BIND": "x", "SLURM_ARRAY_JOB_ID": "3", "SLURMD_NODENAME": "n1", "SBATCH_EXPORT": "NONE",
        "SRUN_CPUS_PER_TASK": "2", "SQUEUE_FORMAT": "%i", "SACCT_FORMAT": "x", "PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0",
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "n1", "GROUP_RANK": "0", "ROLE_NAME": "x",
        "TORCHELASTIC_RUN_ID": "x", "SUBMITIT_EXECUTOR": "slurm", "APPTAINER_BIND": "/x", "SINGULARITYENV_X": "1",
        "HPCENV_LOCAL_NODE": "local0", "PET_NNODES": "2",
    }  # fmt: skip
    assert slurm_command.clean_environment(outer) == {}


def test_what_an_outer_gate_chose_does_not_pass_for_the_users_wish() -> None:
    chosen = {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "2"}
    assert slurm_command.clean_environment({**chosen, "TORCHELASTIC_RUN_ID": "7.0"}) == {}
    assert slurm_command.clean_environment(chosen) == chosen


def test_what_a_session_has_of_its_own_job_does_not_reach_a_new_job() -> None:
    user = {"PATH": "/usr/bin", "HOME": "/home/me", "SLURM_CONF": "/etc/slurm.conf"}
    of_the_session = {
        "HPCENV_RUN": "lab", "HPCENV_CHECKPOINTS": "/x", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "JPY_PARENT_PID": "1",
        "CUDA_VISIBLE_DEVICES": "3", "ROCR_VISIBLE_DEVICES": "3", "TMPDIR": "/tmp/7", "JUPYTER_TOKEN_FILE": "/tmp/7/token",
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    assert slurm_command.clean_environment({**user, **of_the_session}) == user
    outside = {"CUDA_VISIBLE_DEVICES": "3", "TMPDIR": "/scratch/me", **user}
    assert slurm_command.clean_environment(outside) == outside


def test_which_cluster_is_meant_and_what_is_the_users_stays() -> None:
    own = {
        "SLURM_CONF": "/etc/slurm.conf", "SLURM_JWT": "t", "SLURM_CLUSTERS": "a", "PATH": "/bin", "HOME": "/h",
        "RANKING": "1", "MY_RANK": "1", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "WANDB_API_KEY": "k",
    }  # fmt: skip
    assert slurm_command.clean_environment(own) == own


def test_what_sbatch_stores_with_the_job_has_no_credentials() -> None:
    """`hf_token` and `https_proxy` in small letters count, too; what --pass-env names is asked for."""
    shell = {
        "PATH": "/bin", "HOME": "/h", "PWD": "/w", "SLURM_JWT": "t", "TOKENIZERS_PARALLELISM": "false", "HF_HOME": "/m",
        "WANDB_API_KEY": "k", "HF_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "s", "DB_PASSWORD": "p", "MLFLOW_TOKEN": "m",
        "https_proxy": "http://me:secret@proxy:3128", "HTTP_PROXY": "http://proxy:3128", "no_proxy": "localhost",
        "PIP_INDEX_URL": "https://token@index.example/simple", "DB": "postgres://u:p@h/d", "GIT": "ssh://git@host/x",
    }  # fmt: skip
    kept = slurm_command.environment_to_store(shell, passed=("MLFLOW_*", "DB"))
    gone = {"WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"}
    stripped = {"https_proxy": "http://proxy:3128", "PIP_INDEX_URL": "https://index.example/simple"}
    assert kept == {name: stripped.get(name, value) for name, value in shell.items() if name not in gone}


def test_commands_see_the_cleaned_environment(fake_slurm: Any) -> None:
    slurm.job_state("7", {**fake_slurm.environ, "SQUEUE_FORMAT": "%i", "SLURM_CONF": "/x"})
    (call,) = fake_slurm.calls("squeue")
    assert "SQUEUE_FORMAT" not in call.env
    assert call.env["SLURM_CONF"] == "/x"


# -- cancel, find, refusals ---------------------------------------------------------------


def test_a_job_is_cancelled_by_its_number(fake_slurm: Any) -> None:
    slurm.cancel("42", fake_slurm.environ)
    assert [call.argv for call in fake_slurm.calls("scancel")] == [("42",)]


@pytest.mark.parametrize("word", ["--me", "-u alice", "", "1 2", "local-7", "٣"])
def test_nothing_else_is_handed_to_scancel(fake_slurm: Any, word: str) -> None:
    with pytest.raises(ToolFailed, match="is not a job id"):
        slurm.cancel(word, fake_slurm.environ)
    assert fake_slurm.calls("scancel") == []


def test_a_job_is_found_by_name_and_folder(fake_slurm: Any) -> None:
    fake_slurm.answers("squeue", "8|RUNNING|/home/bob/runs/a\n7|PENDING|/home/alice/a|b/runs/a\n٣|PENDING|/x\nbanner\n")
    places = {"/home/alice/a|b/runs/a": "a", "/home/alice/runs/a": "a", "/x": "b"}
    found = slurm.find_jobs(places, fake_slurm.environ)
    assert found == {
        "/home/alice/a|b/runs/a": (slurm.Found(job_id="7", state="pending"),), "/home/alice/runs/a": (), "/x": (),
    }  # fmt: skip
    (call,) = fake_slurm.calls("squeue")
    assert "--name=a,b" in call.argv


def test_an_array_is_found_by_its_own_number_whatever_its_elements_do(fake_slurm: Any) -> None:
    """`squeue-array-by-name`: one element runs, one was cancelled, the others wait; %i says `N_[2-3%1]` and `N_0`."""
    fake_slurm.replays("squeue", "squeue-array-by-name")
    said = (RECORDED / "24.11" / "squeue-array-by-name.out").read_text().splitlines()
    number, _, place = said[0].split("|")
    assert len(said) > 1
    found = slurm.find_jobs({place: "array"}, fake_slurm.environ)
    assert found == {place: (slurm.Found(job_id=number, state="running"),)}
    assert any("%F" in word for word in fake_slurm.calls("squeue")[0].argv)


def test_who_looks_for_no_job_asks_nobody_and_who_gets_no_answer_says_so(fake_slurm: Any, tmp_path: Path) -> None:
    assert slurm.find_jobs({}, fake_slurm.environ) == {}
    assert fake_slurm.calls("squeue") == []
    fake_slurm.answers("squeue", err="slurm_load_jobs error: Unable to contact slurm controller\n", status=1)
    with pytest.raises(ToolFailed):
        slurm.find_jobs({"/x": "a"}, fake_slurm.environ)
    assert len(fake_slurm.calls("squeue")) == 3, "now and then it fails once"
    with pytest.raises(ToolMissing):
        slurm.find_jobs({"/x": "a"}, {**fake_slurm.environ, "PATH": str(tmp_path)})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "reason", "hint"),
    [
        ("nosuch-partition", "invalid partition specified: nosuch", "sinfo --summarize"),
        ("nosuch-account", "Invalid account or account/partition combination", "sacctmgr"),
        ("impossible-nodes", "More processors requested than permitted", "sinfo"),
    ],
)
def test_a_refusal_comes_with_what_to_look_at(version: str, name: str, reason: str, hint: str) -> None:
    said, advice = slurm_command.rejection((RECORDED / version / f"sbatch-{name}.err").read_text())
    assert reason in said
    assert hint in str(advice)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("sbatch: error: Invalid --mem specification", "--mem 64G"),
        ("sbatch: error: Batch job submission failed: Requested reservation is invalid", "scontrol show reservation"),
        ("sbatch: error: Batch job submission failed: Job dependency problem", "squeue --me"),
    ],
)
def test_what_slurm_24_11_says_of_other_words(said: str, hint: str) -> None:
    assert hint in str(slurm_command.rejection(said)[1])


def test_an_unknown_refusal_is_quoted() -> None:
    assert slurm_command.rejection("the site's plugin says no\n") == ("the site's plugin says no", None)
    assert slurm_command.rejection("") == ("no message", None)


# -- many jobs at once --------------------------------------------------------------------


def test_many_jobs_are_one_question_to_each(fake_slurm: Any) -> None:
    ids = [str(number) for number in range(1000, 1500)] + ["77_3"]
    fake_slurm.answers(
        "squeue", "1000|RUNNING|None|n1|0:05\n1001|FAILED|NonZeroExitCode|n1|0:05\n77_3|PENDING|None||0:00\n"
    )
    fake_slurm.answers("sacct", "1001|FAILED|3:0|n1|00:00:05\n1002|COMPLETED|0:0|n1|00:00:05\n")
    states = slurm.job_states(ids, fake_slurm.environ)
    assert len(states) == 501
    assert [states[one].state for one in ("1000", "1001", "1002", "1003", "77_3")] == [
        "running", "failed", "completed", "unknown", "pending",
    ]  # fmt: skip
    assert states["1001"].exit_status == 3
    squeue, sacct = fake_slurm.calls("squeue"), fake_slurm.calls("sacct")
    assert (len(squeue), len(sacct)) == (1, 1)
    asked = next(word for word in sacct[0].argv if word.startswith("--jobs="))
    assert "1000," not in asked, "what squeue lists as running needs no accounting"


def test_elements_of_an_array_that_never_started_are_one_line_of_sacct(fake_slurm: Any) -> None:
    """As Slurm 24.11 wrote it on the testbed, after one element was cancelled by itself and then all."""
    fake_slurm.answers("squeue")
    fake_slurm.answers(
        "sacct", "120_[0,2,4-9%2]|CANCELLED by 2001|0:0|None assigned|00:00:00\n120_3|FAILED|1:0|n1|00:00:01\n"
    )
    states = slurm.job_states([f"120_{number}" for number in range(11)], fake_slurm.environ)
    assert {int(one.partition("_")[2]) for one, job in states.items() if job.state == "cancelled"} == {
        0,
        2,
        4,
        5,
        6,
        7,
        8,
        9,
    }
    assert states["120_3"].state == "failed"
    assert states["120_1"].gone
    assert states["120_10"].gone
    assert "--jobs=120" in fake_slurm.calls("sacct")[0].argv


def test_no_job_is_no_question(fake_slurm: Any) -> None:
    assert slurm.job_states([], fake_slurm.environ) == {}
    assert fake_slurm.calls("squeue") == []


def test_more_jobs_than_one_argument_holds(fake_slurm: Any) -> None:
    ids = [str(10**9 + number) for number in range(20_000)]
    fake_slurm.answers("squeue", f"{ids[0]}|RUNNING|None|n1|0:05\n")
    fake_slurm.answers("sacct", f"{ids[-1]}|COMPLETED|0:0|n1|00:00:05\n")
    states = slurm.job_states(ids, fake_slurm.environ)
    assert (states[ids[0]].state, states[ids[-1]].state) == ("running", "completed")
    assert not any(word.startswith("--jobs") for word in fake_slurm.calls("squeue")[0].argv)


def test_a_squeue_that_fails_is_asked_again_and_one_that_hangs_is_not(fake_slurm: Any, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    script = tools / "squeue"
    script.write_text(
        f"#!/bin/sh\necho x >> {tmp_path}/asked\n"
        f"[ $(wc -l < {tmp_path}/asked) -ge 3 ] && echo '7|RUNNING|None|n1|0:05' && exit 0\n"
        "echo 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2\nexit 1\n"
    )
    script.chmod(0o755)
    state = slurm.job_state("7", {**fake_slurm.environ, "PATH": f"{tools}:/usr/bin:/bin"})
    assert state.state == "running"
    assert (tmp_path / "asked").read_text().count("x") == 3


def test_without_accounting_sacct_is_asked_once(fake_slurm: Any) -> None:
    fake_slurm.replays("squeue", "squeue-nosuch")
    fake_slurm.answers("sacct", err="Slurm accounting storage is disabled\n", status=1)
    assert slurm.job_state("7", fake_slurm.environ).gone is True
    assert len(fake_slurm.calls("sacct")) == 1


@pytest.mark.parametrize(
    ("said", "seconds"), [("KillWait                = 45 sec\n", 45.0), ("", 30.0), ("KillWait = x", 30.0)]
)
def test_kill_wait(fake_slurm: Any, tmp_path: Path, said: str, seconds: float) -> None:
    tool = tmp_path / "bin" / "scontrol"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\nprintf '%s' '{said}'\n")
    tool.chmod(0o755)
    assert slurm.kill_wait({"PATH": f"{tool.parent}:/usr/bin:/bin"}) == seconds
