"""Chooses the cut of a captured model: as the user gave it, or by the measured costs of its nodes.

Start with :func:`resolve_split_spec`. ``split_spec="auto"`` is the cut whose slowest stage is
fastest. The time of a stage is computed as by :func:`fleetpipe.plan`: its nodes forward and
backward, and its transfers in both directions. All uses of a parameter or buffer that a forward
writes into stay in one stage. A border is the boundary between two consecutive stages.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.cutting.split_spec import (
    AUTO,
    AtCall,
    Border,
    SplitPoint,
    SplitSpec,
    borders_of,
)
from fleetpipe.capture.running.captured_state import lend_zeros
from fleetpipe.capture.running.replay import entry_functions
from fleetpipe.capture.tracing.capturing import Capturer, in_mode
from fleetpipe.capture.tracing.model_snapshot import state_kept
from fleetpipe.capture.tracing.signature import PLAIN
from fleetpipe.capture.tracing.value import Capture, Node, Ref, StateRef, arguments, spec_of
from fleetpipe.dygraph.gradients import drop_gradients, explain_backward_error
from fleetpipe.dygraph.observe import layer_meter
from fleetpipe.dygraph.observe.profile import TYPICAL
from fleetpipe.errors import CaptureError, ConfigError, PartitionError
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import FULL_NAME
from fleetpipe.paddle_api.tensor import has_memory, tensor_bytes
from fleetpipe.profiling import PipelinePlan, Profile, fastest_cut

#: The least and the most times that a node is run to measure it; the fastest run counts.
LEAST_RUNS, MOST_RUNS = 5, 20

#: The most nodes that are measured of several equal ones; the median of their times counts.
MOST_EQUAL = 5

#: Seconds of processor time after which nodes run at most ``LEAST_RUNS`` times.
SECONDS = 1.0


class Span(NamedTuple):
    """The numbers of the first and the last node of a run that use a parameter or buffer."""

    first: int
    last: int


#: By the name of a parameter or buffer, its span in each of several runs; None in a run that does
#: not use it.
Spans = dict[str, list[Span | None]]


def find_spans(traces: Sequence[Capture]) -> Spans:
    """Returns which nodes use each parameter or buffer into which any captured run writes.

    The result has, by name and for each run, the numbers of the first and last such node.
    """

    def span(name: str, nodes: Sequence[Node]) -> Span | None:
        """Returns the numbers of the first and last of ``nodes`` that use a tensor, or None."""
        users = [number for number, node in enumerate(nodes) if name in node.state]
        return Span(users[0], users[-1]) if users else None

    names = dict.fromkeys(name for trace in traces for name in trace.changed)
    return {name: [span(name, trace.nodes) for trace in traces] for name in names}


def find_split_state(written: Spans, starts: Sequence[int]) -> str | None:
    """Returns the name of a parameter or buffer that is used before and after a border.

    Args:
        written: The spans of the parameters and buffers that the runs write into.
        starts: The number of the first node after the border, in each run.

    Returns:
        The first such name; None if there is none.
    """
    for name, spans in written.items():
        used = [(span, start) for span, start in zip(spans, starts) if span is not None]
        is_used_before = any(span.first < start for span, start in used)
        is_used_after = any(span.last >= start for span, start in used)
        if is_used_before and is_used_after:
            return name
    return None


def require_one_stage(runs: Sequence[tuple[Capture, Sequence[int]]]) -> None:
    """Raises an error if two stages use a parameter or buffer that a forward writes into.

    Args:
        runs: The runs in training and in evaluation, each with the number of the first node of each
            stage after stage 0.

    Raises:
        CaptureError: Two stages use one.
    """
    traces, cuts = zip(*runs)
    written = find_spans(traces)
    for starts in zip(*cuts):
        name = find_split_state(written, starts)
        if name is not None:
            users: dict[int, str] = {}
            for trace, firsts in runs:
                for number, node in enumerate(trace.nodes):
                    if name in node.state:
                        stage = bisect_right(firsts, number)
                        users.setdefault(stage, f"{node.name} in stage {stage}, {node.location}")
            before, after, *_ = (users[stage] for stage in sorted(users))
            raise CaptureError(
                f"two stages share {name!r}, into which the forward writes",
                where=f"{before}; {after}",
                cause="micro-batches come to the stages at different times: one stage would see "
                "what others wrote for another micro-batch",
                fix="cut so that all of its uses are in one stage: fleetpipe.explain(model, "
                "example) shows where",
            )


def measure_nodes(capturer: Capturer, trace: Capture, places: Iterable[int]) -> Profile:
    """Measures the time of each node by itself on the example, and restores the model.

    Gradients are cleared.

    Args:
        capturer: The model with its example inputs.
        trace: The captured run of the model's forward in training.
        places: The numbers of the nodes with which a stage may begin, without the first.

    Returns:
        The costs of inputs, nodes and outputs. Nodes that compute the same on equal shapes have
        equal times.
    """
    model, functions = capturer.model, entry_functions(trace, capturer.example_signature)
    names = ["inputs", *(node.name for node in trace.nodes), "outputs"]
    uses = [[], *map(tensors_used_by, trace.nodes), []]
    cost_classes = ["inputs", *(_cost_class(trace, node) for node in trace.nodes), "outputs"]
    equal_nodes: defaultdict[str, list[int]] = defaultdict(list)
    for number, cost_class in enumerate(cost_classes):
        equal_nodes[cost_class].append(number)
    meter = layer_meter.LayerMeter(
        len(functions),
        lambda number, value: ({number: functions[number]}, value),
        lambda _: {},
        splits=False,
    )

    def run(number: int, value: Nest) -> Nest:
        """Measures one run of function ``number``, forward and backward; returns the output."""
        without_memory = [tensor for tensor in uses[number] if not has_memory(tensor)]
        with lend_zeros(without_memory):
            try:
                output = meter.run_of(number)(value, None)
            except Exception as error:
                raise explain_backward_error(error)  # noqa: B904 (the error itself, or its cause)
            drop_gradients(without_memory)
        return output

    measured = {number for numbers in equal_nodes.values() for number in numbers[:MOST_EQUAL]}
    inputs: dict[int, Nest] = {}
    with state_kept(model), in_mode(model, training=True), paddle.set_grad_enabled(True):
        begin, value = time.thread_time(), capturer.example
        for number in range(len(functions)):
            if number in measured:
                inputs[number] = value
            value = run(number, value)
        # All nodes in turn, so that a disturbance does not slow all runs of one node.
        for count in range(1, MOST_RUNS):
            if count >= LEAST_RUNS and time.thread_time() - begin > SECONDS:
                break
            for number, value in inputs.items():
                run(number, value)
    drop_gradients(model.parameters())
    samples = [
        layer_meter.combine(meter.samples[0, number], min) for number in range(len(functions))
    ]
    for numbers in equal_nodes.values():
        measured_samples = [samples[number] for number in numbers[:MOST_EQUAL]]
        forward = statistics.median(sample.forward for sample in measured_samples)
        backward = statistics.median(sample.backward for sample in measured_samples)
        for number in numbers:
            samples[number] = samples[number]._replace(forward=forward, backward=backward)
    costs = layer_meter.layer_costs(
        names, samples, layer_meter.state_bytes(uses, dict(model.named_parameters()))
    )
    return Profile(tuple(costs), None, tuple(place + 1 for place in places), transfer=TYPICAL)


def _cost_class(trace: Capture, node: Node) -> str:
    """Returns a text that is equal for nodes that compute the same on equal shapes."""

    def describe(leaf: object) -> object:
        """Returns the shape and dtype of a tensor or placeholder; a plain value itself."""
        if isinstance(leaf, Ref):
            return trace.specs[leaf.value]
        if isinstance(leaf, StateRef):
            return spec_of(leaf.tensor)
        return spec_of(leaf) if isinstance(leaf, paddle.Tensor) else leaf

    layer: Layer = node.function
    plain_attributes = [
        (type(inner), name, value)
        for inner in (layer.sublayers(include_self=True) if node.is_layer else ())
        for name, value in vars(inner).items()
        if isinstance(value, (*PLAIN, list, tuple)) and name != FULL_NAME
    ]
    called = "" if node.is_layer else getattr(node.function, "__name__", node.function)
    takes = [describe(leaf) for leaf in arguments(node)]
    makes = [trace.specs[value] for value in node.outputs]
    return repr(
        (
            called,
            plain_attributes,
            takes,
            makes,
            [spec_of(tensor) for tensor in tensors_used_by(node)],
        )
    )


def tensors_used_by(node: Node) -> list[Tensor]:
    """Returns the parameters and buffers that a node uses: its layer's, and its arguments."""
    layer: Layer = node.function
    tensors = [*layer.parameters(), *layer.buffers()] if node.is_layer else []
    return tensors + [ref.tensor for ref in node.state_refs]


