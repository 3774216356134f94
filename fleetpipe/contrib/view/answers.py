"""Answers the questions that a user has about a run, for the terminal, the page and JSON.

Start with ``answers_of``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from fleetpipe.contrib.view.board import JobBoard, RunRecord
from fleetpipe.contrib.view.history import EVALUATED, RunEvent
from fleetpipe.contrib.view.showing.drawing import percent, seconds, short

#: The latest moment whose hour is shown, in seconds since 1970.
_FAR = 1e11
_DAY = 86400.0
#: Into how many stretches a run is cut to compare their means, and the fewest figures of one.
_STRETCHES, _FEWEST = 20, 5
#: A loss diverges if its mean is so many times the lowest mean before.
_DIVERGES = 2.0
#: Steps are slow if they take so many times as long as those of the best stretch.
_SLOW = 1.25
#: A larger share of the time is reported with its likely cause; a pipeline always waits.
_LARGE, _LARGE_WAITING = 0.25, 0.5
_WORDS = {"waiting": "waiting for peers"}
#: The likely cause of a large share of the time.
_LIKELY = {
    "waiting": "the stages are uneven, the micro-batches few, or a rank is slow: fleetpipe why",
    "data": "the loader is slow: give it more workers, or a faster disk",
    "callbacks": "a callback is slow: call it less often",
    "evaluation": "evaluate less often, or on less",
    "saves": "save less often, or in the background",
    "other": "the script does something between its steps, such as loading data",
}
#: The most events that are shown, the newest ones, and the most slow ranks.
_MOST_EVENTS, _MOST_SLOW = 6, 3
#: Kinds of events that tell of something wrong.
_BAD = ("nan", "mixed", "failed")
#: Steps, and the figure of each.
Points = Sequence[tuple[int, float]]


class Answer(NamedTuple):
    """An answer to a question.

    Attributes:
        question: The subject of the question in a word or two, or the time of an event.
        text: The answer.
        kind: ``good``, ``open`` or ``bad``; empty for a mere figure.
    """

    question: str
    text: str
    kind: str = ""


def answers_of(run: RunRecord, now: float | None = None) -> list[Answer]:
    """Returns the answers for a run: its state first, its newest events last.

    Args:
        run: The record of the run.
        now: Seconds since 1970; None: the present time.
    """
    at = time.time() if now is None else now
    board, figures = run.board, run.points
    answers = [
        *learning_of(figures, board.gradient_norm, board.history.events),
        *_progress(board, at),
        *_rates(board, figures),
        *_time(board.shares),
        *_slow(board),
    ]
    state = alive(board, at)
    wrong = dict.fromkeys(answer.question for answer in answers if answer.kind == "bad")
    if state.kind == "good" and wrong:
        state = Answer("state", f"{state.text}, but see {', '.join(wrong)}", "open")
    return [state, *answers, *_history_of(board, at)]


def status_of(board: JobBoard) -> dict[str, Any]:
    """Returns the figures and the answers for scripts, under keys that no version changes."""
    return {
        **board.status(),
        "answers": [answer._asdict() for answer in answers_of(RunRecord("job", board))],
        "happened": [event._asdict() for event in events_of(board)],
    }


def alive(board: JobBoard, now: float) -> Answer:
    """Returns the answer whether a job runs, or since when and why it does not."""
    mixed = [event for event in board.history.events if event.kind == "mixed"]
    attempt = board.attempts[-1] if board.attempts else None
    text, kind = board.state, "bad"
    if mixed:
        text = f"{board.state}; {mixed[-1].text}"
    elif attempt is not None and attempt.ended is not None:
        ago = seconds(max(0.0, now - attempt.ended))
        text = f"{attempt.outcome} {ago} ago, at {clock_of(attempt.ended, now)}"
        kind = "bad" if attempt.failed else "good"
    elif board.state == "stopped" and board.silence:
        since = clock_of(now - board.silence, now)
        text = f"dead or cut off: nothing was heard for {seconds(board.silence)}, since {since}"
    elif board.state == "stopped":
        stopped = [str(rank.rank) for rank in board.ranks if rank.state == "stopped"]
        text = f"stopped: rank {', '.join(stopped)}"
    elif board.state == "late":
        age = min(rank.step_age for rank in board.ranks if rank.step_age is not None)
        parts = sorted({rank.part for rank in board.ranks if rank.part})
        where = f" ({', '.join(parts)})" if parts else ""
        usual = seconds(board.usual_step)
        text = f"hangs: no step for {seconds(age)}, where one takes {usual}{where}"
    elif board.state == "ended" and board.steps and board.step < board.steps:
        text = "ended before its last step"
    elif not board.ranks and board.step:
        ago = seconds(max(0.0, now - board.at))
        text, kind = f"still running, or died without a word: the last row is {ago} old", "open"
    else:
        kind = "good" if board.state == "running" else "open"
    return Answer("state", text, kind)


def clock_of(moment: float, now: float) -> str:
    """Returns the local time of a moment, with the date in place of seconds where it is old."""
    form = "%H:%M:%S" if abs(now - moment) < _DAY else "%m-%d %H:%M"
    return time.strftime(form, time.localtime(moment)) if abs(moment) < _FAR else "long ago"


def learning_of(
    figures: Mapping[str, Points], norm: float | None = None, events: Sequence[RunEvent] = ()
) -> Iterator[Answer]:
    """Yields the answer whether a run learns, for each of its losses.

    Args:
        figures: Steps and values by name: of the loss, and of evaluations as ``eval_loss``.
        norm: The last gradient norm, if it is known.
        events: What happened; the step of a NaN is exact there.
    """
    for name, points in figures.items():
        if name == "loss" or name.startswith("loss "):
            parts = [_loss(name, points)]
            if EVALUATED + name in figures:
                step, value = figures[EVALUATED + name][-1]
                parts.append(f"{short(value)} in the evaluation after step {step:,}")
            if norm is not None:
                parts.append(f"gradient norm {short(norm)}")
            first = [one.since for one in events if one.text.startswith(f"{name} is ")]
            wrong = [*_wrong(points, first)]
            yield Answer("learning", "; ".join([*wrong, *parts]), "bad" if wrong else "")


def _loss(name: str, points: Points) -> str:
    means = _means(points)
    mean = f", lately {short(means[0][1])} in the mean" if means else ""
    return f"{name} {short(points[-1][1])}{mean}"


def _wrong(points: Points, first: Sequence[int]) -> Iterator[str]:
    """Yields from which step on a loss is NaN or infinite, or that it diverges."""
    strange = [step for step, value in points if not math.isfinite(value)]
    means = _means(points)
    step, lowest = min(means, key=lambda mean: mean[1], default=(0, 0.0))
    if strange and not math.isfinite(points[-1][1]):
        yield f"NaN or infinite from step {min([strange[0], *first]):,} on"
    elif strange:
        yield f"NaN or infinite at step {strange[-1]:,}"
    elif lowest > 0 and means[0][1] > _DIVERGES * lowest:
        yield f"diverges: its mean was down at {short(lowest)} at step {step:,}"


def _progress(board: JobBoard, now: float) -> Iterator[Answer]:
    done = f"step {board.step:,}" + (f" of {board.steps:,}" if board.steps else "")
    left = "" if board.state == "ended" else _end(board, now)
    if board.step or board.steps:
        yield Answer("done", f"{done}, remaining {left}" if left else done)


def _end(board: JobBoard, now: float) -> str:
    """Returns the remaining time of a job and the hour of its end; empty if unknown."""
    left = board.eta_seconds
    if left is None:
        return ""
    if not left or now + left > _FAR:
        return seconds(left)
    return f"{seconds(left)}, until {time.strftime('%H:%M %Z', time.localtime(now + left))}"


def _rates(board: JobBoard, figures: Mapping[str, Points]) -> Iterator[Answer]:
    rates = [f"{short(board.step_time)} s/step"] if board.step_time else []
    for unit, name in (("samples/s", "samples_per_second"), ("tokens/s", "tokens_per_second")):
        points = figures.get(name, ())
        rate = board.samples_per_second if unit == "samples/s" else 0.0
        if rate:
            rates.append(f"{short(rate)} {unit}")
        elif points and (board.step_time or not board.ranks):
            rates.append(f"{short(points[-1][1])} {unit}")
    if rates:
        slower = _beside_best(board.step_time, figures.get("step time", ()))
        yield Answer("speed", ", ".join(rates) + slower)


def _beside_best(step_time: float, points: Points) -> str:
    """Compares the time of a step with that of the best stretch; empty if it is not slow."""
    means = ((mean, step) for step, mean in _means(points) if mean > 0)
    best, step = min(means, default=(step_time, 0))
    if step_time < _SLOW * best or not step_time:
        return ""
    factor = step_time / best
    return f"; {factor:.1f} times the {short(best)} s of its best stretch, at step {step:,}"


def _means(points: Points) -> list[tuple[int, float]]:
    """Returns the last step and the mean of each stretch of figures, the last stretch first."""
    count = max(_FEWEST, len(points) // _STRETCHES)
    ends = range(len(points), count - 1, -count)
    return [(points[end - 1][0], fmean(y for _, y in points[end - count : end])) for end in ends]


def _time(shares: Mapping[str, float]) -> Iterator[Answer]:
    """Yields the shares of wall time, with the likely cause of the largest that is too large."""
    if shares:
        limits = {part: _LARGE_WAITING if part == "waiting" else _LARGE for part in _LIKELY}
        large = [part for part in _LIKELY if shares.get(part, 0.0) > limits[part]]
        text = time_of(shares)
        for worst in sorted(large, key=lambda part: shares[part])[-1:]:
            text = f"{percent(shares[worst])} {worst}: {_LIKELY[worst]}; {text}"
        yield Answer("time", text, "bad" if large else "")


def time_of(shares: Mapping[str, float]) -> str:
    """Returns the shares of wall time in words."""
    return ", ".join(f"{_WORDS.get(part, part)} {percent(share)}" for part, share in shares.items())


def _slow(board: JobBoard) -> Iterator[Answer]:
    """Yields which ranks are slow now, or which one was slow last."""
    for one in board.slow[:_MOST_SLOW]:
        yield Answer("slow", str(one), "bad")
    if len(board.slow) > _MOST_SLOW:
        yield Answer("slow", f"and {len(board.slow) - _MOST_SLOW} more", "bad")
    past = [event for event in board.history.events if event.kind == "slow"]
    if past and not board.slow:
        yield Answer("slow", f"nobody now; {past[-1]}", "open")


def events_of(board: JobBoard) -> list[RunEvent]:
    """Returns the events of a run and the failures of its attempts, the newest last."""
    attempts = [
        RunEvent(one.ended, one.last_step or 0, "failed", one.outcome, one.last_step or 0)
        for one in board.attempts
        if one.ended is not None and one.failed
    ]
    return sorted([*board.history.events, *attempts], key=lambda event: event.time)


def _history_of(board: JobBoard, now: float) -> Iterator[Answer]:
    """Yields the restarts, healings and saves of a job, then its newest events with their times."""
    saved = board.last_checkpoint
    last = "none" if saved is None else f"step {saved.step:,}, {seconds(saved.age)} ago"
    restarts = max(board.restarts, len(board.attempts) - 1)
    healings = sum(event.times for event in board.history.events if event.kind == "healed")
    happened = [
        f"{restarts} restart" + "s" * (restarts != 1),
        f"{healings} healing" + "s" * (healings != 1) if healings else "",
        f"last checkpoint: {last}",
        board.news * (board.state != "ended"),
    ]
    yield Answer("happened", ", ".join(filter(None, happened)))
    for event in events_of(board)[-_MOST_EVENTS:]:
        yield Answer(clock_of(event.time, now), str(event), "bad" * (event.kind in _BAD))
