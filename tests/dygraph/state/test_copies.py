"""Copies of layers train as the originals do."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn

from fleetpipe.dygraph.state.copies import copy_layers
from fleetpipe.paddle_api.tensor import shares_memory


def test_a_copy_has_names_attributes_hooks_and_modes() -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1D(3), nn.Linear(3, 2))
    weight, bias = layer[0].weight, layer[2].bias
    weight.lr_group, weight.is_firstly_shared, bias.need_clip = "slow", False, False
    layer[2].register_forward_post_hook(lambda *values: values[-1] * 2)
    layer[1].eval()
    layer[0].scale = [1, 2]
    other = copy_layers([layer, paddle.tanh], [layer, paddle.tanh], [weight])[0]
    assert [p.name for p in other.parameters()] == [p.name for p in layer.parameters()]
    assert (other[0].weight.lr_group, other[2].bias.need_clip) == ("slow", False)
    # What a rank says of its own copy of a tied weight is not true of another.
    assert not hasattr(other[0].weight, "is_firstly_shared")
    assert [part.training for part in other] == [True, False, True]
    x = paddle.randn([4, 3])
    assert (other(x) == layer(x)).all()
    assert (other[0].scale, other[0].scale is layer[0].scale) == ([1, 2], False)
    assert shares_memory(other[0].weight, weight)
    assert not shares_memory(other[2].bias, bias)


class CopiesItself(nn.Layer):
    """Is copied by a method of its own, which knows no memo."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        other = CopiesItself()
        other.set_state_dict(self.state_dict())
        return other


def test_a_layer_that_copies_itself_keeps_names_too() -> None:
    layer = CopiesItself()
    other = copy_layers(layer, [layer])
    assert [p.name for p in other.parameters()] == [p.name for p in layer.parameters()]
    assert (other.linear.weight == layer.linear.weight).all()
