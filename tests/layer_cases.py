"""Images whose layers are awkward or hostile, made on the spot, as OCI layouts.

`CASES` are legal images with everything that layers can hold; other tests run over them by
name. `HOSTILE` are images that must be refused, or that must stay inside their own root.
Shared by the unit tests of layers, of the squashfs reader and of the whole conversion.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import struct
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from hpcenv.image.content.tree import TreeEntry

OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar"
TIME = 1_700_000_000


# -- members ------------------------------------------------------------------------------


def member(name: bytes, kind: bytes, **said: object) -> tarfile.TarInfo:
    """One member; tarfile takes names as text, so other bytes travel as surrogates."""
    made = tarfile.TarInfo(os.fsdecode(name))
    made.type = kind
    made.mtime = TIME
    made.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    for key, value in said.items():
        setattr(made, key, value)
    return made


def file(name: bytes, data: bytes = b"", **said: object) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, tarfile.REGTYPE, size=len(data), **said), data


def directory(name: bytes, **said: object) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, tarfile.DIRTYPE, **said), b""


def symlink(name: bytes, target: bytes, **said: object) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, tarfile.SYMTYPE, linkname=os.fsdecode(target), mode=0o777, **said), b""


def hard_link(name: bytes, target: bytes, **said: object) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, tarfile.LNKTYPE, linkname=os.fsdecode(target), **said), b""


def device(name: bytes, kind: bytes, major: int, minor: int, **said: object) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, kind, devmajor=major, devminor=minor, **said), b""


def fifo(name: bytes, **said: object) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, tarfile.FIFOTYPE, **said), b""


def whiteout(name: bytes) -> tuple[tarfile.TarInfo, bytes]:
    parent, slash, last = name.rpartition(b"/")
    return file(parent + slash + b".wh." + last)


def opaque(name: bytes) -> tuple[tarfile.TarInfo, bytes]:
    return file((name + b"/" if name else b"") + b".wh..wh..opq")


def tar(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    """An archive of these members; GNU form, so that names of any bytes come through."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def header(name: bytes, flag: bytes, *, size: int | bytes = 0, magic: bytes = b"ustar\x0000", **said: bytes) -> bytes:
    """A header block written by hand: for what tarfile does not write."""
    fields = {"mode": b"0000644\0", "uid": b"0000000\0", "gid": b"0000000\0", "mtime": b"%011o\0" % TIME}
    fields |= {"link": b"", "prefix": b"", "major": b"0000000\0", "minor": b"0000000\0", **said}
    length = size if isinstance(size, bytes) else b"%011o\0" % size
    block = struct.pack(
        "100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12x",
        *(name, fields["mode"], fields["uid"], fields["gid"], length, fields["mtime"], b" " * 8, flag, fields["link"]),
        *(magic, b"", b"", fields["major"], fields["minor"], fields["prefix"]),
    )
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def record(key: bytes, value: bytes) -> bytes:
    """A pax record."""
    length = len(key) + len(value) + 3
    while length != len(b"%d %s=%s\n" % (length, key, value)):
        length = len(b"%d %s=%s\n" % (length, key, value))
    return b"%d %s=%s\n" % (length, key, value)


def pax(records: list[tuple[bytes, bytes]], flag: bytes = b"x") -> bytes:
    data = b"".join(record(key, value) for key, value in records)
    return header(b"pax", flag, size=len(data)) + padded(data)


END = bytes(1024)


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


