"""Ranks that are threads: collective operations, sums by a tree, computations in turns."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.engine.observer import Stopwatch
from fleetpipe.errors import ConfigError, PeerFailed, PipelineTimeout, TransportError, UsageError
from fleetpipe.mesh import turns
from fleetpipe.mesh.axes import Degrees
from fleetpipe.mesh.groups import DirectGroup, GlooGroup, SoleGroup
from fleetpipe.mesh.sums import TreeSum, count_blocks, tree
from fleetpipe.transport import MemoryHub, MessageKey, View
from tests.fixtures import Clock, Patch
from tests.transport.helpers import DTYPES, LIMIT, join_all

RANKS = 3
OnAll = Callable[[Callable[[DirectGroup], Any]], "list[Any]"]


@pytest.fixture
def on_all() -> Iterator[OnAll]:
    """Runs a function with the group of each rank, all at once."""
    transports = join_all(RANKS)
    with ThreadPoolExecutor(RANKS) as threads:
        yield lambda run: list(threads.map(run, [DirectGroup(t, LIMIT) for t in transports]))
    for transport in transports:
        transport.close()


def test_groups_of_one_mesh_do_not_take_each_others_messages(on_all: OnAll) -> None:
    """Each member of two groups speaks first in another of them; some wait in both at once."""
    members = {"tail": (1, 2), "all": (2, 0, 1), "others": (2, 1)}

    def views(whole: DirectGroup) -> dict[str, Any]:
        rank = whole.rank
        own = {
            name: DirectGroup(View(whole.transport, ranks), LIMIT, name)
            for name, ranks in members.items()
            if rank in ranks
        }
        # What is of one name comes in order, what is of others in any.
        for name in own if rank == 1 else reversed(own):
            group = own[name]
            for peer in set(range(group.ranks)) - {group.rank}:
                group.transport.send(peer, group._gather, f"{name} of {rank}")
        return {
            name: [group._receive(p, group._gather) for p in range(group.ranks) if p != group.rank]
            for name, group in own.items()
        }

    for rank, found in enumerate(on_all(views)):
        assert found == {
            name: [f"{name} of {other}" for other in ranks if other != rank]
            for name, ranks in members.items()
            if rank in ranks
        }


def test_a_view_refuses_who_is_no_member(on_all: OnAll) -> None:
    def refused(whole: DirectGroup) -> bool:
        if whole.rank == 1:
            return True
        view = View(whole.transport, (2, 0))
        with pytest.raises(TransportError, match="has no connection to rank 2"):
            view.send(2, MessageKey("C", 0, 0, "", 0), None)
        return True

    assert on_all(refused) == [True] * RANKS


def test_values_go_from_one_to_all_and_from_all_to_all(on_all: OnAll) -> None:
    assert on_all(lambda group: group.broadcast(("from", group.rank), 1)) == [("from", 1)] * RANKS
    assert on_all(lambda group: group.all_gather(group.rank)) == [[0, 1, 2]] * RANKS


def test_sums_have_the_same_bits_on_all(on_all: OnAll) -> None:
    def total(group: DirectGroup) -> bytes:
        tensor = paddle.full([2], [0.1, 1e8, -1e8][group.rank])
        group.all_reduce([tensor])
        return bytes(tensor.numpy().tobytes())

    in_order = paddle.full([2], 0.1) + paddle.full([2], 1e8) + paddle.full([2], -1e8)
    assert on_all(total) == [in_order.numpy().tobytes()] * RANKS


def test_each_tensor_comes_from_the_member_named_beside_it(on_all: OnAll) -> None:
    def values(group: DirectGroup) -> list[float]:
        tensors = [paddle.full([1], 10.0 * group.rank + number) for number in range(3)]
        sources = [2, 0, 2]
        kept = [tensor.detach() for tensor in tensors]
        group.broadcast_each(list(zip(tensors, sources)))
        # In place: whoever holds the tensor already has the value.
        assert [view.item() for view in kept] == [tensor.item() for tensor in tensors]
        return [tensor.item() for tensor in tensors]

    assert on_all(values) == [[20.0, 1.0, 22.0]] * RANKS


def part_for(member: int, rank: int, dtype: str, lengths: list[int]) -> Any:
    """What a rank has for a member: figures of both; every second one is 0."""
    figures = [float((place % 2) * (10 * rank + member + 1)) for place in range(lengths[member])]
    return paddle.to_tensor(figures, "float64").astype(dtype)


def bits(tensor: Any) -> tuple[list[int], bytes]:
    """The shape and the bits of a tensor."""
    plain = tensor.astype("float64") if "float" in str(tensor.dtype) else tensor
    return list(tensor.shape), bytes(plain.numpy().tobytes())


NUMBERS = ("float32", "float64", "int32", "int64")
FLOATS = ("float16", "bfloat16")


@pytest.mark.parametrize("lengths", [[4, 4, 4], [3, 0, 5]], ids=["equal", "unequal"])
def test_every_member_gets_the_parts_that_are_for_it(on_all: OnAll, lengths: list[int]) -> None:
    dtypes = [d for d in (*NUMBERS, *FLOATS, "bool") if d in DTYPES]

    def exchanged(group: DirectGroup) -> list[list[tuple[list[int], bytes]]]:
        found = []
        for dtype in dtypes:
            parts = [part_for(member, group.rank, dtype, lengths) for member in range(RANKS)]
            got = group.all_to_all(parts)
            assert all(part.dtype == parts[0].dtype for part in got)
            found.append([bits(part) for part in got])
        return found

    for member, found in enumerate(on_all(exchanged)):
        for dtype, got in zip(dtypes, found):
            assert got == [bits(part_for(member, r, dtype, lengths)) for r in range(RANKS)]


@pytest.mark.parametrize("lengths", [[4, 4, 4], [3, 0, 5]], ids=["equal", "unequal"])
def test_parts_are_summed_in_the_order_of_the_members(on_all: OnAll, lengths: list[int]) -> None:
    """0.1 + 1e8 - 1e8 has other bits in every other order."""
    figures = [0.1, 1e8, -1e8]

    def summed(group: DirectGroup) -> dict[str, tuple[list[int], bytes]]:
        figure = figures[group.rank]
        return {
            dtype: bits(group.reduce_scatter([paddle.full([n], figure, dtype) for n in lengths]))
            for dtype in ("float32", "float64")
        }

    for member, found in enumerate(on_all(summed)):
        for dtype, got in found.items():
            first, *rest = (paddle.full([lengths[member]], figure, dtype) for figure in figures)
            for part in rest:
                first = first + part
            assert got == bits(first)


def test_numbers_of_every_kind_are_summed(on_all: OnAll) -> None:
    def summed(group: DirectGroup) -> list[tuple[str, list[float]]]:
        found = []
        for dtype in (*NUMBERS, *FLOATS):
            total = group.reduce_scatter(
                [paddle.full([2], group.rank + m, dtype) for m in range(3)]
            )
            found.append((str(total.dtype), total.astype("float64").tolist()))
        return found

    for member, found in enumerate(on_all(summed)):
        assert found == [
            (str(paddle.zeros([1]).astype(dtype).dtype), [3.0 + 3 * member] * 2)
            for dtype in (*NUMBERS, *FLOATS)
        ]


def test_a_member_sends_each_part_once_and_no_other(on_all: OnAll) -> None:
    """A gather would send (n-1) times the tensor; here it is (n-1)/n of it."""
    rows = 3000

    def sent(group: DirectGroup) -> list[int]:
        parts = paddle.ones([rows * 4], "float32").split(RANKS)
        counts = [group.transport.bytes_sent]
        for exchange in (group.all_to_all, group.reduce_scatter):
            exchange(parts)
            counts.append(group.transport.bytes_sent)
        return [after - before for before, after in itertools.pairwise(counts)]

    whole = rows * 4 * 4
    for counts in on_all(sent):
        assert all(0 < count <= 1.05 * (RANKS - 1) / RANKS * whole for count in counts)


def test_what_is_exchanged_may_be_changed_at_once(on_all: OnAll) -> None:
    """Far more than the kernel takes: most of it leaves after the call has returned."""
    size = 1 << 21

    def exchanged(group: DirectGroup) -> list[float]:
        parts = [paddle.full([size], 1.0 + group.rank) for _ in range(RANKS)]
        waiting = group.begin_all_to_all(parts)
        for part in parts:
            part.set_value(paddle.zeros([size]))
        return [float(part.min()) for part in waiting.values()]

    assert on_all(exchanged) == [[1.0, 2.0, 3.0]] * RANKS


def test_a_member_that_does_not_come_is_named() -> None:
    transports = join_all(RANKS)

    def exchanged(rank: int) -> str:
        group = DirectGroup(transports[rank], 0.5)
        with pytest.raises(PipelineTimeout) as caught:
            group.reduce_scatter([paddle.ones([1])] * RANKS)
        return str(caught.value)

    with ThreadPoolExecutor(2) as threads:
        for rank, message in enumerate(threads.map(exchanged, range(2))):
            assert f"rank {rank}" in message
            assert "rank 2" in message
    for transport in transports:
        transport.close()


def test_parts_that_do_not_fit_are_refused(on_all: OnAll) -> None:
    def refused(group: DirectGroup) -> str:
        with pytest.raises(UsageError, match=r"(?s)3 tensors, by member.*got: *2"):
            group.all_to_all([paddle.ones([1])] * 2)
        with pytest.raises(UsageError, match="bools can be exchanged"):
            group.reduce_scatter([paddle.ones([1], "bool")] * RANKS)
        own = paddle.ones([3] if group.rank == 1 else [2])
        with pytest.raises(UsageError) as caught:
            group.reduce_scatter([own] * RANKS)
        return str(caught.value)

    messages = on_all(refused)
    assert "shape [3] from member 1" in messages[0]
    assert "shape [2] from member 0" in messages[1]


def test_ranks_on_one_thread_exchange_through_memory() -> None:
    hub = MemoryHub(2)
    groups = [DirectGroup(hub.endpoint(rank), LIMIT) for rank in range(2)]
    begun = [
        group.begin_all_to_all([paddle.full([2], 10.0 * rank + m) for m in range(2)])
        for rank, group in enumerate(groups)
    ]
    assert [[part[0].item() for part in one.values()] for one in begun] == [[0, 10], [1, 11]]


def test_one_process_has_what_everyone_has() -> None:
    group, tensor = SoleGroup(), paddle.full([2], 3.0)
    group.all_reduce([tensor])
    group.broadcast_each([(tensor, 0)])
    assert group.broadcast("value", 0) == "value"
    assert group.all_gather("value") == ["value"]
    (exchanged,), total = group.all_to_all([tensor]), group.reduce_scatter([tensor])
    tensor.set_value(paddle.zeros([2]))
    assert exchanged.tolist() == total.tolist() == [3.0, 3.0]
    with pytest.raises(UsageError, match="1 tensors, by member"):
        group.all_to_all([tensor, tensor])
    with pytest.raises(UsageError, match="bools can be exchanged"):
        group.reduce_scatter([tensor.astype("bool")])


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (RuntimeError("[/paddle/third_party/gloo/pair.cc:784] reset"), PeerFailed),
        (OSError("(External) NCCL error(5), invalid usage"), PeerFailed),
        (PipelineTimeout("a limit of ours"), PipelineTimeout),
    ],
)
def test_what_breaks_paddles_collectives_is_a_peer(raised: Exception, kind: type) -> None:
    group = GlooGroup(MemoryHub(1).endpoint(0), LIMIT, None)
    with pytest.raises(kind) as told, group.collective():
        raise raised
    assert str(raised) in str(told.value)


def bracketed(values: list[str]) -> str:
    return tree(values, lambda left, right: f"({left}+{right})")


@pytest.mark.parametrize(
    ("count", "total"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (6, "(((0+1)+2)+((3+4)+5))"),
        (8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
    ],
)
def test_a_tree_adds_blocks_and_then_pairs_of_them(count: int, total: str) -> None:
    assert bracketed([*map(str, range(count))]) == total


@given(odd=st.integers(0, 5), levels=st.integers(0, 5), data=st.data())
def test_ranks_with_equal_parts_come_to_the_sum_of_one(
    odd: int, levels: int, data: st.DataObject
) -> None:
    count = (2 * odd + 1) << levels
    assert count_blocks(count) == 1 << levels
    ranks = 1 << data.draw(st.integers(0, levels))
    values, share = [*map(str, range(count))], count // ranks
    parts = [bracketed(values[rank * share : (rank + 1) * share]) for rank in range(ranks)]
    assert bracketed(parts) == bracketed(values)


@given(count=st.integers(1, 200))
def test_a_tree_holds_a_branch_for_each_of_its_levels_at_most(count: int) -> None:
    total = TreeSum[int](count, int.__add__)
    for value in range(count):
        total.add(value)
        assert len(total._branches) <= count_blocks(count).bit_length()
    assert total.total() == sum(range(count))


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"dp": 3}, r"dp_degree \(=3\) must be a power of two.*dp_degree=2"),
        ({"sharding": 6}, "sharding_degree=4"),
        ({"mp": 5}, "mp_degree=4"),
        ({"sep": 2}, "sep_degree=1"),
        ({"cp": 2}, "parts of attention"),
        ({"ep": 2, "dp": 2}, "experts"),
    ],
)
def test_degrees_without_whole_branches_are_refused(degrees: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + words):
        Degrees(**degrees).require_tree(dynamic=True, device="cpu")


def test_a_static_program_and_layers_cut_on_a_gpu_have_no_tree() -> None:
    with pytest.raises(ConfigError, match="dynamic graph"):
        Degrees().require_tree(dynamic=False, device="cpu")
    Degrees(dp=2).require_tree(dynamic=True, device="gpu")
    with pytest.raises(ConfigError, match=r"(?s)mp_degree \(=2\) on a gpu.*mp_degree=1"):
        Degrees(mp=2).require_tree(dynamic=True, device="gpu")


class Register:
    """A process that has one register, which each computation has for itself."""

    def __init__(self) -> None:
        self.value = "begin"
        self.threads: list[int] = []

    def suspend(self) -> Callable[[], None]:
        value = self.value
        return lambda: setattr(self, "value", value)

    def inherited(self) -> AbstractContextManager[None]:
        return nullcontext()


def writer(register: Register, lines: list[str], name: str, exchanges: int) -> Callable[[], None]:
    """Notes what it reads, writes its own, and hands over, several times."""

    def run() -> None:
        register.threads.append(threading.get_ident())
        for number in range(exchanges + 1):
            lines.append(f"{name}{number} {register.value}")
            register.value = f"{name}{number}"
            if number < exchanges:
                turns.hand_over()

    return run


@pytest.mark.parametrize(
    ("first", "second", "expected", "last"),
    [
        (2, 1, ["f0 begin", "s0 begin", "f1 f0", "s1 s0", "f2 f1"], "f2"),
        (0, 2, ["f0 begin", "s0 begin", "s1 s0", "s2 s1"], "f0"),
        (1, 0, ["f0 begin", "s0 begin", "f1 f0"], "f1"),
    ],
)
def test_the_order_and_the_state_of_each(
    first: int, second: int, expected: list[str], last: str
) -> None:
    register, lines = Register(), list[str]()
    pairs = turns.Turns(register, 5)
    for _ in range(2):
        register.value = "begin"
        lines.clear()
        pairs.run(*(writer(register, lines, n, k) for n, k in (("f", first), ("s", second))))
        assert lines == expected
        assert register.value == last
    assert len(set(register.threads)) == 2
    turns.hand_over()  # nobody else has a turn


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("exchanges", [0, 1])
def test_an_error_of_one_ends_the_other(failing: int, exchanges: int) -> None:
    ends: list[str] = []

    def fails() -> None:
        for _ in range(exchanges):
            turns.hand_over()
        raise KeyError("mine")

    def goes_on() -> None:
        try:
            for _ in range(9):
                turns.hand_over()
            ends.append("unharmed")
        except Exception as error:
            # As autograd does with what a layer raises in backward.
            raise OSError from error
        finally:
            ends.append("end")

    pair = [fails, goes_on] if failing == 0 else [goes_on, fails]
    pairs = turns.Turns(Register(), 5)
    with pytest.raises(KeyError, match="mine"):
        pairs.run(*pair)
    # One that has not begun does not begin.
    assert ends == ([] if (failing, exchanges) == (0, 0) else ["end"])
    pairs.run(lambda: None, lambda: None)


def test_who_never_hands_over_is_no_hang() -> None:
    held = threading.Event()
    with pytest.raises(PipelineTimeout, match=r"within 0.2 s(?s:.*)\"overlap\"\] = False"):
        turns.Turns(Register(), 0.1).run(held.wait, lambda: None)
    held.set()


@pytest.mark.parametrize(("first", "second"), [(3, 1), (1, 3)])
def test_times_are_those_of_the_turns(monkeypatch: Patch, first: int, second: int) -> None:
    """Each sleeps once more than it hands over; drawn side by side they fill the whole time."""
    clock = Clock(monkeypatch)
    spans: dict[str, tuple[float, float]] = {}

    def sleeper(name: str, exchanges: int) -> Any:
        def run() -> None:
            for _ in range(exchanges):
                clock.sleep(1)
                turns.hand_over()
            clock.sleep(1)

        record = lambda begin, end: spans.update({name: (begin, end)})  # noqa: E731
        return Stopwatch(run, record, time.perf_counter)

    turns.Turns(Register(), 5).run(sleeper("first", first), sleeper("second", second))
    lengths = {name: end - start for name, (start, end) in spans.items()}
    assert lengths == {"first": first + 1, "second": second + 1}
    (_, end), (start, _) = sorted(spans.values())
    assert end == start
