"""The learning rate: what dygraph steps wrongly is found, what the script does is followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest

from fleetpipe import parity
from fleetpipe.dygraph import PipelineOptimizer, PipelineParallel
from tests.fixtures import Patch
from tests.parity.defects import differences
from tests.pipelines import batch, mlp_and_sgd, model_in_job, sgd

LR = paddle.optimizer.lr
SCHEDULERS: dict[str, Callable[[], Any]] = {
    "StepDecay": lambda: LR.StepDecay(0.1, 2),
    "LambdaDecay": lambda: LR.LambdaDecay(0.1, lambda epoch: 0.9**epoch),
    "LinearWarmup": lambda: LR.LinearWarmup(LR.CosineAnnealingDecay(0.1, 5), 2, 0.0, 0.1),
    "LinearWarmup of a number": lambda: LR.LinearWarmup(0.1, 2, 0.0, 0.1),
    "CyclicLR": lambda: LR.CyclicLR(0.01, 0.1, 2),
}


def schedule(scheduler: Any, steps: int = 4) -> parity.Report:
    with model_in_job(2) as model:
        session = parity.begin(model, sgd(model, scheduler))
        for seed in range(steps):
            session.step(batch(seed=seed), scheduler)
        return session.report


def step_twice(monkeypatch: Patch) -> None:
    """Has every ``train_batch`` step the scheduler once more."""
    train_batch = PipelineParallel.train_batch

    def wrong(self: Any, data: Any, optimizer: Any, lr_scheduler: Any, *more: Any) -> Any:
        loss = train_batch(self, data, optimizer, lr_scheduler, *more)
        lr_scheduler.step()
        return loss

    monkeypatch.setattr(PipelineParallel, "train_batch", wrong)


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scheduler_that_steps_twice_is_found_in_the_step(make: Any, monkeypatch: Patch) -> None:
    scheduler = make()
    assert schedule(scheduler).passed
    assert scheduler.last_epoch == 4
    step_twice(monkeypatch)
    report = schedule(make(), steps=1)
    assert ("last_epoch", type(scheduler).__name__, 0) in differences(report)
    assert {found.quantity for found in report.differences} <= {"learning rate", "last_epoch"}
    assert "learning rate" in {found.quantity for found in schedule(make()).differences}


def test_a_rate_that_changes_before_the_update_is_found(monkeypatch: Patch) -> None:
    step = PipelineOptimizer.step

    def early(self: Any) -> None:
        if type(self) is PipelineOptimizer:
            self.wrapped._learning_rate.step()
        step(self)

    monkeypatch.setattr(PipelineOptimizer, "step", early)
    quantities = {found.quantity for found in schedule(LR.StepDecay(0.1, 1), 1).differences}
    assert {"learning rate", "parameter"} <= quantities


def test_the_script_steps_and_sets_the_rate_as_it_likes() -> None:
    scheduler = LR.ReduceOnPlateau(0.5, patience=0, factor=0.1)
    with model_in_job(2) as model:
        optimizer = sgd(model, scheduler)
        session = parity.begin(model, optimizer)
        rates = []
        for seed in range(5):
            session.step(batch(seed=seed))
            scheduler.step(paddle.to_tensor(1.0))
            rates.append(optimizer.get_lr())
        optimizer.set_lr_scheduler(LR.StepDecay(0.1, 1))
        session.step(batch(), optimizer.wrapped._learning_rate)
    assert session.report.passed, session.report.verdict()
    assert len(set(rates)) > 2


def test_a_number_that_the_script_changes_is_followed() -> None:
    with mlp_and_sgd(2) as (model, optimizer):
        session = parity.begin(model, optimizer)
        for rate in (0.1, 0.05, 0.5):
            optimizer.set_lr(rate)
            session.step(batch())
    assert session.report.passed, session.report.verdict()


def test_a_scheduler_of_the_scripts_own_is_stepped_on_a_copy() -> None:
    class Halving:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer, self.last_epoch = optimizer, 0

        def get_lr(self) -> float:
            return float(self.optimizer.get_lr())

        def step(self) -> None:
            self.last_epoch += 1
            self.optimizer.set_lr(self.get_lr() / 2)

    with mlp_and_sgd(2) as (model, optimizer):
        session = parity.begin(model, optimizer)
        for seed in range(3):
            session.step(batch(seed=seed), scheduler := Halving(optimizer))
        assert (optimizer.get_lr(), scheduler.last_epoch) == (0.0125, 1)
    assert session.report.passed, session.report.verdict()
