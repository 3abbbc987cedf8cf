"""`hpcenv image rebuild`: what a lockfile can give back, what it cannot, and the comparison afterwards."""

from __future__ import annotations

import copy
import sys

import image_fakes
import pytest

from hpcenv.errors import FileUnusable, SpecError, ToolFailed, ToolMissing, WouldOverwrite
from hpcenv.node.check import sif
from hpcenv.project import lockfile as lock_model
from hpcenv.project import toml_files
from hpcenv.project.document import parse
from hpcenv.project.lockfile import Lockfile
from hpcenv.recipes import dockerfile, rebuild_comparison
from hpcenv.recipes.combination import DISTRIBUTIONS
from hpcenv.recipes.rebuild import RebuildResult, build_sif, rebuild

A, B, C = "a" * 64, "b" * 64, "c" * 64
BASE = f"registry.example:5000/base@sha256:{A}"


def dist(name, version="1.0", sha256=A, **more):
    wheel = {"proof": "record", "sha256": sha256} if sha256 else {"proof": "none"}
    return {"name": name, "version": version, "source": "wheel", "record-sha256": "01", "wheel": wheel} | more


DATA = {
    "schema": 1,
    "generated-by": "t",
    "fingerprint": "",
    "kind": "sif",
    "asked": {"image": "docker://registry.example:5000/torch:1", "platform": "linux/amd64"},
    "container": {
        "reference": "docker://registry.example:5000/torch:1",
        "manifest-digest": f"sha256:{B}",
        "config-digest": f"sha256:{C}",
        "rootfs-chain-id": f"sha256:{A}",
        "platform": "linux/amd64",
        "env-digest": f"sha256:{C}",
        "nvidia": {"CUDA_VERSION": "12.6.3", "NVIDIA_REQUIRE_CUDA": "cuda>=12.6 brand=tesla", "NVIDIA_BAD": "a\nRUN b"},
        "sif": {
            "sha256": C, "size": 1, "partition-sha256": A, "partition-size": 1, "compression": "zstd", "arch": "amd64",
            "built-with": "x", "builder": "b", "source-date-epoch": 0,
        },
    },
    "python": {"version": "3.11.2", "implementation": "cpython"},
    "torch": {"version": "2.13.0+cu126", "cuda": "12.6"},
    "system": {"machine": "x86_64", "os-release": "debian 12", "glibc": "2.36", "packages-count": 127},
    "packages": {
        "count": 5, "env-digest": "sha256:aa", "unlisted-count": 2, "unlisted-digest": "sha256:cc",
        "dist": [
            dist("torch", "2.13.0+cu126", B),
            dist("numpy"),
            dist("odd", sha256=None),
            dist("mine", source="editable", wheel={"proof": "none"}),
            dist("x\nRUN evil", sha256=None),
        ],
    },
}  # fmt: skip


def write(folder, **changes):
    data = copy.deepcopy(DATA)
    for path, value in changes.items():
        table = data
        *parents, key = path.split("__")
        for name in parents:
            table = table[name]
        table[key.replace("_", "-")] = value
    found, problems = parse(Lockfile, lock_model.from_data(data))
    assert problems == ()
    path = folder / "x.lock.toml"
    toml_files.write(toml_files.dumps(lock_model.to_data(found), header="t"), path)
    return path


def locked(folder, **changes):
    from hpcenv.project.workspace import read_lockfile

    return read_lockfile(write(folder, **changes))


def make(tmp_path, path=None, **words):
    return rebuild(
        tmp_path, tmp_path / "out", lock=str(path or write(tmp_path)), **{"environ": {}, "base": BASE} | words
    )


def test_a_recipe_from_a_lockfile(tmp_path):
    result = make(tmp_path)
    read = {path.name: path.read_text() for path in result.files}
    assert result.image == "rebuilt:v2.13.0-cuda12.6-bookworm"
    assert f"torch==2.13.0+cu126 \\\n    --hash=sha256:{B}" in read["requirements.lock"]
    assert "odd==1.0" in read["requirements.unproved.txt"]
    assert "mine" not in read["requirements.unproved.txt"] + read["requirements.lock"]
    assert 'ENV CUDA_VERSION="12.6.3"' in read["Dockerfile"]
    dockerfile.parse(read["Dockerfile"])
    assert "evil" not in read["Dockerfile"] + read["image.def"] + read["requirements.unproved.txt"]
    assert result.notes == (
        f"if the original still exists: hpcenv image pull docker://registry.example:5000/torch:1@sha256:{B}",
    )
    assert result.problem is None


