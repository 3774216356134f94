"""Reads and sets Paddle's mixed precision: automatic casts, and ``GradScaler``.

All names are the same in 2.6.2 and 3.3.x. A *rehearsal* imitates on a CPU how a GPU computes in
half precision: see ``rehearsal``, which is imported only for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from paddle import _C_ops

from fleetpipe.aliases import DType, Optimizer, Scaler, Tensor
from fleetpipe.errors import StateError
from fleetpipe.paddle_api import paddle

#: The dtype of the active rehearsal; None without one.
_rehearsed: str | None = None
#: Whether :func:`casts_visible` is open, in which casts with empty lists cast nothing.
_casts_visible = False


def rehearsal_dtype() -> str | None:
    """Returns the half precision that a CPU imitates now (see ``rehearse``); None without one."""
    return _rehearsed


def note_rehearsal(dtype: str | None) -> None:
    """Sets the result of :func:`rehearsal_dtype`."""
    global _rehearsed
    _rehearsed = dtype


def casts_automatically() -> bool:
    """Returns whether tensors are cast automatically now, as inside ``auto_cast``."""
    framework: ModuleType = paddle.framework
    tracer = framework._dygraph_tracer()
    # O0 is 0. Its name takes twice as long, and every Linear calls this.
    if not int(tracer._amp_level):
        return False
    return not _casts_visible or any(tracer._get_amp_op_list())


class Casts(NamedTuple):
    """Describes active automatic casts.

    Attributes:
        level: Paddle's level, ``"O1"`` or ``"O2"``.
        dtype: The dtype of half precision.
        white: The operations that are cast to half precision.
        black: The operations that stay in float32.
    """

    level: str
    dtype: str
    white: frozenset[str]
    black: frozenset[str]


def casts_of_now() -> Casts | None:
    """Returns the active automatic casts; None without any."""
    framework: ModuleType = paddle.framework
    tracer = framework._dygraph_tracer()
    if not int(tracer._amp_level):
        return None
    lists = map(frozenset, tracer._get_amp_op_list())
    return Casts(tracer._amp_level.name, tracer._amp_dtype, *lists)


def without_casts() -> AbstractContextManager[object]:
    """Returns a context without automatic casts."""
    return paddle.amp.auto_cast(enable=False) if casts_automatically() else nullcontext()


def automatic_casts() -> Callable[[], AbstractContextManager[object]]:
    """Returns a function that returns a context with the present automatic casts.

    The backward recomputes a forward in such a context.
    """
    casts = casts_of_now()
    if casts is None:
        return without_casts
    level, dtype, white, black = casts
    auto_cast: Callable[..., AbstractContextManager[object]] = paddle.amp.auto_cast
    return lambda: auto_cast(True, set(white), set(black), level, dtype)


@contextmanager
def casts_visible(dtype: str) -> Iterator[Casts | None]:
    """Opens a context in which automatic casts are on, to notice code that turns them off.

    It yields the casts that were active before, or None: then it turns on casts with empty lists of
    operations, which change nothing.

    Args:
        dtype: The dtype of half precision of the casts that are turned on.
    """
    global _casts_visible
    framework: ModuleType = paddle.framework
    tracer = framework._dygraph_tracer()
    level, half, lists = tracer._amp_level, tracer._amp_dtype, tracer._get_amp_op_list()
    outer, _casts_visible = _casts_visible, True
    if not int(level):
        tracer._amp_level, tracer._amp_dtype = type(level).O1, dtype
        tracer._set_amp_op_list(set(), set())
    try:
        yield casts_of_now()
    finally:
        _casts_visible = outer
        tracer._amp_level, tracer._amp_dtype = level, half
        tracer._set_amp_op_list(*lists)


def checked_amp(
    configs: str | dict[str, Any] | None, optimizer: Optimizer
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Returns the ``amp_configs`` of ``paddle.Model.prepare``, checked and split as it does.

    Returns:
        The level of automatic casts; the arguments of ``auto_cast`` with lists of operations; and
        the arguments of ``GradScaler``.

    Raises:
        ValueError: The configs have an unknown form.
        AssertionError: The optimizer's clip does not work with mixed precision.
    """
    adapter = SimpleNamespace()
    check: Any = paddle.Model._prepare_amp
    check(SimpleNamespace(_adapter=adapter, _optimizer=optimizer), configs)
    return adapter._amp_level, adapter._amp_custom_lists, adapter._amp_configs


