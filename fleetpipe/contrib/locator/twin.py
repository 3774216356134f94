"""Runs a script at degrees 1 so that each of its steps starts with the job's state.

``degrees_of_one`` makes the job one rank's; ``Feed`` gives it weights, samples and gradients.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fleetpipe.aliases import Nest, Optimizer, Tensor
from fleetpipe.compare.differences import numbers_of, unit_of
from fleetpipe.compare.trail import strategies_changed
from fleetpipe.contrib.locator import record
from fleetpipe.contrib.locator.layouts import WholeTensors, signatures
from fleetpipe.contrib.locator.record import Meaning, RankTensors
from fleetpipe.dygraph import PipelineLayer, PipelineParallel
from fleetpipe.dygraph.nest import map_tensors, tensors_by_place, tensors_of
from fleetpipe.mesh import AXES
from fleetpipe.paddle_api import paddle, replaced
from fleetpipe.paddle_api.optimizer import learning_rate_of


class Feed:
    """Gives a twin the job's weights and samples at the begin of each step, and its gradients.

    Thus a difference in a step has its cause in that step. The update begins from the job's
    gradients, since Adam turns the rounding of a tiny gradient into whole steps.
    """

    def __init__(self, folder: Path, perturbed: bool) -> None:
        """Reads the record of the job.

        Args:
            folder: The folder of the record.
            perturbed: Whether each number is changed by at most one unit in the last place.
        """
        self._job = record.read(folder)
        self.whole = WholeTensors(self._job)
        self._random = np.random.default_rng(2026) if perturbed else None

    @property
    def replicas(self) -> int:
        """The number of the job's replicas, whose micro-batches the twin runs in turn."""
        return self._job.replicas

    def parameters(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        """Sets parameters to the job's values at the beginning of a step."""
        for name, parameter in parameters.items():
            drawn = numbers_of(parameter.detach())
            value = self.whole.parameter(step, name, drawn)
            if value is not None or self._random is not None:
                self._set(parameter, drawn if value is None else value)

    def gradients(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        """Sets gradients to those that the job's optimizer stepped by."""
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                value = self.whole.gradient(step, name, numbers_of(parameter.grad))
                if value is not None:
                    self._set(parameter.grad, value)

    def must_read_on(self, recorded: RankTensors, step: int) -> bool:
        """Whether the job's replicas have more samples in a step than the twin has read."""
        if self.replicas == 1 or step >= self._job.steps:
            return False
        of_replica = {self._job.replica(r): r for r in self._job.ranks[::-1] if r.of(step, "data")}
        return _rows(recorded, step) < sum(_rows(rank, step) for rank in of_replica.values())

    def average(self, batches: int, parameters: Iterable[Tensor]) -> None:
        """Divides the gradients, which are sums over some batches, by the number of batches."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.set_value(parameter.grad / batches)

    def rate(self, step: int, optimizer: Optimizer) -> None:
        """Sets the optimizer's learning rate to the job's in a step, if a scheduler computes it."""
        place = Meaning(step, "optimizer input", "", part="learning rate")
        rate, value = learning_rate_of(optimizer), self._job.ranks[0].tensors.get(place)
        if value is not None and isinstance(rate, paddle.optimizer.lr.LRScheduler):
            rate.last_lr = value.item()

    def batch(self, step: int, data: Any, pipeline: PipelineParallel) -> Any:
        """Returns the samples of all replicas if ``data`` has those of one, else ``data``."""
        if self.replicas == 1 and self._random is None:
            return data
        batches = self._samples_of_all(step, data, pipeline)
        if self._random is None:
            return batches
        return map_tensors(self._perturb, batches)

    def _samples_of_all(self, step: int, data: Any, pipeline: PipelineParallel) -> Any:
        wanted = pipeline.accumulate_steps
        inputs, labels = (self.whole.batches(step, kind) for kind in ("input", "label"))
        listed = isinstance(data, (list, tuple)) and len(data) == 2
        rows = wanted * pipeline.micro_batch_size
        whole = listed and all(t.shape[:1] == [rows] for t in tensors_of(list(data)))
        if whole or len(inputs) != wanted or len(labels) != wanted:
            return data
        template = data if listed else next(data)
        for part, values in zip(template, (inputs, labels)):
            if tensors_by_place(part).keys() != values[0].keys():
                return data if listed else [template]
        return [
            [_fill(part, value) for value in values]
            for part, values in zip(template, (inputs, labels))
        ]

    def _perturb(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        copied = tensor.detach().clone()
        self._set(copied, numbers_of(copied))
        return copied

    def _set(self, tensor: Tensor, value: np.ndarray) -> None:
        if self._random is not None and value.dtype.kind == "f":
            moved = value * (1 + unit_of(tensor.dtype) * self._random.integers(-1, 2, value.shape))
            value = np.asarray(moved, value.dtype)
        with paddle.no_grad():
            tensor.set_value(paddle.to_tensor(value).astype(tensor.dtype))


def _rows(rank: RankTensors, step: int) -> int:
    """Returns the number of samples that a rank has in a step."""
    return sum(map(len, signatures(rank, step).values()))


def _fill(template: Nest, values: Mapping[str, np.ndarray]) -> Nest:
    """Returns a nest like ``template`` with the tensors of ``values``, by their places in it."""
    ordered = (values[place] for place in tensors_by_place(template))
    return map_tensors(lambda _: paddle.to_tensor(next(ordered)), template)


@contextmanager
def degrees_of_one(replicas: int) -> Iterator[None]:
    """While it is open, ``fleet.init`` creates a job of one rank, whatever degrees are asked for.

    The pipelines of this job take the micro-batches of all replicas.
    """
    build = PipelineLayer.__init__

    def whole(*arguments: Any, **named: Any) -> None:
        passed = inspect.signature(build).bind(*arguments, **named).arguments
        passed.update(num_stages=1, topology=None)
        for name in ("num_virtual_pipeline_stages", "use_dualpipev", "plan"):
            passed.pop(name, None)
        if not isinstance(passed.get("seg_method", ""), str):
            del passed["seg_method"]
        build(**passed)

    collectives = ((paddle.distributed, name, call) for name, call in _COLLECTIVES.items())
    changed = strategies_changed(lambda strategy: _of_one(strategy, replicas))
    with changed, replaced((PipelineLayer, "__init__", whole), *collectives):
        yield


def _of_one(strategy: Any, replicas: int) -> Any:
    """Returns a strategy with all degrees 1 and the micro-batches of all replicas."""
    strategy = copy.deepcopy(strategy)
    configs = strategy.hybrid_configs
    strategy.hybrid_configs = {f"{axis}_degree": 1 for axis in AXES if f"{axis}_degree" in configs}
    pipeline = dict(strategy.pipeline_configs)
    pipeline["accumulate_steps"] = pipeline.get("accumulate_steps", 1) * replicas
    strategy.pipeline_configs = {**pipeline, "schedule_mode": "1F1B"}
    return strategy


def _nothing(*_: Any, **__: Any) -> None:
    """Does nothing: with one rank the collective leaves its tensor unchanged."""


def _into_list(tensors: list[Any], tensor: Any, *_: Any, **__: Any) -> None:
    tensors.append(tensor)


#: The collectives of a single rank; Paddle's own raise an error there.
_COLLECTIVES: Mapping[str, Callable[..., None]] = {
    "all_reduce": _nothing,
    "broadcast": _nothing,
    "barrier": _nothing,
    "reduce": _nothing,
    "all_gather": _into_list,
    "all_gather_object": _into_list,
}
