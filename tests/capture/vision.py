"""Every constructor of ``paddle.vision.models``, unmodified, on 2 and 4 stages, beside itself.

``python -m tests.capture.vision [NAME ..]`` prints a table in Markdown, a row as each is done, and
ends with 1 where one does not have the plain model's bits. "To rounding" is where the proof says
that a value's gradient is added up stage by stage: a cut between the branches that take it.
`make test-models` runs it for all.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.vision import models

from tests.capture.models import IMAGE_CLASSES, Result, trained
from tests.pipelines import job

#: Channels and size of the images, where 32 x 32 in three colours is too small.
IMAGES = {
    "AlexNet": (3, 224),
    "alexnet": (3, 224),
    "GoogLeNet": (3, 224),
    "googlenet": (3, 224),
    "InceptionV3": (3, 96),
    "inception_v3": (3, 96),
    "LeNet": (1, 28),
    "squeezenet1_0": (3, 64),
    "squeezenet1_1": (3, 64),
}

HEADINGS = ("model", "parameters", "nodes", "2 stages", "4 stages", "bits")


def constructors() -> dict[str, Callable[..., Any]]:
    """Returns the functions that make a model, and LeNet, which has none, by name."""
    found = {name: one for name, one in vars(models).items() if inspect.isfunction(one)}
    return {**found, "LeNet": models.LeNet}


def loss_fn(output: Any, labels: Any) -> Any:
    """The mean cross entropy of one output, or of GoogLeNet's three."""
    outputs = output if isinstance(output, (tuple, list)) else [output]
    losses = [nn.functional.cross_entropy(one, labels) for one in outputs]
    return sum(losses[1:], losses[0]) / len(losses)


def compared(name: str, stages: int, steps: int = 3, **options: Any) -> Result:
    """Trains a model, cut by cost, beside the plain one, on two micro-batches of two images."""
    channels, size = IMAGES.get(name, (3, 32))
    numbers = np.random.default_rng(0)
    data = [
        paddle.to_tensor(numbers.standard_normal((4, channels, size, size)).astype("float32")),
        paddle.to_tensor(numbers.integers(0, IMAGE_CLASSES, (4, 1))),
    ]
    with job(stages, 2):
        return trained(
            lambda: constructors()[name](num_classes=IMAGE_CLASSES),
            data,
            micro_batches=2,
            steps=steps,
            loss_fn=loss_fn,
            keyed=True,
            **options,
        )


def row(name: str) -> tuple[str, ...]:
    """Returns what the table says of a model."""
    done = {stages: compared(name, stages, verify=True) for stages in (2, 4)}
    choices = {stages: result.pipe.choice for stages, result in done.items()}
    pipe = done[2].pipe
    differing = [what for result in done.values() for what in result.differing]
    gaps = [gap for result in done.values() for gap in result.pipe.proof.rounded.values()]
    if differing and gaps:
        verdict = f"to rounding, {max(gaps):.0e}"
    else:
        verdict = f"differ: {len(differing)}, {differing[0]}" if differing else "equal"
    return (
        name,
        f"{sum(parameter.size for parameter in pipe.parameters()):,}",
        str(len(pipe.captures.of_example(training=True).trace.nodes)),
        *(f"{1e3 * one.bottleneck:.0f} / {1e3 * one.bound:.0f} ms" for one in choices.values()),
        verdict,
    )


def table(names: list[str]) -> Iterator[str]:
    """Yields the lines of the table."""
    for cells in (HEADINGS, ("---",) * len(HEADINGS)):
        yield f"| {' | '.join(cells)} |"
    for name in names:
        yield f"| {' | '.join(row(name))} |"


if __name__ == "__main__":
    right = True
    for line in table(sys.argv[1:] or sorted(constructors())):
        print(line, flush=True)
        right = right and "differ" not in line
    sys.exit(not right)
