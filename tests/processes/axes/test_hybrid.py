"""Jobs of several degrees, and tensor-parallel layers, on real ranks beside one device."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.errors import ConfigError
from tests import pipelines
from tests.dygraph import models
from tests.dygraph.models import MODELS, Model, ScaledLoss
from tests.fixtures import Call
from tests.pipelines import ROWS, batch, bits, enabled_scaler, half_precision, pipeline
from tests.processes.axes.tensor_parallel_worker import compared

MICRO_BATCHES, STEPS = 2, 3
KINDS = {**MODELS, "tied": Model(models.layers, MODELS["gpt"].batch, models.loss)}
Make = Callable[[Any], Any]
job = partial(pipelines.job, micro_batches=MICRO_BATCHES, timeout=60)


def adamw(parameters: Any) -> Any:
    """An optimizer with state, whose gradients are clipped by their norm."""
    clip = nn.ClipGradByGlobalNorm(0.5)
    return paddle.optimizer.AdamW(0.01, parameters=parameters, grad_clip=clip)


def momentum(parameters: Any) -> Any:
    """An optimizer with state, whose steps are in proportion to the clipped gradients."""
    clip = nn.ClipGradByGlobalNorm(0.5)
    return paddle.optimizer.Momentum(0.1, parameters=parameters, grad_clip=clip)


def part(data: Any, number: int, rows: int) -> Any:
    """Piece ``number`` of ``rows`` rows of ``[inputs, labels]``."""
    return [tensor[number * rows : (number + 1) * rows] for tensor in data]


def single_step(model: Any, optimizer: Any, data: Any, loss_of: Any, micro_batches: int) -> float:
    """Trains the single model on one batch; returns the norm of its gradients."""
    for number in range(micro_batches):
        inputs, labels = part(data, number, ROWS)
        (loss_of(model(inputs), labels) * (1 / micro_batches)).backward()
    squares = [float((p.grad.astype("float64") ** 2).sum()) for p in model.parameters()]
    optimizer.step()
    optimizer.clear_grad()
    return sum(squares) ** 0.5


def gap(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest difference of a parameter, relative to the parameter's largest number."""
    return max(float((ours[n] - t).abs().max() / t.abs().max()) for n, t in theirs.items())


def trained(running: Any, make: Make = adamw, name: str = "mlp", **options: Any) -> dict[str, Any]:
    """Trains a pipeline and its single model; returns how far apart they are."""
    kind = KINDS[name]
    replicas = running.degrees.replicas
    model = pipeline(kind.layers(), loss_fn=kind.loss, **options)
    single = model.layers.single_model()
    single.set_state_dict(model.layers.full_state_dict())
    optimizer = fleet.distributed_optimizer(make(model.parameters()))
    theirs = make(single.parameters())
    norms = []
    for step in range(STEPS):
        data = kind.batch(MICRO_BATCHES * replicas, step)
        model.train_batch(part(data, running.replica, MICRO_BATCHES * ROWS), optimizer)
        norm = single_step(single, theirs, data, kind.loss, MICRO_BATCHES * replicas)
        norms.append((optimizer.gradient_norm, norm))
    state = model.layers.full_state_dict()
    return {
        "gap": gap(state, single.state_dict()),
        "equal": bits(state) == bits(single.state_dict()),
        "norms": norms,
        "bits": bits(state),
        "moments": sum("moment1" in key or "velocity" in key for key in optimizer.state_dict()),
        "parameters": len(single.parameters()),
    }


def trained_through(
    folder: Path, jobs: list[dict[str, Any]], build: Callable[[], Any], data: Callable[..., Any]
) -> list[Any]:
    """Trains one step in each of several jobs, from the checkpoint of the one before.

    Args:
        folder: The folder of the checkpoints.
        jobs: The arguments of `tests.pipelines.strategy`.
        build: Returns the model and its optimizer.
        data: ``data(running, step)`` returns this rank's part of a batch.

    Returns:
        For each job the loss, and the bits of the state that it begins and ends with.
    """
    legs = []
    for step, options in enumerate(jobs):
        with pipelines.begun(pipelines.strategy(**options)) as running:
            model, optimizer = build()
            manager = fleetpipe.CheckpointManager(folder)
            if step:
                manager.restore(step=step - 1, model=model, optimizer=optimizer)
            begin = bits(model.layers.full_state_dict())
            loss = model.train_batch(data(running, step), optimizer)
            manager.save(step, model=model, optimizer=optimizer)
            manager.wait()
            legs.append((float(loss), begin, bits(model.layers.full_state_dict())))
    return legs


