"""Locking: the same environment gives the same bytes, and nothing is overwritten unseen."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from lock_world import check_project, lock_project

from hpcenv.errors import EnvironmentUnreadable, FileUnusable, LockfileNewer, PinsDiffer, SpecError
from hpcenv.locking.lock import LockResult
from hpcenv.project import lockfile as lock_model
from hpcenv.submission.locked import gpu_needs

from ...conftest import TORCH, make_python  # noqa: TID252


def lock_here(folder: Path, **words: Any) -> LockResult:
    return lock_project(folder, {"PATH": os.environ["PATH"]}, **words)


def lockfile(project: Path) -> Path:
    return project / "lockfiles" / "default.lock.toml"


def test_locking_again_gives_the_same_bytes(project: Path) -> None:
    before = lockfile(project).read_bytes()
    result = lock_here(project)
    assert (result.changed, result.changes) == (False, ())
    assert lockfile(project).read_bytes() == before


def test_the_name_of_the_lockfile_is_no_part_of_what_is_locked(project: Path) -> None:
    first, second = lock_here(project), lock_here(project, name="paper")
    assert second.path.name == "paper.lock.toml"
    assert first.lockfile.fingerprint == second.lockfile.fingerprint


def test_no_path_of_this_machine_stands_in_it(project: Path, python_with_torch: Path) -> None:
    text = lockfile(project).read_text().replace(f'python = "{python_with_torch}"', "")
    assert str(python_with_torch.parents[2]) not in text
    assert os.uname().nodename not in text


@pytest.mark.parametrize("content", [b"schema = 1\n[", b"\xff", b"schema = 'x'\n"])
def test_an_unreadable_lockfile_is_kept_aside(project: Path, content: bytes) -> None:
    lockfile(project).write_bytes(content)
    result = lock_here(project)
    assert result.changed
    assert any("is kept as lockfiles/default.lock.toml.unreadable" in note for note in result.notes)
    assert (project / "lockfiles" / "default.lock.toml.unreadable").read_bytes() == content

    lockfile(project).write_bytes(content)
    lock_here(project)
    kept = sorted(path.name for path in (project / "lockfiles").iterdir())
    assert kept == [f"default.lock.toml{suffix}" for suffix in ("", ".unreadable", ".unreadable.2")]


def test_a_lockfile_stays_where_it_is_when_locking_fails(project: Path, python_without_torch: Path) -> None:
    lockfile(project).write_text("not toml [")
    (project / "hpcenv.toml").write_text(f'image = "host"\npython = "{python_without_torch}"\n')
    with pytest.raises(EnvironmentUnreadable):
        lock_here(project)
    assert [path.name for path in (project / "lockfiles").iterdir()] == ["default.lock.toml"]
    assert lockfile(project).read_text() == "not toml ["


def test_a_newer_lockfile_is_never_overwritten(project: Path) -> None:
    lockfile(project).write_text("schema = 2\nprecious = true\n")
    with pytest.raises(LockfileNewer):
        lock_here(project)
    assert lockfile(project).read_text() == "schema = 2\nprecious = true\n"


def test_an_environment_without_torch_is_refused(project: Path, python_without_torch: Path) -> None:
    (project / "hpcenv.toml").write_text(f'image = "host"\npython = "{python_without_torch}"\n')
    with pytest.raises(EnvironmentUnreadable, match="this environment has no torch") as caught:
        lock_here(project)
    assert str(python_without_torch) in str(caught.value.why)
    assert '"torch.version" = "info" under [policy]' in str(caught.value.hint)


def test_without_torch_no_index_is_asked(project: Path, python_without_torch: Path, tmp_path: Path) -> None:
    (project / "hpcenv.toml").write_text('image = "host"\n')
    said: list[str] = []
    environ = {"PATH": os.environ["PATH"], "VIRTUAL_ENV": str(python_without_torch.parents[1])}
    with pytest.raises(EnvironmentUnreadable, match="this environment has no torch") as caught:
        lock_project(project, environ, said=said, cache=tmp_path)
    assert said == [f"reading {python_without_torch}"]
    assert "activate another environment" in str(caught.value.hint)


@pytest.mark.parametrize("folder", ["/proc/nosuch", "train.py/locks"])
def test_a_lockfile_that_cannot_be_written_is_refused_before_the_work(folder: str, project: Path) -> None:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write(f'[paths]\nlockfiles = "{folder}"\n')
    said: list[str] = []
    with pytest.raises(FileUnusable, match="default.lock.toml. cannot be written"):
        lock_project(project, {"PATH": os.environ["PATH"]}, said=said)
    assert said == []


def test_unless_the_policy_says_so(project: Path, python_without_torch: Path) -> None:
    spec = f'image = "host"\npython = "{python_without_torch}"\n[policy]\n"torch.version" = "info"\n'
    (project / "hpcenv.toml").write_text(spec)
    locked = lock_here(project).lockfile
    assert locked.facts["torch.version"] == "absent"
    assert locked.policy == {"torch.version": "info"}


def test_a_misspelled_policy_is_refused(project: Path) -> None:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write('[policy]\n"system.glib" = "must"\n')
    before = lockfile(project).read_bytes()
    with pytest.raises(SpecError) as caught:
        lock_here(project)
    assert 'unknown field `policy."system.glib"`, perhaps you meant `system.glibc`' in str(caught.value.why)
    assert lockfile(project).read_bytes() == before


@pytest.mark.parametrize("words", [("lock",), ("lock", "--check"), ("verify",)])
def test_a_misspelled_policy_is_told_before_anything_is_read(
    words: tuple[str, ...], project: Path, hpcenv: Any
) -> None:
    (project / "hpcenv.toml").write_text('image = "host"\npython = "/bin/false"\n[policy]\n"torch.vresion" = "info"\n')
    done = hpcenv(*words, cwd=project)
    assert (done.status, done.stdout) == (3, "")
    assert f"error[spec-invalid]: `{project}/hpcenv.toml` is not valid" in done.stderr
    assert 'unknown field `policy."torch.vresion"`, perhaps you meant `torch.version`' in done.stderr


def test_a_library_that_the_environment_has_not_is_told_when_that_is_known(project: Path) -> None:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write('[policy]\n"libs.nosuch.version" = "must"\n')
    with pytest.raises(SpecError, match="is not valid") as caught:
        lock_here(project)
    assert 'unknown field `policy."libs.nosuch.version"`' in str(caught.value.why)


def test_a_python_that_does_not_answer(project: Path) -> None:
    (project / "hpcenv.toml").write_text('image = "host"\npython = "/bin/false"\n')
    with pytest.raises(EnvironmentUnreadable, match="cannot look inside /bin/false"):
        lock_here(project)


def test_a_python_that_answers_with_a_value_of_the_wrong_type(project: Path, python_with_torch: Path) -> None:
    python = project / "python"
    python.write_text(
        f"""#!/bin/sh\n{python_with_torch} "$@" | sed -E 's/("packages.unlisted-count": *)[0-9]+/\\1"many"/'\n"""
    )
    python.chmod(0o755)
    (project / "hpcenv.toml").write_text('image = "host"\npython = "./python"\n')
    before = lockfile(project).read_bytes()
    with pytest.raises(EnvironmentUnreadable, match="gives no valid lockfile") as caught:
        lock_here(project)
    assert "`unlisted_count` = 'many': must be a whole number" in str(caught.value.why)
    assert lockfile(project).read_bytes() == before


