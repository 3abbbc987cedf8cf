"""What conda installed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from probe_world import Venv, package


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
    assert env.probe()["unknown"]["packages.conda-digest"].startswith("ValueError: conda-meta/bad.json: Expecting")
    env.install("tool", {"tool-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\n"})
    (env.site / "tool-1.0.dist-info/INSTALLER").write_text("conda\n")
    assert package(env.probe(), "tool")["source"] == "conda"


PLACEHOLDER = "/placehold_" + "x" * 80


def _conda(env: Venv, *, binary: bool = False, moved_from: str = "") -> Path:
    """What conda leaves of a package with one plain file, one with the prefix in it, and a link."""
    prefix = moved_from or str(env.path)
    packed = (f"a={PLACEHOLDER}/etc\0b\0" if binary else f"path {PLACEHOLDER}/etc\n").encode()
    pad = b"\0" * (len(PLACEHOLDER) - len(prefix)) if binary else b""
    installed = f"a={prefix}/etc".encode() + pad + b"\0b\0" if binary else f"path {prefix}/etc\n".encode()
    (env.path / "lib/libx.so.1").write_bytes(b"x library")
    (env.path / "lib/libx.so").symlink_to("libx.so.1")
    (env.path / "etc").mkdir()
    (env.path / "etc/x.conf").write_bytes(installed)
    mode = {"file_mode": "binary" if binary else "text", "prefix_placeholder": PLACEHOLDER}
    paths: list[dict[str, object]] = [
        {
            "_path": "lib/libx.so.1",
            "path_type": "hardlink",
            "sha256": sha(b"x library"),
            "sha256_in_prefix": sha(b"x library"),
        },
        {"_path": "lib/libx.so", "path_type": "softlink"},
        {
            "_path": "etc/x.conf",
            "path_type": "hardlink",
            "sha256": sha(packed),
            "sha256_in_prefix": sha(installed),
            **mode,
        },
        {"_path": "../outside", "path_type": "hardlink", "sha256": "0" * 64},
    ]
    record = {"name": "x", "version": "1", "build": "0", "paths_data": {"paths": paths, "paths_version": 1}}
    (env.path / "conda-meta").mkdir()
    (env.path / "conda-meta/x-1-0.json").write_text(json.dumps(record))
    return env.path


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read(env: Venv) -> tuple[str, list[str]]:
    values = env.probe("full")["values"]
    return values["packages.conda-content-digest"], values["packages.conda-modified"]


@pytest.mark.parametrize("binary", [False, True])
def test_what_conda_installed_has_one_digest_in_every_prefix(tmp_path: Path, binary: bool) -> None:
    envs = [Venv(tmp_path / name) for name in ("a", "longer-name", "moved")]
    for made in envs:
        _conda(made, binary=binary, moved_from="/old/place" if made.path.name == "moved" else "")
    digests = [_read(made) for made in envs]
    assert digests[0] == digests[1] == digests[2] and digests[0][1] == []


@pytest.mark.parametrize("name", ["lib/libx.so.1", "etc/x.conf"])
def test_a_changed_file_of_conda_is_named(env: Venv, name: str) -> None:
    before = _read(_made(env))
    path = env.path / name
    path.write_bytes(path.read_bytes().replace(b"x", b"y") + b"!")
    after = _read(env)
    assert after[0] != before[0] and after[1] == [name]


def test_a_link_of_conda_that_leads_elsewhere_changes_the_digest(env: Venv) -> None:
    before = _read(_made(env))
    (env.path / "lib/libx.so").unlink()
    (env.path / "lib/libx.so").symlink_to("liby.so")
    assert _read(env)[0] != before[0]


def _made(env: Venv) -> Venv:
    _conda(env)
    return env
