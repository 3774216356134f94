"""Mixtures of experts: routes tokens to experts, which may be on other ranks.

``routing.py`` decides which choices an expert has room for; start there. ``exchange.py`` sends
tokens to experts of other ranks; Paddle's layers call both through ``replacements.py``.
``auxiliary_loss.py`` carries losses of gates to the loss, ``mixture_kind.py`` names all experts.
"""

from __future__ import annotations

from fleetpipe.contrib.experts.auxiliary_loss import AuxiliaryLoss
from fleetpipe.contrib.experts.expert_layers import ExpertList, Experts

__all__ = ["AuxiliaryLoss", "ExpertList", "Experts"]
