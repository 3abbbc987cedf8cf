"""`hpcenv rerun`: the words of a run, changed or not, make the same submission again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.cli.rerun import _CHANGEABLE, changes, command_of, merge, parse_command
from hpcenv.errors import UsageError
from hpcenv.steps.rerun import free_name

COMMAND = (
    *("hpcenv", "submit", "a b.py", "--nodes", "2", "--gpus", "8", "--no-snapshot", "--env", "A=1", "--env", "B=x y"),
    *("--torchrun-args", "--role=x", "--stage", "--run", "first", "--", "--lr", "1", "--json", "--", "$(id)"),
)


def test_a_command_survives_being_read_and_written() -> None:
    words = parse_command(COMMAND)
    assert parse_command(command_of(words)) == words
    assert words["args"] == ("--lr", "1", "--json", "--", "$(id)")


@given(
    args=st.lists(st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)))),
    nodes=st.integers(1, 99),
    value=st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",))),
)
def test_any_argument_survives(args: list[str], nodes: int, value: str) -> None:
    command = (
        "hpcenv",
        "submit",
        "t.py",
        "--nodes",
        str(nodes),
        "--env",
        f"A={value}",
        *(("--", *args) if args else ()),
    )
    assert command_of(parse_command(command)) == command


def test_what_is_typed_takes_the_place_of_what_was() -> None:
    old = parse_command(COMMAND)
    new = merge(old, {"nodes": 4, "env": ("B=3", "C=4")}, ("--torchrun-args", "stage"), ("--lr", "2"))
    told = {change.flag: (change.before, change.after) for change in changes(old, new)}
    assert told == {
        "--nodes": ("--nodes 2", "--nodes 4"),
        "--torchrun-args": ("--torchrun-args --role=x", ""),
        "--env": ("--env A=1 --env 'B=x y'", "--env A=1 --env B=3 --env C=4"),
        "--stage": ("--stage", ""),
        "--": ("-- --lr 1 --json -- '$(id)'", "-- --lr 2"),
    }
    assert changes(old, merge(old, {}, (), None)) == ()


@pytest.mark.parametrize("option", [o for o in _CHANGEABLE if o.name != "lock_name"], ids=lambda o: o.opts[0])
def test_each_flag_can_be_left_out(option: click.Option) -> None:
    word = option.opts[0]
    if option.is_flag:
        given = ("--no-snapshot",) if word == "--snapshot" else (word,)
    elif isinstance(option.type, click.Choice):
        given = (word, str(option.type.choices[0]))
    else:
        given = (word, "2")
    old = parse_command(("hpcenv", "submit", "t.py", *given))
    new = merge(old, {}, (word,), None)
    assert new == parse_command(("hpcenv", "submit", "t.py"))
    assert command_of(new) == ("hpcenv", "submit", "t.py")
    json.dumps(new)


def test_what_cannot_be_submitted_again_is_said() -> None:
    with pytest.raises(UsageError, match="from its record"):
        parse_command(("python", "train.py"))
    with pytest.raises(UsageError, match="does not understand") as caught:
        parse_command(("hpcenv", "submit", "t.py", "--warp", "9"))
    assert "--warp" in str(caught.value.why)
    with pytest.raises(UsageError, match="has no such flag"):
        merge(parse_command(COMMAND), {}, ("nosuch",), None)
    with pytest.raises(UsageError, match="was not given it"):
        merge(parse_command(COMMAND), {}, ("nodelist",), None)


def test_names_of_further_runs(tmp_path: Path) -> None:
    for name in ("a", "a-2", "seed-7"):
        (tmp_path / name).mkdir()
    assert free_name("a", tmp_path) == "a-3"
    assert free_name("a-2", tmp_path) == "a-3"
    assert free_name("seed-7", tmp_path) == "seed-7-2"
    assert free_name("new", tmp_path) == "new"


def test_a_run_again_takes_its_own_lockfile_and_refuses_another_script(hpcenv: Any, project: Path) -> None:
    done = hpcenv("submit", "train.py", "--nproc", "1", "--cluster", "local", "--run", "one", "--", "x", cwd=project)
    assert done.status == 0, done.stderr
    hpcenv("wait", "one", "--timeout", "60s", cwd=project, timeout=90)
    lock = project / "lockfiles" / "default.lock.toml"
    lock.write_text("nothing that could be a lockfile")

    elsewhere = project / "deeper"
    elsewhere.mkdir()
    plan = hpcenv("rerun", "one", "--dry-run", "--json", "--", "y", cwd=elsewhere)
    assert plan.status == 0, plan.stdout
    manifest = plan.envelope["data"]["manifest"]
    assert (manifest["run"], manifest["args"], manifest["workdir"]) == ("one-2", ["y"], str(project))
    assert manifest["lockfile"] == "runs/one/lock.toml"
    told = hpcenv("rerun", "one", "--dry-run", "--nproc", "2", cwd=project).stderr
    assert "  - --nproc 1\n  + --nproc 2\n" in told
    assert not (project / "runs" / "one-2").exists()

    (project / "train.py").write_text("print('another')\n")
    refused = hpcenv("rerun", "one", "--json", cwd=project)
    assert refused.status == 2
    assert "the script was" in refused.envelope["error"]["why"]
    allowed = hpcenv("rerun", "one", "--allow-changed", "--dry-run", "--json", cwd=project)
    assert allowed.status == 0
