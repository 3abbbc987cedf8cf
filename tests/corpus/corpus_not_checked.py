"""What hpcenv does not check (docs/explanation/what-is-checked.md): each is changed here, and the verdict is `match`.

tests/contract/test_not_checked.py compares the list in that page with the tests that it names.
"""

from __future__ import annotations

import importlib.util
import marshal
import sys
from pathlib import Path

from corpus_harmless import harmless
from corpus_interpreter import LIB, own_file
from corpus_mutations import import_hook
from corpus_world import MINOR, Case


def outside(case: Case, name: str, text: str) -> Path:
    """A file that is neither in the environment nor in the project."""
    path = case.root.parent / f"{case.root.name}-outside" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@harmless(name="not-checked-module-below-pythonpath")
def _pythonpath(case: Case) -> None:
    module = outside(case, "outside_module.py", "X = 1\n")
    case.project_variable("PYTHONPATH", str(module.parent))
    case.world.lock(case.root)
    module.write_text("X = 2\n")


@harmless(name="not-checked-module-in-a-folder-of-a-pth-file")
def _pth(case: Case) -> None:
    module = outside(case, "outside_module.py", "X = 1\n")
    case.write("develop.pth", f"{module.parent}\n")
    case.world.lock(case.root)
    module.write_text("X = 2\n")


@harmless(name="not-checked-module-behind-an-import-hook")
def _hook(case: Case) -> None:
    module = outside(case, "hooked.py", "X = 1\n")
    import_hook(case, {"hooked": str(module)})
    case.world.lock(case.root)
    module.write_text("X = 2\n")


@harmless(name="not-checked-data-of-an-editable-install", needs=("git",))
def _editable_data(case: Case) -> None:
    data = case.world.source / "src/editpkg/table.weights"
    case.undo.append(data.unlink)
    data.write_text("1\n")
    case.world.lock(case.root)
    data.write_text("2\n")


@harmless(name="not-checked-compiled-file-that-fits-its-source")
def _forged(case: Case) -> None:
    source = case.path("purepkg/core.py")
    status = source.stat()
    code = compile("LIMIT = 7\n", str(source), "exec")
    fits = int(status.st_mtime).to_bytes(4, "little") + status.st_size.to_bytes(4, "little")
    data = importlib.util.MAGIC_NUMBER + b"\0" * 4 + fits + marshal.dumps(code)
    case.write(f"purepkg/__pycache__/core.{sys.implementation.cache_tag}.pyc", data)


@harmless(name="not-checked-data-that-no-list-names")
def _data(case: Case) -> None:
    case.write("purepkg/kernels.json", "1\n")
    case.write("purepkg/bin/ptxas", "#!/bin/sh\n")
    own_file(case, f"{LIB}/lib2to3/Grammar.txt", b"other\n")
    own_file(case, f"{LIB}/test/test_statistics.py", b"T = 1\n")


@harmless(name="not-checked-headers-of-python")
def _headers(case: Case) -> None:
    own_file(case, f"include/{MINOR}/pyconfig.h", b"#define Py_GIL_DISABLED 1\n")


@harmless(name="not-checked-library-that-code-opens-by-itself")
def _opened(case: Case) -> None:
    library = outside(case, "libplug.so", "one")
    case.write("opens.py", f"import ctypes\n\ndef start():\n    return ctypes.CDLL({str(library)!r})\n")
    case.world.lock(case.root)
    library.write_text("two")


@harmless(name="not-checked-caches-and-settings-below-home")
def _home(case: Case) -> None:
    home = outside(case, "home/.cache/torch_extensions/op/op.so", "one").parents[3]
    case.environ["HOME"] = str(home)
    for name in (".keras/keras.json", ".config/matplotlib/matplotlibrc"):
        path = home / name
        path.parent.mkdir(parents=True)
        path.write_text("one")


@harmless(name="not-checked-compiler-on-path-and-execute-bit")
def _compiler(case: Case) -> None:
    compiler = outside(case, "bin/gcc", "#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    case.environ["PATH"] = f"{compiler.parent}:{case.environ.get('PATH', '/usr/bin:/bin')}"
    core = case.path("purepkg/core.py")
    content = core.read_bytes()
    case.write("purepkg/core.py", content).chmod(0o755)
