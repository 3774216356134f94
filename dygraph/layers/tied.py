"""Finds and builds entries of a layer list that are one layer or share weights: tied entries.

Entries of a ``SharedLayerDesc`` with the same key, class and arguments are one layer. Entries with
the same key and another class or other arguments, such as an embedding and a head, are variants:
separate layers whose shared weights are those of the first entry.

Entries of a ``LocalSharedLayerDesc`` key are all on one rank, and each is a variant. The
constructor of each but the first takes the weights by keyword, under the names that the first entry
gives them. Start with :func:`find` and :func:`build`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.dygraph.layers import entries as descriptions
from fleetpipe.dygraph.layers.entries import Blueprints, Entry
from fleetpipe.dygraph.random_keys import random_states_kept
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle

#: The first sublayer of a model, as in Fleet: it holds the layers of ``SharedLayerDesc``.
HOLDER = "shared_layers"
#: The second sublayer of a model: it holds the layers of ``LocalSharedLayerDesc``.
LOCAL_HOLDER = "local_shared_layers"


def is_shared(name: str) -> bool:
    """Whether a name is that of a parameter or buffer of a shared layer."""
    return name.partition(".")[0] in (HOLDER, LOCAL_HOLDER)


class SharedLayer(NamedTuple):
    """One layer that several entries may call.

    Attributes:
        holder: The sublayer of the model that holds the first layer of the key.
        key: The key of its entries.
        indices: Its entries' numbers in the whole list.
        names: The fully qualified name of each of its parameters and buffers, by path.
        lent: The fully qualified name of each weight that its constructor gets, by keyword.
    """

    holder: str
    key: str
    indices: tuple[int, ...]
    names: Mapping[str, str]
    lent: Mapping[str, str]

    @property
    def path(self) -> str:
        """The path in the model of the first layer of the key."""
        return f"{self.holder}.{self.key}"


class _Variant(NamedTuple):
    """Entries that are one layer: their numbers, and the attributes that they share."""

    indices: list[int]
    attributes: list[str]


def find(entries: Sequence[Entry], blueprints: Blueprints) -> tuple[SharedLayer, ...]:
    """Returns the shared layers of a list in the order of their first entries, after checks.

    Args:
        entries: The list of layers.
        blueprints: A layer like each entry's, for names and shapes.

    Raises:
        ConfigError: A weight does not exist or is no parameter, the first entry of the key does
            not share it, or it has another shape or dtype there.
    """
    variants: dict[tuple[str, str], list[_Variant]] = {}
    for index, entry in enumerate(entries):
        if descriptions.is_local(entry):
            attributes = list(descriptions.shared_attributes(entry))
            local = variants.setdefault((LOCAL_HOLDER, entry.layer_name), [])
            local.append(_Variant([index], attributes))
        elif descriptions.is_shared(entry):
            _sort_in(variants.setdefault((HOLDER, entry.layer_name), []), entries, index)
    layers = []
    for (holder, key), (first, *rest) in variants.items():
        names = {path: f"{holder}.{key}.{path}" for path in _paths_of(first, blueprints)}
        pivot = _attribute_paths(first, entries, blueprints)
        layers.append(SharedLayer(holder, key, tuple(first.indices), names, {}))
        for variant in rest:
            if holder == LOCAL_HOLDER:
                paths = _lent_paths(variant, entries, blueprints)
            else:
                paths = _attribute_paths(variant, entries, blueprints)
            sublayer_names = {
                path: f"{variant.indices[0]}.{path}" for path in _paths_of(variant, blueprints)
            }
            _require_shared(sorted(paths.keys() - pivot.keys()), pivot, entries, first, variant)
            for attribute, path in paths.items():
                _require_alike(key, attribute, (first, pivot), (variant, paths), blueprints)
                sublayer_names[path] = names[pivot[attribute]]
            lent = {name: names[pivot[name]] for name in blueprints.lent(variant.indices[0])}
            layers.append(SharedLayer(holder, key, tuple(variant.indices), sublayer_names, lent))
    return tuple(sorted(layers, key=lambda layer: layer.indices))


def _sort_in(variants: list[_Variant], entries: Sequence[Entry], index: int) -> None:
    """Adds entry ``index`` to its variant of the key, or creates a new variant."""
    entry = entries[index]
    attributes = descriptions.shared_attributes(entry)
    if variants:
        pivot = variants[0]
        missing = sorted(set(attributes) - set(pivot.attributes))
        _require_shared(
            missing, pivot.attributes, entries, pivot, _Variant([index], list(attributes))
        )
    for variant in variants:
        if _is_equal(_description(entries[variant.indices[0]]), _description(entry)):
            variant.indices.append(index)
            variant.attributes.extend(set(attributes) - set(variant.attributes))
            return
    variants.append(_Variant([index], list(attributes)))


def _require_shared(
    missing: Sequence[str],
    names: Iterable[str],
    entries: Sequence[Entry],
    first: _Variant,
    variant: _Variant,
) -> None:
    """Refuses an entry that shares weights which the first entry of its key does not share."""
    if missing:
        index = variant.indices[0]
        raise ConfigError(
            f"layer {index} shares {missing} of {entries[index].layer_name!r}, its first entry "
            "does not",
            where=f"layers {first.indices[0]} and {index} of the list",
            expected=f"some of {sorted(names)}",
            got=str(sorted(variant.attributes)),
            fix="name all shared weights in the shared_weight_attr of the key's first entry",
        )


def _description(entry: Entry) -> tuple[object, ...]:
    """Returns the class, the arguments or the specification from which a layer is built."""
    specification = getattr(entry, "layer_spec", None)
    if specification is None:
        return entry.layer_func, entry.inputs, entry.kwargs
    return specification, entry.kwargs


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two arguments of constructors are equal: by value, or attribute by attribute."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, type):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_equal(one[name], other[name]) for name in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, (np.ndarray, paddle.Tensor)):
        return bool(np.array_equal(np.asarray(one), np.asarray(other)))
    if bool(one == other):
        return True
    # Initializers and ParamAttr do not compare by value.
    attributes = getattr(one, "__dict__", None)
    return bool(attributes) and _is_equal(attributes, vars(other))


def _paths_of(variant: _Variant, blueprints: Sequence[Layer]) -> list[str]:
    """Returns the path of each parameter and buffer of a variant's layer."""
    return list(paddle.nn.Layer.state_dict(blueprints[variant.indices[0]]))


