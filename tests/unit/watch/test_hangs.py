"""Ranks that hang, and healthy ones that make no step: real processes, with torch and gloo."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpcenv.machine.this_node import ThisNode
from hpcenv.records.files import load_record
from hpcenv.records.hangs import (
    HangFound,
    StackRequest,
    found_path,
    requests_of,
    why_to_end,
)
from hpcenv.records.manifest import WatchOptions
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.session import SessionOptions
from hpcenv.submission import node_code
from hpcenv.watch import hangs, stacks
from hpcenv.watch.hangs import HangWatch
from hpcenv.watch.pulses import read_pulses
from hpcenv.watch.watched_node import FOLDER, WatchedNode, folders_prefix
from tests.hooked_rank import OPTIONS, PYTHON
from tests.slow_ranks import QUICK, SLOW

pytestmark = [pytest.mark.torch]

HEAD = """
import datetime, json, os, re, sys, time, ctypes, threading
import torch, torch.distributed as dist
rank, folder = int(os.environ["RANK"]), os.environ["FOLDER"]
dist.init_process_group("gloo", init_method="file://" + folder + "/store", rank=rank,
                        world_size=int(os.environ["WORLD_SIZE"]),
                        timeout=datetime.timedelta(seconds=float(os.environ["SECONDS"])))
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.1)
def step():
    dist.all_reduce(torch.ones(2))
    optimizer.step()
for _ in range(int(os.environ["STEPS"])):
    step()
