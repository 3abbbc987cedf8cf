"""The pulse of a rank: real torch writes it, and the watching process reads it while the rank runs."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hpcenv.incontainer.start_hook.pulse import LAYOUT
from hpcenv.watch import pulses
from hpcenv.watch.pulses import RankPulse
from hpcenv.watch.rank_use import RankLook
from tests.hooked_rank import HEAD, Rank, made_in

# Reads its own pulse, as the process outside does while the rank lives.
READ = """
import json, sys
sys.path.append({root!r})
from pathlib import Path
from dataclasses import asdict
from hpcenv.watch.pulses import read_pulses
def seen():
    print(json.dumps([asdict(one) for one in read_pulses([Path({folder!r})])]), flush=True)
"""


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return made_in(tmp_path)


def seen(rank: Rank, script: str, **options: object) -> list[dict]:
    folder = rank.folder / "watch"
    folder.mkdir(exist_ok=True)
    root = str(Path(pulses.__file__).parents[2])
    head = HEAD + READ.format(root=root, folder=str(folder))
    done = rank.start(head + script, record=False, watch=str(folder), **options)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


STEPS = """
import time
model, optimizer = made()
seen()
for step in range(5):
    loss_of(model).backward()
    time.sleep(0.05)
    optimizer.step()
seen()
"""


def test_steps_and_their_time_are_told_and_nothing_is_recorded(rank: Rank) -> None:
    (before,), (after,) = seen(rank, STEPS)
    assert (before["rank"], before["steps"], before["last_step"], before["saving"]) == (0, 0, 0.0, False)
    assert after["steps"] == 5
    assert 0.19 < after["seconds"] < 5, "four steps: the first one has what was before it"
    assert after["torch_memory"] is None, "CUDA was not started"
    assert not (rank.folder / "run" / "metrics").exists()
    assert not (rank.folder / "run" / "determinism").exists()


def test_a_run_that_records_is_watched_too(rank: Rank) -> None:
    folder = rank.folder / "watch"
    folder.mkdir()
    done = rank.start(HEAD + STEPS.replace("seen()", "pass"), watch=str(folder))
    assert done.returncode == 0, done.stderr
    assert rank.metrics().processes[0].steps == 5
    assert len(list(folder.glob("pulse-0.*"))) == 1


def test_the_wait_for_a_loader_is_part_of_the_step(rank: Rank) -> None:
    _, (after,) = seen(
        rank,
        """
import time
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 6
    def __getitem__(self, index):
        time.sleep(0.1)
        return torch.ones(4)
model, optimizer = made()
seen()
for batch in DataLoader(Slow(), batch_size=1):
    model(batch).sum().backward()
    optimizer.step()
with torch.no_grad():
    for batch in DataLoader(Slow(), batch_size=1): pass
seen()
""",
    )
    assert after["steps"] == 6
    assert 0.5 <= after["waited"] < 0.9, "five batches; a validation does not count"
    assert after["waited"] <= after["seconds"] + 0.05


def test_the_steps_of_two_optimizers_are_one(rank: Rank) -> None:
    ((after,),) = seen(
        rank,
        """
model, one = made()
other = torch.optim.Adam(nn.Linear(2, 2).parameters())
for step in range(3):
    loss_of(model).backward()
    one.step(); other.step()
seen()
""",
    )
    assert after["steps"] == 3


def test_a_rank_that_saves_says_so(rank: Rank, tmp_path: Path) -> None:
    environ = {"HPCENV_CHECKPOINTS": str(tmp_path / "checkpoints")}
    inside, after = seen(
        rank,
        """
from hpcenv import training
with training.saving(1) as path:
    assert path is not None
    path.write_text("x")
    seen()
seen()
""",
        environ=environ,
    )
    assert (inside[0]["saving"], after[0]["saving"]) == (True, False)


def test_a_folder_that_is_not_there_ends_no_training(rank: Rank) -> None:
    done = rank.start(HEAD + "print('trained')", record=False, watch=str(rank.folder / "absent"))
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.startswith("hpcenv: rank 0 is not watched: ")


def test_a_pulse_of_a_process_that_has_ended_or_that_is_half_written_is_none(rank: Rank, tmp_path: Path) -> None:
    seen(rank, STEPS)
    folder = rank.folder / "watch"
    (path,) = folder.glob("pulse-0.*")
    assert pulses.read_pulses([folder]) == (), "the rank has ended"
    values = list(LAYOUT.unpack(path.read_bytes()))
    values[2], values[3] = _this_process()
    path.write_bytes(LAYOUT.pack(*values))
    assert [pulse.steps for pulse in pulses.read_pulses([folder])] == [5]
    path.write_bytes(struct.pack("<Q", values[0] - 1) + path.read_bytes()[8:])
    assert pulses.read_pulses([folder]) == ()
    path.write_bytes(b"short")
    assert pulses.read_pulses([folder]) == ()


def test_a_rank_that_ended_and_is_not_waited_for_is_not_alive(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "100"]) as child:
        start = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        values = (2, 0, child.pid, start, 5, 1.0, 1.0, 0.0, 0, -1, -1, 2)
        (tmp_path / f"pulse-0.{child.pid}").write_bytes(LAYOUT.pack(*values))
        assert [pulse.pid for pulse in pulses.read_pulses([tmp_path])] == [child.pid]
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert pulses.read_pulses([tmp_path]) == (), "a zombie"


def _this_process() -> tuple[int, int]:
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(Path("/proc/self").resolve().name), int(stat[19])


def test_a_rank_without_a_loader_of_torch_may_wait_for_its_data_in_another_way() -> None:
    for waited, found in ((0.0, None), (2.0, 0.2)):
        look = RankLook()
        pulse = RankPulse(
            rank=0, pid=os.getpid(), steps=1, last_step=1.0, seconds=1.0, waited=0.0, saving=False, torch_memory=None,
            torch_peak=None,
        )  # fmt: skip
        look.look([pulse], {}, 10.0)
        (use,) = look.look([replace(pulse, steps=11, seconds=6.0, waited=waited)], {}, 20.0)
        assert (use.step_seconds, use.wait_seconds) == (0.5, found)
