"""Check the user's additions to the launch: arguments for torchrun, names of variables, and sources of secrets.

Runs on: LOGIN NODE. Pure. Options that would break the launch on the nodes are refused here, before the job is queued.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from hpcenv.errors import UsageError
from hpcenv.launch import expand
from hpcenv.records.manifest import CpuBinding, Launcher, Secret

# Options of torchrun that hpcenv sets (torch/distributed/run.py, torch 1.10 to 2.13), each with the reason why a user
# cannot set it.
_OURS = {
    "nnodes": "the number of nodes is --nodes",
    "nproc-per-node": "the number of ranks is --gpus or --nproc",
    "rdzv-backend": "the gate chooses the rendezvous endpoint",
    "rdzv-endpoint": "the gate chooses the rendezvous endpoint",
    "rdzv-id": "the gate chooses the rendezvous endpoint",
    "rdzv-conf": "the gate chooses the rendezvous endpoint",
    "local-addr": "the gate chooses each node's address",
    "log-dir": "the logs of ranks are in the run folder",
    "logs-specs": "the logs of ranks are in the run folder",
    "tee": "the output of every rank goes to the log and to a file",
    "redirects": "the output of every rank goes to the log and to a file",
    "master-addr": "the gate chooses the rendezvous endpoint",
    "master-port": "the gate chooses the rendezvous endpoint",
    "node-rank": "the gate numbers the nodes",
    "standalone": "the gate chooses the rendezvous endpoint",
    "signals-to-handle": "hpcenv passes signals on: --stop-signal",
    "run-path": "the script is a Python file",
    "module": "hpcenv has the option --module (-m)",
    "no-python": "the script is a Python file",
    "use-env": "the script is a Python file",
    "help": "torchrun would print its help and train nothing",
}

# Options with a value. The value may be the next argument. After an option that is not in this list, torchrun uses the
# next argument as the script.
_WITH_VALUE = frozenset(
    {
        *(
            "max-restarts",
            "monitor-interval",
            "start-method",
            "event-log-handler",
            "role",
            "local-ranks-filter",
            "numa-binding",
        ),
        *("duplicate-stdout-filters", "duplicate-stderr-filters", "shutdown-timeout"),
    }
)
_WITHOUT_VALUE = frozenset({"virtual-local-rank"})


# Options of srun that give each task only some of the GPUs. With these options, LOCAL_RANK is not the number of a GPU.
_GPUS_OF_TASKS = frozenset({"gpu-bind", "accel-bind", "tres-bind"})

# The lists above are correct for torch up to this version.
_NEWEST_TORCH = (2, 13)


def check_torchrun_args(words: Sequence[str], *, torch: str = "") -> None:
    """Refuse arguments for torchrun that would break the launch.

    torchrun accepts abbreviated names, and `_` instead of `-`. Such spellings are refused, too.

    Args:
        torch: version of torch. Unknown options are refused only if hpcenv knows the options of this version.

    Raises:
        UsageError: an argument would break the launch, or torchrun would use it as the script.
    """
    value_of = ""
    for word in words:
        if value_of:
            if word.startswith("-"):
                raise _refused(value_of, "it has no value", f"--torchrun-args {value_of}=VALUE")
            value_of = ""
            continue
        name, equals, _ = word.partition("=")
        _check_option(word, name, torch)
        plain = _plain(name)
        if plain in _WITH_VALUE and not equals:
            value_of = word
        elif plain in _WITHOUT_VALUE and equals:
            raise _refused(word, "it takes no value", f"--torchrun-args {name}")
    if value_of:
        raise _refused(value_of, "it has no value", f"--torchrun-args {value_of}=VALUE")


def cpu_binding(asked: CpuBinding | None, torchrun_args: Sequence[str], srun: Mapping[str, object]) -> CpuBinding:
    """Return how the ranks are bound to CPUs. The result is `off` if torchrun or srun binds the ranks to CPUs or GPUs.

    Args:
        asked: the binding that the user wants; None for the default.
        torchrun_args: the user's arguments for torchrun.
        srun: options that are passed on to srun.
    """
    by_torchrun = any(_plain(word.partition("=")[0]) == "numa-binding" for word in torchrun_args)
    return "off" if by_torchrun or _GPUS_OF_TASKS & set(srun) else asked or "near-gpu"


def can_pass(name: str) -> bool:
    """Return whether `--torchrun-args` accepts an option of torchrun; `name` is its name without leading dashes."""
    return name in _WITH_VALUE or name in _WITHOUT_VALUE


def reason_against(name: str) -> str | None:
    """Return why a user cannot set an option of torchrun; None if hpcenv does not set this option."""
    return _OURS.get(name)


def _plain(name: str) -> str:
    return name[2:].replace("_", "-") if name.startswith("--") else ""


def _check_option(word: str, name: str, torch: str) -> None:
    plain = _plain(name)
    if not word.startswith("-"):
        raise _refused(word, "torchrun would use it as the script", "write option and value as one argument: --a=b")
    if not plain:
        why = (
            "torchrun would use what follows as the script"
            if word == "--"
            else "hpcenv passes on only options that begin with --"
        )
        raise _refused(word, why, "arguments of the script go after `--`: hpcenv submit SCRIPT OPTIONS -- ARGS")
    if plain in _WITH_VALUE or plain in _WITHOUT_VALUE:
        return
    meant = next((ours for ours in _OURS if ours.startswith(plain)), None)
    if meant is not None:
        raise _refused(word, _OURS[meant], "leave it out")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", plain):
        raise _refused(word, "this is not the name of an option", "leave it out")
    if _is_known(torch) and not any(known.startswith(plain) for known in (*_WITH_VALUE, *_WITHOUT_VALUE)):
        near = difflib.get_close_matches(plain, (*_WITH_VALUE, *_WITHOUT_VALUE), n=1)
        why = f"torchrun of torch {torch} has no such option"
        raise _refused(word, why, f"--torchrun-args --{near[0]}" if near else "leave it out")


def _is_known(torch: str) -> bool:
    version = re.match(r"([0-9]{1,6})\.([0-9]{1,6})", torch)
    return version is not None and (int(version[1]), int(version[2])) <= _NEWEST_TORCH


def _refused(word: str, why: str, hint: str) -> UsageError:
    return UsageError(f"`--torchrun-args {word}` cannot be passed on", why=why, hint=hint)


def check_expand(words: Sequence[str]) -> None:
    """Refuse arguments with a name in braces that `--expand` does not know.

    Raises:
        UsageError: an argument has such a name.
    """
    unknown = expand.unknown_names(words)
    if not unknown:
        return
    near = difflib.get_close_matches(unknown[0], expand.NAMES, n=1)
    meant = f"did you mean {{{near[0]}}}? " if near else ""
    raise UsageError(
        f"`--expand` has no value for {{{unknown[0]}}}",
        why=f"it replaces {', '.join(f'{{{name}}}' for name in expand.NAMES)}",
        hint=f"{meant}To pass the text itself, write {{{{{unknown[0]}}}}}",
    )


def check_launcher(launcher: Launcher, torchrun_args: Sequence[str]) -> None:
    """Refuse arguments of torchrun if another launcher starts the ranks.

    Raises:
        UsageError: there are arguments of torchrun.
    """
    if launcher != "torchrun" and torchrun_args:
        what = f"`--torchrun-args` and `--launcher {launcher}` contradict each other"
        raise UsageError(what, why="they are arguments of torchrun")


_NAME_OR_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?|\*")


def check_pass_env(names: Iterable[str]) -> None:
    """Refuse a text if it is not the name of a variable and not a pattern like `HF_*`.

    Raises:
        UsageError: `names` has such a text.
    """
    for name in names:
        if not _NAME_OR_PATTERN.fullmatch(name):
            raise UsageError(
                f"`{name}` is not the name of a variable",
                why="--pass-env and pass-env accept a name, or a pattern like HF_*",
                hint="--pass-env WANDB_MODE, or --pass-env 'HF_*'; a value is set with --env NAME=VALUE",
            )


def check_secrets(secrets: Iterable[Secret]) -> None:
    """Refuse a secret in a file with a relative path, because the nodes have another current folder.

    Raises:
        UsageError: the path is relative.
    """
    for secret in secrets:
        kind, _, place = secret.source.partition(":")
        if kind == "file" and not place.startswith(("/", "~/")):
            raise UsageError(
                f"the secret {secret.name} is in `{place}`, which is not an absolute path",
                why=f"the nodes read it, and they have another current folder; requested by {secret.origin}",
                hint=f"{secret.name}=file:/full/path, or file:~/path",
            )
