"""Random models on slices have plain Paddle's bits; parity names the edge of a wrong gradient."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from fleetpipe import parity
from fleetpipe.contrib import slices
from fleetpipe.dygraph.batch import dygraph_stage
from fleetpipe.fleet.meta_parallel import LayerDesc, SharedLayerDesc
from tests.contrib.slices import sliced
from tests.contrib.slices.sliced import Total
from tests.fixtures import Patch
from tests.parity.test_defects import edge_of
from tests.pipelines import job, pipeline, sgd

VOCABULARY = 11


class Heads(nn.Layer):
    """Causal attention of several heads, of which ``window`` limits how far back they see."""

    takes_slices = True

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.both = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.heads, self.window = heads, window

    def forward(self, hidden: Any) -> Any:
        kept = slices.earlier(self)
        output, own = self.attend(hidden, kept)
        slices.keep(self, own)
        return output

    def attend(self, hidden: Any, kept: list[Any]) -> Any:
        """What it returns for some places, and what later ones need, given that of earlier ones."""
        rows, length, width = hidden.shape
        normed = self.norm(hidden)
        apart = [rows, length, self.heads, -1]
        query = self.query(normed).reshape(apart).transpose([0, 2, 1, 3])
        key, value = (
            part.reshape(apart).transpose([0, 2, 1, 3])
            for part in self.both(normed).split(2, axis=-1)
        )
        own = (key, value)
        if kept:
            key, value = (paddle.concat([*part], axis=2) for part in zip(*kept, own))
        seen = key.shape[2]
        far = paddle.ones([length, seen])
        near = paddle.tril(far, seen - length) - paddle.tril(far, seen - length - self.window)
        scores = paddle.matmul(query, key, transpose_y=True) + (near - 1) * 1e9
        found = paddle.matmul(F.softmax(scores), value)
        return hidden + found.transpose([0, 2, 1, 3]).reshape([rows, length, width]), own


class Table(nn.Layer):
    """Vectors of tokens, tied to the head."""

    takes_slices = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)

    @property
    def weight(self) -> Any:
        return self.table.weight

    def forward(self, tokens: Any) -> Any:
        return self.table(tokens)


def logits(table: Table, hidden: Any) -> Any:
    return paddle.matmul(hidden, table.weight, transpose_y=True)


logits.takes_slices = True  # type: ignore[attr-defined]


class Case:
    """A model, its batch, and how it is cut, by the number of the case."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        self.ranks, self.micro_batches = dice.randint(1, 4), dice.randint(1, 4)
        self.count, self.rows = dice.randint(2, 5), dice.randint(1, 3)
        self.length = dice.randint(self.count, 14)
        self.slicing: Any = self.count
        if dice.random() < 0.4:
            self.slicing = tuple(dice.randint(1, 6) for _ in range(self.count))
        heads = dice.choice([1, 2, 4])
        self.width = heads * dice.choice([2, 4])
        window = dice.choice([2, 5, 100])
        self.tied = dice.random() < 0.4
        ends: list[Any] = [
            LayerDesc(nn.Embedding, VOCABULARY, self.width),
            LayerDesc(nn.Linear, self.width, VOCABULARY),
        ]
        if self.tied:
            ends = [
                SharedLayerDesc("table", Table, forward, "weight", self.width)
                for forward in (None, logits)
            ]
        kinds = [
            LayerDesc(Heads, self.width, heads, window),
            LayerDesc(Total),
            LayerDesc(nn.Linear, self.width, self.width),
            LayerDesc(nn.LayerNorm, self.width),
            LayerDesc(nn.GELU),
        ]
        middle = [dice.choice(kinds) for _ in range(dice.randint(3, 6))]
        self.layers = [ends[0], *middle, ends[1]]
        numbers = np.random.default_rng(seed)
        shape = (self.micro_batches * self.rows, self.length)
        self.tokens, self.labels = numbers.integers(1, VOCABULARY, (2, *shape))
        if dice.random() < 0.5:
            self.labels[numbers.random(shape) < 0.4] = 0

    def cut(self) -> list[tuple[int, int]]:
        """Where the slices are, said once more in other words."""
        if self.slicing == self.count:
            sizes = [len(part) for part in np.array_split(range(self.length), self.count)]
        else:
            total = sum(self.slicing)
            ends = [
                int(np.floor(self.length * sum(self.slicing[: i + 1]) / total + 0.5))
                for i in range(self.count)
            ]
            for i in range(self.count):
                ends[i] = min(ends[i], self.length - (self.count - 1 - i))
                ends[i] = max(ends[i], (ends[i - 1] if i else 0) + 1)
            sizes = np.diff([0, *ends]).tolist()
        ends = np.cumsum(sizes).tolist()
        return list(zip([0, *ends], ends))


LOSS = nn.CrossEntropyLoss(ignore_index=0)


