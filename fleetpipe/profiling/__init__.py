"""From what a model's layers cost to a plan: cut, placement, schedule, and what is recomputed.

Needs no Paddle. Begin with ``making.py``. ``profile.py`` and ``plan.py`` are the values, ``stages``
and ``memory`` say what a choice costs, ``candidates`` what may be chosen, ``search`` chooses.
"""

from __future__ import annotations

from fleetpipe.profiling.explaining import Predicted
from fleetpipe.profiling.layer_cost import LayerCost, Link, Transfer
from fleetpipe.profiling.plan import PipelinePlan
from fleetpipe.profiling.planner import fastest_cut, plan, recosted
from fleetpipe.profiling.profile import Profile
from fleetpipe.profiling.stages import StageCost

__all__ = [
    "LayerCost",
    "Link",
    "PipelinePlan",
    "Predicted",
    "Profile",
    "StageCost",
    "Transfer",
    "fastest_cut",
    "plan",
    "recosted",
]
