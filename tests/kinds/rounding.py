"""A small training whose last bits depend on how the CPU rounds: layer norm, softmax, SiLU, AdamW. Nothing in here knows
hpcenv. Data come from `torch.rand`, which gives the same numbers with all CPU kernels."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--steps", type=int, default=12)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 8), nn.Softmax(dim=1))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
for step in range(1, args.steps + 1):
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    inputs = torch.rand(16, 32, generator=generator)
    loss = ((model(inputs) - inputs[:, :8]) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
print("final loss", loss.item())
dist.destroy_process_group()
