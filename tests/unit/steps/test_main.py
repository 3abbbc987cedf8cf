"""The steps as the batch script runs them: `python3 -I RUN/code/step.py STEP RUN`, in a job of n1 and n2."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcenv.records.facts import Facts
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Setting, StopOptions
from hpcenv.records.outcome import NodeExit, StopRequest
from hpcenv.records.verdict import NodeSettings, Verdict
from hpcenv.steps import run_tasks
from hpcenv.steps.this_step import launched_nodes


def listing(folder):
    return sorted(os.listdir(folder)) if folder.exists() else []


def errors(done):
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()


@pytest.fixture
def checked_run(run_of_two, make_facts):
    """A begun run whose nodes have reported facts that match."""
    run = run_of_two
    assert run.step("begin").returncode == 0
    for node in ("n1", "n2"):
        save_record(make_facts(node), run.folder.facts_of(node))
    return run


# -- all of it ----------------------------------------------------------------------------


def test_a_job_of_one_node_from_begin_to_finish(run):
    run.torchrun("echo training")
    assert run.step("begin").returncode == 0
    assert run.step("check").returncode == 0
    decided = run.step("decide")
    assert (decided.returncode, decided.stderr) == (0, "")
    assert decided.stdout.startswith("hpcenv verdict: match: 1 node, ")
    trained = run.step("task")
    assert (trained.returncode, trained.stdout, trained.stderr) == (0, "training\n", "")
    assert run.step("finish", "0").returncode == 0
    assert json.loads(run.folder.finished.read_text())["status"] == 0
    assert listing(run.tmp) == []


def test_the_copy_in_the_run_folder_is_what_runs_whatever_pythonpath_says(run, tmp_path):
    (tmp_path / "evil" / "hpcenv").mkdir(parents=True)
    (tmp_path / "evil" / "hpcenv" / "__init__.py").write_text("raise SystemExit('evil')\n")
    (tmp_path / "evil" / "json.py").write_text("raise SystemExit('evil')\n")
    assert run.step("begin", PYTHONPATH=str(tmp_path / "evil")).returncode == 0


def test_the_steps_need_no_installed_package(run):
    blocked = [sys.executable, "-I", "-S", str(run.folder.step), "begin", str(run.folder.path)]
    done = subprocess.run(blocked, env=run.environ(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# -- begin --------------------------------------------------------------------------------


def test_begin_marks_attempt_node_and_job(run_of_two):
    assert run_of_two.step("begin", node="n1", SLURM_RESTART_COUNT="2").returncode == 0
    marker = json.loads(run_of_two.folder.started.read_text())
    assert abs(marker.pop("time") - time.time()) < 60
    assert marker == {
        "schema": 1, "attempt": 2, "restarts": 2, "node": "n1", "nodes": ["n1", "n2"], "job_id": "77",
        "submitted_as": "77",
    }  # fmt: skip
    run_of_two.step("begin", node="n1", SLURM_ARRAY_JOB_ID="70", SLURM_ARRAY_TASK_ID="3")
    assert json.loads(run_of_two.folder.started.read_text())["submitted_as"] == "70_3"


def test_jobs_of_a_chain_count_their_starts_together(checked_run):
    """Two starts of the first job, then the second: three attempts, and each step knows which it is."""
    checked_run.save(chain=2)
    for number, (job, restarts) in enumerate((("77", "0"), ("77", "1"), ("78", "0"))):
        environ = {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": restarts}
        assert checked_run.step("begin", **environ).returncode == 0
        assert checked_run.step("check", **environ).returncode == 0
        assert load_record(Facts, checked_run.folder.facts_of("n1")).attempt == number
        assert checked_run.step("finish", "7", **environ).returncode == 0
        # One of an earlier job that still runs on a lost node leaves no record.
        checked_run.folder.finished.unlink()
        checked_run.step("finish", "9", SLURM_JOB_ID="76")
        assert not checked_run.folder.finished.exists()
    assert json.loads(checked_run.folder.started.read_text())["attempt"] == 2
    told = [json.loads((checked_run.folder.attempts / n / "started.json").read_text()) for n in ("0", "1")]
    assert [(one["job_id"], one["attempt"], one["restarts"]) for one in told] == [("77", 0, 0), ("77", 1, 1)]


def test_what_an_earlier_attempt_left_is_set_aside_complete(checked_run):
    folder = checked_run.folder
    assert checked_run.step("decide").returncode == 0
    folder.homes.mkdir()
    assert checked_run.step("begin", SLURM_RESTART_COUNT="1").returncode == 0
    assert listing(folder.attempts / "0") == ["env", "exits", "facts", "started.json", "verdict.json"]
    kept = {folder.started, folder.exits}  # the folder of the end records is made first: a disk may be full later
    assert not any(path.exists() for path in folder.of_one_attempt() if path not in kept)
    assert listing(folder.exits) == []
    assert folder.homes.exists()
    assert folder.manifest.exists()


def test_a_script_that_is_started_again_by_hand_loses_nothing(run):
    for _ in range(3):
        assert run.step("begin").returncode == 0
    assert listing(run.folder.attempts) == ["0", "0.1"]


def test_a_damaged_marker_of_the_attempt_before_stops_nobody(run):
    run.folder.started.write_text("{")
    assert run.step("begin").returncode == 0
    assert (run.folder.attempts / "0" / "started.json").read_text() == "{"


def test_what_cannot_be_set_aside_stops_the_job(run):
    run.folder.facts.mkdir()
    run.folder.attempts.write_text("a file in the way")
    done = run.step("begin")
    assert done.returncode == 91
    assert errors(done) == [
        "error[file-unusable]: the begin step cannot go on",
        f"why: [Errno 20] Not a directory: '{run.folder.attempts / '0'}'",
        "hint: check permissions, space and quota of the run folder",
    ]


# -- check --------------------------------------------------------------------------------


def test_each_node_writes_its_own_facts(run_of_two):
    for node in ("n1", "n2"):
        assert run_of_two.step("check", node=node).returncode == 0
    assert listing(run_of_two.folder.facts) == ["n1.json", "n2.json"]
    found = load_record(Facts, run_of_two.folder.facts_of("n2"))
    assert (found.run, found.node, found.attempt) == ("r1", "n2", 0)
    assert found.network.first_node == "n1"


def test_a_node_that_differs_is_no_failure_of_the_check_step(run):
    run.probe("exit 1")
    done = run.step("check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert load_record(Facts, run.folder.facts_of("n1")).unknown["probe"] == "`python` ended with status 1"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_check_that_is_told_to_end_leaves_no_folder_and_no_file(run, number):
    run.probe("echo $$ > ../ready; exec sleep 60".replace("../ready", str(run.base / "ready")))
    child = run.start("check")
    deadline = time.monotonic() + 15
    while not (run.base / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(listing(run.tmp)) == 1
    child.send_signal(number)
    assert child.wait(timeout=20) == 128 + number
    child.stdout.close()
    assert (listing(run.tmp), listing(run.folder.facts)) == ([], [])


# -- decide -------------------------------------------------------------------------------


def test_a_match_writes_settings_for_every_node_and_the_verdict(checked_run):
    done = checked_run.step("decide")
    assert (done.returncode, done.stderr) == (0, "")
    verdict = load_record(Verdict, checked_run.folder.verdict)
    assert (verdict.run, verdict.attempt, verdict.result) == ("r1", 0, "match")
    second = load_record(NodeSettings, checked_run.folder.env_of("n2"))
    assert (second.run, second.node, second.attempt, second.node_rank) == ("r1", "n2", 0, 1)
    assert (second.local_address, second.rendezvous) == ("10.0.0.2", verdict.rendezvous)
    assert second.settings == verdict.settings["n2"]
    assert (verdict.network.profile, second.binds) == ("gloo", ())
    assert {row.name: row.value for row in verdict.network.rows}["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_start_counts_as_use_of_the_image_in_the_store(checked_run, tmp_path):
    record = tmp_path / "images" / f"sha256-{'a' * 64}.json"
    record.parent.mkdir()
    record.write_text("{}")
    os.utime(record, (1, 1))
    environment = dataclasses.replace(checked_run.manifest.environment, sif=str(record.with_suffix(".sif")))
    checked_run.save(environment=environment)
    assert checked_run.step("decide").returncode == 0
    assert record.stat().st_mtime > 1


def test_a_node_that_differs_ends_with_90_a_table_and_no_settings(checked_run, make_facts):
    save_record(make_facts("n2", values={"python.version": "3.11.8"}), checked_run.folder.facts_of("n2"))
    done = checked_run.step("decide")
    assert done.returncode == 90
    assert done.stdout == (
        "hpcenv verdict: MISMATCH: 1 of 2 nodes not as lockfiles/default.lock.toml says\n"
        "\n"
        "  n1  match     2 fields compared\n"
        "  n2  MISMATCH  2 fields compared\n"
        "\n"
        "NODE  FIELD           LOCKED  FOUND\n"
        "n2    python.version  3.11.7  3.11.8\n"
        "\n"
    )
    assert load_record(Verdict, checked_run.folder.verdict).result == "mismatch"
    assert not checked_run.folder.env.exists()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ('{"schema": 2}', "has schema 2, this hpcenv reads schema 1"),
        ("\udcff", "is not UTF-8 text"),
        ("", "is not JSON"),
    ],
)
def test_facts_that_cannot_be_read_end_with_91_and_say_why(checked_run, damage, said):
    checked_run.folder.facts_of("n2").write_bytes(damage.encode("utf-8", "surrogateescape"))
    done = checked_run.step("decide")
    assert (done.returncode, done.stderr) == (91, "")
    (finding,) = load_record(Verdict, checked_run.folder.verdict).findings
    assert (finding.node, finding.field, finding.result) == ("n2", "facts", "unknown")
    assert said in finding.found


@pytest.mark.parametrize("changes", [{"attempt": 1}, {"run": "other"}])
def test_facts_of_another_start_end_with_91(checked_run, make_facts, changes):
    save_record(dataclasses.replace(make_facts("n2"), **changes), checked_run.folder.facts_of("n2"))
    assert checked_run.step("decide").returncode == 91


def test_facts_that_appear_late_still_count(checked_run, make_facts):
    path = checked_run.folder.facts_of("n2")
    path.unlink()
    child = checked_run.start("decide")
    time.sleep(0.7)
    save_record(make_facts("n2"), path)
    assert child.wait(timeout=20) == 0
    child.stdout.close()


def test_a_manifest_that_expects_nothing_opens_no_gate(checked_run):
    checked_run.save(expectations=())
    done = checked_run.step("decide")
    assert done.returncode == 91
    assert "nothing that the lockfile names could be compared" in done.stdout


def test_settings_that_cannot_be_written_leave_no_verdict(checked_run):
    checked_run.folder.env.write_text("a file in the way")
    done = checked_run.step("decide")
    assert done.returncode == 91
    assert errors(done)[0] == "error[file-unusable]: the decide step cannot go on"
    assert not checked_run.folder.verdict.exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_table_that_cannot_be_printed_opens_no_gate(checked_run):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            checked_run.argv("decide"), env=checked_run.environ(), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode != 0
    assert "error[file-unusable]: the decide step cannot go on" in done.stderr


def test_a_locale_that_cannot_write_a_name_is_no_reason_to_end(checked_run, make_facts):
    checked_run.save(
        lockfile="caf\u00e9.lock.toml", settings=(Setting(name="GREETING", value="\u65e5\u672c", origin="--env"),)
    )
    save_record(make_facts("n2", values={"python.version": "3.11.8"}), checked_run.folder.facts_of("n2"))
    environ = checked_run.environ(PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    argv = checked_run.argv("decide")
    argv[1:2] = ["-s", "-P"] if sys.version_info >= (3, 11) else ["-s"]  # without -I the locale variables count
    done = subprocess.run(argv, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (90, "")
    assert "caf\\xe9.lock.toml" in done.stdout


# -- task ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("program", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137)])
def test_the_task_ends_with_the_trainings_own_status(run, program, status):
    run.open_gate()
    run.torchrun(f"echo training; {program}")
    argv = run.argv("task")
    argv[1:2] = ["-I", "-S"]  # no site-packages
    done = subprocess.run(argv, env=run.environ(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "training\n")


def test_behind_a_closed_gate_the_task_ends_with_91(run):
    run.open_gate(result="unknown")
    done = run.step("task")
    assert done.returncode == 91
    assert "error[nodes-unknown]: no matching verdict for attempt 0\n" in done.stderr


# -- what every step refuses --------------------------------------------------------------


@pytest.mark.parametrize("step", ["begin", "check", "decide", "task", "local"])
def test_a_manifest_that_is_missing_or_damaged_is_an_error_and_never_a_traceback(run, step):
    run.folder.manifest.write_text('{"schema": 1')
    done = run.step(step)
    assert done.returncode == 91
    assert errors(done)[0] == f"error[record-invalid]: `{run.folder.manifest}` is not JSON"
    run.folder.manifest.unlink()
    done = run.step(step)
    assert done.returncode == 91
    assert errors(done)[0] == f"error[record-invalid]: cannot read `{run.folder.manifest}`"


@pytest.mark.parametrize("step", ["check", "task"])
def test_outside_of_a_job_no_step_runs(run, step):
    environ = {name: value for name, value in run.environ().items() if not name.startswith("SLURM")}
    done = subprocess.run(run.argv(step), env=environ, capture_output=True, text=True)
    assert done.returncode == 91
    assert errors(done) == [
        "error[nodes-unknown]: this step does not run inside a Slurm job",
        "why: SLURMD_NODENAME is not set",
        "hint: start it with `hpcenv submit SCRIPT`",
    ]


@pytest.mark.parametrize("step", ["begin", "task"])
def test_a_copied_run_folder_does_not_run(run, step, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run.folder.path, copy)
    argv = [sys.executable, "-I", str(copy / "code" / "step.py"), step, str(copy)]
    done = subprocess.run(argv, env=run.environ(), capture_output=True, text=True)
    assert done.returncode == 91
    assert errors(done) == [
        f"error[record-invalid]: `{copy}/manifest.json` is the manifest of another run folder",
        f"why: it was made for {run.folder.path}",
        "hint: do not copy or move the folder of a run that has not ended; submit again",
    ]


def test_a_run_folder_that_is_reached_by_another_name_runs(run, tmp_path):
    (tmp_path / "link").symlink_to(run.folder.path)
    argv = [sys.executable, "-I", str(run.folder.step), "begin", str(tmp_path / "link")]
    assert subprocess.run(argv, env=run.environ()).returncode == 0


@pytest.mark.parametrize("name", ["nodes", "nproc_per_node"])
def test_a_manifest_without_nodes_or_ranks_is_refused(run, name):
    run.save(**{name: 0})
    done = run.step("begin")
    assert errors(done) == [
        f"error[record-invalid]: `{run.folder.manifest}`: `Manifest.{name}` is 0, expected 1 or more"
    ]


def node_exit(node, status, ended, *, asked="", attempt=0):
    return NodeExit(
        schema=1, run="r1", node=node, attempt=attempt, status=status, signal="", started=0.0, ended=ended,
        asked_to_end=asked,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("records", "status"),
    [
        # n2 failed, n1 was told to end because of it and died of the signal: 143 is higher.
        ([node_exit("n1", 143, 9.0, asked="SIGTERM"), node_exit("n2", 7, 5.0)], 7),
        ([node_exit("n1", 1, 5.0), node_exit("n2", 3, 4.0)], 3),
        # Cancelled: no node failed by itself, so the status that Slurm gives counts.
        ([node_exit("n1", 143, 9.0, asked="SIGTERM"), node_exit("n2", 1, 9.0, asked="SIGTERM")], 143),
        # What an earlier attempt left says nothing.
        ([node_exit("n1", 7, 5.0, attempt=3), node_exit("n2", 0, 5.0)], 143),
        ([], 143),
    ],
)
def test_the_runs_status_is_that_of_the_node_which_failed_first(run_of_two, records, status):
    for record in records:
        save_record(record, run_of_two.folder.exit_of(record.node))
    assert run_of_two.step("run-tasks", "sh", "-c", "exit 143").returncode == status


@pytest.mark.parametrize(("said", "status"), [("9", 137), ("15", 143), ("1", 1), ("2", 2)])
def test_the_bare_number_of_a_signal_is_one_only_where_slurm_sends_it_to_srun(run_of_two, said, status):
    """Seen on a full disk: no record, and srun ends with 15. A status of 1 is that of a task."""
    assert run_of_two.step("run-tasks", "sh", "-c", f"exit {said}").returncode == status


# -- a stop before the training -----------------------------------------------------------


def scontrol_says(run, line):
    """Put an scontrol on PATH that shows the job so; returns the variable."""
    tool = run.base / "tools" / "scontrol"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(f"#!/bin/sh\n[ \"$1 $2\" = 'show job' ] && echo '{line}'\nexit 0\n")
    tool.chmod(0o755)
    return {"PATH": f"{tool.parent}:{os.environ['PATH']}"}


PREEMPTED = "JobId=77 JobState=RUNNING StartTime=2026-11-20T10:00:00 PreemptTime=2026-11-20T10:05:00 EndTime=Unknown"
LIMIT = "JobId=77 JobState=TIMEOUT Reason=TimeLimit StartTime=2026-11-20T10:00:00 PreemptTime=None EndTime=Unknown"


@pytest.mark.parametrize(
    ("line", "signal_status", "status", "stopped", "cancelled"),
    [
        (PREEMPTED, 140, 91, "preemption", False),
        (PREEMPTED, 143, 91, "preemption", False),
        (LIMIT, 143, 91, "time-limit", False),
        ("JobId=77 JobState=RUNNING PreemptTime=None EndTime=Unknown", 138, 91, "unknown", False),
        ("JobId=77 JobState=COMPLETING Reason=None PreemptTime=None", 143, 143, "", True),
    ],
)
def test_a_stop_before_the_training_is_recorded_with_its_reason(run, line, signal_status, status, stopped, cancelled):
    tools = scontrol_says(run, line)
    run.save(retry_excluding=1)
    assert run.step("begin", **tools).returncode == 0
    assert run.step("stopped", str(signal_status), **tools).returncode == status
    assert run.step("finish", str(status), **tools).returncode == 0
    record = json.loads(run.folder.finished.read_text())
    found = (record["status"], record["stopped"], record["before_training"], record["cancelled"])
    assert found == (status, stopped, not cancelled, cancelled)
    assert (record["again"], run.folder.excluded.exists()) == (stopped in ("preemption", "unknown"), False)


def test_term_for_a_reason_that_nobody_knows_lets_the_job_go_on(run):
    tools = scontrol_says(run, "JobId=77 JobState=RUNNING PreemptTime=None EndTime=Unknown")
    assert run.step("begin").returncode == 0
    assert run.step("stopped", "143", **tools).returncode == 0
    assert not run.folder.stopping.exists()
    run.step("finish", "91", **tools)
    assert json.loads(run.folder.finished.read_text())["before_training"] is False


@pytest.mark.parametrize(("ranks", "before"), [(False, True), (True, False)])
def test_a_launch_that_slurm_lets_no_more_begin_was_stopped_before(run, ranks, before):
    """srun: Job/step already completing or completed."""
    tools = scontrol_says(run, LIMIT)
    assert run.step("begin").returncode == 0
    run.open_gate()
    if ranks:
        run.folder.ranks.mkdir()
    run.step("finish", "1", **tools)
    record = json.loads(run.folder.finished.read_text())
    assert (record["before_training"], record["stopped"]) == (before, "time-limit" if before else "")


@pytest.mark.parametrize(
    ("requeue", "scontrol", "status", "not_again", "again"),
    [
        ("never", 0, 143, "--requeue never", False),
        ("saved", 0, 0, "", True),
        ("saved", 1, 143, "ended with status 1", False),
    ],
)
def test_a_job_whose_training_was_cut_off_does_not_end_as_completed(run, requeue, scontrol, status, not_again, again):
    tool = run.base / "tools" / "scontrol"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\n[ "$1" != requeue ] || exit {scontrol}\n')
    tool.chmod(0o755)
    run.save(stop=StopOptions(requeue=requeue))
    assert run.step("begin").returncode == 0
    run.open_gate()
    saved = dataclasses.replace(node_exit("n1", 0, 5.0), stopped="time-limit", saved=True)
    save_record(saved, run.folder.exit_of("n1"))
    done = run.step("finish", "0", PATH=f"{tool.parent}:{os.environ['PATH']}")
    record = json.loads(run.folder.finished.read_text())
    assert (record["status"], record["unfinished"], record["again"]) == (status, True, again)
    assert not_again in record["not_again"]
    # The batch script then ends with 143.
    assert done.returncode == (101 if status else 0)


@pytest.mark.parametrize(("status", "result"), [(90, "mismatch"), (91, "unknown")])
@pytest.mark.parametrize("line", ["JobId=77 JobState=RUNNING PreemptTime=None EndTime=Unknown", PREEMPTED])
def test_a_node_that_refuses_to_start_ends_the_job_although_srun_asked_the_other_one_to_end(
    run_of_two, line, status, result
):
    """srun sends TERM to n1 because n2 has ended, and n1 writes down that it was asked: there was no request to the job."""
    tools = scontrol_says(run_of_two, line)
    assert run_of_two.step("begin").returncode == 0
    run_of_two.open_gate()
    asked = dataclasses.replace(
        node_exit("n1", 143, 4.0, asked="SIGTERM"), stopped="preemption" if line == PREEMPTED else ""
    )
    refused = dataclasses.replace(node_exit("n2", status, 9.0), refused=True, detail="the SIF changed on node n2")
    request = StopRequest(schema=1, run="r1", node="n1", attempt=0, signal="SIGTERM", reason="unknown", asked=3.0)
    save_record(request, run_of_two.folder.stop_of("n1"))
    for record in (asked, refused):
        save_record(record, run_of_two.folder.exit_of(record.node))
    assert run_of_two.step("run-tasks", "sh", "-c", "exit 143", **tools).returncode == status
    assert run_of_two.step("finish", str(status), **tools).returncode == 0
    finished = json.loads(run_of_two.folder.finished.read_text())
    found = {name: finished[name] for name in ("status", "again", "before_training", "stopped", "unfinished")}
    assert found == {"status": status, "again": False, "before_training": False, "stopped": "", "unfinished": False}
    assert json.loads(run_of_two.folder.verdict.read_text())["result"] == result


def test_a_note_of_an_earlier_attempt_says_nothing_of_this_one(run):
    tools = scontrol_says(run, PREEMPTED)
    run.step("begin")
    run.step("stopped", "140", **tools)
    note = run.folder.stop_of("n1").read_text()
    run.step("begin", SLURM_RESTART_COUNT="1")
    run.folder.stopping.mkdir()
    run.folder.stop_of("n1").write_text(note)
    run.step("finish", "91", SLURM_RESTART_COUNT="1", **tools)
    assert json.loads(run.folder.finished.read_text())["before_training"] is False


@pytest.mark.parametrize(
    "words", [[], ["begin"], ["dance", "/x"], ["begin", "/x", "more"], ["finish", "/x"], ["run-tasks", "/x"]]
)
def test_wrong_words_are_told_what_is_right(run, words):
    done = subprocess.run([sys.executable, "-I", str(run.folder.step), *words], capture_output=True, text=True)
    assert done.returncode == 91
    assert done.stderr == (
        "error[usage]: step.py takes one of begin, former, modules, stage-look, stage-send, stage-keep, check, stopped, decide, inside, inside-judge, gpus, gpus-judge, smoke, smoke-pairs, smoke-judge, task, watch, session, ssh-server, ssh-command, page, run-tasks, finish, local and a run folder; "
        "`stopped` and `finish` also take a status, `ssh-command` a folder, `page` a service, and `run-tasks` a command\n"
    )


@pytest.mark.parametrize("status", ["0", "91", "137"])
def test_what_is_no_request_to_end_is_not_noted_as_one(run, status):
    done = run.step("stopped", status)
    assert (done.returncode, errors(done)) == (91, [f"error[usage]: `{status}` is not 128 + USR1, USR2 or TERM"])
    assert not run.folder.stopping.exists()


@pytest.mark.parametrize("status", ["", "-1"])
def test_a_status_that_is_none_is_refused(run, status):
    done = run.step("finish", status)
    assert (done.returncode, errors(done)) == (91, [f"error[usage]: `{status}` is not an exit status"])
    assert not run.folder.finished.exists()


# -- srun that waits for a lost node -------------------------------------------------------


def test_a_signal_that_reaches_all_processes_of_the_batch_script_ends_srun_and_not_the_step_that_waits(run_of_two):
    """The step ignores it, and srun does not inherit that."""
    argv = [*run_of_two.argv("run-tasks"), "sh", "-c", "echo began; exec sleep 60"]
    with subprocess.Popen(argv, env=run_of_two.environ(), stdout=subprocess.PIPE) as step:
        assert step.stdout.readline() == b"began\n"
        for path in Path(f"/proc/{step.pid}/task/{step.pid}/children").read_text().split():
            os.kill(step.pid, signal.SIGTERM)
            os.kill(int(path), signal.SIGTERM)
        assert step.wait(timeout=30) == 143


def test_a_node_without_a_record_is_waited_for_a_minute_after_another_one_failed(run_of_two):
    ends = run_tasks.SeenEnds(run_of_two.folder, run_of_two.place())
    assert ends.late(0.0) == ""
    save_record(node_exit("n1", 1, 5.0), run_of_two.folder.exit_of("n1"))
    assert (ends.late(10.0), ends.late(69.0)) == ("", "")
    says = "node n2 left no record of how the training ended, long after another node has failed"
    assert ends.late(71.0) == says
    save_record(node_exit("n2", 0, 5.0), run_of_two.folder.exit_of("n2"))
    assert ends.late(71.0) == "all nodes have ended"


@pytest.mark.parametrize(("seconds", "late"), [(1850, False), (1870, True)])
def test_a_node_that_works_longer_than_one_that_ended_well_has_the_half_hour_of_srun(run_of_two, seconds, late):
    ends = run_tasks.SeenEnds(run_of_two.folder, run_of_two.place())
    save_record(node_exit("n1", 0, 5.0), run_of_two.folder.exit_of("n1"))
    save_record(node_exit("n2", 1, 5.0, attempt=3), run_of_two.folder.exit_of("n2"))
    assert ends.late(0.0) == ""
    assert bool(ends.late(float(seconds))) is late


@pytest.mark.parametrize(
    ("signal_name", "reason", "ends", "until"),
    [
        ("SIGUSR2", "unknown", None, 160.0),
        ("SIGUSR2", "time-limit", 200.0, 200.0),
        ("SIGTERM", "preemption", 300.0, 300.0),
        # srun's own, after another node has failed; and a cancel: no training saves anything.
        ("SIGTERM", "unknown", None, 0.0),
        ("SIGTERM", "cancelled", None, 0.0),
    ],
)
def test_who_was_asked_to_stop_may_save_until_the_end_of_the_grace_period(run_of_two, signal_name, reason, ends, until):
    request = StopRequest(
        schema=1, run="r1", node="n2", attempt=0, signal=signal_name, reason=reason, asked=100.0, ends=ends
    )
    save_record(request, run_of_two.folder.stop_of("n2"))
    run_of_two.save(stop=StopOptions(grace=60))
    folder, manifest = run_of_two.folder, run_of_two.manifest
    assert run_tasks.saving_until(folder, manifest, run_of_two.place()) == until
    assert run_tasks.saving_until(folder, manifest, run_of_two.place(attempt=1)) == 0.0


def test_a_fault_of_hpcenv_itself_does_not_look_like_one_of_the_training(run):
    facts = run.module("facts/facts.py")
    facts.write_text(facts.read_text() + "\ndef gather(*a, **k):\n    return 1 / 0\n")
    done = run.step("check")
    assert done.returncode == 91
    assert done.stderr.startswith("error[internal]: the check step failed\nwhy: Traceback")
    assert "ZeroDivisionError" in done.stderr


def test_what_watches_the_run_waits_for_the_nodes_that_train_and_not_for_spare_ones(run_of_two):
    place = run_of_two.place()
    assert launched_nodes(run_of_two.folder, place) == ("n1", "n2"), "without a verdict"
    run_of_two.open_gate()
    verdict = load_record(Verdict, run_of_two.folder.verdict)
    save_record(dataclasses.replace(verdict, launched=("n2",)), run_of_two.folder.verdict)
    assert launched_nodes(run_of_two.folder, place) == ("n2",)
