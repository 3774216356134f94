"""Runs a piece of a stage without keeping activations, and computes them again in backward.

A piece is some consecutive layers. It runs as usual, but autograd saves a ticket, an empty object,
in the place of each tensor that it would save for backward. When backward reads the first ticket,
the piece runs again, from the same inputs, random states and buffers, and fills all tickets with
tensors. So backward has the same bits and the same order of sums as without recompute. (Chen et
al.: Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.) Start with :func:`call`.
"""

from __future__ import annotations

import functools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.dygraph.backward.layer_state import Copies, LayerStates, changes
from fleetpipe.dygraph.nest import leaf_like, replace, tensors_of
from fleetpipe.dygraph.random_keys import RandomStates, random_states_kept
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.amp import automatic_casts
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.tensor import (
    SavedTensorHooks,
    contiguous,
    copy_of,
    is_for_pylayer,
    is_parameter,
    layout_of,
    leaf_on_same_memory,
    switch_gradients_on,
    to_host,
    with_layout,
)

#: ``run(value)`` runs the layers of a piece and returns the output of the last one.
Run = Callable[[Nest], Nest]

#: The outputs of both runs are compared in the first 16 calls of a piece, then in every 16th call.
_COMPARED_CALLS = 16
#: On a GPU only so many numbers of a tensor are compared, with a tolerance relative to the largest.
_COMPARED_NUMBERS, _TOLERANCE = 4096, 0.1

#: The original error of a failed second run, which Paddle replaces; see :func:`cause_of`.
_failure: Exception | None = None


class RecomputedPiece:
    """Consecutive layers of a stage that are recomputed together."""

    def __init__(self, name: str, functions: Iterable[Callable[[Nest], Nest]]) -> None:
        """Describes consecutive layers that are recomputed together.

        Args:
            name: The name of these layers in messages.
            functions: The layers and functions, in order.
        """
        functions = list(functions)
        self.name = name
        self.plain_functions = [function for function in functions if not _is_layer(function)]
        # Fleet counts the parameters of layers alone, not of functions that call layers; a function
        # that stands for a captured layer counts as a layer.
        self.has_parameters = any(
            layer.parameters()
            for function in functions
            if _is_layer(function) or getattr(function, "counts_as_layer", False)
            for layer in layers_in(function)
        )
        self.layers = [
            sublayer
            for function in functions
            for layer in layers_in(function)
            for sublayer in layer.sublayers(include_self=True)
        ]
        #: Whether its layers compute gradients by ``paddle.grad``; None before the first call.
        self.differentiates: bool | None = None
        #: Copies of large buffers, which several calls may share.
        self.copies: Copies = weakref.WeakValueDictionary()
        self._calls = 0

    def needs_recompute(self, value: Nest) -> bool:
        """Whether a call with the argument ``value`` is recomputed, by Fleet's condition.

        The piece has parameters, and some tensor in ``value`` needs a gradient.
        """
        return (
            self.has_parameters
            and paddle.is_grad_enabled()
            and any(not tensor.stop_gradient for tensor in tensors_of(value))
        )

    def count_call(self) -> bool:
        """Counts a call of the piece; returns whether to compare the outputs of its two runs."""
        self._calls += 1
        # On a GPU each comparison makes the host wait for all queued operations.
        is_sample = device_kind() == "cpu" and self._calls % _COMPARED_CALLS == 0
        return self._calls <= _COMPARED_CALLS or is_sample


class SavedInputs:
    """Copies of the inputs of a stage's pieces, for the second runs of the pieces.

    A tensor that is an input of several pieces, such as a mask, is stored once.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        """Stores some inputs.

        Args:
            pairs: Inputs of pieces, each with a tensor of the same values to which nothing writes,
                and which is stored for the input without a copy.
        """
        self._saved: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        for tensor, unchanged in pairs:
            self._save(tensor, leaf_like(unchanged))

    def of(self, tensor: Tensor) -> Tensor:
        """Returns a stored copy, a leaf, of an input's current values; makes it if needed."""
        reference, version, leaf = self._saved.get(id(tensor), (_missing_ticket, 0, None))
        if version == tensor.inplace_version and reference() is tensor:
            return leaf
        return self._save(tensor, leaf_like(tensor, copied=True))

    def _save(self, tensor: Tensor, leaf: Tensor) -> Tensor:
        """Stores and returns ``leaf``, which has the current values of ``tensor``."""
        self._saved[id(tensor)] = weakref.ref(tensor), tensor.inplace_version, leaf
        return leaf


