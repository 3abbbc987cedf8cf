"""A bundle holds what a run was, without credentials; it can be verified, and a hostile one writes nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hpcenv.errors import BundleInvalid, FileUnusable, HpcenvError, UsageError, WouldOverwrite
from hpcenv.records.code_listing import Listing, Untracked, content_of, digest_of
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Manifest, Setting, Source
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.samples import samples_line
from hpcenv.reproduction.bundle.archive import SUMS, Archive, BundleMember, write_archive
from hpcenv.reproduction.bundle.bundle_check import verify_bundle
from hpcenv.reproduction.bundle.make import make
from hpcenv.reproduction.bundle.unpacked import unpack_once
from hpcenv.runs.use import report_use
from tests import measured_runs, use_runs

ROOT = Path(__file__).resolve().parents[4]
TOKEN = "hf_abcdefghijk"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run that has ended, with a copy of its code, a link in it, and a token in its environment."""
    run = measured_runs.make(tmp_path / "runs", "paper", losses=(3.0, 1 / 3))
    shutil.copy(ROOT / "lockfiles" / "default.lock.toml", run.lockfile)
    (run.source / "conf").mkdir(parents=True)
    (run.source / "train.py").write_text("print(1)\n")
    (run.source / "conf" / "base.yaml").write_text("lr: 0.1\n")
    (run.source / "base.yaml").symlink_to("conf/base.yaml")
    listed = ("source/train.py", "source/conf/base.yaml", "source/base.yaml")
    files = {path: content_of(str(run.path / path)) for path in listed}
    save_record(Listing(schema=1, files=files, live={"source/data": "/scratch/data"}), run.listing)
    manifest = load_record(Manifest, run.manifest)
    source = Source(root="/home/a/p", folder=str(run.source), commit="c" * 40, digest=digest_of(files), files=3)
    settings = (Setting(name="HF_TOKEN", value=TOKEN, origin="--env"), Setting(name="LR", value="1", origin="--env"))
    script = str(run.source / "train.py")
    save_record(replace(manifest, source=source, settings=settings, script=script), run.manifest)
    run.checkpoints.mkdir()
    run.log.write_text("step 1\n")
    return run


def test_a_bundle_is_verified_and_unpacks_to_what_the_run_was(run: RunFolder, tmp_path: Path) -> None:
    made = make(run.path, tmp_path / "b.hpcenv.zip", authors=("Doe, Jane",))
    verified = verify_bundle(made.path)
    assert [(check.name, check.result) for check in verified.checks] == [
        ("sums", "match"), ("lockfile", "match"), ("code", "match"), ("image", "absent"), ("record", "match"),
    ]  # fmt: skip
    assert verified.result == "match"
    assert verified.left_out == {
        "source/data": "the copy only links to it",
        "job.log": "logs are left out; --with-log takes it",
        "checkpoints": "checkpoints are left out",
    }
    with Archive(made.path) as archive:
        archive.unpack(tmp_path / "out")
    out = RunFolder(tmp_path / "out")
    assert (out.source / "base.yaml").readlink() == Path("conf/base.yaml")
    assert (out.source / "train.py").read_text() == "print(1)\n"
    losses = [path.relative_to(run.path) for path in sorted(run.metrics.rglob("*.jsonl"))]
    assert len(losses) == 2
    assert all((out.path / path).read_bytes() == (run.path / path).read_bytes() for path in losses)
    assert not {"job.log", "checkpoints", "code"} & set(os.listdir(out.path))
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", SUMS], cwd=out.path, check=True)


def test_an_unpacked_bundle_is_a_run_that_compare_reads(run: RunFolder, tmp_path: Path, hpcenv: object) -> None:
    made = make(run.path, tmp_path / "b.hpcenv.zip")
    with Archive(made.path) as archive:
        archive.unpack(tmp_path / "out")
    done = hpcenv("compare", str(run.path), str(tmp_path / "out"), cwd=tmp_path)  # type: ignore[operator]
    assert done.status == 0, done.text


