"""Which kept results count, and which files are not read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcenv.node.smoke import kept
from hpcenv.records.smoke import SmokePlan, SmokeResult

from .test_judge import _plan

NOW = 1_000_000.0


@pytest.fixture
def plan(tmp_path: Path) -> SmokePlan:
    return _plan(key="a" * 64, kept=str(tmp_path / "smoke"))


def _result(plan: SmokePlan) -> SmokeResult:
    boots = {node.name: node.boot_id for node in plan.nodes}
    drivers = {node.name: node.driver for node in plan.nodes}
    return SmokeResult(
        schema=1, run="before", attempt=0, result="match", tested=NOW, key=plan.key, boots=boots, drivers=drivers
    )


def test_a_kept_result_is_found_and_names_its_run(plan: SmokePlan) -> None:
    kept.keep(_result(plan), plan)
    found = kept.find(plan, now=NOW + 60)
    assert found is not None and (found.run, found.kept_from) == ("r", "before")


def test_it_does_not_hold_after_a_boot_a_driver_or_a_day(plan: SmokePlan) -> None:
    kept.keep(_result(plan), plan)
    first, second = plan.nodes
    assert kept.find(replace(plan, nodes=(first, replace(second, boot_id="later"))), now=NOW) is None
    assert kept.find(replace(plan, nodes=(first, replace(second, driver="580.1"))), now=NOW) is None
    assert kept.find(replace(plan, key="b" * 64), now=NOW) is None
    assert kept.find(plan, now=NOW + 2 * 86400) is None
    assert kept.find(plan, now=NOW - 60) is None


def test_a_job_that_only_checks_its_nodes_tests_again(plan: SmokePlan) -> None:
    kept.keep(_result(plan), plan)
    assert kept.find(replace(plan, reuse=False), now=NOW) is None
    assert kept.find(plan, now=NOW) is not None


def test_a_failure_is_not_kept(plan: SmokePlan) -> None:
    kept.keep(replace(_result(plan), result="mismatch"), plan)
    assert kept.find(plan, now=NOW) is None


def test_what_others_may_write_or_is_broken_is_not_read(plan: SmokePlan) -> None:
    kept.keep(_result(plan), plan)
    file = Path(plan.kept, f"{plan.key}.json")
    file.chmod(0o666)
    assert kept.find(plan, now=NOW) is None
    file.chmod(0o600)
    assert kept.find(plan, now=NOW) is not None
    Path(plan.kept).chmod(0o777)
    assert kept.find(plan, now=NOW) is None
    Path(plan.kept).chmod(0o700)
    text = file.read_text()
    for broken in ("{", "[]", text.replace('"match"', '"fine"'), text.replace(f'"{plan.key}"', '"c"')):
        file.write_text(broken)
        assert kept.find(plan, now=NOW) is None
    file.unlink()
    file.symlink_to("/dev/zero")
    assert kept.find(plan, now=NOW) is None
