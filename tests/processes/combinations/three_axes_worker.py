"""A tiny GPT that the ranks of a job train: the losses, norms and whole parameters at the end."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional

from fleetpipe import fleet
from fleetpipe.dygraph.tensor_parallel import (
    dropout,
    parallel_matmul,
    share_of,
    whole_value,
)
from fleetpipe.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    ParallelCrossEntropy,
    PipelineLayer,
    RowParallelLinear,
    SharedLayerDesc,
    VocabParallelEmbedding,
)
from fleetpipe.job.job import pipeline_group
from tests import jobs

VOCABULARY, WIDTH, HEADS, LENGTH, BLOCKS = 16, 8, 2, 6, 4
MICRO_BATCHES, ROWS, STEPS = 8, 1, 4
DROP = 0.1


class Embedding(nn.Layer):
    """Tokens; its weight is also the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = VocabParallelEmbedding(VOCABULARY, WIDTH)

    @property
    def weight(self) -> Any:
        return self.tokens.weight

    def forward(self, ids: Any) -> Any:
        return self.tokens(ids)


class Places(nn.Layer):
    """Adds a vector for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(DROP)

    def forward(self, x: Any) -> Any:
        return self.drop(x + self.places(paddle.arange(LENGTH)))


class Block(nn.Layer):
    """Causal attention and two products, with dropout of whole and of cut activations."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = share_of(HEADS, "num_heads")
        self.norms = nn.LayerList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        # No bias: the gradient of a key's is nothing but rounding, which AdamW would enlarge.
        self.qkv = ColumnParallelLinear(WIDTH, 3 * WIDTH, gather_output=False)
        self.out = RowParallelLinear(WIDTH, WIDTH, input_is_parallel=True)
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, has_bias=True, gather_output=False)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, input_is_parallel=True)
        self.drop = nn.Dropout(DROP)

    def forward(self, x: Any) -> Any:
        x = x + self.drop(self._attention(self.norms[0](x)))
        y = dropout(functional.gelu(self.up(self.norms[1](x))), DROP, training=self.training)
        return x + self.drop(self.down(y))

    def _attention(self, x: Any) -> Any:
        size = WIDTH // HEADS
        split = self.qkv(x).reshape([-1, LENGTH, self.heads, 3 * size]).transpose([0, 2, 1, 3])
        query, key, value = split.split(3, axis=-1)
        scores = paddle.matmul(query, key, transpose_y=True) / math.sqrt(size)
        mask = paddle.triu(paddle.full([LENGTH, LENGTH], -1e9), 1)
        shares = dropout(functional.softmax(scores + mask), DROP, 1, training=self.training)
        seen = paddle.matmul(shares, value).transpose([0, 2, 1, 3])
        return self.out(seen.reshape([-1, LENGTH, self.heads * size]))


def head(embedding: Any, x: Any) -> Any:
    return parallel_matmul(x, embedding.weight)


class Criterion(nn.Layer):
    """The mean loss of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.entropy = ParallelCrossEntropy()

    def forward(self, logits: Any, labels: Any) -> Any:
        return self.entropy(logits, labels).mean()


def layers() -> list[Any]:
    shared = ("embed", Embedding)
    return [
        SharedLayerDesc(*shared),
        LayerDesc(Places),
        *[LayerDesc(Block) for _ in range(BLOCKS)],
        LayerDesc(nn.LayerNorm, WIDTH),
        SharedLayerDesc(*shared, forward_func=head),
    ]


def begin(degrees: dict[str, int], schedule: str) -> Any:
    """Begins a job; returns the wrapped model."""
    chunks = 2 if schedule == "Interleaved1F1B" else 1
    order = fleet.DistributedStrategy().hybrid_parallel_order[::-1] if schedule == "ZBH1" else ()
    micro_batches = MICRO_BATCHES // degrees["dp"]
    jobs.begin(micro_batches=micro_batches, schedule=schedule, rows=ROWS, order=order, **degrees)
    paddle.seed(7)
    hcg = fleet.get_hybrid_communicate_group()
    group = hcg.get_model_parallel_group()
    model = PipelineLayer(
        layers(),
        topology=hcg.topology(),
        loss_fn=Criterion(),
        seg_method="layer:Block",
        num_virtual_pipeline_stages=chunks,
        # The single model keeps its activations.
        recompute_interval=1 if degrees["mp"] > 1 else 0,
        recompute_ctx={"mp_group": group, "offload": False, "partition": False},
    )
    return fleet.distributed_model(model)


def data(step: int, degrees: dict[str, int]) -> list[Any]:
    """This replica's part of the batch of a step."""
    ids = np.random.default_rng(step).integers(0, VOCABULARY, (MICRO_BATCHES * ROWS, LENGTH + 1))
    rows = len(ids) // degrees["dp"]
    own = ids[fleet.get_hybrid_communicate_group().get_data_parallel_rank() * rows :][:rows]
    return [paddle.to_tensor(own[:, :-1]), paddle.to_tensor(own[:, 1:])]


def whole_norm(model: Any) -> float:
    """The norm of all gradients: gathers every one whole, each name once."""
    own = {
        name: whole_value(tensor.grad, tensor)
        for name, tensor in model.layers.state_dict().items()
        if tensor.grad is not None
    }
    named = {name: grad for part in pipeline_group().all_gather(own) for name, grad in part.items()}
    squares = [float((grad.astype("float64") ** 2).sum()) for grad in named.values()]
    return math.sqrt(math.fsum(squares))


def train(degrees: dict[str, int], schedules: tuple[str, ...]) -> list[dict[str, Any]]:
    """Trains under each schedule; with degrees of 1 the single model, on the same micro-batches.

    Returns the losses, the norm of all gradients of each step, and the parameters, by name.
    """
    return [_trained(degrees, schedule) for schedule in schedules]


def _trained(degrees: dict[str, int], schedule: str) -> dict[str, Any]:
    model = begin(degrees, schedule)
    optimizer = fleet.distributed_optimizer(
        paddle.optimizer.AdamW(
            0.002,
            # Above the rounding of the smallest gradients, which AdamW would make full steps of.
            epsilon=1e-5,
            parameters=model.parameters(),
            grad_clip=nn.ClipGradByGlobalNorm(0.5),
        )
    )
    norms: list[float] = []
    step_once = optimizer.step

    def step() -> None:
        norms.append(whole_norm(model))
        step_once()

    optimizer.step = step
    losses = [float(model.train_batch(data(i, degrees), optimizer)) for i in range(STEPS)]
    state = {name: tensor.numpy() for name, tensor in model.layers.full_state_dict().items()}
    fleet.shutdown()
    return {**state, "losses": np.array(losses), "norms": np.array(norms)}
