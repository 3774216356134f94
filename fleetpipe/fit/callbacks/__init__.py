"""Callbacks for ``Model.fit`` on ranks; ``fleetpipe.callbacks`` is their public name.

``rank_policy.py`` says which rank runs a callback. The others are one callback each.
"""
