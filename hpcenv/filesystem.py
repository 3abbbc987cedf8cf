"""The file system of a path: which nodes see the path, who may change it, and how much space is left.

Runs on: LOGIN NODE. Reads /proc/self/mountinfo (proc(5)), and asks `lfs`, `mmlsquota` or `quota` for the quota.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import re
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcenv import process
from hpcenv.errors import Command, FileUnusable, Hint, HpcenvError, UsageError

# File systems in memory or on one machine. Other nodes never see files there.
_NODE_LOCAL = frozenset({"tmpfs", "ramfs", "devtmpfs", "overlay", "squashfs", "aufs", "iso9660", "proc", "sysfs"})
_NETWORK = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs", "orangefs", "pvfs2", "9p", "wekafs",
     "panfs", "glusterfs", "fuse.glusterfs", "fuse.cephfs", "fuse.juicefs", "fuse.sshfs", "virtiofs", "daos", "vast"}
)  # fmt: skip
# The errors for a full disk and for an exceeded quota.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# These paths are only compared with other paths; nothing is written there.
_LOCAL_PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/var/run")  # noqa: S108


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """The visibility of a path on other nodes.

    Attributes:
        shared: whether other nodes see the path; None if this machine cannot know it.
        assumed: whether the path counts as shared without proof.
    """

    shared: bool | None
    reason: str
    assumed: bool = False


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A mounted file system: its mount point, its type, and its device or server as the kernel names it."""

    point: str
    kind: str
    source: str

    @property
    def network(self) -> bool:
        """True if other machines see the same files; False if they do not, or if this is not known."""
        return self.kind in _NETWORK


def visibility(path: Path, *, home: Path) -> Visibility:
    """Return whether compute nodes will see `path` under the same name.

    For some file systems the answer is certain. For a local disk the answer is uncertain, because this machine may
    export the disk to the nodes. A path on the same device as the home folder counts as shared, because most sites
    share the home folders. On a cluster of one machine, nothing has to be shared.
    """
    place = _existing(path)
    mount = mount_of(place)
    if mount is None:
        return Visibility(shared=None, reason="its mount point is not in /proc/self/mountinfo")
    if mount.kind in _NETWORK:
        return Visibility(shared=True, reason=f"{mount.point} is a {mount.kind} file system")
    if mount.kind in _NODE_LOCAL:
        return Visibility(shared=False, reason=f"{mount.point} is a {mount.kind} file system, local to this machine")
    local = next((p for p in _LOCAL_PLACES if _is_below(str(place), p)), None)
    if local is not None:
        return Visibility(shared=False, reason=f"{local} is local to each machine")
    if os.path.exists(home) and os.stat(place).st_dev == os.stat(home).st_dev:
        where = "" if str(place) == os.path.realpath(home) else f"it is on the same file system as {home}, and "
        reason = f"{where}homes are shared at most sites; no node was asked"
        return Visibility(shared=True, reason=reason, assumed=True)
    return Visibility(shared=None, reason=f"{mount.point} is a {mount.kind} file system; it may be exported or not")


def _existing(path: Path) -> Path:
    # The functions of os.path raise no error here. Path.resolve and Path.exists raise an error for loops of links, and
    # for folders that the user may not enter.
    place = Path(os.path.realpath(path))
    while not os.path.exists(place):
        place = place.parent
    return place


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def mount_of(path: Path) -> Mount | None:
    """Return the mount that contains `path`: the mount with the longest mount point, and the last such mount.

    Args:
        path: absolute and without links; the path may be missing.
    """
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    best: Mount | None = None
    for line in lines:
        fields, _, tail = line.partition(" - ")
        point = _unescape(fields.split()[4])
        if (point == "/" or _is_below(str(path), point)) and (best is None or len(point) >= len(best.point)):
            words = tail.split()
            best = Mount(point=point, kind=words[0], source=_unescape(words[1]) if len(words) > 1 else "")
    return best


