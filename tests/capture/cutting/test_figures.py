"""Figures of a capture: what a user reads of it, and nodes that are measured and planned."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet, log
from fleetpipe.capture.cutting.auto import measure_nodes
from fleetpipe.capture.tracing.capturing import Capturer
from fleetpipe.errors import CaptureError, ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.profiling.plan_commands import estimates
from tests.capture.models import GPT, WIDTH, Encoded, UNet, images, tokens, trained
from tests.capture.test_models import PIXELS, of_pixels
from tests.pipelines import ROWS, job, pipeline


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


def picture() -> Any:
    return paddle.randn([4 * ROWS, 3, 8, 8])


def nbytes(tensors: list[Any]) -> int:
    return sum(tensor.size * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("build", [ViT, GPT])  # of which the second has a tied embedding
def test_a_parameter_counts_once_where_it_is_used_first(build: Callable[[], Any]) -> None:
    inputs = picture() if build is ViT else tokens(4 * ROWS)
    with job(2):
        pipe = fleetpipe.pipeline(
            build(), inputs[:ROWS], lambda out, _: out.mean(), ["blocks.2"], verify=False
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


def test_the_nodes_stand_in_order_with_what_crosses() -> None:
    found = fleetpipe.explain(UNet(), paddle.static.InputSpec([None, 3, 16, 16], "float32"))
    rows = str(found).splitlines()
    assert len(rows) == 1 + 22
    assert rows[0].split("  ")[0] == "node"
    # In the middle both skips cross, 2 x 4 x 16 x 16 and 2 x 8 x 8 x 8, and 2 x 8 x 4 x 4 itself.
    assert found.crossing[8] == 4 * (2048 + 1024 + 256)
    assert list(found.refused) == [12, 17]
    assert "before middle.0" in rows[9]
    assert "no: no call of a sublayer" in rows[13]
    assert sum(found.parameters) == sum(4 * tensor.size for tensor in UNet().state_dict().values())


def test_it_says_why_a_layer_is_not_opened() -> None:
    text = str(fleetpipe.explain(Encoded(), (tokens(2), tokens(2))))
    assert "not opened: transformer.encoder.layers.1: it is one of Paddle's" in text
    model = GPT(2)
    kind = type(model.blocks[0])
    text = str(fleetpipe.explain(model, tokens(2), no_split=[kind]))
    assert "not opened: blocks.1: its class is in no_split" in text


@pytest.mark.parametrize("rows", [2, 3])
def test_the_picture_has_every_node_and_every_use(rows: int) -> None:
    found = fleetpipe.explain(UNet(), paddle.randn([rows, 3, 16, 16]))
    text = found.graphviz()
    assert text.count("[label=") == 22 + sum(len(node.uses) for node in found.trace.nodes) + 1
    assert f'n2 -> n17 [label="float32[{rows}, 4, 16, 16]"];' in text


def test_the_graph_of_a_pipeline_has_its_stages_and_the_bytes_that_cross() -> None:
    pipe = fleetpipe.pipeline(
        UNet(), paddle.randn([2, 3, 16, 16]), split_spec=["middle", "up2"], verify=False
    )
    text = pipe.graphviz()
    assert [text.count(colour) for colour in ("#8fc7e8", "#f5c56b", "#86d1b3")] == [8, 5, 9]
    # The outer skip goes to the last stage, which takes 8 KiB of the one before too.
    assert text.count("8,192 bytes") == 2
    assert text.count("4,096 bytes") == text.count("1,024 bytes") == 1
    assert text.count("#b00020") == 4


def test_a_capture_that_takes_long_says_so_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow(nn.Layer):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            time.sleep(0.05)
            return x * 2

    monkeypatch.setattr(log, "_PATIENCE", 0.01)
    fleetpipe.explain(Slow(), paddle.ones([2, 3]))
    line = "capturing Slow: its forward runs in both modes, and on other numbers"
    assert caplog.messages.count(line) == 1


MEASURED_WIDTH, MEASURED_ROWS = 64, 64


class Heavy(nn.Layer):  # type: ignore[misc]
    """What takes longer than all light layers together."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = (
            nn.Linear(MEASURED_WIDTH, 64 * MEASURED_WIDTH),
            nn.Linear(64 * MEASURED_WIDTH, MEASURED_WIDTH),
        )

    def forward(self, x: Any) -> Any:
        return self.outer(nn.functional.relu(self.inner(x)))


