"""Measures the cost of each layer of a stage, separately, on its real input.

A layer runs forward and backward several times as if it were a stage, on detached copies of its
input; then its output is the input of the next layer. Start with :class:`LayerMeter`.
"""

from __future__ import annotations

import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.backward.added_gradients import LayersOf
from fleetpipe.dygraph.backward.recompute import RecomputedPiece
from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.dygraph.batch.losses import Criterion
from fleetpipe.dygraph.batch.units import WHOLE, Units
from fleetpipe.dygraph.gradients import drop_gradients
from fleetpipe.dygraph.layers.run_stage import Run, StageRunner
from fleetpipe.dygraph.nest import (
    copies_of,
    differentiable,
    leaf_like,
    map_tensors,
    replace,
    tensors_of,
)
from fleetpipe.extras import extra
from fleetpipe.mesh import groups
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import allocated_bytes, device_clock, peak_bytes, restart_peak
from fleetpipe.paddle_api.tensor import tensor_bytes
from fleetpipe.partition import LayerInfo, Partition
from fleetpipe.profiling import LayerCost
from fleetpipe.schedules import Action, Placement, Schedule
from fleetpipe.schedules.action import GlobalMicroBatch, MicroBatch

#: Layers or functions by their number in the whole list.
Functions = Mapping[int, Callable[[Nest], Nest]]

#: ``calls_of(stage, value)`` returns the functions that a stage runs for its input ``value``, and
#: the input of the first function.
CallsOf = Callable[[int, Nest], tuple[Functions, Nest]]

_FIRST = MicroBatch(0)

#: Schedules of a single layer: with a split backward, and with a full one.
_SPLIT, _FULL = (
    Schedule("alone", Placement("loop", 1), 1, (tuple(Action(k, 0, 0) for k in kinds),))
    for kinds in ("FIW", "FB")
)


class Sample(NamedTuple):
    """The cost of one run of a layer, in seconds and bytes, as in ``LayerCost``.

    ``free`` are the bytes of its output that its own graph does not keep. ``input_grad`` and
    ``weight_grad`` are None if they were not measured. Exchanges are counted over F and B together.
    """

    forward: float
    backward: float
    split_forward: float
    input_grad: float | None
    weight_grad: float | None
    output: float
    held: float
    releases: float
    held_split: float
    waiting: float
    working: float
    saved: float
    free: float
    exchanges: float
    exchanged: float
    expert_share: float
    routed: float
    queries: float
    keys: float
    heads: list[int]
    loads: list[list[int]]


