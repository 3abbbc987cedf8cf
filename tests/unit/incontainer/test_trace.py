"""The trace of chosen steps in real processes with real torch: what it sees, and that it changes no result."""

from __future__ import annotations

import hashlib
import os
import textwrap
from pathlib import Path

import pytest

from hpcenv.records.trace import RankTrace, TracedOperation
from hpcenv.reproduction.operations import common_steps, compare_traces
from tests.hooked_rank import HEAD, Rank, made_in

pytestmark = pytest.mark.torch

NET = """
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.LayerNorm(8)
        self.block = nn.Sequential(nn.Linear(8, 33), nn.SiLU(), nn.Dropout(0.1))
        self.head = nn.Linear(33, 5)
    def forward(self, x):
        return self.head(self.block(self.norm(self.conv(x).mean((2, 3)))))
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(16, 3, 12, 12), torch.randint(5, (16,))
for _ in range(3):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return made_in(tmp_path)


def traced(rank: Rank, script: str, **how: object) -> RankTrace:
    done = rank.start(textwrap.dedent(script), **{"trace_steps": [1, 1], **how})  # type: ignore[arg-type]
    assert done.returncode == 0, done.stderr
    rank.stdout, rank.stderr = done.stdout, done.stderr
    found = rank.trace()
    assert found.problems == ()
    return found


def operation(trace: RankTrace, name: str, step: int = 1) -> TracedOperation:
    return next(one for one in trace.steps[step].operations if one.name.split(".")[1] == name)


def test_operations_have_their_phase_module_line_and_bytes(rank: Rank) -> None:
    trace = traced(
        rank,
        NET + "print(x.numpy().tobytes().hex())",
        trace_steps=[1, 2],
    )
    assert (sorted(trace.steps), trace.notes) == ([1, 2], ())
    first = operation(trace, "convolution")
    assert (first.phase, first.module, first.module_class) == ("forward", "Net.conv", "Conv2d")
    assert first.at.endswith("script.py:13")
    expected = hashlib.sha256(bytes.fromhex(rank.stdout.strip())).hexdigest()[:32]
    assert [(one.name, one.type) for one in first.inputs] == [
        ("input", "float32[16, 3, 12, 12]"), ("weight", "float32[8, 3, 3, 3]"), ("bias", "float32[8]"),
    ]  # fmt: skip
    assert first.inputs[0].hash == expected
    backward = operation(trace, "convolution_backward")
    assert (backward.phase, backward.module, backward.at) == ("backward", "Net.conv", first.at)
    assert operation(trace, "uniform_").phase == "setup" and operation(trace, "_foreach_mul_").phase == "gradients"
    optimizer = [one for one in trace.steps[2].operations if one.phase == "optimizer"]
    assert optimizer and all(one.outputs for one in optimizer)


def test_losses_and_weights_are_those_of_a_run_without_the_trace(rank: Rank) -> None:
    plain = rank.run(NET, hash_parameters_every=1)
    values = [(one.kind, one.step, one.value) for one in plain.records]
    rank.folder.joinpath("run").rename(rank.folder / "plain")
    with_trace = rank.run(NET, hash_parameters_every=1, trace_steps=[1, 3])
    assert [(one.kind, one.step, one.value) for one in with_trace.records] == values
    assert sorted(rank.trace().steps) == [1, 2, 3]


@pytest.mark.long
def test_the_hash_of_the_parameters_and_of_the_loss_are_no_operations_of_the_script(rank: Rank) -> None:
    with_records = traced(rank, NET, hash_parameters_every=1, trace_steps=[1, 2])
    rank.folder.joinpath("run").rename(rank.folder / "first")
    without = traced(rank, NET, record=False, trace_steps=[1, 2])
    names = [[one.name for one in trace.steps[2].operations] for trace in (with_records, without)]
    assert names[0] == names[1]
    assert compare_traces({0: with_records}, {0: without}, [1, 2]).first is None


CHANGES = {
    "MKL_CBWR": ("COMPATIBLE", ("addmm",), "Net.block.0"),
    "ONEDNN_MAX_CPU_ISA": ("SSE41", ("convolution",), "Net.conv"),
    "ATEN_CPU_CAPABILITY": ("default", ("uniform_", "normal_", "randn", "native_layer_norm"), None),
}


@pytest.mark.parametrize(
    "variable", ["MKL_CBWR", *(pytest.param(one, marks=pytest.mark.long) for one in CHANGES if one != "MKL_CBWR")]
)
def test_a_changed_kernel_is_named_with_its_module(variable: str, rank: Rank) -> None:
    """Which operation changes is the library's matter: of each setting, those that were seen on several CPUs."""
    value, names, module = CHANGES[variable]
    reference = traced(rank, NET)
    rank.folder.joinpath("run").rename(rank.folder / "reference")
    other = traced(rank, NET, environ={variable: value})
    compared = compare_traces({0: reference}, {0: other}, common_steps({0: reference}, {0: other}))
    if compared.first is None:
        pytest.skip(f"NOT TESTED: {variable}={value} changes no operation of this network on this CPU")
    first = compared.first
    assert (first.kind, first.step, first.rank) == ("kernel", 1, 0)
    assert first.name.split(".")[1] in names
    assert module is None or first.module == module
    assert [one.role for one in first.values] == ["output"]


