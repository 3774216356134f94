"""Refuses parts of a model outside of its list of layers, and hidden uses between stages.

The functions refuse additions around the list, such as hooks or unlisted parameters.
:class:`HiddenUses` finds stages that use parameters or values of other ranks' stages. In one
process all stages share memory, as several ranks do not, and such a use would go unnoticed: so a
parameter is made unusable for the stages of ranks that do not have its layer.
"""

from __future__ import annotations

import argparse
import functools
import gc
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
from paddle.distributed.fleet.meta_parallel.meta_parallel_base import MetaParallelBase

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.dygraph.function_code import is_installed, is_of_library, variables_of
from fleetpipe.dygraph.layers.tied import SharedLayer, is_shared
from fleetpipe.dygraph.state.names import ModelWithParts
from fleetpipe.errors import BoundaryError, ConfigError, listed
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import forward_hooks
from fleetpipe.paddle_api.tensor import is_out_of_reach, is_parameter, out_of_reach

#: Types of objects into which a user's code may put values.
_PLACES = (dict, list, types.CellType, type)
_CACHE = type(functools.lru_cache(len))
_HOLDERS = (
    *(*_PLACES, tuple, set, deque, types.MethodType, types.SimpleNamespace, argparse.Namespace),
    *(functools.partial, _CACHE, paddle.nn.Layer),
)


def refuse_untied(
    parameters: Mapping[str, Tensor],
    built: Mapping[str, Tensor],
    tied: Sequence[SharedLayer],
    rank_of_layer: Callable[[int], int],
) -> None:
    """Refuses new trained parameters in a shared layer of which several ranks have copies.

    Args:
        parameters: This process's parameters by fully qualified name.
        built: The parameters that it had when the model was built.
        tied: The shared layers of the list.
        rank_of_layer: Returns the rank that owns a layer, from its number.
    """
    spread = [one for one in tied if len({rank_of_layer(i) for i in one.indices}) > 1]
    names = {name for one in spread for name in one.names.values()}
    paths = tuple(f"{one.path}." for one in spread)
    present, before = ({id(p) for p in held.values()} for held in (parameters, built))
    changed = [name for name, p in built.items() if name in names and id(p) not in present]
    changed += [
        name
        for name, p in parameters.items()
        if name.startswith(paths) and not p.stop_gradient and id(p) not in before
    ]
    if changed:
        raise ConfigError(
            "a layer that several ranks share was given other parameters",
            got=listed(changed),
            cause="each rank would train a copy of its own: what ranks share is said by the "
            "SharedLayerDesc when the model is built",
            fix="leave shared layers as they are, or freeze what is put into them; or build them "
            "with it, by a class of your own in the SharedLayerDesc",
        )


def refuse_own_forward(model: Layer, forward: Callable[..., Any]) -> None:
    """Refuses a model with its own ``forward``; the argument is that of ``PipelineLayer``.

    Fleet's wrapper calls it once on each rank, so its effect would depend on their number.
    """
    if getattr(model.forward, "__func__", None) is not forward:
        raise ConfigError(
            "a batch runs the layers of the list, and no forward of the model's own",
            got=f"{type(model).__name__}.forward",
            fix="make what it does a layer or a function of the list, and leave forward out",
        )


def refuse_hooks(model: Layer) -> None:
    """Refuses forward hooks on a whole model: a batch calls its layers, never the model itself."""
    hooks = [hook for of_one in forward_hooks(model) for hook in of_one.values()]
    if hooks:
        raise ConfigError(
            "a batch runs the layers of the list, and no forward hook of the whole model",
            got=listed([getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks]),
            cause="register_forward_pre_hook or register_forward_post_hook of the model",
            fix="make what it does a function of the list; or register it on a layer of the "
            "list; remove() it where it is for direct calls alone",
        )


def refuse_apart(
    layers: Mapping[int, tuple[int, int]], elsewhere: Mapping[int, tuple[int, int]]
) -> None:
    """Refuses built layers that another pipeline of the job has on other ranks.

    Args:
        layers: The number in the list and the rank of each built layer with parameters, by its id.
        elsewhere: The numbers and ranks of the other pipeline's layers, by id.
    """
    for layer, (number, rank) in layers.items():
        other, other_rank = elsewhere.get(layer, (number, rank))
        if other_rank != rank:
            raise ConfigError(
                "a built layer stands in two pipelines, which have it on different ranks",
                where=f"layer {number} of this list, layer {other} of the other",
                got=f"rank {rank} here, rank {other_rank} there",
                cause="each rank has a layer of its own: one is trained, the other stays as it was",
                fix="cut both lists with seg_method=[..] so that layers of both are on the same "
                "ranks, or train them in one process",
            )


def refuse_unlisted(parameters: Mapping[str, Tensor], of_losses: Sequence[Tensor]) -> None:
    """Refuses trained parameters outside of the list, because no stage would use them.

    Args:
        parameters: This process's parameters by fully qualified name.
        of_losses: The parameters of loss functions, which may also be attributes of the model.
    """
    names = [
        name
        for name, parameter in parameters.items()
        if not (is_shared(name) or name.partition(".")[0].isdecimal() or parameter.stop_gradient)
        and not any(parameter is one for one in of_losses)
    ]
    if names:
        raise ConfigError(
            "the model has trained parameters that are of no layer of its list",
            got=listed(names),
            cause="a layer was registered beside the list, after super().__init__() say: no stage "
            "runs it",
            fix="add the layer to the list, or freeze its parameters",
        )


