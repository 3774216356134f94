"""A rank of jobs whose layers are cut: ``slices_worker.py FOLDER PART`` runs one part.

``plain``: a model that is no pipeline, as Fleet's scripts write it, on dp x mp ranks or on one.
``pipeline``: parity, state and random streams of mp 2 x pp 2.
``lost``: a member that fails in backward.
``odd``: a size on the last stage that mp_degree does not divide.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional

from fleetpipe import fleet, parity
from fleetpipe.dygraph.tensor_parallel import own_errors, split_axis, whole_value
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
from tests import jobs

RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
WORLD = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
FOLDER = Path(sys.argv[1])
VOCABULARY, WIDTH, LENGTH = 12, 6, 4
begin = partial(jobs.begin, micro_batches=2)


def write(**found: Any) -> None:
    (FOLDER / f"rank{RANK}.json").write_text(json.dumps(found))


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


def plain() -> None:
    dp, mp = (2, 2) if WORLD == 4 else (1, 1)
    paddle.seed(5)
    begin(dp=dp, mp=mp)
    drawn = paddle.rand([1]).item()
    model = Language()
    model.norm.weight.set_value(paddle.full([WIDTH], 1.0 + RANK))
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(
        paddle.optimizer.AdamW(
            0.01, parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(0.3)
        )
    )
    criterion = ParallelCrossEntropy()
    replica = fleet.get_hybrid_communicate_group().get_data_parallel_rank()
    slice_rank = fleet.get_hybrid_communicate_group().get_model_parallel_rank()
    losses = []
    for step in range(5):
        ids = np.random.default_rng(step).integers(0, VOCABULARY, (8, LENGTH + 1))
        ids = ids[replica * 8 // dp :][: 8 // dp]
        # The first member's inputs count.
        inputs = paddle.to_tensor(ids[:, :-1] * (slice_rank == 0))
        loss = criterion(model(inputs), paddle.to_tensor(ids[:, 1:])).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    logits = model(paddle.arange(LENGTH).unsqueeze(0), whole=True)
    state = {
        name: whole_value(tensor, split_axis(tensor)).numpy().tolist()
        for name, tensor in model.state_dict().items()
    }
    write(losses=losses, state=state, logits=logits.numpy().tolist(), drawn=drawn)


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


def pipeline() -> None:
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
    entropy = ParallelCrossEntropy()
    model = fleet.distributed_model(
        PipelineLayer(
            layers,
            topology=hcg.topology(),
            loss_fn=lambda logits, label: entropy(logits, label).mean(),
            seg_method=[0, 3],
        )
    )
    optimizer = fleet.distributed_optimizer(
        paddle.optimizer.Momentum(
            0.1, parameters=model.parameters(), grad_clip=nn.ClipGradByNorm(0.05)
        )
    )
    session = parity.begin(model, optimizer)
    for step in range(3):
        ids = np.random.default_rng(step).integers(0, VOCABULARY, (4, LENGTH + 1))
        session.step([paddle.to_tensor(ids[:, :-1]), paddle.to_tensor(ids[:, 1:])])
    state = model.layers.full_state_dict()
    for tensor in model.parameters():
        tensor.set_value(paddle.zeros_like(tensor))
    model.layers.load_from(state)
    again = model.layers.full_state_dict()
    reread, files = read_again(model.layers)
    streams = [part.seen for part in model.sublayers() if isinstance(part, Streams)]
    write(
        verdict=session.report.verdict(),
        passed=session.report.passed,
        tolerance=session.report.tolerance,
        shapes={name: list(value.shape) for name, value in state.items()},
        bits={name: value.numpy().tobytes().hex() for name, value in state.items()},
        same=all(np.array_equal(state[name].numpy(), again[name].numpy()) for name in state),
        slots={slot.name: list(slot.shape) for slot in model.layers.state.slots()},
        streams=streams[0] if streams else None,
        reread=reread,
        files=files,
    )


def read_again(layers: Any) -> tuple[bool, list[str]]:
    """Writes a folder and reads it; returns whether all came back, and the names of the files."""
    folder, running = FOLDER / "layers", current_job()
    assert running is not None
    layers.save_state_dict(folder)
    running.everyone().all_gather(None)
    expected = {name: value.numpy() for name, value in layers.state_dict().items()}
    for parameter in layers.parameters():
        parameter.set_value(paddle.zeros_like(parameter))
    layers.set_state_dir(folder)
    found = layers.state_dict()
    same = all(np.array_equal(found[name].numpy(), expected[name]) for name in expected)
    return same, sorted(file.name for file in folder.glob("layer*"))


def lost() -> None:
    begin(mp=2)
    model = ColumnParallelLinear(4, 4, gather_output=False)

    def fail(grad: Any) -> Any:
        raise ValueError("this gradient is no good")

    layers = PipelineLayer(
        [nn.Linear(4, 4), model],
        num_stages=1,
        loss_fn=lambda output, label: (output * label).mean(),
    )
    wrapped = fleet.distributed_model(layers)
    optimizer = fleet.distributed_optimizer(
        paddle.optimizer.SGD(0.1, parameters=wrapped.parameters())
    )
    data = [paddle.rand([4, 4]), paddle.rand([4, 2])]
    wrapped.train_batch(data, optimizer)
    if RANK == 1:
        model.register_forward_post_hook(lambda *_: _[2].register_hook(fail) and None)
    try:
        wrapped.train_batch(data, optimizer)
    except Exception as error:
        write(kind=type(error).__name__, message=str(error))
        raise


def odd() -> None:
    begin(mp=2, pp=2)
    hcg = fleet.get_hybrid_communicate_group()
    try:
        PipelineLayer(
            [nn.Linear(4, 4), LayerDesc(ColumnParallelLinear, 4, 7)],
            topology=hcg.topology(),
            loss_fn=nn.MSELoss(),
        )
    except Exception as error:
        write(kind=type(error).__name__, message=str(error))
    running = current_job()
    assert running is not None
    # Nobody leaves while others still begin.
    running.everyone().all_gather(None)


if __name__ == "__main__":
    with own_errors():
        {"plain": plain, "pipeline": pipeline, "lost": lost, "odd": odd}[sys.argv[2]]()
    fleet.shutdown()
