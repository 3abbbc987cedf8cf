"""What the hint of an error says works: its commands run as they are printed, and end in no other error.

tests/hint_cases.py has the cases, and what no script can follow.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence

import pytest

from tests.cluster.conftest import ACCEPT, Cluster, Done, Project
from tests.hint_cases import CASES, Case

TRAIN = "print('trained', flush=True)\n"
ENDED = """\
hpcenv submit train.py --nodes 1 --gpus 0 --nproc 1 --name a
hpcenv submit train.py --nodes 1 --gpus 0 --nproc 1 --name s --sweep seed=0..1
hpcenv wait a s
"""


@pytest.fixture(scope="module")
def ended(host_project: Project, cluster: Cluster) -> str:
    """A project with an ended run and an ended sweep."""
    folder = f"{host_project.folder}-ended"
    _copy(host_project, folder)
    cluster.must("sh", "-c", ENDED, cwd=folder)
    return folder


def _copy(project: Project, folder: str) -> None:
    command = 'mkdir "$1" && cp -r hpcenv.toml lockfiles "$1" && cat > "$1/train.py"'
    project.cluster.must("sh", "-c", command, "sh", folder, cwd=project.folder, stdin=TRAIN)
    project.cluster.must("/shared/hpcenv/venv/bin/python", "-c", ACCEPT, cwd=folder)


def _marked(number: int, case: Case) -> object:
    """Every second case is a long test: all of them take some minutes."""
    return pytest.param(case, id=case.name, marks=[pytest.mark.long] * (bool(case.long) or number % 2))


@pytest.mark.parametrize("case", [_marked(number, case) for number, case in enumerate(CASES)])
def test_the_hint_works(case: Case, host_project: Project, cluster: Cluster, request: pytest.FixtureRequest) -> None:
    folder = f"{host_project.folder}-hint-{CASES.index(case)}"
    if case.ended:
        folder = request.getfixturevalue("ended")
    else:
        _copy(host_project, folder)
    try:
        provoke = f'{case.setup or ":"}\n{shlex.join(("hpcenv", *_with_json(case.argv)))}; echo "$?"; pwd'
        said = cluster.must("sh", "-c", provoke, cwd=folder)
        body, status, place = said.rstrip().rsplit("\n", 2)
        error = json.loads(body[body.index("{\n") :])["error"]
        assert error is not None, f"nothing failed: {body}"
        assert int(status) == error["exit_status"]
        assert error["hint"], error
        followed = list(_followed(error, case))
        assert followed, f"nothing to follow in: {error['hint']}"
        for line in followed:
            done = cluster.run("sh", "-c", line, cwd=place)
            _require_no_error(line, done, case)
    finally:
        if case.tidy:
            cluster.run("sh", "-c", case.tidy, cwd=folder)


def _with_json(argv: Sequence[str]) -> list[str]:
    end = argv.index("--") if "--" in argv else len(argv)
    return [*argv[:end], "--json", *argv[end:]]


def _followed(error: dict[str, object], case: Case) -> list[str]:
    """Return the shell lines that the hint leads to."""
    hint, commands = str(error["hint"]), error["commands"]
    assert isinstance(commands, list)
    lines = [shlex.join(_with_added(_filled(words, case), case)) for words in commands]
    shown = {shlex.join(words) for words in commands}
    lines += [line for line in re.findall(r"`([^`]+)`", hint) if line.split()[0] in _PROGRAMS and line not in shown]
    if lines:
        return lines
    if case.wrong:
        meant = re.search(r"perhaps you meant `([^`]+)`", hint)
        assert meant, hint
        line = shlex.join(("hpcenv", *case.argv)).replace(case.wrong, meant[1])
        assert line != shlex.join(("hpcenv", *case.argv))
        return [line]
    if hint.startswith(("hpcenv ", "export ")):
        return [re.split(r", (?:or |--)", hint)[0] + "".join(f" {word}" for word in case.adds)]
    return [shlex.join(("hpcenv", *words, *case.adds)) for words in _with_options(hint, case)]


def _with_added(words: Sequence[str], case: Case) -> list[str]:
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], *case.adds, *words[end:]]


# Programs of a command that a hint has as text.
_PROGRAMS = ("hpcenv", "sinfo", "squeue", "scontrol", "sacctmgr", "ls", "df")


def _filled(words: Sequence[str], case: Case) -> list[str]:
    """Return a command with what the reader writes in place of the words in capitals."""
    filled: list[str] = []
    for word in words:
        assert "..." not in word, f"{word}: a word to fill in is written in capitals"
        filled += shlex.split(case.fills[word]) if word in case.fills else [word]
    left = [word for word in filled if re.fullmatch(r"[A-Z][A-Z_]*", word) and word not in case.argv and word != "END"]
    assert not left, f"no value for {left}"
    return filled


def _with_options(hint: str, case: Case) -> list[list[str]]:
    """Return the command line with the options that the text names; `, or ` separates two ways."""
    ways = []
    for way in re.split(r",? or |; |, ", hint):
        words = re.findall(r"(?<!\S)(-{1,2}[a-z][a-z-]*)(?: ((?!--)[^\s,;`]+))?", way)
        if words:
            ways.append(_replaced(case, [(option, case.fills.get(value, value)) for option, value in words]))
    return ways


def _replaced(case: Case, options: Sequence[tuple[str, str]]) -> list[str]:
    words = list(case.argv)
    for option, value in options:
        takes_value = value and option not in _FLAGS
        while option in words:
            at = words.index(option)
            del words[at : at + (2 if takes_value else 1)]
        words += [option, value] if takes_value else [option]
    return words


_FLAGS = ("--allow-dirty", "--allow-cpu-torch")


def _require_no_error(line: str, done: Done, case: Case) -> None:
    said = f"{line}\nended with {done.status}\n{done.text}"
    assert done.status in case.statuses, said
    assert not re.search(r"^error\[", done.stderr, re.MULTILINE), said
    assert "Traceback" not in done.text, said
