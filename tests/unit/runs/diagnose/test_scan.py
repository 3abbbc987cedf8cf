"""The search in one log: any size, any content, flat memory."""

from __future__ import annotations

import io
import random
import time
import tracemalloc
from collections.abc import Sequence

import pytest

from hpcenv.runs.diagnose.patterns import patterns_for
from hpcenv.runs.diagnose.scan import PatternFound, scan

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def found_in(data: bytes, *, start: int = 0) -> Sequence[PatternFound]:
    return scan(io.BytesIO(data), patterns_for(), start=start).found


def test_line_offset_and_count() -> None:
    data = b"a\nb\n" * 100_000 + f"[3] {OOM}\n[3] {OOM}\n".encode() + b"c\n"
    (found,) = found_in(data)
    assert (found.pattern.id, found.rank, found.line, found.count) == ("gpu-out-of-memory", 3, 200_001, 2)
    assert data[found.offset :].startswith(b"[3] torch.OutOfMemoryError")


@pytest.mark.parametrize("before", [0, 1, 262_143, 262_144, 262_145, 500_000, 1_048_575, 1_048_577])
def test_a_line_at_the_edge_of_a_block_is_found_once(before: int) -> None:
    filler = b"x" * 99 + b"\n"
    data = (filler * (before // 100 + 1))[:before] + b"\n" + OOM.encode() + b"\n"
    (found,) = found_in(data)
    assert found.count == 1
    assert found.line == data.count(b"\n", 0, found.offset) + 1


def test_a_last_line_without_an_end() -> None:
    assert [found.line for found in found_in(b"a\n" + OOM.encode())] == [2]
    assert scan(io.BytesIO(b"a\nb"), patterns_for()).lines == 2
    assert scan(io.BytesIO(b""), patterns_for()).lines == 0


def test_lines_that_differ_in_digits_only_are_told_apart() -> None:
    data = b"ibv: Call to ibv_modify_qp failed with 99 x\n" * 3 + b"ibv: Call to ibv_modify_qp failed with 110 x\n"
    assert [(found.pattern.id, found.line) for found in found_in(data)] == [("nccl-ib-unreachable", 4)]


def test_each_rank_is_counted() -> None:
    data = "".join(f"[{rank}] {OOM}\n" * 2 for rank in (4, 0, 7)).encode()
    assert [(found.rank, found.line, found.count) for found in found_in(data)] == [(4, 1, 2), (0, 3, 2), (7, 5, 2)]


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("[3] ", 3),
        ("[rank3]:", 3),
        ("[default3]:", 3),
        ("[3] [rank3]: ", 3),
        ("", None),
        ("[Rank 5] ", 5),
        ("[x] ", None),
    ],
)
def test_the_rank_in_a_prefix(prefix: str, rank: int | None) -> None:
    (found,) = found_in(f"{prefix}{OOM}\n".encode())
    assert found.rank == rank


@pytest.mark.parametrize(
    ("prefix", "rank", "task"),
    [
        ("0: ", None, 0),
        (" 7: ", None, 7),
        ("12: [3] ", 3, 12),
        ("1: [rank3]: ", 3, 1),
        ("7:", None, None),
        ("x 7: ", None, None),
    ],
)
def test_the_task_that_srun_puts_before_a_line(prefix: str, rank: int | None, task: int | None) -> None:
    (found,) = found_in(f"{prefix}{OOM}\n".encode())
    assert (found.rank, found.task) == (rank, task)


def test_tracebacks_of_labelled_tasks_are_told_apart() -> None:
    data = "".join(
        f"{task}: {line}\n"
        for line in (
            "Traceback (most recent call last):",
            '  File "/p/train.py", line LINE, in f',
            "    x()",
            "KeyError: 1",
        )
        for task in (0, 1)
    )
    found = found_in(data.replace("0:   File", "0:  File").replace("LINE", "4").encode())
    assert [(one.task, one.where) for one in found] == [(0, "train.py:4"), (1, "train.py:4")]


