"""Pipeline parallelism for PaddlePaddle: verified schedules, one engine, on CPUs as on GPUs.

``from fleetpipe import fleet`` is the drop-in face of ``paddle.distributed.fleet``.
``fleetpipe.schedules`` and ``fleetpipe.partition`` need no Paddle.
"""

from __future__ import annotations

from pathlib import Path as _Path

__version__ = "0.1.0"

# In a source tree that is not installed, dygraph/ and static/ stand beside this folder.
if not (_Path(__file__).parent / "dygraph").is_dir():
    __path__.append(str(_Path(__file__).parent.parent))
