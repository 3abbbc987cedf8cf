"""The training of train.py with mixed precision, gradient accumulation and activation checkpointing, as options.

Runs on: every rank of a job, under torchrun or alone. Needs train.py beside it, and what that needs; PyTorch >= 2.3.
In a run of hpcenv it saves checkpoints, continues from the newest one, and stops when the scheduler wants the nodes
back.

    hpcenv submit examples/techniques.py --nodes 2 --gpus 8 -- --precision bfloat16 --accumulate 4 --recompute

The batches do not depend on how the work is divided: R ranks with `--accumulate A` train on the same global batch as
R x A ranks without. So `one-node = ["--accumulate", "{factor}"]` under [reproduce] in hpcenv.toml repeats a run
that did not accumulate on fewer ranks.
"""

import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from train import CONTEXT, SHIPPED_TEXT, CharacterModel, find_place, join_ranks, positive_int, read_text, say

try:
    from hpcenv import training
except ImportError:  # without hpcenv it trains, and saves nothing
    training = None

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main():
    args = parse_arguments()
    place = find_place(os.environ)
    join_ranks(place)
    train(args, place)
    # What holds the process group is gone by now; a group that is kept alive cannot stop its threads.
    dist.destroy_process_group()


def train(args, place):
    text, vocabulary = read_text(SHIPPED_TEXT)
    torch.manual_seed(args.seed)
    model = Recomputing(len(vocabulary)) if args.recompute else CharacterModel(len(vocabulary))
    model.to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # float16 has few exponents: gradients are scaled up before they are made, and down before they are used.
    scaler = torch.amp.GradScaler(place.device.type, enabled=args.precision == "float16")
    parallel = DistributedDataParallel(model, device_ids=[place.local_rank] if place.device.type == "cuda" else None)
    global_batch = args.batch_size * args.accumulate * place.world_size
    step = resume(place, model, optimizer, scaler, global_batch)
    # DistributedDataParallel orders its sums by the first backward pass that it sees, see train.py.
    parallel(draw(text, args, place, 0, 0)[:, :-1]).sum().backward()
    stop = False
    while step < args.steps and not stop:
        step += 1
        loss = take_step(args, place, text, parallel, optimizer, scaler, step)
        time.sleep(args.sleep_per_step)
        dist.all_reduce(loss)
        if place.rank == 0 and (step == 1 or step % args.log_every == 0 or step == args.steps):
            say(f"step {step}  loss {loss.item() / place.world_size:.9g}  global batch {global_batch}")
        stop = training is not None and training.stop_requested()
        if place.rank == 0 and training is not None and (stop or step == args.steps or step % args.save_every == 0):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            training.save({**state, "step": step}, step, global_batch=global_batch)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--precision", choices=PRECISIONS, default="float32", help="of the matrix products (autocast)")
    add("--accumulate", type=positive_int, default=1, help="batches that are added up for one step (default 1)")
    add(
        "--recompute",
        action="store_true",
        help="compute activations again in the backward pass, to save memory",
    )
    add("--steps", type=positive_int, default=60, help="last step (default 60)")
    add("--batch-size", type=positive_int, default=8, help="excerpts per rank and batch (default 8)")
    add("--lr", type=float, default=3e-3, help="learning rate (default 3e-3)")
    add("--seed", type=int, default=0, help="of weights and batches (default 0)")
    add("--log-every", type=positive_int, default=20, help="steps between lines (default 20)")
    add("--save-every", type=positive_int, default=20, help="steps between checkpoints, in a run (default 20)")
    add("--sleep-per-step", type=float, default=0.0, help="seconds, to try preemption (default 0)")
    return parser.parse_args()


class Recomputing(CharacterModel):
    """The model, which keeps only the input of each block for the backward pass."""

    def forward(self, numbers):
        positions = torch.arange(numbers.shape[1], device=numbers.device)
        x = self.characters(numbers) + self.positions(positions)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def take_step(args, place, text, parallel, optimizer, scaler, step):
    """Add up the gradients of some batches, and take one step; return this rank's mean loss."""
    optimizer.zero_grad()
    total = torch.zeros((), device=place.device)
    for number in range(args.accumulate):
        excerpts = draw(text, args, place, step, number)
        last = number == args.accumulate - 1
        # The gradients of the ranks are averaged once, in the last backward pass.
        with contextlib.nullcontext() if last else parallel.no_sync():
            with torch.autocast(place.device.type, PRECISIONS[args.precision], enabled=args.precision != "float32"):
                logits = parallel(excerpts[:, :-1])
            loss = cross_entropy(logits.float().flatten(0, 1), excerpts[:, 1:].flatten()) / args.accumulate
            scaler.scale(loss).backward()
        total += loss.detach()
    scaler.step(optimizer)
    scaler.update()
    return total


def draw(text, args, place, step, number):
    """One batch: it depends on seed, step and its number among the batches of all ranks."""
    among_all = (step * args.accumulate + number) * place.world_size + place.rank
    generator = torch.Generator().manual_seed((args.seed * 1_000_003 + among_all) % 2**63)
    starts = torch.randint(len(text) - CONTEXT, (args.batch_size, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)].to(place.device)


def resume(place, model, optimizer, scaler, global_batch):
    """Load rank 0's newest checkpoint on all ranks; return its step."""
    path = training.resume_path(global_batch=global_batch) if training is not None and place.rank == 0 else None
    box = [None if path is None else torch.load(path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(box, src=0)
    if box[0] is None:
        return 0
    model.load_state_dict(box[0]["model"])
    optimizer.load_state_dict(box[0]["optimizer"])
    scaler.load_state_dict(box[0]["scaler"])
    if place.rank == 0:
        say(f"resumed after step {box[0]['step']}")
    return box[0]["step"]


if __name__ == "__main__":
    main()
