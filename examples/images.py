"""Images to train on: scikit-learn's digits, which are there, and CIFAR-10's own file."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import paddle


def digits(scale: int, channels: int) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns scikit-learn's digits, float32 [N, channels, 8 * scale, 8 * scale], labels, name."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = (found.images / 16).repeat(scale, axis=1).repeat(scale, axis=2)[:, None]
    return (
        images.repeat(channels, axis=1).astype("float32"),
        found.target[:, None].astype("int64"),
        "digits",
    )


def cifar10(file: Path) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns CIFAR-10's training images as float32 [N, 3, 32, 32], labels and name."""
    if not file.exists() or not tarfile.is_tarfile(file):
        raise SystemExit(f"--data needs CIFAR-10's cifar-10-python.tar.gz; there is none at {file}")
    dataset = paddle.vision.datasets.Cifar10(data_file=str(file), download=False, backend="cv2")
    images = np.stack([np.asarray(image).transpose(2, 0, 1) for image, _ in dataset])
    labels = np.array([[int(label)] for _, label in dataset], "int64")
    return images.astype("float32") / 255, labels, "CIFAR-10"


def held_out(images: np.ndarray, labels: np.ndarray) -> tuple[Any, Any]:
    """Returns images and labels to train on, and a sixth of them to evaluate on."""
    order = np.random.RandomState(0).permutation(len(images))
    count = len(images) // 6
    train, test = (
        paddle.io.TensorDataset([paddle.to_tensor(images[part]), paddle.to_tensor(labels[part])])
        for part in (order[count:], order[:count])
    )
    return train, test
