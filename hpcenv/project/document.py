"""Tables of the TOML documents: strict, frozen dataclasses with kebab-case keys.

Runs on: LOGIN NODE. Pure.

Every table is a standard dataclass. `parse` lets pydantic-core validate what a TOML parser returned. A
problem names the key's path as in the file, the offending value, and the nearest known key if the
key is misspelled.

Modules with tables do without `from __future__ import annotations`: `table_schema` reads their
annotations at run time.
"""

from __future__ import annotations

import difflib
import functools
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar, TypeVar

from pydantic_core import SchemaValidator, ValidationError

from hpcenv.project import toml_lines
from hpcenv.project.table_schema import table_schema


def kebab(name: str) -> str:
    """Return the TOML key for a Python field name; `schema_` is `schema`."""
    return name.rstrip("_").replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Document:
    """Base of every table in hpcenv.toml, the lockfile and a site profile.

    The constructor checks nothing. `parse` does, where bytes enter.

    Attributes:
        replaced: a key that the table does not have any more -> what to do instead.
    """

    replaced: ClassVar[Mapping[str, str]] = {}

    def check(self) -> None:
        """Judge the document as a whole, after all its tables are valid.

        Raises:
            ValueError: what is wrong with it.
        """


Model = TypeVar("Model", bound=Document)


# -- reading ------------------------------------------------------------------------------


def parse(kind: type[Model], data: Mapping[str, Any], *, text: str = "") -> tuple[Model | None, tuple[str, ...]]:
    """Validate a document; return it, or None with one line per problem.

    Args:
        kind: the table to build.
        data: what the TOML parser returned.
        text: of the file; with it, a problem names its line.
    """
    try:
        document: Model = _validator(typing.cast("Any", kind)).validate_python(_with_tuples(data))
    except ValidationError as error:
        return None, tuple(_explain(kind, problem, text) for problem in error.errors())
    try:
        document.check()
    except ValueError as error:
        return None, (str(error),)
    return document, ()


def json_schema(kind: type[Document]) -> dict[str, Any]:
    """Return the JSON Schema of a document."""
    from pydantic.json_schema import GenerateJsonSchema

    return dict(GenerateJsonSchema(by_alias=True).generate(table_schema(kind, kebab)))


@functools.cache
def _validator(kind: Any) -> SchemaValidator:
    return SchemaValidator(table_schema(kind, kebab))


def _with_tuples(value: Any) -> Any:
    """Return a value with tuples instead of lists: documents are frozen."""
    if isinstance(value, Mapping):
        return {key: _with_tuples(inner) for key, inner in value.items()}
    return tuple(_with_tuples(inner) for inner in value) if isinstance(value, list) else value


# -- writing ------------------------------------------------------------------------------


def plain(table: Document, *without: str, by_key: bool = True, defaults: bool = True) -> dict[str, Any]:
    """Return a document as plain data for JSON or TOML, without fields that are None.

    Args:
        without: fields of this table to leave out.
        by_key: use the keys of the file; otherwise the Python names.
        defaults: include fields that have their default value.
    """
    values = {}
    for field in fields(table):
        value = getattr(table, field.name)
        if value is None or field.name in without or not (defaults or value != _default(field)):
            continue
        values[kebab(field.name) if by_key else field.name] = _plain(value, by_key=by_key, defaults=defaults)
    return values


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


# -- problems -----------------------------------------------------------------------------


# Characters of an offending value that are shown: enough to find it in the file.
_MAX_SHOWN = 80


def _explain(kind: type[Document], problem: Any, text: str) -> str:
    location = list(problem["loc"])
    where = _shown_path(location)
    if problem["type"] == "missing":
        return f"`{where}` is missing"
    number = toml_lines.line_of(text, location)
    line = f"line {number}: " if number else ""
    if problem["type"] == "unexpected_keyword_argument":
        return f"{line}unknown key `{where}`{_suggest(kind, location)}"
    reason = _in_words(kind, problem, location)
    if not location:
        return str(reason)
    return f"{line}`{where}` = {_shortened(problem['input'])}: {reason}"


