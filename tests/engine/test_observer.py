"""Observers: in which order they are called around operations and at the moments of a batch."""

from __future__ import annotations

from typing import Any

import pytest

from fleetpipe.dygraph.train.observers import OBSERVERS
from fleetpipe.engine.observer import BatchObserver, Instruction, Observers
from fleetpipe.schedules import Action
from tests.pipelines import batch, mlp_and_sgd


class Noting(BatchObserver):
    """Notes what it is called for."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self._name, self._seen = name, seen

    def wrap(self, played: Any, op: Any, instruction: Instruction) -> Instruction:
        if op != Action("F", 0, 0):
            return instruction

        def noted() -> Any:
            self._seen.append(f"{self._name} {op}")
            return instruction()

        return noted

    def begin(self, batch: Any) -> None:
        self._seen.append(f"{self._name} begin {batch.optimizer is not None}")

    def computed(self) -> None:
        self._seen.append(f"{self._name} computed")

    def reduced(self, loss: Any) -> None:
        self._seen.append(f"{self._name} reduced {loss.ndim}")

    def step(self, step: Any, optimizer: Any, scaled: bool) -> None:
        self._seen.append(f"{self._name} before step")
        step()
        self._seen.append(f"{self._name} after step")

    def end(self) -> None:
        self._seen.append(f"{self._name} end")


class OfAll:
    """Watches operations and nothing else."""

    def __init__(self, seen: list[str]) -> None:
        self.wrap = Noting("all", seen).wrap


def test_the_first_is_innermost_and_ends_last() -> None:
    seen: list[str] = []
    with mlp_and_sgd(2) as (model, optimizer):
        model.observe(OfAll(seen))
        model.observe(Observers(Noting("a", seen), Noting("b", seen)))
        model.train_batch(batch(), optimizer)
        trained = [*seen]
        model.eval_batch(batch())
    assert seen[len(trained) :] == ["all F0.0"]
    before = ["a begin True", "b begin True", "b F0.0", "a F0.0", "all F0.0"]
    summed = ["a computed", "b computed", "a reduced 0", "b reduced 0"]
    step = ["b before step", "a before step", "a after step", "b after step"]
    assert trained == [*before, *summed, *step, "b end", "a end"]


def test_a_batch_that_fails_does_not_end_and_leaves_no_gradients() -> None:
    class Failing(Noting):
        def reduced(self, loss: Any) -> None:
            raise ZeroDivisionError

    seen: list[str] = []
    with mlp_and_sgd(2) as (model, optimizer):
        model.observe(Failing("a", seen))
        with pytest.raises(ZeroDivisionError):
            model.train_batch(batch(), optimizer)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert seen[-1] == "a computed"


def test_what_nobody_asks_for_is_not_there() -> None:
    with mlp_and_sgd(2) as (model, _):
        there = {name for name in OBSERVERS if model._runtime.engines.observer(name) is not None}
    assert there == {"users", "hooks", "companion", "meter"}
