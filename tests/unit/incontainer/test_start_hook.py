"""The start hook in real processes with real torch: what it sets, sees, counts and leaves as it was."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcenv.incontainer.start_hook import seeds, switches
from hpcenv.records.metrics import RankMetrics
from tests.hooked_rank import HEAD, Rank, made_in


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return made_in(tmp_path)


pytestmark = pytest.mark.torch


def used(metrics: RankMetrics) -> list[tuple[int, int, float]]:
    return [(r.step, r.index, float.fromhex(r.value)) for r in metrics.records if r.kind == "loss" and r.used]


def dropped(metrics: RankMetrics) -> list[float]:
    return [float.fromhex(r.value) for r in metrics.records if r.kind == "loss" and not r.used]


# -- losses and steps ---------------------------------------------------------------------


def test_losses_are_what_the_script_saw_to_the_last_bit(rank: Rank) -> None:
    metrics = rank.run(
        """
        model, optimizer = made()
        for n in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, 1 / 3)
            loss.backward()
            print(loss.item().hex())
            loss.data.mul_(100)  # in place, afterwards
            optimizer.step()
        """
    )
    assert [value.hex() for _, _, value in used(metrics)] == rank.stdout.split()
    assert [step for step, _, _ in used(metrics)] == [1, 2, 3, 4]
    (process,) = metrics.processes
    assert (process.before, process.before_from, process.steps, process.reason) == (0, "start", 4, "finished")


CASES = {
    "accumulation": (
        "for n in range(4): loss_of(model, n + 1).backward(); n % 2 and (optimizer.step(), optimizer.zero_grad())",
        [(1, 0), (1, 1), (2, 0), (2, 1)],
    ),
    "autograd.backward called directly": (
        "for n in range(2): torch.autograd.backward([loss_of(model)]); optimizer.step()",
        [(1, 0), (2, 0)],
    ),
    "LBFGS with its closure": (
        """
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model).pow(2)
            loss.backward()
            return loss
        optimizer.step(closure)
        """,
        [(1, 0), (1, 1)],
    ),
    "two optimizers, as for a GAN": (
        """
        other, second = made()
        for n in range(2):
            optimizer.zero_grad(); loss_of(model).backward(); optimizer.step()
            second.zero_grad(); loss_of(other, 2).backward(); second.step()
        """,
        [(1, 0), (1, 1), (2, 0), (2, 1)],
    ),
    "a wrapper that forwards": (
        """
        class Wrapper(torch.optim.Optimizer):
            def __init__(self, inner):
                super().__init__(inner.param_groups, {})
                self.inner = inner
            def step(self):
                self.inner.step()
        optimizer = Wrapper(optimizer)
        for n in range(2): loss_of(model).backward(); optimizer.step()
        """,
        [(1, 0), (2, 0)],
    ),
    "a new optimizer after the first was dropped": (
        """
        loss_of(model).backward(); optimizer.step(); del optimizer
        optimizer = torch.optim.Adam(model.parameters())
        loss_of(model).backward(); optimizer.step()
        """,
        [(1, 0), (2, 0)],
    ),
    "checkpointed activations": (
        """
        from torch.utils.checkpoint import checkpoint
        x = torch.ones(2, 4, requires_grad=True)
        for n in range(2):
            checkpoint(lambda y: model(y), x, use_reentrant=True).sum().backward(); optimizer.step()
        """,
        [(1, 0), (2, 0)],
    ),
    "a step that torch.compile compiles": (
        """
        @torch.compile(backend="eager")
        def train():
            optimizer.zero_grad(); loss = loss_of(model); loss.backward(); optimizer.step()
        train(); train()
        """,
        [(1, 0), (2, 0)],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(("script", "steps"), CASES.values(), ids=CASES)
def test_each_way_to_train_is_counted_as_steps(script: str, steps: list[tuple[int, int]], rank: Rank) -> None:
    metrics = rank.run("model, optimizer = made()\n" + textwrap.dedent(script))
    if "LBFGS" in script:
        assert {step for step, _, _ in used(metrics)} == {1} and metrics.processes[0].steps == 1
        return
    assert [(step, index) for step, index, _ in used(metrics)] == steps
    assert metrics.processes[0].steps == steps[-1][0]


@pytest.mark.long
def test_gradients_that_are_thrown_away_are_no_step(rank: Rank) -> None:
    metrics = rank.run(
        """
        model, optimizer = made()
        loss_of(model, 5).backward()
        optimizer.zero_grad(); loss_of(model).backward(); optimizer.step()
        model.zero_grad(); loss_of(model, 7).backward()
        """
    )
    assert len(used(metrics)) == 1 and len(dropped(metrics)) == 2
    assert [r.index for r in metrics.records if not r.used] == [-1, -1]


@pytest.mark.long
def test_the_factor_of_a_grad_scaler_is_divided_out_and_a_skipped_step_is_none(rank: Rank) -> None:
    metrics = rank.run(
        """
        model, optimizer = made()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for n in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, 1 / 3)
            scaler.scale(loss).backward()
            if n == 1:
                model.weight.grad[0, 0] = float("inf")
            else:
                print(loss.item().hex())
            scaler.step(optimizer)
            scaler.update()
        """
    )
    losses = [r for r in metrics.records if r.kind == "loss" and r.used]
    assert [float.fromhex(r.value).hex() for r in losses] == rank.stdout.split()
    assert [(r.step, float.fromhex(r.scale)) for r in losses] == [(1, 1024.0), (2, 512.0)]
    assert len(dropped(metrics)) == 1


@pytest.mark.long
def test_what_is_no_loss_is_a_note_and_values_that_json_has_not_are_kept(rank: Rank) -> None:
    metrics = rank.run(
        """
        model, optimizer = made()
        model(torch.ones(2, 4)).backward(torch.ones(2, 1)); optimizer.step()
        (loss_of(model) * float("nan")).backward(); optimizer.step()
        """
    )
    assert [r.value for r in metrics.records if r.kind == "loss"] == ["nan"]
    assert len(metrics.notes) == 1 and "a tensor with 2 elements" in metrics.notes[0]


def test_the_step_by_which_get_state_dict_makes_the_state_is_not_counted(rank: Rank) -> None:
    metrics = rank.run(
        """
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        def adam(model):
            return torch.optim.AdamW(model.parameters(), lr=0.01)
        model, _ = made()
        optimizer = adam(model)
        weights, state = get_state_dict(model, optimizer)
        for one in state["state"].values():
            one["step"] = torch.tensor(10.0)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        for n in range(2):
            optimizer.zero_grad(); loss_of(model).backward(); optimizer.step()
        """,
        environ={"HPCENV_ATTEMPT": "0"},
    )
    assert [step for step, _, _ in used(metrics)] == [11, 12]
    (process,) = metrics.processes
    assert (process.before, process.before_from, process.steps) == (10, "optimizer", 12)


def test_a_first_step_with_learning_rate_0_is_counted(rank: Rank) -> None:
    metrics = rank.run(
        """
        model, _ = made()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        for n in range(2):
            optimizer.zero_grad(); loss_of(model).backward(); optimizer.step()
        """
    )
    assert [step for step, _, _ in used(metrics)] == [1, 2]


@pytest.mark.parametrize(
    ("asks", "rank_number", "attempt", "told"),
    [(False, "0", "0", True), (True, "0", "0", False), (False, "1", "0", False), (False, "0", "1", False)],
    ids=["never-asked", "asked", "another-rank", "second-attempt"],
)
def test_a_script_that_never_asks_for_the_checkpoint_of_resume_from_is_told_at_its_first_step(
    rank: Rank, tmp_path: Path, asks: bool, rank_number: str, attempt: str, told: bool
) -> None:
    given = tmp_path / "step-00000020.pt"
    given.write_bytes(b"")
    variables = {"HPCENV_RESUME_FROM": str(given), "HPCENV_CHECKPOINTS": str(tmp_path / "own")}
    script = f"""
        from hpcenv import training
        path = training.resume_path() if {asks} else None
        model, optimizer = made()
        for n in range(3):
            loss_of(model).backward()
            optimizer.step()
        """
    environ = {**variables, "RANK": rank_number, "HPCENV_ATTEMPT": attempt}
    done = rank.start(HEAD + textwrap.dedent(script), environ=environ)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("did not call hpcenv.training.resume_path(): the training begins anew") == told
    assert ("step-00000020.pt in another way" in done.stderr) == told


def test_a_resumed_optimizer_continues_to_count(rank: Rank) -> None:
    metrics = rank.run(
        """
        model, _ = made()
        def adam():
            return torch.optim.AdamW(model.parameters())
        before, after = adam(), adam()
        state = {"step": torch.tensor(10.0), "exp_avg": torch.zeros(1, 4), "exp_avg_sq": torch.zeros(1, 4)}
        loaded = before.state_dict(); loaded["state"] = {0: state}
        after.load_state_dict(loaded)
        loss_of(model).backward(); after.step()
        """,
        environ={"HPCENV_ATTEMPT": "0"},
    )
    assert [step for step, _, _ in used(metrics)] == [11]
    assert metrics.processes[0].before_from == "optimizer"


@pytest.mark.long
def test_an_attempt_that_loads_nothing_does_not_claim_to_begin_at_zero(rank: Rank) -> None:
    script = "model, optimizer = made()\nloss_of(model).backward(); optimizer.step()"
    done = rank.start(HEAD + script, environ={"HPCENV_ATTEMPT": "1"})
    assert done.returncode == 0, done.stderr
    process = rank.metrics(attempt=1).processes[0]
    assert (process.before, process.before_from) == (None, "unknown")


def test_the_training_ends_after_n_steps_with_status_0_and_says_so(rank: Rank) -> None:
    metrics = rank.run(
        """
        model, optimizer = made()
        try:
            while True:
                optimizer.zero_grad(); loss_of(model).backward(); optimizer.step()
        except Exception:
            print("caught")
        finally:
            print("cleaned up")
        """,
        stop_after_steps=3,
    )
    assert rank.stdout == "cleaned up\n"
    assert [step for step, _, _ in used(metrics)] == [1, 2, 3]
    assert metrics.processes[0].reason == "stop-after-steps"
    assert (rank.read_back().steps, rank.read_back().stopped_after) == (3, 3)
    assert [r.at for r in metrics.records if r.kind == "parameters"] == ["end"]


@pytest.mark.long
def test_the_hash_is_sha256_over_the_bytes_of_the_parameters_in_order(rank: Rank) -> None:
    metrics = rank.run(
        """
        model, optimizer = made()
        for n in range(4):
            optimizer.zero_grad(); loss_of(model).backward(); optimizer.step()
            if n == 1:
                print("".join(bytes(p.detach().numpy().tobytes()).hex() for p in model.parameters()))
        """,
        hash_parameters_every=2,
    )
    hashes = [r for r in metrics.records if r.kind == "parameters"]
    assert [(r.step, r.at) for r in hashes] == [(2, "interval"), (4, "interval")]
    assert hashes[0].value == hashlib.sha256(bytes.fromhex(rank.stdout.strip())).hexdigest()
    assert hashes[0].value != hashes[1].value


def test_metrics_of_the_script_are_written_exactly(rank: Rank) -> None:
    metrics = rank.run(
        """
        import numpy
        from hpcenv import training
        training.log_metrics(3, a=1 / 3, b=torch.tensor(0.1, dtype=torch.bfloat16), c=numpy.float32(0.1), d=7, e=1e400)
        """
    )
    found = {r.name: (r.step, r.value, r.dtype) for r in metrics.records}
    assert found == {
        "a": (3, (1 / 3).hex(), "float64"),
        "b": (3, (0.10009765625).hex(), "bfloat16"),
        "c": (3, "0x1.99999a0000000p-4", "float32"),
        "d": (3, "7", "int"),
        "e": (3, "inf", "float64"),
    }


def test_metrics_of_a_script_without_torch_are_there_while_it_runs(rank: Rank) -> None:
    """A rank that is killed has written those of the calls before, but for the last 0.2 s."""
    script = """\
