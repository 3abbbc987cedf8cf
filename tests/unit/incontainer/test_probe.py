"""The probe, run as it is really run: a subprocess of a real interpreter over real files."""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import io
import json
import os
import py_compile
import re
import shutil
import sqlite3
import struct
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpcenv.incontainer
from hpcenv.incontainer import probe as module

PROBE = Path(hpcenv.incontainer.__file__).with_name("probe.py")
SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
RECORD_FIELDS = {
    "python.version",
    "python.implementation",
    "python.soabi",
    "python.executable",
    "python.prefix",
    "python.sys-path",
    "python.user-site",
    "python.path-variable",
    "torch.version",
    "torch.git-version",
    "torch.cuda",
    "torch.debug",
    "torch.arch-list",
    "torch.cxx11-abi",
    "libs.ld-library-path",
    "libs.ld-preload",
    "packages.count",
    "packages.env-digest",
    "packages.unlisted-digest",
    "packages.unlisted-count",
    "packages.conda-count",
    "packages.conda-digest",
    "python.startup-files",
    "system.packages-manager",
    "system.packages-count",
    "system.packages-digest",
    "system.os-release",
    "system.glibc",
    "system.machine",
}
VENDOR = ("cudart", "cudnn", "nccl", "cufft", "cusparse", "cusparselt", "nvrtc", "nvjitlink", "nvshmem")
HEAVY = ("cublas", "cublaslt")
OWN = ("libtorch", "libtorch_cpu", "libtorch_cuda")
LIBS = (*VENDOR, *HEAVY, *OWN)
RECORD_FIELDS |= {f"libs.{n}.version" for n in VENDOR} | {f"libs.{n}.{p}" for n in LIBS for p in ("origin", "build-id")}
FULL_FIELDS = RECORD_FIELDS | {"packages.content-digest", "python.stdlib-sha256", "python.unchecked-pyc"}
FULL_FIELDS |= {f"libs.{n}.version" for n in HEAVY} | {f"libs.{n}.sha256" for n in LIBS}
MAPPED = ("libgomp", "libiomp", "libomp", "mkl", "mkl-rt", "openblas", "libcuda")
DEEP_FIELDS = FULL_FIELDS | {"torch.running-differs", "torch.config-digest", "torch.cpu-capability", "loaded.differs"}
DEEP_FIELDS |= {f"loaded.{n}" for n in (*LIBS, *MAPPED)}
FIELDS = {"record": RECORD_FIELDS, "full": FULL_FIELDS, "deep": DEEP_FIELDS}


def b64(data: bytes, algorithm: str = "sha256") -> str:
    digest = hashlib.new(algorithm, data).digest()
    return f"{algorithm}=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


