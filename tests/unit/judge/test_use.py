"""What samples say of a run: each odd run gets its sentence and only it, and healthy runs get none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from use_runs import BEGAN, GB, run, thinned

from hpcenv.judge.use import RULES, AskedShape, UseJudgement, in_words, judge_use
from hpcenv.records.samples import NodeSamples


def judged(samples: tuple[NodeSamples, ...], **asked: Any) -> UseJudgement:
    names = tuple(node.node for node in samples)
    return judge_use(
        samples, AskedShape(**{"nodes": names, "gpus": len(samples[0].samples[0].gpus), "cpus": 16} | asked)
    )


def on(node: str, number: int, **values: Any) -> Any:
    return lambda name, _at, index: values if (name, index) == (node, number) else {}


EMPTY = {"use": 0.0, "ranks": (), "others": 0, "memory": 0.0}
HOT = {
    "slow": (
        "hw-slowdown",
        "hw-thermal",
    ),
    "clock": 900.0,
}
SLOW = {"step_seconds": 0.8}

ODD = {
    "no process": (
        {"nodes": 2, "gpu": lambda n, at, i: EMPTY if n == "n2" and i and at > 120 else {}},
        "3 of 4 GPUs of n2 had no process after minute 2",
    ),
    "never a process": ({"ranks": 3, "gpu": on("n1", 3, **EMPTY)}, "1 of 4 GPUs of n1 had no process"),
    "idle": (
        {"gpu": lambda _n, at, i: {"use": 0.0} if i == 3 and at > 300 else {}},
        "1 of 4 GPUs of n1 was idle (0 % use) for 55 of 60 minutes",
    ),
    "all idle, processes hidden": (
        {"gpu": lambda *_: {"use": 0.0, "ranks": (), "others": None}, "rank": lambda *_: {"step": None, "step_seconds": None}},
        "4 of 4 GPUs of n1 were idle (0 % use) for 60 of 60 minutes",
    ),
    "data wait": (
        {"gpus": 1, "gpu": lambda *_: {"use": 39.0}, "rank": lambda *_: {"wait_seconds": 0.305, "workers": 2}},
        "the ranks waited for data 61 % of each step: 2 workers for 16 CPUs",
    ),
    "workers unknown": (
        {"rank": lambda *_: {"wait_seconds": 0.2, "workers": None}},
        "the ranks waited for data 40 % of each step",
    ),
    "node memory": (
        {"node": lambda _n, at, _i: {"memory": 70 * GB if at > 1800 else 60 * GB, "memory_peak": 71 * GB if at > 1800 else 60 * GB}},
        "peak memory 71 of 80 GB of n1",
    ),
    "GPU memory": ({"gpu": on("n1", 2, memory=78.5 * GB)}, "peak memory 78 of 80 GB of GPU 2 of n1"),
    "leak": (
        {"node": lambda _n, at, _i: {"memory": 20 * GB + max(0, at * 2 - 900) * 0.4e6}},
        "memory grows by 40 MB in 100 steps since step 900",
    ),
    "leak with a sawtooth": (
        {"node": lambda _n, at, _i: {"memory": 20 * GB + at * 2 * 0.4e6 + (3 * GB if at % 300 > 200 else 0)}},
        "memory grows by 40 MB in 100 steps since step 620",
    ),
    "leak of torch": (
        {"rank": lambda _n, at, r: {"torch_memory": 20 * GB + at * 2e6} if r == 1 else {}},
        "memory of torch in rank 1 grows by 100 MB in 100 steps since step 620",
    ),
    "hot slow rank": (
        {"nodes": 8, "rank": on("n5", 17, **SLOW), "gpu": on("n5", 1, **HOT)},
        "rank 17 is 1.6 times slower than the median; its GPU reports a hardware slowdown for heat",
    ),
    "slow of two": (
        {"gpus": 2, "rank": on("n1", 1, **SLOW)},
        "rank 1 is 1.6 times slower than the median; no signal that was read explains it",
    ),
    "slow by data": (
        {"rank": on("n1", 2, step_seconds=0.8, wait_seconds=0.32)},
        "rank 2 is 1.6 times slower than the median; it waits for data 40 % of each step",
    ),
    "stopped at times": (
        {"rank": lambda _n, at, r: {"step_seconds": 1.0, "state": "T" if at % 30 == 0 else "S"} if r == 3 else {}},
        "rank 3 is 2.0 times slower than the median; its process is stopped at times (state T)",
    ),
    "slow by its clock": (
        {"rank": on("n1", 0, **SLOW), "gpu": on("n1", 0, clock=900.0)},
        "rank 0 is 1.6 times slower than the median; its GPU runs at 900 MHz, those of the others at 1700 MHz",
    ),
    "slow by its CPUs": (
        {"nodes": 2, "gpus": 1, "rank": on("n2", 1, **SLOW), "node": lambda n, *_: {"pressure_cpu": 44.0} if n == "n2" else {}},
        "rank 1 is 1.6 times slower than the median; processes of n2 wait for a CPU 44 % of the time",
    ),
    "slow by its network": (
        {"nodes": 4, "gpus": 1, "rank": on("n3", 2, **SLOW), "node": lambda n, at, _i: {"rdma_errors": 7 + (at if n == "n3" else 0)}},
        "rank 2 is 1.6 times slower than the median; the RDMA ports of n3 had 3590 errors",
    ),
    "slow by lack of memory": (
        {"nodes": 2, "gpus": 1, "rank": on("n2", 1, **SLOW), "node": lambda n, *_: {"pressure_memory": 9.0 if n == "n2" else 0}},
        "rank 1 is 1.6 times slower than the median; no signal that was read explains it",
    ),
    "holds by data": (
        {"rank": on("n1", 3, wait_seconds=0.2)},
        "rank 3 holds the others back: it waits for data 40 % of each step, they 2 %",
    ),
    "holds because it is stopped": (
        {"rank": lambda _n, at, r: {"state": "T" if r == 1 and at % 30 else "S"}},
        "rank 1 holds the others back: its process is stopped 67 % of the time (state T)",
    ),
    "throttled": ({"gpu": on("n1", 1, **HOT)}, "1 of 4 GPUs of n1 reports a hardware slowdown for heat"),
    "power brake": (
        {"gpu": lambda *_: {"slow": ("power-brake", "hw-slowdown")}},
        "4 of 4 GPUs of n1 report a slowdown by the power brake",
    ),
    "ECC": (
        {"gpu": lambda _n, at, i: {"ecc": 5.0 + (2 if at > 900 else 0)} if i == 3 else {}},
        "GPU 3 of n1 had 2 uncorrected memory errors (ECC)",
    ),
    "pressure of memory": (
        {"node": lambda *_: {"pressure_memory": 14.0}},
        "processes of n1 waited for memory 14 % of the time",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("curves", "text"), ODD.values(), ids=ODD)
def test_an_odd_run_gets_its_sentence_and_only_it(curves: dict[str, Any], text: str) -> None:
    assert [sentence.text for sentence in judged(run(**curves)).sentences] == [text]


def compiles(_n: str, at: float, _i: int) -> dict[str, Any]:
    return (
        {"step": None, "step_seconds": None, "wait_seconds": None, "last_step": None}
        if at < 1500
        else {"step": int(at - 1499)}
    )


NO_STEPS = {"step": None, "step_seconds": None, "wait_seconds": None, "last_step": None, "torch_memory": None}

HEALTHY = {
    "plain": {},
    "two nodes": {"nodes": 2},
    "64 nodes": {"nodes": 64, "gpus": 8, "minutes": 10},
    "evaluation without steps": {"rank": lambda *_: NO_STEPS},
    "long first compile": {"rank": compiles, "gpu": lambda _n, at, _i: {"use": 0.0} if at < 1500 else {}, "minutes": 40},
    "long save": {
        "rank": lambda _n, at, _i: {"saving": True, "step": 1200, "step_seconds": None} if 600 < at < 3000 else {},
        "gpu": lambda _n, at, _i: {"use": 0.0} if 600 < at < 3000 else {},
    },
    "accumulation": {"rank": lambda _n, at, _i: {"step": int(at / 50), "step_seconds": 50.0 if at % 50 == 0 else None, "wait_seconds": 0.4 if at % 50 == 0 else None}},
    "20 seconds": {"minutes": 1 / 3, "gpu": lambda *_: {"use": 0.0}, "rank": lambda _n, _a, r: {"step_seconds": 0.5 + r, "wait_seconds": 0.4}},
    "one short idle phase": {"gpu": lambda _n, at, i: {"use": 0.0} if i == 3 and 600 < at < 1200 else {}},
    "one rank evaluates": {"gpu": lambda _n, at, i: {"use": 0.0} if i and at % 600 < 150 else {}},
    "processes not visible": {"gpu": lambda *_: {"ranks": (), "others": None}},
    "processes hidden as none": {"gpu": lambda *_: {"ranks": (), "others": 0}},
    "CPU only": {"gpus": 0, "ranks": 2},
    "no GPM, no clocks": {"gpu": lambda *_: {"clock": None, "power": None, "unknown": {"sm": "not supported"}}},
    "capped power": {"gpu": lambda *_: {"slow": ("power-cap", "applications-clocks"), "clock": 1300.0}},
    "old ECC errors": {"gpu": lambda *_: {"ecc": 7.0}},
    "a cache that fills": {"node": lambda _n, at, _i: {"memory": (20 + 15 * min(1, at / 1500)) * GB}},
    "memory of an evaluation": {"node": lambda _n, at, _i: {"memory": (20 + (9 if at % 900 > 600 else 0)) * GB}},
    "steps of different length": {"rank": lambda _n, at, r: {"step_seconds": 0.5 + 0.3 * (at % 70 / 70)}},
    "nothing can be read": {
        "gpu": lambda *_: dict.fromkeys(("use", "memory", "memory_total", "power", "clock", "ecc", "others")) | {"ranks": ()},
        "rank": lambda *_: NO_STEPS | {"cpu": None, "workers": None, "state": ""},
        "node": lambda *_: dict.fromkeys(("cpu", "cpus", "memory", "memory_peak", "memory_limit", "pressure_cpu", "pressure_memory")),
    },
}  # fmt: skip


@pytest.mark.parametrize("curves", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_run_is_one_line(curves: dict[str, Any]) -> None:
    made = judged(run(**curves))
    assert [sentence.text for sentence in made.sentences] == []
    assert len(in_words(made)) == 1 and "nothing odd" in in_words(made)[0]


def test_the_line_of_a_healthy_run_has_the_mean_figures() -> None:
    text = "2 nodes, 8 GPUs, 360 samples: nothing odd "
    text += "(GPUs 96 % used, 410 W each, 6.0 CPUs a node, 0.5 s a step, data wait 2 %)"
    assert in_words(judged(run(nodes=2, minutes=30))) == [text]


def test_samples_count_by_their_seconds() -> None:
    late = run(minutes=60, every=60, gpu=on("n1", 2, use=0.0), began=BEGAN + 300)
    early = run(minutes=5)
    joined = (NodeSamples(node="n1", attempt=0, samples=early[0].samples + late[0].samples),)
    assert "was idle (0 % use) for 60 of 65 minutes" in judged(joined).sentences[0].text


def test_the_most_of_a_minute_counts_for_a_peak_and_only_there() -> None:
    assert judged(thinned(run(every=60))).sentences == ()
    made = judged(thinned(run(every=60), memory_peak=79 * GB))
    assert [sentence.text for sentence in made.sentences] == ["peak memory 79 of 80 GB of n1"]


ODD_NODES = [f"n{number}" for number in range(5, 22)]


def test_many_nodes_share_a_sentence() -> None:
    made = judged(
        run(nodes=64, gpus=8, minutes=10, gpu=lambda n, _at, i: {"use": 0.0} if n in ODD_NODES and i > 5 else {})
    )
    assert len(made.sentences) == 1
    assert made.sentences[0].text.startswith("2 of 8 GPUs of n5 were idle (0 % use) for 10 of 10 minutes; 16 more")
    assert len(made.sentences[0].nodes) == 17


def test_what_was_not_seen_is_said_once_with_its_reason() -> None:
    unknown = {"use": None, "unknown": {"use": "Not Supported"}}
    made = judged(run(nodes=2, gpu=lambda *_: unknown), nodes=("n1", "n2", "n3"))
    assert made.unknown == ("no samples of n3", "use of GPUs unknown: Not Supported")
    assert in_words(made)[0].endswith("; no samples of n3; use of GPUs unknown: Not Supported")
    no_cgroup = {"memory": None, "memory_peak": None, "unknown": {"cpu, memory": "no cgroup"}}
    made = judged(
        run(node=lambda *_: no_cgroup, gpu=lambda *_: {"ranks": (), "others": None, "unknown": {"ranks": "NVML"}})
    )
    assert made.unknown == ("processes of GPUs unknown: NVML", "memory of the nodes unknown: no cgroup")
    assert judged(run(gpus=0), gpus=4).unknown[0] == "use of GPUs unknown: no sample shows a GPU"
    damaged = (NodeSamples(node="n1", attempt=0, problem="n1.jsonl: no JSON"),)
    assert judge_use(damaged, AskedShape(nodes=("n1",))).unknown == ("n1: n1.jsonl: no JSON", "no samples of n1")


def cut(node: NodeSamples, begin: float, end: float) -> NodeSamples:
    return replace(node, samples=tuple(one for one in node.samples if begin < one.at - BEGAN <= end))


N1, N2 = run(nodes=2)
NO_NVML = {"use": None, "memory": None, "others": None, "ranks": (), "unknown": {"all": "pynvml is not installed"}}
# Runs of which a part is unknown: what is said of each.
IN_PART = {
    "JAX": (run(rank=lambda *_: NO_STEPS), {}, "no optimizer step was seen: slow ranks, waits for data and memory that grows are unknown"),
    "a rank without steps": (run(rank=lambda _n, _at, r: NO_STEPS if r == 3 else {}), {}, "no optimizer step of rank 3 was seen"),
    "no DataLoader": (run(rank=lambda *_: {"wait_seconds": None}), {}, "the wait for data is unknown: no DataLoader of torch was seen"),
    "a node without samples": ((N1,), {"nodes": ("n1", "n2")}, "no samples of n2"),
    "a node without samples, before the verdict": ((N1,), {"nodes": (), "number": 2}, "samples of 1 of 2 nodes only"),
    "a node that ended early": ((N1, cut(N2, 0, 1200)), {}, "n2: samples of 20 of 60 minutes only"),
    "a node that began late": ((N1, cut(N2, 1200, 3600)), {}, "n2: samples of 40 of 60 minutes only"),
    "both ended early": ((N1, N2), {"until": BEGAN + 9 * 3600}, "n[1-2]: samples of 1 of 9 hours only"),
    "one node without NVML": (run(nodes=2, gpu=lambda n, *_: NO_NVML if n == "n2" else {}), {}, "use of 4 GPUs of n2 unknown: pynvml is not installed"),
    "no reasons of the clocks": (run(gpu=lambda *_: {"unknown": {"slow": "Not Supported"}}), {}, "slowdowns of GPUs unknown: Not Supported"),
    "a driver that hangs": (run(gpu=lambda _n, at, _i: NO_NVML if at > 1800 else {}), {}, "use of GPUs unknown at times: pynvml is not installed"),
    "a GPU that is not there": (run(nodes=2), {"gpus": 8}, "n[1-2]: samples show 4 of 8 GPUs"),
    "one node without a cgroup": (
        run(nodes=2, node=lambda n, *_: {"memory": None, "memory_peak": None, "unknown": {"memory": "no cgroup"}} if n == "n2" else {}),
        {},
        "memory of n2 unknown: no cgroup",
    ),
    "four minutes": (run(minutes=4), {}, "240 s of samples are too few to find idle GPUs"),
    "20 seconds": (run(minutes=1 / 3), {}, "20 s of samples are too few to find slow ranks, waits for data and idle GPUs"),
}  # fmt: skip


@pytest.mark.parametrize(("samples", "asked", "text"), IN_PART.values(), ids=IN_PART)
def test_what_is_known_in_part_is_not_called_healthy(
    samples: tuple[NodeSamples, ...], asked: dict[str, Any], text: str
) -> None:
    made = judged(samples, **asked)
    assert made.sentences == ()
    assert any(one.startswith(text) for one in made.unknown), made.unknown
    assert ": nothing odd in what is known (" in in_words(made)[0]


def test_a_sample_that_is_late_needs_no_word() -> None:
    assert judged((N1, cut(N2, 120, 3500)), until=BEGAN + 3650).unknown == ()
    assert judged(run(every=600), until=BEGAN + 3600 + 700).unknown == ()


def test_each_rule_has_a_case_and_each_row_is_full() -> None:
    said = {sentence.rule for curves, _ in ODD.values() for sentence in judged(run(**curves)).sentences}
    assert said == {rule.id for rule in RULES}
    assert all(rule.example and rule.means and rule.why and rule.hint and rule.source for rule in RULES)
