"""How pydantic-core checks a table of ours: a schema made of the annotations of its dataclass.

Runs on: LOGIN NODE. Pure.

pydantic-core is the validator of pydantic. The package pydantic makes such schemas of any annotation, but
its import and that work are a third of the time of a submission. Our tables need few kinds of
annotations, so their schemas are made here (docs/decisions/0017).
"""

from __future__ import annotations

import datetime as dt
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from pydantic_core import CoreConfig, core_schema

_PLAIN = {
    str: core_schema.str_schema(),
    int: core_schema.int_schema(),
    bool: core_schema.bool_schema(),
    dt.date: core_schema.date_schema(),
    type(None): core_schema.none_schema(),
}


@dataclass(frozen=True)
class Before:
    """In an annotation: what turns an older form of a value into today's, before it is judged.

    Attributes:
        renew: returns today's form; any other value unchanged.
    """

    renew: Callable[[Any], Any]


@dataclass(frozen=True)
class After:
    """In an annotation: what judges a value of the right type, for example `Annotated[str, After(text)]`.

    Attributes:
        judge: returns the value in the form that hpcenv keeps, or raises ValueError.
    """

    judge: Callable[[Any], Any]


def table_schema(table: type, key_of: Callable[[str], str]) -> core_schema.CoreSchema:
    """Return the schema of a table: strict values, no unknown keys.

    Args:
        table: a dataclass; its annotations are objects, not texts.
        key_of: returns the key in the file for the name of a field.

    Raises:
        TypeError: an annotation is of a kind that no table has had so far.
    """
    arguments = core_schema.dataclass_args_schema(
        table.__name__, [_field_schema(field, key_of) for field in fields(table)]
    )
    # The table itself is not strict: a strict dataclass accepts only an instance, no mapping (pydantic 2.14,
    # "Strict Mode", "Dataclasses"). The values in it are.
    config = CoreConfig(title=table.__name__, strict=True, extra_fields_behavior="forbid")
    names = [field.name for field in fields(table)]
    return core_schema.dataclass_schema(table, arguments, names, config=config, strict=False)


def _field_schema(field: Field[Any], key_of: Callable[[str], str]) -> core_schema.DataclassField:
    schema = _value_schema(field.type, key_of)
    if field.default is not MISSING:
        schema = core_schema.with_default_schema(schema, default=field.default)
    elif field.default_factory is not MISSING:
        schema = core_schema.with_default_schema(schema, default_factory=field.default_factory)
    return core_schema.dataclass_field(field.name, schema, validation_alias=key_of(field.name))


def _value_schema(kind: Any, key_of: Callable[[str], str]) -> core_schema.CoreSchema:
    if kind in _PLAIN:
        return _PLAIN[kind]
    if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"):
        return table_schema(kind, key_of)
    inner = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        schema = _value_schema(inner[0], key_of)
        for rule in inner[1:]:
            schema = (
                core_schema.no_info_before_validator_function(rule.renew, schema)
                if isinstance(rule, Before)
                else core_schema.no_info_after_validator_function(rule.judge, schema)
            )
        return schema
    if origin is typing.Literal:
        return core_schema.literal_schema(list(inner))
    if origin in (typing.Union, types.UnionType):
        return _union_schema(inner, key_of)
    if origin is tuple and inner[1:] == (...,):
        return core_schema.tuple_variable_schema(_value_schema(inner[0], key_of))
    if origin is dict:
        return core_schema.dict_schema(_value_schema(inner[0], key_of), _value_schema(inner[1], key_of))
    raise TypeError(f"a table cannot have a value of {kind}")


def _union_schema(kinds: Sequence[Any], key_of: Callable[[str], str]) -> core_schema.CoreSchema:
    choices = [_value_schema(kind, key_of) for kind in kinds if kind is not type(None)]
    schema = choices[0] if len(choices) == 1 else core_schema.union_schema([*choices])
    return schema if type(None) not in kinds else core_schema.nullable_schema(schema)
