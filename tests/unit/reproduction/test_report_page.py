"""The report as HTML and Markdown: what it says, that it loads nothing, and that no text of a record can act."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest

from hpcenv.cluster import energy
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction import plot, report_html, report_markdown
from hpcenv.reproduction.compare import compare_runs
from hpcenv.reproduction.measured import read_measured
from hpcenv.reproduction.report_origin import origin_rows
from hpcenv.reproduction.run_page import RunPage, make_page
from hpcenv.reproduction.run_record import read_record
from tests import measured_runs, traces

RECORDED = Path(__file__).parents[2] / "recorded_runs"
SCHEMA = Path(__file__).parents[3] / "docs" / "reference" / "record.schema.json"


def page_of(folder: Path, reference: Path | None = None) -> RunPage:
    measured = read_measured(RunFolder(folder))
    if reference is None:
        return make_page(read_record(folder), measured)
    return make_page(
        read_record(folder), measured, other=read_measured(RunFolder(reference)), other_name=reference.name,
        comparison=compare_runs(folder, str(reference), str(folder)),
    )  # fmt: skip


class Elements(HTMLParser):
    """The elements of a page, and whether each is closed."""

    VOID = {"meta", "br", "hr", "img", "input", "link"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_says_the_verdict_first_and_marks_the_first_difference():
    text = report_html.render(page_of(RECORDED / "other-lr", RECORDED / "table-1"))
    elements = Elements(text)
    assert elements.open == []
    body = text[text.index("<main>") :]
    assert body.index("differs: loss is beyond") < body.index("Summary") < body.index("<svg") < body.index("Checklist")
    assert "first difference: step 2" in body and "run.arguments" in body and "--lr, 0.021" in body
    assert (
        "<span>hpcenv</span> <span>reproduce</span> <span>table-1-rung-3</span> <span>--rung</span> <span>3</span>"
        in body
    )


def test_the_page_loads_nothing():
    text = report_html.render(page_of(RECORDED / "other-lr", RECORDED / "table-1"))
    for tag, attributes in Elements(text).found:
        assert tag not in ("script", "link", "iframe", "img", "object", "embed", "form", "base"), tag
        assert not {"src", "href", "srcset", "style", "action", "data"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
    assert "default-src 'none'" in text and "url(" not in text and "@import" not in text
    assert not re.search(r"https?://", text)


def test_plots_have_names_for_screen_readers_and_ids_are_unique():
    elements = Elements(report_html.render(page_of(RECORDED / "other-lr", RECORDED / "table-1"))).found
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    pictures = [attributes for tag, attributes in elements if tag == "svg"]
    assert len(pictures) == 3
    for one in pictures:
        assert one["role"] == "img" and set(str(one["aria-labelledby"]).split()) <= set(ids)
    tables = [attributes for tag, attributes in elements if tag == "div" and attributes.get("role") == "region"]
    assert all(one["aria-label"] and one["tabindex"] == "0" for one in tables)


def test_the_difference_has_a_panel_with_the_tolerance(tmp_path):
    losses = (3.0, 2.5, 2.25, 2.0)
    reference = measured_runs.make(tmp_path, "first", losses=losses)
    run = measured_runs.make(tmp_path, "second", losses=(3.0, 2.5, 2.2500002, 1.0))
    page = page_of(run.path, reference.path)
    gap, allowed = page.plots[0].gaps
    assert gap.values == pytest.approx((0.0, 0.0, 2e-7, 1.0)) and gap.steps == (1, 2, 3, 4)
    # torch.testing.assert_close for float32: atol + rtol * |reference|.
    assert allowed.values == pytest.approx([1e-5 + 1.3e-6 * one for one in losses])
    text = report_html.render(page)
    panel = text[text.index('<svg role="img" aria-labelledby="gap0') :]
    panel = panel[: panel.index("</figure>")]
    ET.fromstring(panel[: panel.index("</svg>") + 6])
    assert "difference: steps 1 to 4, from 0 to 1e+00. tolerance" in panel
    assert "the tolerance is rtol 1.3e-06, atol 1e-05" in panel


@pytest.mark.parametrize("values", [(0.0, 0.0), (float("nan"), 1e308), (float("inf"), 5e-324)], ids=str)
def test_strange_differences_make_a_picture_or_words(values):
    found = [plot.Curve(name="difference", steps=(1, 2), values=values)]
    ET.fromstring(plot.logarithmic("x", found, key="p"))


def test_the_origin_of_a_run_is_read_from_its_records(tmp_path):
    run = shutil.copytree(RECORDED / "table-1", tmp_path / "run")
    rows = dict(origin_rows(RunFolder(run), read_record(run), None, 1.8e9))
    assert rows["Bundle"] == rows["Site"] == "unknown" and rows["Slurm"] == "24.11.5"
    assert rows["Check"].startswith("match: 2 nodes, 95 fields")
    assert re.fullmatch(r"0\.0\d node hours, 0\.0\d CPU hours, 0\.00 GPU hours", rows["Hours"])
    assert (rows["Submitted"][:10], rows["Date of this report"]) == ("2026-11-23", "2027-01-15T08:00:00+00:00")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["settings"][0]["origin"] = "site profile lumi"
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "SHA256SUMS").write_text("")
    (run / "verdict.json").unlink()
    (run / "finished.json").unlink()
    rows = dict(origin_rows(RunFolder(run), read_record(run), None, 1.8e9))
    assert rows["Site"] == "lumi" and rows["Bundle"].startswith(f"sha256:{hashlib.sha256().hexdigest()} (SHA256SUMS")
    assert rows["Check"] == "unknown: no verdict" and rows["Hours"].startswith("unknown node hours, unknown CPU hours")


def test_the_operation_that_differs_is_in_the_report_if_both_runs_have_traces(tmp_path, hpcenv):
    first, second = (measured_runs.make(tmp_path / "runs", name) for name in ("first", "second"))
    words = ("report", "runs/second", "--against", "runs/first", "--html", "r.html", "--markdown", "r.md")
    assert hpcenv(*words, cwd=tmp_path).status == 0
    assert "the runs are equal to the last bit" in (tmp_path / "r.html").read_text()
    changed = traces.operation("aten.mm.default", {"self": "x", "mat2": "w"}, {"0": "other"})
    for rank in (0, 1):
        traces.write(first, rank, traces.lines(traces.STEP))
        traces.write(second, rank, traces.lines([changed, traces.STEP[1]]))
    assert hpcenv(*words, cwd=tmp_path).status == 0
    for name in ("r.html", "r.md"):
        assert "the first operation that differs: aten.mm.default" in (tmp_path / name).read_text()


def test_text_that_is_copied_wraps_and_nothing_stays_folded_in_print():
    text = report_html.render(page_of(RECORDED / "other-lr", RECORDED / "table-1"))
    style = text[text.index("<style>") : text.index("</style>")]
    assert re.search(r"pre \{[^}]*white-space: pre-wrap", style)
    assert "details::details-content { content-visibility: visible" in style.partition("@media print")[2]
    # A browser breaks a line after a hyphen. A word of a command that is a box keeps `--nodes` in one piece.
    assert re.search(r"pre span \{ display: inline-block", style)
    assert (
        "<pre><span>hpcenv</span> <span>submit</span> <span>train.py</span> <span>--nodes</span> <span>2</span>" in text
    )
    assert re.search(r"[ ,]pre \{ break-inside: avoid", style.partition("@media print")[2])
    digest = "ab" * 32
    assert f"<td class=long>{digest}</td><td>differs</td>" in report_html._table("x", [("a",), (digest, "differs")])


def test_the_picture_is_xml_and_bounded():
    steps = tuple(range(1, 200_001))
    values = tuple((step * 7919) % 1000 / 10 for step in steps)
    text = plot.curves("loss", [plot.Curve(name="a", steps=steps, values=values)], key="p", mark=150_000)
    ET.fromstring(text)
    assert len(text) < 200_000
    highest = max(values)
    assert any(f"{value:.4g}" in text for value in (highest, 100.0))


@pytest.mark.parametrize(
    "values",
    [(float("nan"),), (float("inf"), 1.0, float("nan"), 2.0), (1e308, -1e308), (0.0, 0.0), (5e-324, 1e-323), (1.0,)],
    ids=str,
)
def test_strange_values_make_a_picture_or_words(values):
    text = plot.curves("x", [plot.Curve(name="a", steps=tuple(range(len(values))), values=values)], key="p")
    ET.fromstring(text)


def test_hostile_texts_do_not_act(tmp_path):
    evil = "</title><script>alert(1)</script>\x1b[2J\x00\u202e|[x](javascript:y)`"
    run = measured_runs.make(tmp_path, "first", args=(evil, "--seed"), module=evil)
    row = {"kind": "metric", "step": 1, "name": evil[:190], "value": (1.0).hex(), "dtype": "float64"}
    measured_runs.record(run, 0, (1.0,), more=[row])
    page = page_of(run.path)
    text = report_html.render(page)
    assert "<script" not in text and "\x1b" not in text and "\x00" not in text and "\u202e" not in text
    assert Elements(text).open == []
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(picture)
    # An indented block is shown as it is; everywhere else the characters are escaped.
    markdown = "\n".join(line for line in report_markdown.render(page).splitlines() if not line.startswith("    "))
    assert "<script" not in markdown and not re.search(r"(?<!\\)\]\(", markdown) and "\x1b" not in markdown


def test_a_report_of_one_run_needs_no_reference():
    page = page_of(RECORDED / "table-1")
    text = report_html.render(page)
    assert "table-1: completed" in text and "Three questions" not in text
    checklist = dict(page.checklist)
    assert checklist["Type of compute"] == "CPU" and checklist["Seeds"] == "base seed 0"
    assert checklist["Determinism"] == "bitwise" and "torch 2.13.0" in checklist["Versions"]
    assert checklist["Energy"] == ""
    assert [span.name for span in page.spans] == ["queue", "check", "training"]
    markdown = report_markdown.render(page)
    assert "## Checklist for a paper" in markdown and "not recorded" in markdown


def test_the_command_writes_the_files(hpcenv, tmp_path):
    words = ("report", str(RECORDED / "other-lr"), "--against", str(RECORDED / "table-1"))
    done = hpcenv(*words, "--html", "r.html", "--markdown", "r.md", "--record", "record.json", cwd=tmp_path)
    assert done.status == 0, done.stderr
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "r.md").read_text().startswith("# table-1-rung-3 against table-1")
    jsonschema.validate(json.loads((tmp_path / "record.json").read_text()), json.loads(SCHEMA.read_text()))
    assert hpcenv("report", "x", "--against", "y", cwd=tmp_path).status == 2


@pytest.mark.parametrize(
    ("text", "joules"),
    [
        ("7|1200\n", 1200.0),
        ("7|1200\n7|300\n", 1500.0),
        ("7|0\n", None),
        ("7|\n", None),
        ("", None),
        ("7|12|x\n", None),
    ],
)
def test_energy_is_unknown_rather_than_zero(text, joules):
    assert energy.parse(text)[0] == joules


def test_the_names_of_the_curves_do_not_lie_on_them() -> None:
    found = [plot.Curve(name=name, steps=(1, 2, 3), values=(3.0, height, 1.0)) for name, height in zip("ab", (9, 8))]
    picture = plot.curves("loss", found, key="k")
    points = [pair.split(",") for text in re.findall(r'points="([^"]+)"', picture) for pair in text.split()]
    names = [float(y) for y, name in re.findall(r'<text x="\d+" y="(\d+)">([ab])</text>', picture)]
    assert len(names) == 2 and max(names) < min(float(y) for _, y in points)