class Venv:
    """A real virtual environment, into which dists are written as an installer writes them."""

    def __init__(self, path: Path, **options: Any) -> None:
        venv.create(path, symlinks=True, **options)
        self.path = path
        self.site = path / SITE

    def install(
        self, name: str, files: dict[str, bytes], version: str = "1.0", rows: list[list[str]] | None = None
    ) -> Path:
        """Write files (paths relative to site-packages) and a dist-info whose RECORD lists them."""
        info = f"{name}-{version}.dist-info"
        meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nName: not-this-one\n".encode()
        listed = {**files, f"{info}/METADATA": meta}
        for path, data in {**listed, f"{info}/INSTALLER": b"pip\n"}.items():
            target = self.site / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        record = [[path, b64(data), str(len(data))] for path, data in listed.items()]
        record += [[f"{info}/INSTALLER", b64(b"pip\n"), "4"], [f"{info}/RECORD", "", ""], *(rows or [])]
        self.write_record(info, record)
        return self.site / info

    def write_record(self, info: str, rows: list[list[str]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        (self.site / info / "RECORD").write_text(text.getvalue())

    def probe(self, level: str = "record", **options: Any) -> dict[str, Any]:
        return probe(self.path / "bin" / "python3", level, **options)


def probe(
    python: Path | str, level: str = "record", *, by: str = "stdin", cwd: Path | None = None, **variables: str
) -> dict[str, Any]:
    done = run(python, ["--level", level], by=by, cwd=cwd, **variables)
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


def run(
    python: Path | str, arguments: list[str], *, by: str = "stdin", cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    start = ["-"] if by == "stdin" else [str(PROBE)]
    return subprocess.run(
        [str(python), "-B", *start, *arguments],
        input=PROBE.read_bytes() if by == "stdin" else b"",
        capture_output=True,
        timeout=120,
        cwd=cwd or "/",
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **variables},
        check=False,
    )


def parse(output: bytes) -> dict[str, Any]:
    assert output.endswith(b"\n") and output.count(b"\n") == 1
    found: dict[str, Any] = json.loads(output)
    assert list(found) == sorted(found)
    assert "\\ud" not in output.decode("ascii"), "a lone surrogate, which strict JSON readers refuse"
    assert found["schema"] == 1
    assert set(found["values"]) | set(found["unknown"]) >= FIELDS[found["level"]]
    assert not set(found["values"]) & set(found["unknown"])
    return found


def package(found: dict[str, Any], name: str) -> dict[str, Any]:
    [entry] = [p for p in found["packages"] if p["name"] == name]
    assert isinstance(entry, dict)
    return entry


def unlisted(found: dict[str, Any]) -> list[str]:
    return [entry["path"] for entry in found["unlisted"]]


@pytest.fixture
def env(tmp_path: Path) -> Venv:
    made = Venv(tmp_path / "env")
    made.install("demo", {"demo/__init__.py": b"X = 1\n", "demo/data.bin": bytes(range(256)) * 99})
    return made


def other_pythons() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for minor in range(8, 15):
        name = f"3.{minor}"
        places = [*Path.home().glob(f".pyenv/versions/{name}.*/bin/python{name}"), Path(f"/usr/bin/python{name}")]
        found[name] = [str(p) for p in places if p.exists()]
    return found


# ---- how it starts, what it prints -----------------------------------------------------------------------------


def test_it_is_valid_python_3_8() -> None:
    ast.parse(PROBE.read_text(), feature_version=(3, 8))


def test_it_imports_only_the_standard_library() -> None:
    names = set()
    for node in ast.walk(ast.parse(PROBE.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add((node.module or "").split(".")[0])
    assert names <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("version", list(other_pythons()))
@pytest.mark.parametrize("level", ["record", "full"])
def test_it_runs_on_every_python_of_this_machine(version: str, level: str, tmp_path: Path) -> None:
    pythons = other_pythons()[version]
    if not pythons:
        pytest.skip(f"NOT TESTED: no Python {version} on this machine")
    for python in pythons:
        found = probe(python, level, by="stdin")
        assert found["values"]["python.version"].startswith(version + ".")
        assert found["values"]["python.soabi"].startswith("cpython-" + version.replace(".", ""))
        assert (
            not found["unknown"].keys()
            - {"system.glibc", "system.os-release"}
            - {f for f in found["unknown"] if f.startswith("libs.")}
        )


@pytest.mark.parametrize("level", ["record", "full"])
def test_stdin_and_file_start_say_the_same(env: Venv, level: str) -> None:
    one, other = env.probe(level, by="stdin"), env.probe(level, by="file")
    one.pop("seconds"), other.pop("seconds")
    assert one == other


def test_its_own_folder_and_the_current_one_are_not_on_the_path(env: Venv, tmp_path: Path) -> None:
    for name in ("json", "csv", "hashlib", "time"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current directory')")
    found = env.probe(cwd=tmp_path)
    assert found["values"]["python.sys-path"][-1] == "{prefix}/" + SITE
    assert str(tmp_path) not in found["values"]["python.sys-path"]
    assert str(PROBE.parent) not in env.probe(by="file")["values"]["python.sys-path"]


def test_safe_path_start_drops_nothing(env: Venv) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("NOT TESTED: PYTHONSAFEPATH is new in 3.11")
    plain, safe = env.probe(), env.probe(PYTHONSAFEPATH="1")
    assert plain["values"]["python.sys-path"] == safe["values"]["python.sys-path"]


def test_wrong_arguments_still_give_json_and_status_2(env: Venv) -> None:
    done = run(env.path / "bin/python3", ["--level", "deeper"])
    assert done.returncode == 2
    found = parse(done.stdout)
    assert found["values"] == {}
    assert found["unknown"]["python.version"].endswith("usage: probe.py [--level record|full|deep], got --level deeper")


# ---- the digest ------------------------------------------------------------------------------------------------


def recomputed(dists: dict[tuple[str, str], list[tuple[str, str, str]]]) -> str:
    """The digest as the probe's docstring says it, written a second time."""
    roots = []
    for (name, version), rows in dists.items():
        lines = sorted({"\0".join(row).encode() for row in rows})
        digest = hashlib.sha256(b"\n".join(lines)).hexdigest()
        roots.append(f"{name}\0{version}\0{digest}".encode())
    return "sha256:" + hashlib.sha256(b"hpcenv-env-v1\n" + b"\n".join(sorted(roots))).hexdigest()


def test_the_digest_can_be_recomputed_from_the_documented_rules(env: Venv) -> None:
    env.install(
        "Fancy_Name",
        {"fancy.py": b"1", "../../../share/fancy/x": b"2", "../../../bin/fancy": b"#!/abs\n"},
        version="1.0-RC.1",
        rows=[["__pycache__/fancy.cpython-311.pyc", "", ""], ["fancy.py", b64(b"1"), "1"]],
    )
    fancy, demo = "Fancy_Name-1.0-RC.1.dist-info", "demo-1.0.dist-info"

    def metadata(name: str, version: str) -> bytes:
        return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nName: not-this-one\n".encode()

    def row(path: str, data: bytes) -> tuple[str, str, str]:
        return path, b64(data), str(len(data))

    expected = recomputed(
        {
            ("fancy-name", "1.0rc1"): [
                row("fancy.py", b"1"),
                row("{data}/share/fancy/x", b"2"),
                row(f"{fancy}/METADATA", metadata("Fancy_Name", "1.0-RC.1")),
            ],
            ("demo", "1.0"): [
                row("demo/__init__.py", b"X = 1\n"),
                row("demo/data.bin", bytes(range(256)) * 99),
                row(f"{demo}/METADATA", metadata("demo", "1.0")),
            ],
        }
    )
    found = env.probe("full")
    assert found["values"]["packages.env-digest"] == expected
    assert found["values"]["packages.content-digest"] == expected
    assert found["values"]["packages.count"] == 2


def test_two_environments_at_different_paths_are_the_same(tmp_path: Path) -> None:
    found = []
    for place in ("a", "deep/er/b"):
        made = Venv(tmp_path / place)
        script = f"#!{made.path}/bin/python3\nprint()\n".encode()
        made.install("demo", {"demo.py": b"1", "../../../bin/demo": script, "../../../etc/demo.conf": b"c"})
        (made.site / "extra.py").write_text("unlisted, in both")
        found.append(made.probe("full"))
    for report in found:
        report.pop("seconds")
        del report["values"]["python.executable"], report["values"]["python.prefix"]
    assert found[0] == found[1]
    assert found[0]["values"]["packages.env-digest"] == found[0]["values"]["packages.content-digest"]


def test_one_changed_byte_is_found_at_level_full_and_named(env: Venv) -> None:
    before = env.probe("full")
    path = env.site / "demo/data.bin"
    data = bytearray(path.read_bytes())
    data[20000] ^= 1
    path.write_bytes(data)
    after = env.probe("full")
    assert before["values"]["packages.env-digest"] == after["values"]["packages.env-digest"]
    assert after["values"]["packages.env-digest"] != after["values"]["packages.content-digest"]
    demo = package(after, "demo")
    assert demo["record-sha256"] != demo["content-sha256"]
    assert demo["modified-count"] == 1
    original = bytes(range(256)) * 99
    assert demo["modified"] == [{"path": "demo/data.bin", "locked": b64(original), "found": b64(bytes(data))}]


def test_level_record_does_not_claim_to_have_looked_at_files(env: Venv) -> None:
    demo = package(env.probe("record"), "demo")
    assert demo["content-sha256"] is None and demo["modified-count"] is None and demo["modified"] == []
    assert package(env.probe("full"), "demo")["modified-count"] == 0


def test_a_changed_record_changes_the_digest(env: Venv) -> None:
    before = env.probe()["values"]["packages.env-digest"]
    record = env.site / "demo-1.0.dist-info/RECORD"
    record.write_text(record.read_text().replace(b64(b"X = 1\n"), b64(b"X = 2\n")))
    assert env.probe()["values"]["packages.env-digest"] != before


def test_a_missing_file_is_modified(env: Venv) -> None:
    (env.site / "demo/__init__.py").unlink()
    demo = package(env.probe("full"), "demo")
    assert demo["modified"] == [{"path": "demo/__init__.py", "locked": b64(b"X = 1\n"), "found": "missing"}]


def test_many_modified_files_are_counted_and_the_list_is_cut(env: Venv) -> None:
    env.install("many", {f"many/{i:03}.py": b"1" for i in range(50)})
    for path in (env.site / "many").iterdir():
        path.write_bytes(b"2")
    many = package(env.probe("full"), "many")
    assert many["modified-count"] == 50 and len(many["modified"]) == 20


def test_a_changed_script_is_found_though_scripts_are_not_in_the_digest(env: Venv) -> None:
    env.install("tool", {"../../../bin/tool": b"#!/x\nrun()\n"})
    digest = package(env.probe("full"), "tool")
    assert digest["record-sha256"] == digest["content-sha256"]
    (env.path / "bin/tool").write_bytes(b"#!/x\nevil()\n")
    changed = package(env.probe("full"), "tool")
    assert changed["record-sha256"] == digest["record-sha256"] != changed["content-sha256"]
    assert [m["path"] for m in changed["modified"]] == ["{scripts}/tool"]


@pytest.mark.parametrize(
    "claim",
    [
        b64(b"1", "sha512"),
        b64(b"1", "md5"),
        "sha256=" + hashlib.sha256(b"1").hexdigest(),
        "sha256=" + base64.b64encode(hashlib.sha256(b"1").digest()).decode(),
        b64(b"1", "sha384"),
    ],
)
def test_other_ways_to_write_a_hash(env: Venv, claim: str) -> None:
    env.install("old", {}, rows=[["old.py", claim, "1"]])
    (env.site / "old.py").write_bytes(b"1")
    old = package(env.probe("full"), "old")
    assert old["content-sha256"] == old["record-sha256"] and old["modified"] == []
    (env.site / "old.py").write_bytes(b"2")
    [change] = package(env.probe("full"), "old")["modified"]
    assert change == {"path": "old.py", "locked": claim, "found": b64(b"2", claim.split("=")[0])}


@pytest.mark.parametrize("claim", ["crc32=abcd", "shake_128=abcd", "=abcd", "nonsense"])
def test_a_hash_that_cannot_be_checked_is_unknown_not_fine(env: Venv, claim: str) -> None:
    env.install("odd", {}, rows=[["odd.py", claim, "1"]])
    (env.site / "odd.py").write_bytes(b"1")
    found = env.probe("full")
    odd = package(found, "odd")
    assert odd["record-sha256"] is not None and odd["content-sha256"] is None
    assert odd["reason"].startswith("content unknown: odd.py: hash algorithm")
    assert found["unknown"]["packages.content-digest"] == "not all files could be read of odd"


def test_a_row_without_a_hash_stays_empty(env: Venv) -> None:
    env.install("loose", {}, rows=[["loose.py", "", ""]])
    loose = package(env.probe("full"), "loose")
    assert loose["content-sha256"] == loose["record-sha256"]


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("1.0-beta2", "1.0b2"),
        ("V1.0.Post1", "1.0.post1"),
        ("1!01.2-3", "1!1.2.post3"),
        ("2.13.0+CU130.ABC-01", "2.13.0+cu130.abc.1"),
        ("1.0.dev", "1.0.dev0"),
        ("what ever", "what ever"),
        ("1" * 200, "1" * 200),
    ],
)
def test_versions_are_written_as_pep_440_does(env: Venv, written: str, normal: str) -> None:
    info = env.site / "v.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: v\nVersion: {written}\n")
    assert package(env.probe(), "v")["version"] == normal


def write_wheel(path: Path) -> dict[str, bytes]:
    info = "wheely-1.0.dist-info"
    files = {
        "wheely/__init__.py": b"def main(): pass\n",
        "wheely-1.0.data/data/share/wheely/x": b"data",
        "wheely-1.0.data/headers/x.h": b"#define X\n",
        "wheely-1.0.data/scripts/wheely-run": b"#!python\nimport wheely\n",
        "wheely-1.0.data/purelib/wheely/pure.py": b"P = 1\n",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: wheely\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": b"[console_scripts]\nwheely = wheely:main\n",
    }
    record = "".join(f"{name},{b64(data)},{len(data)}\n" for name, data in files.items()) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return files


def test_what_pip_installed_has_the_digest_of_the_wheels_own_record(tmp_path: Path) -> None:
    wheel = tmp_path / "wheely-1.0-py3-none-any.whl"
    files = write_wheel(wheel)
    python = tmp_path / "env/bin/python3"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-index", wheel], check=True)
    found = probe(python, "full")
    pip = package(found, "pip")
    assert re.fullmatch("[0-9a-f]{64}", pip["record-sha256"])
    lines = []
    for name, data in files.items():
        path = name.replace("wheely-1.0.data/data/", "{data}/").replace("wheely-1.0.data/purelib/", "")
        path = path.replace("wheely-1.0.data/headers/", "{headers}/wheely/")
        if ".data/scripts/" not in path:
            lines.append("\0".join((path, b64(data), str(len(data)))).encode())
    wheely = package(found, "wheely")
    assert wheely["record-sha256"] == hashlib.sha256(b"\n".join(sorted(lines))).hexdigest()
    assert wheely["content-sha256"] == wheely["record-sha256"]
    assert (wheely["installer"], wheely["location"], wheely["version"]) == ("pip", SITE, "1.0")
    assert unlisted(found) == []


# ---- what leaks in ---------------------------------------------------------------------------------------------


def test_unlisted_files_are_seen(env: Venv) -> None:
    before = env.probe()
    assert before["values"]["packages.unlisted-count"] == 0
    dropped = [
        "evil.py",
        "evil.pth",
        "demo/evil.cpython-311-x86_64-linux-gnu.so",
        "demo/libnccl.so.2",
        "sitecustomize.py",
    ]
    for name in [*dropped, "demo/notes.txt"]:
        (env.site / name).write_text("")
    found = env.probe()
    assert unlisted(found) == sorted(f"{SITE}/{name}" for name in dropped)
    assert found["unlisted"][0]["sha256"] == hashlib.sha256(b"").hexdigest()
    assert found["values"]["packages.unlisted-count"] == len(dropped)
    assert found["values"]["packages.unlisted-digest"] != before["values"]["packages.unlisted-digest"]
    assert found["values"]["packages.env-digest"] == before["values"]["packages.env-digest"]


def test_compiled_files_are_ignored_unless_they_are_modules_of_their_own(env: Venv) -> None:
    cache = env.site / "demo/__pycache__"
    cache.mkdir()
    (cache / "__init__.cpython-311.pyc").write_bytes(b"x")
    (cache / "lone.py").write_bytes(b"x")
    (env.site / "demo/__init__.pyc").write_bytes(b"x")
    assert unlisted(env.probe()) == []
    (env.site / "demo/evil.pyc").write_bytes(b"x")
    assert unlisted(env.probe()) == [f"{SITE}/demo/evil.pyc"]


def test_a_user_site_that_is_on_the_path_is_seen(tmp_path: Path) -> None:
    env = Venv(tmp_path / "env", system_site_packages=True)
    base = tmp_path / "home/.local"
    assert env.probe(PYTHONUSERBASE=str(base))["values"]["python.user-site"] == "off"
    user_site = base / SITE
    (user_site / "numpy").mkdir(parents=True)
    (user_site / "numpy/__init__.py").write_text("")
    found = env.probe(PYTHONUSERBASE=str(base))
    assert found["values"]["python.user-site"] == f"on: {user_site}"
    assert str(user_site) in found["values"]["python.sys-path"]
    assert f"{{user-base}}/{SITE}/numpy/__init__.py" in unlisted(found)
    switched_off = env.probe(PYTHONUSERBASE=str(base), PYTHONNOUSERSITE="1")
    assert switched_off["values"]["python.user-site"] == "off"


def test_pythonpath_is_seen_and_does_not_decide_what_the_probe_imports(env: Venv, tmp_path: Path) -> None:
    extra = tmp_path / "extra"
    extra.mkdir()
    for name in ("csv", "hashlib", "ast", "subprocess", "ctypes"):
        (extra / f"{name}.py").write_text("raise RuntimeError('shadowed')")
    found = env.probe(PYTHONPATH=str(extra))
    assert found["values"]["python.path-variable"] == str(extra)
    assert found["values"]["python.sys-path"][0] == str(extra)
    assert found["unknown"] == {} or set(found["unknown"]) <= {"system.glibc"}
    assert env.probe()["values"]["python.path-variable"] == ""


def test_the_first_dist_on_the_path_wins_and_the_other_is_shadowed(env: Venv, tmp_path: Path) -> None:
    other = tmp_path / "other"
    info = other / "Demo-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: Demo\nVersion: 2.0\n")
    found = env.probe(PYTHONPATH=str(other))
    assert package(found, "demo")["version"] == "2.0"
    assert found["shadowed"] == [{"name": "demo", "version": "1.0", "location": SITE}]


def test_two_versions_in_one_folder_are_seen(env: Venv) -> None:
    env.install("demo", {"demo/__init__.py": b"X = 1\n"}, version="0.9")
    found = env.probe()
    assert package(found, "demo")["version"] == "0.9"
    assert found["shadowed"] == [{"name": "demo", "version": "1.0", "location": SITE}]


def test_pips_leftovers_are_no_dists_but_their_files_are_unlisted(env: Venv) -> None:
    shutil.copytree(env.site / "demo-1.0.dist-info", env.site / "~emo-1.0.dist-info")
    shutil.copytree(env.site / "demo", env.site / "~emo")
    found = env.probe()
    assert found["shadowed"] == []
    assert unlisted(found) == [f"{SITE}/~emo/__init__.py"]


# ---- dists without a usable RECORD -----------------------------------------------------------------------------


def test_a_dist_without_record_counts_as_unknown(env: Venv) -> None:
    before = env.probe()["values"]["packages.env-digest"]
    (env.site / "demo-1.0.dist-info/RECORD").unlink()
    found = env.probe("full")
    demo = package(found, "demo")
    assert demo["record-sha256"] is None and demo["content-sha256"] is None
    assert demo["reason"].startswith("record: FileNotFoundError")
    root = hashlib.sha256(b"hpcenv-env-v1\ndemo\x001.0\0unknown").hexdigest()
    assert found["values"]["packages.env-digest"] == "sha256:" + root != before
    assert f"{SITE}/demo/__init__.py" in unlisted(found)


def test_only_a_record_that_the_digest_covers_vouches_for_a_file(env: Venv, tmp_path: Path) -> None:
    before = env.probe()["values"]
    env.install("demo", {"evil.py": b"by a shadowed dist"}, version="2.0")
    after = env.probe()
    assert after["values"]["packages.env-digest"] == before["packages.env-digest"]
    assert unlisted(after) == [f"{SITE}/evil.py"]
    info = env.install("mine", {"finder.py": b"by an editable install"})
    (info / "direct_url.json").write_text('{"dir_info": {"editable": true}}')
    assert unlisted(env.probe()) == [f"{SITE}/evil.py", f"{SITE}/finder.py"]
    (env.site / "finder.py").write_bytes(b"changed")
    [change] = package(env.probe("full"), "mine")["modified"]
    assert change["path"] == "finder.py"


@pytest.mark.parametrize("as_file", [True, False])
def test_an_egg_info_counts_by_name_and_version(env: Venv, as_file: bool) -> None:
    egg = env.site / "Debian_thing-3.1.egg-info"
    text = "Metadata-Version: 1.1\nName: Debian-Thing\nVersion: 3.1\n"
    if as_file:
        egg.write_text(text)
    else:
        egg.mkdir()
        (egg / "PKG-INFO").write_text(text)
    thing = package(env.probe(), "debian-thing")
    assert (thing["version"], thing["record-sha256"]) == ("3.1", None)
    assert thing["reason"].startswith("no RECORD: installed as egg-info")


def test_an_editable_install_is_named_and_has_no_digest(env: Venv, tmp_path: Path) -> None:
    info = env.install("mine", {"__editable__.mine.pth": b"/home/me/src\n"})
    (info / "direct_url.json").write_text(json.dumps({"url": "file:///home/me", "dir_info": {"editable": True}}))
    mine = package(env.probe(), "mine")
    assert mine["record-sha256"] is None and mine["reason"] == "editable install of file:me"
    (info / "direct_url.json").write_text("[" * 100000)
    broken = package(env.probe(), "mine")
    assert broken["reason"].startswith("origin: ")


def test_metadata_that_is_gone_leaves_the_folders_name(env: Venv) -> None:
    (env.site / "demo-1.0.dist-info/METADATA").unlink()
    demo = package(env.probe(), "demo")
    assert demo["version"] == "1.0" and "identity: FileNotFoundError" in demo["reason"]


# ---- hostile input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"a.py\0,sha256=x,1\n", "NUL"),
        (b'"a.py\nsha256=forged",sha256=x,1\n', "row 1 is not path, hash, size"),
        (b'"unclosed,,\n', "row 1 is not path, hash, size"),
        (b'a.py,"sha256=x\nb.py",1\n', "row 1 is not path, hash, size"),
        (b"a,b,c,d,e\n", "row 1 is not path, hash, size"),
        (b'"' + b"x" * 200_000 + b'",,\n', "field larger than field limit"),
        (b"a,,\n" * 300_001, "more than 300000 rows"),
        (b"x" * (16 << 20) + b"y", "larger than"),
    ],
)
def test_a_record_that_is_garbage_is_unknown_with_the_reason(env: Venv, record: bytes, reason: str) -> None:
    env.install("good", {"good.py": b"1"})
    (env.site / "demo-1.0.dist-info/RECORD").write_bytes(record)
    found = env.probe("full")
    demo = package(found, "demo")
    assert demo["record-sha256"] is None and reason in demo["reason"]
    assert package(found, "good")["content-sha256"] is not None
    assert found["unknown"] == {} or set(found["unknown"]) <= {"system.glibc"}


