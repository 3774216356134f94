"""What the driver of a launched job and its workers tell each other, through an actor."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple


class WorkerOrder(NamedTuple):
    """What the workers are to do.

    Attributes:
        kind: ``begin`` an attempt, send a ``signal`` to the ranks, or ``leave``.
        value: What the attempt is, or the signal's number.
    """

    kind: str
    value: Any = None


class WorkerReport(NamedTuple):
    """What a worker tells.

    Attributes:
        group: The number of its group of workers.
        rank: Its rank.
        kind: ``ready`` for an attempt, ``output`` of the rank, a ``step`` begun, or an attempt
            ``ended``.
        value: Of that.
    """

    group: int
    rank: int
    kind: str
    value: Any


class Mailbox:
    """Holds orders and reports until they are fetched; an actor on the driver's node."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._orders: dict[int, list[WorkerOrder]] = {}
        self._reports: list[WorkerReport] = []

    async def order(self, group: int, order: WorkerOrder) -> None:
        """Leaves an order for all workers of a group."""
        async with self._changed:
            self._orders.setdefault(group, []).append(order)
            self._changed.notify_all()

    async def orders(self, group: int, fetched: int) -> list[WorkerOrder]:
        """Waits for orders of a group beyond those that were ``fetched``, and returns them."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._orders.get(group, ())) > fetched)
            return self._orders[group][fetched:]

    async def report(self, report: WorkerReport) -> None:
        """Leaves a report for the driver."""
        async with self._changed:
            self._reports.append(report)
            self._changed.notify_all()

    async def reports(self) -> list[WorkerReport]:
        """Waits for reports and returns them, the first one first. For one that asks at a time."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._reports))
            reports, self._reports = self._reports, []
            return reports
