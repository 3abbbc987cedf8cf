"""A small model of characters with JAX: each rank has its part of the batch, and all ranks add up their gradients.

Runs on: every rank of a job, as a task of srun, or alone. Needs jax (tried with 0.10) and numpy; torch is not used.

    hpcenv submit examples/jax_train.py --launcher srun --nodes 2 --gpus 8

The ranks meet at MASTER_ADDR and MASTER_PORT, as hpcenv sets them. Under torchrun that port is torch's own, so the
launcher is srun. A project without torch needs a line in hpcenv.toml: "torch.version" = "info" under [policy].
"""

import argparse
import contextlib
import importlib.util
import os
import sys
import time
from pathlib import Path

# The number of threads decides how sums are rounded.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
import jax
import numpy as np
from jax import numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

try:
    from hpcenv import training
except ImportError:  # without hpcenv it trains, and saves nothing
    training = None

SHIPPED_TEXT = Path(__file__).resolve().parent / "data" / "as_you_like_it.txt"
CONTEXT, WIDTH = 16, 64


def main():
    args = parse_arguments()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        local = int(os.environ["LOCAL_RANK"])
        meeting = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        # On a node with GPUs each rank takes its own one; on CPU this is ignored.
        jax.distributed.initialize(meeting, ranks, rank, local_device_ids=[local] if has_gpus() else None)
    train(args, rank, ranks)
    if ranks > 1:
        jax.distributed.shutdown()


def has_gpus():
    """Whether JAX has its plug-in and the job GPUs: asked without starting a backend, which must come later."""
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    return os.path.exists("/dev/nvidiactl") and any(importlib.util.find_spec(name) for name in plugins)


def train(args, rank, ranks):
    text = SHIPPED_TEXT.read_text(encoding="utf-8")
    vocabulary = sorted(set(text))
    numbers = np.array([vocabulary.index(character) for character in text], dtype=np.int32)
    if args.global_batch % ranks:
        sys.exit(f"jax_train.py: --global-batch {args.global_batch} is not a multiple of {ranks} ranks")
    mesh = Mesh(np.array(jax.devices()), ("data",))
    # Each rank has the whole state, and its part of the batch.
    whole, part = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    state, step = resume(start(args, len(vocabulary)), rank, ranks, args.global_batch)
    state = jax.tree.map(lambda array: jax.make_array_from_process_local_data(whole, array), state)
    advance = jax.jit(take_step, static_argnums=2, donate_argnums=0, out_shardings=(whole, whole))
    stop = False
    while step < args.steps and not stop:
        step += 1
        batch = jax.make_array_from_process_local_data(part, draw(numbers, args, rank, ranks, step))
        state, mean = advance(state, batch, args.lr)
        loss = float(mean)
        time.sleep(args.sleep_per_step)
        if training is not None:
            training.log_metrics(step, loss=loss)
        if rank == 0 and (step == 1 or step % args.log_every == 0 or step == args.steps):
            print(f"step {step}  loss {loss:.9g}", flush=True)
        stop = agreed(training is not None and training.stop_requested(), ranks)
        if training is not None and (stop or step == args.steps or step % args.save_every == 0):
            save(state, step, rank, args.global_batch)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--steps", type=int, default=60, help="last step (default 60)")
    add("--global-batch", type=int, default=32, help="excerpts per step, of all ranks together (default 32)")
    add("--lr", type=float, default=3e-3, help="learning rate (default 3e-3)")
    add("--seed", type=int, default=0, help="of weights and batches (default 0)")
    add("--log-every", type=int, default=20, help="steps between lines (default 20)")
    add("--save-every", type=int, default=20, help="steps between checkpoints, in a run (default 20)")
    add("--sleep-per-step", type=float, default=0.0, help="seconds, to try preemption (default 0)")
    return parser.parse_args()


def start(args, vocabulary_size):
    """Weights, and what Adam keeps of each: two means, and the number of steps."""
    random = np.random.default_rng(args.seed)

    def normal(*shape):
        return (random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    weights = {
        "characters": normal(vocabulary_size, WIDTH),
        "hidden": normal(CONTEXT * WIDTH, WIDTH),
        "head": normal(WIDTH, vocabulary_size),
    }
    zeros = {name: np.zeros_like(weight) for name, weight in weights.items()}
    return {"weights": weights, "first": zeros, "second": dict(zeros), "count": np.zeros((), np.int32)}


def loss_of(weights, excerpts):
    """The mean loss of the character that follows each excerpt."""
    seen, wanted = excerpts[:, :-1], excerpts[:, -1]
    x = weights["characters"][seen].reshape(len(seen), -1)
    logits = jax.nn.gelu(x @ weights["hidden"]) @ weights["head"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), wanted[:, None], axis=1).mean()


def take_step(state, excerpts, lr):
    """One step of Adam. The batch is divided among the ranks, so XLA adds up the gradients of all."""
    loss, slopes = jax.value_and_grad(loss_of)(state["weights"], excerpts)
    count = state["count"] + 1
    first = jax.tree.map(lambda mean, slope: 0.9 * mean + 0.1 * slope, state["first"], slopes)
    second = jax.tree.map(lambda mean, slope: 0.999 * mean + 0.001 * slope**2, state["second"], slopes)

    def move(weight, mean, square):
        return weight - lr * (mean / (1 - 0.9**count)) / (jnp.sqrt(square / (1 - 0.999**count)) + 1e-8)

    weights = jax.tree.map(move, state["weights"], first, second)
    return {"weights": weights, "first": first, "second": second, "count": count}, loss


def draw(numbers, args, rank, ranks, step):
    """This rank's part of the global batch, which depends on seed and step only."""
    random = np.random.default_rng((args.seed, step))
    starts = random.integers(len(numbers) - CONTEXT, size=(args.global_batch, 1))
    return numbers[np.array_split(starts, ranks)[rank] + np.arange(CONTEXT + 1)]


def agreed(asked, ranks):
    """Whether any rank was asked to stop. `stop_requested` asks the other ranks only if they use torch.distributed."""
    return bool(asked if ranks == 1 else multihost_utils.process_allgather(np.array(asked)).any())


def save(state, step, rank, global_batch):
    """Rank 0 writes a file; it gets the name of a checkpoint when it is complete."""
    with training.saving(step, global_batch=global_batch) if rank == 0 else contextlib.nullcontext() as path:
        if path is not None:
            with open(path, "wb") as file:
                np.savez(file, step=step, **{str(n): np.asarray(a) for n, a in enumerate(jax.tree.leaves(state))})


def resume(state, rank, ranks, global_batch):
    """Load rank 0's newest checkpoint on all ranks; return the state and its step."""
    path = training.resume_path(global_batch=global_batch) if training is not None and rank == 0 else None
    step = np.zeros((), np.int32)
    if path is not None:
        with np.load(path) as found:
            names = [str(number) for number in range(len(jax.tree.leaves(state)))]
            state = jax.tree.unflatten(jax.tree.structure(state), [found[name] for name in names])
            step = np.int32(found["step"])
    if ranks > 1:
        state, step = multihost_utils.broadcast_one_to_all((state, step))
        state = jax.tree.map(np.asarray, state)
    if rank == 0 and int(step):
        print(f"resumed after step {int(step)}", flush=True)
    return state, int(step)


if __name__ == "__main__":
    main()
