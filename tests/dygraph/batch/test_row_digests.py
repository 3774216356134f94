"""Ranks of one pipeline that are given different rows are refused before anything is trained."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from fleetpipe import fleet
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.row_digests import (
    RowComparison,
    RowDigests,
    digests_of,
    require_one_batch,
)
from fleetpipe.errors import ConfigError, FleetPipeError
from fleetpipe.job.allow import Allow
from tests import jobs
from tests.pipelines import batch, bits, pipeline, sgd

RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
A, B = batch(4, 0), batch(4, 1)


def given(inputs: Any, labels: Any) -> MicroBatches:
    return MicroBatches(
        *(part if part is None else paddle.split(part, 4) for part in (inputs, labels))
    )


#: What the owner of the first stage was given, that of the last, and whether it is one batch.
PAIRS: dict[str, tuple[Any, Any, bool]] = {
    "the same": ((A[0], A[1]), (A[0], A[1]), True),
    "other rows": ((A[0], A[1]), (B[0], B[1]), False),
    "each what it needs": ((A[0], None), (None, B[1]), True),
    "augmented by each rank": ((A[0], A[1]), (A[0] + 0.1, A[1]), True),
    "labels drawn by each rank": ((A[0], A[1]), (A[0], B[1]), True),
    "other inputs": ((A[0], None), (B[0], B[1]), False),
    "other labels": ((A[0], A[1]), (None, B[1]), False),
    "the last row": ((A[0], None), (paddle.concat([A[0][:-1], B[0][-1:]]), A[1]), False),
}


@pytest.mark.parametrize(("others", "whole"), [([1, 2, 2, 2], False), ([2, 2, 2, 2], True)])
def test_parts_of_padding_are_no_whole_sequences(others: list[int], whole: bool) -> None:
    ranks = SimpleNamespace(ranks=4, all_gather=lambda digest: others)
    job: Any = SimpleNamespace(along=lambda axis: ranks, allow=Allow())
    comparison = RowComparison(job, (True, True), 0)
    with pytest.raises(ConfigError, match="own_part") if whole else contextlib.nullcontext():
        comparison._require_parts_of_sequences(RowDigests(2, None))


#: A batch of 16 micro-batches, of which every other one is another, and one of large tensors.
MANY = [paddle.full([2, 8], index, "float32") for index in range(16)]
OTHERS = [part + index % 2 for index, part in enumerate(MANY)]
LARGE = np.zeros((2, 3, 64, 64), "float32")
CHANGED = LARGE.copy()
CHANGED[0, 1, 20, 20] = 1.0


@pytest.mark.parametrize("pair", PAIRS)
def test_batches_are_told_apart(pair: str) -> None:
    first, last, right = PAIRS[pair]
    digests = digests_of(given(*last)), digests_of(given(*first))
    if right:
        require_one_batch(*digests)
    else:
        with pytest.raises(ConfigError, match="given different rows"):
            require_one_batch(*digests)


def test_all_micro_batches_and_all_of_their_numbers_are_compared() -> None:
    with pytest.raises(ConfigError, match="given different rows"):
        require_one_batch(*(digests_of(MicroBatches(part, part)) for part in (MANY, OTHERS)))
    parts = [paddle.to_tensor(LARGE), paddle.to_tensor(CHANGED)]
    one, other = (digests_of(MicroBatches([{"x": (part, None)}], [None])) for part in parts)
    assert one.labels is other.labels is None is not one.inputs
    assert one.inputs != other.inputs
    # A view of a whole batch has the bytes of its own rows alone.
    rows = paddle.concat([parts[1], parts[0]])
    assert digests_of(MicroBatches([{"x": (rows[2:], None)}], [None])).inputs == one.inputs


def trained(call: str, mp: int, compares: bool) -> tuple[str, bool]:
    """Runs one right batch and one of which ranks have other rows: the error, whether it stepped"""
    jobs.begin(pp=2 // mp, mp=mp, compare_rows=compares)
    model = pipeline()
    optimizer = sgd(model)
    model.train_batch(A, optimizer)
    model.eval_batch([A[0], None] if RANK == 0 and mp == 1 else A, compute_loss=True)
    before, text = bits(model.state_dict()), ""
    try:
        if call == "train_batch":
            model.train_batch(B if RANK else A, optimizer)
        else:
            model.eval_batch(B if RANK else A, compute_loss=True)
        fleet.shutdown()
    except FleetPipeError as error:
        text = str(error)
    return text, bits(model.state_dict()) != before


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
@pytest.mark.parametrize("mp", [1, 2])
def test_all_ranks_refuse_before_the_step(on_ranks: Callable[..., Any], call: str, mp: int) -> None:
    for text, stepped in on_ranks(trained, 2, call, mp, True):
        assert "were given different rows" in text
        assert not stepped


def test_an_option_leaves_the_comparison_out(on_ranks: Callable[..., Any]) -> None:
    assert on_ranks(trained, 2, "train_batch", 1, False) == [("", True)] * 2


def notices(same: bool) -> int:
    """Trains two replicas on the same rows or on others; how often this rank is told of it."""
    told: list[str] = []
    log = logging.getLogger("fleetpipe.dygraph.batch.row_digests")
    log.addFilter(lambda record: told.append(record.getMessage()) is None)
    jobs.begin(pp=1, dp=2)
    model = pipeline()
    for _ in range(2):
        model.train_batch(B if RANK and not same else A, sgd(model))
    fleet.shutdown()
    return sum("given the same rows" in text for text in told)


@pytest.mark.parametrize("same", [True, False])
def test_replicas_that_read_the_same_rows_are_told_once(
    on_ranks: Callable[..., Any], same: bool
) -> None:
    assert on_ranks(notices, 2, same) == [int(same), 0]