import os, signal, time
from hpcenv import training
for step in (1, 2):
    training.log_metrics(step, accuracy=0.5 * step)
    time.sleep(0.3)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert rank.start(script).returncode == -9
    assert [(r.step, r.name) for r in rank.metrics().records] == [(1, "accuracy"), (2, "accuracy")]


@pytest.mark.long
def test_a_disk_that_takes_nothing_does_not_end_the_training(rank: Rank) -> None:
    (rank.folder / "run").write_text("a file in the place of the folder")
    done = rank.start(HEAD + "model, optimizer = made()\nloss_of(model).backward(); optimizer.step(); print('trained')")
    assert done.returncode == 0 and done.stdout == "trained\n"
    assert "metrics are no longer recorded" in done.stderr


# -- profiles -----------------------------------------------------------------------------

UNSEEDED = """
import random, numpy
numpy.random.seed, random.seed
print(random.random(), numpy.random.rand(), torch.rand(1).item(), len({"a", "b"}))
"""


@pytest.mark.long
def test_seeded_repeats_what_a_script_without_seeds_draws_and_off_does_not(rank: Rank) -> None:
    drawn = {}
    for profile in ("off", "seeded", "bitwise"):
        for number in (1, 2):
            rank.run(UNSEEDED, profile=profile)
            drawn[profile, number] = rank.stdout
    assert drawn["off", 1] != drawn["off", 2]
    assert drawn["seeded", 1] == drawn["seeded", 2] == drawn["bitwise", 1] == drawn["bitwise", 2]
    assert rank.read_back().rank_seed == 7


