"""Replaces ``paddle.distributed.fleet`` by fleetpipe's modules for later imports.

``fleetpipe run`` does so for a script, and ``fleetpipe.install()`` within a script. Modules that
have imported Paddle's modules before keep them: Paddle itself, and fleetpipe, which calls them.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from fleetpipe import fleet as our_fleet
from fleetpipe.config import PipelineConfig
from fleetpipe.errors import ConfigError
from fleetpipe.extras import Finder, extra
from fleetpipe.fleet import gpu_only
from fleetpipe.fleet.overlay import OURS, OVERLAYS, PADDLES
from fleetpipe.job import meeting
from fleetpipe.paddle_api import paddle, replaced
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.meta_parallel import resharding_within

#: The context that :func:`install` leaves open.
_installed = ExitStack()


@contextmanager
def in_place_of_paddles() -> Iterator[None]:
    """Makes imports of ``paddle.distributed.fleet`` within the context get fleetpipe's modules.

    Attributes, as in ``paddle.distributed.fleet.init``, do so too, and all submodules that
    fleetpipe replaces; other submodules stay Paddle's. On a CPU ``auto_parallel.pipelining`` runs
    on the engine, and functions that need a GPU raise an error that says so.
    """
    paths = ["", ".meta_parallel", *(f".{path}" for path in OVERLAYS)]
    substitutes = {PADDLES + tail: sys.modules[OURS + tail] for tail in paths}
    # Paddle 2.6.2 does not have all of them.
    stock = {name: sys.modules[name] for name in substitutes if name in sys.modules}

    def find(fullname: str) -> ModuleSpec | None:
        """Finds Paddle's submodules, which are not in the folders of fleetpipe's packages."""
        package = stock.get(fullname.rpartition(".")[0])
        if package is None:
            return None
        return PathFinder.find_spec(fullname, getattr(package, "__path__", []))

    finder = Finder(find)
    distributed = paddle.distributed
    sys.modules.update(substitutes)
    setattr(distributed, "fleet", our_fleet)  # noqa: B010  # mypy: a module is not assignable
    sys.meta_path.insert(0, finder)
    fluid, pipelining = extra("fluid"), extra("pipelining")
    try:
        with ExitStack() as changes:
            for change in (without_gpu, fluid.provide, pipelining.on_engine, gpu_only.refusals):
                changes.enter_context(change())
            changes.enter_context(_stores_for_both())
            yield
    finally:
        sys.meta_path.remove(finder)
        setattr(distributed, "fleet", stock[PADDLES])  # noqa: B010
        for name in substitutes:
            sys.modules.pop(name, None)
        sys.modules.update(stock)


@contextmanager
def _stores_for_both() -> Iterator[None]:
    """Lets a script call ``init_parallel_env`` before ``fleet.init`` while the context is open.

    Without this, Paddle's store would use the address of the job's store if the launcher set none.
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
    """Makes Paddle's libraries run without a GPU while the context is open, if there is none.

    Paddle 3.3's flexible checkpoints, which PaddleFormers reads and writes, move values to a GPU
    before processes exchange them; here they copy them on the CPU, from which Gloo sends.
    ``paddle.device.synchronize()``, which its Trainer calls, does nothing.

    For other callers ``Tensor.cuda`` and ``pin_memory`` are Paddle's. The context changes nothing
    if this process computes on a GPU.
    """
    if device_kind() != "cpu":
        yield
        return
    stock, clone = paddle.device.synchronize, paddle.Tensor.clone

    def synchronize(device: Any = None) -> None:
        if device is not None or device_kind() != "cpu":
            stock(device)

    moves = (paddle.Tensor, "cuda", clone), (paddle.Tensor, "pin_memory", clone)
    copying = functools.partial(replaced, *moves)
    with resharding_within(copying), replaced((paddle.device, "synchronize", synchronize)):
        yield


def install() -> None:
    """Replaces ``paddle.distributed.fleet`` by fleetpipe's modules until the process ends.

    Under ``fleetpipe run``, and in a second call, it does nothing.

    Raises:
        ConfigError: A module has imported a name from ``paddle.distributed.fleet`` that fleetpipe
            replaces, and would continue to use Paddle's.
    """
    if sys.modules[PADDLES] is our_fleet:
        return
    within = f"{PADDLES}."
    stock = {name: module for name, module in sys.modules.items() if f"{name}.".startswith(within)}
    _installed.enter_context(in_place_of_paddles())
    try:
        _refuse_early_imports(stock)
    except ConfigError:
        _installed.close()
        raise
    # Closed before the interpreter ends, when it would remove modules in any order.
    atexit.register(_installed.close)


def _refuse_early_imports(modules: dict[str, ModuleType]) -> None:
    """Raises an error if a module has imported something of Paddle's that is now replaced.

    Args:
        modules: Paddle's modules below ``paddle.distributed.fleet``, by name.
    """
    replaced = {
        id(modules[name]): name for name in modules if sys.modules[name] is not modules[name]
    }
    for name in list(replaced.values()):
        for key in getattr(sys.modules[name], "__all__", ()):
            stock = getattr(modules[name], key, None)
            if stock is not getattr(sys.modules[name], key) and callable(stock):
                replaced[id(stock)] = f"{name}.{key}"
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("paddle", "fleetpipe"):
            continue
        for value in list(getattr(module, "__dict__", {}).values()):
            if id(value) in replaced:
                raise ConfigError(
                    "fleetpipe.install() came too late",
                    got=f"{name} has imported {replaced[id(value)]}, and would go on with Paddle's",
                    fix="import fleetpipe; fleetpipe.install() at the top of the script, above all "
                    "other imports; or start the script with fleetpipe run",
                )
