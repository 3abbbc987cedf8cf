"""What is fuzzed: each reader with its seeds, and what it may raise.

A target takes bytes and either returns or raises one of its `allowed` errors: HpcenvError,
and ValueError only where the reader's docstring says so.
"""

from __future__ import annotations

import atexit
import base64
import csv
import hashlib
import io
import json
import os
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpcenv import hostlist
from hpcenv.cluster import estimate, node_types, slurm, slurm_command
from hpcenv.errors import HpcenvError, LockfileInvalid, SpecError
from hpcenv.facts import probe
from hpcenv.identity import sif
from hpcenv.image.convert import squashfs_reader
from hpcenv.incontainer.probe import environment, packages, report
from hpcenv.judge import decide, verdict_table
from hpcenv.judge.compat import table_file
from hpcenv.judge.compat.compat_table import PACKAGED
from hpcenv.judge.compat.drivers import check_driver
from hpcenv.judge.compat.image_rules import evaluate_require, parse_require
from hpcenv.locking import difference as diff_model
from hpcenv.locking.conda_packages import InstalledConda, compare_conda
from hpcenv.locking.pins import cross_check as pin_check
from hpcenv.locking.pins import formats, install_report
from hpcenv.locking.pins.pin import PinSource, marker_environment
from hpcenv.locking.wheels import proof as wheels
from hpcenv.locking.wheels import wheel_record
from hpcenv.project import document, lockfile, toml_files
from hpcenv.project.spec import Project
from hpcenv.project.workspace import read_lockfile
from hpcenv.records.codec import decode_record, encode_record
from hpcenv.records.facts import Facts
from hpcenv.records.manifest import GpuNeeds, Manifest
from hpcenv.records.verdict import NodeSettings, Verdict

from .layer_readers import INDEX_SEEDS, INDEX_WORDS, LAYER_SEEDS, LAYER_WORDS, read_a_kept_index, read_a_layer

SEEDS = Path(__file__).with_name("seeds")
CORPUS = Path(__file__).with_name("corpus")
SCRATCH = Path(tempfile.mkdtemp(prefix="hpcenv-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))


@dataclass(frozen=True, kw_only=True)
class Target:
    """One reader.

    Attributes:
        run: gives the bytes to the reader.
        seeds: well-formed inputs to start from.
        words: pieces that its format is made of.
        allowed: what it may raise.
    """

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...] = ()
    allowed: tuple[type[BaseException], ...] = (HpcenvError,)


def _seeds(name: str) -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in sorted((SEEDS / name).iterdir()))


atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)

# What a seed for requirements.txt names.
(SCRATCH / "limits.txt").write_text("c==3\n")


def _file(name: str, data: bytes) -> Path:
    path = SCRATCH / name
    path.write_bytes(data)
    return path


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


# -- TOML ---------------------------------------------------------------------------------


def read_a_lockfile(data: bytes) -> None:
    """Read, judge by every reader of the model, write again: the same lockfile must come out."""
    locked = read_lockfile(_file("default.lock.toml", data))
    lockfile.expectations(locked, level="full", origin="o")
    lockfile.package_expectations(locked)
    lockfile.policy_problems(locked)
    lockfile.fingerprint(lockfile.to_data(locked))
    values, severities = diff_model.of_lockfile(locked), lockfile.severities_of(locked)
    assert diff_model.compare(values, values, severities=[severities]) == ()
    # Facts whose names cannot stand in a table of their own (`a` and `a.b`) are refused on reading.
    if locked.revision <= lockfile.REVISION:
        again = read_lockfile(_file("again.lock.toml", toml_files.dumps(lockfile.to_data(locked), header="h").encode()))
        assert again == locked, "a lockfile that was written anew is another one"


def read_a_project(data: bytes) -> None:
    document.parse(Project, toml_files.read(_file("hpcenv.toml", data), error=SpecError))


def read_a_compat_table(data: bytes) -> None:
    parsed = table_file.parse(toml_files.read(_file("compat.toml", data), error=SpecError))
    check_driver(parsed, "12.8", "570.26")


# -- installed packages -------------------------------------------------------------------


def read_a_record(data: bytes) -> None:
    """RECORD, METADATA, WHEEL and direct_url.json of one dist: whatever is wrong becomes a reason."""
    names = ("RECORD", "METADATA", "WHEEL", "direct_url.json")
    site = SCRATCH / "site"
    info = site / "x-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    for name, part in zip(names, data.split(b"\n%%\n"), strict=False):
        (info / name).write_bytes(part)
    env = environment.ProbedEnvironment("record", [])
    dist = packages.read_dist(env, environment.Site(str(site), str(SCRATCH), True), info.name)
    entry = report.package_entry(env, dist)
    json.dumps(entry).encode("ascii")
    wheels.InstalledDist.from_probe(entry)
    assert (dist.record is None) == bool(dist.reasons)