def test_the_node_and_time_in_a_line_of_nccl() -> None:
    (found,) = found_in(
        b"[2026-04-22 21:34:20] gpu07:202016:202235 [0] misc/shmutils.cc:88 NCCL WARN Error: failed to extend /dev/shm/nccl-W to 9 bytes\n"
    )
    assert (found.pattern.id, found.node, found.time) == ("nccl-shm", "gpu07", "2026-04-22 21:34:20")


def test_a_progress_bar_before_the_message_is_cut_off() -> None:
    (found,) = found_in(b"\r".join(b" %d%%|##" % n for n in range(5000)) + f"\r{OOM}\n".encode())
    assert found.text == OOM


def test_of_an_exception_the_last_one_of_a_rank_counts() -> None:
    data = "".join(
        f'Traceback (most recent call last):\n  File "/p/train.py", line {n}, in f\n    x()\nKeyError: {n}\n'
        for n in (1, 2, 3)
    )
    (found,) = found_in(data.encode())
    assert (found.pattern.id, found.where, found.line, found.count) == ("python-exception", "train.py:3", 12, 3)


def test_the_name_of_an_exception_in_a_sentence_is_none() -> None:
    assert found_in(b"ValueError: is raised if x\nsee RuntimeError: below\nError\nthe Exception\n") == ()


def test_the_code_of_the_user_not_of_packages_is_named() -> None:
    data = (
        b"[1] Traceback (most recent call last):\n"
        b'[1]   File "/p/train.py", line 9, in main\n'
        b'[0]   File "/p/other.py", line 1, in main\n'
        b'[1]   File "/env/lib/python3.11/site-packages/torch/x.py", line 5, in y\n'
        b"[1] RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x5 and 4x2)\n"
    )
    (found,) = found_in(data)
    assert (found.pattern.id, found.rank, found.where) == ("shape-mismatch", 1, "train.py:9")


def test_the_search_may_start_in_the_middle() -> None:
    data = f"{OOM}\n".encode() + b"x\n" * 10
    assert found_in(data, start=40) == ()


def hostile() -> list[tuple[str, bytes]]:
    generator = random.Random(7)
    return [
        ("random bytes", generator.randbytes(3_000_000)),
        ("one line", b"x" * 5_000_000),
        ("one line of anchors", b"CUDA out of memory Error " * 200_000),
        ("ranks", b"".join(b"[%d] CUDA out of memory\n" % n for n in range(60_000))),
        ("peers", b"".join(b"x Got completion from peer 1.2.%d.%d<9> with status=12 x\n" % (n, n) for n in range(30_000))),
        ("tracebacks", b"".join(b"[%d] Traceback (most recent call last):\n[%d]   x\n[%d] KeyError: 1\n" % (n % 900, n % 900, n % 900) for n in range(20_000))),
        ("empty lines", b"\n" * 3_000_000),
        ("surrogates", "Error \ud800 CUDA out of memory\n".encode("utf-8", "surrogatepass") * 1000),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "data"), hostile(), ids=[name for name, _ in hostile()])
def test_a_hostile_log_takes_neither_long_nor_much_memory(name: str, data: bytes) -> None:
    began = time.process_time()
    result = scan(io.BytesIO(data), patterns_for())
    assert time.process_time() - began < 20
    assert len(result.found) <= 5000
    assert all(len(found.text) <= 4100 and len(found.peers) <= 200 for found in result.found)


def test_the_memory_does_not_grow_with_the_log() -> None:
    class Lines(io.RawIOBase):
        """Lines that are all new, made while they are read."""

        def __init__(self, size: int) -> None:
            self.left, self.generator = size, random.Random(5)

        def seek(self, *_: int) -> int:
            return 0

        def read(self, size: int = -1) -> bytes:
            size = min(size, self.left)
            self.left -= size
            text = " ".join(
                "%x" % self.generator.getrandbits(40) + ("\n" if n % 9 == 0 else "") for n in range(size // 11)
            )
            return text.encode()[:size]

    peaks = []
    for size in (2_000_000, 12_000_000):
        tracemalloc.start()
        scan(Lines(size), patterns_for())  # type: ignore[arg-type]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 3 + 20_000_000
    assert peaks[1] < 60_000_000