# -- images -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """One image.

    Attributes:
        layers: makes the uncompressed layers, lowest first.
        packed: how each is compressed: `gzip`, `zstd`, `plain`, `gzip-members`, `zstd-frames`.
        docker: docker schema 2 media types instead of OCI's.
        untimed: directories that umoci leaves with the time of unpacking: those that no entry
            names, and those in which it makes or removes something after it set their time.
        unlike_umoci: why umoci 0.4.7 refuses what we read, or what it makes of it.
        same_as: then, the case that must give the same tree.
    """

    layers: Callable[[], list[bytes]]
    packed: tuple[str, ...] = ("gzip",)
    docker: bool = False
    untimed: frozenset[bytes] = field(default_factory=frozenset)
    unlike_umoci: str = ""
    same_as: str = ""


def compress(data: bytes, how: str) -> bytes:
    if how == "gzip":
        return gzip.compress(data, 1, mtime=0)
    if how == "gzip-members":
        half = len(data) // 2
        return gzip.compress(data[:half], 1, mtime=0) + gzip.compress(data[half:], 9, mtime=0)
    if how.startswith("zstd"):
        import zstandard

        packer = zstandard.ZstdCompressor(level=3)
        if how == "zstd":
            return packer.compress(data)
        half = len(data) // 2
        # A frame to be skipped between two frames, as zstd:chunked layers have at their end.
        between = struct.pack("<II", 0x184D2A50, 5) + b"hello"
        return packer.compress(data[:half]) + between + packer.compress(data[half:]) + between
    assert how in {"plain", "as-is"}, how
    return data


def media_type(how: str, *, docker: bool) -> str:
    kind = "gzip" if how == "as-is" else how.split("-")[0]
    if docker:
        return DOCKER_LAYER if kind == "plain" else f"{DOCKER_LAYER}.{kind}"
    return OCI_LAYER if kind == "plain" else f"{OCI_LAYER}+{kind}"


def write_layout(
    folder: Path,
    layers: list[bytes],
    *,
    packed: tuple[str, ...] = ("gzip",),
    docker: bool = False,
    config: dict[str, object] | None = None,
    tag: str = "latest",
    diff_ids: list[str] | None = None,
) -> str:
    """Write an OCI layout with one image; return the digest of its manifest.

    `packed` may be `as-is` for layers that are compressed already, with their diff_ids.
    """
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def keep(data: bytes) -> tuple[str, int]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return f"sha256:{digest}", len(data)

    described = []
    for at, layer in enumerate(layers):
        how = packed[at % len(packed)]
        digest, size = keep(compress(layer, how))
        described.append({"mediaType": media_type(how, docker=docker), "digest": digest, "size": size})
    image = {
        "created": "2023-11-14T22:13:20Z",
        "architecture": "amd64",
        "os": "linux",
        "config": config or {},
        "rootfs": {"type": "layers", "diff_ids": diff_ids or [digest_of(layer) for layer in layers]},
        "history": [{"created_by": f"layer {at}"} for at in range(len(layers))],
    }
    kinds = {
        True: (
            "application/vnd.docker.distribution.manifest.v2+json",
            "application/vnd.docker.container.image.v1+json",
        ),
        False: ("application/vnd.oci.image.manifest.v1+json", "application/vnd.oci.image.config.v1+json"),
    }[docker]
    digest, size = keep(json.dumps(image).encode())
    manifest = {
        "schemaVersion": 2,
        "mediaType": kinds[0],
        "config": {"mediaType": kinds[1], "digest": digest, "size": size},
        "layers": described,
    }
    digest, size = keep(json.dumps(manifest).encode())
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    named = {"mediaType": kinds[0], "digest": digest, "size": size}
    named["annotations"] = {"org.opencontainers.image.ref.name": tag}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
    return digest


def write_case(folder: Path, case: Case) -> str:
    """Write a case as it is meant; return the digest of its manifest."""
    return write_layout(folder, case.layers(), packed=case.packed, docker=case.docker)


# -- legal images -------------------------------------------------------------------------


def base() -> bytes:
    """What most cases start from."""
    return tar(
        directory(b".", mode=0o755),
        directory(b"bin"),
        file(b"bin/tool", b"#!/bin/sh\n", mode=0o755),
        file(b"bin/other", b"other"),
        directory(b"etc", mode=0o750, uid=5, gid=6),
        file(b"etc/app.conf", b"a=1\n"),
        directory(b"etc/app.d"),
        file(b"etc/app.d/one", b"1"),
        file(b"etc/app.d/two", b"22"),
        directory(b"etc/app.d/deep"),
        file(b"etc/app.d/deep/three", b"333"),
        symlink(b"lib", b"usr/lib"),
        directory(b"usr"),
        directory(b"usr/lib"),
        file(b"usr/lib/libc.so", b"\x7fELF"),
    )


def over(*members: tuple[tarfile.TarInfo, bytes]) -> Callable[[], list[bytes]]:
    return lambda: [base(), tar(*members)]


def alone(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.GNU_FORMAT) -> Callable[[], list[bytes]]:
    return lambda: [tar(directory(b"."), *members, form=form)]


def _hard_links() -> list[bytes]:
    return [
        tar(
            directory(b"d"),
            file(b"d/b", b"content of three", uid=7, mode=0o640),
            hard_link(b"d/a", b"d/b"),
            hard_link(b"z", b"./d/a"),
            file(b"one", b"one"),
            hard_link(b"two", b"/one"),
            symlink(b"sym", b"one"),
            hard_link(b"sym2", b"sym"),
            device(b"null", tarfile.CHRTYPE, 1, 3),
            hard_link(b"null2", b"null"),
        ),
    ]


def _sparse(form: str, version: str = "") -> Callable[[], list[bytes]]:
    def make() -> list[bytes]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _make_sparse(folder)
            words = ["tar", "--sparse", f"--format={form}", "--sort=name", "--owner=0", "--group=0", "--numeric-owner"]
            words += [f"--sparse-version={version}"] if version else []
            words += ["--pax-option=delete=atime,delete=ctime"] if form == "pax" else []
            return [subprocess.run([*words, "-C", name, "-c", "."], capture_output=True, check=True).stdout]

    return make


def _make_sparse(folder: Path) -> None:
    """Files with holes at every place, one with more pieces than a header holds."""
    for name, size, pieces in (
        ("hole", 300_000, []),
        ("start", 300_000, [0]),
        ("middle", 300_000, [131_072]),
        ("end", 262_144, [258_048]),
        ("many", 4_194_304, range(0, 4_194_304, 65_536)),
        ("dense", 10_000, [0, 4096, 8192]),
    ):
        with (folder / name).open("wb") as made:
            made.truncate(size)
            for at in pieces:
                made.seek(at)
                made.write(b"%08d" % at * 16)
            made.truncate(size)
        os.utime(folder / name, (TIME, TIME))
    os.chmod(folder, 0o755)
    os.utime(folder, (TIME, TIME))


def _formats() -> list[bytes]:
    """The same kinds of members in every form of header, and one without an end."""
    v7 = header(b"old/", b"\0", magic=b"", mode=b"0000755\0") + header(b"old/file", b"\0", size=3, magic=b"")
    v7 += padded(b"old")
    star = header(b"file", b"0", size=4, prefix=b"of-star\0".ljust(131, b"\0") + b"00000000000 ")
    star = _signed_again(star[:508] + b"tar\0") + padded(b"star")
    ustar = header(b"file", b"0", size=5, prefix=b"posix/" + b"p" * 100) + padded(b"posix")
    spaces = header(b"spaces", b"0", size=b"          6\0", mode=b"   644 \0", uid=b"     1\0 ") + padded(b"spaces")
    large = header(b"large-owner", b"0", magic=b"ustar  \0", uid=b"\x80" + (70_000_000).to_bytes(7, "big"))
    return [tar(directory(b"."))[:512] + v7 + star + ustar + spaces + large]


def _signed_again(block: bytes) -> bytes:
    empty = block[:148] + b" " * 8 + block[156:]
    return block[:148] + b"%06o\0 " % sum(empty) + block[156:]


def _pax() -> list[bytes]:
    def one(name: bytes, records: list[tuple[bytes, bytes]], data: bytes = b"", flag: bytes = b"0") -> bytes:
        return pax(records) + header(name, flag, size=len(data)) + padded(data)

    return [
        tar(directory(b"."))[:512]
        + one(b"short", [(b"path", b"name-of-" + b"x" * 200)], b"long name")
        + one(b"sized", [(b"size", b"3"), (b"uid", b"3000000"), (b"gid", b"4000000")])
        + padded(b"abc")
        + one(b"late", [(b"mtime", b"1700000001.999999999"), (b"atime", b"1.5"), (b"comment", b"a\nb = c")])
        + one(b"early", [(b"mtime", b"-1.25")])
        + one(b"owner-by-name", [(b"uname", b"alice"), (b"gname", b"users")])
        + one(b"link", [(b"linkpath", b"/" + b"t" * 300)], flag=b"2")
        + one(b"bytes", [(b"path", b"not\xff utf\n8")], b"x")
        + one(b"emptied", [(b"path", b"")], b"y")
        + END
    ]


def capability() -> bytes:
    """`security.capability` of cap_net_bind_service=ep, revision 2."""
    return struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)


def _xattrs() -> list[bytes]:
    def one(name: bytes, flag: bytes, *pairs: tuple[bytes, bytes], link: bytes = b"") -> bytes:
        return pax([(b"SCHILY.xattr." + key, value) for key, value in pairs]) + header(name, flag, link=link)

    return [
        tar(directory(b"."))[:512]
        + one(b"capable", b"0", (b"security.capability", capability()))
        + one(b"user", b"0", (b"user.text", b"hello"), (b"user.binary", bytes(range(256))), (b"user.empty", b""))
        + one(b"trusted", b"0", (b"trusted.of.somebody", b"\0\n=\0"), (b"trusted.overlay.opaque", b"y"))
        + one(b"labelled", b"0", (b"security.selinux", b"system_u:object_r:bin_t:s0\0"))
        + one(b"folder", b"5", (b"user.of.folder", b"1"))
        + END
    ]


def _no_end() -> list[bytes]:
    return [tar(directory(b"."), file(b"a", b"a"))[: 3 * 512]]


def _kinds_replaced() -> list[bytes]:
    kinds = {
        b"file": lambda name: [file(name, b"file")],
        b"dir": lambda name: [directory(name), file(name + b"/inside", b"x")],
        b"link": lambda name: [symlink(name, b"target")],
        b"fifo": lambda name: [fifo(name)],
        b"node": lambda name: [device(name, tarfile.BLKTYPE, 8, 1)],
    }
    lower, upper = [directory(b"."), directory(b"target"), file(b"target/stays", b"here")], []
    for one, below in kinds.items():
        for two, above in kinds.items():
            lower += below(one + b"-to-" + two)
            upper += above(one + b"-to-" + two)
    return [tar(*lower), tar(*upper)]


def _many_names() -> list[bytes]:
    names = [b"a", b"a-b", b"a.b", b"a0", b"-dash", b" space ", b"tab\there", b"new\nline", b"back\\slash", b'quo"te']
    names += [
        b"\xff\xfe",
        b"caf\xe9",
        "café".encode(),
        b"star*",
        b"[x]",
        b"$HOME",
        b"#",
        b"~",
        b"\x01\x7f",
        b"%s",
        b"...",
    ]
    names += [b"..a", b"a..", b"n" * 255, b"n" * 99, b"n" * 100, b"n" * 101, b".", b"wh.", b".w"]
    names.remove(b".")
    members = [directory(b".")]
    for name in sorted(names):
        members += [file(b"f/" + name, name), directory(b"d/" + name), file(b"d/" + name + b"/in", b"")]
        members += [symlink(b"l/" + name, name)]
    deep = b"/".join([b"deep%02d" % level + b"d" * 90 for level in range(12)])
    members += [
        file(deep + b"/end", b"deep"),
        symlink(b"to-deep", deep + b"/end"),
        hard_link(b"deep-link", deep + b"/end"),
    ]
    return [tar(directory(b"f"), directory(b"d"), directory(b"l"), *members)]


_DEEP = [b"/".join([b"deep%02d" % level + b"d" * 90 for level in range(top)]) for top in range(1, 13)]

CASES: dict[str, Case] = {
    "one-layer": Case(layers=lambda: [base()]),
    "two-plain-layers": Case(layers=over(file(b"new", b"n")), packed=("plain",)),
    "zstd": Case(layers=over(file(b"new", b"n")), packed=("zstd",)),
    "zstd-frames": Case(layers=over(file(b"new", b"n")), packed=("zstd-frames",)),
    "gzip-members": Case(layers=over(file(b"new", b"n")), packed=("gzip-members",)),
    "mixed-compression": Case(
        layers=lambda: [base(), tar(file(b"two", b"2")), tar(file(b"three", b"3"))], packed=("gzip", "zstd", "plain")
    ),
    "docker-schema-2": Case(layers=over(whiteout(b"bin/tool")), docker=True),
    "empty-layer": Case(layers=lambda: [base(), END, tar(file(b"after", b"x"))], packed=("gzip", "plain")),
    # Whiteouts.
    "whiteout-file": Case(layers=over(whiteout(b"bin/tool"))),
    "whiteout-directory": Case(layers=over(whiteout(b"etc/app.d"))),
    "whiteout-symlink": Case(layers=over(whiteout(b"lib"))),
    "whiteout-nothing": Case(layers=over(whiteout(b"no/such/file"), whiteout(b"bin/nor-this"))),
    "whiteout-then-entry": Case(layers=over(whiteout(b"etc/app.conf"), file(b"etc/app.conf", b"new"))),
    "entry-then-whiteout": Case(layers=over(file(b"etc/app.conf", b"new"), whiteout(b"etc/app.conf"))),
    "directory-made-again": Case(
        layers=over(whiteout(b"etc/app.d"), directory(b"etc/app.d", mode=0o700), file(b"etc/app.d/new", b"n"))
    ),
    "whiteout-after-directory-made-again": Case(
        layers=over(directory(b"etc/app.d", mode=0o700), file(b"etc/app.d/new", b"n"), whiteout(b"etc/app.d")),
        untimed=frozenset({b"etc/app.d"}),
    ),
    "whiteout-two-layers-up": Case(
        layers=lambda: [base(), tar(file(b"bin/tool", b"second")), tar(whiteout(b"bin/tool"))]
    ),
    "whiteout-and-back": Case(
        layers=lambda: [base(), tar(whiteout(b"bin/tool")), tar(file(b"bin/tool", b"third", uid=3))]
    ),
    "opaque-first": Case(layers=over(directory(b"etc/app.d"), opaque(b"etc/app.d"), file(b"etc/app.d/new", b"n"))),
    "opaque-last": Case(layers=over(directory(b"etc/app.d"), file(b"etc/app.d/new", b"n"), opaque(b"etc/app.d"))),
    "opaque-only": Case(layers=over(opaque(b"etc/app.d"))),
    "opaque-keeps-its-own-depths": Case(
        layers=over(
            directory(b"etc/app.d"),
            directory(b"etc/app.d/deep"),
            file(b"etc/app.d/deep/four", b"4"),
            opaque(b"etc/app.d"),
        ),
        untimed=frozenset({b"etc/app.d/deep"}),
    ),
    "opaque-root": Case(layers=over(opaque(b""), directory(b"only"), file(b"only/this", b"x"))),
    "opaque-twice": Case(
        layers=lambda: [
            base(),
            tar(directory(b"etc/app.d"), opaque(b"etc/app.d"), file(b"etc/app.d/second", b"2")),
            tar(directory(b"etc/app.d"), opaque(b"etc/app.d"), file(b"etc/app.d/third", b"3")),
        ]
    ),
    "aufs-names": Case(
        layers=over(file(b".wh..wh.aufs"), file(b"bin/.wh..wh.orph"), file(b"real", b"r")),
    ),
    # One kind over another.
    "every-kind-over-every-kind": Case(layers=_kinds_replaced),
    "file-over-directory-and-back": Case(
        layers=lambda: [
            base(),
            tar(file(b"etc/app.d", b"now a file")),
            tar(directory(b"etc/app.d", mode=0o711), file(b"etc/app.d/again", b"x")),
        ]
    ),
    "directory-over-directory": Case(layers=over(directory(b"etc", mode=0o1777, uid=9, gid=8, mtime=TIME + 5))),
    "root-attributes": Case(
        layers=lambda: [tar(directory(b"./", mode=0o711, uid=3, gid=4)), tar(file(b"a", b""))],
    ),
    "root-never-named": Case(layers=lambda: [tar(file(b"a", b"a"))], untimed=frozenset({b""})),
    "missing-parents": Case(
        layers=lambda: [tar(directory(b"."), file(b"x/y/z/file", b"f"), directory(b"x", mode=0o700))],
        untimed=frozenset({b"", b"x/y", b"x/y/z"}),
    ),
    "twice-in-one-layer": Case(
        layers=lambda: [
            tar(
                directory(b"."),
                file(b"a", b"first"),
                file(b"a", b"last", mode=0o600),
                directory(b"d"),
                file(b"d/x", b""),
                directory(b"d", mode=0o700),
            )
        ],
    ),
    # Hard links.
    "hard-links": Case(layers=_hard_links, untimed=frozenset({b""})),
    "hard-link-to-lower-layer": Case(layers=over(hard_link(b"bin/again", b"bin/tool"))),
    "hard-link-target-replaced": Case(
        layers=lambda: [base(), tar(hard_link(b"again", b"bin/tool")), tar(file(b"bin/tool", b"changed"))]
    ),
    "hard-link-target-hidden": Case(
        layers=lambda: [base(), tar(hard_link(b"again", b"bin/tool")), tar(whiteout(b"bin/tool"))]
    ),
    "hard-link-group-loses-one": Case(
        layers=lambda: [*_hard_links(), tar(whiteout(b"d/a"), file(b"one", b"other content"))],
        untimed=frozenset({b""}),
    ),
    "hard-link-over-directory": Case(layers=over(hard_link(b"etc/app.d", b"bin/tool"))),
    "hard-link-renames": Case(layers=over(hard_link(b"moved", b"bin/tool"), whiteout(b"bin/tool"))),
    "hard-link-says-other-attributes": Case(
        layers=over(hard_link(b"again", b"bin/tool", mode=0o600, uid=77, mtime=TIME + 99))
    ),
    "hard-link-through-symlink": Case(layers=over(hard_link(b"c", b"lib/libc.so"))),
    # Symbolic links on the way.
    "below-symlink": Case(layers=over(file(b"lib/new.so", b"n"), directory(b"lib/sub"), file(b"lib/sub/x", b"x"))),
    "below-symlink-chain": Case(
        layers=over(
            symlink(b"one", b"two"),
            symlink(b"two", b"bin/../three"),
            symlink(b"three", b"/etc/app.d"),
            file(b"one/in", b"x"),
        )
    ),
    "below-dangling-symlink": Case(
        layers=over(symlink(b"gone", b"not/there"), file(b"gone/file", b"x")),
        untimed=frozenset({b"", b"not", b"not/there"}),
    ),
    "whiteout-below-symlink": Case(layers=over(whiteout(b"lib/libc.so"))),
    "symlink-becomes-directory": Case(layers=over(directory(b"lib"), file(b"lib/own", b"x"))),
    "directory-becomes-symlink": Case(layers=over(symlink(b"etc", b"bin"), file(b"etc/through", b"x"))),
    "symlink-targets": Case(
        layers=alone(
            symlink(b"abs", b"/usr/bin/x"),
            symlink(b"up", b"../../../../etc/passwd"),
            symlink(b"self", b"self"),
            symlink(b"dot", b"."),
            symlink(b"odd", b"\xff\n x"),
            symlink(b"long", b"../" * 100 + b"x" * 200),
            symlink(b"long-abs", b"/" + b"x/" * 100),
        )
    ),
    # Names.
    "names": Case(layers=_many_names, untimed=frozenset({b"", *_DEEP})),
    "names-not-normal": Case(
        layers=alone(
            file(b"/absolute", b"1"),
            file(b"./dot", b"2"),
            directory(b"d/"),
            file(b"d/./e", b"3"),
            file(b"d/../back", b"4"),
            file(b"d//twice", b"5"),
            file(b"./d/x/../../up", b"6"),
        ),
    ),
    # Attributes.
    "modes": Case(
        layers=alone(
            *(
                file(b"m%04o" % mode, b"x", mode=mode)
                for mode in (0, 0o111, 0o222, 0o4755, 0o2755, 0o6711, 0o1644, 0o7777)
            ),
            *(directory(b"d%04o" % mode, mode=mode) for mode in (0, 0o500, 0o555, 0o1777, 0o2775, 0o3777)),
            file(b"d0500/in", b"in"),
            file(b"d0000/in", b"in"),
        )
    ),
    "owners": Case(
        layers=alone(
            file(b"a", b"", uid=1, gid=2),
            file(b"big", b"", uid=2_097_152, gid=4_294_967_294),
            symlink(b"l", b"x", uid=33, gid=34),
            directory(b"d", uid=65_534, gid=65_534),
        )
    ),
    "setuid-with-owner": Case(layers=alone(file(b"su", b"#!", mode=0o4755, uid=10, gid=20))),
    "times": Case(
        layers=alone(
            file(b"zero", b"", mtime=0),
            file(b"before-1970", b"", mtime=-86_400),
            file(b"in-2038", b"", mtime=2**31),
            file(b"in-2106", b"", mtime=2**32 + 5),
        )
    ),
    "devices-and-fifos": Case(
        layers=alone(
            directory(b"dev"),
            device(b"dev/null", tarfile.CHRTYPE, 1, 3, mode=0o666),
            device(b"dev/sda1", tarfile.BLKTYPE, 8, 1, mode=0o660, gid=6),
            device(b"dev/large", tarfile.CHRTYPE, 0x1FF, 0x3FFFF, mode=0o600),
            fifo(b"dev/pipe", mode=0o622, uid=4),
            device(b"elsewhere", tarfile.CHRTYPE, 5, 1, mode=0o620),
            fifo(b"pipe", mode=0o644),
        )
    ),
    "xattrs": Case(layers=_xattrs),
    "xattrs-replaced": Case(layers=lambda: [*_xattrs(), tar(file(b"capable", b"none now"), directory(b"folder"))]),
    "empty-files": Case(layers=alone(*(file(b"e%d" % at) for at in range(20)), file(b"last", b"not empty"))),
    "sizes-around-blocks": Case(
        layers=alone(
            *(file(b"s%d" % size, b"x" * size) for size in (1, 511, 512, 513, 1024, 131_071, 131_072, 131_073))
        )
    ),
    "same-content": Case(layers=alone(*(file(b"c%d" % at, b"same" * 40_000) for at in range(4)))),
    # Forms of archives.
    "headers-of-every-form": Case(
        layers=_formats, untimed=frozenset({b"", b"of-star", b"posix", b"posix/" + b"p" * 100})
    ),
    "contiguous-file": Case(
        layers=lambda: [tar(directory(b"."))[:512] + header(b"c", b"7", size=2) + padded(b"ok") + END],
        unlike_umoci="refuses the type `7`, which POSIX ustar says is to be read as a regular file",
        same_as="ordinary-file",
    ),
    "ordinary-file": Case(layers=alone(file(b"c", b"ok"))),
    "global-pax-header": Case(
        layers=lambda: [
            tar(directory(b"."))[:512]
            + pax([(b"comment", b"of git archive")], b"g")
            + header(b"c", b"0", size=2)
            + padded(b"ok")
            + END
        ],
        unlike_umoci="refuses the type `g`; POSIX pax has it for all members that follow, git archive writes it",
        same_as="ordinary-file",
    ),
    "aufs-directory": Case(
        layers=lambda: [
            tar(directory(b"."), file(b"c", b"ok"), directory(b".wh..wh.plnk"), file(b".wh..wh.plnk/12.34", b"x"))
        ],
        unlike_umoci="shows `.wh..wh.plnk`; layer.md: names that begin with .wh. cannot exist in an image",
        same_as="ordinary-file",
    ),
    "hard-link-renames-whiteout-first": Case(
        layers=over(whiteout(b"bin/tool"), hard_link(b"moved", b"bin/tool")),
        unlike_umoci="takes members in order; layer.md: whiteouts count regardless of where in a layer they stand",
        same_as="hard-link-renames",
    ),
    "pax-records": Case(layers=_pax),
    "no-end-blocks": Case(layers=_no_end),
    # Image trial 8: umoci and apptainer build take it.
    "end-in-the-padding": Case(layers=lambda: [base(), tar(file(b"last", b"x" * 700))[: 512 + 700]], packed=("plain",)),
    "bytes-after-the-end": Case(layers=lambda: [base() + b"rest of the last record".ljust(512, b"\0")]),
    "sparse-gnu": Case(
        layers=_sparse("gnu"),
        unlike_umoci="refuses the type `S` (layer.md: sparse files SHOULD NOT be used)",
        same_as="sparse-pax-1.0",
    ),
    "sparse-pax-0.0": Case(layers=_sparse("pax", "0.0")),
    "sparse-pax-0.1": Case(layers=_sparse("pax", "0.1")),
    "sparse-pax-1.0": Case(layers=_sparse("pax", "1.0")),
}


# -- hostile images -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """An image that wants more than it may have.

    Attributes:
        blobs: makes the layers as (blob, diff_id).
        says: what the refusal's first line must match; empty for an image that is legal and contained.
        contained: then, paths that its tree must have, with their content.
        limits: `NAME=NUMBER` words under which a small sample of the attack is refused.
    """

    blobs: Callable[[], list[tuple[bytes, str]]]
    says: str = ""
    contained: dict[bytes, bytes] = field(default_factory=dict)
    limits: tuple[str, ...] = ()


def as_blobs(*layers: bytes, how: str = "gzip") -> Callable[[], list[tuple[bytes, str]]]:
    return lambda: [(compress(layer, how), digest_of(layer)) for layer in layers]


def _of(*members: tuple[tarfile.TarInfo, bytes]) -> Callable[[], list[tuple[bytes, str]]]:
    return lambda: as_blobs(tar(directory(b"."), *members))()


def empty_files(count: int, folders: int = 1000) -> list[tuple[bytes, str]]:
    """One layer with that many empty files, spread over some folders, without ever holding it.

    A template, of which name and checksum change.
    """
    template = header(b"d/000/0000000", b"0")
    bare = sum(template[:148] + b" " * 8 + template[156:]) - sum(b"d/000/0000000")
    middle, end = template[13:148], template[156:]

    def parts() -> Iterator[bytes]:
        for start in range(0, count, 4096):
            names = [b"d/%03d/%07d" % (at % folders, at) for at in range(start, min(start + 4096, count))]
            yield b"".join([name + middle + b"%06o\0 " % (bare + sum(name)) + end for name in names])
        yield END

    return _streamed(parts())


def bomb(size: int, how: str = "gzip") -> list[tuple[bytes, str]]:
    """One file of zeros that gzip packs a thousand times, without ever holding it."""
    step = 16 * 1024 * 1024
    count = -(-size // step)
    head = header(b"zeros", b"0", size=b"\x80" + (count * step).to_bytes(11, "big"), magic=b"ustar  \0")
    zeros = bytes(step)
    summed = hashlib.sha256(head)
    for _ in range(count):
        summed.update(zeros)
    summed.update(END)
    part = gzip.compress(zeros, 9, mtime=0) if how == "gzip" else compress(zeros, how)
    return [(compress(head, how) + part * count + compress(END, how), "sha256:" + summed.hexdigest())]


def _streamed(parts: Iterator[bytes]) -> list[tuple[bytes, str]]:
    """Return a layer that is made and packed piece by piece."""
    packer, summed, out = zlib.compressobj(1, zlib.DEFLATED, 31), hashlib.sha256(), []
    for part in parts:
        summed.update(part)
        out.append(packer.compress(part))
    return [(b"".join(out) + packer.flush(), "sha256:" + summed.hexdigest())]


def _cut(how: str) -> Callable[[], list[tuple[bytes, str]]]:
    def make() -> list[tuple[bytes, str]]:
        layer = base() + bytes(20_000)
        blob = compress(layer, how)
        return [(blob[: len(blob) // 2], digest_of(layer))]

    return make


def _raw(*blocks: bytes) -> Callable[[], list[tuple[bytes, str]]]:
    return as_blobs(tar(directory(b"."))[:512] + b"".join(blocks) + END)


def _sparse_claim(size: int, pieces: bytes) -> bytes:
    records = [(b"GNU.sparse.size", b"%d" % size), (b"GNU.sparse.map", pieces), (b"GNU.sparse.name", b"hole")]
    return pax(records) + header(b"hole", b"0", size=512) + bytes(512)


HOSTILE: dict[str, Hostile] = {
    "name-climbs": Hostile(blobs=_of(file(b"../../etc/passwd", b"x")), says="points outside the image"),
    "name-climbs-from-root": Hostile(blobs=_of(file(b"/../etc/passwd", b"x")), says="points outside the image"),
    "name-climbs-through-directories": Hostile(
        blobs=_of(file(b"a/b/../../../x", b"x")), says="points outside the image"
    ),
    "name-climbs-in-pax": Hostile(
        blobs=_raw(pax([(b"path", b"../../x")]), header(b"innocent", b"0")), says="points outside the image"
    ),
    "whiteout-climbs": Hostile(blobs=_of(file(b"../.wh.x")), says="points outside the image"),
    "whiteout-of-the-parent": Hostile(blobs=_of(file(b"a/.wh...")), says="names no file"),
    "whiteout-of-the-directory": Hostile(blobs=_of(file(b"a/.wh..")), says="names no file"),
    "hard-link-climbs": Hostile(blobs=_of(hard_link(b"x", b"../../../etc/shadow")), says="points outside the image"),
    "hard-link-outside": Hostile(blobs=_of(hard_link(b"x", b"/etc/shadow")), says="not in the image"),
    "hard-link-through-symlink-outside": Hostile(
        blobs=_of(symlink(b"out", b"/etc"), hard_link(b"x", b"out/shadow")), says="not in the image"
    ),
    "hard-link-to-directory": Hostile(blobs=_of(directory(b"d"), hard_link(b"x", b"d")), says="is a directory"),
    "write-through-absolute-symlink": Hostile(
        blobs=_of(symlink(b"out", b"/tmp/hpcenv-escape"), file(b"out/file", b"contained")),
        contained={b"tmp/hpcenv-escape/file": b"contained"},
    ),
    "write-through-climbing-symlink": Hostile(
        blobs=_of(symlink(b"out", b"../../../../tmp/hpcenv-escape"), file(b"out/file", b"contained")),
        contained={b"tmp/hpcenv-escape/file": b"contained"},
    ),
    "write-through-symlink-of-lower-layer": Hostile(
        blobs=lambda: as_blobs(tar(symlink(b"a", b"/b"), symlink(b"b", b"../c")), tar(file(b"a/x", b"contained")))(),
        contained={b"c/x": b"contained"},
    ),
    "write-over-symlink": Hostile(
        blobs=_of(symlink(b"passwd", b"/etc/passwd"), file(b"passwd", b"own")), contained={b"passwd": b"own"}
    ),
    "symlinks-in-a-circle": Hostile(
        blobs=_of(symlink(b"a", b"b"), symlink(b"b", b"a"), file(b"a/x", b"x")), says="circular"
    ),
    "symlinks-that-grow": Hostile(blobs=_of(symlink(b"a", b"a/a/a/a/a/a/a/a"), file(b"a/x", b"x")), says="circular"),
    "entry-below-a-file": Hostile(blobs=_of(file(b"f", b"x"), file(b"f/x", b"x")), says="not a directory"),
    "root-is-a-file": Hostile(blobs=_of(file(b"/", b"x")), says="root of a layer is not a directory"),
    "root-is-a-symlink": Hostile(blobs=_of(symlink(b".", b"/etc")), says="root of a layer is not a directory"),
    "many-empty-files": Hostile(blobs=lambda: empty_files(5_001), says="`entries`", limits=("entries=5000",)),
    "one-folder": Hostile(
        blobs=lambda: empty_files(3_001, folders=1), says="`folder_entries`", limits=("folder_entries=3000",)
    ),
    "some-folders": Hostile(
        blobs=lambda: empty_files(4_000, folders=4), says="take as long", limits=("folder_entries=1999",)
    ),
    "many-implied-directories": Hostile(
        blobs=lambda: as_blobs(tar(*(file(b"%d/" % at + b"d/" * 40 + b"f") for at in range(20))))(),
        says="`entries`",
        limits=("entries=500",),
    ),
    "long-names": Hostile(
        blobs=_of(*(file(b"%d" % at + b"n" * 200) for at in range(600))),
        says="`metadata_bytes`",
        limits=("metadata_bytes=100000",),
    ),
    "bomb": Hostile(blobs=lambda: bomb(48 * 1024 * 1024), says="`ratio`", limits=("ratio_from=20000000",)),
    "bomb-zstd": Hostile(blobs=lambda: bomb(48 * 1024 * 1024, "zstd"), says="`ratio`", limits=("ratio_from=20000000",)),
    "too-large": Hostile(
        blobs=lambda: bomb(48 * 1024 * 1024), says="`unpacked_bytes`", limits=("unpacked_bytes=20000000",)
    ),
    "sparse-bomb": Hostile(blobs=_raw(_sparse_claim(2**60, b"0,512")), says="`unpacked_bytes`"),
    "sparse-pieces-overlap": Hostile(blobs=_raw(_sparse_claim(4096, b"0,400,100,112")), says="overlap"),
    "sparse-pieces-outside": Hostile(blobs=_raw(_sparse_claim(100, b"0,512")), says="outside the file"),
    "sparse-map-of-words": Hostile(blobs=_raw(_sparse_claim(4096, b"0,many")), says="not a number"),
    "cut-plain": Hostile(blobs=_cut("plain"), says="truncated|digest"),
    "cut-gzip": Hostile(blobs=_cut("gzip"), says="cannot be decompressed|truncated"),
    # zstd's reader takes a frame that is cut off for an end; then the digest tells.
    "cut-zstd": Hostile(blobs=_cut("zstd"), says="cannot be decompressed|truncated|digest"),
    "cut-in-a-file": Hostile(blobs=as_blobs(tar(file(b"a", b"x" * 5000))[:1024]), says="truncated"),
    "cut-in-a-header": Hostile(blobs=as_blobs(base()[:700]), says="truncated"),
    "cut-after-an-extension": Hostile(blobs=as_blobs(pax([(b"path", b"x")])), says="truncated"),
    "size-negative": Hostile(
        blobs=_raw(header(b"a", b"0", size=b"\xff" * 12, magic=b"ustar  \0")), says="size is negative"
    ),
    "size-with-a-minus": Hostile(blobs=_raw(header(b"a", b"0", size=b"-0000000001\0")), says="not an octal number"),
    "size-of-exabytes": Hostile(
        blobs=_raw(header(b"a", b"0", size=b"\x80" + (2**61).to_bytes(11, "big"), magic=b"ustar  \0")), says="truncated"
    ),
    "pax-size-too-large": Hostile(
        blobs=_raw(pax([(b"size", b"70000")]), header(b"a", b"0", size=2), padded(b"ok")), says="truncated"
    ),
    "pax-size-too-small": Hostile(
        blobs=_raw(pax([(b"size", b"1")]), header(b"a", b"0", size=600), padded(b"x" * 600)), says="checksum"
    ),
    "pax-size-negative": Hostile(blobs=_raw(pax([(b"size", b"-1")]), header(b"a", b"0")), says="size=-1"),
    "pax-record-lies": Hostile(
        blobs=_raw(header(b"p", b"x", size=20), padded(b"99 path=x\n"), header(b"a", b"0")), says="wrong length"
    ),
    "pax-header-of-megabytes": Hostile(
        blobs=_raw(pax([(b"comment", bytes(2_000_000))]), header(b"a", b"0")), says="extension headers"
    ),
    "pax-name-with-nul": Hostile(blobs=_raw(pax([(b"path", b"a\0b")]), header(b"a", b"0")), says="NUL"),
    "pax-global-name": Hostile(blobs=_raw(pax([(b"path", b"x")], b"g"), header(b"a", b"0")), says="global pax"),
    "name-too-long": Hostile(blobs=_of(file(b"a/" * 2100 + b"x")), says="name of 4,2"),
    "name-part-too-long": Hostile(blobs=_of(file(b"x" * 256)), says="255 bytes"),
    "xattr-too-large": Hostile(
        blobs=_raw(pax([(b"SCHILY.xattr.user.x", bytes(70_000))]), header(b"a", b"0")), says="extended attribute"
    ),
    "owner-too-large": Hostile(
        blobs=_raw(pax([(b"uid", b"4294967296")]), header(b"a", b"0")), says="impossible on Linux|the limit of Linux"
    ),
    "device-numbers-too-large": Hostile(
        blobs=_raw(header(b"a", b"3", major=b"7777777\0")), says="impossible on Linux|the limit of Linux"
    ),
    "checksum-wrong": Hostile(blobs=as_blobs(base()[:1024] + b"X" + base()[1025:]), says="checksum is wrong"),
    "zeros-between-members": Hostile(blobs=_raw(bytes(512), header(b"a", b"0")), says="single block of zeros"),
    "unknown-type": Hostile(blobs=_raw(header(b"a", b"V")), says="unknown type"),
    "no-tar-at-all": Hostile(blobs=as_blobs(b"<html>not a layer</html>" * 100), says="octal|checksum"),
    "other-content": Hostile(blobs=lambda: [(compress(base(), "gzip"), "sha256:" + "0" * 64)], says="digest"),
    "no-diff-id": Hostile(blobs=lambda: [(compress(base(), "gzip"), "sha256:../../x")], says="names a layer"),
    "xz": Hostile(blobs=lambda: [(b"\xfd7zXZ\0" + bytes(100), digest_of(b""))], says="xz"),
}


def write_hostile(folder: Path, hostile: Hostile) -> str:
    """Write a hostile image as an OCI layout; return the digest of its manifest."""
    blobs = hostile.blobs()
    return write_layout(folder, [blob for blob, _ in blobs], packed=("as-is",), diff_ids=[told for _, told in blobs])


# -- what others make of them -------------------------------------------------------------


def umoci_unpacks(layers: list[bytes], folder: Path) -> list[TreeEntry]:
    """Return the tree that umoci unpacks as root; gzip and OCI's media types, since 0.4.7 knows no others."""
    write_layout(folder / "layout", layers)
    argv = ["umoci", "raw", "unpack", "--image", f"{folder}/layout:latest", str(folder / "root")]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    return from_folder(folder / "root")


