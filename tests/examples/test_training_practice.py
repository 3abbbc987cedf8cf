"""The examples of training practice: each is trained, resumed and compared, with real ranks on CPU."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpcenv.hub.access import find_access
from hpcenv.hub.fetch import fetch
from hpcenv.image.store.store_folder import open_store
from hpcenv.project.hub_reference import parse_locked
from hpcenv.project.spec import DataTable
from hpcenv.project.store_config import StorePlace
from hpcenv.records.run_folder import RunFolder
from hpcenv.submission import hub_cache
from tests.hub_server import COMMIT, Hub

ROOT = Path(__file__).resolve().parents[2]
TORCH = os.environ.get("HPCENV_TEST_TORCH_PYTHON", sys.executable)
# One that also has what tests/packages/frameworks.in names; `scripts/testbed frameworks` makes one.
FRAMEWORKS = os.environ.get("HPCENV_TEST_FRAMEWORKS_PYTHON", TORCH)
LIMIT_S = 300
RANKS = 3  # two ranks' gradients add up to the same bits in any order, three ranks' need not
pytestmark = pytest.mark.torch


def needs(python, *modules):
    code = ";".join(f"import {name}" for name in modules)
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, env=environment(ROOT))
    if done.returncode != 0:
        why = (done.stderr.splitlines() or ["no message"])[-1]
        pytest.skip(
            f"NOT RUN: {python} cannot import {', '.join(modules)} ({why}); HPCENV_TEST_FRAMEWORKS_PYTHON names one"
        )


def environment(checkpoints):
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    # As in a run of hpcenv: a folder for checkpoints, and hpcenv.training.
    own = {"HPCENV_CHECKPOINTS": str(checkpoints), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return {**kept, **own, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def train(script, checkpoints, ranks, *args, python=TORCH, variables=None):
    """Train 6 steps with a checkpoint after 3; return the loss of each step as it was printed, and stderr."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    words = (str(ROOT / "examples" / script), "--steps", "6", "--save-every", "3", "--log-every", "1", *args)
    process = subprocess.Popen(
        [python, *launcher, *words], env=environment(checkpoints) | (variables or {}), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, out + err
    return dict(re.findall(r"^step (\d+)  loss (\S+)", out, re.MULTILINE)), err


def after_three(whole, folder):
    """A run that was stopped after step 3."""
    folder.mkdir()
    for path in whole.glob("step-00000003*"):
        shutil.copytree(path, folder / path.name) if path.is_dir() else shutil.copy2(path, folder)
    return folder


def resumes_bit_for_bit(tmp_path, script, ranks, *args, python=TORCH):
    """Train, resume after half of it, and compare the loss of each step; each depends on all weights before."""
    losses, _ = train(script, tmp_path / "whole", ranks, *args, python=python)
    assert sorted(losses) == ["1", "2", "3", "4", "5", "6"]
    assert float(losses["6"]) < float(losses["1"])
    assert (tmp_path / "whole" / "step-00000003.json").is_file()
    resumed, err = train(script, after_three(tmp_path / "whole", tmp_path / "half"), ranks, *args, python=python)
    assert resumed == {step: losses[step] for step in ("4", "5", "6")}
    assert "hpcenv: step-" not in err
    return losses


def test_techniques_together_and_the_same_batch_on_fewer_ranks(tmp_path):
    needs(TORCH, "torch", "numpy")
    flags = ("--batch-size", "4", "--precision", "bfloat16", "--recompute")
    losses = resumes_bit_for_bit(tmp_path, "techniques.py", 2, *flags, "--accumulate", "2")
    # One rank with twice as many batches: the same global batch, so the same losses but for rounding.
    one = after_three(tmp_path / "whole", tmp_path / "one")
    resumed, err = train("techniques.py", one, 1, *flags, "--accumulate", "4")
    assert "hpcenv: step-00000003.pt: the world size was 2 and is 1 now" in err
    assert "global batch" not in err
    assert {step: pytest.approx(float(losses[step]), abs=0.02) for step in resumed} == {
        step: float(loss) for step, loss in resumed.items()
    }


@pytest.mark.long
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "flags", [(), ("--recompute",), ("--accumulate", "3")], ids=["plain", "recompute", "accumulate"]
)
def test_each_technique(tmp_path, precision, flags):
    needs(TORCH, "torch", "numpy")
    resumes_bit_for_bit(tmp_path, "techniques.py", RANKS, "--batch-size", "2", "--precision", precision, *flags)


