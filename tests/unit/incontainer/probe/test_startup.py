"""What Python runs at every start."""

from __future__ import annotations

import hashlib
import py_compile
import subprocess
import sys
from pathlib import Path
from typing import Any

from probe_world import SITE, Venv, unlisted, write


def startup(found: dict[str, Any]) -> list[str]:
    return [entry.split(" ")[0] for entry in found["values"]["python.startup-files"]]


def test_everything_that_runs_at_the_start_of_python_is_listed(env: Venv, tmp_path: Path) -> None:
    assert env.probe()["values"]["python.startup-files"] == []
    env.install("hook", {"hook.pth": b"import os\n"})
    write(tmp_path / "extra/sitecustomize.py", "X = 1\n")
    write(tmp_path / "extra/usercustomize/__init__.py", "")
    write(tmp_path / "extra/ignored.pth", "not processed: no site directory")
    found = env.probe(PYTHONPATH=str(tmp_path / "extra"))
    digest = hashlib.sha256(b"X = 1\n").hexdigest()[:16]
    assert f"{tmp_path}/extra/sitecustomize.py {digest}" in found["values"]["python.startup-files"]
    extra = str(tmp_path / "extra")
    assert startup(found) == sorted(
        [f"{extra}/sitecustomize.py", f"{extra}/usercustomize/__init__.py", f"{SITE}/hook.pth"]
    )


def test_launcher_files_are_known_by_content_and_not_by_name(env: Venv) -> None:
    plain = env.probe()["values"]
    (env.site / "_virtualenv.pth").write_text("import _virtualenv")
    found = env.probe()["values"]
    assert found["python.startup-files"] == plain["python.startup-files"]
    assert found["packages.unlisted-digest"] == plain["packages.unlisted-digest"]
    (env.site / "_virtualenv.py").write_text("print('evil')")
    (env.site / "demo/_virtualenv.pth").write_text("import _virtualenv")
    assert unlisted(env.probe()) == [f"{SITE}/_virtualenv.py", f"{SITE}/demo/_virtualenv.pth"]
    (env.site / "_virtualenv.pth").write_text("import evil")
    assert startup(env.probe()) == [f"{SITE}/_virtualenv.pth"]


def test_a_compiled_file_that_python_never_checks_and_that_is_not_of_its_source_is_named(env: Venv) -> None:
    modes = py_compile.PycInvalidationMode
    for name, mode in (("a", modes.UNCHECKED_HASH), ("b", modes.CHECKED_HASH), ("c", modes.TIMESTAMP)):
        env.install(name, {f"{name}.py": b"X = 1\n"})
        py_compile.compile(str(env.site / f"{name}.py"), invalidation_mode=mode, doraise=True)
    assert env.probe("full")["values"]["python.unchecked-pyc"] == []
    for name in ("a", "b", "c"):
        (env.site / f"{name}.py").write_bytes(b"X = 2\n")
    [found] = env.probe("full")["values"]["python.unchecked-pyc"]
    assert found == f"{SITE}/__pycache__/a.{sys.implementation.cache_tag}.pyc"
    done = subprocess.run(
        [env.path / "bin/python3", "-c", "import a, b; print(a.X, b.X)"], capture_output=True, check=True
    )
    assert done.stdout == b"1 2\n", "Python really runs the old code"
