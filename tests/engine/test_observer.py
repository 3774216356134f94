"""What is seen of real steps: by observers, in traces, and in counts of own calls."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from benchmarks.calls import counted
from fleetpipe import fleet, systems
from fleetpipe.dygraph.train.observers import OBSERVERS
from fleetpipe.engine.observer import BatchObserver, Instruction, Observers
from fleetpipe.engine.trace import Trace, measured_costs
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.schedules import Action, Costs, Schedule, build
from fleetpipe.schedules.forms.trace import Event, events_of
from fleetpipe.transport import MessageKey, SocketTransport
from tests.fixtures import LogCapture, Patch
from tests.pipelines import (
    CLASSES,
    FEATURES,
    ROWS,
    batch,
    job,
    mlp_and_sgd,
    model_in_job,
    pipeline,
    sgd,
)


class Noting(BatchObserver):
    """Notes what it is called for."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self._name, self._seen = name, seen

    def wrap(self, played: Any, op: Any, instruction: Instruction) -> Instruction:
        if op != Action("F", 0, 0):
            return instruction

        def noted() -> Any:
            self._seen.append(f"{self._name} {op}")
            return instruction()

        return noted

    def begin(self, batch: Any) -> None:
        self._seen.append(f"{self._name} begin {batch.optimizer is not None}")

    def computed(self) -> None:
        self._seen.append(f"{self._name} computed")

    def reduced(self, loss: Any) -> None:
        self._seen.append(f"{self._name} reduced {loss.ndim}")

    def step(self, step: Any, optimizer: Any, scaled: bool) -> None:
        self._seen.append(f"{self._name} before step")
        step()
        self._seen.append(f"{self._name} after step")

    def end(self) -> None:
        self._seen.append(f"{self._name} end")


class OfAll:
    """Watches operations and nothing else."""

    def __init__(self, seen: list[str]) -> None:
        self.wrap = Noting("all", seen).wrap


def test_the_first_is_innermost_and_ends_last() -> None:
    seen: list[str] = []
    with mlp_and_sgd(2) as (model, optimizer):
        model.observe(OfAll(seen))
        model.observe(Observers(Noting("a", seen), Noting("b", seen)))
        model.train_batch(batch(), optimizer)
        trained = [*seen]
        model.eval_batch(batch())
    assert seen[len(trained) :] == ["all F0.0"]
    before = ["a begin True", "b begin True", "b F0.0", "a F0.0", "all F0.0"]
    summed = ["a computed", "b computed", "a reduced 0", "b reduced 0"]
    step = ["b before step", "a before step", "a after step", "b after step"]
    assert trained == [*before, *summed, *step, "b end", "a end"]


def test_a_batch_that_fails_does_not_end_and_leaves_no_gradients() -> None:
    class Failing(Noting):
        def reduced(self, loss: Any) -> None:
            raise ZeroDivisionError

    seen: list[str] = []
    with mlp_and_sgd(2) as (model, optimizer):
        model.observe(Failing("a", seen))
        with pytest.raises(ZeroDivisionError):
            model.train_batch(batch(), optimizer)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert seen[-1] == "a computed"


def test_what_nobody_asks_for_is_not_there() -> None:
    with mlp_and_sgd(2) as (model, _):
        there = {name for name in OBSERVERS if model._runtime.engines.observer(name) is not None}
    assert there == {"users", "hooks", "companion", "meter"}


def actions(document: dict[str, Any], ranks: int) -> list[list[str]]:
    """The names of the measured actions of each rank, by time."""
    labels = {
        event["pid"]: event["args"]["name"]
        for event in document["traceEvents"]
        if event["name"] == "process_name"
    }
    found: list[list[str]] = []
    for rank in range(ranks):
        slices = [
            event
            for event in document["traceEvents"]
            if event["ph"] == "X" and labels[event["pid"]] == f"rank {rank} measured"
        ]
        slices.sort(key=lambda event: event["ts"])
        found.append([event["name"] for event in slices if event["name"][0] in "FBIW"])
    return found