def call(piece: RecomputedPiece, run: Run, value: Nest, inputs: SavedInputs) -> Nest:
    """Runs consecutive layers so that only their inputs are kept until backward.

    Args:
        piece: The layers, which are recomputed together.
        run: Runs the layers of the piece; from the same states it returns the same values.
        value: The argument of the first layer, which may write to it.
        inputs: The stored inputs of all pieces of the stage.

    Returns:
        The result of ``run(value)``, with its graph.

    Raises:
        ConfigError: A layer computed gradients, but not in its first call, or it ran a backward.
    """
    global _failure
    # A failure may be left of a backward that the user's code ran.
    _failure = None
    rerun = _Rerun(piece, run, value, inputs)
    try:
        with _saving_tensors_by(rerun.pack, rerun.unpack):
            output = run(value)
    except Exception as error:
        raise cause_of(error)  # noqa: B904
    rerun.end_forward(output)
    return output


class _Ticket:
    """An object that autograd saves in the place of a tensor; the second run fills it."""

    __slots__ = ("__weakref__", "layout", "tensor")

    def __init__(self, saved: Tensor) -> None:
        """Creates an empty ticket for a tensor that autograd saves."""
        #: The layout of the saved tensor, by which backward reads any tensor that it gets.
        self.layout = layout_of(saved)
        self.tensor: Tensor = None


