"""Frozen dataclasses whose methods nobody compiles.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

`dataclasses.dataclass` writes the source of six methods for every class and compiles it: a
hundred classes took 60 of the 300 ms of a submission (Python 3.11, 2026-11-20). Here the fields
are those of the standard library (`fields`, `replace`, `asdict` and type checkers see an ordinary
dataclass), and the methods are the same five for all classes.

`dataclasses` itself is loaded when somebody asks in its words: with `inspect`, which it needs, it
is a third of what a step on a node loads (Python 3.13), and four steps come one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import dataclasses
    from dataclasses import dataclass, field, replace
else:

    def dataclass(*, frozen: bool = False, kw_only: bool = False, **words: bool) -> Callable[[type], type]:
        """Make a dataclass of a class; one that is not frozen, or asks for more, the ordinary way."""
        if frozen and not words:
            return functools.partial(_made, kw_only=kw_only)
        import dataclasses

        return dataclasses.dataclass(frozen=frozen, kw_only=kw_only, **words)

    def field(*, default_factory: Any = None, **words: Any) -> Any:
        """Declare a field whose default is made for each object; one that asks for more, the ordinary way."""
        if default_factory is not None and not words:
            return _Factory(default_factory)
        import dataclasses

        return dataclasses.field(**words, **({"default_factory": default_factory} if default_factory else {}))

    def replace(record: Any, /, **changes: Any) -> Any:
        """Return `record` with other values."""
        return record.__class__(**{**vars(record), **changes})


__all__ = ("dataclass", "field", "is_record", "replace", "shape")


class _Factory:
    def __init__(self, make: Callable[[], object]) -> None:
        self.make = make


def _made(kind: type, *, kw_only: bool) -> type:
    own = vars(kind)
    _MADE[kind] = kw_only
    for name, what in (*_PARTS, ("__dataclass_fields__", _Fields(kw_only=kw_only))):
        if own.get(name) is None:
            setattr(kind, name, what)
    return kind


class _Fields:
    """`__dataclass_fields__`, found out when somebody first asks for it: most classes are never used in a run."""

    def __init__(self, *, kw_only: bool) -> None:
        self.kw_only = kw_only

    def __get__(self, _instance: object, owner: type) -> dict[str, dataclasses.Field[Any]]:
        kind = next(one for one in owner.__mro__ if vars(one).get("__dataclass_fields__") is self)
        found: dict[str, dataclasses.Field[Any]] = {}
        for base in reversed(kind.__mro__[1:]):
            found.update(getattr(base, "__dataclass_fields__", {}))
        for name, annotation in kind.__annotations__.items():
            found[name] = _field(kind, name, annotation, kw_only=self.kw_only)
        setattr(kind, "__dataclass_fields__", found)  # noqa: B010  (mypy knows no such attribute)
        return found


def _field(kind: type, name: str, annotation: Any, *, kw_only: bool) -> dataclasses.Field[Any]:
    """Return a field as `dataclasses` makes it."""
    import dataclasses

    value = vars(kind).get(name, dataclasses.MISSING)
    if isinstance(value, _Factory):
        value = dataclasses.field(default_factory=value.make)
    found: dataclasses.Field[Any] = value if isinstance(value, dataclasses.Field) else dataclasses.field(default=value)
    found.name, found.type, found.kw_only = name, annotation, kw_only
    # What `dataclasses.fields` tells fields from class variables by; there are none of those here.
    found._field_type = dataclasses._FIELD  # type: ignore[attr-defined]  # noqa: SLF001
    return found


class Shape:
    """What the methods, and who reads or writes records, need to know of a dataclass, also of an ordinary one.

    Attributes:
        names: of its fields, in their order.
        places: those that a constructor takes without a name.
        defaults, factories: of those that have one.
    """

    def __init__(self, kind: type) -> None:
        self.names: dict[str, None] = {}
        self.defaults: dict[str, object] = {}
        self.factories: dict[str, Callable[[], object]] = {}
        by_name: set[str] = set()
        silent: set[str] = set()
        ignored: set[str] = set()
        for one in _declared(kind):
            self.names[one.name] = None
            for group, belongs in ((by_name, one.by_name), (silent, one.silent), (ignored, one.ignored)):
                (group.add if belongs else group.discard)(one.name)
            self.defaults.pop(one.name, None)
            self.factories.pop(one.name, None)
            if isinstance(one.value, _Factory):
                self.factories[one.name] = one.value.make
            elif one.value is not _NOTHING:
                self.defaults[one.name] = one.value
        self.places = tuple(name for name in self.names if name not in by_name)
        self.shown = [name for name in self.names if name not in silent]
        compared = [name for name in self.names if name not in ignored]
        self.values: Callable[[object], object] = attrgetter(*compared) if compared else lambda _self: ()


class _Declared:
    """One field as a class or a class below it declares it; `value` is its default, a `_Factory` or `_NOTHING`."""

    def __init__(self, name: str, value: Any, *, by_name: bool, silent: bool = False, ignored: bool = False) -> None:
        self.name = name
        self.value = value
        self.by_name = by_name
        self.silent = silent
        self.ignored = ignored


def _declared(kind: type) -> Iterator[_Declared]:
    for base in reversed(kind.__mro__):
        if base in _MADE:
            for name in base.__annotations__:
                value = vars(base).get(name, _NOTHING)
                # Not by isinstance: another thread may be loading `dataclasses` just now.
                if (type(value).__module__, type(value).__name__) == ("dataclasses", "Field"):
                    yield _of_field(name, value, by_name=_MADE[base])
                else:
                    yield _Declared(name, value, by_name=_MADE[base])
        else:
            for name, found in vars(base).get("__dataclass_fields__", {}).items():
                yield _of_field(name, found, by_name=found.kw_only)


def _of_field(name: str, found: dataclasses.Field[Any], *, by_name: bool) -> _Declared:
    from dataclasses import MISSING

    made = _Factory(found.default_factory) if found.default_factory is not MISSING else _NOTHING
    value = made if found.default is MISSING else found.default
    return _Declared(name, value, by_name=by_name, silent=not found.repr, ignored=not found.compare)


_NOTHING: Any = object()
_MADE: dict[type, bool] = {}  # whether all arguments have names
_SHAPES: dict[type, Shape] = {}


def is_record(kind: object) -> bool:
    """Whether `kind` is a dataclass, made here or the ordinary way."""
    return isinstance(kind, type) and any("__dataclass_fields__" in vars(base) for base in kind.__mro__)


def shape(kind: type) -> Shape:
    """Return the shape of a dataclass; found out when it is first asked for."""
    found = _SHAPES.get(kind)
    if found is None:
        found = _SHAPES[kind] = Shape(kind)
    return found


def _init(self: Any, /, *places: Any, **values: Any) -> None:
    own = shape(self.__class__)
    if places:
        values = _placed(self.__class__, own, places, values)
    made: dict[str, Any] = self.__dict__
    made.update(own.defaults)
    made.update(values)
    for name, make in own.factories.items():
        if name not in values:
            made[name] = make()
    if made.keys() != own.names.keys():
        raise TypeError(_mismatch(self.__class__, made.keys() - own.names.keys(), own.names.keys() - made.keys()))


def _placed(kind: type, own: Shape, places: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a constructor by their names."""
    named = dict(zip(own.places, places, strict=False))
    if len(places) > len(named) or not named.keys().isdisjoint(values):
        raise TypeError(f"{kind.__qualname__}(): {len(places)} arguments by place, and {', '.join(values) or 'none'}")
    return {**named, **values}


