"""A second look at a host environment, when the run ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from probe_world import Venv

from hpcenv.container.probe_source import probe_source
from hpcenv.facts import second_look
from hpcenv.facts.probe import read_look, run_probe
from hpcenv.records.facts import Facts, Network
from hpcenv.records.manifest import Environment


@pytest.fixture
def env(tmp_path: Path) -> Venv:
    made = Venv(tmp_path / "looked-at")
    made.install("demo", {"demo/__init__.py": b"X = 1\n", "demo/more.py": b"Y = 1\n"})
    return made


@pytest.fixture
def look(env: Venv, run: Any) -> Callable[..., second_look.SecondLook]:
    """The first look now, and the second one when this is called."""
    environment = Environment(kind="host", python=str(env.path / "bin/python3"))
    manifest = replace(run.manifest, environment=environment, probe_level="full", settings=())
    environ = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    first = read_look(run_probe(environment, environ, probe=probe_source(), level="full", seconds=120))
    assert first is not None and first.files > 100
    network = Network(first_node="n1")
    facts = Facts(schema=1, run="r", node="n1", attempt=0, values={}, unknown={}, network=network, look=first)

    def again(*, asked: bool = False, facts: Facts | None = facts, **variables: str) -> second_look.SecondLook:
        return second_look.look_again(manifest, facts, environ | variables, asked=asked)

    return again


def test_nothing_changed(look: Callable[..., second_look.SecondLook]) -> None:
    assert look() == second_look.SecondLook()


def test_a_changed_file_is_named_and_one_written_again_is_not(
    env: Venv, look: Callable[..., second_look.SecondLook]
) -> None:
    (env.site / "demo/more.py").write_bytes(b"Y = 1\n")
    assert look() == second_look.SecondLook()
    before = os.stat(env.site / "demo/__init__.py")
    (env.site / "demo/__init__.py").write_bytes(b"X = 2\n")
    os.utime(env.site / "demo/__init__.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    (env.site / "new.py").write_bytes(b"N = 1\n")
    changed = look().changed
    assert [name.rpartition("site-packages/")[2] for name in changed] == ["demo/__init__.py", "new.py"]


def test_a_file_that_is_gone_is_named(env: Venv, look: Callable[..., second_look.SecondLook]) -> None:
    (env.site / "demo/more.py").unlink()
    assert [name.rpartition("site-packages/")[2] for name in look().changed] == ["demo/more.py"]


def test_a_link_to_nothing_did_not_change(env: Venv, run: Any, request: pytest.FixtureRequest) -> None:
    (env.site / "dangling.py").symlink_to("/nonexistent/dangling.py")
    look = request.getfixturevalue("look")
    (env.site / "demo/more.py").write_bytes(b"Y = 2\n")
    assert [name.rpartition("site-packages/")[2] for name in look().changed] == ["demo/more.py"]


def test_it_is_skipped_and_says_why(look: Callable[..., second_look.SecondLook]) -> None:
    assert look(asked=True).skipped == "the job was asked to end"
    assert look(SLURM_JOB_END_TIME=str(int(time.time()) + 30)).skipped == "the time limit is near"
    assert look(facts=None).skipped == "the check step left no record of the files"
    assert look(SLURM_JOB_END_TIME=str(int(time.time()) + 3600)) == second_look.SecondLook()
