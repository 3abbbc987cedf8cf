"""Words that are not commands or options of hpcenv, with the text to type instead.

Some of these words are names of similar commands in other programs (`ls`, `kill`). Other words are tasks for which
users now need another program (`sign`, `image scan`). hpcenv had commands for these tasks until 2026-11-25, and
CHANGELOG.md lists the same replacements.

Runs on: LOGIN NODE. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcenv.errors import Command, Hint, UsageError
from hpcenv.project.gone_options import GONE
from hpcenv.project.options import in_place

if TYPE_CHECKING:
    import click

# A command that does not exist -> the command to type instead.
_COMMANDS = {
    "hpcenv cost": "hpcenv usage",
    "hpcenv exec": "hpcenv run -- COMMAND",
    "hpcenv kill": "hpcenv cancel RUN",
    "hpcenv ls": "hpcenv list",
    "hpcenv ps": "hpcenv list",
    "hpcenv restart": "hpcenv rerun RUN",
    "hpcenv resume": "hpcenv submit SCRIPT --resume-from RUN",
    "hpcenv sign": "ssh-keygen -Y sign -f KEY -n file FILE",
    "hpcenv stop": "hpcenv cancel RUN",
    "hpcenv tail": "hpcenv logs -f RUN",
    "hpcenv update": "hpcenv lock",
    "hpcenv watch": "hpcenv top RUN",
    "hpcenv bundle pull": "oras pull HOST/NAME:TAG",
    "hpcenv bundle push": "oras push HOST/NAME:TAG FILE.hpcenv.zip",
    "hpcenv image push": "apptainer push -U FILE.sif oras://HOST/NAME:TAG",
    "hpcenv image rebuild": "hpcenv bundle make RUN --with-sif FILE",
    "hpcenv image scan": "hpcenv export cyclonedx -o bom.cdx.json",
}
# File extensions of scripts. A user may type the name of a script as a command.
_SCRIPTS = (".py", ".sh", ".slurm", ".sbatch", ".sub")
# The reason for a replacement, if the replacement itself does not show the reason.
_REASONS = {
    "hpcenv cost": "it has the GPU hours, the idle hours and the energy of the runs",
    "hpcenv sign": "OpenSSH signs files, and `ssh-keygen -Y verify` verifies them",
    "hpcenv image rebuild": "no other image has the same bytes: keep the SIF in the bundle of the run",
    "hpcenv image scan": "a scanner reads the bill of materials: grype sbom:bom.cdx.json",
}
_SIGNATURES = "hpcenv verifies no signatures: ssh-keygen -Y verify -f SIGNERS -I AUTHOR -n file -s FILE.sig < FILE"
_SIGNED = "ssh-keygen -Y sign signs the output of `hpcenv reproduce --json`"
_DESCRIBED = "`hpcenv bundle make RUN` describes the run in CITATION.cff and record.json"
_STRESSED = "`dcgmi diag -r 3` on a node puts a load on its GPUs; --preflight full has hpcenv's own tests"
_TRANSLATED = "buildah or podman build a Dockerfile; `hpcenv image init` writes a definition file for Apptainer"
# Command and option -> what to do instead.
_OPTIONS = {
    ("hpcenv image build", "--on-cluster"): "srun -c 8 hpcenv image build",
    ("hpcenv image pull", "--on-cluster"): "srun -c 8 hpcenv image pull REFERENCE",
    ("hpcenv image build", "--translate"): _TRANSLATED,
    ("hpcenv reproduce", "--rebuild"): "the authors keep the SIF in the bundle: hpcenv bundle make RUN --with-sif FILE",
    ("hpcenv reproduce", "--key"): _SIGNED,
    ("hpcenv reproduce", "--statement"): _SIGNED,
    ("hpcenv verify", "--identity"): _SIGNATURES,
    ("hpcenv verify", "--signature"): _SIGNATURES,
    ("hpcenv verify", "--signers"): _SIGNATURES,
}
# Command, and a value that it no longer accepts -> what to do instead.
_VALUES = {
    ("hpcenv export", "ro-crate"): _DESCRIBED,
    ("hpcenv export", "rocrate"): _DESCRIBED,
    ("hpcenv export", "spdx"): "hpcenv export cyclonedx -o bom.cdx.json",
    ("hpcenv image build", "apptainer"): _TRANSLATED,
    ("hpcenv rerun", "deep"): _STRESSED,
    ("hpcenv submit", "deep"): _STRESSED,
}
# Option that has no value in sbatch, but has values in hpcenv -> the value with the same meaning.
_WITH_VALUE = {"--requeue": "--requeue always is what --requeue of sbatch means; saved and never are the others"}
_GONE = {"--" + option.name.replace("_", "-"): option.instead for option in GONE}
_KEYS = {option.flag: f"`{option.key}` under [submit] of hpcenv.toml" for option in in_place("project")}


def command(group: str, typed: Sequence[str]) -> UsageError | None:
    """Return the error for a word that is not a command; None if no replacement is known.

    Args:
        group: the words before the unknown word, for example `hpcenv` or `hpcenv image`.
        typed: the word, and the words after it.
    """
    name = f"{group} {typed[0]}"
    is_script = group == "hpcenv" and typed[0].endswith(_SCRIPTS)
    if name not in _COMMANDS and not is_script:
        return None
    hint: Hint = Command("hpcenv", "submit", *typed) if is_script else Command(*_COMMANDS[name].split())
    return UsageError(f"no such command `{name}`", why=_REASONS.get(name), hint=hint)


def option(command_path: str, typed: str) -> UsageError | None:
    """Return the error for an option that a command does not have; None if no replacement is known.

    Args:
        command_path: the command, for example `hpcenv image pull`.
        typed: the option with its dashes, without a value.
    """
    flag = typed.replace("--no-", "--", 1)
    hint = _OPTIONS.get((command_path, typed))
    if hint is None and command_path in ("hpcenv submit", "hpcenv rerun"):
        hint = _KEYS.get(flag)
    if hint is None and command_path in ("hpcenv submit", "hpcenv rerun", "hpcenv reproduce"):
        hint = _GONE.get(flag)
    return None if hint is None else UsageError(f"no such option `{typed}` of `{command_path}`", hint=hint)


def value(command_path: str, problem: click.ClickException) -> str | None:
    """Return the text to type instead of a missing or unknown value; None if no replacement is known.

    Args:
        command_path: the command, for example `hpcenv export`; empty if click does not name the command.
        problem: the error of click. The message of this error begins with the value in quotes, and the full text names
            the option.
    """
    said = problem.format_message()
    typed, _, _ = problem.message.partition(" is not one of ")
    bare = next((hint for flag, hint in _WITH_VALUE.items() if f"'{flag}'" in said), None)
    return bare or _VALUES.get((command_path, typed.strip("'")))
