"""The peer that ``pipeline.py`` measures: the same stack in torch, under its own 1F1B over gloo.

It runs in an environment of its own, which has torch and not Paddle, and serves as
``pipeline_worker.py`` does.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Block(nn.Module):
    """The block of ``gpt.py``."""

    def __init__(self, hidden: int, heads: int, length: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = nn.MultiheadAttention(hidden, heads, batch_first=True)
        self.feed_norm = nn.LayerNorm(hidden)
        self.feed = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )
        self.register_buffer("mask", torch.triu(torch.full([length, length], -1e9), 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, attn_mask=self.mask, need_weights=False)[0]
        return x + self.feed(self.feed_norm(x))


def step_of(case: dict[str, Any], kind: str) -> tuple[int, Callable[[], object]]:
    """Returns this process's rank, and what trains one batch."""
    ranks = case["ranks"] if kind == "pipeline" else 1
    rank = int(os.environ.get("RANK", "0"))
    blocks = case["blocks"] // ranks
    model = nn.Sequential(
        *(Block(case["hidden"], case["heads"], case["length"]) for _ in range(blocks))
    )
    adam = torch.optim.Adam(model.parameters(), 1e-4)
    count, criterion = case["micro_batches"], nn.MSELoss()
    shape = (count * case["rows"], case["length"], case["hidden"])
    inputs, targets = torch.randn(shape), torch.randn(shape)
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
        # What it would send to learn the shapes needs numpy.
        part = inputs[: case["rows"]]
        ends = part.clone().requires_grad_(rank > 0), part.clone().requires_grad_()
        stage = PipelineStage(model, rank, ranks, torch.device("cpu"), *ends)
        schedule = Schedule1F1B(stage, count, loss_fn=criterion)
    first, last = rank == 0, rank == ranks - 1

    def backward() -> None:
        if ranks > 1:
            schedule.step(*[inputs] * first, target=targets if last else None)
            return
        for rows, labels in zip(inputs.chunk(count), targets.chunk(count)):
            (criterion(model(rows), labels) / count).backward()

    def step() -> None:
        backward()
        adam.step()
        adam.zero_grad()

    return rank, step


def main() -> None:
    """Serves as ``pipeline_worker.py`` does; it answers nothing but "train"."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["pipeline", "single"])
    parser.add_argument("case", type=json.loads, help="its attributes, as JSON")
    parser.add_argument("address")
    arguments = parser.parse_args()
    rank, step = step_of(arguments.case, arguments.kind)
    with Client(arguments.address, "AF_UNIX") as driver:
        driver.send(rank)
        while (command := driver.recv())[0] == "train":
            wall, processor = time.perf_counter(), time.process_time()
            for _ in range(command[1]):
                step()
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            seconds = {"seconds": wall / command[1], "processor": processor / command[1]}
            driver.send({**seconds, "losses": []})
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
