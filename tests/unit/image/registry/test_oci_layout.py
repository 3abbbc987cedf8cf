"""oci_layout: images in folders and tar archives, made by every tool, also by a bad one."""

import gzip
import hashlib
import io
import json
import os
import tarfile
import threading

import pytest
from http_server import DOCKER, OCI, sha

from hpcenv.errors import FileUnusable, HpcenvError, ImageUnavailable, SpecError
from hpcenv.image import reference as references
from hpcenv.image.registry import blobs, gzip_reader, oci_layout
from hpcenv.image.registry.blobs import BlobSpec

TARS = (b"tar one" * 1000, b"tar two" * 3000)


def config_of(tars=TARS, arch="amd64", **more):
    return json.dumps(
        {
            "architecture": arch,
            "os": "linux",
            "config": {"Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [sha(tar) for tar in tars]},
            **more,
        }
    ).encode()


class Layout:
    """An OCI layout as a mapping of names to bytes."""

    def __init__(self):
        self.files = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}
        self.entries = []

    def blob(self, data):
        self.files[f"blobs/sha256/{sha(data)[7:]}"] = data
        return {"digest": sha(data), "size": len(data)}

    def image(self, tars=TARS, arch="amd64", **config):
        settings = config_of(tars, arch, **config)
        packed = [gzip.compress(tar, mtime=0) for tar in tars]
        manifest = {
            "schemaVersion": 2,
            "mediaType": OCI + "manifest.v1+json",
            "config": {"mediaType": OCI + "config.v1+json", **self.blob(settings)},
            "layers": [{"mediaType": OCI + "layer.v1.tar+gzip", **self.blob(layer)} for layer in packed],
        }
        return {"mediaType": OCI + "manifest.v1+json", **self.blob(json.dumps(manifest).encode())}

    def index(self, *entries):
        body = {"schemaVersion": 2, "mediaType": OCI + "index.v1+json", "manifests": list(entries)}
        return {"mediaType": OCI + "index.v1+json", **self.blob(json.dumps(body).encode())}

    def name(self, entry, tag=None, **annotations):
        if tag is not None:
            annotations["org.opencontainers.image.ref.name"] = tag
        self.entries.append({**entry, "annotations": annotations})
        return entry

    def finished(self):
        return {**self.files, "index.json": json.dumps({"schemaVersion": 2, "manifests": self.entries}).encode()}

    def folder(self, path):
        for name, data in self.finished().items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
        return references.parse_source(f"oci:{path}")

    def archive(self, path, prefix="", **options):
        return tar(path, {prefix + name: data for name, data in self.finished().items()}, "oci-archive", **options)


def tar(path, files, kind="docker-archive", links=(), form=tarfile.PAX_FORMAT):
    with tarfile.open(path, "w", format=form) as out:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
        for name, kind_of_link, target in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind_of_link, target
            out.addfile(member)
    return references.parse_source(f"{kind}:{path}")


def saved(tars=TARS, packed=(), names=("lab/img:1",), **config):
    """The files of a docker archive in today's form."""
    settings = config_of(tars, **config)
    layers = [gzip.compress(tar, mtime=0) if number in packed else tar for number, tar in enumerate(tars)]
    paths = [f"blobs/sha256/{sha(tar)[7:]}" for tar in tars]
    files = {f"blobs/sha256/{sha(settings)[7:]}": settings, **dict(zip(paths, layers, strict=True))}
    entry = {"Config": f"blobs/sha256/{sha(settings)[7:]}", "RepoTags": list(names), "Layers": paths}
    return files, entry


def save(path, *images, **options):
    files = {name: data for found, _ in images for name, data in found.items()}
    files["manifest.json"] = json.dumps([entry for _, entry in images]).encode()
    return tar(path, files, **options)


def bodies(source, tmp_path, image=None):
    """Fetch an image's layers, and return their bytes."""
    image = image or oci_layout.resolve(source)
    specs = [BlobSpec(digest=layer.digest, size=layer.size) for layer in image.layers]
    with oci_layout.open_source(source, image) as opened:
        store, leases = tmp_path / "store", tmp_path / "leases"
        leases.mkdir(parents=True, exist_ok=True)
        return [path.read_bytes() for path in blobs.fetch_all(specs, opened, store, leases=leases)]


