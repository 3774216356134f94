"""Degrees of a job, places and groups of its ranks, and which part of a parameter a rank has."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paddle import nn
from paddle.distributed.fleet.base.topology import CommunicateTopology

from fleetpipe import fleet
from fleetpipe.errors import CheckpointError, ConfigError
from fleetpipe.job.job import Job
from fleetpipe.mesh import parts
from fleetpipe.mesh.axes import AXES, DENSE, Coordinate, Degrees, Mesh
from fleetpipe.mesh.degree_checks import sharding_stage
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.mesh.parts import JoinedParts, LocalTensor, PartOfWhole, Region
from tests.groups import on_all, thread_members

NAMES = {
    "dp": "data",
    "pp": "pipe",
    "sharding": "sharding",
    "sep": "sep",
    "cp": "context",
    "mp": "model",
}


@pytest.mark.parametrize(
    ("wanted", "world", "expected"),
    [
        ({"dp": -1, "pp": 2, "mp": 2, "sharding": 2}, 16, Degrees(dp=2, pp=2, mp=2, sharding=2)),
        ({"dp": -1, "sharding": 4}, 8, Degrees(dp=2, sharding=4)),
        ({"dp": 2, "pp": 2, "sharding": 1, "mp": 2}, 8, Degrees(dp=2, pp=2, mp=2)),
        ({"pp": 7}, 1, Degrees(pp=7)),
    ],
)
def test_the_data_parallel_degree_is_what_all_others_leave(
    wanted: dict[str, int], world: int, expected: Degrees
) -> None:
    configs = {f"{axis}_degree": degree for axis, degree in wanted.items()}
    assert Degrees.resolve(configs, world) == expected
    assert expected.replicas == expected.dp * expected.sharding


@pytest.mark.parametrize(
    ("configs", "world", "expected"),
    [
        ({"pp_degree": 6}, 4, Degrees(pp=4)),
        ({"pp_degree": 3, "dp_degree": 2}, 4, Degrees(pp=2, dp=2)),
        ({"pp_degree": 2, "mp_degree": 3}, 3, Degrees(mp=3)),
        # What one process plays alone needs no change, nor does what fits.
        ({"pp_degree": 6}, 1, Degrees(pp=6)),
        ({"pp_degree": 2, "dp_degree": 2}, 4, Degrees(pp=2, dp=2)),
        ({"pp_degree": 2, "dp_degree": -1}, 4, Degrees(pp=2, dp=2)),
        ({"pp_degree": 6, "dp_degree": -1}, 5, Degrees(pp=5)),
        ({"pp_degree": 3, "dp_degree": -1}, 2, Degrees(pp=2)),
    ],
)
def test_a_job_that_goes_on_with_fewer_ranks_has_fewer_stages(
    configs: dict[str, int], world: int, expected: Degrees
) -> None:
    degrees = Degrees.resolve(configs, world, 6)
    assert degrees == expected
    asked = configs["pp_degree"]
    assert degrees.asked_pp == (asked if degrees.pp != asked else 0)


@pytest.mark.parametrize(
    ("configs", "world"),
    [({"pp_degree": 4}, 2), ({"dp_degree": 6}, 5), ({"pp_degree": 3, "dp_degree": 2}, 5)],
)
def test_degrees_that_do_not_narrow_to_so_many_ranks_are_refused(
    configs: dict[str, int], world: int
) -> None:
    with pytest.raises(ConfigError, match=r"world size|the job has"):
        Degrees.resolve(configs, world, 6)


@pytest.mark.parametrize("axis", ["pp", "mp", "sharding", "sep"])
@pytest.mark.parametrize("wrong", [0, -1, 2.0, "2", True, None])
def test_a_degree_that_is_no_number_of_ranks_is_refused(axis: str, wrong: Any) -> None:
    message = rf"{axis}_degree must be a whole number of at least 1(.|\n)*={wrong!r}\n"
    with pytest.raises(ConfigError, match=message):
        Degrees.resolve({f"{axis}_degree": wrong}, 1)
    with pytest.raises(ConfigError, match=message):
        fleet.DistributedStrategy().hybrid_configs = {f"{axis}_degree": wrong}


def test_degrees_that_a_graph_mode_does_not_run_are_refused_with_what_to_do() -> None:
    degrees = Degrees(pp=2, sep=2)
    with pytest.raises(ConfigError, match=r"sep_degree=2(.|\n)*use mp_degree"):
        degrees.refuse_beyond(("pp", "dp", "sharding", "mp"), "use mp_degree")
    Degrees(pp=2, mp=2).refuse_beyond(("pp", "mp"), "nothing")


def test_all_degrees_are_named_where_they_do_not_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"pp_degree=2, .*, dp_degree=2\) do not divide"):
        Degrees.resolve({"dp_degree": 2, "pp_degree": 2}, 3)


@pytest.mark.parametrize(
    ("wanted", "world", "message"),
    [
        ({"pp": 3}, 8, "set pp_degree=2, the nearest that divides"),
        ({"pp": 2, "cp": 3}, 8, "set cp_degree=2, the nearest that divides"),
        ({"pp": 2, "ep": 3}, 8, "set ep_degree=2, the nearest that divides"),
        ({"pp": 2, "ep": 2, "moe_sharding": 4}, 8, "set moe_sharding_degree=2, or leave it out"),
        ({"sharding": 4, "cp": 3, "ep": 4}, 4, "set cp_degree=2"),
        ({"sharding": 4, "cp": 2, "cp_sharding": 4}, 4, "cp_sharding_degree=2, or leave it out"),
        ({"dp": 0}, 3, "at least 1"),
        ({"dp": 0}, 1, "at least 1"),
        ({"pp": 2, "cp": 2}, 1, "fleetpipe run --nproc 4"),
        ({"pp": 2, "ep": 2}, 1, "fleetpipe run --nproc 4"),
        (
            {"dp": 2, "pp": 2},
            1,
            r"fleetpipe run --nproc 4 train.py, or leave all but pp_degree out",
        ),
        ({"dp": 2, "pp": 3}, 8, "set pp_degree=4"),
    ],
)
def test_a_degree_that_does_not_divide_is_refused_with_one_that_does(
    wanted: dict[str, int], world: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Degrees.resolve({"dp_degree": -1, **{f"{a}_degree": n for a, n in wanted.items()}}, world)


def test_experts_are_spread_over_all_ranks_of_a_stage() -> None:
    configs = {"dp_degree": -1, "pp_degree": 2, "ep_degree": 2}
    assert Degrees.resolve(configs, 8) == Degrees(dp=4, pp=2, ep=2, moe_sharding=2)
    # Beside experts Fleet's sharding_degree has cp within; cp_sharding_degree says so elsewhere.
    configs = {"dp_degree": -1, "sharding_degree": 4, "cp_degree": 2}
    assert Degrees.resolve(configs, 8) == Degrees(sharding=4, cp=2)
    for more in ({"ep_degree": 4}, {"cp_sharding_degree": 2}):
        degrees = Degrees.resolve({**configs, **more}, 4)
        assert (degrees.sharding, degrees.cp, degrees.state_axes) == (2, 2, ("sharding", "cp"))
        assert degrees.configs()["sharding_degree"] == 4


def test_sharding_of_parameters_and_of_pieces_is_refused() -> None:
    strategy = fleet.DistributedStrategy()
    assert sharding_stage(strategy) == 1
    strategy.sharding = True
    for stage in (1, 2):
        strategy.sharding_configs = {"stage": stage}
        assert sharding_stage(strategy) == stage
    strategy.sharding_configs = {"stage": 3}
    with pytest.raises(ConfigError, match=r"\['stage'\] = 3(.|\n)*raise pp_degree or mp_degree"):
        sharding_stage(strategy)
    strategy.sharding_configs = {"stage": 1}
    configs = strategy.hybrid_configs["sharding_configs"]
    for option in ("split_param", "tensor_fusion", "comm_overlap"):
        setattr(configs, option, True)
        with pytest.raises(ConfigError, match=f"{option} = True(.|\n)*these options pieces"):
            sharding_stage(strategy)
        setattr(configs, option, False)


def topology_of(mesh: Mesh, rank: int) -> Any:
    """Fleet's topology of one rank, without the groups that it would make."""

    def group(axis: str) -> Any:
        return lambda: SimpleNamespace(ranks=mesh.along(mesh.coordinate(rank), [axis]))

    return SimpleNamespace(
        global_rank=rank,
        nranks=mesh.degrees.size,
        get_global_rank=lambda: rank,
        get_model_parallel_group=group("mp"),
        get_sharding_parallel_group=group("sharding"),
        get_data_parallel_group=group("dp"),
    )


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Mesh, CommunicateTopology]:
    """A mesh and Paddle's topology of the same degrees, in some order, or of fewer axes."""
    order = draw(st.permutations([*NAMES]))[draw(st.integers(0, 2)) :]
    degrees = Degrees(**{axis: draw(st.integers(1, 3)) for axis in order})
    names, dims = [NAMES[axis] for axis in order], [getattr(degrees, axis) for axis in order]
    return Mesh.in_order(degrees, order), CommunicateTopology(names, dims)


