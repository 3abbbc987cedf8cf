"""Parts that the modules of `formats/` share: the type of their result, the comment at the top of a file, and YAML.

Runs on: LOGIN NODE. Each module of `formats/` is for one engine. The function `render` of such a module gets the
training, the folder of the export, and the volume claim that `--volume` names. `render` returns the files, and writes
nothing.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcenv.errors import UsageError
from hpcenv.exports.archive import check_archive
from hpcenv.exports.training import Training
from hpcenv.records.codec import encode_record
from hpcenv.records.manifest import Secret
from hpcenv.records.run_folder import RunFolder

_WIDTH = 118
# A hint for the case that the code is too large for a ConfigMap.
USE_A_CLAIM = "--volume CLAIM:/path names a claim that has the code"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A persistent volume claim of a Kubernetes cluster, and its path in the container. The volume has the code."""

    name: str
    path: str


@dataclass(frozen=True)
class Files:
    """The folder of an export, and the files that are the same for all engines."""

    folder: Path

    @property
    def code(self) -> RunFolder:
        """The copy of the code. The copy has the layout of a run folder."""
        return RunFolder(self.folder / "code")

    @property
    def archive(self) -> Path:
        """The archive that the first program of a container runs."""
        return self.folder / "check" / "check.pyz"

    @property
    def lock(self) -> Path:
        """The file with which the check compares the container."""
        return self.folder / "lock" / "lock.json"

    def write(self, training: Training) -> None:
        """Write the archive and the lock.

        Raises:
            OSError: a file cannot be written.
        """
        self.archive.parent.mkdir()
        self.lock.parent.mkdir()
        self.archive.write_bytes(check_archive())
        self.lock.write_text(encode_record(training.lock), encoding="utf-8")
        self.lock.with_name("lock.toml").write_text(training.lockfile, encoding="utf-8")

    def code_files(self) -> list[Path]:
        """Return the files of the code. The records beside the folders of the copy are left out.

        Raises:
            UsageError: the code has a symbolic link that does not lead to a file.
        """
        found = [one for one in sorted(self.code.path.rglob("*")) if one.parent != self.code.path]
        link = next((one for one in found if one.is_symlink() and not one.is_file()), None)
        if link is not None:
            raise UsageError(
                f"`{link.relative_to(self.code.path / 'source')}` is a symbolic link that a ConfigMap cannot hold",
                why="a ConfigMap has files only, and the link leads to a folder or to nothing",
                hint=f"{USE_A_CLAIM}; or replace the link by a copy",
            )
        return [one for one in found if one.is_file()]


@dataclass(frozen=True, kw_only=True)
class EngineFiles:
    """The files for one engine.

    Attributes:
        files: name of a file -> content.
        lost: requests that this engine does not fulfil, in addition to `Training.lost`.
        needs: what must exist before the start, with one phrase for each thing.
        start: the command that starts the training, to be typed in the folder.
    """

    files: Mapping[str, str]
    lost: tuple[str, ...]
    needs: tuple[str, ...]
    start: str


def with_header(training: Training, lost: Sequence[str], start: str, text: str) -> str:
    """Return the text of a file with a comment at its top."""
    lines = [
        f"{training.name}: {training.request.shape}. Written by hpcenv.",
        f"Start it in this folder: {start}",
        "The first program of each container compares the container with the lockfile. If they differ, it ends with",
        "status 90. If this is unknown, it ends with status 91. After 90 or 91, it must not be started again.",
        "If the container agrees with the lockfile, torchrun replaces the program.",
        "What is not here:",
        *(f"  {one}" for one in (*training.lost, *lost)),
    ]
    folded = (part for line in lines for part in textwrap.wrap(line, _WIDTH, subsequent_indent="    "))
    # Text from the user must not end the comment.
    return "".join(f"# {part if part.isprintable() else ascii(part)}\n" for part in folded) + text


# Text that every YAML parser reads as a string without quotes. In YAML 1.2, for example, `3e-4` is a number.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9 ._/:@=-]*[A-Za-z0-9]")


def yaml_text(*documents: Mapping[str, object]) -> str:
    """Return documents as YAML. The keys keep their order."""
    import yaml  # only an export loads it

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None if _PLAIN.fullmatch(value) else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    dumper: Any = type("Dumper", (yaml.SafeDumper,), {})
    dumper.add_representer(str, text)
    # Without these copies, YAML would write an alias for an object that is used twice.
    apart = [json.loads(json.dumps(one)) for one in documents]
    lines = {"sort_keys": False, "allow_unicode": True, "width": 10**6}
    return str(yaml.dump_all(apart, None, dumper, explicit_start=len(apart) > 1, **lines))


def variable_of(secret: Secret) -> str:
    """Return the variable of the user's shell that has a secret; for a secret in a file, the name of the secret."""
    kind, _, name = secret.source.partition(":")
    return name if kind == "env" else secret.name


def from_shell(secret: Secret) -> str:
    """Return a text for `needs` about a secret that the engine reads from the user's shell."""
    kind, _, path = secret.source.partition(":")
    name = variable_of(secret)
    return f"the secret {name} in the environment" + ("" if kind == "env" else f': export {name}="$(cat {path})"')
