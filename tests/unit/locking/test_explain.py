"""`hpcenv explain`: every field, with what the project's lockfile says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomlkit

from hpcenv.errors import UsageError
from hpcenv.locking import difference
from hpcenv.locking.explain import explain
from hpcenv.project.fields import FIELDS
from hpcenv.project.workspace import read_lockfile


@pytest.mark.parametrize("name", [field.name for field in FIELDS])
def test_every_field_of_the_list(name: str, tmp_path: Path) -> None:
    found = explain(tmp_path, name)
    assert (found.name, found.field.name) == (name, name)
    assert (found.locked, found.unknown, found.override) == (None, None, None)


def test_every_field_of_a_real_lockfile_has_its_value(project: Path) -> None:
    locked = read_lockfile(project / "lockfiles" / "default.lock.toml")
    for name, value in difference.of_lockfile(locked).items():
        assert explain(project, name).locked == difference.show(value)


def test_a_value_a_reason_and_an_override(project: Path) -> None:
    path = project / "lockfiles" / "default.lock.toml"
    data = tomlkit.parse(path.read_text())
    data["unknown"] = {"libs.cudnn.version": "cannot be read"}
    data["policy"] = {"torch.version": "warn"}
    path.write_text(tomlkit.dumps(data))
    found = explain(project, "torch.version")
    assert (found.locked, found.override) == ("2.13.0+cpu", "warn")
    assert explain(project, "libs.cudnn.version").unknown == "cannot be read"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("torch.vresion", "perhaps torch.version"),
        ("torch.verison", "perhaps torch.version"),
        ("pyton.version", "perhaps python.version"),
        ("packages.env-digets", "perhaps packages.env-digest"),
        ("host.gpu-modles", "perhaps host.gpu-models"),
        ("qqq", "`hpcenv explain` lists them all"),
        ("", "`hpcenv explain` lists them all"),
    ],
)
def test_an_unknown_field_names_close_ones(name: str, hint: str, project: Path) -> None:
    with pytest.raises(UsageError, match=f"there is no field `{name}`") as caught:
        explain(project, name)
    assert str(caught.value.hint).startswith(hint)


def test_a_name_that_is_close_to_a_field_and_in_the_lockfile_is_meant(project: Path) -> None:
    """`torch.cuda` is close, but this very name is locked."""
    assert explain(project, "torch.cxx11-abi").field.name == "torch.*"


# -- on the command line ------------------------------------------------------------------


def test_the_text(hpcenv: Any, project: Path) -> None:
    done = hpcenv("explain", "torch.version", cwd=project)
    assert done.status == 0
    assert done.stdout.splitlines()[:2] == [
        "torch.version",
        "  what      torch.__version__, with its local part (+cu130)",
    ]
    assert "  severity  must; profile bitwise: must\n" in done.stdout
    assert "  locked    2.13.0+cpu\n" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_without_a_field_all_are_listed(hpcenv: Any, tmp_path: Path) -> None:
    done = hpcenv("explain", cwd=tmp_path)
    assert [line.split()[0] for line in done.stdout.splitlines()] == [field.name for field in FIELDS]
    listed = hpcenv("explain", "--json", cwd=tmp_path).envelope["data"]
    assert [field["name"] for field in listed] == [field.name for field in FIELDS]


def test_outside_of_a_project_there_is_no_value(hpcenv: Any, tmp_path: Path) -> None:
    data = hpcenv("explain", "packages.numpy", "--json", cwd=tmp_path).envelope["data"]
    assert (data["name"], data["locked"], data["field"]["name"]) == ("packages.numpy", None, "packages.*")


def test_an_unknown_field_ends_with_2(hpcenv: Any, tmp_path: Path) -> None:
    done = hpcenv("explain", "torch.vresion", cwd=tmp_path)
    assert done.status == 2
    assert done.stderr.startswith("error[usage]: there is no field `torch.vresion`\n\nhint: perhaps torch.version")