def refused(source, kind=ImageUnavailable, **options):
    with pytest.raises(kind) as error:
        oci_layout.resolve(source, **options)
    assert str(source) in error.value.what or source.path in error.value.what
    return error.value


# --- layouts -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["folder", "archive", "./archive", "gnu archive"])
def test_a_layout_is_described_by_its_own_digests(tmp_path, form):
    layout = Layout()
    entry = layout.name(layout.image(), "v1")
    if form == "folder":
        source = layout.folder(tmp_path / "it")
    else:
        options = {"form": tarfile.GNU_FORMAT} if form.startswith("gnu") else {}
        source = layout.archive(tmp_path / "it.tar", prefix="./" if form.startswith("./") else "", **options)
    image = oci_layout.resolve(source)
    assert (image.reference, image.registry, image.repository) == (str(source), "", "")
    assert (image.manifest_digest, image.index_digest, image.digest_origin) == (entry["digest"], None, "layout")
    assert [layer.diff_id for layer in image.layers] == [sha(data) for data in TARS]
    assert sha(image.manifest) == image.manifest_digest
    assert sha(image.config_bytes) == image.config_digest
    assert image.platforms == ("linux/amd64",)
    assert [gzip.decompress(body) for body in bodies(source, tmp_path, image)] == list(TARS)


def test_an_index_in_a_layout(tmp_path):
    layout = Layout()
    arm = {**layout.image(arch="arm64"), "platform": {"os": "linux", "architecture": "arm64"}}
    amd = {**layout.image(), "platform": {"os": "linux", "architecture": "amd64"}}
    index = layout.name(layout.index(arm, amd), "v1")
    source = layout.folder(tmp_path / "it")
    image = oci_layout.resolve(source)
    assert (image.index_digest, image.manifest_digest) == (index["digest"], amd["digest"])
    assert image.platforms == ("linux/amd64", "linux/arm64")
    assert (
        oci_layout.resolve(source, platform=references.parse_platform("linux/arm64")).manifest_digest == arm["digest"]
    )
    assert (
        "available platforms: linux/amd64, linux/arm64"
        in refused(source, platform=references.parse_platform("linux/ppc64le")).why
    )


def test_a_layout_that_is_its_own_index(tmp_path):
    layout = Layout()
    for arch in ("arm64", "amd64"):
        layout.entries.append({**layout.image(arch=arch), "platform": {"os": "linux", "architecture": arch}})
    source = layout.folder(tmp_path / "it")
    assert oci_layout.resolve(source).manifest_digest == layout.entries[1]["digest"]


def test_one_of_several_is_chosen_by_tag_or_digest(tmp_path):
    layout = Layout()
    one = layout.name(layout.image(created="1"), "v1")
    two = layout.name(layout.image(created="2"), "v2", **{"io.containerd.image.name": "docker.io/lab/img:two"})
    hidden = layout.image(created="3")
    for source in (layout.folder(tmp_path / "it s"), layout.archive(tmp_path / "it s.tar")):

        def named(rest, source=source):
            return oci_layout.resolve(references.parse_source(f"{source}{rest}")).manifest_digest

        assert named(":v1") == one["digest"]
        assert named(":docker.io/lab/img:two") == two["digest"]
        assert named(f"@{two['digest']}") == two["digest"]
        assert named(f"@{hidden['digest']}") == hidden["digest"]
        error = refused(source)
        assert error.what == f"`{source}` could be any of 2 images"
        assert f"name one: '{source}:TAG' or '{source}@sha256:DIGEST'" == str(error.hint), "it has a blank"
        assert error.why == "its images: v1, v2"
        assert refused(references.parse_source(f"{source}:v3")).what == f"`{source}:v3` does not exist"
        assert "is not in it" in refused(references.parse_source(f"{source}@sha256:{'0' * 64}")).why


def test_names_in_an_image_do_not_reach_the_terminal_raw(tmp_path):
    layout = Layout()
    layout.name(layout.image(created="1"), "\x1b[31mred\ud800")
    layout.name(layout.image(created="2"), "v2")
    assert refused(layout.folder(tmp_path / "it")).why == "its images: ?[31mred?, v2"
    names = saved(names=("\x1b[31mred",)), saved(created="2", names=("v2",))
    assert refused(save(tmp_path / "it.tar", *names)).why == "its images: ?[31mred, v2"


def test_an_empty_layout(tmp_path):
    assert "contains no image" in refused(Layout().folder(tmp_path)).what


