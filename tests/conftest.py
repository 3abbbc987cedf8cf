"""What many tests share: fake Slurm commands, a tiny locked project, hpcenv as a process.

Nothing of hpcenv is patched anywhere in these tests: fakes are executables on PATH.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fork_server
import pytest
import tomlkit
from crashed_worker import pytest_xdist_make_scheduler
from error_text import unwrapped
from failed_runs import describe_runs
from hypothesis import settings
from left_out import pytest_collection_modifyitems, pytest_configure

from hpcenv.errors import NotAccepted
from hpcenv.project import acceptance
from hpcenv.project.workspace import open_workspace

# Who starts the tests in the background of a script leaves this signal ignored, and programs under test inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Each push runs all of it; `python -m tests.fuzz.run` is there for the long search.
settings.register_profile("suite", max_examples=50, deadline=None)
settings.load_profile("suite")

# Hooks of pytest: they are found here by their names.
__all__ = ["pytest_collection_modifyitems", "pytest_configure", "pytest_xdist_make_scheduler"]

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
FAKES = TESTS / "fakes" / "bin"
RECORDED = TESTS / "fakes" / "outputs"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the runs of a failed test to what is printed of it."""
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and report.when == "call" and isinstance(folder, Path):
        report.sections.extend(describe_runs(folder))
    return report


def state_home(folder: Path) -> Path:
    """Return XDG_STATE_HOME for commands in a folder: beside it, because a run copies the files of its project."""
    return folder.parent / "state"


def accept(project: Path, environ: Mapping[str, str] | None = None) -> None:
    """Accept what a project asks of this machine, as its user does once."""
    environ = {"XDG_STATE_HOME": str(state_home(project))} if environ is None else environ
    acceptance.keep(acceptance.asked_by(open_workspace(project)), project, environ)


@dataclass(frozen=True)
class Call:
    """One call of a fake command."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    script: str = ""


class FakeSlurm:
    """Slurm's commands as executables that say what a test wants and remember how they were called."""

    def __init__(self, folder: Path, *, tools: Path = FAKES) -> None:
        folder.mkdir()
        self.folder = folder
        kept = {"HOME": os.environ["HOME"]} if "HOME" in os.environ else {}
        self.environ = {**kept, "LANG": "C.UTF-8", "PATH": f"{tools}:/usr/bin:/bin", "FAKE_SLURM": str(folder)}
        self.environ["XDG_STATE_HOME"] = str(state_home(folder))

    def answers(self, tool: str, out: str = "", *, err: str = "", status: int = 0) -> None:
        for suffix, text in (("out", out), ("err", err), ("status", str(status))):
            (self.folder / f"{tool}.{suffix}").write_text(text)

    def replays(self, tool: str, name: str, version: str = "24.11") -> None:
        """Answer what the real command said."""
        for suffix in ("out", "err", "status"):
            shutil.copyfile(RECORDED / version / f"{name}.{suffix}", self.folder / f"{tool}.{suffix}")

    def hangs(self, tool: str) -> None:
        (self.folder / f"{tool}.sleep").write_text("60")

    def calls(self, tool: str) -> list[Call]:
        found = []
        for path in sorted(self.folder.glob(f"{tool}.*.argv")):
            *words, end = path.read_bytes().split(b"\0")[:-1] or [b""]
            if end != b"\n":
                continue  # it is being written
            pairs = (item.partition(b"=") for item in path.with_suffix(".env").read_bytes().split(b"\0")[:-1])
            script = path.with_suffix(".script")
            found.append(
                Call(
                    argv=tuple(os.fsdecode(word) for word in words),
                    env={os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs},
                    script=script.read_text() if script.exists() else "",
                )
            )
        return found


@pytest.fixture
def fake_slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "fake-slurm")


@dataclass(frozen=True)
class Done:
    status: int
    stdout: str
    stderr: str

    @property
    def envelope(self) -> dict[str, Any]:
        return json.loads(self.stdout)


def hpcenv(
    *words: str | bytes,
    cwd: Path,
    environ: Mapping[str, str] | None = None,
    timeout: float = 60,
    accepts: bool = True,
) -> Done:
    """Run hpcenv as a user does, without Slurm unless `environ` has it.

    Args:
        accepts: the user reads what the project asks, and types the command again with `--accept`.
    """
    plain = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "LANG": "C.UTF-8"}
    environ = plain if environ is None else {"LANG": "C.UTF-8", **environ}
    environ = {"XDG_STATE_HOME": str(state_home(cwd)), **environ}
    done = _run(words, cwd, environ, timeout)
    if done.status != NotAccepted.exit_status or not accepts:
        return done
    digest = re.search("--accept ([0-9a-f]{32})", done.stdout + done.stderr)
    assert digest, done
    place = 2 if words[0] in ("data", "image", "kernel", "session") else 1
    return _run((*words[:place], "--accept", digest[1], *words[place:]), cwd, environ, timeout)


