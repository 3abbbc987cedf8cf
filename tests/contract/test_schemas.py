"""The JSON Schemas for editors: each key that a reader knows is there, with a text, and no other; taplo uses them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomlkit

from hpcenv.project import document
from hpcenv.project.document import Document
from hpcenv.project.site import SiteFile
from hpcenv.project.spec import TEMPLATE, Project

ROOT = Path(__file__).resolve().parents[2]
FILES = {"hpcenv.schema.json": Project, "site.schema.json": SiteFile}
PROFILES = sorted((ROOT / "sites").glob("*.toml"))


def schema(name: str) -> Any:
    return json.loads((ROOT / "docs" / "reference" / name).read_text())


def problems(name: str, text: str) -> list[str]:
    """Return what is wrong by the schema; TOML's dates are texts there."""
    data = json.loads(json.dumps(tomlkit.parse(text).unwrap(), default=str))
    return [error.message for error in jsonschema.Draft7Validator(schema(name)).iter_errors(data)]


def in_schema(part: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each key."""
    for key, inner in part.get("properties", {}).items():
        assert len(inner["description"]) > 5, f"{path}.{key}"
        yield f"{path}.{key}"
        yield from in_schema(inner, f"{path}.{key}")
    below = (part.get("items"), part.get("additionalProperties"), *part.get("anyOf", ()))
    for inner in (one for one in below if isinstance(one, dict)):
        yield from in_schema(inner, path)


def in_reader(table: type[Document], path: str = "") -> Iterator[str]:
    for name in table.model_fields:
        key = document.kebab(name)
        yield f"{path}.{key}"
        below = document.table_at(table, [key])
        if below is not None:
            yield from in_reader(below, f"{path}.{key}")


@pytest.mark.parametrize(("name", "kind"), FILES.items())
def test_each_key_of_the_reader_is_in_the_schema_and_back(name: str, kind: type[Document]) -> None:
    jsonschema.Draft7Validator.check_schema(schema(name))
    found = set(in_schema(schema(name)))
    assert len(found) > 60
    assert found == set(in_reader(kind))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_the_profiles_of_the_repository_keep_to_it(path: Path) -> None:
    assert problems("site.schema.json", path.read_text()) == []


ACCEPTED = """\
image = "docker://ghcr.io/team/train:1"
plain-http = ["registry:5000"]
[submit]
nodes = 2
time = "04:00:00"
grace = 90
launcher = "srun"
[sbatch]
exclusive = true
[[data]]
path = "/d"
compare = "sha256"
[policy]
"system.glibc" = "must"
[environment.data]
image = "host"
[[environment.data.bind]]
source = "/scratch"
read-only = true
"""
REFUSED = {
    "an unknown key": 'image = "host"\n[submit]\ngpu = 8\n',
    "a wrong type": 'image = "host"\n[submit]\nnodes = "two"\n',
    "a wrong word": 'image = "host"\n[policy]\n"torch.version" = "maybe"\n',
    "no image": "[submit]\nnodes = 2\n",
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_schema_refuses_what_the_reader_refuses(what: str) -> None:
    assert problems("hpcenv.schema.json", REFUSED[what]) != []
    assert document.parse(Project, tomlkit.parse(REFUSED[what]).unwrap())[0] is None


def test_the_schema_accepts_what_the_reader_accepts() -> None:
    assert problems("hpcenv.schema.json", ACCEPTED) == []
    assert document.parse(Project, tomlkit.parse(ACCEPTED).unwrap())[1] == ()


@pytest.fixture
def written(hpcenv: Any, tmp_path: Path) -> Path:
    """What `hpcenv init` writes."""
    (tmp_path / "p").mkdir()
    done = hpcenv("init", cwd=tmp_path / "p", environ={"HOME": str(tmp_path)})
    assert done.status == 0, done.stderr
    return tmp_path / "p" / "hpcenv.toml"


def test_init_writes_the_schema_and_names_it_in_the_first_line(written: Path) -> None:
    assert written.read_text().splitlines()[0] == "#:schema ./hpcenv.schema.json" == TEMPLATE.splitlines()[0]
    assert json.loads((written.parent / "hpcenv.schema.json").read_text()) == schema("hpcenv.schema.json")
    assert problems("hpcenv.schema.json", written.read_text()) == []


def test_taplo_reads_the_first_line_and_finds_mistakes(written: Path) -> None:
    taplo = shutil.which("taplo", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if taplo is None:
        pytest.skip("NOT CHECKED: taplo is not installed (pip install taplo); jsonschema checked the same above")

    def lint(text: str) -> int:
        written.write_text(text)
        return subprocess.run([taplo, "lint", written], cwd=written.parent, capture_output=True).returncode

    first, rest = written.read_text().split("\n", 1)
    assert [lint(f"{first}\n{text}") for text in (rest, ACCEPTED)] == [0, 0]
    assert all(lint(f"{first}\n{text}") != 0 for text in REFUSED.values())
    # Without the first line, taplo knows no schema: it was that line that it read.
    assert lint(REFUSED["an unknown key"]) == 0
