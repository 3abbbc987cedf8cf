"""The archive of a bundle: write a zip file whose bytes depend only on its content, and read untrusted zip files.

Runs on: LOGIN NODE. The archive is a zip file and not a tar file (docs/decisions/0022). Every computer can open a zip
file, `record.json` can be read without unpacking other files, and a SIF is stored without compression.

Members are sorted by name and have fixed times and modes, so equal content gives equal bytes. The last member,
`SHA256SUMS`, has the sha256 of every other file; `sha256sum -c` can read it.

The reader checks the whole archive before it writes anything. It refuses an archive in these cases: a name or a link
leads out of the folder, the path of a member goes through a link, two names are equal, a member has an unknown kind, or
there is too much data. (Zip format: PKWARE APPNOTE 6.3.10.)
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import struct
import tempfile
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, TYPE_CHECKING

from hpcenv import filesystem
from hpcenv.errors import BundleInvalid, FileUnusable, WouldOverwrite
from hpcenv.image.store.lease import NO_LINKS
from hpcenv.progress import Event, OnEvent, Phase
from hpcenv.records.files import open_regular, sha256_of
from hpcenv.text import printable

if TYPE_CHECKING:
    from typing_extensions import Self

SUMS = "SHA256SUMS"

# This limit is high: a project with its metrics has some thousand files.
MOST_FILES = 200_000
# The directory of a zip file is read as a whole. It has some 100 bytes for each member.
_LONGEST_DIRECTORY = 128 << 20
LONGEST_SUMS = 64 << 20
_LONGEST_PART = 255
_LONGEST_NAME = 2048
_LONGEST_LINK = 1024
# Deflate can compress at most 1032 bytes into 1 (zlib, "Maximum Compression Factor"). Metrics reach a ratio of about
# 20.
_MOST_RATIO = 200
# The ratio is checked only if the unpacked files together are larger than this size.
_SMALL = 1 << 30
_CHUNK = 1 << 20
_TIME = (1980, 1, 1, 0, 0, 0)
_SUM_LINE = re.compile(r"([0-9a-f]{64})  (.+)\Z")

OnStep = Callable[[int], None]
"""Called with the number of bytes that were read or written."""


def counted(on_event: OnEvent, phase: Phase, what: str, total: int) -> OnStep:
    """Return a function for `step` that reports how many of `total` bytes are done."""
    done = 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        on_event(Event(phase=phase, what=what, done=min(done, total), total=total, unit="bytes"))

    return step


def _ignored(_count: int) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class BundleMember:
    """One file or link of an archive.

    Attributes:
        name: path relative to the archive's folder, with `/`.
        source: the file on disk, or the content itself.
        link: target of a symbolic link; empty for a file.
        executable: whether the file is a program.
        compressed: whether the archive compresses the file. False if compression has no use, for example for a SIF.
    """

    name: str
    source: Path | bytes = b""
    link: str = ""
    executable: bool = False
    compressed: bool = True


# -- writing ------------------------------------------------------------------------------


def write_archive(target: Path, folder: str, members: Iterable[BundleMember], *, step: OnStep = _ignored) -> str:
    """Write an archive under a temporary name and rename it.

    Args:
        target: path of the archive; no file with this path may exist.
        folder: name of the folder in the archive that contains all members.
        members: the members, with different names and in any order.
        step: called with the number of bytes that were read.

    Returns:
        The sha256 of the archive.

    Raises:
        WouldOverwrite: `target` exists.
        FileUnusable: a file cannot be read, or the archive cannot be written.
    """
    if os.path.lexists(target):
        raise WouldOverwrite(f"`{target}` exists", hint="choose another name: -o FILE")
    try:
        handle, aside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise filesystem.refused(target, error) from error
    try:
        with open(handle, "wb") as file:
            _write(file, folder, sorted(members, key=lambda member: member.name), step)
        os.chmod(aside, 0o644)
        digest = sha256_of(open_regular(Path(aside)))
        _give_name(aside, target)
    except FileExistsError as error:
        raise WouldOverwrite(f"`{target}` exists", hint="choose another name: -o FILE") from error
    except OSError as error:
        raise filesystem.refused(target, error) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(aside)
    return digest


def _give_name(aside: str, target: Path) -> None:
    """Rename a file to its final name, if no other file has this name.

    Raises:
        FileExistsError: another file has the name.
        OSError: the file cannot be renamed.
    """
    try:
        os.link(aside, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target)) from error
        os.rename(aside, target)


def _write(file: IO[bytes], folder: str, members: list[BundleMember], step: OnStep) -> None:
    sums = []
    with zipfile.ZipFile(file, "w", allowZip64=True, strict_timestamps=True) as archive:
        for member in members:
            digest = _add(archive, folder, member, step)
            if not member.link:
                sums.append(f"{digest}  {member.name}\n")
        _add(archive, folder, BundleMember(name=SUMS, source="".join(sums).encode()), step)


def _add(archive: zipfile.ZipFile, folder: str, member: BundleMember, step: OnStep) -> str:
    """Write one member; return the sha256 of its content."""
    info = zipfile.ZipInfo(f"{folder}/{member.name}", date_time=_TIME)
    info.create_system = 3  # Unix: the high half of external_attr is st_mode
    info.compress_type = zipfile.ZIP_DEFLATED if member.compressed else zipfile.ZIP_STORED
    kind = stat.S_IFLNK | 0o777 if member.link else stat.S_IFREG | (0o755 if member.executable else 0o644)
    info.external_attr = kind << 16
    content = os.fsencode(member.link) if member.link else member.source
    digest = hashlib.sha256()
    if isinstance(content, bytes):
        info.file_size = len(content)
        digest.update(content)
        archive.writestr(info, content)
        step(len(content))
        return digest.hexdigest()
    with open(content, "rb") as source:
        info.file_size = os.fstat(source.fileno()).st_size
        with archive.open(info, "w", force_zip64=info.file_size > _SMALL) as target:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                target.write(chunk)
                step(len(chunk))
    return digest.hexdigest()


# -- reading ------------------------------------------------------------------------------


def parse_sums(text: str) -> dict[str, str]:
    """Return the sha256 of each file that a file SHA256SUMS names.

    Raises:
        ValueError: a line is not a checksum; the message contains the line.
    """
    sums = {}
    for line in text.splitlines():
        match = _SUM_LINE.match(line)
        if match is None:
            raise ValueError(f"a line is not a checksum: {line[:200]!r}")
        sums[match[2]] = match[1]
    return sums


class Archive:
    """An archive that is open for reading, and in which all names were checked.

    Attributes:
        path: path of the archive.
        folder: name of the folder in the archive that contains all members.
        sums: name of a file -> its sha256, according to the archive.
        links: name of a symbolic link -> its target.
        size: size of all unpacked files together, in bytes.
    """

    def __init__(self, path: Path) -> None:
        """Open an archive and check its directory.

        Raises:
            FileUnusable: the file cannot be read.
            BundleInvalid: the file is not the archive of a bundle, or is not safe to unpack.
        """
        self.path = path
        try:
            self._file = open(open_regular(path, follow=True), "rb")  # noqa: SIM115  (closed by close())
        except OSError as error:
            raise FileUnusable(f"cannot read `{path}`", why=error.strerror) from error
        try:
            self._open()
        except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, OSError, EOFError) as error:
            self._file.close()
            raise self._invalid(str(error) or type(error).__name__) from error
        except BundleInvalid:
            self._file.close()
            raise

    def _open(self) -> None:
        _require_short_directory(self._file)
        self._zip = zipfile.ZipFile(self._file)
        infos = self._zip.infolist()
        if len(infos) > MOST_FILES:
            raise self._invalid(f"it has {len(infos)} members, at most {MOST_FILES} are read")
        self.folder = infos[0].filename.partition("/")[0] if infos else ""
        self._infos = {self._name(info): info for info in infos if not info.is_dir()}
        self._require_distinct(len([info for info in infos if not info.is_dir()]))
        self._require_bounded()
        self.links = {name: self._link(name) for name, info in self._infos.items() if _is_link(info)}
        self._require_single_links()
        self.sums = self._read_sums()
        self.size = sum(info.file_size for info in self._infos.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._zip.close()
        self._file.close()

    def _invalid(self, why: str) -> BundleInvalid:
        hint = "fetch the file again, and compare its sha256 with the sha256 that the authors published"
        return BundleInvalid(
            f"`{self.path.name}` is not a bundle that can be used", why=printable(why[:1000]), hint=hint
        )

    # checks of the directory

    def _name(self, info: zipfile.ZipInfo) -> str:
        """Return a member's name without the archive's folder.

        Raises:
            BundleInvalid: the name leaves the folder, or is not safe on a file system.
        """
        name = info.filename
        parts = name.rstrip("/").split("/")
        bad = (
            len(parts) < 2 - info.is_dir()
            or parts[0] != self.folder
            or any(part in ("", ".", "..") or len(os.fsencode(part)) > _LONGEST_PART for part in parts)
            or len(os.fsencode(name)) > _LONGEST_NAME
            or "\\" in name
            or (len(parts[0]) > 1 and parts[0][1] == ":")
            or not name.isprintable()
        )
        if bad:
            raise self._invalid(f"the name {name[:200]!r} does not stay in the bundle's folder")
        if info.flag_bits & 0x1:
            raise self._invalid(f"{name!r} is encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise self._invalid(f"{name!r} is compressed with method {info.compress_type}; stored and deflate are read")
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR):
            raise self._invalid(f"{name!r} is neither a file nor a link")
        return "/".join(parts[1:])

    def _require_distinct(self, count: int) -> None:
        # On some file systems, two names that differ only in case mean the same file.
        folded = {unicodedata.normalize("NFC", name).casefold() for name in self._infos}
        if len(folded) != count:
            raise self._invalid("two of its members have the same name, or names that differ in case only")
        folders = {str(parent) for name in self._infos for parent in PurePosixPath(name).parents}
        both = sorted(folders & set(self._infos))
        if both:
            raise self._invalid(f"{both[0]!r} is a file or a link, and a folder")

    def _require_bounded(self) -> None:
        """Refuse an archive with more data than its size makes plausible, or with members that share bytes."""
        infos = sorted(self._infos.values(), key=lambda info: info.header_offset)
        size = os.fstat(self._file.fileno()).st_size
        for before, after in zip(infos, [*infos[1:], None], strict=True):
            end = before.header_offset + 30 + before.compress_size
            if end > (size if after is None else after.header_offset):
                raise self._invalid(f"{before.filename!r} shares its bytes with another member")
        total = sum(info.file_size for info in infos)
        if total > max(_SMALL, _MOST_RATIO * size):
            raise self._invalid(f"it would unpack to {total} bytes, more than {_MOST_RATIO} times its own size")

    def _link(self, name: str) -> str:
        """Return the target of a link.

        Raises:
            BundleInvalid: the link leads out of the bundle.
        """
        if self._infos[name].file_size > _LONGEST_LINK:
            raise self._invalid(f"the target of the link {name!r} is too long")
        target = os.fsdecode(self._zip.read(self._infos[name]))
        inside = os.path.normpath(os.path.join(os.path.dirname(name) or ".", target))
        # `..` after the name of a link could lead to an unexpected folder.
        parts = [part for part in target.split("/") if part not in ("", ".")]
        climbs_late = ".." in parts[next((n for n, part in enumerate(parts) if part != ".."), len(parts)) :]
        if not parts or "\0" in target or target.startswith("/") or inside.split("/")[0] == ".." or climbs_late:
            raise self._invalid(f"the link {name!r} leads out of the bundle, to {target[:200]!r}")
        return target

    def _require_single_links(self) -> None:
        """Refuse a link whose path goes through another link. Together, the two links could lead out of the folder."""
        for name, target in self.links.items():
            inside = PurePosixPath(os.path.normpath(os.path.join(os.path.dirname(name) or ".", target)))
            over = next((str(path) for path in (inside, *inside.parents) if str(path) in self.links), None)
            if over is not None:
                raise self._invalid(f"the link {name!r} leads over the link {over!r}")

    def _read_sums(self) -> dict[str, str]:
        if SUMS not in self._infos:
            raise self._invalid(f"it has no {SUMS}: it was not made by `hpcenv bundle`")
        try:
            sums = parse_sums(self.read(SUMS, most=LONGEST_SUMS).decode("utf-8"))
        except ValueError as error:
            raise self._invalid(f"{SUMS}: {error}") from error
        files = set(self._infos) - set(self.links) - {SUMS}
        for names, why in ((files - set(sums), "is not in"), (set(sums) - files, "is only in")):
            if names:
                raise self._invalid(f"{min(names)!r} {why} {SUMS}")
        return sums

    # content

    def read(self, name: str, *, most: int) -> bytes:
        """Return the content of a file. The checksum is compared for every file except SHA256SUMS itself.

        Args:
            most: the largest number of bytes that the file may have.

        Raises:
            BundleInvalid: there is no such file, the file is too large, or its checksum is wrong.
        """
        info = self._infos.get(name)
        if info is None or name in self.links:
            raise self._invalid(f"it has no file {name!r}")
        if info.file_size > most:
            raise self._invalid(f"{name!r} has {info.file_size} bytes, at most {most} are read")
        return b"".join(self.chunks(name))

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file, and compare the checksum after the last part.

        Raises:
            BundleInvalid: the file cannot be read, or its checksum is wrong.
        """
        digest = hashlib.sha256()
        try:
            with self._zip.open(self._infos[name]) as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    yield chunk
        except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError) as error:
            raise self._invalid(f"{name!r}: {error}") from error
        except Exception as error:  # zlib.error has no public base
            if type(error).__module__ != "zlib":
                raise
            raise self._invalid(f"{name!r}: {error}") from error
        if name != SUMS and digest.hexdigest() != self.sums[name]:
            raise self._invalid(f"{name!r} was changed: its sha256 is not the one in {SUMS}")

    def verify(self, *, step: OnStep = _ignored) -> None:
        """Read all files and compare their checksums.

        Raises:
            BundleInvalid: the checksum of a file is wrong.
        """
        for name in sorted(self.sums):
            for chunk in self.chunks(name):
                step(len(chunk))

    def unpack(self, target: Path, *, step: OnStep = _ignored) -> None:
        """Write all members into a new folder with a temporary name, and rename the folder at the end.

        Args:
            target: path of the new folder; nothing with this path may exist.

        Raises:
            WouldOverwrite: `target` exists.
            FileUnusable: the folder cannot be written, or there is not enough space.
            BundleInvalid: the checksum of a file is wrong. In this case, `target` is not made.
        """
        if os.path.lexists(target):
            raise WouldOverwrite(f"`{target}` exists", hint="name another folder")
        filesystem.require_space(target.parent, self.size, purpose="the bundle")
        try:
            aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        except OSError as error:
            raise filesystem.refused(target, error) from error
        try:
            self._unpack_into(aside, step)
            os.chmod(aside, 0o755)  # noqa: S103  (like any folder; mkdtemp makes it 0700)
            os.rename(aside, target)
        except OSError as error:
            raise filesystem.refused(target, error) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _unpack_into(self, folder: Path, step: OnStep) -> None:
        self._write_files(folder, self._infos.keys() - self.links.keys(), step)
        for name, link in sorted(self.links.items()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.symlink(link, folder / name)

    def extract(self, folder: Path, names: Iterable[str]) -> None:
        """Write some files into a folder that only this process uses.

        Raises:
            FileUnusable: the files cannot be written.
            BundleInvalid: the checksum of a file is wrong.
        """
        try:
            self._write_files(folder, names, _ignored)
        except OSError as error:
            raise filesystem.refused(folder, error) from error

    def _write_files(self, folder: Path, names: Iterable[str], step: OnStep) -> None:
        for name in sorted(names):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            executable = bool(self._infos[name].external_attr >> 16 & 0o100)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(path, flags, 0o755 if executable else 0o644), "wb") as file:
                for chunk in self.chunks(name):
                    file.write(chunk)
                    step(len(chunk))


