"""The private names of Paddle that checkpoints need, for paddlepaddle 2.6.2 and 3.3.x."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paddle.base import core
from paddle.base import framework as _framework
from paddle.base.layer_helper import LayerHelper

from fleetpipe.aliases import Optimizer, Tensor
from fleetpipe.checkpoint.contents import engine as engines
from fleetpipe.paddle_api import paddle

_any_framework: Any = _framework
_any_paddle: Any = paddle

#: Which Paddle this is.
VERSION: str = _any_paddle.__version__
#: Whether a generator's state can be made: 3.3 takes the engine's, 2.6.2 a seed alone.
TAKES_ENGINES = len(core.default_cpu_generator().get_state().__getstate__()) > 3
_ENGINE_WORDS = 313
_DRAWN_AT_ONCE = 1 << 20


def base_optimizer(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that does the arithmetic, which others such as Fleet's wrap."""
    while "_inner_opt" in vars(optimizer):
        optimizer = optimizer._inner_opt
    return optimizer


def groups_of(optimizer: Optimizer) -> list[list[Tensor]]:
    """Returns the parameters of each group of an optimizer; one list where it has no groups."""
    listed = optimizer._param_groups or []
    if listed and isinstance(listed[0], dict):
        return [list(group["params"]) for group in listed]
    return [list(listed)]


def state_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Returns the accumulators of a parameter by kind, as ``moment1``."""
    names = [parameter.name]
    master = master_weight_of(optimizer, parameter)
    if master is not None:
        names.append(master.name)
    prefix = "" if optimizer._name is None else f"{optimizer._name}_"
    return {
        kind.removeprefix(prefix): accumulators[name]
        for kind, accumulators in optimizer._accumulators.items()
        for name in names
        if name in accumulators
    }


def master_weight_of(optimizer: Optimizer, parameter: Tensor) -> Tensor | None:
    """Returns the float32 copy that an optimizer keeps of a parameter, or None."""
    return optimizer._master_weights.get(parameter.name)


def create_state(optimizer: Optimizer, group: int, parameters: Sequence[Tensor]) -> None:
    """Makes the accumulators of some parameters of a group, as the first step would."""
    listed = optimizer._param_groups
    chosen: object = list(parameters)
    if listed and isinstance(listed[0], dict):
        chosen = {**listed[group], "params": chosen}
    # What a state dict left behind for names that Paddle counts is not for these.
    holder, optimizer._accumulators_holder = optimizer._accumulators_holder, {}
    if optimizer.helper is None:
        optimizer.helper = LayerHelper(type(optimizer).__name__)  # 2.6.2 makes it as it steps
    block = _any_framework.default_main_program().global_block()
    try:
        optimizer._create_accumulators(block, chosen)
    finally:
        optimizer._accumulators_holder = holder


def forget_state(optimizer: Optimizer, parameter: Tensor) -> None:
    """Makes an optimizer as if it had never stepped a parameter."""
    names = [parameter.name]
    master = optimizer._master_weights.pop(parameter.name, None)
    if master is not None:
        names.append(master.name)
    for accumulators in optimizer._accumulators.values():
        for name in names:
            accumulators.pop(name, None)
    for created in ("_already_create_accumulator", "_already_create_accumulater"):  # 2.6.2's
        getattr(optimizer, created, set()).discard(parameter.name)


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has a value: an LSTM keeps a buffer that never gets one on CPU."""
    return bool(tensor._is_initialized())


def generator_state(state: Any) -> dict[str, Any]:
    """Returns a state of a generator as JSON: 2.6.2 pickles too little of it, and prints all."""
    device, seed, offset, *rest = str(state).split()
    # 3.3 prints an address before the 312 words and the place of the engine; a GPU has none.
    engine = rest[-_ENGINE_WORDS:] if len(rest) >= _ENGINE_WORDS else []
    numbers = {"device": int(device), "seed": int(seed), "offset": int(offset)}
    return {**numbers, "engine": " ".join(engine)}


def generator_from(described: Mapping[str, Any]) -> Any:
    """Returns what :func:`generator_state` described, as ``paddle.set_rng_state`` takes it."""
    kind = type(core.default_cpu_generator().get_state())
    numbers = (described["device"], described["seed"], described["offset"])
    made = kind.__new__(kind)
    if TAKES_ENGINES or not described["engine"]:
        engine = (list(described["engine"].encode()),) if TAKES_ENGINES else ()
        made.__setstate__((*numbers, *engine))
        return made
    return _drawn_to(described["seed"], described["engine"])


def _drawn_to(seed: int, engine: str) -> Any:
    """Returns the state of the CPU generator that has an engine of some seed."""
    generator = core.default_cpu_generator()
    before = generator.get_state()
    try:
        generator.manual_seed(seed)
        draws = engines.draws(generator_state(generator.get_state())["engine"], engine)
        for start in range(0, draws, _DRAWN_AT_ONCE):
            paddle.rand([min(_DRAWN_AT_ONCE, draws - start)])
        return generator.get_state()
    finally:
        generator.set_state(before)


__all__ = [
    "VERSION",
    "base_optimizer",
    "core",
    "create_state",
    "forget_state",
    "generator_from",
    "generator_state",
    "groups_of",
    "has_memory",
    "master_weight_of",
    "paddle",
    "state_of",
]
