"""``fleetpipe.pipe_split``: a line in a model's forward at which a stage begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listening: list[Callable[[], None]] = []


def pipe_split() -> None:
    """Starts a stage at this line of a forward that ``fleetpipe.pipeline`` captures.

    ``split_spec=None`` makes use of it; it does nothing when a model runs by itself.

    Raises:
        CaptureError: It is in a sublayer that is captured as a whole.
    """
    for note in _listening:
        note()


def is_noting() -> bool:
    """Whether a forward is being captured."""
    return bool(_listening)


@contextmanager
def noting(note: Callable[[], None]) -> Iterator[None]:
    """While this context is open, each call of :func:`pipe_split` calls ``note``."""
    _listening.append(note)
    try:
        yield
    finally:
        _listening.remove(note)