# Type of a problem (pydantic 2.14, "Validation Errors") -> what the value must be, and how TOML writes it.
_FORMS = {
    "int_type": ("a whole number", "{key} = 2"),
    "int_from_float": ("a whole number", "{key} = 2"),
    "float_type": ("a number", "{key} = 1.5"),
    "string_type": ("text in quotes", '{key} = "{value}"'),
    "bool_type": ("true or false, without quotes", "{key} = true"),
    "tuple_type": ("a list", '{key} = ["{value}"]'),
    "dict_type": ("a table", "[{key}]"),
    "dataclass_type": ("a table", "[{key}]"),
}


def _in_words(kind: type[Document], problem: Any, location: Sequence[int | str]) -> str:
    """Return what is wrong with a value; for a value of the wrong type, with an example of the right form."""
    form = _FORMS.get(problem["type"])
    if form is None or not location:
        return str(problem["msg"].removeprefix("Value error, "))
    value = problem["input"]
    number = str(value).strip() if isinstance(value, str) and str(value).strip().isdigit() else ""
    if number and problem["type"] in ("int_type", "float_type"):
        return f"must be {form[0]}: {location[-1]} = {number}"
    if problem["type"] == "tuple_type" and table_at(kind, location) is not None:
        return f"must be one or more tables: [[{location[-1]}]]"
    shown = value if isinstance(value, (str, int, float)) and not isinstance(value, bool) else "..."
    return f"must be {form[0]}: {form[1].format(key=location[-1], value=shown)}"


def _shown_path(location: Sequence[int | str]) -> str:
    """Return a key's path; the third of several [[bind]] tables is `bind[2]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _shortened(value: object) -> str:
    # As in the file, where it is a list.
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def keys(table: type[Document]) -> tuple[str, ...]:
    """Return the keys of a table, as in the file."""
    return tuple(kebab(field.name) for field in fields(table))


def table_at(kind: type[Document], location: Sequence[int | str]) -> type[Document] | None:
    """Return the class of the table at `location`, None where no table of ours is."""
    table: type[Document] | None = kind
    is_name = False
    for part in location:
        if table is None:
            return None
        if is_name:  # of one of the tables [environment.NAME]
            is_name = False
        elif isinstance(part, str):
            is_name = _is_named(table, part)
            table = next((found for key, found in _tables(table) if key == part), None)
    return table


def _is_named(kind: type[Document], key: str) -> bool:
    """Return whether the key holds tables that each have a name."""
    annotation = next((field.type for field in fields(kind) if kebab(field.name) == key), None)
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    return typing.get_origin(annotation) is dict and _table_in(annotation) is not None


def _tables(kind: type[Document]) -> Iterator[tuple[str, type[Document] | None]]:
    return ((kebab(field.name), _table_in(field.type)) for field in fields(kind))


def _table_in(annotation: object) -> type[Document] | None:
    """Return the table in an annotation such as `Table`, `Table | None`, `tuple[Table, ...]`."""
    if isinstance(annotation, type) and not typing.get_args(annotation) and issubclass(annotation, Document):
        return annotation
    found = (_table_in(inner) for inner in typing.get_args(annotation))
    return next((table for table in found if table is not None), None)


def _suggest(kind: type[Document], location: Sequence[int | str]) -> str:
    """Name what replaces the key, the table that knows this very key, or the nearest key of the same table."""
    word, here = str(location[-1]), table_at(kind, location[:-1])
    if here is not None and word in here.replaced:
        return f": {here.replaced[word]}"
    homes = [
        name
        for name, table in _tables(kind)
        if table is not None and table is not here and word in keys(table) and not _is_named(kind, name)
    ]
    if homes:
        return f", it belongs under [{homes[0]}]"
    close = difflib.get_close_matches(word, () if here is None else keys(here), n=1)
    if close:
        return f", perhaps you meant `{close[0]}`"
    return ", the key belongs to the top of the file" if here is not kind and word in keys(kind) else ""
