"""Finds the first place where a parallel job computes other numbers than one device.

``fleetpipe locate SCRIPT`` runs a script on its ranks, the job, then the same script on one device,
its twin, and compares their tensors. Start with ``locate_command``; the job and its twin run in
separate processes, which leave files:

1. ``collecting`` wraps layers, losses, backward and optimizers; ``recorder`` gives their tensors
   keys (phase, layer, micro-batch, which tensor), and ``record`` stores them;
2. ``twin`` runs a script at degrees 1, and gives each of its steps the job's weights, data and
   gradients: every phase of every step is compared by itself;
3. ``layouts`` finds which shard of the twin's tensors, and which of its rows, a rank has;
4. ``locate_command`` compares the phases of a step in turn (``flow`` compares the outputs of layers
   and their gradients, ``parameters`` weights and updates); a difference counts if it is larger
   than that of a second twin, whose numbers were changed in the last place;
5. a ``Location`` describes the first difference, with the likely cause in a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

OTHER_SAMPLES = (
    "replica {} reads samples that the twin does not read in this step: its sampler is wrong, or "
    "the script needs to know that it runs on one device (--twin)"
)
SAME_SAMPLES = (
    "replica {} reads the same samples as another replica: the sampler does not know of the "
    "replicas"
)
REORDERED = (
    "replica {} reads its samples in another order than the twin, unlike the other replicas: it "
    "shuffles by a seed of its own"
)
MISSING = "the model of the job lacks this parameter: a layer that no stage has, or another model"
EXTRA = "one device has no such parameter: a weight that is not tied in the job, or another layer"
SAME_SHARDS = "all shards were drawn from one random stream: seed each rank of the axis by itself"
MISPLACED = "these ranks hold the shards of others: a checkpoint is cut by another order of ranks"
OTHER_WEIGHTS = "this weight begins with other values than the twin's, unlike the rest"
CHANGED = "after the step before the script has made other values of it than on one device"
LABELS = "labels are not those of the inputs: this rank reads other samples than the first stage"
LABELS_OF_PARTS = (
    "labels are not those of the whole sequences: each rank cuts, or shifts, those of its own part"
)
EVALUATING = "the model of these ranks is in the mode of eval() as they train, and others' is not"
OTHER_ROWS = (
    "this layer computes something else, and its micro-batch has other rows than the twin's: what "
    "depends on all rows, as a batch normalisation, takes those of one replica alone"
)
OTHER_LOSS = (
    "the loss function computes something else or gets other values, such as other labels; or "
    "losses are not weighted by the tokens, or rows, that they are the mean of"
)
DETACHED_SKIP = (
    "what comes back to its input lacks the gradient of its own output, which a skip connection "
    "gives: it is detached"
)
DETACHED_BRANCH = (
    "what comes back to its input is the gradient of its own output, as of a skip connection, and "
    "nothing else: what that is added to is detached"
)
RETURNED = "losses are not averaged over all replicas and micro-batches before they are returned"
GRADIENT = "this layer's own gradient is wrong, and what came to its output in backward is right"
ACCUMULATED = (
    "no parameter has the sum over this step's micro-batches, though backward was right in each: "
    "gradients are cleared or changed between them"
)
NOT_CLEARED = "gradients of the step before are not cleared when backward begins"
TIED = "the gradients of the uses of this tied weight do not add up to that of one device"
TWICE = "the gradient of one use of this tied weight is counted twice"
NO_GRADIENT = "no rank has a gradient: the parameter is detached, frozen, or its stage's is lost"
ABSENT_GRADIENT = "these ranks have no gradient, as others do: it is frozen or detached there"
UNCLIPPED = "these ranks do not clip gradients, as the twin does"
CUT = "ranks have the numbers of the whole weight in other places: it is cut in a wrong way"
RATE = "the learning rate is another: set by rank, or its scheduler has stepped more or less often"
UNTRAINED = "no rank's optimizer has this parameter"
UPDATE = (
    "the optimizer makes another step of the same gradient: its state or options differ, or the "
    "new value is not given to all ranks"
)
BUFFER = "the buffer is updated another number of times, or from other values"

#: By axis the cause where a layer's outputs on the ranks of the axis add up to the twin's.
PARTIAL = {
    "mp": "a missing all-reduce over mp: each rank's output is its part of the sum",
    "ep": "a missing sum over ep: each rank's output has its own experts' part",
    "sep": "a missing sum over sep: each rank's output is its part of the sum",
    "cp": "a missing sum over cp: each rank's output is its part of the sum",
}


class Location(NamedTuple):
    """The first difference between a job and its twin, the same script on one device.

    Attributes:
        layer: The path of a layer or parameter in the full model; "" for the whole step.
        phase: The phase of the step, such as "forward"; ``record.TensorKey`` lists all.
        axis: The axis of the mesh along which ranks are wrong; "" if unknown.
        ranks: The ranks of the job whose values are wrong.
        step: The training step, from 0.
        micro_batch: The micro-batch within the replica, from 0; None for a value of the whole step.
        difference: The largest difference over the largest expected number; infinite if the ranks
            or the twin lack the tensor, or a number is not finite.
        tolerance: The difference that rounding causes there.
        cause: The likely cause, in a sentence.
    """

    layer: str
    phase: str
    axis: str
    ranks: Sequence[int]
    step: int
    micro_batch: int | None
    difference: float
    tolerance: float
    cause: str

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields by name, as JSON values; an infinite difference is None."""
        fields = {**self._asdict(), "ranks": list(self.ranks)}
        return {k: None if v == float("inf") else v for k, v in fields.items()}

    def __str__(self) -> str:
        layer = self.layer or "the whole step"
        along = f", along {self.axis}" if self.axis else ""
        ranks = ", ".join(map(str, self.ranks))
        micro_batch = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        size = f"{self.difference:.3g} relative; up to {self.tolerance:.2g} is rounding"
        if self.difference == float("inf"):
            size = "it cannot be measured"
        return (
            f"locate: first difference: {self.phase} of {layer}{along}\n"
            f"  where: rank {ranks}, step {self.step}{micro_batch}\n"
            f"  how far: {size}\n"
            f"  likely cause: {self.cause}"
        )


