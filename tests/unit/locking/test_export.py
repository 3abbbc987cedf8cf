"""`hpcenv export`: from a lockfile alone; pip takes what it writes; nothing is lost or half written."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from http_server import QuietServer
from packaging.pylock import Pylock
from packaging.version import Version

from hpcenv.errors import LockfileMissing, ToolFailed, WouldOverwrite
from hpcenv.locking.export import ExportResult, export
from hpcenv.project import lockfile as lock_model
from hpcenv.project import toml_files
from hpcenv.project.document import parse
from hpcenv.project.lockfile import Lockfile

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"


def make_wheel(folder: Path, name: str, version: str = "1.0") -> tuple[Path, str]:
    """Make a wheel that pip installs; return it with its sha256."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "x = 1\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for place, text in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
            rows.append(f"{place},sha256={digest},{len(text)}\n")
            wheel.writestr(place, text)
        wheel.writestr(f"{info}/RECORD", "".join(rows) + f"{info}/RECORD,,\n")
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def write_lock(folder: Path, *wheels: tuple[Path, str]) -> Path:
    dists = [
        {
            "name": path.name.split("-")[0],
            "version": "1.0",
            "source": "wheel",
            "record-sha256": "01",
            "wheel": {"filename": path.name, "sha256": sha256, "index": "pypi", "proof": "record"},
        }
        for path, sha256 in wheels
    ]
    data: dict[str, Any] = {
        "schema": 1,
        "generated-by": "hpcenv 0.1.0",
        "fingerprint": "",
        "kind": "host",
        "asked": {"image": "host", "platform": "linux/amd64"},
        "python": {"version": PYTHON, "implementation": sys.implementation.name},
        "torch": {"version": "2.13.0"},
        "system": {"machine": os.uname().machine},
        "packages": {
            "count": len(dists), "env-digest": "sha256:aa", "unlisted-count": 0, "unlisted-digest": "sha256:cc",
            "dist": dists,
        },
    }  # fmt: skip
    found, problems = parse(Lockfile, lock_model.from_data(data))
    assert problems == ()
    assert found is not None
    sealed = found.model_copy(update={"fingerprint": lock_model.fingerprint(lock_model.to_data(found))})
    path = folder / "some.lock.toml"
    toml_files.write(toml_files.dumps(lock_model.to_data(sealed), header=""), path)
    return path


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A package index on this machine: PEP 503 pages that are files."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words: Any) -> None:
            pass

    server = QuietServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def list_in_index(root: Path, wheel: Path, sha256: str | None, *, name: str | None = None) -> None:
    page = root / "simple" / (name or wheel.name.split("-")[0]) / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    stated = f"#sha256={sha256}" if sha256 else ""
    page.write_text(f'<a href="../../files/{wheel.name}{stated}">{wheel.name}</a>')


def pip_environ(home: Path, **words: str) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "HOME": str(home), "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0", **words}