@pytest.mark.long
def test_recomputed_activations_change_no_bit(tmp_path):
    needs(TORCH, "torch", "numpy")
    kept, _ = train("techniques.py", tmp_path / "kept", 2, "--batch-size", "2")
    recomputed, _ = train("techniques.py", tmp_path / "recomputed", 2, "--batch-size", "2", "--recompute")
    assert kept == recomputed


@pytest.mark.long
def test_fsdp2_resumes_also_on_another_number_of_ranks(tmp_path):
    needs(TORCH, "torch.distributed.fsdp", "numpy")
    losses = resumes_bit_for_bit(tmp_path, "fsdp2.py", RANKS)
    for ranks in (1, 2):
        other = after_three(tmp_path / "whole", tmp_path / f"on-{ranks}")
        resumed, err = train("fsdp2.py", other, ranks)
        assert f"hpcenv: step-00000003: the world size was {RANKS} and is {ranks} now" in err
        assert {step: pytest.approx(float(losses[step]), abs=1e-3) for step in resumed} == {
            step: float(loss) for step, loss in resumed.items()
        }


@pytest.mark.long
@pytest.mark.parametrize(
    "flags", [(), ("--accumulate", "2"), ("--precision", "bf16")], ids=["plain", "accumulate", "bf16"]
)
def test_accelerate(tmp_path, flags):
    needs(FRAMEWORKS, "torch", "accelerate")
    resumes_bit_for_bit(tmp_path, "accelerate_train.py", RANKS, "--batch-size", "2", *flags, python=FRAMEWORKS)


@pytest.mark.long
@pytest.mark.parametrize(
    "flags", [(), ("--accumulate", "2"), ("--precision", "bf16-mixed")], ids=["plain", "accumulate", "bf16"]
)
def test_lightning(tmp_path, flags):
    needs(FRAMEWORKS, "torch", "lightning")
    resumes_bit_for_bit(tmp_path, "lightning_train.py", RANKS, "--batch-size", "2", *flags, python=FRAMEWORKS)


@pytest.mark.parametrize("script", ["fsdp2.py", "tensor_parallel.py", "pipeline.py"])
def test_what_needs_torch_only_starts(tmp_path, script):
    """The short one of the long tests below."""
    needs(TORCH, "torch", "numpy")
    losses, _ = train(script, tmp_path / "none", 2, "--steps", "2")
    assert sorted(losses) == ["1", "2"]


@pytest.mark.long
def test_tensor_parallel_resumes_also_with_other_groups(tmp_path):
    needs(TORCH, "torch.distributed.tensor.parallel", "numpy")
    losses = resumes_bit_for_bit(tmp_path, "tensor_parallel.py", 4, "--tensor", "2")
    other = after_three(tmp_path / "whole", tmp_path / "one-group")
    resumed, err = train("tensor_parallel.py", other, 2, "--tensor", "2")
    assert "hpcenv: step-00000003: the world size was 4 and is 2 now" in err
    assert {step: pytest.approx(float(losses[step]), abs=1e-3) for step in resumed} == {
        step: float(loss) for step, loss in resumed.items()
    }


@pytest.mark.long
def test_a_pipeline_resumes_also_with_other_stages(tmp_path):
    needs(TORCH, "torch.distributed.pipelining", "numpy")
    losses = resumes_bit_for_bit(tmp_path, "pipeline.py", 4)
    other = after_three(tmp_path / "whole", tmp_path / "two-stages")
    resumed, err = train("pipeline.py", other, 2)
    assert "hpcenv: step-00000003: the world size was 4 and is 2 now" in err
    assert {step: pytest.approx(float(losses[step]), abs=1e-3) for step in resumed} == {
        step: float(loss) for step, loss in resumed.items()
    }


@pytest.mark.long
def test_many_small_files_in_shards(tmp_path):
    needs(FRAMEWORKS, "torch", "webdataset")
    argv = [FRAMEWORKS, str(ROOT / "examples" / "shards.py"), "--pack"]
    for folder in ("first", "second"):
        subprocess.run([*argv, str(tmp_path / folder)], check=True, timeout=LIMIT_S, env=environment(ROOT))
    first, second = (sorted((tmp_path / folder).iterdir()) for folder in ("first", "second"))
    assert [path.name for path in first] == [f"play-{number:04d}.tar" for number in range(16)]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.long
