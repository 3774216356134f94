"""The entries of a layer list: how one is built, what it is called and what it would hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fleetpipe._paddle import paddle
from fleetpipe.errors import ConfigError

#: Fleet seeds layer i of a model with this number plus i.
FIRST_SEED = 1234


def check(entry: Any, index: int) -> None:
    """Refuses what cannot stand in a list of layers.

    Raises:
        ConfigError: ``entry`` is neither a description, nor a layer, nor callable.
    """
    if _is_shared(entry):
        raise ConfigError(
            "this version does not run SharedLayerDesc (weights shared between stages)",
            where=f"layer {index} of the list, key {entry.layer_name!r}",
            fix="use LayerDesc, with weights of its own for each layer",
        )
    if not hasattr(entry, "build_layer") and not callable(entry):
        raise ConfigError(
            "an entry of the list of layers is neither a LayerDesc, nor a Layer, nor callable",
            where=f"layer {index} of the list",
            got=type(entry).__name__,
            fix="write LayerDesc(nn.Linear, 8, 8), nn.Linear(8, 8) or a function of one argument",
        )


def build(entry: Any, index: int) -> Any:
    """Returns the callable of layer ``index``, built under the seed that Fleet gives it."""
    if not hasattr(entry, "build_layer"):
        return entry
    with _random_state_kept():
        paddle.seed(FIRST_SEED + index)
        return entry.build_layer()


def class_name(entry: Any) -> str:
    """Returns the name that ``seg_method="layer:Regex"`` is matched with; "" if there is none."""
    if isinstance(entry, paddle.nn.Layer):
        return type(entry).__name__
    described = getattr(entry, "layer_func", None)
    if described is None and hasattr(entry, "layer_spec"):
        described = entry.layer_spec.layer
    return str(getattr(described or entry, "__name__", ""))


def blueprint(entry: Any, index: int) -> Any:
    """Returns a layer like layer ``index`` for its names and shapes; its values mean nothing."""
    if not hasattr(entry, "build_layer"):
        return entry
    try:
        with _random_state_kept(), paddle.LazyGuard():
            return entry.build_layer()
    except Exception:
        # A layer whose constructor computes with its parameters cannot be built lazily.
        return build(entry, index)


def count_parameters(layer: Any) -> int:
    """Returns how many numbers the trainable parameters of a layer hold; 0 for a function."""
    if not isinstance(layer, paddle.nn.Layer):
        return 0
    return sum(_numel(parameter) for parameter in layer.parameters() if parameter.trainable)


def _numel(parameter: Any) -> int:
    count = 1
    for size in parameter.shape:
        count *= size
    return count


def _is_shared(entry: Any) -> bool:
    return hasattr(entry, "shared_weight_attr")


@contextmanager
def _random_state_kept() -> Iterator[None]:
    state = paddle.get_rng_state()
    try:
        yield
    finally:
        paddle.set_rng_state(state)
