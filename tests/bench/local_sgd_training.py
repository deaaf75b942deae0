"""The training of bench_local_sgd.py, the same for all systems: a GPT, real text, and the kernel's counts of bytes."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import nn

BATCH, LENGTH, WIDTH, LAYERS, HEADS = 8, 32, 128, 2, 4
EVERY = 20
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}

_BYTES_RECEIVED_AT = 128  # tcpi_bytes_received in struct tcp_info of linux/tcp.h


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 128)
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH - 1)  # no buffer: DDP would send it

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        scores: torch.Tensor = self.head(self.layers(x, self.mask, is_causal=True))
        return scores


class Text(NamedTuple):
    training: torch.Tensor
    evaluation: torch.Tensor


def read_text() -> Text:
    text = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
    pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return Text(pieces[: len(pieces) * 9 // 10], pieces[len(pieces) * 9 // 10 :])


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make_training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = GPT()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def inner_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, text: Text, seed: int, worker: int, step: int, pace: float
) -> None:
    """Train on pieces that depend on seed, worker and step alone. ``pace``: seconds to wait."""
    time.sleep(pace)
    generator = torch.Generator().manual_seed((seed * 100 + worker) * 100_000 + step)
    tokens = text.training[torch.randint(len(text.training), (BATCH,), generator=generator)]
    optimizer.zero_grad()
    loss_of(model, tokens).backward()
    optimizer.step()


def received_bytes() -> int:
    """Return how many bytes the TCP connections of this process have received, counted by the kernel."""
    total = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        except OSError:  # closed since
            continue
        if not is_socket:
            continue
        connection = socket.socket(fileno=os.dup(descriptor))
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                if len(information) >= _BYTES_RECEIVED_AT + 8:
                    total += struct.unpack_from("Q", information, _BYTES_RECEIVED_AT)[0]
    return total


class Meter:
    """Bytes and seconds of one worker per inner step, between its first and its last outer step."""

    def __init__(self, folder: Path, worker: int) -> None:
        self._folder, self._worker = folder, worker
        self._marks: list[tuple[int, int, float]] = []

    def mark(self, step: int) -> None:
        """Note an outer step. The file with the step is what the bench waits for."""
        self._marks.append((step, received_bytes(), time.monotonic()))
        (self._folder / f"at-{self._worker}").write_text(f"{step} {os.getpid()}")

    def write_result(self, model: nn.Module, text: Text) -> None:
        with torch.no_grad():
            result = {"loss": loss_of(model, text.evaluation).item(), "worker": self._worker}
        if len(self._marks) > 1:
            (first, bytes_before, began), (last, bytes_after, ended) = self._marks[0], self._marks[-1]
            result["bytes"] = (bytes_after - bytes_before) / (last - first)
            result["ms"] = (ended - began) / (last - first) * 1e3
        (self._folder / f"result-{self._worker}").write_text(json.dumps(result))