def in_groups(parameters: Any) -> Any:
    """Two groups with rates, decay and clips of their own."""
    parameters = list(parameters)
    return paddle.optimizer.Momentum(
        0.1,
        parameters=[
            {"params": [p for p in parameters if len(p.shape) > 1], "weight_decay": 0.1},
            {
                "params": [p for p in parameters if len(p.shape) == 1],
                "learning_rate": 0.5,
                "grad_clip": nn.ClipGradByGlobalNorm(0.05),
            },
        ],
        grad_clip=nn.ClipGradByGlobalNorm(0.4),
    )


#: Arguments of a job, and of `trained` within it.
TRAINED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "four stages": ({"pp": 4, "dp": 1}, {}),
    # The first, a middle and the last stage share a weight.
    "tied weights": ({"pp": 4, "dp": 1}, {"name": "tied"}),
    "two chunks": (
        {"pp": 2, "dp": 2, "schedule": "Interleaved1F1B"},
        {"make": momentum, "num_virtual_pipeline_stages": 2},
    ),
    "sharded": ({"pp": 2, "sharding": 2}, {"make": momentum}),
    "sharded groups": ({"pp": 2, "sharding": 2}, {"make": in_groups}),
    "sharded alone": ({"dp": -1, "sharding": 2, "axes": ["sharding", "dp"]}, {"make": momentum}),
}
#: The degrees of Fleet's wrapper of a plain model, and of Paddle's ``DataParallel``.
PLAIN = {"plain model": {"dp": 2, "sharding": 2}, "plain replicas": {"dp": 4}}


def overflow() -> Any:
    """Only the second stage of the first replica sees a gradient that is not finite, in step 1."""
    found: dict[str, Any] = {"states": [], "moved": []}
    with job(dp=2, pp=2) as running, half_precision():
        model = pipeline()
        optimizer = fleet.distributed_optimizer(adamw(model.parameters()))
        scaler = fleet.distributed_scaler(
            enabled_scaler(init_loss_scaling=256.0, incr_every_n_steps=2)
        )
        for step in range(4):
            hook = None
            if step == 1 and running.hcg.get_stage_id() == 1 and running.replica == 0:
                weight = model.parameters()[-1]
                hook = weight.register_hook(lambda gradient: gradient * float("nan"))
            before = bits(model.state_dict())
            model.train_batch(batch(MICRO_BATCHES, step), optimizer, scaler=scaler)
            if hook is not None:
                hook.remove()
            found["moved"].append(bits(model.state_dict()) != before)
            state = scaler.state_dict()
            found["states"].append([float(state["scale"].item()), state["incr_count"]])
    return found


def plain(**degrees: int) -> Any:
    """Trains a model that is no pipeline in Fleet's own way."""
    with job(**degrees) as running:
        paddle.seed(7)
        model = fleet.distributed_model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
        paddle.seed(7)
        single = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = fleet.distributed_optimizer(momentum(model.parameters()))
        theirs = momentum(single.parameters())
        norms = []
        for step in range(STEPS):
            data = batch(4, step)
            inputs, labels = part(data, running.replica, ROWS)
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.clear_grad()
            norm = single_step(single, theirs, data, nn.functional.cross_entropy, 4)
            norms.append((optimizer.gradient_norm, norm))
        ours = [*model.parameters()]
        state = {str(index): parameter for index, parameter in enumerate(ours)}
        expected = {str(index): p for index, p in enumerate(single.parameters())}
        return {
            "gap": gap(state, expected),
            "norms": norms,
            "bits": bits(state),
            "moments": sum("velocity" in name for name in optimizer.state_dict()),
        }


