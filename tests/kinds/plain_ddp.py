"""DistributedDataParallel as PyTorch's own tutorials write it: nothing in here knows hpcenv."""

import os
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world_size} on {socket.gethostname()}", flush=True)
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for batch, target in loader:
            loss = nn.functional.mse_loss(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total[0] / total[1]:.5f} of {int(total[1])} batches", flush=True)
    if int(os.environ["LOCAL_RANK"]) == 0:
        print(f"weights {model.module.weight.detach().sum():.5f}", flush=True)
    # torch 2.13 may wait forever if the group's last owner is a DDP model (docs/how-to/diagnose.md).
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
