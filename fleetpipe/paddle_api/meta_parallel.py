"""Completes Fleet's ``meta_parallel`` (pipelines, layers of tensor parallelism) and reads from it.

2.6.2 lacks some names of the pipeline (:class:`LocalSharedLayerDesc` and those after it), and gets
classes of this module; on 3.3 they are Paddle's own. ``flex_checkpoint`` (:func:`shard_weights`,
:func:`resharding_within`) is in 3.3 only.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ContextDecorator, contextmanager
from enum import Enum
from types import ModuleType
from typing import Any

from paddle.base import initializer as _defaults
from paddle.base.param_attr import ParamAttr
from paddle.distributed import collective as _collective
from paddle.distributed.fleet.layers.mpu import mp_ops as _operations
from paddle.distributed.fleet.utils import sequence_parallel_utils as _sequence_parallel

from fleetpipe.aliases import Attribute, Layer, Nest, PaddleGroup, Tensor
from fleetpipe.errors import UsageError
from fleetpipe.paddle_api import paddle, paddle_fleet, replaced

_any_defaults: ModuleType = _defaults
_any_initializers: ModuleType = paddle.nn.initializer
Initializer = _any_initializers.Initializer
_pipelines: ModuleType = paddle_fleet.meta_parallel.pipeline_parallel
#: Whether Fleet's ``PipelineLayer._loss_fn`` is a list (3.x) or what the user passed (2.6.2).
LOSS_FUNCTIONS_ARE_A_LIST = hasattr(paddle_fleet.meta_parallel, "LocalSharedLayerDesc")
#: The modules from which scripts take the operations of tensor-parallel layers.
OPERATION_MODULES: tuple[ModuleType, ...] = (_operations, _collective)
#: The operations in these modules for which CPUs have no kernels.
GPU_OPERATIONS = (
    *("_c_identity", "_c_split", "_c_concat", "_mp_allreduce", "_c_lookup_table"),
    "_c_softmax_with_cross_entropy",
)
#: The module of sequence parallelism between tensor-parallel layers.
SEQUENCE_PARALLEL: ModuleType = _sequence_parallel
#: A hook of a micro-step: it gets values by name, which depend on the location.
Hook = Callable[..., object]

_zero_bubble: Any = getattr(paddle_fleet.meta_parallel, "zero_bubble_utils", None)


def weight_attribute(attr: Attribute) -> Attribute:
    """Returns a layer's ``weight_attr`` as a ``ParamAttr``, with the initializer to use."""
    copied: Attribute = copy.copy(ParamAttr._to_attr(attr))
    if copied and copied.initializer is None:
        default = _any_defaults._global_weight_initializer()
        copied.initializer = default or paddle.nn.initializer.XavierUniform()
    return copied


def assigned_shape(initializer: object) -> list[int] | None:
    """Returns the shape of the value of an ``Assign``; None for any other initializer."""
    if not isinstance(initializer, paddle.nn.initializer.Assign):
        return None
    assign: Attribute = initializer
    return list(assign._value.shape)


def shard_weights(
    state: Mapping[str, Tensor], axes: Mapping[str, int], group: PaddleGroup, prefix: str
) -> dict[str, Tensor]:
    """Returns Paddle 3.3's ``ShardedWeight`` of each tensor of a state, by name with ``prefix``.

    Args:
        state: The tensors by name.
        axes: The axis along which a tensor is a shard of ``group``; other tensors are replicated.
        group: The ranks that have the shards of a tensor.
        prefix: The beginning of all names in the result.
    """
    from paddle.distributed.flex_checkpoint.dcp import sharded_weight

    shards: ModuleType = sharded_weight
    weights: dict[str, Tensor] = {}
    for name, tensor in state.items():
        key = f"{prefix}{name}"
        if name in axes:
            weights[key] = shards.shard_weight(key, tensor, axes[name], group)
        else:
            weights[key] = shards.make_replicated_sharded_weight(key, tensor)
    return weights