def scaler_counts(scaler: Scaler) -> dict[str, float]:
    """Returns the scale of an enabled scaler, and its counts of steps since the scale changed."""
    state = scaler.state_dict()
    return {
        "scale": float(state["scale"].item()),
        "good steps": state["incr_count"],
        "bad steps": state["decr_count"],
    }


def scale_of(scaler: Scaler) -> Tensor:
    """Returns the factor by which an enabled scaler multiplies the loss: a tensor of shape [1]."""
    return scaler._scale


def unscale(gradients: Iterable[Tensor], scale: Tensor) -> bool:
    """Divides gradients by a scale, in place, as Paddle's own scaler does; autograd is off.

    One operation for each dtype multiplies them by the inverse in float32, or in float64 for such
    gradients: in float16 the inverse of a large scale is 0. The host waits once, for the result.

    Args:
        gradients: The gradients of all parameters.
        scale: The factor of the loss: float32, of shape [1].

    Returns:
        Whether some gradient is not finite.
    """
    by_dtype: dict[DType, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    overflows = []
    for dtype, group in by_dtype.items():
        exact = scale.astype(dtype) if dtype == paddle.float64 else scale
        _, overflow = _C_ops.check_finite_and_unscale_(group, exact)
        overflows.append(overflow)
    return bool(overflows) and bool(paddle.concat(overflows).any())


def replace_unscale(scaler: Scaler, unscale: Callable[[Scaler, Optimizer], None]) -> None:
    """Makes a scaler, or the one that it wraps, call ``unscale(scaler, optimizer)``.

    A second call with the same function changes nothing.
    """
    inner: Scaler = getattr(scaler, "_inner_scaler", scaler)
    if getattr(inner._unscale, "__func__", None) is not unscale:
        # step() calls the first, users the second, update() the third.
        inner._unscale = inner.unscale_ = MethodType(unscale, inner)
        inner._update = MethodType(_update_scale, inner)
        # Trainers read it; a step sets it, except where nothing is scaled, as on a CPU.
        if not hasattr(inner, "_cache_found_inf"):
            inner._cache_found_inf = False


def _update_scale(scaler: Scaler) -> None:
    """Calls Paddle's ``_update`` of a scaler, with a scale of shape [] instead of [1].

    Paddle's function prints ``float(scale)``, which NumPy from 2.4 on refuses for the shape [1].
    """
    scaler._scale = scaler._scale.reshape([])
    try:
        type(scaler)._update(scaler)
    finally:
        scaler._scale = scaler._scale.reshape([1])


def mark_unscaled(scaler: Scaler, optimizer: Optimizer, found_inf: bool) -> None:
    """Records in a scaler that an optimizer's gradients are unscaled in this step.

    Args:
        scaler: The scaler.
        optimizer: The optimizer.
        found_inf: Whether some gradient is not finite, so that the scaler skips the step.

    Raises:
        StateError: The gradients were unscaled before in this step.
    """
    state = scaler._optimizer_states[id(optimizer)]
    states = type(state["state"])
    if state["state"] is not states.INIT:
        raise StateError(
            "the gradients were unscaled before in this step",
            fix="call scaler.unscale_(optimizer) once, before scaler.step, then scaler.update()",
        )
    state["state"] = states.UNSCALED
    scaler._found_inf = paddle.to_tensor([found_inf])
