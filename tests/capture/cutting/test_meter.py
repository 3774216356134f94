"""Nodes are measured by the meter of layers, and cut by the search of ``fleetpipe.plan``."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe.capture.cutting.node_meter import measure_nodes
from fleetpipe.capture.tracing.capturing import Capturing
from fleetpipe.capture.tracing.signature import signature_of
from fleetpipe.errors import CaptureError, PartitionError
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.profiling import Profile
from tests.jobs import job
from tests.pipelines import pipeline

WIDTH, ROWS = 64, 64


class Heavy(nn.Layer):  # type: ignore[misc]
    """What takes longer than all light layers together."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.outer(nn.functional.relu(self.inner(x)))


class Stored(nn.Layer):  # type: ignore[misc]
    """A product whose weight is stored in one dtype and used in float32."""

    def __init__(self, dtype: str, width: int = 8) -> None:
        super().__init__()
        self.weight = self.create_parameter([width, width], dtype=dtype)

    def forward(self, x: Any) -> Any:
        return paddle.matmul(x, self.weight.astype("float32"))


def profile_of(model: nn.Layer, inputs: Any) -> Profile:
    capturing = Capturing(model, inputs)
    return measure_nodes(capturing, capturing(signature_of(capturing.example), True), [])


def test_a_captured_model_is_cut_as_the_same_model_as_a_list_of_layers() -> None:
    inputs = paddle.randn([ROWS, WIDTH])
    light = [LayerDesc(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    with job(2, micro_batches=2, rows=ROWS):
        layers = pipeline([*light, LayerDesc(Heavy), LayerDesc(Heavy)], loss_fn=nn.MSELoss())
        batch = [paddle.concat([inputs, inputs]), paddle.zeros([2 * ROWS, WIDTH])]
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
    inputs = paddle.randn([4, 8])
    costs = profile_of(nn.Sequential(Stored(dtype), Stored(dtype)), inputs).layers
    assert sum(cost.parameters for cost in costs) == 2 * 64 * size
    assert sum(cost.gradients for cost in costs) == 2 * 64 * size


def test_a_limit_of_memory_counts_the_bytes_of_the_dtype() -> None:
    # Weight, gradient and two moments: 32 KiB of bfloat16, 128 of float64; two forwards hold 32.
    for dtype, fits in (("bfloat16", True), ("float64", False)):
        plain = nn.Sequential(Stored(dtype, 64), Stored(dtype, 64))
        options = {"num_stages": 2, "verify": False, "memory_cap": 80 * 1024}
        if fits:
            assert (
                len(fleetpipe.pipeline(plain, paddle.ones([1, 64]), **options).choice.seconds) == 2
            )
        else:
            with pytest.raises(PartitionError, match="fit into memory"):
                fleetpipe.pipeline(plain, paddle.ones([1, 64]), **options)


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
