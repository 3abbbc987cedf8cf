"""Names, versions and digests of distributions."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from probe_world import SITE, Venv, b64, package, parse, probe, run, unlisted


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
        report.pop("look")  # times of files, so that another look at the same machine can be short
        del report["values"]["python.executable"], report["values"]["python.prefix"]
        del report["mountinfo"]  # a testbed that starts on this machine changes it
    assert found[0] == found[1]
    assert found[0]["values"]["packages.env-digest"] == found[0]["values"]["packages.content-digest"]


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


def test_pips_leftovers_are_no_dists_and_no_import_can_name_their_files(env: Venv) -> None:
    shutil.copytree(env.site / "demo-1.0.dist-info", env.site / "~emo-1.0.dist-info")
    shutil.copytree(env.site / "demo", env.site / "~emo")
    found = env.probe()
    assert found["shadowed"] == []
    assert unlisted(found) == []


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


def test_metadata_that_is_gone_leaves_the_folders_name(env: Venv) -> None:
    (env.site / "demo-1.0.dist-info/METADATA").unlink()
    demo = package(env.probe(), "demo")
    assert demo["version"] == "1.0" and "identity: FileNotFoundError" in demo["reason"]


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
        # `look` counts the installers' own files, too, and has their times.
        del report["seconds"], report["look"], report["values"]["python.executable"], report["values"]["python.prefix"]
        installers = {entry.pop("installer") for entry in report["packages"]}
        assert installers <= {"pip", "uv"} and len(report["packages"]) == 3
    assert reports[0] == reports[1] == reports[2]


def test_a_named_folder_outside_of_the_prefix_counts_as_a_folder_of_packages(env: Venv, tmp_path: Path) -> None:
    other = tmp_path / "target"
    info = other / "extra-1.0.dist-info"
    info.mkdir(parents=True)
    (other / "extra.py").write_text("X = 1\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"extra.py,{b64(b'X = 1' + bytes([10]))},6\nextra-1.0.dist-info/RECORD,,\n")

    def extra(*words: str) -> dict[str, Any]:
        answer = parse(run(env.path / "bin" / "python3", ["--level", "full", *words], PYTHONPATH=str(other)).stdout)
        return next(entry for entry in answer["packages"] if entry["name"] == "extra")

    assert extra()["scanned"] is False
    found = extra("--site", str(other))
    assert "scanned" not in found
    (other / "extra.py").write_text("X = 2\n")
    assert extra("--site", str(other))["content-sha256"] != found["content-sha256"]
