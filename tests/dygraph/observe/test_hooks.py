"""Hooks around forwards and backwards: when they are called, with what, and what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import paddle
import pytest

from fleetpipe.dygraph.observe.hooks import bubbles_before
from fleetpipe.errors import UsageError
from fleetpipe.fleet.meta_parallel import PipelineParallelMicroStepLocations as Locations
from fleetpipe.fleet.meta_parallel import register_global_pipeline_parallel_hook
from fleetpipe.fleet.meta_parallel.pipeline_parallel import (
    PipelineParallelMicroStepCallback,
    pipeline_parallel_callbacks_,
)
from fleetpipe.schedules import build
from tests.engine.test_hot_path import own_calls
from tests.pipelines import batch, bits, job, mlp_and_sgd, model_in_job, pipeline, sgd


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Takes the hooks of a test out of the registry again."""
    yield
    for hooks in pipeline_parallel_callbacks_.hooks.values():
        hooks.clear()


def test_the_registry_is_one_for_all_wrappers() -> None:
    assert isinstance(pipeline_parallel_callbacks_, PipelineParallelMicroStepCallback)
    assert set(pipeline_parallel_callbacks_.hooks) == set(Locations)
    seen: list[str] = []
    with job(2):
        first, second = pipeline(), pipeline()
        assert first.callbacks is second.callbacks is pipeline_parallel_callbacks_
        first.register_hook(Locations.FORWARD_BEGIN, lambda **_: seen.append("forward"))
        second.forward_backward_pipeline(batch())
        first.forward_backward_pipeline(batch())
    assert len(seen) == 2 * 2 * 4


@pytest.mark.parametrize("schedule", ["1F1B", "FThenB", "ZBH1"])
def test_hooks_see_the_values_of_each_step(schedule: str) -> None:
    seen: dict[Any, list[dict[str, Any]]] = {location: [] for location in Locations}
    for location in Locations:
        register_global_pipeline_parallel_hook(
            location, lambda location=location, **values: seen[location].append(values)
        )
    with model_in_job(2, 3, schedule) as model:
        model.train_batch(batch(3), sgd(model))
    names = {"input_tensor", "step_id"}
    of_location = {
        Locations.FORWARD_BEGIN: names,
        Locations.FORWARD_END: names | {"output_tensor"},
        Locations.BACKWARD_BEGIN: names | {"output_tensor", "output_tensor_grad"},
        Locations.BACKWARD_END: names
        | {"output_tensor", "output_tensor_grad", "input_tensor_grad"},
    }
    for location, calls in seen.items():
        assert len(calls) == 6
        assert {frozenset(call) for call in calls} == {frozenset(of_location[location])}
        assert sorted(call["step_id"] for call in calls) == [0, 0, 1, 1, 2, 2]
    ends = [
        (c["input_tensor"].shape, c["output_tensor"].shape) for c in seen[Locations.FORWARD_END]
    ]
    assert sorted(ends) == [([2, 6], [2, 8])] * 3 + [([2, 8], [2, 4])] * 3
    for call in seen[Locations.BACKWARD_END]:
        if call["output_tensor_grad"] is None:
            assert call["output_tensor"].shape == []
            assert call["input_tensor_grad"].shape == [2, 8]
        else:
            assert call["input_tensor_grad"] is None
            assert call["output_tensor_grad"].shape == [2, 8]


def test_steps_are_counted_over_the_chunks_of_a_rank() -> None:
    steps: list[Any] = []
    register_global_pipeline_parallel_hook(
        Locations.FORWARD_BEGIN, lambda step_id, **_: steps.append(step_id)
    )
    with model_in_job(2, 4, num_virtual_pipeline_stages=2) as model:
        model.train_batch(batch(), sgd(model))
        assert sorted(steps) == sorted(2 * list(range(8)))
        steps.clear()
        model.eval_batch(batch())
        assert steps == [None] * 16


