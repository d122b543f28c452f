"""A script of Lightning that gets SIGTERM in step 3 of 15. The argument is the folder of Lightning."""

import os
import signal
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(sys.argv[1])
import lightning

from torchft.lightning import TorchftStrategy


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


strategy = TorchftStrategy(global_batch_size=4, snapshots=0)
quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, strategy=strategy, max_epochs=3, **dict.fromkeys(quiet, False)
)
trainer.fit(Module(), DataLoader(TensorDataset(torch.rand(20, 4)), batch_size=4))
how = "drained" if strategy.job.manager.draining() else "ended"
print(f"behind fit: {how} after step {strategy.job.step}", flush=True)
