"""Parameters and buffers in every figure: each counts once, where the first node uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.profiling.estimating import estimates
from tests.capture.models import LENGTH, WIDTH, WORDS, tokens
from tests.jobs import ROWS, job


class Mixer(nn.Layer):  # type: ignore[misc]
    """Mixes patches, and features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(5, 5)
        self.feed = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        x = x + self.mix(self.norm(x).transpose([0, 2, 1])).transpose([0, 2, 1])
        return x + nn.functional.gelu(self.feed(x))


class ViT(nn.Layer):  # type: ignore[misc]
    """A class token, positions, and a scale at the end, all of the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2D(3, WIDTH, 4, 4)
        self.token = self.create_parameter([1, 1, WIDTH])
        self.positions = self.create_parameter([1, 5, WIDTH])
        self.blocks = nn.LayerList([Mixer() for _ in range(4)])
        self.scale = self.create_parameter([WIDTH])
        self.frozen = self.create_parameter([7])
        self.frozen.stop_gradient = True
        self.unused = self.create_parameter([3])
        self.register_buffer("order", paddle.arange(5)[::-1].astype("int64"))
        self.register_buffer("fading", paddle.ones([5], "float16"), persistable=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Any) -> Any:
        x = self.patch(x).flatten(2).transpose([0, 2, 1])
        x = paddle.concat([self.token.expand([x.shape[0], -1, -1]), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        x = x[:, self.order] * self.fading.astype("float32").unsqueeze(-1)
        return self.head(x[:, 0] * self.scale + self.frozen.sum())


class Positioned(nn.Layer):  # type: ignore[misc]
    """A language model whose positions are its own parameter, with a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = self.create_parameter([LENGTH, WIDTH])
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, ids: Any) -> Any:
        x = self.blocks(self.embed(ids) + self.positions)
        return paddle.matmul(x, self.embed.weight, transpose_y=True)


def picture() -> Any:
    return paddle.randn([4 * ROWS, 3, 8, 8])


def words() -> Any:
    return tokens(4 * ROWS)


MODELS = pytest.mark.parametrize(
    ("build", "data", "cut"), [(ViT, picture, "blocks.2"), (Positioned, words, "blocks.2")]
)


def nbytes(tensors: list[Any]) -> int:
    return sum(tensor.size * tensor.element_size() for tensor in tensors)


@MODELS
def test_a_parameter_counts_once_where_it_is_used_first(
    build: Callable[[], Any], data: Callable[[], Any], cut: str
) -> None:
    inputs = data()
    with job(2):
        pipe = fleetpipe.pipeline(
            build(), inputs[:ROWS], split_spec=[cut], loss_fn=lambda out, _: out.mean()
        )
        profile = fleet.distributed_model(pipe).profile((inputs, inputs))
    tensors = pipe.plain.state_dict()
    everything = [*pipe.plain.parameters(), *pipe.plain.buffers()]
    trained = [t for t in pipe.plain.parameters() if not t.stop_gradient]
    kept = [t for t in everything if t.stop_gradient]

    # Stage tables: numbers, by the first stage that uses a parameter.
    table = pipe.counted_partition().stages
    for stage in range(2):
        own = [
            tensors[name].size
            for name, users in pipe.users.items()
            if users[0] == stage and not tensors[name].stop_gradient
        ]
        assert table[stage].parameters == sum(own) > 0

    # Bytes of each layer.
    sizes = [(layer.parameters, layer.buffers) for layer in profile.layers]
    assert tuple(map(sum, zip(*sizes))) == (nbytes(trained), nbytes(kept))
    assert sum(layer.gradients for layer in profile.layers) == nbytes(trained)

    # What a plan and an estimate take these for: all parameters, gradients and moments.
    plan = fleetpipe.plan(profile, 2, 4, search="partition")
    assert sum(stage.parameters for stage in plan.stages) == nbytes(trained)
    assert sum(stage.buffers for stage in plan.stages) == nbytes(kept)
    for rank, stage in enumerate(plan.stages):
        assert plan.predicted.peak_bytes[rank] > 4 * stage.parameters + stage.buffers
    for one in estimates(profile, [2], 4):
        assert sum(one.peak_bytes) > 4 * nbytes(trained) + nbytes(kept)

    # What explain says.
    found = fleetpipe.explain(build(), inputs[:ROWS])
    first, *others = map(sum, sizes)
    assert [*found.parameters, 0] == others
    assert first == nbytes([pipe.plain.unused] if build is ViT else [])


def test_the_nodes_of_a_vit_have_what_they_use_themselves() -> None:
    found = fleetpipe.explain(ViT(), picture())
    named = {node.name: size for node, size in zip(found.trace.nodes, found.parameters)}
    assert named["expand"] == 4 * WIDTH
    assert named["blocks.3.feed"] == 4 * (WIDTH + 1) * WIDTH
    # Eight bytes for each place, and two for each factor.
    assert {size for size in found.parameters if size in (40, 10)} == {40, 10}
    assert sum(found.parameters) == nbytes([*ViT().parameters(), *ViT().buffers()]) - 4 * 3
