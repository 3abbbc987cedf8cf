"""A repository of a hub at one commit: `ORG/NAME@COMMIT`.

Runs on: LOGIN NODE. Pure.

The form is the same as in the paths of the hub's own library, without `hf://` (huggingface_hub 2.4,
docs/source/en/package_reference/hf_uris.md). With the prefix `datasets/`, the name is a data set; with `spaces/`, it is
a space. A name without such a prefix is a model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

HubKind = Literal["model", "dataset", "space"]

_KINDS: dict[str, HubKind] = {"datasets": "dataset", "spaces": "space", "models": "model"}
# huggingface_hub 2.4, utils/_validators.py, validate_repo_id: at most 96 characters; no `--`, `..`, `.git` at the end.
_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Names of branches and tags. git allows more names (git-check-ref-format(1)); only the simple ones are accepted.
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,199}")


@dataclass(frozen=True, kw_only=True)
class HubReference:
    """A repository of a hub at a revision.

    Attributes:
        name: `ORG/NAME`, or `NAME` for a repository without organisation.
        revision: the commit, 40 hexadecimal digits. Before hpcenv resolves the revision, it may be a branch or tag.
    """

    kind: HubKind
    name: str
    revision: str

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}"

    @property
    def repository(self) -> str:
        """The repository, as users and URLs name it: with `datasets/` or `spaces/`; a model has no prefix."""
        return self.name if self.kind == "model" else f"{self.kind}s/{self.name}"

    @property
    def cache_folder(self) -> str:
        """Name of the repository's folder in the cache of the hub's library (`repo_folder_name` of version 2.4)."""
        return f"{self.kind}s--{self.name.replace('/', '--')}"


def parse_repository(text: str, *, default_revision: str = "main") -> HubReference:
    """Return the repository that `[datasets/|spaces/]ORG/NAME[@REVISION]` names. The revision may be a branch.

    Raises:
        ValueError: the text does not have this form.
    """
    path, at, revision = text.partition("@")
    first, _, rest = path.partition("/")
    kind = _KINDS.get(first) if rest else None
    name = path if kind is None else rest
    parts = name.split("/")
    if len(parts) > 2 or not all(map(_is_name, parts)):
        raise ValueError(
            f"`{text[:200]}` does not name a repository of a hub: ORG/NAME@COMMIT, or datasets/ORG/NAME@COMMIT"
        )
    revision = revision if at else default_revision
    if not _REVISION.fullmatch(revision) or ".." in revision or "//" in revision:
        raise ValueError(f"`{text[:200]}` names no revision after the @")
    return HubReference(kind=kind or "model", name=name, revision=revision)


def parse_locked(text: str) -> HubReference:
    """Return the repository and commit that `[datasets/|spaces/]ORG/NAME@COMMIT` names.

    Raises:
        ValueError: the text does not have this form, or names no commit. A branch is refused, because its files change.
    """
    found = parse_repository(text, default_revision="main")
    if not _COMMIT.fullmatch(found.revision):
        named = f"`{found.revision}` is not a commit" if "@" in text else "it names no commit"
        raise ValueError(f"{named} (40 hexadecimal digits); to see it: hpcenv data resolve {found}")
    return found


def _is_name(part: str) -> bool:
    return bool(_PART.fullmatch(part)) and "--" not in part and ".." not in part and not part.endswith(".git")
