"""Text of others in what a command prints: no control character reaches a terminal, and none makes a new line.

The strings stand in keys and values of TOML, in the records of a run, in the output of Slurm, and in file names.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.cli._terminal import clean_text, escape_stream
from hpcenv.records.files import save_record
from hpcenv.records.outcome import NodeExit, RankExit
from hpcenv.records.verdict import Finding, NodeVerdict, Verdict
from tests.conftest import hpcenv

from .test_terminal import on_terminal

HOSTILE = {
    "title": "\x1b]0;PWN\x07",
    "clipboard": "\x1b]52;c;UFdO\x07PWN",
    "clear": "\x1b[2J\x1b[HPWN",
    "answer": "\x1b[6n\x1b[cPWN",
    "c1": "\x9b2J\x9d0;PWN\x9c\x85",
    "bidi": "\u202ePWN\u2066\u200f\u061c",
    "invisible": "P\u200bW\u2060N PWN\ufeff",
    "separators": "\u2028PWN\u2029",
    "back": "PWN\b\b\b\r\x7f\x00",
    "line": "PWN\nforged: this is fine",
}
ALL = " ".join(HOSTILE.values())
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def assert_clean(text: str, *, coloured: bool = False) -> None:
    assert "PWN" in text, f"the hostile text is not in the output, so this shows nothing:\n{text!r}"
    rest = COLOUR.sub("", text) if coloured else text
    left = sorted({c for c in rest if not c.isprintable() and c not in "\n\t\u00a0"})
    assert not left, (left, text)
    assert not re.search(r"^forged", text, re.MULTILINE), text


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_the_two_cleaners(text: str) -> None:
    for clean in (clean_text, escape_stream):
        shown = clean(f"a{text}\tb\n")
        assert shown.startswith("a")
        assert shown.endswith("\tb\n")
        assert all(c.isprintable() or c in "\n\t" for c in shown)
    assert escape_stream("\x1b[31mred\x1b[0m") == "\x1b[31mred\x1b[0m"
    assert clean_text("größe \u00a0 模型") == "größe \u00a0 模型"


def quoted(text: str) -> str:
    """Return a TOML string; JSON's escapes are TOML's but for DEL."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def spec_key(project: Path) -> list[str]:
    (project / "hpcenv.toml").write_text(f'image = "host"\n{quoted(ALL)} = 1\n')
    return ["lock"]


def spec_value(project: Path) -> list[str]:
    (project / "hpcenv.toml").write_text(f"image = {quoted(ALL)}\n")
    return ["lock"]


def spec_is_no_toml(project: Path) -> list[str]:
    (project / "hpcenv.toml").write_text(f'image = "host"\n[{quoted(ALL)}]\n[{quoted(ALL)}]\n')
    return ["submit", "train.py", "--dry-run"]


def lockfile_key(project: Path) -> list[str]:
    lock = project / "lockfiles" / "default.lock.toml"
    lock.write_text(f"{quoted(ALL)} = 1\n" + lock.read_text())
    return ["lock", "--check"]


def lockfile_values(project: Path) -> list[str]:
    """Each string of a lockfile, for `diff`."""
    lock = project / "lockfiles" / "default.lock.toml"
    evil = with_versions(lock.read_text())
    (project / "lockfiles" / "evil.lock.toml").write_text(evil)
    return ["diff", "default", "evil"]


def with_versions(text: str) -> str:
    """Return a lockfile in which each version is hostile."""
    lines = text.splitlines(keepends=True)
    return "".join(f"version = {quoted(ALL)}\n" if line.startswith("version = ") else line for line in lines)


def lockfile_exported(project: Path) -> list[str]:
    lock = project / "lockfiles" / "default.lock.toml"
    lock.write_text(with_versions(lock.read_text()))
    return ["export", "cyclonedx"]


def site_profile(project: Path) -> list[str]:
    (project / "sites").mkdir(exist_ok=True)
    (project / "sites" / "a.toml").write_text(f"{quoted(ALL)} = 1\n")
    return ["submit", "train.py", "--dry-run", "--site", "a"]


def script_name(project: Path) -> list[str]:
    return ["submit", ALL.replace("\x00", "") + ".py", "--dry-run", "--nproc", "1"]


def word(_project: Path) -> list[str]:
    return [ALL.replace("\x00", "")]


def option(_project: Path) -> list[str]:
    return ["submit", "--" + HOSTILE["title"] + HOSTILE["bidi"]]


def run_name(_project: Path) -> list[str]:
    return ["status", ALL.replace("\x00", "")]


def field(_project: Path) -> list[str]:
    return ["explain", ALL.replace("\x00", "")]


def slurm_config(project: Path) -> list[str]:
    """`doctor` shows what Slurm says of itself."""
    return ["doctor"]


def batch_script(project: Path) -> list[str]:
    """`--dry-run` shows the script, with the lines of `setup`."""
    spec = project / "hpcenv.toml"
    # A string of JSON is one of TOML, too.
    lines = json.dumps([ALL.replace("\0", "")])
    spec.write_text(spec.read_text() + f"\n[submit]\nassume-shared = true\nsetup = {lines}\n")
    return ["submit", "train.py", "--dry-run", "--nproc", "1"]


def dockerfile(project: Path) -> list[str]:
    (project / "Dockerfile").write_text(
        f"FROM {ALL.replace(chr(10), ' ')}:latest\nRUN {ALL.replace(chr(10), ' ')}\nPWN {ALL}\n"
    )
    return ["image", "lint", "Dockerfile"]


def image_file(project: Path) -> list[str]:
    name = ALL.replace("\x00", "") + ".sif"
    (project / name).write_text("PWN")
    return ["image", "inspect", name]


