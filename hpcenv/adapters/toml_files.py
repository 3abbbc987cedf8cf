"""TOML documents on disk: the only import of tomlkit.

Runs on: LOGIN NODE. Reading gives plain data; writing goes aside and is renamed, so a
lockfile is never half a lockfile.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcenv import wire
from hpcenv.errors import HpcenvError


def read(path: Path, *, error: type[HpcenvError], hint: str | None = None) -> dict[str, Any]:
    """Return the document's plain data.

    Args:
        error: what to raise when it cannot be read; it names the file.
    """
    return loads(read_bytes(path, error=error, hint=hint), path, error=error, hint=hint)


def read_bytes(path: Path, *, error: type[HpcenvError], hint: str | None = None) -> bytes:
    """Return the document as it lies there; `error` is raised as by `read`."""
    try:
        return wire.read_file(path)
    except OSError as problem:
        raise error(f"cannot read `{path}`", why=problem.strerror, hint=hint) from problem


def loads(content: bytes, path: Path, *, error: type[HpcenvError], hint: str | None = None) -> dict[str, Any]:
    """Return the plain data of a document that was read from `path`; `error` is raised as by `read`.

    The standard library reads TOML since Python 3.11, ten times as fast; what it refuses is
    left to tomlkit, whose complaints say more.
    """
    import importlib

    with contextlib.suppress(ImportError, ValueError, RecursionError):
        return dict(importlib.import_module("tomllib").loads(content.decode("utf-8")))
    import tomlkit
    import tomlkit.exceptions

    try:
        return dict(tomlkit.parse(content.decode("utf-8")).unwrap())
    except UnicodeDecodeError as problem:
        raise error(f"`{path}` is not UTF-8 text", why=str(problem), hint=hint) from problem
    except tomlkit.exceptions.TOMLKitError as problem:
        raise error(f"`{path}` is not TOML", why=str(problem), hint=hint) from problem
    except (ValueError, RecursionError) as problem:
        raise error(f"`{path}` is not TOML", why=f"{type(problem).__name__}: {problem}", hint=hint) from problem


def read_plain(path: Path, *, error: type[HpcenvError]) -> dict[str, Any]:
    """Return the document's plain data, as fast as this Python can: the standard library reads TOML since 3.11.

    For verbs that are typed often; its complaints about a document are shorter than those of `read`.

    Args:
        error: what to raise when it cannot be read; it names the file.
    """
    import importlib

    try:
        tomllib = importlib.import_module("tomllib")
    except ImportError:
        return read(path, error=error)
    try:
        return dict(tomllib.loads(wire.read_file(path).decode("utf-8")))
    except OSError as problem:
        raise error(f"cannot read `{path}`", why=problem.strerror) from problem
    except (ValueError, RecursionError) as problem:
        raise error(f"`{path}` is not TOML", why=str(problem)) from problem


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
    """Return a document with more tables behind those that it has; nothing else in it changes.

    Args:
        text: of a TOML document without these tables.
        tables: name -> its keys; values are text, numbers, truth values, lists of text, and
            mappings of text, which become tables of their own.
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
    """Return a value as TOML has it: JSON's, but for DEL, which TOML does not take as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _item(value: Any) -> Any:
    """Return a tomlkit item; long arrays of strings get one line each, for readable diffs."""
    import tomlkit

    item = tomlkit.item(value)
    if isinstance(value, list) and len(value) > 3 and all(isinstance(v, str) for v in value):
        item.multiline(True)
    return item


def write(text: str, path: Path) -> bool:
    """Write `text` unless the file already holds it; return whether it changed."""
    if path.is_file() and path.read_bytes() == text.encode():
        return False
    wire.write_text(text, path)
    return True
