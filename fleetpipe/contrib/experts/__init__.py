"""Mixtures of experts: routes tokens to experts, which may be on other ranks.

``operations.py`` decides which choices an expert has room for; start there. ``exchange.py`` sends
tokens to experts of other ranks; Paddle's layers call both through ``replacements.py``.
``losses.py`` carries losses of gates to the pipeline's loss, ``names.py`` names all experts.
"""

from __future__ import annotations

from fleetpipe.contrib.experts.layer import ExpertList, Experts
from fleetpipe.contrib.experts.losses import AuxiliaryLoss

__all__ = ["AuxiliaryLoss", "ExpertList", "Experts"]
