"""Records as JSON text. Reading is strict: the error for a wrong type or a missing key names its path in the record.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, TypeVar

from hpcenv.errors import RecordInvalid

SCHEMA = 1

Record = TypeVar("Record")


def encode_record(record: object) -> str:
    """Return `record` (a dataclass) as JSON text with sorted keys. Each item of a list or object has its own line.

    The option `indent` of json is not used, because it would spread each item of a list over several lines.
    """
    parts = _parts(record)
    lines = (f" {_one_line(name)}: {_item_lines(parts[name])}" for name in sorted(parts))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _item_lines(value: Any) -> str:
    """Return the JSON text of a field's value, with one line for each item of a list or object."""
    items = _parts(value) if is_dataclass(value) else value
    if isinstance(items, dict) and items:
        inner = ",\n".join(f"  {_one_line(name)}: {_one_line(items[name])}" for name in sorted(items))
        return f"{{\n{inner}\n }}"
    if isinstance(items, (list, tuple)) and items:
        inner = ",\n".join(f"  {_one_line(item)}" for item in items)
        return f"[\n{inner}\n ]"
    return _one_line(items)


def _one_line(value: Any) -> str:
    return _ENCODER.encode(value)


def encode_line(record: object) -> str:
    """Return `record` (a dataclass) as JSON in one line, without line end and without keys that have default values.

    Numbers have at most four digits after the point, because people read these lines, too.
    """
    return _one_line(_told(record))


def _told(value: Any) -> Any:
    """Return a value as plain data. Of a record, return only the fields that differ from their defaults."""
    if isinstance(value, (list, tuple)):
        return [_told(item) for item in value]
    if not is_dataclass(value):
        return round(value, 4) if isinstance(value, float) else value
    told: dict[str, Any] = {}
    kind: Any = type(value)
    for one in _fields(kind):
        item = getattr(value, one.name)
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if item != default:
            told[one.name] = _told(item)
    return told


def _parts(record: object) -> dict[str, Any]:
    if not is_dataclass(record):
        raise TypeError(f"{type(record).__name__} is not a record")
    kind: Any = type(record)
    return {one.name: getattr(record, one.name) for one in _fields(kind)}


_ENCODER = json.JSONEncoder(default=_parts, sort_keys=True)


def decode_record(kind: type[Record], text: str, *, origin: str) -> Record:
    """Return the record of type `kind` that `text` contains.

    Args:
        origin: where the text comes from, for messages.

    Raises:
        RecordInvalid: the text is not JSON, or has a different schema, a missing key or a wrong type.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordInvalid(f"`{origin}` is not JSON", why=str(error)) from error
    if isinstance(data, dict) and data.get("schema", SCHEMA) != SCHEMA:
        raise RecordInvalid(
            f"`{origin}` has schema {data.get('schema')!r}, this hpcenv reads schema {SCHEMA}",
            hint="use the hpcenv version that made this run folder",
        )
    return typing.cast("Record", _decode(kind, data, path=kind.__name__, origin=origin))


def _decode(kind: Any, data: Any, *, path: str, origin: str) -> Any:
    """Turn JSON `data` into a value of type `kind`. If the data do not fit, the error names `path`."""
    if type(data) in _plain_kinds(kind):
        return data
    if isinstance(kind, type) and is_dataclass(kind):
        return _decode_record(kind, data, path=path, origin=origin)
    base = typing.get_origin(kind)
    if base is Literal:
        return _require(isinstance(data, str) and data in typing.get_args(kind), data, kind, path, origin)
    if base in (typing.Union, types.UnionType):
        return _decode_union(kind, data, path=path, origin=origin)
    if base is tuple:
        _require(isinstance(data, list), data, kind, path, origin)
        item = typing.get_args(kind)[0]
        plain = _plain_kinds(item)
        return tuple(
            value if type(value) in plain else _decode(item, value, path=f"{path}[{n}]", origin=origin)
            for n, value in enumerate(data)
        )
    if base is dict:
        _require(isinstance(data, dict), data, kind, path, origin)
        item = typing.get_args(kind)[1]
        plain = _plain_kinds(item)
        return {
            name: value if type(value) in plain else _decode(item, value, path=f"{path}.{name}", origin=origin)
            for name, value in data.items()
        }
    if kind is types.NoneType:
        return _require(data is None, data, kind, path, origin)
    if kind is float:
        _require(isinstance(data, (int, float)) and not isinstance(data, bool), data, kind, path, origin)
        return float(data)
    # In JSON, true and 1 are different values. But for isinstance, True is an int.
    fits = isinstance(data, kind) and (kind is bool or not isinstance(data, bool))
    return _require(fits, data, kind, path, origin)


_PLAIN = (str, int, float, bool, types.NoneType)


@functools.cache
def _plain_kinds(kind: Any) -> frozenset[type]:
    """Return the JSON types that need no decoding for `kind`. Nearly all values have such types: text and numbers."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = typing.get_args(kind) if is_union else (kind,)
    return frozenset(plain for plain in _PLAIN if plain in kinds)


