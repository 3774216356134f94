"""Runs a pipeline and its reference side by side and compares them step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from fractions import Fraction
from typing import Any, Callable

from fleetpipe import numerics
from fleetpipe.dygraph import (
    PipelineOptimizer,
    PipelineParallel,
    randomness,
    tensor_parallel,
    weighted,
)
from fleetpipe.dygraph.shared_layers import is_shared
from fleetpipe.job import all_ranks
from fleetpipe.parity.differences import Difference, compare
from fleetpipe.parity.outputs import Outputs, recorded
from fleetpipe.parity.reference import Reference
from fleetpipe.parity.report import Report, in_order
from fleetpipe.transport import SoleGroup


class Session:
    """A pipeline and its reference, fed the same micro-batches.

    Making one and every step are collective over the job. Each rank runs the whole reference
    and compares the stages it owns; the findings of all ranks are put together on each.
    """

    def __init__(
        self,
        pipeline: PipelineParallel,
        optimizer: PipelineOptimizer,
        reference: Reference,
        train_batch: Callable[..., Any] | None = None,
        tolerance: float | None = None,
    ) -> None:
        """Begins a comparison.

        Args:
            pipeline: The wrapped model.
            optimizer: The pipeline's optimizer.
            reference: The single-device side, with the same weights.
            train_batch: What trains the pipeline; its own method where it is left out.
            tolerance: Largest relative difference that passes. Default: none where bits can be
                equal. 1e-6 where several replicas add up their gradients in another order than one
                device does, 1e-5 where ranks that hold slices of a layer do so in every layer, and
                where several stages use one weight.
        """
        self._pipeline = pipeline
        self._optimizer = optimizer
        self._reference = reference
        self._train_batch = train_batch or pipeline.train_batch
        self._replicas = pipeline.replicas
        if tolerance is None:
            tolerance = 0.0 if self._replicas.ranks == 1 else 1e-6
            slices = tensor_parallel.model_parallel_group().nranks
            if slices > 1 or pipeline.layers.adds_up_uses:
                tolerance = 1e-5
        slots = [slot.name for slot in pipeline.layers.slots()]
        self._names = [part for name in slots for part in (name.rpartition(".")[0], name)]
        self.report = Report(numerics.settings(), tolerance=tolerance)

    def step(self, data: Any, lr_scheduler: Any = None, scaler: Any = None) -> tuple[Any, Any]:
        """Trains both for one batch and compares them. Collective.

        Args:
            data: As for ``train_batch``.
            lr_scheduler: The pipeline's; the reference's optimizer has its own or shares this one.
            scaler: As for ``train_batch``.

        Returns:
            The losses of the reference and of the pipeline.
        """
        step = self.report.steps
        own, everyone = self._pipeline.shared_micro_batches(data)
        layers = self._pipeline.layers
        model, names = self._reference.model, self._reference.names
        with self._as_the_next_batch(), recorded(model, names) as expected:
            weights = self._pipeline.weights_of_all_replicas
            single = self._reference.accumulate(everyone.inputs, everyone.labels, weights)
            # Summed gradients are those of a summed loss; what is told is a mean all the same.
            single = weighted(single, Fraction(sum(self._pipeline.weights)) / sum(weights))
        watched = _ComparingOptimizer(self._optimizer, self._reference, layers, step)
        # Not those of shared layers: each rank makes some of their calls, in an order of its own.
        own_names = {name: name for name in layers.own_state() if not is_shared(name)}
        with recorded(layers, own_names) as outputs:
            loss = self._train_batch([*own], watched, lr_scheduler, scaler)
        found = watched.found + _compare_outputs(outputs, expected, step, self._replicas.rank)
        found += _compare_parameters(layers, self._reference, step, self._replicas.ranks == 1)
        found += [d for d in [compare("loss", "", step, loss, single)] if d]
        self._gather(step, found, watched.squares)
        self.report.single_loss.append(float(single))
        self.report.pipeline_loss.append(float(loss))
        return single, loss

    @contextmanager
    def _as_the_next_batch(self) -> Iterator[None]:
        """Has the reference draw what the pipeline will; the random state is as before then."""
        alone = SoleGroup()  # the keys are agreed on already
        keyed = randomness.keyed(self._pipeline.next_keys(), alone)
        with randomness.random_states_kept(), keyed, tensor_parallel.alone():
            yield

    def _gather(self, step: int, found: list[Difference], squares: Squares) -> None:
        """Puts the findings of all ranks together, and compares the norm of all gradients."""
        parts = all_ranks().all_gather((list(map(astuple, found)), squares))
        everything = {Difference(*fields) for differences, _ in parts for fields in differences}
        # By name: replicas, slices and copies of a tied weight have the same whole gradients.
        whole = {name: pair for _, pairs in parts for name, pair in pairs.items()}
        ours, theirs = (
            math.sqrt(math.fsum(pair[side] for pair in whole.values())) for side in (0, 1)
        )
        if ours != theirs:
            gap = abs(ours - theirs)
            relative = gap / theirs if theirs else math.inf
            ulps = round(gap / math.ulp(theirs)) if math.isfinite(gap) else None
            everything.add(Difference("gradient norm", "", step, gap, relative, ulps))
        self.report.differences += in_order(list(everything), self._names)


#: By parameter, the squared norms of its gradient in the pipeline and in the reference.
Squares = dict[str, tuple[float, float]]


class _ComparingOptimizer(PipelineOptimizer):
    """Compares the gradients of both models when they are complete, then steps both."""

    def __init__(
        self, optimizer: PipelineOptimizer, reference: Reference, layers: Any, step: int
    ) -> None:
        super().__init__(optimizer.wrapped)
        self._pipelines = optimizer
        self.found: list[Difference] = []
        self.squares: Squares = {}
        self._reference = reference
        self._parameters = layers.own_parameters()
        self._step = step

    def bind(self, layers: Any) -> None:
        self._pipelines.bind(layers)

    def step(self) -> None:
        theirs = self._reference.tensors()
        for name, parameter in self._parameters.items():
            grad, expected = _whole(parameter.grad, parameter), theirs[name].grad
            difference = compare("gradient", name, self._step, grad, expected)
            if difference:
                self.found.append(difference)
            self.squares[name] = (_square(grad), _square(expected))
        self._pipelines.step()
        # Now, not later: both optimizers may share a learning rate that changes after this step.
        self._reference.step()


def _whole(value: Any, parameter: Any) -> Any:
    """Returns a parameter or its gradient whole. Collective where the parameter is a slice."""
    axis = tensor_parallel.split_axis(parameter)
    return value if axis is None or value is None else tensor_parallel.whole_value(value, axis)


def _same_part(whole: Any, ours: Any) -> Any:
    """Returns of an output of the reference what this rank has of it, where it has a slice."""
    group = tensor_parallel.model_parallel_group()
    for axis, (all_of_it, own) in enumerate(zip(whole.shape, ours.shape)):
        if all_of_it != own and all_of_it == own * group.nranks:
            return tensor_parallel.slice_of(whole, axis, group.rank, group.nranks)
    return whole


def _square(grad: Any) -> float:
    return 0.0 if grad is None else float((grad.astype("float64") ** 2).sum())


def _compare_outputs(
    outputs: Outputs, expected: Outputs, step: int, replica: int
) -> list[Difference]:
    """Compares the outputs of this replica with those that the reference had for its data."""
    found = []
    for layer, kept in outputs.items():
        theirs_of_all = expected[layer][replica * len(kept) :]
        for call, (ours, theirs) in enumerate(zip(kept, theirs_of_all)):
            same = _same_part(theirs, ours)
            difference = compare("output", f"{layer}, call {call}", step, ours, same)
            if difference:
                found.append(difference)
                break
    return found


def _compare_parameters(
    layers: Any, reference: Reference, step: int, buffers_too: bool
) -> list[Difference]:
    """Compares parameters, and buffers where one replica saw all the data that made them."""
    theirs = reference.tensors()
    ours = layers.own_state() if buffers_too else layers.own_parameters()
    compared = (
        compare("parameter", name, step, _whole(tensor, tensor), theirs[name])
        for name, tensor in ours.items()
    )
    return [difference for difference in compared if difference]
