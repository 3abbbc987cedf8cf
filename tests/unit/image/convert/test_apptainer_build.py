"""apptainer_build: what Apptainer is asked for and what becomes of its answer, with a fake program.

The real program builds in tests/cluster/test_image_runs.py.
"""

import hashlib
import json
import os
import re
import struct
import time
from pathlib import Path

import pytest

from hpcenv.errors import (
    FileUnusable,
    HpcenvError,
    ImageMismatch,
    ImageUnavailable,
    SpecError,
    ToolFailed,
    ToolMissing,
)
from hpcenv.image.content.tree import TreeEntry
from hpcenv.image.convert import apptainer_build
from hpcenv.image.convert.runtime_files import runtime_files
from hpcenv.records.manifest import Bind

EPOCH = 1767323046

# Reads its definition file, keeps what it was given, and writes the SIF prepared beside it.
FAKE = r"""#!/bin/sh
[ "$1" = --version ] && { echo "apptainer version ${FAKE_VERSION:-1.4.5-2}"; exit 0; }
dir=$(dirname "$0")
env > "$dir/seen.env"
pwd > "$dir/seen.pwd"
umask > "$dir/seen.umask"
for word; do printf '%s\n' "$word"; done > "$dir/seen.argv"
for last; do :; done
cp "$last" "$dir/seen.def"
cp -rL "$(dirname "$last")" "$dir/seen.scratch"
mkdir -p "$TMPDIR/rootfs/closed/deep"; touch "$TMPDIR/rootfs/closed/deep/f"; chmod 0 "$TMPDIR/rootfs/closed"
echo 'INFO:    Starting build...' >&2
n=0; for word; do n=$((n+1)); done
eval "out=\${$((n-1))}"
cp "$dir/result.sif" "$out"
[ -e "$dir/sleep" ] && exec sleep "$(cat "$dir/sleep")"
if [ -e "$dir/fail" ]; then cat "$dir/fail" >&2; exit 255; fi
exit 0
"""


def tiny_sif(path, labels, arch=b"02\0"):
    """Write the smallest SIF that Apptainer could have built: labels and a squashfs."""
    meta = json.dumps({"data": {"attributes": {"labels": labels}}}).encode()
    part = (
        struct.pack("<4sIIIIHHHHHHQQ", b"hsqs", 1, 0, 131072, 0, 6, 17, 0, 1, 4, 0, 0, 101).ljust(96, b"\0") + b"files"
    )
    rows, data, now = b"", b"", int(time.time())
    for number, (kind, name, body, extra) in enumerate(
        [(0x4006, b"inspect-metadata.json", meta, b""), (0x4004, b"", part, struct.pack("<ii3s", 1, 2, arch))], 1
    ):
        rows += struct.pack(
            "<iBIIIqqqqqqq128s384s",
            *(kind, 1, number, 0xF0000001, 0, 4096 + len(data), len(body), len(body), now, now, 0, 0, name, extra),
        )
        data += body
    numbers = (now, now, 0, 2, 128, len(rows), 4096, len(data))
    header = struct.pack("<32s10s3s3s16s8q", b"", b"SIF_MAGIC\0", b"01\0", arch, os.urandom(16), *numbers)
    path.write_bytes((header + rows).ljust(4096, b"\0") + data)


