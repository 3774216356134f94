"""A board as metrics, in OpenMetrics' text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fleetpipe.extras import needed_for
from fleetpipe.watch.board import JobBoard

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_STATES = ("starting", "running", "waiting", "stopped", "ended")


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
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        board = self._board

        def gauge(name: str, help_: str, value: float | None, unit: str = "") -> Iterator[object]:
            if value is not None:
                full = f"fleetpipe_{name}"
                yield GaugeMetricFamily(full, help_, value=value, unit=unit)

        for name, help_, value in (
            ("steps", "Steps that are done.", board.step),
            ("restarts", "How often the job was started again.", board.restarts),
        ):
            yield CounterMetricFamily(f"fleetpipe_{name}", help_, value=value)
        saved = board.last_checkpoint
        yield from gauge("run_steps", "Steps of the whole run.", board.steps)
        yield from gauge("step_time_seconds", "Time of a step.", board.step_time, "seconds")
        yield from gauge("samples_per_second", "Of all replicas.", board.samples_per_second)
        yield from gauge("eta_seconds", "Time to the end.", board.eta_seconds, "seconds")
        yield from gauge("last_checkpoint_step", "Step that was saved.", saved and saved.step)
        yield from gauge(
            "last_checkpoint_age_seconds", "Time since.", saved and saved.age, "seconds"
        )
        for name, help_, unit in (
            ("busy", "busy_ratio", "ratio"),
            ("memory", "memory_bytes", "bytes"),
            ("last_step_age", "last_step_age_seconds", "seconds"),
            ("incoming", "incoming_messages", ""),
            ("outgoing", "outgoing_bytes", "bytes"),
        ):
            family = GaugeMetricFamily(
                f"fleetpipe_rank_{help_}", f"{name} of a rank.", labels=("rank",), unit=unit
            )
            for rank in board.ranks:
                value = getattr(rank, name)
                if value is not None:
                    family.add_metric((str(rank.rank),), value)
            yield family
        states = GaugeMetricFamily(
            "fleetpipe_rank_state", "1 for what a rank does.", labels=("rank", "state")
        )
        for rank in board.ranks:
            for state in _STATES:
                states.add_metric((str(rank.rank), state), float(rank.state == state))
        yield states
        slow = GaugeMetricFamily(
            "fleetpipe_slow_factor", "How many times as long it takes.", labels=("rank", "what")
        )
        for one in board.slow:
            slow.add_metric((str(one.rank), one.what), one.factor)
        yield slow
