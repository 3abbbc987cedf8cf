"""An executable that plays `apptainer build`: it makes a small real SIF of an OCI layout or of a definition file.

Not a mock of hpcenv's code: it stands at the process boundary, where Debian 12 has no
Apptainer. The squashfs in the SIF is made by the real mksquashfs.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile

import pytest

# `{salt}` is a file whose bytes go into the SIF at a place that is not the image's, `{salt}-files` a folder of more, and
# `{builds}` one that gets a line for every build.
BUILD = r"""
def opened(path):
    import tarfile
    file = open(path, "rb")
    packed = file.read(4) == b"\x28\xb5\x2f\xfd"
    file.seek(0)
    if not packed:
        return tarfile.open(fileobj=file)
    import zstandard
    return tarfile.open(fileobj=zstandard.ZstdDecompressor().stream_reader(file), mode="r|")


def build(words, salt, builds):
    import json, os, shutil, struct, subprocess, tarfile, tempfile
    recipe, result = open(words[-1]).read(), words[-2]
    from_layout = "Bootstrap: oci" in recipe
    digest = recipe.split("From: ")[1].split()[0].rpartition("@")[2] if "From: " in recipe else "none"
    blob = lambda name: os.path.join("layout", "blobs", "sha256", name.partition(":")[2])
    layers = json.load(open(blob(digest)))["layers"] if from_layout else []
    labels = {}
    for part in recipe.split("%labels\n")[1:]:
        rows = part.split("\n%")[0].split("\n\n")[0].splitlines()
        labels.update(line.split(None, 1) for line in rows if line.startswith("    "))
    root = tempfile.mkdtemp(dir=os.environ["TMPDIR"])
    os.chmod(root, 0o755)
    for layer in layers:
        with opened(blob(layer["digest"])) as tar:
            tar.extractall(root, filter="fully_trusted") if hasattr(tarfile, "data_filter") else tar.extractall(root)
    if os.path.isdir(salt + "-files"):
        shutil.copytree(salt + "-files", root, dirs_exist_ok=True)
    os.mkdir(os.path.join(root, ".singularity.d"))
    shutil.copyfile(salt, os.path.join(root, ".singularity.d", "salt"))
    made = os.path.join(os.environ["TMPDIR"], "made.sqfs")
    options = "-quiet -no-progress -noappend -all-root -no-xattrs -mkfs-time 0 -all-time 0 -comp gzip".split()
    env = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    subprocess.run(["mksquashfs", root, made, *options], check=True, env=env, stdout=subprocess.DEVNULL)
    squashfs = open(made, "rb").read()
    meta = json.dumps({"data": {"attributes": {"labels": labels}}}).encode()
    rows, data = b"", b""
    objects = [
        (0x4006, b"inspect-metadata.json", meta.ljust(8192, b" "), b""),
        (0x4004, b"", squashfs, struct.pack("<ii3s", 1, 2, b"02\0")),
    ]
    for number, (kind, name, body, extra) in enumerate(objects, 1):
        place = (4096 + len(data), len(body), len(body), 1, 1, 0, 0)
        rows += struct.pack("<iBIIIqqqqqqq128s384s", kind, 1, number, 0xF0000001, 0, *place, name, extra)
        data += body
    head = (b"", b"SIF_MAGIC\0", b"01\0", b"02\0", os.urandom(16), 1, 1, 0, 2, 128, len(rows), 4096, len(data))
    front = struct.pack("<32s10s3s3s16s8q", *head) + rows
    open(result, "wb").write(front.ljust(4096, b"\0") + data)
    open(builds, "a").write(digest + "\n")
"""


def require_mksquashfs() -> None:
    """Skip, loudly, where there is no mksquashfs."""
    if shutil.which("mksquashfs") is None:
        pytest.skip("NOT CHECKED: no mksquashfs on PATH (Debian package squashfs-tools)")


def tar_layer(files: dict[str, bytes]) -> bytes:
    """Return a layer with these files, always the same bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def sha(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()
