"""A host environment that is no longer the locked one is seen before the job is queued, as far as a second reaches."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcenv.errors import LockfileStale
from hpcenv.project.context import Context
from hpcenv.project.severities import resolve
from hpcenv.records.manifest import Environment, Manifest, PackageExpectation
from hpcenv.submission import host_packages

HASH = "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"
NAMES = ("alpha", "beta-two", "gamma", "packaging")


def record_of(name: str) -> str:
    """Return the digest of the RECORD that `install` writes, by its definition (incontainer/probe/__init__.py)."""
    rows = sorted(("\0".join((f"{name}.py", HASH, "0")), "\0".join((f"{name}-1.0.dist-info/METADATA", HASH, "9"))))
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def install(site: Path, name: str, version: str = "1.0") -> Path:
    stem = name.replace("-", "_")
    info = site / f"{stem}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{stem}.py,{HASH},0\n{info.name}/METADATA,{HASH},9\n{info.name}/RECORD,,\n")
    return info


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    folder.mkdir(parents=True)
    (tmp_path / "env" / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    for name in NAMES:
        install(folder, name)
    return folder


LOCKED = tuple(
    PackageExpectation(name=name, version="1.0", record_sha256=record_of(name.replace("-", "_"))) for name in NAMES
)


def seen(site: Path, seconds: float = 60) -> list[tuple[str, str, str]]:
    return [(one.field, one.locked, one.found) for one in host_packages.differences(site, LOCKED, seconds)]


def test_an_unchanged_environment_has_no_difference(site: Path) -> None:
    assert seen(site) == []


def test_what_was_installed_removed_or_replaced_is_named(site: Path) -> None:
    install(site, "docstring-parser", "0.18.0")
    shutil.rmtree(site / "alpha-1.0.dist-info")
    shutil.rmtree(site / "beta_two-1.0.dist-info")
    install(site, "beta-two", "1.1")
    record = site / "gamma-1.0.dist-info" / "RECORD"
    record.write_text(record.read_text().replace(HASH, HASH.replace("4", "5"), 1))
    found = seen(site)
    assert sorted(found)[:3] == [
        ("packages.alpha", "1.0", "absent"),
        ("packages.beta-two", "1.0", "1.1"),
        ("packages.docstring-parser", "absent", "0.18.0"),
    ]
    assert [field for field, _, _ in found if field not in {one[0] for one in sorted(found)[:3]}] == [
        "packages.gamma.record-sha256"
    ]


def test_what_was_not_reached_is_not_claimed(site: Path) -> None:
    """Without time, nothing is said; a package that is not there may be in a folder that a .pth file adds."""
    install(site, "docstring-parser", "0.18.0")
    shutil.rmtree(site / "alpha-1.0.dist-info")
    assert seen(site, -1.0) == []
    (site / "editable.pth").write_text(f"{site}\n")
    assert seen(site) == [("packages.docstring-parser", "absent", "0.18.0")]
    (site / "gamma-1.0.dist-info" / "RECORD").unlink()
    assert seen(site) == [("packages.docstring-parser", "absent", "0.18.0")]


def test_names_that_differ_are_looked_at_first(site: Path) -> None:
    """The clock leaves time for one package of five."""
    install(site, "zulu", "2.0")
    (found,) = host_packages.differences(site, LOCKED, 1.5, clock=itertools.count().__next__)
    assert (found.field, found.found) == ("packages.zulu", "2.0")


def manifest_for(make_manifest: Any, site: Path, **changes: Any) -> Manifest:
    python = str(site.parents[2] / "bin" / "python")
    environment = Environment(kind="host", python=python)
    return replace(make_manifest(environment=environment, packages=LOCKED, cluster="local"), **changes)


def context_at(folder: Path) -> Context:
    return Context(environ={"HOME": "/proc"}, cwd=folder, now=time.localtime(0), token="beef", command=("hpcenv",))


def test_the_job_is_refused_where_the_nodes_would_refuse_it(make_manifest: Any, site: Path, tmp_path: Path) -> None:
    manifest, context = manifest_for(make_manifest, site), context_at(tmp_path)
    assert host_packages.compare(manifest, context) == ()
    install(site, "docstring-parser", "0.18.0")
    with pytest.raises(LockfileStale) as caught:
        host_packages.compare(manifest, context)
    assert caught.value.why == "packages.docstring-parser absent -> 0.18.0\nevery node would refuse the job"
    assert str(caught.value.hint).endswith("to lock what is installed now: `hpcenv lock`")
    # Nodes may have other files at a place that is not shared: a note.
    (note,) = host_packages.compare(replace(manifest, cluster="slurm"), context)
    assert "packages.docstring-parser absent -> 0.18.0" in note
    # A difference that does not refuse a run is not reported, and neither is an unknown value.
    for other in (
        replace(manifest, severities=resolve({"packages.*": "warn"}, gpus=False)),
        replace(manifest, script="", module=""),
        replace(manifest, environment=replace(manifest.environment, kind="sif", sif="/x.sif", python="python3")),
    ):
        assert host_packages.compare(other, context) == ()


def test_pip_install_after_the_lock_is_refused_before_the_job(hpcenv: Any, tmp_path: Path) -> None:
    """As a user types it: the job was queued, perhaps for a day, and then ended with 90."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    (site,) = (tmp_path / "env").glob("lib/python3.*/site-packages")
    install(site, "alpha")
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print('TRAINED')\n")
    spec = f'image = "host"\npython = "{tmp_path / "env" / "bin" / "python"}"\n[policy]\n"torch.version" = "info"\n'
    (project / "hpcenv.toml").write_text(spec)
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    asked = hpcenv("lock", "--no-wheels", cwd=project, environ=environ)
    accepting = ("--accept", asked.stderr.rsplit("--accept ", 1)[1].split()[0]) if asked.status == 29 else ()
    done = hpcenv("lock", "--no-wheels", *accepting, cwd=project, environ=environ)
    assert done.status == 0, done.stderr
    words = ("submit", "train.py", "--nproc", "1", "--cluster", "local", "--launcher", "none")
    done = hpcenv(*words, "--name", "one", "--wait", cwd=project, environ=environ)
    assert done.status == 0, done.stdout + done.stderr
    install(site, "docstring-parser", "0.18.0")
    done = hpcenv(*words, "--name", "two", cwd=project, environ=environ)
    assert done.status == 7
    assert "packages.docstring-parser absent -> 0.18.0" in done.stderr
    assert not (project / "runs" / "two").exists()
