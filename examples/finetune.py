"""Continue the training of a causal language model of Hugging Face with DistributedDataParallel.

Runs on: every rank of a job, under torchrun or alone. Needs train.py beside it, what that needs, and transformers
(tried with 5.24).

    hpcenv submit examples/finetune.py --nodes 2 --gpus 8 -- --model ORG/NAME --train-blocks 2

`--model` is a folder, or a repository that `[[data]] hub` of hpcenv.toml names (docs/how-to/hub.md): the login node
has fetched it, and the nodes need no network. Without `--model` the script makes a small GPT-2 with random weights
that reads bytes, to try all else; it has learned nothing before.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from train import SHIPPED_TEXT, find_place, join_ranks, positive_int, say
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

try:
    from hpcenv import training
except ImportError:  # without hpcenv it trains, and saves nothing
    training = None


def main():
    args = parse_arguments()
    place = find_place(os.environ)
    join_ranks(place)
    train(args, place)
    # What holds the process group is gone by now; a group that is kept alive cannot stop its threads.
    dist.destroy_process_group()


def train(args, place):
    model, tokens = load(args, place)
    chosen = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(chosen, lr=args.lr)
    parallel = DistributedDataParallel(model, device_ids=[place.local_rank] if place.device.type == "cuda" else None)
    global_batch = args.batch_size * place.world_size
    step = resume(place, model, optimizer, global_batch)
    model.train()
    # DistributedDataParallel orders its sums by the first backward pass that it sees, see train.py.
    parallel(input_ids=draw(tokens, args, place, 0)).logits.sum().backward()
    stop = False
    while step < args.steps and not stop:
        step += 1
        excerpts = draw(tokens, args, place, step)
        # The model drops activations at random. Seeded for each step, so a checkpoint needs no random state.
        torch.manual_seed((args.seed * 1_000_003 + step) * place.world_size + place.rank)
        loss = parallel(input_ids=excerpts, labels=excerpts).loss
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
    add("--model", help="folder, or ORG/NAME of [[data]] hub (default: a small GPT-2 with random weights)")
    add(
        "--train-blocks", type=int, default=0, help="train the last N blocks and the head only (default 0: all weights)"
    )
    add("--length", type=positive_int, default=64, help="tokens of an excerpt (default 64)")
    add("--steps", type=positive_int, default=60, help="last step (default 60)")
    add("--batch-size", type=positive_int, default=4, help="excerpts per rank (default 4)")
    add("--lr", type=float, default=1e-3, help="learning rate (default 1e-3)")
    add("--seed", type=int, default=0, help="of weights and batches (default 0)")
    add("--log-every", type=positive_int, default=20, help="steps between lines (default 20)")
    add("--save-every", type=positive_int, default=20, help="steps between checkpoints, in a run (default 20)")
    add("--sleep-per-step", type=float, default=0.0, help="seconds, to try preemption (default 0)")
    return parser.parse_args()


def load(args, place):
    """The model with the weights that are trained, and the text as its tokens."""
    text = SHIPPED_TEXT.read_text(encoding="utf-8")
    torch.manual_seed(args.seed)
    if args.model is None:
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": args.length, "vocab_size": 256}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        numbers = list(text.encode("utf-8"))
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        numbers = AutoTokenizer.from_pretrained(args.model)(text)["input_ids"]
    if place.rank == 0:
        origin = f"the weights of {args.model}" if args.model else "random weights: name a model with --model"
        say(f"{type(model).__name__} with {origin}")
    if args.train_blocks:
        train_the_end(model, args.train_blocks)
    return model.to(place.device), torch.tensor(numbers)


def train_the_end(model, blocks):
    """Keep all weights but those of the last blocks and of what comes after them."""
    # The longest list of modules is that of the blocks, whatever a model calls it.
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    last = max(lists, key=len)[-blocks:]
    model.requires_grad_(False)
    for module in (*last, model.get_output_embeddings()):
        module.requires_grad_(True)


def draw(tokens, args, place, step):
    """This rank's excerpts, which depend on seed, step and rank only."""
    generator = torch.Generator().manual_seed(((args.seed * 1_000_003 + step) * place.world_size + place.rank) % 2**63)
    starts = torch.randint(len(tokens) - args.length, (args.batch_size, 1), generator=generator)
    return tokens[starts + torch.arange(args.length)].to(place.device)


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