def test_of_the_samples_a_bundle_has_what_they_say(run: RunFolder, tmp_path: Path, hpcenv: object) -> None:
    for node in use_runs.run(nodes=2, gpus=2, minutes=30, node=lambda *_: {"memory_peak": 71 * use_runs.GB}):
        path = run.samples_of(0, node.node)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(map(samples_line, node.samples)))
    made = make(run.path, tmp_path / "b.hpcenv.zip")
    verified = verify_bundle(made.path)
    assert (verified.result, verified.left_out["samples"]) == ("match", "use.json says what the samples show")
    with Archive(made.path) as archive:
        assert not [name for name in archive.sums if name.startswith("samples")]
        archive.unpack(tmp_path / "out")
    judged = report_use(RunFolder(tmp_path / "out"), load_record(Manifest, run.manifest))
    assert judged == report_use(run, load_record(Manifest, run.manifest))
    assert judged is not None and [one.text for one in judged.sentences] == [
        "peak memory 71 of 80 GB of n1", "peak memory 71 of 80 GB of n2",
    ]  # fmt: skip
    (tmp_path / "out" / "use.json").write_text("{")
    assert report_use(RunFolder(tmp_path / "out"), load_record(Manifest, run.manifest)) is None


def test_the_same_run_gives_the_same_bytes(run: RunFolder, tmp_path: Path) -> None:
    one = make(run.path, tmp_path / "one.hpcenv.zip")
    os.utime(run.source / "train.py", (1, 1))
    two = make(run.path, tmp_path / "b.zip")
    assert one.sha256 == two.sha256
    with Archive(two.path) as archive:
        assert archive.folder == "paper"  # the run, whatever the file is called


@pytest.mark.parametrize("name", ["../../out", "sweep/0003", "\x1b[2J", ".", ""])
def test_the_folder_in_the_archive_is_a_plain_name_whatever_the_run_is_called(
    run: RunFolder, tmp_path: Path, name: str
) -> None:
    save_record(replace(load_record(Manifest, run.manifest), run=name), run.manifest)
    with Archive(make(run.path, tmp_path / "b.zip").path) as archive:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", archive.folder)


def test_no_credential_is_in_a_bundle(run: RunFolder, tmp_path: Path) -> None:
    made = make(run.path, tmp_path / "b.hpcenv.zip")
    with zipfile.ZipFile(made.path) as archive:
        assert not [name for name in archive.namelist() if TOKEN.encode() in archive.read(name)]
        settings = json.loads(archive.read("paper/manifest.json"))["settings"]
    assert [setting["value"] for setting in settings] == ["(value not recorded)", "1"]


def add_code(run: RunFolder, files: Mapping[str, str], untracked: dict[str, Untracked] | None) -> None:
    """Put files into the copy of the code, as the submission would have listed them."""
    for name, text in files.items():
        (run.source / name).parent.mkdir(parents=True, exist_ok=True)
        (run.source / name).write_text(text)
    found = load_record(Listing, run.listing)
    listed = {**found.files, **{f"source/{name}": content_of(str(run.source / name)) for name in files}}
    known = None if untracked is None else {f"source/{name}": one for name, one in untracked.items()}
    save_record(replace(found, files=listed, untracked=known), run.listing)
    manifest = load_record(Manifest, run.manifest)
    assert manifest.source is not None
    save_record(replace(manifest, source=replace(manifest.source, digest=digest_of(listed))), run.manifest)


SECRETS = {
    "secrets.yaml": "hf_token: hf_AAA\n",
    "conf/credentials.json": "{}\n",
    "keys.py": 'API_KEY = "abcdefgh"\n',
    "conf/db.ini": "password = hunter22\n",
}