def test_it_says_what_cannot_be_known(tmp_path):
    parts = {part.what: part for part in make(tmp_path).parts}
    assert parts["2 of 5 packages"].prospect == "same"
    assert parts["1 packages: odd"].prospect == "likely"
    assert parts["mine 1.0"].prospect == "lost"
    assert "editable" in parts["mine 1.0"].why
    assert parts["127 system packages"].prospect == "other"
    assert parts["2 files of no package"].prospect == "lost"
    assert parts["digests of image, layers and SIF"].prospect == "other"
    text = (tmp_path / "out/REBUILD.md").read_text()
    assert "127 system packages" in text
    assert "\nRUN evil" not in text


def test_only_what_is_proved(tmp_path):
    result = make(tmp_path, proved_only=True)
    assert "requirements.unproved.txt" not in {path.name for path in result.files}
    assert {part.what: part.prospect for part in result.parts}["odd 1.0"] == "lost"


def test_the_base_comes_from_the_locked_system(tmp_path):
    assert rebuild_comparison.distribution_of(locked(tmp_path)) == "bookworm"
    unknown = write(tmp_path, system__os_release="rocky 9.5")
    with pytest.raises(SpecError, match="rocky 9.5") as caught:
        make(tmp_path, unknown)
    assert "--os takes one of" in (caught.value.hint or "")
    assert make(tmp_path, unknown, distribution="trixie").image.endswith("-trixie")
    three = locked(tmp_path, python__version="3.12.4")
    combination = rebuild_comparison.combination_of(three, DISTRIBUTIONS["bookworm"])
    assert combination.default_base == "python:3.12-slim-bookworm"


def test_a_torch_that_no_table_knows_is_made_again_too(tmp_path):
    path = write(tmp_path, torch={"version": "9.9.0", "cuda": "19.1"})
    assert make(tmp_path, path).image == "rebuilt:v9.9.0-cuda19.1-bookworm"


def test_a_hostile_torch_version_is_not_written(tmp_path):
    path = write(tmp_path, torch={"version": "1\nRUN evil", "cuda": "x; y"})
    result = make(tmp_path, path)
    assert "evil" not in "".join(path.read_text() for path in result.files if path.name != "REBUILD.md")
    assert "\nRUN" not in (tmp_path / "out/REBUILD.md").read_text()


# -- afterwards ----------------------------------------------------------------------------


def values(**changes):
    found = {
        "python.version": "3.11.2",
        "python.implementation": "cpython",
        "torch.version": "2.13.0+cu126",
        "torch.cuda": "12.6",
        "system.machine": "x86_64",
        "system.os-release": "debian 12",
        "system.glibc": "2.36",
        "packages.count": 5,
        "packages.env-digest": "sha256:aa",
        "packages.unlisted-count": 2,
        "packages.unlisted-digest": "sha256:cc",
    }
    return found | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}


def compare(tmp_path, found, unknown=None, differences=()):
    lock = locked(tmp_path)
    plan = rebuild_comparison.plan(lock, DISTRIBUTIONS["bookworm"])
    rows = rebuild_comparison.compare(lock, plan, found, unknown or {}, differences)
    return {row.field: (row.outcome, row.severity) for row in rows if row.outcome != "same"}, rows


def test_what_is_as_locked_is_the_same(tmp_path):
    bad, rows = compare(tmp_path, values())
    assert bad == {}
    assert len(rows) >= 8


def test_what_differs_comes_first_by_severity(tmp_path):
    bad, rows = compare(tmp_path, values(torch__version="2.13.0+cpu", system__glibc="2.41", python__version="3.11.9"))
    assert set(bad) == {"torch.version", "system.glibc", "python.version"}
    assert rows[0].severity == "must"
    assert {row.outcome for row in rows[: len(bad)]} == {"differs"}


def test_single_packages_stand_for_their_digests(tmp_path):
    found = values(packages__env_digest="sha256:bb", packages__count=4)
    bad, _ = compare(tmp_path, found, differences=[("packages.odd", "1.0", "absent")])
    assert bad == {"packages.odd": ("differs", "must")}
    bad, _ = compare(tmp_path, found)
    assert "packages.env-digest" in bad


def test_what_was_said_before_is_no_surprise(tmp_path):
    found = values(packages__unlisted_digest="sha256:dd", torch__cuda="none")
    _, rows = compare(tmp_path, found, differences=[("packages.mine", "1.0", "absent"), ("packages.odd", "1.0", "2.0")])
    rows_announced = {row.field: row.announced for row in rows if row.outcome != "same"}
    assert rows_announced == {
        "packages.mine": True,
        "packages.unlisted-digest": True,
        "packages.odd": False,
        "torch.cuda": False,
    }
    base = {"folder": tmp_path, "image": "x", "base": "x", "files": (), "parts": ()}
    problem = RebuildResult(**base, rows=rows).problem
    assert problem is not None
    assert problem.exit_status == 28
    assert "packages.odd: locked 1.0, found 2.0" in (problem.why or "")
    assert "packages.mine" not in (problem.why or "")
    assert RebuildResult(**base, rows=tuple(row for row in rows if row.announced)).problem is None


