"""Draws a timeline for a terminal: a row for each rank, time from left to right."""

from __future__ import annotations

import operator
import shutil
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fleetpipe.schedules.action import Action, Item
from fleetpipe.schedules.rows import in_slices
from fleetpipe.schedules.simulation import Timeline

#: The number of characters in a line if the output is no terminal.
_WIDTH_OF_A_FILE = 160

#: The events of one rank: entry, start, end.
_Row = Iterable[tuple[Item, float, float]]


def render(timeline: Timeline, width: int | None = None) -> str:
    """Draws when each rank does what, in the first of three styles that fits the width.

    1. Each action with its micro-batch (``F3``; with several chunks on a rank ``F4.3``), drawn as
       long as it takes (``B3---``), and a space after it.
    2. Without stages and spaces: ``F3B1--``. Of two chunks on a rank the second has small letters.
    3. Every character is a slice of time and shows what fills most of it, ``*`` a fused unit.

    ``~`` at the end of an action is the part in which the rank waits for an exchange.

    Args:
        timeline: The result of ``schedule.simulate()``.
        width: Characters in a line; None means the terminal's, or 160 without one.

    Returns:
        Lines without a final line break: the rows, then a legend. ``.`` is idle time.
    """
    if width is None:
        width = shutil.get_terminal_size((_WIDTH_OF_A_FILE, 24)).columns
    drawing = _Drawing(timeline)
    ranks = timeline.schedule.placement.ranks
    digits = len(str(ranks - 1))
    labels = [f"rank {rank:<{digits}}  " for rank in range(ranks)]
    columns = max(width - len(labels[0]), 20)
    for style in drawing.styles(columns):
        if style.columns <= columns:
            rows = [drawing.wide_row(row, style) for row in drawing.rows()]
            legend = f"time 1 = {_count_characters(style.scale)}"
            small = style.small
            break
    else:
        slices = min(columns, drawing.slices)
        rows = [drawing.narrow_row(row, slices) for row in drawing.rows()]
        legend = f"time {timeline.makespan / slices:g} = 1 character"
        small = drawing.chunks == 2
    lines = [(label + row).rstrip() for label, row in zip(labels, rows)]
    note = ", small letters = the second stage of a rank" if small else ""
    waits = ", ~ = waits for an exchange" if any("~" in row for row in rows) else ""
    return "\n".join([*lines, f"{legend}, . = idle{waits}{note}"])


def summary(timeline: Timeline) -> str:
    """Returns the figures of a timeline, one on each line."""
    schedule = timeline.schedule
    figures = {
        "schedule": f"{schedule.name}, {schedule.placement.ranks} ranks,"
        f" {schedule.micro_batches} micro-batches{in_slices(schedule.slices)},"
        f" chunks {schedule.placement.chunks}"
        f" ({schedule.placement.name})",
        "makespan": f"{timeline.makespan:.10g}",
        "span": f"{timeline.span:.10g}",
        "busy": f"{timeline.busy:.10g}",
        "bubble": f"{timeline.bubble:.10g} ({timeline.bubble_rate:.2%} of the span)",
        "peak activations": " ".join(f"{peak:g}" for peak in timeline.peak_activations),
    }
    if timeline.peak_bytes is not None:
        figures["peak bytes"] = " ".join(f"{peak:.0f}" for peak in timeline.peak_bytes)
    return "\n".join(f"{name:<17} {figure}" for name, figure in figures.items())


class _Style(NamedTuple):
    """A way to draw actions with their micro-batches.

    Args:
        scale: Characters for one unit of time.
        columns: Characters for the makespan.
        small: Whether small letters mark the second stage of a rank, in place of numbers.
        space: Characters after each action.
    """

    scale: float
    columns: int
    small: bool
    space: int


