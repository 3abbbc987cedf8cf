"""Records that cross machines: what is written can be read, what is damaged is refused by name."""

import dataclasses
import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcenv.errors import RecordInvalid
from hpcenv.records.checked_sif import CheckedSif, FileIdentity
from hpcenv.records.codec import decode_record, encode_record
from hpcenv.records.facts import Difference, Facts, Interface, Network, Route
from hpcenv.records.files import load_record, read_file, save_record, write_text
from hpcenv.records.manifest import Setting
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import NodeVerdict, Rendezvous, Verdict

FACTS = Facts(
    schema=1,
    run="r1",
    node="n1",
    attempt=2,
    values={"python.version": "3.11.7", "host.gpu-count": 8, "flag": True, "ratio": 0.5, "names": ("a", "b"), "no": ()},
    unknown={"libs.nccl.version": "not there"},
    network=Network(
        first_node="n1",
        interfaces=(Interface(name="eth0", addresses=("10.0.0.1", "fe80::1")),),
        routes=(Route(target="10.0.0.1", source="10.0.0.1", interface="eth0"),),
        free_port=None,
        variables=(Setting(name="NCCL_DEBUG", value="INFO", origin="environment of the job"),),
    ),
    differences=(Difference(field="packages.numpy", locked="2.0", found="2.1"),),
    sif=CheckedSif(
        path="/images/a.sif",
        staged=False,
        checked="full",
        why="",
        sha256="00",
        file=FileIdentity(device=1, inode=2, size=3, mtime_ns=4, ctime_ns=5),
        lasting=True,
    ),
    seconds={"probe": 1.5, "host": 0},
)


def refusal(kind, text):
    with pytest.raises(RecordInvalid) as caught:
        decode_record(kind, text, origin="n1.json")
    return str(caught.value)


def changed(**changes):
    return json.dumps(json.loads(encode_record(FACTS)) | changes)


# -- round trips --------------------------------------------------------------------------


def test_what_is_written_is_read_back_with_its_types():
    assert decode_record(Facts, encode_record(FACTS), origin="here") == FACTS


def test_true_stays_true_and_one_stays_one():
    again = decode_record(Facts, changed(values={"a": True, "b": 1, "c": 1.0, "d": "1"}), origin="here")
    assert [type(value) for value in again.values.values()] == [bool, int, float, str]


def test_the_text_is_sorted_readable_json_with_one_final_newline():
    text = encode_record(Rendezvous(host="10.0.0.1", port=1, id="7.0"))
    assert text == '{\n "host": "10.0.0.1",\n "id": "7.0",\n "port": 1\n}\n'


def test_arguments_that_are_not_utf8_come_back_as_the_same_bytes(tmp_path):
    name = os.fsdecode(b"caf\xe9 $(id) \n")
    save_record(Setting(name="A", value=name, origin="--env"), tmp_path / "s.json")
    assert os.fsencode(load_record(Setting, tmp_path / "s.json").value) == b"caf\xe9 $(id) \n"


VALUES = st.one_of(
    st.text(), st.integers(), st.booleans(), st.floats(allow_nan=False), st.lists(st.text(), max_size=3).map(tuple)
)


@given(st.dictionaries(st.text(), VALUES, max_size=5), st.dictionaries(st.text(), st.text(), max_size=3))
def test_any_values_survive_the_way(values, unknown):
    record = dataclasses.replace(FACTS, values=values, unknown=unknown)
    assert decode_record(Facts, encode_record(record), origin="here") == record


@given(st.binary(max_size=60))
def test_any_other_bytes_are_refused_and_never_crash(content):
    with pytest.raises(RecordInvalid):
        decode_record(Facts, content.decode("latin-1"), origin="here")


# -- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 40, -3])
def test_a_file_that_was_cut_short_is_refused(cut):
    assert refusal(Facts, encode_record(FACTS)[:cut]).startswith("`n1.json` is not JSON\nwhy: ")


def test_json_that_is_nested_without_end_is_refused():
    assert refusal(Facts, "[" * 100_000).startswith("`n1.json` is not JSON\n")


def test_a_newer_schema_names_both_numbers_and_the_way_out():
    assert refusal(Facts, changed(schema=2)) == (
        "`n1.json` has schema 2, this hpcenv reads schema 1\nhint: use the hpcenv version that made this run folder"
    )


def test_a_missing_key_is_named_with_its_path():
    assert refusal(Facts, changed(network={})) == "`n1.json` lacks `Facts.network.first_node`"
    assert refusal(Facts, "{}") == "`n1.json` lacks `Facts.schema`"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node": 7}, "`Facts.node` is 7, expected text"),
        ({"attempt": True}, "`Facts.attempt` is True, expected a whole number"),
        ({"attempt": "1"}, "`Facts.attempt` is '1', expected a whole number"),
        ({"attempt": 1.0}, "`Facts.attempt` is 1.0, expected a whole number"),
        ({"values": []}, "`Facts.values` is [], expected an object"),
        ({"differences": {}}, "`Facts.differences` is {}, expected a list"),
        ({"seconds": {"probe": "1"}}, "`Facts.seconds.probe` is '1', expected a number"),
        ({"sif": {"path": 1}}, "`Facts.sif.path` is 1, expected text"),
        (
            {"values": {"a": None}},
            "`Facts.values.a` is None, expected text or a whole number or a number or true or false or a list",
        ),
        (
            {"network": {"first_node": "n1", "interfaces": [{"name": "eth0", "addresses": [1]}]}},
            "`Facts.network.interfaces[0].addresses[0]` is 1, expected text",
        ),
    ],
)
def test_a_wrong_type_names_the_path_and_both_sides(changes, message):
    assert refusal(Facts, changed(**changes)) == f"`n1.json`: {message}"


