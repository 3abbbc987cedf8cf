"""The model of train.py with tensor parallelism, and data parallelism between groups of ranks, by torch's DTensor.

Runs on: every rank of a job, under torchrun. Needs train.py beside it, and what that needs; PyTorch >= 2.6.
`--tensor T` ranks that follow each other divide each layer among themselves, and read the same excerpts: choose T so
that these ranks are on one node. The groups divide the batch, and the rest of the weights, as in fsdp2.py.

    hpcenv submit examples/tensor_parallel.py --nodes 2 --gpus 8 -- --tensor 4
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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from train import CONTEXT, SHIPPED_TEXT, CharacterModel, find_place, join_ranks, positive_int, read_text, say

try:
    from hpcenv import training
except ImportError:  # without hpcenv it trains, and saves nothing
    training = None

# torch 2.13 warns of in-place operations on the output of the model; there are none here.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module")

# The hidden layer of each block is cut into columns, and the layer after it into rows: one all_reduce for the two.
PLAN = {"think.1": ColwiseParallel(), "think.3": RowwiseParallel()}


def main():
    args = parse_arguments()
    place = find_place(os.environ)
    join_ranks(place)
    train(args, place)
    # What holds the process group is gone by now; a group that is kept alive cannot stop its threads.
    dist.destroy_process_group()


def train(args, place):
    text, vocabulary = read_text(SHIPPED_TEXT)
    if place.world_size % args.tensor:
        sys.exit(f"tensor_parallel.py: {place.world_size} ranks are no multiple of --tensor {args.tensor}")
    groups = place.world_size // args.tensor
    if args.global_batch % groups:
        sys.exit(f"tensor_parallel.py: --global-batch {args.global_batch} is not a multiple of {groups} groups")
    torch.manual_seed(args.seed)
    model = CharacterModel(len(vocabulary)).to(place.device)
    mesh = init_device_mesh(place.device.type, (groups, args.tensor), mesh_dim_names=("data", "tensor"))
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False)
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
    add("--tensor", type=positive_int, default=2, help="ranks that divide a layer among themselves (default 2)")
    add("--steps", type=positive_int, default=60, help="last step (default 60)")
    add("--global-batch", type=positive_int, default=24, help="excerpts per step, of all groups together (default 24)")
    add("--lr", type=float, default=3e-3, help="learning rate (default 3e-3)")
    add("--seed", type=int, default=0, help="of weights and batches (default 0)")
    add("--log-every", type=positive_int, default=20, help="steps between lines (default 20)")
    add("--save-every", type=positive_int, default=20, help="steps between checkpoints, in a run (default 20)")
    add("--sleep-per-step", type=float, default=0.0, help="seconds, to try preemption (default 0)")
    return parser.parse_args()


def draw(text, args, place, step):
    """The part of the global batch of this rank's group, which depends on seed and step only."""
    generator = torch.Generator().manual_seed((args.seed * 1_000_003 + step) % 2**63)
    starts = torch.randint(len(text) - CONTEXT, (args.global_batch, 1), generator=generator)
    mine = starts.tensor_split(place.world_size // args.tensor)[place.rank // args.tensor]
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
