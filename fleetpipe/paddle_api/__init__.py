"""Everything beyond Paddle's public API that fleetpipe uses, for 2.6.2 and 3.3.x.

One module for each subject: a private name of Paddle's is in its subject's module and nowhere else,
so that a name that moves is changed in one file. ``tests/paddle_api`` checks this. Each module says
at its top how the two versions differ; everything else holds for both.

Start with ``optimizer`` or ``tensor``, which most packages use. The import of this package is also
the one check that Paddle is installed; ``paddle``, ``paddle_fleet`` and ``replaced``, which changes
attributes for a while, come from here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from fleetpipe.errors import PaddleNotFound

try:
    with warnings.catch_warnings():
        # Paddle's own import warns, which under python -W error would be an error here.
        if any(action == "error" for action, *_ in warnings.filters):
            warnings.simplefilter("default")
        import paddle
except ModuleNotFoundError as error:
    if error.name != "paddle":
        raise
    raise PaddleNotFound(
        "this part of fleetpipe needs PaddlePaddle, which is not installed",
        fix="pip install paddlepaddle (CPU) or pip install paddlepaddle-gpu (GPU); "
        "fleetpipe.schedules and fleetpipe.partition work without it",
    ) from error

from paddle.distributed import fleet as _fleet

#: ``paddle.distributed.fleet`` with all its names: its stub hides some that are used here.
paddle_fleet: ModuleType = _fleet

#: The version of Paddle, such as ``"3.3.1"``.
VERSION: str = paddle.version.full_version

#: Stands for the value of an attribute that an object does not have.
_ABSENT = object()


@contextmanager
def replaced(*names: tuple[object, str, object]) -> Iterator[None]:
    """Opens a context in which attributes of modules, classes and objects have other values.

    Args:
        names: A module, class or object, an attribute of it, and the value. An attribute that the
            owner itself does not have is deleted at the end.
    """
    originals = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in names]
    for owner, name, value in names:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in originals:
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


__all__ = ["VERSION", "paddle", "paddle_fleet", "replaced"]
