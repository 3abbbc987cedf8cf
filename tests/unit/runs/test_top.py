"""`hpcenv top` and the section `use` of `hpcenv report`: from files of samples, as the nodes write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import run_folders as folders
from use_runs import BEGAN, run

import hpcenv as api
from hpcenv.records.files import write_text
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.samples import NodeSamples, Sample, samples_line
from hpcenv.runs.entries import open_run
from hpcenv.runs.report import report
from hpcenv.runs.top import TopReader, lines, one_line, page_of

Make = Callable[..., RunFolder]
NOW = BEGAN + 600 + 9


def put(folder: RunFolder, nodes: tuple[NodeSamples, ...], attempt: int = 0) -> RunFolder:
    for node in nodes:
        path = folder.samples_of(attempt, node.node)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(map(samples_line, node.samples)))
    return folder


def page(folder: RunFolder) -> str:
    return "\n".join(lines(TopReader(open_run(folder.path)).read(NOW)))


def idle(node: str, *gpus: int) -> Any:
    return lambda name, _at, index: {"use": 0.0} if name == node and index in gpus else {}


def test_the_page_of_a_node_with_its_slowest_rank(make: Make) -> None:
    slow = lambda _n, _at, rank: {"step_seconds": 0.8} if rank == 1 else {}  # noqa: E731
    text = page(put(make("a"), run(gpus=2, minutes=10, rank=slow)))
    assert text == (
        "a: 1 node, 2 GPUs, 2 ranks; newest sample 9 s old\n"
        "\n"
        "NODE  GPU USE %  GPU GB  W    CPUS  GB\n"
        "n1    96 96      41/80   410  6/16  20/80\n"
        "\n"
        "RANK  NODE  STEP  S/STEP  DATA WAIT\n"
        "0     n1    1200  0.5     2 %\n"
        "1     n1    1200  0.8     1 %        slowest\n"
        "\n"
        "- rank 1 is 1.6 times slower than the median; no signal that was read explains\n"
        "  it"
    )


def test_512_gpus_are_a_few_lines_of_80_columns_with_the_odd_node(make: Make) -> None:
    text = page(put(make("a"), run(nodes=64, gpus=8, minutes=10, every=30, gpu=idle("n30", 6, 7))))
    assert len(text.splitlines()) < 16 and max(map(len, text.splitlines())) <= 80
    assert "n[1-29,31-64]  96  " in text and "n30            96 96 96 96 96 96 0 0" in text
    assert "512 ranks  n[1-64]  1200" in text
    assert "- 2 of 8 GPUs of n30 were idle (0 % use) for 10 of 10 minutes" in text


def test_what_is_unknown_is_a_question_mark(make: Make) -> None:
    nothing = dict.fromkeys(("use", "memory", "memory_total", "power", "clock", "ecc", "others")) | {"ranks": ()}
    text = page(
        put(make("a"), run(gpus=1, minutes=10, gpu=lambda *_: nothing, node=lambda *_: {"cpu": None, "cpus": None}))
    )
    assert "n1    ?          ?       ?  ?     20/80" in text
    assert "- use of GPUs unknown" in text and "nothing odd" in text


def test_a_run_without_samples_says_so(make: Make) -> None:
    assert page(make("a")) == "a: no samples"
    assert one_line(TopReader(open_run(make("b").path)).read(NOW)) == "b: no samples"


def test_a_second_look_reads_what_is_new_and_no_half_line(make: Make) -> None:
    folder = put(make("a"), run(minutes=5))
    path, later = folder.samples_of(0, "n1"), run(minutes=6)[0].samples[30:]
    reader = TopReader(open_run(folder.path))
    assert reader.read(NOW).judgement.samples == 30
    with path.open("a") as file:
        file.write("".join(map(samples_line, later)).removesuffix("\n"))
    assert reader.read(NOW).judgement.samples == 35
    with path.open("a") as file:
        file.write("\n")
    assert reader.read(NOW).judgement.samples == 36
    put(folder, run(minutes=2))  # a new file with the same name
    assert reader.read(NOW).judgement.samples == 12


def test_only_the_end_of_a_long_file_is_read(make: Make) -> None:
    folder = put(make("a"), run(minutes=60, gpus=8))
    made = TopReader(open_run(folder.path)).read(BEGAN + 60 * 60 + 1)
    assert 20 < made.judgement.samples <= 90
    assert made.judgement.unknown == () and made.nodes[0].last.at == BEGAN + 60 * 60


def test_8_idle_gpus_are_odd_at_the_first_look_whether_steps_are_known_or_not(make: Make) -> None:
    # Each value is there, so a line has the length of a real node's.
    full = dict.fromkeys(("power_limit", "temperature", "clock_limit", "replays", "energy", "sm"), 123456.5)
    full |= {"use": 0.0, "uuid": "GPU-efea3747-6fb6-cf63-1546-7dcf5d3532d0", "unknown": {"x": "y" * 200}}
    no_steps = dict.fromkeys(("step", "step_seconds", "wait_seconds", "last_step"))
    for name, rank in (("a", {}), ("b", no_steps)):
        folder = put(make(name), run(gpus=8, minutes=60, gpu=lambda *_: full, rank=lambda *_, rank=rank: rank))
        assert folder.samples_of(0, "n1").stat().st_size / 360 > 5400
        made = TopReader(open_run(folder.path)).read(BEGAN + 3601).judgement
        assert [one.text for one in made.sentences] == ["8 of 8 GPUs of n1 were idle (0 % use) for 15 of 15 minutes"]


def test_a_leak_and_a_gpu_without_a_process_are_odd_at_the_first_look(make: Make) -> None:
    leak = lambda _n, at, _i: {"memory": 20e9 + at * 2 * 0.4e6 * 5}  # noqa: E731
    empty = lambda _n, at, i: {"use": 0.0, "ranks": (), "others": 0} if i and at > 3000 else {}  # noqa: E731
    folder = put(make("a"), run(minutes=60, node=leak, gpu=empty))
    said = [one.text for one in TopReader(open_run(folder.path)).read(BEGAN + 3601).judgement.sentences]
    assert said[0] == "3 of 4 GPUs of n1 had no process after minute 50", "of the attempt, not of what was read"
    assert said[1].startswith("memory grows by 200 MB in 100 steps since step ")


def test_a_page_that_is_too_long_has_what_is_odd_first_and_says_what_it_leaves_out(make: Make) -> None:
    folder = put(make("a"), run(nodes=6, gpus=1, minutes=10, gpu=idle("n3", 0)))
    top = TopReader(open_run(folder.path)).read(NOW)
    whole = list(lines(top))
    assert page_of(top, len(whole)) == whole
    small = page_of(top, 8)
    assert small[:3] == [whole[0], "", "- 1 of 1 GPU of n3 was idle (0 % use) for 10 of 10 minutes"]
    assert small[3:5] == ["", "NODE  GPU USE %  GPU GB  W    CPUS  GB"]
    assert len(small) == 8 and small[-1] == f"{len(whole) - 7} more lines: the terminal has only 8 lines"


def test_samples_that_end_before_the_ranks_are_told(make: Make, tmp_path: Path) -> None:
    folder = put(make("a", cluster="local", job_id="local-1"), run(minutes=60))
    top = TopReader(open_run(folder.path))
    assert "n1: samples of 15 of 195 minutes only" in top.read(BEGAN + 4 * 3600).judgement.unknown
    folders.start(folder, ["n1"])
    folder.exits.mkdir()
    write_text("{}", folder.exit_of("n1"))
    write_text(json.dumps({"schema": 1, "status": 0, "time": BEGAN + 9 * 3600}), folder.finished)
    made = " ".join(str(report(tmp_path, str(folder.path), environ={})).split())
    assert "nothing odd in what is known" in made and "n1: samples of 1 of 9 hours only" in made
    with folder.samples_of(0, "n1").open("a") as file:
        file.write(samples_line(Sample(at=BEGAN + 3600, seconds=0.0, ended="samples end at hour 1: full")))
    for _ in range(2):
        found = top.read(BEGAN + 3601)
        assert "n1: samples end at hour 1: full" in found.judgement.unknown and found.nodes[0].last.gpus
    made = " ".join(str(report(tmp_path, str(folder.path), environ={})).split())
    assert "n1: samples end at hour 1: full" in made


def test_a_verdict_of_another_attempt_does_not_say_which_nodes_train(make: Make) -> None:
    """While a new attempt begins, the run folder still has the verdict of the attempt before."""
    folder = put(make("a"), run(minutes=10), 1)
    top = TopReader(open_run(folder.path))
    folders.start(folder, ["n1", "n2"], attempt=0)
    assert top.read(NOW).judgement.unknown == ()
    folders.start(folder, ["n1", "n2"], attempt=1)
    assert top.read(NOW).judgement.unknown == ("no samples of n2",)
    write_text("damaged", folder.verdict)
    assert top.read(NOW).judgement.unknown == ()


def test_a_folder_that_is_no_attempt_is_not_the_newest_attempt(make: Make) -> None:
    folder = put(make("a"), run(minutes=10))
    folder.samples_of(0, "n1").parent.with_name("attempt-copy").mkdir()
    (folder.samples / "attempt-copy" / "n1.jsonl").write_text("")
    assert TopReader(open_run(folder.path)).read(NOW).attempt == 0


def test_what_was_too_short_to_read_is_not_called_healthy(make: Make) -> None:
    folder = put(make("a"), run(minutes=4, gpu=lambda *_: {"use": 0.0}))
    text = page(folder)
    assert "nothing odd in what is known\n- " in text and "240 s of samples" in text
    assert "nothing odd in what is known" in one_line(TopReader(open_run(folder.path)).read(NOW))


def test_a_node_that_is_behind_and_hostile_names(make: Make) -> None:
    folder = put(make("a"), run(nodes=1, minutes=10))
    late = run(nodes=1, minutes=5)[0]
    put(folder, (NodeSamples(node="n\x1b[2J", attempt=0, samples=late.samples),))
    text = page(folder)
    assert "of the node that is furthest behind 309 s" in text.replace("\n  ", " ")
    assert "\x1b" not in text


def test_the_report_has_the_section_of_the_newest_attempt(make: Make, tmp_path: Path) -> None:
    folder = put(
        put(make("a", cluster="local", job_id="local-1"), run(minutes=60)), run(minutes=60, gpu=idle("n1", 3)), 1
    )
    write_text(json.dumps({"schema": 1, "status": 0, "time": 1.0}), folder.finished)
    made = report(tmp_path, str(folder.path), environ={})
    assert "  use       1 node, 4 GPUs, 360 samples (GPUs 72 % used, 410 W each" in str(made)
    assert "            1 of 4 GPUs of n1 was idle (0 % use) for 60 of 60 minutes\n" in str(made)
    assert "            hint: look at what its rank does" in str(made)
    assert max(len(line) for line in str(made).splitlines() if "idle" in line or "use " in line) <= 80


def test_a_report_without_samples_has_no_section(make: Make, tmp_path: Path) -> None:
    folder = make("a", cluster="local", job_id="local-1")
    write_text(json.dumps({"schema": 1, "status": 0, "time": 1.0}), folder.finished)
    made = report(tmp_path, str(folder.path), environ={})
    assert "  use " not in str(made)


def test_the_command_prints_plain_lines_and_json_into_a_pipe(make: Make, tmp_path: Path, hpcenv: Any) -> None:
    put(make("a"), run(minutes=10))
    done = hpcenv("top", "a", "--runs-dir", str(tmp_path / "runs"), cwd=tmp_path)
    assert done.status == 0 and "\x1b" not in done.stdout and "nothing odd" in done.stdout
    found = json.loads(hpcenv("top", "a", "--runs-dir", str(tmp_path / "runs"), "--json", cwd=tmp_path).stdout)
    assert found["data"]["runs"][0]["nodes"][0]["last"]["gpus"][0]["use"] == 96.0
    assert api.top("a", project=tmp_path, runs_dir=str(tmp_path / "runs"))[0].judgement.sentences == ()


def test_without_a_run_each_running_run_is_a_line(make: Make, tmp_path: Path, hpcenv: Any, fake_slurm: Any) -> None:
    put(make("a", job_id="7"), run(minutes=10, gpu=idle("n1", 3)))
    put(make("b", job_id="8"), run(minutes=10))
    fake_slurm.answers("squeue", "7|RUNNING|None|n1|0:01\n8|PENDING|None||0:00\n")
    made = hpcenv("top", "--runs-dir", str(tmp_path / "runs"), cwd=tmp_path, environ=fake_slurm.environ)
    assert made.stdout.startswith("a: 1 node, 4 GPUs, 4 ranks, ") and "b: " not in made.stdout
    assert "1 of 4 GPUs of n1 was idle (0 % use) for 10 of 10 minutes" in made.stdout.replace("\n    ", " ")
    fake_slurm.answers("squeue", "8|PENDING|None||0:00\n7|PENDING|None||0:00\n")
    none = hpcenv("top", "--runs-dir", str(tmp_path / "runs"), cwd=tmp_path, environ=fake_slurm.environ)
    assert none.stdout == "" and "no run is running" in none.stderr
