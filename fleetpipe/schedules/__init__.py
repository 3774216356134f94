"""Schedules as values: build, verify, simulate, draw and lower them. Imports no Paddle."""

from __future__ import annotations

from .action import Action, Fused, Item
from .costs import Costs
from .dependencies import Dependencies, Edge, chain
from .forward_only import forward_only
from .operations import Free, Op, Recv, Reduce, Send, Step
from .placement import Placement
from .plan import Plan
from .registry import build, canonical_name, names
from .render import render
from .schedule import Schedule
from .simulate import Timeline
from .verified import build_verified

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
    "Step",
    "Timeline",
    "build",
    "build_verified",
    "canonical_name",
    "chain",
    "forward_only",
    "names",
    "render",
]
