"""accelerate's Accelerator: nothing in here knows hpcenv."""

import socket

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    print(
        f"rank {accelerator.process_index} of {accelerator.num_processes} on {socket.gethostname()},"
        f" started as {accelerator.distributed_type.value}",
        flush=True,
    )
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))
    for epoch in range(5):
        losses = []
        for batch, target in loader:
            loss = nn.functional.mse_loss(model(batch), target)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach().reshape(1))
        every = accelerator.gather(torch.cat(losses))
        accelerator.print(f"epoch {epoch} loss {every.mean():.5f} of {len(every)} batches")
    # torch 2.13 may wait forever if the group's last owner is a DDP model (docs/how-to/diagnose.md).
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


if __name__ == "__main__":
    main()
