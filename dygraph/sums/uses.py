"""The uses of a parameter: one for each entry of the list of layers that computes with it.

If entries of one stage use the same parameter, autograd leaves one sum of their gradients. To keep
them separate, all entries but the first compute with a stand-in: a tensor with the memory of the
parameter and a gradient of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.backward.adding import count_own_hook, is_watched
from fleetpipe.dygraph.backward.recompute import layers_in
from fleetpipe.dygraph.gradients import set_gradient
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api.layer import parameters_in
from fleetpipe.paddle_api.tensor import stand_in

#: By stage, by the number of an entry of the list, the parameters that it uses.
Stages = Mapping[int, Mapping[int, Sequence[Tensor]]]

_NOTHING = nullcontext()


class TablePlace(NamedTuple):
    """A place in a layer's table of parameters."""

    table: dict[str, Tensor]
    name: str


class Use(NamedTuple):
    """A use of a parameter by an entry of the list.

    Attributes:
        number: The entry's number in the whole list.
        parameter: The parameter.
        source: The tensor that gets the gradient from autograd: the parameter, or a stand-in.
        total: The tensor whose gradient becomes the sum over all micro-batches: the parameter, or a
            stand-in if the parameter has other uses too.
    """

    number: int
    parameter: Tensor
    source: Tensor
    total: Tensor


class Uses:
    """The uses of the parameters of this process, in one batch.

    Attributes:
        of_stage: The uses of each stage.
        several: The uses in this process of each parameter that has several on all ranks, by its
            id.
    """

    def __init__(
        self,
        stages: Stages,
        slots_of: Callable[[int, Tensor], Iterable[TablePlace]],
        shared: Collection[Tensor],
    ) -> None:
        """Finds the uses.

        Args:
            stages: The entries of the stages of this process.
            slots_of: Returns the places of a parameter in the layers of an entry.
            shared: The parameters that entries of other ranks use too.

        Raises:
            ConfigError: Entries of one stage use a parameter whose gradient has a hook.
        """
        self._slots_of = slots_of
        self._swaps: dict[int, list[tuple[TablePlace, Tensor]]] = {}
        places = [
            (stage, number, parameter)
            for stage, entries in sorted(stages.items())
            for number, parameters in entries.items()
            for parameter in {id(p): p for p in parameters}.values()
        ]
        count = Counter(id(parameter) for *_, parameter in places)
        count.update(id(parameter) for parameter in shared)
        self.several: dict[int, list[Use]] = {key: [] for key, uses in count.items() if uses > 1}
        self.of_stage: dict[int, list[Use]] = {stage: [] for stage in stages}
        self._copying: list[Callable[[], object]] = []
        for place in places:
            self._add(*place)

    def _add(self, stage: int, number: int, parameter: Tensor) -> None:
        uses = self.several.get(id(parameter))
        if uses is None:
            if is_watched(parameter):
                self._copying.append(_copy_behind_hooks(parameter))
            self.of_stage[stage].append(Use(number, parameter, parameter, parameter))
            return
        _refuse_hooks(parameter, stage)
        total = stand_in(parameter)
        first = all(use.parameter is not parameter for use in self.of_stage[stage])
        if not first:
            swaps = self._swaps.setdefault(number, [])
            swaps += ((slot, total) for slot in self._slots_of(number, parameter))
        use = Use(number, parameter, parameter if first else total, total)
        uses.append(use)
        self.of_stage[stage].append(use)

    def end(self) -> None:
        """Makes all entries compute with the parameters themselves again."""
        self._swaps.clear()
        for remove in self._copying:
            remove()
        self._copying.clear()

    def add_up(self) -> None:
        """Sets the gradient of each parameter with several uses to their sum here, in order."""
        for uses in self.several.values():
            total = sum_in_order((u.number, g) for u in uses if (g := u.total.grad) is not None)
            if total is not None:
                set_gradient(uses[0].parameter, total.clone() if len(uses) == 1 else total)

    def running(self, number: int) -> AbstractContextManager[None]:
        """Returns a context in which an entry of the list computes with its stand-ins."""
        swaps = self._swaps.get(number)
        return _NOTHING if swaps is None else _put_in(swaps)


def sum_in_order(numbered: Iterable[tuple[int, Tensor]]) -> Tensor | None:
    """Adds up tensors in the order of their numbers; returns None if there are none."""
    total = None
    for _, tensor in sorted(numbered, key=lambda pair: pair[0]):
        total = tensor if total is None else total + tensor
    return total


def parameters_of(function: Callable[[Nest], Nest]) -> list[Tensor]:
    """Returns the parameters of the layers of an entry."""
    return [parameter for layer in layers_in(function) for parameter in layer.parameters()]


def slots_in(function: Callable[[Nest], Nest], parameter: Tensor) -> Iterator[TablePlace]:
    """Yields the places of a parameter in the layers of an entry."""
    for layer in layers_in(function):
        for part in layer.sublayers(include_self=True):
            table = parameters_in(part)
            yield from (TablePlace(table, name) for name, one in table.items() if one is parameter)


@contextmanager
def _put_in(swaps: Sequence[tuple[TablePlace, Tensor]]) -> Iterator[None]:
    before = [slot.table[slot.name] for slot, _ in swaps]
    for slot, other in swaps:
        slot.table[slot.name] = other
    try:
        yield
    finally:
        for (slot, _), parameter in zip(swaps, before):
            slot.table[slot.name] = parameter


def _copy_behind_hooks(parameter: Tensor) -> Callable[[], object]:
    """Adds a hook that copies the gradient, behind the user's; returns what removes it.

    What the last hook returns becomes the gradient and is taken away. So a tensor that a user's
    hook stores or returns would be empty.
    """
    count_own_hook(parameter)
    remove: Callable[[], object] = parameter.register_hook(lambda grad: grad.clone()).remove
    return remove


def _refuse_hooks(parameter: Tensor, stage: int) -> None:
    if hasattr(parameter, "main_grad") or is_watched(parameter):
        raise ConfigError(
            "with sums by a tree the uses of a tied weight have gradients of their own, which a "
            "hook on the gradient of the weight does not see",
            where=f"stage {stage}, parameter {parameter.name}",
            got="a hook, or a main_grad, on a parameter that several layers use",
            fix="leave the hook out, or fleetpipe_configs['sums'] = 'running'",
        )
