"""Text for people fits 80 columns, as far as pages are recorded."""

from pathlib import Path

from hpcenv.text import WIDTH

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def test_recorded_pages_fit_80_columns() -> None:
    pages = sorted(GOLDEN.rglob("*.txt"))
    assert len(pages) > 80
    long = []
    for path in pages:
        text = path.read_text()
        # The head of a page about a machine is written by its test.
        lines = text.partition("\n\n")[2] if path.parent.name == "network" else text
        # A path, a hash, a value or a list of devices is one word, to be copied: it may be longer.
        long += [f"{path.name}: {line}" for line in lines.splitlines() if len(line) > WIDTH and len(line.split()) > 1]
    assert long == []