def test_untracked_code_that_looks_like_a_credential_is_left_out_and_listed(run: RunFolder, tmp_path: Path) -> None:
    plain = {"model.py": "X = 1\n", "conf/local.yaml": "max_tokens: 4096\n"}
    add_code(run, {**SECRETS, **plain}, dict.fromkeys((*SECRETS, *plain), "other"))
    made = make(run.path, tmp_path / "b.hpcenv.zip")
    assert {
        path: why for path, why in made.left_out.items() if path.startswith("source/") and path != "source/data"
    } == {
        "source/secrets.yaml": "its name is typical of a file with credentials",
        "source/conf/credentials.json": "its name is typical of a file with credentials",
        "source/keys.py": "line 1 looks like a credential",
        "source/conf/db.ini": "line 1 looks like a credential",
    }
    with zipfile.ZipFile(made.path) as archive:
        names = set(archive.namelist())
    assert {"paper/source/model.py", "paper/source/conf/local.yaml"} <= names
    assert not {f"paper/source/{name}" for name in SECRETS} & names
    verified = verify_bundle(made.path)
    code = next(check for check in verified.checks if check.name == "code")
    assert code.result == "unknown" and "not in the bundle: source/conf/credentials.json" in code.detail
    assert verified.left_out == made.left_out


def test_what_git_tracks_and_what_include_names_is_in_a_bundle(run: RunFolder, tmp_path: Path) -> None:
    add_code(run, SECRETS, {"secrets.yaml": "include", "conf/db.ini": "include"})
    made = make(run.path, tmp_path / "b.hpcenv.zip")
    assert not [path for path in made.left_out if path.startswith("source/") and path != "source/data"]
    assert verify_bundle(made.path).result == "match"


def test_of_a_run_that_does_not_say_what_git_tracks_names_and_content_decide(run: RunFolder, tmp_path: Path) -> None:
    """A run of an hpcenv from before 2026-11-25, which copied text that git ignores."""
    add_code(run, SECRETS, None)
    data = json.loads(run.listing.read_text())
    del data["untracked"]
    run.listing.write_text(json.dumps(data))
    made = make(run.path, tmp_path / "b.hpcenv.zip")
    assert {f"source/{name}" for name in SECRETS} <= set(made.left_out)
    assert made.left_out["source/keys.py"].endswith("; the run does not say whether git tracks it")


def test_a_linked_file_is_listed_with_the_reason(run: RunFolder, tmp_path: Path) -> None:
    found = load_record(Listing, run.listing)
    live = {f"source/{name}": f"/p/{name}" for name in ("data", "a.yaml", ".env")}
    untracked: dict[str, Untracked] = {"source/a.yaml": "ignored", "source/.env": "credential"}
    save_record(replace(found, live=live, untracked=untracked), run.listing)
    left_out = make(run.path, tmp_path / "b.hpcenv.zip").left_out
    assert {path: left_out[path] for path in live} == {
        "source/data": "the copy only links to it",
        "source/a.yaml": "git ignores it, and the copy only links to it",
        "source/.env": "it looks like a credential, and the copy only links to it",
    }


def test_an_argument_that_is_named_like_a_credential_gets_a_note(
    run: RunFolder, tmp_path: Path, hpcenv: object
) -> None:
    args = ("--lr", "1", "--hf-token", "abcdefgh", "--db-password=hunter22")
    save_record(replace(load_record(Manifest, run.manifest), args=args), run.manifest)
    done = hpcenv("bundle", "make", str(run.path), "-o", "b.zip", cwd=tmp_path)  # type: ignore[operator]
    assert done.status == 0, done.stderr
    assert "note: --hf-token, --db-password: an argument of the script that looks like a credential" in done.stderr
    assert "hunter22" not in done.stdout + done.stderr
    (tmp_path / "b.zip").unlink()
    save_record(replace(load_record(Manifest, run.manifest), args=("--tokens", "4096")), run.manifest)
    assert make(run.path, tmp_path / "b.zip").notes == ()


def test_a_run_that_has_no_result_gets_a_note(run: RunFolder, tmp_path: Path, hpcenv: object) -> None:
    run.finished.unlink()
    done = hpcenv("bundle", "make", str(run.path), "-o", "b.zip", cwd=tmp_path)  # type: ignore[operator]
    assert done.status == 0, done.stderr
    assert "note: the run is not completed (has not ended): the bundle has no result" in done.stderr


