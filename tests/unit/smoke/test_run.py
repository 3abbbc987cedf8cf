"""The step of the smoke test on two nodes: each ends within its limit, and says when its ranks have ended, or why not."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Expectation
from hpcenv.records.smoke import SmokeNode, SmokePlan, SmokeReport
from hpcenv.records.verdict import NodeSettings, Rendezvous
from hpcenv.smoke.watch import Others

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
    """The port of a run whose agents start and do not meet each other."""
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
        said = [step.communicate(timeout=60)[0] for step in steps]
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


# Stands for an agent: starts one rank, which does as the script says, and then ends with 7. Its number is there before
# its rank is.
_AGENT = """
for word in "$@"; do case $word in --folder=*) folder=${word#--folder=} ;; esac; done
number=$(cat "$folder/../../number.$(basename "$folder")")
LOCAL_RANK=0 sh -c 'echo "{\\"phase\\": \\"all\\", \\"state\\": \\"$2\\"}" > "$1/rank-$3.jsonl"' \
  sh "$folder" STATE "$number"
exit 7
"""


def _run_on_first_node(run: Any, agent: str) -> SmokeReport:
    run.torchrun(agent)
    (run.folder.smoke / "number.n1").write_text("0")
    step = run.start("smoke", "n1")
    said, _ = step.communicate(timeout=60)
    assert (step.returncode, said) == (0, "")
    return load_record(SmokeReport, run.folder.smoke_of("n1", pairs=False))


def test_a_rank_that_says_nothing_of_its_end_is_not_done(run_of_two: Any, port: int) -> None:
    assert _run_on_first_node(run_of_two, _AGENT.replace("STATE", "begin")).ended == "failed"


def test_ranks_that_are_done_are_done_though_their_agent_fails(run_of_two: Any, port: int) -> None:
    assert _run_on_first_node(run_of_two, _AGENT.replace("STATE", "end")).ended == "done"


def test_a_torchrun_that_hangs_after_its_ranks_is_ended_at_the_limit(run_of_two: Any, port: int) -> None:
    report = _run_on_first_node(run_of_two, _AGENT.replace("STATE", "end").replace("exit 7", "exec sleep 300"))
    assert (report.ended, report.problem) == ("timeout", "rank 0 gave its result, but its process did not end")


def test_diagnostics_are_read_from_what_the_ranks_write_not_from_torchruns_copy(run_of_two: Any, port: int) -> None:
    run = run_of_two
    run.save(
        nproc_per_node=1,
        backend="nccl",
        expectations=(Expectation(field="libs.nccl.version", value="2.31.1", severity="info"),),
    )
    save_record(replace(_plan(port), backend="nccl"), run.folder.smoke_plan)
    logs = 'mkdir -p "$folder/x/attempt_0/0"; echo "NCCL DIAG [OK] p2p: fine" > "$folder/x/attempt_0/0/stdout.log"\n'
    report = _run_on_first_node(run, _AGENT.replace("STATE", "end").replace("number=", logs + "number="))
    assert report.diagnostics == ("[OK] p2p: fine",)
