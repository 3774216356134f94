"""Fleet's topology made of the mesh, beside Paddle's own constructors of the same degrees."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import paddle
import pytest
from paddle.distributed.fleet.base import topology as stock

from fleetpipe.job.fleet_view import mesh_topology
from fleetpipe.mesh.axes import COPIES, DENSE, Degrees, Mesh, complete_order
from tests.mesh.test_axes import NAMES as DENSE_NAMES

pytestmark = pytest.mark.skipif(
    not hasattr(stock, "EPHybridCommunicateGroup"), reason="2.6.2 has no experts"
)
NAMES = {**DENSE_NAMES, "ep": "expert", "moe_sharding": "moe_sharding"}
LIBRARIES = ["sharding", "moe_sharding", "pp", "sep", "cp", "dp", "ep", "mp"]
ORDERS = {
    "default": ["dp", "pp", "sharding", "sep", "cp", "mp"],
    "libraries": LIBRARIES,
    "experts_outside": ["pp", "sharding", "ep", "moe_sharding", "sep", "cp", "dp", "mp"],
}


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes Paddle's functions answer for a rank, and its groups plain lists."""

    def answer(rank: int, ranks: int) -> None:
        def new_group(ranks: list[int], **_: Any) -> Any:
            members = sorted(ranks)
            return SimpleNamespace(ranks=members, nranks=len(members), id=0)

        monkeypatch.setattr(paddle.distributed, "get_rank", lambda: rank)
        monkeypatch.setattr(paddle.distributed, "get_world_size", lambda: ranks)
        monkeypatch.setattr(paddle.distributed, "new_group", new_group)
        monkeypatch.setattr(paddle.distributed, "all_reduce", lambda *_, **__: None)
        monkeypatch.setattr(stock, "_HYBRID_PARALLEL_GROUP", None)

    return answer


def answers(hcg: Any) -> dict[str, Any]:
    """What each method without arguments says; groups by their ranks."""
    said: dict[str, Any] = {}
    for name in dir(hcg):
        if not name.startswith("get_") or name in ("get_rank_from_stage", "get_p2p_groups"):
            continue
        try:
            answer = getattr(hcg, name)()
        except (AssertionError, AttributeError):  # Paddle has no group of that kind here
            continue
        said[name] = getattr(answer, "ranks", answer)
    said["stage"] = [hcg.get_rank_from_stage(s) for s in range(hcg.get_pipe_parallel_world_size())]
    said["neighbours"] = hcg._get_p2p_prev_rank(), hcg._get_p2p_next_rank()
    said["cp_sharding"] = hcg.get_sharding_parallel_rank(True), hcg._cp_sharding_degree
    return said


@pytest.mark.parametrize("order", ORDERS.values(), ids=[*ORDERS])
@pytest.mark.parametrize(
    ("pp", "sharding", "cp", "mp", "ep", "moe_sharding"),
    [
        *[(2, 2, 1, 1, 2, 1), (2, 4, 1, 1, 2, 2), (1, 4, 2, 1, 2, 2), (1, 8, 4, 1, 2, 4)],
        *[(2, 2, 1, 2, 4, 1), (1, 4, 2, 2, 4, 2), (2, 4, 2, 2, 2, 4), (2, 2, 2, 1, 2, 1)],
    ],
)
def test_experts_have_the_places_that_paddle_gives_them(
    as_rank: Callable[[int, int], None],
    order: list[str],
    pp: int,
    sharding: int,
    cp: int,
    mp: int,
    ep: int,
    moe_sharding: int,
) -> None:
    wanted = {"pp": pp, "sharding": sharding, "cp": cp, "mp": mp, "ep": ep}
    wanted["moe_sharding"] = moe_sharding
    configs = {f"{axis}_degree": degree for axis, degree in wanted.items()}
    ranks = pp * sharding * mp
    degrees = Degrees.resolve({**configs, "dp_degree": -1}, ranks)
    mesh = Mesh.in_order(degrees, order)
    assert degrees.size == ranks
    full = complete_order(order)
    names, dims = [NAMES[axis] for axis in full], [wanted.get(axis, 1) for axis in full]
    for rank in range(ranks):
        as_rank(rank, ranks)
        ours = answers(mesh_topology(mesh, rank))
        if pp > 1 < moe_sharding and full.index("pp") < full.index("moe_sharding"):
            # Paddle's own sharding groups have ranks of two stages there, or it fails.
            stage = {member // (ranks // pp) for member in ours["get_sharding_parallel_group"]}
            assert stage == {ours["get_stage_id"]}
            continue
        expected = stock.EPHybridCommunicateGroup(names, dims)
        # Paddle's has neighbours in a pipeline alone, and may give this place of another order.
        expected.next_rank, expected.prev_rank = (
            ours["neighbours"][::-1] if pp == 1 else (expected.next_rank, expected.prev_rank)
        )
        expected._cp_parallel_id = expected._cp_group.index(rank)
        theirs = answers(expected)
        assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.parametrize("order", ORDERS.values(), ids=[*ORDERS])
def test_every_rank_has_one_place_and_groups_that_agree(order: list[str]) -> None:
    """Of all axes at once, which Paddle refuses."""
    for sizes in itertools.islice(itertools.product((1, 2), repeat=6), 0, None, 5):
        degrees = Degrees(**dict(zip(DENSE, sizes)))
        per_stage = degrees.size // degrees.pp
        for ep in (n for n in (1, 2, 4) if per_stage % n == 0):
            spread = replace(degrees, ep=ep, moe_sharding=per_stage // ep if ep > 1 else 1)
            mesh = Mesh.in_order(spread, order)
            places = [mesh.coordinate(rank) for rank in range(mesh.degrees.size)]
            assert [mesh.rank(place) for place in places] == [*range(degrees.size)]
            for axes in [(axis,) for axis in (*DENSE, "ep", "moe_sharding")] + [COPIES]:
                groups = mesh.groups(axes)
                assert sorted(rank for ranks in groups for rank in ranks) == [*range(degrees.size)]
                assert all(len(ranks) == mesh.degrees.split(*axes) for ranks in groups)
                stages = [{places[rank].pp for rank in ranks} for ranks in groups]
                assert "pp" in axes or all(len(stage) == 1 for stage in stages)


@pytest.mark.parametrize("order", [*itertools.permutations(["pp", "cp", "dp"])])
def test_cp_without_experts_is_an_axis_of_its_own(
    as_rank: Callable[[int, int], None], order: tuple[str, ...]
) -> None:
    mesh = Mesh.in_order(Degrees(pp=2, cp=2, dp=2), order)
    topology = stock.CommunicateTopology(
        [NAMES[axis] for axis in mesh.order], [getattr(mesh.degrees, axis) for axis in mesh.order]
    )
    for rank in range(8):
        as_rank(rank, 8)
        ours = answers(mesh_topology(mesh, rank))
        place = topology.get_coord(rank)
        assert ours["get_context_parallel_rank"] == place.context
        assert ours["get_context_parallel_group"] in topology.get_comm_list("context")
        assert rank in ours["get_context_parallel_group"]
        assert ours["get_data_parallel_group"] in topology.get_comm_list("data")
        assert (ours["get_stage_id"], ours["get_data_parallel_rank"]) == (place.pipe, place.data)
