"""``fleetpipe.pipe_split``: a line in a model's forward at which a stage begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listening: list[Callable[[], None]] = []


def pipe_split() -> None:
    """Begins a stage here, in a forward that ``fleetpipe.pipeline`` captures.

    It is asked for by ``split_spec=None``, and does nothing when a model runs by itself.

    Raises:
        CaptureError: It is in a sublayer that is not opened.
    """
    for note in _listening:
        note()


def is_noting() -> bool:
    """Whether a forward runs to be captured, and by nobody else's wish."""
    return bool(_listening)


@contextmanager
def noting(note: Callable[[], None]) -> Iterator[None]:
    """Within it ``note`` is called for each call of :func:`pipe_split`."""
    _listening.append(note)
    try:
        yield
    finally:
        _listening.remove(note)
