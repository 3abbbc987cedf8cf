"""Secrets: variables whose values are read on the node, at launch, and written nowhere.

Runs on: COMPUTE NODE. Standard library only. No message here holds a value.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcenv.errors import NodesUnknown
from hpcenv.wire import Secret

_MOST_BYTES = 64 * 1024


def read_all(secrets: Sequence[Secret], environ: Mapping[str, str], *, node: str) -> dict[str, str]:
    """Return name -> value of every secret.

    Args:
        environ: the environment of the job, for sources `env:NAME`.

    Raises:
        NodesUnknown: one cannot be read; says which source, and not a character of a value.
    """
    return {secret.name: _read(secret, environ, node) for secret in secrets}


def _read(secret: Secret, environ: Mapping[str, str], node: str) -> str:
    kind, _, place = secret.source.partition(":")
    try:
        if kind == "env":
            if place not in environ:
                raise ValueError(f"{place} is not set in the environment of the job")
            return environ[place]
        if kind == "file":
            return _from_file(Path(place))
        raise ValueError("a source is file:PATH or env:NAME")
    except (OSError, ValueError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise NodesUnknown(
            f"node {node} cannot read the secret {secret.name} from `{secret.source}`",
            why=f"{why}; it is asked for by {secret.origin}",
            hint="check that this node sees the file and you may read it; variables must be set where you submit",
        ) from None


def _from_file(path: Path) -> str:
    """Return what a file holds, without its last newline."""
    descriptor = os.open(path.expanduser(), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a plain file")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(_MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    if b"\0" in data:
        raise ValueError("it holds a NUL, which no variable can hold")
    try:
        # Strict: the exception's text would show the byte, so it is not passed on.
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