@contextmanager
def resharding_within(context: Callable[[], ContextDecorator]) -> Iterator[None]:
    """Opens a context in which ``flex_checkpoint`` sends each tensor within a ``context()``.

    It changes nothing on 2.6.2, or if ``flex_checkpoint`` is not imported.
    """
    if "paddle.distributed.flex_checkpoint" not in sys.modules:
        yield
        return
    from paddle.distributed.flex_checkpoint.dcp import full_param, load_state_dict

    loading: Any = load_state_dict
    gathering: Any = full_param.BaseAssembler
    gather = gathering.__iter__

    def iterate(assembler: object) -> Iterator[tuple[str, Tensor]]:
        """Returns Paddle's iterator over gathered tensors, of which each step has a context."""
        gather_next = context()(functools.partial(next, gather(assembler), None))
        return iter(gather_next, None)

    limited = context()(loading._load_state_dict)
    with replaced((loading, "_load_state_dict", limited), (gathering, "__iter__", iterate)):
        yield


class _LocalSharedLayerDesc(paddle_fleet.meta_parallel.LayerDesc):  # type: ignore[name-defined, misc]
    """Describes a layer that shares the weights of the first layer with its key, on one rank."""

    def __init__(
        self,
        key: str,
        layer_func: type[Layer],
        forward_func: Callable[..., Nest] | None = None,
        shared_weight_attr: str | list[str] = "weight",
        *inputs: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(layer_func, *inputs, **kwargs)
        self.layer_name = key
        self.forward_func = forward_func
        names = [shared_weight_attr] if isinstance(shared_weight_attr, str) else shared_weight_attr
        self.shared_weight_attr = names

    def build_layer(self, **extra_kwargs: Any) -> Layer:
        """Returns a new layer; ``extra_kwargs`` replace keyword arguments of the description."""
        return self.layer_func(*self.inputs, **{**self.kwargs, **extra_kwargs})


class _DatasetPreprocessor:
    """Wraps a function that returns the data of a batch when it is called without arguments."""

    def __init__(self, function: Callable[[], Nest]) -> None:
        self.function = function

    def __call__(self) -> Nest:
        return self.function()


class _MicroStepLocations(Enum):
    """The points of a stage's forward or backward at which a hook is called."""

    FORWARD_BEGIN = "forward_begin"
    FORWARD_END = "forward_end"
    BACKWARD_BEGIN = "backward_begin"
    BACKWARD_END = "backward_end"


class _MicroStepCallback:
    """A registry of hooks by location in a stage's forward or backward."""

    def __init__(self) -> None:
        self.hooks: dict[Enum, list[Hook]] = {
            location: [] for location in PipelineParallelMicroStepLocations
        }

    def register_hook(self, location: Enum, hook: Hook) -> None:
        """Adds a hook that is called at a location."""
        if location not in self.hooks:
            raise UsageError(
                "a hook is registered for one of PipelineParallelMicroStepLocations",
                got=repr(location),
                fix="take one of " + ", ".join(point.name for point in self.hooks),
            )
        self.hooks[location].append(hook)

    def on_location(self, location: Enum, **values: object) -> None:
        """Calls the hooks of a location with ``values``, in the order of their registration."""
        for hook in self.hooks[location]:
            hook(**values)


class _WeightGradStore:
    """Paddle's queue of delayed weight gradients, which is always empty on 2.6.2."""

    cache: tuple[()] = ()


#: The queue of the weight gradients that ``SplitBWLinear`` delays.
WeightGradStore: Any = getattr(_zero_bubble, "WeightGradStore", _WeightGradStore)
LocalSharedLayerDesc: Any = getattr(
    paddle_fleet.meta_parallel, "LocalSharedLayerDesc", _LocalSharedLayerDesc
)
PipelineDatasetPreprocessor: Any = getattr(
    _pipelines, "PipelineDatasetPreprocessor", _DatasetPreprocessor
)
PipelineParallelMicroStepLocations: Any = getattr(
    _pipelines, "PipelineParallelMicroStepLocations", _MicroStepLocations
)
PipelineParallelMicroStepCallback: Any = getattr(
    _pipelines, "PipelineParallelMicroStepCallback", _MicroStepCallback
)
#: The registry that all wrappers of the process use.
pipeline_parallel_callbacks_: Any = (
    getattr(_pipelines, "pipeline_parallel_callbacks_", None) or PipelineParallelMicroStepCallback()
)
register_global_pipeline_parallel_hook: Callable[[Enum, Hook], None] = getattr(
    _pipelines,
    "register_global_pipeline_parallel_hook",
    pipeline_parallel_callbacks_.register_hook,
)
