"""W of an Embedding row by row: autograd's bits, seen by all that watch gradients."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe.dygraph.backward import linear_and_embedding
from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.schedules import build
from tests.dygraph.models import Steps, grads_of
from tests.fixtures import Patch
from tests.pipelines import bits, job, pipeline, sgd

WORDS, WIDTH, MICRO_BATCHES = 50, 8, 3
#: Whether sums can grow without autograd.
ROWS = not paddle.__version__.startswith("2.")


@pytest.fixture(autouse=True)
def _small_tables(monkeypatch: Patch) -> None:
    monkeypatch.setattr(linear_and_embedding, "FEWEST", 1)


def two(**options: Any) -> tuple[Any, Steps]:
    """The same table twice: plain, and one whose backward is split."""
    plain = nn.Embedding(WORDS, WIDTH, **options)
    layer = nn.Embedding(WORDS, WIDTH, **options)
    layer.set_state_dict(plain.state_dict())
    return plain, Steps(layer)


def batch(plain: Any, steps: Steps, words: int, seed: int) -> None:
    """Trains one batch on both sides, all W at its end; of some words most come again."""
    numbers = np.random.default_rng(seed)
    ids = [paddle.to_tensor(numbers.integers(0, words, (2, 9))) for _ in range(MICRO_BATCHES)]
    weights = [paddle.to_tensor(numbers.standard_normal((2, 9, WIDTH))) for _ in ids]
    scores = [lambda out, w=w: (out * w.astype(out.dtype)).sum() for w in weights]
    for one, score in zip(ids, scores):
        score(plain(one)).backward()
    for k, (one, score) in enumerate(zip(ids, scores)):
        steps.input_grads(k, score(steps.forward(k, one)))
    for k in range(MICRO_BATCHES):
        steps.weight_grads(k)
    steps.split.end()


@pytest.mark.parametrize("words", [1, 5, WORDS])
@pytest.mark.parametrize("cleared", ["zeroed", "dropped", "kept"])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"sparse": True}])
def test_every_batch_has_the_bits_of_autograd(words: int, cleared: str, options: Any) -> None:
    plain, steps = two(**options)
    for seed in range(3):
        batch(plain, steps, words, seed)
        assert grads_of(steps.layer) == grads_of(plain)
        for layer in (plain, steps.layer):
            if cleared != "kept":
                layer.weight.clear_gradient(cleared == "zeroed")
    assert steps.gradients_in_w() == ["0.weight"]


def test_rows_are_added_without_a_gradient_of_the_table(monkeypatch: Patch) -> None:
    shapes = []
    sum_rows = linear_and_embedding.sum_rows

    def noted(ids: Any, grad: Any, table: Any) -> Any:
        shapes.append(table.shape[0])
        return sum_rows(ids, grad, table)

    monkeypatch.setattr(linear_and_embedding, "sum_rows", noted)
    plain, steps = two()
    for seed in range(2):
        shapes.clear()
        batch(plain, steps, 3, seed)
    few = 3 if ROWS else WORDS
    assert shapes == [WORDS, few, few]


def test_ids_that_are_written_into_before_w_count_as_they_were() -> None:
    plain, steps = two()
    for k in range(2):
        for run in (plain, lambda one, k=k: steps.forward(k, one)):
            ids = paddle.to_tensor([1, 2, 2])
            out = run(ids).sum()
            ids.set_value(paddle.to_tensor([0, 0, 0]))
            out.backward() if run is plain else steps.input_grads(k, out)
        steps.weight_grads(k)
    steps.split.end()
    assert steps.layer.weight.grad[2].tolist() == [4.0] * WIDTH


class Tied(nn.Layer):  # type: ignore[misc]
    """A table that a product uses as well, in all micro-batches or in some."""

    def __init__(self, beside: bool = True, twice: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.beside, self.twice = beside, twice

    def forward(self, ids: Any) -> Any:
        x = self.words(ids)
        if self.twice:
            x = x + self.words(ids.flip([0]) + 1)
        return x.matmul(self.words.weight.t()) if self.beside else x


class Hooked(Tied):
    """Its table's gradient has a hook."""

    def __init__(self) -> None:
        super().__init__(beside=False)
        self.words.weight.register_hook(lambda grad: grad * 3)


MODELS = {
    "alone": (Tied, False),
    "looked up twice": (Tied, False, True),
    "used beside it": (Tied,),
    "hooked": (Hooked,),
    "frozen later": (Tied, False),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("interval", [0, 1])
def test_a_backward_that_is_not_split_has_the_bits_of_autograd(
    kind: str, interval: int, monkeypatch: Patch
) -> None:
    results = []
    for fewest in (10**9, 1):
        monkeypatch.setattr(linear_and_embedding, "FEWEST", fewest)
        rows = noted_rows(monkeypatch)
        paddle.seed(3)
        with job(1, 3, "1F1B"):
            layers = [LayerDesc(*MODELS[kind]), LayerDesc(nn.Linear, WIDTH, 4)]
            if kind == "used beside it":
                layers.pop()
            loss = lambda output, _label: (output * output).mean()  # noqa: E731
            options = {"recompute_ctx": {"mp_group": None}} if interval else {}
            model = pipeline(layers, loss_fn=loss, recompute_interval=interval, **options)
            optimizer = sgd(model, 0.1)
            for seed in range(3):
                numbers = np.random.default_rng(seed).integers(0, 9, (3, 2, 5))
                ids = paddle.to_tensor(numbers.reshape(6, 5))
                model.train_batch([ids, ids], optimizer)
                if kind == "frozen later" and seed == 1:
                    next(iter(model.parameters())).stop_gradient = True
            results.append(bits(model.state_dict()))
    assert results[0] == results[1]
    assert bool(rows) == (kind in ("alone", "frozen later") and ROWS)


def noted_rows(monkeypatch: Patch) -> list[int]:
    """How many look-ups each backward that was not split added row by row."""
    rows: list[int] = []
    original = linear_and_embedding._add_rows

    def noted(total: Any, ids: Any, grad: Any) -> None:
        rows.append(ids.size)
        original(total, ids, grad)

    monkeypatch.setattr(linear_and_embedding, "_add_rows", noted)
    return rows


def test_a_gradient_within_forward_is_of_the_whole_table() -> None:
    layer = nn.Embedding(WORDS, WIDTH)
    ids = paddle.to_tensor([1, 2, 2])
    split = SplitBackward(build("1F1B", ranks=1, micro_batches=1), lambda stage: {0: layer})
    grads = []
    for fast in (False, True):
        with split.recording(0, 0) if fast else nullcontext():  # type: ignore[arg-type]
            output = layer(ids)
        output.register_hook(lambda grad: grad * 2)
        (grad,) = paddle.grad((output**3).sum(), [layer.weight])
        grads.append(grad.numpy().tobytes())
    assert grads[0] == grads[1]
