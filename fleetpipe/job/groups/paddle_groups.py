"""Paddle's groups: made under the user's limit, and kept for later jobs: none can be closed.

The descriptors and threads of a group stay until its process ends, so that a job takes the groups
with its members that earlier jobs made. All ranks make the same groups in the same order, so what
one of them has kept, all of its members have; where a job failed, nothing of it is used again. A
group keeps the options that it was first made with, those of NCCL for example.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fleetpipe.errors import FleetPipeError, PeerFailed
from fleetpipe.job import meeting
from fleetpipe.job.groups import gloo
from fleetpipe.job.store import JobStore
from fleetpipe.job.watching.watch import Watch
from fleetpipe.paddle_api.topology import beginning

#: The groups of these members, in the order in which one job made them.
_kept: dict[tuple[int, ...], list[Any]] = {}
#: Whether a rank may be within a collective operation of some group, or never have made it.
_in_doubt = False


@contextmanager
def made_for(number: int, store: JobStore, watch: Watch, timeout: float) -> Iterator[None]:
    """Within it, Paddle's ``fleet.init`` makes the groups of a job. Collective over the job.

    Raises:
        PeerFailed: Paddle could not make them.
        PipelineTimeout: Some rank did not come to a group that it is a member of.
    """
    made: Counter[tuple[int, ...]] = Counter()
    world = range(meeting.world_size())
    gloo.separate_stores(store, timeout)
    limited = watch.limit(timeout, "making Paddle's groups", world)
    open_store = functools.partial(meeting.paddles_client, timeout)

    def new_group(make: Callable[..., Any], ranks: list[int], **options: Any) -> Any:
        members = tuple(sorted(ranks))
        made[members] += 1
        groups = _kept.setdefault(members, [])
        if made[members] > len(groups):
            meets = meeting.own_rank() in members and len(members) > 1
            what = f"making Paddle's group of ranks {list(members)}"
            if meets:
                key = f"fleetpipe/{number}/group/{members}/{made[members]}"
                # Whoever waits there says itself who is missing, before the watch would.
                with watch.limit(2 * timeout, what, members):
                    meeting.meet(store, key, timeout, what, watch.gone, members)
            with watch.limit(timeout, what, members if meets else world):
                groups.append(make(ranks, **options))
        return groups[made[members] - 1]

    with limited, _translated(), beginning(open_store, new_group):
        yield
    # The first rank of a group serves its store: it must not leave while others make it.
    meeting.meet(store, f"fleetpipe/{number}/groups", timeout)
    meeting.let_others_go(store, f"fleetpipe/{number}/groups/going")


def forget_where_in_doubt(number: int, store: JobStore, meet: Callable[[], None]) -> None:
    """Keeps the groups of earlier jobs only where no rank doubts them. Collective over the job.

    From here on they are in doubt until the job has ended well, see :func:`trust`.
    """
    global _in_doubt
    key = f"fleetpipe/{number}/groups/in_doubt"
    if _in_doubt:
        store.add(key, 1)
    meet()
    if store.add(key, 0):
        _kept.clear()
    _in_doubt = True


def trust(ended_well: bool) -> None:
    """Says at the end of a job whether a later one may use its groups."""
    global _in_doubt
    _in_doubt = not ended_well


#: Where the files of Paddle's and Gloo's C++ are, which their errors name.
_SOURCES = "/paddle/"


@contextmanager
def _translated() -> Iterator[None]:
    """Says in the place of Gloo or of Paddle's store what it means that they fail."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        if _SOURCES not in str(error) or isinstance(error, FleetPipeError):
            raise
        raise PeerFailed(
            "Paddle could not make its groups",
            got=str(error).strip().splitlines()[-1],
            cause="another rank died meanwhile, or the ranks cannot reach each other",
            fix="read the logs of the other ranks",
        ) from error
