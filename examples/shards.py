"""The training of train.py from many small files that were packed into few large ones, with WebDataset.

Runs on: every rank of a job, under torchrun or alone. Needs train.py beside it, what that needs, and webdataset (tried
with 1.0).

A parallel file system opens files slowly and reads large ones fast. So pack once, on the login node, and name the
folder as [[data]]; `hpcenv submit` then looks at a few files, not at all samples:

    python examples/shards.py --pack data/shards
    hpcenv submit examples/shards.py --nodes 2 --gpus 8 -- --shards data/shards

Without `--shards` each rank packs the shipped play into a separate folder, to try all else.
"""

import argparse
import io
import itertools
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import webdataset
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from train import CONTEXT, SHIPPED_TEXT, CharacterModel, find_place, join_ranks, positive_int, read_text, say

try:
    from hpcenv import training
except ImportError:  # without hpcenv it trains, and saves nothing
    training = None

SHARDS, NAMES = 16, "play-{:04d}.tar"


def main():
    args = parse_arguments()
    if args.pack:
        pack(Path(args.pack))
        return
    place = find_place(os.environ)
    join_ranks(place)
    with tempfile.TemporaryDirectory() as own:
        if not args.shards:
            pack(Path(own))
        train(args, place, Path(args.shards or own))
    # What holds the process group is gone by now; a group that is kept alive cannot stop its threads.
    dist.destroy_process_group()


def train(args, place, folder):
    _, vocabulary = read_text(SHIPPED_TEXT)
    torch.manual_seed(args.seed)
    model = CharacterModel(len(vocabulary)).to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    parallel = DistributedDataParallel(model, device_ids=[place.local_rank] if place.device.type == "cuda" else None)
    global_batch = args.batch_size * place.world_size
    step, stop = resume(place, model, optimizer, global_batch), False
    batches = read(args, place, folder, after=step)
    # DistributedDataParallel orders its sums by the first backward pass that it sees, see train.py.
    parallel(torch.zeros(args.batch_size, CONTEXT, dtype=torch.long, device=place.device)).sum().backward()
    while step < args.steps and not stop:
        step += 1
        excerpts = next(batches)
        loss = cross_entropy(parallel(excerpts[:, :-1]).flatten(0, 1), excerpts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(args.sleep_per_step)
        mean = loss.detach()
        dist.all_reduce(mean)
        if place.rank == 0 and (step == 1 or step % args.log_every == 0 or step == args.steps):
            say(f"step {step}  loss {mean.item() / place.world_size:.9g}")
        stop = training is not None and training.stop_requested()
        if place.rank == 0 and training is not None and (stop or step == args.steps or step % args.save_every == 0):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            training.save(state, step, global_batch=global_batch)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--pack", metavar="FOLDER", help="write the shards there, and end")
    add("--shards", metavar="FOLDER", help="read the shards there (default: pack the shipped play)")
    add("--steps", type=positive_int, default=60, help="last step (default 60)")
    add("--batch-size", type=positive_int, default=8, help="excerpts per rank (default 8)")
    add("--lr", type=float, default=3e-3, help="learning rate (default 3e-3)")
    add("--seed", type=int, default=0, help="of weights and batches (default 0)")
    add("--log-every", type=positive_int, default=20, help="steps between lines (default 20)")
    add("--save-every", type=positive_int, default=20, help="steps between checkpoints, in a run (default 20)")
    add("--sleep-per-step", type=float, default=0.0, help="seconds, to try preemption (default 0)")
    return parser.parse_args()


def pack(folder):
    """Write each excerpt as a sample of one file, into shards of the same number of samples."""
    text, _ = read_text(SHIPPED_TEXT)
    excerpts = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    each = len(excerpts) // SHARDS
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(SHARDS):
        # Times and users in the archive would make other bytes of the same samples.
        with webdataset.TarWriter(str(folder / NAMES.format(shard)), mtime=0, user="root", group="root") as archive:
            for number in range(shard * each, (shard + 1) * each):
                file = io.BytesIO()
                torch.save(excerpts[number].clone(), file)
                archive.write({"__key__": f"{number:08d}", "pth": file.getvalue()})


def read(args, place, folder, after):
    """Yield this rank's batches, without those of the steps that were done before."""
    shards = sorted(str(path) for path in folder.glob("*.tar"))
    if len(shards) < place.world_size:
        sys.exit(f"shards.py: {folder} has {len(shards)} shards, and each of {place.world_size} ranks needs one")
    # Ranks with as many shards have as many batches, so none waits for another at the end of an epoch.
    shards = shards[: len(shards) // place.world_size * place.world_size]
    batches = (batch for epoch in itertools.count() for batch in read_epoch(args, place, shards, epoch))
    # WebDataset reads from front to back: what a checkpoint has seen is read again, and thrown away.
    return itertools.islice(batches, after, None)


def read_epoch(args, place, shards, epoch):
    """Yield the batches of one epoch, whose order depends on seed and epoch only."""
    order = random.Random(args.seed * 1_000_003 + epoch)
    mine = order.sample(shards, len(shards))[place.rank :: place.world_size]
    # The list above has this rank's shards only, so nothing is split again.
    samples = webdataset.WebDataset(mine, shardshuffle=False, nodesplitter=None, workersplitter=None)
    samples = samples.decode().to_tuple("pth").shuffle(200, rng=order)
    for batch in samples.batched(args.batch_size, collation_fn=None, partial=False):
        yield torch.stack([excerpt for (excerpt,) in batch]).to(place.device)


def resume(place, model, optimizer, global_batch):
    """Load rank 0's newest checkpoint on all ranks; return its step."""
    path = training.resume_path(global_batch=global_batch) if training is not None and place.rank == 0 else None
    box = [None if path is None else torch.load(path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(box, src=0)
    if box[0] is None:
        return 0
    model.load_state_dict(box[0]["model"])
    optimizer.load_state_dict(box[0]["optimizer"])
    if place.rank == 0:
        say(f"resumed after step {box[0]['step']}")
    return box[0]["step"]


if __name__ == "__main__":
    main()
