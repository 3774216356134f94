"""The engine against a stage that only keeps a diary: order, edges, splits, frees, collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest

from fleetpipe.engine.engine import Engine
from fleetpipe.engine.stage import Values
from fleetpipe.errors import PipelineTimeout
from fleetpipe.mesh import turns
from fleetpipe.schedules import Edge, Plan, Recv, Schedule, build, chain, forward_only
from fleetpipe.schedules.placement import Placement
from fleetpipe.transport import MemoryHub


class Diary:
    """A stage whose values say where they come from."""

    def __init__(self, edges: tuple[Edge, ...]) -> None:
        self.edges = edges
        self.lines: list[str] = []
        self.alive: set[tuple[int, int]] = set()

    def forward(self, stage: int, micro_batch: int, inputs: Values) -> Values:
        took = ",".join(f"{edge}={value}" for edge, value in sorted(inputs.items()))
        self.lines.append(f"F{stage}.{micro_batch} {took}")
        self.alive.add((stage, micro_batch))
        return {edge: f"y{stage}.{micro_batch}" for edge in self.edges if edge.source == stage}

    def _back(self, kind: str, stage: int, micro_batch: int, grads: Values) -> Values:
        took = ",".join(f"{edge}={value}" for edge, value in sorted(grads.items()))
        self.lines.append(f"{kind}{stage}.{micro_batch} {took}")
        return {edge: f"g{stage}.{micro_batch}" for edge in self.edges if edge.target == stage}

    def backward(self, stage: int, micro_batch: int, output_grads: Values) -> Values:
        return self._back("B", stage, micro_batch, output_grads)

    def input_grad(self, stage: int, micro_batch: int, output_grads: Values) -> Values:
        return self._back("I", stage, micro_batch, output_grads)

    def weight_grad(self, stage: int, micro_batch: int) -> None:
        self.lines.append(f"W{stage}.{micro_batch}")

    def release(self, stage: int, micro_batch: int) -> None:
        self.alive.remove((stage, micro_batch))


def played(plan: Plan, first_micro_batch: int = 0) -> tuple[Diary, Engine, list[str]]:
    """Runs a plan with all ranks in this process."""
    plan.verify()
    diary = Diary(plan.edges)
    hub = MemoryHub(plan.placement.ranks)
    transports = {rank: hub.endpoint(rank) for rank in range(plan.placement.ranks)}
    engine = Engine(plan, diary, transports, timeout=1)
    reached: list[str] = []
    engine.run(
        {name: (lambda name=name: reached.append(name)) for name in ("REDUCE", "STEP")},
        first_micro_batch,
    )
    return diary, engine, reached


def test_each_action_gets_what_its_edges_bring() -> None:
    diary, _, reached = played(build("1F1B", ranks=2, micro_batches=2).lower())
    assert [line for line in diary.lines if line[1] == "0"] == [
        "F0.0 ",
        "F0.1 ",
        "B0.0 0>1=g1.0",
        "B0.1 0>1=g1.1",
    ]
    assert [line for line in diary.lines if line[1] == "1"] == [
        "F1.0 0>1=y0.0",
        "B1.0 ",
        "F1.1 0>1=y0.1",
        "B1.1 ",
    ]
    assert reached == ["REDUCE", "STEP"]
    assert diary.alive == set()


def test_where_a_rank_is_can_be_asked_at_each_operation() -> None:
    plan = build("1F1B", ranks=2, micro_batches=1).lower()
    _, engine, _ = played(plan)
    walker = engine._walkers[1]
    said = []
    # As another thread may find it; a receive has no instruction here.
    for walker._position in range(len(plan.ops[1]) + 1):
        said.append(walker.where())
    operations = [f"rank 1, operation {op}" for op in plan.ops[1]]
    assert any(isinstance(op, Recv) for op in plan.ops[1])
    assert [text.partition(" (")[0].partition(", last")[0] for text in said] == [
        *operations,
        "rank 1, between batches",
    ]


def test_a_skip_connection_is_an_edge_like_any_other() -> None:
    edges = (*chain(3), Edge(0, 2, "mask"))
    diary, _, _ = played(build("1F1B", ranks=3, micro_batches=1).lower(edges))
    assert "F2.0 0>2:mask=y0.0,1>2=y1.0" in diary.lines
    assert "B0.0 0>1=g1.0,0>2:mask=g2.0" in diary.lines


def test_split_backward_on_a_vee_with_two_stages_on_one_rank() -> None:
    text = (
        "# fleetpipe-schedule 1 name=hand ranks=2 micro_batches=1 chunks=2 placement=vee\n"
        "F0.0 F3.0 I3.0 W3.0 I0.0 W0.0\n"
        "F1.0 F2.0 I2.0 I1.0 W2.0 W1.0"
    )
    diary, engine, _ = played(Schedule.parse(text).lower())
    assert "F2.0 1>2=y1.0" in diary.lines
    assert "I1.0 1>2=g2.0" in diary.lines
    assert diary.lines.index("W2.0") > diary.lines.index("I2.0 2>3=g3.0")
    assert diary.alive == set()
    assert engine.peak_held == {0: 2, 1: 2}


def test_fused_actions_both_run() -> None:
    text = (
        "# fleetpipe-schedule 1 name=hand ranks=1 micro_batches=2 chunks=1 placement=loop\n"
        "F0.0 (F0.1|B0.0) B0.1"
    )
    diary, _, _ = played(Schedule.parse(text).lower())
    assert diary.lines == ["F0.0 ", "F0.1 ", "B0.0 ", "B0.1 "]


class Exchanging(Diary):
    """A stage that exchanges something in the middle of each forward and backward."""

    fails = ""

    def forward(self, stage: int, micro_batch: int, inputs: Values) -> Values:
        values = super().forward(stage, micro_batch, inputs)
        turns.hand_over()
        if self.fails == f"F{stage}.{micro_batch}":
            raise KeyError("mine")
        self.lines.append(f"end of F{stage}.{micro_batch}")
        return values

    def backward(self, stage: int, micro_batch: int, output_grads: Values) -> Values:
        grads = super().backward(stage, micro_batch, output_grads)
        turns.hand_over()
        self.lines.append(f"end of B{stage}.{micro_batch}")
        return grads

    def suspend(self) -> Callable[[], None]:
        return lambda: None

    def inherited(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_a_fused_forward_and_backward_of_two_stages_take_turns() -> None:
    plan = Schedule.parse(
        "# fleetpipe-schedule 1 name=hand ranks=1 micro_batches=2 chunks=2 placement=vee\n"
        "F0.0 F1.0 (F0.1|B1.0) (F1.1|B0.0) B1.1 B0.1"
    ).lower()
    stage = Exchanging(plan.edges)
    engine = Engine(plan, stage, {0: MemoryHub(1).endpoint(0)}, 1, overlapping=stage)
    engine.run({"REDUCE": list, "STEP": list})
    assert stage.lines[4:12] == [
        *("F0.1 ", "B1.0 ", "end of F0.1", "end of B1.0"),
        *("F1.1 0>1=y0.1", "B0.0 0>1=g1.0", "end of F1.1", "end of B0.0"),
    ]
    assert stage.alive == set()
    stage.fails = "F1.1"
    with pytest.raises(KeyError, match="mine") as caught:
        engine.run({"REDUCE": list, "STEP": list})
    assert "end of B0.0" not in stage.lines[16:]
    if sys.version_info >= (3, 11):
        assert r"operation (F1.1|B0.0) (stage 1, micro-batch 1)" in caught.value.__notes__[0]


def test_a_forward_only_plan_keeps_nothing() -> None:
    diary, engine, reached = played(forward_only(Placement("loop", 3, 1), 4).lower())
    assert len(diary.lines) == 12
    assert diary.alive == set()
    assert reached == []
    assert max(engine.peak_held.values()) == 1


def test_micro_batches_are_told_by_their_global_number() -> None:
    diary, _, _ = played(build("1F1B", ranks=2, micro_batches=2).lower(), first_micro_batch=6)
    assert {line.split()[0] for line in diary.lines} == {
        f"{kind}{stage}.{k}" for kind in "FB" for stage in (0, 1) for k in (6, 7)
    }


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt()])
def test_what_an_unfinished_run_sent_does_not_reach_the_next(error: BaseException) -> None:
    plan = build("FThenB", ranks=2, micro_batches=3).lower()

    class FailsOnce(Diary):
        run = 0

        def forward(self, stage: int, micro_batch: int, inputs: Values) -> Values:
            if self.run == 0 and stage == 1 and micro_batch == 1:
                raise error
            outputs = super().forward(stage, micro_batch, inputs)
            return {edge: f"{value} of run {self.run}" for edge, value in outputs.items()}

    diary = FailsOnce(plan.edges)
    hub = MemoryHub(2)
    engine = Engine(plan, diary, {rank: hub.endpoint(rank) for rank in (0, 1)}, 1)
    nothing = {"REDUCE": lambda: None, "STEP": lambda: None}
    with pytest.raises(type(error)):
        engine.run(nothing)
    diary.run = 1
    diary.lines.clear()
    engine.run(nothing)
    taken = [line for line in diary.lines if line.startswith("F1.")]
    assert taken == [f"F1.{k} 0>1=y0.{k} of run 1" for k in range(3)]


def test_a_message_that_does_not_come_is_named_with_the_operation_that_needs_it() -> None:
    plan = build("1F1B", ranks=2, micro_batches=2).lower()
    hub = MemoryHub(2)
    engine = Engine(plan, Diary(plan.edges), {1: hub.endpoint(1)}, timeout=1)
    with pytest.raises(PipelineTimeout) as caught:
        engine.run({})
    message = str(caught.value)
    assert "rank 1, operation F1.0 (stage 1, micro-batch 0)" in message
    assert "F of edge 0>1, micro-batch 0" in message