def test_a_file_with_the_value_of_a_credential_is_refused(run: RunFolder, tmp_path: Path) -> None:
    run.log.write_text(f"logged in with {TOKEN}\n")
    make(run.path, tmp_path / "without.hpcenv.zip")
    with pytest.raises(UsageError, match=r"`job.log` holds the value of HF_TOKEN") as caught:
        make(run.path, tmp_path / "b.hpcenv.zip", log=True)
    assert TOKEN not in str(caught.value)
    assert not (tmp_path / "b.hpcenv.zip").exists()


def test_code_that_the_run_changed_is_left_out_and_the_code_is_then_unknown(run: RunFolder, tmp_path: Path) -> None:
    (run.source / "conf" / "base.yaml").write_text("lr: 0.2\n")
    made = make(run.path, tmp_path / "b.hpcenv.zip")
    assert made.left_out["source/conf/base.yaml"] == "it was changed after the submission"
    verified = verify_bundle(made.path)
    code = next(check for check in verified.checks if check.name == "code")
    assert (code.result, code.detail) == ("unknown", "not in the bundle: source/conf/base.yaml")
    assert verified.result == "unknown"


def test_what_does_not_belong_together_is_a_mismatch_although_the_sums_are_right(
    run: RunFolder, tmp_path: Path
) -> None:
    made = make(run.path, tmp_path / "b.hpcenv.zip")
    lock = run.lockfile.read_bytes()

    def result(**changed: bytes) -> dict[str, str]:
        verified = verify_bundle(rewritten(made.path, tmp_path / "c.hpcenv.zip", changed))
        return {check.name: check.result for check in verified.checks if check.result not in ("match", "absent")}

    assert result(**{"source/train.py": b"print(2)\n"}) == {"code": "mismatch"}
    assert result(**{"lock.toml": lock.replace(b'version = "2', b'version = "3', 1)}) == {"lockfile": "mismatch"}
    listing = json.loads(run.listing.read_text())
    listing["files"].pop("source/train.py")
    assert result(**{"source.json": json.dumps(listing).encode()}) == {"code": "mismatch"}


def test_an_image_must_be_the_locked_one(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "x.sif").write_bytes(b"no SIF")
    with pytest.raises(FileUnusable, match="is not the locked image"):
        make(run.path, tmp_path / "b.hpcenv.zip", sif=tmp_path / "x.sif")
    assert not (tmp_path / "b.hpcenv.zip").exists()


def test_nothing_is_overwritten(run: RunFolder, tmp_path: Path) -> None:
    target = tmp_path / "b.hpcenv.zip"
    target.write_text("mine")
    with pytest.raises(WouldOverwrite):
        make(run.path, target)
    assert target.read_text() == "mine"
    made = make(run.path, tmp_path / "c.hpcenv.zip")
    with Archive(made.path) as archive, pytest.raises(WouldOverwrite):
        archive.unpack(run.path)


def test_a_bundle_is_unpacked_once_and_its_folder_is_found_again(run: RunFolder, tmp_path: Path) -> None:
    out, seen = tmp_path / "out", []
    with Archive(make(run.path, tmp_path / "b.zip").path) as archive:
        assert unpack_once(archive, out, step=seen.append)
        assert sum(seen) > 0
        assert not unpack_once(archive, out, step=seen.append)
        for spoil, why in (
            (lambda: (out / "source/train.py").write_text("print(2)\n"), "`source/train.py` in it differs from the file in the bundle"),
            (lambda: (out / "metrics/more.jsonl").write_text("{}\n"), "`metrics/more.jsonl` in it is not in the bundle"),
            (lambda: (out / "lock.toml").unlink(), "it has no `lock.toml`"),
            (lambda: (out / SUMS).write_text(""), "`SHA256SUMS` in it differs from the file in the bundle"),
            (lambda: elsewhere(out / "source", tmp_path / "source"), "it has no `source/"),
            (lambda: relinked(out / "source/base.yaml", "/etc/passwd"), "`source/base.yaml` in it differs from the file in the bundle"),
        ):  # fmt: skip
            spoil()
            with pytest.raises(WouldOverwrite) as caught:
                unpack_once(archive, out, step=seen.append)
            assert why in str(caught.value)
            shutil.rmtree(out)
            archive.unpack(out)
        shutil.rmtree(out)
        out.write_text("mine")
        with pytest.raises(WouldOverwrite, match="not a folder"):
            unpack_once(archive, out, step=seen.append)
        assert out.read_text() == "mine"


