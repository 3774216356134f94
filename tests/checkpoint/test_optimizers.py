"""The state of every optimizer of Paddle's comes back by parameter, however often one was built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.errors import CheckpointError
from tests.pipelines import enabled_scaler, job, mlp_and_sgd


def model(dtype: str = "float32") -> Any:
    """Three layers with a parameter that is not trained; the same whenever it is made."""
    made = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    numbers = np.random.default_rng(3)
    for parameter in made.parameters():
        parameter.set_value(numbers.standard_normal(parameter.shape).astype("float32"))
    made[1].bias.stop_gradient = True
    return made.to(dtype=dtype)


def grouped(parameters: list[Any]) -> Any:
    return paddle.optimizer.Adam(
        0.1,
        parameters=[
            {"params": parameters[:2], "beta1": 0.8},
            {"params": parameters[2:], "learning_rate": 0.5},
        ],
    )


def named(kind: str, **options: Any) -> Callable[[list[Any]], Any]:
    def make(parameters: list[Any]) -> Any:
        return getattr(paddle.optimizer, kind)(learning_rate=0.1, parameters=parameters, **options)

    return make


OPTIMIZERS = {
    "SGD": named("SGD"),
    "Momentum": named("Momentum"),
    "Momentum, several at once": named("Momentum", use_multi_tensor=True),
    "Adagrad": named("Adagrad"),
    "Adadelta": named("Adadelta"),
    "RMSProp": named("RMSProp", centered=True, momentum=0.9),
    "Adam": named("Adam"),
    "Adam, several at once": named("Adam", use_multi_tensor=True),
    "Adam, named": named("Adam", name="mine"),
    "Adam, in groups": grouped,
    "AdamW": named("AdamW"),
    "Adamax": named("Adamax"),
    "Lamb": named("Lamb"),
    **{
        kind: named(kind)
        for kind in ("NAdam", "RAdam", "Rprop", "ASGD")
        if hasattr(paddle.optimizer, kind)
    },
}


def step(made: Any, optimizer: Any, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    for parameter in made.parameters():
        if not parameter.stop_gradient:
            gradient = paddle.to_tensor(numbers.standard_normal(parameter.shape))
            parameter.grad = gradient.astype(parameter.dtype)
    optimizer.step()


def values(made: Any) -> list[bytes]:
    return [parameter.astype("float32").numpy().tobytes() for parameter in made.parameters()]


def went_on(folder: Path, make: Any, dtype: str = "float32") -> tuple[list[bytes], list[bytes]]:
    """Parameters after five steps: straight on, and restored after three in another model."""
    made = model(dtype)
    optimizer = make(made.parameters())
    for seed in range(3):
        step(made, optimizer, seed)
    manager = fleetpipe.CheckpointManager(folder)
    manager.save(3, model=made, optimizer=optimizer)
    other = model(dtype)
    others = make(other.parameters())
    step(other, others, 77)  # what it knows by now must not count
    manager.restore(model=other, optimizer=others)
    for seed in (3, 4):
        step(made, optimizer, seed)
        step(other, others, seed)
    return values(made), values(other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_with_the_same_bits(tmp_path: Path, name: str) -> None:
    straight, restored = went_on(tmp_path, OPTIMIZERS[name])
    assert straight == restored
    assert straight != values(model())


def test_master_weights_come_back(tmp_path: Path) -> None:
    straight, restored = went_on(tmp_path, named("SGD", multi_precision=True), "bfloat16")
    assert straight == restored
    files = sorted(path.name for path in tmp_path.rglob("*.safetensors"))
    assert [name.split("-")[0] for name in files] == ["master_weights", "model"]


def test_state_of_what_was_not_stepped_then_is_forgotten(tmp_path: Path) -> None:
    made = model()
    optimizer = paddle.optimizer.Momentum(0.1, parameters=made.parameters())
    manager = fleetpipe.CheckpointManager(tmp_path)
    manager.save(0, model=made, optimizer=optimizer)
    step(made, optimizer, 1)
    first = values(made)
    step(made, optimizer, 2)
    manager.restore(model=made, optimizer=optimizer)
    step(made, optimizer, 1)
    assert values(made) == first


@pytest.mark.parametrize(("writer", "reader"), [("Adam", "AdamW"), ("AdamW", "Adam")])
def test_adam_and_adamw_take_each_others_state(tmp_path: Path, writer: str, reader: str) -> None:
    made, other = model(), model()
    optimizers = [
        getattr(paddle.optimizer, kind)(0.1, parameters=one.parameters(), weight_decay=0.0)
        for kind, one in ((writer, made), (reader, other))
    ]
    step(made, optimizers[0], 1)
    manager = fleetpipe.CheckpointManager(tmp_path)
    manager.save(1, model=made, optimizer=optimizers[0])
    manager.restore(model=other, optimizer=optimizers[1])
    for one, optimizer in zip((made, other), optimizers):
        step(one, optimizer, 2)
    assert values(other) == values(made)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (named("SGD"), "no state of this optimizer"),
        (named("Adam", amsgrad=True), "of an optimizer with other options"),
    ],
)
def test_another_optimizer_is_refused_and_nothing_changes(
    tmp_path: Path, make: Any, message: str
) -> None:
    made = model()
    optimizer = paddle.optimizer.Adam(0.1, parameters=made.parameters())
    step(made, optimizer, 1)
    manager = fleetpipe.CheckpointManager(tmp_path)
    manager.save(1, model=made, optimizer=optimizer)
    other = model()
    try:
        others = make(other.parameters())
    except TypeError:
        pytest.skip("amsgrad is an option of 3.x")
    before = values(other)
    with pytest.raises(CheckpointError, match=message):
        manager.restore(model=other, optimizer=others)
    assert values(other) == before
    assert not any(others._accumulators.values())


def test_rate_scaler_and_data_come_back(tmp_path: Path) -> None:
    class Data:
        def __init__(self) -> None:
            self.position = {"epoch": 0, "samples": [0]}

        def state_dict(self) -> Any:
            return self.position

        def set_state_dict(self, state: Any) -> None:
            self.position = state

    def objects() -> dict[str, Any]:
        made = model()
        warm = paddle.optimizer.lr.CosineAnnealingWarmRestarts(0.3, 2, 2)
        rate = paddle.optimizer.lr.LinearWarmup(warm, 2, 0.0, 0.3)
        return {
            "model": made,
            "optimizer": paddle.optimizer.SGD(rate, parameters=made.parameters()),
            "lr_scheduler": rate,
            "scaler": enabled_scaler(init_loss_scaling=1024.0),
            "data": Data(),
        }

    one, other = objects(), objects()
    for _ in range(9):
        one["lr_scheduler"].step()
    one["scaler"]._scale = paddle.to_tensor([2.0**31])
    one["data"].position = {"epoch": 3, "samples": [7, 1.5]}
    manager = fleetpipe.CheckpointManager(tmp_path)
    manager.save(1, **one)
    manager.restore(**other)
    assert (
        other["optimizer"].get_lr() == one["optimizer"].get_lr() != objects()["optimizer"].get_lr()
    )
    rates: list[list[float]] = [[], []]
    for _ in range(9):
        for listed, scheduler in zip(rates, (one["lr_scheduler"], other["lr_scheduler"])):
            scheduler.step()
            listed.append(scheduler())
    assert rates[0] == rates[1]
    assert float(other["scaler"].state_dict()["scale"].item()) == 2.0**31
    assert other["data"].position == {"epoch": 3, "samples": [7, 1.5]}


def test_buffers_that_no_state_dict_has_come_back(tmp_path: Path) -> None:
    def layer(value: float) -> Any:
        made = nn.LSTM(2, 3)
        made.register_buffer("seen", paddle.full([2], value), persistable=False)
        return made

    manager = fleetpipe.CheckpointManager(tmp_path)
    manager.save(1, model=layer(3.0))
    other = layer(0.0)
    manager.restore(model=other)
    assert other.seen.tolist() == [3.0, 3.0]
    assert "seen" not in other.state_dict()


Rate = paddle.optimizer.lr.StepDecay


@pytest.mark.parametrize(
    ("before", "set_in_the_run", "after", "expected", "said"),
    [
        (0.1, None, 0.1, 0.1, ""),
        (0.1, 0.02, 0.1, 0.02, ""),
        (0.1, None, 0.001, 0.001, "was 0.1 when it was saved, and is now 0.001"),
        (0.1, 0.02, 0.001, 0.001, "was 0.02 when it was saved, and is now 0.001"),
        (
            0.1,
            None,
            Rate(0.5, 2),
            0.5,
            "was 0.1 when it was saved, and is now the script's StepDecay",
        ),
        (Rate(0.5, 2), None, 0.1, 0.1, "was a scheduler's when it was saved, and is now 0.1"),
    ],
)
def test_the_rate_that_the_script_gives_counts_and_one_that_the_run_has_set_stays(
    before: Any,
    set_in_the_run: Any,
    after: Any,
    expected: float,
    said: str,
    tmp_path: Path,
    caplog: Any,
) -> None:
    manager, made = fleetpipe.CheckpointManager(tmp_path), model()
    parameters = [parameter for parameter in made.parameters() if not parameter.stop_gradient]

    def optimizer(rate: Any) -> Any:
        return fleet.distributed_optimizer(paddle.optimizer.SGD(rate, parameters=parameters))

    with job(1):
        first = optimizer(before)
        if set_in_the_run is not None:
            first.set_lr(set_in_the_run)
        manager.save(1, model=made, optimizer=first)
        again = optimizer(after)
        manager.restore(model=made, optimizer=again)
        assert again.get_lr() == expected
    lines = [text for text in caplog.messages if "learning rate" in text]
    assert lines == ([f"the learning rate {said}"] if said else [])


def test_an_optimizer_that_fleet_has_not_wrapped_goes_on_with_the_saved_rate(
    tmp_path: Path,
) -> None:
    with mlp_and_sgd(1) as (pipe, optimizer):
        fleetpipe.CheckpointManager(tmp_path).save(1, model=pipe, optimizer=optimizer)
        made = pipe.layers.single_model()
    plain = paddle.optimizer.SGD(0.5, parameters=made.parameters())
    fleetpipe.load_single(made, tmp_path, optimizer=plain)
    assert plain.get_lr() == 0.1


def test_the_rate_that_steps_take_comes_back_where_the_optimizer_has_another(
    tmp_path: Path,
) -> None:
    """As after Paddle's ``ReduceLROnPlateau``, which sets the number and no step's rate."""

    def step(made: Any, optimizer: Any) -> bytes:
        made(paddle.ones([2, 4])).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        return b"".join(bits.numpy().tobytes() for bits in made.parameters())

    made = model()
    sgd = paddle.optimizer.SGD(0.1, parameters=made.parameters())
    step(made, sgd)
    sgd._learning_rate = 0.05
    fleetpipe.CheckpointManager(tmp_path).save(1, model=made, optimizer=sgd)
    again = model()
    other = paddle.optimizer.SGD(0.1, parameters=again.parameters())
    fleetpipe.CheckpointManager(tmp_path).restore(model=again, optimizer=other)
    assert (step(again, other), other.get_lr()) == (step(made, sgd), 0.05)
