"""Schedules as values: build, verify, simulate, draw and lower them. Imports no Paddle.

Users import from here; drawings and traces are in ``forms``. To read the package, begin at the
bottom with ``action.py``, ``placement.py`` and ``rows.py``. A file imports lower layers only
(``tests/test_house.py``)::

    commands
    registry                                by name: build, register
    api                                     Schedule and Plan with their methods
    check     forms
    simulation
    families  explain
    action placement costs rows
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetpipe.extras import late
from fleetpipe.schedules.action import (
    Action,
    Free,
    Fused,
    Item,
    Op,
    Recv,
    Reduce,
    Send,
    SliceNumber,
    Step,
)
from fleetpipe.schedules.api import Plan, Schedule, forward_only
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.placement import Dependencies, Edge, Placement, chain
from fleetpipe.schedules.registry import (
    build,
    build_verified,
    canonical_name,
    names,
    option_names,
    rebuild,
    register,
)
from fleetpipe.schedules.simulation import Timeline

if TYPE_CHECKING:
    from fleetpipe.schedules.forms.terminal import render as render
else:
    __getattr__ = late({"render": "fleetpipe.schedules.forms.terminal"})

__all__ = [
    "Action",
    "Costs",
    "Dependencies",
    "Edge",
    "Free",
    "Fused",
    "Item",
    "Op",
    "Placement",
    "Plan",
    "Recv",
    "Reduce",
    "Schedule",
    "Send",
    "SliceNumber",
    "Step",
    "Timeline",
    "build",
    "build_verified",
    "canonical_name",
    "chain",
    "forward_only",
    "names",
    "option_names",
    "rebuild",
    "register",
    "render",
]


def __dir__() -> list[str]:
    """Returns the names of the package, those that are loaded late among them."""
    return sorted({*globals(), *__all__})