def pip(*words: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--dry-run", "--ignore-installed"]
    return subprocess.run([*argv, *words], env=environ, capture_output=True, text=True)


def run(lock: Path, kind: Any, output: Path | None = None, **environ: str) -> ExportResult:
    return export(lock.parent, kind, environ=pip_environ(lock.parent, **environ), lock=lock.name, output=output)


# -- requirements.txt


def test_pip_installs_from_the_requirements_and_compares_the_hash(tmp_path: Path) -> None:
    wheel, sha256 = make_wheel(tmp_path / "links", "mine")
    output = tmp_path / "requirements.txt"
    lock = write_lock(tmp_path, (wheel, sha256))
    run(lock, "requirements", output)
    words = ("--require-hashes", "--no-index", "--find-links", str(wheel.parent), "-r", str(output))
    done = pip(*words, environ=pip_environ(tmp_path))
    assert "Would install mine-1.0" in done.stdout, done.stderr

    wheel.write_bytes(wheel.read_bytes() + b"\0")
    done = pip(*words, environ=pip_environ(tmp_path))
    assert done.returncode != 0
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr


def test_pip_finds_the_requirements_of_a_real_lockfile(tmp_path: Path) -> None:
    """With this machine's own index: a package that these tests need anyway, locked by its index's hash."""
    name, wanted = "iniconfig", version("iniconfig")
    report = pip("--no-deps", "--quiet", "--report", "-", f"{name}=={wanted}", environ=dict(os.environ))
    if report.returncode != 0:
        pytest.skip(f"NOT CHECKED: pip reaches no index here that has {name} {wanted}")
    info = json.loads(report.stdout)["install"][0]["download_info"]
    place = Path(info["url"].rsplit("/", 1)[-1])
    sha256 = info["archive_info"]["hashes"]["sha256"]
    lock = write_lock(tmp_path, (place, sha256))
    lock.write_text(lock.read_text().replace('version = "1.0"', f'version = "{wanted}"'))
    output = tmp_path / "requirements.txt"
    export(tmp_path, "requirements", environ=os.environ, lock=lock.name, output=output)
    done = pip("--require-hashes", "-r", str(output), environ=dict(os.environ))
    assert f"Would install {name}-{wanted}" in done.stdout, done.stderr

    if info["url"].startswith("file:"):
        pytest.skip("NOT CHECKED: pylock, the index of this machine is a folder")
    text = export(tmp_path, "pylock", environ=os.environ, lock=lock.name).text
    (package,) = toml(text)["packages"]
    assert package["wheels"][0]["hashes"]["sha256"] == sha256
    assert package["wheels"][0]["url"].endswith(place.name)


# -- pylock.toml


def toml(text: str) -> dict[str, Any]:
    import tomlkit

    return tomlkit.parse(text).unwrap()


def test_pylock_takes_urls_of_the_users_index(tmp_path: Path) -> None:
    wheel, sha256 = make_wheel(tmp_path / "files", "mine")
    list_in_index(tmp_path, wheel, sha256)
    output = tmp_path / "pylock.toml"
    with serving(tmp_path) as address:
        result = run(write_lock(tmp_path, (wheel, sha256)), "pylock", output, PIP_INDEX_URL=f"{address}/simple")
        data = toml(output.read_text())
        Pylock.from_dict(data)
        (package,) = data["packages"]
        assert package["wheels"] == [
            {"name": wheel.name, "url": f"{address}/files/{wheel.name}", "hashes": {"sha256": sha256}}
        ]
        assert (result.count, result.left_out, result.notes) == (1, (), ())
        if Version(version("pip")) < Version("26.1"):
            pytest.skip(f"NOT CHECKED: pip {version('pip')} does not install from pylock.toml (26.1 does)")
        done = pip("-r", str(output), environ=pip_environ(tmp_path))
        assert "Would install mine-1.0" in done.stdout, done.stderr


def test_pylock_prefers_an_index_to_a_folder_and_leaves_out_what_only_a_folder_has(tmp_path: Path) -> None:
    both, sha256 = make_wheel(tmp_path / "files", "both")
    here, only = make_wheel(tmp_path / "files", "only")
    list_in_index(tmp_path, both, sha256)
    lock = write_lock(tmp_path, (both, sha256), (here, only))
    with serving(tmp_path) as address:
        words = {"PIP_INDEX_URL": f"{address}/simple", "PIP_FIND_LINKS": str(tmp_path / "files")}
        result = run(lock, "pylock", **words)
    assert [package["name"] for package in toml(result.text)["packages"]] == ["both"]
    assert "file:" not in result.text
    assert str(tmp_path) not in result.text
    (left,) = result.left_out
    assert (left.name, left.reason) == (
        "only",
        "its wheel is in a folder on this machine (find-links), and no index has it",
    )
    assert result.notes == ("1 of 2 packages are left out: only",)


def test_pylock_holds_no_password_of_the_index(tmp_path: Path) -> None:
    wheel, sha256 = make_wheel(tmp_path / "files", "mine")
    list_in_index(tmp_path, wheel, sha256)
    with serving(tmp_path) as address:
        index = address.replace("://", "://me:secret@") + "/simple"
        result = run(write_lock(tmp_path, (wheel, sha256)), "pylock", PIP_INDEX_URL=index)
    assert f"{address}/files/" in result.text
    assert "secret" not in result.text


def test_pylock_leaves_out_a_file_that_the_index_has_replaced(tmp_path: Path) -> None:
    wheel, sha256 = make_wheel(tmp_path / "files", "mine")
    good, other = make_wheel(tmp_path / "files", "good")
    list_in_index(tmp_path, wheel, "0" * 64)
    list_in_index(tmp_path, good, other)
    with serving(tmp_path) as address:
        lock = write_lock(tmp_path, (wheel, sha256), (good, other))
        result = run(lock, "pylock", PIP_INDEX_URL=f"{address}/simple")
    (left,) = result.left_out
    assert left.reason == f"the index has a different file of that name: sha256 {'0' * 64}, locked {sha256}"
    assert f"# mine==1.0: {left.reason}" in result.text


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            {"PIP_INDEX_URL": "http://127.0.0.1:9/simple"},
            r"index not reachable \(Connection\w*Error\): pypi; needed for mine",
        ),
        ({"PIP_NO_INDEX": "1"}, "mine: no index lists mine-1.0-py3-none-any.whl"),
        ({"PIP_TIMEOUT": "nonsense"}, r"pip could not be set up \(SystemExit\): its configuration or version"),
    ],
)
def test_pylock_without_an_index_says_what_to_do_and_writes_nothing(
    tmp_path: Path, words: dict[str, str], why: str
) -> None:
    lock = write_lock(tmp_path, make_wheel(tmp_path / "files", "mine"))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ToolFailed) as caught:
        run(lock, "pylock", tmp_path / "pylock.toml", **words)
    assert caught.value.what == "cannot find the URLs of the locked wheels"
    assert re.fullmatch(why, str(caught.value.why))
    assert "`hpcenv export requirements`, which needs no index" in str(caught.value.hint)
    assert sorted(tmp_path.iterdir()) == before


