"""Going into a running run: the environment of its ranks, on a node of this attempt, or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import run_folders as folders

from hpcenv.errors import NodesUnknown
from hpcenv.launch.attach import attach
from hpcenv.records.checked_sif import CheckedSif, FileIdentity
from hpcenv.records.facts import Facts, Network
from hpcenv.records.files import load_record, save_record
from hpcenv.records.manifest import Environment, Secret, Setting
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import NodeSettings

ENVIRON = {"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "n2", "SLURM_JOB_ID": "7", "TERM": "dumb", "PYTHONPATH": "/x"}


def make(where: Path, **manifest: Any) -> RunFolder:
    folder = folders.make_run(where / "runs", "a", "7", nodes=2, workdir=str(where), **manifest)
    folders.start(folder, ["n1", "n2"])
    settings = load_record(NodeSettings, folder.env_of("n2"))
    mark = Setting(name="MARK", value="a $(id) b", origin="--env")
    save_record(NodeSettings(**{**vars(settings), "settings": (mark,)}), folder.env_of("n2"))
    return folder


def test_a_command_sees_what_the_ranks_see(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret\n")
    secret = Secret(name="TOKEN", source=f"file:{tmp_path}/secret", origin="--secret")
    folder = make(tmp_path, secrets=(secret,))
    script = (
        f'printf "%s|" "$MARK" "$PWD" "$HPCENV_RUN_FOLDER" "$TOKEN" "$PYTHONPATH" "$RANK" > {tmp_path}/said; exit 7'
    )
    assert attach(folder, ENVIRON, ("sh", "-c", script), secrets=False) == 7
    assert (tmp_path / "said").read_text() == f"a $(id) b|{tmp_path}|{folder.path}||||"
    assert attach(folder, ENVIRON, ("sh", "-c", script), secrets=True) == 7
    assert "|s3cret|" in (tmp_path / "said").read_text()
    assert attach(folder, ENVIRON, ("sh", "-c", "kill -TERM $$"), secrets=False) == 143


@pytest.mark.parametrize(
    ("change", "words"),
    [({"SLURMD_NODENAME": "n3"}, "not a node of this run"), ({"SLURM_JOB_ID": "8"}, "this is job 8, the run is job 7")],
)
def test_another_node_or_job_is_no_place_for_it(tmp_path: Path, change: dict[str, str], words: str) -> None:
    with pytest.raises(NodesUnknown, match=words):
        attach(make(tmp_path), {**ENVIRON, **change}, ("false",), secrets=False)


def test_settings_of_an_earlier_attempt_are_not_used(tmp_path: Path) -> None:
    folder = make(tmp_path)
    folders.write(folder.started, attempt=1, nodes=["n1", "n2"], job_id="7")
    with pytest.raises(NodesUnknown, match="do not belong to attempt 1"):
        attach(folder, ENVIRON, ("false",), secrets=False)


def test_a_sif_that_was_swapped_is_not_started(tmp_path: Path) -> None:
    sif = tmp_path / "a.sif"
    sif.write_bytes(b"one")
    folder = make(tmp_path, environment=Environment(kind="sif", python="python3", sif=str(sif), apptainer="/bin/false"))
    status = os.stat(sif)
    identity = FileIdentity(
        device=status.st_dev, inode=status.st_ino, size=3, mtime_ns=status.st_mtime_ns, ctime_ns=status.st_ctime_ns
    )
    checked = CheckedSif(
        path=str(sif), staged=False, checked="full", why="", sha256="0" * 64, file=identity, lasting=True
    )
    facts = Facts(
        schema=1, run="a", node="n2", attempt=0, values={}, unknown={}, network=Network(first_node="n1"), sif=checked
    )
    save_record(facts, folder.facts_of("n2"))
    assert attach(folder, ENVIRON, ("true",), secrets=False) == 1, "what /bin/false says: it was started"
    sif.write_bytes(b"two")
    with pytest.raises(NodesUnknown, match="not the one that runs"):
        attach(folder, ENVIRON, ("true",), secrets=False)
