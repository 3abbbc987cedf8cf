"""Mutate good inputs and watch the readers: `python -m tests.fuzz.run --minutes N [TARGET ...]`.

`--replay` only runs what lies in tests/fuzz/corpus, each once, and says how it ended.

Each target runs in a process of its own with bounded memory. A mutant that reaches new
lines of hpcenv, or ends in a way not seen before, is mutated on. What counts as a crash:

- an error that the target does not allow,
- more than 2 s of processor time for one input, or 30 s of any time,
- more than 256 MiB on top of what the process had.

The input of a crash is written to `--crashes` (default: a folder of the system for
temporary files); once fixed, it belongs into tests/fuzz/corpus/TARGET/, which the test
suite replays.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import multiprocessing
import os
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .targets import CORPUS, TARGETS, Target

CPU_SECONDS = 2.0
WALL_SECONDS = 30.0
MEMORY = 256 << 20
LARGEST = 1 << 16
SLICE_SECONDS = 20.0
# Of each target in each round, however busy the machine is; the last one looks for new lines.
LEAST_EXECUTIONS = 16
PACKAGE = str(Path(__file__).resolve().parents[2] / "hpcenv")


class Hang(BaseException):
    """One input took too long."""


def main() -> int:
    """Run every target in turn, slice by slice, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: all of {', '.join(TARGETS)}")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--crashes", type=Path, default=Path(tempfile.gettempdir()) / "hpcenv-fuzz-crashes")
    parser.add_argument("--replay", action="store_true", help="run tests/fuzz/corpus once")
    options = parser.parse_args()
    if options.replay:
        return replay(options.targets or list(TARGETS))
    names = options.targets or list(TARGETS)
    deadline = time.monotonic() + options.minutes * 60
    totals: dict[str, dict[str, Any]] = {name: {"executions": 0, "corpus": 0, "crashes": set()} for name in names}
    kept: dict[str, list[bytes]] = {name: [] for name in names}
    number = options.seed
    while time.monotonic() < deadline:
        for name in names:
            seconds = min(
                SLICE_SECONDS, max(1.0, (deadline - time.monotonic()) / len(names)), options.minutes * 60 / len(names)
            )
            number += 1
            told = _slice(name, number, seconds, options.crashes, kept[name])
            totals[name]["executions"] += told["executions"]
            totals[name]["crashes"] |= set(told["crashes"])
            totals[name]["corpus"] = len(kept[name])
    for name, total in totals.items():
        print(
            f"{name:16} {total['executions']:>9} executions, {total['corpus']:>4} kept, {len(total['crashes'])} crashes"
        )
        for crash in sorted(total["crashes"]):
            print(f"  {crash}")
    executions = sum(total["executions"] for total in totals.values())
    crashes = sum(len(total["crashes"]) for total in totals.values())
    print(json.dumps({"executions": executions, "crashes": crashes, "minutes": options.minutes, "seed": options.seed}))
    return 1 if crashes else 0


def replay(names: list[str]) -> int:
    """Run every input that once crashed; print one line for each, `bad` for what still does."""
    worst = 0
    for name in names:
        for path in sorted((CORPUS / name).glob("*")):
            child = multiprocessing.get_context("fork").Process(target=_replay_one, args=(name, path))
            child.start()
            child.join(WALL_SECONDS)
            if child.exitcode not in (0, 1):
                child.kill()
                print(f"bad {name}/{path.name}: hangs or ends the process ({child.exitcode})", flush=True)
            worst = max(worst, 0 if child.exitcode == 0 else 1)
    return worst


def _replay_one(name: str, path: Path) -> None:
    _limit()
    signature, bad = execute(TARGETS[name], path.read_bytes())
    print(f"{'bad' if bad else 'good'} {name}/{path.name}: {signature}", flush=True)
    sys.exit(1 if bad else 0)


