"""Running statistics of replicas: each has those of its own part of the data.

The first replica's are the model's. What another one has otherwise stands in a group of its own, as
``1/model/3._mean``, and is that replica's again where there are as many replicas as then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetpipe.checkpoint.contents.parts import REPLICAS, Held, Name, Saved
from fleetpipe.checkpoint.files import host_memory, tensors
from fleetpipe.checkpoint.ranks import Ranks


def with_own(ranks: Ranks, what: str, held: Mapping[Name, Held]) -> Mapping[Name, Held]:
    """Returns what this rank holds, and what its replica has otherwise than the first one.

    Collective where there are replicas.

    Args:
        ranks: All ranks of the job.
        what: What is done, for messages.
        held: What this rank holds.

    Raises:
        CheckpointError: Some rank cannot read its memory; every rank raises.
    """
    if ranks.replicas == 1:
        return held
    (member, _), (replica, _), _ = ranks.place
    mine = {name: one for name, one in held.items() if one.differs}

    def sums() -> list[Any]:
        return [member, replica, [[*name, _checksum(one)] for name, one in mine.items()]]

    everyone = ranks.together(what, sums)
    found = {
        (theirs, of, Name(group, name)): checksum
        for of, theirs, rows in everyone
        for group, name, checksum in rows
    }
    others = {
        (theirs, name)
        for (theirs, of, name), checksum in found.items()
        if checksum != found.get((0, of, name), checksum)
    }
    several: dict[Name, set[int]] = {}
    for (*_, name), checksum in found.items():
        several.setdefault(name, set()).add(checksum)
    # Of what is the same everywhere, as frozen parameters are, the ranks share the writing.
    shared = {name: one._replace(differs=len(several[name]) > 1) for name, one in mine.items()}
    own = {_of_replica(replica, name): mine[name] for name in mine if (replica, name) in others}
    return {**held, **shared, **own}


def own_wanted(ranks: Ranks, wanted: Mapping[Name, Held], saved: Saved) -> Mapping[Name, Held]:
    """Returns what is to be filled, of which this replica's own statistics come from its own.

    Args:
        ranks: All ranks of the job.
        wanted: What is to be filled, by the names of the first replica's.
        saved: What the checkpoint has.
    """
    if ranks.replicas != saved.replicas:
        return wanted
    replica, _ = ranks.place[1]
    own = {name: _of_replica(replica, name) for name, held in wanted.items() if held.differs}
    found = {name: other for name, other in own.items() if other in saved.tensors}
    return {found.get(name, name): held for name, held in wanted.items()}


def _of_replica(replica: int, name: Name) -> Name:
    return Name(REPLICAS, f"{replica}/{name.group}/{name.name}")


def _checksum(held: Held) -> int:
    kept, memory = host_memory.bytes_of(held)
    found = tensors.checksum([memory])
    del kept
    return found