def test_wrong_bytes_in_a_layout(tmp_path):
    layout = Layout()
    entry = layout.name(layout.image())
    path = f"blobs/sha256/{entry['digest'][7:]}"
    layout.files[path] += b" "
    error = refused(layout.folder(tmp_path))
    assert error.why.startswith(
        f"its manifest has other bytes\nexpected {entry['digest']}\nfound {sha(layout.files[path])}"
    )


def test_a_layer_with_wrong_bytes_or_none(tmp_path):
    layout = Layout()
    layout.name(layout.image())
    source = layout.folder(tmp_path / "it")
    image = oci_layout.resolve(source)
    path = tmp_path / "it/blobs/sha256" / image.layers[0].digest[7:]
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"!")
    with pytest.raises(ImageUnavailable, match="twice with wrong bytes"):
        bodies(source, tmp_path, image)
    path.write_bytes(good[:-1])
    with pytest.raises(ImageUnavailable) as error:
        bodies(source, tmp_path, image)
    assert f"has {len(good) - 1} bytes in it, not {len(good)}" in error.value.why
    path.unlink()
    with pytest.raises(ImageUnavailable) as error:
        bodies(source, tmp_path, image)
    assert "is not in it" in error.value.why


def test_a_transfer_from_files_goes_on_where_it_ended(tmp_path):
    layout = Layout()
    layout.name(layout.image())
    for source in (layout.folder(tmp_path / "it"), layout.archive(tmp_path / "it.tar")):
        image = oci_layout.resolve(source)
        layer = image.layers[0]
        with oci_layout.open_source(source, image) as opened:
            stream = opened.fetch(layer.digest, layer.size, 7, stall=1)
            whole = layout.files[f"blobs/sha256/{layer.digest[7:]}"]
            assert (stream.start, b"".join(stream.chunks)) == (7, whole[7:])


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("oci-layout", None), ("oci-layout", b"{}"), ("oci-layout", b"\xff"), ("index.json", None), ("index.json", b"[]"),
        ("index.json", b"{"), ("index.json", b"[" * 100000), ("index.json", b'{"manifests": 7}'), ("index.json", b'{"manifests": [7]}'),
        ("index.json", b'{"manifests": [{}]}'), ("index.json", b'{"manifests": [{"digest": "sha256:../../x"}]}'),
        ("index.json", b'{"manifests": [{"digest": 7, "annotations": 7}]}'), ("index.json", b" " * (4 * 1024 * 1024 + 1)),
    ],
)  # fmt: skip
def test_damaged_layouts(tmp_path, name, data):
    layout = Layout()
    layout.name(layout.image())
    files = {**layout.finished(), name: data}
    if data is None:
        del files[name]
    for number in range(2):
        if number:
            refused(tar(tmp_path / "it.tar", files, "oci-archive"))
            continue
        for place, content in files.items():
            (tmp_path / "it" / place).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "it" / place).write_bytes(content)
        refused(references.parse_source(f"oci:{tmp_path / 'it'}"))


def test_paths_that_are_not_what_was_said(tmp_path):
    layout = Layout()
    layout.name(layout.image())
    layout.folder(tmp_path / "it")
    layout.archive(tmp_path / "it.tar")
    assert "oci-archive:" in refused(references.parse_source(f"oci:{tmp_path}/it.tar")).hint
    assert f"oci:{tmp_path}/it" in refused(references.parse_source(f"oci-archive:{tmp_path}/it")).hint
    assert "does not exist here" in refused(references.parse_source(f"oci:{tmp_path}/nowhere")).why
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in refused(references.parse_source(f"docker-archive:{tmp_path}/pipe")).why
    (tmp_path / "it/index.json").unlink()
    os.mkfifo(tmp_path / "it/index.json")
    assert "is not in it" in refused(references.parse_source(f"oci:{tmp_path}/it")).why


@pytest.mark.ordinary_user
def test_a_file_that_may_not_be_read(tmp_path):
    (tmp_path / "it.tar").write_bytes(b"")
    (tmp_path / "it.tar").chmod(0)
    refused(references.parse_source(f"oci-archive:{tmp_path}/it.tar"), FileUnusable)


# --- docker archives -----------------------------------------------------------------------