def from_folder(root: Path) -> list[TreeEntry]:
    """A file system's tree as entries."""
    kinds = {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "directory",
        stat.S_IFLNK: "symlink",
        stat.S_IFCHR: "character-device",
        stat.S_IFBLK: "block-device",
        stat.S_IFIFO: "fifo",
    }
    top = os.fsencode(root)
    paths = [b""]
    for folder, below, files in os.walk(top):
        paths += [os.path.relpath(os.path.join(folder, name), top) for name in [*below, *files]]
    first: dict[int, bytes] = {}
    found = []
    for path in sorted(paths):
        full = os.path.join(top, path) if path else top
        told = os.lstat(full)
        kind = kinds[stat.S_IFMT(told.st_mode)]
        names = sorted(os.fsencode(name) for name in os.listxattr(full, follow_symlinks=False))
        content = Path(os.fsdecode(full)).read_bytes() if kind == "file" else b""
        found.append(
            TreeEntry(
                path=path,
                kind=kind,
                mode=stat.S_IMODE(told.st_mode),
                uid=told.st_uid,
                gid=told.st_gid,
                mtime=told.st_mtime_ns // 10**9,
                size=len(content),
                blake3=blake3(content).hexdigest() if kind == "file" else None,
                target=os.readlink(full) if kind == "symlink" else b"",
                device=(os.major(told.st_rdev), os.minor(told.st_rdev)) if kind.endswith("device") else None,
                xattrs=tuple((name, os.getxattr(full, name, follow_symlinks=False)) for name in names),
                inode=path if kind == "directory" else first.setdefault(told.st_ino, path),
            )
        )
    return found
