"""Refuse a shell script or another program that is given to `hpcenv submit` instead of a Python script.

Runs on: LOGIN NODE. Pure, except that `refuse_starter` checks whether a file exists.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcenv.errors import Command, Hint, ScriptUnusable
from hpcenv.submission import sbatch_directives

_SHELL = re.compile(rb"#!\s*(?:/usr/bin/env\s+(?:-S\s+)?)?(?:/[^\s]*/)?(?P<name>bash|sh|zsh|dash|ksh|csh|tcsh)\b")
# Programs that start a Python script. Most batch scripts have such a program in their last line.
_STARTERS = re.compile(r"(?:.*/)?(?:python[0-9.]*|torchrun|accelerate|deepspeed)\Z")
_SHELL_NAME = re.compile(r"(?:.*/)?(?:ba|da|k|z)?sh\Z")
_STARTS_ON_NODES = re.compile(r"(?:.*/)?(?:srun|mpirun|mpiexec)\Z")


def refuse(script: str, content: bytes) -> None:
    """Refuse a shell script and a compiled program, because the locked Python runs the script on each rank.

    Args:
        script: the script as the user typed it.
        content: the content of the script, as bytes.

    Raises:
        ScriptUnusable: the script is a shell script or a program. If a shell script starts a Python script, the hint is
            the command that submits this Python script.
    """
    found = _SHELL.match(content)
    if found is None and not script.endswith((".sh", ".bash", ".sbatch", ".slurm")):
        if content.startswith(b"\x7fELF"):
            raise ScriptUnusable(f"`{script}` is a program, not a Python script", why=_ONLY_PYTHON, hint=_hint(""))
        return
    name = "shell" if found is None else found["name"].decode()
    raise ScriptUnusable(
        f"`{script}` is a {name} script",
        why=_ONLY_PYTHON,
        hint=_hint(content.decode("utf-8", "replace")),
    )


_ONLY_PYTHON = "the script is started with the locked Python, which reads Python only"


def refuse_starter(script: str, args: Sequence[str], cwd: Path, command: Sequence[str]) -> None:
    """Refuse a starter such as `python` before the script, because hpcenv starts the ranks itself.

    Args:
        script, args: the script and its arguments as the user typed them.
        command: the command line of the submission, for the hint.

    Raises:
        ScriptUnusable: the script is a program that starts scripts. The hint is the command line without this program.
    """
    words, at = list(command), command.index(script) if script in command else len(command)
    first, *rest = [*script.split(), *(words[at + 1 :] or args)] or [""]
    if not (_STARTERS.match(first) or _STARTS_ON_NODES.match(first)) or (cwd / script).exists():
        return
    program = _program(rest)
    if program and program[-1] in words[at:]:
        to = words.index(program[-1], at)
        module = [word for word in words[at:to] if word in ("-m", "--module")]
        words = [*words[:at], *module, *words[to:]]
    else:
        words = ["hpcenv", "submit", *(program or ("SCRIPT",)), "--nodes", "N", "--gpus", "G"]
    raise ScriptUnusable(
        f"`{first}` is not a script: it starts one",
        why="hpcenv starts the script on all ranks itself",
        hint=Command(*words),
    )


def _hint(text: str) -> Hint:
    """Return the command that submits the Python script of a shell script, as far as its text shows this command."""
    program, args = next(_python_commands(text), (("SCRIPT",), ("--", "ARGS")))
    given = sbatch_directives.read(text)
    options, left = sbatch_directives.translate(given)
    if not given:
        options = ("--nodes", "N", "--gpus", "G")
    elif "--gpus" not in options:
        options = (*options, "--gpus", "0" if "--nproc" in options else "G")
    if "nodes" in left:
        options = ("--nodes", "N", *options)
    rest = "".join(f"\nLeft out: --{name} ({reason})." for name, reason in left.items())
    return (Command("hpcenv", "submit", *program, *options, *args), f"{rest}{_THE_REST}")


_THE_REST = """
Options of sbatch are options of hpcenv submit (--partition, --time).
Variables are --env NAME=VALUE, or [env] in hpcenv.toml.
Modules are in the site profile, see `hpcenv doctor`."""


# Modules that start the script in the next argument.
_LAUNCHERS = re.compile(r"torch\.distributed\.(?:run|launch)\Z|accelerate\.commands\.launch\Z|deepspeed\b")


def _python_commands(text: str) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield each Python script or module that a shell script starts, with its arguments.

    The word ARG replaces each argument that only a shell can evaluate.
    """
    # Comments are removed before lines are joined, because a backslash does not continue a comment.
    code = re.sub(r"(?m)^[ \t]*#.*", "", f"{text}\n")
    for line in re.sub(r"\\\r?\n", " ", code).splitlines():
        try:
            words = _without_shell(shlex.split(line, comments=True))
        except ValueError:
            continue
        starter = next((n for n, word in enumerate(words) if _STARTERS.match(word)), None)
        program = () if starter is None else _program(words[starter + 1 :])
        if program:
            after = words.index(program[-1], starter or 0) + 1
            rest = [word if word.isprintable() and "$" not in word else "ARG" for word in words[after:]]
            yield program, (("--", *rest) if rest else ())


def _without_shell(words: list[str]) -> list[str]:
    """Return the words of a command. For `bash -c "COMMAND"`, return the words of COMMAND."""
    shell = next((n for n, word in enumerate(words) if _SHELL_NAME.match(word)), len(words))
    for number in range(shell + 1, len(words) - 1):
        if re.fullmatch(r"-\w*c", words[number]):
            return shlex.split(words[number + 1], comments=True)
    return words


def _program(words: Sequence[str]) -> tuple[str, ...]:
    """Return the script, or `-m` and the module, from the arguments of python or of a launcher."""
    for word, following in zip(words, (*words[1:], ""), strict=True):
        if word in ("-m", "--module") and following and not _LAUNCHERS.match(following):
            return "-m", following
        if word.endswith(".py"):
            return (word,)
    return ()
