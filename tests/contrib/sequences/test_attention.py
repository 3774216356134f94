"""Attention over sequences that ranks share is plain attention of the whole; Paddle's plans of it.

The ranks are threads of one process over real sockets.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional

from fleetpipe.contrib.sequences import (
    ContextParallel,
    PrepareContextParallel,
    SequenceRanks,
    attention,
    context_parallel,
    documents_of,
    ring,
)
from fleetpipe.dygraph.train.switches import Switches
from fleetpipe.errors import ConfigError, PeerFailed
from fleetpipe.job.job import Job
from fleetpipe.mesh import groups
from fleetpipe.mesh.groups import DirectGroup, SoleGroup
from fleetpipe.paddle_api.tensor import tensor_bytes
from fleetpipe.transport import View
from tests.fixtures import Patch
from tests.groups import Twins, on_members, threads
from tests.pipelines import job, pipeline
from tests.transport.helpers import LIMIT


@contextmanager
def sequence_ranks(
    sep: int, cp: int, made: Callable[[DirectGroup], Any] = lambda group: group
) -> Iterator[list[SequenceRanks]]:
    """Connects sep x cp ranks; ``made`` may put something around the group along cp."""

    def along(whole: DirectGroup, members: list[int], name: str) -> Any:
        if len(members) == 1:
            return SoleGroup()
        return made(DirectGroup(View(whole.transport, members), LIMIT, name))

    def seen_by(whole: DirectGroup) -> SequenceRanks:
        place, part = divmod(whole.rank, sep)
        return SequenceRanks(
            along(whole, [place * sep + other for other in range(sep)], "sep"),
            along(whole, [other * sep + part for other in range(cp)], "cp"),
        )

    if sep * cp == 1:
        yield [SequenceRanks(SoleGroup(), SoleGroup())]
        return
    with threads(sep * cp) as groups:
        yield [seen_by(group) for group in groups]


ROWS, SIZE = 2, 8


def plain(query: Any, key: Any, value: Any, causal: bool, documents: Any) -> Any:
    """Attention of whole sequences by one softmax."""
    heads = query.shape[2] // key.shape[2]
    query, key, value = (t.transpose([0, 2, 1, 3]) for t in (query, key, value))
    key, value = (paddle.repeat_interleave(t, heads, axis=1) for t in (key, value))
    length = query.shape[2]
    scores = paddle.matmul(query, key, transpose_y=True) / SIZE**0.5
    seen = paddle.ones([length, length], dtype="bool")
    seen = (paddle.tril(seen) if causal else seen).unsqueeze([0, 1])
    if documents is not None:
        same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
        seen = paddle.logical_and(seen, same.unsqueeze(1))
    scores = paddle.where(seen, scores, paddle.full([], -1e30))
    return paddle.matmul(functional.softmax(scores), value).transpose([0, 2, 1, 3])


class Case:
    """Random queries, keys, values and weights of the output; perhaps packed documents."""

    def __init__(self, length: int, heads: int, shared: int, packed: bool, seed: int = 0) -> None:
        numbers = np.random.default_rng(seed)
        sizes = [(ROWS, length, count, SIZE) for count in (heads, shared, shared, heads)]
        *self.inputs, self.weights = (
            paddle.to_tensor(numbers.standard_normal(size).astype("float32")) for size in sizes
        )
        self.documents = None
        if packed:
            ends = [np.sort(numbers.integers(1, length, 3)) for _ in range(ROWS)]
            ids = [[n - max(0, *e[e <= n], 0) for n in range(length)] for e in ends]
            self.documents = documents_of(paddle.to_tensor(np.array(ids)))

    def results(self, ranks: SequenceRanks | None, causal: bool, trained: str = "qkv") -> list[Any]:
        """The output and the gradients of query, key and value, whole; plain without ranks."""
        inputs = [t if ranks is None else ranks.own_part(t) for t in self.inputs]
        inputs = [tensor.detach().clone() for tensor in inputs]
        for name, tensor in zip("qkv", inputs):
            tensor.stop_gradient = name not in trained
        if ranks is None:
            output = plain(*inputs, causal, self.documents)
            (output * self.weights).sum().backward()
            return [t.numpy() for t in (output, *(t.grad for t in inputs))]
        documents = self.documents if self.documents is None else ranks.own_part(self.documents)
        output = attention(*inputs, causal=causal, documents=documents, ranks=ranks)
        (output * ranks.own_part(self.weights)).sum().backward()
        gradients = [t.grad for t in inputs if not t.stop_gradient]
        return [ranks.whole(t).numpy() for t in (output, *gradients)]


def gap(found: list[Any], expected: list[Any]) -> float:
    """The largest difference, relative to the largest number."""
    pairs = zip(found, expected)
    return max(float(np.abs(one - other).max() / np.abs(other).max()) for one, other in pairs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("sep", "cp", "heads", "shared"),
    [(1, 1, 2, 2), (2, 1, 4, 2), (4, 1, 4, 1), (3, 1, 6, 3), (1, 2, 4, 2), (2, 2, 4, 4)],
)
def test_split_attention_is_the_whole(
    sep: int, cp: int, heads: int, shared: int, causal: bool, packed: bool, monkeypatch: Patch
) -> None:
    """With tiles smaller than a chunk, and keys that several heads share."""
    monkeypatch.setattr(ring, "TILE", 5)
    case = Case(sep * cp * 12, heads, shared, packed)
    expected = case.results(None, causal)
    with sequence_ranks(sep, cp) as ranks:
        for found in on_members(ranks, lambda own: case.results(own, causal)):
            assert gap(found, expected) < 1e-5


@pytest.mark.parametrize(("sep", "cp"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("trained", ["qv", "k"])
def test_what_is_not_trained_gets_no_gradient(sep: int, cp: int, trained: str) -> None:
    """As frozen projections of a first layer make it, whose input needs none."""
    case = Case(8, 4, 2, packed=False)
    with sequence_ranks(sep, cp) as ranks:
        everything = on_members(ranks, lambda own: case.results(own, True))
        parts = on_members(ranks, lambda own: case.results(own, True, trained))
    for (output, *grads), part in zip(everything, parts):
        expected = [output, *(g for name, g in zip("qkv", grads) if name in trained)]
        assert [one.tobytes() for one in part] == [one.tobytes() for one in expected]


class Mirror(Twins):
    """Counts the bytes for the other member."""

    nbytes = 0

    def all_to_all(self, parts: list[Any]) -> list[Any]:
        self.nbytes += tensor_bytes(parts[1])
        return parts


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_bytes_that_are_counted_are_those_that_cross(dtype: str) -> None:
    inputs, group = [t.astype(dtype) for t in Case(24, 4, 2, False).inputs], Mirror()
    with groups.counting_traffic() as seen:
        for _ in range(2):
            attention(*inputs, ranks=SequenceRanks(group, SoleGroup()))  # type: ignore[arg-type]
    # Half of the queries, keys, values and outputs.
    assert group.nbytes == seen.queries + seen.keys // 2
    assert seen.heads == [4, 4]


def test_the_bits_depend_on_no_timing() -> None:
    case = Case(64, 4, 4, False)
    found = []
    for _ in range(2):
        with sequence_ranks(1, 4) as ranks:
            found.append(on_members(ranks, lambda own: case.results(own, True))[0])
    assert all(np.array_equal(one, other) for one, other in zip(*found))


class Watched:
    """A group whose member notes how much of what it was sent is in memory."""

    most = 0

    def __init__(self, group: DirectGroup) -> None:
        self.rank, self.ranks = group.rank, group.ranks
        self.all_gather = group.all_gather
        self._group = group
        self._alive: list[weakref.ref[Any]] = []
        self.held: list[int] = []

    def all_to_all(self, parts: list[Any]) -> list[Any]:
        """What is on its way counts too: a copy for another, and what comes in its place."""
        going = sum(int(part.size) for part in parts)
        got = self._group.all_to_all(parts)
        coming = [part for n, part in enumerate(got) if n != self.rank]
        alive = sum(int(t.size) for r in self._alive if (t := r()) is not None)
        self.held.append(going + alive + sum(int(part.size) for part in coming))
        self._alive += [weakref.ref(part) for part in coming if part.size]
        return got


def test_no_rank_holds_more_than_two_parts_of_keys_and_values() -> None:
    case, cp = Case(64, 4, 4, False), 4
    whole = 2 * int(case.inputs[1].size)
    with sequence_ranks(1, cp, Watched) as ranks, paddle.no_grad():
        on_members(ranks, lambda own: attention(*map(own.own_part, case.inputs), ranks=own))
        for own in ranks:
            assert len(own.cp.held) == 2 * (cp - 1)
            assert whole // cp + max(own.cp.held) <= 2 * whole // cp


def test_causal_work_is_shared_out_evenly(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ring, "TILE", 4)
    case, counted = Case(128, 2, 2, False), ring._scores
    work: dict[int, int] = {}

    def scores(*args: Any) -> Any:
        found = counted(*args)
        mine = threading.get_ident()
        work[mine] = work.get(mine, 0) + (0 if found is None else int(found.size))
        return found

    monkeypatch.setattr(ring, "_scores", scores)
    with sequence_ranks(1, 4) as ranks:
        on_members(ranks, lambda own: case.results(own, True))
    # Half of what all queries and all keys would be, and the diagonal.
    assert sum(work.values()) < 0.6 * 2 * ROWS * 2 * 128**2
    assert len(work) == 4
    assert max(work.values()) <= 1.1 * min(work.values())


class Fixed(SoleGroup):
    """The first member of a group that nobody reaches."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks


