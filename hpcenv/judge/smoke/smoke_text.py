"""The result of a smoke test as text, for the job's log and for reports. Pure.

Runs on: COMPUTE NODE and LOGIN NODE. Plain ASCII, 80 columns, no colour.
"""

from __future__ import annotations

from hpcenv.judge.checks.check_table import CHECKS
from hpcenv.records.smoke import SmokeResult
from hpcenv.text import plural, visible_ascii, wrap


def render(result: SmokeResult) -> str:
    """Return what was tested, with the results. Failures are left out, because the table of the verdict shows them."""
    lines = [wrap(f"hpcenv smoke test: {headline(result)}")]
    found = {name: text for checks in result.checks.values() for name, text in checks.fine.items()}
    fine = {check.id: found[check.id] for check in CHECKS if check.id in found}
    width = max((len(name) for name in fine), default=0)
    lines += [wrap(f"  {name:<{width}}  {visible_ascii(text)}", indent=width + 4) for name, text in fine.items()]
    others = [outcome for checks in result.checks.values() for outcome in checks.others]
    not_run = {outcome.id: outcome.found for outcome in others if outcome.state == "not-run"}
    lines += [wrap(f"  not run: {name}: {visible_ascii(why)}", indent=4) for name, why in not_run.items()]
    return "\n".join(lines) + "\n"


def headline(result: SmokeResult) -> str:
    """Return the result in one line."""
    took = f"{result.seconds.get('all', 0.0):.1f} s"
    others = [outcome for checks in result.checks.values() for outcome in checks.others]
    bad = ", ".join(dict.fromkeys(outcome.id for outcome in others if outcome.state in ("failed", "unknown")))
    nodes = plural(len(result.checks), "node")
    if result.result == "match":
        return f"match: {nodes} in {took}" + (f"; warning: {bad}" if bad else "")
    return f"{'MISMATCH' if result.result == 'mismatch' else 'UNKNOWN'}: {bad}; {nodes} in {took}"
