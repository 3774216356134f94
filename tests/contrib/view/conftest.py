"""What the tests of the pages share: a trace as a run writes it, and a browser."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetpipe.schedules import Costs, build
from fleetpipe.schedules.forms import Event, events_of, write_trace

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser() -> str:
    """The command of a browser; without one a test is skipped."""
    command = next(filter(None, map(shutil.which, BROWSERS)), None)
    if command is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed: no browser to look with")
    return command


@pytest.fixture
def traced() -> Callable[..., None]:
    """Writes the trace of two steps, the second of which took twice as long."""

    def write(path: Path, name: str = "1F1B", chunks: int = 1) -> None:
        schedule = build(name, ranks=2, micro_batches=4, chunks=chunks)
        predicted = events_of(schedule.simulate(Costs(0.010, 0.010, 0.010)))
        measured = [
            Event(event.rank, event.name, start + factor * event.start, start + factor * event.end)
            for start, factor in ((0, 1), (1, 2))
            for event in predicted
        ]
        tracks = {"measured": measured, "predicted": predicted}
        seconds = dict.fromkeys(tracks, 1e6)
        write_trace(path, tracks, schedule.placement, microseconds=seconds)

    return write
