"""Reads and changes layers: their hooks, options, and tables of parameters and buffers.

All names are the same in 2.6.2 and 3.3.x, except for those of recompute.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from paddle.base import unique_name
from paddle.incubate.distributed.models.moe import moe_layer as _moe_layer
from paddle.incubate.distributed.models.moe import utils as _moe_utils
from paddle.incubate.distributed.models.moe.gate import naive_gate as _naive_gate
from paddle.jit.dy2static.program_translator import StaticFunction

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.paddle_api import paddle, replaced
from fleetpipe.paddle_api.tensor import has_memory

MoELayer: type[Layer] = _moe_layer.MoELayer
#: The gate of ``MoELayer`` that has no auxiliary loss.
NaiveGate: type[Layer] = _naive_gate.NaiveGate
#: The operations that send tokens to the experts of ``MoELayer``, and the experts' outputs back.
MoEScatter: Any = _moe_layer.MoEScatter
MoEGather: Any = _moe_layer.MoEGather
#: The modules of Paddle's mixture of experts.
_paddle_moe = (_moe_layer, _moe_utils)


# A layer that has not set its mode is in evaluation: ``fleetpipe.dygraph.model.owned_stages``.
paddle.nn.Layer.training = False

#: Attributes of a layer: its parameters, its buffers and its sublayers, each a dict by name.
TABLES = ("_parameters", "_buffers", "_sub_layers")
#: Attribute of a layer: its name with the number that Paddle counts.
FULL_NAME = "_full_name"

#: The models that :func:`recompute_without_reentrance` has changed.
_DATA_PARALLEL: weakref.WeakSet[Any] = weakref.WeakSet()


def save_name_counters() -> Callable[[], None]:
    """Returns a function that sets Paddle's counters of names back to their values of now.

    Layers that are built in between then leave no gap in the names of later ones.
    """
    counts, names = unique_name.generator.ids, unique_name.dygraph_parameter_name_checker._name_set
    counts_before, names_before = dict(counts), set(names)

    def restore() -> None:
        counts.clear()
        counts.update(counts_before)
        names.intersection_update(names_before)

    return restore


def forward_hooks(layer: Layer) -> list[dict[int, Any]]:
    """Returns the hooks that run before a layer's forward, and those that run after it, by id."""
    attributes = vars(layer)
    return [attributes["_forward_pre_hooks"], attributes["_forward_post_hooks"]]


def is_patched(layer: Layer) -> bool:
    """Returns whether a layer's forward has hooks, or was replaced in the layer itself."""
    return has_hooks(layer) or "forward" in vars(layer)


def state_slots(layer: Layer) -> Iterator[tuple[dict[str, Tensor], str]]:
    """Yields the location of each tensor of a layer that its forward may change.

    These are its buffers, and its frozen parameters of at most one dimension, in which some layers
    have statistics. A location is a table of the layer (a dict), and a name in it.
    """
    attributes = vars(layer)
    for name, tensor in attributes["_buffers"].items():
        # Recurrent layers have a buffer for GPUs, which has no memory on a CPU.
        if tensor is not None and has_memory(tensor):
            yield attributes["_buffers"], name
    for name, tensor in attributes["_parameters"].items():
        # On several ranks a plain model has memory only for the parameters of its stages.
        is_state = tensor is not None and tensor.stop_gradient and tensor.ndim <= 1
        if is_state and has_memory(tensor):
            yield attributes["_parameters"], name


def option_of(layer: Layer, name: str, default: object) -> object:
    """Returns an option of a layer, also one that Paddle's layer has under a private name.

    Args:
        layer: The layer.
        name: The option, without an underscore in front.
        default: The value if the layer has no such option.
    """
    return getattr(layer, name, getattr(layer, f"_{name}", default))


def is_static(layer: Layer) -> bool:
    """Returns whether ``paddle.jit.to_static`` has turned a layer's forward into a static graph."""
    return isinstance(layer.forward, StaticFunction)


def parameters_in(layer: Layer) -> dict[str, Tensor | None]:
    """Returns the dict, by name, in which a layer stores its own parameters."""
    table: dict[str, Tensor | None] = layer._parameters
    return table


def buffers_in(layer: Layer) -> dict[str, Tensor | None]:
    """Returns the dict, by name, in which a layer stores its own buffers."""
    table: dict[str, Tensor | None] = vars(layer).get("_buffers", {})
    return table


