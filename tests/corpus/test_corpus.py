"""One locked environment, one thing changed: caught where that is claimed, under its right name, or no alarm at all.

`./scripts/corpus` runs it alone. The score stands at the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import corpus_binds  # noqa: F401  (its changes join the two lists)
import corpus_interpreter  # noqa: F401
import corpus_not_checked  # noqa: F401
import corpus_revision  # noqa: F401
import corpus_variables  # noqa: F401
import pytest
from corpus_harmless import DOCUMENTED, HARMLESS
from corpus_mutations import LEVELS, MUTATIONS, Mutation
from corpus_world import NEEDS, Case, ImageWorld, Seen, World, environment_variable

MUST_SHOW = 60
MUST_NOT_ALARM = 20

# What has run so far in this process: name -> "" or what is wrong.
caught: dict[str, str] = {}
alarms: dict[str, str] = {}
skipped: dict[str, str] = {}


def names(mutations: list[Mutation]) -> list[str]:
    return [mutation.name for mutation in mutations]


def cases(mutations: list[Mutation]) -> list[object]:
    """Each as a parameter; what root cannot show is run as an ordinary user."""
    marks = {True: [pytest.mark.ordinary_user], False: []}
    return [pytest.param(one, id=one.name, marks=marks["user" in one.needs]) for one in mutations]


@pytest.fixture
def look(world: World, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Mutation], list[Seen]]:
    def look(mutation: Mutation) -> list[Seen]:
        missing = [NEEDS[need][1] for need in mutation.needs if not NEEDS[need][0]]
        if missing:
            skipped[mutation.name] = missing[0]
            request.node.user_properties.append(("corpus-skipped", (mutation.name, missing[0])))
            pytest.skip(f"NOT TESTED: {missing[0]}")
        images: ImageWorld | None = request.getfixturevalue("image_world") if mutation.image else None
        case = images.copy(tmp_path / "p") if images else world.copy(tmp_path / "p")
        try:
            if mutation.profile == "bitwise":
                case.bitwise()
            mutation.apply(case)
            with environment_variable("PATH", case.environ["PATH"]):
                return case.look(mutation.level)
        finally:
            case.clean_up()

    return look


@pytest.mark.parametrize("mutation", cases(MUTATIONS))
def test_it_is_caught_and_named(
    mutation: Mutation, look: Callable[[Mutation], list[Seen]], record_property: Callable[[str, object], None]
) -> None:
    wrong = "it did not come to an end"  # which counts, too
    try:
        wrong = what_is_missed(mutation, look(mutation))
    finally:
        if mutation.name not in skipped:
            caught[mutation.name] = wrong
            record_property("corpus-mutation", (mutation.name, wrong))
    assert not wrong


def what_is_missed(mutation: Mutation, seen: list[Seen]) -> str:
    """Say why a mutation does not count as caught: not named, not as severe, or something else named as well."""
    told = [f for f in seen if f.result != "match"]
    expected = (mutation.field,) if isinstance(mutation.field, str) else mutation.field
    named = [f for f in told if fits(f.field, expected)]
    rest = ", ".join(f"{f.field} ({f.severity}, {f.result})" for f in told) or "nothing"
    if not named:
        return f"{mutation.level} does not name {' or '.join(expected)}; it names {rest}"
    if not any(f.severity == mutation.severity for f in named):
        return f"{mutation.level} names {named[0].field} as {named[0].severity}, not as {mutation.severity}"
    wrong = [f for f in told if not fits(f.field, (*expected, *mutation.also)) and f.severity != "info"]
    return f"{mutation.level} names {', '.join(f.field + ': ' + f.text for f in wrong)} as well" if wrong else ""


def fits(field: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(field, pattern) for pattern in patterns)


@pytest.mark.parametrize("change", cases(HARMLESS))
def test_it_raises_nothing(
    change: Mutation, look: Callable[[Mutation], list[Seen]], record_property: Callable[[str, object], None]
) -> None:
    said = "it did not come to an end"
    try:
        said = what_alarms(change, look(change))
    finally:
        if change.name not in skipped:
            alarms[change.name] = said
            record_property("corpus-harmless", (change.name, said))
    assert not said


def what_alarms(change: Mutation, seen: list[Seen]) -> str:
    documented = DOCUMENTED.get(change.name, ())
    alarm = [f for f in seen if f.severity != "info" and not fits(f.field, documented)]
    return "; ".join(f"{change.level} says {f.field} ({f.severity}, {f.result}): {f.text}" for f in alarm)


def test_the_corpus_is_large_enough_and_names_each_once() -> None:
    assert len(MUTATIONS) >= MUST_SHOW
    assert len(HARMLESS) >= MUST_NOT_ALARM
    every = names(MUTATIONS) + names(HARMLESS)
    assert len(every) == len(set(every))
    assert {mutation.level for mutation in MUTATIONS} == set(LEVELS)
    assert {change.level for change in HARMLESS} == set(LEVELS), "a level without a control"


def test_the_base_is_as_it_was_built(world: World) -> None:
    """No change reached the base through a hard link."""
    base = Case(world, world.base)
    assert [f for f in base.look("full") if f.severity != "info"] == []


@pytest.mark.parametrize(("changed", "status", "outcome"), [(True, 90, "mismatch"), (False, 0, "match")])
def test_the_command_says_the_same(
    world: World, tmp_path: Path, hpcenv: Callable[..., Any], changed: bool, status: int, outcome: str
) -> None:
    case = world.copy(tmp_path / "p")
    if changed:
        case.edit("purepkg/core.py", "LIMIT = 100", "LIMIT = 101", keep_times=True)
    done = hpcenv("verify", "--json", cwd=case.root, environ=case.environ)
    case_said = sorted(f.field for f in case.look("full"))
    case.clean_up()
    said = done.envelope["data"]
    assert (done.status, said["outcome"]) == (status, outcome), done.stdout + done.stderr
    assert sorted(f["field"] for f in said["verdict"]["findings"]) == case_said
    assert ("packages.purepkg.content-sha256" in case_said) == changed


def test_everything_is_caught_and_nothing_alarms(request: pytest.FixtureRequest) -> None:
    run = len(caught) + len(alarms) + len(skipped)
    here = len([one for one in MUTATIONS + HARMLESS if NEEDS["user"][0] or "user" not in one.needs])
    if run < here:
        pytest.skip(f"NOT TESTED: {run} of {here} changes ran in this process")
    missed = sorted(name for name, wrong in caught.items() if wrong)
    false = sorted(name for name, said in alarms.items() if said)
    assert (len(caught) - len(missed), missed) == (len(caught), [])
    assert (len(false), false) == (0, [])