@pytest.mark.long
def test_random_numbers_from_another_state_are_told_from_another_kernel(rank: Rank) -> None:
    script = "draw = torch.nn.functional.dropout(torch.ones(64), 0.5)\nmodel, optimizer = made()\n"
    script += "loss_of(model).backward(); optimizer.step()"
    reference = traced(rank, HEAD + "torch.manual_seed(3)\n" + script)
    rank.folder.joinpath("run").rename(rank.folder / "reference")
    other = traced(rank, HEAD + "torch.manual_seed(4)\n" + script)
    first = compare_traces({0: reference}, {0: other}, [1]).first
    assert first is not None and (first.kind, first.name) == ("random", "aten.bernoulli_.float")
    assert first.values[0].name == "generator"


@pytest.mark.long
def test_other_data_are_a_difference_of_inputs_that_no_operation_wrote(rank: Rank) -> None:
    script = "model, optimizer = made()\nimport array\n"
    script += "x = torch.frombuffer(bytearray(array.array('f', [1.0, %s, 1.0, 1.0]).tobytes()), dtype=torch.float32)\n"
    script += "(model(x)).sum().backward(); optimizer.step()"
    reference = traced(rank, HEAD + script % "2.0")
    rank.folder.joinpath("run").rename(rank.folder / "reference")
    other = traced(rank, HEAD + script % "3.0")
    first = compare_traces({0: reference}, {0: other}, [1]).first
    assert first is not None and (first.kind, first.phase, first.module_class) == ("inputs", "forward", "Linear")
    assert [(one.role, one.written_by) for one in first.values] == [("input", ""), ("output", "")]


# What a training may do around its steps while a trace is on: (script after HEAD, steps that are traced whole).
CASES = {
    "two optimizers": (
        (
            "a, b = torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)\n"
            "for _ in range(3): loss_of(model).backward(); a.step(); b.step()"
        ),
        [1, 2],
    ),
    "accumulation": (
        "for n in range(4): loss_of(model, n + 1).backward(); n % 2 and (optimizer.step(), optimizer.zero_grad())",
        [1, 2],
    ),
    "a mode of the script around a step": (
        (
            "from torch.utils.flop_counter import FlopCounterMode\n"
            "loss_of(model).backward()\n"
            "with FlopCounterMode(display=False): optimizer.step(); optimizer.zero_grad()\n"
            "loss_of(model).backward(); optimizer.step(); loss_of(model).backward(); optimizer.step()"
        ),
        [1, 2],
    ),
    "a DataLoader with workers": (
        (
            "data = torch.utils.data.TensorDataset(torch.ones(8, 4))\n"
            "for (x,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=1):\n"
            "    model(x).sum().backward(); optimizer.step()"
        ),
        [1, 2],
    ),
    "recomputed activations": (
        (
            "from torch.utils.checkpoint import checkpoint\n"
            "for _ in range(2): checkpoint(model, torch.ones(2, 4), use_reentrant=False).sum().backward(); optimizer.step()"
        ),
        [1, 2],
    ),
    "a compiled function": (
        "step = torch.compile(loss_of, backend='aot_eager')\nfor _ in range(2): step(model).backward(); optimizer.step()",
        [1, 2],
    ),
    "a training that ends before the last traced step": ("loss_of(model).backward(); optimizer.step()", [1]),
    "an exception": ("loss_of(model).backward(); optimizer.step()\ntry: model(torch.ones(3))\nexcept RuntimeError: pass", [1]),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("script", "steps"), CASES.values(), ids=CASES)
