"""`hpcenv lock --from` accepts what uv's own check accepts: small projects, installed by uv, pip and pip-tools.

The check of a uv.lock is `uv sync --check`, that of the other files `uv pip sync --dry-run`.
"""

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
    """A project.

    Attributes:
        text: its pyproject.toml without the index.
        others: the other projects in it.
        options: what of it is installed.
        first: whether the case is tested in the short run too.
        by: what locks and installs it, see LOCKED.
        wanted: the lines of requirements.in.
        words: more words for the command that locks.
    """

    text: str = ""
    others: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    first: bool = False
    by: str = "uv"
    wanted: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The file of pins."""
        return LOCKED[self.by][0]


PIP = (sys.executable, "-m", "pip")
INTO = ("--python", ".venv/bin/python", "install", "--no-index", "--find-links", "WHEELS")
UV_SYNC = ("uv", "pip", "sync", "--no-index", "--find-links", "WHEELS")
LINKS = ("--no-index", "--find-links", "WHEELS")
PIP_LOCK = (*PIP, "lock", *LINKS, "-o", "pylock.toml", "-r", "requirements.in", "WORDS")
PIP_COMPILE = ("pip-compile", "--generate-hashes", *LINKS, "-o", "requirements.txt", "requirements.in", "WORDS")
UV_EXPORT = ("uv", "export", "--frozen", "WORDS", "-o")
# What locks and installs a project: the file of pins, and the commands.
LOCKED = {
    "uv": ("uv.lock", ("uv", "lock"), ("uv", "sync", "--frozen", "WORDS")),
    "uv export": ("pylock.toml", ("uv", "lock"), (*UV_EXPORT, "pylock.toml"), (*UV_SYNC, "pylock.toml")),
    "uv export requirements": (
        "requirements.txt",
        ("uv", "lock"),
        (*UV_EXPORT, "requirements.txt"),
        (*UV_SYNC, "requirements.txt"),
    ),
    "pip": ("pylock.toml", PIP_LOCK, (*PIP, *INTO, "-r", "pylock.toml")),
    "pip, uv": ("pylock.toml", PIP_LOCK, (*UV_SYNC, "pylock.toml")),
    "pip-tools": ("requirements.txt", PIP_COMPILE, (*PIP, *INTO, "--require-hashes", "-r", "requirements.txt")),
    "pip-tools, uv": ("requirements.txt", PIP_COMPILE, (*UV_SYNC, "requirements.txt")),
}
# pip-tools is beside the tools for exported files: tests/packages/exports.in.
TOOLS = str(Path(os.environ.get("HPCENV_TEST_EXPORTS_PYTHON") or sys.executable).parent)


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
    "marker": Case(text=project("bb; sys_platform == 'win32'", "aa", more=NO_PACKAGE)),
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
    "requires-python": Case(text=project("aa", more=NO_PACKAGE).replace(">=3.10", ">=3.11,<4")),
    "exported": Case(text=project("aa", "cc", more=NO_PACKAGE), by="uv export", first=True),
    "exported-extra": Case(
        text=project("bb", more=EXTRAS + CONFLICT), options=("--extra", "gpu"), words=("--extra", "gpu"), by="uv export"
    ),
    "exported-requires-python": Case(
        text=project("aa", more=NO_PACKAGE).replace(">=3.10", ">=3.11,<4"), by="uv export"
    ),
    "exported-requirements": Case(
        text=project("aa", "dd; sys_platform == 'win32'", more=GROUPS + NO_PACKAGE),
        words=("--group", "test"),
        by="uv export requirements",
    ),
    "pip": Case(wanted=("aa", "cc"), by="pip", first=True),
    "pip-extra": Case(wanted=("ee[more]", "bb"), by="pip"),
    "pip-marker": Case(wanted=("aa", 'bb; sys_platform == "win32"', 'dd; sys_platform == "linux"'), by="pip"),
    "pip-group": Case(text=project("bb", more=GROUPS + BUILD), wanted=("aa",), words=("--group", "test"), by="pip"),
    "pip-constraint": Case(wanted=("aa<2", "cc"), by="pip"),
    "pip-editable": Case(text=project("aa", more=BUILD), wanted=("-e .",), by="pip, uv"),
    "pip-tools": Case(wanted=("aa", "cc"), by="pip-tools", first=True),
    "pip-tools-extra": Case(wanted=("ee[more]", "bb"), by="pip-tools"),
    "pip-tools-marker": Case(
        wanted=("aa", 'bb; sys_platform == "win32"', 'dd; sys_platform == "linux"'), by="pip-tools"
    ),
    "pip-tools-constraint": Case(wanted=("aa<2", "cc"), by="pip-tools"),
    "pip-tools-direct-url": Case(wanted=("aa", "dd @ file://WHEELS/dd-1.0-py3-none-any.whl"), by="pip-tools, uv"),
    "pip-tools-editable": Case(text=project("aa", more=BUILD), wanted=("-e .",), by="pip-tools, uv"),
    "pip-tools-two-indexes": Case(wanted=("aa", "bb"), words=("--find-links", "OTHERS"), by="pip-tools"),
}
# The kinds of projects that are changed.
CHANGED = (
    "plain",
    "workspace",
    "conflict-gpu",
    "extra",
    "group",
    "marker",
    "the-project-as-editable",
    "direct-url",
    "two-indexes",
    "requires-python",
    "exported",
    "exported-requirements",
    "pip",
    "pip-group",
    "pip-tools",
    "pip-tools-marker",
    "pip-tools-direct-url",
    "pip-tools-two-indexes",
)


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

    def start(self, *words: str, good: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(words, cwd=self.folder, env=self.environ, capture_output=True, text=True)
        assert not good or done.returncode == 0, done.stderr
        return done

    def uv(self, *words: str, good: bool = True) -> subprocess.CompletedProcess[str]:
        return self.start("uv", *words, good=good)

    def says_uv(self, file: str) -> bool:
        if file == "uv.lock":
            return self.uv("sync", "--check", *self.options, good=False).returncode == 0
        words = LINKS if file == "requirements.txt" else ()
        words = tuple(word.replace("WHEELS", str(self.wheels)) for word in words)
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
        if "pip-tools" in case.by and not Path(TOOLS, "pip-compile").exists():
            pytest.skip(
                "NOT RUN: pip-tools is not installed beside HPCENV_TEST_EXPORTS_PYTHON (tests/packages/exports.txt)"
            )
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
        shutil.copytree(wheels, tmp_path / "others")
        values = {"WHEELS": str(wheels), "OTHERS": str(tmp_path / "others")}
        (folder / "requirements.in").write_text(_filled("\n".join(case.wanted), values) + "\n")
        keep = {"PATH": f"{os.environ['PATH']}:{TOOLS}", "HOME": str(tmp_path), "UV_CACHE_DIR": str(tmp_path / "cache")}
        alone = {"UV_OFFLINE": "1", "PIP_CONFIG_FILE": os.devnull}
        made = Made(folder, {**keep, **alone}, case.options, hpcenv, wheels)
        made.uv("venv", "--python", sys.executable)
        for line in LOCKED[case.by][1:]:
            words = case.options + case.words if "uv" in line[:1] else case.words
            filled = (words if word == "WORDS" else (word,) for word in line)
            made.start(*(_filled(word, values) for some in filled for word in some))
        return made

    return make


def _filled(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def params() -> list[Any]:
    return [pytest.param(case, id=name, marks=[pytest.mark.long] * (not case.first)) for name, case in CASES.items()]


def test_there_are_forty_projects() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("case", params())
def test_a_file_of_pins_is_accepted_where_uv_would_change_nothing(case: Case, make: Callable[[Case], Made]) -> None:
    made = make(case)
    assert made.says_uv(case.file)
    accepted, why = made.says_hpcenv(case.file)
    assert accepted, why


@pytest.mark.parametrize("change", ["other version", "missing", "added"])
@pytest.mark.parametrize("kind", [pytest.param(one, marks=[pytest.mark.long] * (one != "plain")) for one in CHANGED])
def test_a_changed_environment_is_refused_as_uv_refuses_it(
    kind: str, change: str, make: Callable[[Case], Made]
) -> None:
    made, file = make(CASES[kind]), CASES[kind].file
    assert made.says_hpcenv(file)[0], "before the change"
    links = ("--no-index", "--find-links", str(made.wheels))
    if change == "other version":
        older = (made.folder / ".venv").glob("lib/*/site-packages/aa-2.0.dist-info")
        made.uv("pip", "install", *links, "aa==1.0" if any(older) else "aa==2.0")
    elif change == "missing":
        made.uv("pip", "uninstall", "aa")
    else:
        made.uv("pip", "install", *links, "build-me")
    assert not made.says_uv(file)
    accepted, why = made.says_hpcenv(file)
    assert not accepted
    assert ("build-me" if change == "added" else "aa") in why
    # The hint has a command that removes the difference.
    if file == "uv.lock":
        made.uv("sync", "--locked", *made.options)
    elif change == "added":
        assert "pip uninstall build-me" in why and "pip install" not in why
        made.uv("pip", "uninstall", "build-me")
    else:
        assert "pip uninstall" not in why
        made.start(*PIP, *INTO[:3], *links, "-r", file)
    assert made.says_hpcenv(file)[0]


def test_a_uv_lock_that_is_older_than_the_project_is_refused(make: Callable[[Case], Made]) -> None:
    made = make(CASES["plain"])
    pyproject = made.folder / "pyproject.toml"
    pyproject.write_text("# A remark changes nothing.\n" + pyproject.read_text())
    assert made.says_uv("uv.lock") and made.says_hpcenv("uv.lock")[0]
    pyproject.write_text(pyproject.read_text().replace("'aa', 'cc'", "'aa', 'cc', 'dd'"))
    assert not made.says_uv("uv.lock")
    done = made.hpcenv("lock", "--from", "uv.lock", "--no-wheels", cwd=made.folder, environ=made.environ)
    assert done.status == 5 and "older than pyproject.toml" in done.stderr and "`uv lock`" in done.stderr, done.stderr


def test_what_uv_cannot_tell_without_the_projects_code_is_said(make: Callable[[Case], Made]) -> None:
    """Only the project's own code knows its requirements, and hpcenv does not let uv start it."""
    text = project("aa", more=BUILD).replace(
        "dependencies = ['aa']", "dynamic = ['dependencies']\n#dependencies = ['aa']"
    )
    made = make(Case(text=text))
    (made.folder / "backend.py").write_text("open('ran', 'w')\n")
    accepted, said = made.says_hpcenv("uv.lock")
    assert accepted, said
    assert "it is not known whether uv.lock is older" in said and "build of trainer" in said
    assert "uv lock --check" in said
    assert not (made.folder / "ran").exists()


