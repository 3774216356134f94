"""Runs the layers of a stage in order, each with its random seed, and recomputes pieces of stages.

A piece is some consecutive layers. If a layer cannot take a value, the error names the layer and
describes the value; Paddle's errors name only an operation. Start with :class:`StageRunner`.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

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

#: The classes of errors of an operation that cannot take a value; Gloo and the system raise others.
_VALUE_ERRORS = (
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    AssertionError,
    NotImplementedError,
)

#: ``run(value, micro_batch)`` runs the layers of a stage; ``value`` is the first one's argument.
#: The micro-batch is a global number while a plan runs, and None in a direct call.
Run = Callable[[Nest, GlobalMicroBatch | None], Nest]


def require_dynamic_graph(what: str) -> None:
    """Refuses a call in static graph; ``what``, for the error, is what needs dynamic graph."""
    if not paddle.in_dynamic_mode():
        raise StateError(
            f"static graph is on, and {what} needs dynamic graph",
            cause="paddle.enable_static() was called, by the script or by a library",
            fix="call paddle.disable_static() before; in static graph use device_guard and "
            "fleet.distributed_optimizer(..).minimize(loss)",
        )


def is_error_of_value(error: Exception, value: Nest, caller: str) -> bool:
    """Whether a layer failed because of the value that it got.

    That is so if Paddle or the call itself refused the value, or if the layer's code could not
    unpack the value or expected another type.

    Args:
        error: The error of the layer.
        value: The argument of the layer.
        caller: The file with the call of the layer.
    """
    text = str(error)
    # Paddle raises an error of another class if it has no kernel for the value's dtype.
    if isinstance(error, FleetPipeError) or not (
        isinstance(error, _VALUE_ERRORS) or "(NotFound)" in text
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


def layer_error(
    error: Exception, partition: Partition, index: int, layer: Callable[[Nest], Nest], value: Nest
) -> BoundaryError:
    """Returns the error to raise if a layer could not take its argument.

    Args:
        error: The error of the layer.
        partition: The cut into stages, with the names of layers.
        index: The number of the layer in the whole list.
        layer: The layer, or a function.
        value: Its argument.
    """
    name = _describe_layer(partition, index)
    if gradients.is_raised_in_paddle_grad(error):
        return gradients.grad_across_stages_error(error, name, value)
    if "one pair of hooks" in str(error):
        return BoundaryError(
            f"{name} is recomputed, and opens saved_tensors_hooks itself",
            expected="one pair of hooks at a time, as Paddle has it",
            cause="recompute(use_reentrant=False) in the layer, or saved_tensors_hooks of its own",
            fix="set recompute_interval=0, or call recompute with use_reentrant=True",
        )
    no_kernel = _NO_KERNEL.search(str(error))
    if no_kernel is not None:
        return BoundaryError(
            f"{name} cannot run on this device, a {device_kind()}",
            cause=f"Paddle has no kernel there: {no_kernel[0]}",
            fix="run on a GPU, or use another layer: BatchNorm1D or 2D for SyncBatchNorm, whose "
            "statistics are then of each replica's rows",
        )
    inside = _error_in_sublayer(error, partition, index, layer, value)
    if inside is not None:
        return inside
    before = f"what layer {index - 1} returned" if index else "the inputs of the batch"
    stage = partition.stage_of(index)
    first = index == partition.boundaries[stage]
    return BoundaryError(
        f"{name} cannot take {before}",
        where=f"first layer of stage {stage}" if first else None,
        expected=_describe_sizes(layer),
        got=_describe_argument(partition, index, value),
        cause=reason(error),
        fix=_suggest_fix(error, index, value),
    )


def _error_in_sublayer(
    error: Exception, partition: Partition, index: int, layer: Callable[[Nest], Nest], value: Nest
) -> BoundaryError | None:
    """Returns the error to raise if a layer gave a sublayer a value that does not fit there.

    The error names the innermost sublayer whose forward raised ``error``. The result is None if
    that sublayer got ``value``, the argument of the whole layer, which the layer before returned.
    """
    if not isinstance(layer, paddle.nn.Layer):
        return None
    paths = {id(sublayer): path for path, sublayer in layer.named_sublayers()}
    arguments_of_layer = value if isinstance(value, (tuple, list)) else (value,)
    failed: Layer = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code, names = frame.f_code, frame.f_locals
        sublayer = names.get("self")
        if code.co_name != "forward" or id(sublayer) not in paths:
            continue
        arguments = [names.get(name) for name in code.co_varnames[1 : code.co_argcount]]
        tensors = tuple(a for a in arguments if isinstance(a, paddle.Tensor))
        if tensors and not any(tensors[0] is a for a in arguments_of_layer):
            failed, argument = sublayer, tensors[0] if len(tensors) == 1 else tensors
    if failed is None:
        return None
    path = paths[id(failed)]
    return BoundaryError(
        f"{_describe_layer(partition, index)}: its {path} cannot take what the layer gives it",
        expected=_describe_sizes(failed),
        got=f"{outline(argument)}; the layer itself was given "
        f"{_describe_argument(partition, index, value)}",
        cause=reason(error),
        fix=f"change {path} of layer {index}, or what stands before it there, so that they fit",
    )


def _describe_argument(partition: Partition, index: int, value: Nest) -> str:
    """Describes the argument of layer ``index``, and names the layer that returned it."""
    source = f", from {_describe_layer(partition, index - 1)}" if index else ""
    return f"{outline(value)}{source}"


def _describe_layer(partition: Partition, index: int) -> str:
    """Returns the number and the class name of layer ``index`` of the list, for messages."""
    name = partition.layers[index].name
    return f"layer {index} ({name})" if name else f"layer {index}"


def _describe_sizes(layer: Layer) -> str | None:
    """Returns the sizes with which a layer of Paddle's was built, as text; None if it has none."""
    sizes = layer.extra_repr() if isinstance(layer, paddle.nn.Layer) else ""
    return f"what {type(layer).__name__}({sizes}) takes" if sizes else None


