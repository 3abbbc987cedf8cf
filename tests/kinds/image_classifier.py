"""A small convolutional classifier with a DataLoader that has workers and random augmentation. Nothing in here knows
hpcenv."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Shapes(Dataset):
    """Bars that lie or stand, with noise and a random flip."""

    def __len__(self):
        return 128

    def __getitem__(self, index):
        image = np.random.normal(0, 0.3, (1, 12, 12)).astype("float32")  # noqa: NPY002  (as such scripts are)
        label = index % 2
        where = random.randrange(12)
        image[0, where, :] += 1.0 - label
        image[0, :, where] += label
        if torch.rand(()) < 0.5:
            image = image[:, ::-1].copy()
        return torch.from_numpy(image), label


def main():
    dist.init_process_group("gloo")
    data = Shapes()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(200, 2)
    )
    net = DistributedDataParallel(net)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    # torch 2.13 may wait forever if the group's last owner is a DDP model (docs/how-to/diagnose.md).
    del net
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
