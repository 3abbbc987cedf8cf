"""What all tables of the documents have in common: strict, frozen, comparable, without unknown keys."""

from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from hpcenv.project import lockfile, site, spec
from hpcenv.project.document import Document, parse
from hpcenv.project.lockfile import AskedTable, LockedBindTable, LockedHostTable
from hpcenv.project.site_option_types import SiteSubmitTable

ASKED = AskedTable(image="host", platform="linux/amd64")


def tables(kind: type[Document] = Document) -> Iterator[type[Document]]:
    for table in kind.__subclasses__():
        yield table
        yield from tables(table)


def test_every_table_is_strict_and_frozen_and_refuses_unknown_keys() -> None:
    found = list(tables())
    assert {lockfile.Lockfile, spec.Project, site.SiteFile, SiteSubmitTable} <= set(found)
    rules = {"strict": True, "frozen": True, "extra": "forbid"}
    assert [table.__name__ for table in found if not rules.items() <= table.model_config.items()] == []


def test_a_table_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ASKED.image = "docker://other"  # type: ignore[misc]


def test_a_file_has_keys_and_no_python_names() -> None:
    found, problems = parse(LockedHostTable, {"gpu-memory": "40 GB"})
    assert (found, problems) == (LockedHostTable(gpu_memory="40 GB"), ())
    found, problems = parse(LockedHostTable, {"gpu_memory": "40 GB"})
    assert (found, problems) == (None, ("unknown key `gpu_memory`, perhaps you meant `gpu-memory`",))


def test_a_default_is_not_shared() -> None:
    LockedHostTable().nvidia_require["NVIDIA_REQUIRE_CUDA"] = "cuda>=13.0"
    assert LockedHostTable().nvidia_require == {}


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