def test_an_extra_index_that_is_down_is_no_missing_wheel(tmp_path: Path) -> None:
    """Unknown is not absent: the silent index may have it."""
    good, sha256 = make_wheel(tmp_path / "files", "good")
    list_in_index(tmp_path, good, sha256)
    with serving(tmp_path) as address, pytest.raises(ToolFailed) as caught:
        lock = write_lock(tmp_path, (good, sha256), make_wheel(tmp_path / "files", "mine"))
        words = {"PIP_INDEX_URL": f"{address}/simple", "PIP_EXTRA_INDEX_URL": "http://127.0.0.1:9/simple"}
        run(lock, "pylock", **words)
    # The error's name is pip's, and changes with it.
    assert re.fullmatch(r"index not reachable \(\w+\): extra-1; needed for mine", str(caught.value.why))


def test_files_of_the_users_folder_do_not_stand_in_for_what_pip_imports(tmp_path: Path, monkeypatch: Any) -> None:
    wheel, sha256 = make_wheel(tmp_path / "files", "mine")
    list_in_index(tmp_path, wheel, sha256)
    for name in ("queue", "pip", "packaging", "hpcenv", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken from the current folder')\n")
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path) as address:
        assert run(write_lock(tmp_path, (wheel, sha256)), "pylock", PIP_INDEX_URL=f"{address}/simple").count == 1


def test_another_name_than_pylock_toml_is_said(tmp_path: Path) -> None:
    lock = write_lock(tmp_path)
    assert run(lock, "pylock", tmp_path / "pylock.paper.toml").notes == ()
    (note,) = run(lock, "pylock", tmp_path / "other.toml").notes
    assert (
        note == "PEP 751 requires the name pylock.toml or pylock.NAME.toml: installers read other.toml as requirements"
    )


