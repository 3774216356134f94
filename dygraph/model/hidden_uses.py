"""Uses by stages, past the list of layers, of other ranks' weights and values.

In one process all stages share one memory, but ranks do not. So a weight is made unusable for
stages that are not on a rank with its layer. In the first batch a value is hidden from other ranks'
stages if a stage leaves it in a place that functions of both can reach, such as a dict's entry.
"""

from __future__ import annotations

import argparse
import functools
import gc
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
from paddle.distributed.fleet.meta_parallel.meta_parallel_base import MetaParallelBase

from fleetpipe.dygraph.code_names import is_installed, is_of_library, variables_of
from fleetpipe.dygraph.state.names import ModelWithParts
from fleetpipe.errors import BoundaryError, ConfigError, listed
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.tensor import is_out_of_reach, is_parameter, out_of_reach

#: Kinds that hold what a user's code puts there.
_PLACES = (dict, list, types.CellType, type)
_CACHE = type(functools.lru_cache(len))
_HOLDERS = (
    *(*_PLACES, tuple, set, deque, types.MethodType, types.SimpleNamespace, argparse.Namespace),
    *(functools.partial, _CACHE, paddle.nn.Layer),
)


class _OfAnotherStage:
    """Replaces a value that another rank's stage has left; any use of it raises an error."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __getattribute__(self, name: str) -> Any:
        raise _refusal(object.__getattribute__(self, "key"))

    __bool__ = __len__ = __iter__ = __float__ = __array__ = lambda self: self.key


class _Left(NamedTuple):
    rank: int
    value: object
    stand_in: _OfAnotherStage


def _refusal(keys: str) -> BoundaryError:
    return BoundaryError(
        "a stage looks for a value that another stage leaves beside what it returns",
        got=keys,
        cause="a layer keeps it in a dict, in a list of its module or in an attribute: on ranks it "
        "is not there, and in one process it may be that of another micro-batch",
        fix="return it with the output, (output, kept), and have the layers behind hand it on",
    )


def _stray(names: str) -> ConfigError:
    return ConfigError(
        "stages use parameters that are of no layer of theirs",
        got=names,
        cause="a function, the loss or an attribute holds a layer that is elsewhere in the list, "
        "or nowhere: on ranks each would train a copy of its own",
        fix="describe all uses of such a layer as SharedLayerDesc with one key; make a free "
        "parameter that of a layer in the list",
    )


class HiddenUses:
    """Finds layers' uses of parameters and values that other ranks have."""

    def __init__(
        self,
        functions: Mapping[int, Iterable[object]],
        owners: Mapping[int, Collection[int]],
        names: Mapping[int, str],
        rank_of: Callable[[int], int],
        here: Collection[int],
    ) -> None:
        """Searches the values that the functions of this process can reach.

        Args:
            functions: The layers and functions of each rank's stages that this process has, by
                rank.
            owners: The ranks that have a layer with a parameter, by the parameter's id.
            names: The fully qualified name of each parameter, by its id.
            rank_of: Returns the rank that has a stage.
            here: The ranks that this process plays.
        """
        self._names, self._rank_of = names, rank_of
        reached = {rank: reachable(roots) for rank, roots in functions.items()}
        near: dict[int, set[int]] = {}
        for rank, values in reached.items():
            for key in values:
                near.setdefault(key, set()).add(rank)

        def is_foreign(value: Any, rank: int) -> bool:
            ranks = near[id(value)]
            allowed = owners.get(id(value), ranks if len(ranks) == 1 else ())
            return is_parameter(value) and not value.stop_gradient and rank not in allowed

        #: By rank, the trained parameters within its reach that its stages may not use.
        self._foreign: dict[int, list[Any]] = {
            rank: [value for value in reached[rank].values() if is_foreign(value, rank)]
            for rank in {*here} & reached.keys()
        }
        self._apart = ExitStack()
        self._rank: int | None = None
        self._is_first = True
        self._on_ranks = len(here) < len(functions)
        every = {key: value for values in reached.values() for key, value in values.items()}
        # A rank without an entry of a function's cache calls the function.
        caches = [one for one in every.values() if isinstance(one, _CACHE)]
        cached = {id(one) for one in gc.get_referents(*caches)}
        self._places = [
            value
            for key, value in every.items()
            if len(here) > 1 and len(near[key]) > 1 and isinstance(value, _PLACES)
            if key not in cached
        ]
        self._before = [dict(_content(place)) for place in self._places]
        self._left: dict[tuple[int, Any], _Left] = {}

    @property
    def watches(self) -> bool:
        """Whether anything is hidden from a stage, or may have to be."""
        return bool(self._places or any(self._foreign.values()))

    def enter(self, stage: int, forward: bool) -> None:
        """Called when an action of a stage begins."""
        self._note_left()
        rank = self._rank_of(stage)
        self._show(rank if forward else None)
        if rank != self._rank:
            self._apart.close()
            self._apart.enter_context(out_of_reach(self._foreign.get(rank, ())))
        self._rank = rank

    def leave(self, ends: bool = False) -> None:
        """Restores everything hidden, because no stage runs.

        Args:
            ends: Whether the first batch is over; later values that stages leave are not inspected.
        """
        self._note_left()
        self._show(None)
        self._apart.close()
        self._rank = None
        if ends:
            self._places, self._before, self._left, self._is_first = [], [], {}, False

    def _note_left(self) -> None:
        """Records the values that the last stage left where functions of other ranks reach them."""
        for number, place in enumerate(self._places):
            before, now = self._before[number], dict(_content(place))
            for key, value in now.items():
                if self._rank is not None and before.get(key) is not value and _has_values(value):
                    self._left[number, key] = _Left(self._rank, value, _OfAnotherStage(str(key)))
            self._before[number] = now

    def _show(self, rank: int | None) -> None:
        """Hides the values that other ranks have left from ``rank``; None restores all."""
        for (number, key), left in self._left.items():
            shown = left.value if rank in (None, left.rank) else left.stand_in
            now = self._before[number].get(key)
            if now is not shown and (now is left.value or now is left.stand_in):
                _put(self._places[number], key, shown)
                self._before[number][key] = shown

    @contextmanager
    def refused(self) -> Iterator[None]:
        """While it is open, errors due to hidden values or weights are replaced by clear ones.

        Raises:
            ConfigError: A stage has used a parameter of another rank, with or without its gradient.
            BoundaryError: A stage has looked for a value that another one left.
        """
        try:
            yield
        except Exception as error:
            foreign = [] if self._rank is None else self._foreign.get(self._rank, [])
            if foreign and is_out_of_reach(error):
                names = listed([self._names.get(id(one), one.name) for one in foreign])
                raise _stray(f"one of {names} on rank {self._rank}") from error
            if _OfAnotherStage.__name__ in str(error):
                raise _refusal(listed([str(key) for _, key in self._left])) from error
            nothing = isinstance(error, (LookupError, AttributeError, NameError))
            if self._on_ranks and self._is_first and nothing:
                raise _refusal(f"{type(error).__name__}: {error}") from error
            raise


