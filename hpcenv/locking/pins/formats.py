"""The files that `hpcenv lock --from` accepts: one row per format.

Runs on: LOGIN NODE.

    pins = read_pins(PinSource(path=Path("pixi.lock#gpu")), environment=marker_environment(facts))

Each format lists the packages that *may* be installed, for several platforms at a time. A pin counts only if its marker
is true, or if its platform is the platform of the examined environment. (This may be a different environment than the
one that runs hpcenv.) A package may belong only to an extra, a dependency group or a category that was not selected.
Such a package may be absent. If it is installed, it must agree with its pin. In a uv.lock such a package does not
count at all, as for `uv sync`.

The text after `#` makes a choice in a file that has several parts: an environment of pixi.lock, categories of
conda-lock.yml.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import join, quote
from typing import Any, Literal

from packaging.utils import canonicalize_name

from hpcenv.errors import LockfileInvalid
from hpcenv.locking.pins import conda_lock, pixi, pylock, requirements, uv_export
from hpcenv.locking.pins.pin import Pin, PinSelection, PinSource
from hpcenv.locking.pins.text_file import read_text
from hpcenv.locking.pins.toml_text import parse_toml, project_name
from hpcenv.locking.pins.yaml_text import parse_yaml

Syntax = Literal["toml", "yaml", "text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One format.

    Attributes:
        name: the name that users know.
        syntax: how its text is read.
        fits: whether a file with this name and content has this format. Several formats have the same syntax.
        select_pins: yields the packages that count.
        reinstall: the command that installs from the file again. FILE means the file, CHOSEN the choice, and FORCE the
            option that replaces a package by a different file of the same version.
        force: the option that replaces FORCE in `reinstall`.
        removes: whether the command also removes the packages of pip that the file does not pin.
        choice: the kind of text that can follow `#`; empty if the format has no choice.
        require_known: refuses an unknown version, or a choice that is not in the file, before the environment is read.
        others: the other environments that can be chosen, if only one environment of the file can be installed.
        conda: whether the format pins packages of conda too, not only packages of pip.
        extras: whether extras and groups of the project can be named.
    """

    name: str
    syntax: Syntax
    fits: Callable[[str, Any], bool]
    select_pins: Callable[[Path, Any, PinSelection], Iterable[Pin]]
    reinstall: str
    force: str = ""
    removes: bool = False
    choice: str = ""
    require_known: Callable[[Path, Any, str], None] = lambda *_: None
    others: Callable[[Any], Sequence[str]] = lambda _: ()
    conda: bool = False
    extras: bool = False


