"""Finds and builds tied entries: items of a list of layers that are one layer or share weights.

Entries of a ``SharedLayerDesc`` with the same key, class and arguments are one layer. Entries with
the same key and another class or other arguments, such as an embedding and a head, are variants:
separate layers whose shared weights are those of the first entry.

Entries of a ``LocalSharedLayerDesc`` key are all on one rank, and each is a variant. The
constructor of each but the first takes the weights by keyword, under the names that the first entry
gives them. Start with :func:`find_shared_layers` and :func:`build`.
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

#: The name of the sublayer of a model that holds the layers of ``SharedLayerDesc``, as in Fleet.
HOLDER = "shared_layers"
#: The name of the sublayer of a model that holds the layers of ``LocalSharedLayerDesc``.
LOCAL_HOLDER = "local_shared_layers"


def is_shared(name: str) -> bool:
    """Whether a fully qualified name is that of a parameter or buffer of a shared layer."""
    return name.partition(".")[0] in (HOLDER, LOCAL_HOLDER)


class SharedLayer(NamedTuple):
    """One layer that several entries of the list may call, with a key from their descriptions.

    Attributes:
        holder: HOLDER or LOCAL_HOLDER: the sublayer of the model that holds the key's first layer.
        key: The key of its entries.
        indices: The numbers of its entries in the whole list, in order.
        names: The fully qualified name of each of its parameters and buffers, by path in the layer.
        lent: The fully qualified names of weights of another layer that the constructor gets, by
            keyword.
    """

    holder: str
    key: str
    indices: tuple[int, ...]
    names: Mapping[str, str]
    lent: Mapping[str, str]

    @property
    def path(self) -> str:
        """The path in the model of the first layer with this key."""
        return f"{self.holder}.{self.key}"


class _Variant(NamedTuple):
    """The entries with one key that become one layer: of one class, with equal arguments.

    Attributes:
        indices: Their numbers in the whole list, in order.
        attributes: The names of the attributes with which they share weights.
    """

    indices: list[int]
    attributes: list[str]


def find_shared_layers(entries: Sequence[Entry], blueprints: Blueprints) -> tuple[SharedLayer, ...]:
    """Returns the shared layers of a list in the order of their first entries, after checks.

    Args:
        entries: The list of layers.
        blueprints: A layer like each entry's, for names and shapes.

    Raises:
        ConfigError: A shared weight does not exist or is no parameter, or the first entry with its
            key does not share it, or has it with another shape or dtype.
    """
    variants: dict[tuple[str, str], list[_Variant]] = {}
    for index, entry in enumerate(entries):
        if descriptions.is_local(entry):
            attributes = list(descriptions.shared_attributes(entry))
            local = variants.setdefault((LOCAL_HOLDER, entry.layer_name), [])
            local.append(_Variant([index], attributes))
        elif descriptions.is_shared(entry):
            _add_to_variant(variants.setdefault((HOLDER, entry.layer_name), []), entries, index)
    layers = []
    for (holder, key), (first, *rest) in variants.items():
        names = {path: f"{holder}.{key}.{path}" for path in _paths_of(first, blueprints)}
        first_paths = _paths_of_shared_weights(first, entries, blueprints)
        layers.append(SharedLayer(holder, key, tuple(first.indices), names, {}))
        for variant in rest:
            if holder == LOCAL_HOLDER:
                paths = _paths_of_lent_weights(variant, entries, blueprints)
            else:
                paths = _paths_of_shared_weights(variant, entries, blueprints)
            sublayer_names = {
                path: f"{variant.indices[0]}.{path}" for path in _paths_of(variant, blueprints)
            }
            missing = sorted(paths.keys() - first_paths.keys())
            _require_shared_by_first(missing, first_paths, entries, first, variant)
            for weight, path in paths.items():
                _require_same_shape(key, weight, (first, first_paths), (variant, paths), blueprints)
                sublayer_names[path] = names[first_paths[weight]]
            lent = {name: names[first_paths[name]] for name in blueprints.lent(variant.indices[0])}
            layers.append(SharedLayer(holder, key, tuple(variant.indices), sublayer_names, lent))
    return tuple(sorted(layers, key=lambda layer: layer.indices))


def _add_to_variant(variants: list[_Variant], entries: Sequence[Entry], index: int) -> None:
    """Adds a shared entry to the variant of its key with its class and arguments, or to a new one.

    Args:
        variants: The variants of the entry's key so far; changed in place.
        entries: The whole list of layers.
        index: The number of the entry.
    """
    entry = entries[index]
    attributes = descriptions.shared_attributes(entry)
    if variants:
        first, variant = variants[0], _Variant([index], list(attributes))
        missing = sorted(set(attributes) - set(first.attributes))
        _require_shared_by_first(missing, first.attributes, entries, first, variant)
    for variant in variants:
        if _are_equal(
            _constructor_arguments(entries[variant.indices[0]]), _constructor_arguments(entry)
        ):
            variant.indices.append(index)
            variant.attributes.extend(set(attributes) - set(variant.attributes))
            return
    variants.append(_Variant([index], list(attributes)))


def _require_shared_by_first(
    missing: Sequence[str],
    names: Iterable[str],
    entries: Sequence[Entry],
    first: _Variant,
    variant: _Variant,
) -> None:
    """Refuses a variant that shares weights which the first variant of its key does not share.

    Args:
        missing: The names of those weights, or of attributes with them; empty to refuse nothing.
        names: The names that the first variant shares.
        entries: The whole list of layers.
        first: The first variant of the key.
        variant: The other variant.
    """
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


def _constructor_arguments(entry: Entry) -> tuple[object, ...]:
    """Returns a shared entry's class, or ``LayerSpec``, and the arguments of its constructor."""
    specification = getattr(entry, "layer_spec", None)
    if specification is None:
        return entry.layer_func, entry.inputs, entry.kwargs
    return specification, entry.kwargs


