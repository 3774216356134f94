"""Profiles of models that are hard to cut, in the form of cost files."""

from __future__ import annotations

import random
from dataclasses import replace

from fleetpipe.profiling import LayerCost, Link, Profile

MIB = 2**20

BLOCK = LayerCost(
    "Block",
    forward=1e-3,
    backward=2e-3,
    input_grad=1e-3,
    weight_grad=1e-3,
    parameters=4 * MIB,
    gradients=4 * MIB,
    output=MIB,
    held=8 * MIB,
    held_split=9 * MIB,
    waiting=5 * MIB,
    working=2 * MIB,
    saved=7 * MIB,
)


def times(layer: LayerCost, factor: float, name: str = "") -> LayerCost:
    """A layer that takes ``factor`` times as long."""
    return replace(
        layer,
        name=name or layer.name,
        forward=layer.forward * factor,
        backward=layer.whole * factor,
        input_grad=None if layer.input_grad is None else layer.input_grad * factor,
        weight_grad=None if layer.weight_grad is None else layer.weight_grad * factor,
    )


def whole_only(profile: Profile) -> Profile:
    """The profile without I and W."""
    layers = (replace(layer, input_grad=None, weight_grad=None) for layer in profile.layers)
    return replace(profile, layers=tuple(layers))


def even(blocks: int = 8) -> Profile:
    """Blocks that are all alike."""
    return Profile((BLOCK,) * blocks)


def big_vocabulary(blocks: int = 24) -> Profile:
    """A cheap embedding, blocks, and a head that takes as long as four of them."""
    embedding, head = times(BLOCK, 0.1, "Embedding"), times(BLOCK, 4, "Head")
    return Profile((embedding, *[BLOCK] * blocks, head))


def uneven(blocks: int = 26, seed: int = 0) -> Profile:
    """Layers of very different cost."""
    numbers = random.Random(seed)
    factors = [numbers.choice((0.3, 1, 1, 2.5)) for _ in range(blocks)]
    return Profile(tuple(times(BLOCK, factor) for factor in factors))


def slow_link(ranks: int, blocks: int = 24) -> Profile:
    """Blocks alike, and a link in the middle that takes as long as two of them."""
    links = [Link(2e-3 if rank == ranks // 2 - 1 else 3e-5) for rank in range(ranks)]
    return even(blocks).with_links(*links)
