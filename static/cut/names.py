"""The variables of a pipeline in its scope, which it may share with other pipelines."""

from __future__ import annotations

import itertools

PREFIX = "fleetpipe@"
_pipelines = itertools.count()


class Names:
    """Names of variables that no other pipeline of the process has.

    Making an executor makes some variables anew, so that another pipeline that had them would go
    on with memory that is free.
    """

    def __init__(self) -> None:
        self._prefix = f"{PREFIX}{next(_pipelines)}."
        #: What every gradient is multiplied by where the norm of all stages is clipped.
        self.clip_factor = f"{self._prefix}clip"

    def fed(self, name: str) -> str:
        """Returns the variable in which stages find what is fed under a name."""
        return f"{self._prefix}fed.{name}"

    def incoming(self, stage: int, value: int) -> str:
        """Returns the variable in which a stage finds a value of an earlier stage."""
        return f"{self._prefix}{stage}.in.{value}"

    def outgoing(self, stage: int, value: int) -> str:
        """Returns the variable in which a stage leaves a value that it makes."""
        return f"{self._prefix}{stage}.out.{value}"

    def gradient(self, stage: int, value: int, target: int) -> str:
        """Returns that of what ``target`` says of the gradient of a value of a stage."""
        return f"{self._prefix}{stage}.grad.{value}.{target}"

    def incoming_gradient(self, stage: int, value: int) -> str:
        """Returns the variable in which a stage leaves the gradient of a value it was given."""
        return f"{self._prefix}{stage}.in.{value}.grad"

    def accumulator(self, parameter: str) -> str:
        """Returns the variable in which the gradient of a parameter is added up."""
        return f"{self._prefix}{parameter}.sum"

    def waiting(self, stage: int, number: int) -> str:
        """Returns the variable in which the first half of a stage's backward leaves a value."""
        return f"{self._prefix}{stage}.waiting.{number}"