def _suggest_fix(error: Exception, index: int, value: Nest) -> str:
    """Returns the remedy for layer ``index``, which could not take ``value``, for messages."""
    source = f"layer {index - 1} return" if index else "the batch give"
    several = isinstance(error, TypeError) and "positional argument" in str(error)
    if isinstance(value, (tuple, list)):
        kind = type(value).__name__
        if several:
            return f"a layer takes one argument, here a {kind}: write forward(self, args)"
        return f"have {source} one Tensor, or take the {kind} apart in a function before the layer"
    if several or "unpack" in str(error):
        return f"have {source} a tuple, which a layer takes as one argument: forward(self, args)"
    return (
        f"change layer {index - 1} or {index} so that they fit"
        if index
        else ("change layer 0, or the inputs, so that they fit")
    )


#: Layers or functions that run in order, each after its number in the whole list.
_Steps = tuple[tuple[int, Callable[[Nest], Nest]], ...]


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
        self._recomputed_layers = frozenset(recompute)
        self._runs: dict[int, Run] = {}
        #: The uses of parameters in the current batch, if each use has its own gradient.
        self.uses: Uses | None = None

    def function(self, stage: int) -> Run:
        """Returns a function that runs the layers of ``stage`` on a copy of its argument.

        The argument is copied because layers may write into it: Paddle allows no writes into a
        leaf, and the memory may be in use elsewhere. The function raises a ``BoundaryError`` if a
        layer cannot take the result of the layer before.
        """
        return self._runs.get(stage) or self._build_run(stage)

    def function_without_copies(self, stage: int) -> Run:
        """Returns a function that runs the layers of ``stage`` without copy and recompute."""
        first, last = self._partition.boundaries[stage : stage + 2]
        return functools.partial(self._run_steps, self._steps_between(first, last))

    def _build_run(self, stage: int) -> Run:
        """Builds, stores and returns the function that runs a stage."""
        first, last = self._partition.boundaries[stage : stage + 2]
        if self._interval or not self._recomputed_layers.isdisjoint(range(first, last)):
            starts = range(first, last, self._interval or 1)
            pieces = [self._make_piece(stage, *ends) for ends in zip(starts, [*starts[1:], last])]
            run: Run = functools.partial(self._run_pieces, pieces)
        else:
            run = functools.partial(
                self._run_steps, self._steps_between(first, last), on_copies=True
            )
        self._runs[stage] = run
        return run

    def _steps_between(self, start: int, end: int) -> _Steps:
        """Returns the layers with numbers from ``start`` to ``end - 1``, each after its number."""
        return tuple((index, self._functions[index]) for index in range(start, end))

    def _make_piece(
        self, stage: int, start: int, end: int
    ) -> tuple[_Steps, RecomputedPiece | None]:
        """Returns some layers of a stage, and their piece if they are recomputed, else None.

        Args:
            stage: The number of the stage.
            start: The number of the first layer.
            end: The number after that of the last layer.
        """
        steps = self._steps_between(start, end)
        if not (self._interval or start in self._recomputed_layers):
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
        """Calls the layers of all pieces in order; pieces may be recomputed in backward."""
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
        """Calls layers in order; while a plan runs, each with its own random seed.

        Args:
            steps: The layers.
            value: The argument of the first layer.
            micro_batch: The global number of the micro-batch; None outside of a batch.
            on_copies: Whether to copy the tensors in ``value`` first.
        """
        if on_copies:
            value = copy_tensors(value)
        keys = None if micro_batch is None else random_keys.current_keys()
        if keys is not None and micro_batch is not None:
            keys.micro_batch = micro_batch
        for number, function in steps:
            if keys is not None:
                keys.enter(number, function)
            try:
                if self.uses is None:
                    value = function(value)
                else:
                    with self.uses.layer_context(number):
                        value = function(value)
            except Exception as error:
                if not is_error_of_value(error, value, __file__):
                    raise
                raise layer_error(error, self._partition, number, function, value) from error
        return value


def checked_interval(recompute_interval: object, recompute_ctx: object) -> int:
    """Returns the option ``recompute_interval``, checked: the number of layers of a piece, or 0.

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
        """Creates the chunk of some layers.

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
