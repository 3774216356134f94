"""The entries (items) of a user's list of layers: checks and builds them.

An entry is a ``LayerDesc``, a layer that the script has built, or a function.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.dygraph import layer_kinds
from fleetpipe.dygraph.random_keys import PythonStates, random_states_kept
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle, paddle_fleet
from fleetpipe.paddle_api.layer import save_name_counters
from fleetpipe.paddle_api.meta_parallel import LocalSharedLayerDesc

#: An entry of a list of layers: a ``LayerDesc``, a built layer, or a function. A description with a
#: method ``blueprint()`` returns by it a layer whose parameters have no memory.
Entry = Any
#: Fleet seeds layer i of a model with this number plus i.
FIRST_SEED = 1234
#: The weights of other layers that a constructor gets, by keyword: none, for most layers.
NOTHING_LENT: Mapping[str, Tensor] = MappingProxyType({})


def check_entries(layers: object) -> list[Entry]:
    """Returns the entries of a user's list of layers, after checks.

    Raises:
        ConfigError: ``layers`` is no list, or is empty, or an entry is not allowed.
    """
    if not isinstance(layers, Iterable):
        raise ConfigError(
            "the layers of a PipelineLayer are a list",
            got=type(layers).__name__,
            fix="pass [LayerDesc(..), LayerDesc(..), ..], in the order in which they run",
        )
    entries = [_remove_newer_argument(entry) for entry in layers]
    if not entries:
        raise ConfigError(
            "the list of layers of a PipelineLayer is empty",
            expected="at least one layer for each stage",
            got=f"a {type(layers).__name__} without entries",
            cause="a loop that built the list did not run, or an iterator was read before",
            fix="pass [LayerDesc(..), LayerDesc(..), ..], in the order in which they run",
        )
    for index, entry in enumerate(entries):
        _require_allowed(entry, index)
    return entries


def _remove_newer_argument(entry: Entry) -> Entry:
    """Returns an entry without ``shared_submodule_weight_only``, an argument of a newer Paddle.

    An older Paddle would pass it to the layer. It has no effect here: entries share the weights in
    ``shared_weight_attr``, or the whole layer if class and arguments are equal.
    """
    if not is_shared(entry) or "shared_submodule_weight_only" not in entry.kwargs:
        return entry
    entry = copy.copy(entry)
    entry.kwargs = {**entry.kwargs}
    del entry.kwargs["shared_submodule_weight_only"]
    return entry


def _require_allowed(entry: Entry, index: int) -> None:
    """Refuses entry ``index`` of a list of layers if it is no description, layer or function."""
    if isinstance(entry, type) and issubclass(entry, paddle.nn.Layer):
        raise ConfigError(
            "an entry of the list of layers is a class, which would be built anew in every call",
            where=f"layer {index} of the list",
            got=f"the class {entry.__name__}",
            fix=f"write LayerDesc({entry.__name__}, ..) or {entry.__name__}(..)",
        )
    if not hasattr(entry, "build_layer") and not callable(entry):
        raise ConfigError(
            "an entry of the list of layers is neither a LayerDesc, nor a Layer, nor callable",
            where=f"layer {index} of the list",
            got=type(entry).__name__,
            fix="write LayerDesc(nn.Linear, 8, 8), nn.Linear(8, 8) or a function of one argument",
        )


class SeveralLayers:
    """An entry of a list of layers that becomes several when the number of ranks is known."""

    def require_place(self, entries: Sequence[Entry], index: int) -> None:
        """Refuses a list of layers in which this entry must not stand at ``index``."""

    def layers(self, ranks: int) -> list[Entry]:
        """Returns the entries that replace this one in a pipeline of ``ranks`` ranks."""
        raise NotImplementedError


def expand(entries: Sequence[Entry], ranks: int) -> list[Entry]:
    """Returns a list of layers in which each :class:`SeveralLayers` is replaced by its entries.

    Raises:
        ConfigError: An entry is not allowed at its position.
    """
    for index, entry in enumerate(entries):
        if isinstance(entry, SeveralLayers):
            entry.require_place(entries, index)
    expanded: list[Entry] = []
    for entry in entries:
        expanded += entry.layers(ranks) if isinstance(entry, SeveralLayers) else [entry]
    return expanded


def is_shared(entry: Entry) -> bool:
    """Whether ``entry`` is a ``SharedLayerDesc`` or a ``LocalSharedLayerDesc``."""
    return isinstance(entry, paddle_fleet.meta_parallel.SharedLayerDesc) or is_local(entry)


def is_local(entry: Entry) -> bool:
    """Whether ``entry`` is a ``LocalSharedLayerDesc``, which shares within one rank only."""
    return isinstance(entry, LocalSharedLayerDesc)


def shared_attributes(entry: Entry) -> tuple[str, ...]:
    """Returns the names of the weights that a ``SharedLayerDesc`` shares."""
    # One name on 2.6.2, a list on 3.3.
    names = entry.shared_weight_attr
    return (names,) if isinstance(names, str) else tuple(names)


def shared_weights(
    entry: Entry, index: int, layer: Layer, attribute: str
) -> dict[str, tuple[str, Tensor]]:
    """Returns the weights that a shared entry shares by one attribute of its layer.

    The attribute is a parameter, or an iterator over names and parameters, such as
    ``named_parameters()`` of a sublayer: ``body.fc.weight`` is the ``fc.weight`` of an attribute
    ``body``.

    Args:
        entry: The entry, a ``SharedLayerDesc`` or ``LocalSharedLayerDesc``.
        index: Its number in the whole list.
        layer: Its layer.
        attribute: The name of the attribute.

    Returns:
        For each shared weight, by name, its path in ``layer`` and the weight.

    Raises:
        ConfigError: The layer has no parameter with the name.
    """
    paths = {id(parameter): path for path, parameter in layer.named_parameters()}
    value = getattr(layer, attribute, None)
    weights = {attribute: value}
    if isinstance(value, Iterator):
        weights = {f"{attribute}.{path}": parameter for path, parameter in value}
    for name, weight in weights.items():
        if id(weight) not in paths:
            raise ConfigError(
                f"the shared layer {entry.layer_name!r} has no parameter {name!r}",
                where=f"layer {index} of the list ({type(layer).__name__})",
                expected=f"one of its parameters: {', '.join(paths.values())}",
                got="no such attribute" if weight is None else type(weight).__name__,
                fix="pass its name as shared_weight_attr, or write a property that returns it",
            )
    return {name: (paths[id(weight)], weight) for name, weight in weights.items()}


def build(entry: Entry, index: int, lent: Mapping[str, Tensor] = NOTHING_LENT) -> Any:
    """Returns the layer of entry ``index``, built under the seed that Fleet gives it.

    The generators are left as the constructor leaves them.

    Args:
        entry: The entry of the list.
        index: The number of the entry.
        lent: Weights of another layer that are passed to the constructor, by keyword.

    Raises:
        ConfigError: The constructor does not take the arguments of the description.
    """
    if not hasattr(entry, "build_layer"):
        return _check_built(entry)
    paddle.seed(FIRST_SEED + index)
    try:
        return _build_and_check(entry, lent)
    except TypeError as error:
        raise ConfigError(
            f"layer {index} ({class_name(entry)}) cannot be built from its description",
            where=f"layer {index} of the list",
            got=_describe_arguments(entry)
            + (f", and the weights {sorted(lent)} of the first of its key" if lent else ""),
            cause=f"TypeError: {error}",
            fix="have its constructor take the weights that LocalSharedLayerDesc hands on, or use "
            "SharedLayerDesc, which hands on none"
            if lent
            else "give LayerDesc what the layer's constructor takes",
        ) from error


def build_without_memory(entry: Entry, index: int, lent: Mapping[str, Tensor]) -> Any:
    """Builds a layer of another rank without memory, and returns it; None for other entries.

    So the layers that are built next get the automatic names, and draw the numbers from NumPy's and
    Python's generators, as in one process. The arguments are those of :func:`build`.
    """
    if not hasattr(entry, "build_layer"):
        return None
    if hasattr(entry, "blueprint"):
        return entry.blueprint()
    states, restore_names = PythonStates(), save_name_counters()
    paddle.seed(FIRST_SEED + index)
    try:
        return _build_lazily(entry, lent)
    except Exception:
        states.put_back()
        restore_names()
        return build(entry, index, lent)


def _describe_arguments(entry: Entry) -> str:
    """Returns as text the arguments that a ``LayerDesc`` passes to its layer's constructor."""
    specification = getattr(entry, "layer_spec", None)
    if specification is None:
        return f"arguments {entry.inputs}, {entry.kwargs}"
    # Paddle drops the positional arguments of a LayerDesc with a LayerSpec.
    arguments = {**specification.extra_kwargs, **entry.kwargs}
    return f"arguments {arguments} of a LayerSpec"


