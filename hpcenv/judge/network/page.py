"""The network decision as text. Pure.

Runs on: LOGIN NODE and COMPUTE NODE. The text is plain ASCII. Lines have at most 80 columns; a longer word gets a
longer line.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcenv.hostlist import fold_hostlist
from hpcenv.records.network import NetworkDecision, NetworkRow, SettingEffect
from hpcenv.text import visible_ascii, wrap

_WORDS = {"set": "SET", "host": "HOST", "given": "GIVEN", "skip": "SKIP"}


def render(decision: NetworkDecision) -> str:
    """Return the text: profile, variables, effects, binds, srun options and warnings."""
    parts = [wrap(f"profile  {decision.profile}  ({visible_ascii(decision.why)})", indent=9)]
    parts += [line for row in decision.rows for line in _row(row)]
    parts += [_effect(effect) for effect in decision.effects]
    for one in decision.binds:
        parts.append(wrap(f"BIND   {one.bind.target}  [{one.rule}]", indent=7))
        parts.append(_detail(one.reason))
    for option in decision.step_options:
        parts.append(wrap(f"SRUN   {option.option}  [{option.rule}]", indent=7))
        parts.append(_detail(f"{option.reason}; put it into [srun] of hpcenv.toml or the site profile"))
        parts.append(_detail(f"source: {option.source}"))
    for warning in decision.warnings:
        where = _on(warning.nodes)
        parts.append(wrap(f"WARN   {visible_ascii(warning.what)}{where}  [{warning.rule}]", indent=7))
        parts += [_detail(f"do: {warning.todo}")] if warning.todo else []
        parts += [_detail(f"source: {warning.source}")] if warning.source else []
    return "\n".join(parts) + "\n"


def _row(row: NetworkRow) -> list[str]:
    value = f" = {visible_ascii(row.value)}" if row.action != "skip" else ""
    rule = f", {row.rule}" if row.rule else ""
    lines = [
        wrap(
            f"{_WORDS[row.action]:<5}  {row.name}{value}{_on(row.nodes)}  [{visible_ascii(row.origin)}{rule}]", indent=7
        )
    ]
    lines.append(_detail(row.reason))
    if row.evidence:
        lines.append(_detail(f"seen: {row.evidence}"))
    if row.source:
        lines.append(_detail(f"source: {row.source}"))
    return lines


_EFFECTS = {"yes": "takes effect", "no": "has no effect", "unknown": "cannot be read back"}


def _effect(one: SettingEffect) -> str:
    seen = f"{one.where}: {one.found}"
    return wrap(f"READ   {one.name} {_EFFECTS[one.took_effect]}{_on(one.nodes)}  ({visible_ascii(seen)})", indent=7)


def _on(nodes: Sequence[str]) -> str:
    return f" on {fold_hostlist(visible_ascii(node) for node in nodes)}" if nodes else ""


def _detail(text: str) -> str:
    return wrap(f"         {visible_ascii(text)}", indent=11)
