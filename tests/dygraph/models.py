"""Small models, each with a batch for it, and single layers whose I and W are run apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn

from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.fleet.meta_parallel import LayerDesc, SharedLayerDesc
from fleetpipe.schedules import Schedule, build
from tests.pipelines import CLASSES, ROWS, bits

VOCABULARY, LENGTH, WIDTH = 11, 5, 8


class Model(NamedTuple):
    """A list of layers and its data.

    Args:
        layers: Makes the list.
        batch: Makes ``[inputs, labels]`` from a number of micro-batches and a seed.
        loss: The loss function.
    """

    layers: Callable[[], list[Any]]
    batch: Callable[[int, int], list[Any]]
    loss: Callable[[Any, Any], Any]


class ScaledLoss(nn.Layer):
    """A loss with a parameter."""

    def __init__(self, first: float = 1.0) -> None:
        super().__init__()
        self.scale = self.create_parameter([1], default_initializer=nn.initializer.Constant(first))

    def forward(self, output: Any, label: Any) -> Any:
        return nn.functional.cross_entropy(output * self.scale, label)


class Attention(nn.Layer):
    """Causal self-attention of one head, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        scores = self.query(y) @ self.key(y).transpose([0, 2, 1]) / WIDTH**0.5
        mask = paddle.triu(paddle.full([LENGTH, LENGTH], -1e9), 1)
        return x + self.out(nn.functional.softmax(scores + mask) @ self.value(y))


class FeedForward(nn.Layer):
    """Two products with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Embedding(nn.Layer):
    """Tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Any) -> Any:
        return self.tokens(ids) + self.places(paddle.arange(LENGTH))


def _token_batch(labels_for_each_token: bool) -> Callable[[int, int], list[Any]]:
    def make(micro_batches: int, seed: int) -> list[Any]:
        numbers = np.random.default_rng(seed)
        rows = micro_batches * ROWS
        ids = numbers.integers(0, VOCABULARY, (rows, LENGTH + 1))
        labels = ids[:, 1:] if labels_for_each_token else numbers.integers(0, CLASSES, (rows, 1))
        return [paddle.to_tensor(ids[:, :-1]), paddle.to_tensor(labels)]

    return make


def _image_batch(micro_batches: int, seed: int) -> list[Any]:
    numbers = np.random.default_rng(seed)
    rows = micro_batches * ROWS
    images = numbers.standard_normal((rows, 1, 12, 12)).astype("float32")
    return [paddle.to_tensor(images), paddle.to_tensor(numbers.integers(0, CLASSES, (rows, 1)))]


def _mlp() -> list[Any]:
    layers: list[Any] = [LayerDesc(nn.Embedding, VOCABULARY, WIDTH), lambda x: x.flatten(1)]
    width = LENGTH * WIDTH
    for _ in range(4):
        layers += [LayerDesc(nn.Linear, width, WIDTH), LayerDesc(nn.LayerNorm, WIDTH)]
        layers.append(nn.functional.relu)
        width = WIDTH
    return [*layers, LayerDesc(nn.Linear, width, CLASSES)]


def _conv_net() -> list[Any]:
    return [
        LayerDesc(nn.Conv2D, 1, 4, 3, padding=1),
        LayerDesc(nn.ReLU),
        LayerDesc(nn.MaxPool2D, 2),
        LayerDesc(nn.Conv2D, 4, 6, 3, padding=1),
        LayerDesc(nn.BatchNorm2D, 6),
        LayerDesc(nn.ReLU),
        LayerDesc(nn.Conv2D, 6, 6, 3, padding=1),
        LayerDesc(nn.ReLU),
        LayerDesc(nn.MaxPool2D, 2),
        LayerDesc(nn.Flatten),
        LayerDesc(nn.Linear, 54, 16),
        LayerDesc(nn.ReLU),
        LayerDesc(nn.Linear, 16, CLASSES),
    ]


def _gpt() -> list[Any]:
    blocks = [LayerDesc(kind) for _ in range(4) for kind in (Attention, FeedForward)]
    return [
        LayerDesc(Embedding),
        *blocks,
        LayerDesc(nn.LayerNorm, WIDTH),
        LayerDesc(nn.Linear, WIDTH, VOCABULARY),
    ]


def loss(output: Any, labels: Any) -> Any:
    """The mean cross entropy of all tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


MODELS = {
    "mlp": Model(_mlp, _token_batch(False), nn.CrossEntropyLoss()),
    "convolutions": Model(_conv_net, _image_batch, nn.CrossEntropyLoss()),
    "gpt": Model(_gpt, _token_batch(True), loss),
}


#: The fully qualified names of what the entries share.
SHARED = ("shared_layers.embed.scale", "shared_layers.embed.table.weight")


class Tokens(nn.Layer):
    """An embedding that shows its weight as a property, as most models do, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = self.create_parameter([WIDTH])

    @property
    def embedding_weight(self) -> Any:
        """The tied weight."""
        return self.table.weight

    def forward(self, ids: Any) -> Any:
        return self.table(ids) * self.scale