def read_a_wheel(data: bytes) -> None:
    """A wheel's RECORD, as an index would serve it."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            wheel_record.wheel_record_digests(wheel, "x-1.0-py3-none-any.whl", whole=True)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, OSError, EOFError, RuntimeError) as error:
        raise ValueError(str(error)) from error
    except Exception as error:
        # Two errors of its own that only its caller sees.
        if type(error).__module__ == wheel_record.__name__ or type(error).__module__ == "zlib":
            raise ValueError(str(error)) from error
        raise


_CONDA_PACKAGE = InstalledConda(
    name="a", version="1", build="0_0", channel="c", sha256="a" * 64, md5="", dists=(), unproved=""
)


def read_pinned(name: str) -> Callable[[bytes], None]:
    environment = marker_environment({"python.version": "3.12.3", "system.machine": "x86_64"})

    def run(data: bytes) -> None:
        found = formats.read_pins(PinSource(path=_file(name, data)), environment=environment)
        dists = [wheels.InstalledDist(name="torch", version="2.13.0+cpu")]
        proofs = [wheels.WheelProof(name="torch", proof="none", reason="r")]
        pin_check.cross_check([pin for pin in found if pin.manager == "pypi"], dists, proofs)
        compare_conda(found, [_CONDA_PACKAGE])
        install_report.known_files(found)

    return run


def read_a_report(data: bytes) -> None:
    install_report.parse_report(data, origin="report.json")


# -- SIF ----------------------------------------------------------------------------------


def read_a_sif(data: bytes) -> None:
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, data)
        header = sif.read_header(fd)
        for part in (sif.labels, sif.superblock, sif.partition_sha256):
            try:
                part(fd, header)
            except HpcenvError:
                continue
        for entry in header.objects:
            try:
                sif.read_object(fd, entry)
            except HpcenvError:
                continue
    finally:
        os.close(fd)


def a_sif() -> bytes:
    """The smallest file with everything that is read: labels, a definition, a squashfs."""
    meta = json.dumps({"data": {"attributes": {"labels": {"a": "b"}}}}).encode()
    body = struct.pack("<4sIIIIHHHHHHQQ", b"hsqs", 7, 1700000000, 131072, 2, 6, 17, 0, 1, 4, 0, 0, 101)
    squashfs = body.ljust(96, b"\0") + b"files"
    objects = [
        (0x4001, "", b"bootstrap: docker\n", b""),
        (0x4006, "inspect-metadata.json", meta, b""),
        (0x4004, "", squashfs, struct.pack("<ii3s", 1, 2, b"02\0")),
    ]
    first, data, rows = 128 + 4 * 585, b"", b""
    for number, (kind, name, part, extra) in enumerate(objects, 1):
        rows += struct.pack(
            "<iBIIIqqqqqqq128s384s", kind, 1, number, 0xF0000001, 0, first + len(data), len(part), len(part), 1, 1,
            0, 0, name.encode(), extra,
        )  # fmt: skip
        data += part
    head = struct.pack(
        "<32s10s3s3s16s8q", b"#!/usr/bin/env run-singularity\n", b"SIF_MAGIC\0", b"01\0", b"02\0", b"\7" * 16, 1, 1,
        1, 4, 128, 4 * 585, first, len(data),
    )  # fmt: skip
    return (head + rows).ljust(first, b"\0") + data


# -- squashfs -----------------------------------------------------------------------------


def read_a_squashfs(data: bytes) -> None:
    """The whole tree with contents, in this thread: the fuzzer sees only its own thread's lines."""
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, data)
        found = squashfs_reader.read_tree(fd, offset=0, size=len(data), threads=1, largest_content=32 << 20)
        before = None
        for entry in found:
            assert before is None or before < entry.path, "paths are out of order, or one comes twice"
            before = entry.path
        squashfs_reader.read_file(fd, b"sub/one", offset=0, size=len(data))
    finally:
        os.close(fd)


# -- records ------------------------------------------------------------------------------

_MANIFEST = decode_record(Manifest, _seeds("manifest")[0].decode(), origin="seed")
_NEEDS = GpuNeeds(
    cuda="12.8",
    arch_list=("sm_80", "compute_90"),
    require={"NVIDIA_REQUIRE_CUDA": "cuda>=12.8 brand=tesla,driver>=570"},
    table=json.dumps(toml_files.read(PACKAGED, error=SpecError)),
)


