"""A captured model is compared with the untouched one; what differs or draws is refused."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.capture.proof import Proof
from fleetpipe.capture.proof.training import StagesTrainer
from fleetpipe.capture.running.stages import CapturedStages
from fleetpipe.capture.tracing import capturing
from fleetpipe.capture.tracing.value import Capture
from fleetpipe.compare.differences import Rounding
from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.errors import CaptureError
from fleetpipe.paddle_api import eager_operations
from fleetpipe.paddle_api.device import peak_bytes, restart_peak
from tests.capture.models import GPT, Encoded, UNet, images, tokens
from tests.pipelines import job


def proof(model: Any, example: Any, split_spec: Any, **options: Any) -> Proof:
    """Returns what was compared."""
    found: Proof = fleetpipe.pipeline(model, example, split_spec=split_spec, **options).proof
    return found


def test_it_says_what_is_equal() -> None:
    found = proof(UNet(), images(2, 16)[0], ["middle", "up2"])
    # Five convolutions with two parameters and a batch norm with two more, and the head; two
    # statistics each.
    # Of two steps with three micro-batches, and of two evaluations.
    assert found == (8, 22, 10, {}, (), False, (("1F1B", 3), ("ZBH1", 3)), (2, 3))
    assert str(found) == (
        "equal in bits: 8 outputs, 22 gradients, 10 buffers; trained 2 steps of 3 micro-batches "
        "under 1F1B and ZBH1, evaluated 2 and 3 rows"
    )


def test_a_value_of_several_stages_is_proved_to_rounding_and_named() -> None:
    paddle.seed(0)
    found = proof(
        Encoded(), (tokens(2), tokens(2, seed=1)), ["transformer.decoder.layers.1", "head"]
    )
    assert found.gradients == 143
    assert all(gap < 1e-6 for gap in found.rounded.values())
    # Every layer of the decoder takes the memory.
    assert found.summed == ("transformer.encoder.norm",)


def test_dropout_is_compared_under_the_same_keys() -> None:
    paddle.seed(0)
    found = proof(GPT(dropout=0.5), tokens(2), ["blocks.2"])
    assert found.keyed
    assert max(found.rounded.values(), default=0) < 1e-6


class Sum(nn.Layer):  # type: ignore[misc]
    """A sum and a product between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x) * (x + 1))


X = paddle.arange(6.0).reshape([2, 3])
LINE = Sum.forward.__code__.co_firstlineno + 1


def test_what_the_capture_takes_for_a_constant_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its hook the sum is no node, and the capture takes its result for a constant."""
    methods = tuple(name for name in eager_operations._METHODS if name != "__add__")
    monkeypatch.setattr(eager_operations, "_METHODS", methods)
    with pytest.raises(CaptureError, match=rf"test_proof.py:{LINE}(.|\n)*mul with a constant"):
        proof(Sum(), X, ["second"])


def altered(trace: Capture) -> Capture:
    """Adds another number."""
    nodes = [
        replace(node, args=(node.args[0], 2)) if node.name == "add" else node
        for node in trace.nodes
    ]
    return replace(trace, nodes=tuple(nodes))


def removed(trace: Capture) -> Capture:
    """Has the product take what was added to, and not the sum."""
    (add,) = (node for node in trace.nodes if node.name == "add")
    nodes = [
        replace(node, args=(node.args[0], add.args[0])) if node.name == "mul" else node
        for node in trace.nodes
        if node is not add
    ]
    return replace(trace, nodes=tuple(nodes))


@pytest.mark.parametrize(("change", "node"), [(altered, "add"), (removed, "mul")])
def test_a_wrong_capture_is_found_and_its_first_node_named(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Capture], Capture], node: str
) -> None:
    traced = capturing.record
    monkeypatch.setattr(capturing, "record", lambda *given: change(traced(*given)))
    with pytest.raises(CaptureError) as caught:
        proof(Sum(), X, ["second"])
    text = str(caught.value)
    assert "the captured stages do not do what the model does: output 0 of micro-batch 0" in text
    assert f"where: first in {node}, {__file__}:{LINE}\n" in text


class Counting(nn.Layer):  # type: ignore[misc]
    """Computes with what it keeps on Python's side."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls, self.seen, self.generator = 0, [0], random.Random(3)

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.seen.append(self.calls)
        return self.linear(x) * (1 + 0.5**self.calls) + self.generator.random()


