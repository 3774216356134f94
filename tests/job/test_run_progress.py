"""What ranks tell while they run: files of their attempt, their steps, and the time of each."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fleetpipe.job import attempt_files, records
from fleetpipe.job.attempt_files import Failure
from fleetpipe.job.records import BETWEEN, PARTS, RunProgress, WallTime
from tests.fixtures import Clock, Patch

pytestmark = pytest.mark.no_paddle


def as_rank(monkeypatch: Patch, rank: int) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ID", str(rank))


def test_without_a_folder_nothing_is_told(monkeypatch: Patch) -> None:
    monkeypatch.delenv(attempt_files.FOLDER, raising=False)
    monkeypatch.delenv(attempt_files.NUMBER, raising=False)
    attempt_files.tell_failure(Failure(0, "raised", "boom"))
    attempt_files.tell_code(1)
    attempt_files.tell_preempted(3)
    attempt_files.step_counter()(8)
    assert attempt_files.folder() is None
    assert attempt_files.number() == 0


def test_what_ranks_tell_is_read_in_its_order(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv(attempt_files.FOLDER, str(tmp_path))
    first, second = Failure(2, "died", "it ended"), Failure(1, "raised", "boom", "Traceback")
    as_rank(monkeypatch, 1)
    attempt_files.tell_failure(first)
    attempt_files.tell_code(70)
    as_rank(monkeypatch, 0)
    attempt_files.tell_failure(second)
    attempt_files.tell_failure(first)  # what a rank learns later is not what failed first
    assert [told.failure for told in attempt_files.failures(tmp_path)] == [first, second]
    assert [attempt_files.reported_exit_code(tmp_path, rank) for rank in (0, 1)] == [None, 70]
    assert attempt_files.steps_saved_at_stop(tmp_path) is None
    attempt_files.tell_preempted(12)
    assert attempt_files.steps_saved_at_stop(tmp_path) == 12


def test_two_threads_that_tell_at_once_leave_one_failure(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    as_rank(monkeypatch, 1)
    failures = [Failure(2, "died", "it ended"), Failure(1, "raised", "boom", "Traceback" * 500)]
    together = threading.Barrier(2)

    def tell(failure: Failure) -> None:
        together.wait()
        attempt_files.tell_failure(failure)

    for number in range(100):
        home = tmp_path / str(number)
        home.mkdir()
        monkeypatch.setenv(attempt_files.FOLDER, str(home))
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(tell, failures))
        (told,) = attempt_files.failures(home)
        assert told.failure in failures
        assert [file.name for file in home.iterdir()] == ["failure.1"]


def test_a_save_that_ends_while_a_record_is_made_has_no_age_below_zero(
    monkeypatch: Patch,
) -> None:
    """The other ranks refuse such a record, and the job ended with it."""
    progress = RunProgress()
    clock = iter(range(100, 200))
    monkeypatch.setattr(records.time, "monotonic", lambda: float(next(clock)))
    with progress.saving(1):
        pass

    def saved_meanwhile() -> tuple[int, int]:
        with progress.saving(2):
            pass
        return 0, 0

    progress.queues = saved_meanwhile
    record = progress.record(0, "F0.0", with_rows=True)
    assert (record.saved, record.saved_age) == (1, 1.0)
    assert progress.record(0, "F0.0", with_rows=False).saved == 2


def test_a_norm_on_a_card_is_read_now_and_then_and_never_by_who_asks(monkeypatch: Patch) -> None:
    progress = RunProgress()
    read: list[float] = []

    def told(now: float, waits: bool) -> tuple[float | None, bool]:
        def norm() -> float:
            read.append(now)
            return now

        monkeypatch.setattr(records.time, "monotonic", lambda: now)
        progress.tell_norm(norm, waits)
        before = len(read)
        shown = progress.record(0, "", with_rows=False).gradient_norm
        return shown, len(read) > before

    assert told(100.0, waits=False) == (100, True)
    seen = [told(now, waits=True) for now in (101.0, 101.5, 102.5)]
    assert seen == [(101, False), (101, False), (102.5, False)]
    assert read == [100, 101, 102.5]


class Loss:
    """What a step computed: a Tensor has as much."""

    def __init__(self, *values: float) -> None:
        self.shape, self.item = [len(values)], lambda: values[0]


def test_the_losses_of_a_step_are_kept_where_somebody_takes_them(monkeypatch: Patch) -> None:
    progress, times = RunProgress(), (0.0, 0.0, 0.0, 0.0, {}, 0.0)
    monkeypatch.setattr(records.time, "monotonic", lambda: 5.0)
    progress.end_step(times)
    progress.figures = deque()
    for loss, waits in [
        (Loss(0.5), False),
        ([Loss(1.0), Loss(2.0)], True),
        (Loss(3.0), True),  # a card is waited for now and then
        (Loss(1.0, 2.0), False),
    ]:
        progress.tell_loss(loss, waits)
        progress.end_step(times)
    losses = [{"loss": 0.5}, {"loss 0": 1.0, "loss 1": 2.0}, {}, {}]
    rows = [(step, {**row, "step time": 0.0}) for step, row in enumerate(losses, 2)]
    assert list(progress.figures) == rows


class Process:
    """A process whose clock and waits a test sets."""

    def __init__(self, monkeypatch: Patch) -> None:
        self.clock = Clock(monkeypatch)
        self.waited = 0.0
        self.wall_time = WallTime(lambda: self.waited)

    def work(self, seconds: float, waits: bool = False) -> None:
        self.clock.sleep(seconds)
        self.waited += seconds * waits

    def step(self, compute: float, waiting: float = 0.0, measured: bool = True) -> None:
        self.wall_time.begin_step()
        self.work(compute)
        self.work(waiting, waits=True)
        self.wall_time.end_step(measured)

    def spent(self) -> dict[str, Any]:
        assert len(self.wall_time.seconds) == len(PARTS)
        return {
            part: pytest.approx(seconds, abs=1e-9)
            for part, seconds in zip(PARTS, self.wall_time.seconds)
            if seconds > 1e-9
        }


def test_all_wall_time_after_the_first_step_is_some_part(monkeypatch: Patch) -> None:
    process = Process(monkeypatch)
    process.work(7.0)
    process.step(5.0)
    assert process.spent() == {}
    spending = process.wall_time.spending
    with spending("data"):
        process.work(1.0)
    with spending("callbacks"):
        process.work(2.0)
        with spending("saves"):
            process.work(4.0)
            process.work(1.0, waits=True)
    process.work(0.5)
    process.work(0.25, waits=True)
    with spending("evaluation"):
        with spending("data"):
            process.work(8.0)
        process.work(3.0, waits=True)
    process.step(2.0, waiting=1.0)
    expected = {
        "compute": 2.0,
        "waiting": 1.25,
        "data": 1.0,
        "callbacks": 2.0,
        "evaluation": 11.0,
        "saves": 5.0,
        "other": 0.5,
    }
    assert process.spent() == expected
    assert sum(process.wall_time.seconds) == pytest.approx(22.75)
    assert dict(process.wall_time.between) == {part: expected[part] for part in BETWEEN}
    process.step(1.0)
    assert process.spent() == {**expected, "compute": 3.0}
    assert dict(process.wall_time.between) == dict.fromkeys(BETWEEN, 0.0)


def test_an_error_within_a_part_ends_it(monkeypatch: Patch) -> None:
    process = Process(monkeypatch)
    process.step(1.0)

    def load() -> None:
        with process.wall_time.spending("data"):
            process.work(1.0)
            assert process.wall_time.part == "data"
            raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        load()
    assert process.wall_time.part == ""
    process.step(1.0)
    assert process.spent() == {"compute": 1.0, "data": 1.0}


def test_steps_that_are_not_measured_are_shared_out(
    monkeypatch: Patch,
) -> None:
    """The host queues the work in 0.1 s, and waits for it in the script, which reads the loss."""
    process = Process(monkeypatch)
    process.step(0.9, waiting=0.1)
    process.work(0.25)
    process.step(0.1, measured=False)
    process.work(1.15)
    with process.wall_time.spending("saves"):
        process.work(5.0)
    process.step(0.1, measured=False)
    expected = {"compute": 1.6 * 0.72, "waiting": 1.6 * 0.08, "other": 1.6 * 0.2, "saves": 5.0}
    assert process.spent() == {part: pytest.approx(each) for part, each in expected.items()}
