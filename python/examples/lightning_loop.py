"""Lightning with torchft: manual optimization on one device; Lightning's multi-device strategies end at a
failure.
"""

from typing import Any

import lightning  # pyrefly: ignore[missing-import]
import torch

from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.process_group import ProcessGroupGloo

net = torch.nn.Linear(8, 2)
adam = torch.optim.Adam(net.parameters())


def load_state_dict(state: Any) -> None:
    net.load_state_dict(state["net"])
    adam.load_state_dict(state["adam"])


manager = Manager(
    pg=ProcessGroupGloo(),
    load_state_dict=load_state_dict,
    state_dict=lambda: {"net": net.state_dict(), "adam": adam.state_dict()},
    min_replica_size=1,
)


class Module(lightning.LightningModule):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.net = DistributedDataParallel(manager, net)
        self.optimizer = Optimizer(manager, adam)

    def configure_optimizers(self):
        return adam  # for Lightning's checkpoints

    def training_step(self, batch, index):
        self.optimizer.zero_grad()
        self.manual_backward(self.net(batch[0]).sum())
        self.optimizer.step()
        self.trainer.should_stop = manager.current_step() >= 100 or manager.draining()


data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(1000, 8)), batch_size=4)
options = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=-1, **options)
trainer.fit(Module(), data)
manager.shutdown()