def parameter_bytes(trace: Capture) -> list[int]:
    """Returns for each node the bytes of the parameters and buffers that no earlier node uses."""
    first_uses = layer_meter.first_uses(map(tensors_used_by, trace.nodes))
    return [sum(map(tensor_bytes, tensors)) for tensors in first_uses]


class Choice(NamedTuple):
    """A cut chosen by costs.

    Attributes:
        borders: The borders between the stages, in order.
        seconds: The seconds of each stage for one micro-batch.
        bound: A lower bound, in seconds, of the slowest stage of any cut into as many stages: the
            larger of the mean stage and the slowest node.
    """

    borders: tuple[Border, ...]
    seconds: tuple[float, ...]
    bound: float

    @property
    def bottleneck(self) -> float:
        """The seconds of the slowest stage."""
        return max(self.seconds)

    def __str__(self) -> str:
        stages = ", ".join(f"{1e3 * seconds:.3g}" for seconds in self.seconds)
        return (
            f"cut {', '.join(map(str, self.borders)) or 'nowhere'}: stages of {stages} ms; the "
            f"slowest {1e3 * self.bottleneck:.3g} ms, no cut below {1e3 * self.bound:.3g} ms"
        )


def find_cut_points(
    training: Capture, evaluation: Capture
) -> tuple[dict[int, Border], dict[int, str]]:
    """Finds the nodes with which a stage may begin, and why it may not begin with others.

    Args:
        training: The run of the forward in training.
        evaluation: The run in evaluation.

    Returns:
        Two dicts by the number of the node in training: the border before each node with which a
        stage may begin, and the reason for each other node except the first.
    """
    written = find_spans((training, evaluation))
    borders: dict[int, Border] = {}
    refused: dict[int, str] = {}
    for number in range(1, len(training.nodes)):
        border = _border_before(training, number)
        if border is None:
            refused[number] = "no call of a sublayer is beside it, to name the place"
            continue
        try:
            start = border.start(evaluation)
        except ConfigError:
            start = 0
        name = find_split_state(written, (number, start))
        if not 0 < start < len(evaluation.nodes):
            refused[number] = "in evaluation the forward does not come here"
        elif name is not None:
            refused[number] = f"{name!r} is used on both sides, and the forward writes into it"
        else:
            borders[number] = border
    return borders, refused


