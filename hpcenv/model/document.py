"""What the TOML documents have in common: strict, frozen tables with kebab-case keys.

Runs on: LOGIN NODE. Pure.

pydantic judges what enters, once for a content (adapters/accepted.py remembers which were
accepted; decision 0011), and what the program holds are plain frozen dataclasses: importing
pydantic and making two dozen models of it takes as long as all the rest of a submission. A
problem is reported with the key's path as it stands in the file, the offending value, and the
nearest known key for a misspelled one.

Modules with tables do without `from __future__ import annotations`: their annotations are read
at run time, and text would have to be evaluated first.
"""

from __future__ import annotations

import functools
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from hpcenv.dataclass import dataclass

if TYPE_CHECKING:
    from pydantic import BaseModel, GetCoreSchemaHandler


@dataclass(frozen=True, kw_only=True)
class Document:
    """Base of every table in hpcenv.toml, the lockfile and a site profile.

    Making one checks nothing: `parse` does, where bytes enter.
    """

    def check(self) -> None:
        """Judge the document as a whole, once its tables are valid.

        Raises:
            ValueError: what is wrong with it.
        """


Model = TypeVar("Model", bound=Document)


class Check:
    """In `Annotated`: what pydantic asks of a value of the right type.

    Args:
        rule: returns the value, or raises ValueError with what is wrong.
    """

    def __init__(self, rule: Callable[[Any], Any]) -> None:
        self.rule = rule

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Tell pydantic (2.12, "Custom types"): what its AfterValidator does, which would have to be imported first."""
        from pydantic import AfterValidator

        return AfterValidator(self.rule).__get_pydantic_core_schema__(source, handler)


def kebab(name: str) -> str:
    """Return the TOML key for a Python field name; `schema_` is `schema`."""
    return name.rstrip("_").replace("_", "-")


# -- what enters --------------------------------------------------------------------------


def parse(kind: type[Model], data: Mapping[str, Any]) -> tuple[Model | None, tuple[str, ...]]:
    """Validate a document; return it, or None with one line per problem.

    Args:
        kind: the table to build.
        data: what the TOML parser returned.
    """
    from pydantic import ValidationError

    try:
        valid = _validator(_as_key(kind)).model_validate(data)
    except ValidationError as error:
        return None, tuple(_explain(kind, problem) for problem in error.errors())
    # In pydantic's words, tuples and dates in the place of what the parser gave.
    made = build(kind, valid.model_dump(by_alias=True, exclude_unset=True))
    try:
        made.check()
    except ValueError as error:
        return None, (str(error),)
    return made, ()


def _as_key(kind: Any) -> Any:
    """Return a table's class; mypy takes the hash of its objects for its own."""
    return kind


@functools.cache
def _validator(kind: type[Any]) -> type[BaseModel]:
    """Return the pydantic model that a table's annotations describe."""
    import pydantic

    words: dict[str, Any] = {}
    for field in fields(kind):
        said: dict[str, Any] = {}
        if field.default_factory is not MISSING:
            said["default_factory"] = field.default_factory
        elif field.default is not MISSING:
            said["default"] = field.default
        if typing.get_origin(field.type) is tuple:
            # TOML has arrays only, for lists and tuples.
            said["strict"] = False
        words[field.name] = (_with_validators(field.type), pydantic.Field(**said))
    config = pydantic.ConfigDict(
        strict=True, extra="forbid", alias_generator=kebab, validate_by_name=True, validate_by_alias=True
    )
    return pydantic.create_model(kind.__name__, __config__=config, __doc__=kind.__doc__, **words)


def json_schema(kind: type[Document]) -> dict[str, Any]:
    """Return the JSON Schema of a document, as pydantic says it."""
    return dict(_validator(_as_key(kind)).model_json_schema(by_alias=True))


def _with_validators(annotation: Any) -> Any:
    """Return an annotation with pydantic's models in the place of our tables."""
    base, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if base is None:
        return _validator(annotation) if _is_table(annotation) else annotation
    if base is Annotated:
        return operator.getitem(Annotated, (_with_validators(parts[0]), *parts[1:]))
    if base in (typing.Union, types.UnionType):
        return typing.Union[tuple(_with_validators(part) for part in parts)]  # noqa: UP007  (made at run time)
    return base[tuple(_with_validators(part) for part in parts)] if base in (tuple, dict) else annotation


def _is_table(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Document)


def build(kind: type[Model], data: Mapping[str, Any]) -> Model:
    """Make a document of data that is known to be valid; nothing is checked.

    Args:
        data: keys as in the file.
    """
    values = {}
    for field, key, convert in _plan(_as_key(kind)):
        if key in data:
            values[field] = data[key] if convert is None else convert(data[key])
    return kind(**values)