def ranks_of(sep: int = 1, cp: int = 1) -> SequenceRanks:
    return SequenceRanks(Fixed(sep), Fixed(cp))


def test_a_whole_sequence_is_put_together_in_its_order() -> None:
    whole = paddle.arange(2 * 24).reshape([2, 24])
    with sequence_ranks(3, 2) as ranks:
        found = on_members(ranks, lambda own: (own.whole(own.own_part(whole)), own.places(24)))
    assert all(np.array_equal(one.numpy(), whole.numpy()) for one, _ in found)
    # Chunks 0 and 3 of the first cp rank, cut in three.
    assert [places.tolist() for _, places in found[:3]] == [
        *([0, 1, 2, 3], [4, 5, 18, 19], [20, 21, 22, 23]),
    ]


def zeros(*shape: int) -> Any:
    return paddle.zeros([*shape])


def attend(*shapes: tuple[int, ...], **options: Any) -> Any:
    return attention(*(zeros(*shape) for shape in shapes), **options)


THREE = [(2, 4, 3, 8)] * 3
REFUSED: list[tuple[str, Callable[[], Any]]] = [
    ("heads that divide", lambda: attend((2, 4, 3, 8), (2, 4, 2, 8), (2, 4, 2, 8))),
    ("same places", lambda: attend((2, 4, 4, 8), (2, 8, 4, 8), (2, 8, 4, 8))),
    ("same places", lambda: attend(*[(2, 4, 8)] * 3)),
    ("document for each place", lambda: attend(*THREE, documents=zeros(2, 8))),
    ("3 heads cannot be shared out to sep_degree=2", lambda: attend(*THREE, ranks=ranks_of(2))),
    (
        "1 heads cannot be shared out to sep_degree=2",
        lambda: attend(*[(2, 4, 1, 8)] * 3, ranks=ranks_of(2)),
    ),
    ("key is no Tensor", lambda: attention(zeros(2, 4, 2, 8), np.zeros(2), zeros(2, 4, 2, 8))),
    (r"shape \[4\] has no axis 1", lambda: ranks_of().own_part((zeros(2, 4), zeros(4)))),
    ("whole number", lambda: ranks_of().places("4")),  # type: ignore[arg-type]
    *(
        ("(?s)sequence of 10.*pad sequences to 12", partial(ranks.own_part, (zeros(2, 10),) * 2))
        for ranks in (ranks_of(3), ranks_of(1, 2))
    ),
]


