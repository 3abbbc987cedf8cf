"""All export formats: what they share, and which there are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from export_lockfiles import DISTS, A, dist, lines, locked
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.pylock import Pylock
from packaging.requirements import Requirement

from hpcenv.locking.export import exporters
from hpcenv.locking.exporter import ExportRequest
from hpcenv.locking.formats.cyclonedx import cyclonedx
from hpcenv.locking.formats.environment import environment
from hpcenv.locking.formats.pylock import WheelUrl, pylock, wheels_to_find
from hpcenv.locking.formats.requirements import requirements
from hpcenv.project import toml_files
from hpcenv.project.lockfile import Lockfile
from tests.conftest import ROOT


def test_the_order_of_the_lockfile_is_no_part_of_an_export() -> None:
    for render in (requirements, cyclonedx):
        one, other = render(locked(*DISTS)).text, render(locked(*reversed(DISTS))).text
        # The fingerprint names the lockfile's own order; all else is the same.
        assert _unnamed(one) == _unnamed(other)


def _unnamed(text: str) -> str:
    return re.sub("hpc[12]-[0-9a-f]{12}|urn:uuid:[0-9a-f-]{36}", "", text)


HOSTILE = [
    "x\n--index-url http://evil.example",
    "-e .",
    "x --hash",
    "x\u2028y",
    "x; y",
    "../x",
    "",
    "x\x1b[2J",
    "é",
    "x\r\ny",
]


def hostile(words: str) -> Lockfile:
    return locked(
        dist(words, sha256=A),
        dist("b", words),
        dist("c", sha256=words),
        dist("d", proof="none", wheel={"proof": "none", "reason": words}),
        dist("e", source="vcs", wheel={"proof": "none"}, **{"direct-url": {"url": words, "commit-id": words}}),
        dist("g", wheel={"proof": "record", "sha256": A, "filename": words}),
        dist("h", wheel={"proof": "record", "sha256": A, "filename": f"h-1.0-{words}.whl"}),
        dist("f", proof="direct-url", **{"direct-url": {"url": f"https://h.example/{words}.whl"}}),
        facts={"python": {"version": words, "implementation": words}, "system": {"machine": words}},
    )


def check_hostile(words: str) -> None:
    made = hostile(words)
    for line in lines(requirements(made).text):
        pin, _, option = line.partition(" --hash=sha256:")
        assert re.fullmatch("[0-9a-f]{64}", option), line
        Requirement(pin)
    for line in lines(environment(made, name="x").text):
        assert re.fullmatch(r'[a-z]+: ?("x")?|  - [a-z]+(=[0-9.abrc]+)?:?|      - (\S+==\S+|"[^"\\]+")', line), line
    urls = {one.name: WheelUrl(url="https://h.example/x.whl") for one in wheels_to_find(made)}
    document = pylock(made, urls)
    Pylock.from_dict(toml_files_parse(toml_files.dumps(document.data, header=document.header)))
    assert document.header.isascii()
    text = cyclonedx(made).text
    assert text == cyclonedx(made).text
    json.loads(text)


def toml_files_parse(text: str) -> dict[str, Any]:
    import tomlkit

    return tomlkit.parse(text).unwrap()


@pytest.mark.parametrize("words", HOSTILE)
def test_words_of_a_lockfile_never_become_lines_that_pip_or_conda_obey(words: str) -> None:
    check_hostile(words)


@settings(deadline=None, max_examples=40)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_no_words_do(words: str) -> None:
    check_hostile(words)


def test_an_export_is_known_again_and_nothing_else_is() -> None:
    made = locked(*DISTS)
    request = ExportRequest(name="n", environ={})
    texts = {name: one.render(made, request).text for name, one in exporters().items() if not one.needs_index}
    assert set(texts) >= {"requirements", "environment", "cyclonedx"}
    for kind in texts:
        for other, text in texts.items():
            assert exporters()[kind].is_ours(text) == (kind == other)
    foreign = (
        "",
        "numpy\n",
        "{}",
        "[]",
        "[" * 100_000,
        '{"bomFormat": "CycloneDX", "metadata": {"component": {"name": "x"}}}',
    )
    assert not any(exporter.is_ours(text) for exporter in exporters().values() for text in foreign)


def test_a_module_in_formats_is_a_format() -> None:
    modules = {path.stem for path in (ROOT / "hpcenv" / "locking" / "formats").glob("[!_]*.py")}
    assert set(exporters()) == modules
    for name, exporter in exporters().items():
        assert exporter.name == name
        assert exporter.help
