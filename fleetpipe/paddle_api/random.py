"""Saves and restores random generators, and replaces the random streams of Fleet's tracker.

A stream is a generator with a name, which tensor parallelism uses for dropout. 3.3.x can set the
whole state of a CPU generator; 2.6.2 only its seed, so that the rest is written to its memory.
"""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from paddle import _C_ops
from paddle.base import core as _core

from fleetpipe import log
from fleetpipe.aliases import Place, Tensor
from fleetpipe.errors import CheckpointError
from fleetpipe.paddle_api import paddle, paddle_fleet
from fleetpipe.paddle_api.device import device_id, expected_place

_log = log.logger(__name__)

#: Paddle's module with the names that its stub hides.
core: Any = _core
#: Whether a state can be created with the words of the engine (3.3), not only with a seed (2.6.2).
TAKES_ENGINES = len(core.default_cpu_generator().get_state().__getstate__()) > 3
#: The length of a CPU generator's engine, MT19937-64: 312 words and the index in them.
_ENGINE_WORDS = 313
#: The name of Paddle's default generator in a list of streams.
DEFAULT = "default generator"
#: The length of a printed state before the engine: device, seed and offset.
_STATE_NUMBERS = 3

#: The number of calls of ``paddle.seed`` since :func:`count_seedings`.
_seedings = 0


def track_streams(stream_of: Callable[[str], AbstractContextManager[None] | None]) -> None:
    """Makes ``rng_state(name)`` of Paddle's tracker of random streams return other contexts.

    Args:
        stream_of: Returns the context of a stream, by its name; None for Paddle's own.
    """
    tracker = paddle_fleet.meta_parallel.get_rng_state_tracker()
    if "rng_state" in vars(tracker):
        return
    original = tracker.rng_state

    @functools.wraps(original)
    def rng_state(name: str = "model_parallel_rng") -> AbstractContextManager[None]:
        replacement = stream_of(name) if name in tracker.states_ else None
        stream: AbstractContextManager[None] = original(name)
        return stream if replacement is None else replacement

    tracker.rng_state = rng_state


def seeding_count() -> int:
    """Returns the number of calls of ``paddle.seed`` since :func:`count_seedings`."""
    return _seedings


def count_seedings() -> Callable[[], None]:
    """Starts to count the calls of ``paddle.seed``; returns a function that ends this."""
    original = paddle.seed

    @functools.wraps(original)
    def seed(seed: int) -> Any:
        global _seedings
        _seedings += 1
        return original(seed)

    paddle.seed = seed
    return functools.partial(setattr, paddle, "seed", original)


def draw_on_host(below: int) -> int:
    """Returns a random whole number from 0 to ``below - 1``, drawn from the CPU's generator.

    On a GPU, Paddle's own operation would make this process wait for all queued work.
    """
    drawn: Tensor = _C_ops.randint(0, below, [1], paddle.int64, paddle.CPUPlace())
    return int(drawn.item())


def next_evaluation_number() -> int:
    """Counts an evaluation: returns 0 after the CPU's generator was seeded, then 1, 2, ..

    No random number is drawn. The count is the offset in the generator's state, which a CPU does
    not use otherwise. So checkpoints and ``paddle.set_rng_state`` save and restore it.
    """
    generator = core.default_cpu_generator()
    described = generator_state(generator.get_state())
    generator.set_state(generator_from({**described, "offset": described["offset"] + 1}))
    return int(described["offset"])


def stream_seeds() -> dict[str, int]:
    """Returns the seed of each random stream of Paddle's tracker, by name."""
    states = paddle_fleet.meta_parallel.get_rng_state_tracker().get_states_tracker()
    return {name: int(state[0].current_seed()) for name, state in states.items()}


def stream_states() -> dict[str, dict[str, Any]]:
    """Returns the state of each random stream on this process's device, by the stream's name."""
    tracked = paddle_fleet.meta_parallel.get_rng_state_tracker().get_states_tracker()
    return {name: generator_state(states[device_id()]) for name, states in tracked.items()}


def generator_of(place: Place) -> Any:
    """Returns the generator that the random operations of a device draw from."""
    if isinstance(place, core.CUDAPlace):
        return core.default_cuda_generator(place.get_device_id())
    return core.default_cpu_generator()


def generators() -> list[Any]:
    """Returns the default generators of this process: of its device, and of the CPU.

    It uses no ``paddle.get_rng_state``, since 2.6.2's takes no name of a device.
    """
    of_cpu = core.default_cpu_generator()
    of_device = generator_of(expected_place())
    return [of_cpu] if of_device is of_cpu else [of_device, of_cpu]


