"""The private names of Paddle's dynamic graph, for paddlepaddle 2.6.2 and 3.3.x."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

from paddle.base import core
from paddle.base import framework as _framework
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import (
    hybrid_parallel_optimizer as _hybrid,
)
from paddle.distributed.fleet.utils import mix_precision_utils as _mixed_precision
from paddle.jit.dy2static.program_translator import StaticFunction
from paddle.nn import clip as _stock_clip

from fleetpipe.aliases import Clip, Layer, Optimizer, Scaler, Scheduler, Tensor, Topology
from fleetpipe.errors import StateError
from fleetpipe.paddle_api import paddle, paddle_fleet
from fleetpipe.paddle_api.device import device_kind

_clips: ModuleType = _stock_clip
_optimizers: ModuleType = _hybrid
_mixed: ModuleType = _mixed_precision
_eager: ModuleType = core.eager
HybridParallelOptimizer = _optimizers.HybridParallelOptimizer

#: Whether Fleet's ``PipelineLayer._loss_fn`` is a list (3.x) or what the user passed (2.6.2).
LOSS_FUNCTIONS_ARE_A_LIST = hasattr(paddle_fleet.meta_parallel, "LocalSharedLayerDesc")


#: What ``run_backward`` of Paddle's takes behind the graph's roots: whether to keep the graph and,
#: on 3.x, where to draw it.
_PLAINLY: tuple[object, ...] = (
    (False, None)
    if "dump_backward_graph_path" in inspect.signature(paddle.autograd.backward).parameters
    else (False,)
)


def run_backward(tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Does what ``paddle.autograd.backward`` does, without its checks of the arguments.

    Between a forward and a backward they take 10 us, as nothing of them is in the caches.

    Args:
        tensors: Where to start, each once.
        grads: The gradient of each; None for ones.
    """
    _eager.run_backward(tensors, grads, *_PLAINLY)


