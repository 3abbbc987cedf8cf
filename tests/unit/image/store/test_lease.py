"""Leases, between real processes: killed, stopped, many at once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpcenv.errors import FileUnusable, ToolFailed
from hpcenv.image.store import lease as leases
from hpcenv.image.store.lease import lease, live_holders
from hpcenv.progress import Event

# Takes the lease argv[1], says so, then does what stdin says; argv[2:] are beat and stale_after.
HOLDER = """
import sys
from pathlib import Path
from hpcenv.image.store.lease import lease
path, beat, stale = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
with lease(path, purpose="converts X", timeout=60, beat=beat, stale_after=stale) as held:
    print("held", flush=True)
    for line in sys.stdin:
        if line == "mine?\\n":
            print(held.still_mine(), flush=True)
        else:
            break
print("released", flush=True)
"""


class Process:
    """Another process that holds, or waits for, a lease."""

    def __init__(self, path: Path, beat: float = 0.05, stale_after: float = 1.0) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path), str(beat), str(stale_after)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def ask(self, word: str) -> str:
        assert self.child.stdin is not None
        self.child.stdin.write(word + "\n")
        self.child.stdin.flush()
        return self.says()

    def end(self) -> None:
        self.child.kill()
        self.child.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Any:
    made: list[Process] = []

    def begin(**how: float) -> Process:
        made.append(Process(tmp_path / "x", **how))
        return made[-1]

    yield begin
    for process in made:
        process.end()


def forge(path: Path, **changes: object) -> None:
    """Write a lease as another machine or a process of the past would have left it."""
    me = leases.this_process()
    said = {"schema": 1, "token": "a" * 32, "host": "n7", "machine": me.machine, "pid": me.pid, "start": me.start}
    path.write_bytes(json.dumps(said | {"purpose": "converts X"} | changes).encode() + b"\n000000000040000\n")


def test_a_lease_is_a_file_while_it_is_held_and_nothing_after(tmp_path: Path) -> None:
    with lease(tmp_path / "x", purpose="converts X", timeout=0) as held:
        assert held.still_mine()
        assert [p.name for p in tmp_path.iterdir()] == ["x"]
        said = json.loads((tmp_path / "x").read_text().splitlines()[0])
        assert (said["pid"], said["purpose"]) == (os.getpid(), "converts X")
        assert os.stat(tmp_path / "x").st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == []


def test_everybody_can_see_who_holds_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with lease(tmp_path / "x", purpose="p", timeout=0):
            assert os.stat(tmp_path / "x").st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_it_is_given_back_when_the_work_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), lease(tmp_path / "x", purpose="p", timeout=0):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_who_waits_is_told_for_whom_and_a_timeout_names_the_holder(tmp_path: Path, start: Any) -> None:
    holder = start()
    assert holder.says() == "held"
    events: list[Event] = []
    with pytest.raises(ToolFailed) as failure, lease(tmp_path / "x", purpose="p", timeout=0.3, on_event=events.append):
        pass
    who = rf"pid {holder.child.pid} on {re.escape(os.uname().nodename)} converts X since \d+ s"
    assert [event.phase for event in events] == ["wait"]
    assert re.fullmatch(who, events[0].what)
    assert re.fullmatch(who, failure.value.why or "")
    assert failure.value.hint == f"wait for it, or end it (on {os.uname().nodename}: kill {holder.child.pid})"
    assert holder.ask("mine?") == "True"


def test_the_next_one_goes_on_as_soon_as_it_is_released(tmp_path: Path, start: Any) -> None:
    holder = start()
    assert holder.says() == "held"
    waiter = start()
    assert holder.ask("done") == "released"
    assert waiter.says() == "held"


def test_the_lease_of_a_killed_holder_is_removed_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    # Seen on the testbed: killed between the last byte of a blob and the end of its lease. No process needed the lease again.
    killed, living = Process(tmp_path / "blob-1"), Process(tmp_path / "blob-2")
    assert killed.says() == living.says() == "held"
    killed.end()
    leases.remove_ended(tmp_path)
    left, still = [path.name for path in tmp_path.iterdir()], living.ask("mine?")
    living.end()
    assert (left, still) == (["blob-2"], "True")


def test_a_killed_holder_on_this_machine_costs_no_time(tmp_path: Path, start: Any) -> None:
    holder = start(stale_after=600)
    assert holder.says() == "held"
    holder.end()
    assert (tmp_path / "x").exists()
    with lease(tmp_path / "x", purpose="p", timeout=0, stale_after=600) as held:
        assert held.still_mine()
    assert list(tmp_path.iterdir()) == []


def test_a_zombie_holds_nothing(tmp_path: Path, start: Any) -> None:
    holder = start(stale_after=600)
    assert holder.says() == "held"
    holder.child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, holder.child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
    with lease(tmp_path / "x", purpose="p", timeout=0, stale_after=600):
        pass


def test_a_process_id_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    forge(tmp_path / "x", start=leases.this_process().start - 1)
    with lease(tmp_path / "x", purpose="p", timeout=0, stale_after=600):
        pass


@pytest.mark.parametrize(
    "changes",
    [{"machine": "other", "pid": 1}, {"machine": "", "start": 1}, {"token": "../../x"}, {"pid": "x"}],
    ids=["another machine", "unknown machine", "bad token", "damaged"],
)
def test_what_cannot_be_judged_from_here_is_watched(tmp_path: Path, changes: dict[str, object]) -> None:
    forge(tmp_path / "x", **changes)
    with pytest.raises(ToolFailed), lease(tmp_path / "x", purpose="p", timeout=0.2, stale_after=600):
        pass
    began = time.monotonic()
    with lease(tmp_path / "x", purpose="p", timeout=30, stale_after=0.4):
        assert time.monotonic() - began >= 0.4
    assert list(tmp_path.iterdir()) == []


def test_clocks_are_never_compared(tmp_path: Path) -> None:
    """A lease whose times lie in 1970 or in the year 2242 lives as long as it changes."""
    forge(tmp_path / "x", machine="other")
    stop = threading.Event()

    def change() -> None:
        beats = 0
        while not stop.wait(0.05):
            beats += 1
            os.utime(tmp_path / "x", (0, beats % 2 * 2**33 + beats))

    os.utime(tmp_path / "x", (0, 2**33))
    heart = threading.Thread(target=change)
    heart.start()
    try:
        with pytest.raises(ToolFailed), lease(tmp_path / "x", purpose="p", timeout=2, stale_after=1):
            pass
    finally:
        stop.set()
        heart.join()


def test_a_stopped_holder_loses_it_and_notices(tmp_path: Path, start: Any) -> None:
    holder = start(stale_after=0.5)
    assert holder.says() == "held"
    holder.child.send_signal(signal.SIGSTOP)
    with lease(tmp_path / "x", purpose="p", timeout=30, beat=0.05, stale_after=0.5) as held:
        holder.child.send_signal(signal.SIGCONT)
        assert holder.ask("mine?") == "False"
        assert holder.ask("done") == "released"
        assert held.still_mine()  # what it gave back was not ours
        assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert list(tmp_path.iterdir()) == []


def test_two_waiters_break_one_lease_and_one_of_them_has_it(tmp_path: Path, start: Any) -> None:
    forge(tmp_path / "x", machine="other")
    both = [start(stale_after=1), start(stale_after=1)]
    first = _whichever(both)
    second = both[1 - both.index(first)]
    assert first.ask("mine?") == "True"
    assert first.ask("done") == "released"
    assert second.says() == "held"
    assert second.ask("done") == "released"
    assert list(tmp_path.iterdir()) == []


def _whichever(processes: list[Process]) -> Process:
    import selectors

    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(process.child.stdout, selectors.EVENT_READ, process)  # type: ignore[arg-type]
        ready = selector.select(30)
        assert len(ready) == 1
        time.sleep(0.3)
        assert len(selector.select(0)) == 1, "both hold it"
        process: Process = ready[0][0].data
        assert process.says() == "held"
        return process


def test_a_breaker_that_died_at_its_work_is_no_obstacle(tmp_path: Path) -> None:
    forge(tmp_path / "x", machine="other")
    forge(tmp_path / (".x.break-" + "a" * 32), token="b" * 32, machine="other", pid=1)
    with lease(tmp_path / "x", purpose="p", timeout=30, stale_after=0.3):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lease_taken_away_by_mistake_is_given_back(tmp_path: Path) -> None:
    with lease(tmp_path / "x", purpose="p", timeout=0) as held:
        leases._remove_lease(tmp_path / "x", "c" * 32)
        assert held.still_mine()
        assert [p.name for p in tmp_path.iterdir()] == ["x"]


CONTENDER = """
import os, sys, time
from pathlib import Path
from hpcenv.image.store.lease import lease
folder = Path(sys.argv[1])
for turn in range(3):
    with lease(folder / "x", purpose="counts", timeout=60, beat=0.5, stale_after=20) as held:
        inside = os.open(folder / "inside", os.O_CREAT | os.O_EXCL)  # fails where two are inside
        count = int((folder / "count").read_text())
        (folder / "count").write_text(str(count + 1))
        if (int(sys.argv[2]), turn) == (0, 1):
            os.unlink(folder / "inside")
            os.kill(os.getpid(), 9)
        assert held.still_mine()
        os.close(inside)
        os.unlink(folder / "inside")
