"""Records outputs of layers and gradients on edges, on both sides, to find the first that differs.

The sides are a pipeline and its reference, the model on one device. On an edge, between two stages,
both the gradient that the consumer sends back and the whole gradient of the value at its
producer are compared, which shows where a gradient is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.compare.differences import MARGIN, Difference, compare, unit_of, zeros_for_missing
from fleetpipe.dygraph import PipelineLayer, SingleModel, tensor_parallel, tensors_of
from fleetpipe.dygraph.backward.layer_state import model_kept
from fleetpipe.dygraph.batch.units import WHOLE, Units
from fleetpipe.dygraph.nest import map_tensors, needs_gradient, tensors_by_place
from fleetpipe.dygraph.observe.hooks import is_trial
from fleetpipe.engine.observer import BatchObserver, Blocked, Instruction, Played
from fleetpipe.extras import extra
from fleetpipe.job.job import current_job
from fleetpipe.schedules import Action, Op
from fleetpipe.transport import MessageKey, Value

#: By layer, the tensors that its calls returned, in the order of the calls.
Outputs = dict[str, list[Tensor]]

#: Whether a backward runs in this thread.
_in_backward = ContextVar("_in_backward", default=False)


@contextmanager
def backward_running() -> Iterator[None]:
    """In this context no output is recorded, since a backward may recompute a layer."""
    before = _in_backward.set(True)
    try:
        yield
    finally:
        _in_backward.reset(before)


@contextmanager
def record_model(model: Layer, names: Mapping[str, str]) -> Iterator[Outputs]:
    """Records the outputs of every layer that owns parameters while the context is open.

    Args:
        model: A Layer.
        names: By the name of a parameter or buffer in the Layer, its fully qualified name.

    Yields:
        The outputs, by the layers' fully qualified names.
    """
    outputs: Outputs = {}
    handles = []
    owners = {inner.rpartition(".")[0]: name.rpartition(".")[0] for inner, name in names.items()}
    for path, layer in model.named_sublayers(include_self=True):
        # The outputs of a vocabulary head in shards and in one process cannot be compared.
        if path in owners and getattr(layer, "has_plain_output", True):
            of_layer = outputs.setdefault(owners[path], [])
            handles.append(layer.register_forward_post_hook(_recording_hook(of_layer)))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def record_stages(layers: PipelineLayer) -> AbstractContextManager[Outputs]:
    """Records the outputs of this process's layers of a pipeline, as :func:`record_model` does.

    Shared layers are left out, since each rank makes some of their calls, in an order of its own.
    So is the whole model, which a batch does not call.
    """
    state = layers.state
    names = (n for n in state.local_tensors() if "." in n and not state.has_several_calls(n))
    return record_model(layers, {n: n for n in names})


def _recording_hook(recorded: list[Tensor]) -> Callable[[Layer, Nest, Nest], None]:
    """Returns a hook on a layer that appends copies of the layer's outputs to ``recorded``."""

    # No partial: the search for tensors that stages share (``HiddenUses``) enters partials, and
    # would find ``recorded``.
    def append_copies(_layer: Layer, _inputs: Nest, output: Nest) -> None:
        # Copies, since the next layer may work in place; across a border of stages it cannot.
        if not (_in_backward.get() or is_trial()):
            recorded.extend(tensor.detach().clone() for tensor in tensors_of(output))

    return append_copies


def compare_outputs(
    outputs: Outputs, expected: Outputs, step: int, replica: int = 0, call_of: str = ""
) -> list[Difference]:
    """Compares the outputs of this replica with those of the reference for the same data.

    Args:
        outputs: The outputs of the pipeline's layers.
        expected: The outputs of the reference's layers, for the data of all replicas or of this.
        step: The training step.
        replica: The index of this replica's data in the data of the reference; 0 if the reference
            has only these.
        call_of: A suffix for the names of differences, such as ``" of eval_batch"``.

    Returns:
        For each layer with different outputs, the difference of the first such call.
    """
    differences = []
    for layer, pipeline_outputs in outputs.items():
        # The reference may have run the data of every replica, one replica after another.
        reference_outputs = expected[layer][replica * len(pipeline_outputs) :]
        for call, (ours, reference) in enumerate(zip(pipeline_outputs, reference_outputs)):
            name, part = f"{layer}, call {call}{call_of}", part_of(reference, ours)
            if sequence_parts() and part.shape != ours.shape:
                continue  # the sequence is on another axis, as after a reshape to one row
            difference = compare("output", name, step, ours, part)
            if difference:
                differences.append(difference)
                break
    return differences


