"""Write event files of TensorBoard: their frames, and events with one scalar.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only. A file is a sequence of TFRecord frames. Each frame has the
length, the masked CRC-32C of the length, an `Event` in protobuf, and the masked CRC-32C of the event, as tensorboard
2.21 writes them (`summary/writer/record_writer.py`, `compat/proto/event.proto`, `summary.proto`).
`reproduction/tensorboard.py` reads such files.
"""

from __future__ import annotations

import struct

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def first_frame(seconds: float) -> bytes:
    """Return the first frame of a file, which contains the version of the file's format."""
    return frame(_wall_time(seconds) + _part(3, b"brain.Event:2"))


def scalar_frame(tag: str, step: int, value: float, seconds: float) -> bytes:
    """Return the frame of one value. The value has the precision of a float32, as TensorBoard shows it."""
    try:
        number = struct.pack("<f", value)
    except OverflowError:
        number = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    of_value = _part(1, tag.encode("utf-8", "replace")) + _key(2, _FIXED32) + number
    return frame(_wall_time(seconds) + _key(2, _VARINT) + _varint(step) + _part(5, _part(1, of_value)))


def frame(event: bytes) -> bytes:
    """Return the frame of an event: its length, the event, and the two checksums."""
    length = struct.pack("<Q", len(event))
    return length + struct.pack("<I", masked_crc(length)) + event + struct.pack("<I", masked_crc(event))


def _wall_time(seconds: float) -> bytes:
    return _key(1, _FIXED64) + struct.pack("<d", seconds)


def _part(number: int, content: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(content)) + content


def _key(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


# -- CRC-32C ------------------------------------------------------------------------------


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ 0x82F63B78 if value & 1 else value >> 1
        table.append(value)
    return tuple(table)


_TABLE = _crc_table()


def masked_crc(data: bytes | memoryview) -> int:
    """Return the masked CRC-32C of a part of a frame (RFC 3720, B.4; masked as in tensorboard's `record_writer.py`)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
