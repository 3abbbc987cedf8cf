"""The launch step: the gate before it, torchrun's command line, signals, statuses, what is left."""

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hpcenv.identity import sif_check
from hpcenv.launch import launch, node_folders, starts
from hpcenv.records.facts import Facts, Network, Staged
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import (
    Bind,
    DataFolder,
    Environment,
    LaunchOptions,
    PreflightOptions,
    Secret,
    StageRequest,
)
from hpcenv.records.outcome import NodeExit, RankExit
from hpcenv.records.verdict import NodeSettings, Rendezvous


def wait_for(condition):
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 15 s"
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def read_pid(path):
    wait_for(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


def exit_record(run):
    return load_record(NodeExit, run.folder.exit_of("n1"))


# -- the command line ---------------------------------------------------------------------


def settings(**changes):
    base = NodeSettings(
        schema=1,
        run="r1",
        node="n1",
        attempt=0,
        node_rank=0,
        local_address="10.0.0.1",
        rendezvous=Rendezvous(host="10.0.0.1", port=23456, id="77.0"),
        settings=(),
    )
    return dataclasses.replace(base, **changes)


def words(manifest, nodes=2, **changes):
    return starts.torchrun_argv(manifest, settings(**changes), nodes=nodes, log_dir="/runs/r1/ranks/n1")


def test_torchrun_gets_an_explicit_rendezvous(make_manifest):
    assert words(make_manifest(args=("--lr", "3e-4"))) == [
        "--nnodes=2",
        "--nproc_per_node=2",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=10.0.0.1:23456",
        "--rdzv_id=77.0",
        "--rdzv_conf=is_host=1",
        "--local_addr=10.0.0.1",
        "--log_dir=/runs/r1/ranks/n1",
        "--tee=3",
        "--",
        "/job/train.py",
        "--lr",
        "3e-4",
    ]


def test_torchrun_is_started_by_a_program_that_records_how_ranks_end(make_manifest):
    manifest = make_manifest()
    argv = launch.agent_argv(manifest, "n1", words=starts.launcher_words(manifest, settings(), nodes=2))
    assert argv[:4] == [
        "/env/bin/python",
        "/runs/r1/code/hpcenv/incontainer/agent.py",
        "/runs/r1/ranks/n1/agent.json",
        "--",
    ]
    assert argv[4:] == words(manifest)


def test_only_the_first_node_hosts_and_an_ipv6_endpoint_has_brackets(make_manifest):
    other = {"node_rank": 1, "local_address": "fd00::2", "rendezvous": Rendezvous(host="fd00::1", port=1, id="7.1")}
    argv = words(make_manifest(), **other)
    assert "--rdzv_conf=is_host=0" in argv
    assert "--rdzv_endpoint=[fd00::1]:1" in argv
    assert "--local_addr=fd00::2" in argv


def test_words_for_torchrun_come_first(make_manifest):
    options = LaunchOptions(torchrun_args=("--monitor-interval", "5", "--role=a b", "--max-restarts=3"))
    argv = words(make_manifest(launch=options))
    assert argv[:4] == ["--monitor-interval", "5", "--role=a b", "--max-restarts=3"]


def test_arguments_reach_the_script_as_they_are_also_a_double_dash(make_manifest):
    import argparse

    # As torch/distributed/run.py declares them (torch 2.13).
    parser = argparse.ArgumentParser()
    for name in ("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"):
        parser.add_argument(f"--{name}")
    for name in ("local_addr", "log_dir", "tee"):
        parser.add_argument(f"--{name}")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    given = ("--", "--nnodes=9", "", "a b", "$(id)", "line\nbreak", "--", "--help")
    parsed = parser.parse_args(words(make_manifest(args=given)))
    assert (parsed.training_script, tuple(parsed.training_script_args), parsed.nnodes) == ("/job/train.py", given, "2")


# -- the gate -----------------------------------------------------------------------------


def refused(run, done, *lines):
    assert done.returncode == 91
    assert done.stderr.splitlines() == list(lines)
    # Nothing of the script ran; what is recorded is the gate's own status.
    assert not run.folder.ranks.exists()
    assert load_record(NodeExit, run.folder.exit_of("n1")).status == 91


def test_without_a_verdict_nothing_starts(run):
    run.torchrun("echo started")
    done = run.step("task")
    assert done.returncode == 91
    assert done.stdout == ""
    assert done.stderr.startswith(f"error[record-invalid]: cannot read `{run.folder.verdict}`\nwhy: ")


@pytest.mark.parametrize("result", ["mismatch", "unknown"])
def test_a_verdict_that_is_no_match_keeps_the_gate_closed(run, result):
    run.open_gate(result=result)
    refused(
        run,
        run.step("task"),
        "error[nodes-unknown]: no matching verdict for attempt 0",
        f"why: {run.folder.verdict} has `{result}` for run r1, attempt 0",
        "hint: start the run with its batch script, which checks the nodes first",
    )


def test_a_verdict_of_the_attempt_before_does_not_open_the_gate(run):
    run.open_gate(attempt=0)
    done = run.step("task", SLURM_RESTART_COUNT="1")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        91,
        "error[nodes-unknown]: no matching verdict for attempt 1",
    )


