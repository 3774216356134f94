"""Random generators: their states, and the streams of Fleet's tracker.

3.3.x takes the whole state of a CPU generator; 2.6.2 takes a seed alone, so that the
rest is written to its memory.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from paddle import _C_ops
from paddle.base import core as _core

from fleetpipe import log
from fleetpipe.aliases import Place, Tensor
from fleetpipe.errors import CheckpointError
from fleetpipe.paddle_api import paddle, paddle_fleet
from fleetpipe.paddle_api.device import device_id, expected_place

_log = log.logger(__name__)

#: With the names that its stub hides.
core: Any = _core
#: Whether a generator's state can be made: 3.3 takes the engine's, 2.6.2 a seed alone.
TAKES_ENGINES = len(core.default_cpu_generator().get_state().__getstate__()) > 3
#: The engine, MT19937-64: 312 words and the place in them.
_ENGINE_WORDS = 313
#: The name of Paddle's own generator among streams.
DEFAULT = "default generator"
#: What precedes it: device, seed and offset.
_NUMBERS = 3


def track_streams(stream_of: Callable[[str], AbstractContextManager[None] | None]) -> None:
    """Has the streams of tensor parallelism, as ``rng_state(name)`` of Paddle's tracker, replaced.

    Args:
        stream_of: Returns the context to run in instead; None for Paddle's own.
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


def drawn_on_host(below: int) -> int:
    """Returns a whole number from 0 on, drawn from the generator of the CPU as an operation would.

    Where a GPU computes, its own operation would have this process wait for all that was queued.
    """
    drawn: Tensor = _C_ops.randint(0, below, [1], paddle.int64, paddle.CPUPlace())
    return int(drawn.item())


def stream_seeds() -> dict[str, int]:
    """Returns the seed that each stream of Paddle's tracker was given, by name."""
    states = paddle_fleet.meta_parallel.get_rng_state_tracker().get_states_tracker()
    return {name: int(state[0].current_seed()) for name, state in states.items()}


def stream_states() -> dict[str, dict[str, Any]]:
    """Returns the state of each stream of Fleet's tracker on this process's own device."""
    tracked = paddle_fleet.meta_parallel.get_rng_state_tracker().get_states_tracker()
    return {name: generator_state(states[device_id()]) for name, states in tracked.items()}


def generator_of(place: Place) -> Any:
    """Returns the generator that the random operations of a device draw from."""
    if isinstance(place, core.CUDAPlace):
        return core.default_cuda_generator(place.get_device_id())
    return core.default_cpu_generator()


def generators() -> list[Any]:
    """Returns the generators that this process draws from: the device's, and the CPU's beside it.

    2.6.2's ``paddle.set_rng_state`` takes no name of a device, so that they are asked themselves.
    """
    by_cpu = core.default_cpu_generator()
    by_device = generator_of(expected_place())
    return [by_cpu] if by_device is by_cpu else [by_device, by_cpu]


def generator_state(state: Any) -> dict[str, Any]:
    """Returns a state of a generator as JSON: 2.6.2 pickles too little of it, and prints all.

    Cards have no number in it: ranks on several are to have the same.
    """
    device, seed, offset, *rest = str(state).split()
    # 3.3 prints an address before the 312 words and the place of the engine; a GPU has none.
    engine = rest[-_ENGINE_WORDS:] if len(rest) >= _ENGINE_WORDS else []
    numbers = {"device": min(int(device), 0), "seed": int(seed), "offset": int(offset)}
    return {**numbers, "engine": " ".join(engine)}


def state_like(now: Any, described: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the one of some saved states that is of the device of another; that, without one.

    A CPU's has an engine of many numbers, and a card's counts what was drawn from a seed: neither
    can go on as the other.

    Args:
        now: A state of the device.
        described: Of :func:`generator_state`.
    """
    device = int(str(now).split()[0])
    for one in described:
        if (one["device"] < 0) == (device < 0):
            return generator_from({**one, "device": device})
    log.once(
        _log.warning,
        "the state of a CPU's generator cannot go on as that of a card, nor the other way round: "
        "what the script draws there itself begins anew, as it has seeded it",
    )
    return now


def generator_states() -> list[dict[str, Any]]:
    """Returns the states of the generators that this process draws from."""
    return [generator_state(generator.get_state()) for generator in generators()]


def set_generator_states(described: Sequence[Mapping[str, Any]]) -> None:
    """Has this process's generators go on from :func:`generator_states`, of whatever device."""
    for generator in generators():
        generator.set_state(state_like(generator.get_state(), described))


def generator_from(described: Mapping[str, Any]) -> Any:
    """Returns what :func:`generator_state` described, as ``paddle.set_rng_state`` takes it.

    Raises:
        CheckpointError: This build of 2.6.2 has its states in memory in another order.
    """
    kind: Any = type(core.default_cpu_generator().get_state())
    numbers = (described["device"], described["seed"], described["offset"])
    state = kind.__new__(kind)
    if TAKES_ENGINES:
        state.__setstate__((*numbers, list(described["engine"].encode())))
        return state
    state.__setstate__(numbers)
    if described["engine"]:
        _memory_of(state)[_NUMBERS:] = list(map(int, described["engine"].split()))
    return state


def _memory_of(state: Any) -> ctypes.Array[ctypes.c_uint64]:
    """Returns where 2.6.2 has a state: no function of it takes the words of the engine.

    They lie behind the object's one pointer as they are printed, which is verified.
    """
    address = ctypes.c_void_p.from_address(id(state) + object.__basicsize__).value
    words = (ctypes.c_uint64 * (_NUMBERS + _ENGINE_WORDS)).from_address(address or 0)
    if list(words) != [int(word) % 2**64 for word in str(state).split()]:
        raise CheckpointError(
            "the state of the random generator cannot be restored on this Paddle",
            expected="a state whose numbers lie in memory in the order in which it prints them",
            cause="this is another build of 2.6.2 than those of PyPI for Linux",
            fix="restore on paddlepaddle 3.3, or leave the random states out with only=",
        )
    return words