class LayerMeter:
    """Measures the layers of this process, and stores the samples.

    Attributes:
        samples: The samples of each layer, by the number of the unit in its micro-batch and the
            number of the layer in the whole list; the loss counts as one more layer.
    """

    def __init__(
        self,
        count: int,
        calls_of: CallsOf,
        layers_of: LayersOf,
        units: Units = WHOLE,
        splits: bool = True,
    ) -> None:
        """Starts without samples.

        Args:
            count: The number of layers of the whole model.
            calls_of: Returns the functions that a stage runs, and the input of the first one.
            layers_of: Returns the layers of a stage whose backward can be split.
            units: The units into which micro-batches are cut. If they are cut, no backward is
                split.
            splits: Whether to measure I and W as well.
        """
        self.samples: defaultdict[tuple[int, int], list[Sample]] = defaultdict(list)
        self._units, self._count = units, count
        self._splits = splits and units.count == 1
        self._calls_of, self._layers_of = calls_of, layers_of
        self._each = Partition(tuple(range(count + 1)), "each", (LayerInfo(""),) * count)
        self._meters: dict[tuple[int, int], _Meter] = {}
        self._runners: dict[int, tuple[Functions, StageRunner]] = {}
        #: Whether a layer writes into its input, by its number; filled by the layer's first run.
        self._writes: dict[int, bool] = {}

    def run_of(self, stage: int) -> Run:
        """Returns a function that runs a stage and measures each of its layers."""

        def run(value: Nest, micro_batch: GlobalMicroBatch | None) -> Nest:
            functions, value = self._calls_of(stage, value)
            layers, runner = self._layers_of(stage), self._runner(stage, functions)
            # Copies that nothing else refers to: it is measured when their memory becomes free.
            value = map_tensors(lambda tensor: leaf_like(tensor, copied=True), value)
            index = (micro_batch or 0) % self._units.count
            for number, function in functions.items():
                if (index, number) not in self._meters:
                    layer = {number: layers[number]} if number in layers else {}
                    self._meters[index, number] = self._meter(index, function, layer)
                meter = self._meters[index, number]
                meter.run = functools.partial(self._run, runner, number)
                box = [value]
                del value
                value, sample = meter.sample(box, micro_batch)
                self.samples[index, number].append(sample)
            return value

        return run

    def _runner(self, stage: int, functions: Functions) -> StageRunner:
        """Returns the runner for single layers of a stage."""
        runner = self._runners.get(stage)
        if runner is None or runner[0] != functions:
            runner = self._runners[stage] = (functions, StageRunner(functions, self._each))
        return runner[1]

    def _run(
        self, runner: StageRunner, number: int, value: Nest, micro_batch: GlobalMicroBatch | None
    ) -> Nest:
        """Runs a layer; copies its input, which costs time, only if the layer writes into it."""
        if self._writes.get(number):
            return runner.function(number)(value, micro_batch)
        copies = {} if number in self._writes else copies_of(value)
        versions = [copy.inplace_version for copy in copies.values()]
        output = runner.function_without_copies(number)(replace(value, copies), micro_batch)
        if number not in self._writes:
            after = [copy.inplace_version for copy in copies.values()]
            self._writes[number] = after != versions
        return output

    def take_loss(self, index: int, loss: Criterion, output: Nest, label: Nest) -> None:
        """Measures a loss like one more layer, whose output is the input of no layer."""
        meter = self._meter(index, loss, {})
        meter.run = lambda value, _: loss(value, label)
        _, sample = meter.sample([map_tensors(leaf_like, output)], None)
        self.samples[index, self._count].append(sample._replace(output=0, saved=0))

    def _meter(self, index: int, function: Callable[..., Nest], layer: Functions) -> _Meter:
        return _Meter(function, layer, self._splits, self._units, index)


