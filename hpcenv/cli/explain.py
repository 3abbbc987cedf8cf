"""`hpcenv explain`."""

from __future__ import annotations

import click

from hpcenv.cli import _render
from hpcenv.cli._complete import lockfile_names
from hpcenv.locking.explain import Explanation, explain
from hpcenv.project import fields
from hpcenv.text import wrap


@click.command("explain")
@click.argument("field", required=False)
@click.option(
    "--lock",
    "lock",
    metavar="NAME",
    default="default",
    show_default=True,
    help="Show the value of the field in lockfiles/NAME.lock.toml.",
    shell_complete=lockfile_names,
)
@_render.json_option
def command(field: str | None, lock: str, as_json: bool) -> None:
    """Explain FIELD: what it is, where it comes from and why it matters. Without FIELD, list all fields."""
    if field is None:
        _list(as_json=as_json)
        return
    explanation = explain(_render.cwd(), field, lock=lock)
    if as_json:
        _render.success("explain", explanation)
        return
    _render.say(explanation.name)
    for label, text in _lines(explanation):
        if text:
            _render.say(wrap(text, first=f"  {label:<9} ", indent=12, whole_words=False))


def _list(*, as_json: bool) -> None:
    if as_json:
        _render.success("explain", list(fields.FIELDS))
        return
    width = max(len(field.name) for field in fields.FIELDS)
    for field in fields.FIELDS:
        _render.say(f"{field.name:<{width}}  {field.default:<4}  {field.what}")


def _lines(explanation: Explanation) -> list[tuple[str, str]]:
    field = explanation.field
    unknown = f"unknown: {explanation.unknown}" if explanation.unknown else ""
    return [
        ("what", field.what),
        ("from", field.source),
        ("why", field.why),
        ("severity", f"{field.default}; profile bitwise: {field.severity('bitwise')}"),
        ("fixed", f"[policy] cannot change it: {field.fixed}" if field.fixed else ""),
        ("override", f"{explanation.override}, by [policy]" if explanation.override else ""),
        ("locked", explanation.locked or unknown),
        ("to do", field.hint),
    ]