@pytest.mark.parametrize("schedule", ["1F1B", "FThenB"])
def test_the_actions_of_every_step_stand_in_the_order_of_the_schedule(
    tmp_path: Path, schedule: str, caplog: LogCapture
) -> None:
    with model_in_job(3, micro_batches=4, schedule=schedule, trace=tmp_path / "new") as model:
        optimizer = sgd(model)
        model.eval_batch(batch(4))
        for _ in range(2):
            model.train_batch(batch(4), optimizer)
    document = json.loads((tmp_path / "new" / "trace.json").read_text())
    rows = build(schedule, ranks=3, micro_batches=4).actions
    assert actions(document, 3) == [[str(action) for action in row] * 2 for row in rows]
    assert document["otherData"]["steps"] == [1, 2]
    machine = document["otherData"]["machine"]
    assert (machine["ranks"], machine["processors"]) == ([3], [systems.processors()])
    assert len(machine["limited"]) == len(machine["stolen"]) == 2
    for picture in ("measured.png", "predicted.png"):
        assert (tmp_path / "new" / picture).read_bytes().startswith(b"\x89PNG")
    told = caplog.text
    assert "trace of 2 of 2 steps" in told
    assert "measured after the first step, " in told
    assert "clocks agree within 0 us" in told


def record(trace: Trace, schedule: Schedule, forwards: Mapping[int, tuple[float, float]]) -> None:
    """Records steps, by number, whose forwards take these times on the two stages."""
    for number, forward in forwards.items():
        trace.begin_step()
        for event in events_of(schedule.simulate(Costs(forward))):
            trace._records[event.rank].append((*event[1:4], 0.0))
        trace.end_step(number)


@pytest.mark.parametrize(("kept", "told"), [(3, "measured after the first step"), (2, "measured")])
def test_the_first_step_of_a_job_counts_in_no_figure(tmp_path: Path, kept: int, told: str) -> None:
    schedule = build("1F1B", ranks=2, micro_batches=2)
    trace = Trace(tmp_path, schedule, range(2), SoleGroup(), most_steps=kept)
    record(trace, schedule, {40: (100, 1), 50: (1, 1), 51: (1, 1)})
    assert f"bubble rate 0.3333 {told}, 0.3333 predicted" in str(trace.write())
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document["otherData"]["steps"] == [40, 50, 51][-kept:]


def test_a_step_that_was_held_up_counts_in_no_figure(tmp_path: Path) -> None:
    schedule = build("1F1B", ranks=2, micro_batches=2)
    trace = Trace(tmp_path, schedule, range(2), SoleGroup())
    record(trace, schedule, {1: (1, 1), 2: (1, 1), 3: (1, 1), 4: (1, 90)})
    assert "bubble rate 0.3333 measured after the first step, 0.3333 predicted" in str(
        trace.write()
    )


