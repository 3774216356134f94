"""A GPT with a large vocabulary: its head in parts, beside the best cut of whole layers.

    OMP_NUM_THREADS=1 python benchmarks/vocabulary.py [--blocks 4,8] [--ranks 2,4,8] [--rounds 3]

One process plays all ranks, and profiles the model with a whole head and with parts in turn, by the
processor time of its thread: so the figures hold for as many processors as ranks, and what else the
machine does disturbs them little. The schedule is simulated with these costs. Both models are cut
where their slowest stage is fastest. The lower bound is the time of all layers and parts, shared
evenly by all ranks. Memory is that of weights, their gradients, an optimizer of two numbers for
each weight, and activations, of the last rank beside the largest of the others.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn

from benchmarks.figures import Figure, parser, report
from benchmarks.workers.gpt import Case
from fleetpipe import fleet
from fleetpipe.dygraph import VocabularyHead, VocabularyLoss
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
from fleetpipe.partition import fastest
from fleetpipe.schedules import Costs, build

#: Weights, gradients, and an optimizer's two numbers.
COPIES = 4


class Simulated(NamedTuple):
    """A step of one model.

    Attributes:
        seconds: How long it takes.
        bound: How long at least.
        memory: Bytes of the last rank over the most of any other.
    """

    seconds: float
    bound: float
    memory: float


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--blocks", default="4,8")
    options.add_argument("--ranks", default="2,4,8")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--vocabulary", type=int, default=50_000)
    options.add_argument("--hidden", type=int, default=256)
    options.add_argument("--length", type=int, default=128, help="rows of a micro-batch")
    options.add_argument("--micro-batches", type=int, default=16)
    options.add_argument("--schedule", default="1F1B")
    args = options.parse_args()
    figures = []
    for blocks in map(int, args.blocks.split(",")):
        sizes = [ranks for ranks in map(int, args.ranks.split(",")) if ranks <= blocks]
        steps: dict[int, list[tuple[Simulated, Simulated]]] = {ranks: [] for ranks in sizes}
        for _ in range(args.rounds):
            body = layers_before_the_head(args, blocks)
            linear = LayerDesc(nn.Linear, args.hidden, args.vocabulary, bias_attr=False)
            whole = measured(args, 2, [*body, linear], nn.CrossEntropyLoss())
            for ranks in sizes:
                head = VocabularyHead(args.hidden, args.vocabulary)
                parts = measured(args, ranks, [*body, head], VocabularyLoss())
                both = [(whole, len(whole)), (parts, len(body))]
                steps[ranks].append(tuple(simulated(args, ranks, *each) for each in both))
        for ranks, rounds in steps.items():
            figures += figures_of(f"{blocks} blocks, {ranks} ranks", rounds)
    report(figures, args.json)


def figures_of(title: str, rounds: list[tuple[Simulated, Simulated]]) -> list[Figure]:
    """Returns the figures of all rounds."""
    names = ("whole layers", "parts")
    figures = [Figure(n, [both[i].seconds for both in rounds], "s") for i, n in enumerate(names)]
    figures += [
        Figure("parts / whole", [parts.seconds / whole.seconds for whole, parts in rounds]),
        Figure("parts, of the bound", [parts.seconds / parts.bound for _, parts in rounds]),
    ]
    figures += [
        Figure(f"last rank's memory, {n}", [both[i].memory for both in rounds])
        for i, n in enumerate(names)
    ]
    return [figure._replace(name=f"{title}: {figure.name}") for figure in figures]


def layers_before_the_head(args: argparse.Namespace, blocks: int) -> list[Any]:
    """Returns the embedding, the blocks and the last norm."""
    case = Case(args.hidden, blocks, 8, args.length, args.micro_batches, 1)
    embedding = LayerDesc(nn.Embedding, args.vocabulary, args.hidden)
    return [embedding, *case.layers(), LayerDesc(nn.LayerNorm, args.hidden)]


def measured(args: argparse.Namespace, ranks: int, layers: list[Any], loss: Any) -> list[Any]:
    """Returns the costs of the layers; that of the loss is the last one's."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": ranks}
    strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 1}
    fleet.init(is_collective=True, strategy=strategy)
    topology = fleet.get_hybrid_communicate_group().topology()
    model = fleet.distributed_model(PipelineLayer(layers, topology=topology, loss_fn=loss))
    tokens = np.random.default_rng(0).integers(0, args.vocabulary, (2, args.length + 1))
    data = [paddle.to_tensor(tokens[:, :-1]), paddle.to_tensor(tokens[:, 1:])]
    profile = model.profile(data)
    fleet.shutdown()
    *rest, last = profile.layers
    added = {
        name: getattr(last, name) + getattr(profile.loss, name)
        for name in ("forward", "backward", "held")
    }
    return [*rest, dataclasses.replace(last, **added)]


def simulated(args: argparse.Namespace, ranks: int, layers: list[Any], body: int) -> Simulated:
    """Returns a step with these costs, of which the first ``body`` are cut into stages."""

    def seconds(_stage: int, first: int, last: int) -> float:
        return sum(one.forward + one.backward for one in layers[first:last])

    cut = [*fastest(range(1, body), body, ranks, seconds).boundaries]
    cut += range(body + 1, len(layers) + 1)
    stages = [layers[first:last] for first, last in zip(cut, cut[1:])]
    costs = Costs(
        forward=tuple(sum(one.forward for one in stage) for stage in stages),
        backward=tuple(sum(one.backward for one in stage) for stage in stages),
        bytes=tuple(sum(one.held for one in stage) for stage in stages),
    )
    schedule = build(
        args.schedule, ranks=ranks, micro_batches=args.micro_batches, head=body < len(layers)
    )
    timeline = schedule.simulate(costs)
    assert timeline.peak_bytes is not None
    memory = list(timeline.peak_bytes)
    for number, stage in enumerate(stages):
        parameters = sum(one.parameters for one in stage)
        memory[schedule.placement.rank_of(number)] += COPIES * parameters
    bound = args.micro_batches * seconds(0, 0, len(layers)) / ranks
    return Simulated(timeline.makespan, bound, memory[-1] / max(memory[:-1]))


if __name__ == "__main__":
    main()
