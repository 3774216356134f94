"""Stage 2 of a sharded optimizer on real ranks: the bits of stage 1, and of plain Paddle."""

from __future__ import annotations

import random
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet, parity
from fleetpipe.dygraph.gradients import gradient_of
from fleetpipe.errors import FleetPipeError
from tests.fixtures import Call
from tests.pipelines import ROWS, bits, enabled_scaler, half_precision, job, pipeline
from tests.processes.axes.test_hybrid import (
    KINDS,
    adamw,
    in_groups,
    momentum,
    part,
    trained_through,
)

STEPS = 3


class Muon(paddle.optimizer.Optimizer):  # type: ignore[misc]
    """Momentum whose matrices are made orthogonal, each as a whole: Paddle to 3.3 has none."""

    def _create_accumulators(self, block: Any, parameters: Any) -> None:
        for parameter in parameters:
            self._add_accumulator("momentum", parameter)

    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> None:
        parameter, gradient = param_and_grad
        moment = self._get_accumulator("momentum", parameter)
        moment.set_value(moment * 0.9 + gradient)
        update = moment
        if moment.ndim == 2:
            update = moment / (moment.norm() + 1e-7)
            for _ in range(5):
                gram = update @ update.T
                update = 3.4445 * update + (-4.775 * gram + 2.0315 * gram @ gram) @ update
        parameter.set_value(parameter - 0.02 * update)


def muon(parameters: Any) -> Any:
    """An optimizer that needs whole matrices."""
    clip = nn.ClipGradByGlobalNorm(0.5)
    return Muon(0.02, parameters=list(parameters), grad_clip=clip)


OPTIMIZERS = {"adamw": adamw, "momentum": momentum, "groups": in_groups}


class Case(NamedTuple):
    """A job of four ranks.

    Attributes:
        degrees: By axis.
        scaled: Whether a GradScaler scales the loss; it skips step 1.
        apart: Whether a step is taken in the three parts of a library's trainer.
    """

    degrees: dict[str, int]
    model: str = "mlp"
    schedule: str = "1F1B"
    optimizer: str = "adamw"
    micro_batches: int = 2
    scaled: bool = False
    apart: bool = False


def drawn(seed: int) -> Case:
    """A case of its own for each seed."""
    numbers = random.Random(seed)
    degrees = numbers.choice(
        [{"pp": 2, "sharding": 2}] * 3 + [{"sharding": 4}, {"dp": 2, "sharding": 2}]
    )
    schedules = ["1F1B", "FThenB", "ZBH1", "ZBV"] if "pp" in degrees else ["1F1B"]
    scaled = numbers.random() < 0.3
    return Case(
        degrees,
        numbers.choice(["mlp", "gpt", "tied"]),
        numbers.choice(schedules),
        # Adam makes as much of the last bits as of a sign where a gradient is next to nothing.
        numbers.choice([*OPTIMIZERS] if "pp" in degrees else ["momentum", "groups"]),
        numbers.choice([2, 3, 4]),
        scaled,
        not scaled and numbers.random() < 0.5,
    )


