"""`submit --resume-from`, and what the ranks know of their run: real runs on this machine, in two environments."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from hpcenv.incontainer import provenance
from tests.conftest import TORCH, accept, hpcenv, make_python

# torchrun of the stand-in torch, with as many ranks as it is asked for.
SEVERAL_RANKS = """
import os, re, subprocess, sys
def main(args):
    end = args.index('--')
    nproc = int(re.search(r'--nproc.per.node[= ](\\d+)', ' '.join(args[:end]))[1])
    ranks = []
    for rank in range(nproc):
        place = {'RANK': str(rank), 'LOCAL_RANK': str(rank), 'GROUP_RANK': '0', 'WORLD_SIZE': str(nproc), 'LOCAL_WORLD_SIZE': str(nproc)}
        ranks.append(subprocess.Popen([sys.executable, *args[end + 1:]], env={**os.environ, **place}))
    assert [rank.wait() for rank in ranks] == [0] * nproc
"""

SCRIPT = """
import json, os, sys, time
from pathlib import Path
from hpcenv import training
found = training.resume_path(global_batch=int(sys.argv[1]))
step = 0 if found is None else int(found.read_text())
print("BEGINS", os.environ["RANK"], step, flush=True)
# As the first collective of a training does: no rank saves before all have begun.
Path(os.environ["HPCENV_RUN_FOLDER"], "begun-" + os.environ["RANK"]).touch()
while len(list(Path(os.environ["HPCENV_RUN_FOLDER"]).glob("begun-*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
if os.environ["RANK"] == "0":
    with training.saving(step + 5, global_batch=int(sys.argv[1])) as path:
        path.write_text(str(step + 5))
    Path(os.environ["HPCENV_RUN_FOLDER"], "environment.json").write_text(json.dumps(training.environment()))
"""


def python_with(folder: Path, version: str) -> Path:
    files = {name.replace("2.13.0+cpu", version): text.replace("2.13.0+cpu", version) for name, text in TORCH.items()}
    return make_python(folder, {**files, "torch/distributed/run.py": SEVERAL_RANKS})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose run `old` had torch 2.12.1 and 1 rank; it is locked with torch 2.13.0 now. Tests share it."""
    pythons = tmp_path_factory.mktemp("pythons")
    new, old = python_with(pythons / "new", "2.13.0+cpu"), python_with(pythons / "old", "2.12.1+cpu")
    folder = tmp_path_factory.mktemp("resume") / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    for python in (old, new):
        (folder / "hpcenv.toml").write_text(f'image = "host"\npython = "{python}"\n')
        accept(folder)
        done = hpcenv("lock", cwd=folder)
        assert done.status == 0, done.stderr
        if python == old:
            done = hpcenv("submit", "train.py", "--nproc", "1", "--name", "old", "--wait", "--", "32", cwd=folder)
            assert done.status == 0, done.stdout + done.stderr
    return folder


def lines_of(run: Path, word: str) -> list[str]:
    return [line.partition(word)[2].strip() for line in (run / "job.log").read_text().splitlines() if word in line]


def test_a_checkpoint_of_another_torch_and_world_size_is_told_before_training_goes_on(trained: Path) -> None:
    old = json.loads((trained / "runs" / "old" / "checkpoints" / "step-00000005.json").read_text())
    assert (old["torch"], old["world_size"], old["global_batch"], old["step"], old["run"]) == (
        "2.12.1+cpu",
        1,
        32,
        5,
        "old",
    )
    submit = ("submit", "train.py", "--nproc", "2", "--name", "new", "--resume-from", "old", "--wait", "--", "64")
    done = hpcenv(*submit, cwd=trained)
    assert done.status == 0, done.stdout + done.stderr
    said = done.stderr
    assert "note: --resume-from step-00000005.pt: torch was 2.12.1+cpu and is 2.13.0+cpu now" in said
    assert "note: --resume-from step-00000005.pt: the world size was 1 and is 2 now" in said
    assert f"the lockfile was {old['fingerprint']} and is hpc2-" in said
    log = (trained / "runs" / "new" / "job.log").read_text()
    told = [
        "hpcenv: step-00000005.pt: torch was 2.12.1+cpu and is 2.13.0+cpu now",
        "hpcenv: step-00000005.pt: the world size was 1 and is 2 now",
        "hpcenv: step-00000005.pt: the global batch was 32 and is 64 now",
    ]
    for line in told:
        assert log.count(line) == 1, log  # by one rank
        assert log.index(line) < log.index("BEGINS 0 5")
    assert sorted(lines_of(trained / "runs" / "new", "BEGINS")) == ["0 5", "1 5"]
    new = json.loads((trained / "runs" / "new" / "checkpoints" / "step-00000010.json").read_text())
    assert (new["torch"], new["world_size"], new["run"]) == ("2.13.0+cpu", 2, "new")
    assert (trained / "runs" / "old" / "checkpoints" / "step-00000005.pt").read_text() == "5"


def test_nothing_is_said_where_nothing_differs(trained: Path) -> None:
    one = ("submit", "train.py", "--nproc", "1", "--wait")
    assert hpcenv(*one, "--name", "a", "--", "32", cwd=trained).status == 0
    done = hpcenv(*one, "--name", "b", "--resume-from", "a", "--", "32", cwd=trained)
    assert done.status == 0, done.stderr
    assert "step-00000005.pt: " not in done.stderr
    assert "step-00000005.pt: " not in (trained / "runs" / "b" / "job.log").read_text()
    assert lines_of(trained / "runs" / "b", "BEGINS") == ["0 5"]
    newer = trained / "runs" / "a" / "checkpoints" / "step-00000099.pt"
    newer.write_text("99")
    done = hpcenv("rerun", "b", "--wait", cwd=trained)  # continues from the very checkpoint
    assert done.status == 0, done.stdout + done.stderr
    assert lines_of(trained / "runs" / "b-2", "BEGINS") == ["0 5"]


def test_a_path_and_a_checkpoint_without_a_record(trained: Path) -> None:
    (trained / "mine").mkdir()
    (trained / "mine" / "model.bin").write_text("7")
    dry = ("submit", "train.py", "--nproc", "1", "--dry-run", "--json", "--resume-from")
    data = hpcenv(*dry, "mine/model.bin", cwd=trained).envelope["data"]
    assert data["manifest"]["resume_from"] == str(trained / "mine" / "model.bin")
    what = "--resume-from not known with which environment model.bin was written: there is no model.bin.json"
    assert what in data["notes"]
    data = hpcenv(*dry, "runs/old/checkpoints", cwd=trained).envelope["data"]
    assert data["manifest"]["resume_from"].endswith("/old/checkpoints/step-00000005.pt")


@pytest.mark.parametrize(
    ("word", "what", "why"),
    [
        ("nosuch", "no run `nosuch`", "--resume-from takes a run, or the path of a checkpoint"),
        ("empty", "`--resume-from empty`: there is no checkpoint", "step-N.pt"),
    ],
)
def test_what_is_no_checkpoint_is_refused(trained: Path, word: str, what: str, why: str) -> None:
    (trained / "empty").mkdir(exist_ok=True)
    done = hpcenv("submit", "train.py", "--nproc", "1", "--name", "c", "--resume-from", word, "--json", cwd=trained)
    error = done.envelope["error"]
    assert error["what"] == what
    assert why in error["why"]
    assert not (trained / "runs" / "c").exists()


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b"[]", b'{"schema": 9}', b"\xff", b" " * (1 << 20)])
def test_a_damaged_record_is_unknown_and_never_fine(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "step-00000005.json").write_bytes(content)
    (line,) = provenance.judge(tmp_path / "step-00000005.pt", {"torch": "2.13.0"})
    assert line.startswith("not known with which environment step-00000005.pt was written: step-00000005.json ")


def test_values_of_a_record_are_data(tmp_path: Path) -> None:
    record = {"schema": 1, "torch": "\x1b[31m" + "x" * 9000, "world_size": [1] * 1000, "commit": {"a": 1}}
    (tmp_path / "step-00000005.json").write_text(json.dumps(record))
    for line in provenance.judge(tmp_path / "step-00000005", {"torch": "2.13.0", "world_size": 1, "commit": "a"}):
        assert line.isprintable()
        assert len(line) < 400


def test_a_script_writes_its_environment_into_its_own_log(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "project", ignore=shutil.ignore_patterns("runs"))
    trained = tmp_path / "project"
    accept(trained)
    git = "git init -q && git add -A && git -c user.name=a -c user.email=a@b commit -qm one"
    (trained / ".gitignore").write_text("runs/\n")
    subprocess.run(git, shell=True, check=True, cwd=trained)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=trained, capture_output=True, text=True).stdout.strip()
    words = ("--determinism", "seeded", "--seed", "7", "--name", "a", "--wait", "--", "32")
    done = hpcenv("submit", "train.py", "--nproc", "2", *words, cwd=trained)
    assert done.status == 0, done.stdout + done.stderr
    run = trained / "runs" / "a"
    found = json.loads((run / "environment.json").read_text())
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["fingerprint"].startswith("hpc2-")
    expected = {
        **{
            "run": "a",
            "attempt": 0,
            "fingerprint": manifest["fingerprint"],
            "commit": commit,
            "rank": 0,
            "world_size": 2,
        },
        **{"torch": "2.13.0+cpu", "seed": 7, "rank_seed": 7, "determinism": "seeded", "gpu": None, "cuda": None},
    }
    assert {name: found[name] for name in expected} == expected
    assert found["python"].count(".") == 2
    (trained / "train.py").write_text(SCRIPT + "\n# changed\n")
    done = hpcenv(
        "submit", "train.py", "--nproc", "1", "--allow-dirty", "--name", "b", "--wait", "--", "32", cwd=trained
    )
    assert done.status == 0, done.stdout + done.stderr
    dirty = json.loads((trained / "runs" / "b" / "environment.json").read_text())["commit"]
    assert dirty.startswith(f"{commit}-dirty.")
    assert len(dirty) == len(commit) + len("-dirty.") + 12


def test_a_run_folder_has_its_packages_as_pip_reads_them(trained: Path) -> None:
    text = (trained / "runs" / "old" / "requirements.txt").read_text()
    fingerprint = json.loads((trained / "runs" / "old" / "manifest.json").read_text())["fingerprint"]
    assert f"lockfile {fingerprint}" in text
    assert "# torch==2.12.1+cpu: " in text  # without a wheel there is no hash, and the comment says so