def _slice(name: str, seed: int, seconds: float, crashes: Path, kept: list[bytes]) -> dict[str, Any]:
    """Fuzz one target for a while in a child; a child that dies or hangs is a crash too."""
    current = mmap.mmap(-1, LARGEST + 16)
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_child, args=(name, seed, seconds, crashes, current, writer, list(kept))
    )
    child.start()
    writer.close()
    told: dict[str, Any] = {"executions": 0, "crashes": [], "kept": []}
    limit = time.monotonic() + seconds + WALL_SECONDS
    while time.monotonic() < limit:
        if reader.poll(0.5):
            try:
                told = reader.recv()
            except EOFError:
                break
            limit = max(limit, time.monotonic() + WALL_SECONDS) if told.get("more") else limit
            if not told.get("more"):
                break
        elif not child.is_alive():
            break
    ended = not told.get("more", True)
    if not ended:
        size = struct.unpack_from("<Q", current, 0)[0]
        how = "hangs in one call" if child.is_alive() else f"ends the process ({child.exitcode})"
        told["crashes"] = [*told["crashes"], _keep(name, bytes(current[16 : 16 + size]), how, crashes)]
        child.kill()
    child.join()
    kept[:] = told["kept"] or kept
    return told


def _child(
    name: str, seed: int, seconds: float, crashes: Path, current: mmap.mmap, pipe: Any, kept: list[bytes]
) -> None:
    target, chance = TARGETS[name], random.Random(f"{name} {seed}")
    _limit()
    sys.stdin = open(os.devnull)
    seen: set[str] = set()
    lines: set[tuple[str, int]] = set()
    corpus = list(dict.fromkeys([*target.seeds, *kept]))
    told: dict[str, Any] = {"executions": 0, "crashes": [], "kept": kept, "more": True}
    reported = time.monotonic()
    for data in corpus:
        struct.pack_into("<Q", current, 0, len(data))
        current[16 : 16 + len(data)] = data
        _covered(lambda data=data: execute(target, data), lines)
        # On a busy machine this takes longer than a call may: the parent would see a hang.
        if time.monotonic() > reported + 5:
            reported = time.monotonic()
            pipe.send(told)
    began = reported = time.monotonic()
    while told["executions"] < LEAST_EXECUTIONS or time.monotonic() < began + seconds:
        data = mutate(chance.choice(corpus), corpus, target.words, chance)
        struct.pack_into("<Q", current, 0, len(data))
        current[16 : 16 + len(data)] = data
        told["executions"] += 1
        outcomes: list[tuple[str, bool]] = []
        if told["executions"] % 16:
            outcomes.append(execute(target, data))
            new = False
        else:
            new = _covered(lambda data=data, out=outcomes: out.append(execute(target, data)), lines)
        signature, bad = outcomes[0]
        if bad and signature not in seen:
            told["crashes"].append(_keep(name, data, signature, crashes))
        elif not bad and (new or signature not in seen) and len(corpus) < 2000:
            corpus.append(data)
        seen.add(signature)
        if time.monotonic() > reported + 5:
            reported = time.monotonic()
            pipe.send(told)
    told["more"], told["kept"] = False, [data for data in corpus if data not in target.seeds][-500:]
    pipe.send(told)


def execute(target: Target, data: bytes) -> tuple[str, bool]:
    """Run one input; return how it ended, and whether that is a crash."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        target.run(data)
        outcome, bad = "fine", False
    except target.allowed as error:
        outcome, bad = _signature(error), False
    except (Exception, Hang) as error:  # noqa: BLE001  (that is what is looked for)
        outcome, bad = f"{_signature(error)} at {_where(error)}", True
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if grown > MEMORY // 2:
        return f"takes {grown >> 20} MiB", True
    return outcome, bad


def _limit() -> None:
    """Bound memory and time of this process."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def stop(_signal: int, _frame: object) -> None:
        raise Hang(f"more than {CPU_SECONDS} s of processor time")

    signal.signal(signal.SIGVTALRM, stop)


def _signature(error: BaseException) -> str:
    """Return the kind of an error without the words of this very input."""
    text = re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"|[0-9]+", "_", f"{error} {getattr(error, 'why', None) or ''}")
    return f"{type(error).__name__}: {text[:120]!r}"


def _where(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "hpcenv" in f.filename]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"


def _keep(name: str, data: bytes, how: str, crashes: Path) -> str:
    place = crashes / name / hashlib.sha256(data).hexdigest()[:16]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    return f"{how}  <- {place} ({len(data)} bytes)"


