"""`hpcenv submit --export`: a folder that can be moved, and submitted without hpcenv."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcenv.identity import code
from hpcenv.records.files import load_record
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.submission import Submission


@pytest.fixture
def project(project: Path) -> Path:
    """The tiny project; tests run in /tmp, which hpcenv knows not to be shared."""
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write("[submit]\nassume-shared = true\n")
    return project


@pytest.fixture
def exported(project: Path, hpcenv: Any, fake_slurm: Any, tmp_path: Path) -> Path:
    (project / "lib").mkdir()
    (project / "lib" / "helper.py").write_text("VALUE = 1\n")
    (project / "data.bin").write_bytes(b"\0")
    words = (
        "submit",
        "train.py",
        "--nproc",
        "1",
        "--export",
        str(tmp_path / "out"),
        "--",
        "a b",
        "$(id)",
    )
    environ = {**fake_slurm.environ, "HOME": str(tmp_path)}
    done = hpcenv(*words, cwd=project, environ=environ)
    assert done.status == 0, done.stderr
    assert fake_slurm.calls("sbatch") == []
    return tmp_path / "out"


def settle(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    script = folder / "code" / "hpcenv" / "launch" / "prepare_export_run.py"
    command = [sys.executable, "-I", str(script), str(folder)]
    return subprocess.run(command, env={"PATH": "/usr/bin:/bin", **environ}, text=True, capture_output=True)


def test_the_folder_holds_all_that_a_stranger_needs(exported: Path) -> None:
    names = {path.name for path in exported.iterdir()}
    assert names == {
        *("README.txt", "job.sbatch", "manifest.json", "lock.toml", "code", "inside", "source", "source.json"),
        *("start-hook", "requirements.txt"),
    }
    assert (exported / "source" / "lib" / "helper.py").is_file(), "without git modules and text come along"
    assert not (exported / "source" / "data.bin").exists()
    readme = (exported / "README.txt").read_text()
    assert "cd THIS_FOLDER && sbatch job.sbatch" in readme
    assert len(readme.splitlines()) <= 18
    script = (exported / "job.sbatch").read_text()
    assert str(exported) not in "\n".join(line for line in script.splitlines() if not line.startswith("# Made by"))
    subprocess.run(["bash", "-n", exported / "job.sbatch"], check=True)


def test_a_copy_elsewhere_gets_a_run_folder_of_its_own_for_every_job(exported: Path, tmp_path: Path) -> None:
    moved = tmp_path / "it's a $(copy)"
    shutil.copytree(exported, moved, symlinks=True)
    shutil.rmtree(exported)
    done = settle(moved, SLURM_JOB_ID="77")
    assert (done.returncode, done.stdout) == (0, f"{moved}/runs/77\n"), done.stderr
    run = RunFolder(moved / "runs" / "77")
    manifest = load_record(Manifest, run.manifest)
    assert (manifest.run, manifest.run_folder, manifest.workdir) == ("out-77", str(run.path), str(run.source))
    assert manifest.script == str(run.source / "train.py")
    assert manifest.source is not None
    code.make_own_copy(manifest.source, run)
    assert Path(manifest.script).is_file()
    assert code.find_digest(manifest.source, run) == manifest.source.digest
    assert manifest.args == ("a b", "$(id)")
    assert run.step.is_file()
    assert run.lockfile.is_file()
    assert load_record(Submission, run.submission).job_id == "77"
    before = run.manifest.read_bytes()
    assert settle(moved, SLURM_JOB_ID="77").returncode == 0
    assert run.manifest.read_bytes() == before, "a job that starts again goes on in its folder"
    assert settle(moved, SLURM_JOB_ID="78").stdout == f"{moved}/runs/78\n"


def test_another_copy_of_the_image_is_named_by_a_variable(exported: Path) -> None:
    path = exported / "manifest.json"
    data = json.loads(path.read_text())
    data["environment"].update(kind="sif", sif="/elsewhere/x.sif", apptainer="/nonexistent/apptainer")
    data["sif"] = {"sha256": "0" * 64}
    path.write_text(json.dumps(data))
    place = settle(exported, SLURM_JOB_ID="5", HPCENV_SIF="/mine/x.sif").stdout.strip()
    moved = json.loads((Path(place) / "manifest.json").read_text())
    assert moved["environment"]["sif"] == "/mine/x.sif"
    assert moved["sif"] is None, "the nodes read all of it: its identity was that of another file"
    assert {"source": str(exported), "target": str(exported), "read_only": False} in moved["environment"]["binds"]
    assert json.loads((Path(settle(exported, SLURM_JOB_ID="6").stdout.strip()) / "manifest.json").read_text())["sif"]


@pytest.mark.parametrize("job", ["", "../../x", "5 "])
def test_without_a_job_there_is_no_folder(exported: Path, job: str) -> None:
    done = settle(exported, SLURM_JOB_ID=job)
    assert done.returncode == 91
    assert "hint: copy the whole folder" in done.stderr


def test_submitted_from_elsewhere_it_says_what_to_do(exported: Path, tmp_path: Path) -> None:
    environ = {"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "5"}
    done = subprocess.run(["bash", exported / "job.sbatch"], env=environ, cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 91
    assert "submit this from inside its own folder" in done.stderr


def test_what_is_about_ones_own_job_is_no_flag_here(project: Path, hpcenv: Any) -> None:
    for words in (("--wait",), ("--sweep", "a=1"), ("--chain", "2"), ("--name", "x")):
        done = hpcenv("submit", "train.py", *words, "--export", "x", cwd=project)
        assert done.status == 2, words


def test_without_git_it_says_what_is_not_taken_along(project: Path, hpcenv: Any, fake_slurm: Any) -> None:
    for name in (
        "data/words.txt",
        "runs/sweep/sweep.json",
        "runs/sweep/code/x.py",
        "other/sw/sweep.json",
        "other/sw/y.py",
    ):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("")
    (project / "data" / "w.bin").write_bytes(b"\0")
    (project / ".env").write_text("TOKEN=hush")
    words = ("submit", "train.py", "--nproc", "1", "--export", "out")
    done = hpcenv(*words, cwd=project, environ={**fake_slurm.environ, "HOME": str(project)})
    assert done.status == 0, done.stderr
    assert "note: not in the exported folder: data/w.bin\n" in done.stderr
    source = project / "out" / "source"
    assert sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()) == [
        *("data/words.txt", "hpcenv.toml", "train.py"),
    ]


def test_whoever_submits_it_has_the_secrets(project: Path, hpcenv: Any, fake_slurm: Any) -> None:
    words = ("submit", "train.py", "--nproc", "1", "--secret", "A=env:THEIRS", "--export", "out")
    done = hpcenv(*words, cwd=project, environ={**fake_slurm.environ, "HOME": str(project)})
    assert done.status == 0, done.stderr
    assert "it needs the secret A from env:THEIRS" in done.stderr


def test_hints_name_what_this_command_has(project: Path, hpcenv: Any, fake_slurm: Any) -> None:
    (project / "x").mkdir()
    environ = {**fake_slurm.environ, "HOME": str(project)}
    done = hpcenv("submit", "train.py", "--nproc", "1", "--export", "x", cwd=project, environ=environ)
    assert (done.status, done.stderr.splitlines()[-1]) == (17, "hint: choose another one: --export DIR")
    done = hpcenv("submit", "train.py", "--export", "y", cwd=project, environ=environ)
    assert (done.status, done.stderr.splitlines()[-1]) == (
        2,
        "hint: --nodes N --gpus G, or --gpus 0 --nproc R for CPU ranks",
    )


def test_a_folder_in_the_way_is_kept(project: Path, hpcenv: Any) -> None:
    (project / "x").mkdir()
    done = hpcenv("submit", "train.py", "--nproc", "1", "--export", "x", cwd=project)
    assert "error[would-overwrite]" in done.stderr
    assert os.listdir(project / "x") == []


def test_a_run_is_exported_again(project: Path, hpcenv: Any, fake_slurm: Any, tmp_path: Path) -> None:
    environ = {**fake_slurm.environ, "HOME": str(tmp_path)}
    done = hpcenv("submit", "train.py", "--nproc", "1", "--name", "first", "--", "old", cwd=project, environ=environ)
    assert done.status == 0, done.stderr
    again = ("rerun", "first", "--export", "again")
    done = hpcenv(*again, "--", "new", cwd=project, environ=environ)
    assert done.status == 0, done.stderr
    manifest = load_record(Manifest, project / "again" / "manifest.json")
    assert (manifest.run, manifest.args) == ("again", ("new",))
    assert len(fake_slurm.calls("sbatch")) == 1
    for words in (("--wait",), ("--name", "x"), ("--failed",), ("--volume", "a:/b")):
        assert hpcenv("rerun", "first", "--export", "other", *words, cwd=project, environ=environ).status == 2, words
    assert hpcenv("rerun", "first", "--format", "compose", cwd=project, environ=environ).status == 2
    (project / "train.py").write_text("print('changed')\n")
    done = hpcenv("rerun", "first", "--export", "other", cwd=project, environ=environ)
    assert done.status == 2
    assert "--allow-changed" in done.stderr


@pytest.mark.parametrize("value", ["NONE", "all", "NIL", "A=1", "ALL,LR=2"])
def test_a_value_of_sbatchs_own_export_is_not_a_folder(value: str, hpcenv: Any, project: Path) -> None:
    (project / "t.py").write_text("")
    done = hpcenv("submit", "t.py", f"--export={value}", cwd=project)
    assert done.status == 2
    assert "--env" in done.stderr
    assert f"./{value}" in done.stderr
    assert not (project / value).exists()