class Lab:
    """A fake Apptainer, an image of three blobs, and the places a build needs."""

    def __init__(self, folder):
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.program = self.bin / "apptainer"
        self.program.write_text(FAKE)
        self.program.chmod(0o755)
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.out = folder / "out.sif"
        self.blobs = {}
        layer, config = self.blob(b"layer"), self.blob(b"{}")
        manifest = {
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": {"digest": config},
            "layers": [{"digest": layer}],
        }
        self.digest = self.blob(json.dumps(manifest).encode())
        self.labels = {"hpcenv.source.manifest-digest": self.digest, "hpcenv.format": "1"}
        self.environ = {"PATH": os.environ["PATH"], "HOME": "/h", "APPTAINER_BIND": "/", "https_proxy": "p"}
        tiny_sif(self.bin / "result.sif", {"org.label-schema.build-date": "2026-01-02T03:04:06Z", **self.labels})

    def blob(self, body):
        digest = "sha256:" + hashlib.sha256(body).hexdigest()
        self.blobs[digest] = self.bin / digest[7:]
        self.blobs[digest].write_bytes(body)
        return digest

    def common(self, changes):
        return {
            "apptainer": str(self.program),
            "architecture": "amd64",
            "destination": self.out,
            "temporary": self.temporary,
            "environ": self.environ,
            **changes,
        }

    def layout(self, **changes):
        given = {"manifest_digest": self.digest, "blobs": self.blobs, "epoch": EPOCH, "labels": self.labels}
        given["entries"] = ()
        given["files"] = runtime_files(
            {"config": {"Env": ["A=$(id)"]}}, labels=self.labels, architecture="amd64", epoch=EPOCH
        )
        return apptainer_build.build_layout(**self.common({**given, **changes}))

    def definition(self, text, **changes):
        identity = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
        tiny_sif(self.bin / "result.sif", {"hpcenv.definition.digest": identity, **changes.get("labels", {})})
        given = {"text": text, "folder": self.out.parent}
        return apptainer_build.build_definition(**self.common({**given, **changes}))

    def seen(self, what):
        return (self.bin / f"seen.{what}").read_text().splitlines()


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


def test_the_whole_definition_file(lab):
    lab.layout()
    assert lab.seen("def") == [
        "Bootstrap: oci",
        f"From: layout@{lab.digest}",
        "",
        "%files",
        "    scripts/10-docker2singularity.sh /.singularity.d/env/10-docker2singularity.sh",
        "    scripts/runscript /.singularity.d/runscript",
        "",
        "%labels",
        "    hpcenv.format 1",
        f"    hpcenv.source.manifest-digest {lab.digest}",
        "    org.label-schema.build-date 2026-01-02T03:04:06Z",
    ]


def test_the_layout_is_the_image(lab):
    lab.layout()
    layout = lab.bin / "seen.scratch" / "layout"
    (described,) = json.loads((layout / "index.json").read_text())["manifests"]
    assert described["digest"] == lab.digest
    assert described["mediaType"] == "application/vnd.docker.distribution.manifest.v2+json"
    for digest, blob in lab.blobs.items():
        copied = (layout / "blobs" / "sha256" / digest[7:]).read_bytes()
        assert copied == blob.read_bytes()
    assert described["size"] == lab.blobs[lab.digest].stat().st_size
    assert "A='$(id)'" in (lab.bin / "seen.scratch" / "scripts" / "10-docker2singularity.sh").read_text()


def test_the_whole_command_line_and_environment(lab):
    built = lab.layout()
    scratch = Path(lab.seen("pwd")[0])
    assert scratch.parent == lab.temporary
    assert lab.seen("argv") == [
        "build", "--force", "--disable-cache", "--arch", "amd64",
        "--mksquashfs-args", "-comp zstd -Xcompression-level 3", str(lab.out), str(scratch / "image.def"),
    ]  # fmt: skip
    env = dict(line.split("=", 1) for line in lab.seen("env"))
    assert {name: env.get(name) for name in ("SOURCE_DATE_EPOCH", "https_proxy", "HOME", "APPTAINER_BIND")} == {
        "SOURCE_DATE_EPOCH": str(EPOCH), "https_proxy": "p", "HOME": "/h", "APPTAINER_BIND": None,
    }  # fmt: skip
    assert env["TMPDIR"] == env["APPTAINER_TMPDIR"] == str(scratch)
    assert env["APPTAINER_CACHEDIR"].startswith(str(scratch))
    assert built.epoch == EPOCH
    assert built.apptainer_version == "1.4.5-2"


def test_the_result_is_normalised_and_nothing_else_is_left(lab):
    lab.layout()
    first = lab.out.read_bytes()
    tiny_sif(lab.bin / "result.sif", {"org.label-schema.build-date": "2026-01-02T03:04:06Z", **lab.labels})
    lab.layout()
    assert lab.out.read_bytes() == first
    assert list(lab.temporary.iterdir()) == []


@pytest.mark.parametrize("value", ["a\n%post\n  id", "{{ x }}", "a\r", "%post", "a # b", " a", "", "$(id)", "ü"])
def test_nothing_can_be_smuggled_into_the_definition_file(lab, value):
    with pytest.raises(SpecError, match="definition file"):
        lab.layout(labels={**lab.labels, "a": value})
    with pytest.raises(SpecError, match="definition file"):
        lab.layout(labels={**lab.labels, f"a{value} ": "b"})
    assert not lab.out.exists()


