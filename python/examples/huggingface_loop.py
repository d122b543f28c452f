"""Hugging Face's Trainer with torchft: each item that the Trainer reads is a step of the job, with batches of
its own.
"""

import os

import torch
from transformers import (  # pyrefly: ignore[missing-import]
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

import torchft

torch.manual_seed(0)  # the same weights and texts in all groups
net = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2))
adam = torch.optim.AdamW(net.parameters())
texts = [{"input_ids": each, "labels": each} for each in torch.randint(50, (1000, 8))]

job = torchft.Job(device="cpu")
model, _ = job.prepare(net, adam)  # and a schedule: the Trainer's own would count steps that are lost
data = job.loader(texts, global_batch_size=10, micro_batch_size=5)


class JobTrainer(Trainer):
    def get_train_dataloader(self):
        for step in data:
            yield {"step": step}
        self.control.should_training_stop = True

    def training_step(self, unused_model, inputs, num_items_in_batch=None):
        step = inputs["step"]
        model.train()
        for batch in step:
            step.backward(self.compute_loss(model, batch))
        step.clip(1.0)
        step.commit()
        net.zero_grad()  # so the step of the Trainer's optimizer, which comes next, does nothing
        return torch.tensor(step.loss)


for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
    os.environ.pop(name, None)  # the job has read them, and the Trainer would wrap the model once more
arguments = TrainingArguments(
    max_steps=1_000_000,  # the end of the data ends the training
    max_grad_norm=0,  # see step.clip
    report_to=[],
    save_strategy="no",  # Job(checkpoint_dir=...) saves
    use_cpu=True,
    disable_tqdm=True,
)
constant = torch.optim.lr_scheduler.ConstantLR(adam, factor=1.0)
JobTrainer(net, arguments, optimizers=(adam, constant)).train()