class Head(nn.Layer):
    """A head that has the embedding's weight and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, VOCABULARY)
        self.table = self.create_parameter([VOCABULARY, WIDTH])

    @property
    def embedding_weight(self) -> Any:
        """The tied weight."""
        return self.table

    def forward(self, x: Any) -> Any:
        return paddle.matmul(x, self.table, transpose_y=True) + self.projection(x)


def logits(tokens: Tokens, x: Any) -> Any:
    """The head, as a forward_func."""
    return paddle.matmul(x, tokens.embedding_weight, transpose_y=True)


def again(tokens: Tokens, x: Any) -> Any:
    """A use in the middle: the most likely token's row once more, and the table's mean."""
    return x + tokens(x.mean(-1).astype("int64") * 0 + 1) + tokens.embedding_weight.mean()


def tied(forward_func: Any = None, attributes: Any = "embedding_weight") -> Any:
    """An entry that shares the embedding."""
    return SharedLayerDesc("embed", Tokens, forward_func, attributes)


def layers(middle: bool = True) -> list[Any]:
    """9 entries of which 2 or, with ``middle``, 3 share one embedding."""
    return [
        tied(),
        LayerDesc(FeedForward),
        LayerDesc(FeedForward),
        nn.functional.tanh,
        tied(again) if middle else LayerDesc(nn.LayerNorm, WIDTH),
        LayerDesc(FeedForward),
        LayerDesc(FeedForward),
        LayerDesc(nn.LayerNorm, WIDTH),
        tied(logits),
    ]


ONE_STAGE: Schedule = build("ZBH1", ranks=1, micro_batches=3)


def numbers(*shape: int, seed: int = 0) -> Any:
    """A tensor that needs a gradient."""
    values = np.random.default_rng(seed).standard_normal(shape).astype("float32")
    return paddle.to_tensor(values, stop_gradient=False)


def shaken(layer: Any) -> Any:
    """The layer with parameters that are no longer what it began with."""
    for seed, parameter in enumerate(layer.parameters()):
        if not parameter.stop_gradient:
            moved = numbers(*parameter.shape, seed=seed + 9).detach()
            parameter.set_value(parameter + moved.astype(parameter.dtype))
    return layer


def gradients_in_w(split: SplitBackward) -> list[str]:
    """Names of the parameters whose gradients were computed in W alone, in the first batch."""
    kinds_by_name = split.arrivals.kinds if split.arrivals else {}
    return [name for name, kinds in kinds_by_name.items() if kinds == {"W"}]


class Steps:
    """Runs forward, I and W of one layer as a stage does."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.split = SplitBackward(ONE_STAGE, lambda stage: {0: layer})

    def forward(self, micro_batch: int, *inputs: Any) -> Any:
        with self.split.recording(0, micro_batch):
            return self.layer(*inputs)

    def input_grads(self, micro_batch: int, root: Any) -> None:
        with self.split.input_grads(0, micro_batch):
            root.backward()

    def weight_grads(self, micro_batch: int) -> None:
        self.split.weight_grads(0, micro_batch)
        self.split.release(0, micro_batch)

    def gradients_in_w(self) -> list[str]:
        return gradients_in_w(self.split)


def score(output: Any) -> Any:
    """A number whose gradient differs from element to element."""
    if isinstance(output, (tuple, list)):
        return sum(map(score, output), paddle.zeros([]))
    weights = paddle.arange(output.size, dtype="float32").reshape(output.shape)
    return (output * paddle.sin(weights + 1)).sum()


def grads_of(layer: Any) -> list[bytes | None]:
    return [None if p.grad is None else p.grad.numpy().tobytes() for p in layer.parameters()]


class Leaf(nn.Layer):
    """Parameters of its own, by name and shape, and what is computed with an input and them."""

    def __init__(self, compute: Callable[..., Any], **shapes: Sequence[int]) -> None:
        super().__init__()
        self.compute = compute
        for name, shape in shapes.items():
            setattr(self, name, self.create_parameter(shape))

    def forward(self, x: Any) -> Any:
        return self.compute(x, *self._parameters.values())


class Called(nn.Layer):
    """Layers, and how they are called."""

    def __init__(self, call: Callable[..., Any], *parts: Any) -> None:
        super().__init__()
        self.call, self.parts = call, nn.LayerList(parts)

    def forward(self, x: Any) -> Any:
        return self.call(x, *self.parts)


class Around(nn.Layer):
    """A layer, and how it is called."""

    def __init__(self, inner: Any, call: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: Any) -> Any:
        return self.call(self.inner, x)


class Parent(nn.Layer):
    """Has a parameter of its own beside a sublayer's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shift = self.create_parameter([4])

    def forward(self, x: Any) -> Any:
        return self.linear(x) + self.shift


def shifted(compute: Callable[..., Any] = paddle.add) -> Leaf:
    """A leaf with one vector; by default its input's gradient is its output's gradient itself."""
    return Leaf(compute, shift=[4])


def fused_and_split(
    make: Callable[[], Any], inputs: list[Any], all_wait: bool = True
) -> tuple[Any, Any, Steps]:
    """Gradients of inputs and parameters, and buffers: by autograd, and with all W at the end."""
    paddle.seed(5)
    plain = shaken(make())
    paddle.seed(5)
    steps = Steps(shaken(make()))
    results = []
    for x in inputs:
        y = x.detach()
        y.stop_gradient = x.stop_gradient
        score(plain(y)).backward()
        results.append(y)
    for k, x in enumerate(inputs):
        root = score(steps.forward(k, x))
        steps.input_grads(k, root)
    assert all(grad is None for grad in grads_of(steps.layer)) == all_wait
    for k in range(len(inputs)):
        steps.weight_grads(k)
    expected = ([x.grad for x in results], grads_of(plain), bits(plain.state_dict()))
    got = ([x.grad for x in inputs], grads_of(steps.layer), bits(steps.layer.state_dict()))
    for pair in (expected, got):
        pair[0][:] = [None if grad is None else grad.numpy().tobytes() for grad in pair[0]]
    return expected, got, steps
