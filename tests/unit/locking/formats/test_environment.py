"""environment.yml."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from export_lockfiles import DISTS, A, dist, lines, locked

from hpcenv.locking.formats.environment import environment


def read_yaml(text: str) -> dict[str, Any]:
    """The few forms of YAML that are written; with PyYAML, that this is how it reads them too."""
    rows = lines(text)
    assert rows[0].startswith("name: ")
    assert rows[1] == "dependencies:"
    found: list[Any] = []
    for row in rows[2:]:
        nested, entry = re.fullmatch(r"  (    )?- (.+)", row).groups()  # type: ignore[union-attr]
        value: Any = json.loads(entry) if entry.startswith('"') else entry
        assert entry.startswith('"') or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+!=-]*:?", entry), entry
        if nested:
            found[-1]["pip"].append(value)
        else:
            found.append({"pip": []} if value == "pip:" else value)
    read = {"name": json.loads(rows[0].partition(" ")[2]), "dependencies": found}
    try:
        import yaml
    except ImportError:
        return read
    assert yaml.safe_load(text) == read
    return read


def test_environment_pins_python_and_what_pip_can_install() -> None:
    conda = dist("libmamba", source="conda", wheel={"proof": "none"})
    found = environment(locked(*DISTS, conda), name="on")
    assert read_yaml(found.text) == {
        "name": "on",
        "dependencies": [
            "python=3.12.11",
            "pip",
            {"pip": ["numpy==2.3", "torch==2.13.0+cu130", "unasked==3", "unproved==1.0"]},
        ],
    }
    assert [(one.name, one.reason.partition(" file")[0]) for one in found.left_out] == [
        ("libmamba", "installed by conda"),
        ("Mine", "editable install"),
        ("pulled", "installed from version control https://git.example/x.git at 4f2a"),
    ]


def test_environment_keeps_the_hash_of_a_direct_url() -> None:
    url = "https://files.example/x-1.0-py3-none-any.whl"
    found = read_yaml(environment(locked(dist("x", **{"direct-url": {"url": url}})), name="n").text)
    assert found["dependencies"][-1] == {"pip": [f"x @ {url}#sha256={A}"]}


@pytest.mark.parametrize("proof", ["direct-url", "claimed"])
def test_environment_warns_of_a_wheel_of_a_file(proof: str) -> None:
    one = dist("x", proof=proof, **{"direct-url": {"url": "file:x-1.0-py3-none-any.whl"}})
    one["wheel"]["index"] = None
    found = environment(locked(one), name="n")
    assert found.notes == (
        "pip must be configured to find x: installed from a file, and an index may have a different file of this version",
    )


def test_environment_says_when_conda_has_not_this_python() -> None:
    facts = {"python": {"version": "3.11.13", "implementation": "pypy"}}
    found = environment(locked(dist("x"), facts=facts), name="n")
    assert read_yaml(found.text)["dependencies"][0] == "python"
    assert found.notes == ("Python is not pinned: the lockfile has pypy 3.11.13",)
