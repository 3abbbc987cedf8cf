"""What hpcenv uses of huggingface_hub and is not documented there has the form that hpcenv/hub/client.py relies on."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("huggingface_hub", reason="NOT RUN: the extra `hub` is not installed")

from huggingface_hub import constants
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile


def test_a_download_continues_at_a_size_and_writes_to_a_file() -> None:
    parameters = inspect.signature(http_get).parameters
    assert list(parameters)[:2] == ["url", "temp_file"]
    assert {"resume_size", "headers", "expected_size"} <= set(parameters)
    assert constants.MAX_HTTP_DOWNLOAD_SIZE > 10**9


def test_an_entry_of_a_list_has_the_digests() -> None:
    file = RepoFile(path="a", size=1, oid="b", lfs={"size": 2, "oid": "c", "pointerSize": 3})
    assert file.lfs is not None
    assert (file.path, file.size, file.blob_id, file.lfs.sha256, file.lfs.size) == ("a", 1, "b", "c", 2)