def test_a_failure_is_explained_and_leaves_nothing(lab):
    (lab.bin / "fail").write_text("INFO:    noise\nFATAL:   write /t/bundle-temp-1/x: no space left on device\n")
    with pytest.raises(ToolFailed, match="not enough space") as error:
        lab.layout()
    lines = error.value.why.splitlines()
    assert lines[0] == "FATAL:   write /t/bundle-temp-1/x: no space left on device"
    assert re.fullmatch(rf"temporary files are in {re.escape(str(lab.temporary))} \(\w+, [0-9.]+ GB free\)", lines[1])
    assert not lab.out.exists()
    assert list(lab.temporary.iterdir()) == []
    (lab.bin / "fail").write_text("FATAL:   GET http://r/v2/a/manifests/x: MANIFEST_UNKNOWN: manifest unknown\n")
    with pytest.raises(ImageUnavailable, match="no longer has"):
        lab.layout()


def test_a_build_that_takes_too_long(lab):
    (lab.bin / "sleep").write_text("20")
    with pytest.raises(ToolFailed, match="did not finish in time"):
        lab.layout(timeout=1.0)
    assert not lab.out.exists()
    assert list(lab.temporary.iterdir()) == []


def test_a_result_that_is_another_image_is_refused(lab):
    result = lab.bin / "result.sif"
    date = {"org.label-schema.build-date": "2026-01-02T03:04:06Z"}
    tiny_sif(result, {**lab.labels, "hpcenv.source.manifest-digest": "sha256:" + "9" * 64})
    with pytest.raises(ImageMismatch, match="wrong labels"):
        lab.layout()
    tiny_sif(result, {**lab.labels, **date}, arch=b"04\0")
    with pytest.raises(ImageMismatch, match="an image for arm64"):
        lab.layout()
    result.write_bytes(b"52 kB of nothing")
    with pytest.raises(ImageMismatch):
        lab.layout()
    assert not lab.out.exists()


def test_an_image_whose_links_apptainer_would_follow_is_refused(lab):
    link = TreeEntry(path=b".singularity.d/env", kind="symlink", mode=0o777, target=b"/home/alice")
    with pytest.raises(ImageMismatch, match="must not convert") as error:
        lab.layout(entries=[link])
    assert "/.singularity.d/env" in error.value.why
    assert not (lab.bin / "seen.argv").exists()


def test_an_apptainer_that_is_too_old(lab):
    lab.program.write_text(FAKE.replace("1.4.5-2", "1.3.9"))
    with pytest.raises(ToolMissing, match=r"apptainer 1\.3\.9 is too old"):
        lab.layout()


def test_a_temporary_folder_that_is_gone(lab, tmp_path):
    with pytest.raises(FileUnusable, match="cannot be built"):
        lab.layout(temporary=tmp_path / "none")


def test_removing_a_tree_does_not_follow_links(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o500)
    tree = tmp_path / "tree"
    (tree / "closed").mkdir(parents=True)
    (tree / "closed" / "link").symlink_to(kept)
    (tree / "closed").chmod(0)
    apptainer_build._remove_tree(tree)
    assert not tree.exists()
    assert kept.stat().st_mode & 0o777 == 0o500


# --- definition files ------------------------------------------------------------------------

DIGEST = "sha256:" + "1" * 64


def test_a_floating_source_is_refused(lab):
    with pytest.raises(SpecError, match="line 2 of the definition file") as error:
        lab.definition("Bootstrap: docker\nFrom: python:3.12\n")
    assert "python:3.12" in error.value.why
    with pytest.raises(SpecError, match="line 1 of the definition file"):
        lab.definition("Bootstrap: debootstrap\nOSVersion: trixie\n")
    assert lab.definition("Bootstrap: docker\nFrom: python:3.12\n", allow_floating=True).materials[0].digest is None


