"""Name the folders of an image at which Apptainer must mount something, but cannot.

Runs on: LOGIN NODE. Pure. Seen with Apptainer 1.4.5 on a Debian 12 node, 2026-11-23; the cases are in
tests/cluster/test_image_trial.py.
"""

from __future__ import annotations

from collections.abc import Callable

from hpcenv.image.content.tree import TreeEntry
from hpcenv.image.convert.layer_index import shown

__all__ = ["unusable_mount_points"]

Find = Callable[[bytes], "TreeEntry | None"]

# Apptainer mounts these folders of the host, or new folders, in every container.
_MOUNTED = (b"dev", b"proc", b"sys", b"tmp", b"var/tmp")
# Programs also work if this folder is not mounted.
_OPTIONAL = b"var/tmp"
_MOST_LINKS = 40


def unusable_mount_points(find: Find) -> tuple[str, ...]:
    """Return one sentence for each mount point of Apptainer at which a file or link of the image prevents the mount.

    A missing folder is not a fault, because hpcenv adds it. A link to a folder inside the image works.

    Args:
        find: returns the image's entry at a path, or None; it follows no links.
    """
    notes = []
    for path in _MOUNTED:
        name = "/" + path.decode()
        if (entry := _blocking(path, find)) is None:
            continue
        if entry.kind != "symlink":
            what = f"/{shown(entry.path)} of the image is no directory but a {entry.kind}"
            notes.append(f"{what}: Apptainer cannot mount {name}, so this image cannot be started")
        elif path != _OPTIONAL:
            notes.append(
                f"{_link(entry)}: the files that Apptainer mounts there will be missing, or the image cannot be started"
            )
    entry = _blocking(b"etc", find)
    if entry is not None:
        what = f"/etc of the image is no directory but a {entry.kind}" if entry.kind != "symlink" else _link(entry)
        writes = "; Apptainer can create files there" if entry.target.startswith(b"/") else ""
        notes.append(
            f"{what}: programs in the image will not find /etc/passwd, /etc/hosts and /etc/resolv.conf{writes}"
        )
    return tuple(notes)


def _link(entry: TreeEntry) -> str:
    return f"/{shown(entry.path)} of the image is a link to `{shown(entry.target)}`, which is no directory of the image"


def _blocking(path: bytes, find: Find) -> TreeEntry | None:
    """Return the entry that blocks a directory: a file, or a link that leads to no directory; else None."""
    done: list[bytes] = []
    todo = path.split(b"/")[::-1]
    first: TreeEntry | None = None
    for _ in range(_MOST_LINKS * 16):
        if not todo:
            return None
        part = todo.pop()
        if part in (b"", b"."):
            continue
        if part == b"..":
            done = done[:-1]
            continue
        entry = find(b"/".join([*done, part]))
        if entry is None:
            return first  # without a link in its path, the directory is only missing
        if entry.kind == "symlink":
            first = first or entry
            done = [] if entry.target.startswith(b"/") else done
            todo += entry.target.split(b"/")[::-1]
        elif entry.kind == "directory":
            done.append(part)
        else:
            return first or entry
    return first
