"""Random models under six schedules have the bits of plain Paddle, step by step.

``python -m tests.dygraph.train.test_random_models 0 200`` tries as many, and counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest

from fleetpipe.errors import FleetPipeError
from tests.dygraph.random_models import AROUND, BIAS_THREE_TIMES, MICRO_BATCHES, REFUSED, Case
from tests.pipelines import accumulate, job, pipeline

#: Ranks and chunks.
SCHEDULES = {
    "FThenB": (2, 1),
    "1F1B": (3, 1),
    "Eager1F1B": (2, 1),
    "Interleaved1F1B": (2, 2),
    "ZBH1": (2, 1),
    "ZBV": (2, 2),
}

#: What CI tries.
NUMBERS = range(4)


class Step(NamedTuple):
    """What a step gives, in bits: the loss, gradients and the state by name."""

    loss: bytes
    gradients: dict[str, bytes]
    state: dict[str, bytes]


def number_bits(tensor: Any) -> bytes:
    """The bits of a tensor; all that is not a number is alike."""
    numbers = tensor.detach().numpy().copy()
    numbers[np.isnan(numbers)] = np.nan
    return numbers.tobytes()


def square(output: Any, labels: Any) -> Any:
    return ((output - labels) ** 2).mean()


def steps(case: Case, model: Any, gradients_of: Any, named: Any) -> Iterator[Step]:
    """Trains two steps, each with the gradients that ``gradients_of(batch)`` leaves."""
    optimizer = paddle.optimizer.Adam(0.01, parameters=model.parameters())
    for step in range(2):
        loss = gradients_of(case.batch(step))
        with_gradient = {n: p.grad for n, p in named().items() if p.grad is not None}
        gradients = {name: number_bits(grad) for name, grad in with_gradient.items()}
        optimizer.step()
        optimizer.clear_grad()
        state = {name: number_bits(tensor) for name, tensor in named().items()}
        yield Step(number_bits(loss), gradients, state)


def plain_steps(case: Case) -> list[Step]:
    with job(1, MICRO_BATCHES):
        paddle.seed(case.number)
        model = pipeline(case.entries(), loss_fn=square).layers.single_model()
    model.to(dtype=case.dtype)

    def gradients_of(batch: list[Any]) -> Any:
        parts = zip(*(part.split(MICRO_BATCHES) for part in batch))
        return accumulate(square(model(x), y) / MICRO_BATCHES for x, y in parts)

    return list(steps(case, model, gradients_of, model.state_dict))


def piped_steps(case: Case, schedule: str, fast_leaves: bool) -> list[Step]:
    ranks, chunks = SCHEDULES[schedule]
    options = {"recompute_interval": case.interval, "recompute_ctx": {}} if case.interval else {}
    with job(ranks, MICRO_BATCHES, schedule, rows=case.rows, fast_leaves=fast_leaves):
        paddle.seed(case.number)
        chunked = {"num_virtual_pipeline_stages": chunks, **options}
        model = pipeline(case.entries(), loss_fn=square, **chunked)
        model.layers.to(dtype=case.dtype)
        run = model.forward_backward_pipeline
        return list(steps(case, model, run, model.layers.own_state))


def differences(one: Step, other: Step) -> set[str]:
    """The names of what differs, "loss" for the loss."""
    names = {"loss"} if one.loss != other.loss else set()
    for left, right in zip(one[1:], other[1:]):
        names |= {name for name in left.keys() | right.keys() if left.get(name) != right.get(name)}
    return names


def outcome(case: Case, schedule: str, expected: list[Step]) -> str:
    """What training under a schedule comes to: "equal", or what else is said of such a model."""
    splits = schedule.startswith("ZB")
    fast_leaves = (case.number + list(SCHEDULES).index(schedule)) % 7 != 0
    try:
        results = piped_steps(case, schedule, fast_leaves)
    except FleetPipeError as error:
        if not splits or REFUSED.isdisjoint(case.kinds):
            raise AssertionError((case, schedule)) from error
        return "refused"
    for one, other in zip(expected, results):
        if names := differences(one, other):
            places = {int(name.partition(".")[0]) - case.tokens for name in names if name != "loss"}
            around = AROUND | BIAS_THREE_TIMES if splits else BIAS_THREE_TIMES
            kinds = {case.kinds[place] if place < 4 else "last" for place in places}
            assert kinds, (case, schedule, names)
            assert kinds <= around, (case, schedule, names)
            assert one.loss == other.loss, (case, schedule)
            # What comes after has other numbers to begin with.
            return "another order"
    return "equal"


def outcomes(number: int) -> Counter[str]:
    case = Case.of(number)
    expected = plain_steps(case)
    return Counter(outcome(case, schedule, expected) for schedule in SCHEDULES)


@pytest.mark.once_for("2", "3")
@pytest.mark.parametrize("number", NUMBERS)
def test_a_random_model_has_the_bits_of_plain_paddle(number: int) -> None:
    assert outcomes(number)["equal"] > 1


if __name__ == "__main__":
    import sys

    total: Counter[str] = Counter()
    for one in range(*map(int, sys.argv[1:])):
        try:
            total += outcomes(one)
        except AssertionError as error:
            total["wrong"] += 1
            print(error)
        print(one, dict(total), flush=True)
