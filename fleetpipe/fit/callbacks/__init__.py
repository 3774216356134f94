"""Callbacks for ``Model.fit`` on ranks; ``fleetpipe.callbacks`` is their public name.

``callback_list.py`` makes the list that a loop calls, and ``rank_policy.py`` decides which rank
runs a callback. Each other module has callbacks.
"""
