"""What may be fed, drawn and fetched, of one program or several, and what the errors say."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.static import device_guard

from fleetpipe import fleet
from fleetpipe.errors import ConfigError, PeerFailed, StateError, UsageError
from fleetpipe.paddle_api.static import EOFException, is_pir
from fleetpipe.static import DataLoader, pipeline_of, state_dict
from tests.fixtures import Call
from tests.pipelines import begun
from tests.static.networks import (
    FEATURES,
    MICRO_BATCHES,
    ROWS,
    assert_same,
    batches,
    data,
    executor_of,
    mlp,
    pipelined,
    static_mode,
    strategy_of,
    unsplit,
)
from tests.static.run.test_training import momentum


@contextmanager
def running(build: Any = None, **own: Any) -> Iterator[Any]:
    """A pipeline of two stages that is ready to run; yields its executor and what it built."""
    with static_mode():
        paddle.seed(7)
        strategy = strategy_of(**own)
        with begun(strategy):
            fetches = (build or mlp(2))()
            exe = executor_of(fetches[0], strategy)
            yield exe, fetches


def micro_batches(feed: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    for index in range(MICRO_BATCHES):
        yield {name: array[index * ROWS : (index + 1) * ROWS] for name, array in feed.items()}


def test_mean_last_and_all_of_the_micro_batches() -> None:
    results = {}
    for how in ("mean", "last", "all"):
        with running(fetch=how) as (exe, fetches):
            results[how] = exe.run(feed=batches(1)[0], fetch_list=list(fetches))
    losses, logits = results["all"]
    assert losses.shape == (4,)
    assert logits.shape == (4, 2, 4)
    assert results["last"][0] == losses[-1]
    np.testing.assert_array_equal(results["last"][1], logits[-1])
    assert results["mean"][0].shape == ()
    np.testing.assert_allclose(results["mean"][0], losses.mean(), rtol=1e-6)
    np.testing.assert_array_equal(results["mean"][1], logits.reshape(8, 4))


def test_names_parameters_and_tensors_can_be_fetched() -> None:
    first, second = batches(2)
    with running() as (exe, fetches):
        (name, *_) = pipeline_of().parameters
        before = exe.run(feed=first, fetch_list=[name])[0]
        assert pipeline_of().peak_held == {0: 2, 1: 1}
        after, loss = exe.run(feed=second, fetch_list=[name, fetches[0]])
        assert not np.array_equal(before, after)
        compiled = pipeline_of()._compiled
        tensor = exe.run(feed=first, fetch_list=fetches[0], return_numpy=False)[0]
        assert isinstance(tensor, paddle.Tensor)
        assert loss.dtype == "float32"
        assert exe.run(feed=first) == []
        assert pipeline_of()._compiled is compiled, "steps after the first compile nothing"
        nested = exe.run(feed=first, fetch_list=[[fetches[0], (fetches[1],)], name])
        assert [value.shape for value in nested] == [(), (8, 4), before.shape]
        for name, words in (("nothing", "had no such value"), ("x", "fed or constant")):
            with pytest.raises(ConfigError, match=words):
                exe.run(feed=first, fetch_list=[name])
        for foreign in (3, np.zeros(2), None):
            with pytest.raises(UsageError, match="only values of the program can be fetched"):
                exe.run(feed=first, fetch_list=[foreign, fetches[0]])
        startup, names = paddle.static.default_startup_program(), [*state_dict()]
        values = exe.run(startup, fetch_list=names)
        assert_same(dict(zip(names, values)), state_dict())


def test_a_value_that_is_fetched_later_changes_no_bit() -> None:
    feeds = batches(3)
    expected = losses_of(feeds)
    with running() as (exe, fetches):
        got = [exe.run(feed=feeds[0], fetch_list=[fetches[0]])[0]]
        got += [exe.run(feed=feed, fetch_list=list(fetches))[0] for feed in feeds[1:]]
    assert got == expected


def losses_of(feeds: list[Any]) -> list[Any]:
    """The losses of a pipeline that is fed these mini-batches."""
    with running() as (exe, fetches):
        return [exe.run(feed=feed, fetch_list=[fetches[0]])[0] for feed in feeds]


def test_constants_and_fixed_rows_are_fed() -> None:
    def build() -> Any:
        with device_guard("gpu:0"):
            x = paddle.static.data("x", [ROWS, FEATURES])
            scale = paddle.static.data("scale", [1])
            hidden = nn.Linear(FEATURES, 8)(x) * scale
        with device_guard("gpu:1"):
            return [paddle.mean(nn.Linear(8, 1)(hidden) * scale)]

    feed = {"x": batches(1)[0]["x"], "scale": np.array([0.5], "float32")}
    with running(build) as (exe, fetches):
        half = exe.run(feed=feed, fetch_list=list(fetches))[0]
    with running(build) as (exe, fetches):
        whole = exe.run(feed={**feed, "scale": feed["scale"] * 2}, fetch_list=list(fetches))[0]
    assert half != whole


UNFIT: list[tuple[Any, type[Exception], str]] = [
    (lambda feed: {"x": feed["x"]}, ConfigError, "need 'y', which was not fed"),
    (lambda feed: {**feed, "x": feed["x"][:6]}, ConfigError, "8, 6"),
    (lambda feed: {**feed, "x": feed["x"].astype("float64")}, UsageError, "another dtype"),
    (lambda feed: {**feed, "x": feed["x"][:, :3]}, ConfigError, "accumulate_steps x micro_batch_"),
    (lambda feed: [feed, feed], UsageError, "must be a dict"),
    (lambda feed: None, ConfigError, "a feed of nothing"),
    (lambda feed: {**feed, "y": "seven"}, UsageError, "'y' is no array of numbers(?s:.*)got: str"),
    (lambda feed: {**feed, "x": [[1.0], [1.0, 2.0]]}, UsageError, "'x' is no array of numbers"),
]


def test_feeds_that_do_not_fit() -> None:
    with running() as (exe, _):
        for change, error, words in UNFIT:
            with pytest.raises(error, match=words):
                exe.run(feed=change(batches(1)[0]))


def test_labels_of_one_micro_batch_are_not_those_of_each() -> None:
    def build() -> Any:
        with device_guard("gpu:0"):
            hidden = nn.Linear(FEATURES, 8)(paddle.static.data("x", [-1, FEATURES]))
        with device_guard("gpu:1"):
            labels = paddle.static.data("y", [ROWS, 1], "int64")
            return [nn.functional.cross_entropy(nn.Linear(8, 4)(hidden), labels)]

    feed = batches(1)[0]
    with running(build) as (exe, fetches):
        assert exe.run(feed=feed, fetch_list=list(fetches))[0] > 0
        with pytest.raises(ConfigError, match="'y' has the rows of one micro-batch"):
            exe.run(feed={**feed, "y": feed["y"][:ROWS]})


@pytest.mark.parametrize(
    ("started", "optimizer", "words"),
    [(False, "SGD", "startup program"), (True, "Adam", "optimizer's variable(?s:.*)after min")],
)
def test_the_startup_program_runs_after_minimize_and_first(
    started: bool, optimizer: str, words: str
) -> None:
    with static_mode(), begun(strategy_of()):
        loss = mlp(2)()[0]
        exe = executor_of() if started else paddle.static.Executor(paddle.CPUPlace())
        wrapped = fleet.distributed_optimizer(getattr(paddle.optimizer, optimizer)(), strategy_of())
        wrapped.minimize(loss)
        with pytest.raises(ConfigError, match=words):
            exe.run(feed=batches(1)[0])


def until_the_end(exe: Any, loss: Any) -> list[Any]:
    losses = []
    try:
        while True:
            losses.append(exe.run(fetch_list=[loss])[0])
    except EOFException:
        return losses


def losses_of_two_passes(exe: Any, loss: Any, loader: Any) -> list[Any]:
    with pytest.raises(StateError, match="was not started"):
        exe.run(fetch_list=[loss])
    losses = []
    for _ in range(2):
        loader.start()
        losses += until_the_end(exe, loss)
        loader.reset()
    return losses


def test_an_iterator_gives_a_group_of_micro_batches_to_each_run() -> None:
    feeds = batches(2)
    with running() as (exe, fetches):
        items = (one for feed in feeds for one in micro_batches(feed))
        got = [exe.run(feed=items, fetch_list=[fetches[0]])[0] for _ in feeds]
        with pytest.raises(EOFException):
            exe.run(feed=items, fetch_list=[fetches[0]])
    assert got == losses_of(feeds)


def test_micro_batches_of_an_iterator_that_do_not_fit_together() -> None:
    parts = [*micro_batches(batches(1)[0])]
    shorter = {name: value[:-1] for name, value in parts[0].items()}
    wider = {**parts[0], "x": np.ones((ROWS, FEATURES + 1), "float32")}
    nameless = {"y": parts[0]["y"]}
    with running() as (exe, _):
        for unlike in (shorter, wider, nameless):
            with pytest.raises(ConfigError, match="have the same shapes"):
                exe.run(feed=iter([*parts[:2], unlike, *parts]))
        with pytest.raises(EOFException):
            exe.run(feed=iter([*parts[:3], shorter]))


def test_a_loader_feeds_its_program_and_drops_an_incomplete_group() -> None:
    feeds = batches(2)

    def samples() -> Iterator[Any]:
        rows = ((row, int(y[0])) for feed in [*feeds, *feeds] for row, y in zip(*feed.values()))
        return itertools.islice(rows, 20)

    def build() -> Any:
        fetches = mlp(2)()
        x, y = data()
        loader = DataLoader.from_generator([x, y], capacity=64)
        loader.set_sample_generator(samples, batch_size=ROWS)
        return [*fetches, loader]

    expected = losses_of([*feeds, *feeds])
    with running(build) as (exe, (loss, _, loader)):
        assert losses_of_two_passes(exe, loss, loader) == expected
        with pytest.raises(StateError, match="was not started"):
            exe.run(fetch_list=[loss])


def test_a_loader_is_started_and_reset() -> None:
    with static_mode():
        loader = DataLoader.from_generator([paddle.static.data("x", [-1, 2])])
        with pytest.raises(StateError, match="no generator"):
            loader.start()
        loader.set_batch_generator(lambda: iter([]))
        loader.start()
        with pytest.raises(StateError, match="started before"):
            loader.start()
        with pytest.raises(ConfigError, match="iterable"):
            DataLoader.from_generator([], iterable=True)


def test_paddles_own_loader_feeds_its_program() -> None:
    if is_pir(paddle.static.Program()):
        pytest.skip("under PIR Paddle's from_generator is for iterable=True only")
    from paddle.base.reader import DataLoader as Stock

    feeds = batches(3)

    def build() -> Any:
        with device_guard("gpu:0"):
            x, y = data()
            loader = Stock.from_generator([x, y], capacity=64, iterable=False)
        return [*mlp(2)(), loader]

    def parts() -> Iterator[Any]:
        for feed in feeds[:2]:
            for part in micro_batches(feed):
                yield part["x"], part["y"]
        yield feeds[2]["x"][:ROWS], feeds[2]["y"][:ROWS]

    expected = losses_of(feeds[:2] * 2)
    with running(build) as (exe, (loss, _, loader)):
        loader.set_batch_generator(parts, places=paddle.CPUPlace())
        assert losses_of_two_passes(exe, loss, loader) == expected
        exe.run(feed=feeds[0], fetch_list=[loss])


def test_one_row_of_a_micro_batch_is_no_mean() -> None:
    strategy = strategy_of()
    strategy.pipeline_configs = {"accumulate_steps": MICRO_BATCHES, "micro_batch_size": 1}

    def build() -> list[Any]:
        loss, logits = mlp(2)()
        with device_guard("gpu:1"):
            return [loss, logits.max(axis=1)]

    feed = {name: array[:MICRO_BATCHES] for name, array in batches(1)[0].items()}
    results, _ = pipelined(build, lambda: paddle.optimizer.SGD(0.1), [feed], strategy)
    assert [result.shape for result in results[0]] == [(), (MICRO_BATCHES,)]


def test_pipelines_train_in_turns_in_one_scope() -> None:
    with static_mode(), begun(strategy_of()):
        programs = []
        for name in ("", "other_"):  # the names of what both are fed are the same
            main, startup = paddle.static.Program(), paddle.static.Program()
            with paddle.utils.unique_name.guard(name), paddle.static.program_guard(main, startup):
                paddle.seed(7)
                loss = mlp(2)()[0]
                exe = executor_of(loss, strategy_of(), momentum())
            programs.append((main, loss))
        for feed in batches(3):
            for main, loss in programs:
                exe.run(main, feed=feed, fetch_list=[loss])
        states = [state_dict(main) for main, _ in programs]
    _, expected = unsplit(mlp(2), momentum, batches(3))
    assert_same(states[0], expected)
    assert_same({name.replace("other_", ""): v for name, v in states[1].items()}, expected)


def fed_without_labels() -> list[str]:
    """Feeds nothing that the last stage needs, then all; what each call raises."""
    paddle.enable_static()
    fleet.init(is_collective=True)
    loss = mlp(2)()[0]
    exe = executor_of(loss, strategy_of(timeout=40))
    first, second = batches(2)
    exe.run(feed=first)  # both have begun
    errors = []
    for feed in ({"x": first["x"]}, second, second):
        try:
            exe.run(feed=feed, fetch_list=[loss])
        except (ConfigError, PeerFailed) as error:
            errors.append(str(error))
    return errors


def test_a_feed_that_one_rank_misses_ends_the_job_on_both(on_ranks: Call) -> None:
    # Else the second rank trains later batches on what the first sent for this one.
    for errors in on_ranks(fed_without_labels, 2):
        assert len(errors) >= 2
        assert all("stages need 'y', which was not fed" in error for error in errors)
