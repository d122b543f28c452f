"""Hugging Face's Trainer with torchft: another class, and the samples of a step. All else is its own."""

import torch
from transformers import (  # pyrefly: ignore[missing-import]
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
)

from torchft.huggingface import TorchftTrainer

torch.manual_seed(0)  # the same weights and texts in all groups
net = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2))
texts = [{"input_ids": each, "labels": each} for each in torch.randint(50, (1000, 8))]
arguments = TrainingArguments(
    num_train_epochs=1,
    per_device_train_batch_size=5,
    report_to=[],
    save_strategy="no",  # job={"checkpoint_dir": ...} saves what a job resumes from
    use_cpu=True,
    disable_tqdm=True,
)
trainer = TorchftTrainer(net, arguments, train_dataset=texts, global_batch_size=10)
trainer.train()
