"""Trains a captured model beside the plain one, and names what differs in bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.capture.running.head import loss_input
from fleetpipe.capture.running.plain_model import call_keyed
from fleetpipe.dygraph.nest import map_tensors
from fleetpipe.schedules.action import GlobalMicroBatch
from tests.jobs import job
from tests.pipelines import accumulate

CLASSES = 10


class Result(NamedTuple):
    """What came of it.

    Attributes:
        pipe: The captured model.
        model: It, wrapped.
        plain: The plain model, after the same steps.
        differing: What differs: "step 0 loss", "step 0 gradient of fc.weight", ...
    """

    pipe: Any
    model: Any
    plain: Any
    differing: list[str]


def images(rows: int, size: int = 32, seed: int = 0) -> list[Any]:
    """[images, labels]: rows x 3 x size x size, and classes."""
    numbers = np.random.default_rng(seed)
    return [
        paddle.to_tensor(numbers.standard_normal((rows, 3, size, size)).astype("float32")),
        paddle.to_tensor(numbers.integers(0, CLASSES, (rows, 1))),
    ]


def trained(
    build: Callable[[], Any],
    data: list[Any],
    *,
    micro_batches: int = 4,
    steps: int = 3,
    loss_fn: Any = None,
    keyed: bool = False,
    **options: Any,
) -> Result:
    """Trains by SGD in the current job, of one process, and compares losses, gradients, state.

    Args:
        build: Makes the plain model.
        data: The inputs and the labels of a batch, used in every step.
        micro_batches: Those of the job.
        steps: How many.
        loss_fn: By default the cross entropy.
        keyed: Whether the plain model draws random numbers under the pipeline's keys.
        options: Those of ``fleetpipe.pipeline``.
    """
    loss_fn = loss_fn or nn.CrossEntropyLoss()
    paddle.seed(7)
    model = build()
    plain = copy.deepcopy(model)
    parts = _micro_batches(data, micro_batches)
    pipe = fleetpipe.pipeline(model, parts[0][0], loss_fn=loss_fn, **options)
    differing = _different("start", pipe.state_dict(), plain.state_dict())
    wrapped = fleet.distributed_model(pipe)
    ours = paddle.optimizer.SGD(0.05, parameters=pipe.parameters())
    theirs = paddle.optimizer.SGD(0.05, parameters=plain.parameters())
    plain.train()
    for step in range(steps):
        keys = wrapped.next_keys() if keyed else None
        loss = wrapped.forward_backward_pipeline(data)
        total = accumulate(
            loss_fn(called(pipe, plain, inputs, keys, number), labels) / micro_batches
            for number, (inputs, labels) in enumerate(parts)
        )
        differing += _different(f"step {step}", {"loss": loss}, {"loss": total})
        differing += _different(f"step {step} gradient of", _gradients(pipe), _gradients(plain))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.clear_grad()
        differing += _different(f"step {step}", pipe.state_dict(), plain.state_dict())
    return Result(pipe, wrapped, plain, differing)


def called(pipe: Any, plain: nn.Layer, inputs: Any, keys: Any, number: int) -> Any:
    """What the loss takes of the plain model, which draws as the pipeline does with ``keys``."""
    unopened = pipe.forms.capturing.unopened
    return loss_input(plain, call_keyed(plain, inputs, unopened, keys, GlobalMicroBatch(number)))


def require_bits(
    build: Callable[[], Any],
    data: list[Any],
    split_spec: Any = "auto",
    schedule: str = "1F1B",
    **options: Any,
) -> Result:
    """Trains in a job of as many stages as ``split_spec`` says, or two, with the plain bits."""
    stages = 2 if split_spec == "auto" else len(split_spec) + 1
    with job(stages // options.get("num_chunks", 1), options.get("micro_batches", 4), schedule):
        done = trained(build, data, split_spec=split_spec, **options)
    assert done.differing == []
    return done


def _micro_batches(data: list[Any], count: int) -> list[tuple[Any, Any]]:
    def part(index: int) -> Callable[[Any], Any]:
        def rows(tensor: Any) -> Any:
            size = tensor.shape[0] // count
            return tensor[index * size : (index + 1) * size]

        return rows

    return [(map_tensors(part(i), data[0]), map_tensors(part(i), data[1])) for i in range(count)]


def _gradients(model: Any) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _different(what: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    names = [name for name in theirs if name not in ours]
    names += [name for name in ours if name not in theirs]
    names += [
        name
        for name in theirs
        if name in ours and ours[name].numpy().tobytes() != theirs[name].numpy().tobytes()
    ]
    return [f"{what} {name}" for name in names]
