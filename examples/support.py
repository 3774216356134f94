"""What the examples share: batches, the options and the report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fleetpipe import parity
from fleetpipe.arguments import new_file
from fleetpipe.dygraph.tensor_parallel import alone
from fleetpipe.parity import Report


def options(description: str, steps: int | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that every example takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help="training steps")
    parser.add_argument("--schedule", default="1F1B", help="schedule by name, e.g. FThenB")
    parser.add_argument(
        "--report", type=new_file, help="write the result of the comparison as JSON"
    )
    parser.add_argument("--trace", type=Path, help="folder for the trace and pictures of the run")
    return parser


def batches(images: np.ndarray, labels: np.ndarray, size: int, steps: int) -> Iterator[list[Any]]:
    """Yields ``steps`` batches [images, labels] in the order of the data, from the start again."""
    for step in range(steps):
        rows = np.arange(step * size, (step + 1) * size) % len(images)
        yield [paddle.to_tensor(images[rows]), paddle.to_tensor(labels[rows])]


class Comparison:
    """Trains a single device beside the pipeline: on its micro-batches, and on whole batches."""

    def __init__(
        self, model: Any, optimizer: Any, make: Callable[..., Any], tolerance: float
    ) -> None:
        """Begins to compare. Collective over the pipeline.

        Args:
            model: The wrapped model.
            optimizer: The wrapped optimizer.
            make: ``make(parameters=..)`` returns an optimizer like it.
            tolerance: Largest relative difference that passes.
        """
        self._pipeline = model
        self._session = parity.begin(model, optimizer, tolerance=tolerance)
        self._whole = model.layers.single_model()
        model.layers.copy_to(self._whole)
        self._optimizer = make(parameters=self._whole.parameters())
        self.report = self._session.report
        self.whole_batch_loss: list[float] = []

    def step(self, batch: list[Any]) -> paddle.Tensor:
        """Trains on a batch, of which every rank gives the rows of its replica. Collective."""
        _, everyone = self._pipeline.shared_micro_batches(batch)
        inputs, labels = paddle.concat(everyone.inputs), paddle.concat(everyone.labels)
        with alone():  # of the ranks that share layers, where there are any
            loss = self._pipeline.layers.loss_fn()(self._whole(inputs), labels)
        loss = loss * float(sum(self._pipeline.weights))
        loss.backward()
        self._optimizer.step()
        self._optimizer.clear_grad()
        self.whole_batch_loss.append(float(loss))
        return self._session.step(batch)[1]


def write_report(path: Path | None, report: Report, **more: Any) -> None:
    """Writes what the comparison found, and more, as one JSON object."""
    if path is not None:
        path.write_text(json.dumps({**report.as_dict(), **more}, indent=1) + "\n", encoding="utf-8")
