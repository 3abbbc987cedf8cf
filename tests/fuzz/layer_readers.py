"""What is fuzzed of layers: a tar archive as a layer, and a kept index of one.

Checksums are put right before the reader sees the bytes; else nothing but the first check
would be tried.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import zlib

from blake3 import blake3

from hpcenv.image.content import tar_stream, tree
from hpcenv.image.convert import layer_stream, layers
from hpcenv.image.convert.layer_index import FORMAT
from hpcenv.image.convert.layers import LayerIndex, LayerLimits

from ..layer_cases import CASES, END, base, digest_of, header, padded, pax  # noqa: TID252 - run by python -m as well

# Small, so that no input takes long that only claims to be large.
_LIMITS = LayerLimits(entries=5_000, unpacked_bytes=2 << 20, metadata_bytes=1 << 20)
_NAMES = ("pax-records", "headers-of-every-form", "hard-links", "xattrs", "every-kind-over-every-kind", "times")
_INDEXED = ("devices-and-fifos", "xattrs", "hard-links", "opaque-twice")


def _sparse() -> bytes:
    """A small sparse file in each of its forms."""
    one, data = b"GNU.sparse.", bytes(512)
    old = header(b"old", b"S", size=512, magic=b"ustar  \0", prefix=bytes(41) + b"%011o\0%011o\0" % (1024, 512))
    old = old[:483] + b"%011o\0" % 4096 + old[495:]
    pairs = [
        (one + b"size", b"4096"),
        (one + b"numblocks", b"1"),
        (one + b"offset", b"512"),
        (one + b"numbytes", b"512"),
    ]
    listed = [(one + b"size", b"4096"), (one + b"map", b"0,256,1024,256"), (one + b"name", b"listed")]
    newest = [(one + b"major", b"1"), (one + b"minor", b"0"), (one + b"name", b"new"), (one + b"realsize", b"4096")]
    made = old + data + pax(pairs) + header(b"pairs", b"0", size=512) + data
    made += pax(listed) + header(b"x", b"0", size=512) + data
    return _repaired(made + pax(newest) + header(b"y", b"0", size=1024) + padded(b"1\n2048\n512\n") + data + END)


def _repaired(data: bytes) -> bytes:
    """Give every block that looks like a header the checksum that it should have."""
    out = bytearray(data)
    for at in range(0, len(out) - 511, 512):
        if out[at + 257 : at + 262] == b"ustar":
            out[at + 148 : at + 156] = b" " * 8
            out[at + 148 : at + 156] = b"%06o\0 " % sum(out[at : at + 512])
    return bytes(out)


LAYER_SEEDS = (*(CASES[name].layers()[-1] for name in _NAMES), _sparse())
LAYER_WORDS = (
    *(
        b"0",
        b"1",
        b"2",
        b"3",
        b"5",
        b"6",
        b"7",
        b"S",
        b"x",
        b"g",
        b"L",
        b"K",
        b"\0" * 512,
        b"ustar\x0000",
        b"ustar  \0",
    ),
    *(b"../", b"/", b"./", b".wh.", b".wh..wh..opq", b"/..", b"\xff" * 12, b"\x80" + b"\0" * 11, b"77777777777\0"),
    *(b"path=", b"linkpath=", b"size=", b"mtime=-", b"GNU.sparse.map=", b"GNU.sparse.major=1", b"SCHILY.xattr.user.a="),
    *(b"GNU.sparse.realsize=", b"GNU.sparse.offset=", b"9" * 30, b"\n", b"12 path=abc\n", b"etc", b"lib", b"bin/tool"),
)


def _layer(data: bytes, at: str) -> tuple[LayerIndex, bytes]:
    index = layers.index_layer(io.BytesIO(data), diff_id=digest_of(data), limits=_LIMITS)
    assert LayerIndex.from_bytes(index.to_bytes(), diff_id=index.diff_id, limits=_LIMITS) == index, at
    return index, data


_BASE = _layer(base(), "base")


def read_a_layer(data: bytes) -> None:
    """Index it, merge it over an ordinary layer, write the stream and read that again."""
    upper = _layer(_repaired(data), "upper")
    merged = layers.merge([_BASE[0], upper[0]], limits=_LIMITS)
    written = list(merged.written())
    tree.tree_digest(written)
    assert not any(b"/.wh." in b"/" + entry.path or b"/../" in b"/" + entry.path + b"/" for entry in written)
    out = io.BytesIO()
    layer_stream.emit(merged, lambda at: contextlib.nullcontext(io.BytesIO((_BASE, upper)[at][1])), out)
    reader, found = tar_stream.Reader([out.getvalue()]), {b"": None}
    for member in reader:
        found[member.name] = blake3(b"".join(reader.stored())).hexdigest() if member.kind == "file" else member.kind
    assert found.keys() == {entry.path for entry in written}
    assert all(path.rpartition(b"/")[0] in found for path in found if path), "a member without its directory"
    for entry in written:
        if entry.kind == "file":
            assert found[entry.path] in {entry.blake3, "hard-link"}


_DIFF_ID = digest_of(b"fuzz")


def _payload(name: str) -> bytes:
    layer = CASES[name].layers()[0]
    kept = layers.index_layer(io.BytesIO(layer), diff_id=digest_of(layer)).to_bytes()
    squeezed = kept.split(b"\n", 3)[3]
    return zlib.decompress(squeezed).replace(digest_of(layer).encode(), _DIFF_ID.encode())


INDEX_SEEDS = tuple(_payload(name) for name in _INDEXED)
INDEX_WORDS = (
    b"\0",
    b"/",
    b"..",
    b".",
    b"fdlhcbpwo",
    b"null",
    b"-1",
    b"[",
    b"]",
    b"{",
    b'"sections"',
    b"9" * 30,
    b"\xff" * 8,
)


def read_a_kept_index(data: bytes) -> None:
    """Load it, and do with it what is done with a good one; the layer itself is short."""
    packed = b"%d\n" % len(data) + zlib.compress(data, 1)
    head = b"hpcenv layer index %d\n" % FORMAT + hashlib.sha256(packed).hexdigest().encode() + b"\n"
    index = LayerIndex.from_bytes(head + packed, diff_id=_DIFF_ID, limits=_LIMITS)
    merged = layers.merge([_BASE[0], index], limits=_LIMITS)
    tree.tree_digest(merged.written())
    merged.size()
    layer_stream.emit(merged, lambda _: contextlib.nullcontext(io.BytesIO(bytes(1 << 20))), io.BytesIO())
