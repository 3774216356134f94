"""``colossalai.utils``: the timers and the loader of its tutorials, and Titans' ``build_cifar``."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from fleetpipe.errors import StateError, UsageError, nearest
from fleetpipe.io import DataLoader, sample_generator
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import device_clock

#: The name of the file on its own site and in Paddle.
FILE = "cifar-10-python.tar.gz"
_MEAN = np.array([0.4914, 0.4822, 0.4465], "float32")
_SCALE = np.array([0.2023, 0.1994, 0.2010], "float32")


class Timer:
    """Measures the times between calls of :meth:`start` and :meth:`stop`, in seconds."""

    _begun: float | None

    def __init__(self) -> None:
        self.reset()

    def start(self) -> None:
        """Begins to measure a time."""
        self._begun = device_clock()()

    def stop(self, keep_in_history: bool = False) -> float:
        """Ends the measurement; returns its seconds.

        Args:
            keep_in_history: Whether the mean and the sum include it.

        Raises:
            StateError: The timer was not started.
        """
        if self._begun is None:
            raise StateError("this timer does not run", fix="call start() before stop()")
        self._elapsed, self._begun = device_clock()() - self._begun, None
        if keep_in_history:
            self._history.append(self._elapsed)
        return self._elapsed

    def reset(self) -> None:
        """Drops all times."""
        self._history: list[float] = []
        self._begun = None
        self._elapsed = 0.0

    def get_elapsed_time(self) -> float:
        """Returns the time that was measured last, in seconds; 0 if there is none."""
        return self._elapsed

    def get_history_sum(self) -> float:
        """Returns the sum of the times in the history, in seconds."""
        return sum(self._history)

    def get_history_mean(self) -> float:
        """Returns the mean of the times in the history, in seconds; 0 if there are none."""
        return self.get_history_sum() / max(len(self._history), 1)


class MultiTimer:
    """Timers by name; ``Trainer`` has ``Train-step``, ``Train-epoch``, ``Test-step`` and so on."""

    def __init__(self, on: bool = True) -> None:
        """Begins without any timers.

        Args:
            on: Whether times are measured; if False, all calls do nothing.
        """
        self._on = on
        self._timers: dict[str, Timer] = {}

    def start(self, name: str) -> None:
        """Starts the timer of a name, which may be new."""
        if self._on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float | None:
        """Stops a timer; returns the seconds, or None if timers are off.

        Raises:
            StateError: The timer was not started.
        """
        return self.get_timer(name).stop(keep_in_history) if self._on else None

    def get_timer(self, name: str) -> Timer:
        """Returns the timer of a name.

        Raises:
            StateError: There is no timer of that name.
        """
        if name not in self._timers:
            raise StateError(
                f"there is no timer {name!r}", fix=f"start it first; {nearest(name, self._timers)}"
            )
        return self._timers[name]

    def reset(self, name: str | None = None) -> None:
        """Drops the times of one timer, or of all; does nothing if timers are off.

        Raises:
            StateError: There is no timer of that name.
        """
        if self._on:
            for timer in self._timers.values() if name is None else [self.get_timer(name)]:
                timer.reset()


def get_dataloader(
    dataset: Any,
    shuffle: bool = False,
    drop_last: bool = True,
    num_workers: int = 0,
    batch_size: int = 1,
    seed: int = 1024,
    add_sampler: bool = True,
    pin_memory: bool = False,
    **options: Any,
) -> DataLoader:
    """Returns a :class:`fleetpipe.io.DataLoader`; all ranks of a pipeline read the same batches.

    Args:
        dataset: Any dataset with a length.
        shuffle: Whether to shuffle, in an order that depends on seed and epoch only.
        drop_last: Whether to drop an incomplete last batch.
        num_workers: Processes that read.
        batch_size: Rows of a batch of one replica.
        seed: The seed of the order.
        add_sampler: Accepted without effect: each replica has its own samples.
        pin_memory: Accepted without effect.
        options: Other options of Paddle's loader, by name.

    Raises:
        StateError: ``launch_from_torch`` was not called before, in one of several processes.
    """
    options.update(batch_size=batch_size, num_workers=num_workers, seed=seed)
    return DataLoader(dataset, shuffle=shuffle, drop_last=drop_last, **options)


def build_cifar(
    batch_size: int,
    root: str | os.PathLike[str],
    padding: int | None = None,
    crop: int | None = None,
    resize: int | None = None,
    num_workers: int = 0,
) -> tuple[DataLoader, DataLoader]:
    """Returns the loaders of CIFAR-10's training and test images.

    Images are float32 [batch_size, 3, size, size], normalized, labels int64 [batch_size]. Training
    images are shuffled, cropped at random and mirrored at random, in the same way on all ranks of a
    pipeline; test images are not. A training batch is never short. Titans changes colours at random
    too (AutoAugment), which is left out.

    Args:
        batch_size: Rows of a batch of one replica.
        root: The file ``cifar-10-python.tar.gz``, or its folder. Nothing is downloaded.
        padding: Black pixels at each side of a training image, before it is cropped.
        crop: Size of the random part that is cut out; None for the whole image.
        resize: Size to which test images are scaled; None leaves them.
        num_workers: Processes that read.

    Raises:
        UsageError: There is no such file.
        StateError: ``launch_from_torch`` was not called before, in one of several processes.
    """
    file = Path(root) if Path(root).is_file() else Path(root) / FILE
    if not file.is_file() or not tarfile.is_tarfile(file):
        raise UsageError(
            "build_cifar reads CIFAR-10's own file, which is not there",
            expected=f"a tar file at {file}",
            fix="download https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz to there, or "
            "give the folder that has it",
        )
    train, test = (
        paddle.vision.datasets.Cifar10(str(file), mode, download=False, backend="pil")
        for mode in ("train", "test")
    )
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": num_workers}
    return (
        get_dataloader(Images(train, padding or 0, crop), shuffle=True, **options),
        get_dataloader(Images(test, resize=resize), drop_last=False, **options),
    )


class Images(paddle.io.Dataset):  # type: ignore[type-arg, unused-ignore]  # 2.6.2 takes no argument
    """CIFAR's images, cropped or resized, and normalized."""

    def __init__(
        self, images: Any, padding: int = 0, crop: int | None = None, resize: int | None = None
    ) -> None:
        """Sets how the images are changed.

        Args:
            images: A dataset of PIL's images and labels.
            padding: Black pixels at each side of an image, before it is cropped.
            crop: Size of the random part that is cut out; half of these parts are mirrored. None
                for the whole image.
            resize: Size to which images are scaled; None leaves them.
        """
        self._images = images
        self._padding, self._crop, self._size = padding, crop, resize

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        image, label = self._images[index]
        if self._size is not None:
            image = image.resize((self._size, self._size))
        pixels = np.asarray(image, "float32") / 255
        if self._crop is not None:
            pixels = self._crop_at_random(pixels, self._crop)
        pixels = (pixels - _MEAN) / _SCALE
        return np.ascontiguousarray(pixels.transpose(2, 0, 1)), np.int64(label)

    def __len__(self) -> int:
        return len(self._images)

    def _crop_at_random(self, pixels: np.ndarray, size: int) -> np.ndarray:
        """Returns a random part of the padded image, mirrored in half of the calls."""
        numbers = sample_generator()
        side = (self._padding, self._padding)
        padded = np.pad(pixels, (side, side, (0, 0)))
        top, left = numbers.integers(0, padded.shape[0] - size + 1, 2)
        part = padded[top : top + size, left : left + size]
        return part[:, ::-1] if numbers.random() < 0.5 else part
