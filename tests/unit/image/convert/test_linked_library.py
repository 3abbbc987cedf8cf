"""The version of a shared library that a program is linked with."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hpcenv.image.convert.linked_library import _version_in, library_version

ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}


def test_the_packers_zstd_is_the_one_that_it_maps_when_it_runs(tmp_path: Path) -> None:
    program = shutil.which("mksquashfs")
    if program is None:
        pytest.skip("NOT CHECKED: no mksquashfs on PATH (Debian package squashfs-tools)")
    version = library_version(program, "zstd", env=ENV)
    # The same from the running program: it waits for its archive here.
    with subprocess.Popen(
        [program, "-", str(tmp_path / "out"), "-tar"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as running:
        maps = ""
        while "libc.so" not in maps or "libzstd" not in maps:
            assert running.poll() is None
            maps = Path(f"/proc/{running.pid}/maps").read_text()
        running.kill()
    assert f"libzstd.so.{version}\n" in maps


def test_a_version_is_that_of_the_file_behind_the_links(tmp_path: Path) -> None:
    (tmp_path / "libzstd.so.1.99.7").touch()
    (tmp_path / "libzstd.so.1").symlink_to("libzstd.so.1.99.7")
    says = f"\tlibm.so.6 => /lib/libm.so.6 (0x01)\n\tlibzstd.so.1 => {tmp_path}/libzstd.so.1 (0x00007f)"
    assert _version_in(says, "zstd") == "1.99.7"


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ("\tstatically linked", "unknown: the loader lists no shared libzstd for the program"),
        ("mksquashfs version 4.6.1", "unknown: the loader lists no shared libzstd for the program"),
        ("\tlibzstd.so.1 => not found", "unknown: the loader lists no shared libzstd for the program"),
        ("\tlibzstd.so.1 => /nowhere/libzstd.so.1 (0x1)", "unknown: the name of its file is libzstd.so.1"),
        ("\tlibzstd.so.1 => /nowhere/lib\x1bzstd (0x1)", "unknown: the name of its file is lib\\x1bzstd"),
    ],
)
def test_what_cannot_be_told_is_unknown(says: str, why: str) -> None:
    assert _version_in(says, "zstd") == why


def test_a_script_around_the_program_tells_nothing(tmp_path: Path) -> None:
    program = tmp_path / "mksquashfs"
    program.write_text('#!/bin/sh\nexec /usr/bin/mksquashfs "$@"\n')
    program.chmod(0o755)
    assert library_version(str(program), "zstd", env=ENV).startswith("unknown: ")


def test_a_program_that_is_not_there_is_unknown() -> None:
    assert library_version("/nowhere/mksquashfs", "zstd", env=ENV).startswith("unknown: ")
