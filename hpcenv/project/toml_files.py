"""Read and write TOML files. Only this module imports tomlkit.

Runs on: LOGIN NODE. Reading returns plain data. A file is written under a temporary name and then renamed, so a
lockfile is never incomplete.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcenv.errors import Command, Hint, HpcenvError
from hpcenv.records.files import read_file, write_text

if sys.version_info >= (3, 11):
    import tomllib


# A document that a person wrote has a few KiB. Python's reader needs up to 200 times as much memory (3.11).
LONGEST = 1 << 20
# The memory of a reader grows with the square of the number of parts in a key (tomllib of Python 3.11 to 3.14).
_MOST_PARTS = 32
_MOST_DOTS = 100_000


def read(path: Path, *, error: type[HpcenvError], hint: Hint | None = None, most: int = LONGEST) -> dict[str, Any]:
    """Read a TOML file.

    Args:
        error: what to raise if the file cannot be read, or is not valid TOML.
        most: how many bytes the file may have.
    """
    return loads(read_bytes(path, error=error, hint=hint, most=most), path, error=error, hint=hint)


def read_bytes(path: Path, *, error: type[HpcenvError], hint: Hint | None = None, most: int = LONGEST) -> bytes:
    """Return the content of a TOML file, as bytes.

    Args:
        error: what to raise if the file cannot be read.
        most: how many bytes the file may have.
    """
    try:
        return read_file(path, most=most)
    except OSError as problem:
        forbidden = Command("ls", "-ld", str(path)) if isinstance(problem, PermissionError) else None
        raise error(f"cannot read `{path}`", why=problem.strerror, hint=hint or forbidden) from problem


def loads(content: bytes, path: Path, *, error: type[HpcenvError], hint: Hint | None = None) -> dict[str, Any]:
    """Return the data of a TOML file from its bytes. If they are not valid TOML, raise `error`, which names `path`.

    Since Python 3.11, the standard library can read TOML, ten times as fast as tomlkit. If the standard library finds
    an error, tomlkit reads the document again, because tomlkit's message names line and column.
    """
    require_short_keys(content, path, error=error, hint=hint)
    if sys.version_info >= (3, 11):
        with contextlib.suppress(ValueError, RecursionError):
            return tomllib.loads(content.decode("utf-8"))
    import tomlkit
    import tomlkit.exceptions

    try:
        return dict(tomlkit.parse(content.decode("utf-8")).unwrap())
    except UnicodeDecodeError as problem:
        raise error(f"`{path}` is not UTF-8 text", why=str(problem), hint=hint) from problem
    except tomlkit.exceptions.TOMLKitError as problem:
        line = conflict_line(content)
        why = str(problem) if line is None else f"line {line}: a merge left a conflict here"
        raise error(f"`{path}` is not TOML", why=why, hint=hint) from problem
    except (ValueError, RecursionError) as problem:
        raise error(f"`{path}` is not TOML", why=f"{type(problem).__name__}: {problem}", hint=hint) from problem


def conflict_line(content: bytes) -> int | None:
    """Return the number of the first line that git marked as a conflict (git-merge(1), "conflicts are presented")."""
    before, marker, _ = (b"\n" + content).partition(b"\n<<<<<<< ")
    return before.count(b"\n") + 1 if marker else None


def require_short_keys(content: bytes, path: Path, *, error: type[HpcenvError], hint: Hint | None = None) -> None:
    """Raise `error` if reading the dotted keys of the document would need too much memory.

    A dotted key is at the start of a line, in a table's header, or in an inline table. A dotted key never continues on
    the next line.
    """
    of_several_lines = b'"""' in content or b"'''" in content
    lines = content.split(b"\n")
    most = max(line.count(b".") if of_several_lines else _dots(line) for line in lines)
    if content.count(b".") <= _MOST_DOTS and most < _MOST_PARTS:
        return
    token_pattern = re.compile(_PIECE, re.DOTALL)
    text, total, in_key, position = content.decode("utf-8", "replace"), 0, 0, 0
    while token := token_pattern.match(text, position):
        position = token.end()
        if token.lastgroup == "quote":
            position = _end_of_string(text, token[0], position)
        elif token.lastgroup == "dot":
            in_key, total = in_key + 1, total + 1
            if in_key >= _MOST_PARTS or total > _MOST_DOTS:
                many = f"a key with more than {_MOST_PARTS} parts" if in_key >= _MOST_PARTS else "too many dotted keys"
                line = text.count("\n", 0, position) + 1
                raise error(f"`{path}` has {many}", why=f"line {line}", hint=hint)
        elif token.lastgroup == "end":
            in_key = 0


