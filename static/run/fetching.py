"""What the user fetches: which value it is, who owns it, and one result from its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fleetpipe.aliases import Variable
from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.static.cut.contract import GraphReader
from fleetpipe.static.cut.split import Split


class Fetch(NamedTuple):
    """An entry of ``fetch_list``.

    Attributes:
        name: What messages call it.
        number: The number of the value.
        stage: The stage that makes it; None for a variable that lives from batch to batch.
        variable: The name of such a variable, else None.
    """

    name: str
    number: int
    stage: int | None
    variable: str | None

    @classmethod
    def of(cls, target: Variable | str, reader: GraphReader, split: Split) -> Fetch:
        """Finds the value that a user fetches by itself or by its name.

        Raises:
            ConfigError: The program has no such value, or no stage makes it.
            UsageError: It is neither a value nor a name.
        """
        if not isinstance(target, str) and not hasattr(type(target), "name"):
            raise UsageError(
                "only values of the program can be fetched",
                got=type(target).__name__,
                fix="put values, or their names, into fetch_list",
            )
        label = _label(target)
        number = reader.number(target)
        if number is None:
            raise ConfigError(
                f"cannot fetch {label!r}: the program had no such value when it was minimized",
                fix="build everything that is fetched before minimize, each under a guard; "
                "gradients have no place in the program of a pipeline",
            )
        if number in split.graph.persistable:
            return cls(label, number, None, split.graph.names[number])
        stage = split.stage_of_value[number]
        if stage is None:
            raise ConfigError(
                f"cannot fetch {label!r}: it is fed or constant, or every stage has its own",
                cause="what stands under device_guard('gpu:all') belongs to no stage",
                fix="fetch a result of the network, made under a guard with a number",
            )
        return cls(label, number, stage, None)


def _label(target: Variable | str) -> str:
    if isinstance(target, str):
        return target
    # Under PIR most values have no name, and asking for one is an error.
    return str(target.name) if getattr(target, "has_name", True) else str(target)


def combined(name: str, values: Sequence[np.ndarray], how: str) -> np.ndarray:
    """Makes one result of the values of all micro-batches.

    Args:
        name: What the user fetched, for messages.
        values: An array for each micro-batch, in order.
        how: ``"mean"``: the mean of values with one element, in their order and dtype (a float64
            for integers), and values with rows one after another, as the whole batch has them.
            ``"last"``: the value of the last micro-batch. ``"all"``: stacked along a new first
            axis.

    Raises:
        ConfigError: The values do not fit together.
    """
    if how == "last":
        return values[-1]
    if how == "mean" and values[0].size == 1:
        floating = np.issubdtype(values[0].dtype, np.floating)
        shares = [value if floating else value.astype("float64") for value in values]
        total = shares[0] / shares[0].dtype.type(len(shares))
        for share in shares[1:]:
            # A sum of quotients, as the loss of a dynamic-graph pipeline.
            total = total + share / share.dtype.type(len(shares))
        return np.asarray(total)
    join = np.stack if how == "all" else np.concatenate
    try:
        return join(values)
    except ValueError as error:
        raise ConfigError(
            f"the values of {name!r} in the micro-batches do not fit together",
            got=f"shapes {[list(value.shape) for value in values]}",
            fix="fetch it with fleetpipe_configs = {'fetch': 'last'}",
        ) from error
