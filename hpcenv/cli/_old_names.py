"""Old names of options and commands: each ends with status 2, and the error prints the new command.

Options of sbatch, srun and torchrun are in `_foreign_options.py`.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from hpcenv.cli import _foreign_options
from hpcenv.errors import Command, UsageError

# (command, old option) -> the new option, or a sentence if there is no new option. "" is every command.
OLD_OPTIONS = {
    ("", "--runs"): "--runs-dir",
    **{(command, "--run"): "--name" for command in ("submit", "rerun")},
    **{(command, "--no-snapshot"): "--workdir live" for command in ("submit", "rerun")},
    **{(command, "--snapshot"): "leave it out: it is what hpcenv does by itself" for command in ("submit", "rerun")},
    **{(command, "--name"): "--lock" for command in ("lock", "verify", "export")},
    **{
        (command, f"--{key}"): f"set `{key}` under [submit] in hpcenv.toml"
        for command in ("submit", "rerun")
        for key in ("template", "compat-file", "assume-shared", "stage-limit")
    },
    ("image init", "--name"): "--tag",
    ("image init", "--out"): "--output",
    ("image init", "--with"): "lock the package together with torch, and give the lock: --pylock FILE",
    ("image init", "--apt"): "add the package to the line `$apt install` of both files",
    ("image init", "--base-python"): "leave it out: with --base, --python is the Python of the base",
    ("image init", "--plain-http"): "name the digest, --base NAME@sha256:..., or set plain-http in hpcenv.toml",
    ("image init", "--compat-file"): "set compat-file in the table [submit] of hpcenv.toml",
    ("diff", "--profile"): "--determinism",
}

# Old command, without `hpcenv` -> new command.
OLD_COMMANDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("image", "path"): ("image", "inspect", "--path"),
}


def refuse_command(command_path: str, arguments: Sequence[str]) -> None:
    """Raise the error for an old command; do nothing for other words.

    Args:
        command_path: the command so far, for example `hpcenv image`.
        arguments: the words after it.

    Raises:
        UsageError: this command has a new name; the hint is the same command with that name.
    """
    old = (*command_path.split()[1:], arguments[0])
    new = OLD_COMMANDS.get(old)
    if new is not None:
        raise UsageError(
            f"`hpcenv {' '.join(old)}` is now `hpcenv {' '.join(new)}`",
            why="the command has a new name",
            hint=Command("hpcenv", *new, *arguments[1:]),
        )


def answer(problem: click.UsageError, arguments: Sequence[str]) -> UsageError | None:
    """Return the error for an old name or for an option of sbatch, srun or torchrun; None for any other mistake.

    Args:
        problem: what click says about the command line.
        arguments: the command line without `hpcenv`.
    """
    command = "" if problem.ctx is None else problem.ctx.command_path.partition(" ")[2]
    if command == "export" and "sbatch" in arguments:
        return _exported(arguments)
    if isinstance(problem, click.NoSuchOption):
        option = problem.option_name
        new = OLD_OPTIONS.get((command, option)) or OLD_OPTIONS.get(("", option))
        if new is not None:
            return _renamed(option, new, arguments)
        return _foreign_options.answer(option, arguments) if command in ("submit", "rerun") else None
    return None


def _renamed(old: str, new: str, arguments: Sequence[str]) -> UsageError:
    if not new.startswith("--"):
        return UsageError(f"the option `{old}` no longer exists", hint=new)
    words = _foreign_options.replaced(arguments, old, new)
    return UsageError(f"`{old}` is now `{new}`", why="the option has a new name", hint=Command("hpcenv", *words))


def _exported(arguments: Sequence[str]) -> UsageError:
    """Return the error for `hpcenv export sbatch SCRIPT ... -o DIR`."""
    new = {"export": "submit", "-o": "--export", "--output": "--export"}
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    words = [new.get(word, word) for word in arguments[:end] if word != "sbatch"]
    return UsageError(
        "`hpcenv export sbatch` is now `hpcenv submit --export DIR`",
        why="the command has a new name",
        hint=Command("hpcenv", *words, *arguments[end:]),
    )