class _Meter:
    """Measures one layer repeatedly.

    Attributes:
        run: Runs the layer.
    """

    run: Run

    def __init__(
        self,
        function: Callable[..., Nest],
        layer: Functions,
        splits: bool,
        units: Units,
        index: int,
    ) -> None:
        # Whether to split its backward too, and whether later units send gradients to kept values.
        self._splits, self._awaited = splits, index < units.count - 1
        self._again = units.again
        # On a CPU the thread's processor time, in which other load does not count.
        self._now = device_clock(time.thread_time)
        self._piece = RecomputedPiece("", [function])
        self._split = SplitBackward(_SPLIT, lambda _: layer)
        self._full = SplitBackward(_FULL, lambda _: layer)
        self._warm = False
        self._free = 0

    def sample(self, box: list[Nest], micro_batch: GlobalMicroBatch | None) -> tuple[Nest, Sample]:
        """Runs the layer; returns its detached output, and the cost of a run.

        Args:
            box: A list with only the layer's input, which is removed when the input is used last.
            micro_batch: The micro-batch of the input.
        """

        def run(value: Nest) -> Nest:
            return self.run(value, micro_batch)

        if not self._warm:
            # The first run is slower: it allocates gradients, and if split it examines the layer.
            self._run_full(run, box[0])
            if self._splits:
                self._run_split(run, box[0])
            self._free = self._unsaved_bytes(run, box[0])
            self._warm = True
        recompute = self._splits and self._piece.needs_recompute(box[0])
        with groups.counting_traffic(self._now) as sent:
            forward, backward, held, working = self._run_full(run, box[0])
        apart = self._run_split(run, box[0]) if self._splits else (forward, None, None, 0, 0)
        split_forward, input_grad, weight_grad, held_split, waiting = apart
        output = run(box[0])
        # A recomputed layer holds only its output until backward.
        saved = max(held - bytes_of(output, box[0]), 0) if recompute else 0
        before = allocated_bytes()
        box.clear()
        releases = max(before - allocated_bytes(), 0)
        output = map_tensors(leaf_like, output)
        sample = Sample(
            *(forward, backward, split_forward, input_grad, weight_grad, bytes_of(output)),
            *(held, releases, held_split, waiting, working, saved, self._free),
            *(sent.exchanges, sent.nbytes, sent.expert_seconds / forward if forward else 0),
            *(sent.routed, sent.queries, sent.keys),
            heads=sent.heads,
            loads=sent.loads,
        )
        return output, sample

    def _run_full(self, run: Callable[[Nest], Nest], value: Nest) -> tuple[float, float, int, int]:
        """Runs F and B.

        Returns:
            The seconds of both, the bytes held between them, and the bytes used temporarily.
        """
        value = map_tensors(leaf_like, value)
        before = allocated_bytes()
        restart_peak()
        begin = self._now()
        with self._again() as kept, self._full.recording(0, _FIRST):
            output = run(value)
        forward = self._now() - begin
        held = max(allocated_bytes() - before, 0)
        working = max(peak_bytes() - before - held, 0)
        made, ones = _gradients_for(output, value)
        if self._awaited:
            # The gradients that later units send to kept values wait for this unit's backward.
            waiting, gradients = _gradients_for(list(kept.values()), None)
            made, ones, held = made + waiting, ones + gradients, held + bytes_of(waiting)
        at = allocated_bytes()
        restart_peak()
        begin = self._now()
        if made:
            with self._full.in_backward(0, _FIRST):
                paddle.autograd.backward(made, ones)
        backward = self._now() - begin
        return forward, backward, held, max(working, peak_bytes() - at)

    def _run_split(
        self, run: Callable[[Nest], Nest], value: Nest
    ) -> tuple[float, float, float, int, int]:
        """Runs F, I and W; returns their times, and the bytes held before I and before W."""
        split, without = self._split, allocated_bytes()
        # Copies that nothing else refers to: it is measured whether they are kept until W.
        value = map_tensors(lambda tensor: leaf_like(tensor, copied=True), value)
        before = allocated_bytes()
        begin = self._now()
        with split.recording(0, _FIRST):
            output = run(value)
        forward = self._now() - begin
        held = max(allocated_bytes() - before, 0)
        made, ones = _gradients_for(output, value)
        begin = self._now()
        with split.input_grads(0, _FIRST):
            if made:
                paddle.autograd.backward(made, ones)
        input_grad = self._now() - begin
        drop_gradients(differentiable(value))
        del value, output, made, ones
        waiting = max(allocated_bytes() - without, 0)
        begin = self._now()
        split.weight_grads(0, _FIRST)
        weight_grad = self._now() - begin
        split.release(0, _FIRST)
        if not self._warm:
            # Removes the hooks of the first batch. All later samples are of one batch, because the
            # first gradient of a batch is slower.
            split.end()
        return forward, input_grad, weight_grad, held, waiting

    def _unsaved_bytes(self, run: Callable[[Nest], Nest], value: Nest) -> int:
        """Returns the bytes of a layer's output that its graph does not save for backward."""
        with self._again():
            output = run(map_tensors(leaf_like, value))
        # The sums keep the graph alive; Python's references to its nodes would never free it.
        roots = [tensor.sum() for tensor in differentiable(output, roots=True)]
        before = allocated_bytes()
        del output
        free = max(before - allocated_bytes(), 0)
        if roots:
            paddle.autograd.backward(roots)
        return free