def read_facts(data: bytes) -> None:
    """Facts of a node: whatever can be read can be judged and shown."""
    found = decode_record(Facts, _text(data), origin="facts")
    decode_record(Facts, encode_record(found), origin="again")
    for manifest in (_MANIFEST, Manifest(**{**vars(_MANIFEST), "gpu_needs": _NEEDS, "gpus_per_node": 1})):
        named = Facts(**{**vars(found), "run": manifest.run, "node": "n1", "attempt": 0})
        other = Facts(**{**vars(named), "node": "n2", "values": {}})
        verdict, _ = decide.judge(manifest, ["n1", "n2"], {"n1": named, "n2": other}, {}, attempt=0, job_id="1")
        verdict_table.render(verdict, lockfile="l")


def read_a_verdict(data: bytes) -> None:
    verdict = decode_record(Verdict, _text(data), origin="verdict")
    verdict_table.render(verdict, lockfile="lockfiles/default.lock.toml")


def read_a_manifest(data: bytes) -> None:
    manifest = decode_record(Manifest, _text(data), origin="manifest")
    found = decode_record(Facts, _seeds("facts")[0].decode(), origin="seed")
    decide.judge(manifest, [found.node], {found.node: found}, {}, attempt=0, job_id="1")


def read_settings(data: bytes) -> None:
    decode_record(NodeSettings, _text(data), origin="settings")


def read_a_probe(data: bytes) -> None:
    """The probe's answer, up to the point where facts are made of it."""
    answer = probe.parse_probe(_text(data), level="full")
    for value in answer["values"].values():
        probe._as_value(value)


# -- words --------------------------------------------------------------------------------


def read_a_hostlist(data: bytes) -> None:
    hostlist.expand_hostlist(_text(data))


def read_a_requirement_of_an_image(data: bytes) -> None:
    requirement = parse_require(_text(data))
    evaluate_require(requirement, {"host.cuda-driver-version": "12.8", "host.driver-version": "570.26"})


def read_states(data: bytes) -> None:
    """Jobs and elements of arrays, as squeue and sacct tell of them."""
    ids = ("7", "120_3", "120_9")
    slurm._parse_squeue(_text(data), ids)
    slurm._parse_sacct(_text(data), ids)
    slurm_command.rejection(_text(data))


def read_sinfo(data: bytes) -> None:
    node_types.parse_offers(_text(data))
    node_types.parse_configuration(_text(data))
    estimate.parse_estimate(_text(data))


