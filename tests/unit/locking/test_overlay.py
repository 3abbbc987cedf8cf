"""What may be mounted over an image, and which package is from where."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hpcenv.errors import ImageMismatch, SpecError
from hpcenv.locking import overlay
from hpcenv.project.lockfile import OverlayTable
from hpcenv.project.workspace import Workspace, open_workspace
from hpcenv.records.manifest import Environment, Overlay

CFG = "home = /usr/bin\ninclude-system-site-packages = true\nversion = 3.11.2\n"


def project(folder: Path, value: str, more: str = "", image: str = "docker://registry.example/a/b:1") -> Workspace:
    (folder / "hpcenv.toml").write_text(f'image = "{image}"\noverlay = "{value}"\n{more}')
    return open_workspace(folder)


def make_folder(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(CFG if name == "pyvenv.cfg" else "X = 1\n")
    return folder


def pack(folder: Path) -> Path:
    if shutil.which("mksquashfs") is None:
        pytest.skip("NOT RUN: mksquashfs is not installed")
    path = folder.with_suffix(".sqsh")
    subprocess.run(["mksquashfs", folder, path, "-quiet", "-no-progress", "-noappend", "-comp", "gzip"], check=True)
    return path


def test_what_has_a_pyvenv_cfg_is_a_virtual_environment_of_the_image(tmp_path: Path) -> None:
    source = pack(make_folder(tmp_path / "v", "pyvenv.cfg", "lib/module.py"))
    found = overlay.find(project(tmp_path, f"{source}:/user-software/"))
    assert (found.overlay.use, found.overlay.target) == ("venv", "/user-software")
    assert (found.interpreter, found.version) == ("/usr/bin/python3", "3.11.2")


def test_anything_else_is_packages_for_pythonpath(tmp_path: Path) -> None:
    pack(make_folder(tmp_path / "x", "module.py"))
    workspace = project(tmp_path, "x.sqsh:/opt/extra")
    found = overlay.find(workspace)
    assert found.overlay.use == "packages"
    table = overlay.identify(found.overlay, "/image/own")
    assert overlay.locked_overlay(workspace, table).python_path == "/opt/extra:/image/own"


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("module.py", "x:/opt/extra", "x.sqsh:/opt/extra"),
        ("module.py", "x", "x.sqsh:/opt/packages"),
        ("pyvenv.cfg", "x", "x.sqsh:{x}"),
        ("pyvenv.cfg", "x/", "x.sqsh:{x}"),
    ],
)
def test_a_folder_is_refused_with_the_command_that_packs_it(tmp_path: Path, name: str, value: str, line: str) -> None:
    folder = make_folder(tmp_path / "x", name)
    with pytest.raises(SpecError, match="is a folder") as caught:
        overlay.find(project(tmp_path, value))
    assert f"mksquashfs {folder} {folder}.sqsh" in str(caught.value.hint)
    assert f'overlay = "{line.format(x=folder)}"' in str(caught.value.hint)


def test_a_squashfs_without_target_is_refused_with_the_line_that_has_one(tmp_path: Path) -> None:
    pack(make_folder(tmp_path / "x", "usr/lib/module.py"))
    with pytest.raises(SpecError, match="has no target") as caught:
        overlay.find(project(tmp_path, "x.sqsh"))
    assert 'overlay = "x.sqsh:/opt/packages"' in str(caught.value.hint)


@pytest.mark.parametrize(
    ("locked", "words"),
    [
        (OverlayTable(form="folder", use="packages", target="/opt/x", content="sha256:0"), "a folder at /opt/x"),
        (OverlayTable(form="folder", use="venv", content="sha256:0"), "a folder at its own path"),
        (OverlayTable(form="squashfs", use="layer", sha256="0"), "a squashfs over the whole image"),
    ],
)
def test_what_an_older_lockfile_mounts_otherwise_is_refused(tmp_path: Path, locked: OverlayTable, words: str) -> None:
    with pytest.raises(SpecError, match=f"cannot be mounted: it is {words}") as caught:
        overlay.locked_overlay(project(tmp_path, "x"), locked)
    assert "mksquashfs DIR x.sqsh" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("value", "more", "what"),
    [
        ("nowhere", "", "cannot be read"),
        ("file", "", "is not a squashfs"),
        ("x.sqsh:/opt/a:b", "", "nothing can be mounted at"),
        ("v.sqsh:/opt/a,b", "", "nothing can be mounted at"),
        ("v.sqsh:/opt/v", 'python = "/usr/bin/python3"\n', "would not be used"),
        ("v.sqsh:/opt/v", '[[bind]]\nsource = "/data"\ntarget = "/opt/v/lib"\n', "would hide a part of the overlay"),
        ("v.sqsh:/opt/v", '[[bind]]\nsource = "/opt/v"\n', "would hide a part of the overlay"),
    ],
)
def test_what_cannot_be_mounted_is_refused_with_a_reason(tmp_path: Path, value: str, more: str, what: str) -> None:
    pack(make_folder(tmp_path / "v", "pyvenv.cfg"))
    pack(make_folder(tmp_path / "x", "module.py"))
    (tmp_path / "file").write_text("text")
    with pytest.raises(SpecError, match=what) as caught:
        overlay.find(project(tmp_path, value, more))
    assert caught.value.why


def test_the_command_that_packs_a_folder_can_be_pasted(tmp_path: Path) -> None:
    (tmp_path / "my venv; x.img").write_text("text")
    with pytest.raises(SpecError, match="is not a squashfs") as caught:
        overlay.find(project(tmp_path, "my venv; x.img"))
    assert str(caught.value.hint) == "pack the folder with its packages: `mksquashfs FOLDER 'my venv; x.sqsh'`"


def test_without_an_image_there_is_nothing_to_mount_it_over(tmp_path: Path) -> None:
    make_folder(tmp_path / "v", "pyvenv.cfg")
    with pytest.raises(SpecError, match="needs an image"):
        overlay.find(project(tmp_path, "v", image="host"))


@pytest.mark.parametrize("value", ["x:/", "x:/proc/x", "x:/tmp/y", "x:/hpcenv/home", ":/opt"])
def test_a_target_that_the_runtime_or_hpcenv_mounts_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(SpecError, match="is not valid"):
        project(tmp_path, value)


def venv(version: str = "3.11.2") -> overlay.FoundOverlay:
    mounted = Overlay(source="/p/v.sqsh", use="venv", target="/p/v")
    return overlay.FoundOverlay(overlay=mounted, interpreter="/opt/py/bin/python3", version=version)


def image(program: str = "/opt/apptainer") -> Environment:
    return Environment(kind="sif", python="python3", sif="/images/a b.sif", apptainer=program)


def test_a_virtual_environment_of_the_host_or_of_another_python_is_refused() -> None:
    overlay.require_interpreter(venv(), {"values": {"python.version": "3.11.9"}}, "", image())
    with pytest.raises(SpecError, match="was not made for this image") as caught:
        overlay.require_interpreter(venv(), None, "no such file", image("/opt/ce/bin/singularity"))
    assert str(caught.value.hint) == (
        "make it with the Python of the image, in an empty FOLDER: `singularity exec -B FOLDER:/p/v '/images/a b.sif' "
        "python3 -m venv --system-site-packages /p/v`; then install into it, and: `mksquashfs FOLDER v.sqsh`"
    )
    with pytest.raises(SpecError, match="has another Python than the image") as caught:
        overlay.require_interpreter(venv(), {"values": {"python.version": "3.12.1"}}, "", image())
    assert "apptainer exec -B" in str(caught.value.hint)


def test_an_image_without_python3_takes_no_virtual_environment(tmp_path: Path) -> None:
    program = tmp_path / "apptainer"
    program.write_text("#!/bin/sh\necho 'FATAL: \"python3\": executable file not found in $PATH' >&2\nexit 255\n")
    program.chmod(0o755)
    environ = {"PATH": os.environ["PATH"]}
    with pytest.raises(SpecError, match="cannot be used with this image") as caught:
        overlay.require_python(venv().overlay, image(str(program)), environ)
    assert "executable file not found" in str(caught.value.why)
    packages = Overlay(source="/p/x.sqsh", use="packages", target="/opt/x")
    overlay.require_python(packages, image(str(program)), environ)
    program.write_text("#!/bin/sh\necho '[\"/\"]'\n")
    overlay.require_python(venv().overlay, image(str(program)), environ)


def package(name: str, location: str, version: str = "1", record: str = "r", content: str = "c") -> dict[str, str]:
    return {
        "name": name,
        "version": version,
        "location": location,
        "record-sha256": record,
        "content-sha256": content,
    }


def test_the_packages_of_a_virtual_environment_are_those_below_its_prefix() -> None:
    answer = {
        "values": {"python.prefix": "/p/v"},
        "packages": [package("new", "lib/site-packages"), package("numpy", "lib/site-packages", "2"),
                     package("torch", "{base-prefix}/lib/dist-packages")],
    }  # fmt: skip
    base = {"packages": [package("numpy", "lib/dist-packages", "1"), package("torch", "lib/dist-packages")]}
    found = overlay.origins(venv().overlay, answer, base)
    assert {name: origin.hides for name, origin in found.items()} == {"new": "", "numpy": "1"}


def test_the_packages_on_pythonpath_are_those_at_the_target() -> None:
    mounted = Overlay(source="/p/x.sqsh", use="packages", target="/usr/local/extra")
    answer = {
        "values": {"python.prefix": "/usr"},
        "packages": [package("a", "local/extra"), package("b", "lib/dist-packages"), package("c", "/opt/other")],
    }
    assert list(overlay.origins(mounted, answer, None)) == ["a"]


def test_the_same_tree_packed_twice_has_one_tree_digest_and_two_hashes(tmp_path: Path) -> None:
    first = pack(make_folder(tmp_path / "x", "module.py"))
    other = tmp_path / "y.sqsh"
    subprocess.run(
        [
            "mksquashfs",
            tmp_path / "x",
            other,
            "-quiet",
            "-no-progress",
            "-comp",
            "gzip",
            "-b",
            "65536",
            "-mkfs-time",
            "7",
        ],
        check=True,
    )
    one, two = (
        overlay.identify(Overlay(source=str(path), use="packages", target="/opt/x"), "") for path in (first, other)
    )
    assert one.sha256 != two.sha256
    assert one.tree_sha256 == two.tree_sha256


def test_submit_refuses_another_overlay_and_policy_makes_it_a_note(tmp_path: Path) -> None:
    path = pack(make_folder(tmp_path / "x", "module.py"))
    workspace = project(tmp_path, "x.sqsh:/opt/extra")
    found = overlay.find(workspace).overlay
    locked = overlay.identify(found, "")
    path.write_bytes(path.read_bytes() + b"X")
    with pytest.raises(ImageMismatch, match="is not the locked overlay"):
        overlay.require_locked(found, locked, None, must=True, relock=overlay.Command("hpcenv", "lock"))
    _, notes = overlay.require_locked(found, locked, None, must=False, relock=overlay.Command("hpcenv", "lock"))
    assert "is not the locked overlay" in notes[0]
    path.unlink()
    with pytest.raises(ImageMismatch, match="cannot be read"):
        overlay.require_locked(found, locked, None, must=True, relock=overlay.Command("hpcenv", "lock"))
