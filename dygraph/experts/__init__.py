"""Mixtures of experts: which tokens go where, and how they get there.

Start with ``operations.py``: which choices an expert has room for. ``exchange.py`` sends tokens to
the experts of other ranks, ``replacements.py`` puts both in the place of Paddle's. ``losses.py``
carries the losses of gates to the loss of the pipeline.
"""

from __future__ import annotations

from fleetpipe.dygraph.experts.layer import ExpertList, Experts
from fleetpipe.dygraph.experts.losses import AuxiliaryLoss, carrying, value_of
from fleetpipe.dygraph.experts.names import (
    fill_gradients,
    is_expert,
    number_experts,
    spreads,
    whole_state,
)
from fleetpipe.dygraph.experts.replacements import install

__all__ = [
    "AuxiliaryLoss",
    "ExpertList",
    "Experts",
    "carrying",
    "fill_gradients",
    "install",
    "is_expert",
    "number_experts",
    "spreads",
    "value_of",
    "whole_state",
]