class _OfAnotherStage:
    """Replaces a value that another rank's stage has stored; any use of it raises an error."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __getattribute__(self, name: str) -> Any:
        raise _refusal(object.__getattribute__(self, "key"))

    __bool__ = __len__ = __iter__ = __float__ = __array__ = lambda self: self.key


class _Left(NamedTuple):
    """A value that a stage of ``rank`` has stored, and the object that replaces it elsewhere."""

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
    """Returns the error of a stage that uses parameters of other ranks."""
    return ConfigError(
        "stages use parameters that are of no layer of theirs",
        got=names,
        cause="a function, the loss or an attribute holds a layer that is elsewhere in the list, "
        "or nowhere: on ranks each would train a copy of its own",
        fix="describe all uses of such a layer as SharedLayerDesc with one key; make a free "
        "parameter that of a layer in the list",
    )


class HiddenUses:
    """Finds uses of parameters and values of other ranks; implements ``StageWatch``."""

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
            functions: The layers and functions of the list that this process has, by owning rank.
            owners: For each parameter, by id, the ranks that have a layer with it.
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

        #: For each rank, the trained parameters that its stages can reach but may not use.
        self._foreign: dict[int, list[Any]] = {
            rank: [value for value in reached[rank].values() if is_foreign(value, rank)]
            for rank in {*here} & reached.keys()
        }
        self._apart = ExitStack()
        self._rank: int | None = None
        self._is_first = True
        self._on_ranks = len(here) < len(functions)
        every = {key: value for values in reached.values() for key, value in values.items()}
        # Values in the cache of a function are allowed: a rank without them calls the function.
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
        """Whether a stage can reach parameters or values of other ranks."""
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
        """Restores all hidden parameters and values, because no stage runs.

        Args:
            ends: Whether the batch is over; stored values are inspected in the first batch only.
        """
        self._note_left()
        self._show(None)
        self._apart.close()
        self._rank = None
        if ends:
            self._places, self._before, self._left, self._is_first = [], [], {}, False

    def _note_left(self) -> None:
        """Records values that the last stage has stored within reach of other ranks' functions."""
        for number, place in enumerate(self._places):
            before, now = self._before[number], dict(_content(place))
            for key, value in now.items():
                if self._rank is not None and before.get(key) is not value and _has_values(value):
                    self._left[number, key] = _Left(self._rank, value, _OfAnotherStage(str(key)))
            self._before[number] = now

    def _show(self, rank: int | None) -> None:
        """Hides from ``rank`` the values that other ranks have stored; None restores all."""
        for (number, key), left in self._left.items():
            shown = left.value if rank in (None, left.rank) else left.stand_in
            now = self._before[number].get(key)
            if now is not shown and (now is left.value or now is left.stand_in):
                _put(self._places[number], key, shown)
                self._before[number][key] = shown

    @contextmanager
    def refused(self) -> Iterator[None]:
        """While it is open, an error due to a hidden value or parameter becomes a clear one.

        Raises:
            ConfigError: A stage has used a parameter of another rank.
            BoundaryError: A stage has used a value that another rank's stage has stored.
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
    """Returns the values in a dict, a list, a class or a closure's cell, by key."""
    if isinstance(place, dict):
        return place
    if isinstance(place, list):
        return dict(enumerate(place))
    if isinstance(place, type):
        return vars(place)
    try:
        return {"cell_contents": place.cell_contents}
    except ValueError:  # the cell is empty
        return {}


def _put(place: Any, key: Any, value: object) -> None:
    if isinstance(place, (dict, list)):
        place[key] = value
    else:
        setattr(place, key, value)


def _has_values(value: object) -> bool:
    """Whether a value is, or contains, tensors or arrays other than parameters."""
    if isinstance(value, (tuple, list, dict)):
        return any(map(_has_values, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (paddle.Tensor, np.ndarray)) and not is_parameter(value)


def reachable(roots: Iterable[object]) -> dict[int, object]:
    """Returns all objects that functions and layers can reach, themselves included, by id.

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
    """Returns the objects to which an object refers; adds a function's module to ``values``."""
    if isinstance(value, paddle.Tensor):
        return []
    if isinstance(value, types.FunctionType):
        # A function reaches only the variables of its module that it names. The module's variables
        # are added all the same, because the function may store values there.
        values[id(value.__globals__)] = value.__globals__
        parts = (value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value))
        return [*parts, *variables_of(value).values()]
    is_code = isinstance(value, (type, types.ModuleType, types.MethodType))
    if hasattr(type(value), "__dict__") and hasattr(value, "__dict__") and not is_code:
        return [vars(value), type(value), *gc.get_referents(value)]
    return gc.get_referents(value)


def _is_closed(value: Any) -> bool:
    """Whether an object belongs to a library and contains nothing of the script's."""
    if isinstance(value, (str, int, float, types.BuiltinFunctionType, types.CodeType)):
        return True
    if isinstance(value, (ModelWithParts, MetaParallelBase)):
        return True  # a pipeline itself
    if isinstance(value, _HOLDERS) and not isinstance(value, type):
        return False
    named = value if isinstance(value, (type, types.FunctionType)) else type(value)
    module = (
        value.__name__
        if isinstance(value, types.ModuleType)
        else getattr(named, "__module__", "builtins")
    )
    return (is_of_library(module) or is_installed(module)) and not is_parameter(value)
