"""What a user may add to the launch: words for torchrun, names of variables, sources of secrets. Pure.

Runs on: LOGIN NODE. What could break the launch on the nodes is refused here, before the queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hpcenv.errors import UsageError
from hpcenv.wire import Secret

# Options of torchrun that decide what hpcenv itself decides (torch/distributed/run.py, torch 1.10 to 2.13), and why
# they are not for the user.
_OURS = {
    "nnodes": "the number of nodes is --nodes",
    "nproc-per-node": "the number of ranks is --gpus or --nproc",
    "rdzv-backend": "the gate chooses where the nodes meet",
    "rdzv-endpoint": "the gate chooses where the nodes meet",
    "rdzv-id": "the gate chooses where the nodes meet",
    "rdzv-conf": "the gate chooses where the nodes meet",
    "local-addr": "the gate chooses each node's address",
    "log-dir": "the logs of ranks are in the run folder",
    "logs-specs": "the logs of ranks are in the run folder",
    "tee": "every rank's lines go to the log and to a file",
    "redirects": "every rank's lines go to the log and to a file",
    "master-addr": "the gate chooses where the nodes meet",
    "master-port": "the gate chooses where the nodes meet",
    "max-restarts": "that is an option of hpcenv: --max-restarts N",
    "node-rank": "the gate numbers the nodes",
    "standalone": "that is an option of hpcenv: --standalone",
    "signals-to-handle": "hpcenv passes signals on: --stop-signal",
    "run-path": "the script is a file of Python",
    "module": "the script is a file of Python",
    "no-python": "the script is a file of Python",
    "use-env": "the script is a file of Python",
    "help": "torchrun would print its help and train nothing",
}

# Options that take a value, as the next word too; of any other one the next word would become the script.
_WITH_VALUE = frozenset(
    {
        *("monitor-interval", "start-method", "event-log-handler", "role", "local-ranks-filter", "numa-binding"),
        *("duplicate-stdout-filters", "duplicate-stderr-filters", "shutdown-timeout"),
    }
)
_WITHOUT_VALUE = frozenset({"virtual-local-rank"})


# The latest torch whose torchrun was read for the lists above.
_NEWEST_TORCH = (2, 13)


def check_torchrun_args(words: Sequence[str], *, torch: str = "") -> None:
    """Refuse words for torchrun that would break the launch.

    argparse takes beginnings for the whole name, and `_` and `-` are the same to torchrun: any spelling is refused.

    Args:
        torch: its version; a later torchrun than the one known here may have options of its own.

    Raises:
        UsageError: such a word, or one that torchrun would take for the script.
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


def _plain(name: str) -> str:
    return name[2:].replace("_", "-") if name.startswith("--") else ""


def _check_option(word: str, name: str, torch: str) -> None:
    plain = _plain(name)
    if not word.startswith("-"):
        raise _refused(word, "torchrun would take it for the script", "give an option and its value as one word: --a=b")
    if not plain:
        why = "torchrun would take what follows for the script" if word == "--" else "torchrun's short options are ours"
        raise _refused(word, why, "arguments of the script go after `--`: hpcenv submit SCRIPT ... -- ARGS")
    if plain in _WITH_VALUE or plain in _WITHOUT_VALUE:
        return
    meant = next((ours for ours in _OURS if ours.startswith(plain)), None)
    if meant is not None:
        raise _refused(word, _OURS[meant], "leave it out")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", plain):
        raise _refused(word, "that is no name of an option", "leave it out")
    if _is_known(torch) and not any(known.startswith(plain) for known in (*_WITH_VALUE, *_WITHOUT_VALUE)):
        import difflib

        near = difflib.get_close_matches(plain, (*_WITH_VALUE, *_WITHOUT_VALUE), n=1)
        why = f"torchrun of torch {torch} has no such option"
        raise _refused(word, why, f"--torchrun-args --{near[0]}" if near else "leave it out")


def _is_known(torch: str) -> bool:
    version = re.match(r"([0-9]{1,6})\.([0-9]{1,6})", torch)
    return version is not None and (int(version[1]), int(version[2])) <= _NEWEST_TORCH


def _refused(word: str, why: str, hint: str) -> UsageError:
    return UsageError(f"`--torchrun-args {word}` cannot be passed on", why=why, hint=hint)


_NAME_OR_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?|\*")


def check_pass_env(names: Iterable[str]) -> None:
    """Refuse what is no name of a variable, nor the beginning of one with a `*`.

    Raises:
        UsageError: such a word.
    """
    for name in names:
        if not _NAME_OR_PATTERN.fullmatch(name):
            raise UsageError(
                f"`{name}` is no variable to pass on",
                why="--pass-env and pass_env take a name, or the beginning of names with a `*`",
                hint="--pass-env WANDB_MODE, or --pass-env 'HF_*'; a value is set with --env NAME=VALUE",
            )


def check_secrets(secrets: Iterable[Secret]) -> None:
    """Refuse a secret's file whose path would mean something else on the nodes.

    Raises:
        UsageError: a relative path.
    """
    for secret in secrets:
        kind, _, place = secret.source.partition(":")
        if kind == "file" and not place.startswith(("/", "~/")):
            raise UsageError(
                f"the secret {secret.name} is in `{place}`, which is no absolute path",
                why=f"it is read on the nodes, where no folder is the current one; asked for by {secret.origin}",
                hint=f"{secret.name}=file:/full/path, or file:~/path",
            )
