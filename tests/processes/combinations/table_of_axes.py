"""Every pair and every triple of axes at 2, beside one device with all of the data: a table.

    python -m tests.processes.combinations.table_of_axes [pp sep mp ..]

A model with causal attention of packed documents and a mixture of experts trains for three steps
of AdamW with a clip by the global norm. Shown are the largest differences to plain Paddle on whole
batches, relative to the largest number: of losses, of gradients (what one step of gradient descent
changes), of parameters after the three steps. Up to eight processes for each: run by hand.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional

from fleetpipe import fleet
from fleetpipe.dygraph import sequences
from fleetpipe.dygraph.experts import Experts
from fleetpipe.dygraph.tensor_parallel import share_of
from fleetpipe.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    PipelineLayer,
    RowParallelLinear,
)
from fleetpipe.job.job import current_job
from tests import byhand, jobs
from tests.processes.axes import sequences_worker as cases

AXES = ("pp", "dp", "sharding", "mp", "ep", "sep", "cp")
EXPERTS, STEPS = 4, 3


class Mixture(nn.Layer):
    """Two of four experts for each token, all of them on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(cases.WIDTH, EXPERTS)
        self.mixture = self.built()

    @staticmethod
    def expert() -> nn.Layer:
        return nn.Sequential(nn.Linear(cases.WIDTH, 8), nn.Tanh(), nn.Linear(8, cases.WIDTH))

    def built(self) -> Any:
        mixture = nn.Layer()
        mixture.experts = nn.LayerList([self.expert() for _ in range(EXPERTS)])
        return mixture

    def mixed(self, tokens: Any, choices: Any, weights: Any) -> Any:
        shares = [
            (weights * (choices == n).astype(weights.dtype)).sum(-1, keepdim=True)
            for n in range(EXPERTS)
        ]
        outputs = [expert(tokens) for expert in self.mixture.experts]
        return paddle.add_n([share * output for share, output in zip(shares, outputs)])

    def forward(self, value: Any) -> Any:
        x, documents = value
        tokens = x.reshape([-1, cases.WIDTH])
        weights, choices = paddle.topk(functional.softmax(self.gate(tokens)), 2)
        return x + self.mixed(tokens, choices, weights).reshape(x.shape), documents


class MixtureOfParts(Mixture):
    """Each rank has its experts."""

    def built(self) -> Any:
        return Experts(self.expert, EXPERTS)

    def mixed(self, tokens: Any, choices: Any, weights: Any) -> Any:
        return self.mixture(tokens, choices, weights)


