"""What a job asks of the part that makes good the death of another rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fleetpipe.errors import PeerFailed, PipelineTimeout


class Recovery(Protocol):
    """What makes good the death of another rank.

    Attributes:
        counts: Whether the script is within a step: what it does elsewhere belongs to none.
    """

    counts: bool

    def follow(self, model: Any, scaler: Any, guards: int, drawn: bool) -> None:
        """Refuses to heal from now on where a batch has what cannot be done once more.

        Args:
            model: The model that is trained.
            scaler: Its ``GradScaler``, or None.
            guards: How often guards compare the ranks; 0 for never.
            drawn: Whether the batch comes from a function.
        """

    def refuse(self, why: str) -> None:
        """Refuses to heal from now on."""

    def train(self, begin: Callable[[Any], Any], data: Any, optimizer: Any) -> Any:
        """Trains ``begin(data)`` and returns it; trains again after the death of another rank."""

    def meet(self) -> object:
        """Connects all ranks once more. Collective."""

    def hinder(self, why: str, alone: bool = True) -> None:
        """Refuses to heal where this step would have to begin anew.

        Args:
            why: What no process can be told.
            alone: Whether it can be told as a part of something else.
        """

    def share(
        self, what: str, act: Callable[[], Any], pass_over: Callable[[], object] | None
    ) -> Any:
        """Returns what ``act`` returns; repeats it after the death of another rank."""

    def heal(self, error: PeerFailed | PipelineTimeout) -> bool:
        """Makes good the death that a rank has noticed after a batch.

        Returns:
            Whether the process that replaces the dead one did that batch, too.

        Raises:
            FleetPipeError: ``error``, if that cannot be.
        """
