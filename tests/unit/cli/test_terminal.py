"""Nothing that others wrote steers a terminal; into a pipe it goes as it is."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import run_folders as folders
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.cli._terminal import Cleaner, escape_control

SEQUENCES = st.sampled_from(
    [
        "\x1b[2J",
        "\x1b[31m",
        "\x1b[0m",
        "\x1b]0;title\x07",
        "\x1b",
        "\x9b2J",
        "\r",
        "\r\n",
        "\n",
        "\t",
        "\u202e",
        "a",
        "ü",
    ]
)


def cleaned(pieces: list[str]) -> str:
    cleaner = Cleaner()
    return "".join([*(cleaner.feed(piece) for piece in pieces), cleaner.rest()])


@given(st.lists(st.one_of(SEQUENCES, st.text())))
def test_only_colours_and_lines_reach_a_terminal(pieces: list[str]) -> None:
    shown = cleaned(pieces)
    rest = re.sub(r"\x1b\[[0-9;:]*m", "", shown)
    assert all(character.isprintable() or character in "\n\t\u00a0" for character in rest)
    assert escape_control("".join(pieces)).replace("\u00a0", "").isprintable()


@given(st.text(st.sampled_from("a\x1b[;m31\r\n")), st.integers(1, 5))
def test_where_a_piece_ends_makes_no_difference(text: str, size: int) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    # A colour left open ends with its line, wherever the pieces end.
    bare = [part.replace("\x1b[0m", "") for part in (cleaned(pieces), cleaned([text]))]
    assert bare[0] == bare[1]


def test_a_colour_ends_with_its_line() -> None:
    assert cleaned(["\x1b[31mred\nplain"]) == "\x1b[31mred\x1b[0m\nplain"
    assert cleaned(["\x1b[31mred"]) == "\x1b[31mred\x1b[0m"
    assert Cleaner(colours=False).feed("\x1b[31mred\x1b[0m") == "red"


def on_terminal(words: list[str], cwd: Path, *, argv: list[str] | None = None, **environ: str) -> str:
    leader, follower = pty.openpty()
    env = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "LANG": "C.UTF-8", "TERM": "xterm"}
    child = subprocess.Popen(
        argv or [sys.executable, "-m", "hpcenv", *words],
        cwd=cwd,
        env={**env, "XDG_STATE_HOME": str(cwd.parent / "state"), **environ},
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    parts = []
    while select.select([leader], [], [], 60)[0]:
        try:
            part = os.read(leader, 1 << 16)
        except OSError:
            break
        if not part:
            break
        parts.append(part)
    child.wait()
    os.close(leader)
    return b"".join(parts).decode().replace("\r\n", "\n")


def test_a_log_on_a_terminal_and_in_a_pipe(tmp_path: Path) -> None:
    folder = folders.make_run(tmp_path, "a", "local-1", cluster="local", nodes=2, nproc_per_node=1)
    folders.start(folder, ["n1", "n2"])
    log = "[0] \x1b[2Jwiped\n[1] \x1b[32mgreen\x1b[0m\n"
    folder.log.write_text(log)
    assert on_terminal(["logs", "./a"], tmp_path) == (
        "\x1b[36m[0]\x1b[0m \\x1b[2Jwiped\n\x1b[33m[1]\x1b[0m \x1b[32mgreen\x1b[0m\n"
    )
    assert on_terminal(["logs", "./a"], tmp_path, NO_COLOR="1") == "[0] \\x1b[2Jwiped\n[1] green\n"
    piped = subprocess.run(
        [sys.executable, "-m", "hpcenv", "logs", "./a"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert piped.stdout == log
