"""Types for Paddle's own descriptions of layers, which Paddle does not annotate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddle.distributed.fleet.meta_parallel.parallel_layers.spec_utils import LayerSpec
    from paddle.nn import Layer

    class LayerDesc:
        """A layer's class and its arguments, from which the rank that owns the layer builds it."""

        def __init__(
            self, layer_func: type[Layer] | LayerSpec, *inputs: Any, **kwargs: Any
        ) -> None: ...

        def build_layer(self, **extra_kwargs: Any) -> Layer:
            """Builds the layer."""

    class _Keyed(LayerDesc):
        def __init__(
            self,
            key: str,
            layer_func: type[Layer] | LayerSpec,
            forward_func: Callable[..., Any] | None = None,
            shared_weight_attr: str | list[str] = "weight",
            *inputs: Any,
            **kwargs: Any,
        ) -> None: ...

    class SharedLayerDesc(_Keyed):
        """A description of a layer that shares weights with all others of the same key."""

    class LocalSharedLayerDesc(_Keyed):
        """A description of a layer that uses the weights of the first of its key on its rank."""

else:
    from paddle.distributed.fleet.meta_parallel import LayerDesc, SharedLayerDesc

    from fleetpipe.paddle_api.meta_parallel import LocalSharedLayerDesc

__all__ = ["LayerDesc", "LocalSharedLayerDesc", "SharedLayerDesc"]