@pytest.mark.parametrize("size", ["9" * 30 + "x", "\u00b2", "-1", "1e9", "9" * 5000])
def test_an_absurd_size_changes_only_the_digest(env: Venv, size: str) -> None:
    env.install("odd", {}, rows=[["odd.py", b64(b"1"), size]])
    (env.site / "odd.py").write_bytes(b"1")
    odd = package(env.probe("full"), "odd")
    assert odd["content-sha256"] == odd["record-sha256"] and odd["modified"] == []


@pytest.mark.parametrize("record", [b"\xff\xfe,\xff,\xff\n", b",,\n\n\n", b"caf\xe9.py,sha256=x,1\n", b"a\n"])
def test_a_record_that_is_odd_is_hashed_as_it_is(env: Venv, record: bytes) -> None:
    (env.site / "demo-1.0.dist-info/RECORD").write_bytes(record)
    demo = package(env.probe("full"), "demo")
    assert re.fullmatch("[0-9a-f]{64}", demo["record-sha256"])


_PATHS = st.sampled_from(
    "a.py b/c.so b/__pycache__/c.cpython-311.pyc x.pyc b/x.pyc ./d.py ../../../bin/run ../../../etc/x ../y.py b//e.py "
    "__pycache__/f.py g__pycache__h.py n-1.dist-info/RECORD n-1.dist-info/INSTALLER n-1.dist-info/METADATA "
    "n-1.dist-info/x/RECORD ./n-1.dist-info/RECORD n-1.dist-infox /absolute/z.py .hidden b/.x.py \xe4.py \U0001f600.py".split()
)
_ROWS = st.tuples(_PATHS, st.sampled_from(["sha256=Zm9v", "md5=00", ""]), st.sampled_from(["1", ""])).map(",".join)
_LINES = _ROWS | st.text('ab,/."\r_\xe9\0', max_size=8)
_RECORDS = st.tuples(st.sampled_from(["\n", "\r\n"]), st.lists(_ROWS, max_size=12) | st.lists(_LINES, max_size=12)).map(
    lambda made: made[0].join([*made[1], ""])
)


@settings(max_examples=400, deadline=None)
@given(_RECORDS, st.sampled_from(["utf-8", "latin-1"]))
def test_a_record_says_the_same_taken_by_lines_and_by_rows(
    tmp_path_factory: pytest.TempPathFactory, text: str, encoding: str
) -> None:
    """Level record takes whole lines where it can; level full takes every row."""
    site = tmp_path_factory.getbasetemp() / "by-lines" / "lib" / "site-packages"
    (site / "n-1.dist-info").mkdir(parents=True, exist_ok=True)
    (site / "n-1.dist-info" / "RECORD").write_bytes(text.encode(encoding, "replace"))

    def read(level: str) -> object:
        dist = module.Dist(module.Site(str(site), str(site.parents[1]), True), "n-1.dist-info")
        try:
            module._read_record(module.Environment(level), dist)
        except Exception as error:  # noqa: BLE001  (whatever it is: both must say the same)
            return repr(error)
        return dist.plain_digest or module._record_digest(dist.rows), sorted(set(dist.listed))

    assert read("record") == read("full")


def test_a_record_as_pip_or_uv_writes_it_is_taken_by_lines() -> None:
    for end in ("\n", "\r\n"):
        dist = module.Dist(module.Site("/env/lib", "/env", True), "n-1.dist-info")
        rows = (
            "a.py,sha256=Zm9v,3",
            "__pycache__/a.cpython-311.pyc,,",
            "../bin/run,sha256=Zm9v,3",
            "n-1.dist-info/RECORD,,",
        )
        assert module._read_plain_record(dist, end.join([*rows, ""]).encode())
        assert dist.listed == ["/env/lib/a.py", "/env/bin/run"]


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    "make",
    [
        make_fifo,
        Path.mkdir,
        lambda p: p.symlink_to("RECORD"),
        lambda p: p.symlink_to("/dev/zero"),
        lambda p: p.symlink_to("/nonexistent"),
    ],
    ids=["fifo", "folder", "loop", "device", "dangling"],
)
@pytest.mark.parametrize("name", ["RECORD", "METADATA", "INSTALLER", "direct_url.json"])
def test_a_metadata_file_that_is_no_file_neither_hangs_nor_crashes(env: Venv, make: Any, name: str) -> None:
    path = env.site / "demo-1.0.dist-info" / name
    path.unlink(missing_ok=True)
    make(path)
    demo = package(env.probe("full"), "demo")
    assert demo["version"] == "1.0"
    part = {"RECORD": "record: ", "METADATA": "identity: ", "direct_url.json": "origin: "}.get(name)
    dangling_url = name == "direct_url.json" and os.path.islink(path) and os.readlink(path) == "/nonexistent"
    if part is None or dangling_url:  # as good as not there
        assert demo["content-sha256"] == demo["record-sha256"] is not None
    else:
        assert demo["record-sha256"] is None and demo["content-sha256"] is None
        assert demo["reason"].startswith(part)


@pytest.mark.parametrize(
    "path", ["/etc/hostname", "../../../../../../../../../../etc/hostname", "demo/../../../../../x"]
)
def test_a_path_that_leaves_the_environment_is_never_read(env: Venv, tmp_path: Path, path: str) -> None:
    env.install("spy", {}, rows=[[path, b64(b"not what is there"), "17"]])
    found = env.probe("full")
    spy = package(found, "spy")
    assert spy["record-sha256"] is not None and spy["content-sha256"] is None and spy["modified"] == []
    assert spy["reason"] == f"content unknown: {{outside}}/{path} lies outside of the environment and was not read"
    assert "spy" in found["unknown"]["packages.content-digest"]


