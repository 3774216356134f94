"""Sums the gradients of a batch by trees, so that no schedule, cut or degree changes their bits.

There is a tree for each use of a parameter: for each layer of the whole list that computes with it.
After each backward of a stage the gradients are removed from the parameters, and added to the trees
in the order of the micro-batches. ``fleetpipe.mesh.sums`` defines the trees. Start with
:class:`GradientTrees`.
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
from fleetpipe.paddle_api.tensor import parameter_on_same_memory, take_gradient
from fleetpipe.schedules import Placement

#: The parameters that each layer uses, by the stage and then by the number of the layer.
ParametersByStage = Mapping[int, Mapping[int, Sequence[Tensor]]]

_NOTHING = nullcontext()


class ParameterSlot(NamedTuple):
    """Where a layer has a parameter: the layer's dict of parameters, and the name in it."""

    table: dict[str, Tensor]
    name: str


class Use(NamedTuple):
    """One layer's use of a parameter, with a gradient of its own.

    If a parameter has several uses, another tensor with the same memory, its stand-in, takes its
    place in some layers, and has the gradient of the use.

    Attributes:
        number: The layer's number in the whole model.
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
    """Which layers of this process use which parameters, in one batch.

    Attributes:
        of_stage: The uses of each stage.
        several: The uses in this process of each parameter that has several uses on all ranks, by
            the parameter's id.
    """

    def __init__(
        self,
        stages: ParametersByStage,
        find_slots: Callable[[int, Tensor], Iterable[ParameterSlot]],
        shared: Collection[Tensor],
    ) -> None:
        """Finds the uses, and creates stand-ins for parameters with several uses.

        Args:
            stages: The parameters that the layers of this process use.
            find_slots: Returns where layer ``number`` has a parameter, which may be several
                attributes.
            shared: The parameters that layers of other ranks use too.

        Raises:
            ConfigError: A parameter has several uses, and a hook on its gradient.
        """
        self._find_slots = find_slots
        self._replacements: dict[int, list[tuple[ParameterSlot, Tensor]]] = {}
        all_uses = [
            (stage, number, parameter)
            for stage, layers in sorted(stages.items())
            for number, parameters in layers.items()
            for parameter in {id(p): p for p in parameters}.values()
        ]
        count = Counter(id(parameter) for *_, parameter in all_uses)
        count.update(id(parameter) for parameter in shared)
        self.several: dict[int, list[Use]] = {key: [] for key, uses in count.items() if uses > 1}
        self.of_stage: dict[int, list[Use]] = {stage: [] for stage in stages}
        self._hook_removers: list[Callable[[], object]] = []
        for stage, number, parameter in all_uses:
            self._add(stage, number, parameter)

    def _add(self, stage: int, number: int, parameter: Tensor) -> None:
        """Adds the use of a parameter by layer ``number``, with a stand-in if it has several."""
        uses = self.several.get(id(parameter))
        if uses is None:
            if is_watched(parameter):
                # The result of the last hook becomes the gradient, whose memory is taken away
                # later. Without a copy, a tensor that a user's hook stores would become empty.
                count_own_hook(parameter)
                hook = parameter.register_hook(lambda grad: grad.clone())
                self._hook_removers.append(hook.remove)
            self.of_stage[stage].append(Use(number, parameter, parameter, parameter))
            return
        if hasattr(parameter, "main_grad") or is_watched(parameter):
            raise ConfigError(
                "with sums by a tree the uses of a tied weight have gradients of their own, which "
                "a hook on the gradient of the weight does not see",
                where=f"stage {stage}, parameter {parameter.name}",
                got="a hook, or a main_grad, on a parameter that several layers use",
                fix="leave the hook out, or fleetpipe_configs['sums'] = 'running'",
            )
        total = parameter_on_same_memory(parameter)
        first = all(use.parameter is not parameter for use in self.of_stage[stage])
        if not first:
            replacements = self._replacements.setdefault(number, [])
            replacements += ((slot, total) for slot in self._find_slots(number, parameter))
        use = Use(number, parameter, parameter if first else total, total)
        uses.append(use)
        self.of_stage[stage].append(use)

    def end(self) -> None:
        """Makes all layers compute with the parameters themselves again."""
        self._replacements.clear()
        for remove in self._hook_removers:
            remove()
        self._hook_removers.clear()

    def add_up(self) -> None:
        """Sets the gradient of each parameter with several uses to the sum over its uses."""
        for uses in self.several.values():
            gradients = ((use.number, use.total.grad) for use in uses)
            total = sum_in_order((n, grad) for n, grad in gradients if grad is not None)
            if total is not None:
                set_gradient(uses[0].parameter, total.clone() if len(uses) == 1 else total)

    def layer_context(self, number: int) -> AbstractContextManager[None]:
        """Returns a context in which layer ``number`` computes with its stand-ins, if any."""
        replacements = self._replacements.get(number)
        return _NOTHING if replacements is None else _replace_parameters(replacements)


def sum_in_order(numbered: Iterable[tuple[int, Tensor]]) -> Tensor | None:
    """Adds up tensors in the order of their numbers; returns None if there are none."""
    total = None
    for _, tensor in sorted(numbered, key=lambda pair: pair[0]):
        total = tensor if total is None else total + tensor
    return total


def parameters_of(function: Callable[[Nest], Nest]) -> list[Tensor]:
    """Returns the parameters of an entry of the model: a layer, or a function that calls layers."""
    return [parameter for layer in layers_in(function) for parameter in layer.parameters()]


def find_in_layers(function: Callable[[Nest], Nest], parameter: Tensor) -> Iterator[ParameterSlot]:
    """Yields where the layers of an entry of the model, a layer or a function, have a parameter."""
    for layer in layers_in(function):
        for sublayer in layer.sublayers(include_self=True):
            table = parameters_in(sublayer)
            names = (name for name, value in table.items() if value is parameter)
            yield from (ParameterSlot(table, name) for name in names)


@contextmanager
def _replace_parameters(replacements: Sequence[tuple[ParameterSlot, Tensor]]) -> Iterator[None]:
    """A context in which layers have other tensors in the places of their parameters."""
    originals = [slot.table[slot.name] for slot, _ in replacements]
    for slot, replacement in replacements:
        slot.table[slot.name] = replacement
    try:
        yield
    finally:
        for (slot, _), parameter in zip(replacements, originals):
            slot.table[slot.name] = parameter


class GradientTrees:
    """Sums the gradients of a batch pairwise, so that schedules do not change the bits."""

    def __init__(self, uses: Uses, micro_batches: int) -> None:
        """Starts without gradients, for ``micro_batches`` micro-batches."""
        self.uses = uses
        self._stages = {
            stage: _StageTrees(of_stage, micro_batches) for stage, of_stage in uses.of_stage.items()
        }

    def take(self, stage: int, micro_batch: int, complete: bool) -> None:
        """Moves the gradients of a stage's backward from the parameters into the sums.

        Args:
            stage: The stage that has run backward.
            micro_batch: The number of the micro-batch in the batch, from 0.
            complete: Whether these are the last gradients of the micro-batch in the stage: after B
                or W, not after I.

        Raises:
            ConfigError: A gradient is sparse.
        """
        self._stages[stage].take(micro_batch, complete)

    @paddle.no_grad()
    def finish(self) -> None:
        """Sets the parameters' gradients to the sums, after the last micro-batch."""
        for trees in self._stages.values():
            trees.finish()
        self.uses.add_up()


