"""docs/how-to/steps.md: its three steps run, in two environments, as the page says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import TORCH, accept, hpcenv, make_python

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "steps.md"
FILES = re.compile(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^    (hpcenv .*)$", re.MULTILINE)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project of the page, with environments of this machine in place of its two images."""
    pythons = [make_python(tmp_path / name, files) for name, files in (("train", TORCH), ("prepare", {}))]
    page = PAGE.read_text(encoding="utf-8")
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in FILES.findall(page):
        (folder / name).write_text(text)
    spec = (folder / "hpcenv.toml").read_text()
    for python in pythons:
        spec = re.sub(r'image = "docker://.*"', f'image = "host"\npython = "{python}"', spec, count=1)
    assert "docker" not in spec
    (folder / "hpcenv.toml").write_text(spec)
    accept(folder)
    return folder


def test_the_three_steps_of_the_page(project: Path) -> None:
    commands = [shlex.split(line)[1:] for line in COMMANDS.findall(PAGE.read_text(encoding="utf-8"))]
    assert [words[0] for words in commands] == ["lock", "lock", "submit", "submit", "submit"]
    for words in commands:
        done = hpcenv(*words, cwd=project)
        assert done.status == 0, (words, done.stdout, done.stderr)
    locks = {name: (project / "lockfiles" / f"{name}.lock.toml").read_text() for name in ("default", "data")}
    assert "/prepare/" in locks["data"]
    assert 'TOKENIZERS_PARALLELISM = "false"' in locks["data"]
    assert "/train/" in locks["default"]
    assert "TOKENIZERS_PARALLELISM" not in locks["default"]
    assert ('"torch.version" = "info"' in locks["data"], "[policy]" in locks["default"]) == (True, False)
    runs = {name: project / "runs" / name for name in ("prepare", "train", "evaluate")}
    manifests = {name: json.loads((run / "manifest.json").read_text()) for name, run in runs.items()}
    assert "/prepare/" in manifests["prepare"]["environment"]["python"]
    assert "/train/" in manifests["evaluate"]["environment"]["python"]
    assert [one["name"] for one in manifests["prepare"]["settings"]] == ["TOKENIZERS_PARALLELISM"]
    assert manifests["evaluate"]["lockfile"] == "lockfiles/default.lock.toml"
    logs = {name: (run / "job.log").read_text() for name, run in runs.items()}
    assert "wrote 200 points" in logs["prepare"]
    assert "trained: slope 3.0" in logs["train"]
    assert "largest error 0.1" in logs["evaluate"]
    assert json.loads((runs["train"] / "submission.json").read_text())["after"] == ["prepare"]


def test_a_change_of_one_environment_leaves_the_other_lockfile_fresh(project: Path) -> None:
    for name in ("default", "data"):
        assert hpcenv("lock", "--lock", name, cwd=project).status == 0
    spec = (project / "hpcenv.toml").read_text()
    (project / "hpcenv.toml").write_text(spec.replace('PARALLELISM = "false"', 'PARALLELISM = "true"'))
    assert hpcenv("lock", "--check", cwd=project).status == 0
    done = hpcenv("lock", "--check", "--lock", "data", "--json", cwd=project)
    assert [one["name"] for one in done.envelope["data"]["reasons"]] == ["env-changed"]
    done = hpcenv("submit", "prepare.py", "--lock", "data", "--nproc", "1", "--json", cwd=project)
    assert done.envelope["error"]["code"] == "lockfile-stale"
    assert done.envelope["error"]["commands"] == [["hpcenv", "lock", "--lock", "data"]]
