"""Mixtures of experts: which tokens go where, and how they get there.

Start with ``operations.py``: which choices an expert has room for. ``exchange.py`` sends tokens to
the experts of other ranks; Paddle's layers call both by ``replacements.py``. ``losses.py`` carries
the losses of gates to the loss of the pipeline, and ``names.py`` is what a pipeline asks.
"""

from __future__ import annotations

from fleetpipe.contrib.experts.layer import ExpertList, Experts
from fleetpipe.contrib.experts.losses import AuxiliaryLoss

__all__ = ["AuxiliaryLoss", "ExpertList", "Experts"]
