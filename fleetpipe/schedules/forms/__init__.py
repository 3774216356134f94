"""How schedules are written and drawn: as text, in a terminal, as a trace and as a picture.

Users import events, pictures and traces from here; ``text.py`` is behind
``str(schedule)`` and ``Schedule.parse``. To draw what ran, begin with
:class:`Event`. It imports values, explanations and players; faces and commands import it.
"""

from __future__ import annotations

from fleetpipe.contrib.pictures.panel import Panel, panel_of
from fleetpipe.contrib.pictures.schedule_picture import draw, plot
from fleetpipe.schedules.forms.chrome import chrome_trace, write_trace
from fleetpipe.schedules.forms.events import Event, Figures, events_of, figures_of
from fleetpipe.schedules.forms.terminal import render, summary

__all__ = [
    "Event",
    "Figures",
    "Panel",
    "chrome_trace",
    "draw",
    "events_of",
    "figures_of",
    "panel_of",
    "plot",
    "render",
    "summary",
    "write_trace",
]
