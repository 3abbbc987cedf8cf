"""The model of train.py with one stage on each rank: pipeline parallelism by torch.distributed.pipelining.

Runs on: every rank of a job, under torchrun. Needs train.py beside it, and what that needs; PyTorch >= 2.6.
The batch is cut into parts; while one rank computes a part, the rank before it computes the next one (1F1B). Each
rank writes its own blocks into one folder (torch.distributed.checkpoint), by names that do not depend on the number of
ranks.

    hpcenv submit examples/pipeline.py --nodes 2 --gpus 8 -- --blocks 32
"""

import argparse
import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from train import CONTEXT, SHIPPED_TEXT, WIDTH, Block, find_place, join_ranks, positive_int, read_text, say

try:
    from hpcenv import training
except ImportError:  # without hpcenv it trains, and saves nothing
    training = None

# One entry for each weight, so that the entries of the ranks do not have the same name.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def main():
    args = parse_arguments()
    place = find_place(os.environ)
    join_ranks(place)
    train(args, place)
    # What holds the process group is gone by now; a group that is kept alive cannot stop its threads.
    dist.destroy_process_group()


def train(args, place):
    text, vocabulary = read_text(SHIPPED_TEXT)
    if args.blocks < place.world_size or args.batch_size % args.parts:
        sys.exit("pipeline.py: --blocks must be at least the number of ranks, --batch-size a multiple of --parts")
    part = Part(len(vocabulary), args, place).to(place.device)
    optimizer = torch.optim.AdamW(part.parameters(), lr=args.lr)
    stage = PipelineStage(part, place.rank, place.world_size, place.device)
    # Each part of the batch adds its share to the gradients, so the loss of a part is divided by their number.
    schedule = Schedule1F1B(stage, args.parts, loss_fn=mean_loss, scale_grads=True)
    step, stop = resume(place, part, optimizer, args.batch_size), False
    while step < args.steps and not stop:
        step += 1
        loss = take_step(schedule, optimizer, draw(text, args, place, step), place)
        time.sleep(args.sleep_per_step)
        if place.rank == 0 and (step == 1 or step % args.log_every == 0 or step == args.steps):
            say(f"step {step}  loss {loss:.9g}")
        stop = training is not None and training.stop_requested()
        if training is not None and (stop or step == args.steps or step % args.save_every == 0):
            save(place, part, optimizer, step, args.batch_size)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--blocks", type=positive_int, default=4, help="of the model; each rank has its share (default 4)")
    add("--parts", type=positive_int, default=4, help="that a batch is cut into (default 4)")
    add("--steps", type=positive_int, default=60, help="last step (default 60)")
    add("--batch-size", type=positive_int, default=16, help="excerpts per step (default 16)")
    add("--lr", type=float, default=3e-3, help="learning rate (default 3e-3)")
    add("--seed", type=int, default=0, help="of weights and batches (default 0)")
    add("--log-every", type=positive_int, default=20, help="steps between lines (default 20)")
    add("--save-every", type=positive_int, default=20, help="steps between checkpoints, in a run (default 20)")
    add("--sleep-per-step", type=float, default=0.0, help="seconds, to try preemption (default 0)")
    return parser.parse_args()


class Part(nn.Module):
    """This rank's blocks, by their names in the whole model; the first rank also embeds, the last one has the head."""

    def __init__(self, vocabulary_size, args, place):
        super().__init__()
        mine = torch.arange(args.blocks).tensor_split(place.world_size)[place.rank].tolist()
        self.first, self.last = place.rank == 0, place.rank == place.world_size - 1
        self.blocks = nn.ModuleDict()
        for number in range(args.blocks):
            # Each block has its own seed: a rank need not make the blocks of others to get the same weights.
            torch.manual_seed(args.seed * 1_000_003 + number)
            if number in mine:
                self.blocks[str(number)] = Block()
        torch.manual_seed(args.seed * 1_000_003 + args.blocks)
        if self.first:
            self.characters, self.positions = nn.Embedding(vocabulary_size, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        if self.last:
            self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary_size))

    def forward(self, x):
        if self.first:
            x = self.characters(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if self.last else x


def mean_loss(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def take_step(schedule, optimizer, excerpts, place):
    """One step of all ranks; the last rank has the loss, and tells it to the others."""
    optimizer.zero_grad()
    parts = []
    inputs = (excerpts[:, :-1],) if place.rank == 0 else ()
    if place.rank == place.world_size - 1:
        schedule.step(*inputs, target=excerpts[:, 1:], losses=parts)
    else:
        schedule.step(*inputs)
    optimizer.step()
    loss = torch.stack(parts).mean().detach() if parts else torch.zeros((), device=place.device)
    dist.broadcast(loss, src=place.world_size - 1)
    return loss.item()


def draw(text, args, place, step):
    """The batch, which depends on seed and step only: the first rank needs the inputs, the last one the targets."""
    generator = torch.Generator().manual_seed((args.seed * 1_000_003 + step) % 2**63)
    starts = torch.randint(len(text) - CONTEXT, (args.batch_size, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)].to(place.device)


def save(place, model, optimizer, step, global_batch):
    """All ranks write into one folder. It gets the name of a checkpoint when all have written."""
    first = training.saving(step, global_batch=global_batch) if place.rank == 0 else contextlib.nullcontext()
    with first as path:
        box = [None if path is None else str(path)]
        dist.broadcast_object_list(box, src=0)
        if box[0] is None:  # outside a run
            return
        weights, state = get_state_dict(model, optimizer, options=FLAT)
        dcp.save({"model": weights, "optimizer": state, "step": torch.tensor(step)}, checkpoint_id=box[0])
        dist.barrier()


def resume(place, model, optimizer, global_batch):
    """Each rank reads its part of the newest checkpoint, whatever number of ranks wrote it; return its step."""
    path = training.resume_path(global_batch=global_batch) if training is not None and place.rank == 0 else None
    box = [None if path is None else str(path)]
    dist.broadcast_object_list(box, src=0)
    if box[0] is None:
        return 0
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    found = {"model": weights, "optimizer": state, "step": torch.tensor(0)}
    dcp.load(found, checkpoint_id=box[0])
    states = {"model_state_dict": found["model"], "optim_state_dict": found["optimizer"]}
    set_state_dict(model, optimizer, **states, options=FLAT)
    if place.rank == 0:
        say(f"resumed after step {found['step'].item()}")
    return found["step"].item()


if __name__ == "__main__":
    main()
