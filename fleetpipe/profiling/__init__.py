"""Plans a pipeline from its layers' costs: cut, placement, schedule, and the layers to recompute.

Needs no Paddle. Begin with ``planner.py``, which picks the best of the choices in ``candidates``.
``profile.py`` and ``plan.py`` have the values that users get; ``cost_model`` and ``memory`` compute
the costs of a choice.
"""

from __future__ import annotations

from fleetpipe.profiling.cost_model import LayerCost, Link, ProcessMemory, StageCost, Transfer
from fleetpipe.profiling.plan import PipelinePlan, Predicted
from fleetpipe.profiling.planner import fastest_cut, plan, recosted
from fleetpipe.profiling.profile import Profile
from fleetpipe.profiling.splits import LayerDegrees

__all__ = [
    "LayerCost",
    "LayerDegrees",
    "Link",
    "PipelinePlan",
    "Predicted",
    "ProcessMemory",
    "Profile",
    "StageCost",
    "Transfer",
    "fastest_cut",
    "plan",
    "recosted",
]