def trained(case: Case, stage: int, report: bool = False) -> dict[str, Any]:
    """Trains a job; returns what it ends with, and what plain Paddle does."""
    kind, make = KINDS[case.model], {**OPTIMIZERS, "muon": muon}[case.optimizer]
    options = {"micro_batches": case.micro_batches, "schedule": case.schedule}
    chunks = {"num_virtual_pipeline_stages": 2} if case.schedule == "ZBV" else {}
    scaling = half_precision() if case.scaled else nullcontext()
    stages = {"guards": 1, "sharding_stage": stage}
    with (
        job(**options, timeout=60, allow=["optimizer:Muon"], **stages, **case.degrees) as running,
        scaling,
    ):
        paddle.seed(3)
        model = pipeline(kind.layers(), loss_fn=kind.loss, **chunks)
        single = model.layers.single_model()
        single.set_state_dict(model.layers.full_state_dict())
        wrapped, plain = (
            fleet.distributed_optimizer(make(model.parameters())),
            make(single.parameters()),
        )
        scaler = enabled_scaler(init_loss_scaling=256.0) if case.scaled else None
        losses, norms, nbytes = [], [], []
        for step in range(STEPS):
            whole = kind.batch(case.micro_batches * running.degrees.replicas, step)
            mine = part(whole, running.replica, case.micro_batches * ROWS)
            broken = case.scaled and step == 1 and running.replica == 0
            hook = (
                model.parameters()[-1].register_hook(lambda g: g * float("nan")) if broken else None
            )
            if case.apart:
                model._prepare_training(mine, wrapped)
                losses.append(model.forward_backward_pipeline(mine))
                nbytes.append(gradient_bytes(model, wrapped))
                wrapped.step()
                wrapped.clear_grad()
            else:
                losses.append(model.train_batch(mine, wrapped, scaler=scaler))
                nbytes.append(gradient_bytes(model, wrapped))
            if hook is not None:
                hook.remove()
            if not (case.scaled and step == 1):
                norms.append(wrapped.gradient_norm)
                plain_step(single, plain, whole, case, running.degrees.replicas)
        state = model.layers.full_state_dict()
        return {
            "ends": (bits(dict(enumerate(losses))), norms, bits(state)),
            "nbytes": nbytes,
            # Absolute: the bias of a key has no gradient but rounding.
            "gap": max(float((state[n] - t).abs().max()) for n, t in single.state_dict().items()),
            "equal": bits(state) == bits(single.state_dict()),
        }


def left_over() -> str:
    """What a second batch says whose first one was neither stepped nor cleared."""
    with job(pp=2, sharding=2, sharding_stage=2, micro_batches=2):
        model = pipeline(KINDS["mlp"].layers(), loss_fn=KINDS["mlp"].loss)
        optimizer = fleet.distributed_optimizer(momentum(model.parameters()))
        data = KINDS["mlp"].batch(2, 0)
        for _ in range(2):  # cleared between
            model._prepare_training(data, optimizer)
            model.forward_backward_pipeline(data)
            optimizer.step()
            optimizer.clear_grad()
        model.forward_backward_pipeline(model._prepare_training(data, optimizer))
        try:
            model.forward_backward_pipeline(data)
        except FleetPipeError as error:
            return str(error)
    return "nothing"


def gradient_bytes(model: Any, optimizer: Any) -> tuple[int, int]:
    """Bytes of the gradients that this rank has, and of those of the parameters that it owns."""
    sizes = {id(p): 4 * int(p.size) for p in model.parameters()}
    here = (p for p in model.parameters() if gradient_of(p) is not None)
    own = (p for p in model.parameters() if optimizer.owns_state(p))
    return sum(sizes[id(p)] for p in here), sum(sizes[id(p)] for p in own)


def plain_step(single: Any, optimizer: Any, data: Any, case: Case, replicas: int) -> None:
    """A step of the single model on the batch of all replicas, whose gradients it averages."""
    sums: dict[str, Any] = {}
    for replica in range(replicas):
        rows = part(data, replica, case.micro_batches * ROWS)
        for number in range(case.micro_batches):
            inputs, labels = part(rows, number, ROWS)
            loss = KINDS[case.model].loss(single(inputs), labels)
            (loss * float(Fraction(1, case.micro_batches))).backward()
        for parameter in single.parameters():
            share = parameter.grad / replicas
            before = sums.get(parameter.name)
            sums[parameter.name] = share if before is None else before + share
            parameter.clear_gradient(False)
    for parameter in single.parameters():
        parameter.grad = sums[parameter.name]
    optimizer.step()
    optimizer.clear_grad()


def under_both_stages(cases: list[Case]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(trained(case, 1), trained(case, 2)) for case in cases]


def trained_gpt() -> tuple[Any, Any]:
    """Builds the model that is trained through several layouts, and its optimizer."""
    paddle.seed(3)
    model = pipeline(KINDS["gpt"].layers(), loss_fn=KINDS["gpt"].loss)
    return model, fleet.distributed_optimizer(adamw(model.parameters()))


def rows_of_gpt(running: Any, step: int) -> Any:
    """This replica's part of a batch of four micro-batches."""
    rows = 4 // running.degrees.replicas * ROWS
    return part(KINDS["gpt"].batch(4, step), running.replica, rows)


