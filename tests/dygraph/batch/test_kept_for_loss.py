"""What layers keep for a loss that runs on another rank is refused, however the loss reads it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.dygraph.batch.kept_for_loss import require_nothing_kept
from fleetpipe.errors import BoundaryError, FleetPipeError
from fleetpipe.fit.criterion import Criterion
from tests.pipelines import batch, bits, job, pipeline, sgd

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
