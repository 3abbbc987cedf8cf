"""SPDX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from export_lockfiles import DISTS, B, C, dist, locked

from hpcenv.locking.formats.spdx import spdx
from hpcenv.project.workspace import read_lockfile

ROOT = Path(__file__).resolve().parents[4]


def packages(text: str) -> dict[str, dict[str, Any]]:
    return {one["SPDXID"]: one for one in json.loads(text)["packages"]}


def test_spdx_lists_every_package_with_purl_and_proved_hash() -> None:
    rendered = spdx(locked(*DISTS, image=True))
    found = packages(rendered.text)
    assert rendered.count == len(DISTS)
    assert found["SPDXRef-sif"]["checksums"] == [{"algorithm": "SHA256", "checksumValue": C}]
    (torch,) = [one for one in found.values() if one["name"] == "torch"]
    assert torch["checksums"] == [{"algorithm": "SHA256", "checksumValue": B}]
    assert torch["externalRefs"][0]["referenceLocator"].startswith("pkg:pypi/torch@2.13.0%2Bcu130")
    assert all("checksums" not in one for one in found.values() if one["name"] in ("unproved", "unasked", "pulled"))
    assert len(found) == len(DISTS) + 3


@pytest.mark.parametrize("made", ["plain", "image", "cuda.lock.toml", "default.lock.toml"])
def test_spdx_is_valid_for_the_tools_of_spdx(made: str, tmp_path: Path) -> None:
    """The parser and validator of the SPDX project (spdx-tools 0.8) accept it, and refuse a broken one."""
    try:
        from spdx_tools.spdx.parser.parse_anything import parse_file
        from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document
    except ImportError:
        pytest.skip("NOT CHECKED: the validator is missing (pip install spdx-tools)")

    def problems(text: str) -> list[str]:
        path = tmp_path / "bom.spdx.json"
        path.write_text(text)
        return [one.validation_message for one in validate_full_spdx_document(parse_file(str(path)))]

    twice = [dist("x"), dist("x"), dist("x_y..z", **{"content-sha256": "02"})]
    if made.endswith(".toml"):
        lockfile = read_lockfile(ROOT / "lockfiles" / made)
    else:
        lockfile = locked(*DISTS, *twice, image=made == "image")
    text = spdx(lockfile).text
    assert problems(text) == []
    assert problems(text.replace('"CC0-1.0"', '"MIT"')) != []
    assert problems(text.replace('"SPDXRef-python"', '"python"', 1)) != []