class BlockOfShards(cases.Block):
    """This rank's heads, on its places."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = share_of(cases.HEADS, "num_heads")
        width = cases.WIDTH
        self.qkv = ColumnParallelLinear(width, 3 * width, has_bias=False, gather_output=False)
        self.out = RowParallelLinear(width, width, input_is_parallel=True)
        self.up = ColumnParallelLinear(width, 4 * width, has_bias=True, gather_output=False)
        self.down = RowParallelLinear(4 * width, width, input_is_parallel=True)

    def attend(self, query: Any, key: Any, value: Any, documents: Any) -> Any:
        return sequences.attention(query, key, value, documents=documents)


def layers() -> list[Any]:
    kinds = (cases.Embedding, BlockOfShards, MixtureOfParts, BlockOfShards, cases.Head)
    return [LayerDesc(kind) for kind in kinds]


def plain() -> nn.LayerList:
    kinds = (cases.Embedding, cases.Block, Mixture, cases.Block, cases.Head)
    return nn.LayerList([kind() for kind in kinds])


def optimizer_of(kind: str, parameters: Any) -> Any:
    """Plain descent, in which a step is the gradients; or AdamW with a clip that is at work."""
    if kind == "gradients":
        return paddle.optimizer.SGD(cases.RATE, parameters=parameters)
    clip = nn.ClipGradByGlobalNorm(0.5)
    return paddle.optimizer.AdamW(0.01, parameters=parameters, grad_clip=clip)


def plain_step(model: Any, optimizer: Any, batch: Any, criterion: Any) -> float:
    """Trains on whole sequences of whole batches; returns the loss."""
    value, labels = batch
    for layer in model:
        value = layer(value)
    loss = criterion(value, labels)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return float(loss)


def differences(degrees: dict[str, int]) -> dict[str, float]:
    """Trains a job, and plain Paddle beside it."""
    replicas = degrees.get("dp", 1) * min(degrees.get("sharding", 1), 2)
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    found: dict[str, float] = {"loss": 0.0}
    for kind, steps in (("gradients", 1), ("parameters", STEPS)):
        own = {"loss_reduction": "tokens"}
        every = {"dp": 1, "pp": 1, **degrees}
        strategy = jobs.strategy(1, rows=4 // replicas, own=own, **every)
        fleet.init(is_collective=True, strategy=strategy)
        paddle.seed(5)
        pipe = PipelineLayer(layers(), num_stages=every["pp"], loss_fn=criterion)
        model, single = fleet.distributed_model(pipe), plain()
        single.set_state_dict(pipe.full_state_dict())
        optimizer = fleet.distributed_optimizer(optimizer_of(kind, pipe.parameters()))
        other = optimizer_of(kind, single.parameters())
        for step in range(steps):
            whole = cases.data(step)
            batch = sequences.own_part(_own_rows(whole))
            loss = float(model.train_batch(list(batch), optimizer))
            expected = plain_step(single, other, whole, criterion)
            found["loss"] = max(found["loss"], cases.gap(loss, expected))
        trained, state = pipe.full_state_dict(), single.state_dict()
        assert trained.keys() == state.keys(), trained.keys() ^ state.keys()
        found[kind] = max(cases.gap(trained[n].numpy(), state[n].numpy()) for n in state)
        fleet.shutdown()
    return found


def _own_rows(value: Any) -> Any:
    """The rows of this replica, of each tensor."""
    if isinstance(value, tuple):
        return tuple(map(_own_rows, value))
    job = current_job()
    assert job is not None
    return value.split(job.degrees.replicas)[job.replica]


def degrees_of(axes: tuple[str, ...]) -> dict[str, int]:
    """Returns the degrees; experts are spread over ranks that another axis has."""
    degrees = dict.fromkeys(axes, 2)
    if "ep" in axes and not {"dp", "sharding", "mp", "sep", "cp"} & set(axes):
        degrees["sharding"] = 2
    if {"sharding", "ep", "cp"} <= set(axes):
        # As in Fleet the ranks of a sequence are among those of the shards then.
        degrees["sharding"] = 4
    return degrees


def main() -> None:
    """Prints a row for each pair and triple, as it ends."""
    # Ranks find a function by the name of its module, which is not that of the program.
    call = importlib.import_module("tests.processes.combinations.table_of_axes").differences
    chosen = tuple(sys.argv[1:]) or AXES
    combinations = [c for n in (2, 3) for c in itertools.combinations(chosen, n)]
    print(f"{'axes':22} {'loss':>9} {'gradients':>9} {'parameters':>10}")
    folder = Path(tempfile.mkdtemp())
    for axes in combinations:
        degrees = degrees_of(axes)
        ranks = 2 ** len(degrees.keys() - {"ep"})  # sharding 4 has the two of cp
        try:
            rows = byhand.call(call, ranks, degrees, folder=folder, timeout=240)
            shown = "".join(
                f" {max(row[name] for row in rows):9.1e}"
                for name in ("loss", "gradients", "parameters")
            )
        except AssertionError as error:
            lines = [line for line in str(error).splitlines() if "Error" in line]
            shown = f" {lines[-1] if lines else error}"[:160]
        print(f"{' x '.join(axes):22}{shown}", flush=True)


if __name__ == "__main__":
    main()
