"""Finds the first place where a parallel job computes something else than one device does.

``fleetpipe locate SCRIPT`` runs a script on its ranks, then the same script at degrees 1, its twin,
and compares what both have computed. Start with ``command``; a job and its twin are processes of
their own, of which only files stay:

1. ``collecting`` puts hooks on layers, losses, backward and optimizers; ``recorder`` names what
   passes there by its meaning (layer, micro-batch, which of its tensors), and ``record`` keeps it;
2. ``twin`` sets a script to degrees 1, and gives each of its steps the job's weights, data and
   gradients: every step, and every phase of it, is compared by itself;
3. ``rows`` and ``layouts`` say which part of the twin's tensors a rank has;
4. ``comparison`` goes through the phases of a step; a difference counts beyond what a second twin
   shows, whose numbers were changed in the last place (``tolerance``);
5. ``causes`` says in a sentence what the difference looks like.

``record``, ``rows``, ``layouts``, ``assembly``, ``tolerance``, ``comparison``, ``parameters`` and
``causes`` load no Paddle.
"""

from __future__ import annotations
