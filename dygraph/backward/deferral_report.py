"""Reports which gradients a split backward delayed until W, which not, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.dygraph.backward.adding import count_own_hook
from fleetpipe.dygraph.backward.leaf import Leaf
from fleetpipe.paddle_api import paddle

#: ``layers_of(stage)`` gives the layers of a stage by their numbers in the whole list.
LayersOf = Callable[[int], Mapping[int, Layer]]


@dataclass(frozen=True)
class DeferralReport:
    """A report of what a split backward delayed until W; ``str()`` is a table.

    Attributes:
        schedule: The name of the schedule.
        reasons: For each trainable parameter of the stages, by its name in the whole model, why all
            or part of its gradient was computed in I in the first batch; "" if none was. Empty
            before the first batch, and if the schedule splits no backward.
    """

    schedule: str
    reasons: Mapping[str, str]

    @property
    def deferred(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients are computed and added in W."""
        return tuple(name for name, reason in self.reasons.items() if not reason)

    @property
    def immediate(self) -> dict[str, str]:
        """Names of the other parameters, each with the reason."""
        return {name: reason for name, reason in self.reasons.items() if reason}

    def __str__(self) -> str:
        if not self.reasons:
            return f"{self.schedule}: no backward was split yet"
        lines = [
            f"{self.schedule}: the gradients of {len(self.deferred)} of {len(self.reasons)} "
            "parameters are computed in W"
        ]
        lines += [f"  {name}: computed in I: {reason}" for name, reason in self.immediate.items()]
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
                    self._watch(path, parameter)
        self._kind = kind
        try:
            yield
        finally:
            self._kind = ""

    def reasons(self, leaves: Mapping[int, Iterable[Leaf]]) -> dict[str, str]:
        """Returns :attr:`DeferralReport.reasons`, in the order of the model."""
        owners = {
            id(p): leaf for stage in leaves.values() for leaf in stage for p in leaf.parameters
        }
        return {
            name: _reason(self._kinds[name], owners.get(id(self._parameters[name])))
            for name in sorted(self._kinds, key=lambda name: int(name.partition(".")[0]))
        }

    def halves(self) -> set[int]:
        """Returns the ids of the parameters that got part of their gradient in I and part in W."""
        return {id(self._parameters[name]) for name, kinds in self._kinds.items() if len(kinds) > 1}

    def _watch(self, name: str, parameter: Tensor) -> None:
        """Records in which kinds of action, I or W, a parameter gets a gradient."""
        if parameter.stop_gradient:
            return
        self._parameters[name] = parameter
        kinds = self._kinds.setdefault(name, set())

        def note(_grad: Tensor) -> None:
            if self._kind:
                kinds.add(self._kind)

        self._handles.append((parameter, parameter.register_hook(note)))


def _reason(kinds: set[str], owner: Leaf | None) -> str:
    if not kinds:
        return "no gradient reached it"
    if owner is None:
        return "its layer has sublayers with parameters of their own"
    if kinds == {"W"}:
        return ""
    return owner.reason or "it is used outside of its layer's own forward"