def test_a_definition_is_built_with_digests(lab):
    text = "Bootstrap: docker\nFrom: python:3.12\n\n%post\n    id\n"
    built = lab.definition(text, digests={"python:3.12": DIGEST}, labels={"x.y": "z"})
    identity = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    assert lab.seen("def") == [
        "Bootstrap: docker", f"From: python@{DIGEST}", "", "%post", "    id", "",
        "%labels", f"    hpcenv.definition.digest {identity}", "    x.y z",
    ]  # fmt: skip
    assert built.definition_digest == identity
    assert [(m.what, m.name, m.digest) for m in built.materials] == [("source", f"docker:python@{DIGEST}", DIGEST)]
    assert "SOURCE_DATE_EPOCH" not in dict(line.split("=", 1) for line in lab.seen("env"))
    assert lab.seen("pwd") == [str(lab.out.parent)]


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_what_post_writes_has_the_same_modes_for_every_caller(lab, umask):
    before = os.umask(umask)
    try:
        lab.definition("Bootstrap: scratch\n")
    finally:
        assert os.umask(before) == umask
    assert lab.seen("umask") == ["0022"]


def test_plain_http_is_said_only_when_asked_for(lab):
    lab.definition("Bootstrap: scratch\n")
    assert "--no-https" not in lab.seen("argv")
    lab.definition("Bootstrap: scratch\n", plain_http=True)
    assert "--no-https" in lab.seen("argv")


def test_what_of_the_host_a_build_sees_is_said_and_recorded(lab, tmp_path):
    binds = [Bind(source="/a,b", target="/mnt", read_only=True), Bind(source="/c", target="/d")]
    built = lab.definition("Bootstrap: scratch\n", binds=binds)
    argv = lab.seen("argv")
    mounts = [after for word, after in zip(argv, argv[1:], strict=False) if word == "--mount"]
    assert mounts == ['type=bind,"source=/a,b","destination=/mnt",ro', 'type=bind,"source=/c","destination=/d"']
    assert [m.name for m in built.materials if m.what == "bind"] == ["/a,b:/mnt:ro", "/c:/d:rw"]


def test_who_asks_the_registry_is_known_to_apptainer(lab):
    environ = {**lab.environ, "APPTAINER_DOCKER_USERNAME": "u", "DOCKER_CONFIG": "/c", "REGISTRY": "x"}
    lab.definition("Bootstrap: scratch\n", environ=environ)
    env = dict(line.split("=", 1) for line in lab.seen("env"))
    assert (env["APPTAINER_DOCKER_USERNAME"], env["DOCKER_CONFIG"]) == ("u", "/c")
    assert "REGISTRY" not in env
    assert "APPTAINER_BIND" not in env


def test_a_place_that_cannot_be_written_is_explained(lab):
    (lab.bin / "fail").write_text("FATAL:   While creating SIF: while creating container: open /x: permission denied\n")
    with pytest.raises(ToolFailed, match="the SIF cannot be written"):
        lab.layout()


def test_space():
    assert apptainer_build.space_needed(367_000_000) == pytest.approx(2.27e9, rel=0.01)
    assert apptainer_build.space_needed(367_000_000, 1_170_000_000) == pytest.approx(2.09e9, rel=0.01)


def test_what_a_definition_copies_is_recorded(lab, tmp_path):
    (tmp_path / "base.sif").write_bytes(b"sif")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("1")
    text = "Bootstrap: localimage\nFrom: base.sif\n\n%files\n  data /data\n  'base.sif' /b\n  *.txt /t\n"
    one = lab.definition(text).materials
    assert [m.name for m in one] == ["localimage:base.sif", "data", "base.sif", "*.txt"]
    assert one[0].digest == one[2].digest == "sha256:" + hashlib.sha256(b"sif").hexdigest()
    assert one[3].digest is None
    (tmp_path / "data" / "a").write_text("2")
    two = lab.definition(text).materials
    assert one[1].digest != two[1].digest
    assert one[1].digest.startswith("sha256:")


def test_a_missing_label_in_the_result_is_noticed(lab):
    text = "Bootstrap: scratch\n"
    tiny_sif(lab.bin / "result.sif", {})
    with pytest.raises(ImageMismatch, match="wrong labels"):
        apptainer_build.build_definition(**lab.common({"text": text, "folder": lab.temporary}))


def test_only_our_errors_come_out_of_odd_definitions(lab):
    for text in ("", "x", "\0", "Bootstrap:", "Bootstrap: docker", "bootstrap: \nfrom: {{ x }}@" + DIGEST, "%files\n'"):
        try:
            lab.definition(text, digests={text: DIGEST})
        except HpcenvError as error:
            assert error.what