def cause_of_wrong_loss(
    ratio: float,
    tolerance: float,
    scales: Sequence[int],
    micro_batches: int,
    rows: int,
    degrees: Mapping[str, int],
) -> str:
    """Returns why a job's loss differs from that of its twin, the run on one device.

    Args:
        ratio: The sum of the ranks' losses over the sum of the twin's.
        tolerance: The relative difference that rounding may cause.
        scales: The factors by which the ratio may be larger without a fault.
        micro_batches: The number of micro-batches.
        rows: The number of rows of a micro-batch.
        degrees: The job's degrees.
    """
    if not ratio or not math.isfinite(ratio):
        return OTHER_LOSS
    mistakes = [
        (float(micro_batches), f"not divided by the {micro_batches} micro-batches"),
        (1 / micro_batches, f"divided by the {micro_batches} micro-batches twice"),
        (float(rows), f"a sum over the {rows} rows of a micro-batch"),
    ]
    for axis, degree in degrees.items():
        mistakes.append((float(degree), f"multiplied by the degree of {axis}"))
        mistakes.append((1 / degree, f"divided by the degree of {axis}"))
    whole_numbers = float(round(ratio)), 1 / max(1, round(1 / ratio))
    for factor in (*dict(mistakes), *whole_numbers):
        if factor in (0, 1):
            continue
        likely = " or ".join(words for of_mistake, words in mistakes if of_mistake == factor)
        off = min(abs(ratio / scale / factor - 1) for scale in (scales if likely else (1,)))
        if off <= max(tolerance, 1e-6):
            size = f"{factor:g} times" if factor > 1 else f"1/{1 / factor:g} of"
            as_where = f", as where it is {likely}" if likely else ""
            return f"a wrong scale: backward begins from {size} the loss{as_where}"
    return OTHER_LOSS


def cause_of_wrong_reduction(
    degrees: Mapping[str, int],
    axes: Sequence[str],
    missing: Sequence[str],
    ratio: float | None,
    name: str,
    shared: bool,
) -> tuple[str, str]:
    """Returns the axis and the cause of a gradient that is wrong after its reduction.

    Args:
        degrees: The job's degrees.
        axes: The axes along which the ranks' gradients must be added up.
        missing: The axes along which the ranks still have different gradients.
        ratio: The factor by which the gradient is too large, or None.
        name: The parameter.
        shared: Whether several stages have the parameter.
    """
    layer = name.rpartition(".")[0] or name
    if missing:
        axis = missing[0]
        if axis == "pp" and shared:
            return axis, f"a missing all-reduce of the tied weight of {layer} between its stages"
        return axis, f"a missing all-reduce over {axis} of the gradient of {layer}"
    axis = axes[0] if axes else next(iter(degrees), "")
    if ratio is not None and abs(ratio - 1) > 1e-3:
        times = f"{ratio:.4g} times the gradient"
        if shared:
            how = "counted twice" if ratio > 1 else "averaged over its stages and not added up"
            return "pp", f"{times}: that of the tied weight is {how}"
        degree = max(ratio, 1 / ratio)
        fitting = (a for a in (*axes, *degrees) if abs(degrees.get(a, 1) - degree) < 1e-2)
        axis = next(fitting, axes[0] if axes else "")
        return axis, f"{times}: a wrong scale, by {axis or 'some degree'}"
    if shared:
        return "pp", f"the parts of the tied weight of {layer} do not make the sum of all its uses"
    return axis, f"ranks do not add up their gradients of {layer} along {axis} as they should"
