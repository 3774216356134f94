"""Every form in which a batch is given, crosses stages and gets gradients; and what is refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import parity
from fleetpipe.dygraph.batch.micro_batches import MicroBatchCut, join_outputs, ragged_weights, split
from fleetpipe.dygraph.nest import join, leaves, tensors_of
from fleetpipe.errors import BoundaryError, ConfigError, UsageError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineDatasetPreprocessor
from fleetpipe.fleet.meta_parallel.pipeline_parallel import FakeMicroDataset
from tests.pipelines import (
    CLASSES,
    FEATURES,
    ROWS,
    batch,
    job,
    mlp_and_sgd,
    mlp_layers,
    model_in_job,
    pipeline,
    sgd,
    switch,
    train,
    train_plainly,
)

STEPS = 4
INPUTS, LABELS = batch(STEPS)
CUT = MicroBatchCut(STEPS, ROWS)


def cut(tensor: Any) -> list[Any]:
    return [tensor[k * ROWS : (k + 1) * ROWS] for k in range(STEPS)]


def items() -> Iterator[tuple[Any, Any]]:
    yield from zip(cut(INPUTS), cut(LABELS))


def refilled() -> Iterator[tuple[Any, Any]]:
    """Yields one pair of tensors again and again, with other values."""
    pair = paddle.zeros([ROWS, INPUTS.shape[1]]), paddle.zeros([ROWS, 1], "int64")
    for item in items():
        for tensor, value in zip(pair, item):
            tensor.set_value(value)
        yield pair


class Bare:
    """An iterator that has no ``__iter__``: Fleet only calls ``next``."""

    def __init__(self) -> None:
        self.items = items()

    def __next__(self) -> Any:
        return next(self.items)


WHOLE: dict[str, Callable[[], Any]] = {
    "list": lambda: [INPUTS, LABELS],
    "tuple": lambda: (INPUTS, LABELS),
    "labels of one dimension": lambda: [INPUTS, LABELS.flatten()],
    "lists": lambda: [cut(INPUTS), cut(LABELS)],
    "one list": lambda: (INPUTS, cut(LABELS.flatten())),
    "generator": items,
    "generator of one pair of tensors": refilled,
    "iterator": lambda: iter(list(items())),
    "next alone": Bare,
    "generator of lists": lambda: (list(item) for item in items()),
    "preprocessor of a list": lambda: PipelineDatasetPreprocessor(lambda: [INPUTS, LABELS]),
    "preprocessor of a generator": lambda: PipelineDatasetPreprocessor(items),
    "micro data set": lambda: FakeMicroDataset([INPUTS, LABELS.flatten()], True, True, STEPS, ROWS),
}


def test_all_forms_of_a_batch_train_alike() -> None:
    with model_in_job(2, STEPS) as model:
        expected = float(model.forward_backward_pipeline([INPUTS, LABELS]))
        for form, make in WHOLE.items():
            assert float(model.forward_backward_pipeline(make())) == expected, form
            assert float(model.eval_batch(make(), compute_loss=True)) == expected, form


class Sides(NamedTuple):
    left: Any
    right: Any


LEFT, RIGHT = INPUTS[:, :2], INPUTS[:, 2:]
SEVERAL: dict[str, Callable[[], Any]] = {
    "tuple": lambda: (LEFT, RIGHT),
    "tuple of lists": lambda: (cut(LEFT), RIGHT),
    "tuple with None": lambda: (LEFT, None, RIGHT),
    "dict": lambda: {"left": LEFT, "right": RIGHT},
    "dict with a list and None": lambda: {"left": cut(LEFT), "none": None, "right": RIGHT},
    "nested": lambda: {"left": (LEFT,), "right": {"deep": RIGHT}},
    "list of tuples": lambda: list(zip(cut(LEFT), cut(RIGHT))),
    "list of lists": lambda: [[left, None, right] for left, right in zip(cut(LEFT), cut(RIGHT))],
    "list of dicts": lambda: [{"l": a, "r": b} for a, b in zip(cut(LEFT), cut(RIGHT))],
    "named tuple": lambda: Sides(LEFT, RIGHT),
    "list of named tuples": lambda: list(map(Sides, cut(LEFT), cut(RIGHT))),
}


def test_all_forms_of_several_inputs_train_alike() -> None:
    kinds: list[type] = []

    def joined(value: Any) -> Any:
        kinds.append(type(value))
        return paddle.concat(list(tensors_of(value)), axis=1)

    with model_in_job(2, STEPS, layers=[joined, *mlp_layers()]) as model:
        expected = float(model.forward_backward_pipeline([(INPUTS,), LABELS]))
        for form, make in SEVERAL.items():
            kinds.clear()
            assert float(model.forward_backward_pipeline([make(), LABELS])) == expected, form
            assert ({*kinds} == {Sides}) == ("named" in form)
            pairs = zip(split([make(), None], CUT).inputs, cut(LABELS))
            assert float(model.forward_backward_pipeline(iter(list(pairs)))) == expected, form


def test_several_labels_reach_the_loss_as_they_were_given() -> None:
    seen: list[Any] = []

    def loss(output: Any, label: Any) -> Any:
        seen.append(label)
        return output.mean()

    with model_in_job(2, STEPS, loss_fn=loss) as model:
        optimizer = sgd(model)
        model.train_batch([INPUTS, (LABELS, None, cut(LABELS))], optimizer)
        assert [len(label) for label in seen] == [3] * STEPS
        assert all(label[1] is None for label in seen)
        assert all((label[0] == label[2]).all() for label in seen)
        seen.clear()
        model.train_batch([INPUTS, {"y": LABELS.flatten()}], optimizer)
        assert [label["y"].shape for label in seen] == [[ROWS]] * STEPS
        seen.clear()
        model.train_batch([INPUTS, [None] * STEPS], optimizer)
        assert seen == [None] * STEPS


def test_pieces_are_detached_and_the_users_tensors_are_left_alone() -> None:
    inputs = INPUTS.clone()
    inputs.stop_gradient = False
    parts = split([(inputs, cut(inputs)), None], CUT).inputs
    assert all(piece.stop_gradient for part in parts for piece in part)
    assert not inputs.stop_gradient


def test_an_iterator_gives_exactly_the_items_of_a_step() -> None:
    taken: list[int] = []

    def endless() -> Iterator[Any]:
        k = 0
        while True:
            taken.append(k)
            yield INPUTS[:ROWS], LABELS[:ROWS]
            k += 1

    with model_in_job(2, STEPS) as model:
        source = endless()
        for step in (1, 2):
            model.train_batch(source, sgd(model))
            assert len(taken) == step * STEPS


def test_the_preprocessor_is_called_once_for_each_batch() -> None:
    calls: list[int] = []

    def load() -> Any:
        calls.append(1)
        return [INPUTS, LABELS]

    with mlp_and_sgd(2, STEPS) as (model, optimizer):
        model.train_batch(PipelineDatasetPreprocessor(load), optimizer)
        model.eval_batch(PipelineDatasetPreprocessor(load), compute_loss=True)
    assert calls == [1, 1]


def test_a_micro_data_set_leaves_out_what_a_stage_does_not_need() -> None:
    dataset = FakeMicroDataset([INPUTS, LABELS], True, False, STEPS, ROWS)
    assert iter(dataset) is dataset
    inputs, label = next(dataset)
    assert (inputs.shape, label) == ([ROWS, 6], None)
    assert len(list(dataset)) == STEPS - 1
    assert next(FakeMicroDataset([None, LABELS], False, True, STEPS, ROWS))[1].shape == [ROWS, 1]


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        ([INPUTS], ConfigError, "2 entries"),
        ([INPUTS[:-1], LABELS], ConfigError, "7 rows"),
        ([INPUTS, LABELS[:-1]], ConfigError, "labels does not have"),
        ([INPUTS.sum(), LABELS], ConfigError, r"0-D(.|\n)*\[value\] \* 4"),
        ([cut(INPUTS)[1:], LABELS], ConfigError, "one value per micro-batch"),
        ([(INPUTS, RIGHT[1:]), LABELS], ConfigError, r"inputs\[1\]"),
        ([np.zeros((8, 6)), LABELS], BoundaryError, "inputs is not a Tensor"),
        ([{"a": (INPUTS, 3)}, LABELS], BoundaryError, r"inputs\['a'\]\[1\](.|\n)*\] \* acc"),
        (iter([(INPUTS, LABELS)]), ConfigError, "after 1 of 4"),
        (iter([INPUTS] * 4), ConfigError, "micro-batch 0"),
        (iter([(INPUTS, "label")] * 4), BoundaryError, "labels of micro-batch 0"),
        ([(INPUTS, True), LABELS], BoundaryError, "leave it out, or give None"),
        (INPUTS, ConfigError, r"pass \[inputs, labels\]"),
        ("batch", ConfigError, r"pass \[inputs, labels\]"),
        ({"x": INPUTS, "y": LABELS}, ConfigError, r"dict(.|\n)*of 'x', 'y'"),
        (iter([{"x": INPUTS}] * 4), ConfigError, r"for b in loader\)"),
        (range(4), ConfigError, r"iter\(loader\)"),
    ],
)
def test_what_is_no_batch_is_refused_by_its_place(data: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        split(data, CUT)


def test_rows_that_do_not_fit_are_cut_only_where_that_is_allowed() -> None:
    any_rows = CUT._replace(any_rows=True)
    parts = split([(INPUTS[:5], LABELS[:5]), None], any_rows).inputs
    assert [(a.shape[0], b.shape[0]) for a, b in parts] == [(2, 2), (2, 2), (1, 1)]
    with pytest.raises(ConfigError, match="2 and 3"):
        split([(INPUTS[:5], LABELS[:4]), None], any_rows)
    weights = ragged_weights({"y": (None, LABELS[:5])}, any_rows)
    assert weights is not None
    assert [str(weight) for weight in weights] == ["2/5", "2/5", "1/5"]
    assert ragged_weights(LABELS[:6], any_rows) is None
    assert ragged_weights(cut(LABELS), any_rows) is None


def evaluated() -> list[tuple[float, float, str]]:
    """Evaluates other numbers of rows on two replicas: the loss, the mean of all, the parity."""
    results = []
    for reduction in ("mean", "sum"):
        with job(2, STEPS, dp=2, loss_reduction=reduction) as running:
            model = pipeline(mlp_layers(blocks=1))
            part = slice(0, 5) if running.replica == 0 else slice(5, 8)
            rows = [INPUTS[part], LABELS[part]]
            got = float(model.eval_batch(rows, compute_loss=True))
            session = parity.begin(model, sgd(model))
            session.eval_batch(rows, compute_loss=True)
            single = model.layers.single_model()
            model.layers.copy_to(single)
            loss = paddle.nn.functional.cross_entropy(single(INPUTS), LABELS)
            results.append((got, float(loss), session.report.verdict()))
    return results


def test_replicas_count_by_their_rows(on_ranks: Callable[..., Any]) -> None:
    for results in on_ranks(evaluated, 4):
        assert results[0][0] == pytest.approx(results[0][1], rel=1e-5)
        assert not any("FAILED" in verdict for *_, verdict in results)


def test_a_number_in_an_output_is_that_of_one_micro_batch() -> None:
    output = {"rows": 2, "name": "a", "none": None}
    assert join_outputs([output]) == output
    with pytest.raises(UsageError, match="that of one micro-batch"):
        join_outputs([{"rows": 2}, {"rows": 2}])


class First(nn.Linear):
    def forward(self, value: Any) -> Any:
        return {"hidden": super().forward(value), "blocks": []}


class Block(nn.Layer):
    """Attends over what all blocks before it have added."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.score = self.create_parameter([8])

    def forward(self, state: Any) -> Any:
        added = paddle.tanh(self.linear(state["hidden"])) + state["hidden"]
        blocks = [*state["blocks"], added]
        values = paddle.stack(blocks)
        weights = nn.functional.softmax((values * self.score).sum(-1), axis=0)
        return {"hidden": (weights.unsqueeze(-1) * values).sum(0), "blocks": blocks}


