"""Random streams whose seeds depend on the batch, the micro-batch and the layer, not on the rank.

At the start of a training batch one number is drawn from Paddle's CPU generator. Before each call
of a layer all generators are seeded with a hash of this number, the layer's number and the
micro-batch. Other code has random streams too: losses, hooks on gradients, the backward of a
``PyLayer``, the optimizer's step and ``apply``. A tuple of whole numbers names each stream, and is
hashed with the number of the batch. Start with :class:`Keys`, the seeds of one batch.
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
    draw_on_host,
    generators,
    next_evaluation_number,
    stream_seeds,
    track_streams,
)
from fleetpipe.paddle_api.tensor import is_parameter, watch_pylayers
from fleetpipe.schedules.action import GlobalMicroBatch

#: The value of ``fleetpipe_configs["rng"]`` with which generators stay as the user and Fleet seed
#: them.
FLEET = "fleet"

#: The streams of Paddle's tracker from which the shards of a layer draw: each rank along mp must
#: have a seed of its own there.
OF_SHARDS = frozenset({"model_parallel_rng", "local_seed"})

#: The first number of the streams of loss functions, of the optimizer's step and of ``apply``, in
#: the place of a layer's number.
LOSS, STEP, APPLY = -1, -2, -3
#: Marks a stream in backward; it follows the stream of the call, or the hash of a parameter's name.
BACKWARD = -4
#: Marks the seed of an evaluation; it is hashed after the number drawn.
_EVALUATION = -5

#: The largest number of 64 bits.
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

#: The seeds of the batch that runs; None outside of batches.
_keys: Keys | None = None


def hash_to_seed(*parts: int) -> int:
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
    """Whether a layer or function is one of Paddle's that draw no random number, and unpatched."""
    kind = type(function)
    if kind is functools.partial:
        # A node of a captured model calls the function ``stands_for``.
        function = getattr(function, "stands_for", function)
        kind = type(function)
    if kind in _QUIET_LAYERS:
        return not is_patched(function)
    return kind in (types.FunctionType, types.BuiltinFunctionType) and function in _QUIET_FUNCTIONS


class DrawKinds(NamedTuple):
    """Says from which random generators some functions may draw numbers.

    Attributes:
        any: Whether they may draw from any generator at all.
        python: Whether they are known to draw from Python's or NumPy's own generators.
    """

    any: bool
    python: bool


def find_draw_kinds(functions: Sequence[Callable[..., Any]]) -> DrawKinds:
    """Returns from which generators functions may draw.

    Args:
        functions: The functions; empty if they are unknown.
    """
    if functions and all(map(draws_nothing, functions)):
        return DrawKinds(False, False)
    return DrawKinds(True, any(map(draws_python, functions)))


