"""Trains a captured model beside the untouched one before it is used.

Start with ``prove``: a plain loop over the user's own model yields the moments of a training, and
the captured stages under a schedule must yield the same ones.
"""

from fleetpipe.capture.proof.prove import Proof, planned_schedule, prove

__all__ = ["Proof", "planned_schedule", "prove"]
