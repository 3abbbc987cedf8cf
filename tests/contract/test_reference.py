"""docs/reference is what the code says: generated pages, and a schema that real lockfiles keep."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomlkit

from hpcenv.cli._help import VERBS
from hpcenv.project import fields, lockfile

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
SEEDS = sorted((ROOT / "tests" / "fuzz" / "seeds" / "lockfile").iterdir())
STALE = sorted((ROOT / "tests" / "stale").glob("*/lockfiles/*.toml"))


def schema() -> Any:
    return json.loads((REFERENCE / "lockfile.schema.json").read_text())


def problems(data: Any) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema())
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(data)]


def parsed(path: Path) -> dict[str, Any]:
    return tomlkit.parse(path.read_text()).unwrap()


def test_the_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "reference-docs", "--check"], text=True, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, ""), "run scripts/reference-docs"


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


# -- what keeps to it ---------------------------------------------------------------------


def test_the_lockfiles_of_the_tests_keep_to_the_schema() -> None:
    assert {path: said for path in (*SEEDS, *STALE) if (said := problems(parsed(path)))} == {}


def test_what_lock_writes_today_keeps_to_the_schema(project: Path) -> None:
    assert problems(parsed(project / "lockfiles" / "default.lock.toml")) == []


def test_what_a_run_keeps_keeps_to_the_schema(hpcenv: Any, project: Path) -> None:
    done = hpcenv("submit", "train.py", "--nproc", "1", "--name", "a", "--wait", "--", b"\xff", cwd=project)
    assert done.status == 0, done.stderr
    data = parsed(project / "runs" / "a" / "lock.toml")
    assert problems(data) == []
    assert data["run"]["argv"][-1] == "\\xff"


def changed(*path: str, value: Any) -> dict[str, Any]:
    """Return a good lockfile with one key set, or removed."""
    data: dict[str, Any] = copy.deepcopy(parsed(SEEDS[-1]))
    table = data
    for part in path[:-1]:
        table = table[part] if isinstance(table, dict) else table[int(part)]
    if value is None:
        del table[path[-1]]
    else:
        table[path[-1]] = value
    return data


@pytest.mark.parametrize(
    "data",
    [
        changed("schema", value=2),
        changed("schema", value=None),
        changed("torch", value=None),
        changed("python", "version", value=None),
        changed("kind", value="host"),
        changed("container", value=None),
        changed("kind", value="other"),
        changed("nosuch", value=1),
        changed("packages", "nosuch", value=1),
        changed("packages", "count", value="1"),
        changed("packages", "dist", "0", "version", value=None),
        changed("torch", "ratio", value=1.5),
        changed("libs", value={"nccl": {"version": {"a": "b"}}}),
        changed("policy", value={"torch.version": "maybe"}),
        changed("container", "sif", "size", value="4"),
    ],
)
def test_what_is_no_lockfile_does_not(data: dict[str, Any]) -> None:
    assert problems(data) != []


# -- what is documented -------------------------------------------------------------------


def test_every_field_has_its_row() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (REFERENCE / "fields.md").read_text(), re.MULTILINE)
    assert rows == [field.name for field in fields.FIELDS]


def test_every_table_and_key_has_its_row() -> None:
    page = (REFERENCE / "lockfile.md").read_text()
    sections = re.findall(r"^## `\[+([^\]]+)\]+`$", page, re.MULTILINE)
    assert {"asked", "container", "container.sif", "libs.*", "packages.dist", "packages.dist.wheel", "policy"} <= set(
        sections
    )
    assert set(lockfile.FACT_TABLES) <= set(sections)

    def keys(table: dict[str, Any]) -> set[str]:
        inner = [part.get("items", part) for part in table.get("properties", {}).values()]
        return set(table.get("properties", {})).union(*map(keys, inner))

    missing = {
        key for key in keys(schema()) if f"`{key}`" not in page and f"[{key}]" not in page and f".{key}]" not in page
    }
    assert missing == set()


def test_every_command_in_a_page_is_one() -> None:
    words = {
        (page.name, word)
        for page in REFERENCE.glob("*.md")
        for word in re.findall(r"`hpcenv ([a-z]+)", page.read_text())
    }
    assert words
    assert {(name, word) for name, word in words if word not in VERBS} == set()
