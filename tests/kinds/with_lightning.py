"""Lightning's Trainer with DDP on two nodes: nothing in here knows hpcenv."""

import socket

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def on_fit_start(self):
        place = type(self.trainer.strategy.cluster_environment).__name__
        print(
            f"rank {self.global_rank} of {self.trainer.world_size} on {socket.gethostname()}, started by {place}",
            flush=True,
        )

    def training_step(self, batch, _):
        inputs, target = batch
        loss = nn.functional.mse_loss(self.layer(inputs), target)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            loss, batches = self.trainer.callback_metrics["loss"], self.trainer.num_training_batches
            print(f"epoch {self.current_epoch} loss {loss:.5f} of {batches * self.trainer.world_size} batches")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main():
    lightning.seed_everything(0)
    inputs = torch.randn(256, 8)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    trainer = lightning.Trainer(
        max_epochs=5, accelerator="cpu", strategy="ddp", devices=2, num_nodes=2, enable_progress_bar=False
    )
    trainer.fit(Model(), DataLoader(data, batch_size=16, shuffle=True))


if __name__ == "__main__":
    main()
