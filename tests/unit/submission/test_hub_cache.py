"""Data of a hub in a run: found by the ranks, recorded, compared on the nodes, and refused where they are not as fetched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from hpcenv.container.start_command import build_start_command
from hpcenv.records.manifest import Environment, Setting
from hpcenv.submission import hub_cache
from hpcenv.submission.hub_cache import HubCache
from hpcenv.submission.locked import add_own
from tests.hub_server import COMMIT, Hub

OTHER = "f" * 40
FILES = {"config.json": b'{"hidden": 32}', "w.bin": b"weights" * 1000}
SCRIPT = """
import os, pathlib
assert os.environ["HF_HUB_OFFLINE"] == os.environ["TRANSFORMERS_OFFLINE"] == os.environ["HF_DATASETS_OFFLINE"] == "1"
assert "HF_TOKEN" not in os.environ
cache = pathlib.Path(os.environ["HF_HUB_CACHE"], "models--lab--tiny")
commit = (cache / "refs" / "main").read_text()
# One write: ranks print at the same time, and Python without a buffer writes each argument by itself.
text = (cache / "snapshots" / commit / "config.json").read_text()
print(f"TRAINS {commit} {text}", flush=True)
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub(FILES, lfs=("w.bin",))
    yield made
    made.close()


@pytest.fixture
def environ(project: Path, hub: Hub, tmp_path: Path) -> dict[str, str]:
    (project / "train.py").write_text(SCRIPT)
    with open(project / "hpcenv.toml", "a") as file:
        file.write(f'[[data]]\nhub = "lab/tiny@{COMMIT}"\n')
    named = hub.environ(HF_TOKEN="hf_secret", HPCENV_STORE=str(tmp_path / "store"))
    return {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path / "home"), **named}


def submit(hpcenv: Any, project: Path, environ: dict[str, str], *words: str) -> Any:
    return hpcenv(
        "submit", "train.py", "--cluster", "local", "--nproc", "1", "--wait", *words, cwd=project, environ=environ
    )


def test_a_run_reads_the_fetched_model_and_a_changed_byte_is_named(
    hpcenv: Any, project: Path, environ: dict[str, str], hub: Hub
) -> None:
    done = submit(hpcenv, project, environ, "--name", "none")
    assert done.status == 48
    assert f"`lab/tiny@{COMMIT}` is not fetched" in done.stderr
    assert "hpcenv data fetch" in done.stderr
    assert hpcenv("data", "fetch", cwd=project, environ=environ).status == 0
    hub.close()
    done = submit(hpcenv, project, environ, "--name", "one")
    run = project / "runs" / "one"
    assert done.status == 0, done.stderr
    assert f'TRAINS {COMMIT} {{"hidden": 32}}' in (run / "job.log").read_text()
    manifest = json.loads((run / "manifest.json").read_text())
    (data,) = manifest["data"]
    assert (data["name"], data["hub"]) == ("lab-tiny", f"lab/tiny@{COMMIT}")
    table = tomlkit.parse((run / "lock.toml").read_text())["data"]["lab-tiny"].unwrap()
    assert table == {name: data[name] for name in ("path", "compare", "state", "hub")}
    verdict = (run / "verdict.json").read_text()
    assert "match" in verdict
    assert f"data lab/tiny@{COMMIT}: size-and-time compared" in verdict
    for path in run.rglob("*"):
        assert not path.is_file() or b"hf_secret" not in path.read_bytes(), path

    changed = Path(data["path"], "config.json")
    changed.chmod(0o644)
    changed.write_bytes(b'{"hidden": 33}')
    done = submit(hpcenv, project, environ, "--name", "two")
    assert done.status == 48
    assert "config.json: changed since it was fetched" in done.stderr
    assert not (project / "runs" / "two").exists()


