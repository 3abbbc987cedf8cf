"""`--cluster local`: the same steps on this machine, and no process left behind."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from hpcenv.records.files import load_record
from hpcenv.records.manifest import StopOptions, WatchOptions
from hpcenv.records.outcome import NodeExit
from hpcenv.records.verdict import NodeSettings, Verdict
from hpcenv.steps.local import node_names


def environ(run, **more):
    return {"PATH": os.environ["PATH"], "HOME": str(run.base), "TMPDIR": str(run.tmp), **more}


def go(run, **more):
    return subprocess.run(run.argv("local"), env=environ(run, **more), capture_output=True, text=True, timeout=60)


def start(run):
    with open(run.base / "log", "wb") as log:
        return run.start("local", env=environ(run), stdout=log, stderr=log, start_new_session=True)


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 20 s"
        time.sleep(0.02)


def left_behind(run):
    """Processes that carry the run's folder in their command line or environment."""
    mark, found = os.fsencode(str(run.base)), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes() or mark in (entry / "cmdline").read_bytes():
                    found.append((entry / "cmdline").read_bytes())
            except OSError:
                continue
    return found


def status(run):
    return json.loads(run.folder.finished.read_text())["status"]


# Tells the emulated nodes apart by their log folder, ranks/NODE.
WHO = "for word; do case $word in --log_dir=*) who=${word##*/};; esac; done\n"


def test_nodes_have_plain_names():
    assert node_names(3) == ("local0", "local1", "local2")


def test_all_nodes_are_checked_before_all_nodes_train(local_run):
    local_run.torchrun(WHO + 'echo "training on $who"')
    done = go(local_run)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("hpcenv verdict: match: 2 nodes, ")
    assert sorted(done.stdout.splitlines()[-2:]) == ["training on local0", "training on local1"]
    assert [node.node for node in load_record(Verdict, local_run.folder.verdict).nodes] == ["local0", "local1"]
    assert load_record(NodeSettings, local_run.folder.env_of("local1")).rendezvous.host == "127.0.0.1"
    assert status(local_run) == 0


def test_the_variables_of_a_slurm_job_around_it_do_not_count(local_run):
    done = go(local_run, SLURM_JOB_ID="5", SLURM_JOB_NODELIST="n[7-9]", SLURMD_NODENAME="n7", SLURM_RESTART_COUNT="4")
    assert (done.returncode, status(local_run)) == (0, 0)


def test_a_difference_ends_with_90_and_no_training(local_run):
    local_run.torchrun("echo training")
    local_run.probe(
        """echo '{"schema": 1, "level": "full", "values": {"python.version": "3.12.0"}, "unknown": {}, "packages": []}'"""
    )
    done = go(local_run)
    assert (done.returncode, status(local_run)) == (90, 90)
    assert "training" not in done.stdout
    assert "local[0-1]  python.version  3.11.7  3.12.0" in done.stdout


def test_what_could_not_be_told_ends_with_91(local_run):
    local_run.probe("exit 1")
    assert (go(local_run).returncode, status(local_run)) == (91, 91)


def test_a_begin_that_fails_ends_with_91(local_run):
    local_run.folder.facts.mkdir()
    local_run.folder.attempts.write_text("in the way")
    assert (go(local_run).returncode, status(local_run)) == (91, 91)


def test_the_status_of_a_node_that_fails_is_the_runs_and_the_other_node_ends(local_run):
    """The other node ignores the failure; it is told to end, and nothing of it stays."""
    # The time for the others is 20 s: far too long for a test, so this copy of the code has less.
    code = local_run.module("steps/local.py")
    code.write_text(code.read_text().replace("_SECONDS_FOR_OTHERS = 20.0", "_SECONDS_FOR_OTHERS = 0.5"))
    local_run.torchrun(WHO + '[ "$who" = local1 ] && exit 7\nexec sleep 60')
    done = go(local_run)
    assert (done.returncode, status(local_run)) == (7, 7)
    assert load_record(NodeExit, local_run.folder.exit_of("local0")).signal == "SIGTERM"
    assert left_behind(local_run) == []


def test_a_run_that_is_told_to_end_leaves_no_process_and_its_status(local_run):
    local_run.torchrun(WHO + f"echo $$ > {local_run.base}/ready-$who\nexec sleep 60")
    child = start(local_run)
    wait_for(lambda: all((local_run.base / f"ready-{node}").exists() for node in ("local0", "local1")))
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=20) == 143
    assert status(local_run) == 143
    assert {load_record(NodeExit, path).status for path in local_run.folder.exits.iterdir()} == {143}
    assert json.loads(local_run.folder.finished.read_text())["cancelled"] is True
    assert left_behind(local_run) == []
    assert os.listdir(local_run.tmp) == []


def test_a_run_that_is_told_to_end_while_it_checks_does_not_go_on(local_run):
    local_run.probe(f"echo $$ >> {local_run.base}/ready; exec sleep 60")
    local_run.torchrun("echo training")
    child = start(local_run)
    wait_for(lambda: (local_run.base / "ready").exists() and (local_run.base / "ready").read_text().count("\n") == 2)
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=20) == 143
    assert status(local_run) == 143
    assert not local_run.folder.verdict.exists()
    assert left_behind(local_run) == []
    assert os.listdir(local_run.tmp) == []


def test_a_run_that_is_told_to_end_at_once_starts_nothing_more(local_run):
    child = start(local_run)
    wait_for(local_run.folder.started.exists)
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=20) in (130, 0)  # 0: it was faster
    assert status(local_run) == child.returncode
    assert left_behind(local_run) == []


def test_a_run_in_which_nothing_is_in_use_ends_with_its_reason(local_run):
    local_run.save(watch=WatchOptions(sample=1, idle_end=6), stop=StopOptions(grace=4))
    local_run.torchrun("exec sleep 600")
    child = start(local_run)
    assert child.wait(timeout=240) in (137, 143)
    said = (local_run.base / "log").read_text()
    assert "hpcenv: idle: no GPU and no CPU was in use for " in said
    assert {load_record(NodeExit, path).stopped for path in local_run.folder.exits.iterdir()} == {"idle"}
    assert left_behind(local_run) == []
