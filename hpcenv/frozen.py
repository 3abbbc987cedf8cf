"""Frozen dataclasses whose methods are written once.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

`dataclass` writes methods as source code for each class, and Python compiles them at each start: a quarter of
`hpcenv submit` (docs/decisions/0021). A class that a submission or a node loads takes them from here:

    @frozen_dataclass
    class Bind(Frozen):

It is a dataclass with keyword arguments: `fields`, `replace` and `is_dataclass` know it. A type checker knows the
arguments of its constructor, and that its fields are frozen (PEP 681).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[Any], Any]:  # noqa: D103  (Python has it since 3.11)
        return lambda function: function


Kind = TypeVar("Kind", bound="Frozen")


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False, field_specifiers=(field,))
def frozen_dataclass(kind: type[Kind]) -> type[Kind]:
    """Make a class a frozen dataclass with keyword arguments. Its base is `Frozen`, which has the methods."""
    return dataclass(init=False, kw_only=True, eq=False, repr=False)(kind)


class _Signature:
    """What `inspect.signature` and `help` say of a constructor: the fields, as `dataclass` has it."""

    def __get__(self, record: object, kind: type[Frozen]) -> object:
        from inspect import Parameter, Signature  # nothing that runs a command or a job asks for it

        def parameter(one: Field[Any]) -> Parameter:
            has = one.default if one.default is not MISSING else one.default_factory
            default = Parameter.empty if has is MISSING else has
            return Parameter(one.name, Parameter.KEYWORD_ONLY, default=default, annotation=one.type)

        return Signature([parameter(one) for one in _fields(kind)])


class Frozen:
    """Base of frozen dataclasses: equal are two of the same class with equal fields, as `dataclass` has it."""

    __signature__ = _Signature()

    def __init__(self, **values: Any) -> None:
        for one in _fields_of(self):
            if one.name in values:
                self.__dict__[one.name] = values.pop(one.name)
            elif one.default is not MISSING:
                self.__dict__[one.name] = one.default
            elif one.default_factory is not MISSING:
                self.__dict__[one.name] = one.default_factory()
            else:
                raise TypeError(f"{type(self).__qualname__}() lacks the argument {one.name!r}")
        if values:
            raise TypeError(f"{type(self).__qualname__}() has no argument {next(iter(values))!r}")

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return _compared(self) == _compared(other)

    def __hash__(self) -> int:
        counts = (one for one in _fields_of(self) if (one.compare if one.hash is None else one.hash))
        return hash(tuple(getattr(self, one.name) for one in counts))

    def __repr__(self) -> str:
        values = (f"{one.name}={getattr(self, one.name)!r}" for one in _fields_of(self) if one.repr)
        return f"{type(self).__qualname__}({', '.join(values)})"


def _fields_of(record: Frozen) -> tuple[Field[Any], ...]:
    kind: Any = type(record)
    return _fields(kind)


# `fields` looks through all names of the class each time.
_fields: Callable[[Any], tuple[Field[Any], ...]] = functools.cache(fields)


def _compared(record: Frozen) -> tuple[Any, ...]:
    return tuple(getattr(record, one.name) for one in _fields_of(record) if one.compare)
