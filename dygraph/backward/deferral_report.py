"""Reports which gradients a split backward delayed until W, which not, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.dygraph.backward.adding import count_own_hook
from fleetpipe.dygraph.backward.leaf import Leaf
from fleetpipe.paddle_api import paddle

#: ``layers_of(stage)`` gives the layers of a stage by their numbers in the whole list.
LayersOf = Callable[[int], Mapping[int, Layer]]


class Deferral(NamedTuple):
    """In which actions a parameter's gradient was computed and added.

    Attributes:
        name: The parameter's name in the whole model.
        computed: "W", or "I" if all or part of the gradient was computed with those of inputs.
        added: "W", or "I" if all or part of it was added to the parameter's ``grad`` in I.
        reason: Why any part was done in I; "" if none was.
    """

    name: str
    computed: str
    added: str
    reason: str


@dataclass(frozen=True)
class DeferralReport:
    """A report of what a split backward delayed until W; ``str()`` is a table.

    Attributes:
        schedule: The name of the schedule.
        parameters: The trainable parameters of the stages, as observed in the first batch. Empty
            before the first batch, and if the schedule splits no backward.
    """

    schedule: str
    parameters: tuple[Deferral, ...]

    @property
    def deferred(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients are computed and added in W."""
        return tuple(entry.name for entry in self.parameters if not entry.reason)

    @property
    def immediate(self) -> dict[str, str]:
        """Names of the other parameters, each with the reason."""
        return {entry.name: entry.reason for entry in self.parameters if entry.reason}

    def __str__(self) -> str:
        if not self.parameters:
            return f"{self.schedule}: no backward was split yet"
        lines = [
            f"{self.schedule}: the gradients of {len(self.deferred)} of {len(self.parameters)} "
            "parameters are computed in W"
        ]
        lines += [
            f"  {entry.name}: computed in {entry.computed}, added in {entry.added}: {entry.reason}"
            for entry in self.parameters
            if entry.reason
        ]
        return "\n".join(lines)


class GradientArrivals:
    """Records by hooks, in the first batch, in which action each parameter gets its gradient."""

    def __init__(self) -> None:
        self._kinds: dict[str, set[str]] = {}
        self._parameters: dict[str, Tensor] = {}
        self._handles: list[tuple[Tensor, Any]] = []
        self._stages: set[int] = set()
        self._kind = ""
        self._open = True

    def stop(self) -> None:
        """Removes the hooks."""
        self._open = False
        for parameter, handle in self._handles:
            handle.remove()
            count_own_hook(parameter)
        self._handles.clear()

    def during(self, stage: int, kind: str, layers_of: LayersOf) -> AbstractContextManager[None]:
        """While it is open, gradients that arrive are recorded for an action of a stage."""
        return self._noting(stage, kind, layers_of) if self._open else nullcontext()

    @contextmanager
    def _noting(self, stage: int, kind: str, layers_of: LayersOf) -> Iterator[None]:
        if stage not in self._stages:
            self._stages.add(stage)
            for index, layer in layers_of(stage).items():
                if not isinstance(layer, paddle.nn.Layer):
                    continue
                for path, parameter in layer.named_parameters(prefix=str(index)):
                    self._hook(path, parameter)
        self._kind = kind
        try:
            yield
        finally:
            self._kind = ""

    def deferrals(self, leaves: Mapping[int, Iterable[Leaf]]) -> tuple[Deferral, ...]:
        """Returns the records, in the order of the model."""
        owners = {
            id(p): leaf for stage in leaves.values() for leaf in stage for p in leaf.parameters
        }
        return tuple(
            _deferral(name, self._kinds[name], owners.get(id(self._parameters[name])))
            for name in sorted(self._kinds, key=lambda name: int(name.partition(".")[0]))
        )

    def halves(self) -> set[int]:
        """Returns the ids of the parameters that got part of their gradient in I and part in W."""
        return {id(self._parameters[name]) for name, kinds in self._kinds.items() if len(kinds) > 1}

    def _hook(self, name: str, parameter: Tensor) -> None:
        if parameter.stop_gradient:
            return
        self._parameters[name] = parameter
        kinds = self._kinds.setdefault(name, set())

        def note(_grad: Tensor) -> None:
            if self._kind:
                kinds.add(self._kind)

        self._handles.append((parameter, parameter.register_hook(note)))


def _deferral(name: str, kinds: set[str], owner: Leaf | None) -> Deferral:
    if kinds == {"W"} and owner is not None:
        return Deferral(name, "W", "W", "")
    if not kinds:
        reason = "no gradient reached it"
    elif owner is None:
        reason = "its layer has sublayers with parameters of their own"
    else:
        reason = owner.reason or "it is used outside of its layer's own forward"
    return Deferral(name, "I", "I", reason)