class _Drawing:
    """Draws the rows of one timeline.

    Attributes:
        makespan: The time from 0 to the end of the last action.
        chunks: Chunks on each rank.
        second: The stages that are drawn in small letters, if their letters are small at all.
        shortest: The time of the shortest action.
        slices: The number of characters in a row that show nearly everything in narrow rows.
    """

    def __init__(self, timeline: Timeline) -> None:
        placement = timeline.schedule.placement
        self.timeline = timeline
        self.makespan = timeline.makespan
        self.chunks = placement.chunks
        self.second = {
            stage
            for rank in range(placement.ranks)
            for stage in placement.stages_of(rank)[1:]
            if placement.chunks == 2 or placement.has_head
        }
        lengths: set[float] = set()
        for starts, ends in zip(timeline.starts, timeline.ends):
            lengths.update(map(operator.sub, ends, starts))
        lengths.discard(0)
        self.shortest = min(lengths, default=1)
        even = all(abs(length / self.shortest % 1) < 1e-9 for length in lengths)
        # So many slices show everything; where times are uneven, nearly everything.
        self.slices = max(1, round(self.makespan / self.shortest) * (1 if even else 4))

    def rows(self) -> Iterator[_Row]:
        """Yields the events of each rank without storing them: there may be millions."""
        timeline = self.timeline
        for row in zip(timeline.schedule.actions, timeline.starts, timeline.ends):
            yield zip(*row)

    def styles(self, columns: int) -> Iterator[_Style]:
        """Yields the styles, the widest first; none if even the narrowest could not fit.

        Args:
            columns: Characters that a row may have.
        """
        # An action takes at least two characters; this check saves a look at each action.
        if 2 * self.makespan / self.shortest > columns + 1:
            return
        yield self._style(small=False, space=1)
        if self.chunks <= 2:
            yield self._style(small=self.chunks == 2, space=0)

    def _style(self, small: bool, space: int) -> _Style:
        """Returns the style with the smallest scale at which the text of each action fits."""
        sizes = [
            (start, end, len(self.token(item, small)) + space)
            for row in self.rows()
            for item, start, end in row
            if end > start
        ]
        scale = max((letters / (end - start) for start, end, letters in sizes), default=1)
        # Where ends fall between characters, rounding can take one away.
        if any(round(end * scale) - round(start * scale) < size for start, end, size in sizes):
            scale = max((size + 1) / (end - start) for start, end, size in sizes)
        return _Style(scale, round(self.makespan * scale), small, space)

    def token(self, item: Item, small: bool) -> str:
        """Returns the text of an entry: ``F3``, or with several stages on a rank ``F4.3``.

        Args:
            item: The entry.
            small: Whether small letters mark the second stage of a rank, in place of numbers.
        """
        if not isinstance(item, Action):
            return "(" + "|".join(self.token(part, small) for part in item.actions) + ")"
        if self.chunks == 1 or small:
            return f"{self._letter(item)}{item.micro_batch}"
        return str(item)

    def _letter(self, action: Action) -> str:
        """Returns the kind of an action, in small letters for the second stage of a rank."""
        return action.kind.lower() if action.stage in self.second else action.kind

    def wide_row(self, row: _Row, style: _Style) -> str:
        """Draws a rank's row in one of :meth:`styles`."""
        cell = max(1, round(self.shortest * style.scale)) if style.space else 1
        idle = ".".ljust(cell) * (style.columns // cell + 1)
        line = ""
        for item, start, end in row:
            begin, stop = round(start * style.scale), round(end * style.scale)
            if stop > begin:
                if len(line) < begin:
                    gap = idle[len(line) : begin - style.space]
                    line += (gap if "." in gap else gap.replace(" ", ".", 1)) + " " * style.space
                token, size = self.token(item, style.small), stop - begin - style.space
                waits = round(self.timeline.exchange_in(item) * style.scale)
                token = token.ljust(size - min(waits, size - len(token)), "-")
                line += token.ljust(size, "~") + " " * style.space
        return line + idle[len(line) : style.columns]

    def narrow_row(self, row: _Row, slices: int) -> str:
        """Draws a rank's row as ``slices`` characters, each for an equal slice of time.

        The character is that of the action that fills most of the slice, ``.`` for idle time.
        """
        length = self.makespan / slices
        filled: list[dict[str, float]] = [{".": length} for _ in range(slices)]
        for item, start, end in row:
            letter = self._letter(item) if isinstance(item, Action) else "*"
            waits = end - self.timeline.exchange_in(item)
            for sign, begin, stop in ((letter, start, waits), ("~", waits, end)):
                first, last = int(begin / length), min(slices - 1, int(stop / length))
                for index in range(first, last + 1) if stop > begin else ():
                    amount = stop - begin
                    if first < last:
                        amount = min(stop, (index + 1) * length) - max(begin, index * length)
                    amounts = filled[index]
                    amounts[sign] = amounts.get(sign, 0) + amount
                    amounts["."] -= amount
        return "".join(max(amounts, key=amounts.__getitem__) for amounts in filled)


def _count_characters(characters: float) -> str:
    """Writes a number of characters with its unit."""
    return "1 character" if characters == 1 else f"{characters:g} characters"
