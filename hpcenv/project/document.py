"""Tables of the TOML documents: strict, frozen pydantic models with kebab-case keys.

Runs on: LOGIN NODE. Pure.

A table is a class with one attribute for each key. `parse` validates what a TOML parser returned. A
problem names the key's path as in the file and the invalid value. If the key is unknown, the problem
also names the nearest known key.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from hpcenv.project import toml_lines


def kebab(name: str) -> str:
    """Return the TOML key for a Python field name; `schema_` is `schema`."""
    return name.rstrip("_").replace("_", "-")


class Document(BaseModel):
    """Base of every table in hpcenv.toml, the lockfile and a site profile.

    In Python, attributes and the arguments of the constructor have Python names. In a file, a table has the keys that
    `kebab` returns, and no other keys.

    Attributes:
        replaced: a key that was removed from the table -> what to do instead.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        alias_generator=kebab,
        validate_by_name=True,
        validate_by_alias=True,
    )
    replaced: ClassVar[Mapping[str, str]] = {}


Model = TypeVar("Model", bound=Document)


# -- reading ------------------------------------------------------------------------------


def parse(kind: type[Model], data: Mapping[str, Any], *, text: str = "") -> tuple[Model | None, tuple[str, ...]]:
    """Validate a document; return it, or None with one line per problem.

    Args:
        kind: the table to build.
        data: what the TOML parser returned.
        text: the text of the file. If `text` is given, each problem names its line.
    """
    try:
        return kind.model_validate(_with_tuples(data), by_alias=True, by_name=False), ()
    except ValidationError as error:
        return None, problems(kind, error, text)


def problems(kind: type[Document], error: ValidationError, text: str = "") -> tuple[str, ...]:
    """Return one line per problem that pydantic found in a document."""
    return tuple(_explain(kind, problem, text) for problem in error.errors())


def _with_tuples(value: Any) -> Any:
    """Return a value with tuples instead of lists, because documents are frozen."""
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
    return table.model_dump(
        mode="json", by_alias=by_key, exclude=set(without), exclude_none=True, exclude_defaults=not defaults
    )


# -- problems -----------------------------------------------------------------------------


# Characters of an invalid value that are shown. They are enough to find the value in the file.
_MAX_SHOWN = 80


def _explain(kind: type[Document], problem: Any, text: str) -> str:
    location = list(problem["loc"])
    where = _shown_path(location)
    if problem["type"] == "missing":
        return f"`{where}` is missing"
    number = toml_lines.line_of(text, location)
    line = f"line {number}: " if number else ""
    if problem["type"] == "extra_forbidden":
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
    "model_type": ("a table", "[{key}]"),
}


def _in_words(kind: type[Document], problem: Any, location: Sequence[int | str]) -> str:
    """Return what is wrong with a value. For a value of the wrong type, add an example of the right form."""
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
    """Return a key's path. For the third of several [[bind]] tables, this is `bind[2]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _shortened(value: object) -> str:
    # A tuple is shown as a list, as in the file.
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def keys(table: type[Document]) -> tuple[str, ...]:
    """Return the keys of a table, as in the file."""
    return tuple(kebab(name) for name in table.model_fields)


def table_at(kind: type[Document], location: Sequence[int | str]) -> type[Document] | None:
    """Return the class of the table at `location`; None if hpcenv has no table there."""
    table: type[Document] | None = kind
    is_name = False
    for part in location:
        if table is None:
            return None
        if is_name:  # this part is a name, such as NAME in [environment.NAME]
            is_name = False
        elif isinstance(part, str):
            is_name = _is_named(table, part)
            table = next((found for key, found in _tables(table) if key == part), None)
    return table


def _is_named(kind: type[Document], key: str) -> bool:
    """Return whether the value of the key consists of named tables."""
    annotation = next((field.annotation for name, field in kind.model_fields.items() if kebab(name) == key), None)
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    return typing.get_origin(annotation) is dict and _table_in(annotation) is not None


def _tables(kind: type[Document]) -> Iterator[tuple[str, type[Document] | None]]:
    return ((kebab(name), _table_in(field.annotation)) for name, field in kind.model_fields.items())


def _table_in(annotation: object) -> type[Document] | None:
    """Return the table in an annotation such as `Table`, `Table | None`, `tuple[Table, ...]`."""
    if isinstance(annotation, type) and not typing.get_args(annotation) and issubclass(annotation, Document):
        return annotation
    found = (_table_in(inner) for inner in typing.get_args(annotation))
    return next((table for table in found if table is not None), None)


def _suggest(kind: type[Document], location: Sequence[int | str]) -> str:
    """Name the replacement of the key, the table that has this key, or the nearest key of the same table."""
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