def _attribute_paths(
    variant: _Variant, entries: Sequence[Entry], blueprints: Sequence[Layer]
) -> dict[str, str]:
    """Returns the path of each shared weight of a variant within its layer."""
    index = variant.indices[0]
    entry, layer = entries[index], blueprints[index]
    return {
        name: path
        for attribute in variant.attributes
        for name, (path, _) in descriptions.shared_weights(entry, index, layer, attribute).items()
    }


def _lent_paths(
    variant: _Variant, entries: Sequence[Entry], blueprints: Blueprints
) -> dict[str, str]:
    """Returns the path in a variant's layer of each weight that the constructor got."""
    index = variant.indices[0]
    layer = blueprints[index]
    paths = {id(parameter): path for path, parameter in layer.named_parameters()}
    lent = blueprints.lent(index)
    left = [attribute for attribute, weight in lent.items() if id(weight) not in paths]
    if left:
        raise ConfigError(
            f"the constructor of layer {index} does not keep what it was handed",
            where=f"layer {index} of the list ({type(layer).__name__}), "
            f"key {entries[index].layer_name!r}",
            expected=f"the arguments {left} among its parameters",
            got=", ".join(paths.values()) or "no parameters",
            fix="write self.weight = weight in its constructor, or use SharedLayerDesc",
        )
    return {attribute: paths[id(weight)] for attribute, weight in lent.items()}


def _require_alike(
    key: str,
    attribute: str,
    first: tuple[_Variant, Mapping[str, str]],
    other: tuple[_Variant, Mapping[str, str]],
    blueprints: Sequence[Layer],
) -> None:
    """Refuses a shared weight that has other shapes or dtypes in two variants of a key."""
    forms = []
    for variant, paths in (first, other):
        weight = paddle.nn.Layer.state_dict(blueprints[variant.indices[0]])[paths[attribute]]
        forms.append(f"{list(weight.shape)} {weight.dtype}")
    if forms[0] != forms[1]:
        raise ConfigError(
            f"the entries with key {key!r} have {attribute!r} in different shapes or dtypes",
            where=f"layers {first[0].indices[0]} and {other[0].indices[0]} of the list",
            expected=forms[0],
            got=forms[1],
            fix="give both entries the same sizes, or keys of their own",
        )


