"""Gradients, norms and losses that are summed by trees, beside plain Paddle's sums by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def tied_layers(blocks: int = 6) -> list[Any]:
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
    pp: int = 1, schedule: str = "1F1B", micro_batches: int = 12, **options: Any
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


def by_hand(values: Sequence[Any]) -> Any:
    """The sum by a tree, written down once more."""
    if len(values) % 2 == 0:
        middle = len(values) // 2
        return by_hand(values[:middle]) + by_hand(values[middle:])
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def train_by_hand(layers: Callable[[], list[Any]], micro_batches: int, steps: int = 2) -> Trained:
    """SGD in plain Paddle on a list of layers, each of which is one use of its parameters."""
    with job(1, micro_batches):
        paddle.seed(0)
        model = pipeline(layers()).layers.single_model()
    optimizer, losses = paddle.optimizer.SGD(0.1, parameters=model.parameters()), []
    for step in range(steps):
        gradients, shares = [], []
        for inputs, labels in zip(
            *(part.split(micro_batches) for part in batch(micro_batches, step))
        ):
            share = nn.functional.cross_entropy(model(inputs), labels) / micro_batches
            share.backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
            optimizer.clear_grad()
            shares.append(share.detach())
        for parameter, *parts in zip(model.parameters(), *gradients):
            parameter.grad = by_hand(parts)
        optimizer.step()
        optimizer.clear_grad()
        losses.append(by_hand(shares).numpy().tobytes())
    return Trained(losses, bits(model.state_dict()), {})


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 6, 8, 12])
@pytest.mark.parametrize(("pp", "schedule"), [(1, "1F1B"), (2, "ZBH1")])
def test_sums_are_those_of_a_tree_by_hand(micro_batches: int, pp: int, schedule: str) -> None:
    trained = train(mlp_layers(), pp, schedule, micro_batches=micro_batches, configs=TREE)
    assert trained == train_by_hand(mlp_layers, micro_batches)


def test_uses_of_a_tied_weight_are_added_in_the_order_of_the_layers() -> None:
    micro_batches = 4
    with job(1, micro_batches, **TREE):
        paddle.seed(0)
        model = pipeline(tied_layers(0), loss_fn=token_loss)
        inputs, labels = tokens(micro_batches, 0)
        weight = model.parameters()[0]
        uses = [weight.clone().detach() for _ in range(3)]
        model.forward_backward_pipeline([inputs, labels])
    parts: list[list[Any]] = [[], [], []]
    for ids, wanted in zip(inputs.split(micro_batches), labels.split(micro_batches)):
        for use in uses:
            use.stop_gradient = False
        first, middle, last = uses
        x = nn.functional.embedding(ids, first)
        x = paddle.matmul(x + middle.mean(), last, transpose_y=True)
        gradients = paddle.grad(token_loss(x, wanted) / micro_batches, uses)
        for part, gradient in zip(parts, gradients):
            part.append(gradient)
    first, middle, last = map(by_hand, parts)
    assert weight.grad.numpy().tobytes() == ((first + middle) + last).numpy().tobytes()


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
    assert train_tied(pp, schedule, **options) == train_tied()


def shard_of_rank(data: list[Any], copies: int) -> list[Any]:
    """The part of a batch of all replicas that this rank's replica takes."""
    copy, rows = current_job().copy, len(data[0]) // copies
    return [part[copy * rows : (copy + 1) * rows] for part in data]


def _train_on_a_rank(**degrees: int) -> dict[str, bytes]:
    stage, total = degrees.pop("stage", 1), 8
    copies = degrees.get("dp", 1) * degrees.get("sharding", 1)
    with job(micro_batches=total // copies, sharding_stage=stage, **TREE, **degrees):
        paddle.seed(0)
        model = pipeline(tied_layers(), loss_fn=token_loss, seg_method="uniform")
        optimizer = clipped(model)
        for step in range(2):
            loss = model.train_batch(shard_of_rank(tokens(total, step), copies), optimizer)
        return {**bits(model.layers.full_state_dict()), "loss": loss.numpy().tobytes()}


@pytest.mark.parametrize(
    "degrees",
    [
        {"pp": 2},
        {"dp": 2},
        {"sharding": 2, "stage": 2},
        {"dp": 2, "sharding": 2},
        {"dp": 2, "sharding": 2, "stage": 2},
        {"pp": 2, "dp": 2},
    ],
)
def test_no_degree_changes_a_bit(on_ranks: Any, degrees: dict[str, int]) -> None:
    ranks = int(np.prod([n for axis, n in degrees.items() if axis != "stage"]))
    (alone,) = on_ranks(partial(_train_on_a_rank), 1)
    assert on_ranks(partial(_train_on_a_rank, **degrees), ranks) == [alone] * ranks


def _compare_on_a_rank(**degrees: int) -> tuple[bool, float]:
    copies = degrees.get("dp", 1) * degrees.get("sharding", 1)
    with job(micro_batches=8 // copies, **TREE, **degrees):
        paddle.seed(0)
        model = pipeline(tied_layers(), loss_fn=token_loss, seg_method="uniform")
        session = parity.begin(model, clipped(model))
        for step in range(2):
            session.step(shard_of_rank(tokens(8, step), copies))
        return session.report.bit_exact, session.report.tolerance


@pytest.mark.parametrize("degrees", [{"pp": 2}, {"dp": 2}, {"pp": 2, "dp": 2}])
def test_parity_compares_bits_of_tied_weights_and_replicas(
    on_ranks: Any, degrees: dict[str, int]
) -> None:
    ranks = int(np.prod([*degrees.values()]))
    assert on_ranks(partial(_compare_on_a_rank, **degrees), ranks) == [(True, 0.0)] * ranks


def _compare_shards() -> tuple[bool, float]:
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


def test_parity_compares_bits_of_shards(on_ranks: Any) -> None:
    assert on_ranks(_compare_shards, 2) == [(True, 0.0)] * 2


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


@pytest.mark.parametrize(("saved", "restored"), [("tree", "running"), ("running", "tree")])
def test_a_checkpoint_goes_on_with_the_other_sums_and_says_so(
    saved: str, restored: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
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
        go_on(saved)
        go_on(saved)
        assert "sums were" not in caplog.text
        go_on(restored)
    assert f"sums were {saved!r} and are {restored!r}: the bits are others" in caplog.text


def _sparse() -> list[Any]:
    return [LayerDesc(nn.Embedding, VOCABULARY, WIDTH, sparse=True), LayerDesc(nn.Linear, WIDTH, 4)]


def test_what_adds_up_otherwise_is_refused() -> None:
    with job(1, **TREE):
        model = pipeline(_sparse(), loss_fn=lambda output, labels: output.mean())
        with pytest.raises(ConfigError, match="sparse"):
            model.train_batch(tokens(4, 0), sgd(model))


def _wrap_another_model() -> bool:
    """Returns whether a rank refuses a model that is no PipelineLayer, and only with replicas."""
    with job(1, 1, mp=2, **TREE):
        fleet.distributed_model(nn.Linear(2, 2))
    with job(1, 1, dp=2, **TREE), pytest.raises(ConfigError, match="a PipelineLayer where"):
        fleet.distributed_model(nn.Linear(2, 2))
    return True


def test_replicas_of_another_model_are_refused(on_ranks: Any) -> None:
    assert on_ranks(_wrap_another_model, 2) == [True, True]


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
            fleetpipe.pipeline(plain, (example,), loss_fn=token_loss, split_spec=splits)
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
