"""Random streams whose seeds depend on the batch, the micro-batch and the layer, not on the rank.

At the start of a training batch one number is drawn from Paddle's CPU generator. From this number,
the micro-batch and the layer's number the generators are seeded before each call of a layer. Other
places have streams too: losses, hooks on gradients, the backward of a ``PyLayer``, the optimizer's
step and ``apply``. A place is a tuple of numbers. Start with :class:`Keys`.
"""

from __future__ import annotations

import functools
import json
import random
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.aliases import Layer, Nest, Optimizer, Tensor
from fleetpipe.dygraph.function_code import draws_python, is_of_library
from fleetpipe.mesh.groups import Group
from fleetpipe.paddle_api import paddle, paddle_fleet, replaced
from fleetpipe.paddle_api.layer import is_patched
from fleetpipe.paddle_api.random import (
    count_pass,
    drawn_on_host,
    generators,
    stream_seeds,
    track_streams,
)
from fleetpipe.paddle_api.tensor import is_parameter, watch_pylayers
from fleetpipe.schedules.action import GlobalMicroBatch

#: The values of ``fleetpipe_configs["rng"]``.
KEYED, FLEET = "keyed", "fleet"

#: The streams of Paddle's tracker from which shards draw; each rank must have its own seed.
OF_SHARDS = frozenset({"model_parallel_rng", "local_seed"})

#: Replace a layer's number in the places of loss functions, of the step and of ``apply``.
LOSS, STEP, APPLY = -1, -2, -3
#: Marks a place in backward; it follows the place of the call, or the name of the parameter.
BACKWARD = -4
#: Marks the seed of an evaluation; it follows the number drawn.
_EVALUATION = -5

_WORD = 2**64 - 1

_functions: types.ModuleType = paddle.nn.functional

#: Functions of Paddle that draw nothing.
_QUIET_FUNCTIONS = frozenset(
    getattr(_functions, name)
    for name in (
        *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "swish", "mish"),
        *("tanh", "sigmoid", "softmax", "log_softmax", "softplus", "hardswish", "hardsigmoid"),
        "hardtanh",
    )
) | {paddle.flatten, paddle.tanh}

#: Layers of Paddle that draw nothing, whatever their arguments.
_QUIET_LAYERS = frozenset(
    getattr(paddle.nn, name)
    for name in (
        *("Linear", "Embedding", "Bilinear", "Identity", "Flatten", "Conv1D", "Conv2D", "Conv3D"),
        *("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose", "BatchNorm", "BatchNorm1D"),
        *("BatchNorm2D", "BatchNorm3D", "LayerNorm", "GroupNorm", "InstanceNorm1D"),
        *("InstanceNorm2D", "ReLU", "ReLU6", "LeakyReLU", "PReLU", "ELU", "SELU", "CELU", "GELU"),
        *("Silu", "Swish", "Mish", "Tanh", "Sigmoid", "Softmax", "LogSoftmax", "Softplus"),
        *("Hardswish", "Hardsigmoid", "Hardtanh", "MaxPool1D", "MaxPool2D", "MaxPool3D"),
        *("AvgPool1D", "AvgPool2D", "AvgPool3D", "AdaptiveAvgPool1D", "AdaptiveAvgPool2D"),
        *("AdaptiveAvgPool3D", "AdaptiveMaxPool1D", "AdaptiveMaxPool2D"),
    )
)

_keys: Keys | None = None


def key(*parts: int) -> int:
    """Returns a seed of 63 bits, a hash of whole numbers in their order.

    Each part goes through the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable
    Pseudorandom Number Generators, 2014). Paddle's CPU generator uses the low 32 bits.
    """
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state >> 1


def draws_nothing(function: Callable[[Nest], Nest]) -> bool:
    """Whether a call of a layer or function certainly draws no random number.

    True only for some of Paddle's own layers and functions, if nobody has patched them.
    """
    kind = type(function)
    if kind is functools.partial:
        # A node of a captured model calls the function ``stands_for``.
        function = getattr(function, "stands_for", function)
        kind = type(function)
    if kind in _QUIET_LAYERS:
        return not is_patched(function)
    return kind in (types.FunctionType, types.BuiltinFunctionType) and function in _QUIET_FUNCTIONS


