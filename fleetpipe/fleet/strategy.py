"""Fleet's ``DistributedStrategy`` with one more group of options, ``fleetpipe_configs``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from paddle.distributed import fleet as paddle_fleet

from fleetpipe.config import FLEETPIPE_DEFAULTS, merge_fleetpipe_configs

_stock_hybrid_configs: Any = vars(paddle_fleet.DistributedStrategy)["hybrid_configs"]


class DistributedStrategy(paddle_fleet.DistributedStrategy):
    """Paddle's strategy; what is fleetpipe's own stands in ``fleetpipe_configs``."""

    # Paddle's __setattr__ refuses attributes that the class does not have.
    _fleetpipe_configs: Mapping[str, Any] = FLEETPIPE_DEFAULTS

    @property
    def hybrid_configs(self) -> Any:
        """Paddle's; setting some options leaves the others, and the mapping given, as they are."""
        return _stock_hybrid_configs.fget(self)

    @hybrid_configs.setter
    def hybrid_configs(self, configs: Mapping[str, Any]) -> None:
        # Paddle's setter takes pp_configs and mp_configs out of the mapping that it is given: a
        # second strategy made from the same one would go without them.
        _stock_hybrid_configs.fset(self, copy.deepcopy(dict(configs)))

    @property
    def fleetpipe_configs(self) -> dict[str, Any]:
        """Options that Fleet does not have; setting some leaves the others as they are.

        ``loss_reduction``: ``"mean"`` (default) or ``"sum"`` over the micro-batches of a batch.
        ``timeout``: seconds that any wait for another rank may last; default
        ``FLEETPIPE_TIMEOUT`` in the environment, else 600.
        ``memory_cap``: most forwards that a rank may hold unreleased; a schedule that needs more is
        refused before it runs. ``trace``: a folder, in which the trace and the pictures of what
        really ran are written at the end of the job. ``costs``: what actions cost, a mapping or a
        JSON file from ``model.profile``, for the schedule ``auto``. ``groups`` and
        ``warmup_slack``: of Interleaved1F1B. ``fetch``: in static graph what ``exe.run`` returns of
        a value that each micro-batch has, the ``"mean"`` (default), the ``"last"`` or ``"all"``;
        ``fetch_broadcast``: whether every rank gets it (default False).

        Raises:
            ConfigError: An option is unknown; the message names the nearest.
        """
        return dict(self._fleetpipe_configs)

    @fleetpipe_configs.setter
    def fleetpipe_configs(self, configs: Mapping[str, Any]) -> None:
        self._fleetpipe_configs = merge_fleetpipe_configs(self._fleetpipe_configs, configs)
