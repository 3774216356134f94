"""Measures what order="ready" gains from late actions, a slow link and unequal micro-batches.

    python benchmarks/schedules/ready.py [--steps 12] [--forward 0.005] [--link 0.02]

Four ranks, a process each, one job. The engine runs stand-ins that sleep 5 ms in a forward and 10
in a backward, so that ranks do not share cores. All orders run in turn, step by step, each under
the same delays; a ratio is that of a step's time by that of the fixed 1F1B. Late: actions of rank 1
take three times as long in one case of ten, and each message between ranks 1 and 2 takes 0 to 20
ms, none before an earlier one. Unequal: micro-batches take 0.25 to 2 times as long as on average,
as with packed text. Then a GPT is trained under all these delays in each order, and the bits of its
parameters are compared. ``late_arrivals.py`` simulates the same for all schedules.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import paddle
from paddle import nn

from benchmarks.figures import Figure, answer, is_rank, on_ranks, parser, report
from benchmarks.workers import gpt
from fleetpipe import fleet
from fleetpipe.engine.engine import Engine, Walker
from fleetpipe.engine.ready import ReadyWalker
from fleetpipe.engine.stage import Values
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
from fleetpipe.job.job import Job, current_job
from fleetpipe.schedules import Plan, build
from fleetpipe.schedules.check.envelope import Envelope
from fleetpipe.transport import MessageKey

RANKS, MICRO_BATCHES, STEPS_OF_GPT = 4, 16, 4
#: The rank whose actions are late, the ends of the slow link, and lengths of micro-batches.
SLOW, LINK, LENGTHS = 1, (1, 2), (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)

#: Schedule, order, and memory cap; the first is what the others are compared with.
ORDERS: Sequence[tuple[str, str, int | None]] = (
    ("1F1B", "fixed", None),
    ("1F1B", "ready", None),
    ("1F1B", "ready", 7),
    ("1F1B", "ready", 8),
    ("1F1B", "ready", 16),
    ("Eager1F1B", "fixed", None),
)
#: What is uneven: whether something is late, and whether micro-batches are of unequal length.
UNEVEN = {"quiet": (False, False), "late": (True, False), "unequal": (False, True)}


class Now:
    """What goes on in this process at the moment."""

    step = 0
    late = unequal = False
    rank = 0
    forward = 0.005
    link = 0.02


def chance(*key: object) -> float:
    """Returns a number from 0 to 1 that depends on nothing but the step and the key."""
    return zlib.crc32(repr((Now.step, *key)).encode()) / 2**32


def pause(kind: str, stage: int, micro_batch: int) -> None:
    """Sleeps as long as an action of a stand-in takes."""
    seconds = Now.forward * (2 if kind == "B" else 1)
    if Now.unequal:
        # The mean of the lengths is 1.
        seconds *= LENGTHS[int(chance("length", micro_batch) * len(LENGTHS))]
    if Now.late and Now.rank == SLOW and chance(kind, stage, micro_batch) < 0.1:
        seconds *= 3
    time.sleep(seconds)


class StandIns:
    """The stage of a rank, which sleeps and hands small tensors on; see ``fleetpipe.engine``."""

    def __init__(self, plan: Plan) -> None:
        self._edges, self._value = plan.edges, paddle.ones([64])

    def forward(self, stage: int, micro_batch: int, inputs: Values) -> Values:
        """Sleeps as long as a forward takes."""
        pause("F", stage, micro_batch)
        return {edge: self._value for edge in self._edges if edge.source == stage}

    def backward(self, stage: int, micro_batch: int, output_grads: Values) -> Values:
        """Sleeps as long as a backward takes."""
        pause("B", stage, micro_batch)
        return {edge: (self._value,) for edge in self._edges if edge.target == stage}

    input_grad = backward

    def release(self, stage: int, micro_batch: int) -> None:
        """Holds nothing."""

    weight_grad = release


class Contender:
    """An order of stand-ins.

    Attributes:
        seconds: What steps took, by what was uneven.
    """

    def __init__(self, schedule: str, order: str, cap: int | None, transport: Any) -> None:
        hint = build(schedule, ranks=RANKS, micro_batches=MICRO_BATCHES)
        self._envelope, plan = Envelope(hint, Now.rank, memory_cap=cap), hint.lower()
        walker: Any = Walker if order == "fixed" else partial(ReadyWalker, self._begun)
        stage = StandIns(plan)
        self._engine = Engine(plan, stage, {Now.rank: transport}, 60, walker=walker)
        self.seconds: dict[str, list[float]] = {name: [] for name in UNEVEN}

    def _begun(self) -> Envelope:
        self._envelope.restart()
        return self._envelope

    def step(self, together: Any) -> float:
        """Runs a batch, which all ranks begin and end together; returns how long it took."""
        together.all_gather(0)
        begin = time.perf_counter()
        self._engine.run({"REDUCE": lambda: together.all_gather(0), "STEP": lambda: None})
        return time.perf_counter() - begin


class SlowLink:
    """Stands before the transport of a rank: messages of one peer take a while."""

    def __init__(self, transport: Any, peer: int) -> None:
        self._transport, self._peer = transport, peer
        self._free = 0.0
        self._here: dict[tuple[int, MessageKey], tuple[float, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, peer: int, key: MessageKey, value: Any) -> None:
        """Sends a value with the moment at which it arrives."""
        if peer == self._peer and key.kind in "FB":
            late = Now.link * chance(*key) if Now.late else 0.0
            self._free = max(self._free, time.monotonic() + late)
            value = (self._free, value)
        self._transport.send(peer, key, value)

    def try_receive(self, peer: int, key: MessageKey) -> tuple[bool, Any]:
        """Takes a value that has arrived."""
        if self._arrival(peer, key) > time.monotonic():
            return False, None
        return True, self._here.pop((peer, key))[1]

    def receive(self, peer: int, key: MessageKey, timeout: float) -> Any:
        """Waits for a value."""
        self.await_any([(peer, key)], timeout, math.inf)
        return self.try_receive(peer, key)[1]

    def await_any(self, messages: Any, timeout: float, patience: float) -> None:
        """Waits until one of some values has arrived."""
        end = time.monotonic() + patience
        while True:
            arrivals = {one: self._arrival(*one) for one in messages}
            now, first = time.monotonic(), min(end, *arrivals.values())
            if first <= now:
                return
            coming = [tuple(one) for one, at in arrivals.items() if at == math.inf]
            if coming:
                self._transport.await_any(coming, timeout, first - now)
            else:
                time.sleep(first - now)

    def _arrival(self, peer: int, key: MessageKey) -> float:
        """Returns when a value arrives; infinity as long as it has not left the socket."""
        if (peer, key) not in self._here:
            arrived, value = self._transport.try_receive(peer, key)
            if not arrived:
                return math.inf
            stamped = peer == self._peer and key.kind in "FB"
            self._here[peer, key] = value if stamped else (0.0, value)
        return self._here[peer, key][0]


class Restless(nn.Layer):
    """Sleeps in a forward and a backward as long as a stand-in does."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number, self._calls = number, 0

    def forward(self, x: Any) -> Any:
        place = self._number, self._calls % MICRO_BATCHES
        self._calls += 1
        pause("F", *place)
        if not x.stop_gradient:
            x.register_hook(lambda _: pause("B", *place))
        return x


