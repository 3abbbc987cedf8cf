"""Files of a run folder that are pipes, devices, links, folders, or too long: no command waits, and none shows another file.

A run folder may come from somebody else. Each command has a time limit here; a pipe without a writer would never end.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.records.files import open_regular, read_end, read_file, read_json
from hpcenv.records.run_folder import RunFolder
from tests.conftest import hpcenv

SECRET = "the reader's own secret"


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_link_to_a_file(path: Path) -> None:
    secret = path.parents[len(path.parts) - 2 - path.parts.index("runs")] / "secret.json"
    secret.write_text(f'{{"schema": 1, "status": 0, "why": "{SECRET}"}}\n[0] {SECRET}\n')
    path.symlink_to(secret)


def a_link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def a_folder(path: Path) -> None:
    path.mkdir()


def a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


UNUSUAL: tuple[Callable[[Path], None], ...] = (
    a_pipe, a_link_to_a_device, a_link_to_a_file, a_link_to_a_pipe, a_folder, a_socket,
)  # fmt: skip


@pytest.mark.parametrize("unusual", UNUSUAL, ids=lambda kind: kind.__name__)
def test_the_readers_refuse_by_name(unusual: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a" / "job.log"
    path.parent.mkdir(parents=True)
    unusual(path)
    for read in (
        open_regular,
        lambda p: read_file(p, follow=False),
        lambda p: read_end(p, most=9),
        lambda p: read_json(p),
    ):
        with pytest.raises(OSError, match=r"symbolic link|regular file|directory|No such device") as caught:
            read(path)
        assert caught.value.filename == str(path)


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("0123456789")
    assert read_end(path, most=4) == b"6789"
    assert read_end(path, most=40) == b"0123456789"
    assert read_file(path, most=10) == b"0123456789"
    with pytest.raises(OSError, match="more than"):
        read_file(path, most=9)
    os.truncate(path, 1 << 40)  # takes no room on the disk
    with pytest.raises(OSError, match="more than"):
        read_file(path)
    assert read_end(path, most=4) == bytes(4)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="levels"):
        read_json(path)


FILES = {
    "log": lambda run: run.log,
    "verdict": lambda run: run.verdict,
    "started": lambda run: run.started,
    "finished": lambda run: run.finished,
    "manifest": lambda run: run.manifest,
    "submission": lambda run: run.submission,
    "request": lambda run: run.request,
    "lockfile": lambda run: run.lockfile,
    "exit": lambda run: run.exit_of("n1"),
    "settings": lambda run: run.env_of("n1"),
    "rank's log": lambda run: run.ranks / "n1" / "7.0_x" / "attempt_0" / "0" / "stderr.log",
    "script": lambda run: run.script,
}
COMMANDS = (
    ["report", "a"], ["logs", "a"], ["logs", "a", "--err"], ["status", "a"], ["list"], ["diff", "a", "b"], ["wait", "a"],
    ["cancel", "a"], ["clean", "a", "--dry-run"], ["clean", "a", "--yes"], ["attach", "a"], ["rerun", "a", "--dry-run"],
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, project: Path, fake_slurm: Any) -> RunFolder:
    for name, job in (("a", "7"), ("b", "8")):
        made = folders.make_run(tmp_path / "runs", name, job)
        folders.start(made, ["n1"], job_id=job)
        folders.end(made, "n1", 7)
        made.log.write_text("[0] hello\n")
        made.lockfile.write_bytes((project / "lockfiles" / "default.lock.toml").read_bytes())
        errors = FILES["rank's log"](made)
        errors.parent.mkdir(parents=True)
        errors.write_text("hello\n")
    fake_slurm.answers("sacct", "7|FAILED|7:0|n1|00:10:00\n8|FAILED|7:0|n1|00:10:00\n")
    return RunFolder(tmp_path / "runs" / "a")


# One unusual file at a time would be 12 x 6 x 12 commands: the commands are spread over the files and the kinds.
CASES = [
    (command, file, UNUSUAL[(at + number) % 3])
    for at, command in enumerate(COMMANDS)
    for number, file in enumerate(FILES)
    if (at + number) % 4 == 0 or file == "log" and command[0] in ("report", "logs")
]


@pytest.mark.parametrize(("command", "file", "unusual"), CASES, ids=lambda part: getattr(part, "__name__", str(part)))
def test_no_command_waits_or_shows_another_file(
    command: list[str], file: str, unusual: Callable[[Path], None], run: RunFolder, fake_slurm: Any
) -> None:
    path = FILES[file](run)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    unusual(path)
    words = [*command, "--runs-dir", str(run.path.parent)]
    done = hpcenv(*words, cwd=run.path.parent.parent, environ=fake_slurm.environ, timeout=50)
    assert done.status != 1, done.stderr
    assert "Traceback" not in done.stderr
    assert SECRET not in done.stdout + done.stderr
    if command[0] == "logs" and file == "log" and "--err" not in command:
        assert "cannot" in done.stderr
        assert str(path) in done.stderr
