"""The order of samples belongs to the job: replicas take turns in it, and may change their number.

What is compared is a plain reference: the order of an epoch, read from a position on.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import CheckpointError, ConfigError, StateError
from fleetpipe.io import DistributedBatchSampler
from tests import pipelines


def replicas(samples: int, count: int, batch: int, **options: Any) -> list[DistributedBatchSampler]:
    return [
        DistributedBatchSampler(range(samples), batch, count, rank, **options)
        for rank in range(count)
    ]


def together(samplers: list[DistributedBatchSampler], steps: int | None = None) -> list[int]:
    """Lets all replicas take batches in step; returns the samples in the job's order."""
    taken: list[int] = []
    for step, parts in enumerate(zip(*samplers)):
        taken += [index for part in parts for index in part]
        assert len({len(part) for part in parts}) == 1
        assert len({json.dumps(sampler.state_dict()) for sampler in samplers}) == 1
        if step + 1 == steps:
            break
    return taken


def order(samples: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order of an epoch as numpy's own shuffle of a list has it."""
    indices = list(range(samples))
    if shuffle:
        np.random.RandomState([seed, epoch] if seed else epoch).shuffle(indices)
    return indices


#: Samples of an epoch, replicas and the size of a batch before and after, steps before.
RUNS = st.tuples(
    st.integers(0, 60), *[st.integers(1, 4)] * 2, *[st.integers(1, 5)] * 2, st.integers(0, 12)
)


@given(RUNS, st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_an_interrupted_epoch_has_the_samples_of_a_whole_one(
    run: tuple[int, ...], seed: int, epoch: int, shuffle: bool
) -> None:
    samples, before, after, batch, other_batch, steps = run
    options: dict[str, Any] = {"shuffle": shuffle, "drop_last": False}
    first = replicas(samples, before, batch, seed=seed, **options)
    for sampler in first:
        sampler.set_epoch(epoch)
    taken = together(first, steps) if steps else []
    saved = json.loads(json.dumps(first[0].state_dict()))
    second = replicas(samples, after, other_batch, **options)
    for sampler in second:
        sampler.set_state_dict(saved)
        sampler.set_epoch(saved["epoch"])
    # What an epoch ends with is repeated from its begin, once in each of the two runs at most.
    expected = order(samples, seed, epoch, shuffle)
    read = taken[:samples] + together(second)
    assert read[:samples] == expected
    assert len(read) - samples < after
    assert read[samples:] == list(np.resize(expected, len(read) - samples))


@given(RUNS, st.booleans())
def test_dropped_samples_are_those_that_are_no_whole_step(
    run: tuple[int, ...], shuffle: bool
) -> None:
    samples, count, _, batch, _, steps = run
    size = count * batch
    first = replicas(samples, count, batch, shuffle=shuffle)
    taken = together(first, steps) if steps else []
    second = replicas(samples, size, 1, shuffle=shuffle)
    for sampler in second:
        sampler.set_state_dict(first[0].state_dict())
    taken += together(second)
    assert taken == order(samples, 0, 0, shuffle)[: samples // size * size]
    for sampler in [*first, *second]:
        sampler.set_epoch(1)
        assert len(list(sampler)) == len(sampler) == samples // size


def test_two_replicas_then_one_then_two_take_what_two_take() -> None:
    whole = replicas(23, 2, 2, shuffle=True, seed=7)
    expected = [together(whole), together(whole)]
    parts, state, found = [(2, 2, 2), (1, 4, 3), (2, 2, None)], None, []
    for count, batch, steps in parts:
        samplers = replicas(23, count, batch, shuffle=True, seed=7)
        for sampler in samplers:
            if state is not None:
                sampler.set_state_dict(state)
        found += together(samplers, steps)
        state = samplers[0].state_dict()
    assert found == expected[0]
    assert len(found) == 20
    assert state == {"seed": 7, "epoch": 0, "consumed": 23, "samples": 23, "shuffle": True}
    assert together(samplers) == expected[1]
    assert expected[0] != expected[1]


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_order_is_paddles_where_replicas_divide_the_samples(drop_last: bool) -> None:
    for rank in range(3):
        theirs = paddle.io.DistributedBatchSampler(range(24), 3, 3, rank, True, drop_last)
        ours = DistributedBatchSampler(range(24), 3, 3, rank, True, drop_last)
        for epoch in range(3):
            theirs.set_epoch(epoch)
            assert list(theirs) == list(ours)
            assert ours.epoch == epoch


def test_each_iteration_is_an_epoch_further_unless_it_is_said() -> None:
    sampler = DistributedBatchSampler(range(6), 2, shuffle=True)
    first, second = list(sampler), list(sampler)
    assert (sampler.epoch, first == second) == (1, False)
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.epoch = 1
    assert list(sampler) == second


def test_an_iteration_that_was_left_does_not_move_the_next_one() -> None:
    sampler = DistributedBatchSampler(range(8), 2)
    left = iter(sampler)
    next(left)
    again = iter(sampler)
    next(again)
    next(left)
    next(left)
    assert sampler.state_dict()["epoch"] == 1
    assert sampler.state_dict()["consumed"] == 2


def test_it_knows_its_job() -> None:
    with pipelines.job(pp=2):
        sampler = DistributedBatchSampler(range(6), 2)
        assert list(sampler) == [[0, 1], [2, 3], [4, 5]]


def test_one_of_several_processes_needs_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    with pytest.raises(StateError, match=r"fleet\.init"):
        DistributedBatchSampler(range(6), 2)
    assert len(DistributedBatchSampler(range(6), 2, 2, 1)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), r"batch_size must be a whole number of at least 1"),
        ((2, True, 0), r"num_replicas=True"),
        ((2, 2, 2), r"rank \(=2\) must be below num_replicas \(=2\)"),
        ((2, 1, -1), r"rank must be a whole number of at least 0"),
    ],
)
def test_arguments_are_refused_by_name(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistributedBatchSampler(range(6), *arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 9}, "samples=8, as in this run"),
        ({"shuffle": True}, "shuffle=False, as in this run"),
        ({"consumed": 9}, "at most 8 consumed"),
        ({"consumed": -1}, "consumed: int"),
        ({"epoch": 1.0}, "epoch: int"),
        ({"seed": None}, "seed: int"),
        ({"step": 4}, "step as well"),
    ],
)
def test_a_foreign_position_is_refused_and_changes_nothing(
    change: dict[str, Any], message: str
) -> None:
    sampler = DistributedBatchSampler(range(8), 2)
    own = sampler.state_dict()
    with pytest.raises(CheckpointError, match=message):
        sampler.set_state_dict({**own, "consumed": 4, "seed": 3, **change})
    with pytest.raises(CheckpointError, match="no saved position"):
        sampler.set_state_dict([])  # type: ignore[arg-type]
    assert sampler.state_dict() == own
