"""The README's sessions are real: its commands run in the testbed and print what it shows."""

from __future__ import annotations

import doctest
import re
import uuid
from collections.abc import Iterator

import pytest

from .conftest import ROOT, Cluster, Project, copy_examples

pytestmark = pytest.mark.cluster


def sessions() -> list[tuple[str, str]]:
    """Each `$ command` of the README's console blocks with the output below it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


@pytest.fixture
def project(cluster: Cluster) -> Iterator[Project]:
    """A newcomer's folder. What the sessions start and damage is gone afterwards."""
    made = Project(cluster, f"/home/alice/hpcenv-tests/readme-{uuid.uuid4().hex[:6]}")
    copy_examples(cluster, made.folder)
    yield made
    cluster.run("scancel", "--name", "busy", "--user", "alice")
    cluster.run("rm", "-rf", f"{made.folder}/store")


def test_the_readmes_sessions_print_what_it_shows(cluster: Cluster, project: Project) -> None:
    checker, status = doctest.OutputChecker(), 0
    assert len(sessions()) >= 12
    for command, expected in sessions():
        # A store of its own: the sessions damage a SIF.
        # stdout alone: what hpcenv says about its progress goes to stderr.
        shell = f"export HPCENV_STORE={project.folder}/store; (exit {status}); {command}"
        done = cluster.run("bash", "-c", shell, cwd=project.folder, timeout=600)
        status = done.status
        want = expected.replace("\n\n", "\n<BLANKLINE>\n")
        got = done.stdout
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert checker.check_output(want, got, flags), (
            f"$ {command}\n--- README\n{want}\n--- printed\n{got}{done.stderr}"
        )
