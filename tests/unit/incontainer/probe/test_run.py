"""How the probe starts and what it prints."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from probe_world import FIELDS, PROBE, SITE, Venv, parse, probe, run

from hpcenv.container.probe_source import read_chapters
from hpcenv.incontainer.probe.run import PROBES
from hpcenv.incontainer.probe.table import LEVELS

PACKAGE = "hpcenv.incontainer.probe"


def other_pythons() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for minor in range(8, 15):
        name = f"3.{minor}"
        places = [*Path.home().glob(f".pyenv/versions/{name}.*/bin/python{name}"), Path(f"/usr/bin/python{name}")]
        found[name] = [str(p) for p in places if p.exists()]
    return found


@pytest.mark.parametrize("chapter", list(read_chapters()))
def test_it_is_valid_python_3_8(chapter: str) -> None:
    ast.parse(read_chapters()[chapter], feature_version=(3, 8))


@pytest.mark.parametrize("chapter", list(read_chapters()))
def test_it_imports_only_the_standard_library_and_its_own_chapters(chapter: str) -> None:
    for node in ast.walk(ast.parse(read_chapters()[chapter])):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= set(sys.stdlib_module_names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module == PACKAGE:
                assert {alias.name for alias in node.names} <= set(read_chapters())
            elif module.startswith(PACKAGE + "."):
                assert module[len(PACKAGE) + 1 :] in read_chapters()
            else:
                assert module.split(".")[0] in sys.stdlib_module_names


def test_no_two_rows_answer_the_same_field_or_have_the_same_name() -> None:
    for level in LEVELS:
        rows = [row for row in PROBES if level in row.levels]
        fields = [field for row in rows for field in row.fields]
        assert len(fields) == len(set(fields))
        assert len(rows) == len({row.name for row in rows})


@pytest.mark.parametrize("version", list(other_pythons()))
@pytest.mark.parametrize("level", ["record", "full"])
def test_it_runs_on_every_python_of_this_machine(version: str, level: str, tmp_path: Path) -> None:
    pythons = other_pythons()[version]
    if not pythons:
        pytest.skip(f"NOT TESTED: no Python {version} on this machine")
    for python in pythons:
        found = probe(python, level, by="stdin")
        assert found["values"]["python.version"].startswith(version + ".")
        assert found["values"]["python.soabi"].startswith("cpython-" + version.replace(".", ""))
        assert (
            not found["unknown"].keys()
            - {"system.glibc", "system.os-release"}
            - {f for f in found["unknown"] if f.startswith("libs.")}
        )


@pytest.mark.parametrize("level", ["record", "full"])
def test_stdin_and_file_start_say_the_same(env: Venv, level: str) -> None:
    one, other = env.probe(level, by="stdin"), env.probe(level, by="file")
    one.pop("seconds"), other.pop("seconds")
    assert one == other


def test_its_own_folder_and_the_current_one_are_not_on_the_path(env: Venv, tmp_path: Path) -> None:
    for name in ("json", "csv", "hashlib", "time"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current directory')")
    found = env.probe(cwd=tmp_path)
    assert found["values"]["python.sys-path"][-1] == "{prefix}/" + SITE
    assert str(tmp_path) not in found["values"]["python.sys-path"]
    assert str(PROBE) not in env.probe(by="file")["values"]["python.sys-path"]


def test_safe_path_start_drops_nothing(env: Venv) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("NOT TESTED: PYTHONSAFEPATH is new in 3.11")
    plain, safe = env.probe(), env.probe(PYTHONSAFEPATH="1")
    assert plain["values"]["python.sys-path"] == safe["values"]["python.sys-path"]


def test_wrong_arguments_still_give_json_and_status_2(env: Venv) -> None:
    done = run(env.path / "bin/python3", ["--level", "deeper"])
    assert done.returncode == 2
    found = parse(done.stdout)
    assert found["values"] == {}
    assert found["unknown"]["python.version"].endswith(
        "[--python FILE] [--site FOLDER] [--revision NUMBER], got --level deeper"
    )


def break_module(env: Venv, name: str) -> None:
    (env.site / "break.pth").write_text(f"import sys; sys.modules[{name!r}] = None\n")


def test_one_broken_probe_leaves_the_others(env: Venv) -> None:
    for name in ("csv", "hashlib"):
        break_module(env, name)
        found = env.probe("full")
        reason = f"ModuleNotFoundError: import of {name} halted"
        # No package says that it differs: all of them are unknown, with the cause.
        assert found["packages"] == []
        for field in ("packages.count", "packages.env-digest"):
            assert found["unknown"][field].startswith(reason)
        for field in ("packages.unlisted-digest", "packages.content-digest"):
            assert found["unknown"][field].startswith(f"RuntimeError: {reason}")
    assert found["values"]["python.version"] == ".".join(map(str, sys.version_info[:3]))
    assert found["values"]["python.user-site"] == "off"


def test_without_json_there_is_still_json(env: Venv) -> None:
    break_module(env, "json")
    found = env.probe("full")
    assert found["values"] == {}
    assert set(found["unknown"]) == FIELDS["full"]
    assert "json" in found["unknown"]["torch.cuda"]


def test_another_hpcenv_in_the_environment_is_not_imported(env: Venv) -> None:
    """Nor is it in the way when a .pth file has imported it already."""
    env.install("hpcenv", {"hpcenv/__init__.py": b"", "hpcenv/incontainer/__init__.py": b"raise SystemExit('wrong')"})
    assert env.probe()["unknown"] == {}
    (env.site / "early.pth").write_text("import hpcenv\n")
    assert env.probe()["unknown"] == {}


def test_exit_handlers_of_installed_code_do_not_print_behind_the_line(env: Venv) -> None:
    (env.site / "noisy.pth").write_text("import atexit; atexit.register(print, 'behind')\n")
    assert env.probe()["values"]["packages.unlisted-count"] == 1
