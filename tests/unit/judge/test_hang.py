"""What two looks at all ranks prove: given looks, without processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from hpcenv.incontainer.start_hook.stacks import summary
from hpcenv.judge.hang import judge, stack_lines
from hpcenv.records.hangs import (
    LOCK_HELD,
    Frame,
    GroupState,
    HangFound,
    Operation,
    ProcessState,
    RankStacks,
    StackAnswer,
    StackRequest,
)

SCRIPT = Frame(file="/home/train.py", line=5, function="main")
WAITS = GroupState(name="0", last=Operation(number=7, name="all_reduce"), waits=Operation(number=7, name="all_reduce"))
DONE = GroupState(name="0", last=Operation(number=6, name="all_reduce"))
TORCH = "/usr/lib/python3.11/site-packages/torch"


def look(rank: int = 0, *, state: str = "S", groups: object = (), files: tuple[str, ...] = (), **more: object):
    process = {
        name: more.pop(name) for name in ("cpu", "total", "busy", "call", "file", "mount", "wchan") if name in more
    }
    stack = (*(Frame(file=file, line=1, function="called") for file in files), SCRIPT)
    made = {"stack": stack, **more}
    return RankStacks(rank=rank, process=ProcessState(pid=10 + rank, state=state, **process), groups=groups, **made)


def found(
    *second: RankStacks, ranks: int = 0, nodes: tuple[str, ...] = ("n0",), before: Iterable[RankStacks] = ()
) -> HangFound:
    """Judge two looks, a minute apart. In the first one, no CPU had been used."""
    first = tuple(before) or second
    idle = [replace(one, process=replace(one.process, cpu=0.0, total=0.0, busy=0.0)) for one in first]
    looks = enumerate((tuple(idle), second), start=1)
    answers = [StackAnswer(node="n0", look=number, at=0.0, ranks=one) for number, one in looks]
    request = StackRequest(id="x", asked=0.0, stalled=300.0, looks=2, gap=60.0)
    return judge(request, answers, nodes=nodes, ranks=ranks, at=0.0)


NO_TORCH = {"groups": None, "unknown": "torch is not imported"}
HELD = {"groups": None, "unknown": LOCK_HELD, "cpu": 60.0, "total": 60.0}


@pytest.mark.parametrize(
    ("second", "kind"),
    [
        ([look(groups=(DONE,))], "hang"),
        ([look(groups=(WAITS,), cpu=60.0, total=60.0)], "hang"),
        # Without a record of operations, equal lines and the use of a CPU prove nothing.
        ([look(**NO_TORCH)], "unknown"),
        ([look(**NO_TORCH, cpu=60.0, total=600.0)], "unknown"),
        ([look(**NO_TORCH, state="D")], "unknown"),
        ([look(**NO_TORCH), look(1, **NO_TORCH, state="")], "unknown"),
        ([look(**NO_TORCH, cpu=60.0), look(1, **NO_TORCH, state="T")], "unknown"),
        ([look()], "unknown"),
        ([look(cpu=60.0)], "working"),
        ([look(total=60.0)], "working"),
        ([look(**HELD)], "unknown"),
        # These ranks cannot run, or the stack shows an operation of torch.
        ([look(**NO_TORCH), look(1, **NO_TORCH, state="T")], "hang"),
        ([look(**NO_TORCH, state="D", call="read", file="/data/x")], "hang"),
        ([look(files=(f"{TORCH}/distributed/distributed_c10d.py",), cpu=60.0)], "hang"),
        ([look(groups=(WAITS,)), look(1, **HELD)], "hang"),
        # A thread that is not the main thread computes, and the others wait for this rank.
        ([look(groups=(WAITS,)), look(1, groups=(DONE,), total=60.0)], "working"),
    ],
)
def test_what_is_a_hang(second: list[RankStacks], kind: str) -> None:
    assert found(*second).kind == kind


BUSY = ProcessState(pid=99, state="R", written=0)
POOL = "/usr/lib/python3.11/multiprocessing/pool.py"


@pytest.mark.parametrize(
    ("rank", "kind"),
    [
        ({"groups": (DONE,)}, "working"),
        ({"groups": (WAITS,)}, "hang"),
        ({"groups": (WAITS,), "files": (f"{TORCH}/utils/data/dataloader.py",)}, "working"),
        ({"groups": (WAITS,), "files": (POOL,)}, "working"),
        ({"groups": (WAITS,), "files": (f"{TORCH}/_inductor/async_compile.py",)}, "working"),
    ],
)
@pytest.mark.parametrize("child", [{"workers": (BUSY,)}, {"busy": 60.0}])
def test_a_busy_child_is_work_if_the_rank_can_wait_for_it(rank: dict, kind: str, child: dict) -> None:
    assert found(look(**rank, **child)).kind == kind


def test_a_stopped_rank_with_a_busy_child_does_not_work() -> None:
    stopped = look(1, state="T", stack=(), groups=None, unknown="no answer in 5 s", workers=(BUSY,))
    assert found(look(groups=(WAITS,)), stopped).kind == "hang"


def test_a_rank_that_no_hook_has_marked_is_named_and_is_unknown() -> None:
    waits = [look(rank, groups=(WAITS,)) for rank in (0, 2)]
    one = found(*waits, ranks=4)
    assert one.kind == "unknown"
    why = "ranks 1, 3 could not be asked (no mark of the start hook)"
    assert one.lines[:2] == (f"no optimizer step for 5 min; {why}", "ranks 0, 2 wait in all_reduce no. 7 (train.py:5)")
    # Which ranks a silent node has is not known.
    one = found(*waits, ranks=4, nodes=("n0", "n1"))
    assert (one.kind, one.lines[0]) == ("unknown", "no optimizer step for 5 min; node n1 did not answer")
    assert found(ranks=1).lines == (
        "no optimizer step for 5 min; rank 0 could not be asked (no mark of the start hook)",
    )


def test_all_that_the_kernel_says_about_a_silent_rank_is_told() -> None:
    silent = {"stack": (), "groups": None, "unknown": "no answer in 5 s"}
    told = look(**silent, wchan="futex_wait_queue", call="system call 202")
    text = "state S, kernel function futex_wait_queue, system call 202"
    assert stack_lines([told]) == [f"rank 0: no stack; no answer in 5 s; {text}"]
    assert f"it is silent: no answer in 5 s, {text}" in found(look(1, groups=(WAITS,)), told).lines[0]
    told = look(**silent, state="T", call="read", file="socket:[7]")
    text = "state T (stopped), kernel function unknown, system call read of socket:[7]"
    assert stack_lines([told]) == [f"rank 0: no stack; no answer in 5 s; {text}"]
    told = look(**silent, state="D", wchan="request_wait_answer", call="read", file="/m/x", mount="fuse at /m")
    text = "state D (in a call that cannot be interrupted), kernel function request_wait_answer"
    assert stack_lines([told]) == [
        f"rank 0: no stack; no answer in 5 s; {text}, system call read of /m/x on fuse at /m"
    ]


@pytest.mark.parametrize(("state", "seen"), [("", ""), ("Z", "; ended")])
def test_a_rank_whose_program_has_ended_is_called_ended(state: str, seen: str) -> None:
    """State Z (a zombie): the parent has not waited for the process yet."""
    ended = look(1, state=state, stack=(), groups=None, unknown="no answer in 5 s", wchan="do_exit")
    one = found(look(groups=(WAITS,)), ended, look(2, groups=(WAITS,)))
    assert one.lines[0] == "ranks 0, 2 wait in all_reduce no. 7 (train.py:5); rank 1 ended"
    assert stack_lines([ended]) == [f"rank 1: no stack; no answer in 5 s{seen}"]
    two = found(look(**NO_TORCH), ended)
    assert two.lines[1] == "rank 0 is in main (train.py:5); rank 1 is gone: its process has ended"


def entry(name: str, p2p: int = 0, number: int = 0, state: str = "completed") -> dict:
    """Return an entry of torch's flight recorder: a send or receive (`p2p`), or a collective operation."""
    base = {"process_group": ["0", "default_pg"], "profiling_name": f"nccl:{name}", "is_p2p": bool(p2p)}
    return {**base, "p2p_seq_id": p2p, "collective_seq_id": number, "state": state, "retired": state == "completed"}