def by_hand(case: Case, layers: list[Any]) -> float:
    """Feeds plain layers the slices; what later ones need is kept here. Returns the loss."""
    total = None
    for k in range(case.micro_batches):
        rows = slice(k * case.rows, (k + 1) * case.rows)
        tokens, labels = case.tokens[rows], case.labels[rows]
        counted = int((labels != 0).sum())
        kept: list[list[Any]] = [[] for _ in layers]
        done: list[Any] = []
        for begin, end in case.cut():
            hidden = paddle.to_tensor(tokens[:, begin:end])
            own: list[tuple[Any, Any]] = []
            for number, layer in enumerate(layers):
                if isinstance(layer, Heads):
                    hidden, made = layer.attend(hidden, kept[number])
                elif isinstance(layer, Total):
                    before = kept[number]
                    places, sums = before[-1] if before else (0, paddle.zeros_like(hidden[:, 0]))
                    sums = sums.unsqueeze(1) + hidden.cumsum(axis=1)
                    until = places + hidden.shape[1]
                    along = paddle.arange(places + 1, until + 1, dtype="float32")
                    hidden, made = hidden + sums / along.reshape([1, -1, 1]), (until, sums[:, -1])
                else:
                    hidden = layer(hidden)
                    continue
                leaves = []
                for value in made:
                    leaf = value
                    if isinstance(value, paddle.Tensor):
                        leaf = value.detach()
                        leaf.stop_gradient = value.stop_gradient
                        own.append((value, leaf))
                    leaves.append(leaf)
                kept[number].append(tuple(leaves))
            part = labels[:, begin:end]
            loss = LOSS(hidden, paddle.to_tensor(part))
            share = Fraction(end - begin, case.length)
            if counted:
                share = Fraction(int((part != 0).sum()), counted)
            # As fractions in lowest terms, a product and then a quotient.
            share /= case.micro_batches
            loss = loss * share.numerator if share.numerator != 1 else loss
            loss = loss / share.denominator if share.denominator != 1 else loss
            done.append((loss, own))
            total = loss.detach() if total is None else total + loss.detach()
        for loss, own in reversed(done):
            back = [(value, leaf.grad) for value, leaf in own if leaf.grad is not None]
            paddle.autograd.backward([loss, *(v for v, _ in back)], [None, *(g for _, g in back)])
    return float(total)


class Plain(nn.Layer):
    """The layers of a case, built once more; a tied head has the table of the first."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        entries = case.layers[:-1] if case.tied else case.layers
        self.parts = nn.LayerList([entry.build_layer() for entry in entries])
        self.tied = case.tied

    def functions(self) -> list[Any]:
        parts = list(self.parts)
        return [*parts, lambda hidden: logits(parts[0], hidden)] if self.tied else parts


@pytest.mark.once_for("3", "4", "5")
@pytest.mark.parametrize("group", range(6))
def test_random_models_have_the_bits_of_plain_layers(group: int) -> None:
    for seed in range(10 * group, 10 * group + 10):
        case = Case(seed)
        options = {"rows": case.rows, "slices": case.slicing}
        with job(case.ranks, case.micro_batches, "Seq1F1B", **options):
            model, plain = pipeline(case.layers, loss_fn=LOSS), Plain(case)
            model.layers.copy_to(plain)
            expected = by_hand(case, plain.functions())
            data = [paddle.to_tensor(case.tokens), paddle.to_tensor(case.labels)]
            loss = model.forward_backward_pipeline(data)
            assert float(loss) == expected, seed
            names = model.layers.state.names_in(plain)
            theirs = {names[name]: tensor.grad for name, tensor in plain.named_parameters()}
            for name, tensor in model.layers.state.own_parameters().items():
                found, known = tensor.grad, theirs[name]
                assert (found is None) == (known is None), (seed, name)
                if known is not None and case.tied and "table" in name:
                    # Ranks add up what the two uses of a tied weight got, each its own.
                    scale = float(known.abs().max())
                    np.testing.assert_allclose(found.numpy(), known.numpy(), atol=1e-5 * scale)
                elif known is not None:
                    assert found.numpy().tobytes() == known.numpy().tobytes(), (seed, name)


@pytest.mark.parametrize("slices", [3, (3, 1, 3)])
def test_an_edge_is_named_with_the_slice(slices: Any, monkeypatch: Patch) -> None:
    backward = dygraph_stage.DygraphStage.backward

    def backward_wrong(self: Any, number: int, unit: int, grads: Any) -> Any:
        sent = backward(self, number, unit, grads)
        wrong = number == 1 and unit == 7
        return {e: tuple(g * 1.01 for g in gs) for e, gs in sent.items()} if wrong else sent

    def run() -> parity.Report:
        with job(3, schedule="Seq1F1B", slices=slices):
            model = pipeline(sliced.layers(dropout=0.1), loss_fn=sliced.loss)
            session = parity.begin(model, sgd(model))
            session.step(sliced.batch(8, 7))
            return session.report

    assert run().bit_exact
    monkeypatch.setattr(dygraph_stage.DygraphStage, "backward", backward_wrong)
    report = run()
    assert edge_of(report) == "edge 0 -> 1, value, micro-batch 2, slice 1"
    first = report.first_of_a_layer
    assert first is not None
    assert first.name.startswith(("0.", "1."))
