"""Gradients, norms and losses that are summed by trees, beside plain Paddle's sums by hand."""

from __future__ import annotations

import functools
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import SplitPoint, fleet, parity
from fleetpipe.errors import ConfigError
from fleetpipe.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    RowParallelLinear,
    SharedLayerDesc,
)
from fleetpipe.job.job import current_job
from tests.pipelines import (
    CLASSES,
    FEATURES,
    ROWS,
    Trained,
    adamw,
    batch,
    bits,
    job,
    mlp_layers,
    pipeline,
    sgd,
    train,
)

VOCABULARY, LENGTH, WIDTH = 11, 5, 8
TREE = {"sums": "tree"}


class Embedding(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([VOCABULARY, WIDTH])

    def forward(self, ids: Any) -> Any:
        return nn.functional.embedding(ids, self.weight)


class Block(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.drop = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def logits(layer: Any, x: Any) -> Any:
    return paddle.matmul(x, layer.weight, transpose_y=True)


def token_loss(output: Any, labels: Any) -> Any:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def tied_layers(blocks: int = 4) -> list[Any]:
    """A language model whose embedding is its head, and stands in the middle once more."""
    tied = partial(SharedLayerDesc, "embedding", Embedding, shared_weight_attr="weight")
    middle = tied(forward_func=lambda layer, x: x + layer.weight.mean())
    half = [LayerDesc(Block) for _ in range(blocks // 2)]
    return [tied(), *half, middle, *half, tied(forward_func=logits)]


def tokens(micro_batches: int, seed: int) -> list[Any]:
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, (micro_batches * ROWS, LENGTH + 1))
    return [paddle.to_tensor(ids[:, :-1]), paddle.to_tensor(ids[:, 1:])]


def clipped(model: Any) -> Any:
    clip = nn.ClipGradByGlobalNorm(0.5)
    return adamw(model, grad_clip=clip)


def train_tied(
    pp: int = 1, schedule: str = "1F1B", micro_batches: int = 6, **options: Any
) -> Trained:
    return train(
        *(tied_layers(), pp, schedule),
        micro_batches=micro_batches,
        data=tokens,
        optimizer=clipped,
        configs=TREE,
        gradients=True,
        loss_fn=token_loss,
        seg_method="uniform",
        **options,
    )


@functools.cache
def alone() -> Trained:
    return train_tied()


@pytest.mark.parametrize(
    ("pp", "schedule", "options"),
    [
        (2, "1F1B", {}),
        (3, "FThenB", {}),
        (2, "Eager1F1B", {}),
        (2, "ZBH1", {}),
        (2, "ZBH2", {}),
        (2, "ZBV", {"num_virtual_pipeline_stages": 2}),
        (2, "VHalf", {"num_virtual_pipeline_stages": 2}),
        (2, "VMin", {"num_virtual_pipeline_stages": 2}),
        (2, "DualPipeV", {"num_virtual_pipeline_stages": 2}),
        (2, "1F1B", {"num_virtual_pipeline_stages": 2}),
        (2, "1F1B", {"recompute_interval": 1, "recompute_ctx": {"mp_group": None}}),
        (1, "1F1B", {"recompute_interval": 3, "recompute_ctx": {"mp_group": None}}),
    ],
)
def test_no_schedule_changes_a_bit(pp: int, schedule: str, options: dict[str, Any]) -> None:
    assert train_tied(pp, schedule, **options) == alone()


def shard_of_rank(data: list[Any], copies: int) -> list[Any]:
    """The part of a batch of all replicas that this rank's replica takes."""
    copy, rows = current_job().copy, len(data[0]) // copies
    return [part[copy * rows : (copy + 1) * rows] for part in data]


def tied_model() -> Any:
    paddle.seed(0)
    return pipeline(tied_layers(), loss_fn=token_loss, seg_method="uniform")


def train_on_a_rank(**degrees: int) -> dict[str, bytes]:
    copies = degrees.get("dp", 1) * degrees.get("sharding", 1)
    with job(micro_batches=8 // copies, **TREE, **degrees):
        model = tied_model()
        optimizer = clipped(model)
        for step in range(2):
            loss = model.train_batch(shard_of_rank(tokens(8, step), copies), optimizer)
        return {**bits(model.layers.full_state_dict()), "loss": loss.numpy().tobytes()}


def compare_on_a_rank(**degrees: int) -> tuple[bool, float]:
    copies = degrees.get("dp", 1)
    with job(micro_batches=8 // copies, **TREE, **degrees):
        model = tied_model()
        session = parity.begin(model, clipped(model))
        for step in range(2):
            session.step(shard_of_rank(tokens(8, step), copies))
        return session.report.bit_exact, session.report.tolerance


def compare_shards() -> tuple[bool, float]:
    layers = [
        LayerDesc(nn.Linear, FEATURES, 16),
        LayerDesc(ColumnParallelLinear, 16, 64, has_bias=True, gather_output=False),
        LayerDesc(RowParallelLinear, 64, CLASSES, input_is_parallel=True),
    ]
    with job(micro_batches=4, mp=2, **TREE):
        paddle.seed(0)
        model = pipeline(layers)
        session = parity.begin(model, clipped(model))
        session.step(batch(4, 0))
        session.step(batch(4, 1))
        return session.report.bit_exact, session.report.tolerance


def wrap_another_model() -> None:
    """A rank refuses a model that is no PipelineLayer, and only with replicas."""
    with job(1, 1, mp=2, **TREE):
        fleet.distributed_model(nn.Linear(2, 2))
    with job(1, 1, dp=2, **TREE), pytest.raises(ConfigError, match="a PipelineLayer where"):
        fleet.distributed_model(nn.Linear(2, 2))


def on_two() -> tuple[list[dict[str, bytes]], list[tuple[bool, float]]]:
    """What a rank of two trains in each layout, and how parity finds it there."""
    layouts: list[dict[str, int]] = [{"pp": 2}, {"dp": 2}]
    trained = [*layouts, {"sharding": 2, "sharding_stage": 2}]
    wrap_another_model()
    compared = [compare_shards(), *(compare_on_a_rank(**degrees) for degrees in layouts)]
    return [train_on_a_rank(**degrees) for degrees in trained], compared


def on_four() -> tuple[list[dict[str, bytes]], list[tuple[bool, float]]]:
    sharded = [{"dp": 2, "sharding": 2, "sharding_stage": stage} for stage in (1, 2)]
    both = {"pp": 2, "dp": 2}
    return [train_on_a_rank(**d) for d in (*sharded, both)], [compare_on_a_rank(**both)]


@pytest.mark.parametrize(("program", "ranks"), [(on_two, 2), (on_four, 4)])
def test_no_degree_changes_a_bit_and_parity_compares_bits(
    on_ranks: Any, program: Any, ranks: int
) -> None:
    expected = train_on_a_rank()
    for trained, compared in on_ranks(program, ranks):
        assert trained == [expected] * len(trained)
        assert compared == [(True, 0.0)] * len(compared)


def test_parity_by_micro_batch_and_with_weights() -> None:
    with job(2, **TREE):
        model = pipeline(tied_layers(), loss_fn=token_loss)
        session = parity.begin(model, sgd(model))
        weights = [Fraction(number, 10) for number in (1, 2, 3, 4)]
        session.step(tokens(4, 0), return_micro_batch_loss=True, weights=weights)
        assert session.report.bit_exact


def test_a_batch_is_added_to_gradients_that_are_left() -> None:
    with job(2, **TREE):
        paddle.seed(0)
        model = pipeline()
        model.forward_backward_pipeline(batch(4, 0))
        first = [p.grad.clone() for p in model.parameters()]
        model.forward_backward_pipeline(batch(4, 1))
        both = [p.grad.numpy().tobytes() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.clear_gradient(False)
        model.forward_backward_pipeline(batch(4, 1))
        second = [p.grad for p in model.parameters()]
    assert both == [(one + other).numpy().tobytes() for one, other in zip(first, second)]


def test_a_checkpoint_goes_on_with_the_other_sums_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def go_on(sums: str) -> None:
        with job(2, sums=sums):
            model = pipeline()
            manager = fleetpipe.CheckpointManager(tmp_path)
            optimizer = sgd(model)
            if manager.steps():
                manager.restore(model=model, optimizer=optimizer)
            model.train_batch(batch(4, 0), optimizer)
            manager.save(len(manager.steps()) + 1, model=model, optimizer=optimizer)

    with caplog.at_level("INFO"):
        go_on("tree")
        go_on("tree")
        assert "sums were" not in caplog.text
        go_on("running")
    assert "sums were 'tree' and are 'running': the bits are others" in caplog.text


def test_what_adds_up_otherwise_is_refused() -> None:
    with job(1, **TREE):
        table = LayerDesc(nn.Embedding, VOCABULARY, WIDTH, sparse=True)
        model = pipeline(
            [table, LayerDesc(nn.Linear, WIDTH, 4)], loss_fn=lambda output, labels: output.mean()
        )
        with pytest.raises(ConfigError, match="sparse"):
            model.train_batch(tokens(4, 0), sgd(model))


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_what_a_hook_stores_or_returns_keeps_its_numbers(schedule: str) -> None:
    stored: list[tuple[Any, Any]] = []
    with job(2, 4, schedule, **TREE):
        model = pipeline(mlp_layers())
        weight, bias, *_ = model.parameters()
        ones = paddle.ones_like(weight)
        weight.register_hook(lambda gradient: ones)
        bias.register_hook(lambda gradient: stored.append((gradient, gradient.numpy().copy())))
        for step in range(2):
            model.forward_backward_pipeline(batch(4, step))
        assert (weight.grad.numpy() == 8.0).all()
        assert (ones.numpy() == 1.0).all()
        assert len(stored) == 8
        assert all((tensor.numpy() == numbers).all() for tensor, numbers in stored)


def test_a_hook_on_a_tied_weight_is_refused_before_the_batch() -> None:
    with job(1, **TREE):
        model = pipeline(tied_layers(), loss_fn=token_loss)
        model.parameters()[0].register_hook(lambda gradient: gradient)
        with pytest.raises(ConfigError, match="a hook"):
            model.train_batch(tokens(4, 0), sgd(model))


class Plain(nn.Layer):
    """A plain model, whose head may be its embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.first, self.second = Block(), Block()
        self.head = None if tied else nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Any) -> Any:
        x = self.second(self.first(self.embedding(ids)))
        return logits(self.embedding, x) if self.head is None else self.head(x)


def train_captured(pp: int, tied: bool, cut: str = "first") -> tuple[list[bytes], dict[str, bytes]]:
    with job(pp, 4, **TREE):
        paddle.seed(0)
        plain, splits = Plain(tied), {cut: SplitPoint.END} if pp > 1 else "auto"
        example = tokens(1, 0)[0]
        model = fleet.distributed_model(
            fleetpipe.pipeline(
                plain, (example,), loss_fn=token_loss, split_spec=splits, verify=False
            )
        )
        optimizer = clipped(model)
        losses = [model.train_batch(tokens(4, step), optimizer) for step in range(2)]
        state = bits(model.layers.full_state_dict())
    return [loss.numpy().tobytes() for loss in losses], state


def test_a_captured_model_has_the_bits_of_one_stage() -> None:
    assert train_captured(2, tied=False) == train_captured(1, tied=False)
    assert train_captured(2, tied=True, cut="second") == train_captured(2, tied=True)


def test_nodes_of_one_stage_that_share_a_weight_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)two nodes of one stage.*'running'"):
        train_captured(1, tied=True)


class WithHead(nn.Layer):
    """A loss that shrinks the head, a layer of the list."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = head

    def forward(self, output: Any, label: Any) -> Any:
        return nn.functional.cross_entropy(output, label) + (self.head.weight**2).sum()


def test_a_loss_that_uses_a_weight_of_the_list_is_refused_by_its_layer() -> None:
    head = nn.Linear(FEATURES, CLASSES)
    with job(2, 2, **TREE):
        model = pipeline([LayerDesc(nn.Linear, FEATURES, FEATURES), head], loss_fn=WithHead(head))
        with pytest.raises(ConfigError, match=r"layer 1 of the list, parameter .*"):
            model.train_batch(batch(2), sgd(model))
