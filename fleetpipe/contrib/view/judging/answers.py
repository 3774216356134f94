"""What somebody asks of a run, and the answers, which the terminal and the pages show alike."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from fleetpipe.contrib.view.reading.board import JobBoard
from fleetpipe.contrib.view.reading.history import EVALUATED, History
from fleetpipe.contrib.view.showing.numbers import percent, seconds, short

#: From this moment on the hour of an end means nothing, and much later ones have none.
_FAR = 1e11
#: Stretches of a run whose means are compared, and the fewest figures of one.
_STRETCHES, _FEWEST = 20, 5
#: A loss whose mean is so many times its lowest one diverges.
_DIVERGES = 2.0
#: A step that takes so many times the fastest ones is slow.
_SLOW = 1.25
_WORDS = {"waiting": "waiting for peers"}
#: Steps, and the figure of each.
Points = Sequence[tuple[int, float]]


class Answer(NamedTuple):
    """An answer to a question.

    Attributes:
        question: The subject of the question, in a word or two.
        text: The answer.
        kind: ``good``, ``open`` or ``bad``; empty for what is only a figure.
    """

    question: str
    text: str
    kind: str = ""


def answers_of(board: JobBoard) -> list[Answer]:
    """Returns what is to be said of a job: is it alive, does it learn, how far, how fast is it?"""
    figures = _figures(board.history)
    done = f"step {board.step:,}" + (f" of {board.steps:,}" if board.steps else "")
    left = "" if board.state == "ended" else end_of(board, time.time())
    answers = [
        alive(board),
        *learning_of(figures, board.gradient_norm),
        Answer("done", f"{done}, remaining {left}" if left else done),
    ]
    if board.step_time:
        rates = f"{short(board.step_time)} s/step, {short(board.samples_per_second)} samples/s"
        slower = _beside_best(board.step_time, figures.get("step time", ()))
        answers.append(Answer("speed", rates + slower))
    if board.shares:
        answers.append(Answer("time", time_of(board.shares)))
    answers += [Answer("slow", str(one), "bad") for one in board.slow]
    saved = board.last_checkpoint
    last = "none" if saved is None else f"step {saved.step:,}, {seconds(saved.age)} ago"
    happened = [
        f"{board.restarts} restart" + "s" * (board.restarts != 1),
        f"last checkpoint: {last}",
        board.news * (board.state != "ended"),
    ]
    return [*answers, Answer("happened", ", ".join(filter(None, happened)))]


def alive(board: JobBoard) -> Answer:
    """Returns whether a job runs, and since when it does not."""
    if board.state == "stopped":
        if board.silence:
            return Answer("state", f"nothing was heard for {seconds(board.silence)}", "bad")
        stopped = [str(rank.rank) for rank in board.ranks if rank.state == "stopped"]
        return Answer("state", f"stopped: rank {', '.join(stopped)}", "bad")
    if board.state == "late":
        age = min(rank.step_age for rank in board.ranks if rank.step_age is not None)
        parts = sorted({rank.part for rank in board.ranks if rank.part})
        where = f" ({', '.join(parts)})" if parts else ""
        text = f"no step for {seconds(age)}, where one takes {seconds(board.usual_step)}{where}"
        return Answer("state", text, "bad")
    if board.state == "ended" and board.steps and board.step < board.steps:
        return Answer("state", "ended before its last step", "bad")
    return Answer("state", board.state, "good" if board.state == "running" else "open")


def _figures(history: History) -> dict[str, list[tuple[int, float]]]:
    figures: dict[str, list[tuple[int, float]]] = {}
    for step, row in history.rows():
        for name, value in row.items():
            figures.setdefault(name, []).append((step, value))
    return figures


def learning_of(figures: Mapping[str, Points], norm: float | None = None) -> Iterator[Answer]:
    """Yields whether a run learns.

    Args:
        figures: Steps and values by name: of the loss, and of evaluations as ``eval_loss``.
        norm: The last gradient norm, if it is known.
    """
    for name, points in figures.items():
        if name == "loss" or name.startswith("loss "):
            parts = [_loss(name, points)]
            if EVALUATED + name in figures:
                step, value = figures[EVALUATED + name][-1]
                parts.append(f"{short(value)} in the evaluation after step {step:,}")
            if norm is not None:
                parts.append(f"gradient norm {short(norm)}")
            wrong = [*_wrong(points)]
            yield Answer("learning", "; ".join([*wrong, *parts]), "bad" if wrong else "")


def _loss(name: str, points: Points) -> str:
    means = _means(points)
    return f"{name} {short(points[-1][1])}" + (f", mean {short(means[0][1])}" if means else "")


def _wrong(points: Points) -> Iterator[str]:
    """Yields from which step on a loss is no number, or diverges."""
    strange = [step for step, value in points if not math.isfinite(value)]
    means = _means(points)
    step, lowest = min(means, key=lambda mean: mean[1], default=(0, 0.0))
    if strange and not math.isfinite(points[-1][1]):
        yield f"NaN or infinite from step {strange[0]:,} on"
    elif strange:
        yield f"NaN or infinite at step {strange[-1]:,}"
    elif lowest > 0 and means[0][1] > _DIVERGES * lowest:
        yield f"diverges: its mean was {short(lowest)} at step {step:,}"


def _beside_best(step_time: float, points: Points) -> str:
    """Returns how many times as long as in the best stretch a step takes, if that is much."""
    means = ((mean, step) for step, mean in _means(points) if mean > 0)
    best, step = min(means, default=(step_time, 0))
    if step_time < _SLOW * best:
        return ""
    factor = step_time / best
    return f"; {factor:.1f} times the {short(best)} s of its best stretch, at step {step:,}"


def _means(points: Points) -> list[tuple[int, float]]:
    """Returns the last step and the mean of each stretch of figures, the last stretch first."""
    count = max(_FEWEST, len(points) // _STRETCHES)
    ends = range(len(points), count - 1, -count)
    return [(points[end - 1][0], fmean(y for _, y in points[end - count : end])) for end in ends]


def time_of(shares: Mapping[str, float]) -> str:
    """Returns the shares of wall time in words."""
    return ", ".join(f"{_WORDS.get(part, part)} {percent(share)}" for part, share in shares.items())


def end_of(board: JobBoard, now: float) -> str:
    """Returns the remaining time of a job and the hour of its end; empty if unknown."""
    left = board.eta_seconds
    if left is None:
        return ""
    if not left or now + left > _FAR:
        return seconds(left)
    return f"{seconds(left)}, until {time.strftime('%H:%M %Z', time.localtime(now + left))}"