def test_shards_resume_in_a_later_epoch_too(tmp_path):
    needs(FRAMEWORKS, "torch", "webdataset")
    # The play has about 2,600 excerpts: three ranks read all of them in two steps.
    words = ("--batch-size", "300")
    resumes_bit_for_bit(tmp_path, "shards.py", RANKS, *words, python=FRAMEWORKS)


@pytest.mark.long
@pytest.mark.parametrize("given", [False, True], ids=["random weights", "a folder"])
def test_finetune(tmp_path, given):
    needs(FRAMEWORKS, "torch", "transformers")
    words = ("--batch-size", "2")
    if given:
        subprocess.run([FRAMEWORKS, "-c", SMALL_MODEL, str(tmp_path / "model")], check=True, env=environment(ROOT))
        words += ("--model", str(tmp_path / "model"), "--train-blocks", "1", "--length", "16")
    resumes_bit_for_bit(tmp_path, "finetune.py", RANKS, *words, python=FRAMEWORKS)


@pytest.mark.long
def test_finetune_reads_a_model_that_the_hub_table_names(tmp_path):
    needs(FRAMEWORKS, "torch", "transformers")
    subprocess.run([FRAMEWORKS, "-c", SMALL_MODEL, str(tmp_path / "model")], check=True, env=environment(ROOT))
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    hub, wanted, place = Hub(files, repository="lab/small"), f"lab/small@{COMMIT}", StorePlace(root=tmp_path / "store")
    fetch(parse_locked(wanted), (), find_access(hub.environ()), open_store(place.root, create=True))
    hub.close()
    # What the run has: the fetched files in its folder, and variables that name them. The hub is gone.
    cache = hub_cache.plan_cache([hub_cache.find_fetched(DataTable(hub=wanted), place)])
    hub_cache.write(cache, RunFolder(tmp_path / "run"))
    variables = {one.name: one.value for one in hub_cache.variables(cache, tmp_path / "run")}
    words = ("--model", "lab/small", "--train-blocks", "1", "--length", "16", "--batch-size", "2")
    losses, _ = train("finetune.py", tmp_path / "whole", 2, *words, python=FRAMEWORKS, variables=variables)
    assert float(losses["6"]) < float(losses["1"])
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(AssertionError, match="find them in the cached files"):
        train("finetune.py", tmp_path / "none", 1, *words, python=FRAMEWORKS, variables=variables)


# A Llama with random weights, and a tokenizer of characters, as `save_pretrained` writes them.
SMALL_MODEL = r"""
import sys
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
letters = {chr(number): number for number in range(128)}
tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(sys.argv[1])
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes)).save_pretrained(sys.argv[1])
"""


def train_with_jax(checkpoints, ranks):
    """The ranks as tasks of srun would be: each with its numbers, and one place to meet."""
    port = free_port()
    words = [FRAMEWORKS, str(ROOT / "examples" / "jax_train.py"), "--steps", "6", "--save-every", "3"]
    processes = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environ = {**environment(checkpoints), **place, **meeting}
        processes.append(
            subprocess.Popen(
                [*words, "--log-every", "1"], env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    try:
        said = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, said
    return dict(re.findall(r"^step (\d+)  loss (\S+)", said[0][0], re.MULTILINE))


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.long
def test_jax_resumes_and_the_ranks_add_up_their_gradients(tmp_path):
    needs(FRAMEWORKS, "jax", "numpy")
    losses = train_with_jax(tmp_path / "whole", 2)
    assert sorted(losses) == ["1", "2", "3", "4", "5", "6"]
    assert float(losses["6"]) < float(losses["1"])
    assert (tmp_path / "whole" / "step-00000003.json").is_file()
    resumed = train_with_jax(after_three(tmp_path / "whole", tmp_path / "half"), 2)
    assert resumed == {step: losses[step] for step in ("4", "5", "6")}
    # One rank has the same global batch.
    one = train_with_jax(tmp_path / "one", 1)
    assert {step: float(loss) for step, loss in one.items()} == {
        step: pytest.approx(float(loss), abs=1e-4) for step, loss in losses.items()
    }


@pytest.mark.long
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_deepspeed_zero(tmp_path, stage):
    needs(FRAMEWORKS, "torch", "deepspeed")
    resumes_bit_for_bit(tmp_path, "deepspeed_zero.py", RANKS, "--batch-size", "2", "--stage", stage, python=FRAMEWORKS)
