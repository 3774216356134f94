"""Proves, before a captured model is used, that it trains to the bits of the untouched model.

Start with ``prove``: ``training`` trains the untouched model by a plain loop and the captured
stages under a schedule, and compares outputs, gradients and state after each step.
"""

from fleetpipe.capture.proof.prove import Proof, planned_schedule, prove

__all__ = ["Proof", "planned_schedule", "prove"]
