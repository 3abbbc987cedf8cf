"""The program of the ranks on real processes, and what is read from its files and sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcenv.smoke import ras
from hpcenv.smoke.reach import Reach
from hpcenv.smoke.watch import Watch, read_lines, read_rank

from .silent import silent_listener

PROGRAM = Path(__file__).resolve().parents[3] / "hpcenv" / "incontainer" / "smoke.py"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_ranks_run_all_phases(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    argv = [sys.executable, str(PROGRAM), f"--folder={tmp_path}", "--backend=gloo", "--seconds=60"]
    ranks = [subprocess.Popen(argv, env={**common, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}) for rank in (0, 1)]
    assert [rank.wait(timeout=180) for rank in ranks] == [0, 0]
    watch = Watch(tmp_path, (0, 1), seconds=60, start_seconds=60)
    assert watch.started() and watch.late() is None
    for rank in watch.ranks(nccl=False):
        assert rank.done and rank.torch
        assert [phase.phase for phase in rank.phases] == ["start", "init", "correct", "second-group", "bandwidth"]
        assert {phase.state for phase in rank.phases} == {"end"}
        assert rank.phases[-1].bus_gb_s > 0
        assert set(rank.connections) == {("127.0.0.1", "127.0.0.1")}


def test_files_of_ranks_are_read_as_data_of_others(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.jsonl"
    file.write_bytes(
        b'{"phase": "init", "state": "end", "seconds": "x", "found": {"connections": [[1], "a", ["b", "c"]]}}\n'
        b'[1]\n{"phase": ["q"], "state": 3, "found": 7}\nnot json\n{"phase": "correct", "state": "beg'
    )
    rank = read_rank(0, read_lines(file), None)
    assert rank.connections == (("b", "c"),) and not rank.done
    assert read_lines(tmp_path / "missing") == []


def test_a_rank_without_progress_is_late(tmp_path: Path) -> None:
    watch = Watch(tmp_path, (0,), seconds=-6.0, start_seconds=-6.0)
    late = watch.late()
    assert late is not None and late.phase == "start"
    (tmp_path / "rank-0.jsonl").write_text('{"phase": "correct", "state": "end"}\n')
    watch.late()
    late = watch.late()
    assert late is not None and late.phase == "second-group"


def test_an_answer_today_does_not_hide_a_link_that_is_cut_later() -> None:
    port = _free_port()
    reach = Reach("127.0.0.1", port)
    reach.start()
    try:
        time.sleep(1)
        assert reach.silent_for() == 0, "a port without a listener answers with a reset"
        with silent_listener(port):
            _wait(lambda: reach.silent_for() > 3)
            assert "timed out" in reach.problem
        _wait(lambda: reach.silent_for() == 0)
    finally:
        reach.close()
        reach.join(timeout=10)
    assert not reach.is_alive()


def _wait(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 15
    while not is_so():
        assert time.monotonic() < until, "it did not happen within 15 s"
        time.sleep(0.05)


@pytest.mark.parametrize(("version", "words"), [("", "unknown"), ("2.23.4", "no RAS service")])
def test_ras_is_asked_of_versions_that_have_it(version: str, words: str) -> None:
    assert words in ras.ask(version)


def test_ras_answers_over_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        asked: list[bytes] = []

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                asked.append(connection.recv(100))
                connection.sendall(b"Job summary: 1 of 16 ranks missing\n")

        thread = threading.Thread(target=serve)
        thread.start()
        answer = ras.ask("2.27.3+cuda12.8", f"127.0.0.1:{server.getsockname()[1]}")
        thread.join(timeout=10)
    assert answer == "Job summary: 1 of 16 ranks missing"
    assert asked == [b"verbose status\n"]


def test_ras_without_a_listener_says_so() -> None:
    port = _free_port()
    assert f"no answer from 127.0.0.1:{port}" in ras.ask("2.27.3", f"127.0.0.1:{port}")
