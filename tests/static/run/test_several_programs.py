"""Pipelines side by side in one process, and what else runs in their scope."""

from __future__ import annotations

from typing import Any

import paddle

from fleetpipe import fleet
from fleetpipe.errors import ConfigError, PeerFailed
from fleetpipe.static import state_dict
from tests.fixtures import Call
from tests.jobs import begun
from tests.static.networks import (
    assert_same,
    batches,
    executor_of,
    mlp,
    static_mode,
    strategy_of,
    unsplit,
)


def momentum() -> Any:
    return paddle.optimizer.Momentum(0.1, 0.9)


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
