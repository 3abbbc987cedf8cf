"""docs/how-to/ci.md: the commands of its workflow for a cluster, and the imports of the locked packages in their image."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import Done, Project

# The first test converts the image, starts three runs, and imports all packages.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "ci.md"


def workflow() -> dict[str, Any]:
    return dict(yaml.safe_load((PAGE.parent / "ci" / "short-run.yml").read_text(encoding="utf-8")))


def commands() -> list[str]:
    steps = workflow()["jobs"]["short-run"]["steps"]
    return [step["run"] for step in steps if "run" in step and "if" not in step]


def shell(project: Project, line: str, number: str) -> Done:
    """Run a step as the runner would."""
    variables = f"export GITHUB_RUN_ID={number} REFERENCE={project.folder}/reference/ci-reference"
    return project.cluster.run("sh", "-c", f"{variables}; {line}", cwd=project.folder, timeout=900)


def test_the_workflow_compares_a_short_run_with_the_reference_of_the_page(sif_project: Project) -> None:
    [made] = re.findall(r"^    (hpcenv submit .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    done = shell(sif_project, made.replace("/shared/team", f"{sif_project.folder}/reference"), "0")
    assert done.status == 0, done.text

    check, imports, submit, compare = commands()
    words = made.replace("\\\n", " ").replace(
        "--runs-dir /shared/team --name ci-reference", '--name "ci-$GITHUB_RUN_ID"'
    )
    assert submit.split() == words.split(), "the reference is made by another line"
    same = uuid.uuid4().hex[:6]
    for step in (check, imports, submit, compare):
        done = shell(sif_project, step, same)
        assert done.status == 0, (step, done.text)
    assert "equal to the last bit" in done.stdout

    other = uuid.uuid4().hex[:6]
    assert shell(sif_project, f"{submit} --lr 0.5", other).status == 0
    assert shell(sif_project, compare, other).status == 41


def test_each_package_of_the_image_is_imported_in_the_image(sif_project: Project) -> None:
    done = sif_project.hpcenv("verify", "--imports", "--json", timeout=900)
    found = {one["name"]: one for one in json.loads(done.stdout)["data"]["imports"]}
    assert done.status == 0, [one for one in found.values() if one["state"] != "imported"]
    assert "torch" in found["torch"]["module"].split()
    locked = sif_project.cluster.must("cat", f"{sif_project.folder}/lockfiles/default.lock.toml")
    assert len(found) == locked.count("[[packages.dist]]")


def test_the_image_of_the_lockfile_is_named_as_docker_pulls_it(sif_project: Project) -> None:
    said = sif_project.must("image", "inspect", "--reference")
    assert re.fullmatch(r"registry:5000/hpcenv/torch@sha256:[0-9a-f]{64}\n", said)
