"""Guards: each broken invariant is named with its parameter and ranks, and no bit is changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.contrib.guards import Guards, fingerprint
from fleetpipe.dygraph.batch.micro_batches import MicroBatches, ObservedBatch
from fleetpipe.engine.observer import Blocked
from fleetpipe.errors import ConfigError, InvariantError, PeerFailed
from fleetpipe.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    RowParallelLinear,
    SharedLayerDesc,
    get_rng_state_tracker,
)
from fleetpipe.schedules import Edge, Recv
from fleetpipe.transport import MessageKey
from tests.dygraph.models import MODELS, WIDTH, FeedForward, Tokens, logits
from tests.pipelines import adam, batch, job, mlp_and_sgd, pipeline

EVERY, STEPS = 2, 4
TEXT = MODELS["gpt"]


class Members(nn.Layer):
    """A norm, two products that are cut along mp, and a dropout of shards between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH, gather_output=False, has_bias=True)
        self.down = RowParallelLinear(2 * WIDTH, WIDTH, input_is_parallel=True, has_bias=True)

    def forward(self, x: Any) -> Any:
        inner = self.up(self.norm(x))
        if "model_parallel_rng" in get_rng_state_tracker().states_:
            with get_rng_state_tracker().rng_state():
                inner = nn.functional.dropout(inner, 0.5)
        return x + self.down(inner)


def dropout(x: Any) -> Any:
    return nn.functional.dropout(x, 0.5)


def layers(middle: list[Any]) -> list[Any]:
    """A tied embedding around other layers."""
    shared = {"shared_weight_attr": "embedding_weight"}
    return [
        SharedLayerDesc("embed", Tokens, **shared),
        *middle,
        SharedLayerDesc("embed", Tokens, forward_func=logits, **shared),
    ]


#: What is broken: the options of the job, and words of the error.
BROKEN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "shard": (
        {"sharding": 2},
        [
            "parameter 1.norm.weight is not",
            "rank 1 of 0, 1, along sharding, at the begin of step 2",
        ],
    ),
    "member": ({"mp": 2}, ["parameter 1.norm.weight is not", "along mp", "all-reduce over mp"]),
    "tied": (
        {"pp": 2},
        ["tied weight shared_layers.embed.table.weight is not", "rank 1 of 0, 1, along pp"],
    ),
    "counted twice": ({"pp": 2}, ["step 0", "clipped by a norm", "counted more than once"]),
    "one generator": (
        {"dp": 2, "rng": "fleet"},
        ["ranks 0, 1 draw the same random numbers along dp", "the default generator"],
    ),
    "one stream": (
        {"mp": 2},
        ["ranks 0, 1 draw the same random numbers along mp", "the model_parallel_rng"],
    ),
    # Last: it is an error of one rank, which ends the job of the other.
    "not finite": ({"dp": 2}, ["gradient of 1.norm.weight is not finite", "rank 1, step 2"]),
}


def break_one(what: str) -> tuple[int, str]:
    """Trains a model that is broken after step 1, or at once; returns the step and the error."""
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    options = BROKEN[what][0]
    own_data = rank if {"dp", "sharding"} & options.keys() else 0
    with job(micro_batches=2, guards=EVERY, **options):
        paddle.seed(7)
        get_rng_state_tracker().reset()
        if what == "one stream":
            get_rng_state_tracker().add("model_parallel_rng", 5)
        middle = [LayerDesc(Members if "mp" in options else FeedForward)]
        if what == "shard":
            middle.append(LayerDesc(nn.BatchNorm1D, WIDTH, data_format="NLC"))
        if what == "one generator":
            middle.append(dropout)
        model = pipeline(layers(middle), loss_fn=TEXT.loss)
        optimizer = adam(model, grad_clip=nn.ClipGradByGlobalNorm(0.1))
        named = model.layers.state.own_parameters()
        table = named["shared_layers.embed.table.weight"]
        if what == "counted twice":
            table.is_firstly_shared = True
        for step in range(STEPS):
            try:
                model.train_batch(TEXT.batch(2, step + 10 * own_data), optimizer)
            except (InvariantError, PeerFailed) as error:
                return step, str(error)
            if step == 1 and rank == 1 and what == "not finite":
                named["1.norm.weight"].register_hook(lambda gradient: gradient / 0)
            elif step == 1 and rank == 1:
                with paddle.no_grad():
                    changed = table if what == "tied" else named["1.norm.weight"]
                    changed.scale_(1 + 1e-6)
    return STEPS, ""


def break_all() -> dict[str, tuple[int, str]]:
    """Breaks one invariant after another, in jobs of the same processes."""
    return {what: break_one(what) for what in BROKEN}


@pytest.mark.once
def test_all_ranks_name_what_is_broken(on_ranks: Callable[..., Any]) -> None:
    for found in on_ranks(break_all, 2):
        for what, (_, words) in BROKEN.items():
            step, message = found[what]
            assert step == (2 if "step 2" in str(words) or what in ("member", "tied") else 0), what
            assert all(word in message for word in words), message


def test_one_process_names_a_gradient_that_is_not_finite_and_trains_on() -> None:
    with mlp_and_sgd(2, guards=3) as (model, optimizer):
        inputs, labels = batch()
        broken = [inputs / 0.0, labels]
        for data in (batch(), broken, broken):  # steps 1 and 2 are not verified
            model.train_batch(data, optimizer)
        with pytest.raises(InvariantError, match=r"gradient of 6.bias is not finite\n.*step 3"):
            model.train_batch(batch(), optimizer)
        assert all(p.grad is None for p in model.parameters())


def test_an_optimizer_that_is_not_wrapped_steps_beside_guards() -> None:
    with job(1, guards=1):
        model = pipeline()
        clip = nn.ClipGradByGlobalNorm(0.1)
        sgd = paddle.optimizer.SGD(0.1, parameters=model.parameters(), grad_clip=clip)
        before, after = (float(model.train_batch(batch(), sgd)) for _ in range(2))
    assert after < before


def test_fingerprints_are_made_once_where_a_rank_waits() -> None:
    """And in batches that are not verified no instruction does anything else."""
    published: list[int] = []
    with mlp_and_sgd(2) as (model, _):
        guards = Guards(model.layers, model._runtime.job, 2)
        guards._publish = lambda: published.append(len(published))  # type: ignore[method-assign]
    receive: Any = Recv("F", Edge(0, 1), 0)
    answers = [None, Blocked(0, MessageKey("F", 0, 1, "", 0))]
    watched: Any = [guards.wrap(None, receive, lambda a=a: a) for a in answers]  # type: ignore
    for batch_number in range(3):
        guards.begin(ObservedBatch(MicroBatches(None, None), None, None, 0, None, None))
        assert [instruction() for instruction in watched] == answers
        assert len(published) == batch_number // 2 + 1
    send: Any = object()
    assert guards.wrap(send, send, watched[0]) is watched[0]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "bool"])
def test_a_fingerprint_is_that_of_the_bits(dtype: str) -> None:
    tensor = (paddle.arange(15.0) - 7).astype(dtype).reshape([3, 5])
    same, other = tensor.clone(), tensor.clone()
    other[2, 4] = 0
    assert fingerprint(same.t().contiguous().t()) == fingerprint(tensor) != fingerprint(other)
    assert fingerprint(tensor[:0]) == ""


@pytest.mark.parametrize("value", [-1, True, 0.5, None])
def test_a_wrong_number_of_steps_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="is a number of steps"), job(2, guards=value):
        pipeline()
