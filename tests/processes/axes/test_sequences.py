"""Four ranks that split sequences, beside a pipeline: parity, checkpoints, profiles and traces."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional

from fleetpipe import fleet, parity
from fleetpipe.cli import main
from fleetpipe.dygraph import sequences
from fleetpipe.dygraph.tensor_parallel import share_of
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.paddle_api import VERSION
from fleetpipe.profiling import Profile
from tests import pipelines
from tests.pipelines import adamw
from tests.processes.axes.test_hybrid import trained_through

parts: Any = fleet.utils.sequence_parallel_utils
VOCABULARY, WIDTH, HEADS, LENGTH, BLOCKS = 11, 8, 4, 16, 2
MICRO_BATCHES, ROWS = 2, 2


def plain_attention(query: Any, key: Any, value: Any, documents: Any) -> Any:
    """Causal attention of ``[rows, length, heads, size]`` within documents, by one softmax."""
    query, key, value = (t.transpose([0, 2, 1, 3]) for t in (query, key, value))
    scores = paddle.matmul(query, key, transpose_y=True) / query.shape[-1] ** 0.5
    seen = paddle.tril(paddle.ones(scores.shape[-2:], dtype="bool"))
    same = (documents.unsqueeze(-1) == documents.unsqueeze(-2)).unsqueeze(1)
    scores = paddle.where(paddle.logical_and(seen, same), scores, paddle.full([], -1e30))
    return paddle.matmul(functional.softmax(scores), value).transpose([0, 2, 1, 3])


class Embedding(nn.Layer):
    """Tokens and their positions; the documents go along."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, value: Any) -> Any:
        ids, positions, documents = value
        return self.tokens(ids) + self.positions(positions), documents


class Block(nn.Layer):
    """Attention and two products on whole sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.LayerList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias_attr=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, query: Any, key: Any, value: Any, documents: Any) -> Any:
        return plain_attention(query, key, value, documents)

    def attention(self, x: Any, documents: Any) -> Any:
        rows, length, _ = x.shape
        size = WIDTH // HEADS
        split = self.qkv(x).reshape([rows, length, -1, 3 * size]).split(3, axis=-1)
        return self.out(self.attend(*split, documents).reshape([rows, length, -1]))

    def forward(self, value: Any) -> Any:
        x, documents = value
        x = x + self.attention(self.norms[0](x), documents)
        return x + self.down(functional.gelu(self.up(self.norms[1](x)))), documents


class Head(nn.Layer):
    """Logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, value: Any) -> Any:
        return self.linear(value[0])


class BlockOfParts(Block):
    """The same on this rank's places."""

    def attend(self, query: Any, key: Any, value: Any, documents: Any) -> Any:
        return sequences.attention(query, key, value, documents=documents)


class SequenceParallelEmbedding(Embedding):
    """Gives each member a part of the sequence, which is the first axis from here on."""

    def forward(self, value: Any) -> Any:
        x, documents = super().forward(value)
        return parts.ScatterOp.apply(x.transpose([1, 0, 2])), documents


class MembersOfParts(Block):
    """Norms and residuals on parts of the sequence; products of shards on this rank's places."""

    def __init__(self) -> None:
        super().__init__()
        column, row = (
            getattr(parts, f"{kind}SequenceParallelLinear") for kind in ("Column", "Row")
        )
        self.heads = share_of(HEADS, "num_heads")
        self.qkv = column(WIDTH, 3 * WIDTH, has_bias=False, gather_output=False)
        self.out = row(WIDTH, WIDTH, input_is_parallel=True)
        self.up = column(WIDTH, 4 * WIDTH, has_bias=True, gather_output=False)
        self.down = row(4 * WIDTH, WIDTH, input_is_parallel=True)
        for parameter in self.norms.parameters():
            parts.mark_as_sequence_parallel_parameter(parameter)

    def attention(self, x: Any, documents: Any) -> Any:
        whole = self.qkv(x).transpose([1, 0, 2])
        rows, length, _ = whole.shape
        split = whole.reshape([rows, length, self.heads, -1]).split(3, axis=-1)
        seen = sequences.attention(*split, documents=documents).reshape([rows, length, -1])
        return self.out(seen.transpose([1, 0, 2]))


class SequenceParallelHead(Head):
    """Logits of whole sequences, the same on all members."""

    def forward(self, value: Any) -> Any:
        return super().forward([parts.GatherOp.apply(value[0]).transpose([1, 0, 2])])


def layers(kind: str) -> list[Any]:
    embedding, block, head = {
        "parts": (Embedding, BlockOfParts, Head),
        "apart": (Embedding, Block, Head),  # wrong: a place sees this rank's places alone
        "members of parts": (SequenceParallelEmbedding, MembersOfParts, SequenceParallelHead),
    }[kind]
    return [LayerDesc(embedding), *[LayerDesc(block)] * BLOCKS, LayerDesc(head)]


