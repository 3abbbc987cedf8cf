"""`hpcenv verify --imports`: import each locked package once in the environment, and name the packages that fail.

Runs on: LOGIN NODE, or on any machine that is verified. This module starts incontainer/import_packages.py, which
imports the packages, and reads its output.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hpcenv import incontainer
from hpcenv.container.start_command import own_folders
from hpcenv.errors import EnvironmentUnreadable
from hpcenv.facts.probe import run_text
from hpcenv.records.manifest import Manifest

# The import of torch takes some seconds; from a slow disk, it takes up to a minute.
_SECONDS_EACH = 120.0
_SECONDS = 3600.0

ImportState = Literal["imported", "failed", "no-module", "not-installed"]


@dataclass(frozen=True, kw_only=True)
class PackageImport:
    """The result of the import of a locked package.

    Attributes:
        name: the name of the package in the lockfile.
        module: the modules that were imported, or the module that failed; empty for a package without a module.
        state: the result; `no-module` means that the package has no Python module (for example, it has only libraries).
        found: the last line of the error; empty if there was no error.
    """

    name: str
    module: str
    state: ImportState
    found: str

    @property
    def failed(self) -> bool:
        """Whether a training that needs the package would fail."""
        return self.state in ("failed", "not-installed")


def import_packages(manifest: Manifest, environ: Mapping[str, str]) -> tuple[PackageImport, ...]:
    """Import each locked package in a separate process, inside the environment of the ranks.

    Args:
        manifest: a manifest for this machine, with environment, packages and variables.
        environ: the environment variables of this process.

    Raises:
        EnvironmentUnreadable: the program reported no result for a package.
        HpcenvError: the environment could not be started, or did not end in time.
    """
    names = [package.name for package in manifest.packages]
    source = (pkgutil.get_data(incontainer.__name__, "import_packages.py") or b"").decode()
    output = run_text(
        manifest.environment,
        environ,
        text=source,
        words=[json.dumps({"packages": names, "seconds": _SECONDS_EACH})],
        seconds=_SECONDS,
        variables={setting.name: setting.value for setting in manifest.settings},
        passed=manifest.pass_env,
        binds=own_folders(manifest),
    )
    found = {one.name: one for one in _parse(output)}
    missing = [name for name in names if name not in found]
    if missing:
        why = f"no result for {', '.join(missing[:5])}; the program printed {output[-300:]!r}"
        raise EnvironmentUnreadable("the packages could not be imported one by one", why=why)
    return tuple(found[name] for name in names)


def _parse(output: str) -> list[PackageImport]:
    """Return the results. Skip all other lines, because code that runs at the start of Python may print lines."""
    results = []
    for line in output.splitlines():
        try:
            row: Any = json.loads(line)
            words = {name: str(row[name]) for name in ("name", "module", "found")}
            state = row["state"]
        except (ValueError, KeyError, TypeError):
            continue
        if state in get_args(ImportState):
            results.append(PackageImport(state=state, **words))
    return results


def in_words(imports: Sequence[PackageImport]) -> list[str]:
    """Return lines for the user: a line with the numbers, and lines about the packages that were not imported."""
    fine = sum(one.state == "imported" for one in imports)
    lines = [f"imports: {fine} of {len(imports)} locked packages can be imported"]
    for one in imports:
        what = {"failed": "cannot be imported", "not-installed": "is not installed"}.get(one.state, "")
        if what:
            module = f" (module {one.module})" if one.module else ""
            lines.append(f"  {one.name}{module} {what}{': ' if one.found else ''}{one.found}")
    without = [one.name for one in imports if one.state == "no-module"]
    if without:
        lines.append(f"  without a module to import: {', '.join(without)}")
    return lines
