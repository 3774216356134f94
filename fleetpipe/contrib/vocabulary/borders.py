"""The values that cross between the stages of a model with a vocabulary head."""

from __future__ import annotations

from fleetpipe.aliases import Nest
from fleetpipe.dygraph.batch.borders import Chain
from fleetpipe.dygraph.nest import tensors_of
from fleetpipe.engine.stage import Values
from fleetpipe.errors import BoundaryError
from fleetpipe.schedules import Placement


class HeadBorders(Chain):
    """Sends the output of the last stage before the head, with the labels, to all its parts.

    The loss takes the results of the parts, in order.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self._before_head, self._loss = placement.body - 1, placement.stages - 1

    def join(self, values: Values) -> Nest:
        """Returns the value of the one edge; for the loss, a tuple of the values of all parts."""
        of_loss = next(iter(values)).target == self._loss
        return tuple(values.values()) if of_loss else super().join(values)

    def split(self, stage: int, output: Nest, labels: Nest) -> Values:
        """Returns the output as the value of each edge; to the parts, with the labels.

        Raises:
            BoundaryError: There are no labels.
        """
        if stage == self._before_head:
            classes = next(tensors_of(labels), None)
            if classes is None:
                raise BoundaryError(
                    "a VocabularyHead computes with the labels, and there are none",
                    where="last stage before the head",
                    cause="eval_batch without compute_loss, or predict_batch: no rank has whole "
                    "logits",
                    fix="use eval_batch(.., compute_loss=True), or evaluate of a fleetpipe.Model",
                )
            output = output, classes
        return super().split(stage, output, labels)
