"""The RECORD of a distribution."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_world import Venv, b64, package

from hpcenv.incontainer.probe import record
from hpcenv.incontainer.probe.environment import Dist, ProbedEnvironment, Site


def test_a_changed_record_changes_the_digest(env: Venv) -> None:
    before = env.probe()["values"]["packages.env-digest"]
    record = env.site / "demo-1.0.dist-info/RECORD"
    record.write_text(record.read_text().replace(b64(b"X = 1\n"), b64(b"X = 2\n")))
    assert env.probe()["values"]["packages.env-digest"] != before


def test_a_row_without_a_hash_stays_empty(env: Venv) -> None:
    env.install("loose", {}, rows=[["loose.py", "", ""]])
    loose = package(env.probe("full"), "loose")
    assert loose["content-sha256"] == loose["record-sha256"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"a.py\0,sha256=x,1\n", "NUL"),
        (b'"a.py\nsha256=forged",sha256=x,1\n', "row 1 is not path, hash, size"),
        (b'"unclosed,,\n', "row 1 is not path, hash, size"),
        (b'a.py,"sha256=x\nb.py",1\n', "row 1 is not path, hash, size"),
        (b"a,b,c,d,e\n", "row 1 is not path, hash, size"),
        (b'"' + b"x" * 200_000 + b'",,\n', "field larger than field limit"),
        (b"a,,\n" * 300_001, "more than 300000 rows"),
        (b"x" * (16 << 20) + b"y", "larger than"),
    ],
)
def test_a_record_that_is_garbage_is_unknown_with_the_reason(env: Venv, record: bytes, reason: str) -> None:
    env.install("good", {"good.py": b"1"})
    (env.site / "demo-1.0.dist-info/RECORD").write_bytes(record)
    found = env.probe("full")
    demo = package(found, "demo")
    assert demo["record-sha256"] is None and reason in demo["reason"]
    assert package(found, "good")["content-sha256"] is not None
    assert found["unknown"] == {} or set(found["unknown"]) <= {"system.glibc"}


@pytest.mark.parametrize("size", ["9" * 30 + "x", "\u00b2", "-1", "1e9", "9" * 5000])
def test_an_absurd_size_changes_only_the_digest(env: Venv, size: str) -> None:
    env.install("odd", {}, rows=[["odd.py", b64(b"1"), size]])
    (env.site / "odd.py").write_bytes(b"1")
    odd = package(env.probe("full"), "odd")
    assert odd["content-sha256"] == odd["record-sha256"] and odd["modified"] == []


@pytest.mark.parametrize("record", [b"\xff\xfe,\xff,\xff\n", b",,\n\n\n", b"caf\xe9.py,sha256=x,1\n", b"a\n"])
def test_a_record_that_is_odd_is_hashed_as_it_is(env: Venv, record: bytes) -> None:
    (env.site / "demo-1.0.dist-info/RECORD").write_bytes(record)
    demo = package(env.probe("full"), "demo")
    assert re.fullmatch("[0-9a-f]{64}", demo["record-sha256"])


_PATHS = st.sampled_from(
    "a.py b/c.so b/__pycache__/c.cpython-311.pyc x.pyc b/x.pyc ./d.py ../../../bin/run ../../../etc/x ../y.py b//e.py "
    "__pycache__/f.py g__pycache__h.py n-1.dist-info/RECORD n-1.dist-info/INSTALLER n-1.dist-info/METADATA "
    "n-1.dist-info/x/RECORD ./n-1.dist-info/RECORD n-1.dist-infox /absolute/z.py .hidden b/.x.py \xe4.py \U0001f600.py".split()
)


_ROWS = st.tuples(_PATHS, st.sampled_from(["sha256=Zm9v", "md5=00", ""]), st.sampled_from(["1", ""])).map(",".join)


_LINES = _ROWS | st.text('ab,/."\r_\xe9\0', max_size=8)


_RECORDS = st.tuples(st.sampled_from(["\n", "\r\n"]), st.lists(_ROWS, max_size=12) | st.lists(_LINES, max_size=12)).map(
    lambda made: made[0].join([*made[1], ""])
)


@settings(max_examples=400, deadline=None)
@given(_RECORDS, st.sampled_from(["utf-8", "latin-1"]))
def test_a_record_says_the_same_taken_by_lines_and_by_rows(
    tmp_path_factory: pytest.TempPathFactory, text: str, encoding: str
) -> None:
    """Level record takes whole lines where it can; level full takes every row."""
    site = tmp_path_factory.getbasetemp() / "by-lines" / "lib" / "site-packages"
    (site / "n-1.dist-info").mkdir(parents=True, exist_ok=True)
    (site / "n-1.dist-info" / "RECORD").write_bytes(text.encode(encoding, "replace"))

    def read(level: str) -> object:
        dist = Dist(Site(str(site), str(site.parents[1]), True), "n-1.dist-info")
        try:
            record.read_record(ProbedEnvironment(level, []), dist)
        except Exception as error:  # noqa: BLE001  (whatever it is: both must say the same)
            return repr(error)
        return dist.plain_digest or record.record_digest(dist.rows), sorted(set(dist.listed))

    assert read("record") == read("full")


def test_a_record_as_pip_or_uv_writes_it_is_taken_by_lines() -> None:
    for end in ("\n", "\r\n"):
        dist = Dist(Site("/env/lib", "/env", True), "n-1.dist-info")
        rows = (
            "a.py,sha256=Zm9v,3",
            "__pycache__/a.cpython-311.pyc,,",
            "../bin/run,sha256=Zm9v,3",
            "n-1.dist-info/RECORD,,",
        )
        assert record._read_plain_record(dist, end.join([*rows, ""]).encode())
        assert dist.listed == ["/env/lib/a.py", "/env/bin/run"]


@pytest.mark.parametrize(
    "path", ["/etc/hostname", "../../../../../../../../../../etc/hostname", "demo/../../../../../x"]
)
def test_a_path_that_leaves_the_environment_is_never_read(env: Venv, tmp_path: Path, path: str) -> None:
    env.install("spy", {}, rows=[[path, b64(b"not what is there"), "17"]])
    found = env.probe("full")
    spy = package(found, "spy")
    assert spy["content-sha256"] == spy["record-sha256"] is not None and spy["modified"] == []
    assert spy["outside-rows"] == 1
    assert "packages.content-digest" in found["values"]


def test_a_compiled_file_counts_where_the_record_lists_no_source(env: Venv) -> None:
    env.install("lone", {}, rows=[["secret.pyc", b64(b"1"), "1"]])
    env.install("copy", {"mod.py": b"1"}, rows=[["mod.pyc", b64(b"1"), "1"]])
    (env.site / "secret.pyc").write_bytes(b"1")
    (env.site / "mod.pyc").write_bytes(b"1")
    before = env.probe("full")
    assert package(before, "lone")["record-sha256"] == package(env.probe(), "lone")["record-sha256"]
    (env.site / "secret.pyc").write_bytes(b"2")
    (env.site / "mod.pyc").write_bytes(b"2")
    after = env.probe("full")
    assert package(after, "lone")["content-sha256"] != package(before, "lone")["content-sha256"]
    assert package(after, "copy")["content-sha256"] == package(before, "copy")["content-sha256"]


def test_an_absolute_path_inside_the_environment_does_not_depend_on_the_place(tmp_path: Path) -> None:
    digests = set()
    for place in ("a", "b"):
        made = Venv(tmp_path / place)
        made.install(
            "abs", {}, rows=[[f"{made.site}/abs.py", b64(b"1"), "1"], [f"{made.path}/share/x", b64(b"2"), "1"]]
        )
        (made.site / "abs.py").write_bytes(b"1")
        (made.path / "share").mkdir(exist_ok=True)
        (made.path / "share/x").write_bytes(b"2")
        entry = package(made.probe("full"), "abs")
        digests |= {entry["record-sha256"], entry["content-sha256"]}
    assert len(digests) == 1
