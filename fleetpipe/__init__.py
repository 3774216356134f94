"""Pipeline parallelism for PaddlePaddle: verified schedules, one engine, on CPUs as on GPUs.

``from fleetpipe import fleet`` is the drop-in face of ``paddle.distributed.fleet``.
``fleetpipe.schedules`` and ``fleetpipe.partition`` need no Paddle.
"""

from __future__ import annotations

__version__ = "0.1.0"