def test_a_verdict_of_another_run_does_not_open_the_gate(run):
    run.open_gate(run="r0")
    assert f"why: {run.folder.verdict} has `match` for run r0, attempt 0" in run.step("task").stderr


def test_settings_that_another_job_wrote_into_the_folder_are_refused(run):
    run.open_gate(rendezvous="78.0")
    refused(
        run,
        run.step("task"),
        "error[nodes-unknown]: the settings of node n1 belong to another start of the job",
        f"why: {run.folder.env_of('n1')} belongs to run r1, attempt 0, node n1, rendezvous 78.0",
        "hint: do not start two jobs in one run folder",
    )


# -- statuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "status", "name"),
    [("exit 0", 0, ""), ("exit 7", 7, ""), ("kill -KILL $$", 137, "SIGKILL")],
)
def test_the_status_of_torchrun_is_the_status_of_the_task(run, program, status, name):
    run.open_gate()
    run.torchrun(program)
    done = run.step("task")
    assert (done.returncode, done.stderr) == (status, "")
    record = exit_record(run)
    assert (record.run, record.node, record.attempt, record.status, record.signal) == ("r1", "n1", 0, status, name)
    assert 0 <= record.ended - record.started < 60


def test_torchrun_gets_settings_arguments_and_working_directory(run):
    run.save(args=("--lr", "a b", "$(id)"))
    run.open_gate()
    run.torchrun('shift 2; for last; do :; done; echo "$PWD $NCCL_DEBUG [$last] ${PYTHONPATH-none}"')
    done = run.step("task", PYTHONPATH="/evil")
    assert done.stdout == f"{run.base} WARN [$(id)] none\n"


def test_an_environment_that_this_node_does_not_see_is_an_error_and_no_traceback(run):
    run.open_gate()
    (run.bin / "python").unlink()
    done = run.step("task")
    assert done.returncode == 91
    assert done.stderr.splitlines() == [
        "error[tool-missing]: torchrun cannot be started",
        f"why: {run.bin}/python in {run.base}: [Errno 2] No such file or directory: '{run.bin}/python'",
        "hint: check that this node can see the environment and the working directory",
    ]


def test_a_working_directory_that_this_node_does_not_see_is_an_error(run):
    run.open_gate()
    run.save(workdir=str(run.base / "gone"))
    done = run.step("task")
    assert done.returncode == 91
    assert "error[tool-missing]: torchrun cannot be started\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_status_is_not_lost_because_it_cannot_be_written_down(run):
    run.open_gate()
    run.torchrun("exit 7")
    run.folder.exits.write_text("a file in the way of the folder")
    done = run.step("task")
    assert done.returncode == 7
    assert done.stderr.startswith(f"hpcenv: node n1: cannot write {run.folder.exit_of('n1')}: ")


