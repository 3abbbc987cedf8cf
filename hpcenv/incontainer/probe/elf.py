"""The parts of a file that the dynamic loader reads.

Runs on: inside the image.
"""

from __future__ import annotations

import os


class Elf:
    """The data that the dynamic loader reads from a file before it maps the file. The file is untrusted input.

    Attributes:
        kind: class, byte order and machine; the loader skips files of another kind.
        constants: (offset, size) of the segments that are not writable and not executable.
    """

    __slots__ = (
        "_order",
        "_strings",
        "_versions",
        "build_id",
        "constants",
        "kind",
        "needed",
        "rpath",
        "runpath",
        "soname",
    )

    def __init__(self, descriptor: int) -> None:
        import struct

        head = os.pread(descriptor, 64, 0)
        if len(head) < 64 or head[:4] != b"\x7fELF" or head[4] not in (1, 2) or head[5] not in (1, 2):
            raise ValueError("not an ELF file")
        wide, order = head[4] == 2, "<" if head[5] == 1 else ">"
        machine = struct.unpack_from(order + "H", head, 18)[0]
        self.kind = (head[4], head[5], machine)
        if wide:
            at, size, count = struct.unpack_from(order + "Q", head, 32) + struct.unpack_from(order + "HH", head, 54)
        else:
            at, size, count = struct.unpack_from(order + "I", head, 28) + struct.unpack_from(order + "HH", head, 42)
        table = _pread(descriptor, size * min(count, 256), at)
        segments = [
            _segment(order, wide, table[i : i + size])
            for i in range(0, len(table) - 31, size)
            if size >= (32, 56)[wide]
        ]
        self._order = order
        self._strings = self._versions = (0, 0)
        self.soname = self.rpath = self.runpath = self.build_id = ""
        self.needed: list[str] = []
        self.constants = [(s[2], s[4]) for s in segments if s[0] == 1 and s[1] & 3 == 0]
        self._read_dynamic(descriptor, segments, order + ("qQ" if wide else "iI"))
        for kind, _, offset, _, length in segments:
            if kind == 4 and not self.build_id:
                self.build_id = _build_id(_pread(descriptor, min(length, 1 << 16), offset), order)

    def _read_dynamic(self, descriptor: int, segments: list[tuple[int, ...]], pair: str) -> None:
        import struct

        tags: list[tuple[int, int]] = []
        for kind, _, offset, _, length in segments:
            if kind == 2:
                data = _pread(descriptor, min(length, 1 << 16), offset)
                tags = list(
                    struct.iter_unpack(pair, data[: len(data) // struct.calcsize(pair) * struct.calcsize(pair)])
                )
                break
        if (0, 0) in tags:
            tags = tags[: tags.index((0, 0))]
        table = dict(tags)
        for kind, _, offset, address, length in segments:
            if kind == 1 and address <= table.get(5, -1) < address + length:  # DT_STRTAB
                self._strings = (offset + table[5] - address, min(table.get(10, 0), 64 << 20))

            if kind == 1 and address <= table.get(0x6FFFFFFE, -1) < address + length:  # DT_VERNEED, DT_VERNEEDNUM
                self._versions = (offset + table[0x6FFFFFFE] - address, min(table.get(0x6FFFFFFF, 0), 256))

        self.needed = [self._text(descriptor, value) for tag, value in tags if tag == 1][:256]
        self.soname = self._text(descriptor, table[14]) if 14 in table else ""
        self.runpath = self._text(descriptor, table[29]) if 29 in table else ""
        # With RUNPATH, RPATH is ignored (ld.so(8)).
        self.rpath = self._text(descriptor, table[15]) if 15 in table and 29 not in table else ""

    def _text(self, descriptor: int, index: int, *, most: int = 4096) -> str:
        data = os.pread(descriptor, most, self._strings[0] + index) if index < self._strings[1] else b""
        return os.fsdecode(data.partition(b"\0")[0])

    def needed_versions(self, descriptor: int) -> list[str]:
        """Return the names of the symbol versions that the file needs, such as GLIBC_2.34.

        The names are in the section .gnu.version_r (Linux Standard Base 5.0, Symbol Versioning). Weak versions are left
        out, because the loader only warns about them. At most 64 bytes of a name are read.

        Raises:
            ValueError: there are more names than a real library can have.
        """
        import struct

        found: list[str] = []
        data = _pread(descriptor, 1 << 16, self._versions[0]) if self._versions[1] else b""
        at = 0
        for _ in range(self._versions[1]):
            if at + 16 > len(data):
                break
            _, count, _, first, following = struct.unpack_from(self._order + "HHIII", data, at)
            name_at = at + first
            for _ in range(min(count, 1024)):
                if name_at + 16 > len(data):
                    break
                _, flags, _, name, step = struct.unpack_from(self._order + "IHHII", data, name_at)
                found += [self._text(descriptor, name, most=64)] if not flags & 2 else []
                if len(found) > 1024:
                    raise ValueError("it names more than 1024 versions")
                name_at += step
                if not step:
                    break
            at += following
            if not following:
                break
        return found

    def symbol_names(self, descriptor: int) -> bytes:
        return _pread(descriptor, self._strings[1], self._strings[0])


def _segment(order: str, wide: bool, row: bytes) -> tuple[int, ...]:
    """Return type, flags, offset in the file, address and size in the file of one program header."""
    import struct

    if wide:
        return struct.unpack_from(order + "IIQQ8xQ", row.ljust(56, b"\0"))
    kind, offset, address, _, size, _, flags = struct.unpack_from(order + "7I", row)
    return kind, flags, offset, address, size


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    if offset >= 1 << 62:
        raise ValueError("an offset that no file can have")
    return os.pread(descriptor, size, offset)


def _build_id(notes: bytes, order: str) -> str:
    import struct

    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from(order + "III", notes, at)
        start = at + 12 + (name_size + 3) // 4 * 4
        if kind == 3 and notes[at + 12 : at + 12 + name_size] == b"GNU\0":
            return notes[start : start + min(size, 64)].hex()
        at = start + (size + 3) // 4 * 4
    return ""
