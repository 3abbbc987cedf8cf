"""The image trial of 2026-11-22 again: its cases on a real node, with the real mksquashfs and Apptainer.

Each test names the number of its finding. Cases that need no node are in tests/unit/image/.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import tarfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from layer_cases import base, digest_of, directory, file, header, padded, pax, symlink, tar, write_layout

from .conftest import Cluster, Done

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

BIG = 64 << 20
# As if the limits were for images of some MiB: the real ones take minutes.
SMALL = ("--limit", "ratio_from=1048576", "--limit", "ratio=10")


def sparse(size: int) -> bytes:
    """A layer with one legal sparse file: `size` bytes, of which 1 KiB is data."""
    records = [
        (b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.name", b"big"),
        (b"GNU.sparse.realsize", b"%d" % size),
    ]  # fmt: skip
    stored = padded(b"1\n%d\n%d\n" % (size - 1024, 1024)) + b"d" * 1024
    return pax(records) + header(b"GNUSparseFile.0/big", b"0", size=len(stored)) + stored + bytes(1024)


def shell() -> list[tuple[tarfile.TarInfo, bytes]]:
    """A root file system with this machine's own small shell."""
    found = (b"bin/sh", "/bin/dash"), (b"lib/x86_64-linux-gnu/libc.so.6",) * 2, (b"lib64/ld-linux-x86-64.so.2",) * 2
    pairs = ((name, "/" + path.decode() if isinstance(path, bytes) else path) for name, path in found)
    return [file(name, Path(path).read_bytes(), mode=0o755) for name, path in pairs]


