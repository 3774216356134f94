"""A program of ColossalAI's on two real ranks: the bits of one process, half of the model
each."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.launching import ROOT, Finished

PROGRAM = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
import paddle
from paddle import nn
from fleetpipe.compat.colossalai import ParallelMode, gpc
from fleetpipe.compat.colossalai.nn.metric import Accuracy
from fleetpipe.compat.colossalai.trainer import Trainer, hooks
from tests.compat.colossalai.test_trainer import Lines
from tests.compat.colossalai.programs import batch, engine_of, launched, partitioned, recorded
from tests.compat.colossalai.test_pipelinable import Tied
from tests.pipelines import bits

def trained(model, data, criterion=None):
    engine = engine_of(model, criterion)
    losses = []
    for step in range(2):
        engine.zero_grad()
        output, label, loss = engine.execute_schedule(iter([data(step)]))
        engine.step()
        losses.append(loss.numpy().tobytes().hex())
    engine.eval()
    evaluated = engine.execute_schedule(iter([data(9)]), forward_only=True)
    return losses, [None if part is None else part.numpy().tobytes().hex() for part in evaluated]

def words(step):
    return paddle.to_tensor([[step % 5, 1], [2, 3], [0, 4], [1, 1]]), paddle.ones([4, 2, 5])

def lines_of(engine):
    logger = Lines()
    own = [hooks.LossHook(), hooks.AccuracyHook(Accuracy()), hooks.LogMetricByEpochHook(logger)]
    data = [batch(step) for step in range(3)]
    Trainer(engine).fit(data, 2, test_dataloader=data, hooks=own)
    return logger.lines

with launched():
    paddle.seed(gpc.get_global_rank())  # which must not matter
    model = partitioned(recorded())
    losses, evaluated = trained(model, batch)
    state = bits(model.state_dict())
    tied = partitioned(recorded(Tied, ["embed", "twice", "act", "twice", "head"], "uniform"))
    tied_losses, _ = trained(tied, words, nn.MSELoss())
    lines = lines_of(engine_of(partitioned(recorded())))
    found = {{
        "lines": lines,
        "place": [gpc.get_local_rank(mode) for mode in ParallelMode],
        "ends": [gpc.is_pipeline_first_stage(), gpc.is_pipeline_last_stage()],
        "losses": losses + tied_losses,
        "evaluated": evaluated,
        "state": {{name: value.hex() for name, value in state.items()}},
        "parameters": sum(parameter.size for parameter in model.parameters()),
        "tied": {{name: value.tolist() for name, value in tied.state_dict().items()}},
    }}
    print("FOUND", json.dumps(found), flush=True)
"""


def test_two_ranks_have_the_bits_of_one_process(launch: Callable[..., Finished]) -> None:
    def found(ranks: int | None) -> list[Any]:
        logs = launch(PROGRAM, ranks).logs
        return [json.loads(log.partition("FOUND ")[2].splitlines()[0]) for log in logs]

    (whole,) = found(None)
    first, last = found(2)
    # GLOBAL, DATA, PIPELINE, TENSOR.
    assert (first["place"], last["place"]) == ([0, 0, 0, 0], [1, 0, 1, 0])
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
    assert first["tied"] == last["tied"]
    assert list(first["tied"]) == list(whole["tied"])
    for name, value in whole["tied"].items():
        np.testing.assert_allclose(first["tied"][name], value, rtol=1e-6)
