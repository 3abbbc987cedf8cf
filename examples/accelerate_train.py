"""The model of train.py with Hugging Face Accelerate, which prepares model, optimizer and precision.

Runs on: every rank of a job, under torchrun (hpcenv starts it), not under `accelerate launch`. Needs train.py beside
it, what that needs, and accelerate (tried with 1.15).

    hpcenv submit examples/accelerate_train.py --nodes 2 --gpus 8 -- --precision bf16 --accumulate 2
"""

import argparse
import contextlib
import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.nn.functional import cross_entropy
from train import CONTEXT, SHIPPED_TEXT, CharacterModel, positive_int, read_text, say

try:
    from hpcenv import training
except ImportError:  # without hpcenv it trains, and saves nothing
    training = None


def main():
    args = parse_arguments()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    accelerator = Accelerator(
        mixed_precision=args.precision, gradient_accumulation_steps=args.accumulate, cpu=not torch.cuda.is_available()
    )
    train(args, accelerator)
    # What holds the process group must be gone; a group that is kept alive cannot stop its threads.
    accelerator.free_memory()
    accelerator.end_training()


def train(args, accelerator):
    text, vocabulary = read_text(SHIPPED_TEXT)
    torch.manual_seed(args.seed)
    model = CharacterModel(len(vocabulary))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=args.lr))
    global_batch = args.batch_size * args.accumulate * accelerator.num_processes
    step, stop = resume(accelerator, global_batch), False
    # DistributedDataParallel orders its sums by the first backward pass that it sees, see train.py.
    accelerator.backward(model(draw(args, accelerator, text, 0, 0)[:, :-1]).sum())
    model.zero_grad()
    while step < args.steps and not stop:
        step += 1
        loss = take_step(args, accelerator, text, model, optimizer, step)
        time.sleep(args.sleep_per_step)
        mean = accelerator.reduce(loss, reduction="mean").item()
        if accelerator.is_main_process and (step == 1 or step % args.log_every == 0 or step == args.steps):
            say(f"step {step}  loss {mean:.9g}  global batch {global_batch}")
        stop = training is not None and training.stop_requested()
        if training is not None and (stop or step == args.steps or step % args.save_every == 0):
            save(accelerator, step, global_batch)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--precision", choices=("no", "bf16", "fp16"), default="no", help="mixed precision (default no)")
    add("--accumulate", type=positive_int, default=1, help="batches that are added up for one step (default 1)")
    add("--steps", type=positive_int, default=60, help="last step (default 60)")
    add("--batch-size", type=positive_int, default=8, help="excerpts per rank and batch (default 8)")
    add("--lr", type=float, default=3e-3, help="learning rate (default 3e-3)")
    add("--seed", type=int, default=0, help="of weights and batches (default 0)")
    add("--log-every", type=positive_int, default=20, help="steps between lines (default 20)")
    add("--save-every", type=positive_int, default=20, help="steps between checkpoints, in a run (default 20)")
    add("--sleep-per-step", type=float, default=0.0, help="seconds, to try preemption (default 0)")
    return parser.parse_args()


def take_step(args, accelerator, text, model, optimizer, step):
    """One step over the batches that are added up; return this rank's mean loss."""
    total = torch.zeros((), device=accelerator.device)
    for number in range(args.accumulate):
        excerpts = draw(args, accelerator, text, step, number)
        with accelerator.accumulate(model):
            logits = model(excerpts[:, :-1])
            loss = cross_entropy(logits.float().flatten(0, 1), excerpts[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach() / args.accumulate
    return total


def draw(args, accelerator, text, step, number):
    """One batch: it depends on seed, step and its number among the batches of all ranks."""
    among_all = (step * args.accumulate + number) * accelerator.num_processes + accelerator.process_index
    generator = torch.Generator().manual_seed((args.seed * 1_000_003 + among_all) % 2**63)
    starts = torch.randint(len(text) - CONTEXT, (args.batch_size, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)].to(accelerator.device)


def save(accelerator, step, global_batch):
    """Accelerate writes a folder; it gets the name of a checkpoint when all ranks have written."""
    first = (
        training.saving(step, global_batch=global_batch) if accelerator.is_main_process else contextlib.nullcontext()
    )
    with first as path:
        (folder,) = broadcast_object_list([None if path is None else str(path)])
        if folder is None:  # outside a run
            return
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()


def resume(accelerator, global_batch):
    """Load the newest checkpoint on all ranks; return its step."""
    asks = training is not None and accelerator.is_main_process
    path = training.resume_path(global_batch=global_batch) if asks else None
    (folder,) = broadcast_object_list([None if path is None else str(path)])
    if folder is None:
        return 0
    accelerator.load_state(folder)
    step = int(os.path.basename(folder).removeprefix("step-"))
    if accelerator.is_main_process:
        say(f"resumed after step {step}")
    return step


if __name__ == "__main__":
    main()