RECORDS = """
record=$2
mkdir -p "$(dirname "$record")/77.0_x/attempt_0/1"
printf 'Traceback (most recent call last):\\nRuntimeError: \\033[31mno\\n' > "$(dirname "$record")/77.0_x/attempt_0/1/stderr.log"
echo '{"status": 7, "ranks": [{"rank": 3, "local_rank": 1, "pid": 9, "status": 7, "ended": 5.0, "error_file": ""}]}' > "$record"
exit 7
"""


def test_the_ranks_that_failed_are_in_the_record_and_in_the_log(run):
    run.open_gate()
    run.torchrun(RECORDS)
    done = run.step("task")
    assert (done.returncode, done.stderr) == (
        7,
        "hpcenv: node n1: rank 3 ended with exit 7: RuntimeError: \\x1b[31mno\n",
    )
    assert exit_record(run).ranks == (
        RankExit(
            rank=3,
            local_rank=1,
            pid=9,
            status=7,
            ended=5.0,
            message="RuntimeError: \x1b[31mno",
            traceback="Traceback (most recent call last):\nRuntimeError: \x1b[31mno",
            source="stderr",
            log="ranks/n1/77.0_x/attempt_0/1/stderr.log",
        ),
    )


def test_a_torchrun_that_records_nothing_is_said_to_have_done_so(run):
    run.open_gate()
    run.torchrun("exit 7")
    run.step("task")
    assert (exit_record(run).ranks, exit_record(run).detail) == ((), "torchrun left no record of its ranks")


# -- the environment of the ranks ---------------------------------------------------------


@pytest.mark.skipif(os.getuid() != 0, reason="NOT RUN: a mount over /sys/class needs root")
def test_errors_of_rdma_ports_that_grow_while_the_ranks_run_are_recorded_and_said(run):
    port = run.base / "class" / "infiniband" / "mlx5_0" / "ports" / "1" / "counters"
    port.mkdir(parents=True)
    (port / "link_downed").write_text("4\n")
    (port / "symbol_error").write_text("0\n")
    run.save(preflight=PreflightOptions(level="quick"))
    run.open_gate()
    run.torchrun(f"sleep 0.5; echo 6 > {port}/link_downed; echo 2 > {port}/symbol_error; exit 1")
    mount = ["unshare", "--mount", "sh", "-c", f'mount --bind {run.base}/class /sys/class && exec "$@"', "sh"]
    done = subprocess.run([*mount, *run.argv("task")], env=run.environ(), cwd="/", capture_output=True, text=True)
    assert done.returncode == 1
    assert "hpcenv: node n1: RDMA errors while the ranks ran: mlx5_0:1 link_downed +2" in done.stderr.splitlines()
    record = exit_record(run)
    assert [(one.counter, one.grown, one.many) for one in record.port_errors] == [
        ("link_downed", 2, True),
        ("symbol_error", 2, False),
    ]
    assert record.port_errors_unknown == ""


def test_ranks_learn_where_their_run_is(run):
    run.open_gate()
    run.torchrun('echo "$HPCENV_RUN_FOLDER $HPCENV_STOP_FOLDER $HPCENV_CHECKPOINTS $HPCENV_ATTEMPT"')
    folder = run.folder.path
    assert run.step("task").stdout == f"{folder} {folder}/stop {folder}/checkpoints 0\n"


ODD = "a 'b' \"c\", `id` $(id) \\ \n end"


def test_the_number_of_the_node_is_that_of_the_launch_not_of_slurms_topology(run):
    run.open_gate()
    run.torchrun(f'printf "%s" "$SLURM_NODEID" > {run.base}/seen')
    assert run.step("task", SLURM_NODEID="5").returncode == 0
    assert (run.base / "seen").read_text() == "0"