# -- the same bytes for each user, at each time -------------------------------------------


def body(path: Path) -> str:
    """A lockfile without its comments."""
    return "".join(line for line in path.read_text().splitlines(keepends=True) if not line.startswith("#"))


def test_two_users_in_two_folders_lock_the_same_bytes(hpcenv: Any, tmp_path: Path) -> None:
    places = [tmp_path / "alice" / "project", tmp_path / "home of bob" / "deep" / "er" / "größe"]
    for number, place in enumerate(places):
        make_python(place / "env", TORCH)
        (place / "hpcenv.toml").write_text('image = "host"\npython = "env/bin/python"\n')
        environ = {
            "PATH": "/usr/bin:/bin", "HOME": str(place.parent), "USER": f"user{number}", "TZ": ("UTC", "Asia/Tokyo")[number],
            "LC_ALL": ("C", "C.UTF-8")[number], "PYTHONPATH": ("", "/elsewhere")[number], "TMPDIR": "/tmp",
        }  # fmt: skip
        done = hpcenv("lock", "--no-wheels", cwd=place, environ=environ)
        assert done.status == 0, done.stderr
    one, other = (body(place / "lockfiles" / "default.lock.toml") for place in places)
    assert one == other


def test_what_installed_it_does_not_show(tmp_path: Path) -> None:
    """pip and uv leave other files behind: INSTALLER, REQUESTED, uv_cache.json and compiled files."""
    info = "torch-2.13.0+cpu.dist-info"
    installers = [
        {f"{info}/INSTALLER": "pip\n", f"{info}/REQUESTED": ""},
        {f"{info}/INSTALLER": "uv", f"{info}/uv_cache.json": "{}\n", f"{info}/uv_build.json": "{}\n"},
    ]
    places = [tmp_path / name for name in ("pip", "uv")]
    for place, files in zip(places, installers, strict=True):
        python = make_python(place / "env", {**TORCH, **files})
        if place.name == "pip":
            subprocess.run([python, "-m", "compileall", "-q", place / "env" / "lib"], check=True)
        (place / "hpcenv.toml").write_text('image = "host"\npython = "env/bin/python"\n')
        lock_here(place)
    one, other = (body(lockfile(place)) for place in places)
    assert one == other


