"""How the gate's decision grows with the job: 128 to 4,096 nodes' facts, from their files to the verdict.

    python -m benchmarks.decide_scale [--json] [--rounds N]

Each size runs in a process of its own, which reads the manifest and every node's facts (real ones, taken from a node
of this machine, with the node's name and addresses changed), judges them, and renders the table. Two cases: all nodes
match, and one node in eight has another byte in one file. There is no peer: nobody else compares nodes.

Must: 1,024 nodes in at most 1 s and 200 MiB, and linear up to 4,096: four times the nodes take at most 5 times as long.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

SIZES = (128, 256, 512, 1024, 4096)
JUDGED = 1024  # the bounds of time and memory are for this many
SECONDS = 1.0
PEAK_MIB = 200
GROWTH = 5.0  # 256 -> 1024 and 1024 -> 4096, with what does not grow left in
# Eight GPUs, ten adapters: what a large node reports of its network.
MACHINE = Path(__file__).resolve().parents[1] / "tests" / "machines" / "ib-h100.json"
SEEDS = Path(__file__).resolve().parents[1] / "tests" / "fuzz" / "seeds"


def main() -> int:
    """Measure, print, and return 1 when a bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--judge", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.judge:
        print(json.dumps(_judge(Path(options.judge))))
        return 0
    result = _measure(options.rounds)
    if options.json:
        print(json.dumps(result))
    return 0 if result["met"] else 1


def _measure(rounds: int) -> dict[str, Any]:
    medians: dict[tuple[str, int], float] = {}
    peak = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for case in ("match", "mismatch"):
            for size in SIZES:
                place = Path(folder) / f"{case}-{size}"
                _write(place, size, broken=case == "mismatch")
                taken = [_in_a_process(place) for _ in range(rounds)]
                if {one["result"] for one in taken} != {case}:
                    raise SystemExit(f"the verdict of {case}-{size} is {taken[0]['result']}")
                seconds = [one["seconds"] for one in taken]
                medians[case, size] = statistics.median(seconds)
                if size <= JUDGED:
                    peak = max(peak, *(one["peak_mib"] for one in taken))
                shown = f"{medians[case, size]:.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"
                print(f"{case:8} {size:5} nodes: {shown}, peak {max(one['peak_mib'] for one in taken):.0f} MiB")
    worst = max(medians[case, JUDGED] for case in ("match", "mismatch"))
    growth = 0.0
    for few, many in ((256, 1024), (1024, 4096)):
        times = max(medians[case, many] / medians[case, few] for case in ("match", "mismatch"))
        print(f"{few} -> {many} nodes: {times:.2f} times the time")
        growth = max(growth, times)
    return {
        "name": "decide_scale",
        "ours_s": round(worst, 3),
        "peer_s": None,
        "ratio": None,
        "must": f"ours_s <= {SECONDS:g}, peak_mib <= {PEAK_MIB}, growth <= {GROWTH:g}",
        "peak_mib": round(peak, 1),
        "growth": round(growth, 2),
        "met": worst <= SECONDS and peak <= PEAK_MIB and growth <= GROWTH,
    }


def _write(place: Path, size: int, *, broken: bool) -> None:
    """Write a run folder with the manifest and the facts of `size` nodes."""
    from hpcenv.machine.network.recording import MachineRecording, fabric_of
    from hpcenv.records.codec import encode_record
    from hpcenv.records.facts import Difference, Facts, Interface, Network, Route
    from hpcenv.records.files import load_record, write_text
    from hpcenv.records.manifest import Expectation, Manifest
    from hpcenv.records.run_folder import RunFolder

    run = RunFolder(place)
    seed = load_record(Facts, next((SEEDS / "facts").iterdir()))
    manifest = load_record(Manifest, next((SEEDS / "manifest").iterdir()))
    # What this very node reported is what is expected: then every other row is a difference that we made.
    values, unknown = seed.values, {name: why for name, why in seed.unknown.items() if name not in seed.values}
    expectations = tuple(
        Expectation(field=e.field, value=values[e.field], severity=e.severity, origin=e.origin)
        for e in manifest.expectations
        if e.field in values
    )
    manifest = replace(
        manifest, run_folder=str(place), cluster="slurm", nodes=size, expectations=expectations,
        script_sha256=str(values["code.script-sha256"]),
    )  # fmt: skip
    write_text(encode_record(manifest), run.manifest)
    run.facts.mkdir(parents=True, exist_ok=True)
    first = "10.1.0.0"
    machine = load_record(MachineRecording, MACHINE)
    fabric = fabric_of(machine)
    for number in range(size):
        own = f"10.1.{number // 256}.{number % 256}"
        network = Network(
            first_node="n0000",
            first_node_addresses=(first,),
            interfaces=(Interface(name="ib0", addresses=(own,)), Interface(name="lo", addresses=("127.0.0.1",))),
            routes=(Route(target=first, source=own, interface="ib0"),),
            free_port=20000,
        )
        difference = Difference(field="packages.torch.content-sha256", locked="00", found="01", note="changed: x.py")
        node = f"n{number:04}"
        facts = replace(
            seed, run=manifest.run, node=node, attempt=0, network=network, fabric=fabric, unknown=unknown,
            values={**values, "host.hostname": node}, differences=(difference,) if broken and number % 8 == 0 else (),
        )  # fmt: skip
        run.facts_of(node).write_text(encode_record(facts))


def _in_a_process(place: Path) -> dict[str, Any]:
    argv = [sys.executable, "-m", "benchmarks.decide_scale", "--judge", str(place)]
    return dict(json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout))


def _judge(place: Path) -> dict[str, Any]:
    """What the batch node does between srun's end and the verdict, in this process."""
    from hpcenv.judge import decide, verdict_table
    from hpcenv.records.codec import encode_record
    from hpcenv.records.facts import Facts
    from hpcenv.records.files import load_record
    from hpcenv.records.manifest import Manifest
    from hpcenv.records.run_folder import RunFolder

    run = RunFolder(place)
    began = time.perf_counter()
    manifest = load_record(Manifest, run.manifest)
    nodes = sorted(path.stem for path in run.facts.iterdir())
    facts = {node: load_record(Facts, run.facts_of(node)) for node in nodes}
    verdict, _ = decide.judge(manifest, nodes, facts, {}, attempt=0, job_id="1")
    text = encode_record(verdict) + verdict_table.render(verdict, lockfile=manifest.lockfile)
    seconds = time.perf_counter() - began
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        nowhere.write(text)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "peak_mib": peak, "result": verdict.result}


if __name__ == "__main__":
    sys.exit(main())
