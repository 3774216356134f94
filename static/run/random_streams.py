"""A random stream for each stage, so that the order of actions does not change the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fleetpipe.aliases import Place
from fleetpipe.paddle_api.random import generator_of, seedings

#: Between the seeds of two stages; odd and large, so that seeds close by do not meet.
_STRIDE = 0x9E3779B1


class Streams:
    """The random streams of this process's stages.

    The first stage that draws uses the generator that ``paddle.seed`` set, as the unsplit program
    would; each later one has its own stream, derived from that seed and its number. Each later call
    of ``paddle.seed`` begins all of them again.
    """

    def __init__(self, drawing: Iterable[int], stages: Iterable[int], place: Place) -> None:
        self._generator, self._seedings = generator_of(place), seedings()
        self._stages = sorted(set(sorted(drawing)[1:]).intersection(stages))
        self._states: dict[int, Any] = {}
        self.begin({})

    @property
    def states(self) -> Mapping[int, Any]:
        """The generator state of each stage with its own stream."""
        return self._states

    def begin(self, states: Mapping[int, Any]) -> None:
        """Restarts the streams."""
        now = self._generator.get_state()
        seed = self._generator.initial_seed()
        for stage in self._stages:
            self._generator.manual_seed((seed + stage * _STRIDE) % (1 << 63))
            self._states[stage] = states.get(stage, self._generator.get_state())
        self._generator.set_state(now)

    def follow_seed(self) -> None:
        """Restarts the streams if the script has called ``paddle.seed`` since they began."""
        if self._seedings != seedings():
            self._seedings = seedings()
            self.begin({})

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """While this context is open, ``stage`` draws from its own stream."""
        if stage not in self._states:
            yield
            return
        program_state = self._generator.get_state()
        self._generator.set_state(self._states[stage])
        try:
            yield
        finally:
            self._states[stage] = self._generator.get_state()
            self._generator.set_state(program_state)