def strategy(schedule: str = "1F1B", **own: Any) -> Any:
    """Returns a strategy for the ranks."""
    made = fleet.DistributedStrategy()
    made.hybrid_configs = {"pp_degree": RANKS}
    made.pipeline_configs = {"accumulate_steps": MICRO_BATCHES, "schedule_mode": schedule}
    made.fleetpipe_configs = own
    return made


def digest_of_gpt(schedule: str, order: str, cap: int | None) -> str:
    """Trains a GPT some steps; returns a digest of this rank's parameters."""
    fleet.init(is_collective=True, strategy=strategy(schedule, order=order, memory_cap=cap))
    slow_down(running().connect())
    paddle.seed(0)
    case = replace(gpt.CASES["gpt 256"], hidden=64, blocks=RANKS, length=16)
    restless = [LayerDesc(Restless, number) for number in range(RANKS)]
    layers = [layer for pair in zip(case.layers(), restless) for layer in pair]
    topology = fleet.get_hybrid_communicate_group().topology()
    model = fleet.distributed_model(PipelineLayer(layers, topology=topology, loss_fn=nn.MSELoss()))
    optimizer = fleet.distributed_optimizer(
        paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    )
    for Now.step in range(STEPS_OF_GPT):
        model.train_batch(case.batch(), optimizer)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.numpy().tobytes())
    return digest.hexdigest()


