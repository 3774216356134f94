"""Optimizers: their parameters, state, clips and learning rates, in dynamic and static graph.

An optimizer's private names are the same in 2.6.2 and 3.3.x, except for two: 2.6.2 creates
``helper`` at the first step (:func:`create_state`), and spells ``_already_create_accumulater``
(:func:`forget_state`).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from paddle.base import framework as _framework
from paddle.base.layer_helper import LayerHelper
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import (
    hybrid_parallel_optimizer as _hybrid,
)
from paddle.incubate.distributed.models.moe import grad_clip as _moe_clip
from paddle.nn import clip as _stock_clip

from fleetpipe.aliases import Clip, DType, Optimizer, Program, Scheduler, Tensor, Variable
from fleetpipe.paddle_api import paddle, replaced
from fleetpipe.paddle_api.amp import rehearsal_dtype

_clips: ModuleType = _stock_clip
_any_framework: Any = _framework
_any_hybrid: ModuleType = _hybrid
_any_optimizer: Any = paddle.optimizer
HybridParallelOptimizer = _any_hybrid.HybridParallelOptimizer


#: Clips by the norm of all gradients; the second is Paddle's for mixtures of experts.
GLOBAL_NORM_CLIPS = (paddle.nn.ClipGradByGlobalNorm, _moe_clip.ClipGradForMOEByGlobalNorm)


def wrapper_chain(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer, what it wraps and so on; the last one does the arithmetic."""
    optimizers = [optimizer]
    while "_inner_opt" in vars(optimizers[-1]):
        optimizers.append(optimizers[-1]._inner_opt)
    return optimizers