class Keys:
    """The random seeds of one batch.

    Attributes:
        micro_batch: The global number of the micro-batch whose calls :meth:`enter` announces.
        python: Whether Python's and NumPy's own generators are seeded for each call.
        common_streams: The names of those used streams of Paddle's tracker that have the same seed
            on all ranks along mp.
    """

    def __init__(self, batch_seed: int, python: bool = False) -> None:
        """Starts with the seed of a batch.

        Args:
            batch_seed: The seed of a stream is a hash of this number and of the stream's numbers.
            python: Whether to seed Python's and NumPy's own generators for each call, or only for
                code that is known to draw from them.
        """
        self.micro_batch = GlobalMicroBatch(0)
        self.python = python
        self.common_streams: set[str] = set()
        self._batch_seed = batch_seed
        self._mp_rank = 0
        self._streams_common_to_shards: frozenset[str] = frozenset()
        #: The stream of the call that runs; None before the first call.
        self._call: tuple[int, ...] | None = None
        #: The number of streams that the call has made for its backward so far.
        self._streams_in_backward = 0
        #: The kinds of draws of the functions that were called, by the ids of the functions. The
        #: functions are stored too, so that their ids stay theirs.
        self._kinds_by_functions: dict[
            tuple[int, ...], tuple[Sequence[Callable[..., Any]], DrawKinds]
        ] = {}
        #: Returns the parameters of this process by fully qualified name.
        self.parameters: Callable[[], Mapping[str, Tensor]] = dict
        #: The states at which streams of Paddle's tracker continue within the call, by name.
        self._streams: dict[str, GeneratorStates] = {}
        self._generators: list[Any] = []
        #: The states of Python's generators before the call, if it has seeded these.
        self._python_states: PythonStates | None = None

    def agree(self, group: Group) -> None:
        """Takes over the batch's seed of the first rank of a group. Collective over the group.

        A stream of Paddle's tracker that has one seed on all ranks gets one seed in the batch, too;
        any other stream gets another seed on each rank.

        Args:
            group: The ranks that hold shards of the same layers.
        """
        if group.ranks == 1:
            return
        everyone = group.all_gather((self._batch_seed, stream_seeds()))
        self._batch_seed, first = everyone[0]
        self._mp_rank = group.rank
        self._streams_common_to_shards = frozenset(
            name
            for name, seed in first.items()
            if all(seeds.get(name) == seed for _, seeds in everyone)
        )

    def enter(self, layer: int, *functions: Callable[..., Any]) -> None:
        """Seeds the generators for a call of layer ``layer``, as numbered in the whole model.

        Args:
            layer: The number of the layer, or LOSS.
            functions: The functions that the call runs; none if they are unknown.
        """
        called = tuple(map(id, functions))
        if called not in self._kinds_by_functions:
            self._kinds_by_functions[called] = functions, find_draw_kinds(functions)
        self._enter((layer, self.micro_batch), self._kinds_by_functions[called][1])

    def _enter(self, stream: tuple[int, ...], draws: DrawKinds) -> None:
        """Begins a call that draws from a stream, and seeds the generators that it uses."""
        self._call, self._streams_in_backward = stream, 0
        self._streams.clear()
        if self._python_states is not None:
            self.leave()
        if draws.any:
            if draws.python and not self.python:
                self._python_states = PythonStates()
            self._seed_generators(hash_to_seed(self._batch_seed, *stream))

    @contextmanager
    def within(self, stream: tuple[int, ...], *functions: Callable[..., Any]) -> Iterator[None]:
        """A context in which code draws from a stream; restores the earlier states at its end.

        Args:
            stream: The numbers that name the stream.
            functions: The functions that draw; none if they are unknown.
        """
        resume, states = self.suspend(), GeneratorStates()
        self._enter(stream, find_draw_kinds(functions))
        try:
            yield
        finally:
            self.leave()
            states.put_back()
            resume()

    @functools.cached_property
    def name_hashes(self) -> dict[int, int]:
        """The hash of each parameter's name, the same on every rank, by the parameter's id."""
        return {id(p): zlib.crc32(name.encode()) for name, p in self.parameters().items()}

    def next_stream_in_backward(self) -> tuple[int, ...] | None:
        """Returns a new stream for a hook or ``PyLayer`` of this call; None between calls."""
        if self._call is None:
            return None
        self._streams_in_backward += 1
        return (*self._call, BACKWARD, self._streams_in_backward)

    def leave(self) -> None:
        """Restores Python's and NumPy's generators, if the current call has seeded them."""
        if self._python_states is not None:
            self._python_states.put_back()
            self._python_states = None

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """A context in which numbers are drawn from the stream ``name`` of Paddle's tracker.

        A stream that is opened again within the same call of a layer continues. A stream that is
        not common to all shards has another seed on each.
        """
        states, call = GeneratorStates(), self._call
        resumed = self._streams.get(name)
        if resumed is not None:
            resumed.put_back()
        else:
            name_hash = zlib.crc32(name.encode())
            rank = 0 if name in self._streams_common_to_shards else self._mp_rank
            self.common_streams |= self._streams_common_to_shards & {name}
            numbers = call or (LOSS, self.micro_batch)
            self._seed_generators(hash_to_seed(self._batch_seed, *numbers, rank, name_hash))
        try:
            yield
        finally:
            if call == self._call:
                self._streams[name] = GeneratorStates()
            states.put_back()

    def suspend(self) -> Callable[[], None]:
        """Returns a function that restores the present call, micro-batch and streams.

        The function does not restore the generators.
        """
        micro_batch, call, count = self.micro_batch, self._call, self._streams_in_backward
        streams, python_states = dict(self._streams), self._python_states
        self._python_states = None

        def resume() -> None:
            self.micro_batch, self._call, self._streams_in_backward = micro_batch, call, count
            self._streams, self._python_states = streams, python_states

        return resume

    def _seed_generators(self, seed: int) -> None:
        """Seeds the generators as ``paddle.seed`` does, but without its search for devices."""
        if self.python or self._python_states is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
        self._generators = self._generators or generators()
        for generator in self._generators:
            generator.manual_seed(seed)


