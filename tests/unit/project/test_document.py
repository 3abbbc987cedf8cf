"""Comparison, hash and text of tables."""

import pytest

from hpcenv.project import spec
from hpcenv.project.lockfile import AskedTable, LockedBindTable, LockedHostTable

ASKED = AskedTable(image="host", platform="linux/amd64")


def test_tables_of_one_kind_with_the_same_values_are_equal() -> None:
    assert AskedTable(image="host", platform="linux/amd64") == ASKED
    assert hash(AskedTable(image="host", platform="linux/amd64")) == hash(ASKED)
    assert AskedTable(image="host", platform="linux/amd64", python="python3") != ASKED
    assert LockedHostTable() == LockedHostTable()


def test_tables_of_different_kinds_are_not_equal() -> None:
    assert spec.PathsTable() != spec.DeterminismTable()
    assert ASKED != ("host", None, "linux/amd64")


def test_a_table_with_a_mapping_has_no_hash() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(LockedHostTable())


def test_the_text_of_a_table_is_how_it_is_written_in_python() -> None:
    assert repr(ASKED) == "AskedTable(image='host', python=None, platform='linux/amd64')"
    bind = LockedBindTable(target="/b", content="sha256:0")
    assert eval(repr(bind)) == bind  # noqa: S307
