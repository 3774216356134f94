"""Runs a job's twin: the same script on one device, so that each step starts with the job's state.

``degrees_of_one`` sets all degrees of the script to 1; ``Feed`` gives its steps the job's weights,
samples and gradients.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fleetpipe.aliases import Nest, Optimizer, Tensor
from fleetpipe.compare.differences import numbers_of, unit_of
from fleetpipe.compare.trail import strategies_changed, wrapping
from fleetpipe.contrib.locator import record
from fleetpipe.contrib.locator.layouts import FullTensors, bytes_of_rows
from fleetpipe.contrib.locator.record import RankTensors, TensorKey
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
        self.full_tensors = FullTensors(self._job)
        self._random = np.random.default_rng(2026) if perturbed else None

    @property
    def replicas(self) -> int:
        """The number of the job's replicas, whose micro-batches the twin runs in turn."""
        return self._job.replicas

    def set_parameters(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        """Sets the one-device twin's parameters to the job's values at the beginning of a step."""
        for name, parameter in parameters.items():
            drawn = numbers_of(parameter.detach())
            value = self.full_tensors.parameter(step, name, drawn)
            if value is not None or self._random is not None:
                self._assign(parameter, drawn if value is None else value)

    def set_gradients(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        """Sets the one-device twin's gradients to those by which the job's optimizers stepped."""
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                value = self.full_tensors.gradient(step, name, numbers_of(parameter.grad))
                if value is not None:
                    self._assign(parameter.grad, value)

    def lacks_samples(self, recorded: RankTensors, step: int) -> bool:
        """Whether the job's replicas have more samples in a step than the twin has read."""
        if self.replicas == 1 or step >= self._job.steps:
            return False
        counts = {
            self._job.replica(rank): _count_samples(rank, step)
            for rank in reversed(self._job.ranks)
            if rank.in_phase(step, "data")
        }
        return _count_samples(recorded, step) < sum(counts.values())

    def set_rate(self, step: int, optimizer: Optimizer) -> None:
        """Sets the optimizer's learning rate to the job's in a step, if that has a scheduler."""
        key = TensorKey(step, "optimizer input", "", role="learning rate")
        rate, value = learning_rate_of(optimizer), self._job.ranks[0].tensors.get(key)
        if value is not None and isinstance(rate, paddle.optimizer.lr.LRScheduler):
            rate.last_lr = value.item()

    def batch_of_all_replicas(self, step: int, data: Any, pipeline: PipelineParallel) -> Any:
        """Returns the batch on which the one-device twin trains a step.

        Args:
            step: The step.
            data: The batch that the script passes to ``train_batch``.
            pipeline: The twin's pipeline, which takes the micro-batches of all replicas.

        Returns:
            The samples of all replicas if ``data`` has those of one, else ``data``; a perturbed
            twin gets them perturbed.
        """
        if self.replicas == 1 and self._random is None:
            return data
        batches = self._fill_with_samples(step, data, pipeline)
        if self._random is None:
            return batches
        return map_tensors(self._perturb, batches)

    def _fill_with_samples(self, step: int, data: Any, pipeline: PipelineParallel) -> Any:
        """Returns all replicas' samples in the containers of one replica's batch, if they fit."""
        wanted = pipeline.accumulate_steps
        inputs, labels = (self.full_tensors.batches(step, kind) for kind in ("input", "label"))
        listed = isinstance(data, (list, tuple)) and len(data) == 2
        rows = wanted * pipeline.micro_batch_size
        complete = listed and all(t.shape[:1] == [rows] for t in tensors_of(list(data)))
        if complete or len(inputs) != wanted or len(labels) != wanted:
            return data
        template = data if listed else next(data)
        for part, values in zip(template, (inputs, labels)):
            if tensors_by_place(part).keys() != values[0].keys():
                return data if listed else [template]
        return [
            [_fill_nest(part, value) for value in values]
            for part, values in zip(template, (inputs, labels))
        ]

    def _perturb(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a tensor, perturbed if it has floats."""
        if not tensor.is_floating_point():
            return tensor
        copied = tensor.detach().clone()
        self._assign(copied, numbers_of(copied))
        return copied

    def _assign(self, tensor: Tensor, value: np.ndarray) -> None:
        """Sets a tensor's numbers; a perturbed twin changes each by at most its last place."""
        if self._random is not None and value.dtype.kind == "f":
            moved = value * (1 + unit_of(tensor.dtype) * self._random.integers(-1, 2, value.shape))
            value = np.asarray(moved, value.dtype)
        with paddle.no_grad():
            tensor.set_value(paddle.to_tensor(value).astype(tensor.dtype))


def _count_samples(rank: RankTensors, step: int) -> int:
    """Returns the number of samples that a rank has in a step."""
    return sum(map(len, bytes_of_rows(rank, step).values()))


def _fill_nest(template: Nest, values: Mapping[str, np.ndarray]) -> Nest:
    """Returns nested containers like ``template``, with tensors by their paths in it."""
    ordered = (values[key] for key in tensors_by_place(template))
    return map_tensors(lambda _: paddle.to_tensor(next(ordered)), template)


@contextmanager
def degrees_of_one(replicas: int) -> Iterator[None]:
    """In this context, ``fleet.init`` creates a job of one rank, whatever degrees it gets.

    The pipelines of this job take the micro-batches of all replicas.
    """

    def build_one_stage(build: Callable[..., None], *arguments: Any, **named: Any) -> None:
        """Builds a pipeline with one stage; ``build`` is the constructor."""
        passed = inspect.signature(build).bind(*arguments, **named).arguments
        passed.update(num_stages=1, topology=None)
        for name in ("num_virtual_pipeline_stages", "use_dualpipev", "plan"):
            passed.pop(name, None)
        if not isinstance(passed.get("seg_method", ""), str):
            del passed["seg_method"]
        build(**passed)

    collectives = ((paddle.distributed, name, call) for name, call in _COLLECTIVES.items())
    changed = strategies_changed(lambda strategy: _strategy_of_one_rank(strategy, replicas))
    with changed, wrapping((PipelineLayer, "__init__", build_one_stage)), replaced(*collectives):
        yield


def _strategy_of_one_rank(strategy: Any, replicas: int) -> Any:
    """Returns a strategy with all degrees 1 and the micro-batches of all replicas."""
    strategy = copy.deepcopy(strategy)
    configs = strategy.hybrid_configs
    strategy.hybrid_configs = {f"{axis}_degree": 1 for axis in AXES if f"{axis}_degree" in configs}
    pipeline = dict(strategy.pipeline_configs)
    pipeline["accumulate_steps"] = pipeline.get("accumulate_steps", 1) * replicas
    strategy.pipeline_configs = {**pipeline, "schedule_mode": "1F1B"}
    return strategy


def _do_nothing(*_: Any, **__: Any) -> None:
    """Replaces a collective that, with one rank, leaves its tensor unchanged: does nothing."""


def _append_tensor(tensors: list[Any], tensor: Any, *_: Any, **__: Any) -> None:
    """Replaces a gather, which over one rank has only the rank's own tensor: appends that."""
    tensors.append(tensor)


#: The collectives of a single rank; Paddle's own raise an error there.
_COLLECTIVES: Mapping[str, Callable[..., None]] = {
    "all_reduce": _do_nothing,
    "broadcast": _do_nothing,
    "barrier": _do_nothing,
    "reduce": _do_nothing,
    "all_gather": _append_tensor,
    "all_gather_object": _append_tensor,
}
