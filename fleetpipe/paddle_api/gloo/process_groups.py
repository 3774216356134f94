"""Paddle's process groups: how Gloo's are made, connected again, and given what Gloo lacks.

The same in 2.6.2 and 3.3.x.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from paddle.base import core
from paddle.distributed import collective as _collective
from paddle.distributed import parallel as _parallel

from fleetpipe.aliases import PaddleGroup, PaddleStore
from fleetpipe.errors import StateError
from fleetpipe.paddle_api.device import device_kind

#: Paddle's modules with all their names: their stubs hide what this package reaches for.
_paddle_collective: Any = _collective
_paddle_parallel: Any = _parallel

#: More than a process makes.
_MOST_GROUPS = 1 << 16
#: This rank's index in each Gloo group and the group's size, by Paddle's number, as they were made.
_gloo_groups: dict[int, tuple[int, int]] = {}
#: A group's store must live as long as the group.
_kept_stores: list[PaddleStore] = []


def replace_gloo_stores(own_store: Callable[[int, int, int], PaddleStore] | None) -> None:
    """Makes every Gloo group use ``own_store(rank_in_group, ranks, group_id)``.

    None leaves groups without what connects them, until :func:`connect_groups`.
    """
    restore_gloo_stores()
    original = _paddle_collective._new_process_group_impl

    @functools.wraps(original)
    def new_group(
        backend: str, store: PaddleStore, rank: int, ranks: int, *more: object, **named: Any
    ) -> PaddleGroup:
        if backend == "gloo" and has_gloo():
            # The default group, which is number 0, gives no group_id.
            number = named.get("group_id", 0)
            _gloo_groups[number] = rank, ranks
            if own_store is None:
                return _Unconnected()
            store = own_store(rank, ranks, number)
            _kept_stores.append(store)
        return original(backend, store, rank, ranks, *more, **named)

    _paddle_collective._new_process_group_impl = new_group
    if own_store is None:
        # Else the default group, which this makes, uses the store that Paddle has opened.
        _paddle_parallel._new_process_group_impl = new_group


class _Unconnected:
    """What a group has until it is connected: operations that meet nobody.

    Attributes:
        refused: Why they are refused; empty while Paddle's topology tries each group once.
    """

    refused = ""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if self.refused:
            raise StateError(
                f"{name} of one of Paddle's groups meets nobody",
                cause=self.refused,
                fix="none here: the job is started again; without --heal it is so from the start",
            )
        return lambda *_, **__: SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)


def refuse_unconnected(why: str) -> None:
    """Makes operations of groups that are not connected raise an error from now on."""
    _Unconnected.refused = why


def connect_groups(own_store: Callable[[int, int, int], PaddleStore], time: int) -> None:
    """Connects every Gloo group of this process anew; their objects stay. Collective.

    Args:
        own_store: As for :func:`replace_gloo_stores`.
        time: How often that was done, and now; Paddle takes no number of a connection twice.
    """
    default = _paddle_collective._get_group_map()[0]
    groups = {0: (default.rank, default.nranks), **_gloo_groups}
    for number, (rank, ranks) in groups.items():
        store = own_store(rank, ranks, number)
        _kept_stores.append(store)
        process_group = core.ProcessGroupGloo.create(
            store, rank, ranks, time * _MOST_GROUPS + number
        )
        _paddle_collective._get_group_map()[number]._pg = process_group


def has_gloo() -> bool:
    """Whether this Paddle has Gloo: the wheels for macOS and Windows do not."""
    return isinstance(getattr(core, "ProcessGroupGloo", None), type)


def make_without_gloo(create: Callable[..., PaddleGroup]) -> None:
    """Makes ``create(store, rank, ranks, group_id)`` create the groups that lack Gloo.

    Does nothing if Gloo works: the wheels for macOS and Windows lack it, and it takes no tensors on
    a card.
    """
    if not has_gloo() or device_kind() != "cpu":
        vars(core)["ProcessGroupGloo"] = SimpleNamespace(create=create)


def complete_gloo(methods: Mapping[str, Callable[..., Any]]) -> None:
    """Replaces methods of Gloo's groups that only say that Gloo lacks them."""
    if has_gloo():
        for name, method in methods.items():
            setattr(core.ProcessGroupGloo, name, method)


def ranks_of(process_group: PaddleGroup) -> list[int]:
    """Returns the members of one of Paddle's process groups, as ranks of the job."""
    groups = _paddle_collective._group_map.values()
    return next(list(group.ranks) for group in groups if group.process_group is process_group)


def transfers(group: PaddleGroup, peer: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns functions that do the same as Paddle's ``isend`` and ``irecv`` with a member.

    In static mode, those two would add an operation to the program.
    """
    among, rank = group.process_group, group.get_group_rank(peer)

    def isend(tensor: Any) -> Any:
        return among.send(tensor, rank, False)

    def irecv(tensor: Any) -> Any:
        return among.recv(tensor, rank, False)

    return isend, irecv


def restore_gloo_stores() -> None:
    """Undoes :func:`replace_gloo_stores`, if it was called; existing groups keep theirs."""
    now = _paddle_collective._new_process_group_impl
    stock = getattr(now, "__wrapped__", now)
    _paddle_collective._new_process_group_impl = _paddle_parallel._new_process_group_impl = stock


def group_of_ring(ring_id: int) -> PaddleGroup:
    """Returns the group with a number of Paddle's; 0 is the default group."""
    return _paddle_collective._get_group_map()[ring_id]
