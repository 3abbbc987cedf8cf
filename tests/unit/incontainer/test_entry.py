"""A console script of the environment, started by its name."""

import subprocess
import sys
from pathlib import Path

import pytest

import hpcenv.incontainer
from hpcenv.errors import ScriptUnusable, UsageError
from hpcenv.records.manifest import Bind, Environment
from hpcenv.submission import entry_point, typed_binds

ENTRY = Path(hpcenv.incontainer.__file__).parent / "entry.py"


@pytest.fixture
def env(tmp_path):
    """A virtual environment with one distribution, which has one console script, and one other program."""
    home = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    site = next(home.glob("lib/python3*/site-packages"))
    (site / "mine.py").write_text("import sys\n\ndef main():\n    print(sys.argv, sys.path[0])\n    return 3\n")
    info = site / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nmine-train = mine:main\n")
    program = home / "bin" / "other"
    program.write_text('#!/bin/sh\necho "other $@"\n')
    program.chmod(0o755)
    (home / "bin" / "mine-train").write_text("#!/bin/false\n")
    return home


def start(env, *words):
    return subprocess.run([str(env / "bin" / "python"), str(ENTRY), *words], capture_output=True, text=True)


def test_the_entry_point_is_found_by_its_name_and_sees_its_own_name_and_arguments(env):
    done = start(env, "mine-train", "--lr", "3e-4")
    place = env / "bin"
    assert done.stdout == f"{[str(place / 'mine-train'), '--lr', '3e-4']} {place}\n"
    assert done.returncode == 3, done.stderr


def test_another_program_of_the_environment_is_started_too(env):
    done = start(env, "other", "a b")
    assert (done.returncode, done.stdout) == (0, "other a b\n"), done.stderr


@pytest.mark.parametrize("name", ["mine-trian", "../bin/other", "sh"])
def test_what_the_environment_does_not_have_ends_with_127(env, name):
    done = start(env, name)
    assert done.returncode == 127
    assert f"the environment has no console script `{name}`" in done.stderr
    assert ("did you mean `mine-train`?" in done.stderr) == (name == "mine-trian")


def test_the_submission_looks_for_it_on_the_host(env):
    host = Environment(kind="host", python=str(env / "bin" / "python"))
    assert entry_point.require_in_environment("mine-train", host) == ()
    with pytest.raises(ScriptUnusable, match="did you mean `mine-train`"):
        entry_point.require_in_environment("mine-trian", host)
    sif = Environment(kind="sif", python="python3", sif="/x.sif")
    assert "not checked" in entry_point.require_in_environment("mine-train", sif)[0]
    with pytest.raises(ScriptUnusable, match="is not the name of a console script"):
        entry_point.require_name("bin/mine-train")


def test_binds_as_typed(tmp_path):
    sif = Environment(kind="sif", python="python3", sif="/x.sif", binds=(Bind(source="/a", target="/a"),))
    found, notes = typed_binds.add(sif, ("data", "/none:/d", f"{tmp_path}:/e/:ro", "/f::ro"), tmp_path)
    assert found.binds == (
        Bind(source=str(tmp_path / "data"), target=str(tmp_path / "data")),
        Bind(source="/none", target="/d"),
        Bind(source=str(tmp_path), target="/e", read_only=True),
        Bind(source="/f", target="/f", read_only=True),
        Bind(source="/a", target="/a"),
    )
    assert [note for note in notes if "/none" in note], notes
    for wrong in ("/a:b", "/a:/b:rx", "/a:/b:ro:x", ":/b", "/a,/b"):
        with pytest.raises(UsageError):
            typed_binds.add(sif, (wrong,), tmp_path)
    with pytest.raises(UsageError, match="there is no container"):
        typed_binds.add(Environment(kind="host", python="/p"), ("/a",), tmp_path)
