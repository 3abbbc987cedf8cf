"""pylock.toml."""

from __future__ import annotations

import pytest
from export_lockfiles import DISTS, A, B, dist, locked
from packaging.pylock import Pylock

from hpcenv.locking.formats.pylock import WheelLink, WheelUrl, choose_url, pylock, wheels_to_find


def test_pylock_has_every_proved_wheel_with_its_url() -> None:
    urls = {"torch": WheelUrl(url="https://h.example/t.whl"), "numpy": WheelUrl(reason="no index lists it")}
    found = pylock(locked(*DISTS), urls)
    assert found.data == {
        "lock-version": "1.0",
        "environments": [
            "sys_platform == 'linux' and platform_machine == 'x86_64' and implementation_name == 'cpython' and python_version == '3.12'"
        ],
        "requires-python": "==3.12.*",
        "created-by": "hpcenv",
        "packages": [
            {
                "name": "torch",
                "version": "2.13.0+cu130",
                "wheels": [
                    {
                        "name": "torch-2.13.0+cu130-py3-none-any.whl",
                        "url": "https://h.example/t.whl",
                        "hashes": {"sha256": B},
                    }
                ],
            }
        ],
    }
    Pylock.from_dict(found.data)
    assert "numpy==2.3: no index lists it" in found.header
    assert [one.name for one in found.left_out] == ["Mine", "numpy", "pulled", "unasked", "unproved"]


def test_only_proved_wheels_of_indexes_are_looked_for() -> None:
    direct = dist("x", proof="direct-url", **{"direct-url": {"url": "https://files.example/x-1.0-py3-none-any.whl"}})
    assert [one.name for one in wheels_to_find(locked(*DISTS, direct))] == ["numpy", "torch"]
    (package,) = pylock(locked(direct), {}).data["packages"]
    assert package["wheels"][0]["url"] == "https://files.example/x-1.0-py3-none-any.whl"


def test_a_wheel_with_the_name_of_another_package_is_left_out() -> None:
    one = dist("x", wheel={"proof": "record", "sha256": A, "filename": "y-1.0-py3-none-any.whl"})
    found = pylock(locked(one), {"x": WheelUrl(url="https://h.example/y-1.0-py3-none-any.whl")})
    assert found.data["packages"] == []
    assert [one.reason for one in found.left_out] == ["the name of its wheel does not fit its name and version"]


NAME = "x-1.0-py3-none-any.whl"


@pytest.mark.parametrize(
    ("links", "url", "said"),
    [
        ([], None, f"no index lists {NAME}"),
        ([(NAME, "https://h.example/x.whl", A)], "https://h.example/x.whl", ""),
        ([("renamed.whl", "http://h.example/x.whl", A)], "http://h.example/x.whl", ""),
        ([(NAME, None, None), (NAME, "https://h.example/x.whl", A)], "https://h.example/x.whl", ""),
        ([(NAME, None, None)], None, "its wheel is in a folder on this machine (find-links), and no index has it"),
        ([(NAME, None, A)], None, "its wheel is in a folder on this machine (find-links), and no index has it"),
        (
            [(NAME, "https://h.example/x.whl", B)],
            None,
            f"the index has a different file of that name: sha256 {B}, locked {A}",
        ),
        (
            [(NAME, "https://h.example/x.whl", None)],
            "https://h.example/x.whl",
            "the index states no sha256 for it; pip compares the file with the locked sha256",
        ),
        ([("y-1.0-py3-none-any.whl", "https://h.example/y.whl", None)], None, f"no index lists {NAME}"),
        ([(NAME, "https://me:secret@h.example/x.whl#sha256=1", A)], "https://h.example/x.whl", ""),
        ([(NAME, "https://h.example/x.whl?token=1", A)], None, "its URL contains a query, which may be a secret"),
        ([(NAME, "file:///srv/x.whl", A)], None, "its URL begins with `file:`, so it is valid on one machine only"),
        ([(NAME, "https://h.example/x\n.whl ", A)], None, "its URL contains characters that are not allowed in a URL"),
    ],
)
def test_the_url_is_of_the_very_file_and_public(
    links: list[tuple[str, str | None, str | None]], url: str | None, said: str
) -> None:
    (one,) = wheels_to_find(locked(dist("x")))
    found = choose_url(one, [WheelLink(filename=f, url=u, sha256=s) for f, u, s in links])
    assert (found.url, found.remark or found.reason) == (url, said)
