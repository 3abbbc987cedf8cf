"""What pip installs in the testbed has the versions and hashes of tests/packages (scripts/lock-test-packages).

pip gets the versions as constraints, and the hashes of what it brings are compared afterwards: with its own option
`--require-hashes` pip wants a hash of torch too, whose build depends on the index.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import TestbedError
from .instance import Instance

# What is brought without a locked version: hpcenv itself; torch, and what its builds for GPUs need.
_FREE = re.compile(r"hpcenv|torch|triton|nvidia-.*|cuda-.*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Locked:
    """Some locked files, read.

    Attributes:
        versions: of each package; `name` as the files write it.
        hashes: SHA-256 of all files that are right.
    """

    versions: dict[str, str]
    hashes: frozenset[str]

    @property
    def key(self) -> str:
        """For a recipe: another lock gives other text."""
        text = "\n".join(
            [*sorted(f"{name}=={version}" for name, version in self.versions.items()), *sorted(self.hashes)]
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def write_constraints(self, path: Path) -> None:
        """The versions, for pip's option `--constraint`."""
        path.write_text("".join(f"{name}=={version}\n" for name, version in self.versions.items()))

    def check(self, files: Iterable[Path]) -> None:
        """Compare what pip brought, and refuse what has another hash or no locked version."""
        for path in files:
            name = re.sub(r"[-_.]+", "-", path.name.split("-")[0]).lower()
            if _FREE.fullmatch(name):
                continue
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest not in self.hashes:
                raise TestbedError(
                    f"pip brought {path.name}, which is not in tests/packages",
                    why=f"its SHA-256 is {digest}; {name} is locked as {self.versions.get(name, 'nothing')}",
                    hint="scripts/lock-test-packages, if requirements changed; else look at the package index",
                )


def read(instance: Instance, *names: str) -> Locked:
    """Read locked files of the checkout, or of the folder that `--newest` of scripts/test.sh made.

    Raises:
        TestbedError: there is no such file, for example for this Python.
    """
    versions: dict[str, str] = {}
    hashes: set[str] = set()
    for name in names:
        path = instance.packages / f"{name}.txt"
        if not path.is_file():
            raise TestbedError(
                f"no {path}",
                why="the testbed installs locked versions only",
                hint="add the Python to scripts/lock-test-packages and run it",
            )
        text = path.read_text()
        versions |= dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.M))
        hashes |= set(re.findall(r"--hash=sha256:([0-9a-f]{64})", text))
    return Locked(versions=versions, hashes=frozenset(hashes))
