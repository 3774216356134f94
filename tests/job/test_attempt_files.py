"""What ranks tell the folder of their attempt, and what is read there."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fleetpipe.job import attempt_files
from fleetpipe.job.watching.failure import Failure
from tests.fixtures import Patch

pytestmark = pytest.mark.no_paddle


def as_rank(monkeypatch: Patch, rank: int) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ID", str(rank))


def test_without_a_folder_nothing_is_told(monkeypatch: Patch) -> None:
    monkeypatch.delenv(attempt_files.FOLDER, raising=False)
    monkeypatch.delenv(attempt_files.NUMBER, raising=False)
    attempt_files.tell_failure(Failure(0, "raised", "boom"))
    attempt_files.tell_code(1)
    attempt_files.tell_preempted(3)
    attempt_files.page()(8)
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
    assert [attempt_files.code_of(tmp_path, rank) for rank in (0, 1)] == [None, 70]
    assert attempt_files.preempted_at(tmp_path) is None
    attempt_files.tell_preempted(12)
    assert attempt_files.preempted_at(tmp_path) == 12


def test_two_threads_that_tell_at_once_leave_one_of_their_failures(
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


def test_a_page_says_which_step_a_rank_row_of(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv(attempt_files.FOLDER, str(tmp_path))
    as_rank(monkeypatch, 1)
    write = attempt_files.page()
    assert attempt_files.steps_begun(tmp_path) == {}
    write(1)
    assert attempt_files.steps_begun(tmp_path) == {1: 0}
    attempt_files.page()(42)
    write(43)
    assert attempt_files.steps_begun(tmp_path) == {1: 42}


def test_the_launcher_tells_which_processes_began_and_ended(tmp_path: Path) -> None:
    assert attempt_files.started_ranks(tmp_path) == attempt_files.ended_ranks(tmp_path) == []
    for rank in (0, 1):
        attempt_files.note_start(tmp_path, rank, 100 + rank)
    attempt_files.note_end(tmp_path, 1, -9)
    attempt_files.note_end(tmp_path, 0, 1)
    assert attempt_files.started_ranks(tmp_path) == [(0, 100), (1, 101)]
    assert attempt_files.ended_ranks(tmp_path) == [(1, -9), (0, 1)]