def test_a_docker_archive_gets_a_manifest_of_its_own(tmp_path):
    files, entry = saved()
    source = save(tmp_path / "it.tar", (files, entry))
    image = oci_layout.resolve(source)
    config = config_of()
    expected = (
        f'{{"config":{{"digest":"{sha(config)}","mediaType":"{OCI}config.v1+json","size":{len(config)}}},"layers":['
        + ",".join(f'{{"digest":"{sha(t)}","mediaType":"{OCI}layer.v1.tar","size":{len(t)}}}' for t in TARS)
        + f'],"mediaType":"{OCI}manifest.v1+json","schemaVersion":2}}'
    ).encode()
    assert image.manifest == expected
    assert image.manifest_digest == f"sha256:{hashlib.sha256(expected).hexdigest()}"
    assert image.digest_origin == "synthesised"
    assert image.config_digest == sha(config)
    assert bodies(source, tmp_path, image) == list(TARS)


def test_its_digest_does_not_depend_on_how_the_archive_packs_it(tmp_path):
    """Today's docker, docker of old and podman (links), builders (packed layers): one image."""
    now = save(tmp_path / "now.tar", saved())
    packed = save(tmp_path / "packed.tar", saved(packed=(0, 1)))
    config = config_of()
    files = {
        f"{sha(config)[7:]}.json": config, "a" * 64 + "/VERSION": b"1.0", "a" * 64 + "/layer.tar": TARS[0], "two.tar": TARS[1],
        "manifest.json": json.dumps(
            [{"Config": f"{sha(config)[7:]}.json", "RepoTags": None, "Layers": ["a" * 64 + "/layer.tar", "b/layer.tar"]}]
        ).encode(),
    }  # fmt: skip
    old = tar(
        tmp_path / "old.tar", files, links=[("b/layer.tar", tarfile.SYMTYPE, "../c"), ("c", tarfile.LNKTYPE, "two.tar")]
    )
    images = [oci_layout.resolve(source) for source in (now, packed, old)]
    assert len({image.manifest_digest for image in images}) == 1
    for source, image in zip((now, packed, old), images, strict=True):
        assert bodies(source, tmp_path / source.path[-8:-4], image) == list(TARS)


def test_one_of_several_saved_images(tmp_path):
    one, two = saved(names=("lab/img:1", "docker.io/library/python:3")), saved(created="2", names=("lab/img:2",))
    source = save(tmp_path / "it.tar", one, two)

    def named(tag):
        return oci_layout.resolve(references.parse_source(f"{source}:{tag}")).config_digest

    assert named("lab/img:1") == named("1") == named("python:3") == sha(config_of())
    assert named("lab/img:2") == sha(config_of(created="2"))
    assert refused(source).why == "its images: docker.io/library/python:3, lab/img:1, lab/img:2"
    assert "does not exist" in refused(references.parse_source(f"{source}:lab/img:3")).what


def test_a_saved_image_for_another_platform(tmp_path):
    assert refused(save(tmp_path / "it.tar", saved(arch="arm64"))).why == "it is an image for linux/arm64"


@pytest.mark.parametrize("damage", ["cut", "other", "bomb", "bzip2"])
def test_packed_layers_that_cannot_be_used(tmp_path, damage, monkeypatch):
    import bz2

    monkeypatch.setattr(gzip_reader, "_RATIO_FROM", 1 << 20)
    tars = (b"\0" * 4_000_000,) if damage == "bomb" else TARS[:1]
    files, entry = saved(tars=tars, packed=(0,))
    name = entry["Layers"][0]
    if damage == "cut":
        files[name] = files[name][:-20]
    elif damage == "other":
        files[name] = gzip.compress(b"other")
    elif damage == "bzip2":
        files[name] = bz2.compress(TARS[0])
    why = refused(save(tmp_path / "it.tar", (files, entry))).why
    said = {"cut": "gzip data are damaged", "other": "other bytes", "bomb": "200 times its size", "bzip2": "bunzip2"}
    assert said[damage] in why


@pytest.mark.parametrize(
    "change",
    [
        {"Config": None}, {"Config": "nowhere.json"}, {"Config": "../../etc/passwd"}, {"Config": "/etc/passwd"}, {"Config": "\0"},
        {"Config": "\ud800"}, {"Layers": None}, {"Layers": []}, {"Layers": [7]}, {"Layers": ["nowhere", "nowhere"]}, {"Layers": ["one"]},
    ],
)  # fmt: skip
def test_damaged_docker_archives(tmp_path, change):
    files, entry = saved()
    refused(save(tmp_path / "it.tar", (files, {**entry, **change})))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b"[7]", b"null", b"[" * 100000])