def test_without_matplotlib_a_trace_is_written_and_the_job_ends_well(
    tmp_path: Path, monkeypatch: Patch, caplog: LogCapture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for folder in ("first", "second"):
        with model_in_job(2, trace=tmp_path / folder) as model:
            model.train_batch(batch(), sgd(model))
        assert [file.name for file in (tmp_path / folder).iterdir()] == ["trace.json"]
    told = caplog.text
    assert told.count("no pictures: they need matplotlib") == 2
    assert told.count("trace of 1 of 1 steps") == 2


def test_fleets_switch_for_profiling_records_too(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2}
    if not hasattr(strategy.hybrid_configs["pp_configs"], "profiling"):
        pytest.skip("Paddle 2.6.2 has no pp_configs.profiling")
    strategy.hybrid_configs["pp_configs"].profiling = True
    strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": 2}
    fleet.init(is_collective=True, strategy=strategy)
    model = pipeline()
    model.train_batch(batch(), sgd(model))
    fleet.shutdown()
    assert (tmp_path / "pipeline_trace" / "trace.json").exists()


def test_measured_costs_are_means_by_kind_and_stage() -> None:
    schedule = build("1F1B", ranks=2, micro_batches=2)
    events = [
        Event(0, "F0.0", 0.0, 1.0),
        Event(0, "F0.1", 1.0, 4.0),
        Event(1, "F1.0", 1.0, 1.5),
        Event(1, "F1.1", 4.0, 4.5),
        Event(1, "SB0>1.0", 4.5, 9.0),
        Event(0, "B0.0", 5.0, 8.0),
        Event(1, "B1.0", 2.0, 4.0),
    ]
    costs = measured_costs(schedule, events)
    assert costs.forward == (2.0, 0.5)
    assert costs.backward == (3.0, 2.0)
    assert costs.weight_grad == 0


FEW, MANY = 16, 32


def layers() -> list[Any]:
    return [nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)]


def of_a_list(micro_batches: int) -> Callable[[], Any]:
    model = pipeline(layers())
    optimizer, data = sgd(model), batch(micro_batches)
    return lambda: model.train_batch(data, optimizer)


def of_a_captured_model(micro_batches: int) -> Callable[[], Any]:
    data, spec = batch(micro_batches), {"2": fleetpipe.SplitPoint.BEGINNING}
    loss, plain = nn.CrossEntropyLoss(), nn.Sequential(*layers())
    pipe = fleetpipe.pipeline(plain, data[0][:ROWS], loss, spec, verify=False)
    model = fleet.distributed_model(pipe)
    optimizer = sgd(model)
    return lambda: model.train_batch(data, optimizer)


def of_fit(micro_batches: int) -> Callable[[], Any]:
    model = fleetpipe.Model(layers())
    model.prepare(paddle.optimizer.SGD(parameters=model.parameters()), nn.CrossEntropyLoss())
    data = paddle.io.TensorDataset(batch(micro_batches))
    return lambda: model.fit(data, batch_size=len(data), verbose=0)


#: What trains, its option for sums, and the most calls for a micro-batch on both ranks together.
WAYS = {
    "list": (of_a_list, "running", 102),
    "captured": (of_a_captured_model, "running", 189),
    "tree": (of_a_list, "tree", 120),
    "fit": (of_fit, "running", 107),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_micro_batch_makes_few_calls(way: str) -> None:
    make, sums, most = WAYS[way]
    calls = []
    for micro_batches in (FEW, MANY):
        with job(2, micro_batches, sums=sums):
            step = make(micro_batches)
            step()
            calls.append(counted(step)["calls"])
    # Far fewer would say that the functions are not recognized.
    assert most / 2 < (calls[1] - calls[0]) / (MANY - FEW) <= most


@pytest.mark.parametrize("packed", [False, True])
def test_a_small_message_is_one_send_and_one_receive(packed: bool) -> None:
    """The value of an edge of one tensor, or what goes back over it: a tuple of one."""
    ends = socket.socketpair()
    first, second = (SocketTransport(n, 2, {1 - n: end}, timeout=9) for n, end in enumerate(ends))
    tensor = paddle.ones([ROWS, FEATURES])
    value = (tensor,) if packed else tensor
    keys = [MessageKey("F", 0, 1, "", number) for number in range(16)]

    def exchange(messages: list[MessageKey]) -> None:
        for key in messages:
            first.send(1, key, value)
            assert second.try_receive(0, key)[0]

    exchange(keys)
    # Tensors are made for so many messages at once.
    counts = counted(lambda: exchange(keys[:8]))
    first.close()
    second.close()
    assert counts["system calls"] == 2 * 8
    assert counts["bytes copied"] == 8 * ROWS * FEATURES * 4
    assert counts["calls"] <= 8 * 31
