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
from fleetpipe.contrib.view.showing.drawing import format_duration, format_figure, format_percent

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
    """What a user wants to know of a run, such as whether it is alive or learns.

    Attributes:
        question: The subject of the question in a word or two, or the time of an event.
        text: The answer.
        kind: ``good``, ``open`` (undecided) or ``bad``; empty for a mere figure.
    """

    question: str
    text: str
    kind: str = ""


def answers_of(run: RunRecord, now: float | None = None) -> list[Answer]:
    """Returns what a user wants to know of a run: its state first, its newest events last.

    Args:
        run: The record of the run.
        now: Seconds since 1970, from which ages are counted; None: the present time.
    """
    at = time.time() if now is None else now
    board, figures = run.board, run.points
    answers = [
        *describe_learning(figures, board.gradient_norm, board.history.events),
        *_describe_progress(board, at),
        *_describe_speed(board, figures),
        *_describe_time_shares(board.shares),
        *_describe_slow_ranks(board),
    ]
    state = describe_state(board, at)
    wrong = dict.fromkeys(answer.question for answer in answers if answer.kind == "bad")
    if state.kind == "good" and wrong:
        state = Answer("state", f"{state.text}, but see {', '.join(wrong)}", "open")
    return [state, *answers, *_describe_history(board, at)]


def status_of(board: JobBoard) -> dict[str, Any]:
    """Returns figures of a job and answers for scripts, under keys that no version changes."""
    return {
        **board.status(),
        "answers": [answer._asdict() for answer in answers_of(RunRecord("job", board))],
        "happened": [event._asdict() for event in events_of(board)],
    }


def describe_state(board: JobBoard, now: float) -> Answer:
    """Returns the answer whether a job is alive; if it is not, since when and why."""
    mixed = [event for event in board.history.events if event.kind == "mixed"]
    attempt = board.attempts[-1] if board.attempts else None
    text, kind = board.state, "bad"
    if mixed:
        text = f"{board.state}; {mixed[-1].text}"
    elif attempt is not None and attempt.ended is not None:
        ago = format_duration(max(0.0, now - attempt.ended))
        text = f"{attempt.outcome} {ago} ago, at {format_clock_time(attempt.ended, now)}"
        kind = "bad" if attempt.failed else "good"
    elif board.state == "stopped" and board.silence:
        since = format_clock_time(now - board.silence, now)
        silence = format_duration(board.silence)
        text = f"dead or cut off: nothing was heard for {silence}, since {since}"
    elif board.state == "stopped":
        stopped = [str(rank.rank) for rank in board.ranks if rank.state == "stopped"]
        text = f"stopped: rank {', '.join(stopped)}"
    elif board.state == "late":
        age = min(rank.step_age for rank in board.ranks if rank.step_age is not None)
        parts = ", ".join(sorted({rank.part for rank in board.ranks if rank.part}))
        usual = format_duration(board.usual_step)
        text = f"hangs: no step for {format_duration(age)}, where one takes {usual}"
        text += f" ({parts})" if parts else ""
    elif board.state == "ended" and board.steps and board.step < board.steps:
        text = "ended before its last step"
    elif not board.ranks and board.step:
        ago = format_duration(max(0.0, now - board.at))
        text, kind = f"still running, or died without a word: the last row is {ago} old", "open"
    else:
        kind = "good" if board.state == "running" else "open"
    return Answer("state", text, kind)


def format_clock_time(moment: float, now: float) -> str:
    """Returns a moment's local time of day; if it is a day ago or more, date and minutes."""
    form = "%H:%M:%S" if abs(now - moment) < _DAY else "%m-%d %H:%M"
    return time.strftime(form, time.localtime(moment)) if abs(moment) < _FAR else "long ago"


def describe_learning(
    figures: Mapping[str, Points], norm: float | None = None, events: Sequence[RunEvent] = ()
) -> Iterator[Answer]:
    """Yields for each loss of a run its last value and mean, and what is wrong with it.

    Args:
        figures: Steps and values by name: ``loss``, and for evaluations ``eval_loss``.
        norm: The last gradient norm, if it is known.
        events: The events of the run, one of which may have the exact step of the first NaN.
    """
    for name, points in figures.items():
        if name == "loss" or name.startswith("loss "):
            means = _mean_by_stretch(points)
            mean = f", lately {format_figure(means[0][1])} in the mean" if means else ""
            parts = [f"{name} {format_figure(points[-1][1])}{mean}"]
            if EVALUATED + name in figures:
                step, value = figures[EVALUATED + name][-1]
                parts.append(f"{format_figure(value)} in the evaluation after step {step:,}")
            if norm is not None:
                parts.append(f"gradient norm {format_figure(norm)}")
            first = [event.since for event in events if event.text.startswith(f"{name} is ")]
            wrong = [*_describe_loss_problem(points, first)]
            yield Answer("learning", "; ".join([*wrong, *parts]), "bad" if wrong else "")