@given(meshes())
def test_ranks_have_the_places_that_paddle_gives_them(
    both: tuple[Mesh, CommunicateTopology],
) -> None:
    mesh, topology = both
    for rank in range(topology.world_size()):
        here, there = mesh.coordinate(rank), topology.get_coord(rank)
        assert {NAMES[a]: getattr(here, a) for a in DENSE} == {
            **dict.fromkeys(NAMES.values(), 0),
            **there._asdict(),
        }
        assert mesh.rank(here) == rank
        assert here.leads() == (rank == 0)


@given(meshes())
def test_ranks_along_axes_are_those_of_paddles_groups(
    both: tuple[Mesh, CommunicateTopology],
) -> None:
    mesh, topology = both
    for axis in mesh.order:
        if NAMES[axis] not in topology.get_hybrid_group_names():
            continue
        lists = topology.get_comm_list(NAMES[axis])
        for rank in range(topology.world_size()):
            along = mesh.along(mesh.coordinate(rank), [axis])
            assert along in lists
            assert rank in along
    if {"data", "sharding"} <= {*topology.get_hybrid_group_names()}:
        fused = topology.get_fused_ranks(["data", "sharding"])
        for rank in range(topology.world_size()):
            along = mesh.along(mesh.coordinate(rank), ["dp", "sharding"])
            assert along in fused
            assert along[mesh.replica(mesh.coordinate(rank))] == rank


