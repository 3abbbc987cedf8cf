"""Train a small character-level language model on one play, with DistributedDataParallel.

A complete training to copy from: a GPT-like transformer, data that needs no download,
checkpoints, resume, and a clean stop when the scheduler wants the nodes back.

Runs on: every rank of a job. Under torchrun all ranks train together (NCCL where every
local rank has a GPU, else Gloo on CPU); `python train.py` alone is a job of one rank.
Needs PyTorch >= 2.0, the NumPy that PyTorch uses, and the standard library, Python >= 3.8.

Same seed, world size and machine: same losses, bit for bit on CPU, resumed or not.
With --checkpoint-dir, SIGTERM or SIGUSR1 to any rank makes all ranks finish the same step,
write a checkpoint and exit with status 0. Without it those signals just end the process.
In a run of hpcenv the checkpoints are in its folder, a warning of Slurm does the same as
those signals, and the job that is queued again goes on by itself; so does a run with
`hpcenv submit --resume-from`.
"""

import argparse
import os
import re
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

# Imported before init_process_group on purpose: its default arguments keep whatever group
# is there at import, and a group that is kept alive cannot stop its threads at the end.
import torch.distributed.nn.functional
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

try:
    from hpcenv import training
except ImportError:  # without hpcenv all works, but for its warnings and its folder
    training = None

SHIPPED_TEXT = Path(__file__).resolve().parent / "data" / "as_you_like_it.txt"
CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2


def main():
    args = parse_arguments()
    place = find_place(os.environ)
    say(
        f"rank {place.rank}  local_rank {place.local_rank}  world_size {place.world_size}"
        f"  host {socket.gethostname()}  pid {os.getpid()}"
        f"  backend {place.backend}  device {place.device}  torch {torch.__version__}"
    )
    text, vocabulary = read_text(args.text)
    checkpoint = read_checkpoint(args, vocabulary) if place.rank == 0 else None
    join_ranks(place)
    torch.manual_seed(args.seed)
    model = CharacterModel(len(vocabulary)).to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    run = Run(args, place, text.to(place.device), vocabulary, model, optimizer)
    resume(run, checkpoint)
    if args.checkpoint_dir is not None:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _frame: caught_signals.append(number))
    train(run)
    dist.destroy_process_group()


# --- Start ---------------------------------------------------------------------------


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--steps", type=positive_int, default=120, help="last step (default 120)")
    add("--batch-size", type=positive_int, default=8, help="excerpts per rank (default 8)")
    add("--lr", type=float, default=3e-3, help="learning rate (default 3e-3)")
    add("--seed", type=int, default=0, help="of weights and batches (default 0)")
    add("--text", type=Path, default=SHIPPED_TEXT, help="UTF-8 text (default: the play in data/)")
    add("--log-every", type=positive_int, default=20, help="steps between lines (default 20)")
    add("--checkpoint-dir", type=Path, help="write checkpoints there, also at the end (default: none)")
    add("--checkpoint-every", type=positive_int, default=50, help="steps between checkpoints (default 50)")
    add("--resume", action="store_true", help="go on from the latest checkpoint there, if there is one")
    add("--sleep-per-step", type=float, default=0.0, help="seconds, to try preemption (default 0)")
    args = parser.parse_args()
    if training is not None and args.checkpoint_dir is None and training.checkpoint_path(0) is not None:
        args.checkpoint_dir, args.resume = training.checkpoint_path(0).parent, True
    if args.resume and args.checkpoint_dir is None:
        parser.error("--resume needs --checkpoint-dir")
    if args.sleep_per_step < 0:
        parser.error("--sleep-per-step must not be negative")
    return args


def positive_int(word):
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is not at least 1")
    return number


@dataclass(frozen=True)
class Place:
    """Which rank this process is, and what it computes on."""

    rank: int
    local_rank: int
    world_size: int
    backend: str
    device: torch.device


def find_place(environ):
    """Read what torchrun says; without torchrun this process is the only rank."""
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    local_world_size = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    gpu_each = torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size
    return Place(
        rank=int(environ.get("RANK", "0")),
        local_rank=local_rank,
        world_size=int(environ.get("WORLD_SIZE", "1")),
        backend="nccl" if gpu_each else "gloo",
        device=torch.device("cuda", local_rank) if gpu_each else torch.device("cpu"),
    )


