"""How schedules are written and drawn: as text, in a terminal, as a trace and as a picture.

Users import events, pictures and traces from here; ``text.py`` is behind ``str(schedule)`` and
``Schedule.parse``. To draw measured steps, begin with :class:`Event`. Pictures are in
``fleetpipe.contrib.pictures``, which is loaded when one is drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetpipe.extras import late

if TYPE_CHECKING:
    from fleetpipe.contrib.pictures import Panel as Panel
    from fleetpipe.contrib.pictures import panel_of as panel_of
    from fleetpipe.contrib.pictures.picture import draw as draw
    from fleetpipe.contrib.pictures.picture import plot as plot
    from fleetpipe.schedules.forms.terminal import render as render
    from fleetpipe.schedules.forms.terminal import summary as summary
    from fleetpipe.schedules.forms.trace import Event as Event
    from fleetpipe.schedules.forms.trace import Figures as Figures
    from fleetpipe.schedules.forms.trace import chrome_trace as chrome_trace
    from fleetpipe.schedules.forms.trace import events_of as events_of
    from fleetpipe.schedules.forms.trace import figures_of as figures_of
    from fleetpipe.schedules.forms.trace import write_trace as write_trace

_MODULES = {
    "fleetpipe.contrib.pictures": ("Panel", "panel_of"),
    "fleetpipe.contrib.pictures.picture": ("draw", "plot"),
    "fleetpipe.schedules.forms.trace": (
        *("Event", "Figures", "chrome_trace"),
        *("events_of", "figures_of", "write_trace"),
    ),
    "fleetpipe.schedules.forms.terminal": ("render", "summary"),
}

__all__ = [name for names in _MODULES.values() for name in names]

if not TYPE_CHECKING:  # to a type checker it would give the package every name
    __getattr__ = late({name: module for module, names in _MODULES.items() for name in names})
