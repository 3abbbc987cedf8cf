"""docs/reference/faults.md names a test for each fault, and each of these tests exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_fault_has_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "reference" / "faults.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| Fault ")]
    assert len(rows) > 20
    for row in rows:
        found = re.search(r"`([a-z_/0-9]+\.py)::(test_[a-z_0-9]+)` \|$", row)
        assert found is not None, row
        source = (ROOT / "tests" / found[1]).read_text(encoding="utf-8")
        assert f"def {found[2]}(" in source, row