def test_the_seed_of_a_rank_follows_the_stated_rule() -> None:
    assert [seeds.seed_of_rank(7, rank) for rank in range(3)] == [7, 1000010, 2000013]
    assert seeds.seed_of_rank((1 << 32) - 1, 1) == 1000002
    assert len({seeds.seed_of_rank(seed, rank) for seed in range(100) for rank in range(100)}) == 10_000


@pytest.mark.long
@pytest.mark.parametrize("profile", ["seeded", "bitwise"])
def test_every_switch_of_a_profile_is_read_back_with_its_value(profile: str, rank: Rank) -> None:
    rank.run("model, optimizer = made()\nloss_of(model).backward(); optimizer.step()", profile=profile)
    found = rank.read_back()
    asked = [switch for switch in found.switches if switch.asked is not None]
    assert len(asked) >= 3 and not any(switch.overridden for switch in asked)
    assert all(s.at_start == s.after_first_step == s.at_end == s.asked for s in asked)
    assert (found.applied_by, found.state, found.problems) == ("start-hook", "ended", ())


@pytest.mark.long
def test_off_reads_back_and_sets_nothing(rank: Rank) -> None:
    rank.run("print(torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic)")
    assert rank.stdout == "False False\n"
    assert rank.read_back().applied_by == "" and rank.switch("torch.deterministic-mode").effective == "0"