IN_A_PROJECT: tuple[Callable[[Path], list[str]], ...] = (
    spec_key, spec_value, spec_is_no_toml, lockfile_key, lockfile_values, lockfile_exported, site_profile, script_name,
    word, option, run_name, field, slurm_config, batch_script, dockerfile, image_file,
)  # fmt: skip
# Data for another program: into a pipe it goes as it is.
DATA = (lockfile_exported, batch_script)


@pytest.mark.parametrize("place", IN_A_PROJECT, ids=lambda place: place.__name__)
def test_in_a_project(place: Callable[[Path], list[str]], project: Path, fake_slurm: Any) -> None:
    fake_slurm.answers("sbatch", f"slurm {ALL}\n")
    fake_slurm.answers("scontrol", f"SLURM_VERSION = 24.11{ALL}\nClusterName = {ALL}\n")
    fake_slurm.answers("sinfo", f"{ALL}|up|infinite|2|8|gpu:2|{ALL}|1000\n")
    check(place(project), project, {**fake_slurm.environ, "HOME": str(project)}, piped=place not in DATA)


@pytest.fixture
def runs(tmp_path: Path, project: Path, fake_slurm: Any) -> Path:
    """Two runs: what nodes, ranks, images and Slurm say is hostile."""
    for number, name in ((7, "a"), (8, "b")):
        run = folders.make_run(
            tmp_path / "runs", name, str(number), nodes=2, nproc_per_node=1, lockfile=ALL, script=ALL, args=(ALL,), workdir=ALL,
            hpcenv_version=ALL, element={ALL: ALL},
        )  # fmt: skip
        lock = (project / "lockfiles" / "default.lock.toml").read_text()
        run.lockfile.write_text(lock if name == "a" else with_versions(lock))
        folders.start(run, [f"n{name}", "n2"], job_id=str(number))
        finding = Finding(
            node="n2", field="torch.version", locked=ALL, found=ALL + name, result="mismatch", severity="must", note=ALL
        )
        nodes = tuple(NodeVerdict(node=node, result="mismatch", compared=3, sif=ALL) for node in ("n1", "n2"))
        verdict = Verdict(
            schema=1, run=name, attempt=0, result="mismatch", nodes=nodes, findings=(finding,), rendezvous=None, settings={}
        )  # fmt: skip
        save_record(verdict, run.verdict)
        rank = RankExit(
            rank=0, local_rank=0, pid=5, status=7, ended=6.0, message=ALL, traceback=ALL, source="error-file", log=ALL
        )
        values = {"schema": 1, "run": name, "attempt": 0, "started": 1.0, "ended": 6.0}
        save_record(NodeExit(**values, node="n2", status=7, signal=ALL, ranks=(rank,)), run.exit_of("n2"))
        save_record(
            NodeExit(**values, node="n1", status=7, signal="", asked_to_end=ALL, asked_at=5.0), run.exit_of("n1")
        )
        folders.write(run.finished, status=7, time=7.0)
        run.log.write_text(f"[0] {ALL}\n")
    # Slurm's words about a job that waits.
    pending = folders.make_run(tmp_path / "runs", "c", "9", nodes=2)
    assert pending.manifest.exists()
    fake_slurm.answers("squeue", f"9|PENDING|{HOSTILE['title']} {HOSTILE['clear']} {HOSTILE['bidi']}||0:00\n")
    fake_slurm.answers("sacct", "7|FAILED|7:0|n2|00:10:00\n8|FAILED|7:0|n2|00:10:00\n")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["report", "a"],
        ["status", "c"],
        ["list"],
        ["diff", "a", "b"],
        ["wait", "a"],
        ["logs", "a"],
    ],
    ids=lambda words: words[0],
)
def test_about_a_run(words: list[str], runs: Path, fake_slurm: Any) -> None:
    environ = {**fake_slurm.environ, "HOME": str(runs)}
    words = [*words, "--runs-dir", str(runs / "runs")]
    if words[0] == "logs":
        shown = on_terminal(words, runs, **environ)
        shown = shown.replace("\nforged: this is fine", "")  # a log has the lines that it has
        assert_clean(shown, coloured=True)
        return
    check(words, runs, environ)


def check(words: list[str], cwd: Path, environ: Mapping[str, str], *, piped: bool = True) -> None:
    assert_clean(on_terminal(words, cwd, **environ))
    if not piped:
        return
    done = hpcenv(*words, cwd=cwd, environ=environ, accepts=False)
    assert_clean(done.stdout + done.stderr)


def test_a_traceback_and_progress_are_clean(tmp_path: Path) -> None:
    """A bug in hpcenv, and the bars of long work, which move the cursor themselves."""
    program = tmp_path / "show.py"
    program.write_text(f"""
import sys
from hpcenv.cli import _errors, _progress, _streams
from hpcenv.progress import Event
_streams.prepare()
if sys.argv[1] == "bug":
    try:
        raise RuntimeError({ALL.replace(chr(10), " ")!r})
    except RuntimeError as error:
        _errors.show(_errors.from_exception(error), as_json=False, command="x")
else:
    with _progress.shown(as_json=False) as show:
        show(Event(phase="note", what={ALL!r}))
        show(Event(phase="fetch", what={ALL!r}, done=1, total=2))
        show(Event(phase="fetch", what={ALL!r}, done=2, total=2))
""")
    for kind in ("bug", "bars"):
        argv = [sys.executable, str(program), kind]
        piped = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        assert_clean(piped.stdout + piped.stderr)
        shown = on_terminal([], tmp_path, argv=argv)
        # What rich itself writes: colours, moves, hiding the cursor. None of HOSTILE is one of these.
        own = re.sub(r"\x1b\[(\?25[lh]|[0-9]*[AK]|[0-9;]*m)|\r", "", shown) if kind == "bars" else shown
        assert_clean(own)