def sequence_parts() -> Any:
    """Returns the ``SequenceRanks`` of a job that splits sequences over ranks, or None."""
    job = current_job()
    if job is None or job.along("sep", "cp").ranks == 1:
        return None
    return extra("sequences").sequence_ranks()


def part_of(whole: Tensor, ours: Tensor) -> Tensor:
    """Returns the shard, or part of sequences, of a reference's output that this rank should have.

    Args:
        whole: The reference's output.
        ours: This rank's output, by whose shape the axis is found.
    """
    group, ranks = tensor_parallel.model_parallel_group(), sequence_parts()
    for axis, (full_size, size) in enumerate(zip(whole.shape, ours.shape)):
        if axis == 1 and ranks is not None and full_size == size * ranks.ranks:
            whole = ranks.own_part(whole)
        elif full_size != size and full_size == size * group.nranks:
            return tensor_parallel.shard_of(whole, axis, group.rank, group.nranks)
    return whole


class EdgeKey(NamedTuple):
    """The key of a value on an edge: its producer stage, micro-batch, and path in containers."""

    stage: int
    micro_batch: int
    path: str


@dataclass
class EdgeGradients:
    """The gradients, in one batch, of the values that stages send each other.

    Attributes:
        arrived: The gradient that the consumer sent back; None if it sent none.
        used: The gradient that the producer's backward starts from: the arrived one, plus the
            gradient of the producer's own uses of the value.
    """

    arrived: dict[EdgeKey, Tensor | None] = field(default_factory=dict)
    used: dict[EdgeKey, Tensor | None] = field(default_factory=dict)


def _record_gradient(tensor: Tensor, gradients: dict[EdgeKey, Tensor | None], at: EdgeKey) -> None:
    """Lets the backward store a copy of a tensor's gradient in ``gradients[at]``."""

    def hook(gradient: Tensor) -> None:
        gradients[at] = gradient.detach().clone()

    gradients[at] = None
    tensor.register_hook(hook)


class EdgeWatch(BatchObserver):
    """Records the gradients of the values that stages of this process send, as batches run.

    Attributes:
        first_micro_batch: The global number of the batch's first micro-batch, or sequence chunk.
        gradients: The gradients of the batch that runs.
    """

    def __init__(self) -> None:
        self.first_micro_batch = 0
        self.gradients = EdgeGradients()

    def begin(self, batch: Any) -> None:
        """Starts a batch without gradients."""
        self.gradients = EdgeGradients()

    def end(self) -> None:
        """Drops the gradients."""
        self.gradients = EdgeGradients()

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """Returns an instruction that also records the gradients of what an action sends."""
        if not isinstance(op, Action):
            return instruction

        def run_and_record() -> Blocked | None:
            if op.kind == "F":
                blocked = instruction()
                self._record_from_forward(op, played.values)
                return blocked
            if op.kind != "W":
                self._record_arrived(op, played.values)
            with backward_running():
                return instruction()

        return run_and_record

    def _record_from_forward(self, op: Action, values: Mapping[MessageKey, Value]) -> None:
        """Starts to record the gradients of the values that a forward sends."""
        for value in _values_on_edges(op, "F", values):
            for path, tensor in tensors_by_place(value).items():
                if needs_gradient(tensor):
                    at = EdgeKey(op.stage, self.first_micro_batch + op.micro_batch, path)
                    self.gradients.arrived[at] = None
                    _record_gradient(tensor, self.gradients.used, at)

    def _record_arrived(self, op: Action, values: Mapping[MessageKey, Value]) -> None:
        """Records the gradients that the consumers of a stage's values sent back."""
        arrived = self.gradients.arrived
        here = (op.stage, self.first_micro_batch + op.micro_batch)
        places = [at for at in arrived if at[:2] == here]
        for grads in _values_on_edges(op, "B", values):
            for at, grad in zip(places, grads):
                arrived[at] = None if grad is None else grad.detach().clone()


