"""A small training whose last bits depend on how the CPU rounds: layer norm, softmax, SiLU, AdamW. Nothing in here knows
hpcenv. Data come from `torch.rand`, which gives the same numbers with all CPU kernels. `--accumulate` keeps the global batch
with fewer ranks."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 8), nn.Softmax(dim=1))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    for part in range(args.accumulate):
        generator = torch.Generator().manual_seed(step * 1000 + rank * args.accumulate + part)
        inputs = torch.rand(16, 32, generator=generator)
        loss = ((model(inputs) - inputs[:, :8]) ** 2).mean()
        (loss / args.accumulate).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
print("final loss", loss.item())
dist.destroy_process_group()