def test_numbered_hooks_are_called_before_their_step_in_training_only() -> None:
    with mlp_and_sgd(2, 3) as (model, optimizer):
        model.train_batch(batch(3), optimizer)
        stage, engine = model._runtime.stage, model._runtime.engines.training
        assert model.forward_pipeline_parallel_hook_capacity == 3
        assert model.backward_pipeline_parallel_hook_capacity == 3
        assert model.bubble_pipeline_parallel_hook_capacity == 0
        seen: list[tuple[str, int]] = []
        for number in range(3):
            model.register_forward_pipeline_parallel_hook(
                location=number, hook=lambda i: seen.append(("f", i))
            )
        model.register_backward_pipeline_parallel_hook(2, lambda i: seen.append(("b", i)))
        for _ in range(2):
            seen.clear()
            model.train_batch(batch(3), optimizer)
            # Two ranks are played here.
            assert Counter(seen) == {("f", 0): 2, ("f", 1): 2, ("f", 2): 2, ("b", 2): 2}
            assert seen[-1] == ("b", 2)
        seen.clear()
        model.eval_batch(batch(3), compute_loss=True)
        assert seen == []
        # The first hook leaves stage and engine as they are.
        assert (model._runtime.stage, model._runtime.engines.training) == (stage, engine)
        for kind, words in (
            ("forward", "from 0 to 2"),
            ("backward", "from 0 to 2"),
            ("bubble", "no"),
        ):
            with pytest.raises(UsageError, match=words):
                getattr(model, f"register_{kind}_pipeline_parallel_hook")(3, print)


def test_bubbles_are_hooked_where_chunks_are_interleaved() -> None:
    with model_in_job(3, 6, num_virtual_pipeline_stages=2) as model:
        assert model.bubble_pipeline_parallel_hook_capacity == 4
        seen: list[int] = []
        for number in range(4):
            model.register_bubble_pipeline_parallel_hook(number, seen.append)
        model.train_batch(batch(6), sgd(model))
        # Three ranks are played here.
        assert Counter(seen) == dict.fromkeys(range(4), 3)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 4), (4, 2), (4, 8)])
def test_every_rank_has_as_many_bubbles(ranks: int, micro_batches: int) -> None:
    names = ("1F1B", "FThenB", "ZBH1", "Interleaved1F1B", "ZBV")
    schedules = (build(name, ranks=ranks, micro_batches=micro_batches) for name in names)
    for schedule, rank in product(schedules, range(ranks)):
        bubbles = bubbles_before(schedule, rank)
        assert sum(bubbles.values()) == 2 * ranks - 2
        assert bubbles[0] == rank
        assert min(bubbles) >= 0


@pytest.mark.parametrize("schedule", ["1F1B", "ZBV", "Interleaved1F1B"])
def test_hooks_change_no_bit(schedule: str) -> None:
    results = []
    for hooked in (False, True):
        with mlp_and_sgd(2, 4, schedule) as (model, optimizer):
            losses = [float(model.train_batch(batch(), optimizer))]
            if hooked:
                model.register_forward_pipeline_parallel_hook(0, lambda i: None)
                model.register_hook(Locations.BACKWARD_BEGIN, lambda **_: None)
            losses.append(float(model.train_batch(batch(seed=1), optimizer)))
            results.append((losses, bits(model.layers.state_dict()), model.peak_held))
    assert results[0] == results[1]


def test_a_hook_may_change_what_it_sees() -> None:
    def zero(output_tensor: Any, **_: Any) -> None:
        if output_tensor.shape == [2, 4]:
            with paddle.no_grad():
                output_tensor.scale_(0.0)

    with model_in_job(2, loss_fn=lambda output, label: (output * output).mean()) as model:
        assert float(model.eval_batch(batch(), compute_loss=True)) > 0
        model.register_hook(Locations.FORWARD_END, zero)
        assert float(model.eval_batch(batch(), compute_loss=True)) == 0


def test_without_hooks_nothing_of_them_runs() -> None:
    with mlp_and_sgd(2) as (model, optimizer):
        model.register_forward_pipeline_parallel_hook(0, print)
        model._runtime.engines.hook_calls.hooks.forward._hooks.clear()
        model.train_batch(batch(), optimizer)
        calls = own_calls(lambda: model.train_batch(batch(), optimizer))
        found = {name: count for name, count in calls.items() if name.startswith("hooks.py")}
        once = {"hooks.py:of_batch", "hooks.py:end"}
        assert found.keys() == once | {"hooks.py:__bool__"}
        assert {found[name] for name in once} == {1}
