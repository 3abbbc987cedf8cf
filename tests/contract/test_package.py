"""What others may rely on: public names, the private hook of submitit, the wheel's content."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import zipfile
from pathlib import Path

import click
import pytest

import hpcenv
from hpcenv.cli import VERBS, cli
from hpcenv.cli.image import VERBS as IMAGE_VERBS

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


# The same of the other verbs.
STEPS = {
    "list": ("listing", "list_lines"),
    "logs": ("logs", "follow_log"),
    "rerun": ("rerun", "asked_again"),
    "wait": ("wait", "wait_for"),
}
# Verbs of `hpcenv image` whose step is a function of another name, or in a module of another.
IMAGE_STEPS = {"list": ("listing", "list_images"), "path": ("path", "find_path")}


@pytest.mark.parametrize("verb", IMAGE_VERBS)
def test_every_verb_of_images_is_a_file_in_cli_and_a_function_in_steps(verb: str) -> None:
    module, function = IMAGE_STEPS.get(verb, (verb, verb))
    command = importlib.import_module(f"hpcenv.cli.image.{module}").command
    assert command.name == verb
    assert command.help
    assert "--json" in [word for option in command.params for word in option.opts]
    step = importlib.import_module(f"hpcenv.steps.image.{module}")
    assert inspect.isfunction(getattr(step, function))


def command_of(verb: str) -> click.Command:
    found = cli.get_command(click.Context(cli), verb)
    assert found is not None
    return found


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "image"])
def test_every_verb_is_a_file_in_cli_and_a_function_in_steps(verb: str) -> None:
    command = command_of(verb)
    assert command.name == verb
    assert command.help
    assert "--json" in [word for option in command.params for word in option.opts]
    module, function = STEPS.get(verb, (verb, verb))
    assert inspect.isfunction(getattr(importlib.import_module(f"hpcenv.steps.{module}"), function))


def test_every_option_has_a_help() -> None:
    for verb in VERBS:
        for option in command_of(verb).params:
            if option.param_type_name == "option":
                assert option.help, f"{verb} {option.opts}"


def test_submitits_private_hook_is_where_the_bridge_expects_it() -> None:
    """The bridge overrides `_submit_command`; submitit must still call it, once, for one job."""
    import submitit
    from submitit.core.core import PicklingExecutor

    assert tuple(int(part) for part in submitit.__version__.split(".")[:2]) == (1, 5)
    assert list(inspect.signature(submitit.SlurmExecutor._submit_command).parameters) == ["self", "command"]
    source = inspect.getsource(PicklingExecutor._internal_process_submissions)
    assert source.count("self._submit_command(") == 1
    assert 'move_temporary_file(pickle_path, "submitted_pickle")' in source
    assert list(inspect.signature(submitit.SlurmJob.__init__).parameters)[:4] == ["self", "folder", "job_id", "tasks"]
    paths = submitit.SlurmJob(folder="/f", job_id="7", tasks=[0]).paths
    assert paths.submission_file == Path("/f/7_submission.sh")
    assert paths.submitted_pickle == Path("/f/7_submitted.pkl")


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
    assert "hpcenv/incontainer/probe.py" in names
    outside = {name for name in names if not name.startswith("hpcenv/") and ".dist-info/" not in name}
    assert outside == set()
    assert not [name for name in names if "test" in name.rpartition("/")[2] or name.endswith(".pyc")]
