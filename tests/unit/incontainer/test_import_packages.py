"""`verify --imports` inside the environment: each package is imported in a separate process, and a crash is a result."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from probe_world import Venv

from hpcenv.incontainer import import_packages

TEXT = Path(import_packages.__file__).read_text(encoding="utf-8")
# Name of a package -> its files, and the result: module, state, end of the error.
CASES: dict[str, tuple[dict[str, str], tuple[str, str, str]]] = {
    "fine": ({"fine/__init__.py": "", "fine/part.py": "import nowhere"}, ("fine", "imported", "")),
    "Two.Modules": ({"one.py": "", "two.py": "", "_hidden.py": "import nowhere"}, ("one two", "imported", "")),
    "second-fails": (
        {"good.py": "", "worse.py": "import sys\nprint('x', file=sys.stderr)\nimport nowhere_at_all"},
        ("worse", "failed", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ),
    "in-namespace": ({"shared/part/__init__.py": ""}, ("shared.part", "imported", "")),
    "with-tests": ({"code.py": "", "tests/__init__.py": "import nowhere"}, ("code", "imported", "")),
    "libraries": ({"nvidia/cublas/lib/libcublas.so.12": "", "data/x.json": "{}"}, ("", "no-module", "")),
    "crashes": ({"crashes.py": "import os\nos.abort()"}, ("crashes", "failed", "ended by signal 6 (Aborted)")),
    "exits": ({"exits.py": "raise SystemExit(0)"}, ("exits", "failed", "it ended the process")),
    "exits-3": ({"exits3.py": "import os\nos._exit(3)"}, ("exits3", "failed", "it ended the process with status 3")),
    "hangs": (
        {"hangs.py": "import subprocess\nsubprocess.run(['sleep', '600'])"},
        ("hangs", "failed", "it has not ended within 3 s"),
    ),
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Venv(tmp_path_factory.mktemp("imports") / "env")
    for name, (files, _) in CASES.items():
        made.install(name, {path: text.encode() for path, text in files.items()})
    editable = made.install("hook-only", {"__editable___hook.py": b"", "hook.pth": b""})
    (editable / "top_level.txt").write_text("under_the_hook\n")
    by_path = made.install("path-only", {"x.pth": b""})
    (by_path / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {"editable": true}}')
    return made.path / "bin" / "python3"


@pytest.fixture(scope="module")
def results(python: Path) -> dict[str, tuple[str, str, str]]:
    names = [name.lower().replace(".", "-") for name in (*CASES, "hook-only", "path-only", "gone")]
    asked = json.dumps({"packages": names, "seconds": 3})
    done = subprocess.run([python, "-B", "-", asked], input=TEXT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in rows] == names
    return {row["name"]: (row["module"], row["state"], row["found"]) for row in rows}


@pytest.mark.parametrize("name", CASES)
def test_a_package_is_imported_or_named_with_module_and_reason(
    name: str, results: dict[str, tuple[str, str, str]]
) -> None:
    assert results[name.lower().replace(".", "-")] == CASES[name][1]


def test_an_editable_install_has_its_modules_from_top_level_or_they_are_not_known(
    results: dict[str, tuple[str, str, str]],
) -> None:
    module, state, found = results["hook-only"]
    assert (module, state, found) == (
        "under_the_hook",
        "failed",
        "ModuleNotFoundError: No module named 'under_the_hook'",
    )
    assert results["path-only"] == ("", "no-module", "an editable install does not list its modules")


def test_a_locked_package_that_is_not_there_is_named(results: dict[str, tuple[str, str, str]]) -> None:
    assert results["gone"] == ("", "not-installed", "")
