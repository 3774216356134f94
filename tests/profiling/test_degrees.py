"""Costs of layers whose experts and sequences are split over another number of ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fleetpipe.errors import ConfigError
from fleetpipe.profiling import (
    LayerDegrees,
    Link,
    PipelinePlan,
    Profile,
    Transfer,
    plan,
    recosted,
)
from tests.profiling.models import BLOCK

MIXTURE = replace(
    BLOCK,
    name="Mixture",
    parameters=5 << 20,
    gradients=5 << 20,
    expert_share=0.5,
    expert_parameters=4 << 20,
    routed=10**6,
    loads=((30, 30, 30, 10),),
)
ATTENTION = replace(BLOCK, name="Attention", queries=8 * 10**5, keys=4 * 10**5, heads=(6,))
LINK, BUSY = Link(1e-5, 1e-9), Transfer(1e-4, 1e-4, 1e-9)
PROFILE = Profile((ATTENTION, MIXTURE), BLOCK, links=(LINK,), transfer=BUSY)


def test_experts_are_spread_over_more_ranks() -> None:
    priced = PROFILE.with_degrees(ep=2)
    attention, mixture = priced.layers
    assert (attention, priced.loss) == (ATTENTION, BLOCK)
    # A megabyte of experts is not spread; of the state that follows the gradients neither.
    assert (mixture.parameters, mixture.gradients) == (3 << 20, 3 << 20)
    # Tokens there and back, forward and backward, one half to this rank itself; and their counts.
    assert (mixture.exchanges, mixture.exchanged) == (5, 2 * 10**6)
    dense = replace(PROFILE, layers=(replace(MIXTURE, loads=()), MIXTURE)).with_degrees(ep=2)
    assert [layer.parameters >> 20 for layer in dense.layers] == [5, 3]
    # The first two experts have 60 of 100 tokens, 1.2 of an even share; half of F is of experts.
    busy = (5 * 2e-4 + 2 * 2e6 * 1e-9) / 2
    assert mixture.forward == pytest.approx(1e-3 * 1.1 + busy)
    assert mixture.backward == pytest.approx(2e-3 * 1.1 + busy)
    assert mixture.weight_grad == pytest.approx(1e-3 * 1.1)
    waits = (5 * 1e-5 + 2e6 * 1e-9) / 2
    stage = priced.stages.stage(1, 2)
    assert stage.exchange == pytest.approx(waits)
    assert stage.forward == pytest.approx(mixture.forward + BLOCK.forward + waits)


def test_sequences_are_split_over_more_ranks() -> None:
    attention, mixture = PROFILE.with_degrees(sep=2).layers
    assert (attention.held, mixture.held, attention.parameters) == (4 << 20, 4 << 20, 4 << 20)
    # Of half of the places: queries, keys and outputs forward, their gradients backward.
    assert (attention.exchanges, attention.exchanged) == (4, 10**6)
    busy = (4 * 2e-4 + 2 * 1e6 * 1e-9) / 2
    assert attention.forward == pytest.approx(5e-4 + busy)
    assert (mixture.forward, mixture.exchanges) == (5e-4, 0)
    # What is exchanged along mp is of half of the places too.
    parts = replace(PROFILE, layers=(ATTENTION, replace(BLOCK, exchanges=2, exchanged=600)))
    layer = parts.with_degrees(sep=2).layers[1]
    assert (layer.exchanges, layer.exchanged) == (2, 300)
    ring = PROFILE.with_degrees(cp=2).layers[0]
    assert (ring.exchanges, ring.exchanged) == (6, 5 * 10**5)
    both = PROFILE.with_degrees(ep=2, sep=2).layers[1]
    assert (both.exchanges, both.exchanged, both.routed) == (5, 10**6, 5 * 10**5)


def test_each_attention_of_a_layer_exchanges() -> None:
    layer = replace(ATTENTION, heads=(6, 2))
    profile = Profile((layer,))
    assert Profile.loads(profile.dumps()) == profile
    assert profile.with_degrees(sep=2).layers[0].exchanges == 8
    assert profile.with_degrees(cp=3).layers[0].exchanges == 24
    with pytest.raises(ConfigError, match="2 heads cannot be shared out to sep_degree=3"):
        profile.with_degrees(sep=3)


@pytest.mark.parametrize("degrees", [{"ep": 4}, {"sep": 2}, {"cp": 2}, {"ep": 2, "sep": 2}])
def test_there_and_back_is_the_same_profile(degrees: dict[str, int]) -> None:
    back = PROFILE.with_degrees(**degrees).with_degrees(1, 1, 1)
    for layer, expected in zip(back.layers, PROFILE.layers):
        for name, figure in vars(expected).items():
            # Experts are taken to have the same share of B as of F.
            rough = name in ("backward", "input_grad", "weight_grad")
            assert getattr(layer, name) == (pytest.approx(figure, rel=0.15) if rough else figure)
    assert PROFILE.with_degrees() is PROFILE
    assert Profile.loads(PROFILE.with_degrees(**degrees).dumps()).degrees != LayerDegrees()


@pytest.mark.parametrize(
    ("profile", "degrees", "message"),
    [
        (PROFILE, {"ep": 3}, "(?s)4 experts cannot be shared out to ep_degree=3.*Mixture.*=2"),
        (PROFILE, {"sep": 4}, "(?s)6 heads cannot be shared out to sep_degree=4.*Attention.*=3"),
        (PROFILE, {"ep": 0}, "ep_degree must be a whole number"),
        (PROFILE, {"cp": 1.5}, "cp_degree must be a whole number"),
        (PROFILE, {"ep": 8}, "give ep_degree=4"),
        (Profile((BLOCK, ATTENTION)), {"ep": 2}, "says nothing of experts"),
        (Profile((BLOCK, MIXTURE)), {"cp": 2}, "says nothing of attention"),
    ],
)
def test_degrees_that_a_profile_does_not_know(
    profile: Profile, degrees: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        profile.with_degrees(**degrees)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"degrees": {"ep": 0}}, "ep_degree must be a whole number"),
        ({"degrees": {"mp": 2}}, "(?s)no profile.*ep, sep, cp"),
        ({"layers": [{**vars(BLOCK), "loads": [1, 2]}]}, r"(?s)loads\[0\].*a list"),
        ({"layers": [{**vars(BLOCK), "loads": [[1, -2]]}]}, r"loads\[0\]\[1\]"),
        ({"layers": [{**vars(BLOCK), "heads": [1.5]}]}, r"(?s)heads\[0\].*a whole number"),
    ],
)
def test_files_that_cannot_be(changes: dict[str, object], message: str) -> None:
    content = {**json.loads(PROFILE.dumps())["profile"], **changes}
    with pytest.raises(ConfigError, match=message):
        Profile.loads(json.dumps({"profile": content}))


def test_a_plan_is_for_its_degrees() -> None:
    profile = replace(PROFILE, layers=(ATTENTION, MIXTURE) * 4)
    made = plan(profile, 2, 4, ep_degree=2, sep_degree=2)
    assert "ep_degree=2, sep_degree=2" in str(made).splitlines()[0]
    assert PipelinePlan.loads(made.dumps()) == made
    made.require_degrees(LayerDegrees(2, 2))
    with pytest.raises(ConfigError, match=r"(?s)other degrees.*sep_degree=2.*sep_degree=1"):
        made.require_degrees(LayerDegrees(2))
    assert recosted(made, profile).stages == made.stages
    # A profile of which nothing is known is for any job.
    plan(Profile((BLOCK,) * 4), 2, 4).require_degrees(LayerDegrees(2))
