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


class Gift(NamedTuple):
    """What one host gives another one before a life begins.

    Attributes:
        giver: The place of the one.
        node: That of the other.
        held: Whether it is what the giver has of the other's ranks.
        kept: Whether it is, also, what it has of its own.
    """

    giver: int
    node: int
    held: bool
    kept: bool


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


def gifts(claims: Sequence[Claim]) -> list[Gift]:
    """Returns who has to give what, so that hosts without memory have what was lost with it.

    The host behind such a one gives back what it has of it, the one before it what it has itself:
    so the next loss may come before the next copies.

    Args:
        claims: Of all hosts of the next life, by place.
    """
    nodes = len(claims)
    last = max((claim.life for claim in claims if claim.nodes == nodes), default=0)
    has = [last > 0 and claim == Claim(last, nodes, node) for node, claim in enumerate(claims)]
    found = []
    for node in (node for node in range(nodes) if not has[node]):
        behind, before = (node + 1) % nodes, (node - 1) % nodes
        if has[behind]:
            found.append(Gift(behind, node, held=True, kept=behind == before))
            if has[before] and before != behind:
                found.append(Gift(before, node, held=False, kept=True))
    return found
