"""The model of train.py with DeepSpeed's ZeRO: optimizer state and gradients (stage 2) are divided among the ranks.

Runs on: every rank of a job, under torchrun (hpcenv starts it), not under the `deepspeed` command. Needs
train.py beside it, what that needs, and deepspeed (tried with 0.19 on CPU; on GPUs it was not run). It compiles
nothing, so the nodes need no compiler.

    hpcenv submit examples/deepspeed_zero.py --nodes 2 --gpus 8 -- --stage 2
"""

import argparse
import contextlib
import os
import time

import deepspeed
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from train import CONTEXT, SHIPPED_TEXT, CharacterModel, find_place, join_ranks, positive_int, read_text, say

try:
    from hpcenv import training
except ImportError:  # without hpcenv it trains, and saves nothing
    training = None


def main():
    args = parse_arguments()
    place = find_place(os.environ)
    join_ranks(place)
    if place.device.type == "cpu":
        # Without this line, DeepSpeed compiles an operator at its first start. It is for inference only.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    train(args, place)
    # What holds the process group is gone by now; a group that is kept alive cannot stop its threads.
    dist.destroy_process_group()


def train(args, place):
    text, vocabulary = read_text(SHIPPED_TEXT)
    torch.manual_seed(args.seed)
    model = CharacterModel(len(vocabulary))
    global_batch = args.batch_size * place.world_size
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "train_batch_size": global_batch,
        "zero_optimization": {"stage": args.stage},
        # torch's own AdamW: DeepSpeed's would be compiled at the first start.
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    step, stop = resume(place, engine, global_batch), False
    while step < args.steps and not stop:
        step += 1
        generator = torch.Generator().manual_seed(
            ((args.seed * 1_000_003 + step) * place.world_size + place.rank) % 2**63
        )
        starts = torch.randint(len(text) - CONTEXT, (args.batch_size, 1), generator=generator)
        excerpts = text[starts + torch.arange(CONTEXT + 1)].to(place.device)
        loss = cross_entropy(engine(excerpts[:, :-1]).flatten(0, 1), excerpts[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        time.sleep(args.sleep_per_step)
        mean = loss.detach()
        dist.all_reduce(mean)
        if place.rank == 0 and (step == 1 or step % args.log_every == 0 or step == args.steps):
            say(f"step {step}  loss {mean.item() / place.world_size:.9g}  global batch {global_batch}")
        stop = training is not None and training.stop_requested()
        if training is not None and (stop or step == args.steps or step % args.save_every == 0):
            save(place, engine, step, global_batch)
    engine.destroy()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="of ZeRO (default 2)")
    add("--steps", type=positive_int, default=60, help="last step (default 60)")
    add("--batch-size", type=positive_int, default=8, help="excerpts per rank and batch (default 8)")
    add("--lr", type=float, default=3e-3, help="learning rate (default 3e-3)")
    add("--seed", type=int, default=0, help="of weights and batches (default 0)")
    add("--log-every", type=positive_int, default=20, help="steps between lines (default 20)")
    add("--save-every", type=positive_int, default=20, help="steps between checkpoints, in a run (default 20)")
    add("--sleep-per-step", type=float, default=0.0, help="seconds, to try preemption (default 0)")
    return parser.parse_args()


def save(place, engine, step, global_batch):
    """All ranks write into one folder. It gets the name of a checkpoint when all have written."""
    first = training.saving(step, global_batch=global_batch) if place.rank == 0 else contextlib.nullcontext()
    with first as path:
        box = [None if path is None else str(path)]
        dist.broadcast_object_list(box, src=0)
        if box[0] is None:  # outside a run
            return
        engine.save_checkpoint(box[0], tag="state", client_state={"step": step})
        dist.barrier()


def resume(place, engine, global_batch):
    """Each rank reads its part of the newest checkpoint; return its step."""
    path = training.resume_path(global_batch=global_batch) if training is not None and place.rank == 0 else None
    box = [None if path is None else str(path)]
    dist.broadcast_object_list(box, src=0)
    if box[0] is None:
        return 0
    _, state = engine.load_checkpoint(box[0], tag="state")
    if place.rank == 0:
        say(f"resumed after step {state['step']}")
    return state["step"]


if __name__ == "__main__":
    main()