def verdict() -> tuple[bool, str]:
    """What parity says of stage 2, with a tied weight and a clip."""
    kind = KINDS["tied"]
    with job(pp=2, sharding=2, sharding_stage=2, micro_batches=2):
        model = pipeline(kind.layers(), loss_fn=kind.loss)
        session = parity.begin(model, fleet.distributed_optimizer(adamw(model.parameters())))
        for step in range(STEPS):
            session.step(kind.batch(2, step))
        return session.report.passed, session.report.verdict()


def captured(stage: int) -> tuple[list[float], dict[str, bytes]]:
    """Trains a plain model, beside itself in the first batches, which compares all gradients."""
    with job(pp=2, sharding=2, sharding_stage=stage, micro_batches=2):
        paddle.seed(3)
        plain = nn.Sequential(*[nn.Linear(6, 6), nn.Tanh()] * 2, nn.Linear(6, 4))
        x, labels = paddle.randn([2 * ROWS, 6]), paddle.zeros([2 * ROWS], "int64")
        pipe = fleetpipe.pipeline(plain, x[:ROWS], nn.CrossEntropyLoss(), num_stages=2)
        model = fleet.distributed_model(pipe)
        optimizer = fleet.distributed_optimizer(adamw(model.parameters()))
        losses = [float(model.train_batch([x, labels], optimizer)) for _ in range(STEPS)]
        return losses, bits(model.layers.full_state_dict())


def everything(folder: Path, layouts: list[tuple[int, dict[str, int]]]) -> dict[str, Any]:
    """All but the random cases, one after another in the same processes."""
    micro_batches = [4 // degrees.get("sharding", 1) for _, degrees in layouts]
    jobs: dict[str, list[dict[str, Any]]] = {
        name: [
            {**degrees, "micro_batches": count, "sharding_stage": stage if name == "stages" else 1}
            for (stage, degrees), count in zip(layouts, micro_batches)
        ]
        for name in ("stages", "plain")
    }
    return {
        "legs": [
            trained_through(folder / name, each, trained_gpt, rows_of_gpt)
            for name, each in jobs.items()
        ],
        "verdict": verdict(),
        "left over": left_over(),
        "captured": [captured(1), captured(2)],
    }


BESIDE = {"pp": 2, "sharding": 2}


def assert_as_stage_1(on_ranks: Call, chosen: list[Case]) -> None:
    found = on_ranks(under_both_stages, 4, chosen, timeout=240)
    for number, case in enumerate(chosen):
        ranks = [rank[number] for rank in found]
        for first, second in ranks:
            replicas = case.degrees.get("dp", 1) * case.degrees["sharding"]
            assert second["ends"][2] == ranks[0][1]["ends"][2], case
            if replicas == 2:  # of more, Gloo has another order than the ranks'
                assert second["ends"] == first["ends"], case
                assert second["equal"] or case.model == "tied", case
            assert second["gap"] < 1e-6, (case, second["gap"])
            assert [here for here, _ in second["nbytes"]] == [own for _, own in second["nbytes"]]
            assert all(here > own for here, own in first["nbytes"])


def test_gradients_are_scattered_to_their_owners(on_ranks: Call) -> None:
    chosen = [
        Case(BESIDE),
        Case(BESIDE, "tied", optimizer="groups", apart=True),
        Case(BESIDE, "gpt", "ZBH1", "momentum", scaled=True),
        Case({"dp": 2, "sharding": 2}, "gpt", optimizer="momentum"),
        Case(BESIDE, optimizer="muon"),
    ]
    assert_as_stage_1(on_ranks, chosen)


@pytest.mark.once
def test_random_jobs(on_ranks: Call) -> None:
    assert_as_stage_1(on_ranks, [drawn(seed) for seed in (0, 4)])


@pytest.mark.once
def test_checkpoints_parity_and_captured_models(on_ranks: Call, tmp_path: Path) -> None:
    layouts = [(2, BESIDE), (1, {"pp": 4}), (2, BESIDE)]
    for found in on_ranks(everything, 4, tmp_path, layouts, timeout=240):
        assert found["legs"][0] == found["legs"][1]
        passed, verdict = found["verdict"]
        assert passed, verdict
        assert "within" in verdict or "bit-exact" in verdict
        assert "stage 2 has added up the gradients" in found["left over"]
        assert found["captured"][0] == found["captured"][1]