def _record_seeds() -> tuple[bytes, ...]:
    metadata = b"Metadata-Version: 2.1\nName: x\nVersion: 1.0\n\nlong\n"
    wheel = b"Wheel-Version: 1.0\nTag: py3-none-any\nTag: cp312-cp312-manylinux_2_28_x86_64\nBuild: 3\n"
    origins = (
        {"url": "https://u:p@example.invalid/x.whl?t=1", "archive_info": {"hashes": {"sha256": "00"}}},
        {"url": "file:///nowhere/x", "dir_info": {"editable": True}},
        {"url": "https://example.invalid/x.git", "vcs_info": {"vcs": "git", "commit_id": "00"}},
    )
    rows = io.StringIO()
    csv.writer(rows).writerows([["x/__init__.py", "sha256=AA", "1"], ["../../../bin/x", "", ""], ['a"b, c', "", "2"]])
    return tuple(
        b"\n%%\n".join([record, metadata, wheel, json.dumps(origin).encode()])
        for record, origin in zip((*_seeds("record"), rows.getvalue().encode(), b"/abs/x.py,,\n"), origins, strict=True)
    )


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def _wheel_seed() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("x/__init__.py", "")
        wheel.writestr("x-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: x\nVersion: 1.0\n")
        wheel.writestr("x-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("x-1.0.data/scripts/x", "")
        rows = [f"{info.filename},sha256={_digest(wheel.read(info))},{info.file_size}\n" for info in wheel.infolist()]
        wheel.writestr("x-1.0.dist-info/RECORD", "".join([*rows, "x-1.0.dist-info/RECORD,,\n"]))
    return file.getvalue()


_PIN = b"a" * 64
_REQUIREMENTS = (
    b'--index-url=x\nZope.Interface[test]==6.0 ; python_version >= "3.8" \\\n    --hash=sha256:' + _PIN + b"\n"
    b"torch==2.13.0+cpu # why\nattrs === 23.1.0 --hash sha256:" + _PIN + b"\n",
    b"plain @ https://example.invalid/plain-1.0-py3-none-any.whl --hash=sha256:" + _PIN + b"\n-c limits.txt\n",
)
_PYLOCK = (
    b'lock-version = "1.0"\ncreated-by = "x"\nenvironments = ["sys_platform == \'linux\'"]\n'
    b'[[packages]]\nname = "torch"\nversion = "2.13.0"\nmarker = "python_version >= \'3.8\'"\n'
    b'[[packages.wheels]]\nname = "torch-2.13.0-py3-none-any.whl"\nurl = "https://e/torch-2.13.0-py3-none-any.whl"\n'
    b'hashes = {sha256 = "' + _PIN + b'"}\n',
)
_REPORT = json.dumps(
    {
        "version": "1",
        "install": [
            {
                "download_info": {"url": "https://e/x-1-py3-none-any.whl", "archive_info": {"hashes": {"sha256": "0"}}},
                "metadata": {"name": "x", "version": "1"},
            }
        ],
    }
).encode()
_PROBE = json.dumps(
    {
        "schema": 1,
        "level": "full",
        "values": {"python.version": "3.12.3", "python.sys-path": ["a"], "packages.count": 1},
        "unknown": {"torch.version": "why"},
        "packages": [{"name": "torch", "version": "2.13.0", "record-sha256": "00", "tags": [], "modified": []}],
    }
).encode()

_TOML = (
    *(b"[", b"]", b"[[", b"]]", b"=", b'"', b"'''", b'"""', b"{", b"}", b",", b".", b"#", b"\n", b"true", b"inf", b"nan"),
    *(b"1979-05-27T07:32:00Z", b"0x1f", b"1_000", b"-0", b"1e400", b"\\u0000", b"\\uD800", b"\\U00110000", b"\r", b"\0"),
    *(b"schema", b"revision", b"facts", b"[packages]", b"[[packages.dist]]", b"[torch]", b"version", b"9" * 5000),
)  # fmt: skip
_JSON = (
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"\\ud800", b"\\u0000"),
    *(b"9" * 5000, b'"schema"', b"[" * 2000, b'"a":' * 3, b'"must"', b'"mismatch"', b'"gpu_needs"', b'"host.gpu-models"'),
)  # fmt: skip
_RECORD = (b",", b'"', b"../", b"/", b".pyc", b"__pycache__", b"sha256=", b"\r", b"\0", b"%%", b"bin/", b"{data}")
_INTEGERS = tuple(struct.pack("<q", n) for n in (0, 1, -1, 2**31, 2**63 - 1, -(2**63), 4096, 128))
_SHORTS = tuple(struct.pack("<H", n) for n in (0, 1, 8, 14, 255, 256, 0x7FFF, 0x8000, 0x9000, 0xFFFF))

_YAML = (
    *(
        b"- ",
        b": ",
        b"\n  ",
        b"[",
        b"]",
        b"{",
        b"}",
        b"&a ",
        b"*a",
        b"<<: *a",
        b"!!",
        b"!!python/name:os.system ",
        b"|\n",
    ),
    *(b"---\n", b"...\n", b"? ", b"'", b'"', b"#", b"%YAML 1.1\n", b"conda: ", b"pypi: ", b"conda_source: ", b"kind: "),
    *(b"version: 7", b"linux-64", b"subdir: ", b"default", b"git+", b"./", b".conda", b"-0_0.conda", b"sha256: ", b"~"),
)
_PIXI = b"""version: 6
environments:
  default:
    packages:
      linux-64:
      - conda: https://e.invalid/c/linux-64/a-1-0_0.conda
      - pypi: ./b-1-py3-none-any.whl
packages:
- conda: https://e.invalid/c/linux-64/a-1-0_0.conda
  sha256: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
- pypi: ./b-1-py3-none-any.whl
  name: b
  version: '1'
  sha256: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
"""
_PIXI_7 = _PIXI.replace(b"version: 6", b"version: 7\nplatforms:\n- {name: mine, subdir: linux-64}").replace(
    b"linux-64:", b"mine:"
)
_CONDA_LOCK = b"""version: 1
metadata: {platforms: [linux-64]}
package:
- {name: a, version: '1', manager: conda, platform: linux-64, url: 'https://e.invalid/linux-64/a-1-0_0.conda',
   hash: {md5: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa}, category: dev}
- {name: b, version: '1', manager: pip, platform: linux-64, url: 'https://e.invalid/b-1-py3-none-any.whl',
   hash: {sha256: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa}}
"""


