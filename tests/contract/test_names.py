"""One name of a class or of a type alias means one thing in the whole package, a private one too."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _types(path: Path) -> Iterator[str]:
    """Yield the classes that a module defines anywhere, its type aliases and its type variables."""
    tree = ast.parse(path.read_text())
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names = [one.id for one in node.targets if isinstance(one, ast.Name)]
            yield from (name for name in names if name.lstrip("_")[:1].isupper() and not name.isupper())


# In a rank the same line of a user's script finds a stand-in, which says that it cannot submit there.
STAND_INS = {"AutoExecutor", "Executor"}


def test_one_type_has_one_name() -> None:
    defined = defaultdict(set)
    for path in sorted((ROOT / "hpcenv").rglob("*.py")):
        for name in _types(path):
            defined[name].add(path.relative_to(ROOT).as_posix())
    assert len(defined) > 500
    assert {name: sorted(paths) for name, paths in defined.items() if len(paths) > 1 and name not in STAND_INS} == {}