def test_a_script_that_overrides_a_switch_is_named_with_its_line(rank: Rank) -> None:
    rank.run(
        """
        model, optimizer = made()
        loss_of(model).backward(); optimizer.step()
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = True
        """,
        profile="bitwise",
    )
    for name, value in (("torch.deterministic-mode", "0"), ("torch.cudnn.benchmark", "True")):
        switch = rank.switch(name)
        assert switch.overridden and (switch.after_first_step, switch.at_end) == (switch.asked, value)
        assert re.search(r"script\.py:\d+\Z", switch.changed_at), switch


def test_operations_without_a_deterministic_kernel_are_counted_under_seeded(rank: Rank) -> None:
    """torch has none for these two even on a CPU."""
    script = """
        x = torch.zeros(4)
        for _ in range(3):
            torch.ones(3, 4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]), accumulate=False)
    """
    rank.run(script, profile="seeded")
    counted = {one.operation: one.count for one in rank.read_back().without_deterministic_kernel}
    assert list(counted.values()) == [3], counted
    assert rank.stderr.count("does not have a deterministic implementation") == 1
    done = rank.start(HEAD + textwrap.dedent(script), profile="bitwise")
    assert done.returncode == 1 and "does not have a deterministic implementation" in done.stderr


@pytest.mark.long
def test_a_script_that_hides_warnings_makes_the_count_unsure(rank: Rank) -> None:
    rank.run("import warnings\nwarnings.simplefilter('ignore')", profile="seeded")
    assert "warning filters" in rank.read_back().problems[0]


