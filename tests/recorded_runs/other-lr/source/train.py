"""Fit a small linear model; the global batch stays the same with `--accumulate`."""

import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    for part in range(args.accumulate):
        generator = torch.Generator().manual_seed(step * 1000 + rank * args.accumulate + part)
        x = torch.randn(8, 16, generator=generator)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        (loss / args.accumulate).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
print("final loss", loss.item())
dist.destroy_process_group()
