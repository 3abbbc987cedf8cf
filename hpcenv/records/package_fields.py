"""The name of a package's field: `packages.NAME`. This name must differ from the names of the keys of [packages].

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

# Keys of [packages] in a lockfile. Each key has its own row in the table of fields, most of them with a lower severity
# than a package. A package can have the same name as a key. A test compares this list with the lockfile's table.
KEYS = frozenset(
    {
        *("count", "env-digest", "content-digest", "unlisted-count", "unlisted-digest"),
        *("conda-count", "conda-digest", "conda-content-digest", "conda-modified", "dist"),
        "conda-package",
    }
)


def package_field(name: str) -> str:
    """Return the field of a package, for example `packages.numpy`; for a name in `KEYS`, `packages.count (package)`.

    Args:
        name: normalised name of the distribution; it never has a blank.
    """
    return f"packages.{name} (package)" if name in KEYS else f"packages.{name}"
