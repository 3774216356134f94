"""One of two members compares its layers with dense ones.

`compared` returns how far each result is from the dense layer's, relative to its largest number,
and the bits of what every member must have alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional

from fleetpipe import transport
from fleetpipe.dygraph.tensor_parallel import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
    alone,
    connect,
    operations,
    own_value,
    whole_value,
)
from fleetpipe.job import meeting, paddle_groups
from fleetpipe.mesh.groups import DirectGroup
from fleetpipe.paddle_api import paddle_fleet

SECONDS = 60.0
GAPS: dict[str, float] = {}
BITS: dict[str, bytes] = {}
NUMBERS = np.random.default_rng(0)
#: The model-parallel group, once a job has begun.
MEMBERS: list[Any] = []


def start(over: str) -> Any:
    """Begins a job of Paddle's with mp_degree 2; returns its model-parallel group."""
    store = meeting.open_store(SECONDS)
    meeting.meet(store, "fleetpipe/0/here", SECONDS)
    paddle_groups.separate_stores(store, SECONDS)
    strategy = paddle_fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 2, "pp_degree": 1}
    paddle_fleet.init(is_collective=True, strategy=strategy)
    topology = paddle_fleet.get_hybrid_communicate_group()
    group = topology.get_model_parallel_group()
    if over == "own":
        rank = topology.get_model_parallel_rank()
        connection = transport.connect(
            rank=rank, ranks=2, store=store, namespace="mp", timeout=SECONDS
        )
        connect(group, DirectGroup(connection, SECONDS))
    return group


def both(make: Callable[[], Any]) -> tuple[Any, Any]:
    """A layer of slices and the whole one, drawn under one seed; biases are not zero."""
    layers = []
    for whole in (False, True):
        paddle.seed(11)
        if whole:
            with alone():
                layers.append(make())
        else:
            layers.append(make())
    for own, dense in zip(*(layer.parameters() for layer in layers)):
        if len(dense.shape) == 1:
            dense.set_value(paddle.linspace(-1, 1, dense.shape[0]))
            own.set_value(own_value(dense, own, MEMBERS[0]))
    return layers[0], layers[1]


def tensor(*shape: int, grad: bool = True) -> Any:
    made = paddle.to_tensor(NUMBERS.standard_normal(shape).astype("float32"))
    made.stop_gradient = not grad
    return made


def twin(value: Any) -> Any:
    other = value.detach().clone()
    other.stop_gradient = value.stop_gradient
    return other


def note(name: str, found: Any, expected: Any) -> None:
    scale = float(expected.abs().max()) or 1.0
    assert found.shape == expected.shape, (name, found.shape, expected.shape)
    GAPS[name] = float((found - expected).abs().max()) / scale


def note_same(name: str, value: Any) -> None:
    BITS[name] = value.numpy().tobytes()


def note_gradients(name: str, layer: Any, dense: Any) -> None:
    pairs = zip(layer.named_parameters(), dense.parameters())
    for (parameter_name, own), whole in pairs:
        grad = whole_value(own.grad, own, MEMBERS[0])
        note(f"{name} {parameter_name} gradient", grad, whole.grad)


def columns(value: Any) -> Any:
    """This member's columns of what has the same values everywhere."""
    return operations.shard_of(value.detach(), -1, MEMBERS[0].rank, 2)


def compare(
    name: str,
    layers: tuple[Any, Any],
    inputs: Any,
    own_input: Callable[[Any], Any] = twin,
    own_output: Callable[[Any], Any] = lambda value: value,
) -> None:
    """Compares results and gradients of a layer of slices with those of the dense one.

    Args:
        name: What the results are noted as.
        layers: Both layers.
        inputs: The inputs of the dense one.
        own_input: Returns this member's part of them; `twin` for all of them.
        own_output: Returns this member's part of the dense one's output.
    """
    layer, dense = layers
    own = own_input(inputs)
    own.stop_gradient = inputs.stop_gradient
    output, expected = layer(own), dense(inputs)
    weights = tensor(*expected.shape, grad=False)
    (output * own_output(weights)).sum().backward()
    (expected * weights).sum().backward()
    note(name, output, own_output(expected))
    if own_output is not columns:
        note_same(name, output)
    if not inputs.stop_gradient:
        grad = own.grad if own_input is twin else whole_value(own.grad, -1, MEMBERS[0])
        note(f"{name} input gradient", grad, inputs.grad)
        if own_input is twin:
            note_same(f"{name} input gradient", own.grad)
    note_gradients(name, layer, dense)


