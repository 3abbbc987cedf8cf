"""CycloneDX."""

from __future__ import annotations

import json
from typing import Any

import pytest
from export_lockfiles import DISTS, A, B, C, dist, locked

from hpcenv.locking.formats.cyclonedx import cyclonedx
from hpcenv.project.lockfile import Lockfile


def bom(made: Lockfile) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    document = json.loads(cyclonedx(made).text)
    return document, {one["bom-ref"]: one for one in document["components"]}


def properties(component: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in component["properties"]}


def test_cyclonedx_lists_packages_with_purl_hash_and_proof() -> None:
    _, found = bom(locked(*DISTS))
    torch = found["package:torch@2.13.0+cu130"]
    assert torch["hashes"] == [{"alg": "SHA-256", "content": B}]
    assert torch["purl"] == "pkg:pypi/torch@2.13.0%2Bcu130?file_name=torch-2.13.0%2Bcu130-py3-none-any.whl"
    assert properties(torch)["hpcenv:wheel.proof"] == "record"
    assert properties(torch)["hpcenv:record-sha256"] == "01"
    for name in ("package:unproved@1.0", "package:unasked@3", "package:pulled@1.0", "package:Mine@1.0"):
        assert "hashes" not in found[name]
        assert properties(found[name])["hpcenv:wheel.proof"] == "none"
    assert found["package:pulled@1.0"]["purl"] == "pkg:generic/pulled@1.0"
    assert properties(found["package:Mine@1.0"])["hpcenv:direct-url.dirty"] == "true"


def test_cyclonedx_has_the_image_the_sif_and_the_libraries() -> None:
    document, found = bom(locked(image=True))
    image = found["image"]
    assert (image["type"], image["name"], image["version"]) == (
        "container",
        "registry.example:5000/team/torch",
        f"sha256:{B}",
    )
    assert image["hashes"] == [{"alg": "SHA-256", "content": B}]
    assert image["purl"].startswith(f"pkg:oci/torch@sha256:{B}?arch=amd64&repository_url=")
    assert properties(image)["hpcenv:container.rootfs-chain-id"] == f"sha256:{A}"
    assert found["sif"]["hashes"] == [{"alg": "SHA-256", "content": C}]
    assert (found["library:nccl"]["version"], found["library:nccl"]["hashes"][0]["content"]) == ("2.29.7", C)
    assert "library:cudnn" not in found
    root = properties(document["metadata"]["component"])
    assert root["hpcenv:torch.cuda"] == "13.0"
    assert root["hpcenv:unknown:libs.cudnn.version"] == "cannot be read"
    assert found["python"]["version"] == "3.12.11"


def test_cyclonedx_has_no_time_and_a_serial_number_of_the_fingerprint() -> None:
    one, again, other = (json.loads(cyclonedx(made).text) for made in (locked(*DISTS), locked(*DISTS), locked()))
    assert one == again
    assert "timestamp" not in one["metadata"]
    assert one["serialNumber"] != other["serialNumber"]
    assert one["metadata"]["component"]["version"] == locked(*DISTS).fingerprint


@pytest.mark.parametrize("image", [False, True])
def test_cyclonedx_is_valid(image: bool) -> None:
    from cyclonedx.exception import MissingOptionalDependencyException
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    twice = [dist("x"), dist("x"), dist("x", **{"content-sha256": "02"})]
    text = cyclonedx(locked(*DISTS, *twice, image=image)).text
    try:
        problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
        broken = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text.replace('"SHA-256"', '"SHA-257"'))
    except MissingOptionalDependencyException:
        pytest.skip("NOT CHECKED: the validator is missing (pip install 'cyclonedx-python-lib[json-validation]')")
    assert problem is None, problem
    assert broken is not None