def test_damaged_manifest_json(tmp_path, text):
    refused(tar(tmp_path / "it.tar", {**saved()[0], "manifest.json": text}))


@pytest.mark.parametrize("rootfs", [None, {}, {"diff_ids": [7, 8]}, {"diff_ids": []}, {"diff_ids": ["sha256:x"] * 2}])
def test_damaged_configurations(tmp_path, rootfs):
    refused(save(tmp_path / "it.tar", saved(rootfs=rootfs)))


# --- tar -----------------------------------------------------------------------------------


def test_links_in_a_circle(tmp_path):
    files, entry = saved()
    files = {**files, "manifest.json": json.dumps([{**entry, "Layers": ["a", "b"]}]).encode()}
    refused(tar(tmp_path / "it.tar", files, links=[("a", tarfile.SYMTYPE, "b"), ("b", tarfile.LNKTYPE, "a")]))
    refused(
        tar(
            tmp_path / "it.tar", files, links=[("a", tarfile.SYMTYPE, "../../x"), ("b", tarfile.SYMTYPE, "/etc/passwd")]
        )
    )


def test_names_longer_than_a_header(tmp_path):
    long = "d" * 150 + "/" + "e" * 150
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        files, entry = saved()
        files[long] = files.pop(entry["Layers"][0])
        source = save(tmp_path / f"{form}.tar", (files, {**entry, "Layers": [long, entry["Layers"][1]]}), form=form)
        assert bodies(source, tmp_path) == list(TARS)