def trained_loss() -> Any:
    """A loss that is trained: its owners are replicas, and see other data."""
    with job(dp=2, pp=2, timeout=50) as running:
        # Its first value is another on each rank.
        loss = ScaledLoss(1.0 + int(os.environ["PADDLE_TRAINER_ID"]))
        model = pipeline(loss_fn=loss)
        single, theirs = model.layers.single_model(), ScaledLoss()
        single.set_state_dict(model.layers.full_state_dict())
        theirs.scale.set_value(loss.scale)
        wrapped = fleet.distributed_optimizer(momentum([*model.parameters(), *loss.parameters()]))
        plain = momentum([*single.parameters(), *theirs.parameters()])
        first = float(loss.scale.item())
        for step in range(STEPS):
            data = batch(2 * MICRO_BATCHES, step)
            model.train_batch(part(data, running.replica, MICRO_BATCHES * ROWS), wrapped)
            single_step(single, plain, data, theirs, 2 * MICRO_BATCHES)
        return {
            "last": running.hcg.get_stage_id() == 1,
            "first": first,
            "scale": float(loss.scale.item()),
            "expected": float(theirs.scale.item()),
        }


def different_clips() -> Any:
    """The last rank clips to another norm."""
    with job(dp=2, pp=2) as running:
        norm = 2.0 if running.hcg.get_global_rank() == 3 else 1.0
        model = pipeline()
        theirs = paddle.optimizer.SGD(
            0.1, parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(norm)
        )
        try:
            model.train_batch(batch(MICRO_BATCHES), fleet.distributed_optimizer(theirs))
        except ConfigError as error:
            return str(error)


def run(names: list[str], *others: Callable[[], Any]) -> dict[str, Any]:
    """Runs jobs one after another; returns by name what this rank finds."""
    found = {case.__name__: case() for case in others}
    for name in names:
        if name in PLAIN:
            found[name] = plain(**PLAIN[name])
        else:
            options, of_training = TRAINED[name]
            with job(**options) as running:
                found[name] = trained(running, **of_training)
    return found


def assert_close(ranks: list[Any], tolerance: float = 1e-6) -> None:
    """The single model's norms and parameters; the same bits on every rank."""
    for rank in ranks:
        assert rank["bits"] == ranks[0]["bits"]
        assert rank["norms"] == ranks[0]["norms"]
        assert rank["gap"] < tolerance
        for ours, theirs in rank["norms"]:
            assert ours == pytest.approx(theirs, rel=1e-6)


def test_stages_replicas_and_the_norm_of_all(on_ranks: Call) -> None:
    training = ["four stages", "tied weights", "two chunks"]
    ranks = on_ranks(run, 4, training, overflow, trained_loss, timeout=240)
    for name in training:
        assert_close([rank[name] for rank in ranks])
    assert [rank["four stages"]["equal"] for rank in ranks] == [True] * 4
    for rank in (rank["overflow"] for rank in ranks):
        assert rank["moved"] == [True, False, True, True]
        assert rank["states"] == [[256.0, 1], [128.0, 0], [128.0, 1], [256.0, 0]]
    owners = [rank["trained_loss"] for rank in ranks if rank["trained_loss"]["last"]]
    for rank in owners:
        assert (rank["first"], rank["scale"]) == (owners[0]["first"], owners[0]["scale"])
        assert rank["scale"] != rank["first"]
        assert rank["scale"] == pytest.approx(rank["expected"], rel=1e-5)


def test_ranks_that_share_the_optimizers_state(on_ranks: Call) -> None:
    training = ["sharded", "sharded groups", "sharded alone", *PLAIN]
    ranks = on_ranks(run, 4, training, different_clips, timeout=240)
    for message in (rank["different_clips"] for rank in ranks):
        assert "ranks 0 and 3 of the job do not run the same" in message
        assert "global_norm=2.0" in message
    for name in training:
        assert_close([rank[name] for rank in ranks])
    moments = {name: [rank[name]["moments"] for rank in ranks] for name in training}
    parameters = ranks[0]["sharded"]["parameters"]
    # pp 2 x sharding 2: the four ranks have one state for each parameter of the model.
    for name in ("sharded", "sharded groups"):
        assert sum(moments[name]) == parameters
        assert min(moments[name]) > 0
    # dp 2 x sharding 2: each replica in dp has a whole one.
    assert sum(moments["sharded alone"]) == 2 * parameters
    assert moments["plain model"] in ([1, 3, 1, 3], [3, 1, 3, 1])


@pytest.mark.parametrize("over", ["own", "gloo"])
def test_two_members_are_the_dense_layers(on_ranks: Call, over: str) -> None:
    (gaps, bits), (other_gaps, other_bits) = on_ranks(compared, 2, over)
    for found in (gaps, other_gaps):
        assert len(found) == 52
        # Not max: it would pass over NaN.
        assert not {name: gap for name, gap in found.items() if not gap < 1e-6}
    assert bits == other_bits
