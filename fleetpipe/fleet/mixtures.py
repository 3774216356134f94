"""Makes Paddle's mixtures of experts load fleetpipe's when one of them first computes."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.layer import replace_in_moe
from fleetpipe.paddle_api.operations import provide

_resolve = functools.cache(pkgutil.resolve_name)

#: Paddle's operations, which machines without a GPU lack.
_OPERATIONS = {
    "routing": (
        *("number_count", "assign_pos", "limit_by_capacity", "prune_gate_by_capacity"),
        "random_routing",
    ),
    "replacements": ("global_scatter", "global_gather"),
}


def _load_at_call(name: str) -> Callable[..., Any]:
    """Returns a function that imports one of ``fleetpipe.contrib.experts`` at its first call."""

    def call(*args: Any, **named: Any) -> Any:
        return _resolve(f"fleetpipe.contrib.experts.{name}")(*args, **named)

    return call


def mend_mixtures() -> None:
    """Changes ``MoELayer``, and replaces Paddle's functions for it if there is no GPU.

    ``paddle.incubate.distributed.models.moe.MoELayer``, its gates, and layers of libraries call
    them; a script may build one before the pipeline.
    """
    replace_in_moe(
        _local_gather=_load_at_call("replacements:local_gather"),
        MoEScatter=SimpleNamespace(apply=_load_at_call("replacements:scatter")),
        MoEGather=SimpleNamespace(apply=_load_at_call("replacements:gather")),
    )
    if device_kind() == "cpu":
        replace_in_moe(
            _alltoall=_load_at_call("replacements:alltoall"),
            check_nccl_version_for_p2p=_load_at_call("replacements:no_check"),
        )
        for module, names in _OPERATIONS.items():
            provide({name: _load_at_call(f"{module}:{name}") for name in names})
