"""Secrets: variables with values that are read on the node at launch, and that are not written into a file of the run.

Runs on: COMPUTE NODE. Standard library only. No message contains a value.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcenv.errors import NodesUnknown
from hpcenv.records import secret_file
from hpcenv.records.manifest import Manifest, Secret

_MAX_BYTES = 64 * 1024


def read_all(secrets: Sequence[Secret], environ: Mapping[str, str], *, node: str, kept: str = "") -> dict[str, str]:
    """Return name -> value of every secret.

    Args:
        secrets: names with sources, from the manifest.
        environ: environment variables of the job, for sources `env:NAME` that the job itself sets.
        node: name of this node, for errors.
        kept: the file with the values that `env:NAME` sources had at the submission.

    Raises:
        NodesUnknown: a secret cannot be read. The error names the source, and contains no part of a value.
    """
    return {secret.name: _read(secret, environ, node, kept) for secret in secrets}


def _read(secret: Secret, environ: Mapping[str, str], node: str, kept: str) -> str:
    kind, _, name = secret.source.partition(":")
    try:
        if secret.kept:
            return _kept(name, Path(kept))
        if kind == "env":
            if name not in environ:
                raise ValueError(f"{name} is not set in the environment of the job")
            return environ[name]
        if kind == "file":
            return _from_file(Path(name))
        raise ValueError("a source must be file:PATH or env:NAME")
    except (OSError, ValueError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise NodesUnknown(
            f"node {node} cannot read the secret {secret.name} from `{secret.source}`",
            why=f"{why}; the secret is requested by {secret.origin}",
            hint=_GONE if secret.kept else _set_where(kind, name),
        ) from None


def _set_where(kind: str, name: str) -> str:
    if kind == "env":
        return f"set {name} in the shell in which you submit"
    return "check that the file exists on this node, and that you may read it"


_GONE = "its value is kept only until the run has ended: submit again; if nodes cannot see that file, use file:PATH"


def _kept(name: str, path: Path) -> str:
    """Return a value that the submission has stored for this run."""
    try:
        return secret_file.read(path)[name]
    except KeyError:
        raise ValueError(f"{path} does not have it") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


def _from_file(path: Path) -> str:
    """Return the content of a file without its last newline."""
    descriptor = os.open(path.expanduser(), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a plain file")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(_MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    if b"\0" in data:
        raise ValueError("it contains a NUL byte, which a variable cannot contain")
    try:
        # Strict decoding. The text of the exception contains the wrong byte, so this text is not shown.
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None


def forget(manifest: Manifest) -> None:
    """Remove the file with the values of the run's secrets."""
    path = Path(manifest.secret_values)
    if manifest.secret_values:
        secret_file.remove(path.parents[1], [manifest.run_folder])
