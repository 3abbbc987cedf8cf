"""A hub outside cannot send the login node to an address inside of the site, nor the token of the user anywhere."""

from __future__ import annotations

import httpx2
import pytest

from hpcenv.errors import DataUnavailable
from hpcenv.hub.guard import MOST_PAGES, Guard

OUTSIDE = "https://1.1.1.1"


def ask(url: str, *, endpoint: str = OUTSIDE, files: bool = True, **headers: str) -> None:
    guard = Guard(endpoint, timeout=5)
    guard.files = files
    guard.on_request(httpx2.Request("GET", url, headers=headers))


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1/x", "https://localhost:8443/x", "https://169.254.169.254/latest", "https://10.0.0.5/x",
        "https://[::1]/x", "https://[fe80::1]/x", "https://[::ffff:10.0.0.5]/x", "https://192.168.1.1/x",
        "https://0.0.0.0/",
    ],
)  # fmt: skip
def test_a_redirect_into_the_site_is_refused(url: str) -> None:
    with pytest.raises(DataUnavailable, match="inside of your network"):
        ask(url)


@pytest.mark.parametrize("url", ["https://8.8.8.8/x", f"{OUTSIDE}/x", "https://[2606:4700::1111]/x"])
def test_a_redirect_that_stays_outside_is_followed(url: str) -> None:
    ask(url)


def test_a_hub_inside_has_its_storage_inside() -> None:
    ask("https://10.0.0.2/x", endpoint="http://10.0.0.1:8080")


def test_the_token_and_a_document_stay_with_the_hub() -> None:
    ask(f"{OUTSIDE}/x", Authorization="Bearer hf_x")
    for url in ("https://8.8.8.8/x", f"{OUTSIDE}:444/x"):
        with pytest.raises(DataUnavailable) as caught:
            ask(url, Authorization="Bearer hf_x")
        assert "the token of the user" in str(caught.value.why)
        with pytest.raises(DataUnavailable) as caught:
            ask(url, files=False)
        assert "another host" in str(caught.value.why)
    with pytest.raises(DataUnavailable) as caught:
        ask("http://8.8.8.8/x")
    assert "without encryption" in str(caught.value.why)


def test_a_document_that_is_not_asked_for_is_no_page() -> None:
    """The library asks huggingface.co once a day for a list of its own, whatever the hub is (huggingface_hub 2.4)."""
    guard = Guard(OUTSIDE, timeout=5)
    with pytest.raises(DataUnavailable, match="cannot be used"):
        guard.on_request(httpx2.Request("GET", "https://8.8.8.8/api/agent-harnesses"))
    for _ in range(MOST_PAGES):
        guard.on_request(httpx2.Request("GET", f"{OUTSIDE}/x"))
    with pytest.raises(DataUnavailable) as caught:
        guard.on_request(httpx2.Request("GET", f"{OUTSIDE}/x"))
    assert f"more than {MOST_PAGES} pages" in str(caught.value.why)
