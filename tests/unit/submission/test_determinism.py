"""What `--determinism` and `--seed` give the ranks, and which launchers can do it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpcenv.errors import UsageError
from hpcenv.project.spec import Project
from hpcenv.records.manifest import DeterminismOptions
from hpcenv.submission.determinism import determinism_options, variables
from hpcenv.submission.request import SubmitOptions
from tests.export_lockfiles import locked


def asked(given: dict[str, Any], table: dict[str, Any] | None = None, launcher: Any = "torchrun") -> DeterminismOptions:
    project = Project.model_validate({"image": "host", "determinism": table or {}})
    profile = (table or {}).get("profile", "off")
    lockfile = locked(facts={"determinism": {"profile": profile}})
    options = replace(SubmitOptions(script="train.py"), **given)
    return determinism_options(options, project, lockfile, gpus=8, backend="gloo", launcher=launcher)


def test_without_a_seed_nothing_is_seeded():
    found = asked({})
    assert (found.profile, found.seeds, found.variables) == ("off", False, {})


@pytest.mark.parametrize(("given", "table"), [({"seed": 42}, {}), ({}, {"seed": 42}), ({"seed": 42}, {"seed": 7})])
def test_a_seed_alone_seeds_the_ranks(given, table):
    found = asked(given, table)
    assert (found.profile, found.seeds, found.seed, found.variables) == ("off", True, 42, {"PYTHONHASHSEED": "42"})
    (setting,) = variables(found)
    assert (setting.name, setting.origin) == ("PYTHONHASHSEED", "base seed 42")


def test_with_a_profile_the_seed_is_the_profiles():
    found = asked({"seed": 42}, {"profile": "seeded"})
    assert (found.profile, found.seeds, found.seed) == ("seeded", False, 42)
    assert found.variables == {"PYTHONHASHSEED": "42", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.mark.parametrize(
    ("given", "table", "named"),
    [
        ({"seed": 42}, {}, "`--seed 42`"),
        ({}, {"seed": 42}, "`seed = 42` under [determinism]"),
        ({"determinism": "seeded"}, {}, "`--determinism seeded`"),
        ({"determinism": "bitwise", "seed": 1}, {}, "`--determinism bitwise`"),
        ({}, {"profile": "bitwise"}, '`profile = "bitwise"` under [determinism]'),
    ],
)
def test_a_program_that_starts_the_ranks_itself_cannot_be_seeded(given, table, named):
    with pytest.raises(UsageError) as error:
        asked(given, table, launcher="none")
    assert error.value.what == f"`--launcher none` and {named} contradict each other"
    assert "hpcenv.training.seed_everything" in str(error.value.hint)
    assert asked({"determinism": "off"}, {"profile": "bitwise"}, launcher="none").profile == "off"
