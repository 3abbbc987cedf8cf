"""Image trial 7: an image whose /dev is a file was converted without a word, and could not be started."""

from __future__ import annotations

import io

import pytest
from layer_cases import digest_of, directory, file, symlink, tar

from hpcenv.image.convert import layers
from hpcenv.image.convert.mount_points import unusable_mount_points


def notes(*members: object) -> list[str]:
    layer = tar(*members)  # type: ignore[arg-type]
    merged = layers.merge([layers.index_layer(io.BytesIO(layer), diff_id=digest_of(layer))])
    return list(unusable_mount_points(merged.find))


def test_an_ordinary_image_has_no_note() -> None:
    assert notes(file(b"bin/sh", b"")) == []
    assert (
        notes(*(directory(name) for name in (b"dev/", b"proc/", b"sys/", b"tmp/", b"etc/", b"var/", b"var/tmp/"))) == []
    )


@pytest.mark.parametrize("name", [b"dev", b"proc", b"sys", b"tmp", b"var", b"var/tmp"])
def test_a_file_where_a_folder_is_mounted(name: bytes) -> None:
    mounted = "/var/tmp" if name == b"var" else f"/{name.decode()}"
    (note,) = notes(file(name, b"x"))
    assert note == (
        f"/{name.decode()} of the image is no directory but a file: Apptainer cannot mount {mounted}, "
        "so this image cannot be started"
    )


@pytest.mark.parametrize("target", [b"usr/there", b"/usr/there", b"../usr/there", b"./usr/link"])
@pytest.mark.parametrize("name", [b"dev", b"proc", b"sys", b"tmp", b"etc", b"var"])
def test_a_link_to_a_folder_of_the_image_works(name: bytes, target: bytes) -> None:
    assert notes(directory(b"usr/there/"), symlink(b"usr/link", b"there"), symlink(name, target)) == []


@pytest.mark.parametrize("target", [b"usr/nowhere", b"/home/alice/victim", b"bin/sh", b"it"])
def test_a_link_that_leads_to_no_folder_of_the_image(target: bytes) -> None:
    (note,) = notes(file(b"bin/sh", b""), symlink(b"it", b"it"), symlink(b"proc", target))
    assert note.startswith(f"/proc of the image is a link to `{target.decode()}`, which is no directory of the image: ")


def test_etc() -> None:
    """Fault trial R1: stock `apptainer exec` creates files in the folder that such a link names."""
    (note,) = notes(symlink(b"etc", b"/home/alice/victim"))
    assert note == (
        "/etc of the image is a link to `/home/alice/victim`, which is no directory of the image: programs in the "
        "image will not find /etc/passwd, /etc/hosts and /etc/resolv.conf; Apptainer can create files there"
    )
    (note,) = notes(file(b"etc", b""))
    assert note.startswith("/etc of the image is no directory but a file: ")


def test_names_of_an_image_reach_no_terminal() -> None:
    (note,) = notes(symlink(b"tmp", b"a\x1b]0;b\x07"))
    assert "\x1b" not in note
