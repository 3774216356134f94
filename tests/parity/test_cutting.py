"""A batch that dygraph cuts wrongly is found, in whatever form it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from paddle import nn

from fleetpipe import parity
from fleetpipe.dygraph.batch import micro_batches, rank_data
from fleetpipe.errors import ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.fixtures import Patch
from tests.parity.defects import FORMS, cut_by_hand, differences
from tests.pipelines import FEATURES, batch, mlp_layers, model_in_job, sgd


class Pair(nn.Layer):
    """Takes two inputs, in whatever container."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 8)

    def forward(self, inputs: Any) -> Any:
        first, second = inputs.values() if isinstance(inputs, dict) else inputs
        return self.linear(first + (0 if second is None else second))


PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    "a tuple": lambda x, y: [(x, x), y],
    "a dict": lambda x, y: [{"a": x, "b": x}, y],
    "a tuple of a list and a tensor": lambda x, y: [(cut_by_hand(x), x), y],
    "a list of tuples": lambda x, y: [[(part, part) for part in cut_by_hand(x)], y],
    "a tuple with None": lambda x, y: [(x, None), y],
    "an iterator of tuples": lambda x, y: iter(
        [((one, one), label) for one, label in zip(cut_by_hand(x), cut_by_hand(y))]
    ),
}


def after_a_step(form: Callable[[Any, Any], Any], layers: list[Any] | None) -> parity.Report:
    with model_in_job(2, layers=layers) as model:
        session = parity.begin(model, sgd(model))
        session.step(form(*batch()))
        return session.report


def pair_layers() -> list[Any]:
    return [LayerDesc(Pair), *mlp_layers()[1:]]


def swapped(split: Any) -> Any:
    """A cutter that mistakes the first two micro-batches of the inputs for each other."""

    def wrong(data: Any, cut: Any) -> Any:
        inputs, labels = split(data, cut)
        return micro_batches.MicroBatches([inputs[1], inputs[0], *inputs[2:]], labels)

    return wrong


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_batch_that_is_cut_wrongly_is_found(form: Any, monkeypatch: Patch) -> None:
    assert after_a_step(form, None).passed
    monkeypatch.setattr(rank_data, "split", swapped(rank_data.split))
    report = after_a_step(form, None)
    assert differences(report)[:2] == [
        ("micro-batch", "inputs[0]", 0),
        ("micro-batch", "inputs[1]", 0),
    ]
    assert "micro-batch of inputs[0] differs" in report.verdict()


@pytest.mark.parametrize("form", PAIRS.values(), ids=PAIRS)
def test_containers_that_are_cut_wrongly_are_found(form: Any, monkeypatch: Patch) -> None:
    assert after_a_step(form, pair_layers()).passed
    monkeypatch.setattr(rank_data, "split", swapped(rank_data.split))
    quantity, name, _ = differences(after_a_step(form, pair_layers()))[0]
    assert (quantity, name[:10]) == ("micro-batch", "inputs[0][")


def test_labels_that_belong_to_other_rows_are_found(monkeypatch: Patch) -> None:
    split = rank_data.split

    def wrong(data: Any, cut: Any) -> Any:
        inputs, labels = split(data, cut)
        return micro_batches.MicroBatches(inputs, labels[::-1])

    monkeypatch.setattr(rank_data, "split", wrong)
    report = after_a_step(FORMS["tensors"], None)
    assert ("micro-batch", "labels[0]", 0) in differences(report)
    assert not report.passed


def test_an_item_too_many_of_an_iterator_is_found(monkeypatch: Patch) -> None:
    split = rank_data.split

    def greedy(data: Any, cut: Any) -> Any:
        found = split(data, cut)
        next(data, None)
        return found

    monkeypatch.setattr(rank_data, "split", greedy)
    report = after_a_step(FORMS["an iterator"], None)
    assert differences(report) == [("micro-batch", "the iterator, taken", 0)]
    assert not report.passed


def test_a_batch_that_does_not_fit_is_refused_as_without_parity() -> None:
    for wrong in ([batch()[0][:7], batch()[1]], iter([(None, None)]), batch()[0]):
        with model_in_job(2) as model:
            session = parity.begin(model, sgd(model))
            with pytest.raises(ConfigError, match=r"accumulate_steps|ended after 1 of 4|data must"):
                session.step(wrong)


def test_exactly_the_items_of_a_step_are_taken_of_an_iterator() -> None:
    items = iter([pair for step in range(3) for pair in zip(*map(cut_by_hand, batch(seed=step)))])
    with model_in_job(2) as model:
        session = parity.begin(model, sgd(model))
        for left in (8, 4, 0):
            session.step(items)
            assert items.__length_hint__() == left
    assert session.report.passed
