"""Read all scalars of TensorBoard's event files, at full precision.

Runs on: LOGIN NODE. Standard library only. `records/event_file.py` describes the format. TensorBoard's own reader is
not used, because by default it keeps a random sample of 10,000 scalars for each tag. A file is untrusted, so its size,
its frames and its tags are limited.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcenv.records.event_file import masked_crc
from hpcenv.records.files import read_file

# Longer records contain images or graphs and no scalars, so they are skipped.
_LONGEST_EVENT = 64 << 10
_LONGEST_TAG = 200
MOST_TAGS = 1000

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FLOAT, _DOUBLE = 1, 2  # DT_FLOAT, DT_DOUBLE of types.proto


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """One value of one tag."""

    tag: str
    step: int
    value: float
    dtype: str


@dataclass(frozen=True, kw_only=True)
class EventFile:
    """The scalars of one file, in the order of the file.

    Attributes:
        problem: why reading stopped before the end of the file; empty if the whole file was read.
    """

    scalars: tuple[Scalar, ...]
    problem: str = ""


def read_events(path: Path) -> EventFile:
    """Return the scalars of an event file. Reading stops at an incomplete frame: a killed run may have written it.

    Raises:
        OSError: the file cannot be read, or is too large.
    """
    content = read_file(path, follow=False)
    found: list[Scalar] = []
    tags: set[str] = set()
    try:
        for event in _frames(content):
            for scalar in _scalars(event):
                tags.add(scalar.tag)
                if len(tags) > MOST_TAGS:
                    raise ValueError(f"it has more than {MOST_TAGS} tags")
                found.append(scalar)
    except ValueError as error:
        return EventFile(scalars=tuple(found), problem=str(error))
    return EventFile(scalars=tuple(found))


def _frames(content: bytes) -> Iterator[memoryview]:
    """Yield the events of a file that can contain scalars.

    Raises:
        ValueError: a frame is cut or damaged.
    """
    view, position = memoryview(content), 0
    while position < len(view):
        head = view[position : position + 12]
        if len(head) < 12:
            raise ValueError(f"the last record, at byte {position}, is cut")
        length, check = struct.unpack("<QI", head)
        if masked_crc(head[:8]) != check:
            raise ValueError(f"the record at byte {position} is damaged")
        start, end = position + 12, position + 12 + length
        if end + 4 > len(view):
            raise ValueError(f"the last record, at byte {position}, is cut")
        if length <= _LONGEST_EVENT:
            event = view[start:end]
            if masked_crc(event) != struct.unpack("<I", view[end : end + 4])[0]:
                raise ValueError(f"the record at byte {position} is damaged")
            yield event
        position = end + 4


def _scalars(event: memoryview) -> Iterator[Scalar]:
    step, summaries = 0, []
    for number, value in _fields(event):
        if number == 2 and isinstance(value, int):
            step = value - (1 << 64) if value >= 1 << 63 else value
        elif number == 5 and isinstance(value, memoryview):
            summaries.append(value)
    for summary in summaries:
        for number, value in _fields(summary):
            if number == 1 and isinstance(value, memoryview):
                yield from _scalar(value, step)


def _scalar(message: memoryview, step: int) -> Iterator[Scalar]:
    """Yield the scalar of a `Summary.Value`: its `simple_value`, or its tensor with one element."""
    tag, found = "", None
    for number, value in _fields(message):
        if number == 1 and isinstance(value, memoryview):
            tag = bytes(value[:_LONGEST_TAG]).decode("utf-8", errors="replace")
        elif number == 2 and isinstance(value, bytes) and len(value) == 4:
            found = struct.unpack("<f", value)[0], "float32"
        elif number == 8 and isinstance(value, memoryview):
            found = _tensor(value) or found
    if found is not None:
        yield Scalar(tag=tag, step=step, value=found[0], dtype=found[1])


def _tensor(message: memoryview) -> tuple[float, str] | None:
    """Return the number in a `TensorProto` with one element of type float or double; None for another tensor."""
    kind, raw = 0, b""
    for number, value in _fields(message):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number in (4, 5, 6) and isinstance(value, (memoryview, bytes)):
            raw = bytes(value)
    if kind == _FLOAT and len(raw) == 4:
        return struct.unpack("<f", raw)[0], "float32"
    if kind == _DOUBLE and len(raw) == 8:
        return struct.unpack("<d", raw)[0], "float64"
    return None


def _fields(message: memoryview) -> Iterator[tuple[int, int | bytes | memoryview]]:
    """Yield number and value of each field of a protobuf message. A value is an int, bytes, or a part of the message.

    Raises:
        ValueError: the bytes are not such a message.
    """
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, position = _varint(message, position)
            yield number, value
            continue
        if kind == _BYTES:
            length, position = _varint(message, position)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError("a record is not an event of TensorBoard")
        part = message[position : position + length]
        if len(part) != length:
            raise ValueError("a record is not an event of TensorBoard")
        yield number, part if kind == _BYTES else bytes(part)
        position += length


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(message):
            break
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a record is not an event of TensorBoard")
