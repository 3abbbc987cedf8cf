"""Errors for options of sbatch, srun or torchrun that were typed after `hpcenv submit`. They name hpcenv's own option.

Runs on: LOGIN NODE. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcenv.errors import Command, UsageError
from hpcenv.project import native_options
from hpcenv.project.options import OPTIONS
from hpcenv.submission import launch_options, sbatch_directives

# Options of `torch.distributed.launch` and of wrapper programs: name -> what the user should do instead.
_HINTS = {
    "local-rank": 'torchrun sets the variable LOCAL_RANK instead: read os.environ["LOCAL_RANK"] in the script',
    "rank": 'torchrun sets the variable RANK: read os.environ["RANK"] in the script',
    "world-size": "torchrun sets the variable WORLD_SIZE; the shape of the run is --nodes, --gpus and --nproc",
    "sbatch-args": "--sbatch NAME=VALUE, once for each option of sbatch",
    "srun-args": "--srun NAME=VALUE, once for each option of srun",
}

# sbatch gets --gres from hpcenv, too: from --gpus, or from --sbatch.
_OTHERS = {"gres": "GPUs are --gpus and --gpu-type; --sbatch passes other resources on"}


def answer(option: str, arguments: Sequence[str]) -> UsageError | None:
    """Return the error for an option of another program; None if sbatch, srun and torchrun do not have the option.

    Args:
        option: the typed option, with its dashes and without a value.
        arguments: the command line without `hpcenv`.
    """
    name = option.lstrip("-").replace("_", "-")
    if len(option.lstrip("-")) == 1:
        own = native_options.short_spellings().get(name)
        if own is not None:
            return _own(option, "sbatch", own, arguments)
        if name not in sbatch_directives.SHORT:
            return None
        name = sbatch_directives.SHORT[name]
    own_name = _own_name(name)
    if own_name is not None:
        return _own(option, *own_name, arguments)
    if name in _HINTS:
        return UsageError(f"no such option `{option}`", why="hpcenv starts the ranks with torchrun", hint=_HINTS[name])
    return _owned(option, name, arguments) or _passed_on(option, name, arguments)


def replaced(arguments: Sequence[str], old: str, new: str) -> list[str]:
    """Return a command line in which an option has another name. Words after `--` are not changed."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    words: list[str] = []
    for word in arguments[:end]:
        name, equals, value = word.partition("=")
        if name == old:
            words.append(f"{new}{equals}{value}")
        elif len(old) == 2 and not word.startswith("--") and word.startswith(old):
            words.append(f"{new}={word[2:]}")
        else:
            words.append(word)
    return [*words, *arguments[end:]]


def _own_name(name: str) -> tuple[str, str] | None:
    """Return the program that has this option, and the option of hpcenv with the same value; None if there are none."""
    for row in OPTIONS:
        # sbatch's --signal combines a signal and a time. hpcenv has one option for the signal and one for the time.
        for program, theirs in (("sbatch", row.sbatch), ("srun", row.srun), ("torchrun", row.torchrun)):
            if theirs == name and name != "signal":
                return program, row.flag
    return None


def _own(option: str, program: str, own: str, arguments: Sequence[str]) -> UsageError:
    """Return the error for an option that has another name in hpcenv."""
    return UsageError(
        f"no such option `{option}`; hpcenv calls it `{own}`",
        why=f"{option} is an option of {program}",
        hint=Command("hpcenv", *replaced(arguments, option, own)),
    )


def _owned(option: str, name: str, arguments: Sequence[str]) -> UsageError | None:
    """Return the error for an option that hpcenv sets itself; None for all other options."""
    if native_options.program_of(name) == "sbatch":
        return None
    for program, reason in (
        ("sbatch", native_options.owned("sbatch").get(name) or _OTHERS.get(name)),
        ("srun", native_options.owned("srun").get(name)),
        ("torchrun", launch_options.reason_against(name)),
    ):
        if reason is not None:
            before, value, after = _around(arguments, option)
            words = sbatch_directives.translate({name: value})[0] if program == "sbatch" else ()
            own = Command("hpcenv", *before, *words, *after)
            left = (Command("hpcenv", "submit", "--help"), " lists the options; leave this one out")
            why = f"{option} is an option of {program}: {reason}"
            return UsageError(f"no such option `{option}`", why=why, hint=own if words and value else left)
    return None


def _passed_on(option: str, name: str, arguments: Sequence[str]) -> UsageError | None:
    """Return the error for an option that hpcenv can pass on; None for all other options."""
    program = "torchrun" if launch_options.can_pass(name) else native_options.program_of(name)
    if program is None:
        return None
    words = _passing(arguments, option, *_CARRIERS[program], name)
    return UsageError(
        f"no such option `{option}`",
        why=f"{option} is an option of {program}; {_CARRIERS[program][0]} passes it on",
        hint=Command("hpcenv", *words),
    )


# Program -> the option of hpcenv that passes on options of this program, and the prefix of each name in the value.
_CARRIERS = {"sbatch": ("--sbatch", ""), "srun": ("--srun", ""), "torchrun": ("--torchrun-args", "--")}


def _passing(arguments: Sequence[str], option: str, carrier: str, dashes: str, name: str) -> list[str]:
    """Return a command line that passes an option on: `--mail-type=END` becomes `--sbatch mail-type=END`."""
    before, value, after = _around(arguments, option)
    text = f"{dashes}{name}={value}" if value else f"{dashes}{name}"
    return [*before, *([f"{carrier}={text}"] if text.startswith("-") else [carrier, text]), *after]


def _around(arguments: Sequence[str], option: str) -> tuple[list[str], str, list[str]]:
    """Return the words before an option, its value, and the words after it."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    is_letter = len(option) == 2
    for number, word in enumerate(words[:end]):
        name, equals, value = word.partition("=")
        if is_letter and name.startswith(option) and word != option:
            return words[:number], word[2:].removeprefix("="), words[number + 1 :]
        if name == option:
            break
    else:
        number, equals, value = end, "", ""
    following = words[number + 1 : end][:1]
    # If the option has no `=`, the next word is its value, except if the next word is an option or the script.
    taken = not equals and bool(following) and not following[0].startswith("-") and not following[0].endswith(".py")
    return words[:number], following[0] if taken else value, words[number + 1 + taken :]
