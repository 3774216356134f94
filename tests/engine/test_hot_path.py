"""What a steady step must not do: announce, compile, keep, or call more than the step before."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe import CheckpointManager
from fleetpipe.engine.engine import Walker
from fleetpipe.job.job import current_job
from fleetpipe.schedules import Plan, Schedule, Send
from fleetpipe.transport import memory
from fleetpipe.transport.wire import bridge, structure
from tests.launching import ROOT
from tests.pipelines import CLASSES, FEATURES, batch, job, mlp_and_sgd, pipeline, sgd

SCHEDULES = ["1F1B", "FThenB", "Eager1F1B"]
PACKAGE = (str(ROOT / "fleetpipe"), str(ROOT / "dygraph"))


def counters() -> dict[int, tuple[int, int, int]]:
    """Messages, announcements and bytes that each rank of this process has sent so far."""
    current = current_job()
    assert current is not None
    return {
        rank: (end.messages, end.announcements, end.bytes_sent)
        for rank, end in current.connect().items()
    }


def sends(plan: Plan) -> list[int]:
    return [sum(isinstance(op, Send) for op in row) for row in plan.ops]


def own_calls(run: Callable[[], Any]) -> Counter[str]:
    """Counts the calls of this package's own functions while ``run`` runs."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_sends_what_the_plan_says_and_announces_nothing(schedule: str) -> None:
    with mlp_and_sgd(3, micro_batches=5, schedule=schedule) as (model, optimizer):
        model.train_batch(batch(5), optimizer)
        before = counters()
        for seed in range(1, 5):
            model.train_batch(batch(5, seed), optimizer)
        after = counters()
        for rank, expected in enumerate(sends(model.schedule.lower())):
            assert after[rank][0] - before[rank][0] == 4 * expected
            assert after[rank][1] == before[rank][1]
            # The first and the last rank send one tensor for each micro-batch, others two.
            assert expected == 5 * (1 if rank in (0, 2) else 2)


