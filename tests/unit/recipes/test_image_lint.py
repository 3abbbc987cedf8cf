"""The table of rules and the table of packages with known trouble."""

from __future__ import annotations

import pytest

from hpcenv.errors import SpecError
from hpcenv.recipes import image_lint


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"schema": 2, "trouble": []},
        {"schema": 1},
        {"schema": 1, "trouble": [{"package": "x"}]},
        {"schema": 1, "trouble": [3]},
    ],
)
def test_a_table_of_troubles_that_is_none(data):
    with pytest.raises(SpecError):
        image_lint.parse_troubles(data)


def test_every_rule_says_what_to_do():
    told_by_the_finding = {"known-trouble", "size"}
    assert all((rule.why and rule.hint) or rule.id in told_by_the_finding for rule in image_lint.RULES.values())