def _border_before(trace: Capture, number: int) -> Border | None:
    """Returns the border before a node; None between two operations, which no call separates."""
    node, previous = trace.nodes[number], trace.nodes[number - 1]
    if node.is_layer:
        path, call = node.scopes[-1]
        return AtCall(path, SplitPoint.BEGINNING, call)
    if previous.is_layer:
        path, call = previous.scopes[-1]
        return AtCall(path, SplitPoint.END, call)
    return None


def choose(
    profile: Profile,
    places: Mapping[int, Border],
    stages: int,
    memory_cap: float | str | None = None,
) -> Choice:
    """Returns the cut whose slowest stage is fastest.

    Args:
        profile: The costs of the inputs, the nodes and the outputs, in that order.
        places: The border before each node with which a stage may begin, by the node's number.
        stages: Number of stages.
        memory_cap: The bytes that a stage may use, for its parameters with gradients and two
            moments and for all forwards in flight under 1F1B; None for no limit.

    Raises:
        PartitionError: There are too few such nodes, or no cut fits into memory.
    """
    bounds, costs = fastest_cut(profile, stages, memory_cap)
    return Choice(
        # The inputs come first.
        tuple(places[first - 1] for first in bounds[1:-1]),
        tuple(stage.seconds for stage in costs),
        max(profile.stages.least() / stages, *(layer.seconds for layer in profile.layers)),
    )


def resolve_split_spec(
    capturer: Capturer,
    spec: SplitSpec | PipelinePlan,
    stages: int | None,
    memory_cap: float | str | None = None,
    head: Sequence[str] = (),
) -> tuple[tuple[Border, ...], Choice | None]:
    """Returns the borders for a user's ``split_spec``. Collective over the job for "auto".

    Args:
        capturer: The model with its example inputs.
        spec: Any ``split_spec`` of :func:`fleetpipe.pipeline`.
        stages: The number of stages; None if it is unknown.
        memory_cap: With "auto", the bytes that a stage may use.
        head: The names of the layers after the model's nodes: the parts of its vocabulary head, and
            the loss.

    Returns:
        The borders between the stages, in order; and with "auto" the choice, with its costs.

    Raises:
        ConfigError: ``spec`` names something that does not exist, needs the number of stages, or is
            a plan of another model.
        PartitionError: "auto" finds no cut.
    """
    signature = capturer.example_signature
    training = capturer(signature, training=True)
    if isinstance(spec, PipelinePlan):
        # The inputs come first, and the outputs last.
        names = ["inputs", *(node.name for node in training.nodes), "outputs", *head]
        spec.require_layers(names)
        named, _ = find_cut_points(training, capturer(signature, training=False))
        firsts = spec.partition.boundaries[1 : spec.schedule.placement.body]
        return tuple(named[first - 1] for first in firsts), None
    if not isinstance(spec, str) or spec != AUTO:
        return tuple(borders_of(spec, capturer.model, training, stages)), None
    if stages is None:
        raise ConfigError(
            'split_spec="auto" needs the number of stages',
            fix="call fleet.init with a pp_degree first, or pass num_stages",
        )
    evaluation = capturer(signature, training=False)
    named, _ = find_cut_points(training, evaluation)
    if len(named) < stages - 1:
        raise PartitionError(
            f"{stages} stages need {stages - 1} places to cut at",
            got=f"{len(named)} places",
            cause="a place is before or after the call of a sublayer, as self.block(x); "
            "self.block.forward(x) is no call of it",
            fix="call sublayers so, or use fewer ranks or chunks; fleetpipe.explain(model, "
            "example) shows what is called",
        )
    job = current_job()
    if job is None or job.local:
        profile = measure_nodes(capturer, training, named)
    else:
        with job.guarded(lambda: "measuring the nodes of the model"):
            # Ranks that compute a layer together measure together; the first one's times count.
            measures = job.leads(*job.degrees.layer_axes)
            text = measure_nodes(capturer, training, named).dumps() if measures else None
            profile = Profile.loads(job.everyone().broadcast(text, 0))
    choice = choose(profile, named, stages, memory_cap)
    return choice.borders, choice
