"""Measures the costs of each layer and of each action of a stage: a profile for planning.

Whole stages run as in a real batch, and layers are measured separately; then the times of a stage's
layers are scaled to add up to the stage's time. If the schedule cuts sequences, each sequence chunk
(unit) of a micro-batch is measured in the same way. Start with :func:`measure`.
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

#: The usual cost of transfers, in seconds, where one process plays all ranks and measures none.
TYPICAL = Transfer(sending=7e-5, receiving=9e-5, per_byte=6e-10)

#: At most so many micro-batches of a batch are measured.
MOST_MICRO_BATCHES = 8

#: One sample for each layer, by the number of the unit in its micro-batch and that of the layer.
_MergedSamples = Mapping[tuple[int, int], layer_meter.Sample]


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
        units: Cuts micro-batches into units as in training; if there are several, each is measured,
            too.
    """
    run = measuring.Runs(layers, job, data, weights[:MOST_MICRO_BATCHES])
    cut = units.count > 1
    with _model_restored(layers):
        # Layers are measured last, because the stages are warm then.
        process = run.process()
        latency = run.latency()
        whole, split = run.stages("B"), run.stages("IW")
        times = run.stages("B", units) if cut else {}
        samples = _merge_ranks(job, run.layers())
        unit_samples = _merge_ranks(job, run.layers_of_units(units)) if cut else {}
    uses = layers.owned_stages.tensors()
    names = layers.state.local_tensors()
    state = layer_meter.state_bytes(uses.values(), names)
    sizes = [[number, *size] for number, size in zip(uses, state)]
    # Processor time does not include the time that a message takes.
    waits_left_out = measuring.clock_for(job) is time.thread_time
    by_rank = job.group().all_gather((sizes, run.lengths(units)))
    profile = None
    if job.group().rank == 0:
        state_sizes = {n: tuple(sizes) for of_rank, _ in by_rank for n, *sizes in of_rank}
        *costs, loss = _whole_costs(layers, samples, state_sizes, whole, split)
        outputs = [costs[end - 1].output for _, end in _layer_ranges(layers)[:-1]]
        link, transfer = between_ranks(layers.placement, whole, outputs, latency)
        # Every rank with data has the lengths of units; without a cut no rank has any.
        lengths: list[int] = next((of_rank for _, of_rank in by_rank if of_rank), [])
        profile = Profile(
            tuple(costs),
            loss,
            layers.owned_stages.cut_places(),
            (link,),
            layers.partition.boundaries,
            transfer,
            slices=tuple(_slice_costs(layers, unit_samples, times, i) for i in range(len(lengths))),
            slice_lengths=tuple(lengths),
            exchange=link if waits_left_out else Link(0.0, 0.0),
            degrees=LayerDegrees.of(job.degrees),
            process=process,
        ).dumps()
    return Profile.loads(job.group().broadcast(profile, 0))


def _merge_ranks(job: Job, samples: measuring.Samples) -> _MergedSamples:
    """Returns a sample of each layer and unit: the fastest run, on the slowest rank. Collective."""
    here = [[*key, [list(sample) for sample in measured]] for key, measured in samples.items()]
    fastest = {
        (unit, number): layer_meter.fastest(measured)
        for of_rank in job.group().all_gather(here)
        for unit, number, measured in of_rank
    }
    # Now of the ranks that compute each layer together.
    of_ranks = measuring.computing_together(job).all_gather(
        [[*key, list(sample)] for key, sample in fastest.items()]
    )
    by_layer: dict[tuple[int, int], list[list[float | None]]] = {}
    for of_rank in of_ranks:
        for unit, number, figures in of_rank:
            by_layer.setdefault((unit, number), []).append(figures)
    return {key: layer_meter.slowest(figures) for key, figures in by_layer.items()}


def _layer_ranges(layers: PipelineLayer) -> list[tuple[int, int]]:
    """Returns the first and the last layer + 1 of each stage; the loss counts as a layer."""
    bounds = [*layers.partition.boundaries[:-1], len(layers.partition.layers) + 1]
    return list(itertools.pairwise(bounds))


def _names(layers: PipelineLayer) -> list[str]:
    """Returns the names of all layers, and "loss"."""
    return [*(layer.name for layer in layers.partition.layers), "loss"]


def _whole_costs(
    layers: PipelineLayer,
    samples: _MergedSamples,
    sizes: Mapping[int, tuple[int, int, int]],
    whole: measuring.StageTimes,
    split: measuring.StageTimes,
) -> list[LayerCost]:
    """Returns the costs of all layers, and of the loss, for a whole micro-batch.

    Args:
        layers: The model.
        samples: The sample of each layer.
        sizes: The bytes of each layer's state, by number, as of :func:`layer_meter.state_bytes`.
        whole: The times of stages with B.
        split: The times of stages with I and W.
    """
    scaled: list[layer_meter.Sample] = []
    for stage, (start, end) in enumerate(_layer_ranges(layers)):
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
    layers: PipelineLayer, samples: _MergedSamples, times: measuring.StageTimes, index: int
) -> tuple[LayerCost, ...]:
    """Returns the costs of all layers, and of the loss, for unit ``index`` of a micro-batch."""
    scaled: list[layer_meter.Sample] = []
    for stage, (start, end) in enumerate(_layer_ranges(layers)):
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
        placement: The rank of each stage.
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
    """Returns the samples of a stage's layers with times that add up to those of the stage.

    Args:
        samples: The samples.
        measured: The seconds that the stage took, by the name of the field in a sample.
    """
    for name, seconds in measured.items():
        total = sum(getattr(sample, name) for sample in samples)
        factor = seconds / total if total else 0.0
        samples = [s._replace(**{name: getattr(s, name) * factor}) for s in samples]
    return samples


@contextmanager
def _model_restored(layers: PipelineLayer) -> Iterator[None]:
    """At its end, restores the model, its gradients and the random states."""
    parameters = layers.trained_parameters()
    values = [(p, p.clone()) for p in layers.state.own_parameters().values()]
    models = (layers, layers.with_modes)
    sublayers = [layer for model in models for layer in model.sublayers(include_self=True)]
    try:
        with random_states_kept(), model_kept(sublayers, parameters, layers.loss_functions()):
            drop_gradients(parameters)
            layers.begin(training=True)
            yield
    finally:
        for parameter, value in values:
            parameter.set_value(value)