_PIECE = r"""(?P<quote>"{3}|'{3}|"|')|(?P<dot>\.)|(?P<part>[^\s#."'=\[\]{},]+|[ \t]+)|(?P<end>#[^\n]*|.)"""
# The quotes that open a string -> a pattern for the end of the string or an escape in it (TOML 1.0, "String").
_ENDS = {'"""': r'\\.|"{3,5}', "'''": r"'{3,5}", '"': r'\\.|"|\n', "'": r"'|\n"}


def _end_of_string(text: str, quote: str, position: int) -> int:
    pattern = re.compile(_ENDS[quote], re.DOTALL)
    while end := pattern.search(text, position):
        position = end.end()
        if not end[0].startswith("\\"):
            return position
    return len(text)


# A string in one line (TOML 1.0, "String"). The pattern also fits a string that does not end, because a reader stops
# there. Without `?`, the time for a line with many such strings would grow with the square of its length.
_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"?' rb"|'[^']*'?"


def _dots(line: bytes) -> int:
    """Return the number of dots outside the strings of a line. If the line has few dots, return the number of all."""
    dots = line.count(b".")
    return dots if dots < _MOST_PARTS else re.sub(_STRING, b"", line).count(b".")


def dumps(data: Mapping[str, Any], *, header: str) -> str:
    """Return canonical TOML text: `header` as comment lines, then `data` in its own order."""
    import tomlkit

    document = tomlkit.document()
    for line in header.splitlines():
        document.add(tomlkit.comment(line) if line else tomlkit.comment(""))
    for key, value in data.items():
        document.add(key, _item(value))
    return tomlkit.dumps(document)


def extended(text: str, tables: Mapping[str, Mapping[str, Any]], *, header: str) -> str:
    """Return a document with additional tables at its end; nothing else changes.

    Args:
        text: a TOML document without these tables.
        tables: the name of each table -> its keys. Values are text, numbers, truth values, lists of
            text, and mappings of text, which become separate tables.
    """
    lines = [*(f"# {line}" for line in header.splitlines()), text.rstrip("\n")]
    for name, keys in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_word(value)}" for key, value in keys.items() if _is_plain(value))]
        for key, value in keys.items():
            if not _is_plain(value):
                lines += ["", f"[{name}.{key}]", *(f"{_word(inner)} = {_word(v)}" for inner, v in value.items())]
    return "\n".join(lines) + "\n"


def _is_plain(value: object) -> bool:
    return not isinstance(value, Mapping)


def _word(value: Any) -> str:
    """Return a value as TOML writes it: like JSON, except for DEL, which TOML requires as an escape."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _item(value: Any) -> Any:
    """Return a tomlkit item. In a long array of strings, each string gets its own line, for readable diffs."""
    import tomlkit

    item = tomlkit.item(value)
    if isinstance(value, list) and len(value) > 3 and all(isinstance(v, str) for v in value):
        item.multiline(True)
    return item


def write(text: str, path: Path) -> bool:
    """Write `text` to the file. If the file has this content already, do nothing. Return whether the file changed."""
    if path.is_file() and path.read_bytes() == text.encode():
        return False
    write_text(text, path)
    return True