# -- files


def test_an_export_of_the_same_kind_is_replaced_and_said(tmp_path: Path) -> None:
    lock, output = write_lock(tmp_path), tmp_path / "bom.json"
    assert not run(lock, "cyclonedx", output).replaced
    first = output.read_bytes()
    assert run(lock, "cyclonedx", output).replaced
    assert output.read_bytes() == first


@pytest.mark.parametrize("kind", ["pylock", "requirements", "cyclonedx", "environment"])
def test_anything_else_is_not_overwritten(tmp_path: Path, kind: str) -> None:
    lock, output = write_lock(tmp_path), tmp_path / "requirements.txt"
    output.write_bytes(b"numpy\n\xff")
    with pytest.raises(WouldOverwrite, match="was not written by"):
        run(lock, kind, output)
    assert output.read_bytes() == b"numpy\n\xff"
    with pytest.raises(WouldOverwrite, match="is not a file"):
        run(lock, kind, tmp_path)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    lock = write_lock(tmp_path)
    (tmp_path / "link.txt").symlink_to("there.txt")
    assert run(lock, "requirements", tmp_path / "link.txt").path == tmp_path / "there.txt"
    assert (tmp_path / "link.txt").is_symlink()


def test_a_lockfile_without_its_project_and_environment_is_enough(tmp_path: Path) -> None:
    """What a reviewer has: the file."""
    wheel, sha256 = make_wheel(tmp_path / "files", "mine")
    lock = write_lock(tmp_path, (wheel, sha256))
    wheel.unlink()
    for kind in ("requirements", "cyclonedx", "environment"):
        assert sha256 in run(lock, kind).text or kind == "environment"
    assert 'name: "some"' in run(lock, "environment").text
    with pytest.raises(LockfileMissing):
        run(tmp_path / "other.lock.toml", "requirements")


# -- the command


def test_text_goes_to_stdout_and_notes_elsewhere(hpcenv: Any, project: Path) -> None:
    done = hpcenv("export", "requirements", cwd=project)
    assert done.status == 0, done.stderr
    assert done.stdout.startswith("# Written by `hpcenv export requirements` from the lockfile hpc2-")
    assert "note: 1 of 1 packages are left out: torch" in done.stderr

    written = hpcenv("export", "requirements", "-o", "r.txt", cwd=project)
    assert (project / "r.txt").read_text() == done.stdout
    assert written.stdout == f"wrote {project}/r.txt (0 packages)\n"
    assert "left out: torch 2.13.0+cpu: " in written.stderr
    again = hpcenv("export", "requirements", "-o", "r.txt", cwd=project)
    assert again.stdout.startswith("replaced ")


def test_json_holds_the_text_or_where_it_is(hpcenv: Any, project: Path) -> None:
    printed = hpcenv("export", "cyclonedx", "--json", cwd=project).envelope["data"]
    assert json.loads(printed["text"])["specVersion"] == "1.6"
    assert (printed["format"], printed["path"], printed["count"]) == ("cyclonedx", None, 1)
    written = hpcenv("export", "cyclonedx", "--json", "-o", "bom.json", cwd=project).envelope["data"]
    assert (written["text"], written["path"]) == (None, str(project / "bom.json"))
    assert (project / "bom.json").read_text() == printed["text"]


def test_a_file_in_the_way_ends_with_its_status(hpcenv: Any, project: Path) -> None:
    done = hpcenv("export", "environment", "-o", "train.py", cwd=project)
    assert (done.status, done.stdout) == (17, "")
    assert "error[would-overwrite]" in done.stderr


def test_help_and_typos(hpcenv: Any, tmp_path: Path) -> None:
    assert "pylock" in hpcenv("export", "--help", cwd=tmp_path).stdout
    assert hpcenv("export", "conda", cwd=tmp_path).status == 2
