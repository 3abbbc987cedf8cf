"""The values of `reproduce --rung`: how much of a run is repeated, and with which options. Pure. Runs on: LOGIN NODE.

`--rung 0` gives proofs from the files alone. `--rung 1` repeats the first optimizer steps on one node, with the same
global batch. `--rung 2` repeats the first steps with the same number of nodes and ranks. `--rung 3` repeats the whole
run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hpcenv.errors import UsageError
from hpcenv.project.option_values import argv_of
from hpcenv.project.options import in_place
from hpcenv.submission import request
from hpcenv.submission.request import SubmitOptions, value_of

Rung = Literal[0, 1, 2, 3]
RUNGS: dict[Rung, str] = {
    0: "proofs from the files, no job",
    1: "the first steps on one node, with the same global batch",
    2: "the first steps, with the same number of nodes and ranks",
    3: "the whole run, with the same number of nodes and ranks",
}
STEPS = 20

# Options that are only for the authors' cluster, or only for one submission of the authors. The user gives different
# options.
_OF_CLUSTER = (
    "partition", "account", "qos", "constraint", "reservation", "exclude", "nodelist", "dependency", "after", "comment",
    "sbatch", "srun", "site", "gpu_type", "gpu_request", "cluster", "assume_shared", "setup",
    "runs_dir", "stage", "stage_data", "stage_dir", "stage_limit", "frozen", "lock", "name", "spare",
    "retry_excluding", "chain", "sweep", "array", "max_parallel", "runtime",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RungPlan:
    """The job that `reproduce` submits for a value of `--rung`.

    Attributes:
        steps: the number of optimizer steps after which the training ends; None for all steps.
        factor: how many ranks of the old run each rank of the new run replaces.
        left_out: options of the old run that belong to the authors' cluster, as a user types them.
    """

    rung: Rung
    options: SubmitOptions
    steps: int | None
    factor: int
    world_size: int
    left_out: tuple[str, ...]


def plan_rung(
    old: SubmitOptions,
    given: Mapping[str, Any],
    rung: Rung,
    *,
    shape: tuple[int, int],
    args: Sequence[str],
    one_node: Sequence[str],
    steps: int,
) -> RungPlan:
    """Return what to submit for a value of `--rung`.

    Args:
        old: options of the run that is reproduced.
        given: options that the user typed for the new run, by name.
        rung: 1, 2 or 3.
        shape: the number of nodes, and the number of ranks on each node. Both are from the run that is reproduced.
        args: arguments of the script.
        one_node: the value of `[reproduce] one-node` in hpcenv.toml.
        steps: how many optimizer steps are repeated if `rung` is 1 or 2.

    Raises:
        UsageError: `rung` is 1, and the global batch cannot be kept.
    """
    nodes, nproc = shape
    options, left_out = _without_cluster(old)
    shaped: dict[str, Any] = {"nodes": 1 if rung == 1 else nodes, "nproc": nproc, "args": tuple(args)}
    options = replace(options, **{**shaped, **given})
    ranks = (options.nodes or 1) * (nproc if "nproc" not in given and "gpus" not in given else _ranks(options))
    world = nodes * nproc
    factor = 1
    if rung == 1:
        factor = _factor(world, ranks)
        options = replace(options, args=(*options.args, *_one_node_args(one_node, factor)))
    last = steps if rung < 3 else None
    if last is not None:
        options = replace(options, **request.parse_flags({"stop_after_steps": last}))
    return RungPlan(rung=rung, options=options, steps=last, factor=factor, world_size=ranks, left_out=left_out)


def _ranks(options: SubmitOptions) -> int:
    return options.nproc or options.gpus or 1


def _without_cluster(old: SubmitOptions) -> tuple[SubmitOptions, tuple[str, ...]]:
    rows = {option.name: option for option in in_place("command")}
    values: dict[str, Any] = {}
    words: list[str] = []
    for name in _OF_CLUSTER:
        option = rows.get(name)
        if option is None:
            continue
        typed = argv_of(option, value_of(old, option))
        if typed and name not in ("name", "lock"):
            words.append(" ".join(typed))
        values[name] = option.absent
    return replace(old, **values), tuple(words)


def _factor(world: int, ranks: int) -> int:
    if world % ranks:
        raise UsageError(
            f"rung 1 cannot keep the global batch: {world} ranks are not a multiple of {ranks}",
            why="each rank of one node does the work of a whole number of ranks",
            hint="--nproc R, or --gpus R, with a divisor of that number; --rung 2 has the shape of the run",
        )
    return world // ranks


def _one_node_args(one_node: Sequence[str], factor: int) -> tuple[str, ...]:
    if factor == 1:
        return ()
    if not any("{factor}" in word for word in one_node):
        raise UsageError(
            "rung 1 is refused: this project does not say how one node keeps the global batch",
            why="fewer ranks with the same arguments train with a smaller batch, which is another experiment",
            hint='[reproduce] in hpcenv.toml: one-node = ["--accumulate", "{factor}"]; --rung 2 needs no such key',
        )
    return tuple(word.replace("{factor}", str(factor)) for word in one_node)
