"""A real virtual environment, and the probe run in it as it is really run: a subprocess."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import hpcenv.incontainer.probe
from hpcenv.container.probe_source import join_chapters, probe_source, read_chapters
from hpcenv.incontainer.probe.run import PROBES
from hpcenv.incontainer.probe.table import LEVELS

PROBE = Path(hpcenv.incontainer.probe.__file__).parent
# Every field that a level must answer.
FIELDS = {level: {f for probe in PROBES if level in probe.levels for f in probe.fields} for level in LEVELS}
SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


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
        input=probe_source().encode() if by == "stdin" else b"",
        capture_output=True,
        timeout=120,
        cwd=cwd or "/",
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **variables},
        check=False,
    )


def altered(
    env: Venv,
    changes: dict[str, str],
    level: str = "record",
    *,
    path: str = "/usr/bin:/bin",
    variables: dict[str, str] | None = None,
) -> dict[str, Any]:
    """The probe with other constants: time limits, the root of the system's files."""
    chapters = read_chapters()
    for old, new in changes.items():
        [name] = [name for name, text in chapters.items() if old in text]
        assert chapters[name].count(old) == 1
        chapters[name] = chapters[name].replace(old, new)
    done = subprocess.run(
        [env.path / "bin/python3", "-B", "-", "--level", level],
        input=join_chapters(chapters).encode(),
        capture_output=True,
        timeout=60,
        env={"PATH": path, **(variables or {})},
        check=True,
    )
    return parse(done.stdout)


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


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def listed(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(p["name"], p["version"], p["arch"]) for p in found["system-packages"]]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
