"""Evaluate the requirements of an image on drivers and GPUs: NVIDIA_REQUIRE_*. Pure; standard library only.

Runs on: LOGIN NODE, COMPUTE NODE.

A requirement is evaluated in the same way as by NVIDIA's container tools. nvidia-container-toolkit 1.20.0 collects the
variables (internal/config/image/cuda_image.go) and passes each to nvidia-container-cli, which parses and evaluates the
variable (libnvidia-container, src/cli/dsl.c and configure.c). Blanks separate alternatives. Commas separate conditions
that must all hold. Alternatives are evaluated from left to right until an alternative holds. If a condition is
evaluated and cannot be read, the container is refused. All variables must hold, for every GPU. The toolkit's CDI mode,
which is the default since 1.18, evaluates none of these variables.

There is one difference. If NVIDIA's tools cannot see a GPU's brand or the driver, they assume a value. Here the result
is then `unknown`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from hpcenv.judge.compat.judgement import Judgement
from hpcenv.judge.compat.versions import numbers, padded
from hpcenv.records.manifest import Value
from hpcenv.records.verdict import Result

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_VERSIONS = {"cuda": "host.cuda-driver-version", "driver": "host.driver-version"}
_PER_GPU = {"arch": "host.gpu-compute-capabilities", "brand": "host.gpu-brands"}

# Texts that Go's strconv.ParseBool accepts as true.
_TRUE = ("1", "t", "T", "TRUE", "true", "True")


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A condition such as `driver>=570`. For a condition that cannot be read, `problem` says why."""

    text: str
    name: str = ""
    operator: str = ""
    value: str = ""
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """One NVIDIA_REQUIRE_* variable. At least one of its `alternatives` must hold, with all its conditions."""

    variable: str
    text: str
    alternatives: tuple[tuple[Condition, ...], ...]


def requirements(environ: Mapping[str, str]) -> tuple[Requirement, ...]:
    """Return the requirements in an image's environment.

    If an image has CUDA_VERSION but no NVIDIA_REQUIRE_CUDA, it requires this CUDA version. If an image sets
    NVIDIA_DISABLE_REQUIRE, it requires nothing.
    """
    if environ.get("NVIDIA_DISABLE_REQUIRE") in _TRUE:
        return ()
    asked = {
        name: text
        for name, text in environ.items()
        if name.startswith("NVIDIA_REQUIRE_") and not name.startswith("NVIDIA_REQUIRE_JETPACK")
    }
    version = environ.get("CUDA_VERSION", "")
    if version and not environ.get("NVIDIA_REQUIRE_CUDA"):
        asked["CUDA_VERSION"] = f"cuda>={'.'.join(version.split('.')[:2])}"
    return tuple(parse_require(text, variable=name) for name, text in sorted(asked.items()))


def parse_require(text: str, *, variable: str = "NVIDIA_REQUIRE_CUDA") -> Requirement:
    """Return the conditions in one variable. A condition that cannot be read is kept, with its problem."""
    alternatives = (
        tuple(_parse_condition(part) for part in alternative.split(",") if part) for alternative in text.split(" ")
    )
    return Requirement(variable=variable, text=text, alternatives=tuple(one for one in alternatives if one))


def _parse_condition(text: str) -> Condition:
    match = re.fullmatch(r"([^<>=!]*)([<>=!]*)(.*)", text, re.DOTALL)
    assert match is not None
    # nvidia-container-cli ignores upper and lower case here.
    name, sign, value = match[1].lower(), match[2], match[3]
    problem = ""
    if sign not in _OPERATORS:
        problem = f"`{sign}` is no operator" if sign else "it has no operator"
    elif name not in _VERSIONS and name not in _PER_GPU:
        problem = f"`{match[1]}` is unknown"
    elif name == "brand" and sign not in ("=", "!="):
        problem = "brands have no order"
    elif not value or (name != "brand" and numbers(value) is None):
        problem = f"`{value}` is not a version"
    return Condition(text=text, name=name, operator=sign, value=value, problem=problem)


def evaluate_require(requirement: Requirement, facts: Mapping[str, Value]) -> Judgement:
    """Say whether a node meets the requirement of an image.

    Args:
        requirement: requirement of the image.
        facts: facts of the node: `host.cuda-driver-version`, `host.driver-version`,
            `host.gpu-compute-capabilities` and `host.gpu-brands`. A missing fact is unknown.
    """
    asked = f"the image's {requirement.variable} ({_shown(requirement)})"
    if not requirement.alternatives:
        return Judgement(result="match", what=f"{asked} asks for nothing")
    judged = dict(reversed([_judge_alternatives(requirement, s) for s in _gpus(facts)]))
    if "mismatch" in judged:
        return Judgement(result="mismatch", what=f"{asked} does not hold", why=judged["mismatch"])
    if "unknown" in judged:
        return Judgement(result="unknown", what=f"whether {asked} holds is not known", why=judged["unknown"])
    return Judgement(result="match", what=f"{asked} holds", why=judged["match"])


def _shown(requirement: Requirement) -> str:
    first = ",".join(condition.text for condition in requirement.alternatives[0]) if requirement.alternatives else ""
    others = len(requirement.alternatives) - 1
    return f"{first} or {others} other{'s' if others > 1 else ''}" if others > 0 else first


def _gpus(facts: Mapping[str, Value]) -> list[dict[str, str]]:
    """Return the facts that conditions use, once for each GPU: the driver, and the facts of that GPU."""
    driver = {name: str(facts[key]) for name, key in _VERSIONS.items() if key in facts}
    columns = {name: facts.get(key) for name, key in _PER_GPU.items()}
    lists = {name: column for name, column in columns.items() if isinstance(column, tuple)}
    rows = [dict(zip(lists, row, strict=True)) for row in zip_longest(*lists.values())]
    return [driver | {name: value for name, value in row.items() if value} for row in rows] or [driver]


def _judge_alternatives(requirement: Requirement, seen: Mapping[str, str]) -> tuple[Result, str]:
    doubts = []
    for alternative in requirement.alternatives:
        result, why, broken = _judge_all(alternative, seen)
        if result == "match" or broken:
            return result, why
        if result == "unknown":
            doubts.append(why)
    if doubts:
        return "unknown", doubts[0]
    has = ", ".join(f"{name} {value}" for name, value in sorted(seen.items()))
    return "mismatch", f"this node has {has}"


def _judge_all(alternative: Sequence[Condition], seen: Mapping[str, str]) -> tuple[Result, str, bool]:
    """Judge conditions that must all be met. The last part of the result says whether a condition is not valid."""
    doubt = ""
    for condition in alternative:
        if condition.problem:
            return "unknown", f"`{condition.text}` cannot be judged: {condition.problem}", True
        have = seen.get(condition.name)
        holds = None if have is None else _holds(condition, have)
        if holds is None:
            doubt = doubt or f"`{condition.text}` cannot be judged: this node's {condition.name} is not known"
        elif not holds:
            return "mismatch", f"`{condition.text}` does not hold", False
    if doubt:
        return "unknown", doubt, False
    return "match", ",".join(condition.text for condition in alternative), False


def _holds(condition: Condition, have: str) -> bool | None:
    if have == "absent":
        return False
    compare = _OPERATORS[condition.operator]
    if condition.name == "brand":
        return compare(have.lower(), condition.value.lower())
    left, right = numbers(have), numbers(condition.value)
    if left is None or right is None:
        return None
    length = max(len(left), len(right))
    return compare(padded(left, length), padded(right, length))