def _pin_files(pattern: str) -> tuple[bytes, ...]:
    """Real lockfiles of other tools."""
    return tuple(path.read_bytes() for path in sorted((SEEDS.parents[1] / "pin_files").glob(pattern)))


TARGETS: dict[str, Target] = {
    "lockfile": Target(run=read_a_lockfile, seeds=_seeds("lockfile"), words=_TOML),
    "project": Target(
        run=read_a_project,
        seeds=(b'image = "docker://x/y:1"\n[submit]\nnodes = 2\n[[bind]]\nsource = "/a"\n[policy]\n"a.b" = "must"\n',),
        words=_TOML,
    ),
    "compat": Target(run=read_a_compat_table, seeds=(PACKAGED.read_bytes(),), words=_TOML),
    "record": Target(run=read_a_record, seeds=_record_seeds(), words=(*_RECORD, *_JSON), allowed=()),
    "wheel": Target(run=read_a_wheel, seeds=(_wheel_seed(),), words=_RECORD, allowed=(ValueError,)),
    "sif": Target(run=read_a_sif, seeds=(a_sif(),), words=_INTEGERS),
    "squashfs": Target(run=read_a_squashfs, seeds=_seeds("squashfs"), words=(*_INTEGERS, *_SHORTS)),
    "layer": Target(run=read_a_layer, seeds=LAYER_SEEDS, words=LAYER_WORDS),
    "layer-index": Target(run=read_a_kept_index, seeds=INDEX_SEEDS, words=(*INDEX_WORDS, *_INTEGERS)),
    "facts": Target(run=read_facts, seeds=_seeds("facts"), words=_JSON),
    "verdict": Target(run=read_a_verdict, seeds=_seeds("verdict"), words=_JSON),
    "manifest": Target(run=read_a_manifest, seeds=_seeds("manifest"), words=_JSON),
    "settings": Target(run=read_settings, seeds=_seeds("settings"), words=_JSON),
    "probe": Target(run=read_a_probe, seeds=(_PROBE,), words=_JSON, allowed=(ValueError,)),
    "requirements": Target(
        run=read_pinned("requirements.txt"),
        seeds=_REQUIREMENTS,
        words=(b"==", b"\\\n", b"--hash=sha256:", b"-r ", b"-e ", b";", b" or ", b"extra", b"[", b"]", b"@ ", b"#"),
    ),
    "pylock": Target(run=read_pinned("pylock.toml"), seeds=_PYLOCK, words=_TOML),
    "pixi": Target(run=read_pinned("pixi.lock"), seeds=(*_pin_files("pixi-4*"), _PIXI, _PIXI_7), words=_YAML),
    "conda-lock": Target(run=read_pinned("conda-lock.yml"), seeds=(_CONDA_LOCK,), words=_YAML),
    "report": Target(run=read_a_report, seeds=(_REPORT,), words=_JSON, allowed=(LockfileInvalid,)),
    "hostlist": Target(
        run=read_a_hostlist,
        seeds=(b"n[1-3,07],gpu1", b"r[1-2]n[08-10]", b"a,b,c"),
        words=(b"[", b"]", b"-", b",", b"0", b"9999", b"[1-9]", b"99999999999"),
        allowed=(ValueError,),
    ),
    "nvidia-require": Target(
        run=read_a_requirement_of_an_image,
        seeds=(b"cuda>=13.1 brand=tesla,driver>=570,driver<571 brand=unknown,driver>=535",),
        words=(b">=", b"<", b"!=", b"=", b" ", b",", b"brand", b"driver", b"arch", b"9" * 5000, b"."),
        allowed=(),
    ),
    "sinfo": Target(
        run=read_sinfo,
        seeds=(b"gpu*|up|1-00:00:00|1-8|4|mixed*|64+|512000|gpu:h100:8(S:0-1)|a,b|g[1-4]\n",),
        words=(b"|", b"gpu:", b"*", b"\n"),
    ),
    "states": Target(
        run=read_states,
        seeds=(
            b"7|RUNNING|None|n[1-2]|0:05\n120_3|PENDING|JobArrayTaskLimit||0:00\n",
            b"120_[0,2,4-9%2]|CANCELLED by 2001|0:0|None assigned|00:00:00\n7|FAILED|7:9|n1|00:00:01\n",
        ),
        words=(b"|", b"120_[", b"]", b"-", b":", b"%2", b"9" * 20, b"CANCELLED by 1", b"\n"),
    ),
}
