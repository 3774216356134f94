"""Schedules, plans and edges on real ranks, over sockets and over Paddle's own groups."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet, parity
from fleetpipe.dygraph import VocabularyHead, VocabularyLoss
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from fleetpipe.job.job import current_job
from fleetpipe.profiling import PipelinePlan, Profile
from fleetpipe.schedules import names
from fleetpipe.transport import ProcessGroupTransport
from tests.contrib.slices import sliced
from tests.dygraph.models import MODELS
from tests.fixtures import Call
from tests.launching import Finished, JobFailed
from tests.pipelines import (
    ROWS,
    Trained,
    batch,
    begin,
    job,
    mlp_layers,
    model_in_job,
    momentum,
    pipeline,
    sgd,
    train,
)
from tests.pipelines import batch as rows
from tests.pipelines import job as begun

pytestmark = pytest.mark.once

RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
ALONE = "PADDLE_TRAINER_ID" not in os.environ


def given(inputs: Any, labels: Any) -> Any:
    """Leaves out what this rank of a loop does not need."""
    if ALONE:
        return [inputs, labels]
    return [inputs, None] if RANK == 0 else [None, labels]


def told(tensor: Any) -> list[Any]:
    return [tensor.shape, str(tensor.dtype), tensor.numpy().tobytes().hex(), tensor.stop_gradient]


def of_iterators() -> Any:
    """Each rank's own iterator gives one item for each micro-batch."""
    taken: list[int] = []

    def items() -> Iterator[Any]:
        for seed in range(12):
            taken.append(seed)
            yield tuple(given(*batch(1, seed)))

    with model_in_job(2) as model:
        optimizer, source, counts = sgd(model), items(), []
        losses = []
        for _ in range(2):
            losses.append(told(model.train_batch(source, optimizer)))
            counts.append(len(taken))
        losses.append(told(model.eval_batch(source, compute_loss=True)))
        return losses, [*counts, len(taken)]


def of_a_vee() -> Any:
    """Rank 0 has the first and the last stage; rank 1 needs no data at all."""
    with model_in_job(2, schedule="DualPipeV") as model:
        inputs, labels = batch()
        data = [inputs, labels] if RANK == 0 else None
        losses = [told(model.train_batch(data, sgd(model))) for _ in range(2)]
        evaluated = told(model.eval_batch(data, compute_loss=True))
        outputs = model.eval_batch(data)
        assert [output.shape for output in outputs] == ([[ROWS, 4]] * 4 if RANK == 0 else [])
        return losses, evaluated


def of_a_head() -> Any:
    """The parts of a head get labels from the last rank, and the norm counts each once."""
    layers = [*mlp_layers()[:-1], VocabularyHead(8, 4)]
    with model_in_job(2, layers=layers, loss_fn=VocabularyLoss()) as model:
        clip = nn.ClipGradByGlobalNorm(0.01)
        adam = paddle.optimizer.Adam(0.1, parameters=model.parameters(), grad_clip=clip)
        optimizer, data = fleet.distributed_optimizer(adam), given(*batch())
        losses = [told(model.train_batch(data, optimizer)) for _ in range(2)]
        losses.append(told(model.eval_batch(data, compute_loss=True)))
        state = model._layers.full_state_dict()
        return losses, {name: told(value) for name, value in state.items()}


def of_a_topology_of_its_own() -> Any:
    """Shared layers with num_stages alone; the second stage does not use one that it has."""

    def shared(key: str, forward: Any = None) -> Any:
        return SharedLayerDesc(key, nn.Linear, forward, "weight", 6, 6)

    ignored = shared("first", lambda _, x: x)
    entries = [shared("both"), shared("first"), nn.functional.tanh]
    entries += [shared("both"), ignored, LayerDesc(nn.Linear, 6, 4)]
    with job(2):
        layers = PipelineLayer(entries, num_stages=2, loss_fn=nn.CrossEntropyLoss())
        model = fleet.distributed_model(layers)
        for _ in range(2):
            model.train_batch(given(*batch()), sgd(model))
        return {name: value.tolist() for name, value in layers.own_state().items()}


