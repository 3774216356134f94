"""Batches that ranks refuse: rows, rates and losses that differ, and losses of what others kept."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.dygraph.batch.losses import require_nothing_kept
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.row_digests import (
    digests_of,
    require_different_parts,
    require_one_batch,
)
from fleetpipe.errors import BoundaryError, ConfigError, FleetPipeError
from fleetpipe.fit.micro_batches import Criterion
from fleetpipe.fleet.meta_parallel import ColumnParallelLinear, LayerDesc
from fleetpipe.job.allow import Allow
from tests import pipelines
from tests.pipelines import CLASSES, FEATURES, batch, bits, job, mlp_layers, pipeline, sgd

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
    with pytest.raises(ConfigError, match="own_part") if whole else contextlib.nullcontext():
        require_different_parts(job, 2)


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
    pipelines.begin(pp=2 // mp, mp=mp, compare_rows=compares)
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
    except FleetPipeError as error:
        text = str(error)
    with suppress(FleetPipeError):
        fleet.shutdown()
    return text, bits(model.state_dict()) != before


def notices(same: bool) -> int:
    """Trains two replicas on the same rows or on others; how often this rank is told of it."""
    told: list[str] = []
    log = logging.getLogger("fleetpipe.dygraph.batch.row_digests")
    log.addFilter(lambda record: told.append(record.getMessage()) is None)
    with job(pp=1, dp=2):
        model = pipeline()
        for _ in range(2):
            model.train_batch(B if RANK and not same else A, sgd(model))
    return sum("given the same rows" in text for text in told)


#: By what is refused: the axis of two ranks, and words of the error.
SITUATIONS = {
    "optimizer:learning_rates": ("dp", "0.1 and 0.2"),
    "data:equal_parts": ("sep", "own_part"),
    "loss:losses_of_shards": ("mp", "gather_output=True"),
}


def refused_or_allowed(refused: str) -> list[str]:
    """Trains a batch in a situation: the error as it is, and as the script allows it."""
    ends = []
    axis, _ = SITUATIONS[refused]
    for allow in ([], [refused]):
        strategy = pipelines.strategy(4, own={"allow": allow}, pp=1, **{axis: 2})
        fleet.init(is_collective=True, strategy=strategy)
        layers = mlp_layers()
        if axis == "mp":
            head = {"gather_output": False, "has_bias": True}
            layers = [LayerDesc(ColumnParallelLinear, FEATURES, 2 * CLASSES, **head)]
        model, text = pipeline(layers), ""
        rate = 0.1 * (1 + RANK) if axis == "dp" else 0.1
        try:
            model.train_batch(batch(4, RANK if axis == "dp" else 0), sgd(model, rate))
        except FleetPipeError as error:
            text = str(error)
        with suppress(FleetPipeError):
            fleet.shutdown()
        ends.append(text)
    return ends


CALLS = [(call, mp) for call in ("train_batch", "eval_batch") for mp in (1, 2)]


def program() -> tuple[Any, ...]:
    """What each of two ranks is told in all of these."""
    compared = [trained(*call, True) for call in CALLS]
    not_compared = trained("train_batch", 1, False)
    errors = {refused: refused_or_allowed(refused) for refused in SITUATIONS}
    return compared, not_compared, [notices(False), notices(True)], errors


def test_all_ranks_refuse_before_the_step(on_ranks: Callable[..., Any]) -> None:
    ranks = on_ranks(program, 2, timeout=120)
    for compared, not_compared, _, _ in ranks:
        for text, stepped in compared:
            assert "were given different rows" in text
            assert not stepped
        assert not_compared == ("", True)
    # Replicas that read the same rows are told once.
    assert [told for _, _, told, _ in ranks] == [[0, 1], [0, 0]]
    first, second = (errors for *_, errors in ranks)
    for refused, (_, words) in SITUATIONS.items():
        assert words in first[refused][0] + second[refused][0], refused
        assert "" not in (first[refused][0], second[refused][0])
        assert first[refused][1] == second[refused][1] == ""


KEPT: list[Any] = []


class Looked(nn.Sequential):
    """Keeps what it has computed, for whoever looks at it."""

    def forward(self, x: Any) -> Any:
        self.aux = super().forward(x)
        return self.aux


MODEL = Looked(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))


def added_up() -> Any:
    return sum(KEPT)


def directly(output: Any, label: Any) -> Any:
    return nn.functional.cross_entropy(output, label) + sum(KEPT)


def by_a_helper(output: Any, label: Any) -> Any:
    return output.mean() + added_up()


def by_the_layers(output: Any, label: Any) -> Any:
    return output.mean() + sum(getattr(part, "aux", 0) for part in MODEL.sublayers())


def of_weights(output: Any, label: Any) -> Any:
    return output.mean() + sum((weight**2).sum() for weight in MODEL.parameters())


class OfItsOwn(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.kept = KEPT

    def forward(self, output: Any, label: Any) -> Any:
        return output.mean() + self.more()

    def more(self) -> Any:
        return sum(self.kept)


def in_a_closure() -> Callable[..., Any]:
    kept = {"aux": KEPT}
    return lambda output, label: output.mean() + sum(kept["aux"])


#: Loss functions, and whether they read what is kept.
LOSSES: dict[str, tuple[Any, bool]] = {
    "directly": (directly, True),
    "by a helper": (by_a_helper, True),
    "by a partial": (functools.partial(directly, label=None), True),
    "by an attribute of layers": (by_the_layers, True),
    "in a closure": (in_a_closure(), True),
    "a layer": (OfItsOwn(), True),
    "a method": (OfItsOwn().more, True),
    "with metrics": (Criterion(directly, None), True),
    "Paddle's": (nn.CrossEntropyLoss(), False),
    "Paddle's function": (nn.functional.cross_entropy, False),
    "of weights": (of_weights, False),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_reads_what_a_layer_kept_is_refused(kind: str) -> None:
    loss, reads = LOSSES[kind]
    kept = (MODEL[0].weight ** 2).sum()
    try:
        KEPT.append(kept.detach())
        require_nothing_kept([loss], 0)
        KEPT.append(kept)
        MODEL[1][0].aux = kept
        if reads:
            with pytest.raises(BoundaryError, match=r"(KEPT|kept|aux)(.|\n)*hand it on"):
                require_nothing_kept([nn.CrossEntropyLoss(), loss], 0)
        else:
            require_nothing_kept([loss], 0)
    finally:
        KEPT.clear()
        del MODEL[1][0].aux


class Keeping(nn.Linear):
    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        KEPT.append((y * y).mean())
        return y


def on_two_ranks() -> tuple[str, bool]:
    """What training ends with, and whether the weights are what they were."""
    with job(2, 4):
        model = pipeline([Keeping(6, 6), nn.Tanh(), nn.Linear(6, 4)], loss_fn=directly)
        before = bits(model.state_dict())
        try:
            model.train_batch(batch(), sgd(model))
        except FleetPipeError as error:
            return str(error), bits(model.state_dict()) == before
        return "", False


def test_no_rank_trains_without_what_another_kept(on_ranks: Any) -> None:
    (first, same), (last, also) = on_ranks(on_two_ranks, 2)
    assert "the loss function reads a tensor that a layer keeps here" in first
    assert "rank 0" in last
    assert (same, also) == (True, True)
    assert paddle.is_grad_enabled()
