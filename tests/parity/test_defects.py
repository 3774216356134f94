"""Injected defects are found: batches cut wrongly, lost gradients, stale buffers, wrong rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet, parity
from fleetpipe.dygraph import PipelineOptimizer, PipelineParallel
from fleetpipe.dygraph.batch import dygraph_stage, micro_batches, row_digests
from fleetpipe.errors import BoundaryError, ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.paddle_api.meta_parallel import PipelineDatasetPreprocessor
from tests.fixtures import Patch
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
)


@contextmanager
def compared(pp: int, **options: Any) -> Iterator[tuple[Any, parity.Session]]:
    """Within it there is a `model_in_job`, trained by SGD, and a session that compares it."""
    with model_in_job(pp, **options) as model:
        yield model, parity.begin(model, sgd(model))


def differences(report: parity.Report) -> list[tuple[str, str, int]]:
    """Quantity, name and step of everything that differs."""
    return [(found.quantity, found.name, found.step) for found in report.differences]


def cut_by_hand(value: Any) -> list[Any]:
    """The micro-batches of a tensor."""
    return [value[start : start + ROWS] for start in range(0, value.shape[0], ROWS)]


#: ``form(inputs, labels)`` gives them to ``train_batch``.
FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "tensors": lambda x, y: [x, y],
    "a tuple of both": lambda x, y: (x, y),
    "lists": lambda x, y: [cut_by_hand(x), cut_by_hand(y)],
    "a list and a tensor": lambda x, y: [cut_by_hand(x), y],
    "an iterator": lambda x, y: iter(list(zip(cut_by_hand(x), cut_by_hand(y)))),
    "a generator": lambda x, y: (pair for pair in list(zip(cut_by_hand(x), cut_by_hand(y)))),
    "a preprocessor": lambda x, y: PipelineDatasetPreprocessor(lambda: [x, y]),
    "a preprocessor of an iterator": lambda x, y: PipelineDatasetPreprocessor(
        lambda: iter(list(zip(cut_by_hand(x), cut_by_hand(y))))
    ),
}


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
    with compared(2, layers=layers) as (_, session):
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


@pytest.mark.parametrize("name", [*FORMS, *PAIRS])
def test_a_batch_that_is_cut_wrongly_is_found(name: str, monkeypatch: Patch) -> None:
    given = (FORMS[name], None) if name in FORMS else (PAIRS[name], pair_layers())
    assert after_a_step(*given).passed
    monkeypatch.setattr(row_digests, "split", swapped(row_digests.split))
    report = after_a_step(*given)
    first = differences(report)[0]
    assert (first[0], first[1][:9], first[2]) == ("micro-batch", "inputs[0]", 0)
    assert f"micro-batch of {first[1]} differs" in report.verdict()
    if name in FORMS:
        assert differences(report)[1] == ("micro-batch", "inputs[1]", 0)


def test_labels_that_belong_to_other_rows_are_found(monkeypatch: Patch) -> None:
    split = row_digests.split

    def wrong(data: Any, cut: Any) -> Any:
        inputs, labels = split(data, cut)
        return micro_batches.MicroBatches(inputs, labels[::-1])

    monkeypatch.setattr(row_digests, "split", wrong)
    report = after_a_step(FORMS["tensors"], None)
    assert ("micro-batch", "labels[0]", 0) in differences(report)
    assert not report.passed


def test_an_item_too_many_of_an_iterator_is_found(monkeypatch: Patch) -> None:
    split = row_digests.split

    def greedy(data: Any, cut: Any) -> Any:
        found = split(data, cut)
        next(data, None)
        return found

    monkeypatch.setattr(row_digests, "split", greedy)
    report = after_a_step(FORMS["an iterator"], None)
    assert differences(report) == [("micro-batch", "the iterator, taken", 0)]
    assert not report.passed


KEPT: dict[str, Any] = {}


class Keeping(nn.Linear):
    """Leaves its output in a dict for the layers behind."""

    def forward(self, value: Any) -> Any:
        KEPT["out"] = super().forward(value)
        return KEPT["out"]


def test_a_value_that_a_stage_leaves_for_another_is_refused_as_without_parity() -> None:
    first = Keeping(FEATURES, 8)
    # The function reaches the first layer itself, and with that what the session keeps of it.
    add = lambda value: paddle.add(value * first.weight.ndim, KEPT["out"])  # noqa: E731
    layers = [first, nn.functional.tanh, add]
    with (
        compared(2, layers=[*layers, LayerDesc(nn.Linear, 8, CLASSES)]) as (_, session),
        pytest.raises(BoundaryError) as refusal,
    ):
        session.step(batch())
    assert "got: out\n" in str(refusal.value)


def test_a_batch_that_does_not_fit_is_refused_as_without_parity() -> None:
    for wrong in ([batch()[0][:7], batch()[1]], iter([(None, None)]), batch()[0]):
        with model_in_job(2) as model:
            session = parity.begin(model, sgd(model))
            with pytest.raises(ConfigError, match=r"accumulate_steps|ended after 1 of 4|data must"):
                session.step(wrong)


def test_exactly_the_items_of_a_step_are_taken_of_an_iterator() -> None:
    items = iter([pair for step in range(3) for pair in zip(*map(cut_by_hand, batch(seed=step)))])
    with compared(2) as (_, session):
        for left in (8, 4, 0):
            session.step(items)
            assert items.__length_hint__() == left
    assert session.report.passed


class Branch(nn.Layer):
    """Returns two values that both go on, under the name of a dict or as a tuple."""

    def __init__(self, named: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.named = named

    def forward(self, value: Any) -> Any:
        new, old = self.linear(value), value * 1
        return {"new": new, "old": old} if self.named else (new, old)


class Merge(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value: Any) -> Any:
        new, old = value.values() if isinstance(value, dict) else value
        return self.linear(new) * nn.functional.tanh(old)


def passed_on(value: Any) -> Any:
    return value


def through(value: Any) -> Any:
    new, old = value
    return new + nn.functional.tanh(old), old


def branching_layers(named: bool = False) -> list[Any]:
    return [
        LayerDesc(nn.Linear, 6, 8),
        nn.functional.tanh,
        LayerDesc(Branch, named),
        passed_on,
        LayerDesc(Merge),
        nn.functional.tanh,
        LayerDesc(nn.Linear, 8, 8),
        LayerDesc(nn.Linear, 8, 4),
    ]


def trained(layers: list[Any], **options: Any) -> parity.Report:
    with compared(4, **options, layers=layers) as (_, session):
        session.step(batch())
        return session.report


def edge_of(report: parity.Report) -> str:
    first = report.failures[0]
    assert first.quantity == "gradient"
    return first.name


@pytest.fixture
def changed(monkeypatch: Patch) -> Callable[..., None]:
    """Has the gradients that a stage sends back over its edge changed."""

    def change(consumer: int, wrong: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
        backward = dygraph_stage.DygraphStage.backward

        def backward_wrong(self: Any, number: int, micro_batch: int, grads: Any) -> Any:
            sent = backward(self, number, micro_batch, grads)
            return {edge: wrong(gs) for edge, gs in sent.items()} if number == consumer else sent

        monkeypatch.setattr(dygraph_stage.DygraphStage, "backward", backward_wrong)

    return change


@pytest.mark.parametrize("schedule_mode", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("consumer", [1, 2, 3])
def test_a_gradient_changed_on_an_edge_is_found_by_the_edge(
    consumer: int, schedule_mode: str, changed: Any
) -> None:
    layers = branching_layers()
    assert trained(layers, schedule=schedule_mode).passed
    changed(consumer, lambda grads: tuple(grad * 1.001 for grad in grads))
    report = trained(layers, schedule=schedule_mode)
    assert edge_of(report).startswith(f"edge {consumer - 1} -> {consumer}, value")
    first_layer = {1: "0.", 2: "2.linear.", 3: "4.linear."}[consumer]
    assert report.first_of_a_layer is not None
    assert report.first_of_a_layer.name.startswith(first_layer)
    first, layer = report.verdict().splitlines()[1:3]
    assert f"gradient of edge {consumer - 1} -> {consumer}, value" in first
    assert f"parity: first layer: step 0: gradient of {first_layer}" in layer


@pytest.mark.parametrize("named", [False, True])
def test_a_gradient_lost_on_an_edge_is_found_by_its_value(named: bool, changed: Any) -> None:
    changed(2, lambda grads: (grads[0], None))
    path = "['old']" if named else "[1]"
    report = trained(branching_layers(named))
    assert edge_of(report) == f"edge 1 -> 2, value{path} (lost), micro-batch 0"
    assert report.failures[0].relative == 1
    # What is lost on one edge is missing on those before.
    edges = [name for _, name, _ in differences(report) if name.startswith("edge ")]
    assert edges == [edge_of(report), "edge 0 -> 1, value, micro-batch 0"]


def test_a_gradient_that_arrives_and_is_not_used_is_found(monkeypatch: Patch) -> None:
    roots = dygraph_stage._join_equal_roots

    def forgetful(tensors: Any, grads: Any) -> Any:
        found, theirs = roots(tensors, grads)
        return found[:1], theirs[:1]

    monkeypatch.setattr(dygraph_stage, "_join_equal_roots", forgetful)
    assert edge_of(trained(branching_layers())) == "edge 1 -> 2, value[1] (lost), micro-batch 0"


def test_a_value_that_passes_through_a_stage_is_found_at_its_edge(changed: Any) -> None:
    layers = branching_layers()
    layers[3] = through
    changed(2, lambda grads: (grads[0], None))
    with compared(4, layers=layers, seg_method=[0, 3, 4, 6]) as (_, session):
        session.step(batch())
    edges = [name for _, name, _ in differences(session.report) if name.startswith("edge ")]
    assert edges == [
        "edge 1 -> 2, value[1] (lost), micro-batch 0",
        "edge 0 -> 1, value[1], micro-batch 0",
    ]


def test_a_gradient_wrong_within_a_stage_is_no_edges_fault(monkeypatch: Patch) -> None:
    with model_in_job(4, layers=branching_layers()) as model:
        model.layers.state_dict()["4.linear.weight"].register_hook(lambda grad: grad * 2)
        session = parity.begin(model, sgd(model))
        session.step(batch())
    assert edge_of(session.report) == "4.linear.weight"
    assert not any(name.startswith("edge") for _, name, _ in differences(session.report))
    assert "first layer" not in session.report.verdict()


def test_a_gradient_lost_between_chunks_of_a_rank_is_found(changed: Any) -> None:
    changed(2, lambda grads: tuple(np.float32(0) * grad for grad in grads))
    with job(2, schedule="ZBV"):
        model = pipeline(branching_layers(), num_virtual_pipeline_stages=2)
        session = parity.begin(model, sgd(model))
        session.step(batch())
    assert edge_of(session.report).startswith("edge 1 -> 2, value")


def test_a_late_micro_batch_is_named(monkeypatch: Patch, changed: Any) -> None:
    count = iter(range(100))
    changed(1, lambda grads: tuple(g * (2.0 if next(count) == 2 else 1.0) for g in grads))
    assert edge_of(trained(branching_layers())) == "edge 0 -> 1, value, micro-batch 2"


def test_the_diagnosis_leaves_nothing_behind(changed: Any) -> None:
    """A difference of one step alone is one of that step's gradients and later parameters."""
    once = iter([True])
    changed(1, lambda grads: tuple(g * (1.5 if next(once, False) else 1.0) for g in grads))
    layers = branching_layers()
    layers[3] = LayerDesc(nn.BatchNorm1D, 8)
    layers[2] = LayerDesc(nn.Linear, 8, 8)
    layers[4] = LayerDesc(nn.Linear, 8, 8)
    with model_in_job(4, layers=layers) as model:
        session = parity.begin(
            model,
            fleet.distributed_optimizer(paddle.optimizer.SGD(0.0, parameters=model.parameters())),
        )
        for seed in range(3):
            session.step(batch(seed=seed))
    assert {step for _, _, step in differences(session.report)} == {0}
    assert session.report.pipeline_loss == session.report.single_loss