def test_an_absolute_path_inside_the_environment_does_not_depend_on_the_place(tmp_path: Path) -> None:
    digests = set()
    for place in ("a", "b"):
        made = Venv(tmp_path / place)
        made.install(
            "abs", {}, rows=[[f"{made.site}/abs.py", b64(b"1"), "1"], [f"{made.path}/share/x", b64(b"2"), "1"]]
        )
        (made.site / "abs.py").write_bytes(b"1")
        (made.path / "share").mkdir(exist_ok=True)
        (made.path / "share/x").write_bytes(b"2")
        entry = package(made.probe("full"), "abs")
        digests |= {entry["record-sha256"], entry["content-sha256"]}
    assert len(digests) == 1


def test_links_out_of_the_environment_are_followed_only_with_a_word(env: Venv, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_bytes(b"X = 1\n")
    (env.site / "demo/__init__.py").unlink()
    (env.site / "demo/__init__.py").symlink_to(tmp_path / "outside.py")
    (env.site / "evil.py").symlink_to(tmp_path / "outside.py")
    found = env.probe("full")
    demo = package(found, "demo")
    assert demo["linked-outside"] == 1 and demo["content-sha256"] == demo["record-sha256"]
    digest = hashlib.sha256(b"X = 1\n").hexdigest()
    assert found["unlisted"] == [{"path": f"{SITE}/evil.py", "sha256": digest, "link": str(tmp_path / "outside.py")}]


def test_linked_folders_cannot_send_the_scan_away_or_round_in_circles(env: Venv) -> None:
    (env.site / "root").symlink_to("/")
    (env.site / "demo/loop").symlink_to("..")
    (env.site / "alias").symlink_to("demo")
    (env.site / "self").symlink_to("self")
    found = env.probe()
    assert found["unlisted"][-1] == {**found["unlisted"][-1], "path": f"{SITE}/root", "link": "/"}
    assert unlisted(found) == [f"{SITE}/alias/__init__.py", f"{SITE}/alias/loop", f"{SITE}/demo/loop", f"{SITE}/root"]


def test_a_listed_file_that_is_no_file_is_modified(env: Venv) -> None:
    kinds: dict[str, Callable[[Path], None]] = {
        "fifo": make_fifo,
        "folder": Path.mkdir,
        "loop": lambda path: path.symlink_to(path),
    }
    for name, make in kinds.items():
        env.install(name, {}, rows=[[f"{name}.py", b64(b"1"), "1"]])
        make(env.site / f"{name}.py")
    found = env.probe("full")
    words = {n: package(found, n)["modified"][0]["found"] for n in ("fifo", "folder", "loop")}
    assert words == {"fifo": "not-a-file", "folder": "not-a-file", "loop": "missing"}


def test_names_that_are_no_text_are_printed_as_escapes(env: Venv) -> None:
    with open(os.fsencode(env.site) + b"/caf\xe9.py", "wb"):
        pass
    info = env.site / "bad.dist-info"
    info.mkdir()
    (info / "METADATA").write_bytes(b"Name: b\xe9\x00d\nVersion: 1\x1b[31m\n")
    found = env.probe()
    assert unlisted(found) == [f"{SITE}/caf\\xe9.py"]
    assert package(found, "b\\xe9\\x00d")["version"] == "1\\x1b[31m"


@pytest.mark.skipif(os.geteuid() == 0, reason="NOT TESTED as root: root can read every file")
def test_a_file_that_may_not_be_read_is_unknown(env: Venv) -> None:
    (env.site / "demo/__init__.py").chmod(0)
    found = env.probe("full")
    assert package(found, "demo")["content-sha256"] is None
    assert "PermissionError" in package(found, "demo")["reason"]


# ---- when something fails --------------------------------------------------------------------------------------


def break_module(env: Venv, name: str) -> None:
    (env.site / "break.pth").write_text(f"import sys; sys.modules[{name!r}] = None\n")


def test_one_broken_probe_leaves_the_others(env: Venv) -> None:
    break_module(env, "csv")
    found = env.probe("full")
    assert "record: ModuleNotFoundError: import of csv halted" in package(found, "demo")["reason"]
    break_module(env, "hashlib")
    found = env.probe("full")
    assert "hashlib" in found["unknown"]["packages.env-digest"]
    assert found["unknown"]["packages.unlisted-digest"] == "RuntimeError: the packages could not be read"
    assert found["values"]["python.version"] == ".".join(map(str, sys.version_info[:3]))
    assert found["values"]["python.user-site"] == "off"


def test_without_json_there_is_still_json(env: Venv) -> None:
    break_module(env, "json")
    found = env.probe("full")
    assert found["values"] == {}
    assert set(found["unknown"]) == FULL_FIELDS
    assert "json" in found["unknown"]["torch.cuda"]


def test_exit_handlers_of_installed_code_do_not_print_behind_the_line(env: Venv) -> None:
    (env.site / "noisy.pth").write_text("import atexit; atexit.register(print, 'behind')\n")
    assert env.probe()["values"]["packages.unlisted-count"] == 1


# ---- torch and its libraries -----------------------------------------------------------------------------------

TORCH = """from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']
__version__ = '2.13.0+{tag}'
debug = False
cuda: Optional[str] = {cuda}
git_version = 'cf30153c4c131c8164ee7798e5022d810682e2cb'
hip: Optional[str] = {hip}
"""


def install_torch(env: Venv, tag: str = "cpu", cuda: str = "None", hip: str = "None") -> None:
    files = {
        "torch/__init__.py": b"raise SystemExit('torch was imported')",
        "torch/version.py": TORCH.format(tag=tag, cuda=cuda, hip=hip).encode(),
    }
    env.install("torch", files, version="2.13.0")


def test_torch_absent(env: Venv) -> None:
    values = env.probe()["values"]
    assert (values["torch.version"], values["torch.git-version"], values["torch.cuda"]) == ("absent",) * 3


def test_torchs_build_facts_are_read_and_it_is_not_imported(env: Venv) -> None:
    install_torch(env)
    values = env.probe()["values"]
    assert values["torch.version"] == "2.13.0+cpu" and values["torch.cuda"] == "none"
    assert values["torch.git-version"] == "cf30153c4c131c8164ee7798e5022d810682e2cb"
    assert values["torch.hip"] == "none"


def test_a_rocm_build_names_hip(env: Venv) -> None:
    install_torch(env, "rocm7.0", hip="'7.0.1'")
    assert env.probe()["values"]["torch.hip"] == "7.0.1"


def test_torch_facts_that_are_not_there_are_unknown(env: Venv) -> None:
    install_torch(env)
    (env.site / "torch/version.py").write_text("__version__ = 'x'\ncuda = ((")
    found = env.probe()
    assert found["unknown"]["torch.cuda"].startswith("SyntaxError")
    (env.site / "torch/version.py").unlink()
    assert env.probe()["unknown"]["torch.version"].startswith("FileNotFoundError")
    shutil.rmtree(env.site / "torch")
    assert "no folder 'torch'" in env.probe()["unknown"]["torch.version"]


def test_a_cuda_build_without_libraries_is_unknown_and_not_absent(env: Venv) -> None:
    install_torch(env, "cu130", "'13.0'")
    found = env.probe()
    assert found["unknown"]["libs.nccl.version"].startswith("no such library found: torch has no extension module _C")
    assert found["unknown"]["libs.nccl.version"].endswith("(torch.cuda is 13.0)")


def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc")
    if found is None:
        pytest.skip("NOT TESTED: no C compiler on this machine")
    return found


def build_library(path: Path, body: str = "", *, needs: tuple[Path, ...] = (), flags: tuple[str, ...] = ()) -> Path:
    """A real shared library whose soname is its file name; it needs the given ones by their sonames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text("#include <stddef.h>\n#include <unistd.h>\n#include <stdlib.h>\n" + body)
    command = [compiler(), "-shared", "-fPIC", "-Wl,--no-as-needed", f"-Wl,-soname,{path.name}", *flags]
    subprocess.run([*command, "-o", path, source, *needs], check=True)
    source.unlink()
    return path


PROPERTY = "int %s(int which, int *v) { static int n[] = {%s}; *v = n[which]; return 0; }"
ANSWERS = {
    "cuda_runtime/lib/libcudart.so.13": "int cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }",
    "nccl/lib/libnccl.so.2": "int ncclGetVersion(int *v) { *v = 22907; return 0; }",
    "cudnn/lib/libcudnn.so.9": "size_t cudnnGetVersion(void) { return 92000; }",
    "cu13/lib/libcublasLt.so.13": PROPERTY % ("cublasLtGetProperty", "13,1,2"),
    "cu13/lib/libcublas.so.13": PROPERTY % ("cublasGetProperty", "13,1,1"),
    "cu13/lib/libcufft.so.12": PROPERTY % ("cufftGetProperty", "12,0,0"),
    "cu13/lib/libcusparse.so.12": PROPERTY % ("cusparseGetProperty", "12,6,3"),
    "cusparselt/lib/libcusparseLt.so.0": PROPERTY % ("cusparseLtGetProperty", "0,8,1"),
    "cu13/lib/libnvrtc.so.13": "int nvrtcVersion(int *a, int *b) { *a = 13; *b = 0; return 0; }",
    "cu13/lib/libnvJitLink.so.13": "int nvJitLinkVersion(unsigned *a, unsigned *b) { *a = 13; *b = 2; return 0; }",
    "nvshmem/lib/libnvshmem_host.so.3": (
        "void nvshmemx_vendor_get_version_info(int *a, int *b, int *c) { *a = 3; *b = 4; *c = 5; }"
    ),
}
ARCHS = 'const char *archs(void) { return "sm_80 sm_90a compute_90"; }'
NEW_ABI = (
    'void fail(void) __asm__("_ZN3c106detail14torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_stringIcSt11char_traits'
    'IcESaIcEEE"); void fail(void) {}'
)
OLD_ABI = 'void fail(void) __asm__("_ZN3c106detail14torchCheckFailEPKcS2_jRKSs"); void fail(void) {}'
PRELOADS = """
raise SystemExit('torch was imported')
def _preload_cuda_deps(err=None):
    cuda_libs = [
        ("cuda_runtime", "libcudart.so.*[0-9]"),
        ("nccl", "libnccl.so.*[0-9]"),
    ]
def _load_global_deps():
    _preload_cuda_deps(err)
pass
"""


def install_cuda_torch(
    env: Venv,
    *,
    tags: str = "--disable-new-dtags",
    answers: dict[str, str] = ANSWERS,
    linked: bool = True,
    cuda: bool = True,
    abi: str = NEW_ABI,
) -> Path:
    """What a torch wheel is to the dynamic loader: stubs with the real names, sonames, RPATHs and needs."""
    install_torch(env, *(("cu130", "'13.0'") if cuda else ("cpu", "None")))
    (env.site / "torch/__init__.py").write_text(PRELOADS)
    vendor = [build_library(env.site / "nvidia" / name, body) for name, body in answers.items()] if cuda else []
    folders = sorted({f"$ORIGIN/../../nvidia/{os.path.dirname(name)}" for name in answers})
    path = (f"-Wl,{tags}", f"-Wl,-rpath,{':'.join([*(folders if linked else []), '$ORIGIN'])}")
    lib = env.site / "torch/lib"
    build_library(lib / "libtorch_global_deps.so", needs=tuple(p for p in vendor if "cudart" in p.name), flags=path)
    c10 = build_library(lib / "libc10.so", abi)
    cpu = build_library(lib / "libtorch_cpu.so", needs=(c10,), flags=path)
    gpu = (build_library(lib / "libtorch_cuda.so", needs=(cpu, *vendor), flags=path),) if cuda else ()
    torch = build_library(lib / "libtorch.so", needs=(cpu, *gpu), flags=path)
    python = build_library(lib / "libtorch_python.so", ARCHS, needs=(torch, *gpu), flags=path)
    suffix = env.probe()["values"]["python.soabi"]
    return build_library(
        env.site / f"torch/_C.{suffix}.so", needs=(python,), flags=(f"-Wl,{tags}", "-Wl,-rpath,$ORIGIN/lib")
    )


def really_mapped(env: Venv, stem: str, **variables: str) -> list[str]:
    """What the real dynamic loader maps when torch's stubs are opened in torch's order."""
    code = (
        "import ctypes, glob, sys\n"
        "ctypes.CDLL(sys.argv[1] + '/lib/libtorch_global_deps.so')\n"
        "ctypes.CDLL(glob.glob(sys.argv[1] + '/_C.*.so')[0])\n"
        "print({l.split()[-1] for l in open('/proc/self/maps') if sys.argv[2] in l})"
    )
    done = subprocess.run(
        [env.path / "bin/python3", "-c", code, env.site / "torch", stem],
        capture_output=True,
        text=True,
        check=True,
        env=variables,
        timeout=60,
    )
    return sorted(ast.literal_eval(done.stdout))


def test_library_versions_come_from_the_libraries_themselves(env: Venv) -> None:
    install_cuda_torch(env)
    found = env.probe("full")
    values = found["values"]
    versions = {name: values[f"libs.{name}.version"] for name in (*VENDOR, *HEAVY)}
    assert versions == {
        "cudart": "13.0",
        "cudnn": "9.20.0",
        "nccl": "2.29.7",
        "cufft": "12.0.0",
        "cusparse": "12.6.3",
        "cusparselt": "0.8.1",
        "nvrtc": "13.0",
        "nvjitlink": "13.2",
        "nvshmem": "3.4.5",
        "cublas": "13.1.1",
        "cublaslt": "13.1.2",
    }
    assert not [field for field in found["unknown"] if field.startswith("libs.")]
    nccl = env.site / "nvidia/nccl/lib/libnccl.so.2"
    assert values["libs.nccl.sha256"] == hashlib.sha256(nccl.read_bytes()).hexdigest()
    assert "libs.cublas.version" not in env.probe()["values"], "loading the real one takes 150 MiB"


def test_origin_moves_with_the_environment_and_build_id_is_the_notes(env: Venv) -> None:
    name = "nccl/lib/libnccl.so.2"
    install_cuda_torch(env)
    build_library(env.site / "nvidia" / name, ANSWERS[name], flags=("-Wl,--build-id=0xc0ffee0123456789",))
    build_library(env.site / "nvidia/cudnn/lib/libcudnn.so.9", flags=("-Wl,--build-id=none",))
    values = env.probe()["values"]
    assert values["libs.nccl.origin"] == f"prefix:{SITE}/nvidia/{name}"
    assert values["libs.nccl.build-id"] == "c0ffee0123456789"
    assert values["libs.cudnn.build-id"] == "none"
    assert values["libs.libtorch_cuda.origin"] == f"prefix:{SITE}/torch/lib/libtorch_cuda.so"


@pytest.mark.parametrize(("tags", "wins"), [("--disable-new-dtags", "prefix"), ("--enable-new-dtags", "other")])
def test_ld_library_path_shadows_a_library_exactly_when_the_loader_lets_it(
    env: Venv, tmp_path: Path, tags: str, wins: str
) -> None:
    install_cuda_torch(env, tags=tags)
    shadow = build_library(tmp_path / "module/libnccl.so.2", "int ncclGetVersion(int *v) { *v = 22203; return 0; }")
    found = env.probe(LD_LIBRARY_PATH=f"{tmp_path}/none:{shadow.parent}")["values"]
    place = {"prefix": f"prefix:{SITE}/nvidia/nccl/lib/libnccl.so.2", "other": f"other:{shadow}"}
    real = {"prefix": str(env.site / "nvidia/nccl/lib/libnccl.so.2"), "other": str(shadow)}
    assert found["libs.nccl.origin"] == place[wins]
    assert found["libs.nccl.version"] == {"prefix": "2.29.7", "other": "2.22.3"}[wins]
    mapped = really_mapped(env, "libnccl", LD_LIBRARY_PATH=f"{tmp_path}/none:{shadow.parent}")
    assert [os.path.normpath(p) for p in mapped] == [real[wins]]
    assert found["libs.ld-library-path"] == [f"{tmp_path}/none", str(shadow.parent)]
    assert env.probe()["values"]["libs.nccl.origin"] == place["prefix"]


def test_ld_preload_is_noted_and_wins(env: Venv, tmp_path: Path) -> None:
    install_cuda_torch(env)
    shadow = build_library(tmp_path / "libnccl.so.2", "int ncclGetVersion(int *v) { *v = 22203; return 0; }")
    found = env.probe(LD_PRELOAD=str(shadow))["values"]
    assert found["libs.nccl.origin"] == f"other:{shadow}" and found["libs.ld-preload"] == [str(shadow)]
    assert really_mapped(env, "libnccl", LD_PRELOAD=str(shadow)) == [str(shadow)]


def test_what_torch_opens_itself_when_the_loader_finds_nothing(env: Venv) -> None:
    # Of a major version that no system has.
    two = {"cuda_runtime/lib/libcudart.so.99": "", "nccl/lib/libnccl.so.99": ANSWERS["nccl/lib/libnccl.so.2"]}
    install_cuda_torch(env, answers=two, linked=False)
    # Without RPATH nothing is found: then torch opens what __init__.py names, wherever sys.path has it.
    found = env.probe()
    assert found["values"]["libs.nccl.origin"] == f"prefix:{SITE}/nvidia/nccl/lib/libnccl.so.99"
    assert found["values"]["libs.nccl.version"] == "2.29.7"


def test_a_needed_library_that_is_nowhere_is_unknown_and_one_that_is_not_needed_is_absent(env: Venv) -> None:
    # Of a major version that no system has.
    install_cuda_torch(env, answers={"cuda_runtime/lib/libcudart.so.99": "", "nccl/lib/libnccl.so.99": ""})
    assert env.probe()["values"]["libs.nvshmem.version"] == "absent"
    (env.site / "nvidia/nccl/lib/libnccl.so.99").rename(env.site / "nvidia/nccl/lib/gone.txt")
    unknown = env.probe()["unknown"]
    where = f"{SITE}/torch/lib/libtorch_cuda.so needs libnccl.so.99"
    assert unknown["libs.nccl.version"] == f"no such library found: {where}, and the loader finds none"
    assert unknown["libs.nvshmem.version"] == "not every library under torch was found: libnccl.so.99 is missing"


def test_a_cpu_build_never_looks_at_the_systems_cuda(env: Venv, tmp_path: Path) -> None:
    install_cuda_torch(env, cuda=False)
    shadow = build_library(tmp_path / "cuda/libnccl.so.2", ANSWERS["nccl/lib/libnccl.so.2"])
    values = env.probe("full", LD_LIBRARY_PATH=str(shadow.parent))["values"]
    for name in (*VENDOR, *HEAVY, "libtorch_cuda"):
        assert values[f"libs.{name}.origin"] == values[f"libs.{name}.sha256"] == "absent"
    assert values["libs.libtorch_cpu.origin"] == f"prefix:{SITE}/torch/lib/libtorch_cpu.so"
    assert re.fullmatch("[0-9a-f]{64}", values["libs.libtorch_cpu.sha256"])
    assert values["torch.arch-list"] == "none"


def test_old_libraries_packed_their_versions_otherwise(env: Venv) -> None:
    answers = {
        "nccl/lib/libnccl.so.2": "int ncclGetVersion(int *v) { *v = 2708; return 0; }",
        "cudnn/lib/libcudnn.so.8": "size_t cudnnGetVersion(void) { return 8902; }",
        "cuda_runtime/lib/libcudart-d0da41ae.so.11.0": "int cudaRuntimeGetVersion(int *v) { *v = 11070; return 0; }",
    }
    install_cuda_torch(env, answers=answers)
    values = env.probe()["values"]
    versions = {name: values[f"libs.{name}.version"] for name in ("nccl", "cudnn", "cudart")}
    assert versions == {"nccl": "2.7.8", "cudnn": "8.9.2", "cudart": "11.7"}


def test_a_library_that_crashes_lies_or_fails_is_unknown_and_alone(env: Venv) -> None:
    answers = {
        "nccl/lib/libnccl.so.2": "int ncclGetVersion(int *v) { abort(); }",
        "cudnn/lib/libcudnn.so.9": 'size_t cudnnGetVersion(void) { write(1, "noise", 5); return 7; }',
        "cuda_runtime/lib/libcudart.so.13": "int cudaRuntimeGetVersion(int *v) { return 35; }",
        "cu13/lib/libnvrtc.so.13": "int other(void) { return 0; }",
        "cu13/lib/libcufft.so.12": ANSWERS["cu13/lib/libcufft.so.12"],
    }
    install_cuda_torch(env, answers=answers)
    found = env.probe()
    unknown = found["unknown"]
    assert unknown["libs.nccl.version"] == "its child process ended with status -6"
    assert unknown["libs.cudnn.version"] == "the library says 7, which is no version"
    assert unknown["libs.cudart.version"] == "status [35]"
    assert "undefined symbol: nvrtcVersion" in unknown["libs.nvrtc.version"]
    assert found["values"]["libs.cufft.version"] == "12.0.0"


def test_a_library_that_hangs_is_given_up_and_not_left_behind(env: Venv) -> None:
    name = "nccl/lib/libnccl.so.2"
    install_cuda_torch(env, answers={name: "int ncclGetVersion(int *v) { sleep(600); return 0; }"})
    found = altered(env, {"LIBRARY_SECONDS = 20.0": "LIBRARY_SECONDS = 0.5"})
    assert found["unknown"]["libs.nccl.version"] == "loading it took longer than 0.5 s"
    assert str(env.site / "nvidia" / name) not in "".join(maps_of_all())


def maps_of_all() -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.append((process / "maps").read_text())
        except OSError:
            continue
    return found


def altered(env: Venv, changes: dict[str, str], level: str = "record", **variables: str) -> dict[str, Any]:
    """The probe with other constants: time limits, the root of the system's files."""
    source = PROBE.read_text()
    for old, new in changes.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    done = subprocess.run(
        [env.path / "bin/python3", "-B", "-", "--level", level],
        input=source.encode(),
        capture_output=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", **variables},
        check=True,
    )
    return parse(done.stdout)


def test_arch_list_abi_and_debug_are_read_from_the_binaries(env: Venv) -> None:
    install_cuda_torch(env)
    values = env.probe()["values"]
    assert values["torch.arch-list"] == ["sm_80", "sm_90a", "compute_90"]
    assert (values["torch.cxx11-abi"], values["torch.debug"]) == ("true", "false")
    build_library(env.site / "torch/lib/libc10.so", OLD_ABI)
    build_library(env.site / "torch/lib/libtorch_python.so")
    found = env.probe()
    assert found["values"]["torch.cxx11-abi"] == "false"
    assert found["unknown"]["torch.arch-list"].startswith("0 strings in libtorch_python.so")


def test_files_that_are_hardly_elf_neither_crash_nor_hang(env: Venv, tmp_path: Path) -> None:
    install_cuda_torch(env, cuda=False)
    path = env.site / "torch/lib/libtorch_cpu.so"
    good = path.read_bytes()
    random = __import__("random").Random(1)
    code = PROBE.read_text().replace(
        'if __name__ == "__main__":\n    import gc', 'if __name__ == "never":\n    import gc'
    )
    script = tmp_path / "fuzz.py"
    script.write_text(code + FUZZ)
    cases = tmp_path / "cases"
    cases.mkdir()
    for number in range(400):
        data = bytearray(good[: random.choice((len(good), random.randrange(len(good))))])
        for _ in range(random.choice((0, 1, 3, 30))):
            place = random.choice((random.randrange(min(64, len(data) or 1)), random.randrange(len(data) or 1)))
            data[place : place + 1] = bytes([random.choice((0, 255, random.randrange(256)))])
        (cases / f"{number:04}").write_bytes(data)
    done = subprocess.run([sys.executable, "-B", script, cases], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "400"


FUZZ = """
import struct
count = 0
for name in sorted(os.listdir(sys.argv[1])):
    descriptor = os.open(os.path.join(sys.argv[1], name), os.O_RDONLY)
    try:
        elf = Elf(descriptor)
        elf.symbol_names(descriptor)
    except (OSError, ValueError):
        pass
    os.close(descriptor)
    count += 1
print(count)
"""


# ---- level deep: a real import of torch --------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.slow
def test_what_torch_maps_is_what_was_expected_without_importing_it() -> None:
    python = os.environ.get("HPCENV_TEST_TORCH_PYTHON")
    if not python:
        pytest.skip("NOT TESTED: HPCENV_TEST_TORCH_PYTHON names no Python with torch")
    found = probe(python, "deep")
    values = found["values"]
    assert not [f for f in found["unknown"] if f.startswith(("loaded.", "torch.", "libs."))]
    assert values["loaded.differs"] == [] and values["torch.running-differs"] == []
    assert values["loaded.libtorch_cpu"] == [values["libs.libtorch_cpu.origin"]]
    assert re.fullmatch("[0-9a-f]{64}", values["torch.config-digest"])


def test_a_torch_that_cannot_be_imported_leaves_the_other_levels(env: Venv) -> None:
    install_cuda_torch(env, cuda=False)
    found = env.probe("deep")
    assert found["unknown"]["loaded.nccl"].startswith("import torch ended with status ")
    assert found["unknown"]["torch.config-digest"].endswith("torch was imported")
    assert found["values"]["libs.libtorch_cpu.origin"].startswith("prefix:")


def test_a_running_torch_that_is_not_its_files_is_said(env: Venv) -> None:
    install_cuda_torch(env, cuda=False)
    (env.site / "torch/__init__.py").write_text(
        "import ctypes, types, os\n"
        "__version__ = '9.9'\n"
        "version = types.SimpleNamespace(git_version='%s', cuda=None, debug=False)\n"
        "_C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)\n"
        "cpu = types.SimpleNamespace(get_cpu_capability=lambda: 'AVX2')\n"
        "backends = types.SimpleNamespace(cpu=cpu)\n"
        "__config__ = types.SimpleNamespace(show=lambda: 'built\\n  - CPU capability usage: AVX2\\nend')\n"
        "ctypes.CDLL(os.path.dirname(__file__) + '/lib/libtorch_cpu.so')\n"
        "print('noise of an import')\n" % "cf30153c4c131c8164ee7798e5022d810682e2cb"
    )
    values = env.probe("deep")["values"]
    assert values["torch.running-differs"] == ["torch.version: 2.13.0+cpu in its files, 9.9 when it runs"]
    expected = f"prefix:{SITE}/torch/lib/libtorch.so"
    assert values["loaded.differs"] == [f"libtorch: nothing mapped, {expected} expected"]
    assert values["torch.config-digest"] == hashlib.sha256(b"built\nend").hexdigest()
    assert values["torch.cpu-capability"] == "AVX2"


# ---- the standard library --------------------------------------------------------------------------------------


def test_the_standard_library_has_one_digest_whoever_asks(env: Venv, tmp_path: Path) -> None:
    other = Venv(tmp_path / "other").probe("full")["values"]["python.stdlib-sha256"]
    assert re.fullmatch("[0-9a-f]{64}", other)
    assert env.probe("full")["values"]["python.stdlib-sha256"] == other
    assert "python.stdlib-sha256" not in env.probe("record")["values"]


# ---- where packages came from ------------------------------------------------------------------------------------


def test_build_and_tags_come_from_wheel(env: Venv) -> None:
    text = b"Wheel-Version: 1.0\nGenerator: x\nTag: cp311-cp311-linux_x86_64\nBuild: 3\nTag: cp311-abi3-linux_x86_64\n"
    env.install("built", {"built-1.0.dist-info/WHEEL": text})
    built = package(env.probe(), "built")
    assert (built["build"], built["source"]) == ("3", "wheel")
    assert built["tags"] == ["cp311-abi3-linux_x86_64", "cp311-cp311-linux_x86_64"]
    assert package(env.probe(), "demo")["source"] == "unknown"


@pytest.mark.parametrize(
    ("origin", "source", "direct"),
    [
        (
            {
                "url": "https://user:secret@host.example/x/y.git?token=secret",
                "vcs_info": {"vcs": "git", "commit_id": "ab12"},
            },
            "vcs",
            {"url": "https://host.example/x/y.git", "commit-id": "ab12"},
        ),
        (
            {"url": "https://host.example/d-1.0.tar.gz#sha256=1", "archive_info": {"hash": "sha256=12"}},
            "archive",
            {"url": "https://host.example/d-1.0.tar.gz", "hash": "sha256=12"},
        ),
        (
            {"url": "file:///home/me/d-1.0-py3-none-any.whl", "archive_info": {"hashes": {"md5": "1", "sha256": "34"}}},
            "wheel",
            {"url": "file:d-1.0-py3-none-any.whl", "hash": "sha256=34"},
        ),
        ({"url": "file:///home/me/d", "dir_info": {}}, "directory", {"url": "file:d"}),
        (
            {"url": "ssh://git@host.example/d", "vcs_info": {}},
            "vcs",
            {"url": "ssh://host.example/d", "commit-id": ""},
        ),
        ({"url": "git@host.example:secret", "dir_info": {}}, "directory", {"url": "?"}),
    ],
)
def test_direct_urls_are_kept_without_secrets_and_places(
    env: Venv, origin: dict[str, Any], source: str, direct: dict[str, str]
) -> None:
    info = env.install("d", {"d.py": b"1"})
    (info / "direct_url.json").write_text(json.dumps(origin))
    entry = package(env.probe(), "d")
    assert (entry["source"], entry["direct-url"]) == (source, direct)
    assert entry["record-sha256"] is not None


def git(folder: Path, *arguments: str) -> str:
    if shutil.which("git") is None:
        pytest.skip("NOT TESTED: no git on this machine")
    who = ["-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *who, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    return done.stdout.strip()


def test_an_editable_install_names_the_commit_and_whether_it_is_changed(env: Venv, tmp_path: Path) -> None:
    source = tmp_path / "my source"
    (source / "pkg").mkdir(parents=True)
    (source / "pkg/a.py").write_text("1")
    git(source, "init", "-q")
    info = env.install("mine", {"__editable__.mine.pth": b"x\n"})
    url = (source / "pkg").as_uri()
    (info / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {"editable": True}}))

    def state(**variables: str) -> dict[str, Any]:
        entry = package(env.probe(**variables), "mine")
        assert (entry["source"], entry["direct-url"]) == ("editable", {"url": "file:pkg", "editable": True})
        assert isinstance(entry["git"], dict)
        return entry["git"]

    assert state()["reason"].endswith("RECORD: no commit") or "reason" in state()
    git(source, "add", ".")
    git(source, "commit", "-qm", "one")
    commit = git(source, "rev-parse", "HEAD")
    clean = {"commit": commit, "dirty": False, "diff-sha256": "none"}
    assert state() == clean
    git(source, "pack-refs", "--all")
    assert state(PATH="/nonexistent") == {"commit": commit, "reason": "whether it is changed is unknown: no git here"}
    (source / "pkg/a.py").write_text("2")
    changed = state()
    assert changed == {"commit": commit, "dirty": True, "diff-sha256": changed["diff-sha256"]} != clean
    git(source, "checkout", "-q", "--detach")
    git(source, "worktree", "add", "-q", str(tmp_path / "tree"), "main")
    (info / "direct_url.json").write_text(
        json.dumps({"url": (tmp_path / "tree").as_uri(), "dir_info": {"editable": True}})
    )
    entry = package(env.probe(), "mine")
    assert entry["git"] == clean
    (tmp_path / "tree/.git").write_text("gitdir: /etc\n")
    assert package(env.probe(), "mine")["git"]["reason"].startswith("its commit is unknown: FileNotFoundError")


@pytest.fixture
def editable(env: Venv, tmp_path: Path) -> Path:
    """The source of an editable install, not under git."""
    source = tmp_path / "source"
    for path in ("src/pkg/__init__.py", "src/pkg/kernel.cu", "bench/speed.py"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text("1")
    info = env.install("mine", {"__editable__.mine.pth": f"{source}/src\n".encode()})
    (info / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), "dir_info": {"editable": True}}))
    return source