@pytest.mark.parametrize(("says", "call"), REFUSED)
def test_what_does_not_fit_is_refused(says: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=says):
        call()


def test_an_error_in_backward_keeps_its_type() -> None:
    from fleetpipe.dygraph.tensor_parallel import own_errors

    class Gone(Fixed):
        calls = 0

        def all_to_all(self, parts: Any) -> Any:
            self.calls += 1
            if self.calls > 2:
                raise PeerFailed("member 1 left")
            return parts

    tensors = [paddle.create_parameter([2, 4, 2, 8], "float32") for _ in range(3)]
    output = attention(*tensors, ranks=SequenceRanks(Gone(2), SoleGroup()))
    with pytest.raises(PeerFailed, match="member 1 left"), own_errors():
        output.sum().backward()


@pytest.mark.parametrize("odd", ["places", "documents", "causal", "scale", "dtype"])
@pytest.mark.parametrize(("sep", "cp"), [(2, 1), (1, 2)])
def test_ranks_that_attend_to_something_else_are_refused(sep: int, cp: int, odd: str) -> None:
    """The second rank has another part, other arguments, or documents alone."""

    def attend(own: SequenceRanks) -> str:
        second = own.sep.rank + own.cp.rank == 1
        dtype = "float64" if second and odd == "dtype" else "float32"
        tensors = [paddle.zeros([2, 8 if second and odd == "places" else 4, 2, 8], dtype)] * 3
        documents = paddle.ones([2, 4], "int32") if second and odd == "documents" else None
        causal = not (second and odd == "causal")
        scale = 2.0 if second and odd == "scale" else None
        with pytest.raises(ConfigError, match="attend to the same") as caught:
            attention(*tensors, causal, documents, scale, own)
        return str(caught.value)

    with sequence_ranks(sep, cp) as ranks:
        first, second = on_members(ranks, attend)
    assert "member 0 of 2" in first
    assert "member 1 of 2" in second
    says = {"places": "[2, 8, 2, 8]", "documents": "no documents", "causal": "=False"}
    assert {**says, "scale": "scale=2.0", "dtype": "float64"}[odd] in first


