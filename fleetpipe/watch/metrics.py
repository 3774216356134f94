"""A board as metrics, in OpenMetrics' text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fleetpipe.extras import needed_for
from fleetpipe.watch.board import JobBoard

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_STATES = ("starting", "running", "waiting", "stopped", "ended")
#: Of the job, and of each rank: an attribute, its name, its unit, and what it is.
_OF_JOB = (
    ("steps", "run_steps", "", "Steps of the whole run."),
    ("step_time", "step_time_seconds", "seconds", "Time of a step."),
    ("samples_per_second", "samples_per_second", "", "Of all replicas."),
    ("eta_seconds", "eta_seconds", "seconds", "Time to the end."),
    ("gradient_norm", "gradient_norm", "", "Of the last step, before clipping."),
)
_OF_RANK = (
    ("busy", "busy_ratio", "ratio", "Share of a step in which it computes."),
    ("memory", "memory_bytes", "bytes", "What it has."),
    ("memory_limit", "memory_limit_bytes", "bytes", "What it may have."),
    ("held", "held_forwards", "", "Most forwards that it held in a step."),
    ("held_cap", "held_cap_forwards", "", "Most that it may hold."),
    ("step_age", "last_step_age_seconds", "seconds", "Time since its last step."),
    ("incoming", "incoming_messages", "", "Messages that it has not taken."),
    ("outgoing", "outgoing_bytes", "bytes", "What it has not sent."),
)
#: Values of labels, and the figure of that.
_Sample = tuple[tuple[str, ...], "float | None"]


def require_package() -> None:
    """Makes sure of what writes metrics.

    Raises:
        PackageNotFound: prometheus-client is not installed.
    """
    with needed_for("serving the board of a job"):
        import prometheus_client.openmetrics.exposition  # noqa: F401


def text(board: JobBoard) -> bytes:
    """Returns the metrics of a board."""
    from prometheus_client.openmetrics.exposition import generate_latest

    write: Callable[[object], bytes] = generate_latest
    return write(_Metrics(board))


class _Metrics:
    """What prometheus-client takes for a registry."""

    def __init__(self, board: JobBoard) -> None:
        self._board = board

    def collect(self) -> Iterator[object]:
        from prometheus_client.core import CounterMetricFamily

        board, ranks = self._board, [(str(rank.rank), rank) for rank in self._board.ranks]
        yield CounterMetricFamily("fleetpipe_steps", "Steps that are done.", board.step)
        restarts = "How often the job was started again."
        yield CounterMetricFamily("fleetpipe_restarts", restarts, board.restarts)
        for attribute, name, unit, what in _OF_JOB:
            yield _gauge(name, what, [((), getattr(board, attribute))], (), unit)
        if board.last_checkpoint is not None:
            step, age = board.last_checkpoint.step, board.last_checkpoint.age
            yield _gauge("last_checkpoint_step", "Step that was saved.", [((), step)])
            name = "last_checkpoint_age_seconds"
            yield _gauge(name, "Time since.", [((), age)], (), "seconds")
        for attribute, name, unit, what in _OF_RANK:
            samples = [((number,), getattr(rank, attribute)) for number, rank in ranks]
            yield _gauge(f"rank_{name}", what, samples, ("rank",), unit)
        states = [
            ((number, state), float(rank.state == state))
            for number, rank in ranks
            for state in _STATES
        ]
        yield _gauge("rank_state", "1 for what a rank does.", states, ("rank", "state"))
        slow = [((str(one.rank), one.what), one.factor) for one in board.slow]
        yield _gauge("slow_factor", "How many times as long it takes.", slow, ("rank", "what"))


def _gauge(
    name: str, what: str, samples: Iterable[_Sample], labels: tuple[str, ...] = (), unit: str = ""
) -> object:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"fleetpipe_{name}", what, labels=labels, unit=unit)
    for values, figure in samples:
        if figure is not None:
            family.add_metric(values, figure)
    return family
