"""Runs the layers of a stage in order, each with its random seed, and recomputes pieces of stages.

An error names the layer that refused a value, and the value; Paddle's errors name an operation
only. Start with :class:`StageRunner`.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from fleetpipe.aliases import Layer, Nest
from fleetpipe.dygraph import gradients, random_keys
from fleetpipe.dygraph.backward import recompute
from fleetpipe.dygraph.backward.recompute import RecomputedPiece, SavedInputs, layers_in
from fleetpipe.dygraph.nest import copies_of, copy_tensors, differentiable, outline, replace
from fleetpipe.dygraph.sums import Uses
from fleetpipe.errors import (
    BoundaryError,
    ConfigError,
    FleetPipeError,
    StateError,
    reason,
    require_whole,
)
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.partition import Partition
from fleetpipe.schedules.action import GlobalMicroBatch

#: Paddle's message if a device has no kernel for any dtype.
_NO_KERNEL = re.compile(r"The kernel `\w+` is not registered|of kernel `\w+`.*wrong Backend `\w+`")

#: The errors of an operation that refuses a value; Gloo and the system raise others.
_OF_VALUES = (
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    AssertionError,
    NotImplementedError,
)

#: ``run(value, micro_batch)`` runs layers on the argument of the first one. The micro-batch is the
#: global number in a run of a plan, and None in a direct call.
Run = Callable[[Nest, GlobalMicroBatch | None], Nest]


def require_dynamic_graph(what: str) -> None:
    """Refuses ``what``, which needs dynamic graph, if static graph is on."""
    if not paddle.in_dynamic_mode():
        raise StateError(
            f"static graph is on, and {what} needs dynamic graph",
            cause="paddle.enable_static() was called, by the script or by a library",
            fix="call paddle.disable_static() before; in static graph use device_guard and "
            "fleet.distributed_optimizer(..).minimize(loss)",
        )


def is_refusal(error: Exception, value: Nest, caller: str) -> bool:
    """Whether a layer failed because of the value that it got.

    It did if Paddle or the call itself refused the value, or if the layer's code could not unpack
    the value or expected another type.

    Args:
        error: The error of the layer.
        value: The argument of the layer.
        caller: The file with the call of the layer.
    """
    text = str(error)
    # Paddle raises an error of another class if it has no kernel for the value's dtype.
    if isinstance(error, FleetPipeError) or not (
        isinstance(error, _OF_VALUES) or "(NotFound)" in text
    ):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raised_in = Path(frame.f_code.co_filename)
    inside_paddle = Path(paddle.__file__).parent in raised_in.parents
    # An operator such as + has no Python frame in Paddle.
    if inside_paddle or raised_in == Path(caller) or "(InvalidArgument)" in text:
        return True
    kind = rf"\b{type(value).__name__}\b"
    another_kind = isinstance(error, (TypeError, AttributeError)) and re.search(kind, text)
    return bool(another_kind) or (isinstance(error, (TypeError, ValueError)) and "unpack" in text)


def refusal(
    error: Exception, partition: Partition, index: int, layer: Callable[[Nest], Nest], value: Nest
) -> BoundaryError:
    """Returns the error to raise in the place of the error of layer ``index`` for ``value``."""
    if gradients.is_raised_in_paddle_grad(error):
        return gradients.grad_across_stages(error, _title(partition, index), value)
    if "one pair of hooks" in str(error):
        return BoundaryError(
            f"{_title(partition, index)} is recomputed, and opens saved_tensors_hooks itself",
            expected="one pair of hooks at a time, as Paddle has it",
            cause="recompute(use_reentrant=False) in the layer, or saved_tensors_hooks of its own",
            fix="set recompute_interval=0, or call recompute with use_reentrant=True",
        )
    no_kernel = _NO_KERNEL.search(str(error))
    if no_kernel is not None:
        return BoundaryError(
            f"{_title(partition, index)} cannot run on this device, a {device_kind()}",
            cause=f"Paddle has no kernel there: {no_kernel[0]}",
            fix="run on a GPU, or use another layer: BatchNorm1D or 2D for SyncBatchNorm, whose "
            "statistics are then of each replica's rows",
        )
    part = _part(error, layer, value)
    if part is not None:
        return _refusal_inside(error, part, partition, index, value)
    before = f"what layer {index - 1} returned" if index else "the inputs of the batch"
    stage = partition.stage_of(index)
    first = index == partition.boundaries[stage]
    return BoundaryError(
        f"{_title(partition, index)} cannot take {before}",
        where=f"first layer of stage {stage}" if first else None,
        expected=_sizes(layer),
        got=_arguments_named(partition, index, value),
        cause=reason(error),
        fix=_advice(error, index, value),
    )


class _Part(NamedTuple):
    """A sublayer that refused a value: its path in the layer of the list, and the value."""

    path: str
    layer: Layer
    value: Nest


def _part(error: Exception, layer: Callable[[Nest], Nest], value: Nest) -> _Part | None:
    """Returns the innermost sublayer that raised ``error``; None if it got ``value`` itself.

    In that case the error is about ``value`` and the layer before.
    """
    if not isinstance(layer, paddle.nn.Layer):
        return None
    paths = {id(part): path for path, part in layer.named_sublayers()}
    whole = value if isinstance(value, (tuple, list)) else (value,)
    inner = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code, names = frame.f_code, frame.f_locals
        part = names.get("self")
        if code.co_name != "forward" or id(part) not in paths:
            continue
        arguments = [names.get(name) for name in code.co_varnames[1 : code.co_argcount]]
        tensors = tuple(one for one in arguments if isinstance(one, paddle.Tensor))
        if tensors and not any(tensors[0] is one for one in whole):
            only = tensors[0] if len(tensors) == 1 else tensors
            inner = _Part(paths[id(part)], part, only)
    return inner


def _refusal_inside(
    error: Exception, part: _Part, partition: Partition, index: int, value: Nest
) -> BoundaryError:
    """Returns the error of a composite layer whose sublayer got a value that does not fit."""
    return BoundaryError(
        f"{_title(partition, index)}: its {part.path} cannot take what the layer gives it",
        expected=_sizes(part.layer),
        got=f"{outline(part.value)}; the layer itself was given "
        f"{_arguments_named(partition, index, value)}",
        cause=reason(error),
        fix=f"change {part.path} of layer {index}, or what stands before it there, so that they "
        "fit",
    )


def _arguments_named(partition: Partition, index: int, value: Nest) -> str:
    """Returns a description of a layer's argument, and the layer that returned it."""
    giver = f", from {_title(partition, index - 1)}" if index else ""
    return f"{outline(value)}{giver}"