class _Rerun:
    """One call of a piece: the inputs and states for its second run, and the tickets to fill."""

    def __init__(self, piece: RecomputedPiece, run: Run, value: Nest, inputs: SavedInputs) -> None:
        """Stores the input ``value`` of ``piece``, and its layers' states, before the first run."""
        self._piece = piece
        self._run = run
        # The argument for the second run, with the stored leaves for the tensors of ``value``.
        saved = {id(tensor): inputs.of(tensor) for tensor in tensors_of(value)}
        self._value = replace(value, saved)
        # Whether a reshaped input is a view or a copy depends on the input's layout.
        self._layouts = [(saved[id(tensor)], layout_of(tensor)) for tensor in tensors_of(value)]
        self._states = LayerStates(piece.layers, piece.copies)
        #: The result of :func:`_bits` for the first run's output; None if it is not compared.
        self._bits: list[int | np.ndarray] | None = None
        self._random = RandomStates()
        self._casts = automatic_casts()
        #: References to the tickets, in the order in which autograd saved tensors; dead if backward
        #: no longer needs the ticket.
        self._tickets: list[weakref.ref[_Ticket]] = []
        #: Whether the first run is going on, and whether it has read a ticket for ``paddle.grad``.
        self._is_in_forward, self._differentiates = True, False

    def pack(self, tensor: Tensor) -> Tensor | _Ticket:
        """Called when autograd saves a tensor in the first run; returns what it saves: a ticket.

        Parameters are saved themselves.
        """
        if _is_kept_in_graph(tensor):
            return tensor
        ticket = _Ticket(tensor)
        if self._piece.differentiates is not False:
            ticket.tensor = tensor if is_for_pylayer() else leaf_on_same_memory(tensor)
        self._tickets.append(weakref.ref(ticket))
        return ticket

    def unpack(self, ticket: _Ticket | Tensor) -> Tensor:
        """Called when backward reads what :meth:`pack` has returned; returns the saved tensor.

        The first call in backward runs the piece again.
        """
        global _failure
        if _is_kept_in_graph(ticket):
            return ticket
        try:
            if self._is_in_forward:
                # A ``paddle.grad`` in the first run reads the tensor.
                self._differentiates = True
                if ticket.tensor is None:
                    raise ConfigError(
                        "a layer computes gradients in its forward, and in its first call did not",
                        where=self._piece.name,
                        fix="call it the same way each time, or set recompute_interval=0",
                    )
                tensor = ticket.tensor
                return tensor if is_for_pylayer() else leaf_on_same_memory(tensor)
            if ticket.tensor is None:
                self._run_again()
        except Exception as error:
            # Paddle would replace the error by that of a missing tensor, and leave gradients off.
            _failure = error
            switch_gradients_on()
            raise
        # The ticket lets go of the tensor, so backward frees it after use.
        tensor, ticket.tensor = ticket.tensor, None
        return tensor

    def end_forward(self, output: Nest) -> None:
        """Ends the first run, which had the result ``output``, and empties the tickets.

        If the layers of the piece call ``paddle.grad`` in their forwards, tickets hold tensors
        during later first runs, too.
        """
        piece = self._piece
        self._is_in_forward = False
        if piece.differentiates is not False:
            piece.differentiates = self._differentiates or bool(piece.differentiates)
            for ticket in filter(None, (reference() for reference in self._tickets)):
                ticket.tensor = None
        if piece.count_call():
            self._bits = _bits(output)

    def _run_again(self) -> None:
        """Runs the piece again from the stored inputs and states, and fills the tickets."""
        filled: list[tuple[Tensor, int]] = []
        tickets = iter(self._tickets)

        def fill(tensor: Tensor) -> Tensor | None:
            """Called when autograd saves a tensor in the second run: fills the next ticket.

            Returns:
                What the second run's own graph saves. A parameter is saved itself. Of any other
                tensor nothing (None), since no backward reads that graph, unless layers call
                ``paddle.grad`` in their forwards: then a ``PyLayer`` saves the tensor itself, and
                an operation a leaf on the same memory.
            """
            if _is_kept_in_graph(tensor):
                return tensor
            ticket = next(tickets, _missing_ticket)()
            # None if backward no longer needs the ticket, or the first run saved fewer tensors.
            if ticket is not None:
                laid_out = with_layout(tensor.detach(), ticket.layout)
                ticket.tensor = leaf_on_same_memory(laid_out)
                ticket.tensor.stop_gradient = tensor.stop_gradient
                filled.append((tensor, tensor.inplace_version))
            if not self._piece.differentiates:
                return None
            return tensor if is_for_pylayer() else leaf_on_same_memory(tensor)

        before, _flags.rerunning = _flags.rerunning, True
        try:
            states = self._states.put_back(self._piece.plain_functions)
            with random_states_kept(), states, paddle.enable_grad(), self._casts():
                # Copies, because Paddle allows no writes into leaves of a graph.
                copies = {
                    id(leaf): with_layout(copy_of(leaf), layout) for leaf, layout in self._layouts
                }
                inputs = replace(self._value, copies)
                self._random.put_back()
                with _saving_tensors_by(
                    fill, _unpack_for_paddle_grad if self._piece.differentiates else _refuse_unpack
                ):
                    output = self._run(inputs)
        finally:
            _flags.rerunning = before
        self._check(filled, next(tickets, None) is None, output)

    def _check(self, filled: Sequence[tuple[Tensor, int]], all_filled: bool, output: Nest) -> None:
        """Refuses a second run that differs from the first, or tensors that layers wrote to.

        Args:
            filled: The tensors in the tickets, each with its version when it was saved.
            all_filled: Whether the second run has saved as many tensors as the first one.
            output: The result of the second run.
        """
        if not all_filled or (
            self._bits is not None and not _runs_agree(self._bits, _bits(output))
        ):
            raise ConfigError(
                "a recomputed piece gave other numbers when backward ran it again"
                if all_filled
                else "a recomputed piece saved fewer tensors than in its forward",
                where=self._piece.name,
                cause="a layer does something else when it is called again with the same input: it "
                "draws from a generator of its own, or changes a list or another object",
                fix="draw from Paddle's, NumPy's or Python's own generator, keep what changes in "
                "a buffer or assign it anew (self.seen = [*self.seen, x]), or set "
                "recompute_interval=0",
            )
        if any(tensor.inplace_version != version for tensor, version in filled):
            raise ConfigError(
                "a tensor that backward needs was changed in place after it was saved",
                where=self._piece.name,
                cause="Paddle refuses that without recompute too",
                fix="use the operation that returns a new tensor, such as tanh instead of tanh_",
            )


def _is_layer(function: object) -> bool:
    return isinstance(function, paddle.nn.Layer)


