"""Where a step runs: the variables of a job."""

import pytest

from hpcenv.errors import NodesUnknown
from hpcenv.machine.this_node import ThisNode, find_this_node

JOB = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n2", "SLURM_JOB_ID": "77"}
LOCAL = {"HPCENV_LOCAL_NODE": "local1", "HPCENV_LOCAL_NODES": "local0,local1", "HPCENV_LOCAL_JOB": "local-9"}


def test_a_first_start_is_attempt_0():
    assert find_this_node(JOB, cluster="slurm") == ThisNode(node="n2", nodes=("n1", "n2", "n3"), attempt=0, job_id="77")


def test_a_restart_counts_and_an_empty_count_is_0():
    assert find_this_node(JOB | {"SLURM_RESTART_COUNT": "2"}, cluster="slurm").attempt == 2
    assert find_this_node(JOB | {"SLURM_RESTART_COUNT": ""}, cluster="slurm").attempt == 0


def test_the_rank_is_the_place_in_the_node_list():
    assert [find_this_node(JOB | {"SLURMD_NODENAME": f"n{n}"}, cluster="slurm").rank for n in (1, 2, 3)] == [0, 1, 2]


def test_a_local_run_is_told_by_its_own_variables():
    place = find_this_node(LOCAL, cluster="local")
    assert place == ThisNode(node="local1", nodes=("local0", "local1"), attempt=0, job_id="local-9")


def test_a_slurm_job_that_inherited_a_local_runs_variables_is_a_slurm_job():
    assert find_this_node(LOCAL | JOB, cluster="slurm").node == "n2"


def test_a_local_run_inside_a_slurm_job_is_a_local_run():
    place = find_this_node(LOCAL | JOB | {"SLURM_RESTART_COUNT": "3"}, cluster="local")
    assert (place.node, place.attempt) == ("local1", 0)


@pytest.mark.parametrize("missing", sorted(JOB))
def test_a_missing_variable_is_named(missing):
    environ = {name: value for name, value in JOB.items() if name != missing}
    with pytest.raises(NodesUnknown) as caught:
        find_this_node(environ, cluster="slurm")
    assert str(caught.value) == (
        f"this step does not run inside a Slurm job\nwhy: {missing} is not set\nhint: start it with `hpcenv submit SCRIPT`"
    )


def test_a_broken_node_list_is_quoted():
    with pytest.raises(NodesUnknown, match=r"why: unbalanced brackets in host list 'n\[1-3'"):
        find_this_node(JOB | {"SLURM_JOB_NODELIST": "n[1-3"}, cluster="slurm")


def test_a_restart_count_that_is_no_number_is_refused():
    with pytest.raises(NodesUnknown, match="invalid literal"):
        find_this_node(JOB | {"SLURM_RESTART_COUNT": "often"}, cluster="slurm")


def test_a_node_outside_of_its_own_job_is_refused():
    with pytest.raises(NodesUnknown) as caught:
        find_this_node(JOB | {"SLURMD_NODENAME": "n9"}, cluster="slurm")
    assert str(caught.value) == ("node `n9` is 0 times in the node list of its job\nwhy: SLURM_JOB_NODELIST=n[1-3]")


def test_nothing_of_a_local_run_is_an_error_and_not_a_crash():
    with pytest.raises(NodesUnknown, match="does not run inside a local run\nwhy: HPCENV_LOCAL_NODE is not set"):
        find_this_node({}, cluster="local")