def of_replicas() -> Any:
    """A step made of its two halves: the gradients of the replicas are averaged once."""
    steps = 4 if ALONE else 2
    begin(dp=1 if ALONE else 2, micro_batches=steps)
    model = pipeline()
    optimizer = sgd(model)
    rows = slice(RANK * steps * ROWS, (RANK + 1) * steps * ROWS)
    for seed in range(2):
        model.forward_backward_pipeline([tensor[rows] for tensor in batch(seed=seed)])
        optimizer.step()
        optimizer.clear_grad()
    fleet.shutdown()
    return {name: value.tolist() for name, value in model.layers.state_dict().items()}


def of_plain_models() -> Any:
    """The wrappers of models that are no pipeline, along Fleet's other axes."""
    found = []
    for axis in ("sharding", "sep"):
        strategy = fleet.DistributedStrategy()
        # Fleet works the missing dp_degree out as 2, whatever this axis takes.
        strategy.hybrid_configs = {f"{axis}_degree": 1 if ALONE else 2}
        fleet.init(is_collective=True, strategy=strategy)
        paddle.seed(5 + RANK)
        plain = nn.Linear(6, 4)
        if ALONE or RANK == 0:
            plain.weight.set_value(paddle.ones([6, 4]))
        model = fleet.distributed_model(plain)
        optimizer = fleet.distributed_optimizer(
            paddle.optimizer.SGD(0.1, parameters=model.parameters())
        )
        inputs, labels = batch()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.clear_grad()
        found.append([type(model).__name__, plain.weight.numpy().tolist()])
        fleet.shutdown()
    return found


def everything() -> dict[str, Any]:
    """What each of the parts gives, by its name."""
    parts = [of_iterators, of_a_vee, of_a_head]
    parts += [of_a_topology_of_its_own, of_replicas, of_plain_models]
    return {part.__name__: part() for part in parts}


def compared(ranks: int, model: str) -> dict[str, tuple[str, dict[int, int]]]:
    """The verdict of each schedule, and the ranks whose peak is not the planned one."""
    found = {}
    for schedule in names():
        case = sliced.MODEL if schedule == "Seq1F1B" else MODELS[model]
        with model_in_job(ranks, 5, schedule, layers=case.layers(), loss_fn=case.loss) as pipe:
            session = parity.begin(pipe, momentum(pipe))
            for step in range(2):
                session.step(case.batch(5, step))
            predicted = pipe.schedule.simulate().peak_activations
            held = {r: peak for r, peak in pipe.peak_held.items() if peak != predicted[r]}
            found[schedule] = session.report.verdict(), held
    return found


@pytest.mark.parametrize(("ranks", "model"), [(2, "gpt"), (4, "mlp")])
def test_every_schedule_is_bit_exact_on_real_ranks(on_ranks: Call, ranks: int, model: str) -> None:
    for found in on_ranks(compared, ranks, ranks, model, timeout=280):
        assert set(found) == {*names()}
        for schedule, (verdict, held) in found.items():
            assert verdict.endswith("bit-exact (losses, gradients and parameters)"), schedule
            assert held == {}, schedule


M = 4


def planned() -> tuple[str, str, list[list[float]]]:
    """Profiles a model, plans, and trains without the plan and by it."""
    with job(2, micro_batches=M):
        model = pipeline(mlp_layers(hidden=64))
        profile = model.profile(batch(M))
        plan = fleetpipe.plan(profile, 2, M, search=("partition", "placement", "schedule"))
        losses = []
        for each in (model, pipeline(mlp_layers(hidden=64), plan=plan)):
            optimizer = sgd(each)
            losses.append([float(each.train_batch(batch(M, s), optimizer)) for s in range(3)])
        rank = paddle.distributed.get_rank()
        assert fleet.get_hybrid_communicate_group().get_stage_id() == rank
        return profile.dumps(), plan.dumps(), losses


def test_two_ranks_profile_plan_and_train(on_ranks: Call) -> None:
    first, second = on_ranks(planned, 2)
    assert first == second
    profile, plan = Profile.loads(first[0]), PipelinePlan.loads(first[1])
    assert len(profile.layers) == len(mlp_layers())
    assert profile.splits
    assert all(layer.forward > 0 for layer in profile.layers)
    assert [layer.parameters > 0 for layer in profile.layers] == [True, False] * 3 + [True]
    assert profile.loss is not None
    assert plan.ranks == 2
    plain, by_plan = first[2]
    assert plain == by_plan


