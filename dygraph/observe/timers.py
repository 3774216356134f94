"""Times forwards, backwards, transfers and reductions for ``pp_configs.enable_timer``.

The timers are called and named as Fleet's; they read the clock and call nothing of CUDA. On a GPU,
where work is queued, a time is that of queueing it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from fleetpipe.engine.engine import Stage, Values
from fleetpipe.errors import ConfigError
from fleetpipe.transport import MessageKey, Transport, Value

_WAYS = {"F": "forward", "B": "backward"}


class Timer:
    """Adds up the time between its starts and stops."""

    def __init__(self, name: str) -> None:
        """Begins at 0."""
        self.name = name
        self._elapsed = 0.0
        self._started: float | None = None

    def start(self) -> None:
        """Starts.

        Raises:
            ConfigError: It runs already.
        """
        if self._started is not None:
            raise ConfigError(f"the timer {self.name} has been started already")
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Stops.

        Raises:
            ConfigError: It does not run.
        """
        if self._started is None:
            raise ConfigError(f"the timer {self.name} has not been started")
        self._elapsed += time.perf_counter() - self._started
        self._started = None

    def reset(self) -> None:
        """Goes back to 0, and stops."""
        self._elapsed = 0.0
        self._started = None

    def elapsed(self, reset: bool = True) -> float:
        """Returns the seconds so far; a running timer goes on."""
        running = self._started is not None
        if running:
            self.stop()
        elapsed = self._elapsed
        if reset:
            self.reset()
        if running:
            self.start()
        return elapsed


class Timers:
    """The timers of a wrapper, by name: ``timers("forward_step").elapsed()``.

    Attributes:
        timers: Those that have been used.
    """

    def __init__(self) -> None:
        """Begins without any."""
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        """Returns the timer of that name."""
        if name not in self.timers:
            self.timers[name] = Timer(name)
        return self.timers[name]

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Times what runs within it."""
        timer = self(name)
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    def log(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Writes the milliseconds of ``names`` to standard error, as one line."""
        texts = [
            f"{name}: {self.timers[name].elapsed(reset) * 1000.0 / normalizer:.2f}"
            for name in names
        ]
        sys.stderr.write(" | ".join(["time (ms)", *texts]) + "\n")


class TimedStage:
    """A stage whose forwards and backwards are timed; all else is the wrapped stage's."""

    def __init__(self, stage: Stage, timers: Timers) -> None:
        """Wraps ``stage``."""
        self._stage = stage
        self._timing = timers.timing

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the wrapped stage."""
        return getattr(self._stage, name)

    def forward(self, stage: int, micro_batch: int, inputs: Values) -> Values:
        """See :class:`fleetpipe.engine.engine.Stage`."""
        with self._timing("forward_step"):
            return self._stage.forward(stage, micro_batch, inputs)

    def backward(self, stage: int, micro_batch: int, output_grads: Values) -> Values:
        """See :class:`fleetpipe.engine.engine.Stage`."""
        with self._timing("backward_step"):
            return self._stage.backward(stage, micro_batch, output_grads)

    def input_grad(self, stage: int, micro_batch: int, output_grads: Values) -> Values:
        """See :class:`fleetpipe.engine.engine.Stage`."""
        with self._timing("backward_step"):
            return self._stage.input_grad(stage, micro_batch, output_grads)

    def weight_grad(self, stage: int, micro_batch: int) -> None:
        """See :class:`fleetpipe.engine.engine.Stage`."""
        with self._timing("backward_step"):
            self._stage.weight_grad(stage, micro_batch)

    def release(self, stage: int, micro_batch: int) -> None:
        """See :class:`fleetpipe.engine.engine.Stage`."""
        self._stage.release(stage, micro_batch)


class TimedTransport:
    """A transport whose transfers between stages are timed; all else is the wrapped one's."""

    def __init__(self, transport: Transport, timers: Timers) -> None:
        """Wraps ``transport``."""
        self._transport = transport
        self._timing = timers.timing

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the wrapped transport."""
        return getattr(self._transport, name)

    def send(self, peer: int, key: MessageKey, value: Value) -> None:
        """See :class:`fleetpipe.transport.Transport`."""
        with self._timing(f"send_{_WAYS[key.kind]}"):
            self._transport.send(peer, key, value)

    def try_receive(self, peer: int, key: MessageKey) -> tuple[bool, Value]:
        """See :class:`fleetpipe.transport.Transport`."""
        with self._timing(f"recv_{_WAYS[key.kind]}"):
            return self._transport.try_receive(peer, key)

    def receive(self, peer: int, key: MessageKey, timeout: float) -> Value:
        """See :class:`fleetpipe.transport.Transport`."""
        with self._timing(f"recv_{_WAYS[key.kind]}"):
            return self._transport.receive(peer, key, timeout)