def _are_equal(left: Any, right: Any) -> bool:
    """Whether two arguments of layers' constructors are equal, by value or by their attributes."""
    if left is right:
        return True
    if type(left) is not type(right) or isinstance(left, type):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_are_equal(left[n], right[n]) for n in left)
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(_are_equal, left, right))
    if isinstance(left, (np.ndarray, paddle.Tensor)):
        return bool(np.array_equal(np.asarray(left), np.asarray(right)))
    if bool(left == right):
        return True
    # Initializers and ParamAttr do not compare by value.
    attributes = getattr(left, "__dict__", None)
    return bool(attributes) and _are_equal(attributes, vars(right))


def _paths_of(variant: _Variant, blueprints: Sequence[Layer]) -> list[str]:
    """Returns the paths of all parameters and buffers in a variant's layer."""
    return list(paddle.nn.Layer.state_dict(blueprints[variant.indices[0]]))


def _paths_of_shared_weights(
    variant: _Variant, entries: Sequence[Entry], blueprints: Sequence[Layer]
) -> dict[str, str]:
    """Returns the path in a variant's layer of each weight that it shares, by the weight's name."""
    index = variant.indices[0]
    entry, layer = entries[index], blueprints[index]
    return {
        name: path
        for attribute in variant.attributes
        for name, (path, _) in descriptions.shared_weights(entry, index, layer, attribute).items()
    }


