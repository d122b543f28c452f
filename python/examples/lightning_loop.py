"""Lightning with torchft: a strategy, and the samples of a step. All else is Lightning's."""

import lightning  # pyrefly: ignore[missing-import]
import torch
from torch.utils.data import DataLoader, TensorDataset

from torchft.lightning import TorchftStrategy

torch.manual_seed(0)  # the same weights and data in all groups


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


data = DataLoader(TensorDataset(torch.rand(1000, 8)), batch_size=5, shuffle=True)
strategy = TorchftStrategy(global_batch_size=10)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,  # of a process; further ones are further groups
    strategy=strategy,
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,  # TorchftStrategy(checkpoint_dir=...) saves what a job resumes from
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), data)