def _build_and_check(entry: Entry, lent: Mapping[str, Tensor]) -> Any:
    """Builds and checks the layer of a description.

    ``lent`` has weights of another layer, which the constructor gets by keyword.
    """
    # A LayerSpec, into which a LayerDesc writes its arguments, may be that of other entries too.
    specification = getattr(entry, "layer_spec", None)
    arguments = getattr(specification, "extra_kwargs", None)
    try:
        # The descriptions of Paddle 2.6.2 take no weights.
        return _check_built(entry.build_layer(**lent) if lent else entry.build_layer())
    finally:
        if specification is not None:
            specification.extra_kwargs = arguments


def _build_lazily(entry: Entry, lent: Mapping[str, Tensor]) -> Any:
    """Builds a layer without memory; the arguments are those of :func:`_build_and_check`.

    It fails if the layer's constructor computes with its parameters.
    """
    with paddle.LazyGuard():
        return _build_and_check(entry, lent)


def _check_built(layer: Any) -> Any:
    """Applies the rules for a new layer's kind, such as mixtures of experts, and returns it."""
    for kind in layer_kinds.kinds_of(layer):
        kind.take_built(layer)
    return layer


class Blueprints(Sequence[Layer]):
    """For each entry of a list, a layer like its own, to read names and shapes of parameters.

    The values of the parameters mean nothing. A layer is built on its first use, and stored. A
    built layer or a function is its own blueprint.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        """Stores the whole list of layers."""
        self._entries = entries
        self._layers: dict[int, Layer] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: Any) -> Layer:
        if index not in self._layers:
            self._layers[index] = self._build(self._entries[index], index)
        return self._layers[index]

    def _build(self, entry: Entry, index: int) -> Layer:
        """Builds the blueprint of entry ``index``, without memory if that is possible."""
        if not hasattr(entry, "build_layer"):
            return entry
        if hasattr(entry, "blueprint"):
            return entry.blueprint()
        lent = self.lent(index)
        # In a separate name space: the names of the model's parameters must not depend on it.
        with random_states_kept(), paddle.utils.unique_name.guard():
            try:
                return _build_lazily(entry, lent)
            except Exception:
                return build(entry, index, lent)

    def lent(self, index: int) -> dict[str, Tensor]:
        """Returns the weights of another layer that the constructor of entry ``index`` gets.

        Only entries of a ``LocalSharedLayerDesc`` get weights: those of the first entry with the
        same key, which itself gets none.

        Returns:
            The weights by keyword.

        Raises:
            ConfigError: The first entry's layer has no such parameter.
        """
        entry = self._entries[index]
        if not is_local(entry):
            return {}
        first = next(
            number
            for number, candidate in enumerate(self._entries)
            if is_local(candidate) and candidate.layer_name == entry.layer_name
        )
        if first == index:
            return {}
        first_entry, layer = self._entries[first], self[first]
        return {
            name: weight
            for attribute in shared_attributes(first_entry)
            for name, (_, weight) in shared_weights(first_entry, first, layer, attribute).items()
        }


def class_name(entry: Entry) -> str:
    """Returns the name of an entry's class or function, to which ``seg_method`` refers; or ""."""
    if isinstance(entry, paddle.nn.Layer):
        return type(entry).__name__
    described = getattr(entry, "layer_func", None)
    if described is None and hasattr(entry, "layer_spec"):
        described = entry.layer_spec.layer
    return str(getattr(described or entry, "__name__", ""))


def count_parameters(layer: Layer) -> int:
    """Returns the number of elements of a layer's trainable parameters; 0 for a function."""
    if not isinstance(layer, paddle.nn.Layer):
        return 0
    return sum(math.prod(p.shape) for p in layer.parameters() if p.trainable)