def commit_all(source: Path) -> None:
    git(source, "init", "-q")
    (source / ".gitignore").write_text("*.so\n__pycache__/\nbuild/\nout/\n")
    git(source, "add", ".")
    git(source, "commit", "-qm", "one")


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("src/pkg/__init__.py", True),
        ("src/pkg/kernel.cu", True),  # tracked: whatever it is
        ("src/pkg/new.py", False),
        ("src/pkg/fast.cpython-311-x86_64-linux-gnu.so", False),  # ignored
        ("src/pkg/lib/libfast.so.2", False),
        ("src/pkg/bare.pyc", False),
        ("out/generated.py", False),  # ignored, and importable from the source's folder
        ("src/pkg/na\nme \udce9.py", False),
    ],
)
def test_each_edit_of_an_editable_install_changes_its_digest(env: Venv, editable: Path, path: str, known: bool) -> None:
    commit_all(editable)
    seen = []
    for text in ("1" if known else None, "first", "second", None):
        (editable / path).parent.mkdir(exist_ok=True)
        (editable / path).write_text(text) if text else (editable / path).unlink(missing_ok=True)
        seen.append(package(env.probe(), "mine")["git"]["diff-sha256"])
    assert seen[0] == "none" and len(set(seen)) == (4 if known else 3)
    assert (seen[3] == "none") is not known


