"""What only real ranks show: who gets the loss, equal bits across processes, replicas, failures."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.errors import StateError
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api.static import is_pir
from fleetpipe.static import full_state_dict, state_dict
from tests.fixtures import Call, Launch
from tests.launching import Finished, JobFailed
from tests.static.networks import MICRO_BATCHES, batches, executor_of, mlp, strategy_of, unsplit
from tests.static.run.test_training import momentum


def trained(
    stages: int,
    schedule: str = "1F1B",
    *,
    fetch: str = "mean",
    broadcast: bool = False,
    clip: float = 0.0,
    norm: bool = True,
) -> dict[str, Any]:
    """Trains a program of so many stages, in as many replicas as the ranks allow."""
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    replicas = int(os.environ.get("PADDLE_TRAINERS_NUM", str(stages))) // stages
    paddle.enable_static()
    paddle.seed(7 + rank // stages)  # replicas begin with what the first of them has
    fleet.init(is_collective=True)
    strategy = strategy_of(schedule, fetch=fetch, fetch_broadcast=broadcast, timeout=40)
    loss, logits = mlp(stages, norm=norm)()
    main = paddle.static.default_main_program()
    if clip:
        for parameter in main.global_block().all_parameters():
            parameter.need_clip = parameter.name != "linear_0.w_0"
    grad_clip = nn.ClipGradByGlobalNorm(clip) if clip else None
    optimizer = paddle.optimizer.Momentum(0.1, 0.9, grad_clip=grad_clip)
    exe = executor_of(loss, strategy, optimizer)
    losses, shapes = [], []
    for batch in batches(3, MICRO_BATCHES * replicas):
        feed = {name: np.split(array, replicas)[rank // stages] for name, array in batch.items()}
        found = exe.run(main, feed=feed, fetch_list=[loss, logits])
        losses.append(None if found[0] is None else found[0].tolist())
        shapes.append(None if found[1] is None else list(found[1].shape))
    state = {name: value.tobytes() for name, value in state_dict().items()}
    whole = {name: value.tobytes() for name, value in full_state_dict().items()}
    ones = {name: np.ones_like(value) for name, value in full_state_dict().items()}
    paddle.static.set_program_state(main, ones)
    assert all((value == 1.0).all() for value in state_dict().values())
    job = current_job()
    assert job is not None
    shown = job.progress.gradient_norm()
    fleet.shutdown()
    return {"whole": whole, "losses": losses, "shapes": shapes, "state": state, "norm": shown}


def union(ranks: list[dict[str, Any]]) -> dict[str, bytes]:
    """The state of all ranks together."""
    return {name: value for rank in ranks for name, value in rank["state"].items()}


def test_four_ranks_and_one_process_agree_in_every_bit(on_ranks: Call) -> None:
    (alone,) = on_ranks(trained, None, 4)
    # A backward that is split, where it can be, has the bits of a whole one.
    schedule = "ZBH1" if is_pir(paddle.static.Program()) else "1F1B"
    ranks = on_ranks(trained, 4, 4, schedule)
    assert [rank["losses"] for rank in ranks[:3]] == [[None] * 3] * 3
    assert ranks[3]["losses"] == alone["losses"]
    assert ranks[3]["shapes"] == [[8, 4]] * 3
    assert union(ranks) == alone["state"]
    assert [rank["whole"] == alone["state"] for rank in ranks] == [True] * 4
    own = [set(rank["state"]) for rank in ranks]
    assert sum(map(len, own)) == len(alone["state"])


def test_two_ranks_clip_together_and_share_what_is_fetched(on_ranks: Call) -> None:
    (alone,) = on_ranks(partial(trained, 2, fetch="all", clip=0.05), None)
    ranks = on_ranks(partial(trained, 2, fetch="all", clip=0.05, broadcast=True), 2)
    assert ranks[0]["losses"] == ranks[1]["losses"]
    # From it comes the factor, which the parameters show.
    assert ranks[0]["norm"] == ranks[1]["norm"] > 0.05
    assert np.shape(ranks[0]["losses"]) == (3, 4)
    np.testing.assert_allclose(ranks[0]["losses"], alone["losses"], rtol=0, atol=1e-6)
    expected = alone["state"]
    for name, value in union(ranks).items():
        got, wanted = (np.frombuffer(v, "float32") for v in (value, expected[name]))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)


def test_two_replicas_of_two_ranks_train_on_the_whole_batch(on_ranks: Call) -> None:
    ranks = on_ranks(partial(trained, 2, norm=False), 4)
    assert ranks[0]["state"] == ranks[2]["state"]
    assert ranks[1]["state"] == ranks[3]["state"]
    means = np.mean([ranks[1]["losses"], ranks[3]["losses"]], axis=0)
    losses, state = unsplit(mlp(2), momentum, batches(3, 8), micro_batches=8)
    np.testing.assert_allclose(means, losses, rtol=0, atol=1e-6)
    found = union(ranks)
    assert sorted(found) == sorted(state)
    for name, value in found.items():
        got = np.frombuffer(value, "float32").reshape(state[name].shape)
        np.testing.assert_allclose(got, state[name], rtol=0, atol=1e-6)


def dying() -> None:
    """Trains; rank 1 dies before the third step."""
    paddle.enable_static()
    strategy = strategy_of("1F1B", timeout=60)
    fleet.init(is_collective=True, strategy=strategy)
    loss = mlp(2)()[0]
    exe = executor_of(loss, strategy)
    for step, feed in enumerate(batches(5)):
        if step == 2 and os.environ["PADDLE_TRAINER_ID"] == "1":
            os._exit(9)
        exe.run(feed=feed, fetch_list=[loss])


def _by_the_loss(broadcast: bool) -> str:
    """Steps a scheduler where the loss is; returns the error, or the rate."""
    paddle.enable_static()
    paddle.seed(7)
    fleet.init(is_collective=True)
    rate = paddle.optimizer.lr.ReduceOnPlateau(0.5, patience=0, threshold=10.0)
    (loss, _), strategy = mlp(2)(), strategy_of(fetch_broadcast=broadcast, timeout=40)
    exe = executor_of(loss, strategy, paddle.optimizer.SGD(rate))
    try:
        for batch in batches(3):
            (value,) = exe.run(feed=batch, fetch_list=[loss])
            if value is not None:
                rate.step(value)
    except StateError as error:
        return str(error)
    return f"rate {rate():.3f}"


def test_ranks_with_other_learning_rates_end(on_ranks: Call) -> None:
    for words in on_ranks(partial(_by_the_loss, False), 2):
        assert "the learning rate 0.5" in words
        assert "the learning rate 0.05" in words
        assert "'fetch_broadcast': True" in words
    assert on_ranks(partial(_by_the_loss, True), 2) == ["rate 0.005"] * 2


def _another_program() -> str:
    """Rank 1 runs its programs in the other order."""
    paddle.enable_static()
    fleet.init(is_collective=True)
    programs = []
    for hidden in (8, 9):
        main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(main, startup):
            exe = executor_of(mlp(2, hidden)()[0], strategy_of(timeout=40))
        programs.append(main)
    try:
        exe.run(programs[int(os.environ["PADDLE_TRAINER_ID"])], feed=batches(1)[0])
    except StateError as error:
        return str(error)
    return "both ran"


def test_ranks_that_run_other_programs_end(on_ranks: Call) -> None:
    first, second = on_ranks(_another_program, 2)
    assert first == second
    assert "do not run the same" in first


def test_a_rank_that_dies_ends_the_other(on_ranks: Call) -> None:
    with pytest.raises(JobFailed) as failed:
        on_ranks(dying, 2, timeout=90)
    job = failed.value.job
    assert isinstance(job, Finished)
    assert "PeerFailed" in job.logs[0]
    assert "rank 1" in job.logs[0]
    assert job.seconds < 40


OLDER = """
    import os
    os.environ["FLAGS_enable_pir_api"] = "0"
    from tests.static.networks import strategy_of
    from tests.static.run.test_training import compare, momentum, skip3

    compare(skip3, momentum, strategy_of())
"""


def test_the_older_program_is_bit_equal_where_paddle_builds_it_on_request(launch: Launch) -> None:
    launch(OLDER, None)
