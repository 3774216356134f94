"""Finds the first place where a parallel job computes other numbers than one device.

``fleetpipe locate SCRIPT`` runs a script on its ranks, then the same script at degrees 1, its twin,
and compares their tensors. Start with ``locate_command``; the job and its twin run in separate
processes, which leave files:

1. ``collecting`` puts hooks on layers, losses, backward and optimizers; ``recorder`` names their
   tensors by their meaning (layer, micro-batch, which tensor), and ``record`` stores them;
2. ``twin`` runs a script at degrees 1, and gives each of its steps the job's weights, data and
   gradients: every phase of every step is compared by itself;
3. ``rows`` and ``layouts`` find the part of the twin's tensors that a rank has;
4. ``comparison`` goes through the phases of a step (``flow`` has what goes through layers,
   ``parameters`` the rest, ``step`` what both need); a difference counts if it is larger than that
   of a second twin, whose numbers were changed in the last place;
5. ``causes`` describes the likely cause in a sentence.
"""

from __future__ import annotations
