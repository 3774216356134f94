"""Refuses parts of a model outside of its list of layers, and hidden uses between stages.

The functions refuse what a script adds beside the list, such as hooks or parameters.
:class:`HiddenUses` finds stages that use parameters or values of other ranks' stages without
receiving them. In one process all stages share memory, and such a use would work, but not on
several ranks: so the parameters of other ranks are made unusable while a rank's stage runs.
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
from fleetpipe.paddle_api.tensor import is_missing_memory_error, is_parameter, without_memory

#: Types of objects in which a user's code may store values.
_CONTAINERS = (dict, list, types.CellType, type)
#: The type of a function with ``functools.lru_cache``.
_CACHE = type(functools.lru_cache(len))
#: Types of objects whose contents are searched, although a library has defined the type.
_ENTERED_TYPES = (
    *(*_CONTAINERS, tuple, set, deque, types.MethodType, types.SimpleNamespace, argparse.Namespace),
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
        built: The parameters that this process had when the model was built.
        tied: The shared layers of the list.
        rank_of_layer: Returns the rank that owns a layer, from its number.
    """
    on_ranks = [layer for layer in tied if len({rank_of_layer(i) for i in layer.indices}) > 1]
    names = {name for layer in on_ranks for name in layer.names.values()}
    paths = tuple(f"{layer.path}." for layer in on_ranks)
    current_ids, built_ids = {id(p) for p in parameters.values()}, {id(p) for p in built.values()}
    changed = [name for name, p in built.items() if name in names and id(p) not in current_ids]
    changed += [
        name
        for name, p in parameters.items()
        if name.startswith(paths) and not p.stop_gradient and id(p) not in built_ids
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
    """Refuses a model whose class overrides ``forward``.

    Fleet's wrapper calls it once on each rank, so its effect would depend on their number.

    Args:
        model: The model.
        forward: The forward of ``PipelineLayer``.
    """
    if getattr(model.forward, "__func__", None) is not forward:
        raise ConfigError(
            "a batch runs the layers of the list, and no forward of the model's own",
            got=f"{type(model).__name__}.forward",
            fix="make what it does a layer or a function of the list, and leave forward out",
        )


def refuse_hooks(model: Layer) -> None:
    """Refuses forward hooks on a whole model: a batch calls its layers, never the model itself."""
    hooks = [hook for table in forward_hooks(model) for hook in table.values()]
    if hooks:
        raise ConfigError(
            "a batch runs the layers of the list, and no forward hook of the whole model",
            got=listed([getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks]),
            cause="register_forward_pre_hook or register_forward_post_hook of the model",
            fix="make what it does a function of the list; or register it on a layer of the "
            "list; remove() it where it is for direct calls alone",
        )


def refuse_layers_on_different_ranks(
    layers: Mapping[int, tuple[int, int]], of_other_pipeline: Mapping[int, tuple[int, int]]
) -> None:
    """Refuses layers built by the script that another pipeline of the job has on other ranks.

    Args:
        layers: The number in this list and the rank of each layer that the script built, by id.
        of_other_pipeline: The same for the other pipeline's list.
    """
    for layer_id, (number, rank) in layers.items():
        other_number, other_rank = of_other_pipeline.get(layer_id, (number, rank))
        if other_rank != rank:
            raise ConfigError(
                "a built layer stands in two pipelines, which have it on different ranks",
                where=f"layer {number} of this list, layer {other_number} of the other",
                got=f"rank {rank} here, rank {other_rank} there",
                cause="each rank has a layer of its own: one is trained, the other stays as it was",
                fix="cut both lists with seg_method=[..] so that layers of both are on the same "
                "ranks, or train them in one process",
            )


def refuse_unlisted(parameters: Mapping[str, Tensor], of_losses: Sequence[Tensor]) -> None:
    """Refuses trained parameters of a model that are in no layer of its list: no stage uses them.

    Args:
        parameters: This process's parameters by fully qualified name.
        of_losses: The parameters of loss functions, which may also be attributes of the model.
    """
    names = [
        name
        for name, parameter in parameters.items()
        if not (is_shared(name) or name.partition(".")[0].isdecimal() or parameter.stop_gradient)
        and not any(parameter is of_loss for of_loss in of_losses)
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
    """Stands for a value that another rank's stage has stored; any use of it raises an error."""

    def __init__(self, key: str) -> None:
        """Stores the name of the value for the error."""
        self.key = key

    def __getattribute__(self, name: str) -> Any:
        raise _foreign_value_error(object.__getattribute__(self, "key"))

    __bool__ = __len__ = __iter__ = __float__ = __array__ = lambda self: self.key


class _StoredValue(NamedTuple):
    """A value that a stage has stored, say in a dict of its module, beside what it returns.

    Attributes:
        rank: The rank of the stage.
        value: The value.
        stand_in: The object that stages of other ranks get in its place.
    """

    rank: int
    value: object
    stand_in: _OfAnotherStage


def _foreign_value_error(keys: str) -> BoundaryError:
    """Returns the error of a stage that uses values of other ranks, with names ``keys``."""
    return BoundaryError(
        "a stage looks for a value that another stage leaves beside what it returns",
        got=keys,
        cause="a layer keeps it in a dict, in a list of its module or in an attribute: on ranks it "
        "is not there, and in one process it may be that of another micro-batch",
        fix="return it with the output, (output, kept), and have the layers behind hand it on",
    )


class HiddenUses:
    """Finds stages that use what only other ranks have; implements ``StageWatch``.

    In one process that plays all ranks such a use would work, and on several ranks it would not.
    """

    def __init__(
        self,
        functions: Mapping[int, Iterable[object]],
        owners: Mapping[int, Collection[int]],
        names: Mapping[int, str],
        rank_of: Callable[[int], int],
        played: Collection[int],
    ) -> None:
        """Searches what the functions of this process can reach.

        Args:
            functions: The layers, functions and losses of each rank, by rank.
            owners: For each parameter, by id, the ranks that have a layer with it.
            names: The fully qualified name of each parameter, by its id.
            rank_of: Returns the rank that has a stage.
            played: The ranks that this process plays.
        """
        self._names, self._rank_of = names, rank_of
        reached = {rank: find_reachable(roots) for rank, roots in functions.items()}
        ranks_by_id: dict[int, set[int]] = {}
        for rank, values in reached.items():
            for key in values:
                ranks_by_id.setdefault(key, set()).add(rank)

        def is_foreign(value: Any, rank: int) -> bool:
            ranks = ranks_by_id[id(value)]
            allowed = owners.get(id(value), ranks if len(ranks) == 1 else ())
            return is_parameter(value) and not value.stop_gradient and rank not in allowed

        #: For each rank, the trained parameters that its stages can reach but may not use.
        self._foreign: dict[int, list[Any]] = {
            rank: [value for value in reached[rank].values() if is_foreign(value, rank)]
            for rank in {*played} & reached.keys()
        }
        self._hidden_parameters = ExitStack()
        #: The rank whose stage runs; None between batches.
        self._rank: int | None = None
        self._is_first_batch = True
        self._on_several_ranks = len(played) < len(functions)
        by_id = {key: value for values in reached.values() for key, value in values.items()}
        # Values in the cache of a function are allowed: a rank without them calls the function.
        caches = [value for value in by_id.values() if isinstance(value, _CACHE)]
        cached = {id(value) for value in gc.get_referents(*caches)}
        #: The containers that functions of several ranks can reach, and their last known items.
        self._containers = [
            value
            for key, value in by_id.items()
            if len(played) > 1 and len(ranks_by_id[key]) > 1 and isinstance(value, _CONTAINERS)
            if key not in cached
        ]
        self._before = [dict(_items_of(container)) for container in self._containers]
        #: The values that stages have stored in these, by the container's number and the key.
        self._stored_values: dict[tuple[int, Any], _StoredValue] = {}

    @property
    def watches(self) -> bool:
        """See :class:`StageWatch`: whether stages can reach what other ranks have."""
        return bool(self._containers or any(self._foreign.values()))

    def enter(self, stage: int, forward: bool) -> None:
        """See :class:`StageWatch`: hides what other ranks have from the stage that runs next."""
        self._record_stored_values()
        rank = self._rank_of(stage)
        self._show_values_to(rank if forward else None)
        if rank != self._rank:
            self._hidden_parameters.close()
            self._hidden_parameters.enter_context(without_memory(self._foreign.get(rank, ())))
        self._rank = rank

    def leave(self, ends: bool = False) -> None:
        """Restores all hidden parameters and values, because no stage runs.

        Args:
            ends: Whether the batch is over; stored values are inspected in the first batch only.
        """
        self._record_stored_values()
        self._show_values_to(None)
        self._hidden_parameters.close()
        self._rank = None
        if ends:
            self._containers, self._before, self._stored_values = [], [], {}
            self._is_first_batch = False

    def _record_stored_values(self) -> None:
        """Records values that the stage that ran last stored where other ranks' code can reach."""
        for number, container in enumerate(self._containers):
            before, now = self._before[number], dict(_items_of(container))
            for key, value in now.items():
                if self._rank is not None and before.get(key) is not value and _has_values(value):
                    self._stored_values[number, key] = _StoredValue(
                        self._rank, value, _OfAnotherStage(str(key))
                    )
            self._before[number] = now

    def _show_values_to(self, rank: int | None) -> None:
        """Hides from ``rank`` the values that other ranks have stored; None restores all."""
        for (number, key), stored in self._stored_values.items():
            visible = stored.value if rank in (None, stored.rank) else stored.stand_in
            current = self._before[number].get(key)
            if current is not visible and (current is stored.value or current is stored.stand_in):
                _set_item(self._containers[number], key, visible)
                self._before[number][key] = visible

    @contextmanager
    def refused(self) -> Iterator[None]:
        """A context whose errors name a use of another rank's value or parameter, if any.

        Raises:
            ConfigError: A stage has used a parameter of another rank.
            BoundaryError: A stage has used a value that another rank's stage has stored.
        """
        try:
            yield
        except Exception as error:
            foreign = [] if self._rank is None else self._foreign.get(self._rank, [])
            if foreign and is_missing_memory_error(error):
                names = listed([self._names.get(id(p), p.name) for p in foreign])
                raise ConfigError(
                    "stages use parameters that are of no layer of theirs",
                    got=f"one of {names} on rank {self._rank}",
                    cause="a function, the loss or an attribute holds a layer that is elsewhere in "
                    "the list, or nowhere: on ranks each would train a copy of its own",
                    fix="describe all uses of such a layer as SharedLayerDesc with one key; make a "
                    "free parameter that of a layer in the list",
                ) from error
            if _OfAnotherStage.__name__ in str(error):
                raise _foreign_value_error(
                    listed([str(key) for _, key in self._stored_values])
                ) from error
            is_missing = isinstance(error, (LookupError, AttributeError, NameError))
            if self._on_several_ranks and self._is_first_batch and is_missing:
                raise _foreign_value_error(f"{type(error).__name__}: {error}") from error
            raise


def _items_of(container: Any) -> Mapping[Any, object]:
    """Returns the values in a dict, a list, a class or a closure's cell, by key."""
    if isinstance(container, dict):
        return container
    if isinstance(container, list):
        return dict(enumerate(container))
    if isinstance(container, type):
        return vars(container)
    try:
        return {"cell_contents": container.cell_contents}
    except ValueError:  # the cell is empty
        return {}


def _set_item(container: Any, key: Any, value: object) -> None:
    """Stores a value in a container, under a key as :func:`_items_of` returns it."""
    if isinstance(container, (dict, list)):
        container[key] = value
    else:
        setattr(container, key, value)


def _has_values(value: object) -> bool:
    """Whether a value is, or contains, tensors or arrays other than parameters."""
    if isinstance(value, (tuple, list, dict)):
        return any(map(_has_values, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (paddle.Tensor, np.ndarray)) and not is_parameter(value)


def find_reachable(roots: Iterable[object]) -> dict[int, object]:
    """Returns all objects that functions and layers can reach, themselves included, by id.

    The search follows the names, closures and bound objects of functions, attributes and
    containers. It does not enter libraries and installed packages, except for objects that the
    script has put there.
    """
    values: dict[int, object] = {}
    stack = list(roots)
    while stack:
        value = stack.pop()
        if id(value) not in values and not _is_left_out(value):
            values[id(value)] = value
            stack += _referents(value, values)
    return values


def _referents(value: Any, values: dict[int, object]) -> list[Any]:
    """Returns the objects to which an object refers; adds the module of a function to ``values``.

    ``values`` are the objects that the search has reached so far, by id.
    """
    if isinstance(value, paddle.Tensor):
        return []
    if isinstance(value, types.FunctionType):
        # A function reaches only the variables of its module that it names. The module's variables
        # are added all the same, because the function may store values there.
        values[id(value.__globals__)] = value.__globals__
        bound = (value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value))
        return [*bound, *variables_of(value).values()]
    is_code = isinstance(value, (type, types.ModuleType, types.MethodType))
    if hasattr(type(value), "__dict__") and hasattr(value, "__dict__") and not is_code:
        return [vars(value), type(value), *gc.get_referents(value)]
    return gc.get_referents(value)


def _is_left_out(value: Any) -> bool:
    """Whether the search for hidden uses leaves out an object, because it is not of the script."""
    if isinstance(value, (str, int, float, types.BuiltinFunctionType, types.CodeType)):
        return True
    if isinstance(value, (ModelWithParts, MetaParallelBase)):
        return True  # a pipeline itself
    if isinstance(value, _ENTERED_TYPES) and not isinstance(value, type):
        return False
    named = value if isinstance(value, (type, types.FunctionType)) else type(value)
    module = (
        value.__name__
        if isinstance(value, types.ModuleType)
        else getattr(named, "__module__", "builtins")
    )
    return (is_of_library(module) or is_installed(module)) and not is_parameter(value)
