"""The JSON Schema of the run record (draft 2020-12), from its dataclasses. Pure. Runs on: LOGIN NODE."""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal

from hpcenv.records.codec import SCHEMA
from hpcenv.reproduce.record import RunRecord

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    types.NoneType: {"type": "null"},
}


def record_schema() -> dict[str, Any]:
    """Return the JSON Schema of `record.json`."""
    parts: dict[str, Any] = {}
    root = _object(RunRecord, parts)
    root["properties"]["schema"] = {"const": SCHEMA}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hpcenv run record",
        **root,
        "$defs": dict(sorted(parts.items())),
    }


def _object(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    rows = fields(kind)
    required = [row.name for row in rows if row.default is MISSING and row.default_factory is MISSING]
    return {
        "type": "object",
        "description": (kind.__doc__ or "").split("\n\n")[0].strip(),
        "properties": {row.name: _of(hints[row.name], parts) for row in rows},
        "required": required,
    }


def _of(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type; dataclasses become parts that are defined once."""
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if isinstance(kind, type) and is_dataclass(kind):
        if kind.__name__ not in parts:
            parts[kind.__name__] = {}
            parts[kind.__name__] = _object(kind, parts)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    base, inner = typing.get_origin(kind), typing.get_args(kind)
    if base is Literal:
        return {"enum": list(inner)}
    if base is tuple:
        return {"type": "array", "items": _of(inner[0], parts)}
    if base is dict:
        return {"type": "object", "additionalProperties": _of(inner[1], parts)}
    if base in (typing.Union, types.UnionType):
        return {"anyOf": [_of(one, parts) for one in inner]}
    raise TypeError(f"no schema for {kind}")
