"""Old names end with status 2 and print the new command; so do the spellings of sbatch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from hpcenv.cli._command_line import cli
from hpcenv.cli._old_names import OLD_OPTIONS


@pytest.mark.parametrize(
    ("typed", "what", "hint"),
    [
        ("submit t.py --run a --nproc 1 -- --run x", "`--run` is now `--name`", "hpcenv submit t.py --name a --nproc 1 -- --run x"),
        ("submit t.py --run=a", "`--run` is now `--name`", "hpcenv submit t.py --name=a"),
        (
            "submit t.py --no-snapshot --nproc 1 -- --no-snapshot",
            "`--no-snapshot` is now `--workdir live`",
            "hpcenv submit t.py --workdir live --nproc 1 -- --no-snapshot",
        ),
        ("status --runs x", "`--runs` is now `--runs-dir`", "hpcenv status --runs-dir x"),
        ("rerun one --runs x", "`--runs` is now `--runs-dir`", "hpcenv rerun one --runs-dir x"),
        ("lock --name paper", "`--name` is now `--lock`", "hpcenv lock --lock paper"),
        ("image path x", "`hpcenv image path` is now `hpcenv image inspect --path`", "hpcenv image inspect --path x"),
        (
            "export sbatch t.py --nproc 1 -o dir -- -o sbatch",
            "`hpcenv export sbatch` is now `hpcenv submit --export DIR`",
            "hpcenv submit t.py --nproc 1 --export dir -- -o sbatch",
        ),
        ("export sbatch", "`hpcenv export sbatch` is now `hpcenv submit --export DIR`", "hpcenv submit"),
        ("submit t.py --template x", "the option `--template` no longer exists", "set `template` under [submit] in hpcenv.toml"),
        ("image init --with numpy", "the option `--with` no longer exists", "--pylock FILE"),
        ("image init --apt vim", "the option `--apt` no longer exists", "`$apt install` of both files"),
        ("image init --base-python", "the option `--base-python` no longer exists", "leave it out"),
    ],
)  # fmt: skip
def test_an_old_name_is_answered_with_the_new_command(
    hpcenv: Any, tmp_path: Path, typed: str, what: str, hint: str
) -> None:
    done = hpcenv(*shlex.split(typed), cwd=tmp_path)
    assert done.status == 2
    lines = done.stderr.splitlines()
    assert lines[0] == f"error[usage]: {what}"
    assert hint in lines[-1]


@pytest.mark.parametrize(
    ("typed", "what", "hint"),
    [
        ("submit t.py -N 2 -- -N 3", "`-N`; hpcenv calls it `--nodes`", "hpcenv submit t.py --nodes 2 -- -N 3"),
        ("submit t.py -N2", "`-N`; hpcenv calls it `--nodes`", "hpcenv submit t.py --nodes=2"),
        ("submit t.py -p gpu", "`-p`; hpcenv calls it `--partition`", "hpcenv submit t.py --partition gpu"),
        ("rerun one -t 5", "`-t`; hpcenv calls it `--time`", "hpcenv rerun one --time 5"),
        ("submit t.py --cpus-per-task=4", "`--cpus-per-task`; hpcenv calls it `--cpus`", "hpcenv submit t.py --cpus=4"),
        ("submit t.py --gpus-per-node 4", "`--gpus-per-node`; hpcenv calls it `--gpus`", "hpcenv submit t.py --gpus 4"),
        ("submit t.py --nproc_per_node=2", "`--nproc_per_node`; hpcenv calls it `--nproc`", "hpcenv submit t.py --nproc=2"),
        ("submit t.py --nnodes 2", "`--nnodes`; hpcenv calls it `--nodes`", "hpcenv submit t.py --nodes 2"),
        ("submit t.py --mail-type END", "`--mail-type`", "hpcenv submit t.py --sbatch mail-type=END"),
        ("submit --exclusive t.py", "`--exclusive`", "hpcenv submit --sbatch exclusive t.py"),
        ("submit t.py --cpu-bind=none", "`--cpu-bind`", "hpcenv submit t.py --srun cpu-bind=none"),
        ("submit t.py --monitor-interval=1", "`--monitor-interval`", "--torchrun-args=--monitor-interval=1"),
        ("submit t.py --rdzv_endpoint=a:1", "`--rdzv_endpoint`", "leave this one out"),
        ("submit t.py --local-rank=0", "`--local-rank`", "LOCAL_RANK"),
    ],
)  # fmt: skip
def test_an_option_of_sbatch_srun_or_torchrun_is_answered_with_the_command_that_works(
    hpcenv: Any, tmp_path: Path, typed: str, what: str, hint: str
) -> None:
    done = hpcenv(*shlex.split(typed), cwd=tmp_path)
    assert done.status == 2
    assert done.stderr.splitlines()[0] == f"error[usage]: no such option {what}"
    assert hint in done.stderr.splitlines()[-1]


def test_an_option_that_only_sbatch_has_is_answered_with_the_reason(hpcenv: Any, tmp_path: Path) -> None:
    done = hpcenv("submit", "t.py", "--ntasks-per-node", "3", cwd=tmp_path)
    assert done.status == 2
    assert "hpcenv starts one task on each node; the ranks are --nproc" in done.stderr


def commands(group: click.Group, path: str = "") -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        here = f"{path} {name}".strip()
        found |= commands(command, here) if isinstance(command, click.Group) else {here: command}
    return found


def test_each_row_names_a_command_that_has_the_new_option_and_not_the_old_one() -> None:
    known = commands(cli)
    for (command, old), new in OLD_OPTIONS.items():
        for name in [command] if command else list(known):
            options = {word for option in known[name].params for word in option.opts}
            assert old not in options, (name, old)
            if command and new.startswith("--"):
                assert new.split()[0] in options, (name, new)
