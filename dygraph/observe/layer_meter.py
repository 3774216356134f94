"""Measures the time and memory of each layer of a stage, separately, on its real input.

A layer runs forward and backward several times as if it were a stage, on detached copies of its
input; then its output is the input of the next layer. F is its forward, B a full backward; I and W
are the input and weight gradients of a split backward. Start with :class:`LayerMeter`.
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

_FIRST_MICRO_BATCH = MicroBatch(0)

#: Schedules of a single layer and micro-batch: with a split backward, and with a full one.
_SPLIT_SCHEDULE, _FULL_SCHEDULE = (
    Schedule("alone", Placement("loop", 1), 1, (tuple(Action(k, 0, 0) for k in kinds),))
    for kinds in ("FIW", "FB")
)


class Sample(NamedTuple):
    """The cost of one run of a layer, in seconds and bytes; :class:`LayerCost` explains the fields.

    Only here are ``split_forward``, the seconds of an F that is followed by I and W, and ``free``,
    the bytes of the output that the layer's own graph does not save. ``input_grad`` and
    ``weight_grad`` are None if they were not measured. Exchanges with other ranks are counted over
    F and B together.
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

    A unit is a micro-batch, or a sequence chunk of one if the schedule cuts sequences.

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
            layers_of: Returns the layers of a stage whose backward can be split, by number.
            units: Cuts micro-batches into units. If there are several, no backward is split.
            splits: Whether to measure I and W as well.
        """
        self.samples: defaultdict[tuple[int, int], list[Sample]] = defaultdict(list)
        self._units, self._count = units, count
        self._measures_split = splits and units.count == 1
        self._calls_of, self._layers_of = calls_of, layers_of
        #: Makes each layer a stage, so that a runner can run it alone.
        self._one_layer_per_stage = Partition(
            tuple(range(count + 1)), "each", (LayerInfo(""),) * count
        )
        #: The meter of each unit and layer, by the keys of ``samples``.
        self._meters: dict[tuple[int, int], _Meter] = {}
        #: The runner of each stage, after the functions for which it was made.
        self._runners: dict[int, tuple[Functions, StageRunner]] = {}
        #: Whether each layer that has run writes into its input, by number.
        self._writes: dict[int, bool] = {}

    def run_of(self, stage: int) -> Run:
        """Returns ``run(value, micro_batch)``, which runs a stage and measures each of its layers.

        ``value`` is the input of the stage, which stays unchanged, and ``micro_batch`` its global
        number; None outside of a batch. ``run`` returns the detached output of the stage's last
        layer, and adds a sample of each layer to ``samples``.
        """

        def run(value: Nest, micro_batch: GlobalMicroBatch | None) -> Nest:
            """Runs the layers of the stage one by one, and stores a sample of each."""
            functions, value = self._calls_of(stage, value)
            layers, runner = self._layers_of(stage), self._runner(stage, functions)
            # Copies that nothing else refers to: it is measured when their memory becomes free.
            value = map_tensors(lambda tensor: leaf_like(tensor, copied=True), value)
            index = (micro_batch or 0) % self._units.count
            for number, function in functions.items():
                if (index, number) not in self._meters:
                    layer = {number: layers[number]} if number in layers else {}
                    self._meters[index, number] = self._new_meter(index, function, layer)
                meter = self._meters[index, number]
                meter.run = functools.partial(self._run_layer, runner, number)
                # In a list, which the meter empties to measure how much memory becomes free.
                box = [value]
                del value
                value, sample = meter.sample(box, micro_batch)
                self.samples[index, number].append(sample)
            return value

        return run

    def _runner(self, stage: int, functions: Functions) -> StageRunner:
        """Returns the runner for single layers of a stage, whose layers are ``functions``."""
        runner = self._runners.get(stage)
        if runner is None or runner[0] != functions:
            runner = self._runners[stage] = (
                functions,
                StageRunner(functions, self._one_layer_per_stage),
            )
        return runner[1]

    def _run_layer(
        self, runner: StageRunner, number: int, value: Nest, micro_batch: GlobalMicroBatch | None
    ) -> Nest:
        """Runs a layer, and returns its output; ``value`` stays unchanged.

        To copy the input costs time, so only a layer that writes into its input gets copies. The
        first run of a layer finds out whether it does.

        Args:
            runner: The runner for single layers of the layer's stage.
            number: The number of the layer in the whole list.
            value: The input of the layer.
            micro_batch: The micro-batch of the input.
        """
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
        """Measures a loss function like one more layer.

        Args:
            index: The number of the unit in its micro-batch.
            loss: The loss function.
            output: The output of the model's last layer for this unit.
            label: The labels of the unit.
        """
        meter = self._new_meter(index, loss, {})
        meter.run = lambda value, _: loss(value, label)
        _, sample = meter.sample([map_tensors(leaf_like, output)], None)
        self.samples[index, self._count].append(sample._replace(output=0, saved=0))

    def _new_meter(self, index: int, function: Callable[..., Nest], layer: Functions) -> _Meter:
        """Returns a meter of ``function`` for unit ``index``; ``layer`` is as for ``_Meter``."""
        return _Meter(function, layer, self._measures_split, self._units, index)


class _Meter:
    """Measures one layer repeatedly.

    Attributes:
        run: Runs the layer on a value; set before :meth:`sample`.
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
        """Prepares to measure a layer.

        Args:
            function: The layer, or a function.
            layer: The layer by its number, if its backward can be split; else empty.
            splits: Whether to measure I and W as well.
            units: Cuts micro-batches into units.
            index: The number of the unit in its micro-batch.
        """
        self._measures_split, self._has_later_units = splits, index < units.count - 1
        #: Returns a context in which the layer runs a unit once more; see :meth:`Units.again`.
        self._unit_again = units.again
        # On a CPU the thread's processor time, in which other load does not count.
        self._clock = device_clock(time.thread_time)
        self._recomputed_piece = RecomputedPiece("", [function])
        self._split_backward = SplitBackward(_SPLIT_SCHEDULE, lambda _: layer)
        self._full_backward = SplitBackward(_FULL_SCHEDULE, lambda _: layer)
        #: Whether the first and slower run is over.
        self._is_warm = False
        #: The bytes of the output that the layer's own graph does not save.
        self._unsaved = 0

    def sample(self, box: list[Nest], micro_batch: GlobalMicroBatch | None) -> tuple[Nest, Sample]:
        """Runs the layer; returns its detached output, and the cost of a run.

        Args:
            box: A list with the layer's input, to which nothing else refers. This method empties it
                after the last run, to measure the memory that becomes free.
            micro_batch: The micro-batch of the input.
        """

        def run(value: Nest) -> Nest:
            return self.run(value, micro_batch)

        if not self._is_warm:
            # The first run is slower: it allocates gradients, and if split it examines the layer.
            self._run_full(run, box[0])
            if self._measures_split:
                self._run_split(run, box[0])
            self._unsaved = self._unsaved_bytes(run, box[0])
            self._is_warm = True
        recompute = self._measures_split and self._recomputed_piece.needs_recompute(box[0])
        with groups.counting_traffic(self._clock) as sent:
            forward, backward, held, working = self._run_full(run, box[0])
        split = (
            self._run_split(run, box[0]) if self._measures_split else (forward, None, None, 0, 0)
        )
        split_forward, input_grad, weight_grad, held_split, waiting = split
        output = run(box[0])
        # A recomputed layer holds only its output until backward.
        saved = max(held - bytes_of(output, box[0]), 0) if recompute else 0
        before = allocated_bytes()
        # Frees what the graph of the last run does not save of the input.
        box.clear()
        releases = max(before - allocated_bytes(), 0)
        output = map_tensors(leaf_like, output)
        sample = Sample(
            *(forward, backward, split_forward, input_grad, weight_grad, bytes_of(output)),
            *(held, releases, held_split, waiting, working, saved, self._unsaved),
            *(sent.exchanges, sent.nbytes, sent.expert_seconds / forward if forward else 0),
            *(sent.routed, sent.queries, sent.keys),
            heads=sent.heads,
            loads=sent.loads,
        )
        return output, sample

    def _run_full(self, run: Callable[[Nest], Nest], value: Nest) -> tuple[float, float, int, int]:
        """Runs F and B of the layer.

        Args:
            run: Runs the layer.
            value: Its input.

        Returns:
            The seconds of F and of B, the bytes saved between them, and the most bytes that one of
            them used temporarily.
        """
        value = map_tensors(leaf_like, value)
        before = allocated_bytes()
        restart_peak()
        begin = self._clock()
        full = self._full_backward
        with self._unit_again() as for_later_units, full.recording(0, _FIRST_MICRO_BATCH):
            output = run(value)
        forward = self._clock() - begin
        held = max(allocated_bytes() - before, 0)
        working = max(peak_bytes() - before - held, 0)
        roots, ones = _gradients_for(output, value)
        if self._has_later_units:
            # Later units send gradients to the values that layers keep for them in this unit, such
            # as keys of attention. These gradients are saved until this unit's backward.
            later_roots, later_ones = _gradients_for(list(for_later_units.values()), None)
            roots, ones, held = roots + later_roots, ones + later_ones, held + bytes_of(later_roots)
        before_backward = allocated_bytes()
        restart_peak()
        begin = self._clock()
        if roots:
            with full.in_backward(0, _FIRST_MICRO_BATCH):
                paddle.autograd.backward(roots, ones)
        backward = self._clock() - begin
        return forward, backward, held, max(working, peak_bytes() - before_backward)

    def _run_split(
        self, run: Callable[[Nest], Nest], value: Nest
    ) -> tuple[float, float, float, int, int]:
        """Runs F, I and W of the layer; the arguments are those of :meth:`_run_full`.

        Returns:
            The seconds of F, of I and of W, the bytes saved between F and I, and those between I
            and W.
        """
        split, before_copies = self._split_backward, allocated_bytes()
        # Copies that nothing else refers to: the bytes between I and W show if W needs the input.
        value = map_tensors(lambda tensor: leaf_like(tensor, copied=True), value)
        before = allocated_bytes()
        begin = self._clock()
        with split.recording(0, _FIRST_MICRO_BATCH):
            output = run(value)
        forward = self._clock() - begin
        held = max(allocated_bytes() - before, 0)
        roots, ones = _gradients_for(output, value)
        begin = self._clock()
        with split.input_grads(0, _FIRST_MICRO_BATCH):
            if roots:
                paddle.autograd.backward(roots, ones)
        input_grad = self._clock() - begin
        drop_gradients(differentiable(value))
        del value, output, roots, ones
        waiting = max(allocated_bytes() - before_copies, 0)
        begin = self._clock()
        split.weight_grads(0, _FIRST_MICRO_BATCH)
        weight_grad = self._clock() - begin
        split.release(0, _FIRST_MICRO_BATCH)
        if not self._is_warm:
            # Removes the hooks of the first batch. All later samples are of one batch, because the
            # first gradient of a batch is slower.
            split.end()
        return forward, input_grad, weight_grad, held, waiting

    def _unsaved_bytes(self, run: Callable[[Nest], Nest], value: Nest) -> int:
        """Returns the bytes of the layer's output that its graph does not save for backward.

        ``run`` runs the layer on ``value``, its input.
        """
        with self._unit_again():
            output = run(map_tensors(leaf_like, value))
        # The sums keep the graph alive without the output. References of Python's to the nodes of
        # the graph would do so too, but Paddle would never free these nodes.
        roots = [tensor.sum() for tensor in differentiable(output, roots=True)]
        before = allocated_bytes()
        del output
        free = max(before - allocated_bytes(), 0)
        if roots:
            paddle.autograd.backward(roots)
        return free