# -- wheels that were proved --------------------------------------------------------------


def with_wheel(project: Path, *, proof: str, seal: bool = True, revision: int = lock_model.REVISION) -> None:
    """Write into the lockfile what a lock with an index would have found."""
    data = tomlkit.parse(lockfile(project).read_text()).unwrap()
    data["revision"] = revision
    (torch,) = (dist for dist in data["packages"]["dist"] if dist["name"] == "torch")
    torch["wheel"] = {"filename": "torch.whl", "sha256": "0" * 64, "index": "pypi", "proof": proof}
    if seal:
        data["fingerprint"] = lock_model.fingerprint(data)
    else:
        data["system"]["glibc"] = "2.99"
    lockfile(project).write_text(tomlkit.dumps(data))


def wheel_of_torch(result: LockResult) -> Any:
    (torch,) = (dist for dist in result.lockfile.packages.dist if dist.name == "torch")
    return torch.wheel


def test_a_proof_stays_while_the_record_stays(project: Path) -> None:
    with_wheel(project, proof="record")
    result = lock_here(project)
    assert (wheel_of_torch(result).proof, result.changes) == ("record", ())


def test_a_direct_url_that_an_old_lockfile_believed_goes(project: Path) -> None:
    with_wheel(project, proof="direct-url", revision=1)
    assert wheel_of_torch(lock_here(project)) is None
    with_wheel(project, proof="direct-url")
    assert wheel_of_torch(lock_here(project)).proof == "direct-url"


def test_a_proof_of_another_record_goes(project: Path, tmp_path: Path) -> None:
    with_wheel(project, proof="record")
    python = make_python(tmp_path / "other", {**TORCH, "torch/more.py": ""})
    (project / "hpcenv.toml").write_text(f'image = "host"\npython = "{python}"\n')
    assert wheel_of_torch(lock_here(project)) is None


def test_a_proof_in_an_edited_lockfile_is_not_believed(project: Path) -> None:
    with_wheel(project, proof="record", seal=False)
    assert wheel_of_torch(lock_here(project)) is None


# -- what another tool pinned -------------------------------------------------------------


@pytest.fixture
def pinned(project: Path) -> Path:
    return project / "requirements.txt"


def from_pins(project: Path, pins: Path) -> LockResult:
    return lock_here(project, pins=pins)