def places(entries: Sequence[Entry]) -> tuple[int, ...] | None:
    """Returns the layers, except layer 0, at which a stage may begin; None for all layers.

    No stage may begin between entries that share weights within one rank.
    """
    uses: dict[str, list[int]] = {}
    for index, entry in enumerate(entries):
        if descriptions.is_local(entry):
            uses.setdefault(entry.layer_name, []).append(index)
    if not uses:
        return None
    closed = {
        number for indices in uses.values() for number in range(indices[0] + 1, indices[-1] + 1)
    }
    return tuple(number for number in range(1, len(entries)) if number not in closed)


def refuse_split(
    entries: Sequence[Entry], blueprints: Sequence[Layer], rank_of_layer: Callable[[int], int]
) -> None:
    """Refuses layers on different ranks that share a parameter without a ``SharedLayerDesc``.

    Args:
        entries: The list of layers.
        blueprints: A layer like each entry's; it may include layers given as arguments.
        rank_of_layer: Returns the rank that owns a layer, from its number in the whole list.

    Raises:
        ConfigError: Two layers on different ranks share a parameter, or a ``LocalSharedLayerDesc``
            key.
    """
    keys: dict[str, int] = {}
    for index, entry in enumerate(entries):
        if not descriptions.is_local(entry):
            continue
        other = keys.setdefault(entry.layer_name, index)
        if rank_of_layer(other) != rank_of_layer(index):
            raise ConfigError(
                "LocalSharedLayerDesc shares weights within one rank",
                where=f"layers {other} and {index} of the list, key {entry.layer_name!r}",
                expected=f"both on rank {rank_of_layer(other)}",
                got=f"the ranks {rank_of_layer(other)} and {rank_of_layer(index)}",
                fix="use SharedLayerDesc, which shares between ranks too, or a schedule under "
                "which both are on one rank: DualPipeV has the first and the last stage there",
            )
    first: dict[int, int] = {}
    for index, layer in enumerate(blueprints):
        shares = descriptions.is_shared(entries[index]) or not isinstance(layer, paddle.nn.Layer)
        for parameter in () if shares else layer.parameters():
            other = first.setdefault(id(parameter), index)
            if rank_of_layer(other) != rank_of_layer(index):
                raise ConfigError(
                    "two layers on different ranks have the same parameter",
                    where=f"layers {other} and {index} of the list",
                    got=f"{parameter.name}, on the ranks {rank_of_layer(other)} and "
                    f"{rank_of_layer(index)}",
                    fix="describe both as SharedLayerDesc with one key",
                )


class Built(NamedTuple):
    """The layers of some entries of a list.

    Attributes:
        functions: The functions to call, by number in the whole list.
        shared: The shared layers that are the first of their keys, by their path in the model.
        layers: All other layers, by name.
        names: The fully qualified names of parameters and buffers with other names in this process.
    """

    functions: dict[int, Callable[[Nest], Nest]]
    shared: dict[str, Layer]
    layers: dict[str, Layer]
    names: dict[str, str]

    def register(self, model: Layer) -> None:
        """Makes the layers sublayers of ``model``, the shared ones first."""
        holders = {name: paddle.nn.LayerDict() for name in (HOLDER, LOCAL_HOLDER)}
        for path, layer in self.shared.items():
            holder, _, key = path.partition(".")
            holders[holder][key] = layer
        for name, sublayer in holders.items():
            model.add_sublayer(name, sublayer)
        for name, layer in self.layers.items():
            model.add_sublayer(name, layer)

    def follow(self, model: Layer) -> None:
        """Adopts the layers that have replaced registered layers in ``model``.

        Raises:
            ConfigError: The model has no layer any more at the path of a registered layer.
        """
        replaced: dict[int, Layer] = {}
        for layers in (self.shared, self.layers):
            for path, layer in layers.items():
                layers[path] = replaced[id(layer)] = _sublayer(model, path)
        for index, function in self.functions.items():
            if isinstance(function, paddle.nn.Layer):
                self.functions[index] = replaced[id(function)]
            elif isinstance(function, functools.partial):
                arguments = [replaced.get(id(part), part) for part in function.args]
                self.functions[index] = functools.partial(
                    function.func, *arguments, **function.keywords
                )


