"""The axes along which ranks are split, and groups of the ranks along them.

Start with ``axes.py``: the axes, their degrees, and every rank's coordinates. ``groups.py`` has the
collective operations, and ``parts.py`` says which part of a parameter a rank holds.
"""

from fleetpipe.mesh.axes import AXES, COPIES, REPLICA, Coordinate, Degrees, Mesh
from fleetpipe.mesh.groups import DirectGroup, GlooGroup, Group, SoleGroup

__all__ = [
    "AXES",
    "COPIES",
    "REPLICA",
    "Coordinate",
    "Degrees",
    "DirectGroup",
    "GlooGroup",
    "Group",
    "Mesh",
    "SoleGroup",
]
