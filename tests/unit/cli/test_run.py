"""`hpcenv run`: a command in the locked environment on this machine, behind the gate; the allocation is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hpcenv.errors import UsageError
from hpcenv.submission.locked_command import CurrentAllocation, count_nodes, find_allocation

SAYS = "import os, sys; print(sys.prefix, os.environ['MINE'], sys.argv[1:], os.getcwd()); sys.exit(7)"


def test_a_command_runs_in_the_locked_environment_and_its_status_is_its_own(
    hpcenv: Any, project: Path, python_with_torch: Path
) -> None:
    done = hpcenv("run", "--env", "MINE=1", "--", str(python_with_torch), "-c", SAYS, "a b", "--json", cwd=project)
    assert done.status == 7, done.stderr
    assert done.stdout == f"{python_with_torch.parents[1]} 1 ['a b', '--json'] {project}\n"
    assert "this machine matches the lockfile, checked in " in done.stderr
    (run,) = (project / "runs").glob("run-*")
    assert "verdict: match" in (run / "job.log").read_text()
    listed = hpcenv("list", "--json", cwd=project).envelope["data"]["runs"]
    assert [(one["run"], one["state"]) for one in listed] == [(run.name, "completed")]
    planned = hpcenv("run", "--json", "--", "true", cwd=project)
    assert planned.envelope["data"]["argv"][-2:] == ["without-secrets", "true"]


def test_a_machine_that_differs_is_refused_with_the_table_and_nothing_is_started(
    hpcenv: Any, project: Path, python_with_torch: Path
) -> None:
    victim = next(Path(python_with_torch).parents[1].rglob("torch/__init__.py"))
    before = victim.read_text()
    try:
        victim.write_text(before + "\n# changed\n")
        done = hpcenv("run", "--", "touch", "started", cwd=project)
    finally:
        victim.write_text(before)
    assert done.status == 90, done.stderr
    assert "error[node-rejected]: the command was not started: a node differs from the lockfile" in done.stderr
    assert "MISMATCH" in done.stderr
    (hint,) = re.findall("`(hpcenv report run-[^`]+)`", done.stderr)
    assert "torch" in hpcenv(*hint.split()[1:], cwd=project).stdout
    assert not (project / "started").exists()


def test_spare_nodes_are_for_jobs(hpcenv: Any, project: Path) -> None:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write("[submit]\nspare = 1\n")
    done = hpcenv("run", "--", "true", cwd=project)
    assert done.status == 0, done.stderr


def test_a_shell_needs_a_terminal(hpcenv: Any, project: Path) -> None:
    done = hpcenv("run", cwd=project)
    assert done.status == 2
    assert "no command is given" in done.stderr
    assert "hpcenv run -- COMMAND" in done.stderr


# -- the allocation -----------------------------------------------------------------------

OF_SALLOC = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-3]"}


@pytest.mark.parametrize(
    ("more", "gpus"),
    [({}, None), ({"SLURM_GPUS_PER_NODE": "h100:4"}, 4), ({"SLURM_GPUS_ON_NODE": "2", "SLURM_GPUS_PER_NODE": "4"}, 2)],
)
def test_the_allocation_is_read_from_slurm_s_variables(more: dict[str, str], gpus: int | None) -> None:
    found = find_allocation({**OF_SALLOC, **more})
    assert found is not None
    assert (found.job_id, found.nodes, found.gpus) == ("12", ("n1", "n2", "n3"), gpus)
    assert find_allocation({}) is None


def test_a_job_without_nodes_is_no_allocation() -> None:
    with pytest.raises(UsageError, match="the nodes of job 12 are not known"):
        find_allocation({"SLURM_JOB_ID": "12"})


def test_on_how_many_nodes_a_command_starts() -> None:
    three = CurrentAllocation(job_id="12", nodes=("n1", "n2", "n3"), gpus=None)
    assert count_nodes(three, nodes=None, pty=False) == 3
    assert count_nodes(three, nodes=None, pty=True) == 1
    assert count_nodes(three, nodes=2, pty=False) == 2
    with pytest.raises(UsageError) as caught:
        count_nodes(three, nodes=4, pty=False)
    assert (caught.value.what, caught.value.why) == ("4 nodes for the command", "job 12 has 3")
    with pytest.raises(UsageError) as caught:
        count_nodes(None, nodes=2, pty=False)
    assert caught.value.why == "this machine is one"
    with pytest.raises(UsageError, match="`--pty` is for one node"):
        count_nodes(three, nodes=2, pty=True)
