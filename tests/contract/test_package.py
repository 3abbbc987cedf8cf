"""What others may rely on: public names, the wheel's content."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import hpcenv
from hpcenv.cli._command_line import cli
from hpcenv.cli._help import VERBS
from hpcenv.cli.bundle import VERBS as BUNDLE_VERBS
from hpcenv.cli.data import VERBS as DATA_VERBS
from hpcenv.cli.image import VERBS as IMAGE_VERBS
from hpcenv.cli.kernel import VERBS as KERNEL_VERBS
from hpcenv.cli.net import VERBS as NET_VERBS
from hpcenv.cli.session import VERBS as SESSION_VERBS
from hpcenv.project.options import in_place

GROUPS = ("bundle", "data", "image", "kernel", "net", "session")
# What they print is read by ssh.
FOR_SSH = ("connect", "ssh-config")

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
        for group, verbs in (
            ("kernel", KERNEL_VERBS),
            ("session", SESSION_VERBS),
            ("net", NET_VERBS),
            ("bundle", BUNDLE_VERBS),
            ("data", DATA_VERBS),
        )
        for verb in verbs
    ],
)
def test_every_command_of_a_group_is_a_file_in_cli(group: str, verb: str) -> None:
    # `list` is a built-in of Python.
    module = "listing" if verb == "list" else verb.replace("-", "_")
    command = importlib.import_module(f"hpcenv.cli.{group}.{module}").command
    assert command.name == verb
    assert command.help
    assert verb in FOR_SSH or "--json" in [word for option in command.params for word in option.opts]


def command_of(verb: str) -> click.Command:
    found = cli.get_command(click.Context(cli), verb)
    assert found is not None
    return found


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in GROUPS])
def test_every_command_is_a_file_in_cli(verb: str) -> None:
    command = command_of(verb)
    assert command.name == verb
    assert command.help
    # A shell is for people only: `hpcenv session start --json` starts the same job.
    assert verb == "shell" or "--json" in [word for option in command.params for word in option.opts]


def test_every_option_has_a_help() -> None:
    for verb in VERBS:
        for option in command_of(verb).params:
            if option.param_type_name == "option":
                assert option.help, f"{verb} {option.opts}"


def build(source: Path, out: Path, *targets: str) -> dict[str, Path]:
    """Build with the hatchling that is installed; return what was made, by its kind."""
    environ = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "hatchling", "build", *(word for one in targets for word in ("-t", one))]
    done = subprocess.run([*command, "-d", out], cwd=source, env=environ, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return {path.suffix: path for path in out.iterdir()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="NOT CHECKED: hatchling is not installed, so no wheel can be built here")
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")[".whl"]


def test_the_wheel_holds_templates_types_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "hpcenv/_data/sbatch_templates/job.sbatch" in names
    assert "hpcenv/_data/sites/lumi.toml" in names
    assert "hpcenv/py.typed" in names
    assert "hpcenv/incontainer/probe/__main__.py" in names
    outside = {name for name in names if not name.startswith("hpcenv/") and ".dist-info/" not in name}
    # Hydra finds plug-ins there only.
    plugins = {"hydra_plugins/hpcenv_launcher.py", "hydra_plugins/hpcenv_trial.py"}
    assert plugins <= outside
    assert all(re.match(r"hpcenv-[^/]+\.data/data/share/", name) for name in outside - plugins)
    assert not [name for name in names if "test" in name.rpartition("/")[2] or name.endswith(".pyc")]


def commands(command: click.Command, name: str) -> Iterator[str]:
    yield name
    if isinstance(command, click.Group):
        for verb in command.list_commands(click.Context(command)):
            inner = command.get_command(click.Context(command), verb)
            assert inner is not None
            yield from commands(inner, f"{name}-{verb}")


def test_the_wheel_holds_completion_and_a_man_page_for_each_command(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shared = {name.partition(".data/data/share/")[2]: name for name in archive.namelist() if ".data/" in name}
        for short, name in shared.items():
            (tmp_path / short.rpartition("/")[2]).write_bytes(archive.read(name))
    pages = {name for name in shared if name.startswith("man/")}
    assert pages == {f"man/man1/{name}.1" for name in commands(cli, "hpcenv")}
    assert {
        "bash-completion/completions/hpcenv",
        "fish/vendor_completions.d/hpcenv.fish",
        "zsh/site-functions/_hpcenv",
    } == (set(shared) - pages)
    assert "complete -o nosort -F _hpcenv_completion hpcenv" in (tmp_path / "hpcenv").read_text()
    submit = (tmp_path / "hpcenv-submit.1").read_text()
    assert all(f"\n.B {row.flag}".replace("-", "\\-") in submit for row in in_place("command") if not row.letter)
    if shutil.which("mandoc") is None:
        pytest.skip("NOT CHECKED: mandoc is not installed; it did not read the man pages (apt-get install mandoc)")
    done = subprocess.run(["mandoc", "-Tlint", *sorted(tmp_path.glob("*.1"))], text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_sdist_has_equal_bytes_when_it_is_built_again(tmp_path: Path) -> None:
    """Again from a copy with other times and modes, in another folder."""
    copy = tmp_path / "a copy"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True, capture_output=True, check=True
    ).stdout.split("\n")
    held = ("hpcenv/", "sbatch_templates/", "sites/", "docs/reference/hpcenv.schema.json")
    for name in (one for one in files if one.startswith(held) or "/" not in one):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
            (copy / name).chmod(0o600)
    first, again = build(ROOT, tmp_path / "1", "sdist"), build(copy, tmp_path / "2", "sdist")
    assert first[".gz"].read_bytes() == again[".gz"].read_bytes()


@pytest.mark.long
def test_the_wheel_from_the_sdist_has_equal_bytes(wheel: Path, tmp_path: Path) -> None:
    """As pip makes it: an sdist first, and the wheel from that."""
    first = build(ROOT, tmp_path / "1", "sdist")
    with tarfile.open(first[".gz"]) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert build(unpacked, tmp_path / "3", "wheel")[".whl"].read_bytes() == wheel.read_bytes()
