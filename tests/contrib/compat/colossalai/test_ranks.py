"""A program of ColossalAI's on two real ranks: the bits of one process, half of the model
each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe.contrib.compat.colossalai import ParallelMode, gpc
from fleetpipe.contrib.compat.colossalai.nn.metric import Accuracy
from fleetpipe.contrib.compat.colossalai.trainer import Trainer, hooks
from tests.contrib.compat.colossalai.test_engine import (
    batch,
    engine_of,
    launched,
    partitioned,
    recorded,
)
from tests.contrib.compat.colossalai.test_pipelinable import Tied
from tests.contrib.compat.colossalai.test_trainer import Lines
from tests.pipelines import bits

pytestmark = pytest.mark.once


def trained(model: Any, data: Any, criterion: Any = None) -> tuple[list[bytes], list[Any]]:
    """The losses of two steps, and what an evaluation returns."""
    engine = engine_of(model, criterion)
    losses = []
    for step in range(2):
        engine.zero_grad()
        _, _, loss = engine.execute_schedule(iter([data(step)]))
        engine.step()
        losses.append(loss.numpy().tobytes())
    engine.eval()
    evaluated = engine.execute_schedule(iter([data(9)]), forward_only=True)
    return losses, [None if part is None else part.numpy().tobytes() for part in evaluated]


def words(step: int) -> tuple[Any, Any]:
    return paddle.to_tensor([[step % 5, 1], [2, 3], [0, 4], [1, 1]]), paddle.ones([4, 2, 5])


def lines_of(engine: Any) -> list[str]:
    """What a trainer with hooks logs."""
    logger = Lines()
    own = [hooks.LossHook(), hooks.AccuracyHook(Accuracy()), hooks.LogMetricByEpochHook(logger)]
    data = [batch(step) for step in range(3)]
    Trainer(engine).fit(data, 2, test_dataloader=data, hooks=own)
    return logger.lines


def program() -> dict[str, Any]:
    """A user's program on this rank, or in one process."""
    with launched():
        paddle.seed(gpc.get_local_rank(ParallelMode.GLOBAL))  # which must not matter
        model = partitioned(recorded())
        losses, evaluated = trained(model, batch)
        state = bits(model.state_dict())
        tied = partitioned(recorded(Tied, ["embed", "twice", "act", "twice", "head"], "uniform"))
        tied_losses, _ = trained(tied, words, nn.MSELoss())
        return {
            "lines": lines_of(engine_of(partitioned(recorded()))),
            "place": [gpc.get_local_rank(mode) for mode in ParallelMode],
            "ends": [end(ParallelMode.PIPELINE) for end in (gpc.is_first_rank, gpc.is_last_rank)],
            "losses": losses + tied_losses,
            "evaluated": evaluated,
            "state": state,
            "parameters": sum(parameter.size for parameter in model.parameters()),
            "tied": {name: value.numpy() for name, value in tied.state_dict().items()},
        }


def test_two_ranks_have_the_bits_of_one_process(on_ranks: Callable[..., Any]) -> None:
    whole = program()
    first, last = on_ranks(program, 2)
    # GLOBAL, DATA, PIPELINE.
    assert (first["place"], last["place"]) == ([0, 0, 0], [1, 0, 1])
    assert (first["ends"], last["ends"]) == ([True, False], [False, True])
    assert whole["ends"] == [True, True]
    assert len(whole["lines"]) == 4
    assert (first["lines"], last["lines"]) == ([], whole["lines"])
    assert first["losses"] == last["losses"] == whole["losses"]
    assert first["evaluated"] == [None, None, whole["evaluated"][2]]
    assert last["evaluated"] == whole["evaluated"]
    # Each rank has its own stages' keys, together the plain model's.
    assert {**first["state"], **last["state"]} == whole["state"]
    assert first["parameters"] + last["parameters"] == whole["parameters"]
    # The weight of the embedding and the layer that runs twice are on both, and stay equal. Two
    # ranks add up their gradients in another order than autograd does.
    assert list(first["tied"]) == list(last["tied"]) == list(whole["tied"])
    for name, value in whole["tied"].items():
        assert first["tied"][name].tobytes() == last["tied"][name].tobytes()
        np.testing.assert_allclose(first["tied"][name], value, rtol=1e-6)
