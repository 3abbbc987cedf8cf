"""Differences between two runs that can explain different results, the most likely difference first. Pure.

Runs on: LOGIN NODE. Trials on a CPU with torch 2.13 (2026-11-22) showed which settings change results: threads, CPU
capability, MKL and oneDNN settings each changed some operations. If a vendor's table is the source, the name of the
table is given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from hpcenv.locking.difference import Change, show
from hpcenv.records.manifest import Value

Likelihood = Literal["another-experiment", "changes-results", "may-change-results", "unlikely"]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A group of differences with one explanation.

    Attributes:
        group: the group's name.
        likelihood: how likely the differences change results. `another-experiment` means that the two runs had
            different tasks.
        why: how the differences change results.
        changes: for each difference, the field, its value in the reference, and its value in the other run.
    """

    group: str
    likelihood: Likelihood
    why: str
    changes: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, kw_only=True)
class _CauseGroup:
    name: str
    likelihood: Likelihood
    fields: re.Pattern[str]
    why: str


def _group(name: str, likelihood: Likelihood, fields: str, why: str) -> _CauseGroup:
    return _CauseGroup(name=name, likelihood=likelihood, fields=re.compile(fields, re.IGNORECASE), why=why)


# This group replaces "number of ranks" if both runs have the same number of ranks.
_SAME_RANKS = "ranks per node"
# A field belongs to the first group that fits. The order of the groups is the order in the output. Groups about the
# task of a run (arguments, seed, code, data) come first: if the tasks differ, a difference between libraries explains
# nothing.
_GROUPS = (
    _group(
        "arguments",
        "another-experiment",
        r"run\.(arguments|script)",
        "the script gets different arguments, so the training is different",
    ),
    _group(
        "seed",
        "another-experiment",
        r"(determinism|env)\..*seed",
        "weights, data order and dropout are drawn from a different seed",
    ),
    _group(
        "code",
        "another-experiment",
        r"code\.(files|digest|diff-sha256|script-sha256)",
        "the script or its modules differ",
    ),
    _group("data", "another-experiment", r"data\..*|run\.data", "the script reads different data"),
    _group(
        "number of ranks",
        "changes-results",
        r"run\.(nodes|nproc-per-node|gpus-per-node)",
        "each rank has different data, and the sums over the ranks have a different order",
    ),
    _group(
        _SAME_RANKS,
        "may-change-results",
        r"(?!)",
        "the same number of ranks is on different nodes or GPUs: the sums over the ranks may have a different order",
    ),
    _group(
        "global batch",
        "changes-results",
        r"run\.global-batch",
        "an optimizer step sees a different number of samples, if each rank has its own samples:"
        " the learning rate and the number of steps depend on this number",
    ),
    _group(
        "threads",
        "changes-results",
        r"env\.(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|determinism\..*threads.*",
        "sums are split into different parts: sum, mean, silu and the gradients of convolutions changed in trials",
    ),
    _group(
        "CPU kernels",
        "changes-results",
        r"determinism\..*(capability|isa|cbwr|mkl|onednn|mkldnn).*|env\.(ATEN_CPU_CAPABILITY|MKL_.*|ONEDNN_.*|DNNL_.*)|"
        r"torch\.cpu-capability|host\.cpu-.*",
        "different vector kernels are used: softmax, layer_norm, gelu and matrix products changed in trials",
    ),
    _group(
        "GPU",
        "changes-results",
        r"host\.gpu-(models|compute-capabilities|sm-counts|mig)|host\.machine|run\.backend",
        "cuBLAS promises equal bits only for one toolkit, one architecture and one number of SMs"
        " (cuBLAS documentation, Results reproducibility)",
    ),
    _group(
        "determinism switches",
        "changes-results",
        r"determinism\.(?!version\.|NCCL_).*|env\.(CUBLAS_WORKSPACE_CONFIG|TORCH_.*|NVIDIA_TF32_OVERRIDE)",
        "different kernels may be chosen, or the same kernels add up in any order",
    ),
    _group(
        "torch and its libraries",
        "may-change-results",
        r"torch\..*|libs\..*|loaded\..*|packages\.(torch|numpy|nvidia-.*|triton)(\..*)?|determinism\.version\..*",
        "a different build may compute an operation in a different way",
    ),
    _group(
        "communication",
        "may-change-results",
        r"(env|determinism)\.(NCCL|GLOO|UCX|FI)_.*|network\..*",
        "a different algorithm, protocol or topology adds up the gradients in a different order",
    ),
    _group("packages", "may-change-results", r"packages\..*", "code that the script imports differs"),
    _group(
        "driver", "may-change-results", r"host\.(driver-version|cuda-driver-version)", "kernels may be compiled anew"
    ),
    _group("Python", "may-change-results", r"python\..*", "another interpreter"),
    _group("other variables", "may-change-results", r"env\..*", "the script or a library may read them"),
    _group(
        "how the runs ended",
        "may-change-results",
        r"run\.outcome",
        "a run that did not complete lacks steps",
    ),
    _group("image", "may-change-results", r"container\..*|system\..*", "files outside of Python differ"),
    _group("for the record", "unlikely", r".*", "no effect on results is known"),
)

