"""A job of some case, beside plain Paddle with all of the data on one device.

The plain side is a function of a case: from the parameters, by their names in the whole model, and
a whole batch to the loss. It knows neither layers nor axes of fleetpipe's.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import PipelineLayer
from tests import byhand, launching, pipelines

STEPS, RATE = 2, 0.2
#: By dtype, the largest difference that is rounding, relative to the largest number.
TOLERANCE = {"float32": 1e-4, "float64": 1e-10}
#: The least that a parameter is expected to move, as a part of what another one does.
LEAST = {"float32": 0.03, "float64": 1e-4}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"learning_rate": 0.02}),
    "momentum": ("Momentum", {"learning_rate": 0.02, "use_nesterov": True, "weight_decay": 0.01}),
    # Above the rounding of the smallest gradients, which they would make full steps of.
    "adam": ("Adam", {"learning_rate": 0.01, "epsilon": 1e-2}),
    "adamw": ("AdamW", {"learning_rate": 0.01, "epsilon": 1e-2, "weight_decay": 0.1}),
    "adagrad": ("Adagrad", {"learning_rate": 0.01, "epsilon": 1e-2}),
}


class Case(ABC):
    """A model by number, how it is cut and trained.

    Attributes:
        number: The number.
        degrees: Of all axes above 1, and of dp and pp.
        schedule: Its name.
        micro_batches: Those of a replica's batch.
        rows: Rows of a micro-batch.
        dtype: Of parameters.
        optimizer: A key of ``OPTIMIZERS``.
        clip: The greatest norm of all gradients; None for no clip.
        options: fleetpipe's own.
        layout: Arguments of ``PipelineLayer``.
        loss_fn: The pipeline's.
    """

    number: int
    degrees: dict[str, int]
    schedule: str
    micro_batches: int
    rows: int
    dtype: str
    optimizer: str
    clip: float | None
    options: dict[str, Any]
    layout: dict[str, Any]
    loss_fn: Any

    @property
    def ranks(self) -> int:
        """Processes; 1 where one plays all ranks of a pipeline."""
        beside = [n for axis, n in self.degrees.items() if axis not in ("pp", "ep")]
        return int(np.prod(beside)) * self.degrees["pp"] if np.prod(beside) > 1 else 1

    @property
    def replicas(self) -> int:
        return self.degrees["dp"] * self.degrees.get("sharding", 1)

    @abstractmethod
    def entries(self) -> list[Any]:
        """Returns the layers of the pipeline; within the job."""

    @abstractmethod
    def batch(self, step: int) -> list[Any]:
        """Returns ``[inputs, labels]`` of all replicas."""

    @abstractmethod
    def plain_loss(self, weights: Mapping[str, Any], batch: list[Any]) -> Any:
        """Returns the loss of a whole batch, of all replicas."""

    def own_part(self, value: Any) -> Any:
        """Returns what a rank trains on, of the rows of its replica."""
        return value

    def optimizer_of(self, kind: str, parameters: Any) -> Any:
        """Plain descent, in which a step is the gradients; or the optimizer of the case."""
        if kind == "gradients":
            return paddle.optimizer.SGD(RATE, parameters=parameters)
        name, options = OPTIMIZERS[self.optimizer]
        clip = self.clip and nn.ClipGradByGlobalNorm(self.clip)
        make = getattr(paddle.optimizer, name)
        return make(parameters=parameters, grad_clip=clip, **options)

    @property
    def name(self) -> str:
        """Its kind and number."""
        return f"{type(self).__module__.rpartition('_')[2]} {self.number}"

    def __repr__(self) -> str:
        return f"{self.name}: {vars(self)}"


def micro_batches(case: Case, value: Any) -> list[Any]:
    """The rows of each micro-batch, of each tensor; those of the first replica come first."""
    if isinstance(value, tuple):
        return [*zip(*(micro_batches(case, one) for one in value))]
    return list(value.split(case.replicas * case.micro_batches))


def differences(case: Case) -> dict[str, float]:
    """Trains a job, and plain Paddle beside it; collective."""
    stage = 1 + case.number // 3 % 2 if "sharding" in case.degrees else 1
    options = {"rows": case.rows, "own": case.options, "sharding_stage": stage}
    strategy = pipelines.strategy(case.micro_batches, case.schedule, **options, **case.degrees)
    paddle.set_default_dtype(case.dtype)
    try:
        with pipelines.begun(strategy) as job:
            layers = PipelineLayer(
                case.entries(), num_stages=case.degrees["pp"], loss_fn=case.loss_fn, **case.layout
            )
            return _beside(case, job, fleet.distributed_model(layers))
    finally:
        paddle.set_default_dtype("float32")


def _beside(case: Case, job: Any, pipe: Any) -> dict[str, float]:
    begin = _numbers(case, pipe.layers.full_state_dict())
    pipe.layers.load_from({name: paddle.to_tensor(value) for name, value in begin.items()})
    weights = {name: _parameter(value) for name, value in begin.items()}
    gaps: dict[str, float] = {"loss": 0.0}
    for kind, steps in (("gradients", 1), ("parameters", STEPS)):
        optimizer = fleet.distributed_optimizer(case.optimizer_of(kind, pipe.parameters()))
        plain = case.optimizer_of(kind, [*weights.values()])
        for step in range(steps):
            batch = case.batch(step)
            loss = float(pipe.train_batch(case.own_part(_own_rows(job, batch)), optimizer))
            expected = case.plain_loss(weights, batch)
            expected.backward()
            plain.step()
            plain.clear_grad()
            gaps["loss"] = float(np.maximum(gaps["loss"], abs(loss / float(expected) - 1)))
        state = {name: tensor.numpy() for name, tensor in pipe.layers.full_state_dict().items()}
        assert state.keys() == weights.keys(), state.keys() ^ weights.keys()
        assert np.isfinite(loss), "the case itself has no finite loss"
        moves = {name: np.abs(weights[name].numpy() - begin[name]).max() for name in weights}
        # Where next to nothing moves, what moves is rounding.
        least = LEAST[case.dtype] * max(moves.values())
        every = {
            name: float(np.abs(state[name] - weights[name].numpy()).max() / max(moves[name], least))
            for name in weights
        }
        worst = max(every, key=lambda name: np.nan_to_num(every[name], nan=np.inf))
        gaps[f"{kind} ({worst})"] = every[worst]
    return gaps


def _numbers(case: Case, state: Mapping[str, Any]) -> dict[str, Any]:
    """Weights by name: no two experts are alike, and no bias is 0."""
    draw = np.random.default_rng(case.number)
    return {
        name: (
            draw.standard_normal(tensor.shape) * 0.6 / tensor.shape[0] ** 0.5
            + (tensor.ndim == 1 and "norm" in name)
        ).astype(case.dtype)
        for name, tensor in state.items()
    }


def _parameter(value: Any) -> Any:
    assign = nn.initializer.Assign(value)
    return paddle.create_parameter(value.shape, str(value.dtype), default_initializer=assign)


def _own_rows(job: Any, value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_own_rows(job, one) for one in value)
    return value.split(job.degrees.replicas)[job.replica]


def every(cases: list[Case]) -> list[dict[str, float]]:
    """The differences of each case."""
    return [differences(case) for case in cases]


def wrong(case: Case, gaps: dict[str, float]) -> dict[str, float]:
    """What is no rounding of the differences of a case."""
    return {name: gap for name, gap in gaps.items() if not gap < TOLERANCE[case.dtype]}


def main(module: str) -> None:
    """Prints the differences of cases, numbers FIRST to FIRST + COUNT - 1."""
    kind = importlib.import_module(module).RandomCase
    first, count = map(int, sys.argv[1:3])
    folder, failed, largest = Path(tempfile.mkdtemp()), 0, dict.fromkeys(TOLERANCE, 0.0)
    for number in range(first, first + count):
        case = kind(number)
        ranks = case.ranks if case.ranks > 1 else None
        try:
            gaps, *others = byhand.call(differences, ranks, case, folder=folder, timeout=100)
        except launching.JobFailed as error:
            gaps, others = (
                {"\n".join(line for line in str(error).splitlines() if "Error" in line): np.nan},
                [],
            )
        if any(wrong(case, one) for one in (gaps, *others)):
            failed += 1
            print("WRONG", case, flush=True)
        else:
            largest[case.dtype] = max(largest[case.dtype], *gaps.values())
        print(number, case.degrees, case.schedule, case.dtype, gaps, flush=True)
    print(f"{count} cases, {failed} wrong; largest difference by dtype: {largest}")
