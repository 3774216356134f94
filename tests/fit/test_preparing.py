"""What ``Model`` is given: precision, data of every kind; and what several ranks read of it."""

from __future__ import annotations

import os
import pickle
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

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
from tests.fit.test_model import BATCH, ROWS, STEPS, Digits, fit, layers, prepared
from tests.fixtures import Call
from tests.pipelines import bits


def losses(model: Any, data: Any, **options: Any) -> list[float]:
    return [logs["loss"][0] for logs in fit(model, data=data, shuffle=False, **options).train]


def test_on_a_cpu_mixed_precision_changes_nothing_and_is_said_once(model: Any, caplog: Any) -> None:
    data = Digits(0, BATCH)
    expected = losses(model, data)
    log.once.cache_clear()
    for level in ("O1", {"level": "O2", "init_loss_scaling": 8.0}):
        other = prepared(fleetpipe.Model(layers()), amp_configs=level)
        assert losses(other, data) == expected
    assert caplog.text.count("auto_cast changes nothing") == 1


@pytest.mark.parametrize("configs", ["O3", {"level": "O3"}, {"loss_scale": 1}])
def test_what_paddle_does_not_take_as_precision_is_refused(model: Any, configs: Any) -> None:
    with pytest.raises(ConfigError, match="amp_configs: "):
        prepared(model, amp_configs=configs)


def test_the_summary_counts_parameters_and_measures_memory(model: Any, capsys: Any) -> None:
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
    expected = losses(model, data)
    assert len(expected) == 3
    kinds = Stream(), batches, iter(batches), paddle.io.DataLoader(data, batch_size=BATCH)
    for kind in (*kinds, fleetpipe.io.DataLoader(data, batch_size=BATCH)):
        again = prepared(fleetpipe.Model(layers()))
        assert losses(again, kind) == expected, kind
    again = prepared(fleetpipe.Model(layers()))
    assert losses(again, data, num_workers=1) == expected


def test_longer_steps_and_a_trace_do_not_go_together(tmp_path: Any) -> None:
    with pipelines.job(pp=2, micro_batches=STEPS, rows=ROWS, trace=str(tmp_path)):
        model = prepared(fleetpipe.Model(layers()))
        with pytest.raises(ConfigError, match="trace"):
            losses(model, Digits(0, BATCH), accumulate_grad_batches=2)


def test_a_schedule_of_the_learning_rate_steps_with_batches(model: Any) -> None:
    rate = paddle.optimizer.lr.StepDecay(0.1, step_size=2)
    model.prepare(paddle.optimizer.SGD(rate, model.parameters()), nn.CrossEntropyLoss())
    losses(model, Digits(0, 3 * BATCH))
    assert model.learning_rate == 0.1 * 0.1
    by_epoch = paddle.callbacks.LRScheduler(by_step=False, by_epoch=True)
    fit(model, by_epoch)
    assert rate.last_epoch == 3 + 1
    plateau = paddle.optimizer.lr.ReduceOnPlateau(0.1)
    model.prepare(paddle.optimizer.SGD(plateau, model.parameters()), nn.CrossEntropyLoss())
    for callbacks in ((), (by_epoch,)):
        with pytest.raises(ConfigError, match="ReduceLROnPlateau"):
            fit(model, *callbacks)
    fit(model, paddle.callbacks.LRScheduler(by_step=False))  # steps by hand


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
    history = model.fit(loader, epochs=1 if workers else 2, verbose=0)
    if not workers:
        history |= {"stream": model.fit(Shuffled(), batch_size=RANK_ROWS, verbose=0)["loss"]}
    state = bits(model.network.full_state_dict())
    fleet.shutdown()
    return history, state


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_shuffles_gives_all_ranks_one_order(on_ranks: Call, workers: int) -> None:
    alone = on_ranks(shuffled, None, workers)
    assert on_ranks(shuffled, 2, workers) == alone * 2


class RankStream(paddle.io.IterableDataset):  # type: ignore[type-arg]
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter([Digits(0, self.rows)[row] for row in range(self.rows)])


def unequal(method: str, kind: str) -> str:
    """Two replicas, of which the second has a batch more; what this rank is told."""
    model, batch = model_in(pp=1, dp=2), Digits(0, RANK_ROWS)
    data: Any = RankStream(RANK_ROWS * (2 + RANK))
    if kind == "list":
        data = [[batch.images, batch.labels]] * (2 + RANK)
    options = {"verbose": 0, **({} if kind == "list" else {"batch_size": RANK_ROWS})}
    try:
        getattr(model, method)(data, **options)
    except FleetPipeError as error:
        return str(error)
    return ""