def current_keys() -> Keys | None:
    """Returns the seeds of the batch that runs; None outside of batches and with rng="fleet"."""
    return _keys


def draw_keys(mode: str, python: bool = False, part: int = 0, training: bool = True) -> Keys | None:
    """Draws the seeds of the batch that begins; None if ``mode`` is "fleet".

    The seed of a training batch is drawn from Paddle's CPU generator. That of an evaluation is too,
    but then the generator is put back.

    Args:
        mode: The option ``rng``.
        python: Whether to seed Python's and NumPy's own generators for each call, too.
        part: The number of this rank among those that split sequences; each has another seed.
        training: Whether the batch is trained, not evaluated.
    """
    if mode == FLEET:
        return None
    states = None if training else GeneratorStates()
    number = draw_on_host(2**31 - 1)
    if states is not None:
        states.put_back()
        number = hash_to_seed(number, _EVALUATION, next_evaluation_number())
    return Keys(hash_to_seed(number, part) if part else number, python)


@contextmanager
def under_keys(keys: Keys | None, group: Group) -> Iterator[None]:
    """A context in which layers draw by the seeds ``keys``; restores the generators at its end.

    Collective over ``group``.

    Args:
        keys: The result of :func:`draw_keys`; None changes nothing.
        group: The ranks that hold shards of one layer; they adopt the first rank's seed.
    """
    global _keys
    if keys is None:
        yield
        return
    keys.agree(group)
    track_streams(_open_stream)
    before, states = _keys, RandomStates() if keys.python else GeneratorStates()
    _keys = keys
    try:
        yield
    finally:
        _keys = before
        keys.leave()
        states.put_back()


def _open_stream(name: str) -> AbstractContextManager[None] | None:
    """Returns a context that draws from a stream of Paddle's tracker; None outside of batches."""
    return None if _keys is None else _keys.stream(name)


class GeneratorStates:
    """The current states of Paddle's generators: of the current device, and of the CPU."""

    def __init__(self) -> None:
        self._states = [(generator, generator.get_state()) for generator in generators()]

    def put_back(self) -> None:
        """Restores the stored states."""
        for generator, state in self._states:
            generator.set_state(state)


class PythonStates:
    """The current states of NumPy's and Python's own generators."""

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
    """The current states of all generators: Paddle's, its tracker's, NumPy's and Python's."""

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


def suspend_random_states() -> Callable[[], None]:
    """Returns a function that restores the current random states, and the current call."""
    states, resume_call = RandomStates(), None if _keys is None else _keys.suspend()

    def resume() -> None:
        states.put_back()
        if resume_call is not None:
            resume_call()

    return resume


@contextmanager
def random_states_kept() -> Iterator[None]:
    """A context that restores the states of all generators, and the current call, at its end."""
    resume = suspend_random_states()
    try:
        yield
    finally:
        resume()


def enter_loss(functions: Sequence[Callable[..., Any]]) -> None:
    """Seeds the generators for the loss functions of the micro-batch whose layers have run."""
    if (keys := current_keys()) is not None:
        keys.enter(LOSS, *functions)


