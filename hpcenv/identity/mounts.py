"""Find the mounts that a container has in addition to the image, from its /proc/self/mountinfo. Pure.

Runs on: COMPUTE NODE, and on the login node while locking. Standard library only.

A SIF's hash does not cover mounts over its files. So the mounts of a container are compared with the binds that hpcenv
requested, and with a table of the mounts that the container runtime itself makes. An administrator can add more mounts
(`bind path` in apptainer.conf). The remaining mounts are checked in a container without binds (bare_image.py). A
remaining mount is a finding if it hides files of the image, or if it is at a path where Python or the loader look for
code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcenv.records.manifest import Bind, Overlay


@dataclass(frozen=True, kw_only=True)
class MountLine:
    """One line of mountinfo (proc_pid_mountinfo(5)).

    Attributes:
        device: `MAJOR:MINOR`.
        root: the folder or file that is mounted, by its path in the file system of the device.
        target: the path at which it is mounted.
        fs_type: type of the file system.
    """

    device: str
    root: str
    target: str
    fs_type: str


@dataclass(frozen=True, kw_only=True)
class RuntimeMount:
    """A mount that the container runtime makes itself.

    Attributes:
        fs_type, root, target: patterns that must match the whole text.
        reason: why the mount is made.
        gpus: whether the mount is made only with --nv or --rocm.
        same_place: whether `root` and `target` must be equal, which means that the files keep their paths.
    """

    target: str
    reason: str
    fs_type: str = r".*"
    root: str = r".*"
    gpus: bool = False
    same_place: bool = False


# Mounts that were seen with Apptainer 1.4.5, or that its apptainer.conf and nvliblist.conf name.
RUNTIME_MOUNTS = (
    RuntimeMount(target="/", reason="the image itself"),
    RuntimeMount(target="/hpcenv/(home|start-gate)", reason="hpcenv's own folders, which no image has"),
    RuntimeMount(
        target="/.*",
        fs_type=r"squashfs|fuse\.squashfuse(_ll)?|ext3|fuse\.fuse2fs",
        same_place=True,
        reason="without overlays, Apptainer mounts the image's own folders one by one (`enable underlay`)",
    ),
    RuntimeMount(target="/proc(/.*)?", fs_type="proc|tmpfs|devtmpfs|overlay|binfmt_misc|autofs", reason="`mount proc`"),
    RuntimeMount(
        target="/sys(/.*)?",
        fs_type=r"sysfs|cgroup2?|tmpfs|securityfs|debugfs|tracefs|pstore|bpf|configfs|efivarfs|fusectl|selinuxfs",
        reason="`mount sys`, with all below it",
    ),
    RuntimeMount(target="/dev(/.*)?", reason="`mount dev`: devices, terminals, shared memory"),
    RuntimeMount(target="(/var)?/tmp", reason="`mount tmp`; hpcenv binds a folder of the job over /tmp"),
    RuntimeMount(target="/etc/localtime", root=r"(.*/)?(zoneinfo/.+|etc/localtime)", reason="`bind path` as delivered"),
    RuntimeMount(
        target="/usr/share/zoneinfo/.+",
        root=r"(.*/)?zoneinfo/.+",
        reason="the same bind by SingularityCE 4.5.1, if /etc/localtime is a link in the image: at the link's target",
    ),
    RuntimeMount(target="/etc/hosts", root=r"(.*/)?etc/hosts", reason="`bind path` as delivered"),
    RuntimeMount(target="/etc/(passwd|group)", root="(.*/)?(passwd|group)", reason="`config passwd`, `config group`"),
    RuntimeMount(target=r"/etc/resolv\.conf", root=r"(.*/)?[a-z-]*resolv\.conf", reason="`config resolv_conf`"),
    RuntimeMount(target=r"/\.singularity\.d/libs(/.*)?", gpus=True, reason="--nv: libraries of the driver"),
    RuntimeMount(target="/usr/bin/nvidia-[a-z-]+", root=".*/nvidia-[a-z-]+", gpus=True, reason="--nv: its programs"),
    RuntimeMount(
        target="/usr/bin/(rocm-smi|rocminfo)", root=".*/(rocm[_-]smi(.py)?|rocminfo)", gpus=True, reason="--rocm"
    ),
    RuntimeMount(target="(/var)?/run/nvidia-[a-z/.-]+", gpus=True, reason="--nv: its sockets"),
)


def parse_mountinfo(text: str) -> tuple[MountLine, ...]:
    """Return the mounts of a process, in the order in which they were made.

    Raises:
        ValueError: a line has a different form, or the text is empty.
    """
    found = []
    for line in text.splitlines():
        front, separator, back = line.partition(" - ")
        parts = front.split(" ")
        if not separator or len(parts) < 6 or not back:
            raise ValueError(f"mountinfo has the line {line[:200]!r}")
        root, target = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), part) for part in parts[3:5])
        found.append(MountLine(device=parts[2], root=root, target=target, fs_type=back.split(" ")[0]))
    if not found:
        raise ValueError("mountinfo is empty")
    return tuple(found)


def unexplained(
    mounts: Sequence[MountLine],
    asked: Sequence[Bind],
    on_node: Sequence[MountLine],
    *,
    gpus: bool,
    overlay: Overlay | None = None,
) -> tuple[MountLine, ...]:
    """Return the mounts of a container that hpcenv did not request and that are not in the table.

    Args:
        mounts: the mounts of a process in the container.
        asked: the binds that hpcenv requested.
        on_node: the mounts of a process of the node.
        gpus: whether the container was started with --nv or --rocm.
        overlay: the overlay that hpcenv mounted over the image.
    """
    expected = {os.path.normpath(bind.target): _placed(os.path.realpath(bind.source), on_node) for bind in asked}
    return tuple(
        mount
        for mount in mounts
        if not _is_asked(mount, expected, asked, on_node)
        and not is_of_runtime(mount, gpus=gpus)
        and not (overlay is not None and _shows(mount, overlay))
    )


_SQUASHFS = r"squashfs|fuse\.squashfuse(_ll)?"


def _shows(mount: MountLine, overlay: Overlay) -> bool:
    """Return whether this mount shows the root of a squashfs at the target of the overlay."""
    at_target = mount.target == os.path.normpath(overlay.target)
    return at_target and mount.root == "/" and re.fullmatch(_SQUASHFS, mount.fs_type) is not None


def shows_overlay(mounts: Sequence[MountLine], overlay: Overlay) -> bool:
    """Return whether the mounts of a container show an overlay.

    With `user bind control = no`, Apptainer 1.4.5 leaves the overlay out, and only warns.
    """
    # If several mounts are at one path, processes see only the last one.
    last = [mount for mount in mounts if mount.target == os.path.normpath(overlay.target)][-1:]
    return any(_shows(mount, overlay) for mount in last)


def is_over_overlay(target: str, overlay: Overlay | None) -> bool:
    """Return whether a mount at this path hides an overlay or a part of the overlay."""
    if overlay is None:
        return False
    place = os.path.normpath(overlay.target)
    return os.path.normpath(target) == place or os.path.normpath(target).startswith(place + "/")


def over_overlay(mounts: Sequence[MountLine], overlay: Overlay | None, *, gpus: bool) -> tuple[MountLine, ...]:
    """Return all mounts, requested or not, at or below the target of an overlay, without the overlay itself.

    These mounts hide locked files.

    Args:
        mounts: the mounts of a process in the container.
        overlay: the overlay that hpcenv mounted over the image; None without an overlay.
        gpus: whether the container was started with --nv or --rocm.
    """
    if overlay is None:
        return ()
    return tuple(
        mount
        for mount in mounts
        if is_over_overlay(mount.target, overlay) and not is_of_runtime(mount, gpus=gpus) and not _shows(mount, overlay)
    )


def missing(mounts: Sequence[MountLine], asked: Iterable[Bind], on_node: Sequence[MountLine]) -> tuple[str, ...]:
    """Return the targets of the requested binds that no mount in the container shows (`user bind control = no`)."""
    shown = {(mount.device, mount.root) for mount in mounts}
    return tuple(sorted(bind.target for bind in asked if _placed(os.path.realpath(bind.source), on_node) not in shown))


def _is_asked(
    mount: MountLine, expected: dict[str, tuple[str, str] | None], asked: Sequence[Bind], on_node: Sequence[MountLine]
) -> bool:
    place = (mount.device, mount.root)
    if mount.target in expected:
        return expected[mount.target] in (place, None)
    # The target of a bind may be a link in the image. Then the mount has a different target, but the same content.
    if place in expected.values():
        return True
    # Mounts below a source on the node also appear below the target in the container.
    for bind in asked:
        if mount.target.startswith(bind.target.rstrip("/") + "/"):
            below = os.path.realpath(bind.source).rstrip("/") + mount.target[len(bind.target.rstrip("/")) :]
            if _placed(below, on_node) == place:
                return True
    return False


def _placed(path: str, on_node: Sequence[MountLine]) -> tuple[str, str] | None:
    """Return the device of a file of the node, and its path in that file system; None if no mount contains the file."""
    holding = None
    for mount in on_node:  # a later mount hides an earlier one
        if path == mount.target or path.startswith(mount.target.rstrip("/") + "/"):
            holding = mount if holding is None or len(mount.target) >= len(holding.target) else holding
    if holding is None:
        return None
    rest = path[len(holding.target.rstrip("/")) :].strip("/")
    return holding.device, f"{holding.root.rstrip('/')}/{rest}" if rest else holding.root


def is_of_runtime(mount: MountLine, *, gpus: bool) -> bool:
    """Return whether the table explains a mount, as a mount of the container runtime or a folder of hpcenv."""
    return any(
        re.fullmatch(known.target, mount.target)
        and re.fullmatch(known.fs_type, mount.fs_type)
        and re.fullmatch(known.root, mount.root)
        and (gpus or not known.gpus)
        and (not known.same_place or mount.root == mount.target)
        for known in RUNTIME_MOUNTS
    )
