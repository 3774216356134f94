"""A profile as a value: its file, its table, and figures that cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fleetpipe.errors import ConfigError
from fleetpipe.profiling import LayerCost, Link, Profile, Transfer, plan
from fleetpipe.schedules import Costs
from tests.profiling.models import BLOCK, big_vocabulary, even, slow_link, whole_only


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