def base_optimizer(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that does the arithmetic, inside wrappers such as Fleet's."""
    return wrapper_chain(optimizer)[-1]


def is_paddles(optimizer: Optimizer) -> bool:
    """Whether an object has the parameters and groups of Paddle's optimizers."""
    return hasattr(optimizer, "_param_groups") and hasattr(optimizer, "_default_dict")


@functools.cache
def names_used_in_class(kind: type) -> frozenset[str]:
    """Returns the names of attributes and variables in the methods of a class and its bases."""
    methods = [inspect.unwrap(one) for base in kind.__mro__ for one in vars(base).values()]
    codes = [one.__code__ for one in methods if isinstance(one, FunctionType)]
    return frozenset(name for code in codes for name in code.co_names)


def allow_no_parameters(applies: Callable[[], bool]) -> None:
    """Makes Paddle's optimizers accept empty lists of parameters, if ``applies()``.

    Their constructors and ``clear_grad`` use the first parameter, so an empty list gets a frozen
    placeholder, which the functions of this module leave out.
    """
    kinds = [_any_optimizer.Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if "__init__" in vars(kind):
            kind.__init__ = _with_parameter(kind.__init__, applies)


def _with_parameter(stock: Callable[..., None], applies: Callable[[], bool]) -> Callable[..., None]:
    """Wraps the constructor ``stock`` so that it gets a placeholder if there is no parameter."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def begin(*arguments: Any, **options: Any) -> None:
        bound = signature.bind(*arguments, **options)
        parameters = bound.arguments.get("parameters")
        if parameters is not None and not isinstance(parameters, paddle.Tensor) and applies():
            listed = list(parameters) or [_placeholder()]
            if isinstance(listed[0], dict):
                part = list(listed[0]["params"]) or [_placeholder()]
                listed[0] = {**listed[0], "params": part}
            bound.arguments["parameters"] = listed
        stock(*bound.args, **bound.kwargs)

    return begin


def _placeholder() -> Tensor:
    parameter = _any_framework.EagerParamBase.from_tensor(paddle.zeros([1]), trainable=False)
    parameter.is_placeholder = True
    return parameter


def check_before_clip_grad_norm(check: Callable[[list[Tensor]], None]) -> None:
    """Makes every reference to ``paddle.nn.utils.clip_grad_norm_`` call ``check`` first."""
    decorated: Any = paddle.nn.utils.clip_grad_norm_
    stock = decorated.__wrapped__

    @functools.wraps(stock)
    def check_and_clip(parameters: Any, *more: Any, **named: Any) -> Tensor:
        parameters = [parameters] if isinstance(parameters, paddle.Tensor) else list(parameters)
        check(parameters)
        return stock(parameters, *more, **named)

    for cell in decorated.__closure__:  # a script may have imported it before
        if cell.cell_contents is stock:
            cell.cell_contents = check_and_clip


def groups_of(optimizer: Optimizer) -> list[list[Tensor]]:
    """Returns the parameters of each group of an optimizer; one list if it has no groups."""
    base = base_optimizer(optimizer)
    groups = [group["params"] for group in dict_groups(base)] or [base._param_groups or []]
    return [[p for p in group if not hasattr(p, "is_placeholder")] for group in groups]


def dict_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the groups of an optimizer in its own form; none if it has a plain list."""
    groups = base_optimizer(optimizer)._param_groups or []
    return groups if groups and isinstance(groups[0], dict) else []


def options_of(optimizer: Optimizer) -> dict[str, str]:
    """Returns the options of an optimizer except parameters, rate and clip, as texts by name."""
    base = base_optimizer(optimizer)
    defaults: dict[str, Any] = base._default_dict
    plain = {n: repr(v) for n, v in defaults.items() if isinstance(v, (bool, int, float, str))}
    # With groups, regularization is that of the group that stepped last.
    alike = {} if dict_groups(base) else {"regularization": str(base.regularization)}
    return {**plain, **alike}


def put_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Replaces the groups of an optimizer that has not stepped yet."""
    base = base_optimizer(optimizer)
    if not dict_groups(base):
        base._parameter_list = groups
    base._param_groups = groups
    for value in vars(base).values():
        by_dtype = base._create_multi_tensor_dict()  # for use_multi_tensor: a list for each group
        if isinstance(value, dict) and value.keys() == by_dtype.keys():
            value.update((kind, by_dtype[kind]) for kind in value if value[kind] is not None)


def wrapper_with_attribute(optimizer: Optimizer, name: str) -> Optimizer | None:
    """Returns the optimizer, of a wrapper and those inside it, that has an attribute; or None."""
    return next((one for one in wrapper_chain(optimizer) if name in vars(one)), None)


def optimized_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters of an optimizer, group after group."""
    return [parameter for group in groups_of(optimizer) for parameter in group]


@contextmanager
def stepping_only(optimizer: Optimizer, kept: Callable[[Tensor], bool]) -> Iterator[bool]:
    """While this context is open, an optimizer steps only parameters for which ``kept`` is true.

    Yields:
        Whether there are any: an optimizer over nothing cannot step.
    """
    base = base_optimizer(optimizer)
    holders = [(base, "_param_groups")]
    # AdamW and MixPrecisionOptimizer step the parameters of another list than the others.
    for wrapper in wrapper_chain(optimizer):
        listed = vars(wrapper).get("_parameter_list")
        if listed and not isinstance(listed[0], dict):
            holders.append((wrapper, "_parameter_list"))
    chosen = {id(parameter) for parameter in optimized_parameters(base) if kept(parameter)}
    with replaced(*((one, name, _choose(getattr(one, name), chosen)) for one, name in holders)):
        yield bool(chosen)


def _choose(listed: list[Any], chosen: Collection[int]) -> list[Any]:
    """Returns the parameters to step of a list of parameters, or of groups, which are dicts."""
    if not (listed and isinstance(listed[0], dict)):
        return [parameter for parameter in listed if id(parameter) in chosen]
    return [{**group, "params": _choose(group["params"], chosen)} for group in listed]


def name_prefix(optimizer: Optimizer) -> str:
    """Returns the prefix of the names of an optimizer's state."""
    name = base_optimizer(optimizer)._name
    return "" if name is None else f"{name}_"


def state_of(
    optimizer: Optimizer,
    parameter: str,
    name_of: Callable[[Tensor | Variable], str] = attrgetter("name"),
) -> dict[str, Any]:
    """Returns the accumulators of a parameter by kind, as ``moment1``; none before its first step.

    Args:
        optimizer: The optimizer; in static graph, one that was applied to a program.
        parameter: The name of the parameter.
        name_of: Returns the name of an accumulator or master weight.
    """
    base = base_optimizer(optimizer)
    master = master_weight_of(base, parameter)
    names = [parameter] if master is None else [parameter, name_of(master)]
    prefix = name_prefix(base)
    return {
        kind.removeprefix(prefix): accumulators[name]
        for kind, accumulators in base._accumulators.items()
        for name in names
        if name in accumulators
    }


def master_weight_of(optimizer: Optimizer, parameter: str) -> Tensor | Variable | None:
    """Returns an optimizer's float32 copy of the parameter of a name, or None."""
    return base_optimizer(optimizer)._master_weights.get(parameter)


def create_state(optimizer: Optimizer, group: int, parameters: Sequence[Tensor]) -> None:
    """Creates the accumulators of some parameters of a group, as the first step would."""
    listed = optimizer._param_groups
    chosen: object = list(parameters)
    if listed and isinstance(listed[0], dict):
        chosen = {**listed[group], "params": chosen}
    if optimizer.helper is None:
        optimizer.helper = LayerHelper(type(optimizer).__name__)  # 2.6.2 makes it as it steps
    block = _any_framework.default_main_program().global_block()
    # The values that a state dict left there are for other parameters of the same names.
    with replaced((optimizer, "_accumulators_holder", {})):
        optimizer._create_accumulators(block, chosen)


def forget_state(optimizer: Optimizer, parameter: Tensor) -> None:
    """Removes all state that an optimizer has of a parameter."""
    names = [parameter.name]
    master = optimizer._master_weights.pop(parameter.name, None)
    if master is not None:
        names.append(master.name)
    for accumulators in optimizer._accumulators.values():
        for name in names:
            accumulators.pop(name, None)
    for created in ("_already_create_accumulator", "_already_create_accumulater"):  # 2.6.2's
        getattr(optimizer, created, set()).discard(parameter.name)


def learning_rate_of(optimizer: Optimizer) -> float | Scheduler:
    """Returns the learning rate of an optimizer: a number, or the scheduler that gives it."""
    return base_optimizer(optimizer)._learning_rate


def rate_of_steps(optimizer: Optimizer) -> float:
    """Returns the constant learning rate that steps use, which may differ from ``get_lr()``.

    After the first step Paddle's ``ReduceLROnPlateau`` sets only the number that ``get_lr``
    returns: the steps go on with the earlier rate.
    """
    base = base_optimizer(optimizer)
    rate, number = base._global_learning_rate(), float(base.get_lr())
    # Equal in float32, or before the first step: the exact number.
    return number if rate is None or float(rate) == np.float32(number) else float(rate)


def set_rates(optimizer: Optimizer, rate: float, of_steps: float) -> None:
    """Sets the constant learning rate that ``get_lr`` returns, and the one that steps use."""
    base = base_optimizer(optimizer)
    base.set_lr(of_steps)
    if np.float32(rate) != np.float32(of_steps):
        if base.helper is None:
            base.helper = LayerHelper(type(base).__name__)  # 2.6.2 makes it as it steps
        base._create_global_learning_rate()
    base._learning_rate = rate


def current_rate(optimizer: Optimizer) -> float:
    """Returns the learning rate of an optimizer's next step."""
    rate = learning_rate_of(optimizer)
    return float(rate() if callable(rate) else rate)


def scheduler_of(optimizer: Optimizer) -> Scheduler:
    """Returns the scheduler of an optimizer's learning rate; None if the rate is a number."""
    rate = learning_rate_of(optimizer)
    return rate if hasattr(rate, "set_state_dict") else None


def rate_variable(optimizer: Optimizer, program: Program) -> Variable:
    """Returns the learning rate's variable in a program that an optimizer was applied to."""
    return optimizer._learning_rate_map[program]


def set_dtype(optimizer: Optimizer, dtype: DType) -> None:
    """Makes an optimizer that is applied to a program compute in ``dtype``.

    ``minimize`` takes the dtype from the loss; ``apply_gradients`` alone does not set it.
    """
    optimizer._dtype = dtype


class ClipPlace(NamedTuple):
    """A place where an optimizer stores a gradient clip: a dict and the name in it."""

    holder: dict[str, object]
    name: str

    @property
    def clip(self) -> Clip:
        """The clip at this place now, or None."""
        return self.holder.get(self.name)

    def put(self, clip: Clip) -> None:
        """Stores another clip at this place."""
        self.holder[self.name] = clip


def clip_places(optimizer: Optimizer) -> list[ClipPlace]:
    """Returns the places where an optimizer may have a clip: itself, its groups, their default."""
    base = base_optimizer(optimizer)
    places = [ClipPlace(base.__dict__, "_grad_clip"), ClipPlace(base._default_dict, "grad_clip")]
    return places + [ClipPlace(group, "grad_clip") for group in dict_groups(base)]


def clips_of_a_step(optimizer: Optimizer) -> list[Clip]:
    """Returns the clips that a step calls, in order: one for each group."""
    groups = [group["grad_clip"] for group in dict_groups(optimizer)]
    return groups or [base_optimizer(optimizer)._grad_clip]


def gradient_clip(optimizer: Optimizer) -> Clip:
    """Returns the clip of an optimizer itself, or None.

    ``minimize`` calls it and ignores groups.
    """
    return getattr(base_optimizer(optimizer), "_grad_clip", None)


def squared_norm(gradient: Tensor) -> Tensor:
    """Returns the sum of the squares of a gradient as Paddle's own clip computes it."""
    if gradient.is_selected_rows():
        merged = _clips.merge_selected_rows(gradient)
        gradient = merged._get_tensor_from_selected_rows()
    half = gradient.dtype in (paddle.float16, paddle.bfloat16)
    if half and gradient.place.is_cpu_place() and rehearsal_dtype() is None:
        # There the kernel is missing, and Paddle's own clip fails.
        gradient = gradient.astype("float32")
    return _clips._squared_l2_norm(gradient)


def copy_optimizer(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], copies: Mapping[str, Tensor]
) -> Optimizer:
    """Returns an optimizer like ``optimizer`` over other parameters, with its own scheduler.

    Groups, decay and clipping carry over, with the state of the parameters' steps so far. The
    optimizer's further parameters are left out.

    Args:
        optimizer: A Paddle optimizer over ``parameters``.
        parameters: Parameters by name.
        copies: The parameters that replace them, by the same names.
    """
    frozen = paddle.zeros([1])
    memo = {id(parameter): frozen for parameter in optimized_parameters(optimizer)}
    memo.update((id(parameter), copies[name]) for name, parameter in parameters.items())
    for name, parameter in parameters.items():
        # Paddle stores state by this name, and a script may choose by it what decays.
        copies[name].name = parameter.name
        # These have the learning rate and the decay of a parameter group.
        copies[name].optimize_attr = dict(parameter.optimize_attr)
        copies[name].regularizer = parameter.regularizer
    base = base_optimizer(optimizer)
    # Not copied, as a Program cannot be: those of the state and of the learning rates.
    memo.update((id(one), one) for one in (base.helper, *base._learning_rate_map))
    names = {parameter.name for parameter in parameters.values()}
    # The keys of state are names of parameters or of master weights.
    kept = {*names, *(base._master_weights[n].name for n in names if n in base._master_weights)}
    for holder in (base._master_weights, *base._accumulators.values()):
        memo.update((id(one), one) for name, one in holder.items() if name not in kept)
    return copy.deepcopy(optimizer, memo)
