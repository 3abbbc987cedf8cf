"""`hpcenv doctor` runs the preflight checks of this machine: real limits, real folders."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcenv.judge.checks.check_table import CHECKS
from hpcenv.project.context import Context
from hpcenv.project.workspace import open_workspace
from hpcenv.survey.here import check_this_machine


def _doctor(project: Path, *words: str, files: int | None = None, **more: str) -> tuple[int, dict[str, Any]]:
    """Run the command with a limit of open files; return its status and the checks."""

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    argv = [sys.executable, "-m", "hpcenv", "doctor", "--json", *words]
    done = subprocess.run(
        argv, cwd=project, env={**os.environ, **more}, preexec_fn=limit, capture_output=True, text=True, check=False
    )
    return done.returncode, json.loads(done.stdout)["data"]


def _row(data: dict[str, Any], name: str) -> dict[str, Any]:
    (row,) = [row for row in data["checks"]["rows"] if row["id"] == name]
    return dict(row)


def test_a_login_node_has_the_checks_whose_result_holds_for_jobs(project: Path) -> None:
    status, data = _doctor(project)
    assert status == 0
    assert {row["id"]: row["state"] for row in data["checks"]["rows"]} == dict.fromkeys(
        ("sys.nofile", "fs.answers", "fs.usable", "fs.full", "fs.space", "time.filesystem"), "fine"
    )
    assert (data["checks"]["level"], data["checks"]["result"]) == ("quick", "match")


def test_a_limit_that_is_too_low_is_a_warning_and_blocks_where_the_policy_says_so(project: Path) -> None:
    status, data = _doctor(project, files=256)
    row = _row(data, "sys.nofile")
    assert (status, row["state"], row["found"], row["severity"], row["owner"]) == (0, "failed", "256", "warn", "user")
    assert "ulimit -n" in row["remedy"]
    spec = project / "hpcenv.toml"
    spec.write_text(spec.read_text() + '\n[policy]\n"sys.nofile" = "must"\n')
    status, data = _doctor(project, files=256)
    assert (status, data["checks"]["result"]) == (90, "mismatch")
    status, data = _doctor(project, "--skip-check", "sys.nofile", files=256)
    assert (status, data["checks"]["skipped"]) == (0, ["sys.nofile"])


def test_a_temporary_folder_that_cannot_be_used_is_a_failure(project: Path) -> None:
    status, data = _doctor(project, TMPDIR="/nonexistent/by-hpcenv")
    row = _row(data, "fs.usable")
    assert (status, row["state"], row["severity"]) == (90, "failed", "must")
    assert "temporary folder /nonexistent/by-hpcenv: No such file" in row["found"]


def test_off_leaves_the_checks_out(project: Path) -> None:
    status, data = _doctor(project, "--preflight", "off", TMPDIR="/nonexistent/by-hpcenv")
    assert (status, data["checks"]) == (0, None)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--preflight", "full"), "`--preflight full` goes with --nodes or --nodelist only"),
        (("--partition", "batch"), "`--partition` goes with --nodes or --nodelist only"),
        (("--skip-check", "sys.nofle"), "there is no check `sys.nofle`"),
        (("--nodes", "2", "--preflight", "off"), "leaves nothing to check"),
        (("--nodelist", "n[1", "--preflight", "full"), "unbalanced brackets"),
        (("--nodes", "2", "--write"), "--write cannot be used with --nodes"),
    ],
)
def test_what_does_not_fit_together_is_refused(hpcenv: Any, project: Path, words: tuple[str, ...], says: str) -> None:
    done = hpcenv("doctor", *words, cwd=project)
    assert done.status == 2, done.stderr
    assert says in done.stderr


def test_inside_a_job_all_quick_checks_of_the_host_run(tmp_path: Path) -> None:
    environ = {
        **os.environ, "SLURMD_NODENAME": "n1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7",
        "SLURM_MEM_PER_NODE": "99999999",
    }  # fmt: skip
    (tmp_path / "hpcenv.toml").write_text('image = "host"\n')
    context = Context(environ=environ, cwd=tmp_path, now=time.localtime(), token="", command=())
    found = check_this_machine(context, open_workspace(tmp_path), store=tmp_path)
    asked = {check.id for check in CHECKS if check.level == "quick" and check.place == "host" and not check.gpus}
    assert {row.id for row in found.rows} == asked
    assert found.nodes == ("n1",)
    (memory,) = [row for row in found.rows if row.id == "sys.memory"]
    assert (memory.state, memory.limit) == ("failed", "about 99999999 MiB")
    assert not (tmp_path / "runs").exists()
