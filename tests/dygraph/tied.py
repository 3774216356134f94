"""A language model whose embedding is its head too, and its list of layers for any tests."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn

from fleetpipe.fleet.meta_parallel import LayerDesc, SharedLayerDesc
from tests.dygraph.models import VOCABULARY, WIDTH, FeedForward

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


def loss(output: Any, labels: Any) -> Any:
    """The mean cross entropy of all tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())
