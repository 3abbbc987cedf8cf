"""Files of a run are written aside and renamed."""

import os

import pytest

from hpcenv.records.files import write_text


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_and_nothing_is_left_aside(tmp_path, durable):
    path = tmp_path / "env" / "n1.json"
    for text in ("first\n", "Zürich\n"):
        write_text(text, path, durable=durable)
        assert path.read_text("utf-8") == text
    assert os.listdir(path.parent) == ["n1.json"]


@pytest.mark.parametrize("durable", [True, False])
def test_what_was_there_stays_when_it_cannot_be_replaced(tmp_path, durable):
    path = tmp_path / "n1.json"
    path.mkdir()
    (path / "kept").write_text("")
    with pytest.raises(OSError, match=r"n1\.json"):
        write_text("new\n", path, durable=durable)
    assert os.listdir(tmp_path) == ["n1.json"]
    assert os.listdir(path) == ["kept"]