def test_a_digest_of_changes_is_told_in_the_docstring(env: Venv, editable: Path) -> None:
    commit_all(editable)
    (editable / "src/pkg/kernel.cu").write_text("2")
    (editable / "src/pkg/__init__.py").unlink()
    git(editable, "mv", "bench/speed.py", "bench/fast.py")
    (editable / "link.py").symlink_to("nowhere")
    lines = [
        "src/pkg/kernel.cu\0" + hashlib.sha256(b"2").hexdigest(),
        "src/pkg/__init__.py\0missing",
        "bench/speed.py\0missing",
        "bench/fast.py\0" + hashlib.sha256(b"1").hexdigest(),
        "link.py\0missing\0nowhere",
    ]
    expected = hashlib.sha256(b"hpcenv-diff-v1\n" + "\n".join(sorted(lines)).encode()).hexdigest()
    assert package(env.probe(), "mine")["git"]["diff-sha256"] == expected


@pytest.mark.parametrize(
    "path",
    [
        "src/pkg/__pycache__/x.cpython-311.pyc",
        "build/lib.linux-x86_64/pkg/x.so",  # no folder that Python could import from
        ".cache/x.py",
        "out/notes.txt",
        "data.bin",
        "lockfiles/default.lock.toml",  # holds this digest
        "venv/lib/x.py",
        "runs/first/source/x.py",
    ],
)
def test_what_is_no_code_of_an_editable_install_changes_no_digest(env: Venv, editable: Path, path: str) -> None:
    for mark in ("venv/pyvenv.cfg", "runs/first/manifest.json", "runs/first/lock.toml", "lockfiles/default.lock.toml"):
        (editable / mark).parent.mkdir(parents=True, exist_ok=True)
        (editable / mark).write_text("")

    def written() -> dict[str, Any]:
        (editable / path).parent.mkdir(parents=True, exist_ok=True)
        (editable / path).write_text("2")
        return package(env.probe(), "mine")

    before = package(env.probe(), "mine")["files"]
    assert before["sha256"] == written()["files"]["sha256"]
    (editable / path).unlink()
    (editable / "lockfiles/default.lock.toml").write_text("1")
    commit_all(editable)
    assert written()["git"]["diff-sha256"] == "none"


