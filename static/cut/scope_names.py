"""The variables of a pipeline in its scope, which other pipelines may use too."""

from __future__ import annotations

import itertools

PREFIX = "fleetpipe@"
_pipelines = itertools.count()


class Names:
    """Names of variables that are unique in the process.

    A new executor creates some variables again, so that another pipeline with the same names would
    use freed memory.
    """

    def __init__(self) -> None:
        self._prefix = f"{PREFIX}{next(_pipelines)}."
        #: What every gradient is multiplied by where the norm of all stages is clipped.
        self.clip_factor = f"{self._prefix}clip"

    def fed(self, name: str) -> str:
        """Returns the variable in which stages find the data of a feed."""
        return f"{self._prefix}fed.{name}"

    def incoming(self, stage: int, value: int) -> str:
        """Returns the variable in which a stage finds a value of an earlier stage."""
        return f"{self._prefix}{stage}.in.{value}"

    def outgoing(self, stage: int, value: int) -> str:
        """Returns the variable in which a stage puts a value that it computes."""
        return f"{self._prefix}{stage}.out.{value}"

    def gradient(self, stage: int, value: int, target: int) -> str:
        """Returns the variable of the gradient of a stage's value, for the use ``target``."""
        return f"{self._prefix}{stage}.grad.{value}.{target}"

    def incoming_gradient(self, stage: int, value: int) -> str:
        """Returns the variable in which a stage puts the gradient of an incoming value."""
        return f"{self._prefix}{stage}.in.{value}.grad"

    def accumulator(self, parameter: str) -> str:
        """Returns the variable in which the gradients of a parameter are summed."""
        return f"{self._prefix}{parameter}.sum"

    def waiting(self, stage: int, number: int) -> str:
        """Returns the variable in which the first half of a stage's backward puts a value."""
        return f"{self._prefix}{stage}.waiting.{number}"
