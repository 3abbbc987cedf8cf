"""`hpcenv submit -m`: which file a module is, what is recorded of it, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from hpcenv.api.submit import plan_job as plan_job_in_python
from hpcenv.errors import HpcenvError
from hpcenv.project.context import Context
from hpcenv.project.workspace import open_workspace
from hpcenv.records.manifest import Environment
from hpcenv.submission import module_file
from hpcenv.submission.plan import Plan
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions, command_of, from_record, to_record
from hpcenv.submission.submit import submit
from hpcenv.submission.sweep_job import element_plan, plan_sweep
from tests.unit.submission.test_snapshot import GIT, git

TRAIN = (
    "import sys\nfrom . import helper\nprint('MODULE', __name__, __package__, helper.VALUE, sys.argv[1:], flush=True)\n"
)
COMMAND = ("hpcenv", "submit", "-m", "package.train", "--nproc", "1")


ONE_CPU = "requested on each node: 1 CPU (one for each rank)"


@pytest.fixture
def tree(project: Path) -> Path:
    """A project with a package; outside of git."""
    package = project / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("VALUE = 1\n")
    (package / "train.py").write_text(TRAIN)
    return project


@pytest.fixture
def context(tree: Path, fake_slurm: Any) -> Context:
    environ = {**fake_slurm.environ, **GIT}
    return Context(environ=environ, cwd=tree, now=time.localtime(0), token="beef", command=COMMAND)


@pytest.fixture
def plan(tree: Path, context: Context) -> Callable[..., Plan]:
    def make(script: str = "package.train", **words: Any) -> Plan:
        given = {"nproc": 1, "assume_shared": True, "name": "a", "module": True, **words}
        return plan_job(open_workspace(tree), SubmitOptions(script=script, **given), context)

    return make


def refused(make: Callable[[], object]) -> HpcenvError:
    with pytest.raises(HpcenvError) as caught:
        make()
    assert caught.value.code == "script-unusable", caught.value
    return caught.value


def test_the_file_of_the_module_is_recorded_and_copied(plan: Any, tree: Path, context: Context) -> None:
    planned = plan(args=("--lr", "1"))
    source = tree / "runs" / "a" / "source"
    assert (planned.manifest.module, planned.manifest.script) == ("package.train", str(source / "package" / "train.py"))
    assert planned.manifest.workdir == str(source)
    assert planned.manifest.script_sha256 == hashlib.sha256(TRAIN.encode()).hexdigest()
    submit(planned, context)
    assert (source / "package" / "helper.py").exists()
    lock = tomlkit.parse((tree / "runs" / "a" / "lock.toml").read_text()).unwrap()
    assert lock["code"]["script-sha256"] == planned.manifest.script_sha256
    assert lock["run"]["argv"] == ["-m", "package.train", "--lr", "1"]


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("package.train", "package/train.py"),
        ("package", "package/__main__.py"),
        ("package.deeper", "package/deeper/__main__.py"),
        ("without_init.train", "without_init/train.py"),
        ("both", "both/__main__.py"),
        ("train", "train.py"),
    ],
)
def test_python_and_hpcenv_start_the_same_file(tree: Path, module: str, file: str) -> None:
    for name in ("package/__main__.py", "package/deeper/__main__.py", "without_init/train.py", "both.py", "train.py"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("print(__file__)\n")
    (tree / "package" / "train.py").write_text("print(__file__)\n")
    for name in ("both/__init__.py", "package/deeper/__init__.py"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("")
    (tree / "both" / "__main__.py").write_text("print(__file__)\n")
    import subprocess
    import sys

    started = subprocess.run([sys.executable, "-m", module], cwd=tree, capture_output=True, text=True, check=True)
    assert started.stdout.strip() == str(tree / file)
    assert module_file.in_project(module, tree, COMMAND) == tree / file


def test_a_module_under_git_is_in_the_copy_of_its_work_tree(plan: Any, tree: Path, context: Context) -> None:
    (tree / ".gitignore").write_text("runs/\n")
    git(tree, "init", "-q")
    git(tree, "add", "-A", ":!package/train.py")
    git(tree, "commit", "-qm", "one")
    with pytest.raises(HpcenvError) as caught:
        plan()
    assert "not under git: package/train.py" in str(caught.value)
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "two")
    planned = plan()
    assert planned.manifest.source.commit == git(tree, "rev-parse", "HEAD")
    submit(planned, context)
    assert Path(planned.manifest.script).read_text() == TRAIN


def test_a_package_behind_a_link_is_where_python_finds_it(
    plan: Any, tree: Path, context: Context, tmp_path: Path
) -> None:
    shutil.move(tree / "package", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", tree / "package")
    planned = plan()
    submit(planned, context)
    assert planned.manifest.script == str(tree / "runs" / "a" / "source" / "package" / "train.py")
    assert Path(planned.manifest.script).read_text() == TRAIN


def test_a_module_runs_with_relative_imports_and_its_arguments(hpcenv: Any, tree: Path) -> None:
    words = ("submit", "-m", "package.train", "--nproc", "1", "--cluster", "local", "--name", "one", "--wait")
    done = hpcenv(*words, "--", "--lr", "-m", "--", "x", cwd=tree)
    assert done.status == 0, done.stderr
    assert "MODULE __main__ package 1 ['--lr', '-m', '--', 'x']" in done.stdout + done.stderr
    assert hpcenv("report", "one", cwd=tree).status == 0
    (tree / "package" / "train.py").write_text(TRAIN + "\n")
    again = hpcenv("rerun", "one", "--cluster", "local", cwd=tree)
    assert again.status == 2
    assert "the script was" in again.stderr
    (tree / "package" / "train.py").write_text(TRAIN)
    again = hpcenv("rerun", "one", "--cluster", "local", "--wait", cwd=tree)
    assert again.status == 0, again.stderr
    same = hpcenv("diff", "one", "one-2", cwd=tree)
    assert same.status == 0, same.stdout


def test_a_module_in_the_live_project(hpcenv: Any, tree: Path) -> None:
    words = ("submit", "-m", "package.train", "--nproc", "1", "--cluster", "local", "--workdir", "live", "--wait")
    done = hpcenv(*words, "--name", "live", "--", "x", cwd=tree)
    assert done.status == 0, done.stderr
    assert "MODULE __main__ package 1 ['x']" in done.stdout + done.stderr
    manifest = json.loads((tree / "runs" / "live" / "manifest.json").read_text())
    assert (manifest["script"], manifest["workdir"]) == (str(tree / "package" / "train.py"), str(tree))


def test_the_same_in_python(tree: Path) -> None:
    planned = plan_job_in_python("package.train", ["x"], project=tree, module=True, nproc=1, cluster="local")
    assert (planned.manifest.module, planned.manifest.args) == ("package.train", ("x",))
    assert planned.command[:3] == ("hpcenv", "submit", "package.train")
    assert "--module" in planned.command


def test_a_module_of_the_environment_has_no_file_and_the_verdict_says_so(hpcenv: Any, plan: Any, tree: Path) -> None:
    words = ("submit", "-m", "json.tool", "--nproc", "1", "--cluster", "local", "--name", "tool", "--wait")
    (tree / "in.json").write_text("[1]")
    done = hpcenv(*words, "--", "in.json", "out.json", cwd=tree)
    assert done.status == 0, done.stdout + done.stderr
    assert "note: not checked whether the environment has the module `json.tool`" in done.stderr
    run = tree / "runs" / "tool"
    assert json.loads((run / "source" / "out.json").read_text()) == [1]
    verdict = json.loads((run / "verdict.json").read_text())
    assert "script-sha256 not known: the project has no module json.tool, it is the environment's" in verdict["notes"]
    manifest = json.loads((run / "manifest.json").read_text())
    assert (manifest["script"], manifest["script_sha256"]) == ("", "")
    assert "script-sha256" not in tomlkit.parse((run / "lock.toml").read_text()).unwrap()["code"]
    assert plan("torch.distributed.run").notes == (ONE_CPU,)


@pytest.mark.parametrize("module", ["package.trian", "packge.train", "package.helper.train", "package"])
def test_a_module_that_exists_nowhere_is_refused(plan: Any, module: str) -> None:
    error = refused(lambda: plan(module))
    assert error.what == f"there is no module `{module}`"
    if module.startswith("pack") and module.count(".") == 1:
        assert str(error.hint) == "perhaps you meant `-m package.train`"


@pytest.mark.parametrize(
    "why_unknown",
    ["a SIF", "PYTHONPATH", "a .pth file", "code of a .pth file", "the system's packages", "no virtual environment"],
)
def test_where_the_environment_may_have_it_that_is_said(tmp_path: Path, tree: Path, why_unknown: str) -> None:
    site = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    system = "true" if why_unknown == "the system's packages" else "false"
    if why_unknown != "no virtual environment":
        (tmp_path / "venv" / "pyvenv.cfg").write_text(f"include-system-site-packages = {system}\n")
    if why_unknown == "a .pth file":
        (site / "editable.pth").write_text("/elsewhere\n")
    if why_unknown == "code of a .pth file":
        (site / "editable.pth").write_text("import finder; finder.install()\n")
    variables = {"PYTHONPATH": "/x"} if why_unknown == "PYTHONPATH" else {}
    environment = Environment(kind="host", python=str(tmp_path / "venv" / "bin" / "python"))
    if why_unknown == "a SIF":
        environment = replace(environment, kind="sif", sif="/x.sif", python="python3")
    notes = module_file.require_in_environment("elsewhere.train", tree, environment, variables)
    assert notes[0].startswith("not checked whether the environment has the module `elsewhere.train`")


def test_a_folder_of_a_pth_file_belongs_to_the_environment(tmp_path: Path, tree: Path) -> None:
    """An editable install names its folder there; a misspelt module was submitted, and failed on the node."""
    site, editable = tmp_path / "venv" / "lib" / "python3.11" / "site-packages", tmp_path / "mine" / "tools"
    site.mkdir(parents=True)
    editable.mkdir(parents=True)
    (tmp_path / "venv" / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    (site / "distutils-precedence.pth").write_text("import os; var = 'SETUPTOOLS_USE_DISTUTILS'\n")
    (site / "_editable_impl_mine.pth").write_text(f"# mine\n{tmp_path / 'mine'}\n")
    (editable / "train.py").write_text("")
    environment = Environment(kind="host", python=str(tmp_path / "venv" / "bin" / "python"))
    assert module_file.require_in_environment("tools.train", tree, environment, {}) == ()
    error = refused(lambda: module_file.require_in_environment("nosuchmod", tree, environment, {}))
    assert error.what == "there is no module `nosuchmod`"


def test_a_run_of_a_module_of_the_environment_is_not_called_verify(plan: Any) -> None:
    assert plan("torch.distributed.run", name=None).manifest.run.startswith("torch.distributed.run-")


def test_words_that_are_no_module_are_answered(plan: Any, tree: Path) -> None:
    def answer(word: str) -> HpcenvError:
        command = ("hpcenv", "submit", "-m", word, "--nproc", "1")
        return refused(lambda: module_file.in_project(word, tree, command))

    assert str(answer("package/train.py").hint) == "hpcenv submit -m package.train --nproc 1"
    assert str(answer("train.py").hint) == "hpcenv submit -m train --nproc 1"
    assert answer("package..train").what == "`package..train` is not the name of a module"
    assert str(refused(lambda: plan("package.train", module=False)).hint) == (
        "it is a module of the project: -m package.train"
    )


def test_a_module_with_a_syntax_error_is_refused(plan: Any, tree: Path) -> None:
    (tree / "package" / "train.py").write_text("def\n")
    assert "line 1" in str(refused(plan).why)


def test_record_and_command_line_keep_the_module() -> None:
    options = SubmitOptions(script="package.train", module=True, nproc=1, args=("x",))
    record = to_record(options)
    assert record is not None
    assert from_record(record) == options
    assert command_of(options) == ("hpcenv", "submit", "package.train", "--nproc", "1", "--module", "--", "x")


def test_each_element_of_a_sweep_has_its_own_file(tree: Path, context: Context) -> None:
    given = {"nproc": 1, "assume_shared": True, "name": "s", "module": True, "sweep": ("seed=0..1",)}
    sweep = plan_sweep(open_workspace(tree), SubmitOptions(script="package.train", **given), context)  # type: ignore[arg-type]
    element = element_plan(sweep, sweep.record.elements[1]).manifest
    assert (element.module, element.args) == ("package.train", ("--seed=1",))
    assert element.script == str(tree / "runs" / "s" / "0001" / "source" / "package" / "train.py")


def test_an_exported_folder_has_the_module(hpcenv: Any, tree: Path, fake_slurm: Any, tmp_path: Path) -> None:
    with open(tree / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write("[submit]\nassume-shared = true\n")
    words = ("submit", "-m", "package.train", "--nproc", "1", "--export", str(tmp_path / "out"))
    done = hpcenv(*words, cwd=tree, environ={**fake_slurm.environ, "HOME": str(tmp_path)})
    assert done.status == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["module"], manifest["script"]) == ("package.train", str(tmp_path / "out/source/package/train.py"))
    assert "A Slurm job: -m package.train on 1 node" in (tmp_path / "out" / "README.txt").read_text()