def elsewhere(folder: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    folder.rename(target)
    folder.symlink_to(target)


def relinked(link: Path, target: str) -> None:
    link.unlink()
    link.symlink_to(target)


def test_a_file_that_hpcenv_does_not_know_is_compared_by_its_sum_alone(run: RunFolder, tmp_path: Path) -> None:
    """As ro-crate-metadata.json, which bundles had until 2026-11."""
    made = make(run.path, tmp_path / "b.hpcenv.zip")
    older = rewritten(made.path, tmp_path / "older.hpcenv.zip", {}, more={"ro-crate-metadata.json": b"{}"})
    assert verify_bundle(older).result == "match"
    with Archive(older) as archive:
        assert "ro-crate-metadata.json" in archive.sums
        archive.unpack(tmp_path / "out")
    assert (tmp_path / "out" / "ro-crate-metadata.json").read_bytes() == b"{}"


# -- hostile archives ---------------------------------------------------------------------


def rewritten(
    source: Path, target: Path, changed: Mapping[str, bytes], *, more: Mapping[str, bytes] | None = None
) -> Path:
    """Write an archive with different contents and more files, whose sums are right."""
    members = [BundleMember(name=name, source=content) for name, content in (more or {}).items()]
    with Archive(source) as archive:
        for name in archive.sums:
            content = changed.get(name, archive.read(name, most=1 << 30))
            members.append(BundleMember(name=name, source=content))
        members += [BundleMember(name=name, link=link) for name, link in archive.links.items()]
    target.unlink(missing_ok=True)
    write_archive(target, archive.folder, members)
    return target


def hostile(path: Path, *entries: tuple[str, bytes, int], sums: bytes = b"") -> Path:
    """Write a zip file with these names, contents and modes, and SHA256SUMS."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content, mode in (*entries, (f"b/{SUMS}", sums, stat.S_IFREG | 0o644)):
            info = zipfile.ZipInfo(name)
            info.create_system, info.external_attr = 3, mode << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, content)
    return path


FILE, LINK_MODE, DEVICE = stat.S_IFREG | 0o644, stat.S_IFLNK | 0o777, stat.S_IFCHR | 0o666


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([("b/../../evil", b"x", FILE)], "does not stay in the bundle's folder"),
        ([("/etc/passwd", b"x", FILE)], "does not stay in the bundle's folder"),
        ([("b/a\\..\\..\\evil", b"x", FILE)], "does not stay in the bundle's folder"),
        ([("c/evil", b"x", FILE)], "does not stay in the bundle's folder"),
        ([("b/./x", b"x", FILE)], "does not stay in the bundle's folder"),
        ([("b/a\x1b[2Jb", b"x", FILE)], "does not stay in the bundle's folder"),
        ([("b/" + "a" * 300, b"x", FILE)], "does not stay in the bundle's folder"),
        ([("b/x", b"x", FILE), ("b/X", b"y", FILE)], "same name, or names that differ in case only"),
        ([("b/x", b"x", FILE), ("b/x/y", b"y", FILE)], "is a file or a link, and a folder"),
        ([("b/l", b"/etc", LINK_MODE)], "leads out of the bundle"),
        ([("b/l", b"../../etc", LINK_MODE)], "leads out of the bundle"),
        ([("b/d/l", b"../e/../../x", LINK_MODE)], "leads out of the bundle"),
        ([("b/l", b"d", LINK_MODE), ("b/l/x", b"x", FILE)], "is a file or a link, and a folder"),
        ([("b/l", b"d/m", LINK_MODE), ("b/d/m", b"..", LINK_MODE)], "leads over the link"),
        ([("b/l", b"a" * 2000, LINK_MODE)], "is too long"),
        ([("b/dev", b"", DEVICE)], "is neither a file nor a link"),
        ([("b/x", b"x", FILE)], "is not in SHA256SUMS"),
    ],
)
def test_a_hostile_archive_is_refused_and_nothing_is_written(
    tmp_path: Path, entries: list[tuple[str, bytes, int]], why: str
) -> None:
    path = hostile(tmp_path / "b.zip", *entries)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(BundleInvalid) as caught, Archive(path) as archive:
        archive.unpack(tmp_path / "out")
    assert why in str(caught.value)
    assert str(caught.value).isprintable() or "\x1b" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_name_that_is_only_in_the_sums_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleInvalid, match="is only in SHA256SUMS"):
        Archive(hostile(tmp_path / "b.zip", sums=b"0" * 64 + b"  gone.txt\n"))
    with pytest.raises(BundleInvalid, match="a line is not a checksum"):
        Archive(hostile(tmp_path / "b.zip", sums=b"hello\n"))


def test_an_archive_that_grows_a_thousandfold_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.zip"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("b/x", "w", force_zip64=True) as file,
    ):
        for _ in range(1100):
            file.write(bytes(1 << 20))
    with pytest.raises(BundleInvalid, match="would unpack to"):
        Archive(path)


def test_members_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    path = hostile(tmp_path / "b.zip", ("b/x", os.urandom(1000), FILE), ("b/y", b"y", FILE))
    content = bytearray(path.read_bytes())
    second = content.index(b"PK\1\2", content.index(b"PK\1\2") + 1)
    struct.pack_into("<L", content, second + 42, 0)
    path.write_bytes(bytes(content))
    with pytest.raises(BundleInvalid):
        Archive(path)


@pytest.mark.parametrize("cut", [0, 1, 10, 21, 100])
def test_a_file_that_is_cut_off_or_no_archive_is_refused(run: RunFolder, tmp_path: Path, cut: int) -> None:
    made = make(run.path, tmp_path / "b.hpcenv.zip")
    content = made.path.read_bytes()
    (tmp_path / "c.zip").write_bytes(content[:cut] if cut < 50 else content[:-cut])
    with pytest.raises(BundleInvalid):
        Archive(tmp_path / "c.zip")


def test_one_changed_byte_anywhere_is_found(run: RunFolder, tmp_path: Path) -> None:
    made = make(run.path, tmp_path / "b.hpcenv.zip")
    content = made.path.read_bytes()
    target = tmp_path / "c.zip"
    # Times and padding of the zip format itself may change; a change of content or names may not pass.
    for place in range(0, len(content), max(1, len(content) // 150)):
        target.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        try:
            with Archive(target) as archive:
                archive.unpack(tmp_path / "out")
        except HpcenvError:
            assert not (tmp_path / "out").exists()
            continue
        for line in (tmp_path / "out" / SUMS).read_text().splitlines():
            assert content_of(str(tmp_path / "out" / line[66:])) == line[:64]


# -- record.json, and what repeats it -----------------------------------------------------


def judged(made: Path, target: Path, **changed: bytes) -> dict[str, str]:
    verified = verify_bundle(rewritten(made, target, {name.replace("__", "."): text for name, text in changed.items()}))
    return {check.name: check.result for check in verified.checks if check.result not in ("match", "absent")}


def with_value(text: bytes, path: str, value: object) -> bytes:
    data = at = json.loads(text)
    *folders, last = (int(part) if part.isdigit() else part for part in path.split("."))
    for part in folders:
        at = at[part]
    at[last] = value
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("run", "another"), ("outcome", "never started"), ("shape.world_size", 4096), ("metrics.0.last", "0x0.0p+0"),
        ("metrics", []), ("packages.0.version", "9"), ("code.commit", "d" * 40), ("gpu_hours", 1e6), ("args", ["--lr"]),
        ("environment.LR", "2"), ("environment.MORE", "1"), ("environment", {}), ("lock.fingerprint", "hpc1-0"),
        ("attempts.0.status", False), ("energy.joules", 5.0), ("submitted", float("nan")), ("invented", 1),
    ],
)  # fmt: skip
def test_a_value_of_the_record_that_the_files_do_not_give_is_a_mismatch(
    run: RunFolder, tmp_path: Path, path: str, value: object
) -> None:
    made = make(run.path, tmp_path / "b.hpcenv.zip").path
    with Archive(made) as archive:
        record = archive.read("record.json", most=1 << 20)
    assert judged(made, tmp_path / "c.zip", record__json=with_value(record, path, value)) == {"record": "mismatch"}


@pytest.mark.parametrize(
    "text", [b"null", b"[]", b"NaN", b"[" * 100_000, "{}".encode("utf-16"), b"{}", b'{"metrics":1}']
)
def test_a_record_that_is_none_is_a_mismatch(run: RunFolder, tmp_path: Path, text: bytes) -> None:
    made = make(run.path, tmp_path / "b.hpcenv.zip").path
    assert judged(made, tmp_path / "c.zip", record__json=text) == {"record": "mismatch"}


def test_text_is_not_compared_and_repeated_values_are(run: RunFolder, tmp_path: Path) -> None:
    made = make(run.path, tmp_path / "b.hpcenv.zip", authors=("Doe, Jane",)).path
    with Archive(made) as archive:
        record, readme, cite = (
            archive.read(name, most=1 << 20) for name in ("record.json", "README.md", "CITATION.cff")
        )
    target = tmp_path / "c.zip"
    assert judged(made, target, record__json=with_value(record, "notes", ["other words"])) == {}
    assert judged(made, target, README__md=readme + b"Our words.\n", CITATION__cff=cite + b"abstract: x\n") == {}
    assert judged(made, target, README__md=readme.replace(b"1 nodes", b"64 nodes")) == {"README.md": "mismatch"}
    assert judged(made, target, README__md=readme.replace(b"# Run paper", b"# Run p")) == {"README.md": "mismatch"}
    assert judged(made, target, CITATION__cff=cite.replace(b"cccc", b"dddd")) == {"CITATION.cff": "mismatch"}
    assert judged(made, target, CITATION__cff=cite.replace(b"hpc1-", b"hpc1-f")) == {"CITATION.cff": "mismatch"}


def test_metrics_of_files_that_no_bundle_has_are_counted_and_the_rest_is_compared(
    run: RunFolder, tmp_path: Path
) -> None:
    (run.source / "log.csv").write_text("step,loss\n1,3.0\n2,2.0\n")
    made = make(run.path, tmp_path / "b.hpcenv.zip").path
    (check,) = [one for one in verify_bundle(made).checks if one.name == "record"]
    assert (check.result, check.detail[:9]) == ("absent", "1 metrics")
    with Archive(made) as archive:
        record = archive.read("record.json", most=1 << 20)
    assert judged(made, tmp_path / "c.zip", record__json=with_value(record, "run", "x")) == {"record": "mismatch"}


def test_a_bundle_of_an_earlier_hpcenv_verifies() -> None:
    """Made at commit 0af6350 of tests/recorded_runs/table-1."""
    verified = verify_bundle(ROOT / "tests" / "bundles" / "0af6350.hpcenv.zip")
    assert {check.name: check.result for check in verified.checks if check.name == "record"} == {"record": "match"}
    assert verified.result == "match"


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f.zip")
    with pytest.raises(FileUnusable) as error:
        verify_bundle(tmp_path / "f.zip")
    assert "pipe" in str(error.value.why)


NO_LINK = """
#define _GNU_SOURCE
#include <errno.h>
int link(const char *a, const char *b) { errno = EPERM; return -1; }
int linkat(int a, const char *b, int c, const char *d, int e) { errno = EPERM; return -1; }
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="NOT TESTED: no gcc, which makes a link() that fails")
def test_a_bundle_is_written_where_there_are_no_hard_links(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "no.c").write_text(NO_LINK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "no.so", "no.c"], cwd=tmp_path, check=True)
    words = [sys.executable, "-m", "hpcenv", "bundle", "make", str(run.path), "-o", str(tmp_path / "b.hpcenv.zip")]
    environ = {**os.environ, "LD_PRELOAD": str(tmp_path / "no.so")}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert verify_bundle(tmp_path / "b.hpcenv.zip").result == "match"
    again = subprocess.run(words, env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert again.returncode != 0 and "exists" in again.stderr
