"""fleetpipe's callbacks: what they print, write and refuse."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle
import pytest

import fleetpipe
from fleetpipe import fleet
from fleetpipe.callbacks import LossMonitor, MetricsLogger, ThroughputMonitor, TraceSteps
from fleetpipe.errors import ConfigError
from fleetpipe.job.records import BETWEEN, PARTS
from fleetpipe.mesh import AXES
from fleetpipe.schedules import Schedule
from tests import pipelines
from tests.fit.test_model import BATCH, ROWS, STEPS, Digits, Losses, fit, layers
from tests.fixtures import Clock


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="did you mean 'jsonl'"):
        MetricsLogger("nowhere", formats=["json"])
    with pytest.raises(ConfigError, match="no format 'json'"):
        MetricsLogger("nowhere", formats="json")
    assert MetricsLogger("nowhere", formats="csv")._formats == ["csv"]


def test_metrics_are_written_and_gone_on_with(model: Any, tmp_path: Path) -> None:
    evaluation = Digits(1000, 1000 + 2 * BATCH + 5)
    told = fit(model, MetricsLogger(tmp_path), eval_data=evaluation)
    evaluated = model.evaluate(evaluation, batch_size=BATCH, verbose=0)
    file = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["step"], row["phase"]) for row in rows] == [
        *((step, "train") for step in (1, 2, 3, 4)),
        (4, "eval"),
    ]
    assert [row["loss"] for row in rows[:4]] == [logs["loss"][0] for logs in told.train]
    assert rows[4]["acc_top1"] == told.eval[0]["acc_top1"]
    assert rows[4]["loss"] == evaluated["loss"][0]
    assert rows[0]["learning_rate"] == 0.01
    # As after a restart from a checkpoint of step 2; the last line was not written to its end.
    file.write_text(file.read_text() + '{}\n[]\n{"step": 5, "pha')
    with (tmp_path / "metrics.csv").open("a") as table:
        table.write("1,0,train,17")
    model._require_runner().trained = 2
    fit(model, MetricsLogger(tmp_path), num_iters=1)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    with (tmp_path / "metrics.csv").open() as table:
        found = [(row["step"], row["name"]) for row in csv.DictReader(table)]
    names = ("loss", "acc_top1", "acc_top2", "learning_rate")
    assert found == [(str(step), name) for step in (1, 2, 3) for name in names]
    # The job's own history has the same, for who watches it.
    fleet.shutdown()
    history = json.loads((tmp_path / "watch-history.json").read_text())["rows"]
    for (step, figures), row in zip(history, rows, strict=True):
        assert step == row["step"]
        assert [figures[name] for name in names[:3]] == [row[name] for name in names[:3]]


def lives(folder: Path) -> list[Any]:
    lines = (folder / "lives.jsonl").read_text().splitlines()
    return [(each["event"], each["step"]) for each in map(json.loads, lines)]


def test_a_run_tells_what_it_is_and_when_it_ran(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "run"
    config = {"width": 48, "where": tmp_path}
    monkeypatch.setattr("sys.argv", ["/home/me/train.py", "--wide"])
    monitor, logger = ThroughputMonitor(log_freq=2, verbose=0), MetricsLogger(home, config=config)
    fit(model, monitor, logger, epochs=2)
    about = json.loads((home / "run.json").read_text())
    assert about["command"] == ["train.py", "--wide"]
    assert about["config"] == {"width": 48, "where": str(tmp_path)}
    assert about["versions"]["fleetpipe"] == fleetpipe.__version__
    degrees = {**dict.fromkeys(AXES, 1), "pp": 2}
    assert about["layout"] == {"processes": 1, **degrees, "device": "cpu"}
    training = about["training"]
    assert (training["epochs"], training["batches_per_epoch"]) == (2, 4)
    assert (training["micro_batches"], training["optimizer"]) == (STEPS, "Adam")
    assert [(stage["rank"], stage["parameters"]) for stage in about["stages"]] == [
        *((0, 64 * 48 + 48), (1, 48 * 32 + 32 + 32 * 10 + 10))
    ]
    assert Schedule.parse(about["schedule"]["text"]) == model.pipeline.schedule
    assert lives(home) == [("begin", 0), ("end", 8)]
    rows = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["held_by_rank"] == [2, 1]
    with (home / "metrics.csv").open() as table:
        found = {row["name"]: row["value"] for row in csv.DictReader(table)}
    assert (found["held_by_rank/0"], found["held_by_rank/1"]) == ("2.0", "1.0")
    # One that goes on adds to the lives of the run, one that begins anew does not.
    fit(model, MetricsLogger(home), num_iters=1)
    assert lives(home) == [("begin", 0), ("end", 8), ("begin", 8), ("end", 9)]
    model._require_runner().trained = 0
    fit(model, MetricsLogger(home), num_iters=1)
    assert lives(home) == [("begin", 0), ("end", 1)]


def test_throughput_counts_the_samples_of_all_replicas(model: Any, capsys: Any) -> None:
    monitor = ThroughputMonitor(log_freq=2, tokens_per_sample=64)
    told = fit(model, monitor)
    figures = monitor.figures
    assert figures["tokens_per_second"] == 64 * figures["samples_per_second"] > 0
    assert figures["peak_held"] == 2  # 1F1B on two ranks
    assert "samples_per_second" in told.train[1]
    # What each rank holds; and this one process, which has loaded Paddle.
    assert told.train[1]["held_by_rank"] == monitor.by_rank["held_by_rank"] == [2, 1]
    (memory,) = monitor.by_rank["peak_memory_by_process"]
    assert 1e8 < memory < 1e11
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_some_steps_are_traced(model: Any, tmp_path: Path, capsys: Any) -> None:
    fit(model, TraceSteps([2, 3], tmp_path / "trace"))
    assert capsys.readouterr().out.startswith("trace of 2 of 2 steps in ")
    events = json.loads((tmp_path / "trace" / "trace.json").read_text())["traceEvents"]
    # Once in each of the two steps, and once as predicted.
    assert [event["name"] for event in events].count("F1.3") == 3
    with pytest.raises(ConfigError, match="from 1"):
        TraceSteps([0])


class First(paddle.callbacks.Callback):
    """Runs on the rank that has the loss alone."""

    on_rank = "loss"

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.calls += 1


def test_a_callback_says_where_it_runs(model: Any) -> None:
    here = First()
    fit(model, here)
    assert here.calls == 4
    here.on_rank = "last"
    with pytest.raises(ConfigError, match="'all', 'first', 'loss'"):
        fit(model, here)


def test_lines_of_the_progress_in_a_log_file(model: Any, capsys: Any) -> None:
    evaluation = Digits(1000, 1000 + BATCH)
    told = fit(model, eval_data=evaluation, log_freq=3, verbose=2)
    output = capsys.readouterr().out.splitlines()
    lines = [re.sub(r", [\d.e+]+ samples/s.*", "", line) for line in output]
    # Of the last batch of a training nothing is left.
    assert [" left, ends " in line for line in output] == [True, False, False]
    figures = [
        f"loss {logs['loss'][0]:.4g}, acc_top1 {logs['acc_top1']:.4g}, "
        f"acc_top2 {logs['acc_top2']:.4g}"
        for logs in (told.train[2], told.train[3], told.eval[0])
    ]
    assert lines == [
        f"epoch 1/1, batch 3/4: {figures[0]}",
        f"epoch 1/1, batch 4/4: {figures[1]}",
        f"evaluation, batch 1/1: {figures[2]}",
    ]


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, 8), (1e9, 2)])
def test_without_a_terminal_a_bar_is_a_line_every_so_many_seconds(
    seconds: float, lines: int, model: Any, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr("fleetpipe.fit.callbacks.progress._SECONDS_OF_A_LINE", seconds)
    fit(model, epochs=2, verbose=1)
    output = capsys.readouterr().out.splitlines()
    assert len(output) == lines
    # At the end of the first epoch half of the training is left, not nothing.
    first = next(line for line in output if "epoch 1/2, batch 4/4" in line)
    assert re.search(r" left, ends \d\d:\d\d:\d\d$", first)


def test_a_training_until_something_stops_it_has_no_end_to_show(model: Any, capsys: Any) -> None:
    class Stops(paddle.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            self.model.stop_training = True

    fit(model, Stops(), epochs=sys.maxsize, log_freq=1, verbose=2)
    output = capsys.readouterr().out
    assert "batch 1/4" in output
    assert "left, ends" not in output


def test_an_interrupted_bar_ends_its_line(model: Any, monkeypatch: Any, capsys: Any) -> None:
    class Interrupts(paddle.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if step == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        fit(model, Interrupts(), verbose=1)
    shown = capsys.readouterr().err
    assert shown.endswith("\n")
    assert "3/4" in shown.rpartition("\r")[2]


def test_a_history_has_a_figure_for_each_epoch(model: Any) -> None:
    counts, data = Losses(), (Digits(0, 2 * BATCH), Digits(500, 500 + BATCH + 5))
    history = model.fit(*data, BATCH, 3, eval_freq=2, verbose=0, callbacks=counts)
    assert {name: len(figures) for name, figures in history.items()} == {
        **dict.fromkeys(("loss", "acc_top1", "acc_top2"), 3),
        **dict.fromkeys(("eval_loss", "eval_acc_top1", "eval_acc_top2"), 2),
    }
    losses = [logs["loss"][0] for logs in counts.train]
    assert history["loss"] == [pytest.approx(sum(losses[n : n + 2]) / 2) for n in (0, 2, 4)]
    assert history["acc_top1"] == [logs["acc_top1"] for logs in counts.train[1::2]]
    ends = counts.eval[-1]
    assert history["eval_loss"][-1] == ends["loss"][0]
    assert history["eval_acc_top2"][-1] == ends["acc_top2"]


@pytest.mark.parametrize(("columns", "metrics"), [(80, 0), (120, 2)])
def test_a_bar_has_loss_rate_and_the_time_left_whole(
    columns: int, metrics: int, model: Any, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda _: (columns, 40))
    fit(model, epochs=3, verbose=1)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "epoch 1/3: 100%" in shown.err
    bars = [bar for bar in shown.err.split("\r") if " left" in bar]
    assert bars
    for bar in bars:
        assert len(bar.rstrip()) <= columns
        assert re.search(r"^epoch \d/3: +\d+%\|.{8,}\| [1-4]/4, loss [^ ,]+, ", bar), bar
        assert re.search(r" \S+ samples/s, [\d:]+ left(, ends [\d:]{8})?\s*$", bar), bar
        assert bar.count("acc_top") == metrics


def test_a_line_does_not_stand_in_the_bar(model: Any, monkeypatch: Any, capsys: Any) -> None:
    """Both go to one stream here, as in a terminal."""
    monkeypatch.setattr("sys.stderr", sys.stdout)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    fit(model, LossMonitor(1), verbose=1)
    shown = capsys.readouterr().out
    said = re.findall(r"(.*)(epoch: 1 step: \d, loss is [\d.]+)\n", shown)
    assert len(said) == 4
    # Before each line the bar is wiped away.
    assert [before.rpartition("\r")[2] for before, _ in said] == [""] * 4


def test_rows_have_the_norm_of_the_gradients_where_the_optimizer_clips_by_it(
    tmp_path: Path,
) -> None:
    with pipelines.job(pp=2, micro_batches=STEPS, rows=ROWS):
        model = fleetpipe.Model(layers())
        clip = paddle.nn.ClipGradByGlobalNorm(1e-3)
        sgd = paddle.optimizer.SGD(0.01, parameters=model.parameters(), grad_clip=clip)
        model.prepare(sgd, paddle.nn.CrossEntropyLoss())
        fit(model, MetricsLogger(tmp_path))
        last = model.gradient_norm
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    norms = [json.loads(line)["gradient_norm"] for line in lines]
    assert len({*norms}) == 4
    assert norms[-1] == last
    assert min(norms) > 1e-3


def test_what_passes_between_steps_has_a_name(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two epochs of four steps the first step does not count; one evaluation is between two."""
    clock = Clock(monkeypatch)

    class SlowBatches(list[Any]):
        """Batches, each of which takes 3 s."""

        def __iter__(self) -> Iterator[Any]:
            for each in super().__iter__():
                clock.sleep(3)
                yield each

    class SlowCallback(paddle.callbacks.Callback):
        """Takes 2 s of each step, and 4 s that are a save's, and 10 s of each evaluation."""

        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            clock.sleep(2)
            with self.model.pipeline.require_running().progress.saving(step):
                clock.sleep(4)

        def on_eval_begin(self, logs: Any = None) -> None:
            clock.sleep(10)

    digits = Digits(0, BATCH)
    trace, one = TraceSteps(range(1, 9), tmp_path), (digits.images, digits.labels)
    slow, evaluated = SlowBatches([one] * 4), SlowBatches([one])
    fit(model, SlowCallback(), trace, data=slow, eval_data=evaluated, epochs=2)
    progress = model.pipeline.require_running().progress
    spent = dict(zip(PARTS, progress.wall_time.seconds))
    assert [spent[part] for part in ("data", "callbacks", "saves")] == [7 * 3, 7 * 2, 7 * 4]
    assert spent["evaluation"] == 10 + 3
    between = json.loads((tmp_path / "trace.json").read_text())["otherData"]["machine"]["between"]
    assert {part: sum(each) for part, each in between.items()} == {
        part: spent[part] for part in BETWEEN
    }