def _unescape(text: str) -> str:
    r"""Undo the octal escapes of mountinfo: a blank is written as \040."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), text)


def file_time(folder: Path) -> float:
    """Return the current time by the clock that sets file times in `folder`.

    On a network file system, the clock of the server sets the file times.

    Raises:
        OSError: no file can be written into `folder`.
    """
    probe = folder / f".{os.urandom(8).hex()}.now"
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.write(fd, b"\n")  # on NFS, a write sets the file time to the server's time, not to this machine's time
            os.fsync(fd)
        except OSError as error:
            # On a full disk, the time of the empty file is exact enough. `prune` must work on a full disk, too.
            if error.errno not in FULL:
                raise
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
        os.unlink(probe)


# --- how much space is left --------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Space:
    """The number of bytes that the caller may still write.

    Attributes:
        free: free bytes of the file system, for users without privileges.
        quota: the bytes that the caller's quota still allows; None if no quota is known.
        origin: the command that reported the quota.
    """

    free: int
    quota: int | None = None
    origin: str = ""

    @property
    def usable(self) -> int:
        """The smaller of `free` and `quota`."""
        return self.free if self.quota is None else min(self.free, self.quota)


def space(folder: Path) -> Space:
    """Return how many bytes may be written into `folder`.

    The quota comes from the command for the type of the file system (`lfs`, `mmlsquota` or `quota`), if this machine
    has the command. The command has five seconds to answer. If the site has configured project quotas of XFS or ext4
    so, `free` already includes these quotas.

    Raises:
        OSError: the folder does not exist.
    """
    said = os.statvfs(folder)
    free = said.f_bavail * said.f_frsize
    place = Path(os.path.realpath(folder))
    mount = mount_of(place)
    if mount is None or os.geteuid() == 0:
        return Space(free=free)
    for tool, argv, parse in _quota_commands(place, mount):
        if shutil.which(tool) is None:
            continue
        with contextlib.suppress(HpcenvError):
            # `quota` ends with 1 if a quota is exceeded, which is a valid answer.
            left = parse(process.run(argv, timeout=5, accept=(0, 1)).stdout)
            if left is not None:
                return Space(free=free, quota=left, origin=argv[0])
    return Space(free=free)


_QuotaCommand = tuple[str, list[str], Callable[[str], int | None]]


def _quota_commands(place: Path, mount: Mount) -> list[_QuotaCommand]:
    user = str(os.geteuid())
    if mount.kind == "lustre":
        return [("lfs", ["lfs", "quota", "-q", "-u", user, str(place)], _lfs_left)]
    if mount.kind == "gpfs":
        device = mount.source.rpartition("/")[2]
        return [("mmlsquota", ["mmlsquota", "-Y", "-u", user, device], _gpfs_left)]
    return [("quota", ["quota", "-w", "-p", "-u", user], lambda text: _quota_left(text, mount.source))]


def _left(used: str, soft: str, hard: str) -> int | None:
    """Return how many more bytes a quota allows; None if there is no limit.

    The arguments are columns in the output of a quota command, in KiB.

    A limit of 0 means "no limit". If a hard limit is set, it is used instead of the soft limit. A user who exceeds only
    the soft limit can still write during the grace period, which usually has several days.
    """
    try:
        taken, limit = int(used.rstrip("*")), int(hard) or int(soft)
    except ValueError:
        return None
    return max(limit - taken, 0) * 1024 if limit else None


def _lfs_left(text: str) -> int | None:
    """Read `lfs quota -q` (Lustre 2.12 to 2.15): path, KiB used, quota, limit, grace, files ...

    If the path is long, `lfs` prints it on a separate line.
    """
    words = text.split()
    for at in range(1, len(words) - 2):
        if all(re.fullmatch(r"\d+\*?", word) for word in words[at : at + 3]):
            return _left(*words[at : at + 3])
    return None


def _gpfs_left(text: str) -> int | None:
    """Read `mmlsquota -Y` (IBM Storage Scale): colons separate the columns, and one line has the column names."""
    names: list[str] = []
    for line in text.splitlines():
        words = line.split(":")
        if "HEADER" in words:
            names = words
        elif names:
            row = dict(zip(names, words, strict=False))
            if row.get("quotaType") == "USR":
                return _left(row.get("blockUsage", ""), row.get("blockQuota", ""), row.get("blockLimit", ""))
    return None


def _quota_left(text: str, source: str) -> int | None:
    """Read `quota -w -p` (quota-tools 4): file system, KiB used, quota, limit, grace, files ..."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 4 and words[0] == source:
            return _left(*words[1:4])
    return None


def most_similar(path: Path) -> Path | None:
    """Return the existing path whose spelling is most similar to a path that does not exist, or None.

    Args:
        path: an absolute path. Each part that does not exist is compared with the names in its folder.
    """
    import difflib

    here = Path(path.anchor)
    for part in path.parts[1:]:
        if os.path.lexists(here / part):
            here /= part
            continue
        try:
            with os.scandir(here) as entries:
                names = [entry.name for _, entry in zip(range(_MOST_NAMES), entries, strict=False)]
        except OSError:
            return None
        close = difflib.get_close_matches(part, names, n=1, cutoff=0.7)
        if not close:
            return None
        here /= close[0]
    return here


# In a folder with a million files, the comparison with all names would take too long for a user who waits.
_MOST_NAMES = 5000


def refused(path: Path, error: OSError, *, doing: str = "written") -> FileUnusable:
    """Return the error for an operation on `path` that the operating system refused."""
    why = error.strerror or str(error)
    hint: Hint = "check the permissions of this path, and of the folders above it"
    if error.errno in FULL:
        with contextlib.suppress(OSError):
            folder = path if path.is_dir() else path.parent
            why += f"; {_megabytes(os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize)} are free in {folder}"
        hint = (
            "free some space (",
            Command("hpcenv", "image", "prune"),
            "), or keep images elsewhere (--store, HPCENV_STORE)",
        )
    elif error.errno == errno.EROFS:
        hint = "name a folder on a file system that can be written to"
    return FileUnusable(f"`{path}` cannot be {doing}", why=why, hint=hint)


