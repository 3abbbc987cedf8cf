"""Which hub and which token: as the hub's own library finds them, and never out of a project."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcenv.errors import UsageError
from hpcenv.hub.access import DEFAULT_ENDPOINT, find_access


def test_the_endpoint_is_the_users(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert find_access(home).endpoint == DEFAULT_ENDPOINT
    found = find_access({**home, "HF_ENDPOINT": "https://hub.example:8443/"})
    assert (found.endpoint, found.endpoint_origin) == ("https://hub.example:8443", "HF_ENDPOINT")


@pytest.mark.parametrize(
    "value",
    [
        "hub.example", "ftp://h", "https://", "https://user:geheim@h", "https://:geheim@h", "https://@h",
        "https://h?token=geheim", "https://h?", "https://h#geheim", "https://h#", "https://[geheim", "https://[::1",
        "https://h:geheim", "http://127.0.0.1:70000", "http://127.0.0.1:0", "https://h\ngeheim", "https://h geheim",
        "https://h\\@geheim", "https://h\u00e9",
    ],
    ids=ascii,
)  # fmt: skip
def test_an_endpoint_that_is_no_address_is_refused_without_its_value(value: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_access({"HF_ENDPOINT": value})
    assert "geheim" not in f"{caught.value}{caught.value.why}{caught.value.hint}"
    assert caught.value.why
    assert caught.value.hint == "export HF_ENDPOINT=https://HOST"


@pytest.mark.parametrize("value", ["https://[::1]:8443", "http://127.0.0.1:8080/mirror/hub"])
def test_an_endpoint_may_be_a_number_and_have_a_path(value: str) -> None:
    assert find_access({"HF_ENDPOINT": value}).endpoint == value


def test_the_token_is_found_where_the_library_finds_it(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert "there is no" in find_access(home).token_origin
    files = [
        (tmp_path / ".cache/huggingface/token", {}),
        (tmp_path / "x/huggingface/token", {"XDG_CACHE_HOME": str(tmp_path / "x")}),
        (tmp_path / "h/token", {"HF_HOME": str(tmp_path / "h"), "XDG_CACHE_HOME": str(tmp_path / "x")}),
        (tmp_path / "t", {"HF_TOKEN_PATH": "~/t", "HF_HOME": str(tmp_path / "h")}),
    ]
    for number, (path, named) in enumerate(files):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"hf_{number}\n")
        found = find_access({**home, **named})
        assert (found.token, found.token_origin) == (f"hf_{number}", str(path))
        assert find_access({**home, **named, "HF_TOKEN": "hf_env"}).token_origin == "HF_TOKEN"
    assert find_access({**home, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "HF_TOKEN": "x"}).token == ""
    assert "hf_0" not in repr(find_access(home))


def test_what_is_no_token_is_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "token"
    named = {"HF_TOKEN_PATH": str(path)}
    for content in (b"", b"a b", b"a\nb: c", b"\xff\xfe"):
        path.write_bytes(content)
        found = find_access(named)
        assert found.token == "", content
        assert found.token_origin
    path.unlink()
    path.mkdir()
    assert find_access(named).token == ""


def test_a_token_is_not_sent_without_encryption() -> None:
    named = {"HF_TOKEN": "hf_x"}
    assert find_access({**named, "HF_ENDPOINT": "http://127.0.0.1:1"}).token == "hf_x"
    found = find_access({**named, "HF_ENDPOINT": "http://hub.example"})
    assert found.token == ""
    assert "without encryption" in found.token_origin
