"""Images to train on: handwritten digits, and the own files of MNIST and CIFAR-10.

``digits.csv.gz`` is "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak, UCI
Machine Learning Repository, under CC BY 4.0: the 1,797 images that scikit-learn has, in its form.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import paddle


def _handwritten() -> tuple[np.ndarray, np.ndarray]:
    """Returns images of 0..16, float64 [N, 8, 8], and the digits that they show, int64 [N, 1]."""
    rows = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1:].astype("int64")


def digits(scale: int, channels: int) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns digits, float32 [N, channels, 8 * scale, 8 * scale], their labels and their name."""
    images, labels = _handwritten()
    images = (images / 16).repeat(scale, axis=1).repeat(scale, axis=2)[:, None]
    return images.repeat(channels, axis=1).astype("float32"), labels, "digits"


def mnist_or_digits(folder: Path | None) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns images float32 [N, 1, 28, 28] in 0..1, labels int64 [N, 1] and the name of the data.

    Args:
        folder: Holds MNIST's train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz. None: the
            1,797 handwritten digits beside this file, enlarged from 8x8.
    """
    if folder is not None:
        return _mnist(folder)
    images, labels = _handwritten()
    enlarged = images.repeat(3, axis=1).repeat(3, axis=2) / 16
    images = np.pad(enlarged, ((0, 0), (2, 2), (2, 2)))[:, None].astype("float32")
    return images, labels, "digits"


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