def test_secrets_reach_the_ranks_and_nothing_else(run):
    file = run.base / "token"
    file.write_text(f"{ODD}\n")
    run.save(
        secrets=(
            Secret(name="TOKEN", source=f"file:{file}", origin="--secret"),
            Secret(name="OTHER", source="env:MY_TOKEN", origin="[secrets]"),
        )
    )
    run.open_gate()
    run.torchrun(f'printf "%s|%s|%s" "$TOKEN" "$OTHER" "$MY_TOKEN" > {run.base}/seen')
    assert run.step("task", MY_TOKEN="xyzzy-1").returncode == 0
    assert (run.base / "seen").read_text() == f"{ODD}|xyzzy-1|"
    written = [path.read_bytes() for path in run.folder.path.rglob("*") if path.is_file()]
    assert not [data for data in written if b"xyzzy" in data or b"end" == data.strip()]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "it is not a plain file"),
        (lambda path: os.mkfifo(path), "it is not a plain file"),
        (lambda path: path.write_bytes(b"x" * 65537), "it has more than 65536 bytes"),
        (lambda path: path.write_bytes(b"hush\xff"), "it is not UTF-8 text"),
        (lambda path: path.write_bytes(b"hush\0"), "it contains a NUL byte, which a variable cannot contain"),
    ],
)
def test_a_secret_that_cannot_be_read_stops_the_node_and_is_not_told(run, make, why):
    make(run.base / "token")
    run.save(secrets=(Secret(name="TOKEN", source=f"file:{run.base}/token", origin="--secret"),))
    run.open_gate()
    run.torchrun("echo started")
    done = run.step("task")
    assert (done.returncode, done.stdout) == (91, "")
    assert done.stderr.splitlines()[:2] == [
        f"error[nodes-unknown]: node n1 cannot read the secret TOKEN from `file:{run.base}/token`",
        f"why: {why}; the secret is requested by --secret",
    ]
    assert "hush" not in done.stderr
    assert exit_record(run).detail == done.stderr.splitlines()[0].partition(": ")[2]


def test_a_secret_of_the_jobs_environment_that_is_not_there(run):
    run.save(secrets=(Secret(name="TOKEN", source="env:MY_TOKEN", origin="--secret"),))
    run.open_gate()
    done = run.step("task")
    assert done.returncode == 91
    assert (
        "why: MY_TOKEN is not set in the environment of the job; the secret is requested by --secret\n" in done.stderr
    )


# -- signals ------------------------------------------------------------------------------


def start(run, torchrun):
    run.open_gate()
    run.torchrun(textwrap.dedent(torchrun).format(base=run.base))
    child = run.start("task")
    read_pid(run.base / "ready")
    return child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_asks_for_the_end_goes_to_torchrun(run, number):
    child = start(run, f"trap 'exit 5' {number.name[3:]}\necho $$ > {{base}}/ready\nwhile :; do sleep 0.05; done")
    child.send_signal(number)
    assert child.wait(timeout=20) == 5
    assert exit_record(run).status == 5
    child.stdout.close()


def test_torchrun_that_dies_of_the_signal_gives_128_and_its_number(run):
    child = start(run, "echo $$ > {base}/ready\nexec sleep 60")
    child.terminate()
    assert child.wait(timeout=20) == 143
    assert exit_record(run).signal == "SIGTERM"
    child.stdout.close()