class Counting(nn.Layer):
    """Has two buffers that no state dict has, of which one is made in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", paddle.zeros([1]), persistable=False)

    def forward(self, value: Any) -> Any:
        self.calls = self.calls + 1
        self.largest = value.detach().max()
        return self.linear(value) + 0.01 * self.calls


def counting_layers() -> list[Any]:
    layers = mlp_layers()
    return [*layers[:3], LayerDesc(Counting), *layers[3:]]


@pytest.mark.parametrize("name", ["calls", "largest"])
def test_a_stale_buffer_that_is_not_saved_is_found(name: str) -> None:
    with compared(3, layers=counting_layers()) as (model, session):
        session.step(batch())
        assert session.report.passed, session.report.verdict()
        (layer,) = (part for part in model.layers.sublayers() if isinstance(part, Counting))
        layer.register_forward_post_hook(lambda *_: setattr(layer, name, paddle.zeros([1])))
        session.step(batch(seed=1))
    assert ("buffer", f"3.{name}", 1) in differences(session.report)
    assert not session.report.bit_exact


def test_the_reference_begins_with_the_pipelines_buffers() -> None:
    with model_in_job(3, layers=counting_layers()) as model:
        model.eval_batch(batch(), compute_loss=True)
        session = parity.begin(model, sgd(model))
        session.step(batch())
    assert session.report.passed, session.report.verdict()


LR = paddle.optimizer.lr
SCHEDULERS: dict[str, Callable[[], Any]] = {
    "StepDecay": lambda: LR.StepDecay(0.1, 2),
    "LambdaDecay": lambda: LR.LambdaDecay(0.1, lambda epoch: 0.9**epoch),
    "LinearWarmup": lambda: LR.LinearWarmup(LR.CosineAnnealingDecay(0.1, 5), 2, 0.0, 0.1),
    "LinearWarmup of a number": lambda: LR.LinearWarmup(0.1, 2, 0.0, 0.1),
    "CyclicLR": lambda: LR.CyclicLR(0.01, 0.1, 2),
}


def schedule(scheduler: Any, steps: int = 4) -> parity.Report:
    with model_in_job(2) as model:
        session = parity.begin(model, sgd(model, scheduler))
        for seed in range(steps):
            session.step(batch(seed=seed), scheduler)
        return session.report


def step_twice(monkeypatch: Patch) -> None:
    """Has every ``train_batch`` step the scheduler once more."""
    train_batch = PipelineParallel.train_batch

    def wrong(self: Any, data: Any, optimizer: Any, lr_scheduler: Any, *more: Any) -> Any:
        loss = train_batch(self, data, optimizer, lr_scheduler, *more)
        lr_scheduler.step()
        return loss

    monkeypatch.setattr(PipelineParallel, "train_batch", wrong)


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scheduler_that_steps_twice_is_found_in_the_step(make: Any, monkeypatch: Patch) -> None:
    scheduler = make()
    assert schedule(scheduler).passed
    assert scheduler.last_epoch == 4
    step_twice(monkeypatch)
    report = schedule(make(), steps=1)
    assert ("last_epoch", type(scheduler).__name__, 0) in differences(report)
    assert {found.quantity for found in report.differences} <= {"learning rate", "last_epoch"}
    assert "learning rate" in {found.quantity for found in schedule(make()).differences}


def test_a_rate_that_changes_before_the_update_is_found(monkeypatch: Patch) -> None:
    step = PipelineOptimizer.step

    def early(self: Any) -> None:
        if type(self) is PipelineOptimizer:
            self.wrapped._learning_rate.step()
        step(self)

    monkeypatch.setattr(PipelineOptimizer, "step", early)
    quantities = {found.quantity for found in schedule(LR.StepDecay(0.1, 1), 1).differences}
    assert {"learning rate", "parameter"} <= quantities


def test_the_script_steps_and_sets_the_rate_as_it_likes() -> None:
    scheduler = LR.ReduceOnPlateau(0.5, patience=0, factor=0.1)
    with model_in_job(2) as model:
        optimizer = sgd(model, scheduler)
        session = parity.begin(model, optimizer)
        rates = []
        for seed in range(5):
            session.step(batch(seed=seed))
            scheduler.step(paddle.to_tensor(1.0))
            rates.append(optimizer.get_lr())
        optimizer.set_lr_scheduler(LR.StepDecay(0.1, 1))
        session.step(batch(), optimizer.wrapped._learning_rate)
    assert session.report.passed, session.report.verdict()
    assert len(set(rates)) > 2


def test_a_number_that_the_script_changes_is_followed() -> None:
    with mlp_and_sgd(2) as (model, optimizer):
        session = parity.begin(model, optimizer)
        for rate in (0.1, 0.05, 0.5):
            optimizer.set_lr(rate)
            session.step(batch())
    assert session.report.passed, session.report.verdict()


def test_a_scheduler_of_the_scripts_own_is_stepped_on_a_copy() -> None:
    class Halving:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer, self.last_epoch = optimizer, 0

        def get_lr(self) -> float:
            return float(self.optimizer.get_lr())

        def step(self) -> None:
            self.last_epoch += 1
            self.optimizer.set_lr(self.get_lr() / 2)

    with mlp_and_sgd(2) as (model, optimizer):
        session = parity.begin(model, optimizer)
        for seed in range(3):
            session.step(batch(seed=seed), scheduler := Halving(optimizer))
        assert (optimizer.get_lr(), scheduler.last_epoch) == (0.0125, 1)
    assert session.report.passed, session.report.verdict()
