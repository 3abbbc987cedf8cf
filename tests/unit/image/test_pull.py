"""`hpcenv image pull`: what the store has is used, what it has no room for is refused, and what is said of it."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import Served, sha
from layer_cases import base, write_layout

from hpcenv.errors import FileUnusable, ImageUnavailable
from hpcenv.image import free_space
from hpcenv.image.convert.layer_index import LayerLimits
from hpcenv.image.pull import BuiltImage, ConvertOptions, ImageRequest, pull, resolve
from hpcenv.image.reference import parse_layered, parse_platform
from hpcenv.image.registry.source import Access
from hpcenv.image.sif_proof import verify
from hpcenv.image.store.sif_record import ImageRecord, Provenance, SifFacts
from hpcenv.image.store.store import Store
from hpcenv.image.store.store_folder import open_store
from hpcenv.locking.image_path import find_path
from hpcenv.progress import Event
from hpcenv.project.store_config import StorePlace

NOBODY = "127.0.0.1:1"


@pytest.fixture
def registry() -> Iterator[Served]:
    it = Served()
    yield it
    it.close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


def keep(store: Store, served: Served, image: dict[str, Any], *, index: str | None = None, tree: bool = True) -> Path:
    """Put an image of a registry into the store as a pull leaves it: a SIF, its record, manifest and configuration."""
    manifest = served.paths[f"/v2/lab/img/manifests/{image['digest']}"][2]
    config = json.loads(manifest)["config"]["digest"]
    for digest, body in (
        (image["digest"], manifest), (config, served.paths[f"/v2/lab/img/blobs/{config}"][2]),
        *((sha(body), body) for body in (b"a", b"bb", b"ccc")),
    ):  # fmt: skip
        path = store.blobs / "sha256" / digest.partition(":")[2]
        path.write_bytes(body)
        path.chmod(0o444)
    content = b"sif of " + image["digest"].encode()
    record = ImageRecord(
        digest=image["digest"],
        references=(f"docker://{served.host}/lab/img:1",),
        index_digest=index,
        manifest_digest=image["digest"],
        config_digest=config,
        platform="linux/amd64",
        tree_sha256="sha256:" + "7" * 64 if tree else None,
        sif=SifFacts(
            sha256=sha(content)[7:], size=len(content), partition_sha256=None, partition_size=10, compression="zstd",
            architecture="amd64",
        ),
        made=Provenance(builder="hpcenv", tools={}, created="2026-11-20T00:00:00Z"),
    )  # fmt: skip
    with store.scratch(0) as folder:
        (folder / "x").write_bytes(content)
        return store.publish_image(folder / "x", record).path


def request(reference: str, *, plain_http: tuple[str, ...] = (), platform: str = "linux/amd64") -> ImageRequest:
    return ImageRequest(
        source=parse_layered(reference),
        platform=parse_platform(platform),
        access=Access(plain_http=plain_http, environ={"HOME": "/none"}),
    )


def pulled(reference: str, store: Store, *, prove: bool = True, **more: Any) -> tuple[BuiltImage, list[str]]:
    events: list[Event] = []
    found = pull(
        request(reference, **more),
        ConvertOptions(prove=prove),
        place=StorePlace(root=store.root),
        environ={"HOME": "/none"},
        on_event=events.append,
    )
    return found, [event.what for event in events if event.phase == "note"]


# -- what the store has -------------------------------------------------------------------


def test_a_digest_that_the_store_has_is_taken_from_there(store: Store, registry: Served) -> None:
    image = registry.image()
    path = keep(store, registry, image)
    registry.requests.clear()
    for reference in (f"docker://{NOBODY}/lab/img@{image['digest']}", f"docker://{NOBODY}/a:9@{image['digest']}"):
        found, notes = pulled(reference, store)
        assert (found.path, found.reused, found.read) == (path, True, False)
        assert notes == [f"{reference}: already in the store; the registry was not asked"]
        assert find_path(StorePlace(root=store.root), reference) == path
    assert registry.requests == []
    # That registry was not asked whether it has the image, so it is not noted as a place that has the image.
    assert found.record.references == (f"docker://{registry.host}/lab/img:1",)


@pytest.mark.parametrize("by_tag", [False, True])
def test_a_sif_that_others_may_write_to_is_told_before_a_layer_is_fetched(
    store: Store, registry: Served, by_tag: bool
) -> None:
    image = registry.image()
    path = keep(store, registry, image)
    for blob in (store.blobs / "sha256").iterdir():
        blob.unlink()
    path.chmod(0o664)
    registry.requests.clear()
    words = "lab/img:1" if by_tag else f"lab/img@{image['digest']}"
    with pytest.raises(FileUnusable) as caught:
        pulled(f"docker://{registry.host}/{words}", store, plain_http=(registry.host,))
    assert (caught.value.what, path.exists()) == (f"`{path}` is not trusted", True)
    config = json.loads(registry.paths[f"/v2/lab/img/manifests/{image['digest']}"][2])["config"]["digest"]
    assert {name.rpartition("/")[2] for name, _ in registry.requests if "/blobs/" in name} <= {config}


def test_and_before_it_is_verified(store: Store, registry: Served) -> None:
    image = registry.image()
    keep(store, registry, image).chmod(0o664)
    wanted = request(f"docker://{NOBODY}/lab/img@{image['digest']}")
    with pytest.raises(FileUnusable, match="is not trusted"):
        verify(wanted, None, limits=LayerLimits(), place=StorePlace(root=store.root), on_event=lambda _: None)


def test_a_tag_is_asked_for_always(store: Store, registry: Served) -> None:
    keep(store, registry, registry.image())
    registry.requests.clear()
    found, _ = pulled(f"docker://{registry.host}/lab/img:1", store, plain_http=(registry.host,))
    assert found.reused
    assert [path for path, _ in registry.requests if path.endswith("/manifests/1")]


def test_a_registry_that_is_down_leads_to_what_the_tag_was_before(store: Store, registry: Served) -> None:
    image = registry.image()
    keep(store, registry, image)
    registry.close()
    reference = f"docker://{registry.host}/lab/img:1"
    with pytest.raises(ImageUnavailable) as caught:
        pulled(reference, store, plain_http=(registry.host,))
    assert (caught.value.hint or "").endswith(f"`hpcenv image pull {reference}@{image['digest']}`")


def test_an_indexs_digest_leads_to_the_image_of_the_platform(store: Store, registry: Served) -> None:
    image = registry.image()
    index = registry.index([{**image, "platform": {"os": "linux", "architecture": "amd64"}}])["digest"]
    path = keep(store, registry, image, index=index)
    assert pulled(f"docker://{NOBODY}/lab/img@{index}", store)[0].path == path
    with pytest.raises(ImageUnavailable, match="is down"):  # that image is not here, so its registry is asked
        pulled(f"docker://{NOBODY}/lab/img@{index}", store, platform="linux/arm64")
    resolved, _ = resolve(request(f"docker://{NOBODY}/lab/img@{index}"), on_event=lambda _: None, store=store)
    assert (resolved.index_digest, resolved.manifest_digest) == (index, image["digest"])


def test_what_is_kept_means_the_same_as_what_the_registry_says(store: Store, registry: Served) -> None:
    image = registry.image()
    wanted = request(f"docker://{registry.host}/lab/img@{image['digest']}", plain_http=(registry.host,))
    before, _ = resolve(wanted, on_event=lambda _: None)
    keep(store, registry, image)
    registry.requests.clear()
    after, _ = resolve(wanted, on_event=lambda _: None, store=store)
    assert after == before
    assert registry.requests == []


@pytest.mark.parametrize("what", ["manifest", "config"])
@pytest.mark.parametrize("damage", [b"{}", b"", None], ids=["other bytes", "empty", "gone"])
def test_what_is_kept_and_damaged_is_asked_for_again(
    store: Store, registry: Served, what: str, damage: bytes | None
) -> None:
    image = registry.image()
    keep(store, registry, image)
    manifest = json.loads(registry.paths[f"/v2/lab/img/manifests/{image['digest']}"][2])
    digest = image["digest"] if what == "manifest" else manifest["config"]["digest"]
    path = store.blobs / "sha256" / digest[7:]
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    registry.requests.clear()
    wanted = request(f"docker://{registry.host}/lab/img@{image['digest']}", plain_http=(registry.host,))
    found, _ = resolve(wanted, on_event=lambda _: None, store=store)
    assert found.manifest_digest == image["digest"]
    assert registry.requests


def test_a_sif_that_was_never_compared_is_not_enough_unless_no_proof_is_asked(store: Store, registry: Served) -> None:
    image = registry.image()
    path = keep(store, registry, image, tree=False)
    reference = f"docker://{NOBODY}/lab/img@{image['digest']}"
    assert pulled(reference, store, prove=False)[0].path == path
    os.unlink(store.blobs / "sha256" / image["digest"][7:])
    with pytest.raises(ImageUnavailable, match="is down"):  # comparing needs what the image is made of
        pulled(reference, store)


@pytest.mark.ordinary_user
def test_a_store_that_may_only_be_read_serves_a_digest(store: Store, registry: Served) -> None:
    image = registry.image()
    path = keep(store, registry, image)
    os.chmod(store.root, 0o555)
    try:
        assert pulled(f"docker://{NOBODY}/lab/img@{image['digest']}", store)[0].path == path
    finally:
        os.chmod(store.root, 0o755)


# -- what the store has room for ----------------------------------------------------------


def huge(registry: Served, size: int) -> dict[str, Any]:
    kind = "application/vnd.oci.image.layer.v1.tar+gzip"
    layers = [{"mediaType": kind, "digest": sha(n), "size": size if n == b"a" else 1} for n in (b"a", b"bb", b"ccc")]
    return registry.image(manifest={"layers": layers})


def test_a_store_without_room_is_refused_before_a_layer_is_asked_for(store: Store, registry: Served) -> None:
    image = huge(registry, 1 << 39)
    registry.requests.clear()
    with pytest.raises(FileUnusable) as caught:
        pulled(f"docker://{registry.host}/lab/img:1", store, plain_http=(registry.host,))
    first, second = (caught.value.why or "").split("\n")
    assert first == "549.8 GB must be downloaded, and the SIF needs up to 549.8 GB"
    assert second.endswith("nothing was downloaded")
    assert caught.value.what == f"there is not enough space in `{store.root}` for `docker://{registry.host}/lab/img:1`"
    layers = {sha(n) for n in (b"a", b"bb", b"ccc")}
    assert not [path for path, _ in registry.requests if path.rpartition("/")[2] in layers]
    assert os.listdir(store.leases) == os.listdir(store.tmp) == []
    assert image["digest"]


def test_what_has_arrived_need_not_fit_again(store: Store, registry: Served) -> None:
    registry.image()
    wanted = request(f"docker://{registry.host}/lab/img:1", plain_http=(registry.host,))
    image, _ = resolve(wanted, on_event=lambda _: None)
    assert free_space.missing(image, store) == 6
    place = store.blobs / "sha256"
    (place / sha(b"ccc")[7:]).write_bytes(b"ccc")
    (place / f".{sha(b'bb')[7:]}.part").write_bytes(b"b")
    assert free_space.missing(image, store) == 2


def test_nothing_is_refused_that_is_there_or_that_another_process_makes(store: Store, registry: Served) -> None:
    image = huge(registry, 1 << 39)
    wanted = request(f"docker://{registry.host}/lab/img:1", plain_http=(registry.host,))
    resolved, _ = resolve(wanted, on_event=lambda _: None)
    with store.lease(image["digest"], purpose="converts it", timeout=1):
        free_space.require_room(resolved, store)
    with pytest.raises(FileUnusable):
        free_space.require_room(resolved, store)
    keep(store, registry, image)
    free_space.require_room(resolved, store)


def test_layers_of_zstd_may_give_a_larger_sif(store: Store, registry: Served) -> None:
    wanted = request(f"docker://{registry.host}/lab/img:1", plain_http=(registry.host,))
    sizes = []
    for packed in ("gzip", "zstd"):
        kind = f"application/vnd.oci.image.layer.v1.tar+{packed}"
        registry.image(
            manifest={"layers": [{"mediaType": kind, "digest": sha(n), "size": 10**9} for n in (b"a", b"b", b"c")]}
        )
        sizes.append(free_space.sif_size(resolve(wanted, on_event=lambda _: None)[0]))
    assert sizes == [3 * 10**9 + (64 << 20), 39 * 10**8 + (64 << 20)]


# -- the verb -----------------------------------------------------------------------------


def test_the_next_command_works_as_it_is_printed(store: Store, registry: Served, hpcenv: Any, tmp_path: Path) -> None:
    image = registry.image()
    path = keep(store, registry, image)
    environ = {"PATH": "/nonexistent", "HOME": str(tmp_path)}
    reference = f"docker://{registry.host}/lab/img:1"

    def run(*words: str, status: int = 0) -> Any:
        done = hpcenv("image", *words, "--store", "store", cwd=tmp_path, environ=environ)
        assert done.status == status, done.stderr
        return done

    done = run("pull", reference, "--plain-http", registry.host)
    assert done.stdout == f"{path}\n"
    said, proof = done.stderr.splitlines()[-2:]
    assert said == f"{image['digest']} for linux/amd64: already in the store, not read again, 78 bytes"
    again = f"hpcenv image verify {reference}@{image['digest']} --plain-http {registry.host} --store store"
    assert proof == f"to read it and compare it with the layers: {again}"
    data = run("pull", reference, "--plain-http", "--json").envelope["data"]
    assert (data["reused"], data["read"], data["verify"]) == (True, False, again)
    # The SIF of this test is a line of text.
    refused = hpcenv(*again.split()[1:], cwd=tmp_path, environ=environ)
    assert (refused.status, "is not a SIF" in refused.stderr or "image-mismatch" in refused.stderr) == (11, True)


def test_a_hint_asks_for_an_image_as_it_was_asked_for(registry: Served, hpcenv: Any, tmp_path: Path) -> None:
    registry.image()
    environ = {"PATH": "/nonexistent", "HOME": str(tmp_path)}
    reference = f"docker://{registry.host}/lab/img:1"
    done = hpcenv("image", "verify", reference, "--plain-http", "--store", "none", cwd=tmp_path, environ=environ)
    assert done.status == 10
    assert (
        done.stderr.splitlines()[-1] == f"hint: hpcenv image pull --store none {reference} --plain-http {registry.host}"
    )


def test_the_hint_of_a_limit_is_the_users_own_command(hpcenv: Any, tmp_path: Path) -> None:
    """Image trial 2: the command of the hint had no reference, so it ended in another error."""
    write_layout(tmp_path / "lay", [base()])
    environ = {"PATH": "/nonexistent", "HOME": str(tmp_path)}

    def hint(*words: str, **more: str) -> str:
        done = hpcenv("image", *words, cwd=tmp_path, environ={**environ, **more})
        assert done.status == 11, done.stderr
        return str(done.stderr.splitlines()[-1])

    pull = ("pull", "oci:lay", "--allow-floating", "--store", "a b", "--limit", "entries=1")
    said = "hint: if you trust this image: `hpcenv image "
    assert hint(*pull) == f"{said}pull oci:lay --allow-floating --store 'a b' --limit entries=1 --limit entries=none`"
    after = hpcenv("image", *pull, "--limit", "entries=none", cwd=tmp_path, environ=environ)
    assert "limit" not in after.stderr.splitlines()[-4]
    assert after.status == 8, after.stderr  # neither mksquashfs nor apptainer is on PATH


def test_the_hint_for_another_platform_is_the_users_own_command(registry: Served, hpcenv: Any, tmp_path: Path) -> None:
    registry.image(arch="arm64")
    words = ("image", "pull", f"docker://{registry.host}/lab/img:1", "--plain-http")
    done = hpcenv(*words, cwd=tmp_path, environ={"PATH": "/nonexistent", "HOME": str(tmp_path)})
    assert done.status == 10
    assert f"`hpcenv {' '.join(words)} --platform linux/arm64`" in done.stderr


@pytest.mark.parametrize(
    ("name", "form"), [("lay", "oci"), ("./lay", "oci"), ("lay.tar", "oci-archive"), ("lay.tar.gz", "oci-archive")]
)
@pytest.mark.parametrize("verb", ["pull", "verify"])
def test_a_path_without_a_scheme_leads_to_the_command_with_one(
    hpcenv: Any, tmp_path: Path, verb: str, name: str, form: str
) -> None:
    write_layout(tmp_path / "lay", [base()])
    for suffix, mode in (("tar", "w"), ("tar.gz", "w:gz")):
        with tarfile.open(tmp_path / f"lay.{suffix}", mode) as out:
            out.add(tmp_path / "lay", ".")
    words = ("image", verb, name, "--store", "s")
    done = hpcenv(*words, cwd=tmp_path, environ={"PATH": "/nonexistent", "HOME": str(tmp_path)})
    assert done.status == 3, done.stderr
    assert done.stderr.splitlines()[-1] == f"hint: hpcenv image {verb} {form}:{name} --store s"


def test_inspect_of_a_folder_leads_to_the_command_that_works(hpcenv: Any, tmp_path: Path) -> None:
    """Image trial 9: `image inspect FOLDER` named a pull that was refused."""
    write_layout(tmp_path / "lay", [base()])
    (tmp_path / "empty").mkdir()
    environ = {"PATH": "/nonexistent", "HOME": str(tmp_path)}
    done = hpcenv("image", "inspect", "lay", cwd=tmp_path, environ=environ)
    assert done.stderr.splitlines()[-1] == "hint: to make a SIF from it: `hpcenv image pull oci:lay`"
    assert "`empty` is a folder" in hpcenv("image", "inspect", "empty", cwd=tmp_path, environ=environ).stderr


def test_a_store_that_cannot_be_made_wants_another_place(registry: Served, hpcenv: Any, tmp_path: Path) -> None:
    registry.image()
    words = ("image", "pull", f"docker://{registry.host}/lab/img:1", "--plain-http", "--store", "/proc/x")
    done = hpcenv(*words, cwd=tmp_path, environ={"PATH": "/nonexistent", "HOME": str(tmp_path)})
    assert done.status == 19, done.stderr
    assert done.stderr.splitlines()[-1].startswith("hint: name a folder that you can write to: --store DIR")


def test_hints_name_the_store_that_was_named(store: Store, registry: Served, hpcenv: Any, tmp_path: Path) -> None:
    huge(registry, 1 << 39)
    words = ("image", "pull", f"docker://{registry.host}/lab/img:1", "--plain-http", registry.host)
    environ = {"PATH": "/nonexistent", "HOME": str(tmp_path)}
    typed = hpcenv(*words, "--store", "store", "--trust", "root", cwd=tmp_path, environ=environ).stderr
    assert "\nhint: `hpcenv image prune --store store --trust root`, or use another store (--store, " in typed
    other = hpcenv(*words, cwd=tmp_path, environ={**environ, "HPCENV_STORE": str(store.root)}).stderr
    assert f"\nhint: `hpcenv image prune --store {store.root}`, or" in other
    plain = hpcenv(*words, cwd=tmp_path, environ=environ).stderr
    assert "\nhint: `hpcenv image prune`, or use another store" in plain
    missing = hpcenv(
        "image", "inspect", "--path", "docker://h:1/n:1", "--store", "a b", "--json", cwd=tmp_path, environ=environ
    )
    assert missing.envelope["error"]["hint"] == "hpcenv image pull --store 'a b' docker://h:1/n:1"
    empty = hpcenv("image", "list", "--store", "none", cwd=tmp_path, environ=environ).stderr
    assert empty.endswith("`hpcenv image pull --store none REFERENCE` creates one\n")


@pytest.mark.parametrize(
    "words",
    [
        ("pull", "docker://h:1/n:1", "--plain-http", "http://h:1"),
        ("pull", "--plain-http", "docker://h:1/n:1"),
        ("verify", "docker://h:1/n:1", "--plain-http", "h:1/n"),
        ("build", "x.def", "--plain-http", ""),
    ],
)
def test_what_is_no_registry_is_refused_by_every_verb(words: tuple[str, ...], hpcenv: Any, tmp_path: Path) -> None:
    done = hpcenv("image", *words, cwd=tmp_path, environ={"PATH": "/nonexistent", "HOME": str(tmp_path)})
    assert done.status == 2, done.stderr
    assert "is not HOST or HOST:PORT, for example registry:5000" in done.stderr


def test_every_verb_with_a_store_has_it_in_hints() -> None:
    from click import Context

    from hpcenv.cli import _render
    from hpcenv.cli.image import VERBS
    from hpcenv.cli.image import command as group

    with_store = set()
    for verb in VERBS:
        command = group.get_command(Context(group), verb)
        assert command is not None
        if any("--store" in parameter.opts for parameter in command.params):
            with_store.add(verb)
    assert with_store == set(_render._WITH_STORE)
