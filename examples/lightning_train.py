"""The model of train.py as a LightningModule, trained by Lightning's Trainer.

Runs on: every rank of a job, under torchrun (hpcenv starts it): Lightning sees torchrun's variables and starts none.
Needs train.py beside it, what that needs, and lightning (tried with 2.6).

    hpcenv submit examples/lightning_train.py --nodes 2 --gpus 8 -- --precision bf16-mixed --accumulate 2
"""

import argparse
import contextlib
import itertools
import os
import time

import lightning
import torch
import torch.distributed as dist
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
    torch.manual_seed(args.seed)
    local, world = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local
    global_batch = args.batch_size * args.accumulate * world
    trainer = lightning.Trainer(
        accelerator="gpu" if gpus else "cpu", devices=local, num_nodes=world // local,
        strategy="ddp" if world > 1 else "auto", precision=args.precision, accumulate_grad_batches=args.accumulate,
        max_steps=args.steps, callbacks=[Keep(args, global_batch)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    # The ranks do not know each other yet, so each looks for itself.
    path = None if training is None else training.resume_path(global_batch=global_batch)
    trainer.fit(Module(args, world), Numbers(), ckpt_path=path, weights_only=False)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--precision", choices=("32-true", "bf16-mixed", "16-mixed"), default="32-true", help="(default 32-true)")
    add("--accumulate", type=positive_int, default=1, help="batches that are added up for one step (default 1)")
    add("--steps", type=positive_int, default=60, help="last step (default 60)")
    add("--batch-size", type=positive_int, default=8, help="excerpts per rank and batch (default 8)")
    add("--lr", type=float, default=3e-3, help="learning rate (default 3e-3)")
    add("--seed", type=int, default=0, help="of weights and batches (default 0)")
    add("--log-every", type=positive_int, default=20, help="steps between lines (default 20)")
    add("--save-every", type=positive_int, default=20, help="steps between checkpoints, in a run (default 20)")
    add("--sleep-per-step", type=float, default=0.0, help="seconds, to try preemption (default 0)")
    return parser.parse_args()


class Numbers(torch.utils.data.IterableDataset):
    """Endless: a batch depends on the step, and Lightning counts the steps."""

    def __iter__(self):
        return itertools.count()


class Module(lightning.LightningModule):
    def __init__(self, args, world_size):
        super().__init__()
        self.args, self.world_size = args, world_size
        self.text, vocabulary = read_text(SHIPPED_TEXT)
        self.model = CharacterModel(len(vocabulary))
        self.number = 0  # of the batch within a step

    def training_step(self, _batch):
        args = self.args
        among_all = ((self.global_step + 1) * args.accumulate + self.number) * self.world_size + self.global_rank
        self.number = (self.number + 1) % args.accumulate
        generator = torch.Generator().manual_seed((args.seed * 1_000_003 + among_all) % 2**63)
        starts = torch.randint(len(self.text) - CONTEXT, (args.batch_size, 1), generator=generator)
        excerpts = self.text[starts + torch.arange(CONTEXT + 1)].to(self.device)
        return cross_entropy(self.model(excerpts[:, :-1]).float().flatten(0, 1), excerpts[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=self.args.lr)


class Keep(lightning.Callback):
    """Says the loss, saves, and stops when the scheduler wants the nodes back."""

    def __init__(self, args, global_batch):
        self.args, self.global_batch, self.last = args, global_batch, 0

    def on_train_start(self, trainer, module):
        self.last = trainer.global_step  # after a resume, not 0
        # DistributedDataParallel orders its sums by the first backward pass that it sees, see train.py.
        trainer.strategy.training_step(0).backward()
        module.zero_grad()
        module.number = 0

    def on_train_batch_end(self, trainer, _module, outputs, _batch, _index):
        step, args = trainer.global_step, self.args
        if step == self.last:  # the step goes on: batches are added up
            return
        self.last = step
        time.sleep(args.sleep_per_step)
        if trainer.is_global_zero and (step == 1 or step % args.log_every == 0 or step == args.steps):
            say(f"step {step}  loss {outputs['loss'].item() * args.accumulate:.9g}  global batch {self.global_batch}")
        stop = training is not None and training.stop_requested()
        if training is not None and (stop or step == args.steps or step % args.save_every == 0):
            self.save(trainer, step)
        trainer.should_stop = trainer.should_stop or stop

    def save(self, trainer, step):
        first = (
            training.saving(step, global_batch=self.global_batch)
            if trainer.is_global_zero
            else contextlib.nullcontext()
        )
        with first as path:
            box = [None if path is None else str(path)]
            if dist.is_initialized():
                dist.broadcast_object_list(box, src=0)
            if box[0] is not None:
                trainer.save_checkpoint(box[0])


if __name__ == "__main__":
    main()
