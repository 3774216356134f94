"""Fleet's methods that reduce gradients while backward runs, refused by name.

Users of ``fleet.distributed_model`` do not call them; a script that does must not go on as if
gradients had been reduced.
"""

from __future__ import annotations

from typing import Any, NoReturn

from fleetpipe.errors import ConfigError


class NoOverlap:
    """The part of a wrapper that is not there."""

    def fused_gradient(self, *arguments: Any, **options: Any) -> NoReturn:
        """Refuses to fuse gradients and to put reductions into backward.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "gradients are reduced once, after the last backward of a batch",
            cause="the order in which they are added up must not depend on timing",
            fix="leave it to train_batch; pp_configs dp_comm_overlap and sharding_comm_overlap may "
            "stay as they are",
        )

    bw_hook_func = fused_gradient
    register_allreduce_overlap_hook = fused_gradient
    register_sharding_comm_overlap_hook = fused_gradient
