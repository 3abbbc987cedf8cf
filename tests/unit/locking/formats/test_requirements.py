"""requirements.txt."""

from __future__ import annotations

import re

import pytest
from export_lockfiles import DISTS, A, B, dist, lines, locked

from hpcenv.locking.formats.requirements import requirements


def test_requirements_pin_what_is_proved_and_comment_the_rest() -> None:
    found = requirements(locked(*DISTS))
    assert lines(found.text) == [f"numpy==2.3 --hash=sha256:{A}", f"torch==2.13.0+cu130 --hash=sha256:{B}"]
    assert [line for line in found.text.splitlines() if "==" in line and line.startswith("#")] == [
        "# Mine==1.0: editable install file:mine at 77aa, with changes that are not committed",
        "# pulled==1.0: installed from version control https://git.example/x.git at 4f2a",
        "# unasked==3: the lockfile names no wheel of it; `hpcenv lock` looks for a wheel",
        "# unproved==1.0: its wheel has no proof",
    ]
    assert [one.name for one in found.left_out] == ["Mine", "pulled", "unasked", "unproved"]
    assert found.notes == ("4 of 6 packages are left out: Mine, pulled, unasked, unproved",)
    assert found.count == 2


def test_a_wheel_of_a_direct_url_is_pinned_to_it() -> None:
    one = dist("x", proof="direct-url", **{"direct-url": {"url": "https://files.example/x-1.0-py3-none-any.whl"}})
    found = requirements(locked(one))
    assert lines(found.text) == [f"x @ https://files.example/x-1.0-py3-none-any.whl --hash=sha256:{A}"]


LOCAL = {"url": "file:x-1.0-py3-none-any.whl"}


@pytest.mark.parametrize("proof", ["direct-url", "claimed", "embedded-lock"])
def test_a_wheel_of_a_file_has_no_hash_that_pip_could_find(proof: str) -> None:
    found = requirements(locked(dist("x", proof=proof, **{"direct-url": LOCAL})))
    assert lines(found.text) == []
    reason = "installed from a file of one machine: no index is known to have this wheel"
    assert [(one.name, one.reason) for one in found.left_out] == [("x", reason)]
    assert f"# x==1.0: {reason}" in found.text


def test_a_wheel_of_a_file_that_an_index_has_is_pinned() -> None:
    found = requirements(locked(dist("x", **{"direct-url": {**LOCAL, "hash": f"sha256={B}"}})))
    assert (lines(found.text), found.notes) == ([f"x==1.0 --hash=sha256:{A}"], ())


def test_a_claimed_hash_is_not_required_and_one_of_an_index_is_not_asked_of_the_url() -> None:
    url = "https://files.example/x-1.0-py3-none-any.whl"
    assert lines(requirements(locked(dist("x", proof="claimed", **{"direct-url": {"url": url}}))).text) == []
    repacked = dist("x", **{"direct-url": {"url": url, "hash": f"sha256={B}"}})
    assert lines(requirements(locked(repacked)).text) == [f"x==1.0 --hash=sha256:{A}"]


def test_another_index_than_the_default_is_said() -> None:
    one = dist("x")
    one["wheel"]["index"] = "extra-1"
    assert requirements(locked(one)).notes == ("pip must be configured to find x: installed from extra-1",)


def test_a_modified_package_is_said_above_its_pin() -> None:
    found = requirements(locked(dist("x", **{"content-sha256": "02"})))
    said = "modified after its installation; the export has the original package"
    assert found.text.splitlines()[-2:] == [f"# x==1.0: {said}", f"x==1.0 --hash=sha256:{A}"]
    assert found.notes == (f"x 1.0 was {said}",)


def test_a_package_that_is_installed_twice_is_left_out() -> None:
    found = requirements(locked(dist("X-y", "1"), dist("x_y", "2")))
    assert lines(found.text) == []
    assert {one.reason for one in found.left_out} == {"it is installed 2 times; pip can install it only once"}


def test_an_edited_lockfile_is_said() -> None:
    found = requirements(locked(edited=True))
    assert re.match("the lockfile was edited: it names hpc1-0{12}, its content has hpc1-[0-9a-f]{12}", found.notes[0])


def test_the_image_is_named_and_said_to_be_missing() -> None:
    found = requirements(locked(dist("x"), image=True))
    assert (
        f"# Locked in the image docker://registry.example:5000/team/torch:2.13, sha256:{B}. This file does not"
        in found.text
    )
    assert found.notes == ("the export contains the image's Python packages only, not the image",)
