"""Sums the gradients of a batch by trees, so that no schedule, cut or degree changes their bits.

There is a tree for each use of a parameter: for each entry of the list of layers that computes with
it. After each backward of a stage, gradients are removed from the parameters and stored under their
micro-batch. ``fleetpipe.mesh.sums`` defines the trees. Start with :class:`GradientTrees`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.backward.added_gradients import count_own_hook, is_watched
from fleetpipe.dygraph.backward.recompute import layers_in
from fleetpipe.dygraph.gradients import gradient_of, set_gradient
from fleetpipe.dygraph.layer_kinds import is_spread
from fleetpipe.dygraph.random_keys import FLEET
from fleetpipe.dygraph.tensor_parallel import is_sequence_parallel_parameter
from fleetpipe.errors import ConfigError
from fleetpipe.mesh.sums import TreeSum
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import add_in_place
from fleetpipe.paddle_api.layer import parameters_in
from fleetpipe.paddle_api.tensor import stand_in, take_gradient
from fleetpipe.schedules import Placement

#: The parameters that an entry of the list uses, by stage and by number of the entry.
Stages = Mapping[int, Mapping[int, Sequence[Tensor]]]

_NOTHING = nullcontext()


class TablePlace(NamedTuple):
    """A layer's dict of parameters, and the name of a parameter in it."""

    table: dict[str, Tensor]
    name: str


class Use(NamedTuple):
    """A use of a parameter by an entry of the list.

    Attributes:
        number: The entry's number in the whole list.
        parameter: The parameter.
        source: The tensor that gets gradients from autograd: the parameter, or a stand-in.
        total: The tensor whose gradient becomes the sum over all micro-batches: the parameter, or a
            stand-in if the parameter has several uses.
    """

    number: int
    parameter: Tensor
    source: Tensor
    total: Tensor


class Uses:
    """The uses of the parameters of this process, in one batch.

    Attributes:
        of_stage: The uses of each stage.
        several: The uses in this process of each parameter that has several uses on all ranks, by
            the parameter's id.
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
        """Adds the use of a parameter by an entry, with stand-ins if it has several uses."""
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
        """Sets the gradient of each parameter with several uses to the sum over uses, in order."""
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
    """While it is open, layers have other tensors in the places of their parameters."""
    before = [slot.table[slot.name] for slot, _ in swaps]
    for slot, other in swaps:
        slot.table[slot.name] = other
    try:
        yield
    finally:
        for (slot, _), parameter in zip(swaps, before):
            slot.table[slot.name] = parameter


def _copy_behind_hooks(parameter: Tensor) -> Callable[[], object]:
    """Adds a hook that copies the gradient after the user's hooks; returns a function to remove it.

    The result of the last hook becomes the gradient, whose memory is taken away later. Without a
    copy, a tensor that a user's hook stores or returns would become empty.
    """
    count_own_hook(parameter)
    remove: Callable[[], object] = parameter.register_hook(lambda grad: grad.clone()).remove
    return remove


def _refuse_hooks(parameter: Tensor, stage: int) -> None:
    """Refuses a hook, or a ``main_grad``, on a parameter with several uses."""
    if hasattr(parameter, "main_grad") or is_watched(parameter):
        raise ConfigError(
            "with sums by a tree the uses of a tied weight have gradients of their own, which a "
            "hook on the gradient of the weight does not see",
            where=f"stage {stage}, parameter {parameter.name}",
            got="a hook, or a main_grad, on a parameter that several layers use",
            fix="leave the hook out, or fleetpipe_configs['sums'] = 'running'",
        )


class GradientTrees:
    """The sums of one batch's gradients in this process."""

    def __init__(self, uses: Uses, micro_batches: int) -> None:
        """Starts without gradients, for ``micro_batches`` micro-batches."""
        self.uses = uses
        self._stages = {
            stage: _StageTrees(of_stage, micro_batches) for stage, of_stage in uses.of_stage.items()
        }

    def take(self, stage: int, micro_batch: int, complete: bool) -> None:
        """Removes the gradients of a stage's backward from the parameters, and stores them.

        Args:
            stage: The stage that has run backward.
            micro_batch: The number of the micro-batch in the batch, from 0.
            complete: Whether these are the last gradients of the micro-batch: after B or W, not I.

        Raises:
            ConfigError: A gradient is sparse.
        """
        self._stages[stage].take(micro_batch, complete)

    @paddle.no_grad()
    def finish(self) -> None:
        """Sets the gradient of each use, and of each parameter, after all micro-batches."""
        for trees in self._stages.values():
            trees.finish()
        self.uses.add_up()