def data(step: int) -> tuple[Any, Any]:
    """Packed sequences of documents of any length; labels of 0 do not count."""
    numbers = np.random.default_rng(step)
    size = (MICRO_BATCHES * ROWS, LENGTH)
    ids, labels = (numbers.integers(0, VOCABULARY, size) for _ in range(2))
    labels[numbers.random(size) < np.linspace(0.9, 0, LENGTH)] = 0
    begins = numbers.random(size) < 0.2
    begins[:, 0] = True
    places = np.arange(LENGTH)
    positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    inputs = (ids, positions, begins.cumsum(axis=1))
    return tuple(map(paddle.to_tensor, inputs)), paddle.to_tensor(labels)


def own_rows(value: Any, replicas: int) -> Any:
    """The rows of this replica, of each tensor."""
    hcg = fleet.get_hybrid_communicate_group()
    rank = max(hcg.get_data_parallel_rank(), hcg.get_sharding_parallel_rank())
    if isinstance(value, tuple):
        return tuple(own_rows(one, replicas) for one in value)
    return value.split(replicas)[rank]


def verdicts(cases: list[tuple[str, dict[str, int], dict[str, Any]]]) -> list[tuple[str, str]]:
    """What parity says of jobs: its verdict, and the first thing that differs."""
    texts = []
    for kind, degrees, options in cases:
        replicas = degrees.get("dp", 1)
        count = MICRO_BATCHES // replicas
        fleet.init(is_collective=True, strategy=pipelines.strategy(count, own=options, **degrees))
        session = parity.begin(*piped(kind))
        session.step(list(sequences.own_part(own_rows(data(1), replicas))))
        batch = list(sequences.own_part(own_rows(data(2), replicas)))
        session.eval_batch(batch, compute_loss=True)
        session.predict_batch(batch[0])
        fleet.shutdown()
        texts.append((session.report.verdict(), str(session.report.differences[:1])))
    return texts


def piped(kind: str = "parts") -> tuple[Any, Any]:
    paddle.seed(5)
    model = pipelines.pipeline(layers(kind), loss_fn=nn.CrossEntropyLoss(ignore_index=0))
    return model, adamw(model)


def own_part(_: Any, step: int) -> list[Any]:
    """This rank's places of a batch."""
    return list(sequences.own_part(data(step)))


def trained_and_profiled(folder: Path, jobs: list[dict[str, Any]]) -> tuple[list[Any], list[str]]:
    """Returns what `trained_through` does, and profiles under the first two jobs."""
    legs = trained_through(folder, jobs, piped, own_part)
    profiles = []
    for options in jobs[:2]:
        with pipelines.begun(pipelines.strategy(**options)) as running:
            profiles.append(piped()[0].profile(own_part(running, 0)).dumps())
    return legs, profiles


def test_parity_joins_the_parts_of_sequences(on_ranks: Callable[..., Any]) -> None:
    tokens = {"loss_reduction": "tokens"}
    cases: list[Any] = [
        ("parts", {"pp": 2, "sep": 2}, {}),
        ("parts", {"pp": 2, "cp": 2}, tokens),
        ("parts", {"dp": 2, "sep": 2}, tokens),
        ("members of parts", {"mp": 2, "cp": 2}, {}),
    ]
    cases = [case for case in cases if not VERSION.startswith("2.") or "cp" not in case[1]]
    for found in on_ranks(verdicts, 4, [*cases, ("apart", {"pp": 2, "sep": 2}, {})], timeout=240):
        for case, (verdict, first) in zip(cases, found):
            assert "equal within 1e-05" in verdict, (case, verdict, first)
        verdict, first = found[-1]
        assert "FAILED" in verdict
        assert "quantity='output', name='1." in first


@pytest.mark.once
def test_checkpoints_and_traces_of_split_sequences(
    on_ranks: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts = [{"pp": 2, "sep": 2}, {"pp": 4}, {"pp": 2, "sep": 2}]
    jobs = [
        {**degrees, "micro_batches": MICRO_BATCHES, "own": {"trace": str(tmp_path / f"{step}")}}
        for step, degrees in enumerate(layouts)
    ]
    legs, profiles = on_ranks(trained_and_profiled, 4, tmp_path / "a", jobs, timeout=240)[0]
    for (_, _, saved), (_, restored, _) in itertools.pairwise(legs):
        assert restored == saved
    # Half of queries, keys, values and outputs, forward and backward, in float32.
    half = ROWS * LENGTH // 2 * WIDTH // 2 * 4
    parts, whole = map(Profile.loads, profiles)
    assert [layer.exchanged for layer in parts.layers] == [0, 8 * half, 8 * half, 0]
    assert [layer.exchanged for layer in whole.layers] == [0] * 4
    # What one of whole sequences says of split ones.
    priced = whole.with_degrees(*parts.degrees)
    for name in ("exchanges", "exchanged", "queries", "keys", "parameters"):
        assert [getattr(one, name) for one in priced.layers] == [
            getattr(one, name) for one in parts.layers
        ]
    alone = trained_through(
        tmp_path / "b", [{"pp": 4, "micro_batches": MICRO_BATCHES}] * 3, piped, own_part
    )
    assert [leg[0] for leg in legs] == pytest.approx([leg[0] for leg in alone], rel=1e-5)
    traces = [(tmp_path / f"{step}" / "trace.json").read_text() for step in (0, 1)]
    assert ['"exchange"' in trace for trace in traces] == [True, False]
    assert main(["why", str(tmp_path / "0")]) == 0
    assert "steps" in capsys.readouterr().out
