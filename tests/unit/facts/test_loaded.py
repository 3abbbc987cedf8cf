"""The libraries that torch has really loaded, against the lockfile."""

import dataclasses

import pytest

from hpcenv.facts import loaded
from hpcenv.project import severities
from hpcenv.records.manifest import Expectation

PATH = "/opt/env/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2"
LOCKED = {
    "libs.nccl.origin": "prefix:lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2",
    "libs.nccl.version": "2.27.5",
    "libs.nccl.build-id": "ab" * 20,
    "libs.cudnn.origin": "absent",
    # libcublas is locked without a version: the default level does not read it.
    "libs.cublas.origin": "prefix:lib/libcublas.so.12",
    "libs.cublas.build-id": "cd" * 20,
}
NCCL = {"path": PATH, "real": PATH, "build-id": "ab" * 20, "numbers": [22705]}
CUBLAS = {"path": "/opt/env/lib/libcublas.so.12", "real": "/opt/env/lib/libcublas.so.12.8", "build-id": "cd" * 20}


@pytest.fixture
def manifest(make_manifest):
    expectations = tuple(Expectation(field=name, value=value, severity="must") for name, value in LOCKED.items())
    return make_manifest(expectations=expectations)


def report(*, nccl=(NCCL,), cublas=(), cudnn=()):
    return {
        "libraries": {
            "nccl": {"expected": PATH, "mapped": list(nccl)},
            "cublas": {"expected": "/opt/env/lib/libcublas.so.12.8", "mapped": list(cublas)},
            "cudnn": {"expected": "", "mapped": list(cudnn)},
        }
    }


def test_the_agent_is_asked_for_what_the_lockfile_has(manifest):
    asked = loaded.wanted(manifest)
    assert sorted(asked) == ["cublas", "cudnn", "nccl"]
    assert asked["nccl"] == {
        "stem": "libnccl", "how": "packed", "function": "ncclGetVersion", "origin": LOCKED["libs.nccl.origin"],
    }  # fmt: skip


@pytest.mark.parametrize("found", [report(), report(nccl=()), report(cublas=(CUBLAS,))])
def test_the_locked_libraries_are_no_difference(manifest, found):
    assert loaded.compare(manifest, found) == ()


@pytest.mark.parametrize(
    ("found", "field", "text", "note"),
    [
        (
            report(nccl=({**NCCL, "path": "/.singularity.d/libs/libnccl.so.2", "real": "/.singularity.d/libs/libnccl.so.2"},)),
            "loaded.nccl", "2.27.5 /.singularity.d/libs/libnccl.so.2", "a file from another place replaces the locked one",
        ),
        # Two copies in one process: either may be the one that is used.
        (
            report(nccl=(NCCL, {**NCCL, "path": "/x/libnccl.so.2", "real": "/x/libnccl.so.2", "numbers": [22304]})),
            "loaded.nccl", "2.23.4 /x/libnccl.so.2", "a file from another place replaces the locked one; another version",
        ),
        (report(nccl=({**NCCL, "numbers": [22800]},)), "loaded.nccl", f"2.28.0 {PATH}", "another version"),
        (
            report(nccl=({**NCCL, "build-id": "00" * 20},)), "loaded.nccl", f"2.27.5 {PATH}",
            "another build: build-id 000000000000, locked abababababab",
        ),
        (
            report(cudnn=({"path": "/usr/lib/libcudnn.so.9", "real": "/usr/lib/libcudnn.so.9.1", "numbers": [91002]},)),
            "loaded.cudnn", "9.10.2 /usr/lib/libcudnn.so.9", "the locked environment does not load this library",
        ),
    ],
)  # fmt: skip
def test_another_file_or_version_is_a_difference(manifest, found, field, text, note):
    [one] = loaded.compare(manifest, found)
    assert (one.severity, one.difference.field, one.difference.found, one.difference.note) == (
        "must",
        field,
        text,
        note,
    )
    assert loaded.blocking([one]) == (one.difference,)
    assert f"node n1: {field} (must): locked " in loaded.in_words([one], "n1")[0]


@pytest.mark.parametrize("found", [{}, {"problem": "/proc/self/maps: no"}, {"libraries": None}])
def test_what_was_not_read_is_unknown(manifest, found):
    [one] = loaded.compare(manifest, found)
    assert (one.difference.unknown, one.severity) == (True, "must")


@pytest.mark.parametrize("key", ["loaded.*", "loaded.nccl"])
@pytest.mark.parametrize("severity", ["must", "warn", "info"])
def test_policy_decides_how_much_it_matters(manifest, key, severity):
    assert severities.problems([key]) == ()
    manifest = dataclasses.replace(manifest, severities=severities.resolve({key: severity}))
    found = loaded.compare(manifest, report(nccl=({**NCCL, "numbers": [22800]},)))
    assert [one.severity for one in found] == [severity]
    assert len(loaded.blocking(found)) == (severity == "must")


def test_a_lockfile_without_libraries_compares_none(make_manifest):
    assert loaded.compare(make_manifest(), {}) == ()


def test_an_environment_that_is_locked_without_torch_loads_none(manifest):
    torch = Expectation(field="torch.version", value="absent", severity="info")
    without = dataclasses.replace(manifest, expectations=(*manifest.expectations, torch))
    assert loaded.wanted(without) == {}
    assert loaded.compare(without, {"problem": "torch cannot be imported"}) == ()
