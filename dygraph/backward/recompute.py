"""Runs a piece of a stage so that what autograd saves is dropped, and computed again in backward.

A piece runs as ever, but each tensor that autograd would save is let go; the graph has a ticket in
its place. The first ticket that backward hands in runs the piece once more, from the same inputs,
random states and buffers, and fills all tickets. So backward itself, and with it every bit and the
order of every sum, is that of a model without recompute. (Chen et al.: Training Deep Nets with
Sublinear Memory Cost, arXiv:1604.06174.)
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Callable

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.dygraph.backward.own_state import changes
from fleetpipe.dygraph.nest import leaves_like, replace, tensors_of
from fleetpipe.dygraph.random_keys import RandomStates, random_states_kept
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.amp import automatic_casts
from fleetpipe.paddle_api.layer import state_slots
from fleetpipe.paddle_api.tensor import SavedBy, is_parameter, same_memory, switch_gradients_on

#: ``run(value)`` runs the layers of a piece.
Run = Callable[[Nest], Nest]

#: A dict of a layer's, the name of a buffer in it, and what stood there.
_State = list[tuple[dict[str, Tensor], str, Tensor]]


class RecomputedPiece:
    """Neighbouring layers of a stage, and what their first call showed about them."""

    def __init__(self, name: str, functions: Iterable[Callable[[Nest], Nest]]) -> None:
        functions = list(functions)
        self.name = name
        self.has_parameters = any(
            layer.parameters()
            for function in functions
            if _is_layer(function) or getattr(function, "counts_as_layer", False)
            for layer in layers_in(function)
        )
        self._layers = [
            part
            for function in functions
            for layer in layers_in(function)
            for part in layer.sublayers(include_self=True)
        ]
        #: Whether its layers write into its inputs; None before the first call.
        self.writes_into_inputs: bool | None = None
        #: Whether they ask for gradients, as ``paddle.grad`` does; likewise.
        self.differentiates: bool | None = None
        #: What a call changes, by whether each of its layers trains: known from a first call.
        self._changing: dict[tuple[bool, ...], set[tuple[int, str]]] = {}

    def needs_recompute(self, value: Nest) -> bool:
        """Whether Fleet would recompute it: it has parameters, and an input needs a gradient."""
        return (
            self.has_parameters
            and paddle.is_grad_enabled()
            and any(not tensor.stop_gradient for tensor in tensors_of(value))
        )

    def state(self) -> _State:
        """Returns the buffers and statistics of its layers."""
        return [
            (holder, name, holder[name])
            for layer in self._layers
            for holder, name in state_slots(layer)
        ]

    def changing_state(self) -> _State:
        """Returns copies of those that a call changes; of all before the first call."""
        changing = self._changing.get(self._modes())
        return [
            (holder, name, tensor.clone())
            for holder, name, tensor in self.state()
            if changing is None or (id(holder), name) in changing
        ]

    def learn(self, before: _State) -> None:
        """Compares the state with that before the first call; forgets what stayed as it was."""
        if self._modes() not in self._changing:
            before[:] = [
                (holder, name, tensor)
                for holder, name, tensor in before
                if holder[name].numpy().tobytes() != tensor.numpy().tobytes()
            ]
            self._changing[self._modes()] = {(id(holder), name) for holder, name, _ in before}

    def _modes(self) -> tuple[bool, ...]:
        return tuple(layer.training for layer in self._layers)


def call(piece: RecomputedPiece, run: Run, value: Nest) -> Nest:
    """Runs a piece so that it holds its inputs, and nothing else, until backward.

    Args:
        piece: The piece.
        run: Runs its layers; gives the same whenever it is called under the same states.
        value: What the first of them takes.

    Returns:
        What ``run(value)`` returns, with its graph.

    Raises:
        ConfigError: A layer wrote into the piece's input, or asked for gradients, and in its first
            call did not.
    """
    global _failure
    # One that nobody asked for, of a backward of the user's own.
    _failure = None
    rerun = _Rerun(piece, run, value)
    try:
        with _opened(rerun.pack, rerun.unpack):
            output = run(value)
    except Exception as error:
        raise cause_of(error)  # noqa: B904
    rerun.settle(value)
    return output


class _Ticket:
    """Stands in the graph for a saved tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor = None


