"""Find files of the project that hide a locked package or a module of the standard library from the ranks.

Runs on: LOGIN NODE. Python first searches for a module in the folder of the script; with `-m`, in the working
directory. A check of the environment does not find this problem, because the locked package is unchanged. But Python
imports another file instead of the package.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from hpcenv.project.lockfile import Lockfile

# Name of a distribution package -> name of its module, for packages with two different names.
_IMPORTED_AS = {
    "attrs": "attr", "beautifulsoup4": "bs4", "opencv-python": "cv2", "opencv-python-headless": "cv2", "pillow": "PIL",
    "protobuf": "google", "python-dateutil": "dateutil", "pytorch-lightning": "pytorch_lightning", "pyyaml": "yaml",
    "scikit-image": "skimage", "scikit-learn": "sklearn",
}  # fmt: skip
# Python loads these modules before it searches the folder. `test` is in this list, because only Python's own tests
# import it.
_NEVER_HIDDEN = frozenset(
    (
        *sys.builtin_module_names,
        "abc",
        "codecs",
        "encodings",
        "genericpath",
        "io",
        "os",
        "posixpath",
        "site",
        "stat",
        "test",
    )
)
_MODULE = re.compile(r"([A-Za-z_]\w*)(\.py|\.pyc|(\.[\w-]+)*\.so)\Z")


def hidden_names(folder: Path | None, locked: Lockfile, packages: Path | None) -> tuple[str, ...]:
    """Return a text for each file that hides a module.

    Args:
        folder: the folder in which Python looks first; None if there is no such folder.
        locked: the lockfile, which has the names of packages. If a module has another name than its package, hpcenv
            knows only the common ones.
        packages: the folder with the packages of a host environment, which shows the names of the modules; None if this
            folder is not known.
    """
    if folder is None:
        return ()
    dists = (
        []
        if locked.packages is None
        else [d for d in locked.packages.dist if not (d.direct_url and d.direct_url.editable)]
    )
    brought = {_IMPORTED_AS.get(dist.name, dist.name.replace("-", "_")): dist.name for dist in dists}
    return tuple(phrase for file, name in _modules(folder) if (phrase := _hides(file, name, brought, packages)))


def _hides(file: str, name: str, brought: dict[str, str], packages: Path | None) -> str:
    if name in sys.stdlib_module_names:
        return "" if name in _NEVER_HIDDEN else f"{file} hides {name} of the standard library"
    if name in brought:
        return f"{file} hides the package {brought[name]} of the lockfile"
    if packages is not None and any(found == name for _, found in _modules(packages, name)):
        return f"{file} hides {name} of the locked environment"
    return ""


def _modules(folder: Path, only: str = "") -> Iterator[tuple[str, str]]:
    """Yield each file or folder that Python imports as a module, with the name of the module.

    A folder without `__init__.py` hides nothing.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        match = _MODULE.match(name)
        if match is not None:
            yield name, match[1]
        elif name.isidentifier() and only in ("", name) and (folder / name / "__init__.py").is_file():
            yield f"{name}/", name