def test_two_ranks_get_what_one_process_gets(on_ranks: Call) -> None:
    ranks = on_ranks(everything, 2)
    (alone,) = on_ranks(everything, None)
    # The uses of a tied weight, and replicas, are added up in another order.
    states = {what: alone.pop(what) for what in ("of_a_topology_of_its_own", "of_replicas")}
    moved = np.array([weight for _, weight in alone.pop("of_plain_models")]) - 1
    # Both ranks have the same rows. Fleet averages over replicas, and adds up over segments.
    moved[1] *= 2
    for found in ranks:
        wrapped = found.pop("of_plain_models")
        assert [name for name, _ in wrapped] == ["ShardingParallel", "SegmentParallel"]
        for (_, weight), step in zip(wrapped, moved):
            assert np.allclose(np.array(weight) - 1, step, rtol=1e-4, atol=1e-7)
        for what, state in states.items():
            own = found.pop(what)
            shared = {name for name in state if name.startswith("shared_layers.")}
            assert shared <= own.keys() <= state.keys()
            for name, value in own.items():
                assert np.allclose(value, state[name], rtol=1e-5, atol=1e-7), (what, name)
        assert found == alone
    assert alone["of_iterators"][1] == [4, 8, 12]


def trained(ranks: int, schedules: list[str], transport: str | None) -> dict[str, Trained]:
    """What training under each schedule ends with."""
    results = {}
    for schedule in schedules:
        case = sliced.MODEL if schedule == "Seq1F1B" else MODELS["mlp"]
        results[schedule] = train(
            case.layers(),
            ranks,
            schedule,
            micro_batches=4,
            steps=1,
            data=case.batch,
            optimizer=momentum,
            loss_fn=case.loss,
            gradients=True,
            configs={"transport": transport},
            each_step=lambda _: require_transport(transport),
        )
    return results


def require_transport(name: str | None) -> None:
    """Fails where tensors go another way than was asked for."""
    job = current_job()
    assert job is not None
    for transport in job.connect().values():
        assert isinstance(transport, ProcessGroupTransport) == (name is not None)


@pytest.mark.parametrize(("ranks", "schedules"), [(2, ["1F1B", "ZBV"]), (4, names())])
def test_every_schedule_has_the_bits_of_one_process(
    on_ranks: Call, ranks: int, schedules: list[str]
) -> None:
    alone = trained(ranks, schedules, None)
    of_ranks = on_ranks(trained, ranks, ranks, schedules, "process_group", timeout=120)
    for schedule, one in alone.items():
        for result in of_ranks:
            assert result[schedule].losses == one.losses, schedule
            assert result[schedule].state == one.state, schedule
        gradients = {k: v for result in of_ranks for k, v in result[schedule].gradients.items()}
        assert gradients == one.gradients, schedule


def end_in_the_midst(how: str) -> None:
    """Rank 1 dies, or stops, when it has all that rank 0 sends of its second step."""
    micro_batches, losses = 4, 0

    def loss(logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        nonlocal losses
        losses += 1
        if losses == 2 * micro_batches:
            if how == "sleep":
                time.sleep(100)
            os.kill(os.getpid(), signal.SIGKILL)
        return paddle.nn.functional.cross_entropy(logits, labels)

    with begun(2, micro_batches=micro_batches, timeout=3):
        model = pipeline(loss_fn=loss)
        optimizer = sgd(model)
        require_transport("process_group")
        for _ in range(2):
            model.train_batch(rows(micro_batches), optimizer)


@pytest.mark.parametrize(
    ("how", "message"),
    [("die", "PeerFailed: rank 1 died"), ("sleep", "rank 0 waited 3 s for a message of rank 1")],
)
def test_what_a_rank_waits_for_is_named(on_ranks: Call, how: str, message: str) -> None:
    env = {"FLEETPIPE_TRANSPORT": "process_group"}
    with pytest.raises(JobFailed) as failed:
        on_ranks(end_in_the_midst, 2, how, env=env, timeout=60)
    ended = failed.value.job
    assert isinstance(ended, Finished)
    assert message in ended.logs[0]
    assert re.search(r"operation B0\.\d \(stage 0, micro-batch \d\)", ended.logs[0])