def _paths_of_lent_weights(
    variant: _Variant, entries: Sequence[Entry], blueprints: Blueprints
) -> dict[str, str]:
    """Returns the path in a variant's layer of each weight that the constructor got, by keyword.

    Raises:
        ConfigError: The constructor has not made a parameter of such a weight.
    """
    index = variant.indices[0]
    layer = blueprints[index]
    paths = {id(parameter): path for path, parameter in layer.named_parameters()}
    lent = blueprints.lent(index)
    unused = [keyword for keyword, weight in lent.items() if id(weight) not in paths]
    if unused:
        raise ConfigError(
            f"the constructor of layer {index} does not keep what it was handed",
            where=f"layer {index} of the list ({type(layer).__name__}), "
            f"key {entries[index].layer_name!r}",
            expected=f"the arguments {unused} among its parameters",
            got=", ".join(paths.values()) or "no parameters",
            fix="write self.weight = weight in its constructor, or use SharedLayerDesc",
        )
    return {keyword: paths[id(weight)] for keyword, weight in lent.items()}


def _require_same_shape(
    key: str,
    name: str,
    first: tuple[_Variant, Mapping[str, str]],
    other: tuple[_Variant, Mapping[str, str]],
    blueprints: Sequence[Layer],
) -> None:
    """Refuses a shared weight that has another shape or dtype in another variant of its key.

    Args:
        key: The key.
        name: The name of the weight.
        first: The first variant, and the path of each shared weight in its layer.
        other: The other variant, and the path of each shared weight in its layer.
        blueprints: A layer like each entry's.
    """
    shapes = []
    for variant, paths in (first, other):
        weight = paddle.nn.Layer.state_dict(blueprints[variant.indices[0]])[paths[name]]
        shapes.append(f"{list(weight.shape)} {weight.dtype}")
    if shapes[0] != shapes[1]:
        raise ConfigError(
            f"the entries with key {key!r} have {name!r} in different shapes or dtypes",
            where=f"layers {first[0].indices[0]} and {other[0].indices[0]} of the list",
            expected=shapes[0],
            got=shapes[1],
            fix="give both entries the same sizes, or keys of their own",
        )


def first_layers_of_stages(entries: Sequence[Entry]) -> tuple[int, ...] | None:
    """Returns the layers, except layer 0, at which a stage may begin; None for all layers.

    No stage may begin between entries that share weights within one rank.
    """
    uses: dict[str, list[int]] = {}
    for index, entry in enumerate(entries):
        if descriptions.is_local(entry):
            uses.setdefault(entry.layer_name, []).append(index)
    if not uses:
        return None
    not_allowed = {
        number for indices in uses.values() for number in range(indices[0] + 1, indices[-1] + 1)
    }
    return tuple(number for number in range(1, len(entries)) if number not in not_allowed)


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
    first_of_keys: dict[str, int] = {}
    for index, entry in enumerate(entries):
        if not descriptions.is_local(entry):
            continue
        first_index = first_of_keys.setdefault(entry.layer_name, index)
        if rank_of_layer(first_index) != rank_of_layer(index):
            raise ConfigError(
                "LocalSharedLayerDesc shares weights within one rank",
                where=f"layers {first_index} and {index} of the list, key {entry.layer_name!r}",
                expected=f"both on rank {rank_of_layer(first_index)}",
                got=f"the ranks {rank_of_layer(first_index)} and {rank_of_layer(index)}",
                fix="use SharedLayerDesc, which shares between ranks too, or a schedule under "
                "which both are on one rank: DualPipeV has the first and the last stage there",
            )
    first_uses: dict[int, int] = {}
    for index, layer in enumerate(blueprints):
        shares = descriptions.is_shared(entries[index]) or not isinstance(layer, paddle.nn.Layer)
        for parameter in () if shares else layer.parameters():
            first_index = first_uses.setdefault(id(parameter), index)
            if rank_of_layer(first_index) != rank_of_layer(index):
                raise ConfigError(
                    "two layers on different ranks have the same parameter",
                    where=f"layers {first_index} and {index} of the list",
                    got=f"{parameter.name}, on the ranks {rank_of_layer(first_index)} and "
                    f"{rank_of_layer(index)}",
                    fix="describe both as SharedLayerDesc with one key",
                )