def linears() -> None:
    for bias, flag in itertools.product((True, False), repeat=2):
        column = both(partial(ColumnParallelLinear, 6, 8, has_bias=bias, gather_output=flag))
        own_output = {} if flag else {"own_output": columns}
        compare(f"column bias={bias} gather={flag}", column, tensor(3, 2, 6), **own_output)
        row = both(partial(RowParallelLinear, 6, 8, has_bias=bias, input_is_parallel=flag))
        own_input = {"own_input": columns} if flag else {}
        compare(f"row bias={bias} parallel={flag}", row, tensor(3, 2, 6), **own_input)


def embedding() -> None:
    layers = both(lambda: VocabParallelEmbedding(10, 4))
    compare("embedding of both", layers, paddle.to_tensor([[0, 9, 4], [5, 4, 4]]))
    compare("embedding of one", layers, paddle.to_tensor([1, 2, 1], dtype="int32"))


class Loss(nn.Layer):
    """A cross-entropy with its labels."""

    def __init__(self, criterion: Any, label: Any) -> None:
        super().__init__()
        self.criterion, self.label = criterion, label

    def forward(self, logits: Any) -> Any:
        return self.criterion(logits, self.label)


def cross_entropies() -> None:
    label = paddle.to_tensor([[0, 9, 3], [4, 5, 3]])
    padded = tensor(2, 3, 10).numpy()
    padded[..., 5:] = -np.inf
    for name, logits, labels in (
        ("[B, S]", tensor(2, 3, 10), label),
        ("[B, S, 1] of int32", tensor(2, 3, 10), label.unsqueeze(-1).astype("int32")),
        ("far from 0", (tensor(2, 3, 10) * 10 + 100).detach(), label),
        ("of padding", paddle.to_tensor(padded), label % 5),
    ):
        logits.stop_gradient = False
        dense = nn.CrossEntropyLoss(reduction="none", ignore_index=3)
        whole = Loss(dense, labels.reshape([2, 3, 1]).astype("int64"))
        own = Loss(ParallelCrossEntropy(ignore_index=3), labels)
        compare(f"cross entropy {name}", (own, whole), logits, own_input=columns)


class Mlp(nn.Layer):
    """The Megatron block: columns, then rows, with one sum in each direction."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ColumnParallelLinear(6, 16, has_bias=True, gather_output=False)
        self.outer = RowParallelLinear(16, 6, input_is_parallel=True)

    def forward(self, x: Any) -> Any:
        return self.outer(functional.gelu(self.inner(x)))


class Language(nn.Layer):
    """Embedding, a residual block, and the embedding again as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = VocabParallelEmbedding(12, 6)
        self.norm = nn.LayerNorm(6)
        self.block = Mlp()
        self.criterion = ParallelCrossEntropy(ignore_index=0)

    def forward(self, ids: Any, label: Any) -> Any:
        hidden = self.table(ids)
        hidden = operations.identity(
            hidden + self.block(self.norm(hidden)), self.table.model_parallel_group
        )
        logits = paddle.matmul(hidden, self.table.weight, transpose_y=True)
        return self.criterion(logits, label).sum() / float((label != 0).sum())


def language_model() -> None:
    models = both(Language)
    optimizers = [paddle.optimizer.SGD(0.5, parameters=model.parameters()) for model in models]
    first = [parameter.numpy() for parameter in models[1].parameters()]
    for step in range(5):
        ids = paddle.to_tensor(NUMBERS.integers(0, 12, (4, 6)))
        losses = []
        for model, optimizer in zip(models, optimizers):
            loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(loss)
        note(f"language model, loss {step}", *losses)
        note_same(f"language model, loss {step}", losses[0])
    pairs = zip(models[0].named_parameters(), models[1].parameters(), first)
    for (name, own), dense, before in pairs:
        value = whole_value(own, own, MEMBERS[0])
        note(f"language model {name} after 5 steps", value, dense)
        assert not np.array_equal(before, dense.numpy()), name


def compared(over: str) -> tuple[dict[str, float], dict[str, bytes]]:
    """Compares everything, over the groups of "own" or of "gloo"."""
    MEMBERS.append(start(over))
    linears()
    embedding()
    cross_entropies()
    language_model()
    return GAPS, BITS
