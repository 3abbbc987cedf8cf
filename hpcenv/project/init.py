"""`hpcenv init`: write a commented hpcenv.toml.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import FileUnusable, UsageError, WouldOverwrite
from hpcenv.project import acceptance
from hpcenv.project.spec import TEMPLATE
from hpcenv.project.workspace import SPEC_NAME, open_workspace
from hpcenv.records.files import write_text


@dataclass(frozen=True, kw_only=True)
class InitResult:
    """The file that was written."""

    path: Path
    image: str


def init(
    folder: Path,
    *,
    environ: Mapping[str, str],
    image: str = "host",
    python: str | None = None,
    plain_http: tuple[str, ...] = (),
) -> InitResult:
    """Write hpcenv.toml into `folder`, and accept what it asks of this machine: the user typed it.

    Args:
        environ: the user's environment, for the folder of what he accepted.
        image: `host`, or a reference such as `docker://HOST/NAME:TAG`.
        python: the interpreter; None leaves the default as a comment.
        plain_http: registries that are used without TLS, each as HOST:PORT.

    Raises:
        WouldOverwrite: the file exists.
        UsageError: a value that cannot be written into the file.
    """
    path = folder / SPEC_NAME
    if os.path.lexists(path):
        raise WouldOverwrite(f"`{path}` exists", hint="edit it, or remove it first")
    for word in filter(None, (image, python, *plain_http)):
        if not word.isprintable() or '"' in word or "\\" in word:
            raise UsageError(f"{word!r} cannot be written into {SPEC_NAME}")
    line = f'python = "{python}"' if python else '# python = ".venv/bin/python"'
    hosts = ", ".join(f'"{host}"' for host in plain_http)
    http = f"plain-http = [{hosts}]" if plain_http else '# plain-http = ["registry.example:5000"]'
    text = TEMPLATE.format(image=image, python=line, plain_http=http)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(text, path)
    try:
        workspace = open_workspace(folder)
    except BaseException:
        path.unlink()
        raise
    # Not the site profiles that the folder may have.
    written = tuple(one for one in acceptance.asked_by(workspace) if one.key in ("python", "image"))
    # Without that folder, the next command asks.
    with contextlib.suppress(FileUnusable):
        acceptance.keep(written, folder, environ)
    return InitResult(path=path, image=image)
