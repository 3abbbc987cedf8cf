"""hpcenv as a user types it, each time as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcenv import process
from hpcenv.cli import _errors
from hpcenv.cli._help import VERBS
from hpcenv.cli.image import VERBS as IMAGE_VERBS
from hpcenv.cluster import node_types
from hpcenv.errors import Interrupted
from tests.conftest import hpcenv


def start(*words: str, cwd: Path, environ: dict[str, str] | None = None) -> subprocess.Popen[str]:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "LANG": "C.UTF-8", "XDG_STATE_HOME": str(cwd.parent / "state")}
    return subprocess.Popen(
        [sys.executable, "-m", "hpcenv", *words],
        cwd=cwd,
        env={**env, **(environ or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


# -- help and typos -----------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["", *VERBS, *(f"image {verb}" for verb in IMAGE_VERBS)])
def test_help_fits_80_columns_of_plain_ascii(verb: str, hpcenv: Any, tmp_path: Path) -> None:
    done = hpcenv(*verb.split(), "--help", cwd=tmp_path)
    assert done.status == 0
    assert done.stdout.isascii()
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_the_example_of_submit_stands_on_a_line_of_its_own(hpcenv: Any, tmp_path: Path) -> None:
    lines = [line.strip() for line in hpcenv("submit", "-h", cwd=tmp_path).stdout.splitlines()]
    assert "hpcenv submit train.py --nodes 2 --gpus 8 -- --lr 3e-4" in lines


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (("submit", "t.py", "--nodes", "two"), "error[usage]: Invalid value for '--nodes': 'two' is not a whole number from 1 on", "hint: hpcenv submit --help"),
        (("submit", "t.py", "--nodes", "2-4"), "'2-4' is not a whole number from 1 on", "hint: hpcenv submit --help"),
        (("submti",), "error[usage]: No such command 'submti'. Did you mean 'submit'?", "hint: hpcenv --help"),
        (("status", "--rnus-dir", "x"), "error[usage]: no such option `--rnus-dir`, perhaps you meant `--runs-dir`", "hint: hpcenv status --runs-dir x"),
        (("submit", "t.py", "--partitoin", "x"), "no such option `--partitoin`, perhaps you meant `--partition`\n", "hint: hpcenv submit t.py --partition x"),
        (("submit", "t.py", "--lr", "3"), "error[usage]: no such option `--lr`\n", "goes after `--`: `hpcenv submit SCRIPT OPTIONS -- --lr`"),
        (("submit",), "error[usage]: Missing argument 'SCRIPT'", "hint: hpcenv submit --help"),
        (("submit", "t.py", "--nodes", "0"), "error[usage]: Invalid value for '--nodes'", "hint: hpcenv submit --help"),
        (("submit", "t.py", "--env", "A"), "  why: `env`: `A` has no value: use A=VALUE (from --env)", "hint: hpcenv submit --help"),
        (("submit", "t.py", "--env", "A=1", "--env", "A=2"), "  why: `env`: `A` is given twice (from --env)", ""),
    ],
)  # fmt: skip
def test_a_typo_gets_a_hint(words: tuple[str, ...], what: str, hint: str, hpcenv: Any, tmp_path: Path) -> None:
    (tmp_path / "hpcenv.toml").write_text('image = "host"\n')
    done = hpcenv(*words, cwd=tmp_path)
    assert done.status == 2
    assert what in done.stderr
    assert hint in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


# -- init and projects --------------------------------------------------------------------


def test_init_writes_once(hpcenv: Any, tmp_path: Path) -> None:
    folder = tmp_path / "paper"
    folder.mkdir()
    user = {"HOME": str(tmp_path)}
    assert hpcenv("init", "--image", "docker://ghcr.io/team/train:1", cwd=folder, environ=user).status == 0
    before = (folder / "hpcenv.toml").read_text()
    done = hpcenv("init", cwd=folder, environ=user)
    assert done.status == 17
    assert "error[would-overwrite]" in done.stderr
    assert (folder / "hpcenv.toml").read_text() == before
    assert hpcenv("init", "--force", cwd=folder, environ=user).status == 0
    assert (folder / "hpcenv.toml").read_text() != before


@pytest.mark.parametrize("words", [("--image", 'a"b'), ("--image", "a\nb"), ("--python", "a\\b"), ("--image", "")])
def test_init_leaves_nothing_when_a_value_cannot_stand_in_the_file(
    words: tuple[str, ...], hpcenv: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "paper"
    folder.mkdir()
    done = hpcenv("init", *words, cwd=folder, environ={"HOME": str(tmp_path)})
    assert done.status in (2, 3)
    assert list(folder.iterdir()) == []


def test_a_project_is_found_from_a_folder_below_it(hpcenv: Any, project: Path) -> None:
    below = project / "a" / "b"
    below.mkdir(parents=True)
    assert hpcenv("lock", "--check", cwd=below).stdout == "lockfiles/default.lock.toml is fresh\n"


def test_outside_of_a_project(hpcenv: Any, tmp_path: Path) -> None:
    done = hpcenv("lock", cwd=tmp_path, environ={"HOME": "/nonexistent"})
    assert done.status == 3
    assert done.stderr == f"error[spec-invalid]: no `hpcenv.toml` in `{tmp_path}` or above it\n\nhint: hpcenv init\n"


@pytest.mark.parametrize("home", [".", "alice"])
def test_no_hint_makes_the_home_folder_a_project(home: str, hpcenv: Any, tmp_path: Path) -> None:
    """The copy of each run would be made of all that the user has."""
    done = hpcenv("lock", cwd=tmp_path, environ={"HOME": str(tmp_path / home)})
    assert "hint: cd PROJECT, the folder of your project; to begin one: `mkdir PROJECT && cd PROJECT" in done.stderr


def test_outside_of_the_scripts_project(hpcenv: Any, project: Path) -> None:
    script = f"{project.name}/train.py"
    done = hpcenv("submit", script, "--gpus", "0", "--nproc", "1", cwd=project.parent, environ={"HOME": "/"})
    assert done.status == 3
    assert f"hint: cd {project.name} (the project of `{script}` is there)\n" in done.stderr


def test_the_users_name_for_a_folder_is_kept(hpcenv: Any, project: Path, tmp_path: Path) -> None:
    """Nodes may know a folder by its link only (automounter)."""
    link = tmp_path / "link"
    link.symlink_to(project)
    environ = {"PATH": "/usr/bin:/bin", "HOME": "/", "PWD": str(link)}
    done = hpcenv("submit", "train.py", "--nproc", "1", "--name", "a", "--dry-run", cwd=link, environ=environ)
    assert f'"run_folder": "{link}/runs/a"' in done.stdout


# -- dry run and submit -------------------------------------------------------------------


@pytest.fixture
def shared_project(project: Path) -> Path:
    """The tiny project; tests run in /tmp, which hpcenv knows not to be shared."""
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write("[submit]\nassume-shared = true\n")
    return project


WORDS = ("submit", "train.py", "--nproc", "1", "--name", "a")


def test_a_dry_run_is_byte_for_byte_what_submit_writes(hpcenv: Any, shared_project: Path, fake_slurm: Any) -> None:
    arguments = ("--", "a b", "--dry-run", "--wait", b"\xff")
    dry = hpcenv(*WORDS, "--dry-run", *arguments, cwd=shared_project, environ=fake_slurm.environ)
    assert dry.status == 0, dry.stderr
    assert fake_slurm.calls("sbatch") == []
    assert not (shared_project / "runs").exists()
    done = hpcenv(*WORDS, *arguments, cwd=shared_project, environ=fake_slurm.environ)
    assert done.status == 0, done.stderr
    run = shared_project / "runs" / "a"
    assert dry.stdout == (run / "job.sbatch").read_text() + (run / "manifest.json").read_text()
    assert fake_slurm.calls("sbatch")[0].script == (run / "job.sbatch").read_text()


def test_submit_says_the_shape_and_what_to_type_next(hpcenv: Any, shared_project: Path, fake_slurm: Any) -> None:
    fake_slurm.answers("sbatch", "Submitted batch job 77\n", err="sbatch: warning: slow today\n")
    done = hpcenv(
        *WORDS, "--nodes", "2", "--gpus", "8", "--allow-cpu-torch", cwd=shared_project, environ=fake_slurm.environ
    )
    assert done.stdout == "submitted a: 2 nodes x 8 GPUs, 1 rank each = 2 ranks, job 77\n"
    assert "note: sbatch: slow today" in done.stderr
    assert "next: hpcenv status a    hpcenv logs -f a" in done.stderr


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (("--mem", "10", "G"), "note: `G` is an argument of the script, typed before `--`\n"),
        (("G", "H", "--", "--lr", "1"), "note: `G`, `H` are arguments of the script, typed before `--`\n"),
        (("--", "G"), ""),
    ],
)
def test_a_word_that_became_an_argument_is_named(
    words: tuple[str, ...], note: str, hpcenv: Any, shared_project: Path, fake_slurm: Any
) -> None:
    """`--mem 10 G` asks for 10 MiB, and the script gets G."""
    done = hpcenv(*WORDS, "--dry-run", *words, cwd=shared_project, environ=fake_slurm.environ)
    assert done.status == 0, done.stderr
    assert (note in done.stderr) if note else ("of the script" not in done.stderr)


def test_a_script_behind_the_dashes_has_no_argument_before_them(
    hpcenv: Any, shared_project: Path, fake_slurm: Any
) -> None:
    words = ("submit", "--nproc", "1", "--name", "a", "--dry-run", "--", "train.py", "G", "H")
    done = hpcenv(*words, cwd=shared_project, environ=fake_slurm.environ)
    assert done.status == 0, done.stderr
    assert "of the script" not in done.stderr


def test_lock_ends_with_what_to_type_next_also_if_it_wrote_nothing(hpcenv: Any, project: Path) -> None:
    said = "next: hpcenv submit SCRIPT --nodes N --gpus 0 --nproc R"
    again = hpcenv("lock", "--no-wheels", cwd=project)
    assert "unchanged:" in again.stdout
    assert again.stderr.endswith(f"{said}\n")
    assert said + " --lock paper\n" in hpcenv("lock", "--no-wheels", "--lock", "paper", cwd=project).stderr


def test_with_a_folder_of_ones_own_the_next_command_finds_the_run(
    hpcenv: Any, shared_project: Path, fake_slurm: Any
) -> None:
    done = hpcenv(*WORDS, "--runs-dir", "my runs", cwd=shared_project, environ=fake_slurm.environ)
    assert f"next: hpcenv status '{shared_project}/my runs/a'" in done.stderr


def test_a_refused_partition_names_where_it_comes_from(hpcenv: Any, shared_project: Path, fake_slurm: Any) -> None:
    fake_slurm.replays("sbatch", "sbatch-nosuch-partition")
    environ = {**fake_slurm.environ, "SBATCH_PARTITION": "nosuch"}
    done = hpcenv(*WORDS, cwd=shared_project, environ=environ)
    assert done.status == 15
    assert "invalid partition specified: nosuch" in done.stderr
    assert "partition = nosuch (SBATCH_PARTITION)" in done.stderr
    assert "hint: `sinfo --summarize` lists the partitions" in done.stderr
    assert list((shared_project / "runs").iterdir()) == []


def test_slurm_without_sbatch(hpcenv: Any, shared_project: Path) -> None:
    done = hpcenv(*WORDS, "--cluster", "slurm", cwd=shared_project)
    assert done.status == 8
    assert "error[tool-missing]: `sbatch` is not on PATH" in done.stderr
    assert not (shared_project / "runs").exists()


def test_interrupting_sbatch_leaves_nothing(shared_project: Path, fake_slurm: Any) -> None:
    fake_slurm.hangs("sbatch")
    child = start(*WORDS, cwd=shared_project, environ=fake_slurm.environ)
    deadline = time.monotonic() + 20
    while not fake_slurm.calls("sbatch") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (shared_project / "runs" / "a" / "manifest.json").exists()
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=20)
    assert child.returncode == 130
    assert stderr.endswith("error[interrupted]: interrupted\n")
    assert list((shared_project / "runs").iterdir()) == []
    assert len(fake_slurm.calls("squeue")) == 1, "it looks whether the job got queued"


def test_an_interrupted_plan_ends_sinfo_and_does_not_wait_for_it(shared_project: Path, fake_slurm: Any) -> None:
    fake_slurm.hangs("sinfo")
    child = start(*WORDS, cwd=shared_project, environ=fake_slurm.environ)
    deadline = time.monotonic() + 20
    while not fake_slurm.calls("sinfo") and time.monotonic() < deadline:
        time.sleep(0.05)
    asked = process.below(child.pid)
    assert asked
    before = time.monotonic()
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=20)
    assert time.monotonic() - before < node_types.QUICK_SECONDS - 1
    assert child.returncode == 130
    assert stderr.endswith("error[interrupted]: interrupted\n")
    assert [pid for pid in asked if process.parent_of(pid) is not None] == []


# -- runs on this machine -----------------------------------------------------------------


def test_a_local_run_from_submit_to_report(hpcenv: Any, project: Path) -> None:
    (project / "train.py").write_text("import sys\nprint('hello', sys.argv[1:], flush=True)\nsys.exit(7)\n")
    done = hpcenv("submit", "train.py", "--nproc", "1", "--name", "a", "--wait", "--", "$(id)", cwd=project)
    assert done.status == 7, done.stderr
    assert "hello ['$(id)']" in done.stdout
    assert "hint: hpcenv report a" in done.stderr
    assert "a: failed, exit status 7" in hpcenv("status", cwd=project).stdout
    report = hpcenv("report", "a", cwd=project).stdout
    assert report.startswith("first failure: node local0, rank 0, exit 7\n")
    assert "hpcenv verdict: match" in report
    assert hpcenv("logs", "-f", "a", cwd=project).stdout == (project / "runs" / "a" / "job.log").read_text()


def test_a_run_of_a_changed_environment_ends_with_90_before_the_script(
    hpcenv: Any, project: Path, python_with_torch: Path
) -> None:
    (victim,) = python_with_torch.parents[1].glob("lib/python*/site-packages/torch/distributed/__init__.py")
    victim.write_text("# one line that was not there\n")
    try:
        done = hpcenv("submit", "train.py", "--nproc", "1", "--name", "a", "--wait", cwd=project)
    finally:
        victim.write_text("")
    assert done.status == 90
    assert "TRAINS" not in done.stdout
    assert "a: rejected (before training: a node differs from the lockfile)" in done.stderr


def test_interrupting_the_wait_leaves_the_run_and_cancel_ends_it(hpcenv: Any, project: Path) -> None:
    (project / "train.py").write_text("import time\nprint('STARTED', flush=True)\ntime.sleep(60)\n")
    child = start("submit", "train.py", "--nproc", "1", "--name", "a", "--wait", cwd=project)
    assert child.stdout is not None
    assert any("STARTED" in line for line in iter(child.stdout.readline, ""))
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=20)
    assert child.returncode == 130
    assert "error[interrupted]: interrupted; a continues" in stderr
    assert "to cancel it: `hpcenv cancel a`" in stderr
    assert hpcenv("status", "a", cwd=project).stdout.startswith("a: running\n")
    done = hpcenv("cancel", "a", cwd=project)
    assert done.status == 0, done.stderr
    assert not hpcenv("status", "a", cwd=project).stdout.startswith("a: running\n")


def test_the_wait_ends_in_time_and_the_run_continues(hpcenv: Any, project: Path) -> None:
    (project / "train.py").write_text("import time\ntime.sleep(60)\n")
    done = hpcenv("submit", "train.py", "--nproc", "1", "--name", "a", "--wait", "--timeout", "1", cwd=project)
    try:
        assert done.status == 124, done.stderr
        assert "error[wait-timeout]: 1 run has not ended in time" in done.stderr
        assert hpcenv("status", "a", "--json", cwd=project).envelope["data"]["state"] in ("pending", "running")
    finally:
        hpcenv("cancel", "a", cwd=project)


@pytest.mark.parametrize("words", [("submit", "train.py"), ("rerun", "a")])
def test_a_timeout_without_a_wait_is_refused(hpcenv: Any, project: Path, words: tuple[str, ...]) -> None:
    done = hpcenv(*words, "--timeout", "1h", cwd=project)
    assert done.status == 2
    assert done.stderr.startswith("error[usage]: `--timeout` needs --wait\n")
    assert not (project / "runs").exists()


# -- output -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [("--help",), ("submit", "train.py", "--nproc", "1", "--dry-run"), ("lock", "--check", "--json")]
)
def test_a_reader_who_goes_away_is_no_failure(words: tuple[str, ...], project: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    env = {"PATH": "/usr/bin:/bin", "HOME": "/", "LANG": "C.UTF-8", "XDG_STATE_HOME": str(project.parent / "state")}
    done = subprocess.run(
        [sys.executable, "-m", "hpcenv", *words], cwd=project, env=env, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "Broken pipe" not in done.stderr


def test_what_a_terminal_cannot_show_is_escaped(hpcenv: Any, tmp_path: Path) -> None:
    environ = {"PATH": "/usr/bin:/bin", "HOME": "/", "PYTHONIOENCODING": "ascii:strict"}
    os.mkdir(os.fsencode(tmp_path) + b"/\xff")
    done = hpcenv("status", "größe", b"--runs-dir=\xff", cwd=tmp_path, environ=environ)
    assert done.status == 16
    assert "no run `gr\\xf6\\xdfe`" in done.stderr


def test_a_full_disk_or_a_forbidden_folder_is_told_in_our_own_form(hpcenv: Any, project: Path) -> None:
    (project / "runs").write_text("a file is in the way")
    done = hpcenv("submit", "train.py", "--nproc", "1", "--name", "a", cwd=project)
    assert done.status == 19
    assert f"error[file-unusable]: cannot make the run folder `{project}/runs/a`" in done.stderr
    assert "why: Not a directory" in done.stderr


def test_a_folder_that_was_removed_meanwhile(project: Path) -> None:
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$0" -P -m hpcenv status'
    env = {"PATH": "/usr/bin:/bin", "HOME": "/"}
    done = subprocess.run(["bash", "-c", script, sys.executable], cwd=project, env=env, capture_output=True, text=True)
    assert done.returncode == 19
    assert "error[file-unusable]: the current folder no longer exists" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupt_in_a_callback_of_python_is_not_lost_and_has_no_traceback() -> None:
    """Python ignores what a callback raises (seen: a lock of the import system), and prints a traceback."""
    program = (
        "import sys, time\n"
        "import hpcenv.__main__ as entry\n"
        "class Interrupted:\n"
        "    def __del__(self):\n"
        "        raise KeyboardInterrupt\n"
        "def command():\n"
        "    Interrupted()\n"
        "    time.sleep(20)\n"
        "entry._main = command\n"
        "entry.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=15)
    assert (done.returncode, done.stderr) == (130, "error[interrupted]: interrupted\n")


def test_an_interrupt_in_the_body_of_a_class_is_one_although_python_makes_another_error_of_it() -> None:
    """Seen once in 200 interrupts at random moments, with Python 3.11: RuntimeError: Error calling __set_name__."""

    class Descriptor:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises((RuntimeError, KeyboardInterrupt)) as caught:
        type("Owner", (), {"one": Descriptor()})
    assert isinstance(_errors.from_exception(caught.value), Interrupted)


def test_a_long_value_of_a_hostile_file_does_not_fill_the_screen(tmp_path: Path) -> None:
    (tmp_path / "hpcenv.toml").write_text(f'image = "host"\n{"A" * 200_000} = 1\n')
    done = hpcenv("lock", cwd=tmp_path)
    assert done.status == 3
    assert "more characters)" in done.stderr
    assert len(done.stderr) < 10_000


@pytest.mark.parametrize(
    "command", [["lock", "--check"], ["verify"], ["submit", "t.py", "--gpus", "0", "--nproc", "1"]]
)
def test_an_image_that_is_none_is_not_answered_with_another_lock(project: Path, command: list[str]) -> None:
    spec = project / "hpcenv.toml"
    spec.write_text(spec.read_text().replace('"host"', '"ubuntu"'))
    (project / "t.py").write_text("")
    done = hpcenv(*command, cwd=project)
    assert done.status == 3
    assert "`ubuntu` does not name an image" in done.stderr
    assert "docker://docker.io/library/ubuntu" in done.stderr


@pytest.mark.parametrize(
    "name", ["Dockerfile", "docker/Dockerfile", "Dockerfile.gpu", "Containerfile", "gpu.dockerfile"]
)
def test_a_dockerfile_as_image_is_refused_with_the_command_that_builds_it(
    hpcenv: Any, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"FROM docker.io/library/debian@sha256:{'0' * 64}\nRUN true\n")
    (tmp_path / "hpcenv.toml").write_text(f'image = "{name}"\n')
    done = hpcenv("lock", cwd=tmp_path)
    assert done.status == 3
    assert "it has the name of a Dockerfile" in done.stderr
    assert f"`hpcenv image build {name}`" in done.stderr
    assert "docker://HOST/NAME:TAG" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="NOT RUN: needs /dev/full")
@pytest.mark.parametrize("words", ["--help", "compat --json", "explain", "lock --help", "no-such-command --json"])
@pytest.mark.parametrize("options", [[], ["-u"]])
def test_output_that_cannot_be_written_is_an_error(words: str, options: list[str]) -> None:
    """As on a file system that is full. Status 1 and a traceback would be those of a bug."""
    with open("/dev/full", "w") as full:
        argv = [sys.executable, *options, "-m", "hpcenv", *words.split()]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 19
    assert done.stderr.startswith(
        "error[file-unusable]: standard output cannot be written\n  why: No space left on device\n\nhint: free some"
    )
    assert done.stderr.count("error[") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="NOT RUN: needs /dev/full")
def test_a_command_goes_on_without_standard_error() -> None:
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "-m", "hpcenv", "no-such-command", "--json"]
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=full, text=True, timeout=60)
    assert done.returncode == json.loads(done.stdout)["error"]["exit_status"] == 2


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(project: Path, closed: str) -> None:
    command = f'exec "$0" -P -m hpcenv lock --check {closed}'
    env = {"PATH": "/usr/bin:/bin", "HOME": str(project)}
    done = subprocess.run(
        ["bash", "-c", command, sys.executable], cwd=project, env=env, capture_output=True, timeout=60
    )
    assert b"bug" not in done.stderr
    open_ones = subprocess.run([sys.executable, "-P", "-m", "hpcenv", "lock", "--check"], cwd=project, env=env)
    assert done.returncode == open_ones.returncode


def test_a_program_does_not_write_into_a_file_in_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    """A file that a program opens must not get the number of standard error."""
    program = (
        "import subprocess, sys\n"
        "from hpcenv.cli import _streams\n"
        "_streams.prepare()\n"
        "child = 'import os; print(open(os.devnull).fileno() > 2)'\n"
        "subprocess.run([sys.executable, '-c', child])\n"
    )
    command = 'exec "$0" -P -c "$1" 2>&-'
    done = subprocess.run(["bash", "-c", command, sys.executable, program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n"


def test_a_command_goes_on_where_nothing_reads_standard_error(project: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-m", "hpcenv", "no-such-command", "--json"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=write, text=True, timeout=60)
    assert done.returncode == json.loads(done.stdout)["error"]["exit_status"] == 2
    with open("/dev/full", "w") as full:
        assert subprocess.run([*argv[:-2], "explain"], stdout=full, stderr=write, timeout=60).returncode == 19
    os.close(write)


def test_a_stream_that_python_does_not_buffer_stays_so() -> None:
    program = (
        "import os, sys\n"
        "from hpcenv.cli import _streams\n"
        "_streams.prepare()\n"
        "print('first', end='')\n"
        "os.write(1, b' second')\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-u", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "first second"