def read_text(path):
    """The text as character numbers, and the characters that they stand for."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"train.py: cannot read --text {path}: {error}")
    if len(text) <= CONTEXT:
        sys.exit(f"train.py: --text {path} has {len(text)} characters, {CONTEXT + 1} are needed")
    vocabulary = "".join(sorted(set(text)))
    number_of = {character: number for number, character in enumerate(vocabulary)}
    return torch.tensor([number_of[character] for character in text]), vocabulary


def join_ranks(place):
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # for so small a model more threads only cost time
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    if "RANK" in os.environ:
        dist.init_process_group(place.backend)
    else:  # a group of one, so that all code below is the same for one rank and for many
        dist.init_process_group(place.backend, store=dist.HashStore(), rank=0, world_size=1)


# --- Model ---------------------------------------------------------------------------


class CharacterModel(nn.Module):
    def __init__(self, vocabulary_size):
        super().__init__()
        self.characters = nn.Embedding(vocabulary_size, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary_size))

    def forward(self, numbers):
        positions = torch.arange(numbers.shape[1], device=numbers.device)
        return self.head(self.blocks(self.characters(numbers) + self.positions(positions)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH))
        self.after = nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attend(x)
        return x + self.think(x)

    def attend(self, x):
        batch, length, _ = x.shape
        heads = self.before(x).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.after(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


# --- Training ------------------------------------------------------------------------


@dataclass
class Run:
    """All that the training works on, and how far it has come."""

    args: argparse.Namespace
    place: Place
    text: torch.Tensor
    vocabulary: str
    model: CharacterModel
    optimizer: torch.optim.Optimizer
    step: int = 0
    first_loss: float = float("nan")
    loss: float = float("nan")


def train(run):
    args, place = run.args, run.place
    gpus = [place.local_rank] if place.device.type == "cuda" else None
    parallel = DistributedDataParallel(run.model, device_ids=gpus)
    # DistributedDataParallel orders its sums by the first backward pass that it sees. That
    # pass is spent here, so that a resumed run adds up in the same order as one that ran on.
    parallel(draw_excerpts(run)[:, :-1]).sum().backward()
    started, stop = time.perf_counter(), False
    while run.step < args.steps and not stop:
        run.step += 1
        loss = take_step(run, parallel)
        time.sleep(args.sleep_per_step)
        run.loss, stop = agree(loss, place)
        if run.step == 1:
            run.first_loss = run.loss
        if place.rank == 0 and (run.step == 1 or run.step % args.log_every == 0):
            seconds = time.perf_counter() - started
            say(f"step {run.step:{len(str(args.steps))}}  loss {run.loss:.4f}  {seconds:.1f} s")
        if stop or run.step == args.steps or run.step % args.checkpoint_every == 0:
            save_checkpoint(run)
    if place.rank == 0 and run.step < args.steps:
        if training is not None:
            training.saved()  # the job can be queued again and goes on
        say(f"stopped by a signal after step {run.step}  loss {run.loss:.4f}")
    elif place.rank == 0:
        say(f"final loss {run.loss:.4f} (first {run.first_loss:.4f})")


def take_step(run, parallel):
    excerpts = draw_excerpts(run)
    logits = parallel(excerpts[:, :-1])
    loss = cross_entropy(logits.flatten(0, 1), excerpts[:, 1:].flatten())
    run.optimizer.zero_grad()
    loss.backward()  # in here DistributedDataParallel averages the gradients over the ranks
    run.optimizer.step()
    return loss.detach()


def draw_excerpts(run):
    """This rank's batch, which depends on seed, step and rank only.

    So a checkpoint needs no random state. A model that draws random numbers itself, for
    dropout say, would have to keep `torch.get_rng_state()` of every rank in it.
    """
    number = (run.args.seed * 1_000_003 + run.step) * run.place.world_size + run.place.rank
    generator = torch.Generator().manual_seed(number % 2**63)
    starts = torch.randint(len(run.text) - CONTEXT, (run.args.batch_size, 1), generator=generator)
    return run.text[(starts + torch.arange(CONTEXT + 1)).to(run.place.device)]


caught_signals = []


def agree(loss, place):
    """The mean loss of all ranks, and whether any of them was asked to stop."""
    warned = training is not None and training.stop_requested()
    both = torch.stack([loss, loss.new_tensor(1.0 if caught_signals or warned else 0.0)])
    dist.all_reduce(both)
    loss_sum, stop_sum = both.tolist()
    return loss_sum / place.world_size, stop_sum > 0


# --- Checkpoints ---------------------------------------------------------------------


def save_checkpoint(run):
    """Rank 0 writes aside, then renames: a file named as a checkpoint is a complete one."""
    directory = run.args.checkpoint_dir
    if directory is None or run.place.rank != 0:
        return
    checkpoint = {name: getattr(run, name) for name in ("step", "first_loss", "loss", "vocabulary")}
    checkpoint["model"] = run.model.state_dict()
    checkpoint["optimizer"] = run.optimizer.state_dict()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step-{run.step:08d}.pt"
    aside = directory / f".{path.name}.part"
    with open(aside, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    say(f"checkpoint {path}")


def read_checkpoint(args, vocabulary):
    """The latest checkpoint or None; without --resume, refuse to mix the files of two runs."""
    path = None if args.checkpoint_dir is None else latest_checkpoint(args.checkpoint_dir)
    own = path is not None
    if not own and training is not None:
        path = training.resume_path()  # of another run: `hpcenv submit --resume-from`
    if path is None:
        return None
    if own and not args.resume:
        sys.exit(f"train.py: found {path}: add --resume, or choose an empty --checkpoint-dir")
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    if checkpoint["vocabulary"] != vocabulary:
        sys.exit(f"train.py: {path} knows other characters than --text {args.text} has")
    return checkpoint


def latest_checkpoint(directory):
    if not directory.is_dir():
        return None
    complete = [path for path in directory.iterdir() if re.match(r"step-\d{8}\.pt$", path.name)]
    return max(complete, key=lambda path: path.name, default=None)


def resume(run, checkpoint):
    """Hand rank 0's checkpoint to all ranks: all go on from the same step, whatever they see."""
    box = [checkpoint]
    dist.broadcast_object_list(box, src=0)
    checkpoint = box[0]
    if checkpoint is None:
        return
    run.model.load_state_dict(checkpoint["model"])
    run.optimizer.load_state_dict(checkpoint["optimizer"])
    for group in run.optimizer.param_groups:
        group["lr"] = run.args.lr  # the command line wins over the checkpoint
    run.step, run.loss = checkpoint["step"], checkpoint["loss"]
    run.first_loss = checkpoint["first_loss"]
    if run.place.rank == 0:
        say(f"resumed after step {run.step}")


def say(line):
    """Write a whole line at once, so that the lines of several ranks do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
