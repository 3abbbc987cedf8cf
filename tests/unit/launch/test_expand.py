"""What --expand replaces in the arguments of a program."""

import re
from pathlib import Path

import pytest

from hpcenv.errors import UsageError
from hpcenv.launch.expand import NAMES, expand, unknown_names
from hpcenv.submission.launch_options import check_expand

VALUES = {"master_addr": "10.0.0.1", "node_rank": 1}


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("{node_rank}", "1"),
        ("--ip={master_addr}:29500", "--ip=10.0.0.1:29500"),
        ("{{node_rank}}", "{node_rank}"),
        ('{"a": {"node_rank": 1}}', '{"a": {"node_rank": 1}}'),
        ("{ node_rank }", "{ node_rank }"),
        ("{}", "{}"),
        ("{NODE_RANK}", "{NODE_RANK}"),
    ],
)
def test_only_known_names_between_single_braces_are_replaced(word, expected):
    assert expand((word,), VALUES) == (expected,)


def test_the_page_names_what_is_replaced():
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "start.md").read_text()
    table = page.partition("## Addresses in arguments")[2].partition("## What differs")[0]
    assert set(re.findall(r"`\{([a-z_]+)\}`", table)) == set(NAMES)


def test_a_value_is_not_expanded_again():
    assert expand(("{node}",), {"node": "{run}", "run": "r1"}) == ("{run}",)


def test_a_name_that_stands_for_nothing_is_refused_with_the_nearest_one():
    assert unknown_names(("{nodes_rank}", "{run}", "{{epoch}}", "{nodes_rank}")) == ("nodes_rank",)
    with pytest.raises(UsageError) as refused:
        check_expand(("--rank", "{nodes_rank}"))
    assert "did you mean {node_rank}?" in str(refused.value)
    assert "{{nodes_rank}}" in str(refused.value)
    assert all(f"{{{name}}}" in str(refused.value) for name in NAMES)
    check_expand(("{node_rank}", "{{epoch}}"))