def test_another_shape_is_announced_once_for_each_channel() -> None:
    with mlp_and_sgd(2, micro_batches=2) as (model, optimizer):
        model.train_batch(batch(2), optimizer)
        before = counters()
        wide = [[tensor[:1] for tensor in (part[:2], part[2:])] for part in batch(2)]
        for _ in range(3):
            model.train_batch(wide, optimizer)
        after = counters()
    assert {rank: after[rank][1] - before[rank][1] for rank in after} == {0: 1, 1: 1}


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_compiled_or_announced_after_the_first_step(
    monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    with mlp_and_sgd(2) as (model, optimizer):

        def step(seed: int) -> None:
            if training:
                model.train_batch(batch(seed=seed), optimizer)
            else:
                model.eval_batch(batch(seed=seed), compute_loss=True)

        def refuse(*_: Any, **__: Any) -> Any:
            raise AssertionError("this belongs into the first step")

        step(0)
        for owner, name in (
            (Walker, "_compile"),
            (Schedule, "lower"),
            (Schedule, "verify"),
            (Plan, "verify"),
            (structure.Structure, "__init__"),
            (memory, "check_key"),
        ):
            monkeypatch.setattr(owner, name, refuse)
        step(1)


def test_every_step_makes_the_same_calls_as_the_one_before() -> None:
    with mlp_and_sgd(2, micro_batches=4) as (model, optimizer):
        data = batch()

        def step() -> None:
            model.train_batch(data, optimizer)

        step()
        second = own_calls(step)
        assert own_calls(step) == second
        assert second["memory.py:send"] == second["bridge.py:take_apart"] == 8
        assert second["engine.py:_compute"] == 16


def frames_below(function: str) -> list[str]:
    """The package's own functions that are running now, from ``function`` on to the innermost."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_name)
            if frame.f_code.co_name == function:
                break
        frame = frame.f_back
    return found[::-1]


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_few_calls_stand_between_train_batch_and_a_layer(schedule: str) -> None:
    seen: list[list[str]] = []

    def look(x: Any) -> Any:
        seen.append(frames_below("train_batch"))
        return x

    with job(2, schedule=schedule):
        model = pipeline([nn.Linear(FEATURES, 8), look, nn.Linear(8, CLASSES)])
        optimizer = sgd(model)
        for _ in range(2):
            model.train_batch(batch(), optimizer)
    assert seen[-1][0] == "train_batch"
    assert len(seen[-1]) == 7, seen[-1]


def files_entered(run: Callable[[], Any]) -> set[str]:
    return {call.split(":")[0] for call in own_calls(run)}


def test_a_step_and_a_save_enter_few_files(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with mlp_and_sgd(2) as (model, optimizer):
        model.train_batch(batch(), optimizer)
        manager.save(1, model=model, optimizer=optimizer)
        step = files_entered(lambda: model.train_batch(batch(), optimizer))
        save = files_entered(lambda: manager.save(2, model=model, optimizer=optimizer))
    assert len(step) <= 41, sorted(step)
    assert len(save) <= 32, sorted(save)


def test_nothing_grows_from_step_to_step() -> None:
    with mlp_and_sgd(3, micro_batches=4) as (model, optimizer):
        data = batch()

        def alive() -> tuple[int, int]:
            gc.collect()
            everything = gc.get_objects()
            # By type: isinstance() would follow weak proxies whose objects are gone.
            tensors = sum(issubclass(type(item), paddle.Tensor) for item in everything)
            return len(everything), tensors

        for _ in range(3):
            model.train_batch(data, optimizer)
        objects, tensors = alive()
        for _ in range(20):
            model.train_batch(data, optimizer)
        later_objects, later_tensors = alive()
    assert later_tensors == tensors
    # One more for each step would be 20.
    assert later_objects - objects < 20


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_are_freed_with_their_backward_without_the_collector(schedule: str) -> None:
    with mlp_and_sgd(2, micro_batches=4, schedule=schedule) as (model, optimizer):
        outputs: list[weakref.ref[Any]] = []
        alive: list[int] = []

        def watch(layer: Any, inputs: Any, output: Any) -> None:
            outputs.append(weakref.ref(output))
            alive.append(sum(one() is not None for one in outputs))

        for layer in model.layers.sublayers():
            layer.register_forward_post_hook(watch)
        gc.disable()
        try:
            model.train_batch(batch(), optimizer)
        finally:
            gc.enable()
        assert len(outputs) == 16
        assert [one() for one in outputs] == [None] * 16
        # Two Linear on each rank, for as many micro-batches as the ranks hold at once.
        assert max(alive) <= 2 * sum(model.schedule.simulate().peak_activations)


def counted() -> tuple[dict[str, Any], dict[str, Any], int]:
    """What there is after two steps and after five more; the sends of the plan."""
    rank = paddle.distributed.get_rank()

    def facts() -> dict[str, Any]:
        return {
            "sent": counters()[rank],
            "block types": bridge._byte_array.cache_info().misses,
            "templates": bridge._tensor_to_clone.cache_info().misses,
            "threads": sorted(thread.name for thread in threading.enumerate()),
        }

    with mlp_and_sgd(2, micro_batches=4) as (model, optimizer):
        for seed in range(2):
            model.train_batch(batch(seed=seed), optimizer)
        before = facts()
        for seed in range(2, 7):
            model.train_batch(batch(seed=seed), optimizer)
        return before, facts(), sends(model.schedule.lower())[rank]


def test_steady_steps_over_sockets(on_ranks: Callable[..., Any]) -> None:
    for before, after, planned in on_ranks(counted, 2):
        # The owner of the first stage also sends what its rows are, that of the last the loss.
        assert after["sent"][0] - before["sent"][0] == 5 * (planned + 1)
        for what in ("block types", "templates", "threads"):
            assert after[what] == before[what]
        assert after["sent"][1] == before["sent"][1]
        assert "fleetpipe-writer" not in after["threads"]
