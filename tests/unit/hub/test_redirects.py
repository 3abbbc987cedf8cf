"""A hub outside cannot send the login node to an address inside of the site."""

from __future__ import annotations

import io

import pytest
import requests

from hpcenv.errors import DataUnavailable
from hpcenv.hub.client import _refuse_internal

OUTSIDE = "https://1.1.1.1"


def redirect(location: str, *, asked: str = f"{OUTSIDE}/lab/tiny", status: int = 302) -> requests.Response:
    response = requests.Response()
    response.status_code, response.url = status, asked
    response.headers["location"], response.raw = location, io.BytesIO()
    return response


@pytest.mark.parametrize(
    "location",
    [
        "https://127.0.0.1/x", "https://localhost:8443/x", "https://169.254.169.254/latest", "https://10.0.0.5/x",
        "https://[::1]/x", "https://[fe80::1]/x", "https://[::ffff:10.0.0.5]/x", "//192.168.1.1/x", "https://0.0.0.0/",
    ],
)  # fmt: skip
def test_a_redirect_into_the_site_is_refused(location: str) -> None:
    with pytest.raises(DataUnavailable, match="inside of your network"):
        _refuse_internal(OUTSIDE, redirect(location))


@pytest.mark.parametrize("location", ["https://8.8.8.8/x", "/other", f"{OUTSIDE}/x", "https://[2606:4700::1111]/x"])
def test_a_redirect_that_stays_outside_is_followed(location: str) -> None:
    _refuse_internal(OUTSIDE, redirect(location))


def test_a_hub_inside_has_its_storage_inside() -> None:
    _refuse_internal("http://10.0.0.1:8080", redirect("https://10.0.0.2/x", asked="http://10.0.0.1:8080/lab"))


def test_an_answer_that_is_no_redirect_is_left_alone() -> None:
    _refuse_internal(OUTSIDE, redirect("https://127.0.0.1/x", status=200))