def _covered(call: Callable[[], object], lines: set[tuple[str, int]]) -> bool:
    """Run with a tracer; return whether a line of hpcenv was reached for the first time."""
    count = len(lines)

    def trace(frame: Any, event: str, _argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return len(lines) > count


# -- mutation -----------------------------------------------------------------------------


def mutate(data: bytes, corpus: list[bytes], words: tuple[bytes, ...], chance: random.Random) -> bytes:
    """Return `data` with one to eight small changes."""
    for _ in range(chance.choice((1, 1, 1, 2, 2, 4, 8))):
        data = chance.choice(_CHANGES)(data, corpus, words, chance)
    return data[:LARGEST]


def _span(data: bytes, chance: random.Random) -> tuple[int, int]:
    begin = chance.randrange(len(data) + 1)
    return begin, min(len(data), begin + int(chance.paretovariate(0.7)))


def _flip(data: bytes, _corpus: list[bytes], _words: tuple[bytes, ...], chance: random.Random) -> bytes:
    if not data:
        return b"\0"
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]


def _set(data: bytes, _corpus: list[bytes], _words: tuple[bytes, ...], chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return (
        data[:at] + bytes([chance.choice((0, 10, 13, 34, 92, 127, 128, 255, chance.randrange(256)))]) + data[at + 1 :]
    )


def _remove(data: bytes, _corpus: list[bytes], _words: tuple[bytes, ...], chance: random.Random) -> bytes:
    begin, end = _span(data, chance)
    return data[:begin] + data[end:]


def _repeat(data: bytes, _corpus: list[bytes], _words: tuple[bytes, ...], chance: random.Random) -> bytes:
    begin, end = _span(data, chance)
    return data[:begin] + data[begin:end] * chance.choice((2, 3, 50, 1000)) + data[end:] if end - begin < 200 else data


def _insert(data: bytes, _corpus: list[bytes], words: tuple[bytes, ...], chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + (chance.choice(words) if words else b"\0") + data[at:]


def _replace(data: bytes, _corpus: list[bytes], words: tuple[bytes, ...], chance: random.Random) -> bytes:
    word = chance.choice(words) if words else b"\0"
    at = chance.randrange(len(data) + 1)
    return data[:at] + word + data[at + len(word) :]


def _splice(data: bytes, corpus: list[bytes], _words: tuple[bytes, ...], chance: random.Random) -> bytes:
    other = chance.choice(corpus)
    begin, end = _span(other, chance)
    at, until = _span(data, chance)
    return data[:at] + other[begin:end] + data[until:]


def _cut(data: bytes, _corpus: list[bytes], _words: tuple[bytes, ...], chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _number(data: bytes, _corpus: list[bytes], _words: tuple[bytes, ...], chance: random.Random) -> bytes:
    found = [match.span() for match in re.finditer(rb"[0-9]+", data)]
    if not found:
        return data
    begin, end = chance.choice(found)
    return data[:begin] + chance.choice((b"0", b"-1", b"99999999999999999999", b"1.5", b"007", b"1e9")) + data[end:]


def _value(data: bytes, _corpus: list[bytes], _words: tuple[bytes, ...], chance: random.Random) -> bytes:
    """Put a value of another kind in place of a quoted word: what a person or another version would write."""
    found = [match.span() for match in re.finditer(rb'"[^"\n]*"', data)]
    if not found:
        return data
    begin, end = chance.choice(found)
    kinds = (b"1", b"true", b"[]", b"{}", b'""', b"null", b'["a"]', b'"absent"', b"1.5", data[begin:end] * 2)
    return data[:begin] + chance.choice(kinds) + data[end:]


def _lines(data: bytes, _corpus: list[bytes], _words: tuple[bytes, ...], chance: random.Random) -> bytes:
    rows = data.split(b"\n")
    one, other = chance.randrange(len(rows)), chance.randrange(len(rows))
    if chance.random() < 0.5:
        rows[one], rows[other] = rows[other], rows[one]
    else:
        rows.insert(other, rows[one])
    return b"\n".join(rows)


_CHANGES = (_flip, _set, _remove, _repeat, _insert, _insert, _replace, _splice, _cut, _number, _value, _value, _lines)


if __name__ == "__main__":
    sys.exit(main())
