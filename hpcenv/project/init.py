"""`hpcenv init`: write a commented hpcenv.toml.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import UsageError, WouldOverwrite
from hpcenv.project.spec import TEMPLATE
from hpcenv.project.workspace import SPEC_NAME, open_workspace
from hpcenv.records.files import write_text


@dataclass(frozen=True, kw_only=True)
class InitResult:
    """The file that was written."""

    path: Path
    image: str


def init(
    folder: Path, *, image: str = "host", python: str | None = None, plain_http: tuple[str, ...] = ()
) -> InitResult:
    """Write hpcenv.toml into `folder`.

    Args:
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
        open_workspace(folder)
    except BaseException:
        path.unlink()
        raise
    return InitResult(path=path, image=image)
