"""Jobs, and small models, optimizers and scalers in them, that many tests share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.amp import grad_scaler

from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
from fleetpipe.job.job import current_job

#: Rows of a micro-batch.
ROWS = 2


def strategy(
    micro_batches: int = 4,
    schedule: str = "1F1B",
    *,
    rows: int = ROWS,
    order: Sequence[str] = (),
    own: Mapping[str, Any] | None = None,
    sharding_stage: int = 1,
    **degrees: int,
) -> Any:
    """Builds a strategy.

    Args:
        micro_batches: Micro-batches of a batch.
        schedule: The schedule's name.
        rows: Rows of a micro-batch.
        order: The axes that come first in the order of the axes; the others follow as usual.
        own: fleetpipe's own options.
        sharding_stage: What the ranks along sharding share.
        degrees: By axis; the others are Fleet's defaults.
    """
    made = fleet.DistributedStrategy()
    configs: dict[str, Any] = {f"{axis}_degree": degree for axis, degree in degrees.items()}
    if order:
        others = [axis for axis in made.hybrid_parallel_order if axis not in order]
        configs["order"] = [*order, *others]
    made.hybrid_configs = configs
    made.pipeline_configs = {
        "accumulate_steps": micro_batches,
        "micro_batch_size": rows,
        "schedule_mode": schedule,
    }
    made.fleetpipe_configs = dict(own or {})
    made.sharding = sharding_stage > 1
    made.sharding_configs = {"stage": sharding_stage}
    return made


def begin(
    pp: int = 1,
    micro_batches: int = 4,
    schedule: str = "1F1B",
    *,
    dp: int = 1,
    mp: int = 1,
    sharding: int = 1,
    rows: int = ROWS,
    axes: Sequence[str] = (),
    sharding_stage: int = 1,
    **own: Any,
) -> Any:
    """Begins a job on all ranks, or on the one process that plays them; returns it.

    The arguments are those of `strategy`, whose order is ``axes`` here; ``own`` are fleetpipe's own
    options.
    """
    degrees = {"dp": dp, "mp": mp, "pp": pp, "sharding": sharding}
    degrees["sharding_stage"] = sharding_stage
    chosen = strategy(micro_batches, schedule, rows=rows, order=axes, own=own, **degrees)
    fleet.init(is_collective=True, strategy=chosen)
    return current_job()


@contextmanager
def begun(strategy: Any = None) -> Iterator[Any]:
    """Within it there is a job of a strategy."""
    fleet.init(is_collective=True, strategy=strategy)
    try:
        yield current_job()
    finally:
        fleet.shutdown()


@contextmanager
def job(*args: Any, **options: Any) -> Iterator[Any]:
    """Begins a job by `begin`, and ends it."""
    running = begin(*args, **options)
    try:
        yield running
    finally:
        fleet.shutdown()


FEATURES, CLASSES = 6, 4


def mlp_layers(hidden: int = 8, blocks: int = 3) -> list[Any]:
    """Linear and Tanh layers that end in CLASSES logits; 2 * blocks + 1 entries."""
    layers: list[Any] = []
    width = FEATURES
    for _ in range(blocks):
        layers += [LayerDesc(nn.Linear, width, hidden), nn.functional.tanh]
        width = hidden
    return [*layers, LayerDesc(nn.Linear, width, CLASSES)]


def pipeline(layers: list[Any] | None = None, **options: Any) -> Any:
    """Wraps a PipelineLayer for the current job."""
    topology = fleet.get_hybrid_communicate_group().topology()
    options.setdefault("loss_fn", nn.CrossEntropyLoss())
    return fleet.distributed_model(
        PipelineLayer(layers or mlp_layers(), topology=topology, **options)
    )


def switch(**switches: Any) -> None:
    """Turns on switches of ``pp_configs`` in the running job's strategy."""
    strategy = fleet.fleet._user_defined_strategy
    known = strategy.hybrid_configs["pp_configs"]
    for name, value in switches.items():
        if not hasattr(known, name):
            pytest.skip(f"this Paddle has no pp_configs.{name}")
        setattr(known, name, value)


def sgd(model: Any, rate: float = 0.1, **options: Any) -> Any:
    """A wrapped SGD over the model's parameters."""
    return fleet.distributed_optimizer(
        paddle.optimizer.SGD(rate, parameters=model.parameters(), **options)
    )


#: What a model of `model_in_job` takes of its options; the job takes the others.
_OF_LAYERS = inspect.signature(PipelineLayer.__init__).parameters


@contextmanager
def model_in_job(*args: Any, layers: list[Any] | None = None, **options: Any) -> Iterator[Any]:
    """Within it there is a `job` of these arguments, and a `pipeline` of these layers in it."""
    of_layers = {name: options.pop(name) for name in [*options] if name in _OF_LAYERS}
    with job(*args, **options):
        yield pipeline(layers, **of_layers)


