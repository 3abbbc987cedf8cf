"""docs/how-to/elsewhere.md: its commands run as they are written, and write what the page says.

tests/cluster/test_exports.py starts what they write, and exports a run of the cluster.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import tomlkit
import tomllib
import yaml
from exports_world import name_image

from hpcenv.project import lockfile as lock_model
from tests.conftest import Done, accept, hpcenv

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "elsewhere.md").read_text(encoding="utf-8")
SUBMIT, CLAIM = (shlex.split(line) for line in re.findall(r"^    (hpcenv .*)$", PAGE, re.MULTILINE))
ROWS = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)`.* \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)}
SECRET = ("--secret", "HF_TOKEN=env:HF_TOKEN")


@pytest.fixture
def project(project: Path, request: pytest.FixtureRequest) -> Path:
    """A project whose lockfile has a torch for GPUs and, unless it is for Slurm, an image of a registry."""
    path = project / "lockfiles" / "default.lock.toml"
    data = tomllib.loads(path.read_text())
    data["torch"]["cuda"] = "12.8"
    data["fingerprint"] = lock_model.fingerprint(data)
    path.write_text(tomlkit.dumps(data))
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write("[submit]\nassume-shared = true\n")
    if getattr(request, "param", "") != "slurm":
        name_image(project)
    accept(project)
    return project


def write(project: Path, engine: str, *more: str, command: list[str] = SUBMIT) -> Done:
    """Type a command of the page with another --format, and with further options."""
    words = [engine if word == "kubernetes" else word for word in command]
    gpus = ("--gpu-type", "H100") if engine == "skypilot" else ()
    done = hpcenv(*words[1:3], *gpus, *more, *words[3:], cwd=project)
    assert done.status == 0, done.stderr
    return done


def test_the_page_has_what_this_file_runs() -> None:
    assert set(ROWS) == {"slurm", "compose", "kubernetes", "trainjob", "skypilot"}
    assert SUBMIT[:3] == CLAIM[:3] == ["hpcenv", "submit", "train.py"]
    for sentence in ("GPUs need `--gpu-type H100`", f"`{' '.join(SECRET)}`"):
        assert sentence in PAGE


@pytest.mark.parametrize(("project", "engine"), [(name, name) for name in ROWS], indirect=["project"])
def test_each_row_of_its_table(project: Path, engine: str) -> None:
    files, start = ROWS[engine]
    done = write(project, engine)
    folder = project / "elsewhere"
    assert {path.name for path in folder.glob("*.yaml")} == set(re.findall(r"[\w-]+\.yaml", files))
    assert (folder / files.split(", ")[0]).is_file()
    assert re.findall("`(.*?)`", start)[0] in " ".join((done.stdout + done.stderr).split())
    if engine != "slurm":
        assert {path.name for path in folder.iterdir() if path.is_dir()} == {"check", "lock", "code"}


def test_the_first_program_of_a_container(project: Path) -> None:
    write(project, "compose")
    (line,) = re.findall(r"^    (python3 -I .*)$", PAGE, re.MULTILINE)
    before, after = (part.split() for part in line.split(" ... "))
    for service in yaml.safe_load((project / "elsewhere/compose.yaml").read_text())["services"].values():
        words = [Path(word).name.removesuffix("3") for word in (*service["entrypoint"], *service["command"])]
        assert words[: len(before)] == [word.removesuffix("3") for word in before]
        assert words[-len(after) :] == after


def test_its_claim_has_the_code(project: Path) -> None:
    done = write(project, "kubernetes", command=CLAIM)
    assert "the claim team with the content of code/" in done.stderr
    documents = [*yaml.safe_load_all((project / "elsewhere/kubernetes.yaml").read_text())]
    (container,) = documents[1]["spec"]["template"]["spec"]["containers"]
    assert f"The pod works in `{container['workingDir']}`" in PAGE
    assert documents[1]["spec"]["backoffLimit"] == 3 * 2, "at most three times the number of nodes"


@pytest.mark.parametrize("engine", ["compose", "skypilot", "kubernetes", "trainjob"])
def test_where_an_engine_gets_its_secret_from(project: Path, engine: str) -> None:
    done = write(project, engine, *SECRET)
    said = " ".join((done.stdout + done.stderr).split())
    if engine in ("compose", "skypilot"):
        assert "the secret HF_TOKEN in the environment" in said
        assert ("sky launch --secret HF_TOKEN task.yaml" in said) == (engine == "skypilot")
    else:
        assert "kubectl create secret generic elsewhere-secrets --from-file=HF_TOKEN=" in said
