"""`hpcenv lock --from` accepts what uv's own check accepts: the same projects, installed by uv, and then changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hpcenv.locking.pins import uv_export

SPEC = 'image = "host"\npython = ".venv/bin/python"\n[policy]\n"torch.version" = "info"\n'
# name, version, what it requires
WHEELS = (
    ("aa", "1.0", ()),
    ("aa", "2.0", ()),
    ("bb", "1.0", ()),
    ("cc", "1.0", ("bb", 'dd; sys_platform == "win32"')),
    ("dd", "1.0", ()),
    ("ee", "1.0", ('aa>=1; extra == "more"',)),
    ("build-me", "1.0", ()),
)
# A build backend without requirements: nothing is fetched to build a project.
BACKEND = """
import zipfile
from pathlib import Path
NAME, VERSION = {name!r}, {version!r}
def _write(folder, editable):
    file = f"{{NAME}}-{{VERSION}}-py3-none-any.whl"
    info = f"{{NAME}}-{{VERSION}}.dist-info/"
    with zipfile.ZipFile(Path(folder, file), "w") as wheel:
        if editable:
            wheel.writestr(f"{{NAME}}.pth", str(Path.cwd()) + "\\n")
        wheel.writestr(info + "METADATA", f"Metadata-Version: 2.1\\nName: {{NAME}}\\nVersion: {{VERSION}}\\n" + REQUIRES)
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return file
REQUIRES = {requires!r}
def build_wheel(folder, config_settings=None, metadata_directory=None): return _write(folder, False)
def build_editable(folder, config_settings=None, metadata_directory=None): return _write(folder, True)
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A project: its pyproject.toml below the index, other projects in it, and what of it is installed."""

    text: str
    others: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    first: bool = False


def project(*requires: str, more: str = "", name: str = "trainer") -> str:
    return f'[project]\nname = "{name}"\nversion = "0.1"\nrequires-python = ">=3.10"\ndependencies = {list(requires)}\n{more}'


NO_PACKAGE = "[tool.uv]\npackage = false\n"
BUILD = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
EXTRAS = '[project.optional-dependencies]\ncpu = ["aa==1.0"]\ngpu = ["aa==2.0"]\n'
CONFLICT = "[tool.uv]\npackage = false\nconflicts = [[{ extra = 'cpu' }, { extra = 'gpu' }]]\n"
GROUPS = '[dependency-groups]\ndev = ["dd"]\ntest = ["bb", { include-group = "dev" }]\n'
CONFLICTING_GROUPS = (
    '[dependency-groups]\none = ["aa==1.0"]\ntwo = ["aa==2.0"]\n[tool.uv]\npackage = false\n'
    "conflicts = [[{ group = 'one' }, { group = 'two' }]]\n"
)
WORKSPACE = "[tool.uv.workspace]\nmembers = ['libs/*']\n"
EVAL = {"libs/eval": project("dd", name="evaluate", more=BUILD)}
LOCAL = "[tool.uv.sources]\nevaluate = { workspace = true }\n"
PATH_SOURCE = "[tool.uv.sources]\nevaluate = { path = 'libs/eval', editable = true }\n"

CASES = {
    "plain": Case(text=project("aa", "cc", more=NO_PACKAGE), first=True),
    "nothing": Case(text=project(more=NO_PACKAGE)),
    "exact": Case(text=project("aa==1.0", more=NO_PACKAGE)),
    "marker": Case(text=project("aa; sys_platform == 'win32'", "bb", more=NO_PACKAGE)),
    "python-marker": Case(text=project("aa; python_version < '3.9'", "dd; python_version >= '3.9'", more=NO_PACKAGE)),
    "extra-of-a-package": Case(text=project("ee[more]", more=NO_PACKAGE)),
    "no-extra-of-a-package": Case(text=project("ee", more=NO_PACKAGE)),
    "extra-unasked": Case(text=project("bb", more='[project.optional-dependencies]\ncpu = ["aa"]\n' + NO_PACKAGE)),
    "extra": Case(
        text=project("bb", more='[project.optional-dependencies]\ncpu = ["aa"]\n' + NO_PACKAGE),
        options=("--extra", "cpu"),
    ),
    "two-extras": Case(
        text=project("bb", more='[project.optional-dependencies]\none = ["aa"]\ntwo = ["dd"]\n' + NO_PACKAGE),
        options=("--extra", "one", "--extra", "two"),
    ),
    "conflict-cpu": Case(text=project("bb", more=EXTRAS + CONFLICT), options=("--extra", "cpu"), first=True),
    "conflict-gpu": Case(text=project("bb", more=EXTRAS + CONFLICT), options=("--extra", "gpu")),
    "conflict-none": Case(text=project("bb", more=EXTRAS + CONFLICT)),
    "default-group": Case(text=project("aa", more=GROUPS + NO_PACKAGE), first=True),
    "group": Case(text=project("aa", more=GROUPS + NO_PACKAGE), options=("--group", "test")),
    "no-default-group": Case(text=project("aa", more=GROUPS + "[tool.uv]\npackage = false\ndefault-groups = []\n")),
    "conflicting-group-one": Case(text=project("bb", more=CONFLICTING_GROUPS), options=("--group", "one")),
    "conflicting-group-two": Case(text=project("bb", more=CONFLICTING_GROUPS), options=("--group", "two")),
    "workspace": Case(text=project("aa", more=NO_PACKAGE + WORKSPACE), others=EVAL, first=True),
    "workspace-member-needed": Case(text=project("aa", "evaluate", more=NO_PACKAGE + WORKSPACE + LOCAL), others=EVAL),
    "workspace-package": Case(
        text=project("aa", more=NO_PACKAGE + WORKSPACE), others=EVAL, options=("--package", "evaluate")
    ),
    "editable-path": Case(text=project("aa", "evaluate", more=NO_PACKAGE + PATH_SOURCE), others=EVAL),
    "editable-path-behind-an-extra": Case(
        text=project("aa", more='[project.optional-dependencies]\ne = ["evaluate"]\n' + NO_PACKAGE + PATH_SOURCE),
        others=EVAL,
    ),
    "the-project-as-editable": Case(text=project("aa", more=BUILD), first=True),
    "constraint": Case(text=project("aa", more="[tool.uv]\npackage = false\nconstraint-dependencies = ['aa<2']\n")),
    "override": Case(text=project("cc", more="[tool.uv]\npackage = false\noverride-dependencies = ['bb==1.0']\n")),
    "direct-url": Case(
        text=project(
            "aa", "dd", more=NO_PACKAGE + "[tool.uv.sources]\ndd = { path = 'WHEELS/dd-1.0-py3-none-any.whl' }\n"
        )
    ),
    "two-indexes": Case(text=project("aa", "bb", more=NO_PACKAGE + "[tool.uv.sources]\nbb = { index = 'second' }\n")),
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small wheels: uv's index, and pip's."""
    folder = tmp_path_factory.mktemp("wheels")
    for name, version, requires in WHEELS:
        module = name.replace("-", "_")
        info = f"{module}-{version}.dist-info/"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: more\n"
        files = {
            f"{module}/__init__.py": f"version = {version!r}\n",
            info + "METADATA": metadata + "".join(f"Requires-Dist: {one}\n" for one in requires),
            info + "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
            for path, text in files.items():
                wheel.writestr(path, text)
            wheel.writestr(info + "RECORD", "".join(f"{path},,\n" for path in [*files, info + "RECORD"]))
    return folder


@dataclass(frozen=True)
class Made:
    """An installed project."""

    folder: Path
    environ: dict[str, str]
    options: tuple[str, ...]
    hpcenv: Any
    wheels: Path

    def uv(self, *words: str, good: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(["uv", *words], cwd=self.folder, env=self.environ, capture_output=True, text=True)
        assert not good or done.returncode == 0, done.stderr
        return done

    def says_uv(self, file: str) -> bool:
        if file == "uv.lock":
            return self.uv("sync", "--check", "--frozen", *self.options, good=False).returncode == 0
        words = (
            ("--require-hashes", "--no-index", "--find-links", str(self.wheels)) if file == "requirements.txt" else ()
        )
        done = self.uv("pip", "sync", "--dry-run", *words, file, good=False)
        return done.returncode == 0 and "Would make no changes" in done.stderr

    def says_hpcenv(self, file: str) -> tuple[bool, str]:
        options = self.options if file == "uv.lock" else ()
        done = self.hpcenv("lock", "--from", file, *options, "--no-wheels", cwd=self.folder, environ=self.environ)
        assert done.status in (0, 21), done.stderr
        return done.status == 0, done.stderr


@pytest.fixture
def make(tmp_path: Path, wheels: Path, hpcenv: Any) -> Callable[[Case], Made]:
    def make(case: Case) -> Made:
        folder = tmp_path / "project"
        index = f"[[tool.uv.index]]\nname = 'flat'\nurl = '{wheels}'\nformat = 'flat'\ndefault = true\n"
        index += f"[[tool.uv.index]]\nname = 'second'\nurl = '{wheels}'\nformat = 'flat'\nexplicit = true\n" * (
            "second" in case.text
        )
        for where, text in {".": case.text + index, **case.others}.items():
            (folder / where).mkdir(parents=True, exist_ok=True)
            (folder / where / "pyproject.toml").write_text(text.replace("WHEELS", str(wheels)))
            if BUILD in text:
                name = text.split('name = "')[1].split('"')[0]
                needs = text.split("dependencies = [")[1].split("]")[0].replace("'", "")
                requires = "".join(f"Requires-Dist: {one.strip()}\n" for one in needs.split(",") if one.strip())
                (folder / where / "backend.py").write_text(BACKEND.format(name=name, version="0.1", requires=requires))
        (folder / "hpcenv.toml").write_text(SPEC)
        keep = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "UV_CACHE_DIR": str(tmp_path / "cache")}
        made = Made(folder, {**keep, "UV_OFFLINE": "1"}, case.options, hpcenv, wheels)
        made.uv("venv", "--python", sys.executable)
        made.uv("lock")
        made.uv("sync", "--frozen", *case.options)
        return made

    return make


def params() -> list[Any]:
    return [pytest.param(case, id=name, marks=[pytest.mark.long] * (not case.first)) for name, case in CASES.items()]


@pytest.mark.parametrize("case", params())
def test_a_uv_lock_is_accepted_where_uv_would_change_nothing(case: Case, make: Callable[[Case], Made]) -> None:
    made = make(case)
    assert made.says_uv("uv.lock")
    accepted, why = made.says_hpcenv("uv.lock")
    assert accepted, why


@pytest.mark.parametrize("file", ["uv.lock", "pylock.toml", "requirements.txt"])
@pytest.mark.parametrize("change", ["other version", "missing", "added"])
def test_a_changed_environment_is_refused_as_uv_refuses_it(
    change: str, file: str, make: Callable[[Case], Made]
) -> None:
    made = make(CASES["plain"])
    links = ("--no-index", "--find-links", str(made.wheels))
    if file == "pylock.toml":
        made.uv("export", "--frozen", "--format", "pylock.toml", "-o", file)
    elif file == "requirements.txt":
        made.uv("pip", "compile", "pyproject.toml", "--generate-hashes", *links, "-o", file)
    assert made.says_uv(file), "before the change"
    assert made.says_hpcenv(file)[0], "before the change"
    if change == "other version":
        made.uv("pip", "install", *links, "aa==1.0")
    elif change == "missing":
        made.uv("pip", "uninstall", "bb")
    else:
        made.uv("pip", "install", *links, "build-me")
    assert not made.says_uv(file)
    accepted, why = made.says_hpcenv(file)
    assert not accepted
    assert {"other version": "aa", "missing": "bb", "added": "build-me"}[change] in why


def test_the_choice_that_was_installed_must_be_named(make: Callable[[Case], Made]) -> None:
    """An extra that is installed and not named is refused, as `uv sync --check` refuses it; the hint has the line."""
    made = make(CASES["conflict-cpu"])
    unnamed = replace(made, options=())
    assert not unnamed.says_uv("uv.lock")
    accepted, why = unnamed.says_hpcenv("uv.lock")
    assert not accepted and "uv sync --locked" in why


def test_an_extra_that_is_not_there_is_refused_with_the_words_of_uv(make: Callable[[Case], Made]) -> None:
    made = make(CASES["plain"])
    done = made.hpcenv("lock", "--from", "uv.lock", "--extra", "none", cwd=made.folder, environ=made.environ)
    assert done.status == 5 and "none" in done.stderr, done.stderr


def test_the_project_may_be_left_out(make: Callable[[Case], Made]) -> None:
    made = make(CASES["the-project-as-editable"])
    made.uv("pip", "uninstall", "trainer")
    assert made.says_hpcenv("uv.lock")[0]


def test_uv_export_starts_nothing_of_the_project(make: Callable[[Case], Made]) -> None:
    """uv reads its lock; it starts neither the build backend nor the Python of .venv."""
    made = make(CASES["the-project-as-editable"])
    (made.folder / "backend.py").write_text("open('ran', 'w')\n")
    shutil.rmtree(made.folder / ".venv")
    shutil.rmtree(made.environ["UV_CACHE_DIR"])
    bin_folder = made.folder / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "python").write_text(f"#!/bin/sh\ntouch {made.folder}/ran\n")
    (bin_folder / "python").chmod(0o755)
    assert "aa" in uv_export.export(made.folder / "uv.lock", ())
    assert not (made.folder / "ran").exists()
