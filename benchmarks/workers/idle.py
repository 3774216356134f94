"""What the engine itself costs: it runs plans whose stages compute nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import paddle

from benchmarks.workers.gpt import Case
from fleetpipe.engine.engine import Engine
from fleetpipe.engine.stage import Values
from fleetpipe.job.job import current_job
from fleetpipe.schedules import Plan, Send, build
from fleetpipe.schedules.action import Action
from fleetpipe.transport import MemoryHub, Transport

TIMEOUT = 60.0


class IdleStage:
    """Hands on the same tensor again and again."""

    def __init__(self, plan: Plan, case: Case) -> None:
        tensor = paddle.ones([case.rows, case.length, case.hidden], "float32")
        tensor.stop_gradient = False
        stages = range(plan.placement.stages)
        self._out = {s: {e: tensor for e in plan.edges if e.source == s} for s in stages}
        self._into = {s: {e: (tensor,) for e in plan.edges if e.target == s} for s in stages}

    def forward(self, stage: int, micro_batch: int, inputs: Values) -> Values:
        return self._out[stage]

    def backward(self, stage: int, micro_batch: int, output_grads: Values) -> Values:
        return self._into[stage]

    def input_grad(self, stage: int, micro_batch: int, output_grads: Values) -> Values:
        return self._into[stage]

    def weight_grad(self, stage: int, micro_batch: int) -> None:
        pass

    def release(self, stage: int, micro_batch: int) -> None:
        pass


def in_one_process(case: Case, runs: int) -> dict[str, float]:
    """Returns microseconds per action, and per message in memory.

    An action: with one rank there is nothing but actions and releases. A message: what two ranks
    take beyond that.
    """
    alone, pair = (build("1F1B", ranks=p, micro_batches=case.micro_batches).lower() for p in (1, 2))
    hub = MemoryHub(2)
    ends: dict[int, Transport] = {rank: hub.endpoint(rank) for rank in range(2)}
    action = _median(_engine(alone, case, {0: MemoryHub(1).endpoint(0)}), runs) / _actions(alone)
    both = _median(_engine(pair, case, ends), runs)
    return {
        "action": action * 1e6,
        "message in memory": (both - action * _actions(pair)) / _messages(pair) * 1e6,
    }


def over_sockets(case: Case, runs: int) -> dict[str, float]:
    """Returns microseconds per message, of the clock and of this rank's processor. Collective.

    Both ranks together take the clock's time for all messages; each rank sends half of them.
    """
    job = current_job()
    if job is None:
        return {}
    plan = build("1F1B", ranks=case.ranks, micro_batches=case.micro_batches).lower()
    engine = _engine(plan, case, job.connect())
    clock = _median(engine, runs)
    start = time.process_time()
    for _ in range(runs):
        _run(engine)
    processor = (time.process_time() - start) / runs
    per_message = 1e6 / _messages(plan)
    return {"clock": clock * per_message, "processor": processor * per_message * case.ranks}


def _engine(plan: Plan, case: Case, transports: Mapping[int, Transport]) -> Engine:
    return Engine(plan, IdleStage(plan, case), transports, TIMEOUT)


def _run(engine: Engine) -> float:
    start = time.perf_counter()
    engine.run({"REDUCE": _nothing, "STEP": _nothing})
    return time.perf_counter() - start


def _nothing() -> None:
    pass


def _median(engine: Engine, runs: int) -> float:
    for _ in range(3):
        _run(engine)
    return statistics.median(_run(engine) for _ in range(runs))


def _actions(plan: Plan) -> int:
    return sum(isinstance(op, Action) for row in plan.ops for op in row)


def _messages(plan: Plan) -> int:
    return sum(isinstance(op, Send) for row in plan.ops for op in row)
