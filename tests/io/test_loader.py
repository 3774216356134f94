"""A loader that is interrupted gives what the uninterrupted one would have given, and no more."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpipe.checkpoint.contents.objects import Objects
from fleetpipe.errors import CheckpointError, ConfigError, PipelineTimeout, StateError, UsageError
from fleetpipe.io import DataLoader, DistributedBatchSampler, sample_generator
from tests import pipelines


class Numbers(paddle.io.Dataset):  # type: ignore[type-arg]
    """Its samples are their numbers, each with what it draws, from whom."""

    def __init__(self, samples: int = 20, worker_streams: bool = False) -> None:
        self.samples = samples
        self.worker_streams = worker_streams

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        drawn = [sample_generator().random()]
        if self.worker_streams:
            drawn += [random.random(), np.random.random(), paddle.rand([1]).item()]
        return np.int64(index), np.array(drawn)


def read(loader: DataLoader, batches: int | None = None) -> list[Any]:
    """Returns batches as lists of samples, with the loader's position after each."""
    found = []
    for number, drawn in zip(range(10**9 if batches is None else batches), loader):
        content = [part.numpy().tolist() for part in drawn]
        found.append((content, loader.state_dict()))
        if number + 1 == batches:
            break
    return found


def restored(state: Any, *args: Any, **options: Any) -> DataLoader:
    loader = DataLoader(*args, **options)
    loader.set_state_dict(json.loads(json.dumps(state)))
    return loader


@given(st.integers(1, 14), st.integers(1, 5), st.booleans(), st.integers(0, 14), st.integers(0, 2))
@settings(max_examples=20)
def test_any_interruption_leaves_what_was_not_taken(
    samples: int, batch: int, drop_last: bool, taken: int, epoch: int
) -> None:
    options: dict[str, Any] = {"batch_size": batch, "shuffle": True, "drop_last": drop_last}
    whole = DataLoader(Numbers(samples), seed=3, **options)
    whole.set_epoch(epoch)
    expected = [read(whole), read(whole)]
    first = DataLoader(Numbers(samples), seed=3, **options)
    first.set_epoch(epoch)
    head = read(first, taken) if taken else []
    second = restored(first.state_dict(), Numbers(samples), **options)
    second.set_epoch(epoch)
    assert head + read(second) == expected[0]
    assert read(second) == expected[1]
    assert len(whole) == len(expected[0])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_is_loaded_ahead_does_not_count(workers: int) -> None:
    loader = DataLoader(Numbers(), batch_size=2, num_workers=workers, prefetch_factor=4)
    batches = iter(loader)
    for taken in range(1, 5):
        next(batches)
        assert loader.state_dict()["sampler"]["consumed"] == 2 * taken


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_and_their_number_change_nothing(persistent: bool) -> None:
    dataset = Numbers(12, worker_streams=True)
    options: dict[str, Any] = {"batch_size": 3, "shuffle": True, "seed": 5}
    whole = DataLoader(dataset, num_workers=1, **options)
    expected = read(whole) + read(whole)
    first = DataLoader(dataset, num_workers=2, persistent_workers=persistent, **options)
    head = read(first) + read(first, 2)
    second = restored(head[-1][1], dataset, num_workers=1, persistent_workers=persistent, **options)
    assert head + read(second) == expected
    draws = [tuple(sample) for (_, drawn), _ in expected for sample in drawn]
    assert len(set(draws)) == 24