def nest(layout: Path, digest: str) -> None:
    """Put an index between a layout's index and its image, twice."""
    for _ in range(2):
        body = (layout / "index.json").read_bytes()
        document = json.loads(body)
        for entry in document["manifests"]:
            entry.pop("annotations", None)
        inner = json.dumps({**document, "mediaType": "application/vnd.oci.image.index.v1+json"}).encode()
        name = digest_of(inner)
        (layout / "blobs" / "sha256" / name[7:]).write_bytes(inner)
        entry = {"mediaType": "application/vnd.oci.image.index.v1+json", "digest": name, "size": len(inner)}
        (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    assert digest


@dataclass(frozen=True)
class Lab:
    """A folder of alice on n1 with layouts."""

    cluster: Cluster
    folder: str

    def image(self, *words: str) -> Done:
        return self.cluster.run("hpcenv", "image", *words, cwd=self.folder, node="n1", timeout=300)

    def sh(self, script: str) -> Done:
        return self.cluster.run("sh", "-c", script, cwd=self.folder, node="n1", timeout=300)

    def store(self) -> str:
        return f"store-{uuid.uuid4().hex[:6]}"


@pytest.fixture(scope="module")
def lab(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    here = tmp_path_factory.mktemp("lab")
    run = [*shell(), directory(b"var/"), directory(b"usr/there/")]
    write_layout(here / "plain", [tar(*run), tar(file(b"data", os.urandom(8 << 20)))])
    write_layout(here / "zeros", [tar(file(b"zeros", bytes(BIG)))])
    write_layout(here / "sparse", [sparse(BIG)])
    nest(here / "nested", write_layout(here / "nested", [base()]))
    for name in (b"dev", b"proc", b"sys", b"tmp", b"var/tmp"):
        write_layout(here / f"file-{name.decode().replace('/', '-')}", [tar(*run, file(name, b"x"))])
    for name in (b"dev", b"tmp", b"etc"):
        write_layout(here / f"link-{name.decode()}", [tar(*run, symlink(name, b"usr/there"))])
    write_layout(here / "nowhere-tmp", [tar(*run, symlink(b"tmp", b"usr/nowhere"))])
    sent = io.BytesIO()
    with tarfile.open(fileobj=sent, mode="w", format=tarfile.GNU_FORMAT) as archive:
        archive.add(here, ".")
    folder = f"/home/alice/image-trial-{uuid.uuid4().hex[:6]}"
    script = 'mkdir "$1" && tar xf - --no-same-owner -C "$1"'
    cluster.must("sh", "-c", script, "sh", folder, stdin=os.fsdecode(sent.getvalue()), node="n1")
    yield Lab(cluster, folder)
    cluster.run("rm", "-rf", folder, node="n1")


def pulled(lab: Lab, name: str, *words: str, store: str | None = None) -> tuple[str, Done]:
    done = lab.image("pull", f"oci:{name}", "--allow-floating", "--store", store or lab.store(), *words)
    assert done.status == 0, done.text
    return done.stdout.strip(), done


def test_1_nothing_is_pruned_while_verify_reads(lab: Lab) -> None:
    store = lab.store()
    path, _ = pulled(lab, "plain", store=store)
    # `image verify` is stopped while it holds its lease.
    script = f"""
        hpcenv image verify oci:plain --store {store} > verified 2>&1 & verify=$!
        while ! ls {store}/leases/use-* > /dev/null 2>&1; do kill -0 $verify || exit 7; sleep 0.01; done
        kill -STOP $verify
        hpcenv image prune --yes --all --store {store}; pruned=$?
        kill -CONT $verify; wait $verify; echo "verify $? prune $pruned"; cat verified
    """
    done = lab.sh(script)
    assert "verify 0 prune 19" in done.stdout, done.text
    assert "compares a SIF with the layers of" in done.stderr
    assert lab.sh(f"test -e {path}").status == 0
    # What was used a moment ago is spared.
    assert "it was used a short time ago" in lab.image("prune", "--yes", "--store", store).stderr
    assert lab.sh(f"test -e {path}").status == 0
    # It was made from a layout, which may be gone later: prune leaves it also then.
    done = lab.image("prune", "--yes", "--all", "--store", store)
    assert done.status == 0 and "cannot be made again; remove it by hand" in done.stderr, done.text
    assert lab.sh(f"test -e {path}").status == 0


def test_2_the_hint_of_a_limit_works_as_it_is_printed(lab: Lab) -> None:
    store = lab.store()
    done = lab.image("pull", "oci:zeros", "--allow-floating", "--store", store, *SMALL)
    assert done.status == 11, done.text
    assert "more than the limit `ratio` of 10" in done.stderr
    command = done.stderr.rpartition("if you trust this image: `")[2].partition("`")[0]
    assert shlex.split(command)[-2:] == ["--limit", "ratio=none"]
    again = lab.sh(command)
    assert again.status == 0, again.text


def test_3_holes_are_no_data(lab: Lab) -> None:
    path, _ = pulled(lab, "sparse", *SMALL)
    assert lab.image("verify", path, "--image", "oci:sparse").status == 0


def test_5_an_index_in_an_index(lab: Lab) -> None:
    path, done = pulled(lab, "nested")
    assert "1 layers for linux/amd64" in done.stderr
    assert lab.image("verify", path, "--image", "oci:nested").status == 0


@pytest.mark.parametrize("name", ["dev", "proc", "sys", "tmp", "var-tmp"])
def test_7_an_image_that_cannot_be_started_is_named(lab: Lab, name: str) -> None:
    store, folder = lab.store(), "/" + name.replace("-", "/")
    path, done = pulled(lab, f"file-{name}", store=store)
    note = f"note: {folder} of the image is no directory but a file: Apptainer cannot mount {folder}, "
    assert note in done.stderr
    assert note in pulled(lab, f"file-{name}", store=store)[1].stderr  # also when it is there already
    assert lab.sh(f"apptainer exec {path} /bin/sh -c :").status == 255


@pytest.mark.parametrize("name", ["plain", "link-dev", "link-tmp", "link-etc", "nowhere-tmp"])
def test_7_and_no_other_is(lab: Lab, name: str) -> None:
    path, done = pulled(lab, name)
    assert ("note: /tmp of the image is a link to `usr/nowhere`" in done.stderr) == (name == "nowhere-tmp")
    assert "cannot be started\n" not in done.stderr.replace("or the image cannot be started\n", "")
    done = lab.sh(f"apptainer exec {path} /bin/sh -c 'test -c /dev/null && test -e /proc/self && echo ok > /tmp/x$$'")
    assert (done.status == 0) == (name != "nowhere-tmp"), done.text


def test_12_a_local_layout_is_read_in_place(lab: Lab) -> None:
    store = lab.store()
    pulled(lab, "plain", store=store)
    assert int(lab.sh(f"du -sk {store}/blobs | cut -f1").stdout) < 100


@pytest.mark.parametrize("form", ["oci-archive", "docker-archive"])
def test_13_an_archive_that_gzip_packed(lab: Lab, form: str) -> None:
    """`docker save` writes its layers and a list of them; the SIF has the tree of the plain archive."""
    make = """
import json, sys, tarfile, gzip, io, hashlib
with tarfile.open(sys.argv[1], "w:gz") as out:
    if sys.argv[2] == "oci-archive":
        out.add("plain", ".")
    else:
        blob = lambda digest: open(f"plain/blobs/sha256/{digest[7:]}", "rb").read()
        manifest = json.loads(blob(json.load(open("plain/index.json"))["manifests"][0]["digest"]))
        def add(name, data):
            info = tarfile.TarInfo(name); info.size = len(data); out.addfile(info, io.BytesIO(data))
        names = [f"{at}/layer.tar" for at, _ in enumerate(manifest["layers"])]
        for name, layer in zip(names, manifest["layers"]):
            add(name, gzip.decompress(blob(layer["digest"])))
        add("config.json", blob(manifest["config"]["digest"]))
        add("manifest.json", json.dumps([{"Config": "config.json", "RepoTags": ["a:1"], "Layers": names}]).encode())
"""
    name = f"{form}.tar.gz"
    lab.cluster.must("python3", "-", name, form, stdin=make, cwd=lab.folder, node="n1")
    store = lab.store()
    done = lab.image("pull", f"{form}:{name}", "--allow-floating", "--store", store, "--json")
    assert done.status == 0, done.text
    plain = lab.image("pull", "oci:plain", "--allow-floating", "--store", lab.store(), "--json")
    trees = [json.loads(one.stdout)["data"]["record"]["tree_sha256"] for one in (done, plain)]
    assert trees[0] == trees[1]
