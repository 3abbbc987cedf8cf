"""`hpcenv explain`."""

from __future__ import annotations

import textwrap

import click

from hpcenv.cli import _render


@click.command("explain")
@click.argument("field", required=False)
@click.option("--lock", "lock_name", default="default", show_default=True, help="Which lockfile's value to show.")
@_render.json_option
def command(field: str | None, lock_name: str, as_json: bool) -> None:
    """Say what FIELD is, where it comes from and why it matters; without FIELD, list all."""
    from hpcenv.model import fields
    from hpcenv.steps.explain import explain

    if field is None:
        if as_json:
            _render.success("explain", list(fields.FIELDS))
            return
        width = max(len(f.name) for f in fields.FIELDS)
        for known in fields.FIELDS:
            _render.say(f"{known.name:<{width}}  {known.default or '-':<4}  {known.what}")
        return
    found = explain(_render.cwd(), field, lock=lock_name)
    if as_json:
        _render.success("explain", found)
        return
    default, bitwise = found.field.default or "not compared", found.field.bitwise or "not compared"
    lines = [
        ("what", found.field.what),
        ("from", found.field.source),
        ("why", found.field.why),
        ("severity", f"{default}; profile bitwise: {bitwise}"),
        ("override", f"{found.override}, by [policy]" if found.override else ""),
        ("locked", found.locked or (f"unknown: {found.unknown}" if found.unknown else "")),
        ("to do", found.field.remedy),
    ]
    _render.say(found.name)
    for word, text in lines:
        if text:
            _render.say(textwrap.fill(text, 80, initial_indent=f"  {word:<9} ", subsequent_indent=" " * 12))