def test_pins_that_agree_are_locked(project: Path, pinned: Path, hpcenv: Any) -> None:
    pinned.write_text("torch==2.13.0+cpu\n")
    assert from_pins(project, pinned).lockfile.facts["torch.version"] == "2.13.0+cpu"
    done = hpcenv("lock", "--from", "requirements.txt", "--no-wheels", cwd=project)
    assert done.status == 0, done.stderr


def test_a_pin_without_a_local_label_accepts_any(project: Path, pinned: Path) -> None:
    pinned.write_text("torch==2.13.0\n")
    from_pins(project, pinned)


@pytest.mark.parametrize(
    ("pins", "why"),
    [
        ("torch==2.12.0\n", "torch: other-version, pinned 2.12.0, installed 2.13.0+cpu"),
        ("torch==2.13.0\nnumpy==2.3\n", "numpy: not-installed, pinned 2.3, installed nothing"),
        ("numpy==2.3\n", "torch: not-pinned, pinned nothing, installed 2.13.0+cpu"),
    ],
)
def test_pins_that_differ_are_refused_and_nothing_is_written(pins: str, why: str, project: Path, pinned: Path) -> None:
    pinned.write_text(pins)
    before = lockfile(project).read_bytes()
    with pytest.raises(PinsDiffer, match="what is installed is not what") as caught:
        from_pins(project, pinned)
    assert why in str(caught.value.why)
    assert f"pip install -r {pinned}" in str(caught.value.hint)
    assert lockfile(project).read_bytes() == before


def test_differing_pins_end_with_21(project: Path, pinned: Path, hpcenv: Any) -> None:
    pinned.write_text("torch==2.12.0\n")
    done = hpcenv("lock", "--from", "requirements.txt", "--no-wheels", "--json", cwd=project)
    assert (done.status, done.envelope["error"]["code"]) == (21, "pins-differ")


def test_a_file_that_pins_nothing_agrees_with_nothing(project: Path, pinned: Path) -> None:
    pinned.write_text("# to be filled\n")
    with pytest.raises(PinsDiffer):
        from_pins(project, pinned)


@pytest.mark.parametrize("more", [(), ("--check",)])
def test_a_pins_file_that_is_not_there_is_refused_before_anything_is_read(
    more: tuple[str, ...], project: Path, hpcenv: Any
) -> None:
    (project / "hpcenv.toml").write_text('image = "host"\npython = "/bin/false"\n')  # would be environment-unreadable
    done = hpcenv("lock", *more, "--from", "requirements.txt", cwd=project)
    assert (done.status, done.stdout) == (19, "")
    assert f"error[file-unusable]: cannot read `{project}/requirements.txt`" in done.stderr


# -- what is no file ----------------------------------------------------------------------


