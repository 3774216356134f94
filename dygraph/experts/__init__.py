"""Mixtures of experts: which tokens go where, and how they get there.

Start with ``operations.py``: which choices an expert has room for. ``exchange.py`` sends tokens to
the experts of other ranks, ``replacements.py`` puts both in the place of Paddle's.
"""

from __future__ import annotations

from fleetpipe.dygraph.experts.parameters import fill_gradients
from fleetpipe.dygraph.experts.replacements import install

__all__ = ["fill_gradients", "install"]
