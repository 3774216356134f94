"""A GPT with a large vocabulary: its head in parts, beside the best cut of whole layers.

    OMP_NUM_THREADS=1 python benchmarks/vocabulary.py [--blocks 4,8] [--ranks 2,4,8] [--rounds 3]
    OMP_NUM_THREADS=1 python benchmarks/vocabulary.py --ranks 2 --clock 5

One process plays all ranks, and profiles the model with a whole head and with parts in turn, by the
processor time of its thread: so the figures hold for as many processors as ranks, and what else the
machine does disturbs them little. The schedule is simulated with these costs. Both models are cut
where their slowest stage is fastest. The even share is the time of all layers and parts, shared
evenly by all ranks, as no cut of whole layers may be. The bound is that of the cut: the time of a
rank's own actions, after the forwards that come before its first and before the backwards that
follow its last. Memory is that of weights, their gradients, an optimizer of two numbers for
each weight, and activations, of the last rank beside the largest of the others.

With ``--clock`` two ranks train both models with these cuts, in turn, that many steps each.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn

from benchmarks.figures import Figure, answer, is_rank, on_ranks, parser, report, started, wrapped
from benchmarks.workers.gpt import Case
from fleetpipe import fleet
from fleetpipe.dygraph import VocabularyHead, VocabularyLoss
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.partition import fastest
from fleetpipe.schedules import Costs, Schedule, build

#: Weights, gradients, and an optimizer's two numbers.
COPIES = 4


class Simulated(NamedTuple):
    """A step of one model.

    Attributes:
        seconds: How long it takes.
        share: How long with an even share for each rank, and nothing to wait for.
        bound: How long at least with this cut.
        memory: Bytes of the last rank over the most of any other.
        cut: The first layer of each stage.
    """

    seconds: float
    share: float
    bound: float
    memory: float
    cut: list[int]


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
    options.add_argument("--clock", type=int, default=0, metavar="STEPS")
    options.add_argument("--cuts", type=json.loads, help=argparse.SUPPRESS)
    args = options.parse_args()
    if is_rank():
        answer(clocked(args))
        return
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
            title = f"{blocks} blocks, {ranks} ranks"
            figures += figures_of(title, rounds)
            if args.clock and ranks == 2:
                cuts = json.dumps([one.cut[:2] for one in rounds[-1]])
                answers = on_ranks(2, "--blocks", str(blocks), "--cuts", cuts)
                figures += clock_figures(title, answers)
    report(figures, args.json)


def figures_of(title: str, rounds: list[tuple[Simulated, Simulated]]) -> list[Figure]:
    """Returns the figures of all rounds."""
    names = ("whole layers", "parts")
    figures = [Figure(n, [both[i].seconds for both in rounds], "s") for i, n in enumerate(names)]
    figures += [
        Figure("parts / whole", [parts.seconds / whole.seconds for whole, parts in rounds]),
        Figure("parts, of an even share", [parts.seconds / parts.share for _, parts in rounds]),
        Figure("parts, of the bound", [parts.seconds / parts.bound for _, parts in rounds]),
    ]
    figures += [
        Figure(f"last rank's memory, {n}", [both[i].memory for both in rounds])
        for i, n in enumerate(names)
    ]
    return [figure._replace(name=f"{title}: {figure.name}") for figure in figures]


def clock_figures(title: str, answers: list[list[list[float]]]) -> list[Figure]:
    """Returns the figures of both models' steps by the clock, given those of each rank."""
    whole, parts = ([max(both) for both in zip(*model)] for model in zip(*answers))
    return [
        Figure(f"{title}: whole layers, by the clock", whole, "s"),
        Figure(f"{title}: parts, by the clock", parts, "s"),
        Figure(f"{title}: parts / whole, by the clock", [b / a for a, b in zip(whole, parts)]),
    ]


def clocked(args: argparse.Namespace) -> list[list[float]]:
    """Is what each of two ranks does: it trains both models in turn; returns seconds of steps."""
    started(2, args.micro_batches, 1, args.schedule)
    body = layers_before_the_head(args, int(args.blocks))
    linear = LayerDesc(nn.Linear, args.hidden, args.vocabulary, bias_attr=False)
    head = VocabularyHead(args.hidden, args.vocabulary)
    losses = nn.CrossEntropyLoss(), VocabularyLoss()
    batch = tokens(args, args.micro_batches)
    trained = [
        wrapped([*body, last], loss, seg_method=cut)
        for last, loss, cut in zip((linear, head), losses, args.cuts)
    ]
    seconds: list[list[float]] = [[], []]
    for _ in range(args.clock + 1):
        for (model, optimizer), steps in zip(trained, seconds):
            began = time.perf_counter()
            model.train_batch(batch, optimizer)
            steps.append(time.perf_counter() - began)
    fleet.shutdown()
    # The first of each warms up.
    return [steps[1:] for steps in seconds]


def tokens(args: argparse.Namespace, rows: int) -> list[paddle.Tensor]:
    """Returns inputs and labels, the words that follow them."""
    words = np.random.default_rng(0).integers(0, args.vocabulary, (rows, args.length + 1))
    return [paddle.to_tensor(words[:, :-1]), paddle.to_tensor(words[:, 1:])]


def layers_before_the_head(args: argparse.Namespace, blocks: int) -> list[Any]:
    """Returns the embedding, the blocks and the last norm."""
    case = Case(args.hidden, blocks, 8, args.length, args.micro_batches, 1)
    embedding = LayerDesc(nn.Embedding, args.vocabulary, args.hidden)
    return [embedding, *case.layers(), LayerDesc(nn.LayerNorm, args.hidden)]


def measured(args: argparse.Namespace, ranks: int, layers: list[Any], loss: Any) -> list[Any]:
    """Returns the costs of the layers; that of the loss is the last one's."""
    started(ranks, 2, 1, args.schedule)
    model, _ = wrapped(layers, loss)
    profile = model.profile(tokens(args, 2))
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
    stages = [layers[first:last] for first, last in itertools.pairwise(cut)]
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
    share = args.micro_batches * seconds(0, 0, len(layers)) / ranks
    bound = bound_of(schedule, costs)
    return Simulated(timeline.makespan, share, bound, memory[-1] / max(memory[:-1]), cut)


def bound_of(schedule: Schedule, costs: Costs) -> float:
    """Returns how long a step of stages with whole backwards takes at least, in any order."""
    placement, most = schedule.placement, 0.0
    for rank in range(placement.ranks):
        own = sum(costs.of(kind, n) for n in placement.stages_of(rank) for kind in "FB")
        around = sum(costs.of(kind, stage) for stage in range(rank) for kind in "FB")
        most = max(most, schedule.micro_batches * own + around)
    return most


if __name__ == "__main__":
    main()
