"""What others may rely on: public names, the wheel's content."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import click
import pytest

import hpcenv
from hpcenv.cli._command_line import cli
from hpcenv.cli._help import VERBS
from hpcenv.cli.bundle import VERBS as BUNDLE_VERBS
from hpcenv.cli.data import VERBS as DATA_VERBS
from hpcenv.cli.image import VERBS as IMAGE_VERBS
from hpcenv.cli.net import VERBS as NET_VERBS

ROOT = Path(__file__).resolve().parents[2]


def test_every_public_name_loads_and_is_listed() -> None:
    assert sorted(hpcenv.__all__) == sorted({*hpcenv._WHERE, "__version__"})
    assert dir(hpcenv) == sorted(hpcenv.__all__)
    for name in hpcenv.__all__:
        assert getattr(hpcenv, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        hpcenv.nosuch  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "hpcenv" / "__init__.py").read_bytes())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    shown = {
        alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert shown == hpcenv._WHERE


IMAGE_MODULES = {"list": "listing"}


@pytest.mark.parametrize("verb", IMAGE_VERBS)
def test_every_image_command_is_a_file_in_cli(verb: str) -> None:
    command = importlib.import_module(f"hpcenv.cli.image.{IMAGE_MODULES.get(verb, verb)}").command
    assert command.name == verb
    assert command.help
    assert "--json" in [word for option in command.params for word in option.opts]


@pytest.mark.parametrize(
    ("group", "verb"),
    [
        (group, verb)
        for group, verbs in (("net", NET_VERBS), ("bundle", BUNDLE_VERBS), ("data", DATA_VERBS))
        for verb in verbs
    ],
)
def test_every_command_of_a_group_is_a_file_in_cli(group: str, verb: str) -> None:
    # `list` is a built-in of Python.
    command = importlib.import_module(f"hpcenv.cli.{group}.{'listing' if verb == 'list' else verb}").command
    assert command.name == verb
    assert command.help
    assert "--json" in [word for option in command.params for word in option.opts]


def command_of(verb: str) -> click.Command:
    found = cli.get_command(click.Context(cli), verb)
    assert found is not None
    return found


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("bundle", "data", "image", "net")])
def test_every_command_is_a_file_in_cli(verb: str) -> None:
    command = command_of(verb)
    assert command.name == verb
    assert command.help
    assert "--json" in [word for option in command.params for word in option.opts]


def test_every_option_has_a_help() -> None:
    for verb in VERBS:
        for option in command_of(verb).params:
            if option.param_type_name == "option":
                assert option.help, f"{verb} {option.opts}"


def test_the_wheel_holds_templates_types_and_no_tests(tmp_path: Path) -> None:
    try:
        import hatchling  # noqa: F401
    except ImportError:
        pytest.skip("NOT CHECKED: hatchling is not installed, so no wheel can be built here")
    command = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *command], text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("hpcenv-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "hpcenv/_data/sbatch_templates/job.sbatch" in names
    assert "hpcenv/_data/sites/lumi.toml" in names
    assert "hpcenv/py.typed" in names
    assert "hpcenv/incontainer/probe/__main__.py" in names
    outside = {name for name in names if not name.startswith("hpcenv/") and ".dist-info/" not in name}
    assert outside == set()
    assert not [name for name in names if "test" in name.rpartition("/")[2] or name.endswith(".pyc")]
