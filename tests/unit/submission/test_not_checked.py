"""What hpcenv does not check of a project and its data (docs/explanation/what-is-checked.md); data that it does check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcenv.api.environment import diff
from hpcenv.errors import Status

READS = "import pathlib, sys\nprint('READ', ascii(pathlib.Path(sys.argv[1]).read_bytes()), flush=True)\n"


@pytest.fixture
def reading(project: Path) -> Path:
    (project / "train.py").write_text(READS)
    return project


def _run(hpcenv: Any, project: Path, name: str, *words: str, reads: str) -> str:
    shape = ("--nproc", "1", "--cluster", "local", "--name", name, "--wait")
    done = hpcenv("submit", "train.py", *shape, *words, "--", reads, cwd=project)
    assert done.status == 0, done.stderr
    return str(done.stdout + done.stderr)


def _verdict(project: Path, name: str) -> Any:
    verdict = json.loads((project / "runs" / name / "verdict.json").read_text())
    # The torch of these tests has no libraries.
    named = [row["field"] for row in verdict["findings"] if not row["field"].startswith("libs.libtorch")]
    assert (verdict["result"], [name for name in named if name.startswith(("code.", "data.", "python."))]) == (
        "match",
        [],
    )
    return verdict


def test_a_file_that_the_copy_links_to_is_not_checked_and_the_verdict_says_so(hpcenv: Any, reading: Path) -> None:
    for name, content in (("one", b"\0one"), ("two", b"\0two")):
        (reading / "weights.bin").write_bytes(content)
        said = _run(hpcenv, reading, name, reads="weights.bin")
        assert f"READ {ascii(content)}" in said
        assert "live, not covered: weights.bin" in _verdict(reading, name)["notes"]
    found = diff("one", "two", project=reading)
    assert found.blocking == ()
    assert "files that the run's copy only links to: weights.bin" in found.not_compared


def test_data_that_no_table_names_are_not_checked_and_diff_says_so(hpcenv: Any, reading: Path, tmp_path: Path) -> None:
    data = tmp_path / "elsewhere.txt"
    for name in ("one", "two"):
        data.write_text(name)
        assert f"READ b'{name}'" in _run(hpcenv, reading, name, reads=str(data))
        _verdict(reading, name)
    found = diff("one", "two", project=reading)
    assert found.blocking == ()
    assert "data that the script reads" in found.not_compared


def test_files_of_a_live_project_are_not_checked_and_submit_and_diff_say_so(hpcenv: Any, reading: Path) -> None:
    for name in ("one", "two"):
        (reading / "config.yaml").write_text(name)
        said = _run(hpcenv, reading, name, "--workdir", "live", reads="config.yaml")
        assert f"READ b'{name}'" in said
        assert "the script runs in the live project (--workdir live): later edits change the job" in said
        _verdict(reading, name)
    found = diff("one", "two", project=reading)
    assert found.blocking == ()
    assert "files of the project: the run used them in place (--workdir live)" in found.not_compared


def test_data_that_a_table_names_are_in_the_verdict_and_in_diff(hpcenv: Any, reading: Path) -> None:
    with open(reading / "hpcenv.toml", "a") as spec:
        spec.write('[[data]]\npath = "weights.bin"\ncompare = "sha256"\n')
    for name in ("one", "two"):
        (reading / "weights.bin").write_bytes(b"\0" + name.encode())
        said = _run(hpcenv, reading, name, reads="weights.bin")
        row = f"data {reading / 'weights.bin'}: sha256 compared: 1 file, 4 bytes, "
        assert _verdict(reading, name)["notes"][0].startswith(row)
        assert row in " ".join(said.split())
    found = diff("one", "two", project=reading)
    assert [change.field for change in found.blocking] == ["data.weights-bin"]
    assert found.blocking[0].left != found.blocking[0].right
    assert not any("data that the script reads" in missing for missing in found.not_compared)
    assert hpcenv("diff", "one", "two", cwd=reading).status == Status.DIFFERENT


def test_a_file_of_the_copy_that_changes_under_the_ranks_is_reported_and_not_checked(
    hpcenv: Any, project: Path
) -> None:
    (project / "helper.py").write_text("VALUE = 1\n")
    change = "import pathlib\npathlib.Path('helper.py').write_text('VALUE = 2\\n')\n"
    (project / "train.py").write_text(f"{change}import helper\nprint('READ', helper.VALUE, flush=True)\n")
    said = _run(hpcenv, project, "one", reads="nothing")
    assert "READ 2" in said
    _verdict(project, "one")
    assert "source/helper.py" in hpcenv("report", "one", cwd=project).stdout


def test_entry_points_beside_the_script_are_not_checked(hpcenv: Any, project: Path) -> None:
    folder = project / "zz.egg-info"
    folder.mkdir()
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: zz\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[some.plugins]\nx = zz:main\n")
    (project / "train.py").write_text(
        "from importlib.metadata import entry_points\n"
        "print('READ', [point.value for point in entry_points().select(group='some.plugins')], flush=True)\n"
    )
    assert "READ ['zz:main']" in _run(hpcenv, project, "one", reads="nothing")
    assert not [note for note in _verdict(project, "one")["notes"] if "zz" in note]
