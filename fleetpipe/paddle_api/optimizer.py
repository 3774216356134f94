"""Reads and changes optimizers: parameters, state, clips and learning rates, in both graph modes.

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


#: The classes of clips by the norm of all gradients; the second is Paddle's for experts.
GLOBAL_NORM_CLIPS = (paddle.nn.ClipGradByGlobalNorm, _moe_clip.ClipGradForMOEByGlobalNorm)


def wrapper_chain(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer and those that it wraps; the last, innermost one updates parameters.

    Fleet's and other libraries' optimizers wrap one in the attribute ``_inner_opt``.
    """
    optimizers = [optimizer]
    while "_inner_opt" in vars(optimizers[-1]):
        optimizers.append(optimizers[-1]._inner_opt)
    return optimizers


def base_optimizer(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that updates parameters, inside wrappers such as Fleet's."""
    return wrapper_chain(optimizer)[-1]


def is_paddles(optimizer: Optimizer) -> bool:
    """Returns whether an object has the attributes of Paddle's optimizers for parameters."""
    return hasattr(optimizer, "_param_groups") and hasattr(optimizer, "_default_dict")


@functools.cache
def names_used_in_class(kind: type) -> frozenset[str]:
    """Returns the names that the methods of a class and its bases use: attributes and globals."""
    members = [inspect.unwrap(member) for base in kind.__mro__ for member in vars(base).values()]
    methods = [member for member in members if isinstance(member, FunctionType)]
    return frozenset(name for method in methods for name in method.__code__.co_names)


def allow_no_parameters(applies: Callable[[], bool]) -> None:
    """Makes the constructors of Paddle's optimizers accept empty lists of parameters.

    The constructors and ``clear_grad`` use the first parameter, so an empty list gets a frozen
    placeholder, which the functions of this module leave out.

    Args:
        applies: Returns whether empty lists are accepted now.
    """
    classes = [_any_optimizer.Optimizer]
    for optimizer_class in classes:  # grows meanwhile
        classes += optimizer_class.__subclasses__()
        if "__init__" in vars(optimizer_class):
            optimizer_class.__init__ = _with_placeholder(optimizer_class.__init__, applies)


def _with_placeholder(
    stock: Callable[..., None], applies: Callable[[], bool]
) -> Callable[..., None]:
    """Returns a wrapper of a constructor that adds a placeholder to an empty list of parameters."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def construct(*arguments: Any, **options: Any) -> None:
        """Calls the constructor with a placeholder in place of an empty list."""
        bound = signature.bind(*arguments, **options)
        parameters = bound.arguments.get("parameters")
        if parameters is not None and not isinstance(parameters, paddle.Tensor) and applies():
            items = list(parameters) or [_new_placeholder()]
            if isinstance(items[0], dict):
                first_group = list(items[0]["params"]) or [_new_placeholder()]
                items[0] = {**items[0], "params": first_group}
            bound.arguments["parameters"] = items
        stock(*bound.args, **bound.kwargs)

    return construct


def _new_placeholder() -> Tensor:
    """Returns a frozen parameter that stands for an empty list of parameters."""
    parameter = _any_framework.EagerParamBase.from_tensor(paddle.zeros([1]), trainable=False)
    parameter.is_placeholder = True
    return parameter


def check_before_clip_grad_norm(check: Callable[[list[Tensor]], None]) -> None:
    """Makes ``paddle.nn.utils.clip_grad_norm_`` call ``check(parameters)`` first.

    It does so wherever a script has imported the function from.
    """
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
    """Returns the optimizer's own dicts of its parameter groups; an empty list without groups."""
    groups = base_optimizer(optimizer)._param_groups or []
    return groups if groups and isinstance(groups[0], dict) else []


def options_of(optimizer: Optimizer) -> dict[str, str]:
    """Returns the options of an optimizer as texts by name, without parameters, rate and clip."""
    base = base_optimizer(optimizer)
    defaults: dict[str, Any] = base._default_dict
    options = {n: repr(v) for n, v in defaults.items() if isinstance(v, (bool, int, float, str))}
    # With groups, regularization is that of the group that stepped last.
    if not dict_groups(base):
        options["regularization"] = str(base.regularization)
    return options


def put_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Replaces the parameter groups of an optimizer that has not stepped yet.

    Args:
        optimizer: The optimizer, perhaps a wrapper.
        groups: The new groups, dicts with ``params`` and the options of the group.
    """
    base = base_optimizer(optimizer)
    if not dict_groups(base):
        base._parameter_list = groups
    base._param_groups = groups
    for value in vars(base).values():
        by_dtype = base._create_multi_tensor_dict()  # for use_multi_tensor: a list for each group
        if isinstance(value, dict) and value.keys() == by_dtype.keys():
            value.update((kind, by_dtype[kind]) for kind in value if value[kind] is not None)


def wrapper_with_attribute(optimizer: Optimizer, name: str) -> Optimizer | None:
    """Returns the outermost optimizer of a wrapper chain that has attribute ``name``; or None."""
    return next((link for link in wrapper_chain(optimizer) if name in vars(link)), None)


def optimized_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters of an optimizer, group after group."""
    return [parameter for group in groups_of(optimizer) for parameter in group]


@contextmanager
def stepping_only(optimizer: Optimizer, steps: Callable[[Tensor], bool]) -> Iterator[bool]:
    """Opens a context in which an optimizer steps only some of its parameters.

    Args:
        optimizer: The optimizer, perhaps a wrapper.
        steps: Returns whether a parameter is stepped.

    Yields:
        Whether there is such a parameter: an optimizer over none cannot step.
    """
    base = base_optimizer(optimizer)
    holders = [(base, "_param_groups")]
    # AdamW and MixPrecisionOptimizer step the parameters of another list than the others.
    for wrapper in wrapper_chain(optimizer):
        parameters = vars(wrapper).get("_parameter_list")
        if parameters and not isinstance(parameters[0], dict):
            holders.append((wrapper, "_parameter_list"))
    ids = {id(parameter) for parameter in optimized_parameters(base) if steps(parameter)}
    shortened = [(owner, name, _only(getattr(owner, name), ids)) for owner, name in holders]
    with replaced(*shortened):
        yield bool(ids)


def _only(items: list[Any], ids: Collection[int]) -> list[Any]:
    """Returns a list of parameters, or of groups (dicts), with only the parameters of some ids."""
    if not (items and isinstance(items[0], dict)):
        return [parameter for parameter in items if id(parameter) in ids]
    return [{**group, "params": _only(group["params"], ids)} for group in items]


def name_prefix(optimizer: Optimizer) -> str:
    """Returns the prefix of the names of an optimizer's state."""
    name = base_optimizer(optimizer)._name
    return "" if name is None else f"{name}_"


def state_of(
    optimizer: Optimizer,
    parameter: str,
    name_of: Callable[[Tensor | Variable], str] = attrgetter("name"),
) -> dict[str, Any]:
    """Returns the accumulators of a parameter by kind, such as ``moment1``.

    The dict is empty before the parameter's first step.

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
    """Returns an optimizer's float32 copy of a half-precision parameter, by its name; or None."""
    return base_optimizer(optimizer)._master_weights.get(parameter)


def create_state(optimizer: Optimizer, group: int, parameters: Sequence[Tensor]) -> None:
    """Creates the accumulators of some parameters of a group, as the first step would.

    Args:
        optimizer: The optimizer that does the arithmetic, not a wrapper.
        group: The index of the group; 0 without groups.
        parameters: The parameters.
    """
    groups = optimizer._param_groups
    target: object = list(parameters)
    if groups and isinstance(groups[0], dict):
        target = {**groups[group], "params": target}
    if optimizer.helper is None:
        optimizer.helper = LayerHelper(type(optimizer).__name__)  # 2.6.2 makes it as it steps
    block = _any_framework.default_main_program().global_block()
    # The values that a state dict left there are for other parameters of the same names.
    with replaced((optimizer, "_accumulators_holder", {})):
        optimizer._create_accumulators(block, target)


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

    Paddle's ``ReduceLROnPlateau`` sets, after the first step, only the number that ``get_lr``
    returns; the steps go on with the earlier rate.
    """
    base = base_optimizer(optimizer)
    rate, number = base._global_learning_rate(), float(base.get_lr())
    # Equal in float32, or before the first step: the exact number.
    return number if rate is None or float(rate) == np.float32(number) else float(rate)


def set_rates(optimizer: Optimizer, rate: float, of_steps: float) -> None:
    """Sets the constant learning rates of an optimizer.

    Args:
        optimizer: The optimizer.
        rate: The rate that ``get_lr`` returns.
        of_steps: The rate that steps use, which may differ.
    """
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
    """The location of an optimizer's gradient clip.

    Attributes:
        holder: The dict that has the clip: attributes of the optimizer, or options of a group.
        name: The key of the clip in it.
    """

    holder: dict[str, object]
    name: str

    @property
    def clip(self) -> Clip:
        """The clip at this location, or None."""
        return self.holder.get(self.name)

    def put(self, clip: Clip) -> None:
        """Stores another clip at this location."""
        self.holder[self.name] = clip


def clip_places(optimizer: Optimizer) -> list[ClipPlace]:
    """Returns where an optimizer may have a clip: itself, the default of its groups, each group."""
    base = base_optimizer(optimizer)
    places = [ClipPlace(base.__dict__, "_grad_clip"), ClipPlace(base._default_dict, "grad_clip")]
    return places + [ClipPlace(group, "grad_clip") for group in dict_groups(base)]


def clips_of_a_step(optimizer: Optimizer) -> list[Clip]:
    """Returns the clips that a step calls, in order: one for each group."""
    groups = [group["grad_clip"] for group in dict_groups(optimizer)]
    return groups or [base_optimizer(optimizer)._grad_clip]


def gradient_clip(optimizer: Optimizer) -> Clip:
    """Returns the clip of an optimizer itself, or None.

    ``minimize`` applies this clip and ignores those of groups.
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
    """Returns a copy of an optimizer over other parameters, with a copy of its scheduler.

    Groups, decay and clips are copied, and so is the state of the parameters' steps so far, such as
    their moments. Parameters of the optimizer that are not in ``parameters`` are left out.

    Args:
        optimizer: A Paddle optimizer over ``parameters`` and possibly more.
        parameters: Parameters by name.
        copies: The parameters that replace them, by the same names. They get the names of Paddle's,
            the learning rates and the decays of the replaced ones.
    """
    # Stands for each parameter that is left out: without a gradient, it is never stepped.
    frozen = paddle.zeros([1])
    # What takes the place of an object in the copy, by the object's id.
    memo = {id(parameter): frozen for parameter in optimized_parameters(optimizer)}
    memo.update((id(parameter), copies[name]) for name, parameter in parameters.items())
    for name, parameter in parameters.items():
        # Paddle stores state by this name, and a script may choose by it what decays.
        copies[name].name = parameter.name
        # These two have the learning rate and the decay of the parameter's group.
        copies[name].optimize_attr = dict(parameter.optimize_attr)
        copies[name].regularizer = parameter.regularizer
    base = base_optimizer(optimizer)
    # What the copy shares with the optimizer: the helper that makes state and the Programs of the
    # learning rates, since no Program can be copied, and below the state of left-out parameters.
    shared = [base.helper, *base._learning_rate_map]
    names = {parameter.name for parameter in parameters.values()}
    # The keys of state are names of parameters or of master weights.
    keys = {*names, *(base._master_weights[n].name for n in names if n in base._master_weights)}
    for state in (base._master_weights, *base._accumulators.values()):
        shared += [value for key, value in state.items() if key not in keys]
    memo.update((id(value), value) for value in shared)
    return copy.deepcopy(optimizer, memo)
