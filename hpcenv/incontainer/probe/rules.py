"""The content of the digests of a lockfile. This content depends on the revision of the lockfile.

Runs on: inside the image, on the login node and on compute nodes. The nodes read the revision from `revision` of
[Environment] in the manifest, and give it to the probe with `--revision`.
"""

from __future__ import annotations

REVISION = 2

# Rule -> the first revision with the rule, and the things that a lockfile without the rule does not cover. '' means
# that a lockfile without the rule covers more.
RULES = {
    "links": (2, "code outside of the environment that its links lead to"),
    "entry-points": (2, "an entry_points.txt that no RECORD lists"),
    "unhashed-rows": (2, "files that a RECORD lists without a hash"),
    "device-code": (2, "device code that no RECORD lists"),
    "conda-files": (2, "files of conda packages whose record has no `paths_data`"),
    "preloaded": (2, "the content of LD_PRELOAD and LD_AUDIT libraries"),
    "path-binds": (2, "binds where PYTHONPATH looks for code"),
    "empty-folders": (2, "empty folders of [[data]]"),
    "leftovers": (2, ""),  # leftovers of editors and archive programs: Python cannot import them
    "fingerprint": (2, ""),  # without values that depend on the installer, a path or the login node
}


def has_rule(rule: str, revision: int) -> bool:
    """Return whether a lockfile of this revision follows a rule."""
    return revision >= RULES[rule][0]
