"""`hpcenv init`: write a commented hpcenv.toml, and its JSON Schema.

Runs on: LOGIN NODE. `hpcenv lock` refuses some values without reading the image. This module refuses these values too,
before the file is written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import FileUnusable, SpecError, UsageError, WouldOverwrite
from hpcenv.image.reference import (
    DefinitionFile,
    ImageSource,
    LocalImage,
    RegistryName,
    SifFile,
    parse_source,
    refuse_floating,
)
from hpcenv.locking.environment import require_python
from hpcenv.project import acceptance, document, toml_files
from hpcenv.project.spec import TEMPLATE, Project
from hpcenv.project.template import data_file
from hpcenv.project.workspace import SPEC_NAME, open_workspace
from hpcenv.records.files import write_text

SCHEMA_NAME = "hpcenv.schema.json"


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
    force: bool = False,
) -> InitResult:
    """Write hpcenv.toml into `folder`, and accept its settings for this machine, because the user typed them.

    Args:
        environ: the user's environment. It names the home folder, and the folder with the settings that the user
            accepted.
        image: `host`, or a reference such as `docker://HOST/NAME:TAG`.
        python: the interpreter. If `python` is None, the file contains the default in a comment.
        plain_http: registries that are used without TLS, each as HOST:PORT.
        force: replace an existing file, and accept the home folder as a project.

    Raises:
        WouldOverwrite: the file exists.
        UsageError: a value cannot be written into the file, or the folder is the user's home.
        SpecError: `image` names no image, a tag that moves to new images, or a file that does not exist.
    """
    path = folder / SPEC_NAME
    for word in filter(None, (image, python, *plain_http)):
        if not word.isprintable() or '"' in word or "\\" in word:
            raise UsageError(f"{word!r} cannot be written into {SPEC_NAME}")
    _require_lockable(parse_source(image), folder)
    if python is not None and image == "host":
        require_python(folder / Path(python).expanduser(), why="--python names it")
    for host in plain_http:
        if "/" in host:
            raise UsageError(f"`{host}` is no host of a registry", hint="--plain-http HOST:PORT, without http://")
    text = _text(image, python, plain_http)
    project, problems = document.parse(Project, toml_files.loads(text.encode(), path, error=SpecError), text=text)
    if project is None:
        raise SpecError(f"`{path}` would not be valid", why="\n".join(problems))
    if not force:
        _require_new(path, environ)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(text, path)
    # The schema is for editors: the first line of hpcenv.toml names it.
    write_text(data_file("docs/reference", SCHEMA_NAME).read_text(encoding="utf-8"), folder / SCHEMA_NAME)
    # Site profiles in the folder are not accepted.
    written = tuple(one for one in acceptance.asked_by(open_workspace(folder)) if one.key in ("python", "image"))
    # If the folder for accepted settings cannot be written, the next command asks the user.
    with contextlib.suppress(FileUnusable):
        acceptance.keep(written, folder, environ)
    return InitResult(path=path, image=image)


def _text(image: str, python: str | None, plain_http: tuple[str, ...]) -> str:
    line = f'python = "{python}"' if python else '# python = ".venv/bin/python"'
    hosts = ", ".join(f'"{host}"' for host in plain_http)
    http = f"plain-http = [{hosts}]" if plain_http else '# plain-http = ["registry.example:5000"]'
    return TEMPLATE.format(image=image, python=line, plain_http=http)


def _require_new(path: Path, environ: Mapping[str, str]) -> None:
    """Refuse to replace a file, and to make the whole home folder one project."""
    if os.path.lexists(path):
        raise WouldOverwrite(
            f"`{path}` exists", hint="edit the file; --force replaces the file, and your changes are lost"
        )
    home = environ.get("HOME")
    if home and os.path.realpath(home) == os.path.realpath(path.parent):
        raise UsageError(
            f"`{path.parent}` is your home folder",
            why="every folder in it would belong to this project",
            hint="`mkdir PROJECT && cd PROJECT`, then `hpcenv init` there; --force makes the home folder a project",
        )


def _require_lockable(source: ImageSource, folder: Path) -> None:
    """Refuse an image that `hpcenv lock` cannot find, or accepts only with an option."""
    if isinstance(source, RegistryName) and source.floats:
        refuse_floating(source, hint="use the tag of a version, or a digest")
    if isinstance(source, (LocalImage, SifFile, DefinitionFile)):
        place = folder / Path(source.path).expanduser()
        if not os.path.exists(place):
            raise SpecError(
                f"there is no `{place}`", why=f"`{source}` names it", hint="make it first, or correct the path"
            )