def _mismatch(kind: type, unknown: set[str], missing: set[str] | frozenset[str]) -> str:
    said = [f"unexpected keyword argument {name!r}" for name in sorted(unknown)]
    said += [f"missing keyword argument {name!r}" for name in sorted(missing)]
    return f"{kind.__qualname__}(): {', '.join(said)}"


def _repr(self: Any) -> str:
    kind = self.__class__
    return f"{kind.__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shape(kind).shown)})"


def _eq(self: Any, other: object) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    values = shape(self.__class__).values
    return values(self) == values(other)


def _hash(self: Any) -> int:
    return hash(shape(self.__class__).values(self))


def _setattr(_self: object, name: str, _value: object) -> NoReturn:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _delattr(_self: object, name: str) -> NoReturn:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot delete field {name!r}")


class _Signature:
    """`__signature__`: what a constructor takes, for those who ask (`inspect.signature`, `help`)."""

    def __get__(self, _instance: object, owner: type) -> Any:
        import dataclasses
        from inspect import Parameter, Signature

        own, found = shape(owner), []
        for one in sorted(dataclasses.fields(owner), key=lambda one: one.name not in own.places):
            kind = Parameter.POSITIONAL_OR_KEYWORD if one.name in own.places else Parameter.KEYWORD_ONLY
            made = own.factories.get(one.name, Parameter.empty)
            default = own.defaults.get(one.name, made)
            found.append(Parameter(one.name, kind, default=default, annotation=one.type))
        return Signature(found)


_PARTS: tuple[tuple[str, object], ...] = (
    ("__signature__", _Signature()),
    ("__init__", _init),
    ("__repr__", _repr),
    ("__eq__", _eq),
    ("__hash__", _hash),
    ("__setattr__", _setattr),
    ("__delattr__", _delattr),
)