def test_a_coordinate_has_the_axes_of_the_degrees() -> None:
    assert Coordinate._fields == AXES == tuple(Degrees.__dataclass_fields__)[: len(AXES)]


def test_one_of_many_leads() -> None:
    mesh = Mesh(Degrees(dp=2, pp=2, sharding=2, mp=2))
    leading = [rank for rank in range(16) if mesh.coordinate(rank).leads("pp", "mp")]
    assert leading == [rank for rank in range(16) if mesh.replica(mesh.coordinate(rank)) == 0]
    assert not Coordinate(sep=1).leads("pp", "mp")


@pytest.mark.parametrize(
    "order",
    [
        ["dp", "pp", "sharding", "sep", "mp"],
        ["mp", "sharding", "pp", "sep", "dp"],
        ["sharding", "mp", "sep", "dp", "pp"],
    ],
)
def test_groups_have_the_right_ranks_in_every_order(order: list[str]) -> None:
    degrees = Degrees(dp=2, pp=2, sharding=2, mp=2)
    store: Any = object()
    # Who names which members, by the kind of the group.
    named: dict[str, dict[tuple[int, ...], list[int]]] = {}
    replicas: dict[int, list[Any]] = {}
    for rank in range(16):
        mesh = Mesh.in_order(degrees, order)
        topology, place = topology_of(mesh, rank), mesh.coordinate(rank)
        connections: Any = SimpleNamespace(
            rank=rank, ranks=16, posts=False, queues=lambda: (0, 0), flights=dict
        )
        job = Job(
            *(degrees, topology, 10.0),
            store=store,
            connections=connections,
            fused_copies="fused",
            mesh=mesh,
        )
        for group in (
            job.group,
            job.copies,
            job.replicas,
            job.model_parallel,
            job.sharding,
            job.everyone,
        ):
            made: Any = group()
            assert group() is made
            stock = getattr(made, "paddle_group", "fused")
            assert stock == "fused" or tuple(stock.ranks) == made.transport.members
            assert made.transport.members[made.rank] == rank
            members = named.setdefault(group.__name__, {})
            members.setdefault(made.transport.members, []).append(rank)
        (view,) = job.connect().values()
        assert (view.rank, view.ranks) == (place.pp, 2)
        found: Any = job.replicas()
        assert found.paddle_group == "fused"
        replicas.setdefault(job.replica, []).append(place)
        places = [mesh.coordinate(member) for member in found.transport.members]
        assert [(p.dp, p.sharding) for p in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert {(p.pp, p.mp) for p in places} == {(place.pp, place.mp)}
    for groups in named.values():
        # Everyone who is named names the same.
        assert all(sorted(members) == ranks for members, ranks in groups.items())
    assert [*map(len, named.values())] == [8, 4, 4, 8, 8, 1]
    for number, found in replicas.items():
        assert {(2 * place.dp + place.sharding) for place in found} == {number}


def test_a_process_alone_is_every_group() -> None:
    topology = topology_of(Mesh(Degrees()), 0)
    job = Job(Degrees(pp=3), topology, 10.0)
    for group in (job.copies(), job.model_parallel(), job.sharding(), job.everyone()):
        assert isinstance(group, SoleGroup)
    assert job.replica == 0


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (["dp", "pp", "pp", "mp"], "got: 'pp' in ['dp', 'pp', 'pp', 'mp']"),
        (["dp", "seq", "mp"], "did you mean 'sep'"),
        ("dp", "did you mean 'dp'"),
    ],
)
def test_an_order_of_other_names_is_refused(order: Any, says: str) -> None:
    with pytest.raises(ConfigError, match="names axes, each once") as caught:
        Mesh.in_order(Degrees(pp=2), order)
    assert says in str(caught.value)