def test_replicas_have_the_random_numbers_of_their_samples() -> None:
    def loader(replicas: int, rank: int) -> DataLoader:
        sampler = DistributedBatchSampler(range(12), 6 // replicas, replicas, rank, shuffle=True)
        return DataLoader(Numbers(12), batch_sampler=sampler)

    whole, halves = read(loader(1, 0)), [read(loader(2, rank)) for rank in range(2)]
    for step, (content, state) in enumerate(whole):
        parts = [half[step] for half in halves]
        assert content == [first + second for first, second in zip(parts[0][0], parts[1][0])]
        assert [part[1] for part in parts] == [state, state]


def test_what_joins_a_batch_draws_for_its_first_sample() -> None:
    def join(samples: list[Any]) -> Any:
        return np.array([sample[0] for sample in samples]), sample_generator().random(1)

    options: dict[str, Any] = {"batch_size": 4, "collate_fn": join, "shuffle": True}
    whole = read(DataLoader(Numbers(), **options))
    assert read(restored(whole[2][1], Numbers(), **options)) == whole[3:]
    draws = {content[1][0] for content, _ in whole}
    assert len(draws) == 5
    assert draws.isdisjoint(read(DataLoader(Numbers(), batch_size=20))[0][0][1][0])


class Broken(paddle.io.Dataset):  # type: ignore[type-arg]
    """Eight numbers, of which the sixth cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise KeyError("sample 5 is broken")
        return np.int64(index)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("failure", ["dataset", "iterable", "collate_fn", "batch_sampler"])
def test_what_fails_in_loading_is_raised_in_the_place_of_its_batch(failure: str) -> None:
    def fails(samples: Any) -> Any:
        if samples[0] == 4:
            raise KeyError("sample 5 is broken")
        return np.array(samples)

    def of_paddles() -> Iterator[list[int]]:
        yield from ([0, 1], [2, 3])
        raise KeyError("sample 5 is broken")

    made: dict[str, Callable[[], DataLoader]] = {
        "dataset": lambda: DataLoader(Broken(), batch_size=2),
        "iterable": lambda: DataLoader((Broken()[i] for i in range(8)), batch_size=2),
        "collate_fn": lambda: DataLoader([*range(8)], batch_size=2, collate_fn=fails),
        "batch_sampler": lambda: DataLoader([*range(8)], batch_sampler=of_paddles()),
    }
    batches = iter(made[failure]())
    assert [next(batches) is not None for _ in range(2)] == [True, True]
    with pytest.raises(KeyError, match="sample 5 is broken"):
        next(batches)


class Stuck(Numbers):
    """Numbers, of which the sixth does not come, or ends the process that loads it."""

    def __init__(self, ends: bool = False) -> None:
        super().__init__()
        self.ends = ends

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            os._exit(7) if self.ends else time.sleep(60)
        return np.int64(index)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_wait_for_a_batch_has_the_limit_of_the_job(workers: int) -> None:
    with pipelines.job(timeout=1):
        batches = iter(DataLoader(Stuck(), batch_size=2, num_workers=workers))
        assert [next(batches) is not None for _ in range(2)] == [True, True]
        with pytest.raises(PipelineTimeout, match=r"over a \w+ brought no batch") as caught:
            next(batches)
    assert ("worker 0 (process" in str(caught.value)) == bool(workers)


@pytest.mark.timeout(60)
def test_what_fails_in_a_worker_is_raised() -> None:
    with pytest.raises(KeyError, match="sample 5 is broken"):
        list(DataLoader(Broken(), batch_size=2, num_workers=2))


@pytest.mark.timeout(60)
def test_a_worker_that_ends_is_named_with_its_exit_code() -> None:
    batches = iter(DataLoader(Stuck(ends=True), batch_size=2, num_workers=1))
    with pytest.raises((RuntimeError, SystemError), match=r"exit codes by worker: \[7\]"):
        list(batches)


def test_a_pass_that_is_left_ends_its_threads_and_workers() -> None:
    threads, children = {*threading.enumerate()}, multiprocessing.active_children()
    for workers, data in ((0, Stream()), (1, Numbers())):
        batches = iter(DataLoader(data, batch_size=2, num_workers=workers))
        next(batches)
        batches.close()
        for thread in {*threading.enumerate()} - threads:
            thread.join(10)  # it was told to end
            assert not thread.is_alive(), thread
        assert {*multiprocessing.active_children()} <= {*children}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no workers")
def test_a_worker_leaves_what_its_parent_left() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if gc.get_freeze_count() > 1000 and gc.isenabled() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert gc.get_freeze_count() == 0
    assert gc.isenabled()


def test_a_list_of_batches() -> None:
    batches = [[np.full(2, n), np.full(1, -n)] for n in range(5)]
    whole = read(DataLoader(batches, batch_size=None, shuffle=True))
    assert sorted(content for content, _ in whole) == [[[n, n], [-n]] for n in range(5)]
    assert read(restored(whole[1][1], batches, batch_size=None, shuffle=True)) == whole[2:]


class Stream(paddle.io.IterableDataset):  # type: ignore[type-arg]
    """Each worker has every n-th sample."""

    def __iter__(self) -> Iterator[Any]:
        info = paddle.io.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(np.arange(20)[first::step].reshape(-1, 1))


@pytest.mark.parametrize("workers", [0, 2])
def test_data_without_numbers_are_taken_up_to_the_position_again(workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 3, "num_workers": workers}
    whole = DataLoader(Stream(), **options)
    expected = [read(whole), read(whole)]
    assert len(expected[0]) == 7 + (workers == 2)
    loader = restored(expected[0][3][1], Stream(), **options)
    assert read(loader) == expected[0][4:]
    assert read(loader) == expected[1]
    facts = {"batch_size": 3, "workers": workers, "replicas": 1}
    assert expected[1][0][1] == {"epoch": 1, "batches": 1, **facts}


def test_data_without_numbers_go_on_with_as_many_workers_and_rows_only() -> None:
    state = DataLoader(Stream(), batch_size=3).state_dict()
    for other, message in (
        ({"batch_size": 2}, "batch_size=2, as in this run"),
        ({"num_workers": 2, "batch_size": 3}, "workers=2, as in this run"),
    ):
        with pytest.raises(CheckpointError, match=message):
            restored(state, Stream(), **other)
    with pytest.raises(CheckpointError, match="the data end after 7 batches"):
        read(restored({**state, "batches": 8}, Stream(), batch_size=3))


def test_a_generator_is_read_once() -> None:
    def numbers() -> Iterator[Any]:
        yield from np.arange(8).reshape(-1, 1)

    state = read(DataLoader(numbers(), batch_size=2), 2)[-1][1]
    loader = restored(state, numbers(), batch_size=2)
    assert [content for content, _ in read(loader)] == [[[4], [5]], [[6], [7]]]
    with pytest.raises(StateError, match="a generator is read once"):
        read(loader)


def test_datasets_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="each of 2 workers would read all of a generator"):
        DataLoader((n for n in range(3)), num_workers=2)
    with pytest.raises(UsageError, match="neither by numbers nor in turn"):
        DataLoader(3)
    with pytest.raises(ConfigError, match="batch_size must be a whole number"):
        DataLoader(range(3), batch_size=0)
    with pytest.raises(ConfigError, match="seed must be a whole number"):
        DataLoader(range(3), seed=-1)


def test_a_sampler_of_paddles_is_read_but_not_saved() -> None:
    sampler = paddle.io.BatchSampler(Numbers(4), batch_size=2)
    loader = DataLoader(paddle.io.TensorDataset([paddle.arange(4)]), batch_sampler=sampler)
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3]]
    with pytest.raises(UsageError, match="a BatchSampler has no position"):
        loader.state_dict()
    with pytest.raises(StateError, match="no sample is being loaded"):
        sample_generator()


def test_a_foreign_position_is_refused_and_changes_nothing() -> None:
    loader = DataLoader(Numbers(), batch_size=2)
    own = read(loader, 3)[-1][1]
    for state, message in (
        ({}, "seed: int"),
        ({**own, "seed": "1"}, "seed='1'"),
        ({**own, "sampler": {**own["sampler"], "samples": 3}}, "samples=20, as in this run"),
    ):
        with pytest.raises(CheckpointError, match=message):
            loader.set_state_dict(state)
    assert loader.state_dict() == own


def test_it_is_a_loader_of_paddles_with_what_was_given() -> None:
    dataset, sampler = Numbers(), DistributedBatchSampler(range(20), 2)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=0)
    assert isinstance(loader, paddle.io.DataLoader)
    assert loader.dataset is dataset
    assert loader.batch_sampler is sampler
    sampler.set_epoch(4)
    assert loader.epoch == 4
    assert read(loader)[0][1]["sampler"]["epoch"] == 4
    assert len(list(loader())) == 10


@pytest.mark.parametrize("reader", [DataLoader, paddle.io.DataLoader, None])
def test_a_sampler_has_a_position_to_save_where_no_loader_draws_ahead_of_it(reader: Any) -> None:
    data = paddle.io.TensorDataset([paddle.arange(20)])
    sampler = DistributedBatchSampler(data, 4)
    assert len([*(sampler if reader is None else reader(data, batch_sampler=sampler))]) == 5
    if reader is None:
        assert Objects(data=sampler).data is sampler
        return
    with pytest.raises(ConfigError, match="draws batches ahead of the training"):
        Objects(data=sampler)
