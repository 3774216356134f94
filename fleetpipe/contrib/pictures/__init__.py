"""Pictures of schedules, runs and profiles.

A ``Panel`` of this file has the boxes of one timeline, by rank and time. ``picture.py`` draws
panels with matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fleetpipe.errors import ConfigError
from fleetpipe.representation import shows
from fleetpipe.schedules.forms.trace import Event, events_of
from fleetpipe.schedules.placement import Placement
from fleetpipe.schedules.rows import in_slices
from fleetpipe.schedules.simulation import Timeline, amounts_in_flight

#: Red, green and blue from 0 to 1: Okabe and Ito's colours, which the colour-blind can distinguish.
COLOURS = {
    "F": (0.00, 0.45, 0.70),
    "B": (0.90, 0.62, 0.00),
    "I": (0.84, 0.37, 0.00),
    "W": (0.00, 0.62, 0.45),
    "other": (0.60, 0.60, 0.60),
}

HEIGHT = 0.86  # height of a bar, in rows
LANE = 0.55  # share of that height for a bar in a lane, if there are more than two chunks

#: Red, green and blue, from 0 to 1.
Colour = tuple[float, float, float]


@shows("title", "placement")
@dataclass(frozen=True)
class Panel:
    """One timeline of a picture.

    Args:
        title: The text above the timeline.
        events: The events. Actions are drawn in the colour of their kind, transfers are left out,
            other events are grey.
        placement: The placement of stages on ranks.
        unit: Unit of the times, such as "s"; empty if they are in the unit of the costs.
        held: For each rank, what it holds over time, as pairs (time, amount); drawn below the
            timeline.
        held_unit: Unit of these amounts, "bytes" for example.
        begin: Where the axis of time begins.
    """

    title: str
    events: Sequence[Event]
    placement: Placement
    unit: str = ""
    held: tuple[tuple[tuple[float, float], ...], ...] = ()
    held_unit: str = ""
    begin: float = 0.0

    @property
    def has_lanes(self) -> bool:
        """Whether a rank's chunks are drawn below each other, as shades distinguish only two."""
        return self.placement.chunks > 2

    @cached_property
    def bars(self) -> list[Bar]:
        """The boxes to draw, in the order of the events."""
        return [bar for event in self.events for bar in _bars_of_event(event, self.placement)]

    def within(self, start: float, end: float) -> Panel:
        """Returns a panel with only the part of the timeline between two times.

        Raises:
            ConfigError: Nothing runs between the two times.
        """
        events = [event for event in self.events if event.start < end and event.end > start]
        if not events:
            times = [time for event in self.events for time in (event.start, event.end)]
            raise ConfigError(
                "nothing runs in the window of the picture",
                expected=f"times between {min(times, default=0):g} and {max(times, default=0):g}",
                got=f"{start:g} to {end:g}",
                fix="give a window in the unit of the times, its start before its end",
            )
        clipped = [
            event._replace(start=max(event.start, start), end=min(event.end, end))
            for event in events
        ]
        return replace(self, events=clipped, begin=start)


@dataclass(frozen=True)
class Bar:
    """A box of a panel, which shows one action.

    Attributes:
        kind: The kind of the action, or "other"; it decides the colour.
        shade: The lightness, from 0 to 1.
        number: The micro-batch, as text.
        left: When the action begins.
        right: When the action ends.
        top: The upper end, in rows; the middle of a rank's row is the rank's number.
        bottom: The lower end, in rows.
        exchange: How long, at the right end, the rank only waits for an exchange.
    """

    kind: str
    shade: float
    number: str
    left: float
    right: float
    top: float
    bottom: float
    exchange: float = 0.0

    @property
    def computed(self) -> float:
        """The time at which the action's computing ends, and a wait for an exchange begins."""
        return max(self.left, self.right - self.exchange)

    @property
    def colour(self) -> Colour:
        """The fill colour on white paper."""
        red, green, blue = (part + (1 - part) * self.shade for part in COLOURS[self.kind])
        return red, green, blue

    @property
    def ink(self) -> str:
        """Black or white, whichever has more contrast with the colour: at least 4.5 to 1."""
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
            for part in self.colour
        )
        # The relative luminance of WCAG 2; at 0.179 black and white have the same contrast.
        return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "white"


def panel_of(timeline: Timeline, unit: str = "", name: str = "", *, memory: bool = False) -> Panel:
    """Returns the panel of a simulated schedule, with bubble rate and peak in its title.

    Args:
        timeline: When each action runs.
        unit: Unit of the times, such as "s"; empty if they are in the unit of the costs.
        name: The begin of the title, if one picture has several panels.
        memory: Whether to draw below how much each rank holds: in bytes if the costs give them,
            else in forwards of one stage.
    """
    schedule = timeline.schedule
    placement = schedule.placement
    chunks = f", {placement.chunks} chunks ({placement.name})" if placement.chunks > 1 else ""
    title = (
        f"{schedule.name}: {placement.ranks} ranks,"
        f" {schedule.micro_batches} micro-batches{in_slices(schedule.slices)}{chunks}"
        f" · bubble {timeline.bubble_rate:.2%}"
        f" · peak {max(timeline.peak_activations):g} forwards"
    )
    title = f"{name}: {title}" if name else title
    panel = Panel(title, events_of(timeline), placement, unit)
    if not memory:
        return panel
    held_unit = "forwards" if timeline.costs.bytes is None else "bytes"
    held = tuple(_held_amounts(timeline, rank) for rank in range(placement.ranks))
    return replace(panel, held=held, held_unit=held_unit)


def _held_amounts(timeline: Timeline, rank: int) -> tuple[tuple[float, float], ...]:
    """Returns what a rank holds over time: the time and the new amount of each change.

    Amounts are in bytes if the costs give them, else in forwards of one stage.
    """
    in_bytes = timeline.costs.bytes is not None
    around = amounts_in_flight(timeline.schedule, rank, timeline.costs, in_bytes=in_bytes)
    times = zip(timeline.starts[rank], timeline.ends[rank])
    steps = [(0.0, 0.0)]
    for (start, end), held in zip(times, around):
        steps += [(start, held.during), (end, held.after)]
    return (*steps, (timeline.makespan, steps[-1][1]))


def _bars_of_event(event: Event, placement: Placement) -> Iterator[Bar]:
    """Yields the boxes that show an event: one for each action of a fused pair."""
    top = event.rank - HEIGHT / 2
    if not event.actions:
        if event.op is None or event.name in ("REDUCE", "STEP"):
            yield Bar("other", 0, "", event.start, event.end, top, top + HEIGHT)
        return
    lane_height = HEIGHT * (LANE if placement.chunks > 2 else 1)
    height = lane_height / len(event.actions)
    stages = placement.stages_of(event.rank)
    for index, action in enumerate(event.actions):
        # 0 for the rank's first stage, up to 1 for its last, which is the palest.
        depth = min(1, stages.index(action.stage) / max(1, placement.chunks - 1))
        upper = top + (HEIGHT - lane_height) * depth + index * height
        yield Bar(
            action.kind,
            shade=0.6 * depth,
            number=str(action.micro_batch),
            left=event.start,
            right=event.end,
            top=upper,
            bottom=upper + height,
            exchange=event.exchange,
        )