def require_space(folder: Path, need: int, *, purpose: str) -> None:
    """Check, before the work begins, that `need` bytes can be written into `folder`.

    Args:
        purpose: what the space is needed for. This text completes "bytes are needed to ..." in the error.

    Raises:
        FileUnusable: fewer than `need` bytes are free, or the user's quota does not allow `need` bytes.
    """
    try:
        found = space(folder)
    except OSError as error:
        raise refused(folder, error, doing="used") from error
    if found.usable >= need:
        return
    short = "your quota leaves" if found.usable == found.quota else "the file system has"
    origin = f" (says `{found.origin}`)" if found.usable == found.quota else ""
    raise FileUnusable(
        f"there is not enough space in `{folder}`",
        why=f"{_megabytes(need)} are needed to {purpose}, {short} {_megabytes(found.usable)}{origin}",
        hint=(Command("hpcenv", "image", "prune"), ", or keep images elsewhere (--store, HPCENV_STORE)"),
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB".replace(",", " ")


# --- who may change it -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trust:
    """The users that hpcenv trusts. hpcenv may run programs from the folders of these users.

    Attributes:
        owners: ids of trusted users, in addition to the caller and root.
        group: whether the group that may write to a folder is trusted too.
    """

    owners: frozenset[int] = frozenset()
    group: bool = False

    def owns(self, status: os.stat_result) -> bool:
        """Return whether the owner of a file or folder is trusted."""
        if status.st_uid in {os.geteuid(), 0, *self.owners}:
            return True
        return self.group and bool(status.st_mode & stat.S_IWGRP) and status.st_gid in {os.getegid(), *os.getgroups()}


def user_ids(names: Sequence[str]) -> frozenset[int]:
    """Return the user ids for names of users or numbers.

    Raises:
        UsageError: this machine does not know one of the users.
    """
    found = set()
    for name in names:
        try:
            found.add(int(name) if name.isascii() and name.isdigit() else pwd.getpwnam(name).pw_uid)
        except KeyError:
            raise UsageError(f"this machine knows no user `{name}`", hint="give a login name or a user id") from None
    return frozenset(found)


def user_name(uid: int) -> str:
    """Return the name of a user; if the machine does not know the name, the user id as text."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def require_trusted(folder: Path, trust: Trust) -> None:
    """Refuse a folder that an untrusted user owns, may write to, or may replace.

    A parent folder is accepted even if a group may write to it, because many project folders have this permission. If a
    member of the group replaces `folder`, the new folder belongs to that member, so this function refuses it.

    Raises:
        FileUnusable: the folder is not trusted; the error names its mode and owner, and has a hint.
        OSError: the folder cannot be read.
    """
    real = Path(os.path.realpath(folder))
    for place in sorted({*Path(os.path.abspath(folder)).parents, *real.parents}):
        status = os.stat(place)
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise _untrusted(
                place, status, f"everybody may put another folder in place of `{folder}`", f"chmod o-w {place}"
            )
    link = os.lstat(folder)
    if not trust.owns(link) and stat.S_ISLNK(link.st_mode):
        raise _untrusted(folder, link, "the link is not yours", "name the folder itself")
    status = os.stat(real)
    if not stat.S_ISDIR(status.st_mode):
        raise FileUnusable(f"`{folder}` is not a folder", hint="name another one")
    if status.st_mode & stat.S_IWOTH:
        raise _untrusted(folder, status, "everybody may write to it", f"chmod o-w {folder}")
    if not trust.owns(status):
        owner = user_name(status.st_uid)
        hint = f"if you trust `{owner}`: --trust {owner}, or HPCENV_STORE_OWNERS={owner}"
        raise _untrusted(folder, status, f"`{owner}` could change what is in it", hint)
    if status.st_mode & stat.S_IWGRP and not trust.group and not private_group(status.st_gid):
        hint = f"chmod g-w {folder}, or store-shared = true under [paths] in hpcenv.toml"
        raise _untrusted(folder, status, "its group may write to it", hint)


def _untrusted(folder: Path, status: os.stat_result, why: str, hint: str) -> FileUnusable:
    mode = stat.S_IMODE(status.st_mode)
    who = f"{user_name(status.st_uid)}:{_group_name(status.st_gid)}"
    return FileUnusable(f"`{folder}` is not trusted", why=f"{why} (mode {mode:04o}, owner {who})", hint=hint)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def private_group(gid: int) -> bool:
    """Return whether the caller is the only member of a group. Many systems give each user such a group."""
    try:
        me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == me.pw_gid and group.gr_name == me.pw_name and set(group.gr_mem) <= {me.pw_name}
