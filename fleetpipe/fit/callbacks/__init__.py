"""Callbacks for ``Model.fit`` on ranks; ``fleetpipe.callbacks`` is their public name.

``on_ranks.py`` says which rank runs a callback. The others are one callback each.
"""
