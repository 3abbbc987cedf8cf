"""hpcenv from this checkout, with the machine's Python: what it needs, and how its command is started."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Without isolation of the user's own packages: they are the machine's, as torch is.
_COMMAND = (
    "import sys; sys.path[:0] = {paths!r}; sys.argv[0] = 'hpcenv'; from hpcenv.__main__ import main; sys.exit(main())"
)
_ASK = """
import json, sys
sys.path[:0] = {paths!r}
from importlib.metadata import PackageNotFoundError, version
def have(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return ''
try:
    import torch
    gpus, says, cuda = torch.cuda.device_count(), torch.__version__, torch.version.cuda or ''
except ImportError as error:
    gpus, says, cuda = 0, '', str(error)
print(json.dumps({{'have': {{n: have(n) for n in {names!r}}}, 'gpus': gpus, 'torch': says, 'cuda': cuda,
                   'python': sys.version.split()[0], 'machine': __import__('platform').machine()}}))
"""
_SECONDS_TO_ASK = 120
_SECONDS_TO_INSTALL = 120


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the machine's Python has.

    Attributes:
        python: that interpreter; `site`: folder of the packages that came from `--wheels`.
        torch: its version; empty without torch, `cuda` then says why.
        gpus: GPUs that torch sees.
        missing: packages of hpcenv that are not there.
    """

    python: str
    site: Path
    version: str
    architecture: str
    torch: str
    cuda: str
    gpus: int
    missing: tuple[str, ...]

    @property
    def hpcenv(self) -> list[str]:
        """Command line of hpcenv from this checkout."""
        return [self.python, "-c", _COMMAND.format(paths=[str(ROOT), str(self.site)])]


def look(python: str, site: Path) -> Machine:
    """Ask an interpreter for its torch, its GPUs, and hpcenv's packages.

    Raises:
        OSError, subprocess.SubprocessError, ValueError: it cannot be asked.
    """
    names = _needed()
    ask = _ASK.format(paths=[str(site)], names=names)
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=_SECONDS_TO_ASK, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    return Machine(
        python=python, site=site, version=said["python"], architecture=said["machine"], torch=said["torch"],
        cuda=said["cuda"], gpus=int(said["gpus"]), missing=tuple(name for name in names if not said["have"][name]),
    )  # fmt: skip


def install(machine: Machine, wheels: Path) -> str:
    """Install the missing packages from a folder of wheels; return what pip said if that failed, else nothing."""
    words = [machine.python, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels)]
    words += ["--target", str(machine.site), *machine.missing]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS_TO_INSTALL)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]


def _needed() -> list[str]:
    """Return the names of the packages in `dependencies` of pyproject.toml, without those of another machine."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = text[text.index("\ndependencies = [") : text.index("\n]", text.index("\ndependencies = ["))]
    lines = [line.strip() for line in block.splitlines()]
    return [match[1] for line in lines if (match := re.match(r'"([A-Za-z0-9_.-]+)[^;]*"', line))]
