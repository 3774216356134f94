"""What names of older Paddle are called today, for errors to say so."""

from __future__ import annotations

import importlib
import re

#: Where Paddle has what ``paddle.fluid`` had, in the order in which a name is looked for.
_HOMES = (
    "paddle",
    "paddle.static",
    "paddle.static.nn",
    "paddle.nn",
    "paddle.nn.functional",
    "paddle.nn.initializer",
    "paddle.optimizer",
    "paddle.optimizer.lr",
    "paddle.regularizer",
    "paddle.metric",
    "paddle.io",
    "paddle.utils",
    "paddle.base",
)
#: Names that are others today, and parts of names that are left out.
_NAMES = {
    "elementwise_sub": "subtract",
    "elementwise_mul": "multiply",
    "elementwise_div": "divide",
    "fill_constant": "full",
    "guard": "disable_static",
}
_LEFT_OUT = re.compile(r"^(elementwise|reduce)_|(Optimizer|Initializer)$")


def name_today(old: str) -> str | None:
    """Returns the dotted name that Paddle has in the place of an older one; None where it has none.

    Args:
        old: The older name; only its last part counts.
    """
    last = old.rpartition(".")[2]
    for name in (_NAMES.get(last, last), _LEFT_OUT.sub("", last)):
        for home in _HOMES:
            if getattr(importlib.import_module(home), name, None) is not None:
                return f"{home}.{name}"
    return None