class Stored(nn.Layer):  # type: ignore[misc]
    """A product whose weight is stored in one dtype and used in float32."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.weight = self.create_parameter([8, 8], dtype=dtype)

    def forward(self, x: Any) -> Any:
        return paddle.matmul(x, self.weight.astype("float32"))


def test_a_captured_model_is_cut_as_the_same_model_as_a_list_of_layers() -> None:
    inputs = paddle.randn([MEASURED_ROWS, MEASURED_WIDTH])
    light = [LayerDesc(nn.Linear, MEASURED_WIDTH, MEASURED_WIDTH) for _ in range(4)]
    with job(2, micro_batches=2, rows=MEASURED_ROWS):
        layers = pipeline([*light, LayerDesc(Heavy), LayerDesc(Heavy)], loss_fn=nn.MSELoss())
        batch = [paddle.concat([inputs, inputs]), paddle.zeros([2 * MEASURED_ROWS, MEASURED_WIDTH])]
        profile = layers.profile(batch)
    plan = fleetpipe.plan(profile, 2, 2, search=("partition",))
    plain = nn.Sequential(*(desc.build_layer() for desc in light), Heavy(), Heavy())
    captured = fleetpipe.pipeline(plain, inputs, num_stages=2, no_split=[Heavy], verify=False)
    # The inputs come first. An even cut would be before the third layer.
    assert captured.partition.boundaries[1] - 1 == plan.partition.boundaries[1] == 5


@pytest.mark.parametrize(
    ("dtype", "size"), [("float64", 8), ("float32", 4), ("float16", 2), ("bfloat16", 2)]
)
def test_memory_is_that_of_the_dtype(dtype: str, size: int) -> None:
    capturing = Capturer(nn.Sequential(Stored(dtype), Stored(dtype)), paddle.randn([4, 8]))
    costs = measure_nodes(capturing, capturing(capturing.example_signature, True), []).layers
    assert sum(cost.parameters for cost in costs) == 2 * 64 * size
    assert sum(cost.gradients for cost in costs) == 2 * 64 * size


class Spoils(nn.Layer):  # type: ignore[misc]
    """Writes into what the backward of an operation needs, which Paddle refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        y = nn.functional.relu(self.a(x))
        z = paddle.exp(y)
        z.add_(y)
        return self.b(z)


def test_a_model_whose_writes_spoil_its_own_backward_is_refused_with_what_to_do() -> None:
    with pytest.raises(CaptureError, match="what to do"):
        fleetpipe.pipeline(Spoils(), paddle.ones([4, 8]), num_stages=2)


def test_a_captured_model_is_profiled_planned_and_trained_to_the_same_bits() -> None:
    data = [images(8, 16)[0], PIXELS]
    with job(2):
        pipe = fleetpipe.pipeline(UNet(), (data[0][:2],), of_pixels)
        profile = fleet.distributed_model(pipe).profile(data)
        named = [layer.name for layer in profile.layers]
        assert named[:3] == ["inputs", "down1.0", "down1.1"]
        assert named[-1] == "outputs"
        # Glue may begin a stage only where a call beside it gives the place a name.
        assert profile.places is not None
        assert set(profile.places) < set(range(1, len(named)))
        free = fleetpipe.plan(profile, 2, 4)
        # What a small cap would give a larger model.
        again = tuple(
            tuple(n for n in range(part.start, part.end) if profile.layers[n].saved)
            for part in free.partition.stages
        )
        assert {profile.layers[n].name for part in again for n in part} >= {"down1.1", "up2.1"}
        made = replace(free, recompute=again)
    for each in (free, made):
        with job(2):
            result = trained(UNet, data, split_spec=each, loss_fn=of_pixels)
            assert result.differing == []
            assert result.model.schedule == each.schedule
            assert result.pipe.partition.boundaries == each.partition.boundaries
    other = nn.Sequential(nn.Conv2D(3, 8, 3), nn.Conv2D(8, 8, 3))
    with job(2), pytest.raises(ConfigError, match="another model"):
        fleetpipe.pipeline(other, (data[0][:2],), split_spec=free)
