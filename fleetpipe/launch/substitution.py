"""Replaces ``paddle.distributed.fleet`` by fleetpipe's modules for later imports.

Modules that imported Paddle's before keep them: Paddle itself, and fleetpipe, which delegates to
them. It also provides the names of older Paddle, see :mod:`fleetpipe.contrib.fluid.fluid_names`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from fleetpipe import fleet as our_fleet
from fleetpipe.config import PipelineConfig
from fleetpipe.extras import Finder, extra
from fleetpipe.fleet import gpu_only
from fleetpipe.fleet.overlay import OURS, OVERLAYS, PADDLES
from fleetpipe.job import meeting
from fleetpipe.paddle_api import paddle, replaced
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.meta_parallel import resharding_within


@contextmanager
def in_place_of_paddles() -> Iterator[None]:
    """While it is open, imports of ``paddle.distributed.fleet`` get fleetpipe's modules.

    So do attributes, as in ``paddle.distributed.fleet.init``, and every module below it that
    fleetpipe replaces. The others stay Paddle's. On a CPU ``auto_parallel.pipelining`` runs on the
    engine, and functions that need a GPU say so.
    """
    tails = ["", ".meta_parallel", *(f".{path}" for path in OVERLAYS)]
    counterparts = {PADDLES + tail: sys.modules[OURS + tail] for tail in tails}
    # Not all: 2.6.2 lacks one.
    stock = {name: sys.modules[name] for name in counterparts if name in sys.modules}

    def find(fullname: str) -> ModuleSpec | None:
        """Finds submodules of Paddle's packages; a replacement's path lacks Paddle's files."""
        package = stock.get(fullname.rpartition(".")[0])
        if package is None:
            return None
        return PathFinder.find_spec(fullname, getattr(package, "__path__", []))

    finder = Finder(find)
    distributed = paddle.distributed
    sys.modules.update(counterparts)
    setattr(distributed, "fleet", our_fleet)  # noqa: B010  # mypy: a module is not assignable
    sys.meta_path.insert(0, finder)
    fluid, pipelining = extra("fluid.fluid_names"), extra("pipelining.stock_schedules")
    try:
        with ExitStack() as changes:
            for change in (without_gpu, fluid.provide, pipelining.on_engine, gpu_only.refusals):
                changes.enter_context(change())
            changes.enter_context(_jobs_beside_groups())
            yield
    finally:
        sys.meta_path.remove(finder)
        setattr(distributed, "fleet", stock[PADDLES])  # noqa: B010
        for name in counterparts:
            sys.modules.pop(name, None)
        sys.modules.update(stock)


@contextmanager
def _jobs_beside_groups() -> Iterator[None]:
    """While it is open, a script may call ``init_parallel_env`` before ``fleet.init``.

    Without this, Paddle's store would take the address of the job's if the launcher set none.
    """
    stock = paddle.distributed.init_parallel_env

    @functools.wraps(stock)
    def begin(*arguments: Any, **options: Any) -> Any:
        timeout = PipelineConfig.from_strategy(our_fleet.DistributedStrategy()).timeout
        meeting.begin_beside_paddle(timeout)
        return stock(*arguments, **options)

    with replaced((paddle.distributed, "init_parallel_env", begin)):
        yield


@contextmanager
def without_gpu() -> Iterator[None]:
    """While it is open, Paddle's libraries run without a GPU, if there is none.

    Paddle 3.3's flexible checkpoints, which PaddleFormers reads and writes, move values to a GPU
    before processes exchange them; here they copy them on the CPU, from which Gloo sends.
    ``paddle.device.synchronize()``, which its Trainer calls, does nothing.

    Other callers' ``Tensor.cuda`` and ``pin_memory`` are Paddle's. It does nothing if this process
    computes on a GPU.
    """
    if device_kind() == "cpu":
        skipping = _skipping(paddle.device.synchronize)
        with resharding_within(_copying), replaced((paddle.device, "synchronize", skipping)):
            yield
    else:
        yield


@contextmanager
def _copying() -> Iterator[None]:
    clone = paddle.Tensor.clone
    with replaced((paddle.Tensor, "cuda", clone), (paddle.Tensor, "pin_memory", clone)):
        yield


def _skipping(function: Callable[..., Any]) -> Callable[..., None]:
    def synchronize(device: Any = None) -> None:
        if device is not None or device_kind() != "cpu":
            function(device)

    return synchronize
