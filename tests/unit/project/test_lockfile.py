"""The lockfile: canonical bytes, what may change in it, and what nodes are compared with."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from hpcenv.errors import LockfileInvalid, LockfileMissing, LockfileNewer
from hpcenv.project import lockfile, toml_files
from hpcenv.project.document import parse
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.workspace import read_lockfile

DATA: dict[str, Any] = {
    "schema": 1,
    "revision": 0,
    "generated-by": "hpcenv 0.1.0",
    "fingerprint": "",
    "kind": "host",
    "asked": {"image": "host", "platform": "linux/amd64"},
    "libs": {"nccl": {"version": "2.29.7"}},
    "python": {
        "implementation": "cpython",
        "soabi": "cpython-312-x86_64-linux-gnu",
        "stdlib-sha256": "sha256:00",
        "sys-path": ["{prefix}/lib/python312.zip", "a", "b", 'größe "q" \\ 文'],
        "version": "3.12.11",
    },
    "system": {"glibc": "2.36"},
    "torch": {"version": "2.13.0"},
    "unknown": {"libs.cudnn.version": "cannot be read"},
    "policy": {"system.glibc": "must"},
    "packages": {
        "count": 2,
        "env-digest": "sha256:aa",
        "content-digest": "sha256:bb",
        "unlisted-count": 0,
        "unlisted-digest": "sha256:cc",
        "dist": [
            {"name": "numpy", "version": "2.3", "record-sha256": "01"},
            {"name": "torch", "version": "2.13.0", "record-sha256": "02", "content-sha256": "03"},
        ],
    },
}  # fmt: skip


def sealed(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "fingerprint": lockfile.fingerprint(data)}


def model(data: dict[str, Any] = DATA) -> Lockfile:
    found, problems = parse(Lockfile, lockfile.from_data(sealed(data)))
    assert problems == ()
    assert found is not None
    return found


def written(data: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "default.lock.toml"
    path.write_text(toml_files.dumps(data, header="h"))
    return path


def test_reading_what_was_written_gives_the_same_bytes(tmp_path: Path) -> None:
    text = toml_files.dumps(lockfile.to_data(model()), header="Written by `hpcenv lock`.")
    path = tmp_path / "default.lock.toml"
    path.write_text(text)
    again = toml_files.dumps(lockfile.to_data(read_lockfile(path)), header="Written by `hpcenv lock`.")
    assert again == text


def test_the_order_in_which_facts_came_does_not_show() -> None:
    facts = dict(reversed(model().facts.items()))
    other = model().model_copy(update={"facts": facts})
    assert toml_files.dumps(lockfile.to_data(other), header="") == toml_files.dumps(
        lockfile.to_data(model()), header=""
    )


def test_the_fingerprint_ignores_who_wrote_the_file() -> None:
    for revision, prefix in ((0, "hpc1-"), (1, "hpc1-"), (2, "hpc2-"), (7, "hpc2-")):
        data = {**DATA, "revision": revision}
        other = {**data, "generated-by": "hpcenv 9.9", "fingerprint": "hpc1-000000000000"}
        assert lockfile.fingerprint(other) == lockfile.fingerprint(data)
        assert re.fullmatch(prefix + "[0-9a-f]{12}", lockfile.fingerprint(data))


@pytest.mark.parametrize(
    "path", [("torch", "version"), ("packages", "env-digest"), ("asked", "image"), ("policy", "system.glibc")]
)
def test_the_fingerprint_covers_everything_else(path: tuple[str, str]) -> None:
    other = copy.deepcopy(DATA)
    other[path[0]][path[1]] = "changed"
    assert lockfile.fingerprint(other) != lockfile.fingerprint(DATA)


def test_the_fingerprint_is_that_of_the_file_as_read(tmp_path: Path) -> None:
    found = read_lockfile(written(sealed(DATA), tmp_path))
    assert lockfile.fingerprint(lockfile.to_data(found)) == found.fingerprint


# -- what is read -------------------------------------------------------------------------


def test_a_newer_revision_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    newer = copy.deepcopy(DATA)
    newer["revision"] = 99
    newer["expect"] = {"loss-trace": ["0x1.5bf0a8p+3"]}
    newer["determinism"] = {"seed": 1234}
    newer["asked"]["profile"] = "bitwise"
    newer["torch"]["cxx11-abi"] = True
    newer["torch"]["ratio"] = 1.5
    newer["packages"]["source"] = "index"
    newer["packages"]["dist"][0]["sbom"] = {"sha256": "x"}
    found = read_lockfile(written(sealed(newer), tmp_path))
    assert found.revision == 99
    assert found.facts == model().facts
    assert found.packages == model().packages


def test_the_same_keys_are_refused_in_our_own_revision(tmp_path: Path) -> None:
    data = copy.deepcopy(DATA)
    data["packages"]["dist"][0]["whel"] = "x"
    with pytest.raises(LockfileInvalid) as caught:
        read_lockfile(written(sealed(data), tmp_path))
    assert "unknown key `packages.dist[0].whel`" in str(caught.value.why)


@pytest.mark.parametrize("schema", ["x", 0, -1, True, 1.0, None])
def test_a_schema_that_is_no_number_is_invalid(schema: Any, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    data = {key: value for key, value in {**DATA, "schema": schema}.items() if value is not None}
    with pytest.raises(LockfileInvalid, match="schema") as caught:
        read_lockfile(written(data, tmp_path))
    assert "git checkout --" in str(caught.value.hint)


def test_a_newer_schema_names_file_both_numbers_and_remedy(tmp_path: Path) -> None:
    path = written({"schema": 2, "generated-by": "hpcenv 3.0", "whatever": 1}, tmp_path)
    with pytest.raises(LockfileNewer) as caught:
        read_lockfile(path)
    assert caught.value.what == f"`{path}` has schema 2, this hpcenv reads schema 1"
    assert caught.value.why == "it was written by hpcenv 3.0"
    assert caught.value.hint == "pip install --upgrade hpcenv"


@pytest.mark.parametrize(
    "content",
    [b"schema = 1\nrevision = ", b"\xff\xfe", b"", b"schema = 1\n", b"[" * 3000, b"a=" + b"[" * 3000],
    ids=["cut", "not-utf-8", "empty", "no-tables", "brackets", "deep"],
)  # fmt: skip
def test_what_is_no_lockfile_says_so(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "default.lock.toml"
    path.write_bytes(content)
    with pytest.raises(LockfileInvalid) as caught:
        read_lockfile(path)
    assert str(path) in caught.value.what
    lock = "`hpcenv lock`"
    assert caught.value.hint == f"bring it from where it was made; it is not under git here. To lock anew: {lock}"
    (tmp_path / ".git").mkdir()
    with pytest.raises(LockfileInvalid) as caught:
        read_lockfile(path)
    restore = f"restore it from version control: `git checkout -- {path}`"
    assert caught.value.hint == f"{restore}; if it was never committed, lock anew: {lock}"


def test_the_conflict_of_a_merge_is_named(tmp_path: Path) -> None:
    """git refuses to restore such a file."""
    path = tmp_path / "default.lock.toml"
    path.write_bytes(b"<<<<<<< HEAD\nschema = 1\n")
    (tmp_path / ".git").mkdir()
    with pytest.raises(LockfileInvalid) as caught:
        read_lockfile(path)
    hint = "settle hpcenv.toml first, then lock anew; the file is kept aside: `hpcenv lock`"
    assert caught.value.hint == hint


def test_a_folder_in_its_place_says_so(tmp_path: Path) -> None:
    (tmp_path / "default.lock.toml").mkdir()
    with pytest.raises(LockfileInvalid) as caught:
        read_lockfile(tmp_path / "default.lock.toml")
    assert caught.value.why == "Is a directory"


def test_no_lockfile_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(LockfileMissing) as caught:
        read_lockfile(tmp_path / "paper.lock.toml")
    assert caught.value.hint == "hpcenv lock --lock paper"


def changed(**tables: Any) -> dict[str, Any]:
    return {key: value for key, value in {**copy.deepcopy(DATA), **tables}.items() if value is not None}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (changed(kind="sif"), "[container] is missing"),
        (changed(asked={"image": "docker://x:1", "platform": "p"}), "asked.image is 'docker://x:1'"),
        (changed(torch=None), "`torch.version` is missing"),
        (changed(packages={**DATA["packages"], "dist": []}), "packages.count is 2, but 0 are listed"),
        (changed(torch={"version": "2", "a": {"b": "1"}, "a.b": "2", "a.b.c": "3"}), "`torch.a.b.c` is no fact"),
        (changed(python="3.12"), "`python.version` is missing"),
    ],
)  # fmt: skip
def test_a_lockfile_that_was_cut_or_edited_does_not_weaken_the_gate(data: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(LockfileInvalid) as caught:
        read_lockfile(written(sealed(data), tmp_path))
    assert said in str(caught.value.why)


# -- what nodes are compared with ---------------------------------------------------------


def expected(level: Any, **policy: Any) -> dict[str, tuple[Any, str]]:
    found = lockfile.expectations(model({**DATA, "policy": policy}), level=level, origin="o")
    return {e.field: (e.value, e.severity) for e in found}


def test_what_needs_every_file_is_left_to_the_full_level() -> None:
    deep = set(expected("full")) - set(expected("record"))
    assert deep == {"python.stdlib-sha256", "packages.content-digest"}


def test_severities_come_from_the_default_profile() -> None:
    found = expected("record")
    assert found["torch.version"] == ("2.13.0", "must")
    assert found["system.glibc"] == ("2.36", "info")


def test_a_profile_in_an_older_lockfile_has_its_name_of_today() -> None:
    assert model({**DATA, "determinism": {"profile": "default"}}).determinism.profile == "off"


def test_policy_loosens_and_tightens() -> None:
    found = expected("record", **{"torch.version": "warn", "system.glibc": "must"})
    assert found["torch.version"][1] == "warn"
    assert found["system.glibc"][1] == "must"


def test_a_misspelled_policy_is_told_with_the_nearest_field() -> None:
    locked = model({**DATA, "policy": {"torch.vresion": "info", "host.gpu-count": "warn"}})
    assert lockfile.policy_problems(locked) == (
        'unknown field `policy."torch.vresion"`, perhaps you meant `torch.version`',
    )


def test_a_modified_package_is_compared_with_what_was_locked() -> None:
    packages = {p.name: p for p in lockfile.package_expectations(model())}
    assert packages["torch"].content_sha256 == "03"
    assert packages["numpy"].content_sha256 == "01"
