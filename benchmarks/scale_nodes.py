"""Check and decide on 2, 8, 32 and 64 nodes: seconds, and the operations on the shared file system for each node.

    python -m benchmarks.scale_nodes [--json] [--sizes 2,8] [--rounds N]

It brings up a testbed with as many nodes as the largest size, and takes it down at the end. All nodes are this machine:
the seconds of many nodes are those of its cores, the operations are not. Each size runs `hpcenv verify --nodes N` on a
Python without packages: what an environment of many files adds is the same on each node (benchmarks/facts.py). The
times are those of the files in the run folder: from the start of the batch script to the last node's facts (check),
and to the verdict (decide).

The operations are counted in a run of their own by strace: all calls with a path or an open file below /home or
/shared, in the check step of a node and in the decide step of the batch node. Of many nodes eight are counted, from the
first to the last: strace on all of them takes minutes on the cores of one machine. There is no peer.

Must: the check of each counted node makes the same number of operations whatever the number of nodes (within 2 %), and
decide makes at most a fixed number more for each further node.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._stop import end_in_order

# It brings up its own testbed, which is larger.
NEEDS = ()

SIZES = (2, 8, 32, 64)
SAME = 0.02
# To read one node's facts and write its settings: 21 seen on 2026-11-23, with some room.
DECIDE_PER_NODE = 40
ROOT = Path(__file__).resolve().parents[1]
TESTBED = ROOT / "scripts" / "testbed"
INSTANCE = "scalenodes"
FOLDER = "/home/alice/hpcenv-bench/scale-nodes"
TOOLS = "/shared/scale-nodes-tools"
LOADER = "/lib64/ld-linux-x86-64.so.2"
# Children too, with the path of each open file: calls with a path or a descriptor. It writes to the node's own disk.
STRACE = f"{LOADER} --library-path {TOOLS} {TOOLS}/strace -f -qq -y -e trace=%file,%desc -o /tmp/ops"
SPEC = 'image = "host"\npython = "venv/bin/python"\n[policy]\n"torch.version" = "info"\n'
# A line of `setup` puts this before the first line of the run's step.py: the two steps start anew below `traced`.
FIRST = f"""\
import os, sys
if sys.argv[1] in ("check", "decide") and not os.environ.get("TRACED"):
    os.environ["TRACED"] = "yes"
    os.execv("{TOOLS}/traced", ["traced", sys.argv[1], sys.executable, "-I", *sys.argv])
"""
SETUP = f'cat {TOOLS}/first.py "$run/code/step.py" > "$run/step.new" && mv "$run/step.new" "$run/code/step.py"'
# Around the step of a node: strace on those that are counted. $1 is the name of the step.
TRACED = f"""\
#!/bin/sh
step=$1; shift
case " @nodes@ " in *" $SLURMD_NODENAME "*) exec {STRACE}."$step" "$@" ;; esac
exec "$@"
"""
MOST_COUNTED = 8
COUNT = r"grep -cE '(\"|<)/(home|shared)/' /tmp/ops.{step} 2>/dev/null || true"
# When the batch script began, the last node had its facts, and the verdict was there.
TIMES = """
import json, pathlib, sys
run = pathlib.Path(sys.argv[1])
facts = max(path.stat().st_mtime for path in run.glob("facts/*.json"))
print(json.dumps([(run / "started.json").stat().st_mtime, facts, (run / "verdict.json").stat().st_mtime]))
"""


@dataclass(frozen=True)
class Size:
    """What was measured for one number of nodes; operations are None where strace is not there."""

    nodes: int
    check_s: float
    decide_s: float
    per_node: tuple[int, ...] | None
    decide: int | None


def main() -> int:
    """Measure, print, and return 1 when a bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of nodes, with commas")
    parser.add_argument("--rounds", type=int, default=1, help="timed runs of each size (default 1)")
    options = parser.parse_args()
    sizes = sorted(map(int, options.sizes.split(",")))
    end_in_order()
    with _testbed(sizes[-1]):
        counts = _prepare()
        found = [_measured(nodes, options.rounds, counts=counts) for nodes in sizes]
    result = _judge(found)
    if options.json:
        print(json.dumps(result))
    return 0 if result["met"] else 1


@contextmanager
def _testbed(nodes: int) -> Iterator[None]:
    argv = [str(TESTBED), "--instance", INSTANCE]
    try:
        subprocess.run([*argv, "up", "--nodes", str(nodes)], check=True, stdout=subprocess.DEVNULL)
        yield
    finally:
        subprocess.run([*argv, "down"], check=False, stdout=subprocess.DEVNULL)


def _run(*command: str, node: str = "login", user: str = "alice", cwd: str = "/", stdin: bytes = b"") -> str:
    argv = [str(TESTBED), "--instance", INSTANCE, "exec", "--node", node, "--user", user, "--cwd", cwd, "--"]
    done = subprocess.run([*argv, *command], input=stdin, capture_output=True, check=False)
    # A verdict that is no match is told by `_verified`.
    if done.returncode not in (0, 29, 90, 91, 93):
        said = os.fsdecode(done.stderr or done.stdout)[-2000:]
        raise SystemExit(f"{command[:3]} ended with {done.returncode}: {said}")
    return os.fsdecode(done.stdout + (done.stderr if done.returncode == 29 else b""))


def _write(path: str, data: bytes, *, user: str = "alice") -> None:
    _run("sh", "-c", 'mkdir -p "$(dirname "$1")" && cat > "$1"', "sh", path, stdin=data, user=user)