def _is_link(info: zipfile.ZipInfo) -> bool:
    return stat.S_ISLNK(info.external_attr >> 16)


# End of central directory record, and the locator and record of zip64 (APPNOTE 4.3.14 to 4.3.16).
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")


def _require_short_directory(file: IO[bytes]) -> None:
    """Refuse a directory that would need too much memory, before `zipfile` reads it.

    Raises:
        ValueError: the directory is too long, or the file is not a zip file.
    """
    size = file.seek(0, os.SEEK_END)
    tail_size = min(size, _END.size + 0xFFFF)
    file.seek(size - tail_size)
    tail = file.read(tail_size)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or at + _END.size > len(tail):
        raise ValueError("it is not a zip file, or it is cut off")
    length = _END.unpack_from(tail, at)[5]
    place = size - tail_size + at - _LOCATOR.size
    if place >= 0:
        file.seek(place)
        magic, _disk, offset, _disks = _LOCATOR.unpack(file.read(_LOCATOR.size))
        if magic == b"PK\6\7" and offset + _END64.size <= size:
            file.seek(offset)
            length = max(length if length != 0xFFFFFFFF else 0, _END64.unpack(file.read(_END64.size))[8])
    if length > min(_LONGEST_DIRECTORY, size):
        raise ValueError(f"its directory has {length} bytes, at most {_LONGEST_DIRECTORY} are read")
    file.seek(0)