# Fields that are only listed "for the record", although they would fit into a group above: alone they explain nothing,
# or they repeat another field.
_FOR_THE_RECORD = re.compile(
    r"code\.(commit|dirty|workdir|reason)|container\.(sif\..*|reference|binds|index-digest)|policy|host\.(hostname|"
    r"gpu-uuids|kernel|cpus|memlock|shm-mib|slurm|apptainer|glibc)|env\.(HPCENV_.*|MASTER_.*|NCCL_SOCKET_IFNAME|"
    r"GLOO_SOCKET_IFNAME)|determinism\.(pid|version\.hpcenv)"
)


def rank_causes(
    changes: Iterable[Change], effective: Mapping[str, tuple[Value | None, Value | None]]
) -> tuple[Cause, ...]:
    """Return the differences of two runs in groups, the most likely cause first.

    Args:
        changes: the changes that `hpcenv diff` finds.
        effective: switch -> its values in the reference and in the other run, for the switches that differ.
    """
    found: dict[str, list[tuple[str, str, str]]] = {}
    rows = [(change.field, change.left, change.right) for change in changes]
    rows += [(f"determinism.{name}", _shown(pair[0]), _shown(pair[1])) for name, pair in sorted(effective.items())]
    # Equal values have no row, so a number without a row is equal in both runs.
    shape = [row[1:] for row in rows if row[0] in ("run.nodes", "run.nproc-per-node")]
    same_ranks = math.prod(int(left) for left, _ in shape) == math.prod(int(right) for _, right in shape)
    for field, left, right in rows:
        name = _GROUPS[-1].name if _FOR_THE_RECORD.fullmatch(field) else _group_of(field).name
        if name == "number of ranks" and same_ranks:
            name = _SAME_RANKS
        row = field, left, right
        if row not in found.setdefault(name, []):
            found[name].append(row)
    return tuple(
        Cause(group=group.name, likelihood=group.likelihood, why=group.why, changes=tuple(found[group.name]))
        for group in _GROUPS
        if group.name in found
    )


def _group_of(field: str) -> _CauseGroup:
    return next(group for group in _GROUPS if group.fields.fullmatch(field))


def _shown(value: Value | None) -> str:
    return "not read" if value is None else show(value)


def different_switches(
    reference: Mapping[str, Mapping[str, Value | None]], other: Mapping[str, Mapping[str, Value | None]]
) -> dict[str, tuple[Value | None, Value | None]]:
    """Return the switches whose values differ between two runs. If several ranks differ, the lowest rank counts."""
    found: dict[str, tuple[Value | None, Value | None]] = {}
    for rank in sorted(reference.keys() & other.keys(), key=lambda one: (len(one), one)):
        left, right = reference[rank], other[rank]
        for name in left.keys() | right.keys():
            if left.get(name) != right.get(name):
                found.setdefault(name, (left.get(name), right.get(name)))
    return found
