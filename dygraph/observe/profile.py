"""Measures the costs of each layer and of each action of a stage: a profile for planning.

Whole stages run as in a real batch, and layers are measured separately; then the times of a stage's
layers are scaled to add up to the stage's time. If the schedule cuts sequences, each sequence chunk
(unit) of a micro-batch is measured in the same way. Work is named by a letter: F is forward, B a
full backward, I and W its input and weight gradients, S and R a send and a receive. Start with
:func:`measure`.
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

#: The most micro-batches of a batch that are measured.
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
        # Layers are measured last, when the first and slower runs of the stages are over.
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
    """Returns one sample for each layer and unit of the whole model. Collective.

    First each figure is the smallest of all runs on a rank, and the ranks of this pipeline exchange
    their layers' samples. Then each figure is the largest over the ranks that compute a layer
    together, such as those along mp, because they wait for the slowest of them.

    Args:
        job: The job of this process.
        samples: The samples of this process's layers, one for each run.
    """
    here = [[*key, [list(sample) for sample in runs]] for key, runs in samples.items()]
    fastest = {
        (unit, layer): layer_meter.combine(runs, min)
        for of_rank in job.group().all_gather(here)
        for unit, layer, runs in of_rank
    }
    of_ranks = measuring.computing_together(job).all_gather(
        [[*key, list(sample)] for key, sample in fastest.items()]
    )
    samples_of_ranks: dict[tuple[int, int], list[list[float | None]]] = {}
    for of_rank in of_ranks:
        for unit, layer, sample in of_rank:
            samples_of_ranks.setdefault((unit, layer), []).append(sample)
    return {key: layer_meter.combine(of_layer, max) for key, of_layer in samples_of_ranks.items()}


def _layer_ranges(layers: PipelineLayer) -> list[tuple[int, int]]:
    """Returns the first layer of each stage, and the one after its last; the loss is a layer."""
    bounds = [*layers.partition.boundaries[:-1], len(layers.partition.layers) + 1]
    return list(itertools.pairwise(bounds))


def _names_with_loss(layers: PipelineLayer) -> list[str]:
    """Returns the names of all layers of a model, and last "loss"."""
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
        sizes: The result of :func:`layer_meter.state_bytes` for each layer, by number.
        whole: The times of stages with B.
        split: The times of stages with I and W.

    Returns:
        The costs of the layers in order, then those of the loss.
    """
    scaled: list[layer_meter.Sample] = []
    for stage, (start, end) in enumerate(_layer_ranges(layers)):
        # A forward before a split backward may take longer: that time counts as part of I.
        slower = max(split["F", stage, 0] - whole["F", stage, 0], 0.0)
        scaled += _scale_times(
            [samples[0, number] for number in range(start, end)],
            forward=whole["F", stage, 0],
            backward=whole["B", stage, 0],
            input_grad=split["I", stage, 0] + slower,
            weight_grad=split["W", stage, 0],
        )
    return layer_meter.layer_costs(
        _names_with_loss(layers),
        scaled,
        [sizes.get(number, (0, 0, 0)) for number in range(len(scaled))],
    )


def _slice_costs(
    layers: PipelineLayer, samples: _MergedSamples, times: measuring.StageTimes, index: int
) -> tuple[LayerCost, ...]:
    """Returns the costs of all layers, and of the loss, for one unit of a micro-batch.

    Args:
        layers: The model.
        samples: The sample of each layer and unit.
        times: The times of stages with B, for each unit.
        index: The number of the unit in its micro-batch.
    """
    scaled: list[layer_meter.Sample] = []
    for stage, (start, end) in enumerate(_layer_ranges(layers)):
        scaled += _scale_times(
            [samples[index, number] for number in range(start, end)],
            forward=times["F", stage, index],
            backward=times["B", stage, index],
        )
    return tuple(
        layer_meter.layer_costs(_names_with_loss(layers), scaled, [(0, 0, 0)] * len(scaled))
    )


def between_ranks(
    placement: Placement, whole: measuring.StageTimes, outputs: Sequence[int], latency: float | None
) -> tuple[Link, Transfer]:
    """Returns the cost of values that cross between ranks; typical costs if none crossed.

    Args:
        placement: The rank of each stage.
        whole: The times of stages with B, sends and receives.
        outputs: The bytes that each stage but the last sends.
        latency: The seconds that a message takes; None if nothing was sent.

    Returns:
        The cost of the link, and the time for which a transfer keeps its two ranks busy.
    """
    if latency is None:
        return Link(), TYPICAL
    sizes = [outputs[stage] for stage in measuring.crossing_stages(placement)]
    copying = TYPICAL.per_byte * statistics.mean(sizes)
    # Each micro-batch crosses twice: as a value, and as its gradient.
    sending, receiving = (
        sum(seconds for (kind, *_), seconds in whole.items() if kind == letter) / (2 * len(sizes))
        for letter in "SR"
    )
    fixed = max(sending - copying, 0.0), max(receiving - copying, 0.0)
    return Link(latency, 0.0), Transfer(*fixed, TYPICAL.per_byte)


def _scale_times(samples: list[layer_meter.Sample], **measured: float) -> list[layer_meter.Sample]:
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
    """Restores the model, its gradients and the random states at the end of this context.

    When the context begins, it drops the gradients and puts the layers into training mode.
    """
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