RANK = """
import os, signal, sys, time
signal.signal(signal.{name}, lambda *_: (print("saved", flush=True), os._exit(0)))
open("{base}/ready", "w").write("%d\\n" % os.getppid())
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_save_goes_to_the_ranks_and_torchrun_lives_on(run, number):
    (run.base / "rank.py").write_text(RANK.format(name=number.name, base=run.base))
    child = start(run, f"LOCAL_RANK=0 {sys.executable} {{base}}/rank.py &\nwait $!\nexit 3")
    # As Slurm with proctrack/linuxproc sends it: torchrun itself gets it too, and does not die of it.
    os.kill(read_pid(run.base / "ready"), number)
    child.send_signal(number)
    assert child.wait(timeout=20) == 3
    assert child.stdout.read() == "saved\n"
    child.stdout.close()


def test_a_signal_to_save_before_there_are_ranks_harms_nobody(run):
    child = start(run, "echo $$ > {base}/ready\nsleep 0.4\nexit 0")
    child.send_signal(signal.SIGUSR1)
    assert child.wait(timeout=20) == 0
    child.stdout.close()


SUPERVISE = """
import signal, subprocess, sys
from hpcenv.launch import processes, supervise
processes.adopt_orphans()
with supervise.caught_signals() as signals:
    {before}
    child = subprocess.Popen(["sh", "-c", {program!r}], start_new_session=True)
    status = supervise.supervise(child, signals, seconds_after_term={seconds})
