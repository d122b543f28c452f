"""Lightning with torchft: manual optimization on one device. Each item that Lightning reads is a step of the
job.
"""

import lightning  # pyrefly: ignore[missing-import]
import torch
from torch.utils.data import TensorDataset

import torchft

torch.manual_seed(0)  # the same dataset in all groups
job = torchft.Job(device="cpu")
net = torch.nn.Linear(8, 2)
model, optimizer = job.prepare(net, torch.optim.Adam(net.parameters()))
data = job.loader(TensorDataset(torch.rand(1000, 8)), global_batch_size=10, micro_batch_size=5)


class Module(lightning.LightningModule):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.net = net

    def training_step(self, dataloader_iter):  # with this name of the argument, Lightning reads no step ahead
        step, _, _ = next(dataloader_iter)
        for (x,) in step:
            step.backward(model(x).sum())
        if step.commit():
            self.log("loss", step.loss, batch_size=10)

    def configure_optimizers(self):
        return optimizer.optim  # for Lightning's checkpoints


options = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, **options)
trainer.fit(Module(), data)