class _Rerun:
    """What it takes to run a piece once more, and the tickets that wait for it."""

    def __init__(self, piece: RecomputedPiece, run: Run, value: Nest) -> None:
        self._piece = piece
        self._run = run
        tensors = list(tensors_of(value))
        self._versions = [tensor.inplace_version for tensor in tensors]
        copied = piece.writes_into_inputs is not False
        self._value = replace(value, leaves_like(tensors, copied))
        self._state = piece.changing_state()
        self._random = RandomStates()
        self._casts = automatic_casts()
        self._tickets: list[weakref.ref[_Ticket]] = []
        self._in_forward, self._differentiates = True, False

    def pack(self, tensor: Tensor) -> Tensor | _Ticket:
        if _stays(tensor):
            return tensor
        ticket = _Ticket()
        if self._piece.differentiates is not False:
            ticket.tensor = same_memory(tensor)
        self._tickets.append(weakref.ref(ticket))
        return ticket

    def unpack(self, ticket: _Ticket | Tensor) -> Tensor:
        global _failure
        if _stays(ticket):
            return ticket
        try:
            if self._in_forward:
                return self._saved(ticket)
            if ticket.tensor is None:
                self._again()
        except Exception as error:
            # Paddle would tell only that there is no tensor, and leave gradients off.
            _failure = error
            switch_gradients_on()
            raise
        # Handed over: what backward is through with is gone.
        tensor, ticket.tensor = ticket.tensor, None
        return tensor

    def _saved(self, ticket: _Ticket) -> Tensor:
        """Returns what a layer's own ``paddle.grad`` needs, which may need it again."""
        self._differentiates = True
        if ticket.tensor is None:
            raise ConfigError(
                "a layer computes gradients in its forward, and in its first call did not",
                where=self._piece.name,
                fix="call it the same way each time, or set recompute_interval=0",
            )
        return same_memory(ticket.tensor)

    def settle(self, value: Nest) -> None:
        """Ends the forward: learns from a first one what has to be copied for the next."""
        piece, tensors = self._piece, list(tensors_of(value))
        self._in_forward = False
        if piece.differentiates is not False:
            piece.differentiates = self._differentiates or bool(piece.differentiates)
            for ticket in filter(None, (reference() for reference in self._tickets)):
                ticket.tensor = None
        written = self._versions != [tensor.inplace_version for tensor in tensors]
        if piece.writes_into_inputs is None:
            piece.writes_into_inputs = written
            if not written:
                self._value = replace(value, leaves_like(tensors))
        elif written and not piece.writes_into_inputs:
            raise ConfigError(
                "a layer changed its input in place, and in its first call did not",
                where=self._piece.name,
                fix="call it the same way each time, or set recompute_interval=0",
            )
        piece.learn(self._state)

    def _again(self) -> None:
        filled: list[tuple[Tensor, int]] = []
        tickets = iter(self._tickets)

        def fill(tensor: Tensor) -> Tensor | None:
            if _stays(tensor):
                return tensor
            ticket = next(tickets, _lost)()
            if ticket is not None:
                ticket.tensor = same_memory(tensor)
                filled.append((tensor, tensor.inplace_version))
            return same_memory(tensor) if self._piece.differentiates else None

        before, _here.rerunning = _here.rerunning, True
        try:
            with random_states_kept(), self._state_of_then(), paddle.enable_grad(), self._casts():
                self._random.put_back()
                with _opened(fill, _kept if self._piece.differentiates else _refuse):
                    self._run(self._inputs())
        finally:
            _here.rerunning = before
        self._check(filled, next(tickets, None) is None)

    def _inputs(self) -> Nest:
        """Returns the inputs for another run."""
        if not self._piece.writes_into_inputs:
            return self._value
        # Not a leaf of the graph, because Paddle lets nobody write into one.
        return replace(self._value, {id(t): t.clone() for t in tensors_of(self._value)})

    @contextmanager
    def _state_of_then(self) -> Iterator[None]:
        """Gives the layers copies of their state as it was before the first run."""
        now = self._piece.state()
        then: dict[tuple[int, str], Tensor] = {}
        for holder, name, tensor in self._state:
            then[id(holder), name] = tensor
        for holder, name, tensor in now:
            state: Tensor = then.get((id(holder), name), tensor)
            holder[name] = state.clone()
        try:
            yield
        finally:
            for holder, name, tensor in now:
                holder[name] = tensor

    def _check(self, filled: Sequence[tuple[Tensor, int]], all_filled: bool) -> None:
        """Refuses a second run that was not like the first."""
        if not all_filled:
            raise ConfigError(
                "a recomputed piece saved fewer tensors than in its forward",
                where=self._piece.name,
                cause="a layer does something else when it is called again with the same input",
                fix="have its forward depend on its input, parameters and buffers alone",
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
    """Returns a layer itself, or the layer that a shared layer's ``forward_func`` is given."""
    if isinstance(function, functools.partial):
        return [part for part in (*function.args, *function.keywords.values()) if _is_layer(part)]
    return [function] if _is_layer(function) else []


def _stays(saved: Tensor | _Ticket) -> bool:
    """Whether the graph keeps what it would save: a PyLayer saves None, and parameters as such."""
    # In backward it may look for a parameter's main_grad.
    return saved is None or is_parameter(saved)


def _lost() -> None:
    """Stands for a ticket that there is no more, or never was."""


def _kept(packed: Tensor) -> Tensor:
    return packed if _stays(packed) else same_memory(packed)


def _refuse(_packed: object) -> None:
    raise RuntimeError("backward cannot run through the second run of a recomputed piece")


class _Here(threading.local):
    """What runs in a thread."""

    in_piece = False
    rerunning = False


_here = _Here()
_failure: Exception | None = None


@contextmanager
def _opened(
    pack: Callable[[Tensor], object], unpack: Callable[[Tensor | _Ticket], Tensor]
) -> Iterator[None]:
    """Within it autograd saves by way of ``pack``."""
    before, _here.in_piece = _here.in_piece, True
    saving = SavedBy(pack, unpack)
    try:
        saving.begin()
        changes.append(saving)
        try:
            yield
        finally:
            changes.remove(saving)
            saving.end()
    finally:
        _here.in_piece = before


def in_piece() -> bool:
    """Whether layers run just now whose activations are not kept."""
    return _here.in_piece


def rerunning() -> bool:
    """Whether layers run just now only to get their activations back."""
    return _here.rerunning


def cause_of(error: Exception) -> Exception:
    """Returns what really went wrong where backward failed because a piece could not run again."""
    global _failure
    cause, _failure = _failure, None
    return error if cause is None else cause
