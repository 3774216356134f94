"""Jobs whose layers are cut: without and with a pipeline, and what they refuse."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional

from fleetpipe import fleet, parity
from fleetpipe.dygraph.tensor_parallel import whole_value
from fleetpipe.errors import ConfigError, PeerFailed
from fleetpipe.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    ParallelCrossEntropy,
    PipelineLayer,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_rng_state_tracker,
)
from fleetpipe.job.job import current_job
from tests import pipelines
from tests.fixtures import Call
from tests.pipelines import adamw, bits, momentum, sgd
from tests.pipelines import pipeline as wrapped_pipeline

RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
WORLD = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
VOCABULARY, WIDTH, LENGTH = 12, 6, 4
begin = partial(pipelines.begin, micro_batches=2)


class Language(nn.Layer):
    """Written as for GPUs: Fleet's topology and Paddle's own names of the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.table = VocabParallelEmbedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, has_bias=True, gather_output=False)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, input_is_parallel=True)

    def forward(self, ids: Any, whole: bool = False) -> Any:
        hidden = self.table(ids)
        hidden = hidden + self.down(functional.gelu(self.up(self.norm(hidden))))
        hcg = fleet.get_hybrid_communicate_group()
        if hcg.get_model_parallel_world_size() == 1:
            return paddle.matmul(hidden, self.table.weight, transpose_y=True)
        group = hcg.get_model_parallel_group()
        hidden = paddle.distributed.collective._c_identity(hidden, group=group)
        logits = paddle.matmul(hidden, self.table.weight, transpose_y=True)
        if not whole:
            return logits
        return paddle.distributed.collective._c_concat(logits, group=group)


def mean_entropy(logits: Any, label: Any) -> Any:
    return ParallelCrossEntropy()(logits, label).mean()