def test_a_file_that_git_is_told_not_to_look_at_counts(env: Venv, editable: Path) -> None:
    commit_all(editable)
    git(editable, "update-index", "--assume-unchanged", "src/pkg/__init__.py")
    before = package(env.probe(), "mine")["git"]
    (editable / "src/pkg/__init__.py").write_text("2")
    after = package(env.probe(), "mine")["git"]
    assert (before["dirty"], after["dirty"]) == (False, False)
    assert before["diff-sha256"] != after["diff-sha256"]


@pytest.mark.parametrize("has_git", [False, True])
def test_without_an_answer_of_git_the_files_of_an_editable_install_count(
    env: Venv, editable: Path, has_git: bool
) -> None:
    if has_git:
        commit_all(editable)

    def files() -> str:
        entry = package(env.probe(PATH="/nonexistent"), "mine")
        assert "diff-sha256" not in entry["git"] and entry["git"]["reason"]
        return str(entry["files"]["sha256"])

    one = hashlib.sha256(b"1").hexdigest()
    lines = [f"bench/speed.py\0{one}", f"src/pkg/__init__.py\0{one}"]
    assert files() == hashlib.sha256(b"hpcenv-files-v1\n" + "\n".join(lines).encode()).hexdigest()
    (editable / "src/pkg/fast.so").write_text("1")
    before = files()
    (editable / "src/pkg/fast.so").write_text("2")
    assert files() != before


def test_a_git_that_does_not_end_is_not_waited_for_twice(env: Venv, editable: Path, tmp_path: Path) -> None:
    commit_all(editable)
    info = env.install("other", {"__editable__.other.pth": b"x\n"})
    (info / "direct_url.json").write_text(json.dumps({"url": editable.as_uri(), "dir_info": {"editable": True}}))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").write_text('#!/bin/sh\necho x >> "$0.calls"\nexec sleep 60\n')
    (tmp_path / "bin/git").chmod(0o755)
    source = PROBE.read_text().replace("GIT_SECONDS = 20.0", "GIT_SECONDS = 0.5")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run([env.path / "bin/python3", "-B", "-"], input=source, capture_output=True, text=True,
                          env={"PATH": path}, check=True, timeout=30)  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("mine", "other"):
        entry = package(found, name)
        assert entry["git"]["reason"] == "whether it is changed is unknown: git took longer than 0.5 s"
        assert entry["files"]["sha256"]
    assert (tmp_path / "bin/git.calls").read_text() == "x\n"


@pytest.mark.parametrize(
    ("bound", "reason"),
    [
        ("SOURCE_FILES = 20_000", "ValueError: more than 1 files to hash"),
        ("SOURCE_BYTES = 4 << 30", "ValueError: more than 0 GiB to hash"),
        ("SOURCE_ENTRIES = 1_000_000", "ValueError: more than 1 files and folders below its folder"),
        ("SOURCE_SECONDS = 60.0", "TimeoutError: reading the editable installs took longer than 1e-06 s"),
    ],
)
def test_a_tree_beyond_the_bounds_is_unknown(env: Venv, editable: Path, bound: str, reason: str) -> None:
    small = "1e-6" if "SECONDS" in bound else "1"
    source = PROBE.read_text().replace(bound, f"{bound.split()[0]} = {small}")
    done = subprocess.run([env.path / "bin/python3", "-B", "-"], input=source, capture_output=True, text=True,
                          env={"PATH": os.environ["PATH"]}, check=True)  # fmt: skip
    assert package(json.loads(done.stdout.splitlines()[-1]), "mine")["files"] == {"reason": reason}


def test_the_newest_unlisted_files_are_named(env: Venv) -> None:
    for number in range(5):
        (env.site / f"m{4 - number}.py").write_text("1")
        os.utime(env.site / f"m{4 - number}.py", (number, number))  # as a copy that keeps times has it
        time.sleep(0.02)
    newest = [f"{SITE}/m{number}.py" for number in range(3)]
    assert env.probe()["unlisted-newest"] == newest


def test_files_that_setup_py_listed_have_a_walk_digest(env: Venv) -> None:
    egg = env.site / "legacy-2.0.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Name: legacy\nVersion: 2.0\n")
    (egg / "installed-files.txt").write_text(
        "PKG-INFO\n../legacy.py\n../__pycache__/legacy.cpython-311.pyc\n../../../../x\n"
    )
    (env.site / "legacy.py").write_bytes(b"1")
    before = env.probe("full")
    legacy = package(before, "legacy")
    pkg_info = hashlib.sha256((egg / "PKG-INFO").read_bytes()).hexdigest()
    lines = [f"legacy-2.0.egg-info/PKG-INFO\0{pkg_info}", f"legacy.py\0{hashlib.sha256(b'1').hexdigest()}"]
    expected = hashlib.sha256(b"hpcenv-walk-v1\n" + "\n".join(lines).encode()).hexdigest()
    assert legacy["record-sha256"] == legacy["content-sha256"] == expected
    assert (legacy["digest-kind"], legacy["source"], unlisted(before)) == ("walk", "sdist", [])
    (env.site / "legacy.py").write_bytes(b"2")
    after = env.probe()
    assert package(after, "legacy")["record-sha256"] != expected
    assert after["values"]["packages.env-digest"] != before["values"]["packages.env-digest"]


def test_debians_own_packages_have_a_digest() -> None:
    folder = Path("/usr/lib/python3/dist-packages")
    eggs = (
        [p for p in folder.glob("*-info") if not (p / "RECORD").exists()] if Path("/var/lib/dpkg/info").is_dir() else []
    )
    if not eggs or not Path("/usr/bin/python3").exists():
        pytest.skip("NOT TESTED: no Debian packages of Python modules on this machine")
    found = probe("/usr/bin/python3", "full")
    walked = [p for p in found["packages"] if p["source"] == "dpkg" and p.get("digest-kind") == "walk"]
    assert walked and all(p["record-sha256"] == p["content-sha256"] for p in walked)
    assert found["values"]["system.packages-manager"] == "dpkg"


# ---- conda and the system's packages -------------------------------------------------------------------------------


def conda_record(env: Venv, name: str, **more: Any) -> None:
    folder = env.path / "conda-meta"
    folder.mkdir(exist_ok=True)
    record = {"name": name, "version": "2024.2", "build": "h1_0", **more}
    (folder / f"{name}-2024.2-h1_0.json").write_text(json.dumps(record))


def test_conda_packages_are_listed_without_hosts_and_tokens(env: Venv) -> None:
    values = env.probe()["values"]
    assert (values["packages.conda-count"], values["packages.conda-digest"]) == (0, "none")
    conda_record(env, "mkl", sha256="ab", channel="https://u:p@conda.example/t/TOKEN/conda-forge/linux-64")
    conda_record(
        env, "zlib", md5="cd", url="https://conda.example/pkgs/main/linux-64/zlib-2024.2-h1_0.conda", channel=""
    )
    (env.path / "conda-meta/history").write_text("")
    found = env.probe()
    base = {"version": "2024.2", "build": "h1_0"}
    assert found["conda-packages"] == [
        {"name": "mkl", "hash": "sha256=ab", "channel": "conda-forge", **base},
        {"name": "zlib", "hash": "md5=cd", "channel": "main", **base},
    ]
    lines = ["mkl\x002024.2\0h1_0\0sha256=ab\0conda-forge", "zlib\x002024.2\0h1_0\0md5=cd\0main"]
    expected = hashlib.sha256(b"hpcenv-conda-v1\n" + "\n".join(lines).encode()).hexdigest()
    assert found["values"]["packages.conda-digest"] == "sha256:" + expected
    (env.path / "conda-meta/bad.json").write_text("{")
    assert env.probe()["unknown"]["packages.conda-digest"].startswith("JSONDecodeError")
    env.install("tool", {"tool-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\n"})
    (env.site / "tool-1.0.dist-info/INSTALLER").write_text("conda\n")
    assert package(env.probe(), "tool")["source"] == "conda"