def _title(partition: Partition, index: int) -> str:
    name = partition.layers[index].name
    return f"layer {index} ({name})" if name else f"layer {index}"


def _sizes(layer: Layer) -> str | None:
    """Returns the sizes with which a layer of Paddle's was built, as text."""
    sizes = layer.extra_repr() if isinstance(layer, paddle.nn.Layer) else ""
    return f"what {type(layer).__name__}({sizes}) takes" if sizes else None


def _advice(error: Exception, index: int, value: Nest) -> str:
    giver = f"layer {index - 1} return" if index else "the batch give"
    several = isinstance(error, TypeError) and "positional argument" in str(error)
    if isinstance(value, (tuple, list)):
        kind = type(value).__name__
        if several:
            return f"a layer takes one argument, here a {kind}: write forward(self, args)"
        return f"have {giver} one Tensor, or take the {kind} apart in a function before the layer"
    if several or "unpack" in str(error):
        return f"have {giver} a tuple, which a layer takes as one argument: forward(self, args)"
    return (
        f"change layer {index - 1} or {index} so that they fit"
        if index
        else ("change layer 0, or the inputs, so that they fit")
    )


class _Step(NamedTuple):
    """A layer and its number in the whole list."""

    number: int
    function: Callable[[Nest], Nest]


_Steps = tuple[_Step, ...]