def plain() -> dict[str, Any]:
    """Trains `Language` in a plain loop."""
    dp, mp = (2, 2) if WORLD == 4 else (1, 1)
    paddle.seed(5)
    begin(dp=dp, mp=mp)
    drawn = paddle.rand([1]).item()
    model = Language()
    model.norm.weight.set_value(paddle.full([WIDTH], 1.0 + RANK))
    model = fleet.distributed_model(model)
    optimizer = adamw(model, grad_clip=nn.ClipGradByGlobalNorm(0.3))
    replica = fleet.get_hybrid_communicate_group().get_data_parallel_rank()
    slice_rank = fleet.get_hybrid_communicate_group().get_model_parallel_rank()
    losses = []
    for step in range(5):
        ids = np.random.default_rng(step).integers(0, VOCABULARY, (8, LENGTH + 1))
        ids = ids[replica * 8 // dp :][: 8 // dp]
        # The first member's inputs count.
        inputs = paddle.to_tensor(ids[:, :-1] * (slice_rank == 0))
        loss = mean_entropy(model(inputs), paddle.to_tensor(ids[:, 1:]))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    logits = model(paddle.arange(LENGTH).unsqueeze(0), whole=True)
    state = {
        name: whole_value(tensor, tensor).numpy() for name, tensor in model.state_dict().items()
    }
    return {"losses": losses, "state": state, "logits": logits.numpy(), "drawn": drawn}


class Streams(nn.Layer):
    """Drops in a stream that all members have alike, and in one that each has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([WIDTH])
        self.seen: dict[str, list[Any]] = {"global_seed": [], "local_seed": []}

    def forward(self, x: Any) -> Any:
        for name, seen in self.seen.items():
            with get_rng_state_tracker().rng_state(name):
                mask = functional.dropout(paddle.ones_like(x), 0.5)
            seen.append(mask.numpy().tolist())
        with get_rng_state_tracker().rng_state("global_seed"):
            return functional.dropout(x * (1 + self.weight), 0.1)


def pipeline(folder: Path) -> dict[str, Any]:
    """Trains a pipeline beside its single model, and writes and reads its state."""
    begin(mp=2, pp=2)
    hcg = fleet.get_hybrid_communicate_group()
    get_rng_state_tracker().add("global_seed", 17)
    get_rng_state_tracker().add("local_seed", 18 + hcg.get_model_parallel_rank())
    # Members whose own generators differ agree on one draw.
    paddle.seed(100 + hcg.get_model_parallel_rank())
    layers = [
        LayerDesc(VocabParallelEmbedding, VOCABULARY, WIDTH),
        LayerDesc(Streams),
        LayerDesc(ColumnParallelLinear, WIDTH, 4 * WIDTH, has_bias=True, gather_output=False),
        nn.Dropout(0.0),
        LayerDesc(RowParallelLinear, 4 * WIDTH, WIDTH, input_is_parallel=True),
        LayerDesc(ColumnParallelLinear, WIDTH, VOCABULARY, gather_output=False),
    ]
    model = wrapped_pipeline(layers, loss_fn=mean_entropy, seg_method=[0, 3])
    optimizer = momentum(model, 0.1, grad_clip=nn.ClipGradByNorm(0.05))
    session = parity.begin(model, optimizer)
    for step in range(3):
        ids = np.random.default_rng(step).integers(0, VOCABULARY, (4, LENGTH + 1))
        session.step([paddle.to_tensor(ids[:, :-1]), paddle.to_tensor(ids[:, 1:])])
    state = model.layers.full_state_dict()
    for tensor in model.parameters():
        tensor.set_value(paddle.zeros_like(tensor))
    model.layers.load_from(state)
    again = model.layers.full_state_dict()
    reread, files = read_again(model.layers, folder)
    streams = [part.seen for part in model.sublayers() if isinstance(part, Streams)]
    return {
        "verdict": session.report.verdict(),
        "passed": session.report.passed,
        "tolerance": session.report.tolerance,
        "shapes": {name: list(value.shape) for name, value in state.items()},
        "bits": bits(state),
        "same": bits(state) == bits(again),
        "slots": {slot.name: list(slot.shape) for slot in model.layers.state.slots()},
        "streams": streams[0] if streams else None,
        "reread": reread,
        "files": files,
    }


def read_again(layers: Any, folder: Path) -> tuple[bool, list[str]]:
    """Writes a folder and reads it; returns whether all came back, and the names of the files."""
    layers.save_state_dict(folder)
    wait_for_all()
    expected = bits(layers.state_dict())
    for parameter in layers.parameters():
        parameter.set_value(paddle.zeros_like(parameter))
    layers.set_state_dir(folder)
    return bits(layers.state_dict()) == expected, sorted(
        file.name for file in folder.glob("layer*")
    )


def wait_for_all() -> None:
    """Returns when all ranks of the job are here."""
    running = current_job()
    assert running is not None
    running.everyone().all_gather(None)


def lost() -> tuple[str, str]:
    """Trains where the second member fails in backward; the error of the other one."""
    begin(mp=2)
    model = ColumnParallelLinear(4, 4, gather_output=True)

    def fail(grad: Any) -> Any:
        raise ValueError("this gradient is no good")

    layers = PipelineLayer(
        [nn.Linear(4, 4), model],
        num_stages=1,
        loss_fn=lambda output, label: (output * label).mean(),
    )
    wrapped = fleet.distributed_model(layers)
    optimizer = sgd(wrapped)
    paddle.seed(1)
    data = [paddle.rand([4, 4]), paddle.rand([4, 4])]
    wrapped.train_batch(data, optimizer)
    if RANK == 1:
        model.register_forward_post_hook(lambda *_: _[2].register_hook(fail) and None)
    try:
        wrapped.train_batch(data, optimizer)
    except PeerFailed as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was refused")


def odd(folder: Path) -> tuple[str, dict[str, Any]]:
    """Builds what cannot be cut, and another pipeline; the error, and what that finds."""
    begin(mp=2, pp=2)
    hcg = fleet.get_hybrid_communicate_group()
    try:
        PipelineLayer(
            [nn.Linear(4, 4), LayerDesc(ColumnParallelLinear, 4, 7)],
            topology=hcg.topology(),
            loss_fn=nn.MSELoss(),
        )
    except ConfigError as error:
        fleet.shutdown()
        return str(error), pipeline(folder)
    raise AssertionError("nothing was refused")


def by_tree(schedule: str, **degrees: int) -> list[dict[str, bytes]]:
    """Trains with sums by a tree and both clips; the whole parameters."""
    begin(micro_batches=4, schedule=schedule, sums="tree", **degrees)

    def trained(clip: Any) -> dict[str, bytes]:
        paddle.seed(3)
        layers = [
            LayerDesc(VocabParallelEmbedding, 32, 32),
            LayerDesc(ColumnParallelLinear, 32, 64, has_bias=True, gather_output=False),
            functional.gelu,
            LayerDesc(RowParallelLinear, 64, 32, input_is_parallel=True),
            nn.LayerNorm(32),
            LayerDesc(ColumnParallelLinear, 32, 32, has_bias=True, gather_output=False),
        ]
        model = wrapped_pipeline(layers, loss_fn=mean_entropy)
        optimizer = adamw(model, grad_clip=clip)
        for step in range(3):
            ids = np.random.default_rng(step).integers(0, 32, (8, LENGTH + 1))
            model.train_batch(
                [paddle.to_tensor(ids[:, :-1]), paddle.to_tensor(ids[:, 1:])], optimizer
            )
        return bits(model.layers.full_state_dict())

    return [trained(clip) for clip in (nn.ClipGradByGlobalNorm(0.1), nn.ClipGradByNorm(0.03))]


@pytest.mark.parametrize("degrees", [{"mp": 4}, {"mp": 2, "pp": 2}])
def test_by_a_tree_no_degree_changes_a_bit(degrees: dict[str, int], on_ranks: Call) -> None:
    (expected,) = on_ranks(partial(by_tree, "1F1B", pp=2), None)
    assert expected[0] != expected[1]
    assert on_ranks(partial(by_tree, "ZBH1", **degrees), 4) == [expected] * 4


@pytest.mark.once
def test_a_model_that_is_no_pipeline_trains_on_two_axes(on_ranks: Call) -> None:
    (single,) = on_ranks(plain, None)
    ranks = on_ranks(plain, 4)
    # The loss of a replica is that of its own rows.
    whole = np.mean([ranks[0]["losses"], ranks[2]["losses"]], axis=0)
    assert np.allclose(whole, single["losses"], rtol=1e-5)
    for found in ranks:
        # Paddle's own init loses the seed that the user set before it.
        assert found["drawn"] == single["drawn"]
        assert found["state"].keys() == {f"_layers.{name}" for name in single["state"]}
        for name, expected in single["state"].items():
            value = found["state"][f"_layers.{name}"]
            scale = np.abs(expected).max()
            assert np.allclose(value, expected, rtol=0, atol=1e-4 * scale), name
        assert np.allclose(found["logits"], single["logits"], rtol=0, atol=1e-4)
    assert ranks[0]["losses"] == ranks[1]["losses"] != ranks[2]["losses"] == ranks[3]["losses"]


@pytest.mark.once
def test_a_pipeline_of_slices_has_parity_and_whole_state(on_ranks: Call, tmp_path: Path) -> None:
    refusals, ranks = zip(*on_ranks(odd, 4, tmp_path))
    for message in refusals:
        assert "`out_features` (=7) must be divisible" in message
    for found in ranks:
        assert found["passed"], found["verdict"]
        assert found["tolerance"] == 1e-5
        assert found["same"]
        assert found["shapes"] == found["slots"]
        assert found["shapes"]["0.weight"] == [12, 6]
        assert found["shapes"]["2.weight"] == [6, 24]
        assert found["shapes"]["5.weight"] == [6, 12]
        assert found["reread"]
        assert found["files"] == [
            f"layer_{layer:02d}-tensor_{member:02d}-model_states.pdparams"
            for layer in range(6)
            for member in range(2)
        ]
        # Whole parameters are the same on all members to the last bit.
        assert found["bits"] == ranks[0]["bits"]
    streams = [found["streams"] for found in ranks if found["streams"]]
    assert len(streams) == 2
    assert streams[0]["global_seed"] == streams[1]["global_seed"]
    assert all(a != b for a, b in zip(streams[0]["local_seed"], streams[1]["local_seed"]))
    masks = [str(mask) for mask in streams[0]["global_seed"]]
    assert len(masks) == len(set(masks)) == 3 * 2


def test_a_member_that_fails_in_backward_reaches_the_other(on_ranks: Call) -> None:
    error, failed = on_ranks(lost, 2, check=False)
    assert failed is None
    kind, message = error
    assert kind == "PeerFailed"
    assert "this gradient is no good" in message
