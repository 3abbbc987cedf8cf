"""An environment that rattler installed from real archives, held against the lockfile that rattler wrote."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rattler", reason="NOT RUN: py-rattler is not installed (pip install -e '.[dev]')")

import conda_world
import image_fakes
import yaml
from conda_world import PLACEHOLDER, SUBDIR, CondaEnvironment, Package, dist_package
from lock_world import check_project, lock_project
from probe_world import SITE

from hpcenv.errors import EnvironmentUnreadable, HashesUnproved, LockfileInvalid, PinsDiffer
from hpcenv.locking.conda_packages import installed_conda
from hpcenv.locking.lock import LockResult

from ...conftest import TORCH  # noqa: TID252
from .test_lock_kinds import APPTAINER, spec, write_layout  # noqa: TID252

TORCH_FILES = {path: text.encode() for path, text in TORCH.items() if path != "torch/__init__.py"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CondaEnvironment:
    cudnn = Package(
        name="cudnn",
        version="9.10.2",
        files={"lib/libcudnn.so.9": b"cudnn", "etc/cudnn.conf": f"path={PLACEHOLDER}/etc\n".encode()},
        links={"lib/libcudnn.so": "libcudnn.so.9"},
    )
    packages = [dist_package("pytorch", "torch", "2.13.0", "cuda129_0", TORCH_FILES), cudnn]
    return conda_world.install(tmp_path_factory.mktemp("conda"), packages)


@pytest.fixture
def project(made: CondaEnvironment, tmp_path: Path) -> Path:
    """A project with a copy of the environment and of its pixi.lock."""
    folder = tmp_path / "project"
    shutil.copytree(made.prefix, folder / "env", symlinks=True)
    shutil.copy(made.lock, folder / "pixi.lock")
    (folder / "hpcenv.toml").write_text(f'image = "host"\npython = "{folder}/env/bin/python"\n')
    return folder


def lock_here(folder: Path, pins: str | None = "pixi.lock", **words: Any) -> LockResult:
    path = folder / pins if pins else None
    environ = {"PATH": os.environ["PATH"]}
    return lock_project(folder, environ, pins=path, **words)


def check_here(folder: Path, pins: str) -> Any:
    return check_project(folder, {"PATH": os.environ["PATH"]}, pins=folder / pins)


def proofs(result: LockResult) -> dict[str, str]:
    return {table.name: table.proof for table in result.lockfile.packages.conda_package}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def record(folder: Path, name: str) -> Path:
    [path] = (folder / "env/conda-meta").glob(f"{name}-*.json")
    return path


def change_record(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    path = record(folder, name)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_what_is_installed_from_the_file_is_locked_as_pinned(project: Path, made: CondaEnvironment) -> None:
    plain = lock_here(project, pins=None)
    assert proofs(plain) == dict.fromkeys(("cudnn", "python", "pytorch"), "conda-meta")
    result = lock_here(project)
    assert proofs(result) == dict.fromkeys(("cudnn", "python", "pytorch"), "pinned")
    assert result.lockfile.fingerprint == plain.lockfile.fingerprint
    tables = {table.name: table for table in result.lockfile.packages.conda_package}
    assert tables["pytorch"].dists == ("torch",) and tables["cudnn"].dists == ()
    expected = {r.name.normalized: (str(r.version), str(r.build), r.sha256.hex()) for r in made.records}
    assert {name: (t.version, t.build, t.sha256) for name, t in tables.items()} == expected
    assert check_here(project, "pixi.lock").fresh
    assert proofs(lock_here(project, pins=None, require_hashes=True))["cudnn"] == "pinned", "it stays proved"


def conda_lock(made: CondaEnvironment, path: Path, *, hashes: tuple[str, ...] = ("md5", "sha256")) -> None:
    """The same packages as conda-lock writes them."""
    packages = [
        {
            "name": r.name.normalized,
            "version": str(r.version),
            "manager": "conda",
            "platform": SUBDIR,
            "dependencies": {},
            "url": f"https://mirror.invalid/channel/{SUBDIR}/{r.file_name}",
            "hash": {name: getattr(r, name).hex() for name in hashes},
            "category": "main",
            "optional": False,
        }
        for r in made.records
    ]
    path.write_text(yaml.dump({"version": 1, "metadata": {"platforms": [SUBDIR]}, "package": packages}))


def test_conda_lock_names_the_same_archives_on_another_mirror(project: Path, made: CondaEnvironment) -> None:
    conda_lock(made, project / "conda-lock.yml")
    assert set(proofs(lock_here(project, "conda-lock.yml")).values()) == {"pinned"}
    assert check_here(project, "conda-lock.yml").fresh


def test_an_md5_agrees_and_proves_nothing_more(project: Path, made: CondaEnvironment) -> None:
    conda_lock(made, project / "conda-lock.yml", hashes=("md5",))
    said: list[str] = []
    result = lock_here(project, "conda-lock.yml", said=said)
    assert set(proofs(result).values()) == {"conda-meta"}
    assert any("only the md5 can be compared" in line for line in said)
    edit(project / "conda-lock.yml", made.records[0].md5.hex(), "0" * 32)
    with pytest.raises(PinsDiffer) as caught:
        lock_here(project, "conda-lock.yml")
    assert "other-file" in str(caught.value.why) and "md5" in str(caught.value.why)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("-cuda129_0.", "-cpu_0.", "pytorch: other-build, pinned 2.13.0 cpu_0, installed 2.13.0 cuda129_0"),
        ("cudnn-9.10.2-", "cudnn-9.10.3-", "cudnn: other-version, pinned 9.10.3 h0_0, installed 9.10.2 h0_0"),
        ("/cudnn-9.10.2-", "/nccl-9.10.2-", "cudnn: not-pinned, pinned nothing, installed 9.10.2 h0_0"),
        ("/cudnn-9.10.2-", "/nccl-9.10.2-", "nccl: not-installed, pinned 9.10.2 h0_0, installed nothing"),
        ("sha256: ", "sha256: 00", "pytorch: other-file, pinned 2.13.0 cuda129_0, installed 2.13.0 cuda129_0"),
    ],
)
def test_what_is_not_from_the_file_is_named(project: Path, old: str, new: str, why: str) -> None:
    path = project / "pixi.lock"
    edit(path, old, new)
    if "sha256: 00" in new:
        lines = [line[:-2] if line.startswith("  sha256: ") else line for line in path.read_text().splitlines()]
        path.write_text("\n".join(lines))
    with pytest.raises(PinsDiffer, match="what is installed is not what") as caught:
        lock_here(project)
    assert why in str(caught.value.why)
    assert "pixi reinstall --locked --environment default" in str(caught.value.hint)
    assert not (project / "lockfiles").exists()


def test_what_pip_added_is_named(project: Path) -> None:
    info = project / "env" / SITE / "tool-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").write_text("tool-1.0.dist-info/METADATA,,\n")
    with pytest.raises(PinsDiffer) as caught:
        lock_here(project)
    assert "tool: not-pinned, pinned nothing, installed 1.0" in str(caught.value.why)


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("lib/libcudnn.so.9", "cudnn"),
        (f"{SITE}/torch/version.py", "pytorch"),
        (f"{SITE}/torch-2.13.0.dist-info/INSTALLER", "pytorch"),
    ],
)
def test_a_file_that_was_changed_later_is_no_proof(project: Path, path: str, package: str) -> None:
    target = project / "env" / path
    data = target.read_bytes()
    target.unlink()  # it may be a hard link to the cache
    target.write_bytes(data + b"\n")
    said: list[str] = []
    result = lock_here(project, said=said)
    assert proofs(result)[package] == "none"
    assert [name for name, proof in proofs(result).items() if proof == "pinned"] == sorted(
        {"cudnn", "python", "pytorch"} - {package}
    )
    assert any(
        line.strip().startswith(f"{package}: could not tell") and os.path.basename(path) in line for line in said
    )
    assert any(f"without a proof: {package}" in note for note in result.notes)
    with pytest.raises(HashesUnproved, match="is not confirmed for 1 package") as caught:
        lock_here(project, require_hashes=True)
    named = "torch 2.13.0+cpu" if package == "pytorch" else "cudnn 9.10.2, from conda"
    assert str(caught.value.why) == f"{named}: not as conda installed it: {path}"


def test_a_record_without_hashes_is_unknown(project: Path) -> None:
    change_record(project, "cudnn", lambda data: [data.pop(name) for name in ("sha256", "md5")])
    said: list[str] = []
    result = lock_here(project, said=said)
    assert proofs(result)["cudnn"] == "none"
    assert any("cudnn: could not tell whether it is as pinned" in line for line in said)


def test_locking_again_says_what_conda_changed(project: Path) -> None:
    lock_here(project)
    change_record(project, "cudnn", lambda data: data.update(version="9.11.0", sha256="ab" * 32))
    [line] = [line for line in lock_here(project, pins=None).changes if "conda" in line]
    assert line.startswith("package of conda cudnn 9.10.2 h0_0 sha256 ") and line.endswith(
        "-> 9.11.0 h0_0 sha256 abababababab"
    )


def test_a_record_that_cannot_be_read_stops_it(project: Path) -> None:
    record(project, "cudnn").write_text("{")
    with pytest.raises(EnvironmentUnreadable, match="what must match on every node could not be read here") as caught:
        lock_here(project)
    assert "packages.conda-digest: ValueError: conda-meta/cudnn" in str(caught.value.why)


def test_an_environment_without_conda_is_another_one(project: Path) -> None:
    shutil.rmtree(project / "env/conda-meta")
    with pytest.raises(PinsDiffer, match="describes a conda environment") as caught:
        lock_here(project)
    assert str(project / "env") in str(caught.value.why)


def test_packages_below_a_venv_were_not_compared() -> None:
    entry = {
        "name": "cudnn",
        "version": "9",
        "build": "0",
        "hash": "sha256=" + "a" * 64,
        "channel": "c",
        "outside": True,
    }
    [package] = installed_conda({"packages": [], "unknown": {}, "conda-packages": [entry]})
    assert "files were not compared" in package.unproved


def test_the_check_of_an_older_lockfile_says_that_it_cannot_tell(project: Path) -> None:
    result = lock_here(project, pins=None)
    text = result.path.read_text()
    result.path.write_text(text.partition("[[packages.conda-package]]")[0])
    with pytest.raises(LockfileInvalid, match="cannot be compared") as caught:
        check_here(project, "pixi.lock#default")
    assert "older hpcenv" in str(caught.value.why)
    assert f"hpcenv lock --from '{project}/pixi.lock#default'" in str(caught.value.hint)
    lock_here(project, "pixi.lock#default")
    assert check_here(project, "pixi.lock#default").fresh


def test_a_noarch_package_and_one_with_an_egg_info(tmp_path: Path) -> None:
    old = Package(
        name="old",
        files={
            f"{SITE}/old-1.0.egg-info/PKG-INFO": b"Metadata-Version: 1.1\nName: old\nVersion: 1.0\n",
            f"{SITE}/old.py": b"x = 1\n",
        },
        depends=["python"],
    )
    torch = dist_package("pytorch", "torch", "2.13.0", "0", TORCH_FILES)
    made = conda_world.install(tmp_path / "world", [torch, old, dist_package("pure", "pure", noarch=True)])
    (tmp_path / "hpcenv.toml").write_text(f'image = "host"\npython = "{made.python}"\n')
    shutil.copy(made.lock, tmp_path / "pixi.lock")
    tables = {t.name: t for t in lock_here(tmp_path).lockfile.packages.conda_package}
    assert tables["old"].dists == ("old",) and tables["old"].proof == "pinned"
    assert tables["pure"].dists == ("pure",) and tables["pure"].proof == "pinned"
    (made.prefix / SITE / "old.py").unlink()
    (made.prefix / SITE / "old.py").write_bytes(b"x = 2\n")
    tables = {t.name: t for t in lock_here(tmp_path).lockfile.packages.conda_package}
    assert (tables["old"].proof, tables["old"].reason) == ("none", f"not as conda installed it: {SITE}/old.py")


def test_an_environment_in_an_image(made: CondaEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SIF is a real file; the program that plays Apptainer starts the Python of the environment."""
    image_fakes.require_mksquashfs()
    tools, folder = tmp_path / "tools", tmp_path / "project"
    tools.mkdir()
    folder.mkdir()
    words = {"python": sys.executable, "folder": str(tools), "inside": str(made.python)}
    (tools / "apptainer").write_text(APPTAINER.format(build=image_fakes.BUILD, **words))
    (tools / "apptainer").chmod(0o755)
    (tools / "salt").write_bytes(b"files")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    write_layout(folder / "lay")
    spec(folder, "oci:lay:1")
    shutil.copy(made.lock, folder / "pixi.lock")
    result = lock_project(folder, dict(os.environ), pins=folder / "pixi.lock")
    assert result.lockfile.kind == "sif" and set(proofs(result).values()) == {"pinned"}
    edit(folder / "pixi.lock", "-cuda129_0.", "-cpu_0.")
    with pytest.raises(PinsDiffer, match="what is installed is not what"):
        check_project(folder, dict(os.environ), pins=folder / "pixi.lock")