def test_one_process_plays_no_copies_of_experts() -> None:
    with pytest.raises(ConfigError, match="moe_sharding_degree=2") as caught:
        Degrees.resolve({"moe_sharding_degree": 2, "ep_degree": 2, "pp_degree": 2}, 1)
    assert "fleetpipe run --nproc 8" in str(caught.value)


ROWS = Region(0, 2, 4, 6)


def parameter(**marks: object) -> Any:
    """A part of two rows of a parameter, [6, 3], or one of two columns of [2, 9]."""
    made: Any = nn.Layer().create_parameter([2, 3])
    for name, mark in marks.items():
        setattr(made, name, mark)
    return made


@pytest.mark.parametrize(
    ("marks", "cut", "axis"),
    [
        ({}, None, ""),
        ({"is_distributed": False, "split_axis": 0}, None, ""),
        ({"is_distributed": True}, None, "mp"),
        ({"is_distributed": True, "split_axis": 0}, ROWS, "mp"),
        ({"is_distributed": True, "split_axis": -1}, Region(1, 3, 6, 9), "mp"),
        ({"part_of_whole": PartOfWhole(1, ROWS)}, ROWS, ""),
        ({"part_of_whole": PartOfWhole(1, ROWS, "rows")}, ROWS, "rows"),
    ],
)
def test_a_parameter_says_which_part_it_is(
    marks: Mapping[str, object], cut: Region | None, axis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "SHARDS", ("mp", "rows"))
    tensor = parameter(**marks)
    part = parts.part_of(tensor, lambda: (1, 3))
    assert (part and part.cut) == cut
    assert parts.shard_axis(tensor) == axis
    assert parts.whole_name("4.weight", tensor) == ("3.weight" if cut and not axis else "4.weight")
    if cut is None and axis:
        with pytest.raises(CheckpointError, match="no split_axis"):
            parts.local_tensor_of(tensor, lambda: (1, 3))
        assert parts.local_tensor_of(tensor, lambda: (0, 1)).cut is None
        return
    held = parts.local_tensor_of(tensor, lambda: (1, 3))
    assert held.described.shape == ((2, 3) if cut is None else cut.whole((2, 3)))
    whole = np.arange(np.prod(held.described.shape)).reshape(held.described.shape)
    name = parts.whole_name("4.weight", tensor)
    found = parts.split_into_parts({name: whole, "more": 1}, {"4.weight": tensor}, lambda: (1, 3))
    assert found.keys() == {"4.weight", "more"}
    assert found["4.weight"].shape == (2, 3)
    assert np.array_equal(found["4.weight"], whole if cut is None else cut.taken_from(whole))


def test_parts_of_one_process_are_filled_as_one() -> None:
    halves = [paddle.zeros([2, 3]), paddle.zeros([4, 3])]
    cuts = [Region(0, 2, 4, 8), Region(0, 4, 8, 8)]
    joined = JoinedParts(("weight", LocalTensor(*pair)) for pair in zip(halves, cuts))
    assert joined.tensors["weight"].cut == Region(0, 2, 8, 8)
    values = paddle.arange(18, dtype="float32").reshape([6, 3])
    target: Any = joined.tensors["weight"].tensor
    target.set_value(values)
    joined.copy_to_parts()
    assert np.array_equal(np.concatenate([half.numpy() for half in halves]), values.numpy())


def test_the_first_rank_joins_the_parts_of_all() -> None:
    whole = {"cut": paddle.rand([6, 3]), "uneven": paddle.rand([2, 6]), "same": paddle.rand([4])}
    groups: Any = thread_members(3)

    def join(rank: int) -> dict[str, Any]:
        cuts = {
            "cut": Region(0, 2 * rank, 2 * rank + 2, 6),
            "uneven": Region(1, *((0, 1), (1, 4), (4, 6))[rank], 6),
        }
        held = [(name, LocalTensor(cut.taken_from(whole[name]), cut)) for name, cut in cuts.items()]
        held += [("same", LocalTensor(whole["same"]))] * (rank == 2)
        return parts.joined_on_first(groups[rank], held)

    first, *others = on_all(3, join)
    assert others == [{}, {}]
    assert {name: value.numpy().tobytes() for name, value in first.items()} == {
        name: value.numpy().tobytes() for name, value in whole.items()
    }
