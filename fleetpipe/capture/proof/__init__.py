"""Trains a captured model beside the untouched one before anything is trusted to it.

Start with ``prove``: a plain loop over the user's own model gives the moments of a training, and
the captured stages under a schedule have to give the same ones.
"""

from fleetpipe.capture.proof.prove import Proof, prove
from fleetpipe.capture.proof.schedule import planned_schedule

__all__ = ["Proof", "planned_schedule", "prove"]
