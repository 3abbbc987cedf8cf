"""Where a step runs: host lists as Slurm writes them, and the variables of a job."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.errors import NodesUnknown
from hpcenv.node.this_node import ThisNode, expand_hostlist, find_this_node

JOB = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n2", "SLURM_JOB_ID": "77"}
LOCAL = {"HPCENV_LOCAL_NODE": "local1", "HPCENV_LOCAL_NODES": "local0,local1", "HPCENV_LOCAL_JOB": "local-9"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1 n2"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[1-2,07]", "n1 n2 n07"),
        ("n[3,1]", "n3 n1"),
        ("r[1-2]n[01-03,07],x", "r1n01 r1n02 r1n03 r1n07 r2n01 r2n02 r2n03 r2n07 x"),
        ("gpu-a100-[1-2]", "gpu-a100-1 gpu-a100-2"),
        ("n[1-2]-ib,login.example", "n1-ib n2-ib login.example"),
        ("7", "7"),
        ("2node-3", "2node-3"),
        ("a[1-2],b[1-2]", "a1 a2 b1 b2"),
    ],
)
def test_host_lists_expand_in_slurms_order(text, names):
    assert expand_hostlist(text) == tuple(names.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a host list: ''"),
        ("n1,", "not a host list: 'n1,'"),
        (",n1", "not a host list: ',n1'"),
        ("n[1-3", "unbalanced brackets in host list 'n[1-3'"),
        ("n1-3]", "unbalanced brackets in host list 'n1-3]'"),
        ("n[1-[2]]", "unbalanced brackets in host list 'n[1-[2]]'"),
        ("n[]", "not a range: ''"),
        ("n[a-b]", "not a range: 'a-b'"),
        ("n[1-]", "not a range: '1-'"),
        ("n[1-2-3]", "not a range: '1-2-3'"),
        ("n[\u00b2]", "not a range: '\u00b2'"),
        ("n[3-1],x", "not a range: '3-1'"),
        ("n[1,1]", "a node is named twice in 'n[1,1]'"),
        ("n1,n[1-2]", "a node is named twice in 'n1,n[1-2]'"),
        ("n[1-65536],m", "not a host list: more than 65536 nodes"),
        ("n[1-9,1-65530]", "not a host list: more than 65536 nodes"),
        ("[1-9]" * 40, "not a host list: more than 65536 nodes"),
        ("[1]" * 6000, "not a host list: a name is longer than a host name can be"),
    ],
)
def test_what_is_no_host_list_is_refused_and_never_guessed(text, message):
    with pytest.raises(ValueError) as caught:
        expand_hostlist(text)
    assert str(caught.value) == message


@given(st.lists(st.from_regex(r"[a-z][a-z0-9.-]{0,9}", fullmatch=True), min_size=1, unique=True))
def test_names_without_brackets_are_themselves(names):
    assert expand_hostlist(",".join(names)) == tuple(names)


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
