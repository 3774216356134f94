"""Sums the gradients of a batch by trees: one for each use of a parameter.

After each backward of a stage its gradients are removed from the parameters and stored for its
micro-batch. So neither the order in which micro-batches run backward matters, nor which stages
share a process. The sum over micro-batches follows :mod:`fleetpipe.mesh.sums`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetpipe.aliases import Tensor
from fleetpipe.dygraph.gradients import set_gradient
from fleetpipe.dygraph.sums.uses import Use, Uses
from fleetpipe.errors import ConfigError
from fleetpipe.mesh.sums import TreeSum
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.kernels import add_in_place
from fleetpipe.paddle_api.tensor import take_gradient


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
            micro_batch: Its number within the batch, from 0.
            complete: Whether no more gradients of the micro-batch come: after B or W, not after I.

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
        #: Of lists, with a gradient for each use.
        self._tree = TreeSum[list[Tensor | None]](micro_batches, _add_each)
        #: The gradients of micro-batches whose turn has not come, and whether they are complete.
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
    """Adds gradients of the same uses in the memory of the first; None stands for none."""
    for place, (total, gradient) in enumerate(zip(left, right)):
        if total is None:
            left[place] = gradient
        elif gradient is not None:
            add_in_place(total, gradient)
    return left
