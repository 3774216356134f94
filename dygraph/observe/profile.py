"""Measures the costs of each layer and of each action of a stage: a profile for planning.

Whole stages run as in a real batch, and layers are measured separately; then the times of a stage's
layers are scaled to add up to the stage's time. If the schedule cuts micro-batches into units, each
unit is measured in the same way. Start with :func:`measure`.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction

from fleetpipe.dygraph.backward.layer_state import model_kept
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.units import WHOLE, Units
from fleetpipe.dygraph.gradients import drop_gradients
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.observe import layer_meter, measuring
from fleetpipe.dygraph.random_keys import random_states_kept
from fleetpipe.job.job import Job
from fleetpipe.profiling import LayerCost, LayerDegrees, Link, Profile, Transfer
from fleetpipe.schedules import Placement

#: The cost of transfers for a rank, if one process plays all ranks and so measures none.
TYPICAL = Transfer(sending=7e-5, receiving=9e-5, per_byte=6e-10)

#: The largest number of micro-batches of a batch that are measured.
MOST_MICRO_BATCHES = 8

#: The typical sample of a layer, by the number of the unit in its micro-batch and of the layer.
_Typical = Mapping[tuple[int, int], layer_meter.Sample]


def measure(
    layers: PipelineLayer,
    job: Job,
    data: MicroBatches,
    weights: list[Fraction],
    units: Units = WHOLE,
) -> Profile:
    """Runs some batches and returns the costs of their parts, the same on every rank.

    Collective over the job. The model, its gradients and the random states do not change.

    Args:
        layers: The model.
        job: The job of this process.
        data: The micro-batches of a batch.
        weights: Their weights in the loss.
        units: The units into which training cuts micro-batches; if there are several, each is
            measured, too.
    """
    run = measuring.Runs(layers, job, data, weights[:MOST_MICRO_BATCHES])
    cut = units.count > 1
    with _state_kept(layers):
        # Layers are measured last, because the stages are warm then.
        process = run.process()
        latency = run.latency()
        whole, split = run.stages("B"), run.stages("IW")
        times = run.stages("B", units) if cut else {}
        samples = _of_all_ranks(job, run.layers())
        parts = _of_all_ranks(job, run.layers_of_units(units)) if cut else {}
    uses = layers.owned_stages.tensors()
    names = layers.state.local_tensors()
    state = layer_meter.state_bytes(uses.values(), names)
    sizes = [[number, *size] for number, size in zip(uses, state)]
    # Processor time does not include the time that a message takes.
    waits_left_out = measuring.clock_for(job) is time.thread_time
    everyone = job.group().all_gather((sizes, run.lengths(units)))
    profile = None
    if job.group().rank == 0:
        held = {number: tuple(sizes) for part, _ in everyone for number, *sizes in part}
        *costs, loss = _whole_costs(layers, samples, held, whole, split)
        outputs = [costs[end - 1].output for _, end in _parts(layers)[:-1]]
        link, transfer = between_ranks(layers.placement, whole, outputs, latency)
        # Every rank with data has the lengths of units; without a cut nobody has any.
        lengths: list[int] = next((there for _, there in everyone if there), [])
        profile = Profile(
            tuple(costs),
            loss,
            layers.owned_stages.cut_places(),
            (link,),
            layers.partition.boundaries,
            transfer,
            slices=tuple(_slice_costs(layers, parts, times, i) for i in range(len(lengths))),
            slice_lengths=tuple(lengths),
            exchange=link if waits_left_out else Link(0.0, 0.0),
            degrees=LayerDegrees.of(job.degrees),
            process=process,
        ).dumps()
    return Profile.loads(job.group().broadcast(profile, 0))


def _of_all_ranks(job: Job, samples: measuring.Samples) -> _Typical:
    """Returns the fastest sample of each layer and unit, on the slowest rank. Collective."""
    plain = [[*key, [list(sample) for sample in measured]] for key, measured in samples.items()]
    everyone = job.group().all_gather(plain)
    typical = {
        (i, n): layer_meter.fastest(measured) for part in everyone for i, n, measured in part
    }
    of_places = measuring.computing_together(job).all_gather(
        [[*key, list(one)] for key, one in typical.items()]
    )
    by_layer: dict[tuple[int, int], list[list[float | None]]] = {}
    for part in of_places:
        for i, n, figures in part:
            by_layer.setdefault((i, n), []).append(figures)
    return {key: layer_meter.slowest(figures) for key, figures in by_layer.items()}


def _parts(layers: PipelineLayer) -> list[tuple[int, int]]:
    """Returns the range of layers of each stage; the loss is one more layer of the last stage."""
    bounds = [*layers.partition.boundaries[:-1], len(layers.partition.layers) + 1]
    return list(itertools.pairwise(bounds))


def _names(layers: PipelineLayer) -> list[str]:
    return [*(layer.name for layer in layers.partition.layers), "loss"]


def _whole_costs(
    layers: PipelineLayer,
    samples: _Typical,
    sizes: Mapping[int, tuple[int, int, int]],
    whole: measuring.StageTimes,
    split: measuring.StageTimes,
) -> list[LayerCost]:
    """Returns the costs of all layers, and of the loss, for a whole micro-batch."""
    scaled: list[layer_meter.Sample] = []
    for stage, (start, end) in enumerate(_parts(layers)):
        slower = max(split["F", stage, 0] - whole["F", stage, 0], 0.0)
        scaled += _scale(
            [samples[0, number] for number in range(start, end)],
            forward=whole["F", stage, 0],
            backward=whole["B", stage, 0],
            input_grad=split["I", stage, 0] + slower,
            weight_grad=split["W", stage, 0],
        )
    return layer_meter.layer_costs(
        _names(layers), scaled, [sizes.get(number, (0, 0, 0)) for number in range(len(scaled))]
    )


def _slice_costs(
    layers: PipelineLayer, samples: _Typical, times: measuring.StageTimes, index: int
) -> tuple[LayerCost, ...]:
    """Returns the costs of all layers, and of the loss, for one unit of a micro-batch."""
    scaled: list[layer_meter.Sample] = []
    for stage, (start, end) in enumerate(_parts(layers)):
        scaled += _scale(
            [samples[index, number] for number in range(start, end)],
            forward=times["F", stage, index],
            backward=times["B", stage, index],
        )
    return tuple(layer_meter.layer_costs(_names(layers), scaled, [(0, 0, 0)] * len(scaled)))


def between_ranks(
    placement: Placement, whole: measuring.StageTimes, outputs: Sequence[int], latency: float | None
) -> tuple[Link, Transfer]:
    """Returns the cost of values that cross between ranks; typical costs if none crossed.

    Args:
        placement: The owner of each stage.
        whole: The times of stages.
        outputs: The bytes that each stage but the last sends.
        latency: The seconds that a message takes; None if nothing was sent.
    """
    if latency is None:
        return Link(), TYPICAL
    sizes = [outputs[stage] for stage in measuring.crossing_stages(placement)]
    copying = TYPICAL.per_byte * statistics.mean(sizes)
    # Each micro-batch crosses twice: as a value, and as its gradient.
    sending, receiving = (
        sum(seconds for (kind, *_), seconds in whole.items() if kind == way) / (2 * len(sizes))
        for way in "SR"
    )
    fixed = max(sending - copying, 0.0), max(receiving - copying, 0.0)
    return Link(latency, 0.0), Transfer(*fixed, TYPICAL.per_byte)


def _scale(samples: list[layer_meter.Sample], **measured: float) -> list[layer_meter.Sample]:
    """Scales the times in the samples of a stage to add up to the measured times of the stage."""
    for name, seconds in measured.items():
        total = sum(getattr(one, name) for one in samples)
        factor = seconds / total if total else 0.0
        samples = [one._replace(**{name: getattr(one, name) * factor}) for one in samples]
    return samples


@contextmanager
def _state_kept(layers: PipelineLayer) -> Iterator[None]:
    """At its end, restores the model, its gradients and the random states."""
    parameters = layers.trained_parameters()
    values = [(p, p.clone()) for p in layers.state.own_parameters().values()]
    parts = [p for one in (layers, layers.with_modes) for p in one.sublayers(include_self=True)]
    try:
        with random_states_kept(), model_kept(parts, parameters, layers.loss_functions()):
            drop_gradients(parameters)
            layers.begin(training=True)
            yield
    finally:
        for parameter, value in values:
            parameter.set_value(value)