def _describe_loss_problem(points: Points, first: Sequence[int]) -> Iterator[str]:
    """Yields in which steps a loss is NaN or infinite, or that it diverges.

    Args:
        points: Steps and losses.
        first: The exact steps at which the loss became NaN, if events have recorded them.
    """
    strange = [step for step, value in points if not math.isfinite(value)]
    means = _mean_by_stretch(points)
    step, lowest = min(means, key=lambda mean: mean[1], default=(0, 0.0))
    if strange and not math.isfinite(points[-1][1]):
        yield f"NaN or infinite from step {min([strange[0], *first]):,} on"
    elif strange:
        yield f"NaN or infinite at step {strange[-1]:,}"
    elif lowest > 0 and means[0][1] > _DIVERGES * lowest:
        yield f"diverges: its mean was down at {format_figure(lowest)} at step {step:,}"


def _describe_progress(board: JobBoard, now: float) -> Iterator[Answer]:
    """Yields how many steps are done, the remaining time, and the hour of the end."""
    done = f"step {board.step:,}" + (f" of {board.steps:,}" if board.steps else "")
    left = None if board.state == "ended" else board.eta_seconds
    if left is not None:
        done += f", remaining {format_duration(left)}"
        if left and now + left <= _FAR:
            done += time.strftime(", until %H:%M %Z", time.localtime(now + left))
    if board.step or board.steps:
        yield Answer("done", done)


def _describe_speed(board: JobBoard, figures: Mapping[str, Points]) -> Iterator[Answer]:
    """Yields the seconds of a step, and the samples and tokens in a second."""
    rates = [f"{format_figure(board.step_time)} s/step"] if board.step_time else []
    for unit, name in (("samples/s", "samples_per_second"), ("tokens/s", "tokens_per_second")):
        points = figures.get(name, ())
        rate = board.samples_per_second if unit == "samples/s" else 0.0
        if rate:
            rates.append(f"{format_figure(rate)} {unit}")
        elif points and (board.step_time or not board.ranks):
            rates.append(f"{format_figure(points[-1][1])} {unit}")
    if rates:
        slower = _compare_with_best_stretch(board.step_time, figures.get("step time", ()))
        yield Answer("speed", ", ".join(rates) + slower)


def _compare_with_best_stretch(step_time: float, points: Points) -> str:
    """Returns a text: how much slower steps are than in the best stretch; empty if hardly."""
    means = ((mean, step) for step, mean in _mean_by_stretch(points) if mean > 0)
    best, step = min(means, default=(step_time, 0))
    if step_time < _SLOW * best or not step_time:
        return ""
    factor = step_time / best
    return f"; {factor:.1f} times the {format_figure(best)} s of its best stretch, at step {step:,}"


def _mean_by_stretch(points: Points) -> list[tuple[int, float]]:
    """Returns the last step and the mean of each stretch of figures, the last stretch first."""
    count = max(_FEWEST, len(points) // _STRETCHES)
    ends = range(len(points), count - 1, -count)
    return [(points[end - 1][0], fmean(y for _, y in points[end - count : end])) for end in ends]


def _describe_time_shares(shares: Mapping[str, float]) -> Iterator[Answer]:
    """Yields the likely cause if a share of wall time is too large, then all shares."""
    if shares:
        limits = {part: _LARGE_WAITING if part == "waiting" else _LARGE for part in _LIKELY}
        large = [part for part in _LIKELY if shares.get(part, 0.0) > limits[part]]
        text = shares_in_words(shares)
        for worst in sorted(large, key=lambda part: shares[part])[-1:]:
            text = f"{format_percent(shares[worst])} {worst}: {_LIKELY[worst]}; {text}"
        yield Answer("time", text, "bad" if large else "")


def shares_in_words(shares: Mapping[str, float]) -> str:
    """Returns the shares of wall time as a text: compute 90.0%, waiting for peers 10.0%."""
    names = {part: _WORDS.get(part, part) for part in shares}
    return ", ".join(f"{names[part]} {format_percent(share)}" for part, share in shares.items())


def _describe_slow_ranks(board: JobBoard) -> Iterator[Answer]:
    """Yields which ranks are slow now; if none is, which one was slow last."""
    for rank in board.slow[:_MOST_SLOW]:
        yield Answer("slow", str(rank), "bad")
    if len(board.slow) > _MOST_SLOW:
        yield Answer("slow", f"and {len(board.slow) - _MOST_SLOW} more", "bad")
    past = [event for event in board.history.events if event.kind == "slow"]
    if past and not board.slow:
        yield Answer("slow", f"nobody now; {past[-1]}", "open")


def events_of(board: JobBoard) -> list[RunEvent]:
    """Returns the events of a job, those of failed attempts among them, the newest last."""
    events = [*board.history.events]
    for attempt in board.attempts:
        if attempt.ended is not None and attempt.failed:
            step = attempt.last_step or 0
            events.append(RunEvent(attempt.ended, step, "failed", attempt.outcome, step))
    return sorted(events, key=lambda event: event.time)


def _describe_history(board: JobBoard, now: float) -> Iterator[Answer]:
    """Yields the numbers of restarts, healings and saves, then each of the newest events."""
    saved = board.last_checkpoint
    last = "none" if saved is None else f"step {saved.step:,}, {format_duration(saved.age)} ago"
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
        yield Answer(format_clock_time(event.time, now), str(event), "bad" * (event.kind in _BAD))
