"""The whole list of layers as one Layer in one process: the reference model of a pipeline.

Its layers are copies, which train as the originals do.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph import random_keys, tensor_parallel
from fleetpipe.dygraph.batch.losses import find_loss_with_extra_values
from fleetpipe.dygraph.layers.tied import Built, SharedLayer, build
from fleetpipe.dygraph.state.names import BufferSlot, ModelWithParts, hidden_buffers
from fleetpipe.dygraph.sums import Uses, find_in_layers, parameters_of
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import set_data

_Layers = TypeVar("_Layers")

#: Attributes of a parameter on several ranks that its copy in one process must not have.
_ATTRIBUTES_OF_RANKS = ("is_firstly_shared", "main_grad", "no_sync")


def copy_layers(value: _Layers, layers: Iterable[Any], shared: Iterable[Tensor] = ()) -> _Layers:
    """Returns a deep copy of layers that trains as the layers do.

    The copy has the hooks, modes and attributes of the layers, and the names and attributes of
    parameters, which Paddle's copy of a parameter lacks. A script may choose by them which
    parameters decay, and fleetpipe marks by attributes which shard a parameter is.

    Args:
        value: A layer, or a container of layers.
        layers: The layers in ``value``; functions are ignored.
        shared: Parameters whose copies use the memory of the originals.
    """
    copies: dict[int, Any] = {}
    with paddle.utils.unique_name.guard():
        for tensor in shared:
            set_data(copy.deepcopy(tensor, copies), tensor.detach())
        copied = copy.deepcopy(value, copies)
    for layer in layers:
        if not isinstance(layer, paddle.nn.Layer):
            continue
        # A layer with its own __deepcopy__ may not record its sublayers' copies in ``copies``.
        for parameter, copied_parameter in zip(layer.parameters(), copies[id(layer)].parameters()):
            for name in (
                vars(parameter).keys() - vars(copied_parameter).keys() - {*_ATTRIBUTES_OF_RANKS}
            ):
                setattr(copied_parameter, name, getattr(parameter, name))
            copied_parameter.name = parameter.name
    return copied


class SingleModel(ModelWithParts):
    """All layers of a pipeline's list in one Layer, with the same names of parameters.

    Args:
        built: All layers of the list, as built in this process.
        loss_fns: The loss functions of the pipeline. A loss function may take extra values of the
            layers besides the model's output, such as auxiliary losses of experts: then the layers
            add these to their outputs, as in the pipeline.
    """

    def __init__(self, built: Built, loss_fns: Sequence[Any] = ()) -> None:
        super().__init__()
        loss = find_loss_with_extra_values(loss_fns)
        functions = loss.carrying(built.functions, loss_fns) if loss else built.functions
        #: The layers and functions to call, in order.
        self._functions = list(functions.values())
        #: The uses of parameters that have gradients of their own; see :meth:`begin_uses`.
        self._uses: Uses | None = None
        built.register(self)

    @contextmanager
    def changed_before(
        self, layers: Collection[int], change: Callable[[int, Nest], Nest]
    ) -> Iterator[None]:
        """Changes the inputs of some layers while this context is open.

        Args:
            layers: The numbers of the layers in the list.
            change: ``change(layer, value)`` returns the input of a layer in place of ``value``.
        """
        functions = list(self._functions)
        for index in layers:
            self._functions[index] = _call_after(functools.partial(change, index), functions[index])
        try:
            yield
        finally:
            self._functions = functions

    def begin_uses(self) -> Uses:
        """Gives each use of a parameter by a layer a gradient of its own; returns the uses.

        That ends when :meth:`Uses.end` of the result is called.
        """
        parameters = {n: parameters_of(function) for n, function in enumerate(self._functions)}
        self._uses = Uses({0: parameters}, lambda n, p: find_in_layers(self._functions[n], p), [])
        return self._uses

    def hidden_buffers(self) -> dict[str, BufferSlot]:
        """Returns where layers have buffers that no state dict has, by layer number and path."""
        return hidden_buffers(dict(enumerate(self._functions)))

    def forward(self, value: Nest) -> Nest:
        """Runs the layers on the model's input ``value``, in order, and returns the last output."""
        # The random seeds of a batch: with them the layers draw what the pipeline's layers draw.
        keys = random_keys.current_keys()
        for index, function in enumerate(self._functions):
            if keys is not None:
                keys.enter(index, function)
            with nullcontext() if self._uses is None else self._uses.layer_context(index):
                value = function(value)
        return value


def single_model(
    entries: Sequence[Any], shared: Iterable[SharedLayer], loss_fns: Sequence[Any] = ()
) -> SingleModel:
    """Builds the whole list of layers in this process as one Layer, with fresh weights.

    Args:
        entries: The whole list of layers; built ones are copied.
        shared: The shared layers of the list.
        loss_fns: The loss functions, which may take extra values of the layers.

    Raises:
        ConfigError: A built layer holds shards, from which no full tensor can be made.
    """
    by_number = dict(enumerate(entries))
    # All entries but descriptions of layers.
    built = {i: e for i, e in by_number.items() if not hasattr(e, "build_layer")}
    tensor_parallel.refuse_shards(built)
    by_number.update(copy_layers(built, built.values()))
    with tensor_parallel.alone():
        return SingleModel(build([*by_number.values()], by_number, tuple(shared)), loss_fns)


def _call_after(
    change: Callable[[Nest], Nest], function: Callable[[Nest], Nest]
) -> Callable[[Nest], Nest]:
    """Returns a function that calls ``function`` with ``change(value)``."""
    return lambda value: function(change(value))