processes.end_rest((), grace=0)
sys.exit(status)
"""


def supervise(program, *, before="", seconds=0.3):
    text = SUPERVISE.format(program=program, before=before, seconds=seconds)
    return subprocess.Popen([sys.executable, "-c", text])


def test_who_does_not_end_when_asked_is_killed_with_all_it_started_in_any_session(tmp_path):
    child = supervise(
        f"trap '' TERM; setsid sh -c 'trap \"\" TERM; echo $$ > {tmp_path}/rank; while :; do sleep 1; done' & "
        f"while [ ! -s {tmp_path}/rank ]; do sleep 0.02; done; echo $$ > {tmp_path}/torchrun; while :; do sleep 1; done"
    )
    torchrun, rank = read_pid(tmp_path / "torchrun"), read_pid(tmp_path / "rank")
    child.terminate()
    assert child.wait(timeout=20) == 137
    assert not alive(torchrun)
    assert not alive(rank)


def test_a_signal_that_comes_before_the_child_is_passed_on_when_it_is_there():
    # The time runs from the signal on: a busy machine may take a third of a second to start a child.
    child = supervise("sleep 60", before="signal.raise_signal(signal.SIGTERM)", seconds=10)
    assert child.wait(timeout=20) == 143


def test_signals_to_save_before_the_child_are_not_kept():
    child = supervise("exit 4", before="signal.raise_signal(signal.SIGUSR1); signal.raise_signal(signal.SIGUSR2)")
    assert child.wait(timeout=20) == 4


def test_ranks_that_outlive_a_killed_torchrun_are_ended(run):
    child = start(
        run,
        """
        setsid sh -c 'echo $$ > {base}/rank; exec sleep 60' &
        while [ ! -s {base}/rank ]; do sleep 0.02; done
        echo $$ > {base}/ready
        sleep 60
        """,
    )
    os.kill(read_pid(run.base / "ready"), signal.SIGKILL)
    assert child.wait(timeout=20) == 137
    assert not alive(read_pid(run.base / "rank"))
    assert "left running" in child.stdout.read()
    child.stdout.close()


# -- a SIF --------------------------------------------------------------------------------


@pytest.fixture
def sif_run(run):
    """A checked and opened run on a file that stands for a SIF."""
    image, apptainer = run.base / "a.sif", run.bin / "apptainer"
    image.write_bytes(b"image")
    apptainer.write_text(f'#!/bin/sh\nexec sh {run.bin}/torchrun.sh "$@"\n')
    apptainer.chmod(0o755)
    run.image = image
    run.save(environment=Environment(kind="sif", python="python3", sif=str(image), apptainer=str(apptainer)))
    run.open_gate()
    return run


def checked(sif_run, /, **changes):
    descriptor = os.open(sif_run.image, os.O_RDONLY)
    identity = sif_check.check(descriptor, path=str(sif_run.image), staged=False, known=None, records=None)
    os.close(descriptor)
    record = Facts(
        schema=1, run="r1", node="n1", attempt=0, values={}, unknown={}, network=Network(first_node="n1"),
        sif=identity,
    )  # fmt: skip
    save_record(dataclasses.replace(record, **changes), sif_run.folder.facts_of("n1"))


def test_the_very_file_that_was_checked_starts_even_if_its_name_is_taken_later(sif_run):
    checked(sif_run)
    sif_run.torchrun(
        f"mv {sif_run.image} {sif_run.image}.old; echo other > {sif_run.image}\n"
        # The last open file is the image; the one before it holds the variables.
        'for word; do case $word in /proc/self/fd/*) image=$word;; esac; done; cat "$image"'
    )
    done = sif_run.step("task")
    assert (done.returncode, done.stdout) == (0, "image")


def test_the_containers_own_tmp_and_nothing_else_is_left_of_it(sif_run):
    checked(sif_run)
    sif_run.torchrun(
        f'echo "$@"; mkdir {sif_run.tmp}/hpcenv-job-77-*/closed; chmod 0 {sif_run.tmp}/hpcenv-job-77-*/closed'
    )
    done = sif_run.step("task")
    assert f'"source={sif_run.tmp}/hpcenv-job-77-' in done.stdout
    assert f"--home {sif_run.folder.home_of('n1')}:/hpcenv/home" in done.stdout
    assert os.listdir(sif_run.tmp) == []


def test_what_a_killed_job_left_on_the_node_goes_and_what_is_in_use_stays(sif_run):
    """Also what a session left: it has keys and a token."""
    checked(sif_run)
    left = ("hpcenv-session-dead_042", "hpcenv-job-76-dead_042", "hpcenv-job-local-76-0123456789abcdef")
    others = ("hpcenv-job-results", "hpcenv-session-notes", "hpcenv-job-76-my_results")
    used, empty = (sif_run.tmp / name for name in ("hpcenv-job-76-used_042", "hpcenv-job-75-new__042"))
    for folder in (*(sif_run.tmp / name for name in (*left, *others)), used):
        folder.mkdir()
        (folder / "token").write_text("secret")
    empty.mkdir()
    os.mkfifo(sif_run.tmp / "hpcenv-job-76-fifo_042")
    sif_run.torchrun("true")
    with node_folders.in_use(used):
        assert sif_run.step("task").returncode == 0
    kept = {empty.name, used.name, "hpcenv-job-76-fifo_042", *others}
    assert {*os.listdir(sif_run.tmp)} == kept, "a name that only begins like ours is the user's own"


def test_a_file_that_the_network_decision_binds_is_seen_in_the_container(sif_run):
    checked(sif_run)
    topology = sif_run.base / "topo.xml"
    topology.touch()
    path = sif_run.folder.env_of("n1")
    bind = Bind(source=str(topology), target="/opt/topo.xml", read_only=True)
    save_record(dataclasses.replace(load_record(NodeSettings, path), binds=(bind,)), path)
    sif_run.torchrun('echo "$@"')
    done = sif_run.step("task")
    assert f"source={topology}" in done.stdout
    assert "/opt/topo.xml" in done.stdout


def test_a_sif_that_was_replaced_after_the_check_is_rejected(sif_run):
    checked(sif_run)
    other = sif_run.base / "b.sif"
    other.write_bytes(b"image")
    os.replace(other, sif_run.image)
    done = sif_run.step("task")
    assert done.returncode == 90
    assert done.stderr.splitlines() == [
        "error[node-rejected]: the SIF changed on node n1 after it was checked",
        f"why: {sif_run.image} is not the file that was checked",
        "hint: do not replace SIF files in place; submit again",
    ]


def test_a_sif_that_was_written_to_in_place_is_rejected(sif_run):
    checked(sif_run)
    with open(sif_run.image, "r+b") as file:
        file.write(b"iMage")
    assert hashlib.sha256(sif_run.image.read_bytes()).hexdigest() != hashlib.sha256(b"image").hexdigest()
    assert sif_run.step("task").returncode == 90


@pytest.mark.parametrize("changes", [{"sif": None}, {"attempt": 1}])
def test_facts_that_do_not_prove_this_sif_on_this_node_are_rejected(sif_run, changes):
    checked(sif_run, **changes)
    assert sif_run.step("task").returncode == 90


def test_a_sif_that_is_gone_could_not_be_told(sif_run):
    checked(sif_run)
    sif_run.image.unlink()
    done = sif_run.step("task")
    assert done.returncode == 91
    assert done.stderr.startswith("error[nodes-unknown]: node n1 can no longer open the SIF\nwhy: [Errno 2] ")


def test_a_node_without_a_usable_temporary_folder_says_so(sif_run):
    checked(sif_run)
    sif_run.folder.homes.write_text("a file in the way")
    done = sif_run.step("task")
    assert done.returncode == 91
    assert done.stderr.startswith("error[file-unusable]: node n1 cannot make the container's folders\nwhy: ")
    assert "Traceback" not in done.stderr


def test_where_stat_may_hide_a_change_the_bytes_are_hashed_again(sif_run):
    checked(sif_run)
    record = load_record(Facts, sif_run.folder.facts_of("n1"))
    doubtful = dataclasses.replace(record.sif, lasting=False)
    save_record(dataclasses.replace(record, sif=doubtful), sif_run.folder.facts_of("n1"))
    assert sif_run.step("task").returncode == 0
    wrong = dataclasses.replace(doubtful, sha256="0" * 64)
    save_record(dataclasses.replace(record, sif=wrong), sif_run.folder.facts_of("n1"))
    assert sif_run.step("task").returncode == 90


def test_a_container_that_fails_because_its_sif_was_swapped_is_a_rejection(sif_run):
    """As Apptainer ends when the name was taken over before it opened the file."""
    checked(sif_run)
    sif_run.torchrun(f"cp {sif_run.image} {sif_run.image}.new; mv {sif_run.image}.new {sif_run.image}; exit 255")
    done = sif_run.step("task")
    assert done.returncode == 90
    assert (
        f"why: {sif_run.image}, from which the container was started, is not the file that was checked" in done.stderr
    )
    assert exit_record(sif_run).status == 90


def test_a_mark_of_a_staged_copy_is_held_while_the_training_runs(sif_run):
    checked(sif_run)
    mark = sif_run.base / "copy.used"
    mark.touch()
    sif_run.save(stage=StageRequest(folder="", limit=1))
    staged = Staged(schema=1, run="r1", node="n1", attempt=0, marks=(str(mark), "/no/such/mark"))
    save_record(staged, sif_run.folder.staged_of("n1"))
    sif_run.torchrun(f"flock -n -x {mark} true && echo FREE; flock -n -s {mark} true && echo SHARED")
    done = sif_run.step("task")
    assert (done.returncode, done.stdout) == (0, "SHARED\n")


def test_a_data_folder_is_seen_at_its_own_path_read_only(sif_run):
    checked(sif_run)
    data = (DataFolder(source="/data/a", listing_sha256=""), DataFolder(source="/data/b", listing_sha256=""))
    sif_run.save(stage=StageRequest(folder="", limit=1, data=data))
    staged = Staged(schema=1, run="r1", node="n1", attempt=0, data={"/data/a": "/local/copy"})
    save_record(staged, sif_run.folder.staged_of("n1"))
    sif_run.torchrun('printf "%s\\n" "$@"')
    lines = sif_run.step("task").stdout.splitlines()
    assert 'type=bind,"source=/local/copy","destination=/data/a",ro' in lines
    assert 'type=bind,"source=/data/b","destination=/data/b",ro' in lines