def test_a_word_that_is_none_of_the_words_is_refused():
    text = '{"node": "n1", "result": "fine", "compared": 1}'
    assert refusal(NodeVerdict, text) == (
        "`n1.json`: `NodeVerdict.result` is 'fine', expected `match` or `mismatch` or `unknown`"
    )
    assert "is ['match']," in refusal(NodeVerdict, text.replace('"fine"', '["match"]'))


@pytest.mark.parametrize("text", ["[]", "null", "1", '"match"'])
def test_json_that_is_no_object_is_refused(text):
    assert refusal(Verdict, text) == f"`n1.json`: `Verdict` is {json.loads(text)!r}, expected an object"


def test_a_long_value_does_not_fill_the_log():
    assert len(refusal(Facts, changed(node=list(range(10_000))))) < 200


def test_keys_of_a_later_hpcenv_are_passed_over():
    assert decode_record(Facts, changed(colour="green"), origin="here") == FACTS


def test_a_file_that_is_not_there_says_so(tmp_path):
    with pytest.raises(RecordInvalid, match="cannot read .*n1.json.*\nwhy: .*No such file"):
        load_record(Facts, tmp_path / "n1.json")


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path):
    with pytest.raises(RecordInvalid, match="cannot read"):
        load_record(Facts, tmp_path)


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def longer(path):
    with open(path, "wb") as file:
        file.truncate((64 << 20) + 1)


NO_FILES = [
    (pipe, "it is not a regular file, but a pipe or a device"),
    (device, "it is not a regular file, but a pipe or a device"),
    (os.mkdir, "Is a directory"),
    (longer, "it has more than 64 MiB"),
]


@pytest.mark.parametrize(("make", "why"), NO_FILES)
def test_what_would_hang_or_never_end_is_not_read(make, why, tmp_path):
    make(tmp_path / "a")
    with pytest.raises(OSError) as caught:
        read_file(tmp_path / "a")
    assert (caught.value.strerror, caught.value.filename) == (why, str(tmp_path / "a"))


def test_a_file_is_read_up_to_its_bound(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_file(tmp_path / "a", most=5) == b"12345"
    # It says that it has 0 bytes.
    assert read_file(Path("/proc/self/status")).startswith(b"Name:")


def test_a_pipe_in_the_place_of_a_record_is_refused(tmp_path):
    pipe(tmp_path / "n1.json")
    with pytest.raises(RecordInvalid, match="cannot read .*n1.json.*\nwhy: it is not a regular file"):
        load_record(Facts, tmp_path / "n1.json")


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    (tmp_path / "n1.json").write_bytes(b'{"schema": "\xff"}')
    with pytest.raises(RecordInvalid, match="n1.json` is not UTF-8 text"):
        load_record(Facts, tmp_path / "n1.json")


# -- writing ------------------------------------------------------------------------------


def test_missing_folders_are_made(tmp_path):
    save_record(FACTS, tmp_path / "facts" / "n1.json")
    assert load_record(Facts, tmp_path / "facts" / "n1.json") == FACTS
    assert os.listdir(tmp_path / "facts") == ["n1.json"]


def test_text_that_cannot_be_written_leaves_the_old_file_and_no_other(tmp_path):
    write_text("old", tmp_path / "a.txt")
    with pytest.raises(UnicodeEncodeError):
        write_text("new \udcff", tmp_path / "a.txt")
    assert os.listdir(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_rename_that_fails_leaves_no_temporary_file(tmp_path):
    (tmp_path / "a.txt" / "in the way").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_text("new", tmp_path / "a.txt")
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error_and_not_half_a_file(tmp_path):
    path = tmp_path / "a.txt"
    aside = tmp_path / f".a.txt.{os.uname().nodename}.{os.getpid()}.tmp"
    aside.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        write_text("new", path)
    assert os.listdir(tmp_path) == []


def test_a_mode_is_set_before_the_file_appears(tmp_path):
    write_text("#!/bin/sh\n", tmp_path / "job.sbatch", mode=0o755)
    assert stat.S_IMODE((tmp_path / "job.sbatch").stat().st_mode) == 0o755


def test_nothing_of_one_attempt_is_also_of_the_run(tmp_path):
    run = RunFolder(tmp_path)
    of_the_run = {run.manifest, run.script, run.lockfile, run.submission, run.code, run.log, run.homes}
    assert not of_the_run & set(run.of_one_attempt())