FORMATS = (
    Format(
        name=uv_export.NAME,
        syntax="toml",
        fits=lambda name, _: name == uv_export.NAME,
        select_pins=pylock.select_pins,
        reinstall="uv sync --locked FORCE CHOSEN",
        force="--reinstall",
        removes=True,
        extras=True,
    ),
    Format(
        name="pylock.toml",
        syntax="toml",
        fits=lambda *_: True,
        select_pins=pylock.select_pins,
        reinstall="pip install FORCE -r FILE",
        force="--force-reinstall",
        extras=True,
    ),
    Format(
        name="pixi.lock",
        syntax="yaml",
        fits=lambda name, data: name.endswith("pixi.lock") or "environments" in data,
        select_pins=pixi.select_pins,
        reinstall="pixi reinstall --locked --environment CHOSEN",
        choice="an environment",
        require_known=pixi.require_known,
        others=pixi.environments,
        conda=True,
    ),
    Format(
        name="conda-lock.yml",
        syntax="yaml",
        fits=lambda *_: True,
        select_pins=conda_lock.select_pins,
        reinstall="conda-lock install --prefix PREFIX FILE",
        choice="categories",
        require_known=conda_lock.require_known,
        conda=True,
    ),
    Format(
        name="requirements.txt",
        syntax="text",
        fits=lambda *_: True,
        select_pins=requirements.select_pins,
        reinstall="pip install FORCE -r FILE",
        force="--force-reinstall",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PinFile:
    """A file of pins that was read.

    Attributes:
        path: the file.
        chosen: the text after `#`.
        source: the file and the choice as the user wrote them.
        format: its format.
        data: the file's content; for a uv.lock, the packages that uv chose from it.
        notes: the facts about the file that could not be found out.
    """

    path: Path
    chosen: str
    source: PinSource
    format: Format
    data: Any
    notes: tuple[str, ...] = ()

    @property
    def named(self) -> str:
        """The file and the choice as they are written on the command line."""
        return f"{self.path}#{self.chosen}" if self.chosen else str(self.path)

    @property
    def project(self) -> tuple[str, ...]:
        """The project in the folder of the file.

        It need not be installed, because a run has its own copy of the code.
        """
        name = project_name(self.path.parent)
        return () if name is None else (name,)

    @property
    def or_choose(self) -> str:
        """A text to add to a hint: the other environments of the file; empty if the user chose an environment."""
        others = () if self.chosen else self.format.others(self.data)
        return (
            f"; or name the environment that is installed: --from {quote(self.path.name)}#NAME, of {', '.join(others)}"
            * bool(others)
        )

    def reinstall(self, *, force: bool = False) -> str:
        """The command that installs from the file again; `force` replaces packages of the same version too."""
        chosen = self.chosen.partition("@")[0] or pixi.DEFAULT
        words = join(self.source.options) if self.format.extras else quote(chosen)
        filled = self.format.reinstall.replace("FORCE ", f"{self.format.force} " * force)
        return filled.replace("CHOSEN", words).replace("FILE", quote(str(self.path))).rstrip()

    def mend(self, too_many: Sequence[str], *, others: bool, force: bool) -> str:
        """The steps that make the environment equal to the file.

        Args:
            too_many: the packages of pip that are installed, but that the file does not pin.
            others: whether there are other differences.
            force: whether a package was installed from a different file of the pinned version.
        """
        lines = []
        if others or self.format.removes:
            lines.append(f"install from it again: {self.reinstall(force=force)}{self.or_choose}")
        if too_many and not self.format.removes:
            lines.append(f"remove what it does not pin: pip uninstall {join(too_many)}")
        if too_many and self.format.name == uv_export.NAME:
            lines.append("or name what else of the project is installed: --extra NAME, --group NAME or --package NAME")
        return "\n".join(lines)


def read_pins(source: PinSource, *, environment: Mapping[str, str]) -> tuple[Pin, ...]:
    """Return the pins of a file that count in an environment, sorted by name.

    Args:
        source: the file, and which parts of it were installed.
        environment: values for markers, see `marker_environment`.

    Raises:
        FileUnusable: the file cannot be read.
        LockfileInvalid: the file has none of the formats, or contains something that is not supported.
    """
    return pins_of(open_pins(source), environment=environment)


def open_pins(source: PinSource) -> PinFile:
    """Read a file of pins, and find out its format.

    Reading the environment takes long, and comes later, before `pins_of`. So this function refuses wrong files early.

    Raises:
        FileUnusable: the file does not exist or cannot be read.
        LockfileInvalid: the file is not text, its format does not fit its name, it does not have the part that was
            chosen, or uv refuses it.
    """
    path, chosen = _split_choice(source.path)
    _require_reader(path)
    text = read_text(path)
    notes: tuple[str, ...] = ()
    syntax = _syntax(path)
    if path.name == uv_export.NAME:
        text, notes = uv_export.export(path, source.options)
    data: Any = text if syntax == "text" else (parse_toml if syntax == "toml" else parse_yaml)(path, text)
    found = next(row for row in FORMATS if row.syntax == syntax and row.fits(path.name, data))
    if chosen and not found.choice:
        names = " and ".join(row.name for row in FORMATS if row.choice)
        raise LockfileInvalid(
            f"`#{chosen}` follows `{path}`, which has nothing to choose from",
            why=f"it is read as a {found.name}; only {names} have environments or categories",
            hint=f"name the file alone: --from {quote(path.name)}",
        )
    _require_choice(source, path, found)
    found.require_known(path, data, chosen)
    return PinFile(path=path, chosen=chosen, source=source, format=found, data=data, notes=notes)


def pins_of(file: PinFile, *, environment: Mapping[str, str]) -> tuple[Pin, ...]:
    """Return the pins of an open file that count in an environment, sorted by name.

    Raises:
        LockfileInvalid: the file contains something that is not supported.
    """
    selection = PinSelection(environment=environment, chosen=file.chosen)
    if file.format.name != uv_export.NAME:  # uv has chosen already
        extras, groups = (tuple(map(canonicalize_name, some)) for some in (file.source.extras, file.source.groups))
        selection = replace(selection, extras=extras, groups=groups)
    own = file.project
    pins = (
        replace(pin, required=pin.required and pin.name not in own)
        for pin in file.format.select_pins(file.path, file.data, selection)
    )
    return tuple(sorted(dict.fromkeys(pins), key=lambda pin: (pin.name, pin.version or "", not pin.required)))


def _split_choice(path: Path) -> tuple[Path, str]:
    """Return file and choice. If an existing file has `#` in its name, the whole text is its name."""
    name, mark, chosen = path.name.rpartition("#")
    return (path.with_name(name), chosen) if mark and name and not os.path.lexists(path) else (path, "")


# Formats that hpcenv does not read, each with the command that writes a format that hpcenv reads.
_EXPORTS = {
    "poetry.lock": "poetry export --output requirements.txt",  # poetry-plugin-export 1.9
    "pdm.lock": "pdm export --format pylock --output pylock.toml",  # PDM 2.24 and newer
    "Pipfile.lock": "pipenv requirements --hash > requirements.txt",
    "environment.yml": "conda-lock lock --file environment.yml",
    "environment.yaml": "conda-lock lock --file environment.yaml",
    "pyproject.toml": "pip lock --output pylock.toml .",  # pip 25.1 and newer; `uv export` for projects of uv
}


def _require_reader(path: Path) -> None:
    """Refuse a file of a tool that can write a format which hpcenv reads.

    Raises:
        LockfileInvalid: the hint has the command that writes such a format.
    """
    command = _EXPORTS.get(path.name)
    if command is not None:
        raise LockfileInvalid(
            f"hpcenv does not read `{path}`",
            why="it reads " + ", ".join(row.name for row in FORMATS),
            hint=f"in its folder: `{command}`\nthen name the file that it writes",
        )


def _require_choice(source: PinSource, path: Path, found: Format) -> None:
    """Refuse extras, groups and a package if the file's format does not have them.

    Raises:
        LockfileInvalid: the format has no extras, groups or packages.
    """
    with_extras = [row.name for row in FORMATS if row.extras]
    for option, asked, formats in (
        ("--extra", source.extras, with_extras),
        ("--group", source.groups, with_extras),
        ("--package", source.package, [uv_export.NAME]),
    ):
        if asked and found.name not in formats:
            raise LockfileInvalid(
                f"`{option}` does not go with `{path}`",
                why=f"it is read as a {found.name}; the option works only with {' and '.join(formats)}",
                hint="leave the option out, or name another file",
            )


def _syntax(path: Path) -> Syntax:
    if path.suffix == ".toml" or path.name == uv_export.NAME:
        return "toml"
    return "yaml" if path.suffix in (".yml", ".yaml") or path.name.endswith("pixi.lock") else "text"
