"""``fleetpipe new``: writes a new project from the text files in this folder.

``new_command.py`` writes it. The files end in ``.txt``, as they are not a part of the package. No
Paddle is needed.
"""