class StageRunner:
    """Calls the layers of this process's stages, each with the result of the one before."""

    def __init__(
        self,
        functions: Mapping[int, Callable[[Nest], Nest]],
        partition: Partition,
        recompute_interval: int = 0,
        recompute: Collection[int] = (),
    ) -> None:
        """Creates a runner of built layers.

        Args:
            functions: The layers and functions by their number in the whole list.
            partition: The cut into stages.
            recompute_interval: The number of layers of a recomputed piece; 0 for none.
            recompute: Layers that are recomputed one by one, if there is no interval.
        """
        self._functions = functions
        self._partition = partition
        self._interval = recompute_interval
        self._chosen = frozenset(recompute)
        self._runs: dict[int, Run] = {}
        #: The uses of parameters in the current batch, if each use has its own gradient.
        self.uses: Uses | None = None

    def function(self, stage: int) -> Run:
        """Returns a function that runs the layers of ``stage`` on copies of its argument.

        Layers may write into their input, but Paddle allows no writes into a leaf, and the memory
        of the argument may be in use elsewhere. The function raises a ``BoundaryError`` if a layer
        cannot take the result of the layer before.
        """
        return self._runs.get(stage) or self._run_of(stage)

    def function_without_copies(self, stage: int) -> Run:
        """Returns a function that runs the layers of ``stage`` without copies and recompute."""
        first, last = self._partition.boundaries[stage : stage + 2]
        return functools.partial(self._run_steps, self._steps(first, last))

    def _run_of(self, stage: int) -> Run:
        """Builds and stores the function that runs a stage; recomputed pieces in it have state."""
        first, last = self._partition.boundaries[stage : stage + 2]
        if self._interval or not self._chosen.isdisjoint(range(first, last)):
            starts = range(first, last, self._interval or 1)
            pieces = [self._piece(stage, *ends) for ends in zip(starts, [*starts[1:], last])]
            run: Run = functools.partial(self._run_pieces, pieces)
        else:
            run = functools.partial(self._run_steps, self._steps(first, last), on_copies=True)
        self._runs[stage] = run
        return run

    def _steps(self, start: int, end: int) -> _Steps:
        return tuple(_Step(index, self._functions[index]) for index in range(start, end))

    def _piece(self, stage: int, start: int, end: int) -> tuple[_Steps, RecomputedPiece | None]:
        """Returns some layers of a stage, and the piece if they are recomputed."""
        steps = self._steps(start, end)
        if not (self._interval or start in self._chosen):
            return steps, None
        names = ", ".join(layer.name for layer in self._partition.layers[start:end])
        name = f"stage {stage}, layers {start} to {end - 1} ({names})"
        return steps, RecomputedPiece(name, [function for _, function in steps])

    def _run_pieces(
        self,
        pieces: list[tuple[_Steps, RecomputedPiece | None]],
        value: Nest,
        micro_batch: GlobalMicroBatch | None,
    ) -> Nest:
        """Calls the layers of pieces in order, and recomputes the pieces that need it."""
        copies = copies_of(value)
        inputs = SavedInputs((copies[id(tensor)], tensor) for tensor in differentiable(value))
        value = replace(value, copies)
        for steps, piece in pieces:
            if self._interval and type(value) is tuple and len(value) == 1:
                (value,) = value  # as Fleet does at the start of each piece
            run = functools.partial(self._run_steps, steps, micro_batch=micro_batch)
            if piece is not None and piece.needs_recompute(value):
                value = recompute.call(piece, run, value, inputs)
            else:
                value = run(value)
        return value

    def _run_steps(
        self,
        steps: _Steps,
        value: Nest,
        micro_batch: GlobalMicroBatch | None,
        on_copies: bool = False,
    ) -> Nest:
        """Calls layers in order; in a run of a plan, each with its own random seed."""
        if on_copies:
            value = copy_tensors(value)
        keys = None if micro_batch is None else random_keys.current()
        if keys is not None and micro_batch is not None:
            keys.micro_batch = micro_batch
        for number, function in steps:
            if keys is not None:
                keys.enter(number, function)
            try:
                if self.uses is None:
                    value = function(value)
                else:
                    with self.uses.running(number):
                        value = function(value)
            except Exception as error:
                if not is_refusal(error, value, __file__):
                    raise
                raise refusal(error, self._partition, number, function, value) from error
        return value


def checked_interval(recompute_interval: object, recompute_ctx: object) -> int:
    """Returns the number of layers that are recomputed together; 0 for none.

    Args:
        recompute_interval: The option of ``PipelineLayer``.
        recompute_ctx: The option of ``PipelineLayer``. Its ``offload`` and ``partition`` change
            where Fleet keeps the inputs of a piece; here they have no effect.

    Raises:
        ConfigError: The interval is not a number of layers, or ``recompute_ctx`` is missing.
    """
    rule = "recompute_interval is a number of layers, or 0 for no recompute"
    fix = "give a whole number of 0 or more"
    interval = require_whole("recompute_interval", recompute_interval, 0, rule=rule, fix=fix)
    if interval and recompute_ctx is None:
        raise ConfigError(
            "recompute_interval needs recompute_ctx, as it does in Fleet",
            got=f"recompute_interval={interval}, recompute_ctx=None",
            fix='pass recompute_ctx={"mp_group": hcg.get_model_parallel_group(), '
            '"offload": False, "partition": False}',
        )
    return interval


class PipelineLayerChunk(paddle.nn.Layer):
    """The layers of one stage, to inspect; its sublayers are named by their numbers in the list.

    A shared layer that is called through its ``forward_func`` is named by its key.
    """

    def __init__(
        self, functions: Mapping[int, Callable[[Nest], Nest]], keys: Mapping[int, str]
    ) -> None:
        """Creates a chunk.

        Args:
            functions: The built layers and functions in order, by number in the whole list.
            keys: The keys of shared layers, by number.
        """
        super().__init__()
        self.run_function = list(functions.values())
        for index, function in functions.items():
            if isinstance(function, paddle.nn.Layer):
                self.add_sublayer(str(index), function)
            elif index in keys:
                self.add_sublayer(keys[index], *layers_in(function))

    def get_run_function(self) -> list[Callable[[Nest], Nest]]:
        """Returns the layers and functions in order."""
        return self.run_function

    def __iter__(self) -> Iterator[Callable[[Nest], Nest]]:
        return iter(self.run_function)

    def __len__(self) -> int:
        return len(self.run_function)

    def forward(self, *_args: object, **_named: object) -> NoReturn:
        """Refuses to be called, as Fleet's chunk does.

        Raises:
            PermissionError: Always.
        """
        raise PermissionError(
            "a chunk of a PipelineLayer cannot be called: call the PipelineLayer with chunk_id"
        )