class DrawKinds(NamedTuple):
    """From which generators some functions draw.

    Attributes:
        any: Whether they may draw random numbers at all.
        python: Whether they are known to draw from Python's or NumPy's own generators.
    """

    any: bool
    python: bool


def draws_of(functions: Sequence[Callable[..., Any]]) -> DrawKinds:
    """Returns from which generators functions draw; no functions stand for unknown ones."""
    if functions and all(map(draws_nothing, functions)):
        return DrawKinds(False, False)
    return DrawKinds(True, any(map(draws_python, functions)))


class Keys:
    """The random seeds of one batch.

    Attributes:
        micro_batch: The global micro-batch of the calls that :meth:`enter` announces.
        python: Whether Python's and NumPy's own generators are seeded for each call.
        common_streams: The used streams that have the same seed on all ranks along mp.
    """

    def __init__(self, batch_seed: int, python: bool = False) -> None:
        """Starts with the seed of a batch.

        Args:
            batch_seed: The seed of a call is a hash of this number and the call's place.
            python: Whether to seed Python's and NumPy's own generators for each call, or only for
                code that is known to draw from them.
        """
        self.micro_batch = GlobalMicroBatch(0)
        self.python = python
        self.common_streams: set[str] = set()
        self._batch_seed = batch_seed
        self._slice = 0
        self._common: frozenset[str] = frozenset()
        self._call: tuple[int, ...] | None = None
        self._made = 0
        #: The functions that were called, which stay alive so, and how they draw, by their ids: it
        #: is found out once in a batch.
        self._draws: dict[tuple[int, ...], tuple[Sequence[Callable[..., Any]], DrawKinds]] = {}
        #: Returns the parameters of this process by fully qualified name.
        self.parameters: Callable[[], Mapping[str, Tensor]] = dict
        self._streams: dict[str, GeneratorStates] = {}
        self._generators: list[Any] = []
        self._outside: PythonStates | None = None

    def agree(self, group: Group) -> None:
        """Adopts the seed of the first rank of ``group``, the shards of one layer. Collective.

        A stream with one seed on all ranks keeps one seed; any other stream has different seeds.
        """
        if group.ranks == 1:
            return
        everyone = group.all_gather((self._batch_seed, stream_seeds()))
        self._batch_seed, first = everyone[0]
        self._slice = group.rank
        self._common = frozenset(
            name for name, seed in first.items() if all(s.get(name) == seed for _, s in everyone)
        )

    def enter(self, layer: int, *functions: Callable[..., Any]) -> None:
        """Seeds all generators for a call of layer ``layer`` of the whole list.

        Args:
            layer: The number of the layer, or LOSS.
            functions: The functions that are called; none if they are unknown.
        """
        called = tuple(map(id, functions))
        if called not in self._draws:
            self._draws[called] = functions, draws_of(functions)
        self._enter((layer, self.micro_batch), self._draws[called][1])

    def _enter(self, call: tuple[int, ...], draws: DrawKinds) -> None:
        """Seeds the generators from which a call at a place draws."""
        self._call, self._made = call, 0
        self._streams.clear()
        if self._outside is not None:
            self.leave()
        if draws.any:
            if draws.python and not self.python:
                self._outside = PythonStates()
            self._seed_generators(key(self._batch_seed, *call))

    @contextmanager
    def within(self, place: tuple[int, ...], *functions: Callable[..., Any]) -> Iterator[None]:
        """While it is open, generators are seeded for a place; at the end they are restored."""
        resume, states = self.suspend(), GeneratorStates()
        self._enter(place, draws_of(functions))
        try:
            yield
        finally:
            self.leave()
            states.put_back()
            resume()

    @functools.cached_property
    def numbers_of_parameters(self) -> dict[int, int]:
        """A hash of each parameter's name, by the parameter's id; the same on every rank."""
        return {id(p): zlib.crc32(name.encode()) for name, p in self.parameters().items()}

    def place_in_backward(self) -> tuple[int, ...] | None:
        """Returns the place of the next hook or ``PyLayer`` of the current call; None outside."""
        if self._call is None:
            return None
        self._made += 1
        return (*self._call, BACKWARD, self._made)

    def leave(self) -> None:
        """Restores Python's and NumPy's generators, if they were seeded for the current call."""
        if self._outside is not None:
            self._outside.put_back()
            self._outside = None

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """While it is open, numbers are drawn from the stream ``name`` of Paddle's tracker.

        If it is used several times within a call of a layer, it continues. A stream that is not
        common to all shards has another seed on each.
        """
        states, call = GeneratorStates(), self._call
        resumed = self._streams.get(name)
        if resumed is not None:
            resumed.put_back()
        else:
            number = zlib.crc32(name.encode())
            part = 0 if name in self._common else self._slice
            self.common_streams |= self._common & {name}
            call_parts = call or (LOSS, self.micro_batch)
            self._seed_generators(key(self._batch_seed, *call_parts, part, number))
        try:
            yield
        finally:
            if call == self._call:
                self._streams[name] = GeneratorStates()
            states.put_back()

    def suspend(self) -> Callable[[], None]:
        """Returns a function that resumes the current call after other code has run."""
        here = self.micro_batch, self._call, self._made, dict(self._streams), self._outside
        self._outside = None

        def resume() -> None:
            self.micro_batch, self._call, self._made, self._streams, self._outside = here

        return resume

    def _seed_generators(self, seed: int) -> None:
        """Seeds the generators as ``paddle.seed`` does, but without its search for devices."""
        if self.python or self._outside is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
        self._generators = self._generators or generators()
        for generator in self._generators:
            generator.manual_seed(seed)


