"""``fleetpipe new``: a project to begin with, made of the text files that are here.

``command.py`` makes it. The files end in ``.txt``, for they are no part of the package, and say
themselves what they are for. No Paddle is needed.
"""
