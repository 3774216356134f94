"""The drop-in face of ``paddle.distributed.fleet``: same names, same paths, pipelines that run.

Every name that fleetpipe does not define is Paddle's very object; ``overlay`` has the table of the
modules below that are fleetpipe's.
"""

from __future__ import annotations

from fleetpipe import heap, numerics, static
from fleetpipe._paddle import choose_backend, paddle_fleet
from fleetpipe.fleet import overlay

choose_backend()
numerics.prepare()
heap.prepare()
overlay.install()
static.install()

from fleetpipe.fleet import high_level, meta_parallel  # noqa: E402
from fleetpipe.fleet.lifecycle import (  # noqa: E402
    get_hybrid_communicate_group,
    init,
    shutdown,
)
from fleetpipe.fleet.strategy import DistributedStrategy  # noqa: E402
from fleetpipe.fleet.wrapping import (  # noqa: E402
    distributed_model,
    distributed_optimizer,
    distributed_scaler,
)

high_level.install()

__all__ = [
    "DistributedStrategy",
    "distributed_model",
    "distributed_optimizer",
    "distributed_scaler",
    "get_hybrid_communicate_group",
    "init",
    "layers",
    "meta_parallel",
    "shutdown",
]
__all__ += [name for name in paddle_fleet.__all__ if name not in __all__]

__getattr__, __dir__ = overlay.over(globals(), paddle_fleet)
