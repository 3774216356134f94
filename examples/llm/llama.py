"""A Llama in plain Paddle: rotary positions, heads that share keys, a gated perceptron, RMSNorm.

``Llama`` is a model for one device, which ``fleetpipe.pipeline`` cuts. ``llama_layers`` is the same
as the list of layers of a ``PipelineLayer``, with the embedding's table in two stages where it is
tied. Parameters have the names of Hugging Face's ``LlamaForCausalLM`` behind its ``model.``.

Both take ids, or (ids, documents) of packed sequences. The blocks take slices: they keep keys and
values, so that ``fleetpipe.generate`` runs each token once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import paddle
from paddle import ParamAttr, nn
from paddle.nn import functional as F

from fleetpipe.dygraph import sequences, slices
from fleetpipe.fleet.meta_parallel import LayerDesc, SharedLayerDesc


@dataclass
class Shape:
    """The sizes of a Llama."""

    width: int = 320  # numbers of a token between layers
    blocks: int = 7  # layers of attention and perceptron
    heads: int = 10
    key_heads: int = 5  # heads of keys and values, each shared by as many heads
    perceptron: int = 864
    tied: bool = True  # whether the head is the embedding's table
    base: float = 10000.0  # of the rotary positions' wave lengths


class Linear(nn.Linear):
    takes_slices = True

    def __init__(self, inputs: int, outputs: int) -> None:
        weight = ParamAttr(initializer=nn.initializer.Normal(std=0.02))
        super().__init__(inputs, outputs, weight, bias_attr=False)


class Embedding(nn.Layer):
    """Takes ids, or (ids, documents), and returns (hidden, documents)."""

    takes_slices = True

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        normal = ParamAttr(initializer=nn.initializer.Normal(std=0.02))
        self.weight = self.create_parameter([vocabulary, width], normal)

    def forward(self, value: Any) -> Any:
        ids, documents = value if isinstance(value, (tuple, list)) else (value, None)
        return F.embedding(ids, self.weight), documents


def logits(embedding: Embedding, hidden: Any) -> Any:
    """Returns the scores of all tokens for each place."""
    return paddle.matmul(hidden, embedding.weight, transpose_y=True)


logits.takes_slices = True  # type: ignore[attr-defined]


class RMSNorm(nn.Layer):
    takes_slices = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([width], default_initializer=nn.initializer.Constant(1))

    def forward(self, value: Any) -> Any:
        # The last one comes behind the blocks, and needs their documents no more.
        hidden = value[0] if isinstance(value, (tuple, list)) else value
        return hidden * paddle.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def rotated(heads: Any, cos: Any, sin: Any) -> Any:
    """Turns each pair of numbers of a head, [rows, places, heads, size], by its place's angles."""
    first, second = heads.chunk(2, axis=-1)
    return heads * cos + paddle.concat([-second, first], axis=-1) * sin


def look_back(query: Any, key: Any, value: Any, each: int) -> Any:
    """Attention of the last places of a sequence to all, [rows, places, heads, size].

    Each head of keys and values serves ``each`` heads of queries.
    """
    key, value = (part.repeat_interleave(each, 2).transpose([0, 2, 1, 3]) for part in (key, value))
    scores = paddle.matmul(query.transpose([0, 2, 1, 3]), key, transpose_y=True)
    places, seen = scores.shape[2:]
    later = paddle.arange(seen) > paddle.arange(places).unsqueeze(-1) + (seen - places)
    shares = F.softmax(scores * query.shape[-1] ** -0.5 + later.astype(scores.dtype) * -1e9)
    return paddle.matmul(shares, value).transpose([0, 2, 1, 3])