def _content(place: Any) -> Mapping[Any, object]:
    if isinstance(place, dict):
        return place
    if isinstance(place, list):
        return dict(enumerate(place))
    if isinstance(place, type):
        return vars(place)
    try:
        return {"cell_contents": place.cell_contents}
    except ValueError:  # it is empty
        return {}


def _put(place: Any, key: Any, value: object) -> None:
    if isinstance(place, (dict, list)):
        place[key] = value
    else:
        setattr(place, key, value)


def _has_values(value: object) -> bool:
    """Whether a value is, or contains, tensors or arrays; a count or a name does not matter."""
    if isinstance(value, (tuple, list, dict)):
        return any(map(_has_values, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (paddle.Tensor, np.ndarray)) and not is_parameter(value)


def reachable(roots: Iterable[object]) -> dict[int, object]:
    """Returns all objects that functions and layers can reach, by id, including themselves.

    The search follows the names, closures and bound objects of functions, attributes and
    containers. It does not enter libraries and installed packages, except for objects that the
    script has put there.
    """
    values: dict[int, object] = {}
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) not in values and not _is_closed(value):
            values[id(value)] = value
            waiting += _next(value, values)
    return values


def _next(value: Any, values: dict[int, object]) -> list[Any]:
    if isinstance(value, paddle.Tensor):
        return []
    if isinstance(value, types.FunctionType):
        # Of its module it sees what it names; the module itself is a place all the same.
        values[id(value.__globals__)] = value.__globals__
        parts = (value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value))
        return [*parts, *variables_of(value).values()]
    if hasattr(type(value), "__dict__") and hasattr(value, "__dict__") and not _is_code(value):
        return [vars(value), type(value), *gc.get_referents(value)]
    return gc.get_referents(value)


def _is_code(value: object) -> bool:
    return isinstance(value, (type, types.ModuleType, types.MethodType))


def _is_closed(value: Any) -> bool:
    """Whether an object belongs to a library and contains nothing of the script's."""
    if isinstance(value, (str, int, float, types.BuiltinFunctionType, types.CodeType)):
        return True
    if isinstance(value, (ModelWithParts, MetaParallelBase)):
        return True  # the pipeline itself
    if isinstance(value, _HOLDERS) and not isinstance(value, type):
        return False
    named = value if isinstance(value, (type, types.FunctionType)) else type(value)
    module = (
        value.__name__
        if isinstance(value, types.ModuleType)
        else getattr(named, "__module__", "builtins")
    )
    return (is_of_library(module) or is_installed(module)) and not is_parameter(value)