def layers_in(function: Callable[[Nest], Nest]) -> list[Layer]:
    """Returns a layer itself, or the layers among the arguments of a ``functools.partial``."""
    if isinstance(function, functools.partial):
        return [part for part in (*function.args, *function.keywords.values()) if _is_layer(part)]
    return [function] if _is_layer(function) else []


def _is_kept_in_graph(saved: Tensor | _Ticket) -> bool:
    """Whether autograd saves a value itself: a parameter, or None, which a ``PyLayer`` may save."""
    # Backward may read a parameter's main_grad.
    return saved is None or is_parameter(saved)


def _bits(value: Nest) -> list[int | np.ndarray]:
    """Returns a checksum of each tensor in an output; on a GPU the tensor's first numbers."""
    tensors = [tensor.detach() for tensor in tensors_of(value) if 0 not in tensor.shape]
    if device_kind() != "cpu":
        parts = (tensor.flatten()[:_COMPARED_NUMBERS].astype("float32") for tensor in tensors)
        return [to_host(part).numpy() for part in parts]
    return [zlib.crc32(contiguous(tensor).numpy()) for tensor in tensors]


def _runs_agree(first: Sequence[int | np.ndarray], again: Sequence[int | np.ndarray]) -> bool:
    """Whether the results of :func:`_bits` of two runs agree.

    Checksums must be equal; numbers of a GPU, whose operations may vary, approximately so.
    """

    def agree(before: int | np.ndarray, after: int | np.ndarray) -> bool:
        """Whether the results of both runs for one tensor agree."""
        if isinstance(before, int):
            return before == after
        tolerance = _TOLERANCE * np.abs(before).max()
        return np.allclose(before, after, 0, tolerance, equal_nan=True)

    return len(first) == len(again) and all(map(agree, first, again))


def _missing_ticket() -> None:
    """Stands for the reference to a missing object: returns None, as a dead reference does."""


def _unpack_for_paddle_grad(packed: Tensor) -> Tensor:
    """Returns a tensor that autograd has saved in the second run to a ``paddle.grad`` there."""
    return packed if _is_kept_in_graph(packed) or is_for_pylayer() else leaf_on_same_memory(packed)


def _refuse_backward(*_arguments: object) -> None:
    """Called when a layer of a piece runs ``backward()`` in its forward: raises a ConfigError."""
    raise ConfigError(
        "a layer that is recomputed runs backward() in its forward",
        cause="it would run again with the layer, and add the same gradients twice",
        fix="return that loss with the output, for loss_fn to add, or set recompute_interval=0",
    )


def _refuse_unpack(_packed: object) -> None:
    """Called when a backward reads from the graph of a second run: raises a ConfigError."""
    global _failure
    _failure = ConfigError(
        "backward came to what a recomputed piece computed when backward ran it again",
        cause="a layer leaves a tensor, as an auxiliary loss, where the loss function reads it",
        fix="return it with the output, for loss_fn to add, or set recompute_interval=0",
    )
    switch_gradients_on()
    raise _failure


class _ThreadFlags(threading.local):
    """Whether this thread runs recomputed layers now, and whether for the second time."""

    in_piece = False
    rerunning = False


_flags = _ThreadFlags()


@contextmanager
def _saving_tensors_by(
    pack: Callable[[Tensor], object], unpack: Callable[[Tensor | _Ticket], Tensor]
) -> Iterator[None]:
    """A context in which autograd saves ``pack(tensor)``, and reads it back by ``unpack``."""
    before, _flags.in_piece = _flags.in_piece, True
    saving = SavedTensorHooks(pack, unpack, _refuse_backward)
    try:
        saving.begin()
        changes.append(saving)
        try:
            yield
        finally:
            changes.remove(saving)
            saving.end()
    finally:
        _flags.in_piece = before


def is_in_piece() -> bool:
    """Whether this thread now runs layers that backward will run again, without activations."""
    return _flags.in_piece


def rerunning() -> bool:
    """Whether this thread now runs layers again, for the activations that backward needs."""
    return _flags.rerunning


def cause_of(error: Exception) -> Exception:
    """Returns the original error of a failed second run in a backward, or ``error`` itself."""
    global _failure
    cause, _failure = _failure, None
    return error if cause is None else cause