def test_what_layers_keep_on_the_side_of_python_is_as_before() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Counting(), nn.Linear(3, 3))
    counting = model[1]
    seen, drawn = counting.seen, random.Random(3).random()
    found = proof(model, X, ["2"], no_split=[Counting])
    assert found.gradients == 6
    assert (counting.calls, counting.seen) == (0, [0])
    assert counting.seen is seen
    assert counting.generator.random() == drawn


class Calls:
    """Counts, as an object of the user's."""

    number = 0


class CountingElsewhere(Counting):
    """Counts in an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Calls()

    def forward(self, x: Any) -> Any:
        self.counter.number += 1
        return self.linear(x) * (1 + 0.5**self.counter.number)


def test_a_node_that_counts_elsewhere_is_told_to_use_a_buffer() -> None:
    model = nn.Sequential(nn.Linear(3, 3), CountingElsewhere(), nn.Linear(3, 3))
    with pytest.raises(CaptureError, match="in a buffer, written by"):
        proof(model, X, ["2"], no_split=[CountingElsewhere])


def test_a_second_micro_batch_that_goes_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = CapturedStages.function

    def function(stages: Any, stage: int) -> Any:
        def wrong(value: Any, micro_batch: Any) -> Any:
            output = run(stages, stage)(value, micro_batch)
            return output if stage == 0 or micro_batch == 0 else output * 2

        return wrong

    monkeypatch.setattr(CapturedStages, "function", function)
    with pytest.raises(CaptureError, match="output 0 of micro-batch 1 differs in step 0, 1F1B"):
        proof(Sum(), X, ["second"])


def test_a_split_backward_that_goes_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, weight_grads = Sum(), SplitBackward.weight_grads

    def more(split: Any, stage: int, micro_batch: Any) -> None:
        weight_grads(split, stage, micro_batch)
        model.first.weight.grad = model.first.weight.grad * 2

    monkeypatch.setattr(SplitBackward, "weight_grads", more)
    with pytest.raises(CaptureError) as caught:
        proof(model, X, ["second"])
    text = str(caught.value)
    assert "gradient of first.weight differs in step 1, ZBH1" in text
    assert f"where: first in first, {__file__}:{LINE}" in text


def test_hooks_that_are_not_called_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Sum()
    model.second.register_forward_post_hook(lambda layer, inputs, output: None)
    train = StagesTrainer.train

    def without(run: Any, step: Any) -> Any:
        model.second._forward_post_hooks.clear()
        return train(run, step)

    monkeypatch.setattr(StagesTrainer, "train", without)
    with pytest.raises(CaptureError, match="call the hooks of second 0 times, and the model"):
        proof(model, X, ["second"])


class Hooked(nn.Layer):  # type: ignore[misc]
    """Puts a hook on a gradient, whatever mode it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        y.register_hook(lambda grad: grad * 2)
        return self.second(y)


def test_a_hook_on_a_gradient_is_no_obstacle_in_evaluation() -> None:
    assert proof(Hooked(), X, ["second"]).evaluated == (2, 3)


@functools.lru_cache
def constant(size: int) -> Any:
    return paddle.arange(float(size)) / size


class Constant(Sum):
    """Makes a constant at the first call, and keeps it outside."""

    def forward(self, x: Any) -> Any:
        return super().forward(x + constant(3))


def test_a_constant_that_is_kept_from_its_first_use_on_is_a_constant() -> None:
    assert proof(Constant(), X, ["second"]).gradients == 4