def _decode_record(kind: Any, data: Any, *, path: str, origin: str) -> Any:
    _require(isinstance(data, dict), data, kind, path, origin)
    if not getattr(kind, "DECODED_ONCE", False):
        return _decode_keys(kind, data, path=path, origin=origin)
    before = _decoded_before.get(kind)
    if before is None or before[0] != data:
        before = _decoded_before[kind] = (data, _decode_keys(kind, data, path=path, origin=origin))
    return before[1]


# For each kind with DECODED_ONCE: the JSON data of the last record, and the decoded record.
_decoded_before: dict[Any, tuple[dict[str, Any], Any]] = {}


def _decode_keys(kind: Any, data: dict[str, Any], *, path: str, origin: str) -> Any:
    values = {}
    for name, hint, plain, is_required in _keys(kind):
        if name in data:
            value = data[name]
            fits = type(value) in plain
            values[name] = value if fits else _decode(hint, value, path=f"{path}.{name}", origin=origin)
        elif is_required:
            raise RecordInvalid(f"`{origin}` lacks `{path}.{name}`")
    return kind(**values)


def _decode_union(kind: Any, data: Any, *, path: str, origin: str) -> Any:
    kinds = [one for one in typing.get_args(kind) if one is not types.NoneType]
    if len(kinds) == 1 and data is not None:
        # `X | None`: an error inside X says more than "neither fits".
        return _decode(kinds[0], data, path=path, origin=origin)
    for one in kinds:
        if isinstance(data, list) and typing.get_origin(one) is not tuple:
            continue  # making the error text would take longer than reading the value, and the text is not used
        try:
            return _decode(one, data, path=path, origin=origin)
        except RecordInvalid:
            continue
    return _require(False, data, kind, path, origin)


def _require(fits: bool, data: Any, kind: Any, path: str, origin: str) -> Any:
    if not fits:
        shown = repr(data)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        raise RecordInvalid(f"`{origin}`: `{path}` is {shown}, expected {_in_words(kind)}")
    return data


_SHOWN = 80
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "null"}


def _in_words(kind: Any) -> str:
    """Return a description of the JSON value that a type requires, for messages."""
    base = typing.get_origin(kind)
    if base is Literal:
        return " or ".join(f"`{word}`" for word in typing.get_args(kind))
    if base in (typing.Union, types.UnionType):
        return " or ".join(_in_words(one) for one in typing.get_args(kind))
    if base is tuple:
        return "a list"
    return _WORDS.get(kind, "an object")


@functools.cache
def _keys(kind: Any) -> tuple[tuple[str, Any, frozenset[type], bool], ...]:
    """Return for each field of a record: name, type, JSON types that need no decoding, and whether it is required."""
    hints = typing.get_type_hints(kind)
    return tuple(
        (
            one.name,
            hints[one.name],
            _plain_kinds(hints[one.name]),
            one.default is MISSING and one.default_factory is MISSING,
        )
        for one in _fields(kind)
    )


@functools.cache
def _fields(kind: Any) -> tuple[Field[Any], ...]:
    return fields(kind)
