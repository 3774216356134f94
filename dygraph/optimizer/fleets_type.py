"""The type of Fleet's optimizer, for users' ``isinstance``, with no method of it in reach.

They work on what its constructor sets up, which is never called here. Fleet's trainers look at some
of that first: see the attributes.
"""

from __future__ import annotations

from typing import Any, NoReturn

from fleetpipe.paddle_api.optimizer import HybridParallelOptimizer


class _NotThere:
    """Has Python ask ``__getattr__`` instead. Trainers may put a method of their own in its place.

    That is why it is no property: PaddleFormers' sets ``_insert_sync``, which nothing here calls.
    """

    def __get__(self, optimizer: Any, kind: type[Any]) -> NoReturn:
        raise AttributeError


_Hidden: Any = type(
    "_Hidden",
    (HybridParallelOptimizer,),
    {
        name: _NotThere()
        for name, value in vars(HybridParallelOptimizer).items()
        if callable(value) and not name.startswith("__")
    },
)


class FleetsType(_Hidden):  # type: ignore[misc]
    """What ``isinstance`` finds, and what a trainer asks before it reduces gradients itself.

    Attributes:
        _dp_enable: Whether the replicas' gradients are still to be reduced before a step; never.
        _sep_enable: Likewise, over the axis ``sep``.
        _sharding_enable: Likewise, of a sharded optimizer.
    """

    _dp_enable = False
    _sep_enable = False
    _sharding_enable = False