def test_it_stays_out_of_the_way(script: str, steps: list[int], rank: Rank) -> None:
    script = HEAD + "model, optimizer = made()\n" + script + "\nprint([p.tolist() for p in model.parameters()])"
    done = rank.start(script)
    assert done.returncode == 0, done.stderr
    trace = traced(rank, script, trace_steps=[1, 2])
    assert rank.stdout == done.stdout
    assert (sorted(trace.steps), "Traceback" in rank.stderr) == (steps, False)
    assert all("recorded" not in note for note in trace.notes), trace.notes
    assert bool([note for note in trace.notes if "compile" in note]) == ("compile(" in script)


@pytest.mark.long
def test_only_the_wanted_steps_are_traced_and_the_count_goes_on_after_a_checkpoint(rank: Rank) -> None:
    script = """
    from hpcenv import training
    model, optimizer = made()
    step = int(training.resume_path().stem[5:]) if training.resume_path() else 0
    while step < 4:
        loss_of(model).backward(); optimizer.step(); step += 1
    """
    assert sorted(traced(rank, HEAD + textwrap.dedent(script), trace_steps=[3, 3]).steps) == [3]
    folder = rank.folder / "checkpoints"
    folder.mkdir()
    (folder / "step-00000002.pt").touch()
    for first in (1, 3):
        rank.folder.joinpath("run").rename(rank.folder / f"before-{first}")
        environ = {"HPCENV_CHECKPOINTS": str(folder)}
        trace = traced(rank, HEAD + textwrap.dedent(script), trace_steps=[first, 3], environ=environ)
        assert {number: step.resumed for number, step in trace.steps.items()} == {3: 2}


@pytest.mark.long
def test_the_limit_is_told_and_the_training_goes_on(rank: Rank) -> None:
    file = rank.hook / "_hpcenv_start_hook" / "trace.py"
    text = file.read_text()
    assert "MOST_BYTES = 32 << 20" in text
    file.write_text(text.replace("MOST_BYTES = 32 << 20", "MOST_BYTES = 20000"))
    done = rank.start(NET + "print('trained')", trace_steps=[1, 3])
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "which is its limit: it ends here" in done.stderr
    found = rank.trace()
    assert found.steps == {} and "reached its limit" in found.problems[0]
    assert os.path.getsize(rank.folder / "run/trace/attempt-0/rank-0.jsonl") < 24000


@pytest.mark.long
def test_a_trace_that_cannot_be_written_does_not_end_the_training(rank: Rank) -> None:
    (rank.folder / "run").write_text("a file in the place of the folder")
    done = rank.start(NET + "print('trained')", trace_steps=[1, 3])
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "the trace ends here" in done.stderr


RANKS = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.full((4, 8), 1.0 + dist.get_rank())
if %r and dist.get_rank() == 1:
    model.module[1].register_forward_hook(lambda module, inputs, result: result * 1.5)
for _ in range(2):
    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
send = torch.full((4,), float(dist.get_rank()))
request = dist.isend(send, 1 - dist.get_rank())
dist.recv(torch.empty(4), 1 - dist.get_rank())
request.wait()
del model
dist.destroy_process_group()
"""


def two_ranks(rank: Rank, script: str, port: int) -> dict[int, RankTrace]:
    import threading

    results = {}

    def go(number: int) -> None:
        environ = {
            "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        results[number] = rank.start(script, trace_steps=[1, 2], environ=environ)

    threads = [threading.Thread(target=go, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.returncode for one in results.values()] == [0, 0], [one.stderr[-2000:] for one in results.values()]
    return {number: rank.trace(number) for number in (0, 1)}


@pytest.mark.long
def test_collectives_are_hashed_and_the_rank_with_the_cause_is_named(rank: Rank, free_port: int) -> None:
    reference = two_ranks(rank, RANKS % False, free_port)
    reduced = [operation(trace, "allreduce_", 2) for trace in reference.values()]
    assert reduced[0].inputs[0].hash != reduced[1].inputs[0].hash
    assert reduced[0].outputs[0].hash == reduced[1].outputs[0].hash
    rank.folder.joinpath("run").rename(rank.folder / "reference")
    other = two_ranks(rank, RANKS % True, free_port)
    compared = compare_traces(reference, other, common_steps(reference, other))
    assert compared.first is not None and (compared.first.rank, compared.first.kind) == (1, "sequence")
    assert compared.first.other_name == "aten.mul.Tensor"
    of_rank_0 = next(one for one in compared.of_ranks if one.rank == 0)
    assert of_rank_0.kind == "collective" and of_rank_0.name == "c10d.allreduce_.default"


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