def _gradients_for(output: Nest, value: Nest) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the outputs of a layer that need a gradient, and a gradient of ones for each."""
    inputs = {id(tensor) for tensor in differentiable(value)}
    made = [t for t in differentiable(output, roots=True) if id(t) not in inputs]
    return made, [paddle.ones_like(tensor) for tensor in made]


def bytes_of(value: Nest, without: Nest = None) -> int:
    """Returns the bytes of the tensors in a value, each once, except those in ``without``."""
    counted = set(map(id, tensors_of(without)))
    tensors = {id(tensor): tensor for tensor in tensors_of(value) if id(tensor) not in counted}
    return sum(map(tensor_bytes, tensors.values()))


def fastest(samples: Iterable[Sequence[Any]]) -> Sample:
    """Returns the minimum of each number: other load on the machine only makes samples slower."""
    return _typical(samples, min)


def slowest(samples: Iterable[Sequence[Any]]) -> Sample:
    """Returns the maximum of each number, over ranks that compute a layer together."""
    return _typical(samples, max)


def _typical(samples: Iterable[Sequence[Any]], choose: Callable[[Iterable[Any]], Any]) -> Sample:
    """Combines each number of some samples by ``choose``; loads of experts are added up."""
    *figures, loads = zip(*samples)
    chosen = [None if None in each else choose(each) for each in figures]
    return Sample._make([*chosen, [[*map(sum, zip(*mixture))] for mixture in zip(*loads)]])


def layer_costs(
    names: Iterable[str], samples: Iterable[Sample], sizes: Iterable[tuple[int, int, int]]
) -> list[LayerCost]:
    """Returns the costs of consecutive layers.

    Args:
        names: The names of the layers.
        samples: The sample of each layer.
        sizes: The bytes of each layer's state, as of :func:`state_bytes`.
    """
    costs: list[LayerCost] = []
    free = math.inf
    for name, one, (trained, untrained, of_experts) in zip(names, samples, sizes):
        # A layer releases no memory of its input that an earlier layer keeps.
        releases, free = min(one.releases, free), one.free
        costs.append(
            LayerCost(
                *(name, one.forward, one.backward, one.input_grad, one.weight_grad),
                *(trained, trained, untrained, int(one.output), int(one.held), int(releases)),
                *(int(one.held_split), int(one.waiting), int(one.working), int(one.saved)),
                *(int(one.exchanges), int(one.exchanged), one.expert_share, of_experts),
                *(int(one.routed), int(one.queries), int(one.keys), tuple(one.heads)),
                tuple(map(tuple, one.loads)),
            )
        )
    return costs


def state_bytes(
    uses: Iterable[Iterable[Tensor]], names: Mapping[str, Tensor]
) -> list[tuple[int, int, int]]:
    """Returns for each layer the bytes of its trained tensors, of others, and of trained experts.

    Args:
        uses: The tensors of each layer; a tensor counts for the first layer that has it.
        names: The tensors by fully qualified name.
    """
    is_expert = extra("experts").is_expert
    experts = {id(tensor) for name, tensor in names.items() if is_expert(name)}
    return [
        (
            sum(tensor_bytes(tensor) for tensor in tensors if not tensor.stop_gradient),
            sum(tensor_bytes(tensor) for tensor in tensors if tensor.stop_gradient),
            sum(
                tensor_bytes(tensor)
                for tensor in tensors
                if id(tensor) in experts and not tensor.stop_gradient
            ),
        )
        for tensors in first_uses(uses)
    ]


def first_uses(uses: Iterable[Iterable[Tensor]]) -> list[list[Tensor]]:
    """Returns the tensors of each layer, without the tensors of earlier layers."""
    seen: set[int] = set()
    names = []
    for tensors in uses:
        new = {id(tensor): tensor for tensor in tensors if id(tensor) not in seen}
        seen.update(new)
        names.append(list(new.values()))
    return names
