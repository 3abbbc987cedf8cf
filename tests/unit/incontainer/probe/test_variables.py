"""Variables that change which code runs, as the probe reads them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hpcenv.container.probe_source import probe_source

FIELDS = ("python.variables", "libs.ld-audit", "libs.glibc-tunables")


def read(**variables: str) -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-B", "-", "--level", "record"],
        input=probe_source(), capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin", **variables},
    )  # fmt: skip
    return {name: json.loads(done.stdout)["values"][name] for name in FIELDS}


def test_without_variables_the_lists_are_empty() -> None:
    assert read() == {name: [] for name in FIELDS}


@pytest.mark.parametrize(
    ("name", "value"),
    [("PYTHONOPTIMIZE", "2"), ("PYTHONSAFEPATH", "1"), ("PYTHONPYCACHEPREFIX", "/opt/cache"),
     ("PYTHONWARNINGS", "ignore::json.decoder.JSONDecodeError")],
)  # fmt: skip
def test_a_variable_with_an_effect_is_named(name: str, value: str) -> None:
    assert read(**{name: value})["python.variables"] == [f"{name}={value}"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("PYTHONOPTIMIZE", "0"), ("PYTHONSAFEPATH", ""), ("PYTHONHOME", sys.base_prefix), ("PYTHONWARNINGS", "ignore"),
     ("PYTHONHASHSEED", "1")],
)  # fmt: skip
def test_a_variable_without_an_effect_is_not_named(name: str, value: str) -> None:
    assert read(**{name: value})["python.variables"] == []


def test_the_variables_of_the_loader_are_lists() -> None:
    found = read(LD_AUDIT="/opt/a.so:/opt/b.so", GLIBC_TUNABLES="glibc.malloc.check=0:glibc.pthread.rseq=0")
    assert found["libs.ld-audit"] == ["/opt/a.so missing", "/opt/b.so missing"]
    assert found["libs.glibc-tunables"] == ["glibc.malloc.check=0", "glibc.pthread.rseq=0"]