class Attention(nn.Layer):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size, self.each = shape.width // shape.heads, shape.heads // shape.key_heads
        self.base = shape.base
        self.q_proj = Linear(shape.width, shape.heads * self.size)
        self.k_proj = Linear(shape.width, shape.key_heads * self.size)
        self.v_proj = Linear(shape.width, shape.key_heads * self.size)
        self.o_proj = Linear(shape.heads * self.size, shape.width)

    def forward(self, hidden: Any, documents: Any) -> Any:
        parts = (self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden))
        query, key, value = (part.reshape([0, 0, -1, self.size]) for part in parts)
        earlier = slices.earlier(self)
        cos, sin = self.waves(hidden.shape[1], sum(keys.shape[1] for keys, _ in earlier))
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        slices.keep(self, (key, value))
        if not paddle.in_dynamic_mode():  # paddle.jit.save
            seen = look_back(query, key, value, self.each)
        elif earlier:
            if documents is not None:
                raise ValueError("slices of packed sequences: give ids alone, or another schedule")
            key, value = (paddle.concat(parts, 1) for parts in zip(*earlier, (key, value)))
            seen = look_back(query, key, value, self.each)
        else:
            seen = sequences.attention(query, key, value, documents=documents)
        return self.o_proj(seen.reshape([0, 0, -1]))

    def waves(self, length: int, begin: int) -> tuple[Any, Any]:
        """Returns the cosines and sines of this rank's places, [places, 1, size]."""
        if paddle.in_dynamic_mode():
            places = sequences.places(length * sequences.sequence_ranks().ranks) + begin
        else:  # paddle.jit.save
            places = paddle.arange(length)
        speeds = self.base ** (paddle.arange(0, -self.size, -2, "float32") / self.size)
        angles = places.astype("float32").unsqueeze(-1) * paddle.concat([speeds, speeds])
        return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


class Perceptron(nn.Layer):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.width, shape.perceptron)
        self.up_proj = Linear(shape.width, shape.perceptron)
        self.down_proj = Linear(shape.perceptron, shape.width)

    def forward(self, hidden: Any) -> Any:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Block(nn.Layer):
    """Takes and returns (hidden, documents)."""

    takes_slices = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.width)
        self.mlp = Perceptron(shape)

    def forward(self, value: Any) -> Any:
        hidden, documents = value
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), documents)
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), documents


class Llama(nn.Layer):
    """Takes ids and documents, integers [rows, places]; returns logits [rows, places, tokens]."""

    def __init__(self, vocabulary: int, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = Embedding(vocabulary, shape.width)
        self.layers = nn.LayerList([Block(shape) for _ in range(shape.blocks)])
        self.norm = RMSNorm(shape.width)
        self.lm_head = None if shape.tied else Linear(shape.width, vocabulary)

    def forward(self, ids: Any, documents: Any = None) -> Any:
        value = self.embed_tokens((ids, documents))
        for block in self.layers:
            value = block(value)
        hidden = self.norm(value)
        return logits(self.embed_tokens, hidden) if self.lm_head is None else self.lm_head(hidden)


def llama_layers(vocabulary: int, shape: Shape) -> list[Any]:
    """Returns the same model as a list of layers, each built on the rank alone that has it."""
    middle = [LayerDesc(Block, shape) for _ in range(shape.blocks)]
    middle.append(LayerDesc(RMSNorm, shape.width))
    if not shape.tied:
        head = LayerDesc(Linear, shape.width, vocabulary)
        return [LayerDesc(Embedding, vocabulary, shape.width), *middle, head]
    table = {"shared_weight_attr": "weight", "vocabulary": vocabulary, "width": shape.width}
    head = SharedLayerDesc("table", Embedding, forward_func=logits, **table)
    return [SharedLayerDesc("table", Embedding, **table), *middle, head]


#: The label of a place that does not count.
IGNORED = -100


def next_token_loss(logits: Any, labels: Any) -> Any:
    """Returns the mean loss of the labels that count; ``nn.CrossEntropyLoss`` divides by all."""
    counted = (labels != IGNORED).astype("float32").sum().clip(min=1.0)
    return F.cross_entropy(logits, labels.unsqueeze(-1), reduction="sum") / counted


# fleetpipe weights micro-batches by the labels that count.
next_token_loss.counted = lambda labels: (labels != IGNORED).sum()  # type: ignore[attr-defined]