_Convert = Callable[[Any], Any]


@functools.cache
def _plan(kind: type[Any]) -> tuple[tuple[str, str, _Convert | None], ...]:
    """Return of each field its name, its key, and what makes its value of the parser's, if anything must."""
    return tuple((field.name, kebab(field.name), _converter(field.type)) for field in fields(kind))


def _converter(annotation: Any) -> _Convert | None:
    base, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if base is None:
        return functools.partial(build, annotation) if _is_table(annotation) else None
    if base is Annotated:
        return _converter(parts[0])
    if base is tuple:
        return _each(_converter(parts[0]))
    if base is dict:
        inner = _converter(parts[1])
        return None if inner is None else lambda found: {key: inner(value) for key, value in found.items()}
    if base in (typing.Union, types.UnionType):
        kinds = [part for part in parts if part is not types.NoneType]
        return _converter(kinds[0]) if len(kinds) == 1 else None
    return None


def _each(inner: _Convert | None) -> _Convert:
    return tuple if inner is None else lambda found: tuple(inner(value) for value in found)


# -- what leaves --------------------------------------------------------------------------


def plain(table: Document, *without: str, by_key: bool = True, defaults: bool = True) -> dict[str, Any]:
    """Return a document as JSON and TOML can hold it, without what is None.

    Args:
        without: names of fields of this table that are left out.
        by_key: keys as in the file, not as in Python.
        defaults: also fields that have their default value.
    """
    found = {}
    for field in fields(table):
        value = getattr(table, field.name)
        if value is None or field.name in without or not (defaults or value != _default(field)):
            continue
        found[kebab(field.name) if by_key else field.name] = _plain(value, by_key=by_key, defaults=defaults)
    return found


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _plain(value: Any, *, by_key: bool, defaults: bool) -> Any:
    if isinstance(value, Document):
        return plain(value, by_key=by_key, defaults=defaults)
    if isinstance(value, (tuple, list)):
        return [_plain(inner, by_key=by_key, defaults=defaults) for inner in value]
    if isinstance(value, Mapping):
        return {key: _plain(inner, by_key=by_key, defaults=defaults) for key, inner in value.items()}
    return value.isoformat() if hasattr(value, "isoformat") else value


# -- what is wrong ------------------------------------------------------------------------


# Of an offending value, what a person needs to find it again.
_LONG = 80


def _explain(kind: type[Document], problem: Any) -> str:
    location = list(problem["loc"])
    where = _shown_path(location)
    if problem["type"] == "extra_forbidden":
        return f"unknown key `{where}`{_suggest(kind, location)}"
    if problem["type"] == "missing":
        return f"`{where}` is missing"
    said = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if not location:
        return str(said)
    return f"`{where}` = {_shortened(problem['input'])}: {said}"


def _shown_path(location: Sequence[int | str]) -> str:
    """Return a key's path; the third of several [[bind]] tables is `bind[2]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONG else text[:_LONG] + "..."


def keys(table: type[Document]) -> tuple[str, ...]:
    """Return the keys of a table, as in the file."""
    return tuple(kebab(field.name) for field in fields(table))


def table_at(kind: type[Document], location: Sequence[int | str]) -> type[Document] | None:
    """Return the class of the table at `location`, None where no table of ours is."""
    table: type[Document] | None = kind
    for part in location:
        if table is None:
            return None
        if isinstance(part, str):
            table = next((found for key, found in _tables(table) if key == part), None)
    return table


def _tables(kind: type[Document]) -> Iterator[tuple[str, type[Document] | None]]:
    return ((kebab(field.name), _table_in(field.type)) for field in fields(kind))


def _table_in(annotation: object) -> type[Document] | None:
    """Return the table in an annotation such as `Table`, `Table | None`, `tuple[Table, ...]`."""
    if isinstance(annotation, type) and not typing.get_args(annotation) and issubclass(annotation, Document):
        return annotation
    found = (_table_in(inner) for inner in typing.get_args(annotation))
    return next((table for table in found if table is not None), None)


def _suggest(kind: type[Document], location: Sequence[int | str]) -> str:
    """Name the nearest key of the same table, or the table that knows this very key."""
    import difflib

    word, here = str(location[-1]), table_at(kind, location[:-1])
    close = difflib.get_close_matches(word, () if here is None else keys(here), n=1)
    if close:
        return f", perhaps you meant `{close[0]}`"
    homes = [name for name, table in _tables(kind) if table not in (here, None) and word in keys(table)]
    if homes:
        return f", it belongs under [{homes[0]}]"
    return ", the key belongs to the top of the file" if here is not kind and word in keys(kind) else ""
