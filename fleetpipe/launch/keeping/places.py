"""Which host of the next life gets which place, and who gives back the memory of a lost one.

The host behind another one, in a ring, has its neighbour's states. A host that comes new, or comes
back without its memory, takes the place of one that is missing and is given that one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Claim(NamedTuple):
    """Where a host was, in the last life in which it took part.

    Attributes:
        life: The number of the life; 0: in none.
        nodes: Hosts that took part in it.
        node: The number of this one.
    """

    life: int = 0
    nodes: int = 0
    node: int = 0


def placed(claims: Sequence[Claim], nodes: int) -> list[int]:
    """Returns which of some hosts have the places 1 to ``nodes - 1``, by number.

    A host keeps the place that it had among as many; of two the one that had it later.

    Args:
        claims: Of the hosts that follow, as they came.
        nodes: Hosts of the next life, with the leading one; at most one more than there are claims.
    """
    found: dict[int, int] = {}
    for host in sorted(range(len(claims)), key=lambda host: -claims[host].life):
        if claims[host].nodes == nodes and claims[host].node > 0:
            found.setdefault(claims[host].node, host)
    others = iter([host for host in range(len(claims)) if host not in found.values()])
    return [found[node] if node in found else next(others) for node in range(1, nodes)]


def given_back(claims: Sequence[Claim]) -> list[tuple[int, int]]:
    """Returns who has to give its memory of its neighbour to whom, as pairs of places.

    Args:
        claims: Of all hosts of the next life, by place.
    """
    nodes = len(claims)
    last = max((claim.life for claim in claims if claim.nodes == nodes), default=0)
    kept = [last > 0 and claim == Claim(last, nodes, node) for node, claim in enumerate(claims)]
    return [
        ((node + 1) % nodes, node)
        for node in range(nodes)
        if not kept[node] and kept[(node + 1) % nodes]
    ]