def running() -> Job:
    """Returns the job that runs."""
    job = current_job()
    assert job is not None
    return job


def slow_down(transports: dict[int, Any]) -> Any:
    """Puts the slow link before this rank's transport if it is at an end; returns that."""
    transport = transports[Now.rank]
    if Now.rank in LINK and not isinstance(transport, SlowLink):
        transport = transports[Now.rank] = SlowLink(transport, sum(LINK) - Now.rank)
    return transport


def measure(options: argparse.Namespace) -> None:
    """Is what a rank does."""
    Now.rank = int(os.environ["PADDLE_TRAINER_ID"])
    Now.forward, Now.link = options.forward, options.link
    fleet.init(is_collective=True, strategy=strategy())
    transport, together = slow_down(running().connect()), running().group()
    contenders = {words(*order): Contender(*order, transport) for order in ORDERS}
    for uneven, (Now.late, Now.unequal) in UNEVEN.items():
        for Now.step in range(options.steps + 1):
            # In another sequence each time, so that none has a better place.
            first = Now.step % len(contenders)
            for contender in [*contenders.values()][first:] + [*contenders.values()][:first]:
                seconds = contender.step(together)
                if Now.step:
                    contender.seconds[uneven].append(seconds)
    Now.late, Now.unequal = True, True
    digests = {words(*order): digest_of_gpt(*order) for order in ORDERS}
    answer({"seconds": {n: c.seconds for n, c in contenders.items()}, "digests": digests})


def words(schedule: str, order: str, cap: int | None) -> str:
    """Returns the name of an order."""
    return f"{schedule} {order}" if cap is None else f"{schedule} {order}, cap {cap}"


def figures(answers: list[dict[str, Any]]) -> list[Figure]:
    """Returns the steps and ratios, as rank 0 has measured them."""
    seconds = answers[0]["seconds"]
    first = seconds[next(iter(seconds))]
    made = [Figure(f"{name}: 1F1B fixed, a step", first[name], "s") for name in UNEVEN]
    for name in UNEVEN:
        for order, taken in seconds.items():
            if taken is not first:
                ratios = [one / base for one, base in zip(taken[name], first[name])]
                made.append(Figure(f"{name}: {order} / 1F1B fixed", ratios))
    return made


def main() -> None:
    """Measures on ranks, and reports."""
    options = parser(__doc__ or "")
    options.add_argument("--steps", type=int, default=12, help="default: %(default)s")
    options.add_argument("--forward", type=float, default=0.005, help="seconds of a forward")
    options.add_argument("--link", type=float, default=0.02, help="most seconds of a late message")
    chosen = options.parse_args()
    if is_rank():
        measure(chosen)
        return
    answers = on_ranks(RANKS)
    unequal = [one["digests"] for one in answers if len(set(one["digests"].values())) > 1]
    if unequal:
        raise SystemExit(f"the bits of the GPT's parameters depend on the order: {unequal}")
    print("the bits of the GPT's parameters are equal in all orders")
    report(figures(answers), chosen.json)


if __name__ == "__main__":
    main()