def test_what_could_not_be_read_is_unknown_not_the_same(tmp_path):
    found = values()
    del found["torch.version"]
    bad, rows = compare(tmp_path, found, {"torch.version": "no torch"})
    assert bad == {"torch.version": ("unknown", "must")}
    assert next(row for row in rows if row.field == "torch.version").found == "no torch"


@pytest.mark.parametrize(("old", "new"), [("--name", "--tag"), ("--out", "--output"), ("--site", "--pip-config")])
def test_an_old_option_is_refused_with_the_new_name(old, new, hpcenv, tmp_path):
    done = hpcenv("image", "rebuild", "--lock", "x.lock.toml", old, "y", cwd=tmp_path)
    assert done.status == 2
    assert f"`{old}`" in done.stderr
    assert f"{new} y" in done.stderr


# -- building ------------------------------------------------------------------------------


FAKE = """#!{python} -IS
import os, sys
{build}
words = sys.argv[1:]
if words == ["--version"]:
    print("apptainer version {version}")
else:
    print(*words)
    print(*(f"{{name}}={{value}}" for name, value in os.environ.items()), sep="\\n")
    if not os.path.exists({folder!r} + "/salt"):
        open(words[-2], "w").write("half")
        sys.exit("FATAL: no")
    build(words, {folder!r} + "/salt", {folder!r} + "/builds")
"""


def fake_apptainer(folder, version="1.4.5"):
    image_fakes.require_mksquashfs()
    folder.mkdir(exist_ok=True)
    program = folder / "apptainer"
    words = {"python": sys.executable, "folder": str(folder), "version": version, "build": image_fakes.BUILD}
    program.write_text(FAKE.format(**words))
    program.chmod(0o755)
    (folder / "salt").write_bytes(b"files")
    return {"PATH": f"{folder}:/usr/bin:/bin", "HOME": "/nowhere", "APPTAINER_BIND": "/etc:/mnt", "SECRET": "x"}


def write_recipe(folder):
    folder.mkdir()
    (folder / "image.def").write_text(f"Bootstrap: docker\nFrom: h.example.org/a@sha256:{'1' * 64}\n%post\n    true\n")
    return folder


def test_the_sif_is_made_aside_with_the_sites_files_mounted(tmp_path):
    out = write_recipe(tmp_path / "out")
    (out / "site").mkdir()
    environ = fake_apptainer(tmp_path / "bin")
    lines: list[str] = []
    image = out / "x.sif"
    build_sif(image, out, pip_config=out / "site", environ=environ, plain_http=("r",), on_line=lines.append, need=1)
    assert sif.labels(image)["hpcenv.definition.digest"].startswith("sha256:")
    assert lines[0].startswith("hpcenv: temporary files are in /")
    argv = lines[1]
    assert argv.startswith("build --force --disable-cache --arch ")
    assert f'--no-https --mount type=bind,"source={out}/site","destination=/mnt",ro --mksquashfs-args' in argv
    assert f" {out}/.x.sif.part " in argv
    assert not any(line.startswith(("APPTAINER_BIND", "SECRET")) for line in lines)
    assert sorted(path.name for path in out.iterdir()) == ["image.def", "site", "x.sif"]
    with pytest.raises(WouldOverwrite):
        build_sif(image, out, pip_config=tmp_path, environ=environ)


def test_a_build_that_fails_leaves_nothing(tmp_path):
    out = write_recipe(tmp_path / "out")
    environ = fake_apptainer(tmp_path / "bin")
    (tmp_path / "bin" / "salt").unlink()
    with pytest.raises(ToolFailed, match="1") as caught:
        build_sif(out / "x.sif", out, pip_config=tmp_path / "none", environ=environ, need=1)
    assert "site" in (caught.value.hint or "")
    assert [path.name for path in out.iterdir()] == ["image.def"]


def test_an_apptainer_that_is_too_old_is_refused(tmp_path):
    out = write_recipe(tmp_path / "out")
    with pytest.raises(ToolMissing, match="too old"):
        build_sif(out / "x.sif", out, pip_config=out, environ=fake_apptainer(tmp_path / "bin", version="1.3.6"), need=1)


def test_no_folder_with_room_is_said_before_the_build(tmp_path):
    out = write_recipe(tmp_path / "out")
    with pytest.raises(FileUnusable, match="no temporary folder has the"):
        build_sif(out / "x.sif", out, pip_config=out, environ=fake_apptainer(tmp_path / "bin"), need=1 << 60)
