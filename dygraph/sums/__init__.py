"""Sums the gradients of a batch by trees, whose bits no schedule, cut or degree changes.

Start with ``gradient_trees.py``; ``fleetpipe.mesh.sums`` has the rule.
"""
