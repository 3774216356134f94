"""Names of a whole model: the pipeline's, and those of the plain model that it was made of."""

from __future__ import annotations

from typing import Any

import pytest
from paddle import nn

from fleetpipe.errors import CheckpointError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
from tests.pipelines import bits


class Plain(nn.Layer):
    """Declares its layers in the other order than it runs them; both have the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(2, 2)
        self.first = nn.Linear(2, 2)


@pytest.fixture
def pipe() -> Any:
    layers = PipelineLayer([LayerDesc(nn.Linear, 2, 2) for _ in range(2)], num_stages=1)
    layers.state.plain_names = {
        f"{name}.{part}": f"{index}.{part}"
        for name, index in (("second", 1), ("first", 0))
        for part in ("weight", "bias")
    }
    return layers


def test_a_plain_models_values_are_found_by_its_own_names(pipe: Any) -> None:
    plain = Plain()
    pipe.load_from(plain)
    own = pipe.own_state()
    assert bits(own)["0.weight"] == bits(plain.state_dict())["first.weight"]
    assert pipe.state.names_in(plain)["first.weight"] == "0.weight"
    other = Plain()
    pipe.copy_to(other)
    assert bits(other.state_dict()) == bits(plain.state_dict())


def test_names_of_the_pipeline_and_an_order_still_count(pipe: Any) -> None:
    sequential = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe.load_from(sequential)
    assert list(bits(pipe.own_state()).values()) == list(bits(sequential.state_dict()).values())


def test_shapes_are_looked_at_under_the_plain_models_names_too(pipe: Any) -> None:
    plain = Plain()
    plain.first = nn.Linear(2, 3)
    with pytest.raises(CheckpointError, match=r"does not fit the pipeline's '0\.weight'"):
        pipe.load_from(plain)
