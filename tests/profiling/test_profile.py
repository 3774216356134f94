"""Profiles of models that are hard to cut: files, tables, and costs over other numbers of ranks."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from fleetpipe.errors import ConfigError
from fleetpipe.profiling import (
    LayerCost,
    LayerDegrees,
    Link,
    PipelinePlan,
    Profile,
    Transfer,
    plan,
    recosted,
)
from fleetpipe.schedules import Costs

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


def test_a_profile_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    full = replace(
        slow_link(4),
        loss=replace(BLOCK, name="loss"),
        places=(2, 5),
        boundaries=(0, 9),
        transfer=Transfer(1e-4, 2e-4, 1e-9),
    )
    for profile in (full, even(), whole_only(big_vocabulary())):
        assert Profile.loads(profile.dumps()) == profile
        profile.write(tmp_path / "profile.json")
        assert Profile.read(tmp_path / "profile.json") == profile


def test_a_profile_of_a_cut_is_a_file_of_costs_as_well() -> None:
    profile = replace(even(6), boundaries=(0, 2, 6))
    costs = Costs.from_json(profile.dumps())
    assert costs.forward == pytest.approx((2e-3, 4e-3))
    assert costs.backward == pytest.approx((4e-3, 8e-3))
    assert profile["weight_grad"] == pytest.approx([2e-3, 4e-3])
    # The second stage also keeps what it received.
    assert profile["bytes"] == [2 * BLOCK.held, 4 * BLOCK.held + BLOCK.output]


def test_layers_may_be_written_by_hand() -> None:
    text = json.dumps(
        {
            "profile": {
                "layers": [
                    {"name": "Embedding", "forward": 0.1, "backward": 0.2},
                    {"name": "Block", "forward": 1, "backward": 2, "repeat": 3},
                ]
            }
        }
    )
    block = LayerCost("Block", 1, 2)
    assert Profile.loads(text) == Profile((LayerCost("Embedding", 0.1, 0.2), block, block, block))


def test_the_table_has_a_line_for_each_layer_and_the_loss() -> None:
    lines = str(replace(whole_only(even(3)), loss=LayerCost("loss", 1e-3, 0))).splitlines()
    assert lines[0].split()[:2] == ["layer", "name"]
    assert [line.split()[0] for line in lines[1:]] == ["0", "1", "2", "loss"]
    assert lines[1].split()[:6] == ["0", "Block", "1.000", "2.000", "-", "-"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward": -1.0}, r"(?s)`forward` is no time or size.*layer 1 \(Block\).*forward=-1\.0"),
        ({"forward": float("nan")}, "forward=nan"),
        ({"held": "many"}, "held='many'"),
        ({"backward": None, "weight_grad": None}, "(?s)not known.*layer 1.*`input_grad` alone"),
        ({"backward": None, "input_grad": None}, "`weight_grad` alone"),
    ],
)
def test_figures_that_cannot_be_are_refused_by_layer(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Profile((BLOCK, replace(BLOCK, **change)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no profile"),
        ('{"forward": [1, 2]}', "an object with 'profile'"),
        ('{"profile": {"layers": []}}', "at least one layer"),
        ('{"profile": {"layers": [1]}}', r"(?s)layers\[0\].*expected: an object.*got: 1"),
        (
            '{"profile": {"layers": [{"name": "a"}]}}',
            r"(?s)layers\[0\].*expected: an object with 'forward'",
        ),
        ('{"profile": {"layers": [{"name": "a", "foward": 1}]}}', "did you mean 'forward'"),
        ('{"profile": {"layers": [{"name": "a", "forward": 1, "repeat": 0}]}}', "repeat"),
        (
            '{"profile": {"layers": [{"name": "a", "forward": 1, "repeat": 1e99}]}}',
            "(?s)repeat.*whole number",
        ),
        (
            '{"profile": {"layers": [{"name": "a", "forward": 1, "repeat": 1000000000000}]}}',
            "(?s)whole number of 1 to 10000.*got: 1000000000000",
        ),
        ('{"profile": {"version": 9, "layers": []}}', "(?s)version.*expected: version 1.*got: 9"),
    ],
)
def test_what_is_no_profile_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Profile.loads(text)


def test_places_and_links_are_checked() -> None:
    with pytest.raises(ConfigError, match="rising"):
        replace(even(4), places=(2, 1))
    with pytest.raises(ConfigError, match="latency=-1"):
        even(4).with_links(Link(-1))
    with pytest.raises(ConfigError, match="receiving=-1"):
        replace(even(4), transfer=Transfer(receiving=-1))
    with pytest.raises(ConfigError, match="No such file"):
        Profile.read("nowhere.json")
    with pytest.raises(ConfigError, match=r"(?s)the path of a file.*NoneType"):
        plan(None, 2, 4)  # type: ignore[arg-type]


def test_a_plan_weighs_the_exchanges_of_experts_and_of_sequences() -> None:
    experts = replace(BLOCK, name="Experts", exchanges=8, exchanged=10**6)
    profile = Profile((experts, experts, *[BLOCK] * 6))
    assert Profile.loads(profile.dumps()) == profile
    assert "1,000,000" in str(profile).splitlines()[1]

    def boundaries(weighed: Profile) -> tuple[int, ...]:
        return plan(weighed, 2, 4, search=["partition"]).partition.boundaries

    # As measured all eight cost the same; each exchange of 0.5 ms makes two of them dear.
    assert boundaries(profile) == (0, 4, 8)
    over_network = profile.with_links(Link(), exchange=Link(5e-4, 1e-9))
    assert Profile.loads(over_network.dumps()) == over_network
    assert boundaries(over_network) == (0, 3, 8)
    dear, plain = (over_network.stages.stage(n, n + 1) for n in (0, 2))
    assert dear.forward - plain.forward == pytest.approx(2.5e-3)
    assert dear.backward - plain.backward == pytest.approx(2.5e-3)
    # Which is what a fused pair may hide.
    assert (dear.exchange, plain.exchange) == (pytest.approx(2.5e-3), 0)


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