class _StageTrees:
    """The sums of one stage."""

    def __init__(self, uses: Sequence[Use], micro_batches: int) -> None:
        self._uses = uses
        #: A sum of lists, each with a gradient for each use.
        self._tree = TreeSum[list[Tensor | None]](micro_batches, _add_each)
        #: The gradients of micro-batches that the tree adds later, and whether they are complete.
        self._waiting: dict[int, tuple[list[Tensor | None], bool]] = {}
        self._next = 0

    @paddle.no_grad()
    def take(self, micro_batch: int, complete: bool) -> None:
        gradients: list[Tensor | None] = []
        for use in self._uses:
            gradient = take_gradient(use.source)
            if gradient is not None and gradient.is_selected_rows():
                raise _sparse(use)
            gradients.append(gradient)
        if micro_batch in self._waiting:
            earlier, _ = self._waiting[micro_batch]
            gradients = _add_each(earlier, gradients)
        self._waiting[micro_batch] = gradients, complete
        while self._next in self._waiting and self._waiting[self._next][1]:
            gradients, _ = self._waiting.pop(self._next)
            self._tree.add(gradients)
            self._next += 1

    def finish(self) -> None:
        for use, gradient in zip(self._uses, self._tree.total()):
            if gradient is not None:
                set_gradient(use.total, gradient)


def _sparse(use: Use) -> ConfigError:
    return ConfigError(
        f"the gradient of {use.parameter.name} is sparse, and a tree adds up dense ones",
        cause="an Embedding(sparse=True)",
        fix="build it with sparse=False, or set fleetpipe_configs['sums'] = 'running'",
    )


def _add_each(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    """Adds up two lists of gradients by use, in place in the first; None is no gradient."""
    for place, (total, gradient) in enumerate(zip(left, right)):
        if total is None:
            left[place] = gradient
        elif gradient is not None:
            add_in_place(total, gradient)
    return left


def refuse_beside_trees(
    parameters: Sequence[Tensor], delayed: bool, sliced: bool, placement: Placement, rng: str
) -> None:
    """Refuses options and layers that add gradients in an order of their own.

    Args:
        parameters: The parameters of this process.
        delayed: Whether ``delay_scale_loss`` is on.
        sliced: Whether the schedule cuts micro-batches.
        placement: The owner of each stage.
        rng: The option ``rng``.
    """
    reasons: Mapping[str, bool] = {
        "delay_scale_loss, which divides gradients after they are added up": delayed,
        "slices of sequences, which add up parts of a micro-batch": sliced,
        "a VocabularyHead, whose parts add up over all ranks": placement.has_head,
        "rng='fleet', under which draws depend on the order of the layers": rng == FLEET,
        "experts that ranks share out": any(map(is_spread, parameters)),
        "sequence parallelism, whose norms add up parts of a sequence": any(
            map(is_sequence_parallel_parameter, parameters)
        ),
    }
    for reason, is_there in reasons.items():
        if is_there:
            raise ConfigError(
                f"sums by a tree do not go with {reason}",
                where="strategy.fleetpipe_configs['sums'] = 'tree'",
                fix="leave one of the two out",
            )


def refuse_shared_with_losses(
    entries: Mapping[int, Sequence[Tensor]], of_losses: Sequence[Tensor]
) -> None:
    """Refuses a parameter that a layer of the list and a loss use, which autograd would add up.

    Args:
        entries: The parameters of the last stage's entries, by number.
        of_losses: The parameters of the loss functions.
    """
    for number, parameters in entries.items():
        for parameter in parameters:
            if any(parameter is one for one in of_losses):
                raise ConfigError(
                    "sums by a tree do not go with a loss that uses a weight of the list",
                    where=f"layer {number} of the list, parameter {parameter.name}",
                    cause="the loss is a layer that has a layer of the list as a sublayer",
                    fix="have that layer of the list return what the loss needs beside its output, "
                    "or set fleetpipe_configs['sums'] = 'running'",
                )


def require_taken(parameters: Iterable[Tensor]) -> None:
    """Refuses a gradient left on a parameter: it is of a use that the list does not show."""
    for parameter in parameters:
        if gradient_of(parameter) is not None:
            raise ConfigError(
                "a parameter has a gradient of a stage whose entries do not show that they use it",
                where=f"parameter {parameter.name}",
                cause="a function of the list uses a parameter of a layer that is not its own",
                fix="make the layer an argument of the function, as SharedLayerDesc's forward_func "
                "has it, or set fleetpipe_configs['sums'] = 'running'",
            )
