from __future__ import annotations

import pytest

from fleetpipe.errors import ConfigError
from fleetpipe.schedules import build
from fleetpipe.schedules.action import Action


@pytest.mark.parametrize(
    ("p", "waves", "bubble"),
    [(2, 1, 4), (2, 4, 4), (3, 2, 8), (4, 1, 12), (4, 2, 13), (8, 1, 28), (8, 2, 30), (8, 4, 30)],
)
def test_the_bubble_with_as_many_micro_batches_as_ranks(p: int, waves: int, bubble: int) -> None:
    timeline = build("Hanayo", ranks=p, micro_batches=p, chunks=2 * waves).simulate()
    assert (timeline.bubble, timeline.busy) == (bubble, 6 * waves * p)
    assert max(timeline.peak_activations) == 2 * waves * p
    cited = (2 * p - 2) / (3 * waves * p + p - 1)
    assert timeline.bubble_rate < cited + 0.002
    assert waves == 1 or timeline.bubble_rate > cited - 0.02


@pytest.mark.parametrize(("chunks", "span", "peak"), [(2, 110, 14), (4, 202, 27)])
def test_golden_cases_of_more_micro_batches(chunks: int, span: int, peak: int) -> None:
    timeline = build("Hanayo", ranks=4, micro_batches=16, chunks=chunks).simulate()
    assert (timeline.span, max(timeline.peak_activations)) == (span, peak)


@pytest.mark.parametrize("p", range(1, 6))
@pytest.mark.parametrize("chunks", [2, 4, 6])
def test_it_is_valid_for_every_number_of_micro_batches(p: int, chunks: int) -> None:
    for m in (1, 2, 3, 7):
        schedule = build("wave", ranks=p, micro_batches=m, chunks=chunks)
        schedule.verify()
        schedule.lower().verify()
        # A single device takes the micro-batches of each stage in this order too.
        for row in schedule.actions:
            actions = [action for action in row if isinstance(action, Action)]
            kinds = {action[:2] for action in actions}
            for kind in kinds:
                assert [a.micro_batch for a in actions if a[:2] == kind] == list(range(m))


def test_odd_numbers_of_chunks_are_refused() -> None:
    with pytest.raises(ConfigError, match="even number of chunks"):
        build("Hanayo", ranks=2, micro_batches=4, chunks=3)
