"""A package may have the name of a key of [packages]; its field is another one."""

from __future__ import annotations

import pytest

from hpcenv.project import document, fields
from hpcenv.project.lockfile import PackagesTable
from hpcenv.records.package_fields import KEYS, package_field


def test_the_keys_are_those_of_the_lockfiles_table_and_of_the_table_of_fields() -> None:
    assert set(document.keys(PackagesTable)) == KEYS
    rows = {field.name.partition(".")[2] for field in fields.FIELDS if field.name.startswith("packages.")}
    assert {name for name in rows if "*" not in name} <= KEYS


def test_every_direct_key_that_nodes_could_compare_has_its_own_row() -> None:
    """Without one it would be judged like a package. Lists of packages are compared package by package, or by a digest."""
    assert all(fields.has_row(f"packages.{key}") for key in KEYS - {"dist", "conda-package"})


@pytest.mark.parametrize("name", sorted(KEYS))
def test_a_package_with_the_name_of_a_key_is_judged_as_a_package(name: str) -> None:
    found = fields.find(package_field(name))
    assert found is not None
    assert (found.name, found.default) == ("packages.*", "must")


def test_other_packages_keep_their_name() -> None:
    assert package_field("numpy") == "packages.numpy"
