"""One printed example of every error, as recorded in tests/golden/errors: a change of a text shows in review.

HPCENV_UPDATE_GOLDEN=1 pytest tests/unit/cli/test_error_pages.py writes the pages anew.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcenv import errors, process
from hpcenv.cli import _errors
from hpcenv.container import secret
from hpcenv.errors import HpcenvError
from hpcenv.hub import tree
from hpcenv.image.convert import layer_index
from hpcenv.launch import launch
from hpcenv.machine.this_node import ThisNode
from hpcenv.project.hub_reference import parse_locked
from hpcenv.records.manifest import Secret
from hpcenv.runs.find import find_all
from hpcenv.runs.status import read_statuses
from hpcenv.runs.wait import NoStart
from hpcenv.submission import function
from tests import run_folders
from tests.error_text import unwrapped, wrapped

PAGES = Path(__file__).resolve().parents[2] / "golden" / "errors"
SETUP = Path(errors.__file__).parent / "steps" / "setup.sh"
UPDATE = "HPCENV_UPDATE_GOLDEN=1 pytest tests/unit/cli/test_error_pages.py"


def kinds() -> dict[str, type[HpcenvError]]:
    found = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, HpcenvError)]
    return {kind.code: kind for kind in found}


# Only their exit statuses are used: the commands print a table or a last line instead of an error.
WITHOUT_TEXT = {"nodes-disagree", "run-end-unknown", "verify-warned"}


class Scene:
    """A project of `image = "host"` with a lockfile, and commands that run in it."""

    def __init__(self, project: Path, run: Any, pythons: dict[str, Path], slurm: Any) -> None:
        self.project, self._run, self.pythons, self.slurm = project, run, pythons, slurm

    def write(self, name: str, text: str) -> None:
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def spec(self, text: str) -> None:
        python = self.pythons["with torch"]
        self.write("hpcenv.toml", f'image = "host"\npython = "{python}"\n{text}')

    def typed(self, *argv: str, environ: dict[str, str] | None = None, accepts: bool = True) -> str:
        """Return what a command that fails prints to standard error."""
        done = self._run(*argv, cwd=self.project, environ=environ, accepts=accepts)
        assert done.status != 0, done.stdout
        return done.stderr[done.stderr.index("error[") :]

    def in_slurm(self, *answer: str, **options: Any) -> str:
        shared(self)
        self.slurm.answers(*answer, **options)
        return self.typed("submit", "train.py", "--nproc", "1", "--time", "5", environ=self.slurm.environ)


def shown(error: BaseException) -> str:
    """Return what the command line prints for an error."""
    return unwrapped(_errors.text(_errors.from_exception(error))) + "\n"


def raised(call: Callable[[], object]) -> str:
    with pytest.raises(BaseException) as caught:
        call()
    return shown(caught.value)


def never_starts(scene: Scene) -> str:
    run_folders.make_run(scene.project / "runs", "a", "7")
    scene.slurm.answers("squeue", "7|PENDING|QOSMaxWallDurationPerJobLimit||0:00\n")
    scene.slurm.answers("squeue---format=%P|%Q|%S|%u|%V", "batch|5|N/A|alice|2026-11-27T03:36:41\n")
    (run,), no_start = find_all(scene.project, ("a",), runs="runs"), NoStart(scene.slurm.environ)
    (status,) = read_statuses([run], scene.slurm.environ)
    assert no_start.see(run, status, 0.0) is None, "Slurm gives such a reason for a moment, too"
    error = no_start.see(run, status, 30.0)
    assert error is not None
    return shown(error)


def waiting(scene: Scene) -> str:
    scene.write("train.py", "import time\ntime.sleep(60)\n")
    started = scene._run("submit", "train.py", "--nproc", "1", "--cluster", "local", "--name", "a", cwd=scene.project)
    assert started.status == 0, started.stderr
    try:
        return scene.typed("wait", "a", "--timeout", "1s")
    finally:
        scene._run("cancel", "a", cwd=scene.project)


def ended(scene: Scene) -> str:
    done = scene._run(
        "submit", "train.py", "--nproc", "1", "--cluster", "local", "--name", "a", "--wait", cwd=scene.project
    )
    assert done.status == 0, done.stderr
    return scene.typed("attach", "a", "--", "true")


def missing_result(scene: Scene) -> str:
    scene.write("result.pkl", "not a pickle")
    return raised(lambda: function.read_result(scene.project / "result.pkl"))


def shared(scene: Scene) -> Scene:
    scene.spec("[submit]\nassume-shared = true\n")
    return scene


def stale(scene: Scene) -> str:
    scene.spec('platform = "linux/arm64"\n')
    return scene.typed("submit", "train.py", "--nproc", "1", "--cluster", "local")


def with_spec(scene: Scene, text: str, *argv: str) -> str:
    scene.write("hpcenv.toml", text)
    return scene.typed(*argv)


def two_without_metrics(scene: Scene) -> str:
    for name in ("table-1", "again"):
        run_folders.make_run(scene.project / "runs", name)
    return scene.typed("compare", "table-1", "again")


def failing_setup() -> str:
    """Return what the shell of a batch script prints when a line of `setup` fails."""
    job = "end() { exit $1; }; stop_if_asked() { :; }; run=/r python=p; set -u; . \"$0\" true 'false # x'"
    environ = {"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "n1"}
    done = subprocess.run(["bash", "-c", job, SETUP], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == errors.SetupFailed.exit_status, done
    return unwrapped(done.stderr)


def no_bundle(scene: Scene) -> str:
    (scene.project / "paper.hpcenv.zip").write_text("<html>404 Not Found</html>")
    return scene.typed("bundle", "verify", "paper.hpcenv.zip")


def not_accepted(scene: Scene) -> str:
    asks = '[[bind]]\nsource = "/scratch"\ntarget = "/data"\n[secrets]\nHF_TOKEN = "file:~/token"\n'
    scene.spec(asks)
    return scene.typed("submit", "train.py", "--nproc", "1", "--", "--lr", "0.1", accepts=False)


def with_file(scene: Scene, name: str, text: str, *argv: str) -> str:
    scene.write(name, text)
    return scene.typed(*argv)


LOCAL = ("--nproc", "1", "--cluster", "local")
LOCK = "lockfiles/default.lock.toml"
NODE = ThisNode(node="n1", nodes=("n1", "n2"), attempt=0, job_id="7")

EXAMPLES: dict[str, Callable[[Scene], str]] = {
    "internal": lambda _: shown(ValueError("an example")),
    "usage": lambda s: s.typed("submit", "train.py", "--nodez", "2"),
    "spec-invalid": lambda s: with_spec(s, 'image = "host"\nimages = 1\n[submit]\nnodes = 0\nmem = 1\n', "lock"),
    "lockfile-missing": lambda s: s.typed("submit", "train.py", *LOCAL, "--lock", "paper"),
    "lockfile-invalid": lambda s: with_file(s, LOCK, "schema = 1\nkind = 3\n", "submit", "train.py", *LOCAL),
    "lockfile-newer": lambda s: with_file(
        s, LOCK, 'schema = 9\ngenerated-by = "hpcenv 9.0"\n', "submit", "train.py", *LOCAL
    ),
    "lockfile-stale": stale,
    "tool-missing": lambda s: shared(s).typed("submit", "train.py", "--nproc", "1", "--cluster", "slurm"),
    "tool-failed": lambda _: raised(lambda: process.run(["sh", "-c", "echo no such account >&2; exit 3"], timeout=60)),
    "image-unavailable": lambda s: s.typed("image", "inspect", "docker://h:1/n:1", "--path", "--store", "my store"),
    "image-mismatch": lambda _: raised(lambda: layer_index.exceeded("entries", 100, "a layer has 101 entries")),
    "environment-unreadable": lambda s: with_spec(
        s, f'image = "host"\npython = "{s.pythons["without torch"]}"\n', "lock"
    ),
    "script-unusable": lambda s: s.typed("submit", "trian.py", *LOCAL),
    "submit-rejected": lambda s: s.in_slurm(
        "sbatch",
        err="sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n",
        status=1,
    ),
    "run-folder-not-shared": lambda s: s.typed(
        "submit", "train.py", "--nproc", "1", "--time", "5", "--name", "a", environ=s.slurm.environ
    ),
    "submit-uncertain": lambda s: s.in_slurm("sbatch", "queued, I think\n"),
    "run-not-found": lambda s: s.typed("status", "paper"),
    "would-overwrite": lambda s: s.typed("init"),
    "record-invalid": lambda s: with_file(s, "runs/a/submission.json", "{", "status", "a"),
    "file-unusable": lambda s: s.typed("export", "requirements", "-o", "/proc/x/requirements.txt"),
    "data-unavailable": lambda _: raised(
        lambda: tree.require_unchanged(tree.locate(Path("/store"), parse_locked(f"lab/tiny@{'0' * 40}"), ()), "list")
    ),
    "hashes-unproved": lambda s: s.typed("lock", "--require-hashes", "--no-wheels"),
    "pins-differ": lambda s: with_file(s, "requirements.txt", "torch==1.0\n", "lock", "--from", "requirements.txt"),
    "lint-failed": lambda s: with_file(
        s, "Dockerfile", "FROM ubuntu:latest\nENV NVIDIA_VISIBLE_DEVICES=none\n", "image", "lint", "Dockerfile"
    ),
    "run-not-running": ended,
    "job-failed": missing_result,
    "wait-timeout": waiting,
    "cannot-start": never_starts,
    "node-rejected": lambda _: shown(launch._sif_changed(NODE, "/images/a.sif")),
    "nodes-unknown": lambda _: raised(
        lambda: secret.read_all(
            (Secret(name="TOKEN", source="file:/nonexistent/token", origin="--secret"),), {}, node="n1"
        )
    ),
    "not-accepted": not_accepted,
    "not-comparable": two_without_metrics,
    "bundle-invalid": no_bundle,
    "setup-failed": lambda _: failing_setup(),
    "interrupted": lambda _: shown(KeyboardInterrupt()),
}


@pytest.fixture
def scene(project: Path, hpcenv: Any, python_with_torch: Path, python_without_torch: Path, fake_slurm: Any) -> Scene:
    return Scene(project, hpcenv, {"with torch": python_with_torch, "without torch": python_without_torch}, fake_slurm)


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_error_is_as_recorded(code: str, scene: Scene) -> None:
    page, text = PAGES / f"{code}.txt", EXAMPLES[code](scene)
    assert text.startswith(f"error[{code}]: ")
    for place, name in places(scene).items():
        text = text.replace(place, name)
    text = re.sub(r"\b[0-9a-f]{12,64}\b", "0123456789ab", text)
    text = wrapped(text)
    if os.environ.get("HPCENV_UPDATE_GOLDEN"):
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)
    assert text == page.read_text(), UPDATE


def places(scene: Scene) -> dict[str, str]:
    """Return what differs from machine to machine, and what stands for it on a page."""
    pythons = {str(path.parents[1]): f"/envs/{name.replace(' ', '-')}" for name, path in scene.pythons.items()}
    return {str(scene.project): "/home/alice/project", **pythons, str(scene.slurm.folder): "/slurm"}


def test_an_error_fits_the_terminal_and_what_is_copied_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    command = errors.Command("hpcenv", "submit", "--accept", "0" * 32, "train.py", "--", "--lr", "0.1", "--x", "1")
    path = f"/{'long/' * 20}a.toml"
    rows = f"{'word ' * 30}\nanother row"
    error = errors.FileUnusable(f"cannot use `{path}`", why=rows, hint=("read it, then: ", command))
    for width in (50, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = _errors.text(error).splitlines()
        assert [line.strip() for line in lines if len(line) > width] == [f"`{path}`", f"`{command}`"]
        assert "       another row" in lines
    assert _errors.text(error.changed(hint=command)).endswith(f"\nhint: {command}")
    hostile = _errors.text(error.changed(hint=errors.Command("hpcenv", "status", "a\x1b[2J")))
    assert hostile.endswith("\nhint: hpcenv status 'a\\x1b[2J'")
    one_line = f"error[file-unusable]: cannot use `{path}`\n  why: {'word ' * 29}word\n       another row"
    assert unwrapped(_errors.text(error)) == f"{one_line}\n\nhint: read it, then: `{command}`"


def test_every_error_has_a_page_and_no_page_is_left_over() -> None:
    assert set(EXAMPLES) | WITHOUT_TEXT == set(kinds())
    assert {page.stem for page in PAGES.glob("*")} == set(EXAMPLES), UPDATE


@pytest.mark.parametrize("code", sorted(WITHOUT_TEXT))
def test_what_has_no_page_is_never_printed(code: str) -> None:
    package = Path(errors.__file__).parent
    name = kinds()[code].__name__
    assert [
        path
        for path in package.rglob("*.py")
        if re.search(rf"\b{name}\(", path.read_text().replace(f"class {name}(", ""))
    ] == []
