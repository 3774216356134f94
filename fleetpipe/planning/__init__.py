"""From what a model's layers cost to a plan: cut, placement, schedule, and what is recomputed.

Needs no Paddle. Begin with ``making.py``. ``profile.py`` and ``plan.py`` are the values, ``stages``
and ``memory`` say what a choice costs, ``candidates`` what may be chosen, ``search`` chooses.
"""

from __future__ import annotations

from fleetpipe.planning.explaining import Predicted
from fleetpipe.planning.layer_cost import LayerCost, Link, Transfer
from fleetpipe.planning.making import fastest_cut, plan, recosted
from fleetpipe.planning.plan import PipelinePlan
from fleetpipe.planning.profile import Profile
from fleetpipe.planning.stages import StageCost

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