def test_what_uv_cannot_tell_without_an_index_is_said(make: Callable[[Case], Made]) -> None:
    made = make(CASES["exact"])
    pyproject = made.folder / "pyproject.toml"
    empty = made.folder / "empty"
    empty.mkdir()
    pyproject.write_text(pyproject.read_text().replace("aa==1.0", "aa<1.5").replace(str(made.wheels), str(empty)))
    accepted, said = made.says_hpcenv("uv.lock")
    assert accepted, said
    assert "uv could not tell without an index" in said and "uv lock --check" in said


def test_the_choice_that_was_installed_must_be_named(make: Callable[[Case], Made]) -> None:
    """An extra that is installed and not named is refused, as `uv sync --check` refuses it; the hint has the line."""
    made = make(CASES["conflict-cpu"])
    unnamed = replace(made, options=())
    assert not unnamed.says_uv("uv.lock")
    accepted, why = unnamed.says_hpcenv("uv.lock")
    assert not accepted and "uv sync --locked" in why and "--extra NAME" in why


def test_an_extra_that_is_not_there_is_refused_with_the_words_of_uv(make: Callable[[Case], Made]) -> None:
    made = make(CASES["plain"])
    done = made.hpcenv("lock", "--from", "uv.lock", "--extra", "none", cwd=made.folder, environ=made.environ)
    assert done.status == 5 and "none" in done.stderr and "`uv lock`" in done.stderr, done.stderr


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
    text, notes = uv_export.export(made.folder / "uv.lock", ())
    assert "aa" in text and not notes
    assert not (made.folder / "ran").exists()