class Attention(nn.Layer):
    """Calls Paddle's function with some options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Any, key: Any, value: Any) -> Any:
        return functional.scaled_dot_product_attention(query, key, value, **self.options)


@pytest.mark.parametrize("causal", [False, True])
def test_alone_a_planned_layer_is_plain_attention(causal: bool) -> None:
    tensors = [paddle.rand([2, 6, 2, 8]) for _ in range(3)]
    layer = Attention(is_causal=causal)
    # Not the layer's: Paddle 2.6.2 has no kernel for it on CPU.
    expected = plain(*tensors, causal, None)
    stock = functional.scaled_dot_product_attention
    ContextParallel("all2all").apply(layer)
    assert np.allclose(layer(*tensors).numpy(), expected.numpy(), atol=1e-6)
    assert functional.scaled_dot_product_attention is stock


def test_a_prepared_layer_gets_this_ranks_places(monkeypatch: Patch) -> None:
    ranks = SequenceRanks(SoleGroup(), Fixed(2))
    monkeypatch.setattr(context_parallel, "sequence_ranks", lambda: ranks)
    layer = nn.Identity()
    PrepareContextParallel().apply(layer)
    assert layer(paddle.arange(8).unsqueeze(0)).tolist() == [[0, 1, 6, 7]]
    with pytest.raises(ConfigError, match="pad sequences to 8"):
        layer(paddle.zeros([1, 6]))
    other = nn.Identity()
    PrepareContextParallel("all2all").apply(other)
    with pytest.raises(ConfigError, match=r"(?s)along sep.*cp_degree=2"):
        other(paddle.zeros([1, 8]))


@pytest.mark.parametrize(
    ("options", "says"),
    [({"attn_mask": paddle.zeros([6, 6])}, "no mask"), ({"dropout_p": 0.5}, "no dropout")],
)
def test_a_mask_and_a_dropout_are_refused(options: dict[str, Any], says: str) -> None:
    layer = Attention(**options)
    ContextParallel().apply(layer)
    with pytest.raises(ConfigError, match=says):
        layer(*[paddle.rand([2, 6, 2, 8])] * 3)


def test_what_calls_no_attention_is_refused() -> None:
    layer = nn.Linear(4, 4)
    ContextParallel().apply(layer)
    with pytest.raises(ConfigError, match="Linear does not attend"):
        layer(paddle.rand([2, 4]))
    with pytest.raises(ConfigError, match="'p2p' or 'all2all'"):
        ContextParallel("ring")


@pytest.fixture
def split(monkeypatch: Patch) -> None:
    """Has a job believe that another rank has the rest of each sequence."""
    along = Job.along

    def of_two(self: Job, *axes: str) -> Any:
        return Fixed(2) if axes == ("sep", "cp") else along(self, *axes)

    monkeypatch.setattr(Job, "along", of_two)


@pytest.mark.usefixtures("split")
def test_sequence_chunks_and_undivided_losses_are_refused_by_name(monkeypatch: Patch) -> None:
    layers = [nn.Linear(6, 5), nn.Linear(5, 4)]
    chunks = r"(?s)Seq1F1B cuts sequences.*sep_degree x cp_degree = 2"
    with job(2, 4, "Seq1F1B", slices=2), pytest.raises(ConfigError, match=chunks):
        pipeline(layers)
    delayed = Switches(delay_scale_loss=True)
    monkeypatch.setattr(Switches, "from_strategy", lambda *_: delayed)
    with job(2), pytest.raises(ConfigError, match="delay_scale_loss"):
        pipeline(layers)
