"""The model of train.py with FSDP2: parameters, gradients and optimizer state are divided among the ranks.

Runs on: every rank of a job, under torchrun. Needs train.py beside it, and what that needs; PyTorch >= 2.6.
Checkpoints are folders of torch.distributed.checkpoint: each rank writes its own part, and a run with another number of
ranks can continue from them.

    hpcenv submit examples/fsdp2.py --nodes 2 --gpus 8
    hpcenv submit examples/fsdp2.py --nodes 4 --gpus 8 --resume-from fsdp2-20261123-120000-beef
"""

import argparse
import contextlib
import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from train import CONTEXT, SHIPPED_TEXT, CharacterModel, find_place, join_ranks, positive_int, read_text, say

try:
    from hpcenv import training
except ImportError:  # without hpcenv it trains, and saves nothing
    training = None


# torch 2.13 warns of in-place operations on the output of the model; there are none here.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module")


def main():
    args = parse_arguments()
    place = find_place(os.environ)
    join_ranks(place)
    train(args, place)
    # What holds the process group is gone by now; a group that is kept alive cannot stop its threads.
    dist.destroy_process_group()


def train(args, place):
    text, vocabulary = read_text(SHIPPED_TEXT)
    if args.global_batch % place.world_size:
        sys.exit(f"fsdp2.py: --global-batch {args.global_batch} is not a multiple of {place.world_size} ranks")
    torch.manual_seed(args.seed)
    model = CharacterModel(len(vocabulary)).to(place.device)
    mesh = init_device_mesh(place.device.type, (place.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    step = resume(place, model, optimizer, args.global_batch)
    stop = False
    while step < args.steps and not stop:
        step += 1
        excerpts = draw(text, args, place, step)
        loss = cross_entropy(model(excerpts[:, :-1]).flatten(0, 1), excerpts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(args.sleep_per_step)
        mean = loss.detach()
        dist.all_reduce(mean)
        if place.rank == 0 and (step == 1 or step % args.log_every == 0 or step == args.steps):
            say(f"step {step}  loss {mean.item() / place.world_size:.9g}")
        stop = training is not None and training.stop_requested()
        if training is not None and (stop or step == args.steps or step % args.save_every == 0):
            save(place, model, optimizer, step, args.global_batch)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--steps", type=positive_int, default=60, help="last step (default 60)")
    add("--global-batch", type=positive_int, default=24, help="excerpts per step, of all ranks together (default 24)")
    add("--lr", type=float, default=3e-3, help="learning rate (default 3e-3)")
    add("--seed", type=int, default=0, help="of weights and batches (default 0)")
    add("--log-every", type=positive_int, default=20, help="steps between lines (default 20)")
    add("--save-every", type=positive_int, default=20, help="steps between checkpoints, in a run (default 20)")
    add("--sleep-per-step", type=float, default=0.0, help="seconds, to try preemption (default 0)")
    return parser.parse_args()


def draw(text, args, place, step):
    """This rank's part of the global batch, which depends on seed and step only."""
    generator = torch.Generator().manual_seed((args.seed * 1_000_003 + step) % 2**63)
    starts = torch.randint(len(text) - CONTEXT, (args.global_batch, 1), generator=generator)
    mine = starts.tensor_split(place.world_size)[place.rank]
    return text[mine + torch.arange(CONTEXT + 1)].to(place.device)


def save(place, model, optimizer, step, global_batch):
    """All ranks write into one folder. It gets the name of a checkpoint when all have written."""
    first = training.saving(step, global_batch=global_batch) if place.rank == 0 else contextlib.nullcontext()
    with first as path:
        box = [None if path is None else str(path)]
        dist.broadcast_object_list(box, src=0)
        if box[0] is None:  # outside a run
            return
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state, "step": torch.tensor(step)}, checkpoint_id=box[0])
        dist.barrier()


def resume(place, model, optimizer, global_batch):
    """Each rank reads its part of the newest checkpoint, whatever number of ranks wrote it; return its step."""
    path = training.resume_path(global_batch=global_batch) if training is not None and place.rank == 0 else None
    box = [None if path is None else str(path)]
    dist.broadcast_object_list(box, src=0)
    if box[0] is None:
        return 0
    weights, state = get_state_dict(model, optimizer)
    found = {"model": weights, "optimizer": state, "step": torch.tensor(0)}
    dcp.load(found, checkpoint_id=box[0])
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    if place.rank == 0:
        say(f"resumed after step {found['step'].item()}")
    return found["step"].item()


if __name__ == "__main__":
    main()