class Built(NamedTuple):
    """The layers of some entries of a list, as built in one process.

    Attributes:
        functions: The layers and functions to call, by number in the whole list.
        shared: The shared layers that are the first of their keys, by their path in the model.
        layers: All other layers, by their name in the model.
        names: For parameters and buffers whose name in this process is not the fully qualified
            one: the latter, by the former.
    """

    functions: dict[int, Callable[[Nest], Nest]]
    shared: dict[str, Layer]
    layers: dict[str, Layer]
    names: dict[str, str]

    def register(self, model: Layer) -> None:
        """Adds the layers to ``model`` as sublayers, the shared ones first."""
        holders = {name: paddle.nn.LayerDict() for name in (HOLDER, LOCAL_HOLDER)}
        for path, layer in self.shared.items():
            holder, _, key = path.partition(".")
            holders[holder][key] = layer
        for name, sublayer in holders.items():
            model.add_sublayer(name, sublayer)
        for name, layer in self.layers.items():
            model.add_sublayer(name, layer)

    def follow(self, model: Layer) -> None:
        """Replaces the layers here by those that the script has put at their paths in ``model``.

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
                arguments = [replaced.get(id(argument), argument) for argument in function.args]
                self.functions[index] = functools.partial(
                    function.func, *arguments, **function.keywords
                )


def _sublayer(model: Layer, path: str) -> Layer:
    """Returns the sublayer of ``model`` at a path; refuses a model without it."""
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
    """Builds some entries of a list; tied entries among these get the same layer or weights.

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
                blank = descriptions.build_without_memory(entry, index, blueprints.lent(index))
                if layer is not None:
                    for path, parameter in blank.named_parameters():
                        paddles_names.setdefault(layer.names[path], parameter.name)
            elif layer is None:
                function = descriptions.build(entry, index)
                if isinstance(function, paddle.nn.Layer):
                    built.layers[str(index)] = function
                built.functions[index] = function
            else:
                lent = {keyword: weights[name] for keyword, name in layer.lent.items()}
                new = descriptions.build(entry, index, lent)
                _register_shared(new, layer, built)
                _share_weights(new, layer, weights, paddles_names)
                for use in uses & owned:
                    forward = entries[use].forward_func
                    call = new if forward is None else functools.partial(forward, new)
                    built.functions[use] = call
    built.functions.update({index: built.functions.pop(index) for index in sorted(owned)})
    return built


def _register_shared(layer: Layer, shared: SharedLayer, built: Built) -> None:
    """Adds a shared layer to ``built``: the first of its key here gets the name of the key.

    Args:
        layer: The layer.
        shared: Its description.
        built: The layers built so far; changed in place.
    """
    if shared.path in built.shared:
        prefix = str(shared.indices[0])
        built.layers[prefix] = layer
    else:
        prefix = shared.path
        built.shared[prefix] = layer
    for path, name in shared.names.items():
        if f"{prefix}.{path}" != name:
            built.names[f"{prefix}.{path}"] = name


def _share_weights(
    layer: Layer, shared: SharedLayer, weights: dict[str, Tensor], paddles_names: Mapping[str, str]
) -> None:
    """Replaces the weights of a layer by shared weights that other layers of this process have.

    Args:
        layer: A new layer.
        shared: Its description.
        weights: The shared weights of this process so far, by fully qualified name; the layer's
            are added.
        paddles_names: Paddle's names of the weights whose first layer is on another rank, by fully
            qualified name; the layer's weights get these names.
    """
    for path, parameter in list(layer.named_parameters()):
        name = shared.names[path]
        parameter.name = paddles_names.get(name, parameter.name)
        first = weights.setdefault(name, parameter)
        if first is not parameter:
            owner, _, attribute = path.rpartition(".")
            sublayers = dict(layer.named_sublayers(include_self=True))
            setattr(sublayers[owner], attribute, first)


def called_through(function: Callable[[Nest], Nest]) -> tuple[Layer, ...]:
    """Returns the shared layer that ``function`` calls by a ``forward_func``, or ()."""
    return function.args if isinstance(function, functools.partial) else ()