class Penalized(nn.Layer):  # type: ignore[misc]
    """Differentiates in its forward where it may."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        y = self.second(self.first(x).tanh())
        if not paddle.is_grad_enabled():
            return y
        z = x.detach()
        z.stop_gradient = False
        (gradient,) = paddle.grad(self.first(z).tanh().sum(), z, create_graph=True)
        return y + (gradient * gradient).mean()


@pytest.mark.parametrize("no_split", [(), (Penalized,)])
def test_a_layer_may_ask_whether_gradients_are_on(no_split: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Penalized(), nn.Linear(4, 4))
    with job(2):
        assert proof(model, paddle.rand([2, 4]), ["2"], no_split=no_split).evaluated == (2, 3)


def test_the_number_of_chunks_is_the_schedules_where_nobody_says_it() -> None:
    with job(2, schedule="ZBV"):
        pipe = fleetpipe.pipeline(
            nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))), X, split_spec=["1", "2", "3"]
        )
        assert pipe.placement.stages == 4
        assert pipe.proof.trained[0][0] == "ZBV"


def test_a_proof_needs_the_memory_of_training_once() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    one = sum(4 * p.size for p in model.parameters())
    restart_peak()
    before = peak_bytes()
    proof(model, paddle.ones([2, 512]), ["4"])
    # Their values as they were and as they train, and the gradients; where Paddle tells the peak.
    assert peak_bytes() - before < 2.7 * one


def test_hooks_are_not_counted_while_rounding_is_measured() -> None:
    """A key's bias has a gradient of rounding alone, and the layers have hooks."""
    paddle.seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.MultiHeadAttention(8, 2), nn.Linear(8, 8))
    for layer in model:
        layer.register_forward_post_hook(lambda layer, inputs, output: output + 0)
    run = proof(model, paddle.randn([2, 5, 8]), ["1"])
    assert run.gradients == 12


def test_what_a_unit_in_the_last_place_moves_is_rounding() -> None:
    right = {"w": paddle.to_tensor([1e-10, 0.0]), "u": paddle.ones([2])}
    moved = {"w": paddle.to_tensor([3e-10, 0.0]), "u": paddle.ones([2])}
    rounding = Rounding(right, lambda: moved)
    assert rounding.explains("w", 3e-9)
    assert not Rounding({"w": right["w"]}, lambda: {"w": right["w"]}).explains("w", 3e-9)
    assert not Rounding({"a.w": right["w"]}, lambda: {"a.w": moved["w"]}).explains("a.w", 4e-9)


ONES = paddle.ones([8, 3])
#: What was drawn.
DRAWN: list[float] = []


class Draws(nn.Layer):  # type: ignore[misc]
    """Draws from each generator, beside a layer; keeps what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.__dict__["own"] = nn.Linear(3, 3), np.random.default_rng(0)

    def forward(self, x: Any) -> Any:
        numbers = [random.random(), float(np.random.rand()), self.own.random()]
        DRAWN.extend(numbers)
        return self.inner(x) if sum(numbers) < 1.5 else x


def test_a_sublayer_draws_in_each_call_and_is_a_node_as_a_whole() -> None:
    around = nn.Sequential(nn.Linear(3, 3), Draws(), nn.Linear(3, 3))
    found = fleetpipe.explain(around, ONES[:2])
    assert [node.name for node in found.trace.nodes] == ["0", "1", "2"]
    assert "draws from a generator of Python's or NumPy's" in found.unopened["1"]
    with job(2):
        pipe = fleetpipe.pipeline(around, ONES[:2], split_spec=["2"], verify=False)
        model = fleet.distributed_model(pipe)
        DRAWN.clear()
        model.predict_batch(ONES)
    # Three numbers for each of four micro-batches, all different.
    assert len(set(DRAWN)) == len(DRAWN) == 12


class Evaluates(nn.Layer):  # type: ignore[misc]
    """Draws in evaluation alone, by a function of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        if not self.training:
            order = list(range(3))
            shuffled(order)
            x = x.index_select(paddle.to_tensor(order), 1)
        return self.last(x)


shuffled = random.shuffle
DRAWING_LINE = Evaluates.forward.__code__.co_firstlineno + 4


def test_the_line_that_draws_is_named_whatever_it_calls_and_in_either_mode() -> None:
    with pytest.raises(CaptureError) as caught:
        fleetpipe.pipeline(Evaluates(), ONES[:2], split_spec=["last"], verify=False)
    assert "draws from a generator of Python's or NumPy's" in str(caught.value)
    assert f"where: {__file__}:{DRAWING_LINE}\n" in str(caught.value)


def test_what_a_number_drawn_in_a_sublayer_decides_is_refused() -> None:
    class Coin(nn.Layer):  # type: ignore[misc]
        def forward(self) -> Any:
            return random.random() < 0.5

    class Tosses(Evaluates):
        def __init__(self) -> None:
            super().__init__()
            self.coin = Coin()

        def forward(self, x: Any) -> Any:
            return self.last(self.first(x)) if self.coin() else self.last(x)

    with pytest.raises(CaptureError, match="a number of Python's that coin makes"):
        fleetpipe.pipeline(Tosses(), ONES[:2], split_spec=["last"])