@pytest.mark.long
def test_seed_everything_chooses_the_seed_in_the_script(rank: Rank) -> None:
    rank.run("from hpcenv import training\nprint(training.seed_everything(5, determinism='bitwise'))")
    found = rank.read_back()
    assert rank.stdout == "5\n" and (found.applied_by, found.seed, found.profile) == ("seed_everything", 5, "bitwise")
    assert rank.switch("torch.deterministic-mode").effective == "2"


# -- the hook itself ----------------------------------------------------------------------


def test_torch_is_not_imported_early_and_not_for_programs_without_it(rank: Rank) -> None:
    done = rank.start("import sys; print('torch' in sys.modules, 'hpcenv' in sys.modules)", profile="bitwise")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False False\n", "")
    assert rank.switch("torch.deterministic-mode").effective is None, "never read: torch was not there"


@pytest.mark.long
@pytest.mark.parametrize("words", [("-m", "package.train"), ("-c", "import package.train"), ("package/train.py",)])
def test_it_runs_however_python_is_started(words: tuple[str, ...], rank: Rank) -> None:
    package = rank.folder / "package"
    package.mkdir()
    (package / "train.py").write_text(HEAD + "model, optimizer = made()\nloss_of(model).backward(); optimizer.step()")
    done = rank.start("", *words, profile="seeded", environ={"PYTHONSAFEPATH": ""})
    assert done.returncode == 0, done.stderr
    assert len(used(rank.metrics())) == 1


def test_the_sitecustomize_of_the_image_still_runs(rank: Rank) -> None:
    own = rank.folder / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys; sys.own = __file__")
    done = rank.start(
        "import sys, sitecustomize; print(sys.own == sitecustomize.__file__)", path=str(own), profile="bitwise"
    )
    assert done.stdout == "True\n", done.stderr
    (own / "sitecustomize.py").write_text("raise ValueError('mine')")
    done = rank.start("print('ran')", path=str(own), profile="bitwise")
    assert done.stdout == "ran\n" and "ValueError: mine" in done.stderr


def test_a_hook_that_fails_ends_the_process_where_the_profile_demands_it(rank: Rank) -> None:
    broken = rank.hook / "_hpcenv_start_hook" / "session.py"
    broken.write_text("raise ValueError('broken')")
    done = rank.start("print('ran')", profile="bitwise")
    assert (done.returncode, done.stdout) == (1, "")
    assert "it could not apply what the run asks for" in done.stderr
    done = rank.start("print('ran')", profile="off")
    assert (done.returncode, done.stdout) == (0, "ran\n") and "nothing is recorded" in done.stderr
    done = rank.start("print('ran')", profile="off", stop_after_steps=3)
    assert done.returncode == 1


@pytest.mark.long
def test_processes_that_a_rank_starts_get_the_switches_and_write_nothing(rank: Rank) -> None:
    metrics = rank.run(
        """
        import multiprocessing, sys
        from torch.utils.data import DataLoader, Dataset
        class Data(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                model, optimizer = made()
                loss_of(model).backward(); optimizer.step()
                return torch.get_deterministic_debug_mode()
        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                loader = DataLoader(Data(), batch_size=4, num_workers=1, multiprocessing_context=method)
                print(method, *[batch.tolist() for batch in loader])
            model, optimizer = made()
            loss_of(model).backward(); optimizer.step()
        """,
        profile="bitwise",
    )
    assert rank.stdout.splitlines() == [f"{m} [2, 2, 2, 2]" for m in ("fork", "spawn", "forkserver")], rank.stderr
    assert len(used(metrics)) == 1 and len(metrics.processes) == 1
    assert rank.read_back().steps == 1