def _prepare() -> bool:
    """Make the project, and bring strace to the nodes; return whether operations can be counted."""
    _run("rm", "-rf", FOLDER)
    _run("mkdir", "-p", FOLDER)
    _run("python3", "-m", "venv", "--without-pip", f"{FOLDER}/venv")
    _write(f"{FOLDER}/hpcenv.toml", SPEC.encode())
    _hpcenv("lock")
    strace = shutil.which("strace")
    if strace is None:
        print("operations are not counted: no strace on this machine", flush=True)
        return False
    needs = subprocess.run(["ldd", strace], capture_output=True, text=True, check=True).stdout
    # The nodes have a C library; another one's parts do not go with it.
    files = [strace, *re.findall(r"=> (/\S*/lib(?:unwind|lzma|dw|elf|z|bz2|zstd)\S*)", needs)]
    for file in files:
        _write(f"{TOOLS}/{Path(file).name}", Path(file).read_bytes(), user="root")
    _run("chmod", "755", f"{TOOLS}/strace", user="root")
    return True


def _hpcenv(*words: str) -> str:
    """Run hpcenv in the project; accept what its own files ask."""
    text = _run("hpcenv", *words, cwd=FOLDER)
    asked = re.search("--accept ([0-9a-f]{32})", text)
    return _run("hpcenv", words[0], "--accept", asked[1], *words[1:], cwd=FOLDER) if asked else text


def _measured(nodes: int, rounds: int, *, counts: bool) -> Size:
    _write(f"{FOLDER}/hpcenv.toml", SPEC.encode())
    times = [_verified(nodes)[1] for _ in range(rounds)]
    check, decide = (statistics.median(one[number] for one in times) for number in (0, 1))
    per_node, decided = _counted(nodes) if counts else (None, None)
    operations = _in_words(per_node, decided)
    print(f"{nodes} nodes: check {check:.1f} s, decide {decide:.2f} s, {operations}", flush=True)
    return Size(nodes, check, decide, per_node, decided)


def _in_words(per_node: tuple[int, ...] | None, decided: int | None) -> str:
    if per_node is None or decided is None:
        return "operations not counted"
    spread = f"{min(per_node)}" if min(per_node) == max(per_node) else f"{min(per_node)} to {max(per_node)}"
    return f"operations: check {spread} on each node, decide {decided} on the batch node"


def _verified(nodes: int) -> tuple[str, tuple[float, float]]:
    """Check that many nodes; return the run, and the seconds of check and decide."""
    text = _hpcenv("verify", "--nodes", str(nodes), "--gpus", "0", "--json")
    verdict: dict[str, Any] = json.loads(text)["data"]["verdict"]
    if verdict["result"] != "match" or len(verdict["nodes"]) != nodes:
        rows = [
            f"{row['field']} on {row['node']}: {row['found']}"
            for row in verdict["findings"]
            if row["severity"] == "must"
        ]
        raise SystemExit(
            f"{nodes} nodes: {verdict['result']}; {len(rows)} findings, the first of them:\n" + "\n".join(rows[:5])
        )
    began, facts, judged = json.loads(_run("python3", "-c", TIMES, f"{FOLDER}/runs/{verdict['run']}"))
    return verdict["run"], (facts - began, judged - facts)


def _counted(nodes: int) -> tuple[tuple[int, ...], int]:
    """Check that many nodes; return the operations of the check on those that strace is on, and of decide."""
    _write(f"{TOOLS}/first.py", FIRST.encode(), user="root")
    _write(f"{FOLDER}/hpcenv.toml", f"{SPEC}[submit]\nsetup = ['{SETUP}']\n".encode())
    some = min(nodes, MOST_COUNTED)
    names = [f"n{1 + at * (nodes - 1) // (some - 1)}" for at in range(some)] if some > 1 else ["n1"]
    _write(f"{TOOLS}/traced", TRACED.replace("@nodes@", " ".join(names)).encode(), user="root")
    _run("chmod", "755", f"{TOOLS}/traced", user="root")
    for name in names:
        _run("rm", "-f", "/tmp/ops.check", "/tmp/ops.decide", node=name, user="root")
    _verified(nodes)
    count = {step: COUNT.format(step=step) for step in ("check", "decide")}
    per_node = tuple(int(_run("sh", "-c", count["check"], node=name, user="root")) for name in names)
    return per_node, int(_run("sh", "-c", count["decide"], node=names[0], user="root"))


def _growth(counted: Sequence[Size]) -> float:
    """Return how many operations decide makes for each further node; its start alone makes about 3,000."""
    if len(counted) < 2:
        return 0.0
    first, last = counted[0], counted[-1]
    return ((last.decide or 0) - (first.decide or 0)) / (last.nodes - first.nodes)


def _judge(found: Sequence[Size]) -> dict[str, Any]:
    """Return the row of the table."""
    counted = [one for one in found if one.per_node is not None and one.decide is not None]
    every = [number for one in counted for number in one.per_node or ()]
    same = not every or max(every) <= min(every) * (1 + SAME)
    decide = _growth(counted)
    last = found[-1]
    operations = f"{min(every)} to {max(every)}" if every else "not counted"
    return {
        "name": f"check and decide on {last.nodes} nodes of one machine",
        "ours_s": last.check_s + last.decide_s,
        "peer_s": None,
        "ratio": None,
        "must": f"operations on the shared file system: check the same on each node ({operations}), "
        f"decide <= {DECIDE_PER_NODE} more for each node ({decide:.1f})",
        "met": bool(every) and same and decide <= DECIDE_PER_NODE,
        "sizes": [
            {"nodes": one.nodes, "check_s": one.check_s, "decide_s": one.decide_s, "decide_operations": one.decide,
             "check_operations": sorted(set(one.per_node or ()))}
            for one in found
        ],
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
