"""Reading and following a log: all of it, one rank, one node, standard error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.errors import (
    FileUnusable,
    RunNotFound,
    UsageError,
)
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import LaunchOptions
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import NodeSettings
from hpcenv.runs.find import find_run
from hpcenv.runs.logs import LogTail, RankNodes, Selection, follow_selected, read_log, read_selected

Make = Callable[..., RunFolder]


def test_a_log_that_is_not_there_yet(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound) as caught:
        list(read_log(RunFolder(tmp_path), "my run"))
    assert caught.value.why == "the job has not started"
    assert caught.value.hint == "hpcenv status 'my run'"


def test_a_log_that_is_gone_is_not_one_that_is_not_there_yet(make: Make, tmp_path: Path) -> None:
    folder = make("a")
    folders.start(folder, ["n1"])
    run = find_run(tmp_path, "a", runs="runs")
    with pytest.raises(FileUnusable, match="is gone") as caught:
        list(read_selected(run, Selection(ranks=(0,)), word="a"))
    assert caught.value.hint == "hpcenv status a"
    kept = folder.ranks / "n1" / "7.0_x" / "attempt_0" / "0" / "stderr.log"
    kept.parent.mkdir(parents=True)
    kept.write_text("Killed\n")
    with pytest.raises(FileUnusable, match="is gone") as caught:
        list(read_selected(run, Selection()))
    assert caught.value.hint == f"hpcenv logs --err {folder.path}"
    assert "".join(read_selected(run, Selection(err=True))) == "[0] Killed\n"


def test_a_log_is_read_byte_for_byte_as_far_as_it_is_text(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_bytes("größe\r\n50%\r100%\r\n".encode() + b"\xff\x0c\n")
    assert "".join(read_log(RunFolder(tmp_path), "a")) == "größe\r\n50%\r100%\r\n\ufffd\x0c\n"


def test_following_gives_whole_lines_and_whole_characters(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    tail = LogTail(path)
    assert tail.read() == ""
    with open(path, "ab", buffering=0) as log:
        log.write("one\ntw".encode())
        assert tail.read() == "one\n"
        log.write("o ü".encode()[:-1])
        assert tail.read() == ""
        assert tail.read() == "two ", "a part only when the file stands still, without half a character"
        log.write("ü".encode()[1:] + b"\n")
        assert tail.read() == "ü\n"
        log.write(b"end \xc3")
        assert (tail.read(), tail.read(), tail.read()) == ("", "end ", "")
    assert tail.rest() == "\ufffd"


def test_a_log_that_was_emptied_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text("a long first line\n")
    tail = LogTail(path)
    assert tail.read() == "a long first line\n"
    path.write_text("new\n")
    assert tail.read() == "new\n"


def test_following_shows_what_is_written_until_the_end(tmp_path: Path) -> None:
    folder = folders.make_run(tmp_path / "runs", "a")
    run = find_run(tmp_path, "a", runs="runs")
    path = folder.log
    over = threading.Event()

    def job() -> None:
        with open(path, "a", encoding="utf-8") as log:
            for number in range(20):
                log.write(f"line {number}\n")
                log.flush()
                time.sleep(0.01)
            log.write("no newline at the end")
        over.set()

    worker = threading.Thread(target=job)
    worker.start()
    text = "".join(follow_selected(run, Selection(), ended=over.is_set, pause=lambda seconds: time.sleep(seconds / 50)))
    worker.join()
    assert text == "".join(f"line {number}\n" for number in range(20)) + "no newline at the end"


LOG = "hpcenv verdict: match\n[0] zero\n[1] one\n[2] [0] two\n[3] three\n[1] uno\n[12] twelve\nsrun: [1] no rank\n[1] last"


def selected(run: Any, **chosen: Any) -> str:
    return "".join(read_selected(run, Selection(**chosen)))


def test_the_lines_of_ranks_and_of_nodes(tmp_path: Path) -> None:
    folder = folders.make_run(tmp_path / "runs", "a", nodes=2, nproc_per_node=2)
    folder.log.write_text(LOG)
    # torchrun numbers nodes by the text of their addresses.
    folders.start(folder, ["n2", "n1"], nproc=2)
    run = find_run(tmp_path, "a", runs="runs")
    assert selected(run) == LOG
    assert selected(run, ranks=(1,)) == "[1] one\n[1] uno\n[1] last"
    assert selected(run, ranks=(0, 2)) == "[0] zero\n[2] [0] two\n"
    assert selected(run, node="n2") == "[0] zero\n[1] one\n[1] uno\n[1] last"
    assert selected(run, node="n1", ranks=(1, 3)) == "[3] three\n"
    assert RankNodes(run).of(3) == ("n1", 1)
    with pytest.raises(UsageError, match="no rank 4"):
        selected(run, ranks=(4,))
    with pytest.raises(UsageError, match="is not a node") as caught:
        selected(run, node="n7")
    assert caught.value.why == "its nodes: n1, n2"


def test_ranks_are_numbered_by_the_text_of_addresses(tmp_path: Path) -> None:
    """As torch 2.13 sorts its nodes: 10.0.0.10 comes before 10.0.0.9."""
    names = [f"n{number}" for number in range(1, 11)]
    folder = folders.make_run(tmp_path / "runs", "a", nodes=10, nproc_per_node=1)
    folders.start(folder, names)
    where = RankNodes(find_run(tmp_path, "a", runs="runs"))
    assert [where.of(rank) for rank in (0, 1, 2, 9)] == [("n1", 0), ("n10", 0), ("n2", 0), ("n9", 0)]


@pytest.mark.parametrize("launcher", ["srun", "none"])
def test_without_torchrun_ranks_are_numbered_by_the_numbers_of_their_nodes(tmp_path: Path, launcher: Any) -> None:
    names = [f"n{number}" for number in range(1, 11)]
    launch = LaunchOptions(launcher=launcher)
    folder = folders.make_run(tmp_path / "runs", "a", nodes=10, nproc_per_node=2, launch=launch)
    folders.start(folder, names)
    folder.log.write_text("[2] on n2\n[18] on n10\n[19] on n10, too\n")
    run = find_run(tmp_path, "a", runs="runs")
    where = RankNodes(run)
    assert [where.of(rank) for rank in (0, 3, 18)] == [("n1", 0), ("n2", 1), ("n10", 0)]
    assert selected(run, node="n10") == "[18] on n10\n[19] on n10, too\n"
    assert selected(run, node="n2") == "[2] on n2\n"


def test_emulated_nodes_with_one_address_have_known_ranks_unless_torchrun_orders_them(tmp_path: Path) -> None:
    for name, launcher in (("a", "srun"), ("b", "torchrun")):
        launch = LaunchOptions(launcher=launcher)  # type: ignore[arg-type]
        folder = folders.make_run(tmp_path / "runs", name, nodes=2, nproc_per_node=1, launch=launch)
        folders.start(folder, ["local0", "local1"])
        for node in ("local0", "local1"):
            record = load_record(NodeSettings, folder.env_of(node))
            save_record(replace(record, local_address="127.0.0.1"), folder.env_of(node))
    assert RankNodes(find_run(tmp_path, "a", runs="runs")).of(1) == ("local1", 0)
    assert RankNodes(find_run(tmp_path, "b", runs="runs")).of(1) is None


def test_a_line_longer_than_memory_should_hold_goes_with_its_rank(tmp_path: Path) -> None:
    folder = folders.make_run(tmp_path / "runs", "a", nodes=1, nproc_per_node=2)
    folder.log.write_text("[0] " + "x" * 3_000_000 + "\n[1] y\n")
    run = find_run(tmp_path, "a", runs="runs")
    assert len(selected(run, ranks=(0,))) == 3_000_005
    assert selected(run, ranks=(1,)) == "[1] y\n"


def rank_file(folder: Any, node: str, local: int, restart: int = 0) -> Path:
    path = folder.ranks / node / "7.0_x" / f"attempt_{restart}" / str(local) / "stderr.log"
    path.parent.mkdir(parents=True)
    return path


def test_standard_error_comes_from_the_ranks_own_files(tmp_path: Path) -> None:
    folder = folders.make_run(tmp_path / "runs", "a", nodes=2, nproc_per_node=2)
    folders.start(folder, ["n1", "n2"], nproc=2)
    rank_file(folder, "n1", 1).write_text("a\nb")
    rank_file(folder, "n2", 0).write_text("c\n")
    run = find_run(tmp_path, "a", runs="runs")
    assert selected(run, err=True) == "[1] a\n[2] c\n[1] b"
    assert selected(run, err=True, ranks=(2,)) == "[2] c\n"
    assert selected(run, err=True, node="n1") == "[1] a\n[1] b"


def test_where_two_nodes_have_one_address_no_rank_is_guessed(tmp_path: Path) -> None:
    folder = folders.make_run(tmp_path / "runs", "a", nodes=2, nproc_per_node=1)
    folders.start(folder, ["local0", "local1"])
    text = folder.env_of("local1").read_text().replace('"local_address": "10.0.0.2"', '"local_address": "10.0.0.1"')
    folder.env_of("local1").write_text(text)
    rank_file(folder, "local1", 0).write_text("x\n")
    run = find_run(tmp_path, "a", runs="runs")
    assert RankNodes(run).of(1) is None
    assert selected(run, err=True) == "[local1, local rank 0] x\n"


def test_following_goes_on_through_a_requeue(tmp_path: Path) -> None:
    folder = folders.make_run(tmp_path / "runs", "a", nodes=1, nproc_per_node=2)
    run = find_run(tmp_path, "a", runs="runs")
    steps, asked = iter(range(100)), iter(range(100))

    def pause(_seconds: float) -> None:
        step = next(steps)
        if step < 20:
            with open(folder.log, "a") as log:
                log.write(f"[0] {step}\n[1] {step}\n")
        if step == 5:
            folders.start(folder, ["n1"], nproc=2)
        if step == 10:
            # What `begin` does when the job starts again.
            for path in folder.of_one_attempt():
                if path.exists():
                    path.rename(tmp_path / path.name)

    pieces = follow_selected(run, Selection(ranks=(1,)), ended=lambda: next(asked) > 8, pause=pause)
    assert "".join(pieces) == "".join(f"[1] {step}\n" for step in range(20))
