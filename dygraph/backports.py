"""Names of the pipeline that paddlepaddle 2.6.2 lacks: Paddle's own where it has them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import ModuleType
from typing import Any

from fleetpipe.aliases import Layer, Nest
from fleetpipe.errors import UsageError
from fleetpipe.paddle_api import paddle_fleet

_paddles: ModuleType = paddle_fleet.meta_parallel.pipeline_parallel
#: Takes the values of a location by name.
Hook = Callable[..., object]


class _LocalSharedLayerDesc(paddle_fleet.meta_parallel.LayerDesc):  # type: ignore[name-defined, misc]
    """A layer that is handed the weights of the first entry with its key, on the same rank."""

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
        named = shared_weight_attr
        self.shared_weight_attr = [named] if isinstance(named, str) else named

    def build_layer(self, **extra_kwargs: Any) -> Layer:
        """Returns the layer; ``extra_kwargs`` come after its own arguments."""
        return self.layer_func(*self.inputs, **{**self.kwargs, **extra_kwargs})


class _DatasetPreprocessor:
    """Wraps a function that gives the data of a batch when it is called without arguments."""

    def __init__(self, function: Callable[[], Nest]) -> None:
        self.function = function

    def __call__(self) -> Nest:
        return self.function()


class _MicroStepLocations(Enum):
    """Where within a forward or a backward of a stage a hook is called."""

    FORWARD_BEGIN = "forward_begin"
    FORWARD_END = "forward_end"
    BACKWARD_BEGIN = "backward_begin"
    BACKWARD_END = "backward_end"


class _MicroStepCallback:
    """A registry of hooks by location."""

    def __init__(self) -> None:
        self.hooks: dict[Enum, list[Hook]] = {
            location: [] for location in PipelineParallelMicroStepLocations
        }

    def register_hook(self, location: Enum, hook: Hook) -> None:
        """Adds a hook.

        Raises:
            UsageError: ``location`` is no ``PipelineParallelMicroStepLocations``.
        """
        if location not in self.hooks:
            raise UsageError(
                "a hook is registered for one of PipelineParallelMicroStepLocations",
                got=repr(location),
                fix="take one of " + ", ".join(one.name for one in self.hooks),
            )
        self.hooks[location].append(hook)

    def on_location(self, location: Enum, **values: object) -> None:
        """Calls the hooks of a location."""
        for hook in self.hooks[location]:
            hook(**values)


def _register_global_hook(location: Enum, hook: Hook) -> None:
    """Adds a hook to the registry that all wrappers of the process look at."""
    pipeline_parallel_callbacks_.register_hook(location, hook)


LocalSharedLayerDesc: Any = getattr(
    paddle_fleet.meta_parallel, "LocalSharedLayerDesc", _LocalSharedLayerDesc
)
PipelineDatasetPreprocessor: Any = getattr(
    _paddles, "PipelineDatasetPreprocessor", _DatasetPreprocessor
)
PipelineParallelMicroStepLocations: Any = getattr(
    _paddles, "PipelineParallelMicroStepLocations", _MicroStepLocations
)
PipelineParallelMicroStepCallback: Any = getattr(
    _paddles, "PipelineParallelMicroStepCallback", _MicroStepCallback
)
#: The registry that all wrappers of the process look at.
pipeline_parallel_callbacks_: Any = (
    getattr(_paddles, "pipeline_parallel_callbacks_", None) or PipelineParallelMicroStepCallback()
)
register_global_pipeline_parallel_hook: Callable[[Enum, Hook], None] = getattr(
    _paddles, "register_global_pipeline_parallel_hook", _register_global_hook
)