"""


class Job:
    """Two nodes with a rank each, and their watchers."""

    def __init__(self, folder: Path, make_manifest: Any) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.run = RunFolder(folder / "run")
        self.run.path.mkdir()
        node_code.copy_start_hook(folder / "start-hook")
        manifest = make_manifest(run_folder=str(self.run.path), nproc_per_node=1)
        self.nodes = [
            WatchedNode(
                manifest=manifest,
                this_node=ThisNode(node=f"n{number}", nodes=("n0", "n1"), attempt=0, job_id=f"7{number}"),
                launch=os.getpid(),
                options=WatchOptions(stall_after=3),
            )
            for number in range(2)
        ]
        self.watches = [HangWatch(node, self.said.append) for node in self.nodes]

    def place(self, number: int) -> Path:
        return self.folder / f"{folders_prefix(self.nodes[number].this_node)}x" / FOLDER

    def start(self, script: str, *words: str, steps: int = 2, head: str = HEAD, seconds: float = 1800) -> None:
        file = self.folder / "train.py"
        file.write_text(head + textwrap.dedent(script))
        for rank in range(2):
            self.place(rank).mkdir(parents=True)
            hook = {**OPTIONS, "record": False, "watch": str(self.place(rank))}
            environ = {
                **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
                **{"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "HPCENV_ATTEMPT": "0"},
                **{"HPCENV_RUN_FOLDER": str(self.run.path), "HPCENV_START_HOOK": json.dumps(hook)},
                **{
                    "PYTHONPATH": f"{self.folder}/start-hook:{Path(node_code.package_folder()).parent}",
                    "FOLDER": str(self.folder),
                    "OMP_NUM_THREADS": "1",
                },
                "TORCH_FR_BUFFER_SIZE": "200",
                "STEPS": str(steps),
                "SECONDS": str(seconds),
                "LENGTH": "13",
                "HPCENV_CHECKPOINTS": str(self.folder / "checkpoints"),
            }
            self.ranks.append(
                subprocess.Popen([PYTHON, str(file), *words], env=environ, cwd=self.folder, process_group=0)
            )

    def watch(self, seconds: float) -> HangFound | None:
        """Watch until something is found, or for so long."""
        until = time.monotonic() + seconds
        folder = requests_of(self.run, 0)
        while time.monotonic() < until:
            for watch in self.watches:
                watch.attend(time.time())
            time.sleep(0.2)
            if found := sorted(folder.glob("*.found.json")):
                return load_record(HangFound, found_path(folder, found[0].name.removesuffix(".found.json")))
        return None

    def answer(self, script: str) -> str:
        """Return the first line about a hang."""
        self.start(script)
        found = self.watch(150)
        assert found is not None, self.said
        assert found.kind == "hang", found
        assert self.said[0] == f"hpcenv: the ranks hang: {found.lines[0]}"
        return found.lines[0]

    def line(self, text: str) -> str:
        lines = (self.folder / "train.py").read_text().splitlines()
        return f"train.py:{1 + next(number for number, line in enumerate(lines) if text in line)}"


@pytest.fixture
def job(tmp_path: Path, make_manifest: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Job(tmp_path, make_manifest)
    yield made
    for rank in made.ranks:
        with suppress(OSError):
            os.killpg(rank.pid, signal.SIGKILL)  # its children, too; also what is stopped
        rank.wait()


def test_a_rank_that_sleeps_in_its_loader(job: Job) -> None:
    found = job.answer("""
        class Slow(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                time.sleep(1000)  # loads
        if rank == 1:
            for batch in torch.utils.data.DataLoader(Slow()):
                pass
        step()
    """)
    assert found == (
        f"rank 0 waits in all_reduce no. 3 ({job.line('dist.all_reduce')}); "
        f"rank 1 never entered it: it is in DataLoader.__next__ ({job.line('# loads')})"
    )


@pytest.mark.long
def test_a_rank_whose_c_call_holds_pythons_lock(job: Job) -> None:
    found = job.answer("""
        if rank == 1:
            re.match("(a+)+$", "a" * 64 + "b")  # holds
        step()
    """)
    assert f"rank 0 waits in all_reduce no. 3 ({job.line('dist.all_reduce')})" in found
    assert f"it is in match ({job.line('# holds')}), which holds Python's lock" in found


@pytest.mark.long
def test_a_rank_that_is_stopped(job: Job) -> None:
    job.start("""
        for _ in range(1000):
            step()
            time.sleep(0.2)
    """)
    job.watch(3)
    while not any(pulse.steps for pulse in read_pulses([job.place(1)])):
        job.watch(1)
    job.ranks[1].send_signal(signal.SIGSTOP)
    found = job.watch(150)
    assert found is not None and found.kind == "hang"
    assert "rank 1 did not say whether it entered it: it is stopped" in found.lines[0]


@pytest.mark.long
def test_a_rank_that_reads_what_never_comes(job: Job) -> None:
    os.mkfifo(job.folder / "data.bin")
    found = job.answer("""
        if rank == 1:
            with open(os.path.join(folder, "data.bin"), "r+b", buffering=0) as file:
                file.read(1)  # reads
        step()
    """)
    assert "rank 0 waits in all_reduce no. 3" in found
    assert f"it is in <module> ({job.line('# reads')}), read of {job.folder}/data.bin on " in found


def test_a_rank_that_skips_a_collective(job: Job) -> None:
    found = job.answer("""
        if rank == 0:
            dist.barrier()
        else:
            time.sleep(1000)  # elsewhere
        step()
    """)
    assert found == (
        f"rank 0 waits in barrier no. 3 ({job.line('dist.barrier')}); "
        f"rank 1 never entered it: it is in <module> ({job.line('# elsewhere')})"
    )


@pytest.mark.long
def test_a_rank_that_ended_silently(job: Job) -> None:
    found = job.answer("""
        if rank == 1:
            threading.Thread(target=time.sleep, args=(1000,)).start() if False else os._exit(0)
        time.sleep(1000)  # left
    """)
    assert found == f"rank 0 is in <module> ({job.line('# left')}); rank 1 is gone: its process has ended"


@pytest.mark.long
def test_two_groups_that_wait_for_each_other(job: Job) -> None:
    found = job.answer("""
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        dist.all_reduce(torch.ones(1), group=groups[rank])  # crossed
    """)
    assert "rank 0 waits in all_reduce no. 1 of group 1" in found
    assert "rank 1 never entered it: it waits in all_reduce no. 1 of group 2" in found


def test_ranks_whose_lines_move_are_working(job: Job) -> None:
    job.start("""
        def evaluate():
            for number in range(50000):
                sum(range(10000))
                sum(range(10001))
                sum(range(10002))
                sum(range(10003))
                sum(range(10004))
                sum(range(10005))
        until = time.time() + 300
        while time.time() < until:
            evaluate()
    """)
    found = job.watch(150)
    assert found is not None and found.kind == "working"
    assert found.lines[0].startswith("no optimizer step for ") and found.lines[0].endswith(", the ranks are working")


@pytest.mark.parametrize("works", ["calls", "loads"])
def test_a_rank_on_one_line_that_computes_or_whose_worker_reads_is_working(job: Job, works: str) -> None:
    """The others wait for it. Its call does not hold Python's lock; `read` of a file is counted by the kernel."""
    job.start(f"""
        import hashlib
        class Reads(torch.utils.data.Dataset):
            def __len__(self):
                return 1
            def __getitem__(self, index):
                while True:
                    open("/dev/zero", "rb").read(4000000)
                    time.sleep(0.2)
        if rank == 1 and {works!r} == "calls":
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**9)
        elif rank == 1:
            next(iter(torch.utils.data.DataLoader(Reads(), num_workers=1)))
        step()
    """)
    found = job.watch(150)
    assert found is not None and found.kind == "working", found


def test_a_rank_that_waits_for_a_message(job: Job) -> None:
    """gloo's sends and receives are not in torch's record."""
    found = job.answer("""
        if rank == 0:
            dist.recv(torch.ones(1), 1)  # receives
        time.sleep(1000)  # elsewhere
    """)
    assert found == (f"rank 0 is in recv ({job.line('# receives')}); rank 1 is in <module> ({job.line('# elsewhere')})")


@pytest.mark.parametrize("works", ["time.sleep(1000)", "hashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**9)"])
def test_a_rank_without_torch_that_stays_on_one_line_is_no_hang(
    job: Job, monkeypatch: pytest.MonkeyPatch, works: str
) -> None:
    """JAX computes for minutes on one line, with and without a CPU. Nothing ends the job."""
    monkeypatch.setattr(hangs, "_BEFORE_FIRST_STEP", 2.0)
    job.start(works, head="import hashlib, time\n", steps=0)
    found = job.watch(150)
    assert found is not None and found.kind == "unknown", found
    text = (
        r"no optimizer step for \d+ s; ranks 0-1 have no operation in torch's flight recorder \(torch is not imported\)"
    )
    assert re.fullmatch(text, found.lines[0])
    assert f"({job.line(works)})" in found.lines[1]
    assert job.said[0] == f"hpcenv: cannot tell whether the ranks hang: {found.lines[0]}"
    assert not why_to_end(requests_of(job.run, 0), WatchOptions(on_stall="stop"))


def test_the_looks_come_before_a_short_time_out_ends_the_ranks(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time-out is learned long before the 5 minutes after which a rank is looked at."""
    monkeypatch.setattr(hangs, "_SECONDS_BETWEEN_LISTINGS", 1.0)
    job.watches = [HangWatch(replace(node, options=WatchOptions()), job.said.append) for node in job.nodes]
    job.start(
        """
        if rank == 0:
            time.sleep(1000)
        step()
    """,
        seconds=16,
    )
    found = job.watch(60)
    assert found is not None and found.kind == "hang", found
    assert "rank 1 waits in all_reduce no. 3" in found.lines[0]
    assert all(rank.poll() is None for rank in job.ranks)
    [name] = [path.stem for path in requests_of(job.run, 0).glob("stall-*.json") if "found" not in path.name]
    stalled = load_record(StackRequest, requests_of(job.run, 0) / f"{name}.json").stalled
    assert stalled is not None and 0.7 * 16 <= stalled < 0.7 * 16 + 2


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "polls" else pytest.mark.long)
        for kind in sorted({*re.findall(r'case == "([a-z0-9-]+)":\n {8}', SLOW)})
    ],
)
def test_a_slow_run_gives_no_alarm(job: Job, kind: str) -> None:
    job.watches = [HangWatch(replace(node, options=WatchOptions(stall_after=5)), job.said.append) for node in job.nodes]
    job.start(SLOW, kind, steps=0)
    until = time.monotonic() + 150
    while any(rank.poll() is None for rank in job.ranks) and time.monotonic() < until:
        job.watch(0.2)
    looks = list(requests_of(job.run, 0).glob("stall-*.found.json"))
    assert [rank.poll() for rank in job.ranks] == [0, 0]
    assert not [line for line in job.said if "hang" in line]
    assert looks or kind in QUICK


@pytest.mark.long
def test_a_rank_that_saves_is_left_alone(job: Job) -> None:
    job.start("""
        from hpcenv import training
        if rank == 0:
            with training.saving(2):
                time.sleep(1000)
        dist.barrier()
    """)
    found = job.watch(14)
    assert found is None or found.kind == "working"
    assert not any("hang" in line for line in job.said)


@pytest.mark.long
def test_a_long_compile_before_the_first_step_is_left_alone(job: Job) -> None:
    job.start(
        """
        import subprocess
        subprocess.run([sys.executable, "-c", "while True: pass"], timeout=60)
    """,
        steps=0,
    )
    assert job.watch(14) is None


def test_only_a_marked_process_gets_the_signal(tmp_path: Path) -> None:
    """A probe counts signals; its number is in a mark of another start time, as after a PID was used again."""
    count = tmp_path / "count"
    probe = textwrap.dedent("""
        import signal, sys, threading
        def seen(number, frame):
            open(sys.argv[1], "a").write("x")
        for number in range(signal.SIGRTMIN, signal.SIGRTMAX):
            signal.signal(number, seen)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN + 7})
        print(threading.get_native_id(), flush=True)
        seen(signal.sigwait({signal.SIGRTMIN + 7}), None)
        signal.pause()
    """)
    with subprocess.Popen([sys.executable, "-c", probe, str(count)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        tid = int(child.stdout.readline())
        start = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        mark = {"pid": child.pid, "tid": tid, "main": "0x1", "signal": signal.SIGRTMIN + 7, "rank": 0}
        mark["signal-without-lock"] = signal.SIGRTMIN + 8
        file = tmp_path / "rank-0.mark"
        (tmp_path / "rank-0.stacks").touch()
        file.write_text(json.dumps({**mark, "start": start - 1}))
        [look] = stacks.look([tmp_path])
        assert look.unknown == "it has ended" and not count.exists()
        assert [*stacks.look([tmp_path / "empty"])] == []
        # The counter works: with its own start time the probe gets it.
        file.write_text(json.dumps({**mark, "start": start}))
        [*stacks.look([tmp_path])]
        assert count.read_text() == "x"
        child.kill()


def test_a_process_that_would_not_catch_the_signal_lives(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "100"]) as child:
        start = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        mark = {"pid": child.pid, "tid": child.pid, "main": "0x1", "signal": signal.SIGRTMIN + 7, "rank": 0}
        mark["signal-without-lock"] = signal.SIGRTMIN + 8
        (tmp_path / "rank-0.mark").write_text(json.dumps({**mark, "start": start}))
        [look] = stacks.look([tmp_path])
        assert look.unknown == "it does not take the signal"
        time.sleep(0.2)
        assert child.poll() is None
        child.kill()


@pytest.mark.parametrize("is_session", [False, True])
def test_what_holds_a_session_makes_no_steps_and_is_not_asked(
    tmp_path: Path, make_manifest: Any, monkeypatch: pytest.MonkeyPatch, is_session: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(hangs, "_BEFORE_FIRST_STEP", 2.0)
    session = SessionOptions(name="lab", folder=str(tmp_path / "lab")) if is_session else None
    made = Job(tmp_path, partial(make_manifest, session=session))
    made.start("time.sleep(300)", steps=0)
    try:
        asked = requests_of(made.run, 0)
        until = time.monotonic() + (12 if is_session else 60)
        while time.monotonic() < until and not list(asked.glob("stall-*")):
            made.watches[0].attend(time.time())
            time.sleep(0.2)
        assert bool(list(asked.glob("stall-*"))) is not is_session
    finally:
        for rank in made.ranks:
            os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