# All methods read the data alike.
@pytest.mark.parametrize(
    ("method", "kind"), [("fit", "list"), ("evaluate", "stream"), ("predict", "stream")]
)
def test_replicas_with_more_batches_than_others_are_refused(
    on_ranks: Call, method: str, kind: str
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


def test_an_evaluation_counts_the_rows_that_replicas_have(on_ranks: Call) -> None:
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


class LogWriter:
    """Stands for that of visualdl, which is not installed."""

    rows: ClassVar[list[Any]] = []

    def __init__(self, logdir: str) -> None:
        assert logdir == "visual"

    def add_scalar(self, tag: str, step: int, value: float) -> None:
        self.rows.append([tag, step, float(value)])

    def close(self) -> None:
        self.rows.append("closed")


def with_callbacks(dp: int, home: Path) -> tuple[dict[str, Any], list[Any]]:
    """Fits with Paddle's callbacks; what this rank sees, and what is written for visualdl."""
    # A batch of all replicas has the rows of one without any.
    pipelines.begin(2, STEPS // dp, rows=ROWS, dp=dp)
    model = fleetpipe.Model(layers())
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    model.prepare(optimizer, nn.CrossEntropyLoss(), paddle.metric.Accuracy(topk=(1, 2)))
    sys.modules["visualdl"] = ModuleType("visualdl")
    setattr(sys.modules["visualdl"], "LogWriter", LogWriter)  # noqa: B010
    kept, options = str(home / "kept"), {"batch_size": BATCH // dp, "verbose": 0}
    callbacks = [
        paddle.callbacks.VisualDL("visual"),
        paddle.callbacks.LRScheduler(),
        paddle.callbacks.EarlyStopping("acc_top1", mode="max", patience=1),
        paddle.callbacks.ModelCheckpoint(2, kept),
        paddle.callbacks.ProgBarLogger(log_freq=6, verbose=2),
        paddle.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, verbose=0, min_delta=9),
    ]
    data, evaluation = Digits(0, 6 * BATCH), Digits(1000, 1045)
    told = fit(
        *(model, *callbacks), data=data, eval_data=evaluation, epochs=3, save_dir=kept, **options
    )
    result = model.evaluate(evaluation, **options)
    model.save(str(home / "saved"))
    model.load(str(home / "saved"))
    (outputs,) = model.predict(evaluation, stack_outputs=True, **options)
    seen = {"train": told.train, "eval": told.eval, "rate": optimizer.get_lr(), "result": result}
    fleet.shutdown()
    return {**seen, "outputs": outputs.tolist()}, LogWriter.rows


def saved(folder: Path) -> dict[str, Any]:
    """What ``Model.save`` wrote, parameters and state of the optimizer in one."""
    state: dict[str, Any] = {}
    for ending in ("pdparams", "pdopt"):
        state.update(pickle.loads((folder / f"saved.{ending}").read_bytes()))
    return state


def test_every_rank_sees_what_one_process_sees(on_ranks: Call, tmp_path: Path) -> None:
    homes = [tmp_path / name for name in ("alone", "ranks", "replicas")]
    ((alone, alone_visual),) = on_ranks(with_callbacks, None, 1, homes[0])
    assert len(alone["train"]) == 18
    assert alone["rate"] == 0.1 * 0.5**2
    assert len(alone["outputs"]) == 45
    assert on_ranks(with_callbacks, 2, 1, homes[1]) == [(alone, alone_visual), (alone, [])]
    assert [row for row in alone_visual if row[0] == "train/loss"] == [
        ["train/loss", step, logs["loss"][0]] for step, logs in enumerate(alone["train"], 1)
    ]
    files = saved(homes[0])
    assert str(files) == str(saved(homes[1]))
    (first, _), *others = on_ranks(with_callbacks, 4, 2, homes[2])
    assert others == [(first, [])] * 3
    for mine, other in zip(first["train"] + first["eval"], alone["train"] + alone["eval"]):
        assert np.allclose(mine.pop("loss"), other.pop("loss"), atol=1e-5)
        assert mine == other
    assert np.allclose(first["outputs"], alone["outputs"], atol=1e-4)
    of_replicas = saved(homes[2])
    assert list(of_replicas) == list(files)
    arrays = [name for name, value in files.items() if isinstance(value, np.ndarray)]
    assert len(arrays) == 12
    assert all(np.allclose(of_replicas[name], files[name], atol=1e-4) for name in arrays)
    # Paddle's ProgBarLogger tells on the first rank alone.
    for log_file in tmp_path.glob("job-*/rank*.log"):
        lines = log_file.read_text().count("step 6/6 - loss: ")
        assert lines == 3 * (log_file.name == "rank0.log"), log_file
    # Of ModelCheckpoint epochs 0 and 2 and the end, of EarlyStopping the best: whole models.
    for home in homes:
        kept = {file.stem for file in (home / "kept").glob("*.pdparams")}
        assert kept == {"0", "2", "final", "best_model"}


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
    data, evaluation = Counted(0, 2 * BATCH + 5), Counted(1000, 1041)
    told = fit(model, data=data, eval_data=evaluation, epochs=2)
    trained = Counted.read
    (outputs,) = model.predict(evaluation, BATCH, stack_outputs=True, verbose=0)
    fleet.shutdown()
    return [told.train, told.eval, outputs.tolist()], trained, Counted.read - trained


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