def _values_on_edges(op: Action, kind: str, values: Mapping[MessageKey, Value]) -> list[Value]:
    """Returns the values that an action's stage sends on (kind "F"), or their gradients ("B")."""
    wanted = (kind, op.stage, op.micro_batch)
    return [v for key, v in values.items() if (key.kind, key.source, key.micro_batch) == wanted]


@contextmanager
def copies_at_borders(model: SingleModel, pipe: PipelineLayer) -> Iterator[EdgeGradients]:
    """In this context, a model runs on copies of the values that stages would send each other.

    At the end parameters have their earlier gradients, and buffers their earlier values.

    Yields:
        The gradients of the micro-batches that run in the context, numbered from 0.
    """
    gradients = EdgeGradients()
    # By the first layer after an edge: the stage before the edge, and the micro-batches so far.
    borders = {first: stage for stage, first in enumerate(pipe.partition.boundaries[1:-1])}
    calls = dict.fromkeys(borders, 0)

    def copy_value(layer: int, value: Nest) -> Nest:
        """Copies the value that goes into the first layer of a stage."""
        stage, micro_batch = borders[layer], calls[layer]
        calls[layer] += 1
        locations = [EdgeKey(stage, micro_batch, path) for path in tensors_by_place(value)]

        def copy(tensor: Tensor) -> Tensor:
            """Copies a tensor, and records the gradient of the copy and that of the tensor."""
            at = locations.pop(0)
            if not needs_gradient(tensor):
                return tensor
            _record_gradient(tensor, gradients.used, at)
            other = tensor.clone()
            _record_gradient(other, gradients.arrived, at)
            return other

        return map_tensors(copy, value)

    layers = model.sublayers(include_self=True)
    with model_kept(layers, model.parameters()), model.changed_before(list(borders), copy_value):
        yield gradients


def edge_name(stage: int) -> str:
    """Returns the name of the edge from a stage to the next, such as "edge 0 -> 1"."""
    return f"edge {stage} -> {stage + 1}"


def compare_edges(
    pipeline: EdgeGradients, reference: EdgeGradients, first: int, step: int, units: Units = WHOLE
) -> list[Difference]:
    """Compares the gradients of the values that the stages of this process send on.

    Args:
        pipeline: The pipeline's gradients.
        reference: The reference's gradients.
        first: The number that the reference's micro-batch 0 has among those of the pipeline.
        step: The training step.
        units: How the schedule cuts micro-batches into sequence chunks; gradients are numbered by
            chunk.

    Returns:
        One difference for each edge and value: in the first micro-batch in which it differs.
    """
    first_by_value: dict[tuple[int, str], Difference] = {}  # by stage and path
    for ours, expected in (
        (pipeline.arrived, reference.arrived),
        (pipeline.used, reference.used),
    ):
        stages_with_difference = {stage for stage, _ in first_by_value}
        stages_here = {key.stage for key in ours} - stages_with_difference
        for key, gradient in expected.items():
            if key.stage not in stages_here or (key.stage, key.path) in first_by_value:
                continue
            unit = key._replace(micro_batch=first * units.count + key.micro_batch)
            lost = " (lost)" if ours.get(unit) is None else ""  # no gradient came back
            name = f"{edge_name(key.stage)}, value{key.path}{lost}, {units.name(key.micro_batch)}"
            difference = _compare_gradient(name, step, ours.get(unit), gradient)
            if difference:
                first_by_value[key.stage, key.path] = difference
    return list(first_by_value.values())


def _compare_gradient(
    name: str, step: int, ours: Tensor | None, expected: Tensor | None
) -> Difference | None:
    """Compares a gradient with the reference's; None counts as zeros.

    Returns:
        None if the gradients differ by no more than rounding.
    """
    if ours is not None and expected is not None:
        expected = part_of(expected, ours)
    ours, expected = zeros_for_missing(ours, expected)
    difference = compare("gradient", name, step, ours, expected)
    if difference is None or expected is None or difference.absolute == 0:
        return None
    return difference if difference.relative > MARGIN * unit_of(expected.dtype) else None