"""


def test_eight_contenders_one_of_them_killed_are_never_two_inside(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    children = [
        subprocess.Popen([sys.executable, "-c", CONTENDER, str(tmp_path), str(number)], stderr=subprocess.PIPE)
        for number in range(8)
    ]
    said = [child.communicate(timeout=60)[1] for child in children]
    assert [child.returncode for child in children] == [-9, *[0] * 7], b"\n".join(said).decode()
    assert (tmp_path / "count").read_text() == "23"  # 7 times 3, and 2 before the kill
    # Where the killed one was the last of all, its lease stays until somebody asks.
    with lease(tmp_path / "x", purpose="looks", timeout=30):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["count"]


def test_without_hard_links_it_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_args: object, **_more: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)  # as FAT and some FUSE file systems answer
    with lease(tmp_path / "x", purpose="p", timeout=0) as held:
        assert held.still_mine()
        with pytest.raises(ToolFailed), lease(tmp_path / "x", purpose="p", timeout=0.1):
            pass
        leases._remove_lease(tmp_path / "x", "c" * 32)
        assert held.still_mine()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 8000,
        b"null\n",
        b"\xff\xfe",
        b"9" * 8192,
        json.dumps({"token": "a" * 32, "pid": 1e400}).encode(),
    ],
    ids=["empty", "cut", "nested", "null", "bytes", "digits", "infinite"],
)
def test_whatever_lies_there_is_waited_for_and_then_removed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with lease(tmp_path / "x", purpose="p", timeout=30, stale_after=0.1) as held:
        assert held.still_mine()
    assert list(tmp_path.iterdir()) == []


def test_what_another_user_wrote_cannot_drive_the_terminal(tmp_path: Path) -> None:
    forge(tmp_path / "x", machine="other", purpose="\x1b[2J\nroot", host="\x07")
    with pytest.raises(ToolFailed) as failure, lease(tmp_path / "x", purpose="p", timeout=0):
        pass
    assert (failure.value.why or "").endswith("on ? ?[2J?root since 40 s")


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileUnusable, match="cannot be created"), lease(tmp_path / "no" / "x", purpose="p", timeout=0):
        pass


def test_a_folder_in_the_way_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(ToolFailed), lease(tmp_path / "x", purpose="p", timeout=0.2):
        pass


def test_live_holders(tmp_path: Path, start: Any) -> None:
    assert live_holders(tmp_path) == ()
    assert live_holders(tmp_path / "none") == ()
    holder = start()
    assert holder.says() == "held"
    forge(tmp_path / "dead", start=1)
    forge(tmp_path / "silent", machine="other")
    (found,) = live_holders(tmp_path, stale_after=600)  # one that lives is enough to know
    assert (found.owner.pid if found.owner else None, found.path.name) == (holder.child.pid, "x")
    events: list[Event] = []
    assert live_holders(tmp_path, but="x", stale_after=0.3, on_event=events.append) == ()
    assert "pid" in events[0].what