def current() -> Keys | None:
    """Returns the seeds of the batch that runs; None outside of batches and for ``"fleet"``."""
    return _keys


def draw(mode: str, python: bool = False, part: int = 0, training: bool = True) -> Keys | None:
    """Returns the seeds of the next batch; None if ``mode`` is "fleet".

    The seed of a training batch is drawn from Paddle's CPU generator. An evaluation does not
    advance the generator.

    Args:
        mode: The option ``rng``.
        python: As for :class:`Keys`.
        part: The number of this rank's part of the sequences; each part has another seed.
        training: Whether the batch is trained.
    """
    if mode == FLEET:
        return None
    states = None if training else GeneratorStates()
    number = drawn_on_host(2**31 - 1)
    if states is not None:
        states.put_back()
        number = key(number, _EVALUATION, count_pass())
    return Keys(key(number, part) if part else number, python)


@contextmanager
def under_keys(keys: Keys | None, group: Group) -> Iterator[None]:
    """While it is open, layers run under ``keys``; at the end the generators are restored.

    Collective.

    Args:
        keys: The result of :func:`draw`; None changes nothing.
        group: The ranks that hold shards of one layer; they adopt the first rank's seed.
    """
    global _keys
    if keys is None:
        yield
        return
    keys.agree(group)
    track_streams(_stream_of)
    before, states = _keys, RandomStates() if keys.python else GeneratorStates()
    _keys = keys
    try:
        yield
    finally:
        _keys = before
        keys.leave()
        states.put_back()


def _stream_of(name: str) -> AbstractContextManager[None] | None:
    """Returns the context of a stream of Paddle's tracker in a batch; None outside of batches."""
    return None if _keys is None else _keys.stream(name)


class GeneratorStates:
    """The states of Paddle's generators: of the current device, and of the CPU."""

    def __init__(self) -> None:
        self._states = [(generator, generator.get_state()) for generator in generators()]

    def put_back(self) -> None:
        """Restores the stored states."""
        for generator, state in self._states:
            generator.set_state(state)


class PythonStates:
    """The states of NumPy's and Python's own generators."""

    def __init__(self) -> None:
        self._numpy: Any = np.random.get_state()
        self._python: Any = random.getstate()

    def share(self, group: Group) -> None:
        """Adopts the states of the first rank of ``group``. Collective over it."""
        if group.ranks > 1:
            name, words, *more = self._numpy
            text = json.dumps([[name, words.tolist(), *more], self._python])
            self._numpy, (version, words, gauss) = json.loads(group.broadcast(text, 0))
            self._python = (version, tuple(words), gauss)

    def put_back(self) -> None:
        """Restores the stored states."""
        np.random.set_state(tuple(self._numpy))
        random.setstate(self._python)


