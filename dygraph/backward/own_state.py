"""The process state that a forward and a backward have to themselves if they run in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from fleetpipe.dygraph import random_keys
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.amp import automatic_casts
from fleetpipe.paddle_api.device import used_here


class Change(Protocol):
    """A change of process-wide state that lasts for a while."""

    def begin(self) -> None:
        """Changes the state of the process."""

    def end(self) -> None:
        """Changes it back; :meth:`begin` may follow once more."""


#: The changes that last at this moment, in the order in which they began; each adds itself.
changes: list[Change] = []


class OwnState:
    """Saves and restores changes and random states; see :mod:`fleetpipe.mesh.turns`.

    Paddle keeps automatic casts, device and the gradient switch per thread.
    """

    def suspend(self) -> Callable[[], None]:
        """Undoes all changes, the last first; returns a function that resumes them."""
        made, states = changes[:], random_keys.suspend()
        changes.clear()
        for change in reversed(made):
            change.end()

        def resume() -> None:
            for change in made:
                change.begin()
                changes.append(change)
            states()

        return resume

    def inherited(self) -> AbstractContextManager[None]:
        """Returns a context to give another thread this one's casts, device, gradient switch."""
        return _with_settings(automatic_casts(), used_here(), paddle.is_grad_enabled())


@contextmanager
def _with_settings(
    casts: Callable[[], AbstractContextManager[object]],
    use_device: Callable[[], None],
    gradients: bool,
) -> Iterator[None]:
    use_device()
    with casts(), paddle.set_grad_enabled(gradients):
        yield