def base_optimizer(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that does the arithmetic, which others such as Fleet's wrap."""
    while "_inner_opt" in vars(optimizer):
        optimizer = optimizer._inner_opt
    return optimizer


def optimized_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters of an optimizer, those of all its groups one after another."""
    listed = base_optimizer(optimizer)._param_groups or []
    if listed and isinstance(listed[0], dict):
        return [parameter for group in listed for parameter in group["params"]]
    return list(listed)


@contextmanager
def restricted(optimizer: Optimizer, kept: Callable[[Tensor], bool]) -> Iterator[bool]:
    """Within it an optimizer steps only the parameters for which ``kept`` is true.

    Yields:
        Whether there are any: an optimizer over nothing cannot step.
    """
    base = base_optimizer(optimizer)
    holders = [(base, "_param_groups")]
    # AdamW goes by another list than the others, and so does MixPrecisionOptimizer.
    wrappers = [optimizer]
    while wrappers[-1] is not base:
        wrappers.append(wrappers[-1]._inner_opt)
    for wrapper in wrappers:
        listed = vars(wrapper).get("_parameter_list")
        if listed and not isinstance(listed[0], dict):
            holders.append((wrapper, "_parameter_list"))
    before = [getattr(holder, name) for holder, name in holders]
    for (holder, name), listed in zip(holders, before):
        setattr(holder, name, _chosen(listed, kept))
    try:
        yield any(map(kept, optimized_parameters(base)))
    finally:
        for (holder, name), listed in zip(holders, before):
            setattr(holder, name, listed)


def _chosen(listed: list[Tensor], kept: Callable[[Tensor], bool]) -> list[Tensor]:
    """Returns what to keep of a list of parameters, or of groups, which are dicts."""
    if not (listed and isinstance(listed[0], dict)):
        return list(filter(kept, listed))
    return [{**group, "params": list(filter(kept, group["params"]))} for group in listed]


class ClipPlace(NamedTuple):
    """Where an optimizer has a gradient clip: a dict and the name in it."""

    holder: dict[str, object]
    name: str

    @property
    def clip(self) -> Clip:
        """The clip that is there now, or None."""
        return self.holder.get(self.name)

    def put(self, clip: Clip) -> None:
        """Puts another clip there."""
        self.holder[self.name] = clip


def clip_places(optimizer: Optimizer) -> list[ClipPlace]:
    """Returns where an optimizer may have a clip: itself, its groups, the default of new ones."""
    base = base_optimizer(optimizer)
    places = [ClipPlace(base.__dict__, "_grad_clip"), ClipPlace(base._default_dict, "grad_clip")]
    groups = [group for group in base._param_groups or [] if isinstance(group, dict)]
    return places + [ClipPlace(group, "grad_clip") for group in groups]


def clips_of_a_step(optimizer: Optimizer) -> list[Clip]:
    """Returns the clips that a step calls, one after another: one for each group."""
    base = base_optimizer(optimizer)
    groups = base._param_groups or []
    if groups and isinstance(groups[0], dict):
        return [group["grad_clip"] for group in groups]
    return [base._grad_clip]


def clip_of_minimize(optimizer: Optimizer) -> Clip:
    """Returns the clip that ``minimize`` calls: it takes no notice of groups."""
    return base_optimizer(optimizer)._grad_clip


def has_known_state(optimizer: Optimizer) -> bool:
    """Whether a step changes parameters and :func:`state_of` alone: those of Paddle's own do."""
    base = base_optimizer(optimizer)
    wrapped = optimizer is base or type(optimizer) is _mixed.MixPrecisionOptimizer
    return wrapped and type(base).__module__.startswith("paddle.optimizer.")


def state_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns what an optimizer has made for its steps: accumulators and master weights."""
    base = base_optimizer(optimizer)
    tensors = list(base._master_weights.values())
    for accumulators in base._accumulators.values():
        tensors += accumulators.values()
    return tensors


def in_data_parallel_mode(hcg: Topology) -> bool:
    """Whether the ranks are split by data alone: ``DataParallel`` averages gradients there."""
    return bool(hcg.get_parallel_mode() == paddle.distributed.ParallelMode.DATA_PARALLEL)


def scaler_counts(scaler: Scaler) -> dict[str, float]:
    """Returns what a scaler, enabled, knows of earlier steps."""
    state = scaler.state_dict()
    return {
        "scale": float(state["scale"].item()),
        "good steps": state["incr_count"],
        "bad steps": state["decr_count"],
    }


def update_scale(scaler: Scaler) -> None:
    """Does what Paddle's ``_update`` does, with a scale that it can print.

    It prints ``float(scale)`` of a tensor of shape [1], which NumPy refuses from 2.4 on.
    """
    scaler._scale = scaler._scale.reshape([])
    try:
        type(scaler)._update(scaler)
    finally:
        scaler._scale = scaler._scale.reshape([1])


def note_unscaled(scaler: Scaler, optimizer: Optimizer, found: bool) -> None:
    """Tells a scaler that the gradients are unscaled, and whether some were not finite.

    Raises:
        StateError: They were unscaled before in this step.
    """
    state = scaler._optimizer_states[id(optimizer)]
    states = type(state["state"])
    if state["state"] is not states.INIT:
        raise StateError(
            "the gradients were unscaled before in this step",
            fix="call scaler.unscale_(optimizer) once, before scaler.step, then scaler.update()",
        )
    state["state"] = states.UNSCALED
    scaler._found_inf = paddle.to_tensor([found])


def squared_norm(gradient: Tensor) -> Tensor:
    """Returns the sum of the squares of a gradient as Paddle's own clip computes it."""
    if gradient.is_selected_rows():
        merged = _clips.merge_selected_rows(gradient)
        gradient = merged._get_tensor_from_selected_rows()
    if gradient.place.is_cpu_place() and gradient.dtype in (paddle.float16, paddle.bfloat16):
        # There the kernel is missing, and Paddle's own clip fails.
        gradient = gradient.astype("float32")
    return _clips._squared_l2_norm(gradient)


def twin_optimizer(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], others: Mapping[str, Tensor]
) -> Optimizer:
    """Returns an optimizer like ``optimizer`` over other parameters, with a scheduler of its own.

    Groups, decay and clipping carry over, accumulated state does not belong to it yet: the twin is
    to be made before the first step.

    Args:
        optimizer: A Paddle optimizer over ``parameters``.
        parameters: Parameters by name.
        others: The parameters to put in their place, by the same names.
    """
    memo = {id(parameter): others[name] for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        # Where a parameter group has its learning rate and its decay.
        others[name].optimize_attr = dict(parameter.optimize_attr)
        others[name].regularizer = parameter.regularizer
    return copy.deepcopy(optimizer, memo)


def learning_rate_of(optimizer: Optimizer) -> float | Scheduler:
    """Returns the learning rate of an optimizer: a number, or the scheduler that gives it."""
    return base_optimizer(optimizer)._learning_rate


def allocated_bytes() -> int:
    """Returns how many bytes of tensors are alive on the current device."""
    if device_kind() == "gpu":
        return int(paddle.device.cuda.memory_allocated())
    return int(core.host_memory_stat_current_value("Allocated", 0))


def restart_peak() -> None:
    """Has :func:`peak_bytes` count from now on."""
    if device_kind() == "gpu":
        paddle.device.cuda.reset_max_memory_allocated()
    elif hasattr(core, "host_memory_stat_reset_peak_value"):
        core.host_memory_stat_reset_peak_value("Allocated", 0)


def peak_bytes() -> int:
    """Returns the most bytes of tensors that were alive at once since :func:`restart_peak`.

    On 2.6.2, where nothing can restart it on a CPU, it is what is alive now.
    """
    if device_kind() == "gpu":
        return int(paddle.device.cuda.max_memory_allocated())
    if not hasattr(core, "host_memory_stat_reset_peak_value"):
        return allocated_bytes()
    return int(core.host_memory_stat_peak_value("Allocated", 0))


def device_id() -> int:
    """Returns the number of this process's device; 0 on CPU, where Paddle does not tell one."""
    environment: Callable[[], object] = paddle.distributed.ParallelEnv
    return int(getattr(environment(), "device_id", 0))


def forward_hooks(layer: Layer) -> list[dict[int, Any]]:
    """Returns the hooks around a layer's forward: those before it, and those after it."""
    attributes = vars(layer)
    return [attributes["_forward_pre_hooks"], attributes["_forward_post_hooks"]]


def is_patched(layer: Layer) -> bool:
    """Whether a layer has hooks around its forward, or another forward than its class."""
    attributes = vars(layer)
    return bool(
        attributes["_forward_pre_hooks"]
        or attributes["_forward_post_hooks"]
        or "forward" in attributes
    )


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


def stream_seeds() -> dict[str, int]:
    """Returns the seed that each stream of Paddle's tracker was given, by name."""
    states = paddle_fleet.meta_parallel.get_rng_state_tracker().get_states_tracker()
    return {name: int(state[0].current_seed()) for name, state in states.items()}


def state_slots(layer: Layer) -> Iterator[tuple[dict[str, Tensor], str]]:
    """Yields where a layer itself has state that its forward may change: a dict and a name in it.

    These are its buffers, and the vectors among its parameters that are not trained, which is
    where some layers have statistics.
    """
    attributes = vars(layer)
    for name, tensor in attributes["_buffers"].items():
        # The one that LSTM and its kin have for GPUs is nowhere on a CPU.
        if tensor is not None and tensor._is_initialized():
            yield attributes["_buffers"], name
    for name, tensor in attributes["_parameters"].items():
        if tensor is not None and tensor.stop_gradient and tensor.ndim <= 1:
            yield attributes["_parameters"], name


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has a value: an LSTM keeps a buffer that never gets one on CPU."""
    return bool(tensor._is_initialized())


def same_memory(tensor: Tensor) -> Tensor:
    """Returns a leaf of the graph that shares memory and may be emptied on its own."""
    if hasattr(tensor, "_unsafe_share_buffer_to"):
        other = tensor.detach()
    else:
        # On 2.6.2 a detached tensor is the same inside, and to unpack it for autograd empties it.
        kind = core.VarDesc.VarType.LOD_TENSOR
        other = core.eager.Tensor(tensor.dtype, tensor.shape, "", kind, False)
        tensor._share_buffer_to(other)
    other.stop_gradient = tensor.stop_gradient
    return other


def is_static(layer: Layer) -> bool:
    """Whether ``paddle.jit.to_static`` makes a static graph of a layer's forward."""
    return isinstance(layer.forward, StaticFunction)


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, with all that is attached to it."""
    return isinstance(tensor, _framework.EagerParamBase)


def switch_gradients_on() -> None:
    """Undoes that Paddle leaves gradients off where a hook failed in the middle of backward."""
    framework: ModuleType = paddle.framework
    framework._dygraph_tracer()._has_grad = True


def casts_automatically() -> bool:
    """Whether tensors are cast automatically now, as within ``auto_cast``."""
    framework: ModuleType = paddle.framework
    return bool(framework._dygraph_tracer()._amp_level.name != "O0")


def automatic_casts() -> Callable[[], AbstractContextManager[object]]:
    """Returns what makes the context in which tensors are cast automatically as they are now."""
    framework: ModuleType = paddle.framework
    tracer = framework._dygraph_tracer()
    level, dtype = tracer._amp_level.name, tracer._amp_dtype
    lists = [set(names) for names in tracer._get_amp_op_list()]

    def context() -> AbstractContextManager[object]:
        if level == "O0" == tracer._amp_level.name:
            return nullcontext()
        if level == "O0":
            return paddle.amp.auto_cast(enable=False)
        white, black = lists
        return paddle.amp.auto_cast(True, white, black, level, dtype)

    return context