def generator_state(state: Any) -> dict[str, Any]:
    """Returns a generator's state as values of JSON: ``device``, ``seed``, ``offset``, ``engine``.

    It is read from the printed state, since 2.6.2 pickles only a part. Every GPU has the device 0,
    so that ranks on several GPUs have equal states; a CPU has -1.
    """
    device, seed, offset, *rest = str(state).split()
    # 3.3 prints an address before the engine's 312 words and index; a GPU has no engine.
    engine = rest[-_ENGINE_WORDS:] if len(rest) >= _ENGINE_WORDS else []
    numbers = {"device": min(int(device), 0), "seed": int(seed), "offset": int(offset)}
    return {**numbers, "engine": " ".join(engine)}


def state_like(now: Any, saved_states: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the saved state that a generator of this process can continue from.

    The state of a CPU is an engine of many numbers, that of a GPU a seed and a count: neither can
    be turned into the other. If no saved state fits, a warning says so.

    Args:
        now: The present state of the generator, which is returned if no saved state fits.
        saved_states: Results of :func:`generator_state`, at most one for each kind of device.
    """
    device = int(str(now).split()[0])
    for saved in saved_states:
        if (saved["device"] < 0) == (device < 0):
            return generator_from({**saved, "device": device})
    log.once(
        _log.warning,
        "the state of a CPU's generator cannot go on as that of a card, nor the other way round: "
        "what the script draws there itself begins anew, as it has seeded it",
    )
    return now


def generator_states() -> list[dict[str, Any]]:
    """Returns the states of this process's default generators, as values of JSON."""
    return [generator_state(generator.get_state()) for generator in generators()]


def set_generator_states(saved_states: Sequence[Mapping[str, Any]]) -> None:
    """Sets this process's default generators to a result of :func:`generator_states`."""
    for generator in generators():
        generator.set_state(state_like(generator.get_state(), saved_states))


def python_states() -> dict[str, Any]:
    """Returns the states of NumPy's and Python's default generators, as values of JSON."""
    numpy_state: Any = np.random.get_state()
    name, words, *rest = numpy_state
    version, numbers, next_gauss = random.getstate()
    python_state = [version, [*numbers], next_gauss]
    return {"numpy": [name, words.tolist(), *rest], "python": python_state}


def set_python_states(states: Mapping[str, Any]) -> None:
    """Sets NumPy's and Python's default generators to a result of :func:`python_states`."""
    np.random.set_state(tuple(states["numpy"]))
    version, numbers, next_gauss = states["python"]
    random.setstate((version, tuple(numbers), next_gauss))


def generator_from(described: Mapping[str, Any]) -> Any:
    """Returns Paddle's state object for a result of :func:`generator_state`.

    Raises:
        CheckpointError: This build of 2.6.2 stores its states in memory in another order.
    """
    kind: Any = type(core.default_cpu_generator().get_state())
    numbers = (described["device"], described["seed"], described["offset"])
    state = kind.__new__(kind)
    if TAKES_ENGINES:
        state.__setstate__((*numbers, list(described["engine"].encode())))
        return state
    state.__setstate__(numbers)
    if described["engine"]:
        _memory_of(state)[_STATE_NUMBERS:] = list(map(int, described["engine"].split()))
    return state


def _memory_of(state: Any) -> ctypes.Array[ctypes.c_uint64]:
    """Returns the memory of a state of 2.6.2, which has no function to set the engine's words.

    The object has one pointer, to the words. This function checks that they lie in memory in the
    order in which the state prints them.
    """
    address = ctypes.c_void_p.from_address(id(state) + object.__basicsize__).value
    words = (ctypes.c_uint64 * (_STATE_NUMBERS + _ENGINE_WORDS)).from_address(address or 0)
    if list(words) != [int(word) % 2**64 for word in str(state).split()]:
        raise CheckpointError(
            "the state of the random generator cannot be restored on this Paddle",
            expected="a state whose numbers lie in memory in the order in which it prints them",
            cause="this is another build of 2.6.2 than those of PyPI for Linux",
            fix="restore on paddlepaddle 3.3, or leave the random states out with only=",
        )
    return words


def seed_from_system() -> None:
    """Seeds the CPU's generator with a random number of the system's, as at a process's begin."""
    core.default_cpu_generator().seed()
