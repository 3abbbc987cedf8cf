"""Host lists as Slurm writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.hostlist import expand_hostlist


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