def replace(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(
    "words", [("verify",), ("lock", "--check"), ("submit", "train.py", "--nproc", "1", "--dry-run")]
)
def test_a_lockfile_that_is_no_file_is_refused_at_once(
    kind: str, words: tuple[str, ...], project: Path, hpcenv: Any
) -> None:
    replace(lockfile(project), kind)
    done = hpcenv(*words, cwd=project, timeout=20)
    assert done.status == 5
    assert "why: it is not a regular file, but a pipe or a device" in done.stderr
    assert "hint: bring it from where it was made; it is not under git here. To lock anew: `hpcenv lock`" in done.stderr


def test_locking_again_puts_it_aside(project: Path) -> None:
    replace(lockfile(project), "device")
    assert any("could not be read and is kept as" in note for note in lock_here(project).notes)
    assert lockfile(project).is_file()


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pins_that_are_no_file_are_refused(kind: str, project: Path, pinned: Path) -> None:
    replace(pinned, kind)
    with pytest.raises(FileUnusable, match="cannot read"):
        from_pins(project, pinned)


# -- checking -----------------------------------------------------------------------------


def test_a_fresh_lock_is_fresh(project: Path) -> None:
    assert check_project(project, {"PATH": os.environ["PATH"]}).fresh


CHECK = ("lock", "--check", "--from", "requirements.txt")


def test_the_check_holds_the_pins_against_it_too(project: Path, pinned: Path, hpcenv: Any) -> None:
    pinned.write_text("torch==2.12.0\n")
    done = hpcenv(*CHECK, "--json", cwd=project)
    assert (done.status, done.envelope["error"]["code"]) == (21, "pins-differ")
    assert "torch: other-version, pinned 2.12.0, installed 2.13.0+cpu" in done.envelope["error"]["why"]
    pinned.write_text("torch==2.13.0\n")
    done = hpcenv(*CHECK, cwd=project)
    assert (done.status, done.stdout) == (0, "lockfiles/default.lock.toml is fresh\n")
    assert (
        "note: torch: could not tell whether it is as pinned (requirements.txt line 1 states no sha256)" in done.stderr
    )


@pytest.mark.parametrize(("sha256", "status"), [("0" * 64, 0), ("1" * 64, 21)])
def test_the_check_knows_the_locked_wheels(sha256: str, status: int, project: Path, pinned: Path, hpcenv: Any) -> None:
    with_wheel(project, proof="record")
    pinned.write_text(f"torch==2.13.0 --hash=sha256:{sha256}\n")
    done = hpcenv(*CHECK, cwd=project)
    assert done.status == status
    assert ("other-file" in done.stderr, "could not tell" in done.stderr) == (status != 0, False)


def test_of_a_stale_lockfile_the_pins_are_not_what_counts(project: Path, pinned: Path, hpcenv: Any) -> None:
    pinned.write_text("torch==2.12.0\n")
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write('[policy]\n"system.glibc" = "info"\n')
    assert hpcenv(*CHECK, cwd=project).status == 7


@pytest.mark.parametrize("flag", ["--upgrade", "--deep", "--no-wheels", "--allow-floating"])
def test_what_means_nothing_to_a_check_is_refused(flag: str, project: Path, hpcenv: Any) -> None:
    done = hpcenv("lock", "--check", flag, cwd=project)
    assert (done.status, done.stdout) == (2, "")
    assert f"error[usage]: `--check` does not go with `{flag}`" in done.stderr


def test_a_moved_environment_is_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    make_python(folder / "env", TORCH)
    (folder / "hpcenv.toml").write_text('image = "host"\npython = "env/bin/python"\n')
    lock_here(folder)
    moved = tmp_path / "there"
    shutil.move(folder, moved)
    assert check_project(moved, {"PATH": os.environ["PATH"]}).reasons == ()


def test_jax_and_its_plugin_are_locked_and_say_which_driver_runs_them(tmp_path: Path) -> None:
    packages = {name: f"{name}-0.10.2.dist-info" for name in ("jax", "jaxlib", "jax_cuda13_plugin")}
    files = {
        f"{info}/{file}": text
        for name, info in packages.items()
        for file, text in (("METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.10.2\n"), ("RECORD", ""))
    }
    make_python(tmp_path / "env", {**TORCH, **files})
    (tmp_path / "hpcenv.toml").write_text('image = "host"\npython = "env/bin/python"\n')
    locked = lock_here(tmp_path).lockfile
    assert {field: value for field, value in locked.facts.items() if field.startswith("jax")} == {
        "jax.version": "0.10.2", "jax.jaxlib": "0.10.2", "jax.cuda": "13", "jax.cuda-plugin": "0.10.2"
    }  # fmt: skip
    assert (locked.facts["torch.cuda"], locked.host.driver_min) == ("none", "580.65.06")
    # torch is built for CPUs, and the job may use GPUs all the same.
    assert (lock_model.gpu_support(locked), lock_model.compares_gpus(locked, 1)) == ("unknown", True)
    needs = gpu_needs(locked, gpus=1, table={})
    assert needs is not None
    assert (needs.cuda, needs.jax_cuda) == ("", "13")


def test_without_jax_nothing_of_it_is_locked(project: Path) -> None:
    assert "jax" not in lockfile(project).read_text()
    locked = lock_here(project).lockfile
    assert (lock_model.jax_cuda_of(locked), gpu_needs(locked, gpus=1, table={})) == (None, None)
