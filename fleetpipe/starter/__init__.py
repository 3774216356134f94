"""``fleetpipe new``: a project to begin with, made of the files in ``template/``.

``command.py`` makes it. The files end in ``.txt``, for they are no part of the package; what they
are for stands in the project's own README. No Paddle is needed.
"""