@contextmanager
def mlp_and_sgd(pp: int, *args: Any, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Within it there is a `job` of these arguments, a `pipeline` in it, and its `sgd`."""
    with model_in_job(pp, *args, **options) as model:
        yield model, sgd(model)


def adam(model: Any, rate: float = 0.01, **options: Any) -> Any:
    """A wrapped Adam over the model's parameters."""
    return fleet.distributed_optimizer(
        paddle.optimizer.Adam(rate, parameters=model.parameters(), **options)
    )


def adamw(model: Any, rate: float = 0.01, **options: Any) -> Any:
    """A wrapped AdamW over the model's parameters."""
    return fleet.distributed_optimizer(
        paddle.optimizer.AdamW(rate, parameters=model.parameters(), **options)
    )


def batch(micro_batches: int = 4, seed: int = 0) -> list[Any]:
    """[inputs, labels] of micro_batches x ROWS rows."""
    numbers = np.random.default_rng(seed)
    rows = micro_batches * ROWS
    return [
        paddle.to_tensor(numbers.standard_normal((rows, FEATURES)).astype("float32")),
        paddle.to_tensor(numbers.integers(0, CLASSES, (rows, 1))),
    ]


def bits(state: dict[str, Any]) -> dict[str, bytes]:
    """The bytes of every tensor of a state dict."""
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


def momentum(model: Any, rate: float = 0.05, **options: Any) -> Any:
    """A wrapped Momentum over the model's parameters."""
    return fleet.distributed_optimizer(
        paddle.optimizer.Momentum(rate, parameters=model.parameters(), **options)
    )


class Trained(NamedTuple):
    """What training ends with, to the last bit.

    Attributes:
        losses: That of each step.
        state: Parameters and buffers.
        gradients: By parameter, those of one more batch; empty if they are not wanted.
    """

    losses: list[bytes]
    state: dict[str, bytes]
    gradients: dict[str, bytes]


def train(
    layers: list[Any] | None = None,
    pp: int = 2,
    schedule: str = "1F1B",
    *,
    micro_batches: int = 4,
    steps: int = 2,
    data: Callable[[int, int], Any] = batch,
    optimizer: Callable[[Any], Any] = sgd,
    gradients: bool = False,
    configs: Mapping[str, Any] | None = None,
    each_step: Callable[[Any], object] = lambda model: None,
    **options: Any,
) -> Trained:
    """Trains a pipeline in a job of its own, from the same random state whatever ran before.

    Args:
        layers: Those of the model.
        pp: The ranks.
        schedule: Its name.
        micro_batches: Those of a batch.
        steps: How many.
        data: The batch of a number of micro-batches and a step.
        optimizer: Makes the wrapped optimizer of a model.
        gradients: Whether those of one more batch are wanted.
        configs: fleetpipe's own options.
        each_step: Is called with the model before each step.
        options: Those of `pipeline`.
    """
    with job(pp, micro_batches, schedule, **(configs or {})):
        paddle.seed(0)
        model = pipeline(layers, **options)
        wrapped, losses = optimizer(model), []
        for step in range(steps):
            each_step(model)
            loss = model.train_batch(data(micro_batches, step), wrapped)
            losses.append(loss.numpy().tobytes())
        state = bits(model.layers.full_state_dict())
        if not gradients:
            return Trained(losses, state, {})
        model.forward_backward_pipeline(data(micro_batches, steps))
        named = model.layers.named_parameters()
        trained = {name: p.grad.numpy().tobytes() for name, p in named if not p.stop_gradient}
        return Trained(losses, bits(model.layers.full_state_dict()), trained)


def accumulate(losses: Iterable[Any]) -> Any:
    """Runs the backwards of some losses, each before the next is computed; returns their sum."""
    total = None
    for loss in losses:
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    return total


def train_plainly(
    micro_batches: int = 4,
    steps: int = 2,
    *,
    layers: list[Any] | None = None,
    loss_fn: Callable[[Any, Any], Any] = nn.functional.cross_entropy,
    divisor: int | None = None,
) -> Trained:
    """What `train` ends with, by a loop of gradient accumulation in plain Paddle, with SGD.

    Args:
        micro_batches: Those of a batch.
        steps: How many.
        layers: Those of the model.
        loss_fn: The loss function.
        divisor: That of each micro-batch's loss; by default their number.
    """
    with job(1, micro_batches):
        paddle.seed(0)
        model = pipeline(layers).layers.single_model()
    optimizer, losses = paddle.optimizer.SGD(0.1, parameters=model.parameters()), []
    for step in range(steps):
        parts = zip(*(part.split(micro_batches) for part in batch(micro_batches, step)))
        total = accumulate(loss_fn(model(x), y) / (divisor or micro_batches) for x, y in parts)
        optimizer.step()
        optimizer.clear_grad()
        losses.append(total.numpy().tobytes())
    return Trained(losses, bits(model.state_dict()), {})


def enabled_scaler(**arguments: Any) -> Any:
    """Makes a scaler as on a GPU; its kernels run on CPU as well."""
    place = SimpleNamespace(is_gpu_place=lambda: True)
    tracer = SimpleNamespace(_expected_place=place)
    with mock.patch.object(grad_scaler, "_dygraph_tracer", return_value=tracer):
        return paddle.amp.GradScaler(**arguments)


@contextmanager
def half_precision() -> Iterator[None]:
    """Within it Paddle believes that losses are float16, as dynamic scaling requires."""
    state: Any = grad_scaler.amp_global_state()
    before, state.amp_dtype = state.amp_dtype, "float16"
    try:
        yield
    finally:
        state.amp_dtype = before