DPKG = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9
Description: text
 Package: not-one
 .

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: bash
Status: hold ok installed
Architecture: amd64
Version: 5.2
"""
APK = "C:Q1x=\nP:musl\nV:1.2.5-r0\nA:x86_64\nF:lib\nR:ld.so\n\nP:busybox\nV:1.37\nA:x86_64\n\n"


def system_packages(env: Venv, root: Path, level: str = "full") -> dict[str, Any]:
    return altered(env, {'SYSTEM_ROOT = "/"': f'SYSTEM_ROOT = "{root}/"'}, level)


def listed(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(p["name"], p["version"], p["arch"]) for p in found["system-packages"]]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_dpkgs_database(env: Venv, tmp_path: Path) -> None:
    write(tmp_path / "r/var/lib/dpkg/status", DPKG)
    found = system_packages(env, tmp_path / "r")
    assert listed(found) == [("bash", "5.2", "amd64"), ("libc6", "2.36-9", "amd64")]
    expected = hashlib.sha256(b"hpcenv-system-packages-v1\nbash\t5.2\tamd64\nlibc6\t2.36-9\tamd64").hexdigest()
    assert found["values"]["system.packages-digest"] == "sha256:" + expected
    assert (found["values"]["system.packages-manager"], found["values"]["system.packages-count"]) == ("dpkg", 2)
    assert "system-packages" not in system_packages(env, tmp_path / "r", "record")
    write(tmp_path / "r/var/lib/dpkg/status", "")
    write(tmp_path / "r/var/lib/dpkg/status.d/tzdata", "Package: tzdata\nVersion: 1\nArchitecture: all\n")
    assert listed(system_packages(env, tmp_path / "r")) == [("tzdata", "1", "all")]


def test_apks_database_and_no_database_at_all(env: Venv, tmp_path: Path) -> None:
    values = system_packages(env, tmp_path / "none")["values"]
    assert [values[f"system.packages-{f}"] for f in ("manager", "count", "digest")] == ["none", 0, "none"]
    write(tmp_path / "r/lib/apk/db/installed", APK)
    found = system_packages(env, tmp_path / "r")
    assert listed(found) == [("busybox", "1.37", "x86_64"), ("musl", "1.2.5-r0", "x86_64")]


def rpm_header(name: str, version: str, release: str, arch: str, epoch: int | None = None) -> bytes:
    data, entries = b"", []
    for tag, text in ((1000, name), (1001, version), (1002, release), (1022, arch)):
        entries.append((tag, 6, len(data), 1))
        data += text.encode() + b"\0"
    if epoch is not None:
        data += b"\0" * (-len(data) % 4)
        entries.append((1003, 4, len(data), 1))
        data += struct.pack(">I", epoch)
    index = b"".join(struct.pack(">IIiI", *entry) for entry in entries)
    return struct.pack(">II", len(entries), len(data)) + index + data


def rpm_database(path: Path, *blobs: bytes) -> None:
    path.parent.mkdir(parents=True)
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE Packages (hnum INTEGER PRIMARY KEY AUTOINCREMENT, blob BLOB NOT NULL)")
    database.executemany("INSERT INTO Packages (blob) VALUES (?)", [(blob,) for blob in blobs])
    database.commit()
    database.close()


def test_rpms_sqlite_database(env: Venv, tmp_path: Path) -> None:
    packages = [
        rpm_header("bash", "5.1.8", "9.el9", "x86_64"),
        rpm_header("vim", "8.2", "1", "x86_64", epoch=2),
        rpm_header("gpg-pubkey", "8483c65d", "1", ""),
    ]
    rpm_database(tmp_path / "r/var/lib/rpm/rpmdb.sqlite", *packages)
    found = system_packages(env, tmp_path / "r")
    assert listed(found) == [("bash", "5.1.8-9.el9", "x86_64"), ("vim", "2:8.2-1", "x86_64")]
    assert found["values"]["system.packages-manager"] == "rpm"
    rpm_database(tmp_path / "bad/usr/lib/sysimage/rpm/rpmdb.sqlite", b"\xff" * 40)
    bad = system_packages(env, tmp_path / "bad")
    assert "more than 100000 entries" in bad["unknown"]["system.packages-digest"]
    write(tmp_path / "garbage/var/lib/rpm/rpmdb.sqlite", "garbage" * 1000)
    assert "DatabaseError" in system_packages(env, tmp_path / "garbage")["unknown"]["system.packages-digest"]


def test_an_rpm_database_of_an_old_format_needs_rpm(env: Venv, tmp_path: Path) -> None:
    if Path("/usr/bin/rpm").exists():
        pytest.skip("NOT TESTED: there is rpm on this machine")
    write(tmp_path / "r/var/lib/rpm/Packages", "berkeley")
    unknown = system_packages(env, tmp_path / "r")["unknown"]
    assert unknown["system.packages-digest"].endswith("no sqlite file, and no rpm here to read it")


# ---- what runs before the training does ----------------------------------------------------------------------------


def startup(found: dict[str, Any]) -> list[str]:
    return [entry.split(" ")[0] for entry in found["values"]["python.startup-files"]]


def test_everything_that_runs_at_the_start_of_python_is_listed(env: Venv, tmp_path: Path) -> None:
    assert env.probe()["values"]["python.startup-files"] == []
    env.install("hook", {"hook.pth": b"import os\n"})
    write(tmp_path / "extra/sitecustomize.py", "X = 1\n")
    write(tmp_path / "extra/usercustomize/__init__.py", "")
    write(tmp_path / "extra/ignored.pth", "not processed: no site directory")
    found = env.probe(PYTHONPATH=str(tmp_path / "extra"))
    digest = hashlib.sha256(b"X = 1\n").hexdigest()[:16]
    assert f"{tmp_path}/extra/sitecustomize.py {digest}" in found["values"]["python.startup-files"]
    extra = str(tmp_path / "extra")
    assert startup(found) == sorted(
        [f"{extra}/sitecustomize.py", f"{extra}/usercustomize/__init__.py", f"{SITE}/hook.pth"]
    )


def test_launcher_files_are_known_by_content_and_not_by_name(env: Venv) -> None:
    plain = env.probe()["values"]
    (env.site / "_virtualenv.pth").write_text("import _virtualenv")
    found = env.probe()["values"]
    assert found["python.startup-files"] == plain["python.startup-files"]
    assert found["packages.unlisted-digest"] == plain["packages.unlisted-digest"]
    (env.site / "_virtualenv.py").write_text("print('evil')")
    (env.site / "demo/_virtualenv.pth").write_text("import _virtualenv")
    assert unlisted(env.probe()) == [f"{SITE}/_virtualenv.py", f"{SITE}/demo/_virtualenv.pth"]
    (env.site / "_virtualenv.pth").write_text("import evil")
    assert startup(env.probe()) == [f"{SITE}/_virtualenv.pth"]


def test_a_compiled_file_that_python_never_checks_and_that_is_not_of_its_source_is_named(env: Venv) -> None:
    modes = py_compile.PycInvalidationMode
    for name, mode in (("a", modes.UNCHECKED_HASH), ("b", modes.CHECKED_HASH), ("c", modes.TIMESTAMP)):
        env.install(name, {f"{name}.py": b"X = 1\n"})
        py_compile.compile(str(env.site / f"{name}.py"), invalidation_mode=mode, doraise=True)
    assert env.probe("full")["values"]["python.unchecked-pyc"] == []
    for name in ("a", "b", "c"):
        (env.site / f"{name}.py").write_bytes(b"X = 2\n")
    [found] = env.probe("full")["values"]["python.unchecked-pyc"]
    assert found == f"{SITE}/__pycache__/a.{sys.implementation.cache_tag}.pyc"
    done = subprocess.run(
        [env.path / "bin/python3", "-c", "import a, b; print(a.X, b.X)"], capture_output=True, check=True
    )
    assert done.stdout == b"1 2\n", "Python really runs the old code"


# ---- pip, uv and virtualenv make the same environment --------------------------------------------------------------


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tools") / "env"
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    done = subprocess.run(
        [place / "bin/pip", "install", "-q", "uv<0.9", "virtualenv"], capture_output=True, text=True, timeout=300
    )
    if done.returncode != 0:
        pytest.skip("NOT TESTED: uv and virtualenv could not be installed: " + done.stderr[-300:])
    return place / "bin"


@pytest.mark.slow
@pytest.mark.long
def test_pip_and_uv_and_virtualenv_make_one_and_the_same_environment(tools: Path, tmp_path: Path) -> None:
    # A pure wheel, a binary one, and an sdist that each of the two builds itself.
    wanted = ["idna==3.10", "markupsafe==3.0.2", "docopt==0.6.2"]
    variables = {**os.environ, "UV_NO_CONFIG": "1"}

    def do(*command: Any) -> None:
        done = subprocess.run(
            [str(c) for c in command], capture_output=True, text=True, timeout=300, env=variables, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"NOT TESTED: {command[:3]} failed: {done.stderr[-300:]}")

    pip, uv, mixed = (tmp_path / name / "env" for name in ("pip", "deep/er/uv", "mixed"))
    do(sys.executable, "-m", "venv", "--without-pip", pip)
    do(tools / "pip", "--python", pip / "bin/python", "install", *wanted)
    do(tools / "uv", "venv", "-p", sys.executable, uv)
    do(tools / "uv", "pip", "install", "--python", uv / "bin/python", *wanted)
    do(tools / "virtualenv", "-p", sys.executable, "--no-seed", mixed)
    do(tools / "uv", "pip", "install", "--python", mixed / "bin/python", "--compile-bytecode", *wanted)
    assert (uv / SITE / "_virtualenv.py").exists(), "this uv leaves no launcher file: nothing is tested"
    reports = [probe(place / "bin/python", "full") for place in (pip, uv, mixed)]
    for report in reports:
        del report["seconds"], report["values"]["python.executable"], report["values"]["python.prefix"]
        installers = {entry.pop("installer") for entry in report["packages"]}
        assert installers <= {"pip", "uv"} and len(report["packages"]) == 3
    assert reports[0] == reports[1] == reports[2]
