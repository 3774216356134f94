"""A captured model that is profiled node by node and built by a plan."""

from __future__ import annotations

from dataclasses import replace

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.errors import ConfigError
from tests.capture.beside import images, trained
from tests.jobs import job


class Residual(nn.Layer):
    """Two convolutions beside a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2D(8, 8, 3, padding=1)
        self.second = nn.Conv2D(8, 8, 3, padding=1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + self.second(nn.functional.relu(self.first(x)))


class Small(nn.Layer):
    """Convolutions with residuals, and glue."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2D(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2D(8)
        self.one, self.two, self.three = Residual(), Residual(), Residual()
        self.head = nn.Linear(8, 10)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = nn.functional.relu(self.norm(self.stem(x)))
        x = self.three(self.two(self.one(x)))
        return self.head(x.mean([2, 3]))


def test_a_captured_model_is_profiled_planned_and_trained_to_the_same_bits() -> None:
    data = images(8, 8)
    with job(2):
        loss = nn.CrossEntropyLoss()
        pipe = fleetpipe.pipeline(Small(), (data[0][:2],), loss_fn=loss, no_split=(Residual,))
        profile = fleet.distributed_model(pipe).profile(data)
        named = [layer.name for layer in profile.layers]
        assert named[:3] == ["inputs", "stem", "norm"]
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
        assert {profile.layers[n].name for part in again for n in part} >= {"one", "two", "three"}
        made = replace(free, recompute=again)
    for each in (free, made):
        with job(2):
            options = {"split_spec": each, "loss_fn": loss, "no_split": (Residual,)}
            result = trained(Small, data, **options)
            assert result.differing == []
            assert result.model.schedule == each.schedule
            assert result.pipe.partition.boundaries == each.partition.boundaries
    other = nn.Sequential(nn.Conv2D(3, 8, 3), nn.Conv2D(8, 8, 3))
    with job(2), pytest.raises(ConfigError, match="another model"):
        fleetpipe.pipeline(other, (data[0][:2],), split_spec=free)