class Last(nn.Linear):
    def forward(self, state: Any) -> Any:
        return super().forward(state["hidden"])


def layers() -> list[Any]:
    blocks = [LayerDesc(Block) for _ in range(4)]
    return [LayerDesc(First, FEATURES, 8), *blocks, LayerDesc(Last, 8, CLASSES)]


def test_a_list_that_grows_over_chunks_has_the_bits_of_the_plain_model() -> None:
    plain = train_plainly(layers=layers())
    chunks = {"num_virtual_pipeline_stages": 2, "seg_method": "layer:Block"}
    assert train(layers(), schedule="Interleaved1F1B", **chunks) == plain
    assert train(layers(), schedule="ZBH1") == plain


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("form", ["whole", "leaf", "list", "iterator", "delayed"])
def test_inputs_that_need_a_gradient_get_it(schedule: str, form: str) -> None:
    inputs, labels = batch()
    first = inputs if form == "leaf" else paddle.zeros([6])
    sources = [first.clone(), first.clone()]
    for source in sources:
        source.stop_gradient = False
    values = sources if form == "leaf" else [inputs + source for source in sources]
    with model_in_job(2, schedule=schedule) as model:
        single = model.layers.single_model()
        if form == "delayed":
            switch(delay_scale_loss=True)
            model = model.__class__(model.layers)
        data: Any = [values[0].split(4) if form == "list" else values[0], labels]
        if form == "iterator":
            data = zip(values[0].split(4), labels.split(4))
        model.train_batch(data, sgd(model))
        for x, y in zip(values[1].split(4), labels.split(4)):
            (nn.functional.cross_entropy(single(x), y) / 4).backward(retain_graph=True)
        got, wanted = (source.grad for source in sources)
        assert got is not None
        assert float((got - wanted).abs().max()) < 1e-7
        assert float(wanted.abs().max()) > 1e-3
        assert model.eval_batch([values[0], labels]) != []


def test_a_derived_container_is_a_leaf_where_classes_are_exact() -> None:
    pair, ordered = Sides(1, 2), OrderedDict(a=3)
    assert [leaf for _, leaf in leaves([pair, ordered])] == [1, 2, 3]
    assert [leaf for _, leaf in leaves([pair, ordered], exact=True)] == [pair, ordered]


@pytest.mark.parametrize(
    "values", [[(1, 2), (1,)], [(1,), [1]], [{"a": 1}, {"b": 1}], [Sides(1, 2), (1, 2)], [1, 2]]
)
def test_what_is_not_alike_is_joined_as_it_is(values: list[Any]) -> None:
    seen: list[Any] = []
    join(seen.append, [{"k": value} for value in values])
    assert seen == [values]
