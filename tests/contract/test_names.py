"""One name of a class or of a type alias means one thing in the whole package, a private one too."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _types(path: Path) -> Iterator[str]:
    """Yield the classes that a module defines anywhere, and the type aliases that it has for others."""
    tree = ast.parse(path.read_text())
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Subscript, ast.BinOp)):
            names = [one.id for one in node.targets if isinstance(one, ast.Name)]
            yield from (name for name in names if name[0].isupper() and not name.isupper())


def test_one_type_has_one_name() -> None:
    defined = defaultdict(set)
    for path in sorted((ROOT / "hpcenv").rglob("*.py")):
        for name in _types(path):
            defined[name].add(path.relative_to(ROOT).as_posix())
    assert len(defined) > 500
    assert {name: sorted(paths) for name, paths in defined.items() if len(paths) > 1} == {}
