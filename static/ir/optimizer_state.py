"""The variables of an optimizer's state for a parameter, in a program."""

from __future__ import annotations

from collections.abc import Callable

from fleetpipe.aliases import Optimizer, Variable
from fleetpipe.paddle_api.optimizer import master_weight_of, state_of
from fleetpipe.static.cut.contract import Kept


def kept_of(optimizer: Optimizer, parameter: str, name_of: Callable[[Variable], str]) -> Kept:
    """Returns the variables of a parameter's state by kind, and that of its float32 copy.

    Args:
        optimizer: The optimizer, applied to a program.
        parameter: The name of the parameter.
        name_of: Returns the name of a variable of the program.
    """
    master = master_weight_of(optimizer, parameter)
    state = state_of(optimizer, parameter, name_of)
    return Kept(
        {kind: name_of(variable) for kind, variable in state.items()},
        None if master is None else name_of(master),
    )