def put_buffer(layer: Layer, path: str, tensor: Tensor) -> None:
    """Sets the buffer at a path below a layer, such as ``"0.norm.mean"``; replaces an attribute."""
    parent, _, name = path.rpartition(".")
    owner = layer_at(layer, parent)
    vars(owner).pop(name, None)
    buffers_in(owner)[name] = tensor


def layer_at(layer: Layer, path: str) -> Layer | None:
    """Returns the sublayer at a path in a layer; the layer itself for "", None if there is none."""
    for name in filter(None, path.split(".")):
        layer = None if layer is None else sublayers_in(layer).get(name)
    return layer


def sublayers_in(layer: Layer) -> dict[str, Layer | None]:
    """Returns the dict, by name, in which a layer stores its direct sublayers."""
    table: dict[str, Layer | None] = layer._sub_layers
    return table


def share_tables(source: Layer, target: Layer) -> None:
    """Makes ``target`` use the same tables of parameters and sublayers as ``source``."""
    for table in TABLES:
        target.__dict__[table] = getattr(source, table)
    copy_unsaved_names(source, target)


def copy_unsaved_names(source: Layer, target: Layer) -> None:
    """Makes ``target`` leave the same buffers out of its state dict as ``source``."""
    target._non_persistable_buffer_names_set = source._non_persistable_buffer_names_set


def has_hooks(layer: Layer) -> bool:
    """Returns whether a layer has hooks around its forward."""
    return any(forward_hooks(layer))


def wrapped_layer(layer: Layer) -> Layer | None:
    """Returns the layer inside one of Paddle's wrappers, such as ``DataParallel``; else None."""
    return layer._layers if list(sublayers_in(layer)) == ["_layers"] else None


def replace_in_moe(**functions: Any) -> None:
    """Makes Paddle's ``MoELayer`` and its gates use other functions, by the replaced names."""
    for module in _paddle_moe:
        for name in functions.keys() & vars(module).keys():
            setattr(module, name, functions[name])


class RecomputingDataParallel(paddle.DataParallel):
    """A ``DataParallel`` that recomputes by hooks of saved tensors, as ``use_reentrant=False``.

    By default recompute is a PyLayer that runs a backward within the backward. DataParallel takes
    the end of the inner backward for the end of the whole one: it does not average gradients that
    are computed later, and the weights of the replicas diverge.

    Attributes:
        synchronizes: Whether the backward of the last forward averages gradients.
    """

    synchronizes = True

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Calls the wrapped layers."""
        if paddle.is_grad_enabled():
            self.synchronizes = self.grad_need_sync
        module = importlib.import_module("paddle.distributed.fleet.recompute.recompute")
        by_hooks = module._recompute_without_reentrant

        def apply(function: Callable[..., Any], preserve: bool, *arguments: Any) -> Any:
            """Replaces ``RecomputeFunction.apply``; ``preserve`` restores the random states."""
            if hasattr(module, "custom_state_manager"):  # 3.3.x, which has more arguments
                _offloaded, get_state, set_state, *rest = arguments
                return by_hooks(function, get_state, set_state, preserve, *rest)
            # 2.6.2 saves the generator's state only for the kinds of device that it lists.
            with replaced((paddle.device, "get_all_custom_device_type", lambda: ["cpu"])):
                return by_hooks(function, preserve, *arguments)

        with replaced((module, "RecomputeFunction", SimpleNamespace(apply=apply))):
            return super().forward(*inputs, **options)


def recompute_without_reentrance(model: Layer) -> Layer:
    """Makes recompute inside of a ``DataParallel`` model work by hooks; returns the same model.

    The model becomes a :class:`RecomputingDataParallel`, which says why. A model of another class
    does not change.
    """
    if type(model) is paddle.DataParallel:
        model.__class__ = RecomputingDataParallel
        _DATA_PARALLEL.add(model)
    return model


def has_unaveraged_gradients(parameters: Sequence[Any]) -> bool:
    """Returns whether some parameter is in a ``DataParallel`` whose backward averages no gradients.

    That is the case if its last forward ran within ``no_sync``.
    """
    ids = {id(parameter) for parameter in parameters}
    models = [model for model in _DATA_PARALLEL if not model.synchronizes]
    return any(id(parameter) in ids for model in models for parameter in model.parameters())