def _sublayer(model: Layer, path: str) -> Layer:
    """Returns the sublayer at a path; refuses a model without it."""
    holder, _, key = path.partition(".")
    try:
        layer = getattr(model, holder)
        return layer[key] if key else layer
    except (AttributeError, KeyError):
        raise ConfigError(
            f"{path} was taken out of the model",
            expected="a layer there, as when the model was cut",
            fix="put another in its place: setattr(model, name, nn.Identity())",
        ) from None


def build(entries: Sequence[Entry], indices: Iterable[int], shared: Sequence[SharedLayer]) -> Built:
    """Builds some entries of a list; entries here that are tied get the same layer or weights.

    A shared layer is built under the seed of its first entry in the whole list, so its values do
    not depend on the rank. Entries of other ranks are built without memory in their turn, so names
    and the numbers that constructors draw do not depend on the rank, either. All random states are
    restored at the end, so all ranks draw the same numbers afterwards.

    Args:
        entries: The whole list of layers.
        indices: The numbers of the entries to build.
        shared: The shared layers of the list.
    """
    built = Built({}, {}, {}, {})
    layer_of = {index: layer for layer in shared for index in layer.indices}
    owned, blueprints = set(indices), Blueprints(entries)
    weights: dict[str, Tensor] = {}
    paddles_names: dict[str, str] = {}
    with random_states_kept():
        for index, entry in enumerate(entries):
            layer = layer_of.get(index)
            uses = {index} if layer is None else {*layer.indices}
            if min(uses) != index:
                continue
            if not uses & owned:
                passed = descriptions.pass_over(entry, index, blueprints.lent(index))
                if layer is not None:
                    for path, parameter in passed.named_parameters():
                        paddles_names.setdefault(layer.names[path], parameter.name)
            elif layer is None:
                function = descriptions.build(entry, index)
                if isinstance(function, paddle.nn.Layer):
                    built.layers[str(index)] = function
                built.functions[index] = function
            else:
                lent = {name: weights[of] for name, of in layer.lent.items()}
                made = descriptions.build(entry, index, lent)
                _place(made, layer, built)
                _tie(made, layer, weights, paddles_names)
                for use in uses & owned:
                    forward = entries[use].forward_func
                    call = made if forward is None else functools.partial(forward, made)
                    built.functions[use] = call
    built.functions.update({index: built.functions.pop(index) for index in sorted(owned)})
    return built


def _place(layer: Layer, shared: SharedLayer, built: Built) -> None:
    """Registers a shared layer: the first of a key here is named ``shared_layers.<key>``."""
    if shared.path in built.shared:
        prefix = str(shared.indices[0])
        built.layers[prefix] = layer
    else:
        prefix = shared.path
        built.shared[prefix] = layer
    for path, name in shared.names.items():
        if f"{prefix}.{path}" != name:
            built.names[f"{prefix}.{path}"] = name


def _tie(
    layer: Layer, shared: SharedLayer, weights: dict[str, Tensor], paddles_names: Mapping[str, str]
) -> None:
    """Replaces the weights of a layer by shared weights that other layers here have.

    A shared weight whose first layer is on another rank gets that weight's name there, from
    ``paddles_names``.
    """
    for path, parameter in list(layer.named_parameters()):
        name = shared.names[path]
        parameter.name = paddles_names.get(name, parameter.name)
        first = weights.setdefault(name, parameter)
        if first is not parameter:
            owner, _, attribute = path.rpartition(".")
            parts = dict(layer.named_sublayers(include_self=True))
            setattr(parts[owner], attribute, first)


def called_through(function: Callable[[Nest], Nest]) -> tuple[Layer, ...]:
    """Returns the shared layer that ``function`` calls by a ``forward_func``; else no layer."""
    return function.args if isinstance(function, functools.partial) else ()
