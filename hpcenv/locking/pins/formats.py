"""The files that `hpcenv lock --from` takes: one row per format.

Runs on: LOGIN NODE.

    pins = read_pins(Path("pixi.lock#gpu"), environment=marker_environment(facts))

Each format lists what *may* be installed, for several platforms at a time. A pin counts only if its marker is true, or
its platform is that of the environment that is examined, which is not the one that runs hpcenv. A package that only an
extra, a dependency group or a category needs, and that was not selected, may be absent; if it is installed, it must
agree.

What stands behind `#` is a choice in a file that has one: an environment of pixi.lock, categories of conda-lock.yml.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from packaging.utils import canonicalize_name

from hpcenv.errors import Command, LockfileInvalid
from hpcenv.locking.pins import conda_lock, pixi, pylock, requirements
from hpcenv.locking.pins.pin import Pin, PinSelection
from hpcenv.locking.pins.text_file import read_text
from hpcenv.locking.pins.toml_text import parse_toml
from hpcenv.locking.pins.yaml_text import parse_yaml

Syntax = Literal["toml", "yaml", "text"]
_UV_LOCK = "uv.lock"


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One format.

    Attributes:
        name: as users know it.
        syntax: how its text is read.
        fits: whether a file of this name and content is of this format, among those of the same syntax.
        select_pins: yields the packages that count.
        reinstall: the command that installs from it again; FILE and CHOSEN stand for the file and the choice.
        choice: what can stand behind `#`; empty where nothing can.
        require_known: refuses another version, or a choice that is not in the file, before the environment is read.
        others: what else could be chosen, if the file has several and only one of them can be installed.
        conda: whether it pins what conda installs, beside what pip does.
    """

    name: str
    syntax: Syntax
    fits: Callable[[str, Any], bool]
    select_pins: Callable[[Path, Any, PinSelection], Iterable[Pin]]
    reinstall: str
    choice: str = ""
    require_known: Callable[[Path, Any, str], None] = lambda *_: None
    others: Callable[[Any], Sequence[str]] = lambda _: ()
    conda: bool = False


FORMATS = (
    Format(
        name="pylock.toml",
        syntax="toml",
        fits=lambda *_: True,
        select_pins=pylock.select_pins,
        reinstall="pip install -r FILE",
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
        reinstall="pip install -r FILE",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PinFile:
    """A file of pins that was read.

    Attributes:
        path: the file.
        chosen: what stood behind `#`.
        format: its format.
        data: its content.
    """

    path: Path
    chosen: str
    format: Format
    data: Any

    @property
    def named(self) -> str:
        """The file as it is named on the command line."""
        return f"{self.path}#{self.chosen}" if self.chosen else str(self.path)

    @property
    def or_choose(self) -> str:
        """What else a hint can say where nothing was chosen: the other environments of the file."""
        others = () if self.chosen else self.format.others(self.data)
        return (
            f"; or name the environment that is installed: --from {quote(self.path.name)}#NAME, of {', '.join(others)}"
            * bool(others)
        )

    @property
    def reinstall(self) -> str:
        """The command that installs from it again."""
        chosen = self.chosen.partition("@")[0] or pixi.DEFAULT
        return self.format.reinstall.replace("CHOSEN", quote(chosen)).replace("FILE", quote(str(self.path)))


def read_pins(
    path: Path, *, environment: Mapping[str, str], extras: Sequence[str] = (), groups: Sequence[str] = ()
) -> tuple[Pin, ...]:
    """Return the pins of a file that count in an environment, sorted by name.

    Args:
        path: the file, with `#CHOSEN` where one of its environments or categories is meant.
        environment: values for markers, see `marker_environment`.
        extras: extras of the project that were installed.
        groups: dependency groups that were installed.

    Raises:
        FileUnusable: it cannot be read.
        LockfileInvalid: it has none of the formats, or contains something that is not supported.
    """
    return pins_of(open_pins(path), environment=environment, extras=extras, groups=groups)


def open_pins(path: Path) -> PinFile:
    """Read a file of pins, and find out its format.

    The environment is read between this and `pins_of`, which takes long.

    Raises:
        FileUnusable: the file does not exist or cannot be read.
        LockfileInvalid: it is not text, is a uv.lock, does not have the format of its name, or has no such choice.
    """
    path, chosen = _split_choice(path)
    text = read_text(path)
    if path.name == _UV_LOCK:
        raise _no_reader(path)
    syntax = _syntax(path)
    data: Any = text if syntax == "text" else (parse_toml if syntax == "toml" else parse_yaml)(path, text)
    found = next(row for row in FORMATS if row.syntax == syntax and row.fits(path.name, data))
    if chosen and not found.choice:
        names = " and ".join(row.name for row in FORMATS if row.choice)
        raise LockfileInvalid(
            f"`{path}` has nothing to choose from, and `#{chosen}` stands behind it",
            why=f"it is read as a {found.name}; only {names} have environments or categories",
            hint=f"name the file alone: --from {quote(path.name)}",
        )
    found.require_known(path, data, chosen)
    return PinFile(path=path, chosen=chosen, format=found, data=data)


def pins_of(
    file: PinFile, *, environment: Mapping[str, str], extras: Sequence[str] = (), groups: Sequence[str] = ()
) -> tuple[Pin, ...]:
    """Return the pins of an open file that count in an environment, sorted by name.

    Raises:
        LockfileInvalid: it contains something that is not supported.
    """
    selection = PinSelection(
        environment=environment,
        extras=tuple(map(canonicalize_name, extras)),
        groups=tuple(map(canonicalize_name, groups)),
        chosen=file.chosen,
    )
    pins = file.format.select_pins(file.path, file.data, selection)
    return tuple(sorted(dict.fromkeys(pins), key=lambda pin: (pin.name, pin.version or "", not pin.required)))


def _split_choice(path: Path) -> tuple[Path, str]:
    """Return file and choice. A file whose own name contains `#` is taken as it is."""
    name, mark, chosen = path.name.rpartition("#")
    return (path.with_name(name), chosen) if mark and name and not os.path.lexists(path) else (path, "")


def _no_reader(path: Path) -> LockfileInvalid:
    """The error for a uv.lock: uv knows its workspaces, conflicting extras and groups best, and exports them."""
    return LockfileInvalid(
        f"hpcenv does not read `{path}`",
        why="the format belongs to uv alone; pylock.toml is the standard one (PEP 751), and uv writes it",
        hint=(
            "in the folder of the file: ",
            Command("uv", "export", "--frozen", "--format", "pylock.toml", "-o", "pylock.toml"),
            "\nthen name pylock.toml instead",
        ),
    )


def _syntax(path: Path) -> Syntax:
    if path.suffix == ".toml":
        return "toml"
    return "yaml" if path.suffix in (".yml", ".yaml") or path.name.endswith("pixi.lock") else "text"
