"""Trains a small language model with streaming DiLoCo: groups that communicate rarely, and may fail and come
back.

    torchft run --replicas 2 train_diloco.py

The text is the source code of Python's standard library, a part of each installation; the model predicts its
bytes. The groups share each batch of AdamW's steps. In --sync-every such steps each fragment of the model is
averaged over the groups once, one fragment after the other, while the next steps run. One such average is a
step of the job.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import torchft
from torchft.local_sgd import DiLoCo


def main(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # `torchft run` starts all groups on one machine
    job = torchft.Job(device=args.device, isolated=args.isolated, use_async_quorum=False)
    net = language_model(args.width, args.layers, args.context).to(job.device)
    inner = torch.optim.AdamW(net.parameters(), lr=args.lr)
    outer = torch.optim.SGD(net.parameters(), lr=args.outer_lr, momentum=0.9, nesterov=True)
    options = {"fragment_sync_delay": args.delay, "should_quantize": args.quantize}
    diloco = DiLoCo(job.manager, list(net), inner, outer, sync_every=args.sync_every, **options)
    model, _ = job.prepare(net, inner)
    text = Pieces(standard_library(args.text_bytes)[0], args.context)
    epochs = math.ceil(args.steps * args.sync_every * args.batch_size / len(text) / len(net))
    data = job.loader(text, global_batch_size=args.batch_size, micro_batch_size=4, epochs=epochs)
    with diloco:
        for step in data:  # a step of AdamW in each group
            for bytes_in, bytes_out in step:
                step.backward(F.cross_entropy(model(bytes_in).flatten(0, 1), bytes_out.flatten()))
            step.commit()  # some of these start or end an average
            if job.step % 50 == 0:
                print(f"{job.name} step {job.step} loss {step.loss:.4f}", flush=True)
    diloco.restore_global_parameters()  # all groups hold the same
    return net


def language_model(width: int, layers: int, context: int) -> nn.Sequential:
    """Maps bytes (N, T) to logits (N, T, 256), T at most `context`. Each part is a fragment for DiLoCo."""
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
    return nn.Sequential(Embedding(width, context), *(Block(width) for _ in range(layers)), head)


class Embedding(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.place = nn.Parameter(0.02 * torch.randn(context, width))

    def forward(self, text: Tensor) -> Tensor:
        return self.byte(text) + self.place[: text.shape[1]]


class Block(nn.TransformerEncoderLayer):
    """Causal attention and a feed-forward layer: (N, T, width) to the same shape."""

    def __init__(self, width: int) -> None:
        super().__init__(width, max(1, width // 32), 4 * width, dropout=0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        hidden = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        return super().forward(x, hidden, is_causal=True)


class Pieces(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text: bytes (T,), and the next byte for each of them."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.text[index * self.context :][: self.context + 1].long()
        return piece[:-1], piece[1:]


def standard_library(limit: int) -> tuple[Tensor, Tensor]:
    """At most `limit` bytes of Python's standard library for training, and a tenth as many held out."""
    texts = [path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    train = bytearray(b"".join(text for i, text in enumerate(texts) if i % 10)[:limit])
    held_out = bytearray(b"".join(texts[::10])[: limit // 10])
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=600, help="steps of the job, at least: the last epoch is completed")
    add("--sync-every", type=int, default=20, help="steps of AdamW in which each fragment is averaged once")
    add("--delay", type=int, default=1, help="steps of AdamW that run while a fragment is being averaged")
    add("--quantize", action="store_true", help="send 8 bits a parameter")
    add("--width", type=int, default=96)
    add("--layers", type=int, default=3, help="with embedding and head, --layers + 2 fragments")
    add("--context", type=int, default=64, help="bytes from which the next one is predicted")
    add("--text-bytes", type=int, default=4_000_000)
    add("--batch-size", type=int, default=16, help="pieces of text of a step of AdamW, for all groups")
    add("--lr", type=float, default=2e-3, help="learning rate of AdamW")
    add("--outer-lr", type=float, default=0.7, help="learning rate of SGD over the averages")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--isolated", action="store_true", help="run operations between groups in another process")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())