class RandomStates:
    """The states of all generators: Paddle's, its tracker's streams, NumPy's and Python's."""

    def __init__(self) -> None:
        self._paddle = GeneratorStates()
        self._streams = paddle_fleet.meta_parallel.get_rng_state_tracker().get_states_tracker()
        self._python = PythonStates()

    def put_back(self) -> None:
        """Restores the stored states."""
        self._paddle.put_back()
        if self._streams:
            tracker = paddle_fleet.meta_parallel.get_rng_state_tracker()
            tracker.set_states_tracker(dict(self._streams))
        self._python.put_back()


def suspend() -> Callable[[], None]:
    """Stores the random states; returns a function that restores them after others have drawn."""
    states, keys = RandomStates(), None if _keys is None else _keys.suspend()

    def resume() -> None:
        states.put_back()
        if keys is not None:
            keys()

    return resume


@contextmanager
def random_states_kept() -> Iterator[None]:
    """At its end, restores the states of all generators and the current call."""
    resume = suspend()
    try:
        yield
    finally:
        resume()


def enter_loss(functions: Sequence[Callable[..., Any]]) -> None:
    """Seeds the generators for the loss functions, after the last layer of a micro-batch."""
    if (keys := current()) is not None:
        keys.enter(LOSS, *functions)


def enter_backward(micro_batch: GlobalMicroBatch) -> None:
    """Sets the micro-batch whose gradients the hooks of parameters get from now on."""
    if (keys := current()) is not None:
        keys.micro_batch = micro_batch


def in_earlier_backward(micro_batches: int) -> AbstractContextManager[None]:
    """Returns a context for gradients of an earlier micro-batch, ``micro_batches`` before this."""
    if (keys := current()) is None:
        return nullcontext()
    return replaced((keys, "micro_batch", GlobalMicroBatch(keys.micro_batch - micro_batches)))


def in_step(optimizer: Optimizer, stage: int, shard: int) -> AbstractContextManager[None]:
    """Returns the context of an optimizer's step, with its own random stream.

    Args:
        optimizer: The user's optimizer.
        stage: The first stage of this process: ranks with other stages draw other numbers.
        shard: The number of this rank's shard of the optimizer's state.
    """
    keys = current()
    return nullcontext() if keys is None else keys.within((STEP, stage, shard), optimizer)


def in_apply(
    names: Callable[[Layer], str], function: Callable[[Layer], object]
) -> Callable[[Layer], None]:
    """Returns a function for ``Layer.apply`` that draws the same numbers for a layer on any rank.

    It draws one number from Paddle's CPU generator.

    Args:
        names: Returns the fully qualified name of a layer.
        function: The user's function.
    """
    keys = Keys(drawn_on_host(2**31 - 1))

    def apply(layer: Layer) -> None:
        with keys.within((APPLY, zlib.crc32(names(layer).encode())), function):
            function(layer)

    return apply


def keyed_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Returns a hook on a gradient that has its own random stream in a batch.

    The stream of a parameter's hook depends on the parameter's name. The stream of another tensor's
    hook depends on the layer in whose forward the hook is registered.
    """
    if is_of_library(getattr(hook, "func", hook)):
        return hook
    if is_parameter(tensor):
        tensor.keyed_hooks = number = getattr(tensor, "keyed_hooks", 0) + 1
        made, parameter = None, id(tensor)
    else:
        made = None if (keys := current()) is None else keys.place_in_backward()
        if made is None:
            return hook

    @functools.wraps(hook)
    def keyed(grad: Tensor) -> Any:
        if (keys := current()) is None:
            return hook(grad)
        place = made
        if place is None:
            name = keys.numbers_of_parameters.get(parameter, 0)
            place = name, keys.micro_batch, BACKWARD, number
        with keys.within(place, hook):
            return hook(grad)

    return keyed


def _place_of_pylayer(kind: type) -> tuple[int, ...] | None:
    """Returns the place of a ``PyLayer``'s backward; None outside of batches."""
    keys = None if kind.__module__.startswith("fleetpipe.") else current()
    return None if keys is None else keys.place_in_backward()


def _in_pylayer(
    place: tuple[int, ...] | None, backward: Callable[..., Any]
) -> AbstractContextManager[None]:
    """Returns a context in which a ``PyLayer``'s backward has the random stream of ``place``."""
    keys = None if place is None else current()
    return nullcontext() if keys is None or place is None else keys.within(place, backward)


watch_pylayers(_place_of_pylayer, _in_pylayer)
