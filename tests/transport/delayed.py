"""Connections whose exchanges arrive a while after they were sent, as over a slow network."""

from __future__ import annotations

import time
from typing import Any

from fleetpipe.transport import MessageKey


class DelayedTransport:
    """Stands before another transport of processes on one host; both ends have one."""

    def __init__(self, transport: Any, seconds: float) -> None:
        self._transport, self._seconds = transport, seconds
        self._early: dict[tuple[int, MessageKey], list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, peer: int, key: MessageKey, value: Any) -> None:
        """Sends a value with the moment of now."""
        self._transport.send(peer, key, (time.monotonic(), value))

    def try_receive(self, peer: int, key: MessageKey) -> tuple[bool, Any]:
        """Takes a value that was sent long enough ago."""
        early = self._early.setdefault((peer, key), [])
        if not early:
            arrived, stamped = self._transport.try_receive(peer, key)
            early += [stamped] * arrived
        if early and time.monotonic() >= early[0][0] + self._seconds:
            return True, early.pop(0)[1]
        return False, None

    def receive(self, peer: int, key: MessageKey, timeout: float) -> Any:
        """Waits until a value was sent long enough ago."""
        early = self._early.setdefault((peer, key), [])
        sent, value = early.pop(0) if early else self._transport.receive(peer, key, timeout)
        time.sleep(max(0.0, sent + self._seconds - time.monotonic()))
        return value
