"""Who imports whom, and what starting hpcenv costs."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import tomlkit
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "hpcenv").rglob("*.py"))
PARTS = {path.name.removesuffix(".py") for path in (ROOT / "hpcenv").iterdir() if path.suffix in ("", ".py")}
HEAVY = ("pydantic", "tomlkit", "submitit", "requests", "rich", "torch", "numpy")


def test_the_import_contracts_hold() -> None:
    program = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which("lint-imports")
    if program is None:
        pytest.skip("NOT CHECKED: import-linter is not installed (pip install 'hpcenv[dev]')")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


# Programs of their own, and what a training script imports. `cli/` and `api/` read the environment and hand it on.
READ_THE_ENVIRONMENT = {"launch/prepare_export_run.py", "machine/amd_gpus.py", "steps/main.py", "training.py"}


def test_the_environment_is_read_at_the_edge() -> None:
    """Functions below get it as a value: so a test, the command line and Python give the same answer."""
    reading = {
        path.relative_to(ROOT / "hpcenv").as_posix()
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
        if isinstance(node.value, ast.Name) and node.value.id == "os"
    }
    # What runs inside the image has no caller of ours.
    below = {name for name in reading if not name.startswith(("api/", "cli/", "incontainer/", "recipes/templates/"))}
    assert below == READ_THE_ENVIRONMENT


def test_only_process_starts_programs() -> None:
    """One place for time limits, cleaned environments and errors that show the argv."""
    importers = {str(path.relative_to(ROOT / "hpcenv")) for path in SOURCES if _imports(path, "subprocess")}
    assert {
        name
        for name in importers
        if not name.startswith(("facts/", "incontainer/", "launch/", "sessions/", "smoke/", "steps/", "watch/"))
    } == {"process.py"}


def _imports(path: Path, module: str) -> bool:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import) and module in [alias.name.partition(".")[0] for alias in node.names]:
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == module:
            return True
    return False


_REQUESTS = "the module loads requests"
_HUB = "the module loads huggingface_hub, which the extra `hub` installs"
_SUBMITIT = "the module loads submitit"
_RANKS = "ranks load this file, and few need it"
_HOOK = "every Python process of a rank loads this file"
_HYDRA = "Hydra loads this file at each start of a program"
_PUBLIC = "for type checkers: `import hpcenv` loads public names on use"
# Imports of our own modules that do not stand at the top of a file, each with its reason. Where a module is imported in
# a function, annotations may name it under TYPE_CHECKING.
NOT_AT_THE_TOP = {
    ("__init__.py", "hpcenv.api"): _PUBLIC,
    ("__init__.py", "hpcenv.errors"): _PUBLIC,
    ("__init__.py", "hpcenv.reproduction.bundle.make"): _PUBLIC,
    ("__init__.py", "hpcenv.reproduction.compare"): _PUBLIC,
    ("__init__.py", "hpcenv.survey.compatibility"): _PUBLIC,
    (
        "api/executor.py",
        "hpcenv.api.function_submission",
    ): "submitit loads this file in every program that uses submitit",
    ("api/executor.py", "hpcenv.submission.plan"): "submitit loads this file in every program that uses submitit",
    ("cli/__init__.py", "hpcenv.cli"): "the modules load click, which `hpcenv --help` does not need (65 ms)",
    ("cli/_command_line.py", "hpcenv.cli"): "every command loads this file; the module loads projects and runs",
    ("cli/_command_line.py", "hpcenv.runs"): "every command loads this file",
    ("cli/_complete.py", "hpcenv.project.workspace"): "every command loads this file; the module loads pydantic",
    ("cli/_complete.py", "hpcenv.runs.find"): "every command loads this file",
    ("hub/download.py", "hpcenv.hub.client"): _HUB,
    ("hub/fetch.py", "hpcenv.hub.client"): _HUB,
    ("image/registry/resolve.py", "hpcenv.image.registry.client"): _REQUESTS,
    ("image/registry/source.py", "hpcenv.image.registry.client"): _REQUESTS,
    ("incontainer/start_hook/session.py", "device"): _HOOK,
    ("incontainer/start_hook/session.py", "parameters"): _HOOK,
    ("incontainer/start_hook/session.py", "pulse"): _HOOK,
    ("incontainer/start_hook/session.py", "stacks"): _HOOK,
    ("incontainer/start_hook/session.py", "samples"): _HOOK,
    ("incontainer/start_hook/session.py", "steps"): _HOOK,
    ("incontainer/start_hook/session.py", "trace"): _HOOK,
    ("incontainer/start_hook/session.py", "writer"): _HOOK,
    ("plugins/hydra_plugins/hpcenv_launcher.py", "hpcenv.api.executor"): _HYDRA,
    ("plugins/hydra_plugins/hpcenv_launcher.py", "hpcenv.api.job"): _HYDRA,
    ("plugins/hydra_plugins/hpcenv_launcher.py", "hpcenv.errors"): _HYDRA,
    ("steps/launch.py", "hpcenv.sessions.door"): "only the job of a session needs it, and every training would load it",
    ("steps/main.py", "hpcenv.sessions"): "a step in a job is a command: it loads its own module only",
    ("submission/submit.py", "hpcenv.submission.submitit_executor"): _SUBMITIT,
    ("submission/sweep_job.py", "hpcenv.submission.submitit_executor"): _SUBMITIT,
    ("training.py", "hpcenv.incontainer"): _RANKS,
    ("training.py", "hpcenv.incontainer.start_hook"): _RANKS,
    ("training.py", "hpcenv.incontainer.start_hook.exact"): _RANKS,
}


def test_imports_of_our_own_modules_stand_at_the_top_of_a_file() -> None:
    found = set()
    for path in SOURCES:
        name = path.relative_to(ROOT / "hpcenv").as_posix()
        for module in _own_imports_below(path):
            # The probe runs in the image, where importing typing takes longer than most of its parts.
            if not (name.startswith("incontainer/probe/") and module.startswith("hpcenv.incontainer.probe.")):
                found.add(
                    (name, "hpcenv.api" if module.startswith("hpcenv.api.") and name == "__init__.py" else module)
                )
    assert sorted(found) == sorted(NOT_AT_THE_TOP)


def _own_imports_below(path: Path) -> set[str]:
    """Return the modules of ours that a file imports in a function, or under a condition."""
    tree = ast.parse(path.read_bytes())
    below = {node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))} - set(tree.body)
    modules = set()
    for node in below:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        is_own = isinstance(node, ast.ImportFrom) and node.level > 0
        modules |= {name for name in names if is_own or name.partition(".")[0] == "hpcenv"}
    return modules


# Not imported by name: pip by a string (locking/wheels/pip_session.py), torch by the probe and the node, where it is.
UNSEEN = {"pip"}
ON_NODES = {"torch", "numpy", "ipykernel", "zmq"}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    project = tomlkit.parse((ROOT / "pyproject.toml").read_text()).unwrap()["project"]
    extras = [words for name, words in project["optional-dependencies"].items() if name != "dev"]
    declared = {
        canonicalize_name(Requirement(word).name) for words in (project["dependencies"], *extras) for word in words
    }
    imported = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                imported.add(node.module.partition(".")[0])
    # tomllib came with 3.11; who imports it says what to do without.
    ours = {"hpcenv", "hydra_plugins", "_hpcenv_start_hook"}
    outside = imported - set(sys.stdlib_module_names) - ours - {"tomllib"} - ON_NODES
    # Hydra is in another environment of the tests.
    owners = {"hydra": ["hydra-core"], **packages_distributions()}
    used = {canonicalize_name(name) for module in outside for name in owners.get(module, [module])}
    assert used == declared - UNSEEN


def imports_of_the_root(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import) and "hpcenv" in [alias.name for alias in node.names]:
            yield f"{path}:{node.lineno}"
        if isinstance(node, ast.ImportFrom):
            # The start hook travels as a package of another name: submission/node_code.py.
            if node.level != 0 and path.parent.name != "start_hook":
                yield f"{path}:{node.lineno}: a relative import"
            names = {alias.name for alias in node.names}
            if node.module == "hpcenv" and not names <= PARTS:
                yield f"{path}:{node.lineno}: {names - PARTS} is no submodule"


def test_nothing_inside_imports_the_package_root() -> None:
    """`import hpcenv` loads public names on use; inside, it would tie everything to everything."""
    assert [found for path in SOURCES for found in imports_of_the_root(path)] == []


def loaded_by(*words: str, cwd: Path, environ: Mapping[str, str] | None = None) -> set[str]:
    code = (
        "import json, sys\n"
        "sys.argv = ['hpcenv', *sys.argv[1:]]\n"
        "from hpcenv.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=cwd,
        text=True,
        capture_output=True,
        check=True,
        env={**os.environ, **(environ or {})},
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("nosuch",)])
def test_help_and_typos_load_nothing_heavy(words: tuple[str, ...], tmp_path: Path) -> None:
    loaded = {name.partition(".")[0] for name in loaded_by(*words, cwd=tmp_path)}
    assert loaded.isdisjoint(HEAVY), loaded.intersection(HEAVY)


def test_importing_hpcenv_imports_nothing_but_its_version() -> None:
    code = "import json, sys; before = set(sys.modules); import hpcenv; print(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    outside = {name for name in json.loads(done.stdout) if name.partition(".")[0] not in sys.stdlib_module_names}
    assert outside == {"hpcenv", "hpcenv.version"}


def test_a_dry_run_loads_no_submitit(project: Path) -> None:
    loaded = loaded_by("submit", "train.py", "--nproc", "1", "--dry-run", cwd=project)
    assert {name.partition(".")[0] for name in loaded}.isdisjoint({"submitit", "requests", "rich", "torch"})
