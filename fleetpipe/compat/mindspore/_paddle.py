"""Gives Paddle's parameters the method that MindSpore's have."""

from __future__ import annotations

from collections.abc import Callable

from paddle.base.framework import EagerParamBase

from fleetpipe.aliases import Tensor


def give_parameters_a_method(name: str, method: Callable[[Tensor, int], None]) -> None:
    """Makes ``parameter.name(stage)`` a call of ``method(parameter, stage)``."""
    setattr(EagerParamBase, name, method)
