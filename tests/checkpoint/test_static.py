"""A static program saves and restores like a model of dynamic graph, and each reads the other."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.errors import CheckpointError, ConfigError, StateError
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.static import pipeline_of, state_dict
from tests.pipelines import bits, job, pipeline
from tests.static.networks import (
    CLASSES,
    FEATURES,
    MICRO_BATCHES,
    assert_same,
    batches,
    executor_of,
    mlp,
    static_mode,
    strategy_of,
)

FEEDS = batches(5)
#: What is saved, and how the run goes on.
BEFORE, AFTER = FEEDS[:3], FEEDS[3:]
HIDDEN = 8


class Static:
    """A program in the static mode of now, and what it is trained with."""

    def __init__(
        self,
        stages: int = 2,
        seed: int = 7,
        dropout: Sequence[int] = (),
        rate: Any = None,
        micro_batches: int = MICRO_BATCHES,
        make: Any = paddle.optimizer.AdamW,
    ) -> None:
        paddle.seed(seed)
        strategy = strategy_of(micro_batches=micro_batches)
        fleet.init(is_collective=True, strategy=strategy)
        self.loss = mlp(stages, norm=True, dropout=dropout)()[0]
        self.rate = paddle.optimizer.lr.StepDecay(0.01, 2) if rate is None else rate
        optimizer = fleet.distributed_optimizer(make(self.rate), strategy)
        optimizer.minimize(self.loss)
        self.exe = executor_of()
        self.objects = {
            "model": paddle.static.default_main_program(),
            "optimizer": optimizer,
            "lr_scheduler": None if rate else self.rate,
        }

    def train(self, feeds: Sequence[Any]) -> list[bytes]:
        losses = []
        for feed in feeds:
            (loss,) = self.exe.run(feed=feed, fetch_list=[self.loss])
            losses.append(b"" if loss is None else loss.tobytes())
            if not isinstance(self.rate, float):
                self.rate.step()
        return losses


class Dynamic:
    """The same network in the dynamic job of now."""

    def __init__(self, stages: int = 2, seed: int = 7) -> None:
        paddle.seed(seed)
        widths = [FEATURES, *[HIDDEN] * stages]
        layers = [
            layer
            for width in widths[:-1]
            for layer in (LayerDesc(nn.Linear, width, HIDDEN), nn.functional.tanh, norm())
        ]
        self.model = pipeline([*layers, LayerDesc(nn.Linear, HIDDEN, CLASSES)])
        self.rate = paddle.optimizer.lr.StepDecay(0.01, 2)
        adamw = paddle.optimizer.AdamW(self.rate, parameters=self.model.parameters())
        optimizer = fleet.distributed_optimizer(adamw)
        self.objects = {"model": self.model, "optimizer": optimizer, "lr_scheduler": self.rate}

    def train(self, feeds: Sequence[Any]) -> list[bytes]:
        data = [[paddle.to_tensor(feed[name]) for name in "xy"] for feed in feeds]
        optimizer = self.objects["optimizer"]
        return [self.model.train_batch(one, optimizer, self.rate).numpy().tobytes() for one in data]


def norm() -> Any:
    return LayerDesc(nn.BatchNorm1D, HIDDEN)


def names_of(stages: int) -> dict[str, str]:
    """The names that :class:`Dynamic` has, by those that Paddle has counted for :class:`Static`."""
    lasting = []
    for block in range(stages):
        lasting += [f"{3 * block}.weight", f"{3 * block}.bias"]
        lasting += [f"{3 * block + 2}.{name}" for name in ("weight", "bias", "_mean", "_variance")]
    lasting += [f"{3 * stages}.weight", f"{3 * stages}.bias"]
    counted = [*pipeline_of().declared]
    assert len(counted) == len(lasting)
    return dict(zip(counted, lasting))


def test_a_program_goes_on_with_the_bits_of_one_that_never_stopped(tmp_path: Path) -> None:
    manager = fleetpipe.CheckpointManager(tmp_path, async_save=True)
    with static_mode():
        run = Static(dropout=[0, 1])
        run.train(BEFORE)
        manager.save(3, **run.objects, metrics={"loss": 1.0}, extra={"seen": 3})
        expected, state, drawn = run.train(AFTER), state_dict(), random_numbers()
        manager.wait()
    for seen in ([], FEEDS[:1]):  # before the first batch, when nothing has been drawn, and later
        with static_mode():
            run = Static(seed=8, dropout=[0, 1])
            run.train(seen)
            restored = manager.restore(**run.objects)
            assert (restored.step, restored.extra) == (3, {"seen": 3})
            assert run.train(AFTER) == expected
            assert_same(state_dict(), state)
            assert random_numbers() == drawn


@pytest.mark.parametrize("kept_in_memory", [False, True])
def test_a_run_of_a_program_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_in_memory: bool
) -> None:
    if kept_in_memory:
        monkeypatch.setenv("FLEETPIPE_KEPT_STATE", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests' own handlers stay
    ended = []
    manager = fleetpipe.CheckpointManager(tmp_path / "run", save_interval=2)
    for seed, until in [(7, 3), (8, 5), (7, 5)]:
        with static_mode():
            run = Static(seed=seed, dropout=[0, 1])
            if ended:  # the third run is never interrupted
                manager = fleetpipe.CheckpointManager(tmp_path / "other", save_interval=9)
                monkeypatch.delenv("FLEETPIPE_KEPT_STATE", raising=False)
            objects = {name: run.objects[name] for name in ("model", "optimizer")}
            resumed = fleetpipe.resume(**objects, manager=manager)
            assert resumed.step == (0 if seed == 7 else 3 if kept_in_memory else 2)
            for step in resumed.steps(until):
                run.train(FEEDS[step : step + 1])
            if until == 5:
                ended.append(state_dict())
    assert_same(*ended)


def random_numbers() -> bytes:
    paddle.disable_static()
    try:
        found: bytes = paddle.rand([4]).numpy().tobytes()
        return found
    finally:
        paddle.enable_static()


def test_a_rate_that_was_set_by_hand_comes_back_of_the_same_optimizer(tmp_path: Path) -> None:
    manager, sgd = fleetpipe.CheckpointManager(tmp_path), paddle.optimizer.SGD
    with static_mode():
        run = Static(rate=0.1, make=sgd)
        run.train(BEFORE)
        with paddle.base.dygraph.guard():
            run.objects["optimizer"].set_lr(0.025)
        manager.save(3, **run.objects)
        expected = run.train(AFTER)
    with static_mode():
        run = Static(rate=0.1, make=sgd)
        assert run.train(FEEDS)[3:] != expected
        manager.restore(**run.objects)
        assert run.objects["optimizer"].get_lr() == 0.025
        assert run.train(AFTER) == expected
    with static_mode(), pytest.raises(CheckpointError, match=r"AdamW\n(.|\n)*SGD"):
        manager.restore(**Static().objects)


def test_dynamic_graph_of_any_layout_goes_on_from_a_program(tmp_path: Path) -> None:
    stages = 3
    with static_mode():
        run = Static(stages)
        run.train(BEFORE)
        manager = fleetpipe.CheckpointManager(tmp_path, names=names_of(stages))
        manager.save(3, **run.objects)
        expected, state = run.train(AFTER), [*state_dict().values()]
        names = [names_of(stages)[name] for name in state_dict()]
        hashed = fleetpipe.model_hash(run.objects["model"], names_of(stages))
    whole = {name: array.tobytes() for name, array in zip(names, state)}
    for ranks in (1, stages):
        with job(ranks):
            other = Dynamic(stages, seed=9)
            fleetpipe.CheckpointManager(tmp_path).restore(**other.objects)
            assert other.train(AFTER) == expected
            assert bits(other.model.layers.full_state_dict()) == whole
            assert fleetpipe.model_hash(other.model) == hashed
            # Both graphs write the same bytes.
            fleetpipe.CheckpointManager(tmp_path).restore(**other.objects)
            fleetpipe.CheckpointManager(tmp_path / "dynamic").save(3, **other.objects)
            files = tensor_files(tmp_path / "dynamic")
            assert files == tensor_files(tmp_path / "step-00000003")
            assert len(files) == 2
    widths = [FEATURES, *[HIDDEN] * (stages - 1)]
    blocks = [(nn.Linear(w, HIDDEN), nn.Tanh(), nn.BatchNorm1D(HIDDEN)) for w in widths]
    plain = nn.Sequential(*(layer for block in blocks for layer in block), nn.Linear(8, CLASSES))
    adamw = paddle.optimizer.AdamW(parameters=plain.parameters())
    assert fleetpipe.load_single(plain, tmp_path, optimizer=adamw) == 3


@pytest.mark.once_for("4")
@pytest.mark.parametrize("stages", [2, 4])
def test_a_program_goes_on_from_dynamic_graph_of_any_layout(tmp_path: Path, stages: int) -> None:
    ended = []
    for ranks in (1, stages):
        with job(ranks):
            run = Dynamic(stages)
            run.train(BEFORE)
            fleetpipe.CheckpointManager(tmp_path / str(ranks)).save(3, **run.objects)
            ended.append((run.train(AFTER), bits(run.model.layers.full_state_dict())))
    assert ended[0] == ended[1]
    for ranks in (1, stages):
        with static_mode():
            other, lasting = Static(stages, seed=9), names_of(stages)
            names = lasting if ranks == 1 else "order"
            manager = fleetpipe.CheckpointManager(tmp_path / str(ranks), names=names)
            manager.restore(**other.objects)
            assert other.train(AFTER) == ended[0][0]
            state = {lasting[name]: value.tobytes() for name, value in state_dict().items()}
            assert state == ended[0][1]


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


def test_another_cut_of_a_program_reads_it(tmp_path: Path) -> None:
    """The same layers in four stages: a dropout in one of them has the same numbers, too."""
    manager = fleetpipe.CheckpointManager(tmp_path)

    def build(guards: Sequence[int]) -> Any:
        paddle.seed(7)
        fleet.init(is_collective=True, strategy=strategy_of())
        with paddle.static.device_guard("gpu:0"):
            value = paddle.static.data("x", [-1, FEATURES])
            label = paddle.static.data("y", [-1, 1], "int64")
        for number, guard in enumerate(guards):
            with paddle.static.device_guard(f"gpu:{guard}"):
                value = nn.Linear(FEATURES if number == 0 else HIDDEN, HIDDEN)(value)
                if number == 2:
                    value = nn.functional.dropout(value, 0.3)
        with paddle.static.device_guard(f"gpu:{guards[-1]}"):
            loss = nn.functional.cross_entropy(nn.Linear(HIDDEN, CLASSES)(value), label)
        optimizer = paddle.optimizer.Momentum(0.1, 0.9)
        exe = executor_of(loss, strategy_of(), optimizer)
        objects = {"model": paddle.static.default_main_program(), "optimizer": optimizer}
        return objects, lambda feeds: [
            exe.run(feed=feed, fetch_list=[loss])[0].tobytes() for feed in feeds
        ]

    cuts = ([0, 0, 1, 1], [0, 1, 2, 3])
    for writer in cuts:
        with static_mode():
            objects, train = build(writer)
            train(BEFORE)
            manager.save(3, **objects)
            expected = train(AFTER)
        for reader in cuts:
            with static_mode():
                objects, train = build(reader)
                train(FEEDS[:1])
                manager.restore(**objects)
                assert train(AFTER) == expected, (writer, reader)


def test_other_names_are_an_error_that_lists_both_sides(tmp_path: Path) -> None:
    manager = fleetpipe.CheckpointManager(tmp_path)
    with job(2):
        manager.save(3, **Dynamic().objects)
    with static_mode():
        run = Static()
        before = state_dict()
        with pytest.raises(ConfigError, match=r"linear_0.w_0(.|\n)*0.weight(.|\n)*names=\{"):
            manager.restore(**run.objects)
        own = next(iter(pipeline_of().declared))
        for names, message in [
            ({own: "0.weight"}, "by other names"),
            ({own[:-1]: "0.weight"}, rf"which the program has not(.|\n)*did you mean '{own}'"),
            ({own: "a", "linear_0.b_0": "a"}, "calls both"),
            ("by order", 'a dict, or "order"'),
        ]:
            other = fleetpipe.CheckpointManager(tmp_path, names=names)
            with pytest.raises(ConfigError, match=message):
                other.restore(**run.objects)
        assert_same(state_dict(), before)
    with job(2), pytest.raises(ConfigError, match="names= is for static programs"):
        fleetpipe.CheckpointManager(tmp_path, names={}).restore(**Dynamic().objects)


def test_what_does_not_fit_a_program_changes_nothing(tmp_path: Path) -> None:
    manager = fleetpipe.CheckpointManager(tmp_path)
    with job(2):
        run = Dynamic()
        manager.save(0, **run.objects)
    with static_mode():
        with pytest.raises(ConfigError, match="after minimize"):
            manager.save(1, model=paddle.static.default_main_program())
        run = Static()
        train_state = state_dict()
        stranger = paddle.optimizer.AdamW(0.1)
        with pytest.raises(ConfigError, match="minimized by another optimizer"):
            manager.save(1, model=run.objects["model"], optimizer=stranger)
        by_order = fleetpipe.CheckpointManager(tmp_path, names="order")
        with pytest.raises(CheckpointError, match="saved before the first step"):
            by_order.restore(**run.objects)
        assert_same(state_dict(), train_state)
        by_order.restore(**run.objects, only=("model",))
        assert not np.array_equal(state_dict()["linear_0.w_0"], train_state["linear_0.w_0"])
    with static_mode():
        paddle.seed(1)
        fleet.init(is_collective=True, strategy=strategy_of())
        loss = mlp(2)()[0]
        optimizer = paddle.optimizer.AdamW(0.1)
        fleet.distributed_optimizer(optimizer, strategy_of()).minimize(loss)
        program = paddle.static.default_main_program()
        with pytest.raises(CheckpointError, match="has no value yet"):
            manager.save(1, model=program, optimizer=optimizer)
        fleet.shutdown()
        with pytest.raises(StateError, match="has ended"):
            manager.save(1, model=program)
    assert manager.steps() == [0]
