"""One name of a class or of a type alias means one thing in the whole package."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _types(path: Path) -> Iterator[str]:
    """Yield the classes and type aliases that a module defines for others."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield from () if node.name[0] == "_" else (node.name,)
        elif isinstance(node, ast.Assign) and isinstance(node.value, (ast.Subscript, ast.BinOp)):
            names = [one.id for one in node.targets if isinstance(one, ast.Name)]
            yield from (name for name in names if name[0].isupper() and not name.isupper())


def test_one_type_has_one_name() -> None:
    defined = defaultdict(set)
    for path in sorted((ROOT / "hpcenv").rglob("*.py")):
        for name in _types(path):
            defined[name].add(path.relative_to(ROOT).as_posix())
    assert len(defined) > 500
    assert {name: sorted(paths) for name, paths in defined.items() if len(paths) > 1} == {}
