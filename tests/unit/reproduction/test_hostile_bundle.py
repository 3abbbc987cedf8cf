"""A bundle of a stranger that asks for everything: nothing of it runs, and each refusal says why. Archives that try to be
written elsewhere are in bundle/test_bundle.py."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hpcenv.records.code_listing import Listing, digest_of
from hpcenv.records.files import load_record, save_record
from hpcenv.records.run_folder import RunFolder
from hpcenv.reproduction.bundle.archive import Archive, BundleMember, write_archive
from hpcenv.reproduction.proofs import file_sha256

RECORDED = Path(__file__).parents[2] / "recorded_runs" / "table-1"
BINDS = """image = "docker://registry/torch:1"
[[bind]]
source = "/"
target = "/host"
read-only = false
[[bind]]
source = "~/.ssh"
target = "/keys"
[env]
LD_PRELOAD = "/host/tmp/evil.so"
BASH_ENV = "/host/tmp/evil.sh"
"""


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What appears if anything of the bundle runs."""
    return tmp_path / "it-ran"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    shutil.copytree(RECORDED, tmp_path / "author", symlinks=True)
    return RunFolder(tmp_path / "author")


def rewrite(run: RunFolder, name: str, text: str) -> None:
    """Change a file of the code, and everything that lists it: the bundle is consistent with itself."""
    path = run.source / name
    path.write_text(text)
    listed = load_record(Listing, run.listing)
    files = {**listed.files, f"source/{name}": file_sha256(path)}
    save_record(Listing(schema=1, files=files), run.listing)
    data = json.loads(run.manifest.read_text())
    data["source"]["digest"] = digest_of(files)
    if name == "train.py":
        data["script_sha256"] = file_sha256(path)
    run.manifest.write_text(json.dumps(data))


def bundle(run: RunFolder, hpcenv: Any, tmp_path: Path) -> Path:
    done = hpcenv("bundle", "make", str(run.path), "-o", "evil.zip", cwd=tmp_path)
    assert done.status == 0, done.stderr
    (tmp_path / "reader").mkdir()
    return tmp_path / "reader"


def test_binds_and_variables_of_a_stranger_are_shown_and_nothing_is_submitted(run, hpcenv, tmp_path):
    rewrite(run, "hpcenv.toml", BINDS)
    reader = bundle(run, hpcenv, tmp_path)
    for rung in ("1", "2", "3"):
        done = hpcenv("reproduce", "../evil.zip", "--rung", rung, "--nproc", "2", cwd=reader, accepts=False)
        assert done.status in (29, 2), done.stderr
    done = hpcenv("reproduce", "../evil.zip", "--rung", "3", cwd=reader, accepts=False)
    assert done.status == 29, done.stderr
    said = " ".join(done.stderr.split())
    for asked in ("/host", "~/.ssh", "LD_PRELOAD", "BASH_ENV"):
        assert asked in said
    assert sorted(os.listdir(reader)) == ["table-1", "table-1-code"]
    assert not (reader / "table-1-code" / "runs").exists()


def test_programs_and_scripts_in_fields_do_not_run(run, hpcenv, tmp_path, mark):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    rewrite(run, "hpcenv.toml", f'image = "host"\npython = "{program}"\n')
    rewrite(run, "train.py", f"open({str(mark)!r}, 'w')\n")
    data = json.loads(run.manifest.read_text())
    data["args"] = [f"$(touch {mark})", f"`touch {mark}`", f"'; touch {mark}; '"]
    run.manifest.write_text(json.dumps(data))
    data = json.loads(run.request.read_text())
    data["options"]["env"] = {"A": f"$(touch {mark})"}
    run.request.write_text(json.dumps(data))
    reader = bundle(run, hpcenv, tmp_path)
    for words in ((), ("--rung", "3", "--dry-run"), ("--rung", "3")):
        done = hpcenv("reproduce", "../evil.zip", *words, cwd=reader, accepts=False)
        assert done.status in (0, 29, 41), done.stderr
        assert not mark.exists()
    assert done.status == 29 and f"python = {program}" in " ".join(done.stderr.split())
    assert hpcenv("report", "table-1", "--html", "r.html", cwd=reader).status == 0
    assert not mark.exists()


def test_an_archive_in_an_archive_stays_a_file(run, hpcenv, tmp_path):
    inner = tmp_path / "inner.zip"
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../out", bytes(200 << 20))
    shutil.copy(inner, run.source / "inner.zip")
    files = {**load_record(Listing, run.listing).files, "source/inner.zip": file_sha256(inner)}
    save_record(Listing(schema=1, files=files), run.listing)
    reader = bundle(run, hpcenv, tmp_path)
    hpcenv("reproduce", "../evil.zip", cwd=reader)
    assert (reader / "table-1/source/inner.zip").read_bytes() == inner.read_bytes()
    assert not (tmp_path / "out").exists() and not (tmp_path / "reader" / "out").exists()


def test_a_directory_that_would_fill_the_memory_is_not_read(tmp_path, hpcenv):
    target = tmp_path / "evil.zip"
    write_archive(target, "b", [BundleMember(name="x", source=b"x")])
    content = bytearray(target.read_bytes())
    # The length of the directory, in its end record (APPNOTE 4.3.16).
    struct.pack_into("<L", content, content.rindex(b"PK\5\6") + 12, 0xF0000000)
    target.write_bytes(bytes(content))
    done = hpcenv("bundle", "verify", "evil.zip", cwd=tmp_path)
    assert done.status == 45 and "its directory has 4026531840 bytes" in done.stderr


def test_a_name_in_the_bundle_that_acts_on_a_terminal_is_escaped(run, hpcenv, tmp_path):
    text = run.manifest.read_text().replace('"run": "table-1"', '"run": "\\u001b]0;x\\u0007\\u001b[2Jtable"')
    run.manifest.write_text(text)
    reader = bundle(run, hpcenv, tmp_path)
    done = hpcenv("reproduce", "../evil.zip", cwd=reader)
    assert "\x1b" not in done.stdout + done.stderr and "\x07" not in done.stdout + done.stderr
    with Archive(tmp_path / "evil.zip") as archive:
        assert archive.folder.isprintable() and os.listdir(reader) == [archive.folder]