def of(*entries: dict) -> dict:
    return summary({"entries": list(entries)}, {"0": [4, 5, 6]})["groups"]["0"]


def test_a_receive_that_does_not_end_waits_for_its_rank() -> None:
    group = of(entry("all_reduce", number=1), entry("recv 0<-2", p2p=1), entry("recv 0<-1", p2p=2, state="started"))
    assert group["waits"] == {"number": 0, "name": "recv from rank 5"}
    assert group["last"] == {"number": 1, "name": "all_reduce"}
    assert of(entry("send 0->1", p2p=1, state="scheduled"))["waits"] == {"number": 0, "name": "send to rank 5"}


def test_operations_of_a_batch_have_the_state_of_its_last_entry() -> None:
    """torch never updates the state of each operation of a batch (`batch_isend_irecv`)."""
    batch = [entry("send 0->1", p2p=1, state="scheduled"), entry("recv 0<-1", p2p=1, state="scheduled")]
    assert "waits" not in of(*batch, entry("coalesced", p2p=1))
    assert of(*batch, entry("coalesced", p2p=1, state="started"))["waits"]["name"] == "send to rank 5"
    many = [entry("all_reduce", number=1, state="scheduled") for _ in range(2)]
    assert "waits" not in of(*many, entry("allreduce_coalesced", number=1))


@pytest.mark.parametrize(("later", "kind"), [(10, "hang"), (5000, "working")])
def test_a_rank_that_sends_and_receives_works(later: int, kind: str) -> None:
    """The stages of a pipeline only exchange messages. Both looks can be at the same line, in a receive."""

    def stage(rank: int, messages: int) -> RankStacks:
        state = of(entry("recv 0<-1", p2p=messages, state="started"))
        group = GroupState(name="0", own=state["own"], waits=Operation(**state["waits"]), ranks=(0, 1))
        return look(rank, groups=(group,), cpu=60.0, total=60.0)

    first, second = ((stage(0, number), stage(1, number)) for number in (10, later))
    assert found(*second, before=first).kind == kind


def test_ranks_that_wait_for_a_message_are_named_with_their_lines() -> None:
    def waits(rank: int, peer: int) -> RankStacks:
        group = GroupState(name="0", waits=Operation(number=0, name=f"recv from rank {peer}"), ranks=(0, 1, 2))
        return look(rank, groups=(group,), cpu=60.0, total=60.0)

    one = found(waits(0, 1), waits(1, 2), look(2, groups=(DONE,)))
    assert one.kind == "hang"
    assert one.lines[0] == (
        "rank 0 waits in recv from rank 1 (train.py:5); "
        "rank 1 is elsewhere: it waits in recv from rank 2 (train.py:5); "
        "rank 2 is elsewhere: it is in main (train.py:5)"
    )
