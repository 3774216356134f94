"""What ``Model`` is given: precision, data of every kind; and what several ranks read of it."""

from __future__ import annotations

import json
import os
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
import fleetpipe.io
from fleetpipe import fleet, log
from fleetpipe.errors import ConfigError, FleetPipeError
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests import pipelines
from tests.fit.test_model import BATCH, ROWS, STEPS, Digits, Losses, layers, prepared
from tests.fixtures import Call, Launch
from tests.launching import ROOT
from tests.pipelines import bits


@pytest.fixture
def model() -> Iterator[Any]:
    with pipelines.job(pp=2, micro_batches=STEPS, rows=ROWS):
        yield fleetpipe.Model(layers())


def losses(model: Any, data: Any, **options: Any) -> list[float]:
    told = Losses()
    model.fit(data, verbose=0, shuffle=False, callbacks=told, **options)
    return [logs["loss"][0] for logs in told.train]


def test_on_a_cpu_mixed_precision_changes_nothing_and_is_said_once(model: Any, caplog: Any) -> None:
    data = Digits(0, BATCH)
    expected = losses(prepared(model), data, batch_size=BATCH)
    log.once.cache_clear()
    for level in ("O1", {"level": "O2", "init_loss_scaling": 8.0}):
        other = prepared(fleetpipe.Model(layers()), amp_configs=level)
        assert losses(other, data, batch_size=BATCH) == expected
    assert caplog.text.count("auto_cast changes nothing") == 1


@pytest.mark.parametrize("configs", ["O3", {"level": "O3"}, {"loss_scale": 1}])
def test_what_paddle_does_not_take_as_precision_is_refused(model: Any, configs: Any) -> None:
    with pytest.raises(ConfigError, match="amp_configs: "):
        prepared(model, amp_configs=configs)


def test_the_summary_counts_parameters_and_measures_memory(model: Any, capsys: Any) -> None:
    prepared(model)
    data = Digits(0, BATCH)
    before = [value.numpy() for value in model.network.full_state_dict().values()]
    counts = model.summary(batch=(data.images, data.labels))
    assert counts == {"total_params": 5018, "trainable_params": 5018}
    title, heads, first, last, total = capsys.readouterr().out.splitlines()
    assert title == "seg_method uniform: 5 layers, stages: 2; parameters that are trained"
    assert heads.endswith("bytes of activations")
    assert "3,120" in first
    assert "1,898" in last
    assert "5,018" in total
    after = [value.numpy() for value in model.network.full_state_dict().values()]
    assert all(map(np.array_equal, before, after))


class Stream(paddle.io.IterableDataset):
    """Digits in turn."""

    def __iter__(self) -> Iterator[Any]:
        data = Digits(0, 3 * BATCH)
        yield from (data[index] for index in range(len(data)))


def test_data_of_every_kind_train_alike(model: Any) -> None:
    data = Digits(0, 3 * BATCH)
    batches = [
        (data.images[begin : begin + BATCH], data.labels[begin : begin + BATCH])
        for begin in range(0, 3 * BATCH, BATCH)
    ]
    expected = losses(prepared(model), data, batch_size=BATCH)
    assert len(expected) == 3
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (Stream(), {"batch_size": BATCH}),
        (batches, {}),
        ((batch for batch in batches), {}),
        (paddle.io.DataLoader(data, batch_size=BATCH), {}),
        (data, {"batch_size": BATCH, "num_workers": 2}),
        (fleetpipe.io.DataLoader(data, batch_size=BATCH, num_workers=1), {}),
    ]
    for kind, options in kinds:
        again = prepared(fleetpipe.Model(layers()))
        assert losses(again, kind, **options) == expected, kind


def test_longer_steps_and_a_trace_do_not_go_together(tmp_path: Any) -> None:
    with pipelines.job(pp=2, micro_batches=STEPS, rows=ROWS, trace=str(tmp_path)):
        model = prepared(fleetpipe.Model(layers()))
        with pytest.raises(ConfigError, match="trace"):
            losses(model, Digits(0, BATCH), batch_size=BATCH, accumulate_grad_batches=2)


def test_a_schedule_of_the_learning_rate_steps_with_batches(model: Any) -> None:
    rate = paddle.optimizer.lr.StepDecay(0.1, step_size=2)
    model.prepare(paddle.optimizer.SGD(rate, model.parameters()), nn.CrossEntropyLoss())
    losses(model, Digits(0, 3 * BATCH), batch_size=BATCH)
    assert model.learning_rate == 0.1 * 0.1
    by_epoch = paddle.callbacks.LRScheduler(by_step=False, by_epoch=True)
    model.fit(Digits(0, 3 * BATCH), batch_size=BATCH, verbose=0, callbacks=by_epoch)
    assert rate.last_epoch == 3 + 1
    plateau = paddle.optimizer.lr.ReduceOnPlateau(0.1)
    model.prepare(paddle.optimizer.SGD(plateau, model.parameters()), nn.CrossEntropyLoss())
    for callbacks in (None, by_epoch):
        with pytest.raises(ConfigError, match="ReduceLROnPlateau"):
            model.fit(Digits(0, BATCH), batch_size=BATCH, verbose=0, callbacks=callbacks)
    by_hand = paddle.callbacks.LRScheduler(by_step=False)
    model.fit(Digits(0, BATCH), batch_size=BATCH, verbose=0, callbacks=by_hand)


RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
RANK_ROWS = 8


def model_in(**degrees: int) -> Any:
    pipelines.begin(micro_batches=2, rows=RANK_ROWS // 2, **degrees)
    model = fleetpipe.Model([LayerDesc(nn.Linear, 64, 8), LayerDesc(nn.Linear, 8, 10)])
    sgd = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    model.prepare(sgd, nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    return model


def shuffled(workers: int) -> tuple[Any, ...]:
    """Fits data that a loader and a generator shuffle, on ranks that nobody seeded alike."""
    np.random.seed(RANK)
    random.seed(RANK)
    model, data = model_in(pp=2), Digits(0, 4 * RANK_ROWS)

    class Shuffled(paddle.io.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            yield from random.sample([*data], len(data))

    loader = paddle.io.DataLoader(data, batch_size=RANK_ROWS, shuffle=True, num_workers=workers)
    history = model.fit(loader, epochs=2, verbose=0)
    history |= {"stream": model.fit(Shuffled(), batch_size=RANK_ROWS, verbose=0)["loss"]}
    state = bits(model.network.full_state_dict())
    fleet.shutdown()
    return history, state


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_shuffles_gives_all_ranks_one_order(
    on_ranks: Callable[..., Any], workers: int
) -> None:
    alone = on_ranks(shuffled, None, workers)
    assert on_ranks(shuffled, 2, workers) == alone * 2


class RankStream(paddle.io.IterableDataset):  # type: ignore[type-arg]
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter([Digits(0, self.rows)[row] for row in range(self.rows)])


def unequal(method: str, kind: str) -> str:
    """Two replicas, of which the second has a batch more; what this rank is told."""
    model, rows = model_in(pp=1, dp=2), RANK_ROWS * (2 + RANK)
    data: Any = RankStream(rows)
    if kind == "list":
        data = [[part[:RANK_ROWS] for part in (np.ones([9, 64], "float32"), np.ones([9, 1], int))]]
        data *= 2 + RANK
    options = {"verbose": 0, **({} if kind == "list" else {"batch_size": RANK_ROWS})}
    try:
        getattr(model, method)(data, **options)
    except FleetPipeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["list", "stream"])
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_replicas_with_more_batches_than_others_are_refused(
    on_ranks: Callable[..., Any], method: str, kind: str
) -> None:
    for text in on_ranks(unequal, 2, method, kind):
        assert "have more batches than those of others" in text
        assert ("rank: 2, 3" if kind == "list" else "of rank 0 ended after 2") in text


def evaluated(lacking: int) -> tuple[Any, ...]:
    """Evaluates a last batch that is shorter on the second replica; the mean of all rows beside."""
    model, digits = model_in(pp=1, dp=2), Digits(0, 2 * RANK_ROWS)
    logs = model.evaluate(
        RankStream(2 * RANK_ROWS - lacking * RANK), batch_size=RANK_ROWS, verbose=0
    )
    network = model.network.single_model()
    model.network.copy_to(network)
    outputs = network(paddle.to_tensor(digits.images))
    losses = nn.functional.cross_entropy(
        outputs, paddle.to_tensor(digits.labels), reduction="none"
    ).flatten()
    fleet.shutdown()
    every = paddle.concat([losses, losses[: 2 * RANK_ROWS - lacking]])
    return logs["loss"][0], float(every.mean())


def test_an_evaluation_counts_the_rows_that_replicas_have(on_ranks: Callable[..., Any]) -> None:
    (first, mean), (second, _) = on_ranks(evaluated, 2, 3)
    assert first == second == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_data_may_fill_the_same_tensors_for_each_batch(accumulate: int) -> None:
    digits = Digits(0, 4 * RANK_ROWS)
    parts = [
        [column[start : start + RANK_ROWS] for column in (digits.images, digits.labels)]
        for start in range(0, 4 * RANK_ROWS, RANK_ROWS)
    ]

    def refilled() -> Iterator[Any]:
        tensors = [paddle.to_tensor(column) for column in parts[0]]
        for part in parts:
            for tensor, column in zip(tensors, part):
                tensor.set_value(column)
            yield tensors

    states = []
    for data in (parts, refilled()):
        model = model_in(pp=2)
        model.fit(data, verbose=0, accumulate_grad_batches=accumulate)
        states.append(bits(model.network.full_state_dict()))
        fleet.shutdown()
    assert states[0] == states[1]


WORKER = ROOT / "tests" / "fit" / "fit_worker.py"


def reports(launch: Launch, folder: Path, nproc: int | None, dp: int) -> list[Any]:
    home = folder / f"{nproc}-{dp}"
    home.mkdir()
    logs = launch(WORKER, nproc, args=[str(home), str(dp), "2"]).logs
    # Paddle's ProgBarLogger tells on the first rank alone.
    assert [log.count("step 6/6 - loss: ") for log in logs] == [3, *[0] * (len(logs) - 1)]
    # Of ModelCheckpoint epochs 0 and 2 and the end, of EarlyStopping the best: whole models.
    kept = {file.name for file in (home / "kept").glob("*.pdparams")}
    assert kept == {f"{name}.pdparams" for name in ("0", "2", "final", "best_model")}
    return [json.loads(file.read_text()) for file in sorted(home.glob("rank*.json"))]


def saved(folder: Path) -> dict[str, Any]:
    """What ``Model.save`` wrote, parameters and state of the optimizer in one."""
    state: dict[str, Any] = {}
    for ending in ("pdparams", "pdopt"):
        state.update(pickle.loads((folder / f"saved.{ending}").read_bytes()))
    return state


def test_every_rank_sees_what_one_process_sees(launch: Launch, tmp_path: Path) -> None:
    (alone,) = reports(launch, tmp_path, None, 1)
    assert len(alone["train"]) == 18
    assert alone["rate"] == 0.1 * 0.5**2
    assert len(alone["outputs"]) == 45
    assert reports(launch, tmp_path, 2, 1) == [alone] * 2
    alone_visual, visual = (
        json.loads((tmp_path / name / "visual.json").read_text()) for name in ("None-1", "2-1")
    )
    assert visual == alone_visual
    assert [row for row in visual if row[0] == "train/loss"] == [
        ["train/loss", step, logs["loss"][0]] for step, logs in enumerate(alone["train"], 1)
    ]
    files = saved(tmp_path / "None-1")
    assert str(files) == str(saved(tmp_path / "2-1"))
    first, *others = reports(launch, tmp_path, 4, 2)
    assert others == [first] * 3
    for mine, other in zip(first["train"] + first["eval"], alone["train"] + alone["eval"]):
        assert np.allclose(mine.pop("loss"), other.pop("loss"), atol=1e-5)
        assert mine == other
    assert np.allclose(first["outputs"], alone["outputs"], atol=1e-4)
    of_replicas = saved(tmp_path / "4-2")
    assert list(of_replicas) == list(files)
    arrays = [name for name, value in files.items() if isinstance(value, np.ndarray)]
    assert len(arrays) == 12
    assert all(np.allclose(of_replicas[name], files[name], atol=1e-4) for name in arrays)


class Counted(Digits):
    """Counts the samples that are read."""

    read = 0

    def __getitem__(self, index: int) -> Any:
        Counted.read += 1
        return super().__getitem__(index)


def fitted() -> tuple[list[Any], int, int]:
    """What a fit and a prediction tell, and how many samples each reads."""
    Counted.read = 0
    pipelines.begin(3, STEPS, rows=ROWS)
    model = fleetpipe.Model(layers())
    sgd = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    model.prepare(sgd, nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    losses = Losses()
    options: dict[str, Any] = {"batch_size": BATCH, "verbose": 0}
    data = Counted(0, 2 * BATCH + 5), Counted(1000, 1041)
    model.fit(*data, epochs=2, callbacks=losses, **options)
    trained = Counted.read
    (outputs,) = model.predict(data[1], stack_outputs=True, **options)
    fleet.shutdown()
    return [losses.train, losses.eval, outputs.tolist()], trained, Counted.read - trained


def test_a_rank_between_the_first_and_the_last_reads_no_sample(on_ranks: Call) -> None:
    alone = fitted()
    first, between, last = on_ranks(fitted, 3)
    assert alone[1:] == (2 * (2 * 32 + 5) + 2 * 41, 41)
    assert first == last == alone
    assert between == (alone[0], 0, 0)


def warned() -> list[str]:
    with pipelines.job(pp=2), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        paddle.Model(nn.Linear(2, 2))
        fleetpipe.Model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    return [str(one.message) for one in seen if "fleetpipe.Model" in str(one.message)]


def test_paddles_model_says_on_ranks_that_it_cuts_nothing(on_ranks: Call) -> None:
    for messages in on_ranks(warned, 2):
        (message,) = messages
        assert message.startswith("paddle.Model runs the whole network on each rank: pp_degree=2")