def _gradients_for(output: Nest, value: Nest) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the tensors from which the backward of a layer starts, and ones as their gradients.

    Args:
        output: The output of the layer.
        value: Its input, whose tensors the layer may return unchanged: these are left out.
    """
    inputs = {id(tensor) for tensor in differentiable(value)}
    roots = [t for t in differentiable(output, roots=True) if id(t) not in inputs]
    return roots, [paddle.ones_like(tensor) for tensor in roots]


def bytes_of(value: Nest, without: Nest = None) -> int:
    """Returns the bytes of the tensors in a value, each once, except those in ``without``."""
    counted = set(map(id, tensors_of(without)))
    tensors = {id(tensor): tensor for tensor in tensors_of(value) if id(tensor) not in counted}
    return sum(map(tensor_bytes, tensors.values()))


def combine(samples: Iterable[Sequence[Any]], choose: Callable[[Iterable[Any]], Any]) -> Sample:
    """Combines some samples of a layer into one.

    Args:
        samples: The samples, or sequences of their fields.
        choose: Combines the values of each field: ``min`` over the runs of a rank, which other load
            only makes slower, and ``max`` over ranks that compute a layer together. The loads of
            experts, the last field, are added up; a field that any sample lacks (None) is None.
    """
    *figures, loads = zip(*samples)
    chosen = [None if None in of_samples else choose(of_samples) for of_samples in figures]
    total_loads = [[*map(sum, zip(*of_mixture))] for of_mixture in zip(*loads)]
    return Sample._make([*chosen, total_loads])


def layer_costs(
    names: Iterable[str], samples: Iterable[Sample], sizes: Iterable[tuple[int, int, int]]
) -> list[LayerCost]:
    """Returns the costs of consecutive layers, for a profile.

    Args:
        names: The names of the layers.
        samples: The sample of each layer.
        sizes: The bytes of each layer's state, as :func:`state_bytes` returns them.
    """
    costs: list[LayerCost] = []
    free = math.inf
    for name, run, (trained, untrained, of_experts) in zip(names, samples, sizes):
        # A layer releases no memory of its input that an earlier layer saves.
        releases, free = min(run.releases, free), run.free
        costs.append(
            LayerCost(
                *(name, run.forward, run.backward, run.input_grad, run.weight_grad),
                *(trained, trained, untrained, int(run.output), int(run.held), int(releases)),
                *(int(run.held_split), int(run.waiting), int(run.working), int(run.saved)),
                *(int(run.exchanges), int(run.exchanged), run.expert_share, of_experts),
                *(int(run.routed), int(run.queries), int(run.keys), tuple(run.heads)),
                tuple(map(tuple, run.loads)),
            )
        )
    return costs


def state_bytes(
    tensors_of_layers: Iterable[Iterable[Tensor]], names: Mapping[str, Tensor]
) -> list[tuple[int, int, int]]:
    """Returns the bytes of the state of each layer.

    For each layer there are three numbers: the bytes of its trained tensors, those of its untrained
    tensors, and those of the trained tensors that are of experts.

    Args:
        tensors_of_layers: The tensors of each layer; each counts for the first layer with it.
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
        for tensors in first_uses(tensors_of_layers)
    ]


def first_uses(tensors_of_layers: Iterable[Iterable[Tensor]]) -> list[list[Tensor]]:
    """Returns the tensors of each layer, each once, without those that an earlier layer has."""
    seen: set[int] = set()
    new_tensors = []
    for tensors in tensors_of_layers:
        new = {id(tensor): tensor for tensor in tensors if id(tensor) not in seen}
        seen.update(new)
        new_tensors.append(list(new.values()))
    return new_tensors