class _StageTrees:
    """Sums the gradients of the parameters that one stage uses, pairwise."""

    def __init__(self, uses: Sequence[Use], micro_batches: int) -> None:
        """Starts without gradients, for ``micro_batches`` micro-batches."""
        self._uses = uses
        #: Adds up lists with a gradient for each use, one list for each micro-batch.
        self._tree = TreeSum[list[Tensor | None]](micro_batches, _add_lists)
        #: The gradients of micro-batches that are not in the tree yet, and if they are complete.
        self._early_gradients: dict[int, tuple[list[Tensor | None], bool]] = {}
        self._next_micro_batch = 0

    @paddle.no_grad()
    def take(self, micro_batch: int, complete: bool) -> None:
        """See :meth:`GradientTrees.take`."""
        gradients: list[Tensor | None] = []
        for use in self._uses:
            gradient = take_gradient(use.source)
            if gradient is not None and gradient.is_selected_rows():
                raise ConfigError(
                    f"the gradient of {use.parameter.name} is sparse; a tree adds up dense ones",
                    cause="an Embedding(sparse=True)",
                    fix="build it with sparse=False, or set fleetpipe_configs['sums'] = 'running'",
                )
            gradients.append(gradient)
        if micro_batch in self._early_gradients:
            earlier, _ = self._early_gradients[micro_batch]
            gradients = _add_lists(earlier, gradients)
        self._early_gradients[micro_batch] = gradients, complete
        while (
            self._next_micro_batch in self._early_gradients
            and self._early_gradients[self._next_micro_batch][1]
        ):
            gradients, _ = self._early_gradients.pop(self._next_micro_batch)
            self._tree.add(gradients)
            self._next_micro_batch += 1

    def finish(self) -> None:
        """Sets the gradients of the stage's parameters to the sums over all micro-batches."""
        for use, gradient in zip(self._uses, self._tree.total()):
            if gradient is not None:
                set_gradient(use.total, gradient)