def test_the_table_gives_variables_only_where_they_are_read() -> None:
    nothing = switches.variables_of("bitwise", seed=3, nccl=None, gpus=False)
    assert nothing == {"PYTHONHASHSEED": "3"}
    old = switches.variables_of("bitwise", seed=3, nccl=(2, 21), gpus=True)
    new = switches.variables_of("bitwise", seed=3, nccl=(2, 27), gpus=True)
    assert "NCCL_ALGO" not in old and new["NCCL_ALGO"] == "allreduce:ring"
    assert old["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and old["NCCL_NVLS_ENABLE"] == "0"
    assert set(switches.variables_of("seeded", seed=3, nccl=(2, 27), gpus=True)) == {
        "PYTHONHASHSEED",
        "CUBLAS_WORKSPACE_CONFIG",
    }
    assert switches.variables_of("off", seed=3, nccl=(2, 27), gpus=True) == {}


# -- CPUs near the GPU --------------------------------------------------------------------

SHOWS_CPUS = """
import os, subprocess, sys
child = subprocess.run([sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"], capture_output=True)
print(sorted(os.sched_getaffinity(0)), child.stdout.decode().strip())
import torch
"""


def test_a_rank_runs_on_the_cpus_near_its_gpu_and_so_do_its_processes(rank: Rank) -> None:
    last = max(os.sched_getaffinity(0))
    done = rank.start(SHOWS_CPUS, cpus=["0-99999", f"{last}"], environ={"LOCAL_RANK": "1"})
    assert done.stdout.strip() == f"[{last}] [{last}]", done.stderr
    assert rank.read_back().cpus == str(last)


def test_cpus_that_slurm_did_not_give_are_left_out_or_named(rank: Rank) -> None:
    own = sorted(os.sched_getaffinity(0))
    done = rank.start(SHOWS_CPUS, cpus=[f"{own[0]},9000-9007"])
    assert done.stdout.startswith(f"[{own[0]}] ")
    done = rank.start(SHOWS_CPUS, cpus=["9000-9007"])
    assert done.returncode == 0
    assert done.stdout.startswith(f"{own} ")
    assert "rank 0 is not bound to CPUs 9000-9007 near its GPU: this process may use none of them" in done.stderr
    assert rank.read_back().cpus == ""
    assert "this process may use none of them" in rank.read_back().problems[0]


def test_a_rank_without_a_binding_keeps_its_cpus_and_one_without_records_is_bound(rank: Rank) -> None:
    own = sorted(os.sched_getaffinity(0))
    assert rank.start(SHOWS_CPUS, cpus=["", f"{own[0]}"]).stdout.startswith(f"{own} ")
    done = rank.start(SHOWS_CPUS, cpus=[f"{own[0]}"], record=False)
    assert done.stdout.startswith(f"[{own[0]}] ")


# -- the device ---------------------------------------------------------------------------


@pytest.mark.parametrize("record", [True, False])
def test_the_device_of_the_first_backward_pass_is_recorded_once(rank: Rank, record: bool) -> None:
    script = HEAD + "model, optimizer = made()\nfor _ in range(2): loss_of(model).backward(); optimizer.step()\n"
    done = rank.start(script, gpus=True, record=record, environ={"HPCENV_NODE": "n1"})
    assert done.returncode == 0, done.stderr
    found = rank.read_back()
    assert (found.node, found.device, found.gpu_uuid, found.problems) == ("n1", "cpu", "", ())


def test_without_gpus_or_without_a_backward_pass_no_device_is_recorded(rank: Rank) -> None:
    assert rank.start(HEAD, gpus=True, record=False, environ={"HPCENV_NODE": "n1"}).returncode == 0
    assert (rank.read_back().node, rank.read_back().device) == ("n1", "")
    rank.run("model, optimizer = made(); loss_of(model).backward(); optimizer.step()")
    assert (rank.read_back().node, rank.read_back().device) == ("", "")


def test_the_gpu_of_a_tensor_is_described(tmp_path: Path) -> None:
    from types import SimpleNamespace as Names

    from hpcenv.incontainer.start_hook import device

    properties = Names(name="NVIDIA H100", uuid="a-b", pci_domain_id=0, pci_bus_id=27, pci_device_id=0)
    assert device.identity(properties) == {"model": "NVIDIA H100", "uuid": "GPU-a-b", "bus": "0000:1b:00.0"}
    assert device.identity(Names(name="AMD", uuid="6e0a")) == {"model": "AMD", "uuid": "6e0a", "bus": ""}


def test_a_seed_alone_seeds_the_rank_and_leaves_the_kernels(rank: Rank) -> None:
    drawn = []
    for _ in range(2):
        rank.run(UNSEEDED, seeds=True)
        drawn.append(rank.stdout)
    assert drawn[0] == drawn[1]
    found = rank.read_back()
    assert (found.profile, found.applied_by, found.seed, found.rank_seed) == ("off", "start-hook", 7, 7)
    assert rank.switch("torch.deterministic-mode").effective == "0"


# -- samples of a step --------------------------------------------------------------------

LOADER = """
from torch.utils.data import DataLoader, TensorDataset
model, optimizer = made()
data = TensorDataset(torch.ones(40, 4))
"""


SIMPLE = """
for (x,) in DataLoader(data, batch_size=8):
    model(x).sum().backward(); optimizer.step()
"""
CALLS = """
for n, (x,) in enumerate(DataLoader(data, batch_size=2, num_workers=1)):
    model(x).sum().backward()
    if n % 4 == 3: optimizer.step()
"""
AHEAD = """
batches = iter(DataLoader(data, batch_size=5)); ahead = next(batches)
for after in batches:
    model(ahead[0]).sum().backward(); optimizer.step(); ahead = after
    with torch.no_grad(): [model(x) for (x,) in DataLoader(data, batch_size=4)]
"""
NO_LOADER = """
for _ in range(3): loss_of(model).backward(); optimizer.step()
"""
NO_SIZE = """
for (x,) in DataLoader(data, batch_size=None): loss_of(model).backward(); optimizer.step()
"""


@pytest.mark.parametrize(
    ("script", "samples"),
    [
        (AHEAD, 5),
        (NO_SIZE, None),
        pytest.param(SIMPLE, 8, marks=pytest.mark.long),
        pytest.param(CALLS, 8, marks=pytest.mark.long),
        pytest.param(NO_LOADER, None, marks=pytest.mark.long),
    ],
)
def test_the_samples_of_a_step_are_those_that_the_script_took_from_its_loaders(
    rank: Rank, script: str, samples: int | None
) -> None:
    rank.run(LOADER + script)
    assert rank.read_back().samples == samples


# -- ranks that do not see each other ------------------------------------------------------

JOINED = "torch.distributed.init_process_group('gloo')\nrank = torch.distributed.get_rank()\n"
ALONE = "model, optimizer = made()\nfor n in range(3): loss_of(model).backward(); optimizer.step()\n"
TOGETHER = "model, optimizer = made()\nmodel = nn.parallel.DistributedDataParallel(model)\n"
LATE = """
model, optimizer = made()
for n in range(4):
    loss_of(model).backward(); optimizer.step()
for parameter in model.parameters(): torch.distributed.all_reduce(parameter.data)
"""
STAGES = """
model, optimizer = made()
if rank == 0:
    out = model(torch.ones(2, 4)); torch.distributed.send(out.detach(), 1); out.backward(torch.ones(2, 1))
else:
    got = torch.empty(2, 1); torch.distributed.recv(got, 0); (model.weight.sum() * got.sum()).backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("script", "apart"),
    [
        (ALONE, [True, True]),
        # As Accelerate 1.x on CPUs: a group is open, and no rank uses it.
        (JOINED + ALONE + "torch.distributed.destroy_process_group()\n", [True, True]),
        (JOINED + TOGETHER + "loss_of(model).backward(); optimizer.step()\n", [False, False]),
        (JOINED + LATE, [False, False]),
        # Gloo counts what one rank sends to another. With NCCL, the first stage of a pipeline has no own loss.
        (JOINED + STAGES, [False, False]),
    ],
    ids=["no group", "an unused group", "ddp", "at the end", "pipeline"],
)
def test_ranks_that_trained_by_themselves_are_seen(script: str, apart: list[bool], rank: Rank) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def start(number: int) -> int:
        done = rank.start(HEAD + script, environ={**place, "RANK": str(number), "LOCAL_RANK": str(number)})
        assert done.returncode == 0, done.stderr
        return number

    with ThreadPoolExecutor(2) as pool:
        assert [rank.read_back(number).apart for number in pool.map(start, range(2))] == apart