def _run(words: Sequence[str | bytes], cwd: Path, environ: Mapping[str, str], timeout: float) -> Done:
    done = fork_server.run(words, cwd=cwd, environ=environ, timeout=timeout)
    return Done(done.returncode, os.fsdecode(done.stdout), unwrapped(os.fsdecode(done.stderr)))


@pytest.fixture(name="hpcenv")
def hpcenv_fixture() -> Any:
    return hpcenv


# Enough of torch to be locked and to "train": the probe reads version.py without importing
# it, and incontainer/agent.py calls torchrun's `main` and catches what that raises.
TORCH = {
    "torch/__init__.py": "",
    "torch/version.py": "__version__ = '2.13.0+cpu'\ncuda = None\nhip = None\ngit_version = 'cf30153c'\n",
    "torch/distributed/__init__.py": "",
    "torch/distributed/run.py": (
        "import os, subprocess, sys\n"
        "from torch.distributed.elastic.multiprocessing.errors import ChildFailedError\n"
        "def main(args):\n"
        "    end = args.index('--')\n"
        "    script = ['-m'] * ('--module' in args[:end]) + args[end + 1:]\n"
        "    rank = {'RANK': '0', 'LOCAL_RANK': '0', 'GROUP_RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_WORLD_SIZE': '1'}\n"
        "    child = subprocess.Popen([sys.executable, *script], env={**os.environ, **rank})\n"
        "    if child.wait() != 0:\n"
        "        raise ChildFailedError(child)\n"
    ),
    "torch/distributed/elastic/multiprocessing/errors.py": (
        "import types\n"
        "class ChildFailedError(Exception):\n"
        "    def __init__(self, child):\n"
        "        failure = dict(local_rank=0, pid=child.pid, exitcode=child.returncode, error_file='<N/A>', timestamp=1)\n"
        "        self.failures = {0: types.SimpleNamespace(**failure)}\n"
    ),
    "torch-2.13.0+cpu.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n",
}


def make_python(folder: Path, files: Mapping[str, str]) -> Path:
    """Make a virtual environment that has `files` installed; return its interpreter."""
    import venv

    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    rows = [f"{name},sha256={_record_digest(text)},{len(text)}\n" for name, text in files.items()]
    for info in site.glob("*.dist-info"):
        (info / "RECORD").write_text("".join(rows))
    return folder / "bin" / "python"


def _record_digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


@pytest.fixture(scope="session")
def python_with_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_python(tmp_path_factory.mktemp("with-torch") / "venv", TORCH)


@pytest.fixture(scope="session")
def python_without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_python(tmp_path_factory.mktemp("without-torch") / "venv", {})


@pytest.fixture(scope="session")
def locked_once(tmp_path_factory: pytest.TempPathFactory, python_with_torch: Path) -> Path:
    folder = tmp_path_factory.mktemp("locked") / "project"
    folder.mkdir()
    (folder / "hpcenv.toml").write_text(f'image = "host"\npython = "{python_with_torch}"\n')
    (folder / "train.py").write_text("import sys\nprint('TRAINS', ascii(sys.argv[1:]), flush=True)\n")
    done = hpcenv("lock", cwd=folder)
    assert done.status == 0, done.stderr
    return folder


@pytest.fixture
def project(locked_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of `image = "host"` with a fresh lockfile and a train.py."""
    folder = tmp_path / "project"
    shutil.copytree(locked_once, folder)
    accept(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(state_home(folder)))
    return folder


@pytest.fixture
def plugin_path(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with the entry points of pyproject.toml.

    An editable installation may be older than the entry point for submitit.
    """
    table = tomlkit.parse((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["submitit"]
    folder = tmp_path / "plugin" / "hpcenv_plugin-0.dist-info"
    folder.mkdir(parents=True)
    lines = [f"{name} = {value}" for name, value in table.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[submitit]", *lines, ""]))
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: hpcenv-plugin\nVersion: 0\n")
    return folder.parent


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the corpus' score and what spoils it; both travel with the reports, also from workers.

    It stands here because the process that prints does not read the conftest.py of folders that
    only its workers collect.
    """
    scores: dict[str, dict[str, str]] = {"mutation": {}, "harmless": {}, "skipped": {}}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for key, value in getattr(report, "user_properties", ()):
                if key.startswith("corpus-"):
                    name, said = value
                    scores[key.removeprefix("corpus-")][name] = said
    if not scores["mutation"] and not scores["harmless"]:
        return
    missed = {name: said for name, said in scores["mutation"].items() if said}
    alarms = {name: said for name, said in scores["harmless"].items() if said}
    terminalreporter.section("corpus")
    for title, found in (("not caught", missed), ("false alarm", alarms), ("NOT TESTED", scores["skipped"])):
        for name, said in sorted(found.items()):
            terminalreporter.write_line(f"{title}: {name}: {said}")
    total, harmless = len(scores["mutation"]), len(scores["harmless"])
    terminalreporter.write_line(
        f"mutations caught {total - len(missed)}/{total}, false alarms {len(alarms)}/{harmless}"
    )
