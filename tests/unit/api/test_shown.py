"""What the Python API returns fits a screen in a prompt, and is text in a notebook."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

import hpcenv
from hpcenv.text import Shown

RETURN_TEXT = ("status", "report", "lock", "check_lock", "verify", "plan_job", "diff", "compare", "compat", "bundle", "reproduce", "diagnose", "list_runs")  # fmt: skip


def _classes(kind: Any) -> list[type]:
    parts = typing.get_args(kind)
    return [one for part in parts for one in _classes(part)] if parts else [kind] if inspect.isclass(kind) else []


@pytest.mark.parametrize("name", RETURN_TEXT)
def test_each_result_has_a_short_repr(name: str) -> None:
    function = getattr(hpcenv, name)
    found = _classes(eval(inspect.signature(function).return_annotation, function.__globals__))
    classes = [one for one in found if dataclasses.is_dataclass(one)]
    assert classes
    assert all(issubclass(one, Shown) and one.__repr__ is Shown.__repr__ for one in classes), classes


def test_the_report_of_a_run_with_a_long_log_fits_a_screen(
    tmp_path: Path, fake_slurm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hpcenv.toml").write_text('image = "host"\n')
    run = folders.make_run(tmp_path / "runs", "nb1", args=tuple(f"--option-{number}" for number in range(500)))
    folders.start(run, ["n1"], nproc=1)
    folders.write(run.finished, status=7, time=9.0)
    run.log.write_text("<b>a line & more</b>\n" * 5000)
    fake_slurm.answers("squeue", "")
    fake_slurm.answers("sacct", "7|FAILED|7:0|n1|00:00:09\n")
    for name, value in fake_slurm.environ.items():
        monkeypatch.setenv(name, value)
    report, status = hpcenv.report("nb1", project=tmp_path), hpcenv.status("nb1", project=tmp_path)
    assert len(repr(report)) < 400
    assert len(repr(status)) < 400
    assert "state='failed'" in repr(status)
    assert "exit_status=7" in repr(status)
    page = report._repr_html_()
    assert page.startswith("<pre>")
    assert "nb1: failed, exit status 7" in page
    assert "&lt;b&gt;a line &amp; more&lt;/b&gt;" in page
    assert status._repr_html_().startswith("<pre>RunStatus(")
