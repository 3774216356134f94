"""Callbacks for ``Model.fit`` on ranks; ``fleetpipe.callbacks`` is their public name.

``rank_policy.py`` decides which rank runs a callback. Each other module is one callback.
"""