def test_the_hint_names_the_other_environments(project: Path) -> None:
    edit(
        project / "pixi.lock",
        "packages:\n- ",
        f"  gpu:\n    channels: []\n    packages:\n      {SUBDIR}: []\npackages:\n- ",
    )
    assert proofs(lock_here(project))["cudnn"] == "pinned"
    edit(project / "pixi.lock", "-cuda129_0.", "-cpu_0.")
    with pytest.raises(PinsDiffer) as caught:
        lock_here(project)
    assert "--from pixi.lock#NAME, of default, gpu" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "text"),
    [("pixi.lock#gpu", None), ("environment.yml", "dependencies: [python]\n"), ("pixi.lock", "version: 3\n")],
)
def test_a_file_that_is_no_use_is_refused_before_the_environment_is_read(
    project: Path, name: str, text: str | None
) -> None:
    (project / "env/bin/python").unlink()
    if text is not None:
        (project / name).write_text(text)
    with pytest.raises(LockfileInvalid):
        lock_here(project, name)


def test_the_command_says_what_is_pinned(project: Path, hpcenv: Any) -> None:
    done = hpcenv("lock", "--from", "pixi.lock#default", "--no-wheels", cwd=project)
    assert done.status == 0, done.stderr
    assert "packages of conda: 3, of which 3 are pinned by a file of --from" in done.stdout
    edit(project / "pixi.lock", "-cuda129_0.", "-cpu_0.")
    done = hpcenv("lock", "--check", "--from", "pixi.lock", "--json", cwd=project)
    assert (done.status, done.envelope["error"]["code"]) == (21, "pins-differ")
