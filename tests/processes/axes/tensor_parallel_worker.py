"""One of two members compares its layers with dense ones.

`compared` returns how far each result is from the dense layer's, relative to its largest number,
and the bits of what every member must have alike.
"""

from __future__ import annotations

from collections.abc import Callable
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


def column_linear(bias: bool, gather: bool) -> None:
    name = f"column bias={bias} gather={gather}"
    layer, dense = both(lambda: ColumnParallelLinear(6, 8, has_bias=bias, gather_output=gather))
    inputs, weights = tensor(3, 2, 6), tensor(3, 2, 8, grad=False)
    reference = twin(inputs)
    output, expected = layer(inputs), dense(reference)
    (output * (weights if gather else columns(weights))).sum().backward()
    (expected * weights).sum().backward()
    note(name, output, expected if gather else columns(expected))
    note(f"{name} input gradient", inputs.grad, reference.grad)
    note_same(f"{name} input gradient", inputs.grad)
    note_gradients(name, layer, dense)


def row_linear(bias: bool, parallel: bool) -> None:
    name = f"row bias={bias} parallel={parallel}"
    layer, dense = both(lambda: RowParallelLinear(6, 8, has_bias=bias, input_is_parallel=parallel))
    inputs, weights = tensor(3, 2, 6), tensor(3, 2, 8, grad=False)
    reference = twin(inputs)
    taken = columns(inputs) if parallel else inputs
    taken.stop_gradient = False
    output, expected = layer(taken), dense(reference)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    note(name, output, expected)
    note_same(name, output)
    whole = columns(reference.grad) if parallel else reference.grad
    note(f"{name} input gradient", taken.grad, whole)
    note_gradients(name, layer, dense)


def embedding() -> None:
    layer, dense = both(lambda: VocabParallelEmbedding(10, 4))
    for name, ids in (
        ("of both", paddle.to_tensor([[0, 9, 4], [5, 4, 4]])),
        ("of one", paddle.to_tensor([1, 2, 1], dtype="int32")),
    ):
        weights = tensor(*ids.shape, 4, grad=False)
        output, expected = layer(ids), dense(ids)
        (output * weights).sum().backward()
        (expected * weights).sum().backward()
        note(f"embedding {name}", output, expected)
        note_same(f"embedding {name}", output)
        note_gradients(f"embedding {name}", layer, dense)


def cross_entropy(name: str, logits: Any, label: Any, dtype: str = "int64") -> None:
    label = paddle.to_tensor(label, dtype=dtype)
    own = columns(logits)
    own.stop_gradient = False
    reference = twin(logits)
    weights = tensor(2, 3, 1, grad=False)
    loss = ParallelCrossEntropy(ignore_index=3)(own, label)
    dense = nn.CrossEntropyLoss(reduction="none", ignore_index=3)
    expected = dense(reference, label.reshape([2, 3, 1]).astype("int64"))
    (loss * weights).sum().backward()
    (expected * weights).sum().backward()
    note(f"cross entropy {name}", loss, expected)
    note(f"cross entropy {name} gradient", whole_value(own.grad, -1, MEMBERS[0]), reference.grad)
    note_same(f"cross entropy {name}", loss)


def cross_entropies() -> None:
    label = np.array([[0, 9, 3], [4, 5, 3]])
    cross_entropy("[B, S]", tensor(2, 3, 10), label)
    cross_entropy("[B, S, 1] of int32", tensor(2, 3, 10), label[..., None], "int32")
    cross_entropy("far from 0", tensor(2, 3, 10) * 10 + 100, label)
    padded = tensor(2, 3, 10).numpy()
    padded[..., 5:] = -np.inf
    cross_entropy("of padding", paddle.to_tensor(padded, stop_gradient=False), label % 5)


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
    for flag in (True, False):
        for other in (True, False):
            column_linear(flag, other)
            row_linear(flag, other)
    embedding()
    cross_entropies()
    language_model()
    return GAPS, BITS
