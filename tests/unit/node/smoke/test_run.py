"""The step `smoke` on two nodes whose agents do not meet: each ends within its limit and says why."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from hpcenv.node.smoke.watch import Others
from hpcenv.records.files import load_record, save_record
from hpcenv.records.smoke import SmokeNode, SmokePlan, SmokeReport
from hpcenv.records.verdict import NodeSettings, Rendezvous

from .silent import silent_listener


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _node(name: str) -> SmokeNode:
    return SmokeNode(
        name=name,
        address="127.0.0.1",
        interface="lo",
        interfaces={"lo": ("127.0.0.1",)},
        speed_mbit=None,
        pair_port=_free_port(),
        boot_id="",
        driver="",
    )


def _plan(port: int) -> SmokePlan:
    return SmokePlan(
        schema=1,
        run="r1",
        attempt=0,
        job_id="77",
        nodes=(_node("n1"), _node("n2")),
        nproc_per_node=1,
        backend="gloo",
        port=port,
        seconds=1,
        start_seconds=300,
        profile="gloo",
    )


@pytest.fixture
def port(run_of_two: Any) -> int:
    """Of a run whose agents start and meet nobody."""
    run, port = run_of_two, _free_port()
    run.torchrun("sleep 300")
    run.save(nproc_per_node=1)
    assert run.step("begin").returncode == 0
    save_record(_plan(port), run.folder.smoke_plan)
    for number, node in enumerate(("n1", "n2")):
        settings = NodeSettings(
            schema=1,
            run="r1",
            node=node,
            attempt=0,
            node_rank=number,
            local_address="127.0.0.1",
            rendezvous=Rendezvous(host="127.0.0.1", port=23456, id="77.0"),
            settings=(),
        )
        save_record(settings, run.folder.env_of(node))
    return port


def test_all_nodes_end_when_one_cannot_reach_the_first(run_of_two: Any, port: int) -> None:
    begun = time.monotonic()
    with silent_listener(port):
        steps = [run_of_two.start("smoke", node) for node in ("n1", "n2")]
        try:
            said = [step.communicate(timeout=60)[0] for step in steps]
        finally:
            for step in steps:
                step.terminate()
    took = time.monotonic() - begun
    assert [step.returncode for step in steps] == [0, 0], said
    first, second = (load_record(SmokeReport, run_of_two.folder.smoke_of(n, pairs=False)) for n in ("n1", "n2"))
    target = f"nothing came back from 127.0.0.1, port {port}"
    assert (second.ended, second.problem.partition(":")[0]) == ("unreachable", target)
    assert (first.ended, first.problem.startswith(f"n2: {target}")) == ("other-ended", True)
    assert took < 30, "the limit of a start is 300 s"


def test_only_the_end_of_another_node_in_this_attempt_counts(tmp_path: Path) -> None:
    file = tmp_path / "ended.json"

    def seen(**changes: object) -> bool:
        words: dict[str, object] = {"run": "r1", "node": "n2", "attempt": 0} | changes
        save_record(SmokeReport(schema=1, ended="failed", **words), file)  # type: ignore[arg-type]
        return Others(file, run="r1", attempt=0, node="n1").ended(ranks_run=False) is not None

    assert Others(file, run="r1", attempt=0, node="n1").ended(ranks_run=False) is None
    assert seen()
    assert not seen(node="n1") and not seen(attempt=1) and not seen(run="r2")
    file.write_text("{")
    assert Others(file, run="r1", attempt=0, node="n1").ended(ranks_run=False) is None


def test_ranks_that_run_get_time_for_their_own_message(tmp_path: Path) -> None:
    file = tmp_path / "ended.json"
    save_record(SmokeReport(schema=1, run="r1", node="n2", attempt=0, ended="failed"), file)
    others = Others(file, run="r1", attempt=0, node="n1")
    assert others.ended(ranks_run=True) is None
    assert others.ended(ranks_run=False) is not None
