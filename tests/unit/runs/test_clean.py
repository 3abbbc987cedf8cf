"""Old runs go, whole and only when they may; what is needed stays."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.errors import RunNotFound, UsageError
from hpcenv.records.manifest import DataFolder, StageRequest
from hpcenv.runs.clean import CleanRequest, clean, plan_clean

DAY = 86400.0


def plan(where: Path, fake_slurm: Any, *words: str, now: float | None = None, **rules: Any) -> Any:
    request = CleanRequest(words=words, runs="runs", **rules)
    return plan_clean(where, request, environ=fake_slurm.environ, now=time.time() if now is None else now)


def names(found: Any) -> set[str]:
    return {one.name for one in found}


@pytest.fixture
def some(tmp_path: Path, fake_slurm: Any) -> Path:
    """Five runs: one that runs, one whose state is unknown, one done, one done with a checkpoint, one that failed."""
    parent = tmp_path / "runs"
    for number, name in enumerate(("runs", "forgotten", "done", "saved", "failed")):
        folders.make_run(parent, name, str(10 + number), submitted=time.time() - 10 * DAY + number)
    (parent / "saved" / "checkpoints").mkdir()
    (parent / "saved" / "checkpoints" / "step-1.pt").write_bytes(b"x" * 100_000)
    fake_slurm.answers("squeue", "10|RUNNING|None|n1|0:01\n12|COMPLETED|None|n1|0:01\n")
    fake_slurm.answers("sacct", "13|COMPLETED|0:0|n1|00:00:01\n14|FAILED|1:0|n1|00:00:01\n12|COMPLETED|0:0|n1|1\n")
    return tmp_path


def test_what_may_still_run_and_what_holds_checkpoints_stays(some: Path, fake_slurm: Any) -> None:
    found = plan(some, fake_slurm, older_than=DAY)
    assert names(found.runs) == {"done", "failed"}
    why = {one.name: one.why for one in found.kept}
    assert set(why) == {"runs", "forgotten", "saved"}
    assert why["runs"] == "it is running"
    assert why["forgotten"].startswith("its state is unknown")
    assert why["saved"] == "it has checkpoints; name it to remove it"
    done = clean(found, environ=fake_slurm.environ)
    assert names(done.removed) == {"done", "failed"}
    assert done.freed > 0
    assert sorted(os.listdir(some / "runs")) == ["forgotten", "runs", "saved"]


def test_a_name_means_also_checkpoints_and_what_slurm_forgot_but_never_what_runs(some: Path, fake_slurm: Any) -> None:
    found = plan(some, fake_slurm, "saved", "forgotten", "runs")
    assert names(found.runs) == {"saved", "forgotten"}
    assert found.frees > 100_000
    assert [one.why for one in found.kept] == ["it is running"]
    fake_slurm.answers("squeue", err="slurm_load_jobs error: Unable to contact slurm controller\n", status=1)
    assert names(plan(some, fake_slurm, "forgotten").runs) == set(), "it may be queued: Slurm did not answer"
    with pytest.raises(RunNotFound):
        plan(some, fake_slurm, "saved", "nosuch")


def test_a_run_that_was_queued_again_meanwhile_stays(some: Path, fake_slurm: Any) -> None:
    found = plan(some, fake_slurm, states=("failed",))
    assert names(found.runs) == {"failed"}
    fake_slurm.answers("squeue", "14|PENDING|None||0:00\n")
    done = clean(found, environ=fake_slurm.environ)
    assert (done.removed, [one.why for one in done.kept]) == ((), ["it is pending"])
    assert (some / "runs" / "failed" / "manifest.json").exists()


def test_the_rules_apply_together(some: Path, fake_slurm: Any) -> None:
    assert names(plan(some, fake_slurm, older_than=30 * DAY).runs) == set()
    assert names(plan(some, fake_slurm, older_than=30 * DAY, now=time.time() + 25 * DAY).runs) == {"done", "failed"}
    assert names(plan(some, fake_slurm, keep=1).runs) == {"done"}
    assert names(plan(some, fake_slurm, states=("completed",), keep=0).runs) == {"done"}
    with pytest.raises(UsageError, match="no runs are named"):
        plan(some, fake_slurm)


def test_a_log_that_grew_lately_makes_a_run_young(some: Path, fake_slurm: Any) -> None:
    (some / "runs" / "done" / "job.log").write_text("just now")
    assert names(plan(some, fake_slurm, older_than=DAY).runs) == {"failed"}


def test_a_link_is_no_run_to_remove(some: Path, fake_slurm: Any) -> None:
    os.rename(some / "runs" / "done", some / "elsewhere")
    (some / "runs" / "done").symlink_to(some / "elsewhere")
    found = plan(some, fake_slurm, "done")
    assert (found.runs, [one.why for one in found.kept]) == ((), ["it is a symbolic link"])


def test_a_sweep_goes_as_a_whole(some: Path, fake_slurm: Any) -> None:
    folders.make_sweep(some / "runs", "sw", ["20_0", "20_1"])
    fake_slurm.answers("sacct", "20_0|COMPLETED|0:0|n1|1\n20_1|FAILED|1:0|n1|1\n")
    fake_slurm.answers("squeue", "20_1|RUNNING|None|n1|0:01\n")
    assert [one.why for one in plan(some, fake_slurm, "sw").kept] == ["it is running"]
    fake_slurm.answers("squeue")
    with pytest.raises(UsageError, match="is one run of a sweep"):
        plan(some, fake_slurm, "sw/0000")
    clean(plan(some, fake_slurm, "sw"), environ=fake_slurm.environ)
    assert not (some / "runs" / "sw").exists()


def test_a_sweep_stays_while_one_of_its_runs_cannot_be_told(some: Path, fake_slurm: Any) -> None:
    folder = folders.make_sweep(some / "runs", "sw", ["20_0", "20_1", "20_2"])
    fake_slurm.answers("sacct", "20_0|COMPLETED|0:0|n1|1\n20_2|COMPLETED|0:0|n1|1\n")
    fake_slurm.answers("squeue")
    (folder / "0001" / "submission.json").write_text("{")
    assert [one.why for one in plan(some, fake_slurm, "sw").kept] == ["the state of 1 of its runs is unknown: 0001"]
    shutil.rmtree(folder / "0001")
    assert names(plan(some, fake_slurm, "sw").runs) == {"sw"}, "what was removed by hand runs no more"


def test_packed_data_goes_with_the_last_run_that_needs_it(some: Path, fake_slurm: Any) -> None:
    store = some / "runs" / ".data"
    store.mkdir()
    shas = {letter: letter * 64 for letter in "abc"}
    for letter, sha in shas.items():
        (store / f"sha256-{sha}.tar").write_bytes(b"x" * 50_000)
        (store / f"{letter * 64}.json").write_text(f'{{"sha256": "{sha}", "size": 50000, "source": "/d"}}')
    old = time.time() - DAY
    for letter in "ab":
        os.utime(store / f"sha256-{shas[letter]}.tar", (old, old))
    # `a` is needed by a run that goes and `b` by one that stays; `c` was packed just now.
    for name, letter in (("failed", "a"), ("saved", "b")):
        tar = store / f"sha256-{shas[letter]}.tar"
        data = DataFolder(source="/d", listing_sha256="0", tar=str(tar), sha256=shas[letter], size=50_000)
        folders.make_run(
            some / "runs", name, "14" if name == "failed" else "13", submitted=1.0,
            stage=StageRequest(folder="", limit=0, data=(data,)),
        )  # fmt: skip
    found = plan(some, fake_slurm, "failed")
    assert [one.path.name for one in found.data] == [f"sha256-{shas['a']}.tar"]
    clean(found, environ=fake_slurm.environ)
    assert sorted(path.name for path in store.iterdir()) == sorted(
        [f"{shas['b']}.json", f"{shas['c']}.json", f"sha256-{shas['b']}.tar", f"sha256-{shas['c']}.tar"]
    )


def test_a_shared_archive_goes_with_the_last_run_that_is_a_link_to_it(some: Path, fake_slurm: Any) -> None:
    shared = some / "runs" / ".data" / f"sha256-{'a' * 64}.zip"
    shared.parent.mkdir()
    shared.write_bytes(b"x" * 50_000)
    for name in ("done", "failed"):
        (some / "runs" / name / "code").mkdir(exist_ok=True)
        os.link(shared, some / "runs" / name / "code/hpcenv.zip")
    found = plan(some, fake_slurm, "failed")
    assert found.data == () and found.frees < 50_000
    clean(found, environ=fake_slurm.environ)
    assert (some / "runs/done/code/hpcenv.zip").read_bytes() == shared.read_bytes() == b"x" * 50_000
    found = plan(some, fake_slurm, "done")
    assert names(found.data) == {".data/sha256-aaaaaaaaaaaa"} and found.frees > 50_000
    # A run that was submitted after the plan keeps it.
    os.link(shared, some / "new")
    assert [(one.name, one.why) for one in clean(found, environ=fake_slurm.environ).kept] == [
        (".data/sha256-aaaaaaaaaaaa", "a run needs it now")
    ]
    (some / "new").unlink()
    clean(plan(some, fake_slurm, "saved"), environ=fake_slurm.environ)
    assert not shared.exists()


def test_data_stays_while_a_manifest_cannot_be_read(some: Path, fake_slurm: Any) -> None:
    tar = some / "runs" / ".data" / f"sha256-{'a' * 64}.tar"
    tar.parent.mkdir()
    tar.write_bytes(b"x")
    os.utime(tar, (1.0, 1.0))
    assert names(plan(some, fake_slurm, "failed").data) == {".data/sha256-aaaaaaaaaaaa"}
    (some / "runs" / "runs" / "manifest.json").write_bytes(b"\xff\xfe")
    assert names(plan(some, fake_slurm, "failed").data) == set()


def test_what_an_interrupted_clean_left_goes_with_the_next(some: Path, fake_slurm: Any) -> None:
    os.rename(some / "runs" / "failed", some / "runs" / ".removing-failed-1234")
    found = plan(some, fake_slurm, "done")
    assert names(found.leftovers) == {".removing-failed-1234"}
    clean(found, environ=fake_slurm.environ)
    assert sorted(os.listdir(some / "runs")) == ["forgotten", "runs", "saved"]


@pytest.mark.ordinary_user
def test_what_cannot_be_removed_is_no_success(some: Path, fake_slurm: Any, hpcenv: Any) -> None:
    words = ("clean", "--state", "failed", "--yes", "--runs-dir", "runs")
    (some / "runs").chmod(0o555)
    try:
        done = hpcenv(*words, cwd=some, environ=fake_slurm.environ)
        as_json = hpcenv(*words, "--json", cwd=some, environ=fake_slurm.environ)
    finally:
        (some / "runs").chmod(0o755)
    assert done.status == as_json.status == 19, done.stderr
    assert "not removed: failed: it cannot be renamed: Permission denied" in done.stderr
    assert as_json.envelope["ok"] is False
    assert as_json.envelope["data"]["done"]["kept"][0]["failed"] is True
    assert (some / "runs" / "failed").is_dir()


def test_a_leftover_that_cannot_go_is_no_success(some: Path, fake_slurm: Any, hpcenv: Any) -> None:
    (some / "runs" / ".removing-x").symlink_to(some)  # rmtree refuses links, also root's
    words = ("clean", "--state", "failed", "--yes", "--json", "--runs-dir", "runs")
    done = hpcenv(*words, cwd=some, environ=fake_slurm.environ)
    assert (done.status, done.envelope["ok"]) == (19, False)
    answer = done.envelope["data"]["done"]
    assert [one["name"] for one in answer["removed"]] == ["failed"]
    assert [(one["name"], one["failed"]) for one in answer["kept"]] == [(".removing-x", True)]