def test_an_exported_folder_has_the_cache_and_its_nodes_would_see_a_change(
    hpcenv: Any, project: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    assert hpcenv("data", "fetch", cwd=project, environ=environ).status == 0
    with open(project / "hpcenv.toml", "a") as file:
        file.write("[submit]\nassume-shared = true\n")
    exported = tmp_path / "exported"
    done = hpcenv("submit", "train.py", "--nproc", "1", "--time", "5", "--export", str(exported),
                  cwd=project, environ=environ)  # fmt: skip
    assert done.status == 0, done.stderr
    manifest = json.loads((exported / "manifest.json").read_text())
    (data,) = manifest["data"]
    assert f"lab/tiny@{COMMIT}" in (exported / "README.txt").read_text()
    assert os.readlink(exported / "hub" / "models--lab--tiny" / "snapshots" / COMMIT) == data["path"]
    Path(data["path"], "more").write_bytes(b"")
    from hpcenv.identity.data import read_state

    assert str(read_state(data["path"], data["compare"])) != data["state"]


def test_an_exported_folder_has_its_cache_where_it_is_now(tmp_path: Path) -> None:
    from hpcenv.launch.prepare_export_run import moved

    before, now = "/old/exported", str(tmp_path)
    settings = [{"name": "HF_HUB_CACHE", "value": f"{before}/hub"}, {"name": "A", "value": "/old/exported-not"}]
    manifest = {"run": "r", "run_folder": before, "environment": {"kind": "host"}, "script": "", "workdir": before,
                "settings": settings}  # fmt: skip
    values = [one["value"] for one in moved(manifest, now, f"{now}/runs/7", "7", {})["settings"]]
    assert values == [f"{now}/hub", "/old/exported-not"]


def cache_of(*commits: str) -> HubCache:
    from hpcenv.identity.data import DataState
    from hpcenv.project.hub_reference import parse_locked

    state = DataState(digest="", files=1, size=1)
    found = [
        hub_cache.FetchedData(wanted=parse_locked(f"lab/tiny@{one}"), folder=Path(f"/store/{one}"), state=state)
        for one in commits
    ]
    return hub_cache.plan_cache(found)


def test_main_is_the_commit_unless_there_are_two() -> None:
    cache = cache_of(COMMIT)
    assert cache.refs == {"models--lab--tiny/refs/main": COMMIT}
    assert cache.notes == ()
    cache = cache_of(COMMIT, OTHER)
    assert cache.refs == {}
    assert len(cache.links) == 2
    assert "has to name the revision" in cache.notes[0]


def test_what_the_user_sets_stays_and_is_said() -> None:
    given = (Setting(name="HF_HUB_OFFLINE", value="0", origin="--env"), Setting(name="A", value="b", origin="--env"))
    settings, notes = add_own(given, hub_cache.variables(cache_of(COMMIT), Path("/run")), ": what then")
    found = {one.name: one.value for one in settings}
    assert found == {"A": "b", "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
                     "HF_HUB_CACHE": "/run/hub"}  # fmt: skip
    assert notes == ("HF_HUB_OFFLINE=0 (--env) replaces 1: what then",)
    assert hub_cache.variables(HubCache(), Path("/run")) == ()


def test_a_container_sees_the_folders_of_the_store_read_only() -> None:
    cache = cache_of(COMMIT)
    environment = Environment(kind="sif", python="python3", apptainer="/usr/bin/apptainer", sif="/x.sif")
    seen = hub_cache.with_binds(environment, cache)
    start = build_start_command(seen, ["true"], workdir="/", variables={}, inherited={})
    assert any(f"/store/{COMMIT}" in word and "ro" in word for word in start.argv), start.argv
    host = Environment(kind="host", python="/usr/bin/python3")
    assert hub_cache.with_binds(host, cache) == host


@pytest.mark.parametrize("changed", [False, True])
def test_a_byte_that_changes_while_the_job_waits_stops_it_on_every_node(
    hpcenv: Any, project: Path, environ: dict[str, str], fake_slurm: Any, changed: bool
) -> None:
    fake_slurm.answers("sbatch", "Submitted batch job 7\n")
    with open(project / "hpcenv.toml", "a") as file:
        file.write("[submit]\nassume-shared = true\n")
    environ = {**environ, **fake_slurm.environ, "HOME": environ["HOME"]}
    assert hpcenv("data", "fetch", cwd=project, environ=environ).status == 0
    words = ("submit", "train.py", "--nodes", "2", "--nproc", "1", "--time", "5", "--name", "waits")
    done = hpcenv(*words, cwd=project, environ=environ)
    assert done.status == 0, done.stderr
    run = project / "runs" / "waits"
    manifest = json.loads((run / "manifest.json").read_text())
    (data,) = manifest["data"]
    # Here its steps run on two emulated nodes of this machine.
    (run / "manifest.json").write_text(json.dumps({**manifest, "cluster": "local"}))
    if changed:
        weights = Path(data["path"], "w.bin")
        weights.chmod(0o644)
        weights.write_bytes(b"W" + FILES["w.bin"][1:])
    step = [sys.executable, "-I", str(run / "code" / "step.py"), "local", str(run)]
    job = subprocess.run(step, env={"PATH": "/usr/bin:/bin", "HOME": environ["HOME"]}, capture_output=True, timeout=100)
    log = job.stdout.decode() + job.stderr.decode()
    assert job.returncode == (90 if changed else 0), log
    assert log.count(f"TRAINS {COMMIT}") == (0 if changed else 2)
    if changed:
        rows = [line for line in log.splitlines() if "data.lab-tiny" in line]
        assert rows, log
        assert "MISMATCH: 2 of 2 nodes" in log
        done = hpcenv("data", "fetch", cwd=project, environ=environ)
        assert "w.bin: changed since it was fetched" in done.stderr
        assert Path(data["path"], "w.bin").read_bytes() == FILES["w.bin"]
