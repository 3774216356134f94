"""What the examples share: the data, the options and the report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fleetpipe import parity
from fleetpipe.dygraph.tensor_parallel import alone
from fleetpipe.parity import Report


def options(description: str, steps: int | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that every example takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help="training steps")
    parser.add_argument("--schedule", default="1F1B", help="schedule by name, e.g. FThenB")
    parser.add_argument("--report", type=Path, help="write the result of the comparison as JSON")
    parser.add_argument("--trace", type=Path, help="folder for the trace and pictures of the run")
    return parser


def mnist_or_digits(folder: Path | None) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns images float32 [N, 1, 28, 28] in 0..1, labels int64 [N, 1] and the name of the data.

    Args:
        folder: Holds MNIST's train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz. None: the
            1,797 handwritten digits inside scikit-learn, enlarged from 8x8.
    """
    if folder is not None:
        return _mnist(folder)
    from sklearn.datasets import load_digits

    digits = load_digits()
    enlarged = digits.images.repeat(3, axis=1).repeat(3, axis=2) / 16
    images = np.pad(enlarged, ((0, 0), (2, 2), (2, 2)))[:, None].astype("float32")
    return images, digits.target[:, None].astype("int64"), "digits"


def _mnist(folder: Path) -> tuple[np.ndarray, np.ndarray, str]:
    files = [folder / f"train-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    for file in files:
        if not file.exists():
            raise SystemExit(f"there is no {file}: --data needs the folder of MNIST's .gz files")
    dataset = paddle.vision.datasets.MNIST(
        image_path=str(files[0]), label_path=str(files[1]), download=False, backend="cv2"
    )
    images = np.stack([np.asarray(image, "float32").reshape(1, 28, 28) for image, _ in dataset])
    labels = np.stack([np.asarray(label, "int64").reshape(1) for _, label in dataset])
    return images / 255, labels, "MNIST"


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
        path.write_text(json.dumps({**report.as_dict(), **more}, indent=1) + "\n")