@pytest.mark.parametrize("form", ["docker", "docker, gzip layers", "oci"])
@pytest.mark.parametrize("members", [1, 7])
def test_an_archive_that_gzip_packed_as_a_whole(tmp_path, form, members, monkeypatch):
    """Image trial 13: `docker save IMAGE | gzip`. pigz and bgzip write several members."""
    monkeypatch.setattr(gzip_reader, "_KEEP_EVERY", 4096)  # many places to begin from
    monkeypatch.setattr(gzip_reader, "_CHUNK", 1000)
    if form == "oci":
        layout = Layout()
        layout.name(layout.image())
        plain = layout.archive(tmp_path / "it.tar")
    else:
        plain = save(tmp_path / "it.tar", saved(packed=(0, 1) if "gzip" in form else ()))
    data = (tmp_path / "it.tar").read_bytes()
    step = -(-len(data) // members)
    packed = b"".join(gzip.compress(data[at : at + step], mtime=0) for at in range(0, len(data), step))
    (tmp_path / "it.tar.gz").write_bytes(packed + bytes(100))  # padding, as on a tape
    source = references.parse_source(f"{plain.kind}:{tmp_path}/it.tar.gz")
    assert oci_layout.resolve(source).manifest_digest == oci_layout.resolve(plain).manifest_digest
    assert bodies(source, tmp_path) == bodies(plain, tmp_path / "plain")
    assert oci_layout.local_form(tmp_path / "it.tar.gz") == plain.kind
    for cut in (len(packed) // 2, 20):
        (tmp_path / "it.tar.gz").write_bytes(packed[:cut])
        refused(source)
    (tmp_path / "it.tar.gz").write_bytes(packed[:100] + b"damage" + packed[106:])
    refused(source)


def test_a_packed_archive_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(gzip_reader, "_RATIO_FROM", 1 << 20)
    files, entry = saved(tars=(b"\0" * 4_000_000,))
    save(tmp_path / "it.tar", (files, entry))
    (tmp_path / "it.tar.gz").write_bytes(gzip.compress((tmp_path / "it.tar").read_bytes()))
    error = refused(references.parse_source(f"docker-archive:{tmp_path}/it.tar.gz"))
    assert error.why == "it decompresses to more than 200 times its size"
    assert error.hint == f"if this is intended, decompress it first: gunzip < {tmp_path}/it.tar.gz > FILE.tar"


@pytest.mark.parametrize("given", ["oci", "oci-archive", "docker-archive"])
@pytest.mark.parametrize("found", ["layout", "oci-archive", "docker-archive", "empty folder", "empty file"])
def test_files_of_another_form_are_named_as_what_they_are(tmp_path, given, found):
    """Image trial 9 and item 20: folders where files are expected, and the other way round."""
    layout = Layout()
    layout.name(layout.image())
    path = tmp_path / "it"
    if found == "layout":
        layout.folder(path)
    elif found == "oci-archive":
        layout.archive(path)
    elif found == "docker-archive":
        save(path, saved())
    elif found == "empty folder":
        path.mkdir()
    else:
        path.write_bytes(b"")
    source = references.parse_source(f"{given}:{path}")
    right = {"layout": "oci", "oci-archive": "oci-archive", "docker-archive": "docker-archive"}.get(found)
    assert oci_layout.local_form(path) == right
    if right == given:
        assert oci_layout.resolve(source)
        return
    hint = refused(source).hint
    assert hint.endswith(f"{right}:{path}") or right is None


@pytest.mark.parametrize(("magic", "program"), [(b"\xfd7zXZ\0", "unxz"), (b"\x28\xb5\x2f\xfd", "zstd -d")])
def test_an_archive_that_is_packed_as_a_whole(tmp_path, magic, program):
    (tmp_path / "it.tar.gz").write_bytes(magic + b"x" * 100)
    error = refused(references.parse_source(f"docker-archive:{tmp_path}/it.tar.gz"))
    assert program in error.hint


def test_every_cut_of_an_archive_is_refused(tmp_path):
    files, entry = saved()
    # What is needed lies at the end: every cut before it takes something away.
    whole = save(tmp_path / "it.tar", (files, entry))
    data = (tmp_path / "it.tar").read_bytes()
    end = data.rindex(b'"Layers"')
    cut = tmp_path / "cut.tar"
    for length in range(0, end, 499):
        cut.write_bytes(data[:length])
        refused(references.parse_source(f"docker-archive:{cut}"))
    assert oci_layout.resolve(whole)


def test_every_flipped_byte_of_a_header_is_survived(tmp_path):
    source = save(tmp_path / "it.tar", saved(tars=(b"x",)))
    data = bytearray((tmp_path / "it.tar").read_bytes())
    survived = 0
    for position in range(0, 512 * 6, 7):
        changed = bytearray(data)
        changed[position] ^= 0x80 if position % 2 else 0xFF
        (tmp_path / "it.tar").write_bytes(changed)
        try:
            oci_layout.resolve(source)
        except HpcenvError:
            survived += 1
    assert survived > 100


def test_sizes_beyond_the_file(tmp_path):
    # The last one is more than the largest offset of ext4, so the kernel refuses to go there.
    for field in (b"\x80" + b"\xff" * 11, b"77777777777\0", b"zzzzzzzzzzz\0", b"\x80" + (1 << 60).to_bytes(11, "big")):
        header = bytearray(512)
        header[:4] = b"name"
        header[124:136] = field
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        (tmp_path / "it.tar").write_bytes(bytes(header) + b"x" * 512)
        refused(references.parse_source(f"oci-archive:{tmp_path}/it.tar"))


def test_an_archive_of_many_members_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(oci_layout, "_MOST_MEMBERS", 3)
    assert oci_layout.resolve(save(tmp_path / "it.tar", saved(tars=TARS[:1])))
    assert refused(save(tmp_path / "it.tar", saved())).why == "it has more than 3 members"


def test_a_later_member_wins(tmp_path):
    files, entry = saved()
    source = save(tmp_path / "it.tar", ({**files, "./" + entry["Layers"][0]: TARS[1]}, entry))
    assert oci_layout.resolve(source).layers[0].size == len(TARS[1])


def test_zeros_behind_an_archive_are_not_read(tmp_path):
    source = save(tmp_path / "it.tar", saved())
    os.truncate(tmp_path / "it.tar", 1 << 40)  # reading them would take minutes
    assert bodies(source, tmp_path) == list(TARS)


def test_damage_is_named_with_its_position_in_the_archive(tmp_path):
    files, entry = saved(tars=(b"x" * 512,))
    source = save(tmp_path / "it.tar", (files, entry))
    data = bytearray((tmp_path / "it.tar").read_bytes())
    end = data.index(b"x" * 512) + 512
    data[end] ^= 1
    (tmp_path / "it.tar").write_bytes(data)
    why = refused(source).why
    assert why == f"a tar archive is damaged: a header's checksum is wrong\nat byte {end:,} of its uncompressed stream"


def test_empty_headers_do_not_end_an_archive(tmp_path):
    """Other programs would find the members after them; the same image must not have two readings."""
    source = save(tmp_path / "it.tar", saved())
    member = tarfile.TarInfo("g")
    member.type = b"g"
    data = (tmp_path / "it.tar").read_bytes()
    (tmp_path / "it.tar").write_bytes(member.tobuf() * 20_000 + data)
    assert "too many headers" in refused(source).why


def test_closing_while_another_thread_reads(tmp_path):
    layout = Layout()
    layout.name(layout.image(tars=(os.urandom(3 << 20),)))
    source = layout.archive(tmp_path / "it.tar")
    image = oci_layout.resolve(source)
    opened = oci_layout.open_source(source, image)
    stream = opened.fetch(image.layers[0].digest, image.layers[0].size, 0, stall=1)
    first = next(stream.chunks)
    thread = threading.Thread(target=opened.close)
    thread.start()
    thread.join()
    assert sha(first + b"".join(stream.chunks)) == image.layers[0].digest


# --- what a user writes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", references.HostEnvironment()),
        ("a.sif", references.SifFile(path="a.sif")),
        ("/x y/ü.sif", references.SifFile(path="/x y/ü.sif")),
        ("../a.def", references.DefinitionFile(path="../a.def")),
        ("oci:a/b", references.LocalImage(kind="oci", path="a/b")),
        ("oci:/a:v1", references.LocalImage(kind="oci", path="/a", tag="v1")),
        (f"oci:/a@sha256:{'0' * 64}", references.LocalImage(kind="oci", path="/a", digest=f"sha256:{'0' * 64}")),
        ("oci:a@b", references.LocalImage(kind="oci", path="a@b")),
        ("oci-archive:x.tar:r.io/a/b:v1", references.LocalImage(kind="oci-archive", path="x.tar", tag="r.io/a/b:v1")),
        ("docker-archive:x.tar", references.LocalImage(kind="docker-archive", path="x.tar")),
        ("docker-archive:x.sif:lab/img:1", references.LocalImage(kind="docker-archive", path="x.sif", tag="lab/img:1")),
        (
            "docker://python:3",
            references.Reference(registry="docker.io", repository="library/python", tag="3", digest=None),
        ),
    ],
)
def test_sources(text, expected):
    found = references.parse_source(text)
    assert found == expected
    assert references.parse_source(str(found)) == found


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "docker://..., oci:FOLDER"), ("python:3.12", "write docker://docker.io/library/python:3.12"), ("Host", "oci:FOLDER"),
        ("ghcr.io/a/b:1", "write docker://ghcr.io/a/b:1"), ("docker:python", "docker://HOST"), (".sif", ".sif"), ("a.img", "docker://docker.io/library/a.img"),
        ("oci:", "oci:PATH"), ("oci://a", "oci:a"), ("oci::v1", "oci:PATH"), ("oci:a:", "forms are"), ("oci:a: b", "forms are"),
        (f"oci:a:v1@sha256:{'0' * 64}", "omit the tag"), ("oci:a@sha256:00", "forms are"),
        (f"docker-archive:a@sha256:{'0' * 64}", "NAME:TAG"), ("docker-daemon:a:1", "docker save"), ("library://a/b", "apptainer"),
        ("oras://a b", "oras://HOST"), ("oras:a", "oras://HOST"), ("http://a/b.sif", "forms are"), ("file:///a.sif", "forms are"), ("a\nb.sif", "forms are"),
        ("a\0.sif", "forms are"), ("x" * 5000 + ".sif", "forms are"), ("oci:a:" + "-" * 4000, "forms are"),
    ],
)  # fmt: skip
def test_what_names_no_source(text, hint):
    with pytest.raises(SpecError) as error:
        references.parse_source(text)
    assert hint in error.value.hint
    assert "\n" not in error.value.what
    assert "\0" not in error.value.what


def test_media_types_of_a_layout_by_docker(tmp_path):
    layout = Layout()
    manifest = {
        "schemaVersion": 2,
        "mediaType": DOCKER + "distribution.manifest.v2+json",
        "config": {"mediaType": DOCKER + "container.image.v1+json", **layout.blob(config_of())},
        "layers": [{"mediaType": DOCKER + "image.rootfs.diff.tar.gzip", **layout.blob(gzip.compress(t))} for t in TARS],
    }
    layout.name(layout.blob(json.dumps(manifest).encode()))
    assert oci_layout.resolve(layout.folder(tmp_path)).digest_origin == "layout"