def enter_backward(micro_batch: GlobalMicroBatch) -> None:
    """Makes hooks on gradients draw numbers for ``micro_batch``, whose backward begins."""
    if (keys := current_keys()) is not None:
        keys.micro_batch = micro_batch


def earlier_backward_context(micro_batches: int) -> AbstractContextManager[None]:
    """Returns a context in which hooks on gradients of parameters draw for an earlier micro-batch.

    Args:
        micro_batches: By how many micro-batches it is earlier.
    """
    if (keys := current_keys()) is None:
        return nullcontext()
    return replaced((keys, "micro_batch", GlobalMicroBatch(keys.micro_batch - micro_batches)))


def optimizer_stream(optimizer: Optimizer, stage: int, shard: int) -> AbstractContextManager[None]:
    """Returns the context of an optimizer's step, in which the optimizer has its own stream.

    Args:
        optimizer: The user's optimizer.
        stage: The first stage of this process, since ranks with other stages draw other numbers.
        shard: The number of this rank's shard of the optimizer's state, for the same reason.
    """
    keys = current_keys()
    return nullcontext() if keys is None else keys.within((STEP, stage, shard), optimizer)


def alike_in_apply(
    names: Callable[[Layer], str], function: Callable[[Layer], object]
) -> Callable[[Layer], None]:
    """Returns a wrapper of ``function`` that draws the same numbers for a layer on any rank.

    This call draws one number from Paddle's CPU generator.

    Args:
        names: Returns the fully qualified name of a layer.
        function: The user's function, for ``Layer.apply``.
    """
    keys = Keys(draw_on_host(2**31 - 1))

    def apply(layer: Layer) -> None:
        with keys.within((APPLY, zlib.crc32(names(layer).encode())), function):
            function(layer)

    return apply


def keyed_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Returns a wrapper of a user's hook on a gradient, which draws from its own stream in a batch.

    The stream of a parameter's hook depends on the parameter's name. The stream of another tensor's
    hook depends on the layer in whose forward the hook is registered.

    Args:
        tensor: The tensor on whose gradient the hook is registered.
        hook: The hook; one of a library is returned as it is.
    """
    if is_of_library(getattr(hook, "func", hook)):
        return hook
    if is_parameter(tensor):
        tensor.keyed_hooks = hook_number = getattr(tensor, "keyed_hooks", 0) + 1
        layer_call_stream, parameter = None, id(tensor)
    else:
        keys = current_keys()
        layer_call_stream = None if keys is None else keys.next_stream_in_backward()
        if layer_call_stream is None:
            return hook

    @functools.wraps(hook)
    def keyed(grad: Tensor) -> Any:
        """Calls the hook; while a batch runs, the hook draws random numbers from its own stream.

        That is the stream of the layer's call that registered the hook; a parameter's hook has one
        for each micro-batch.
        """
        if (keys := current_keys()) is None:
            return hook(grad)
        stream = layer_call_stream
        if stream is None:
            name_hash = keys.name_hashes.get(parameter, 0)
            stream = name_hash, keys.micro_batch, BACKWARD, hook_number
        # The hook is passed too: its code shows which libraries' generators it draws from.
        with keys.within(stream, hook):
            return hook(grad)

    return keyed


def _stream_of_pylayer(kind: type) -> tuple[int, ...] | None:
    """Returns the stream of a ``PyLayer``'s backward, when its forward runs; None for no stream."""
    keys = None if kind.__module__.startswith("fleetpipe.") else current_keys()
    return None if keys is None else keys.next_stream_in_backward()


def _in_stream_of_pylayer(
    stream: tuple[int, ...] | None, backward: Callable[..., Any]
) -> AbstractContextManager[None]:
    """Returns a context in which a ``PyLayer``'s backward draws from its random stream, if any."""
    keys = None if stream is None else current_keys()
    return nullcontext() if keys is None or stream is None else keys.within(stream, backward)


watch_pylayers(_stream_of_pylayer, _in_stream_of_pylayer)
