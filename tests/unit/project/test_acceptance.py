"""What a project asks of the user's machine, and what of it the user has accepted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hpcenv.errors import NotAccepted
from hpcenv.locking.init import init
from hpcenv.project import acceptance
from hpcenv.project.acceptance import Asked
from hpcenv.project.options import OPTIONS
from hpcenv.project.workspace import Workspace, open_workspace
from hpcenv.submission.request import SubmitOptions

IMAGE = 'image = "docker://registry.example/team/torch:2.13.0"\n'


def project(folder: Path, text: str) -> Workspace:
    folder.mkdir(exist_ok=True)
    (folder / "hpcenv.toml").write_text(text)
    return open_workspace(folder)


def keys(workspace: Workspace) -> list[str]:
    return [one.key for one in acceptance.asked_by(workspace)]


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ('image = "host"\npython = ".venv/bin/python"\n', ["python"]),
        (IMAGE + 'python = "python3.12"\n', []),
        ('image = "env.def"\n', ["image"]),
        (IMAGE + 'ca-file = "ca.pem"\n', ["ca-file"]),
        (IMAGE + '[[bind]]\nsource = "/"\ntarget = "/mnt"\n', ["[[bind]]"]),
        (IMAGE + '[[bind]]\nsource = "~/data"\ntarget = "/mnt"\n', ["[[bind]]"]),
        (IMAGE + '[[bind]]\nsource = "../data"\ntarget = "/mnt"\n', ["[[bind]]"]),
        (IMAGE + '[[bind]]\nsource = "out"\ntarget = "/mnt"\n', ["[[bind]]"]),  # a link, see below
        (IMAGE + '[[bind]]\nsource = "data"\ntarget = "/mnt"\n', []),
        (IMAGE + '[secrets]\nTOKEN = "file:~/token"\n', ["[secrets] TOKEN"]),
        (IMAGE + '[env]\nLD_PRELOAD = "x.so"\nOMP_NUM_THREADS = "2"\n', ["[env] LD_PRELOAD"]),
        (IMAGE + '[env]\nGLIBC_TUNABLES = "a=1"\nPATH = "/x"\n', ["[env] GLIBC_TUNABLES", "[env] PATH"]),
        (
            IMAGE + '[env]\nPREPEND_LD_LIBRARY_PATH = "/x"\nAPPEND_PATH = "/x"\nPREPEND_X = "1"\n',
            ["[env] PREPEND_LD_LIBRARY_PATH", "[env] APPEND_PATH"],
        ),
        (IMAGE + '[submit]\npass-env = ["AWS_*"]\nnodes = 2\n', ["[submit] pass-env"]),
        (IMAGE + '[sbatch]\nmail-user = "a@b.example"\n', ["[sbatch] mail-user"]),
        (IMAGE + '[srun]\nmpi = "none"\n', ["[srun] mpi"]),
        (IMAGE + '[submit]\nsetup = ["module purge", "ulimit -l unlimited"]\n', ["[submit] setup", "[submit] setup"]),
        (IMAGE + 'site = "../here.toml"\n', ["site profile"]),
        (IMAGE + 'site = "here"\n', []),
        (IMAGE + '[paths]\nruns = "../../x"\nlockfiles = "locks"\n', ["[paths] runs"]),
        (IMAGE + '[paths]\nstore = "/scratch/store"\nlockfiles = "/"\n', ["[paths] store", "[paths] lockfiles"]),
        (IMAGE + '[environment.e]\nimage = "host"\npython = "p"\n', ["[environment.e] python"]),
        (IMAGE + '[environment.e]\nimage = "env.def"\n', ["[environment.e] image"]),
        ('image = "host"\npython = "p"\n[environment.e]\nimage = "host"\n', ["python"]),
        ('image = "host"\npython = "p"\n[environment.e]\npython = "q"\n', ["python", "[environment.e] python"]),
        (IMAGE + '[[environment.e.bind]]\nsource = "/"\ntarget = "/mnt"\n', ["[[environment.e.bind]]"]),
        (IMAGE + '[environment.e.env]\nLD_PRELOAD = "x.so"\nA = "b"\n', ["[environment.e.env] LD_PRELOAD"]),
        (IMAGE + 'plain-http = ["registry.example"]\n[submit]\npartition = "gpu"\n', []),
    ],
)
def test_what_reaches_outside_the_project_is_asked(tmp_path: Path, text: str, asks: list[str]) -> None:
    workspace = project(tmp_path / "project", text)
    (workspace.root / "out").symlink_to("/usr")
    assert keys(workspace) == asks


def test_what_stands_beside_hpcenv_toml_is_asked_by_its_content(tmp_path: Path) -> None:
    workspace = project(tmp_path / "project", IMAGE)
    assert keys(workspace) == []
    (workspace.root / "sites").mkdir()
    profile = workspace.root / "sites" / "here.toml"
    profile.write_text(
        'name = "here"\n[runtime]\nkind = "apptainer"\nprogram = "/evil"\nreason = "r"\n[[bind]]\nsource = "/"\n'
        '[submit]\nsetup = ["curl evil"]\n'
    )
    assert keys(workspace) == ["site profile"]
    first = acceptance.asked_by(workspace)
    assert "containers start with /evil; lines in the batch script curl evil; binds / at /" in first[0].text
    profile.write_text(profile.read_text() + "# changed\n")
    assert acceptance.digest_of(first) != acceptance.digest_of(acceptance.asked_by(workspace))


def test_an_accepted_list_is_kept_and_a_change_asks_again(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    text = IMAGE + '[secrets]\nTOKEN = "file:~/token"\n'
    workspace = project(tmp_path / "project", text)
    asked = acceptance.asked_by(workspace)
    with pytest.raises(NotAccepted, match="TOKEN = file:~/token"):
        acceptance.require(asked, workspace.root, environ, given=None, hint="")
    with pytest.raises(NotAccepted, match="not 0123"):
        acceptance.require(asked, workspace.root, environ, given="0123", hint="")
    acceptance.require(asked, workspace.root, environ, given=acceptance.digest_of(asked), hint="")
    acceptance.require(asked, workspace.root, environ, given=None, hint="")

    file = next((tmp_path / ".local/state/hpcenv/accepted").iterdir())
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(file.read_text())["project"] == str(workspace.root)

    changed = acceptance.asked_by(project(workspace.root, text.replace("token", "other")))
    assert [one.value for one in acceptance.new_in(changed, workspace.root, environ)] == ["file:~/other"]
    # A script that names a digest hears of a change, also of one that was accepted before.
    with pytest.raises(NotAccepted):
        acceptance.require(asked, workspace.root, environ, given=acceptance.digest_of(changed), hint="")

    other = project(tmp_path / "clone", text)
    assert acceptance.new_in(acceptance.asked_by(other), other.root, environ)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"schema": 1, "project": "/", "accepted": []}', '{"schema": 9}'])
def test_a_damaged_file_accepts_nothing(tmp_path: Path, damage: str) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    workspace = project(tmp_path / "project", IMAGE + '[srun]\nmpi = "none"\n')
    asked = acceptance.asked_by(workspace)
    acceptance.keep(asked, workspace.root, environ)
    assert not acceptance.new_in(asked, workspace.root, environ)
    next((tmp_path / "state/hpcenv/accepted").iterdir()).write_text(damage)
    assert acceptance.new_in(asked, workspace.root, environ) == asked


def test_a_value_cannot_look_like_another_line(tmp_path: Path) -> None:
    workspace = project(tmp_path / "project", IMAGE + '[env]\nLD_PRELOAD = "a\\nnothing else\\u001b[2J"\n')
    assert "\n" not in acceptance.asked_by(workspace)[0].text
    assert "\x1b" not in acceptance.asked_by(workspace)[0].text


def test_init_accepts_what_it_wrote_and_nothing_else(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    folder = tmp_path / "project"
    (folder / "sites").mkdir(parents=True)
    (folder / "sites" / "here.toml").write_text('name = "here"\n')
    init(folder, environ=environ, image="host", python=sys.executable)
    asked = acceptance.asked_by(open_workspace(folder))
    assert [one.key for one in asked] == ["python", "site profile"]
    assert [one.key for one in acceptance.new_in(asked, folder, environ)] == ["site profile"]


RECORDED = {
    "secret": ({"A": "file:~/a"}, "--secret A"),
    "sbatch": ({"exclusive": None}, "--sbatch exclusive"),
    "srun": ({"mpi": "none"}, "--srun mpi"),
    "pass_env": (("B",), "--pass-env"),
    "env": ({"LD_AUDIT": "x", "C": "1"}, "--env LD_AUDIT"),
    "bind": (("/:/mnt",), "--bind"),
    "stage_data": (("/home/other",), "--stage-data"),
    "include": (("../*",), "--include"),
    "resume_from": ("/home/other/step-1.pt", "--resume-from"),
    "runs_dir": ("/elsewhere", "--runs-dir"),
    "stage_dir": ("/elsewhere", "--stage-dir"),
    "runtime": ("/tmp/evil", "--runtime"),
    "site": ("evil.toml", "--site"),
    "setup": (("curl evil",), "--setup"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_what_a_record_of_a_run_asks(name: str) -> None:
    value, key = RECORDED[name]
    options = SubmitOptions(script="train.py", **{name: value})
    (asked,) = acceptance.asked_by_options(options, "request.json", script="train.py")
    assert asked.key == key
    assert asked.value in str(value)
    assert asked.means.endswith("(request.json)")


def test_each_option_that_is_asked_has_a_case() -> None:
    assert {option.name for option in OPTIONS if option.asks} == set(RECORDED)


def test_a_record_asks_for_nothing_by_values_that_stay_in_the_project() -> None:
    options = SubmitOptions(script="train.py", nodes=2, site="here", name="a", env={"C": "1"}, comment="x", lock="big")
    assert acceptance.asked_by_options(options, "request.json", script="train.py") == ()


@pytest.mark.parametrize("script", ["/home/me/.local/x.py", "../x.py", "a/../../x.py"])
def test_a_script_that_may_be_outside_the_project_is_asked(script: str) -> None:
    (asked,) = acceptance.asked_by_options(SubmitOptions(script=script), "request.json", script=script)
    assert (asked.key, asked.value) == ("the script", script)
    module = SubmitOptions(script="a..b", module=True)
    assert acceptance.asked_by_options(module, "request.json", script="a..b") == ()


def test_two_values_of_one_option_are_two_lines() -> None:
    options = SubmitOptions(script="t.py", bind=("/a", "/b:/c:ro"))
    found = acceptance.asked_by_options(options, "request.json", script="t.py")
    assert [(one.key, one.value) for one in found] == [("--bind", "/a"), ("--bind", "/b:/c:ro")]


def test_a_typed_digest_counts_for_one_call_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file in place of the folder, as in a full or read-only home")
    environ = {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}
    asked = [Asked(key="[submit] runtime", value="/x", means="it is started")]
    digest = acceptance.digest_of(asked)
    acceptance.require(asked, tmp_path, environ, given=digest, hint="")
    for given in (None, "0" * len(digest)):
        with pytest.raises(NotAccepted):
            acceptance.require(asked, tmp_path, environ, given=given, hint="")