def _add_lists(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    """Returns the sums of gradients at the same index of two lists; None counts as zero."""
    for index, (total, gradient) in enumerate(zip(left, right)):
        if total is None:
            left[index] = gradient
        elif gradient is not None:
            add_in_place(total, gradient)
    return left


def refuse_beside_trees(
    parameters: Sequence[Tensor], delayed: bool, sliced: bool, placement: Placement, rng: str
) -> None:
    """Refuses options and layers that ``fleetpipe_configs['sums'] = 'tree'`` does not take.

    Args:
        parameters: The parameters of this process.
        delayed: Whether ``delay_scale_loss`` is on.
        sliced: Whether the schedule cuts micro-batches into sequence chunks.
        placement: The rank of each stage.
        rng: The option ``rng``.
    """
    conflicts: Mapping[str, bool] = {
        "delay_scale_loss, which divides gradients after they are added up": delayed,
        "slices of sequences, which add up parts of a micro-batch": sliced,
        "a VocabularyHead, whose parts add up over all ranks": placement.has_head,
        "rng='fleet', under which draws depend on the order of the layers": rng == FLEET,
        "experts that ranks share out": any(map(is_spread, parameters)),
        "sequence parallelism, whose norms add up parts of a sequence": any(
            map(is_sequence_parallel_parameter, parameters)
        ),
    }
    for conflict, exists in conflicts.items():
        if exists:
            raise ConfigError(
                f"sums by a tree do not go with {conflict}",
                where="strategy.fleetpipe_configs['sums'] = 'tree'",
                fix="leave one of the two out",
            )


def refuse_shared_with_losses(
    layers: Mapping[int, Sequence[Tensor]], of_losses: Sequence[Tensor]
) -> None:
    """Refuses a parameter of both a layer and a loss: autograd would add up its gradients.

    Args:
        layers: The parameters of each layer of the last stage, by number.
        of_losses: The parameters of the loss functions.
    """
    for number, parameters in layers.items():
        for parameter in parameters:
            if any(parameter is of_loss for of_loss in of_losses):
                raise ConfigError(
                    "sums by a tree do not go with a loss that uses a weight of the list",
                    where=f"layer {number} of the list, parameter {parameter.name}",
                    cause="the loss is a layer that has a layer of the list as a sublayer",
                    fix="have that layer of the list return what the loss needs beside its output, "
                    "or set fleetpipe_configs['sums'] = 'running'",
                )


def refuse_remaining_gradients(parameters: Iterable[Tensor]) -> None:
    """Refuses a parameter that still has a gradient: a layer uses it that does not list it."""
    for parameter in parameters:
        if gradient_of(parameter) is not None:
            raise ConfigError(
                "a parameter has a gradient of a stage whose entries do not show that they use it",
                where=f"parameter {parameter.name}",
                cause="a function of the list uses a parameter of a layer that is not its own",
                fix="make the layer an argument of the function, as SharedLayerDesc's forward_func "
                "has it, or set fleetpipe_configs['sums'] = 'running'",
            )
