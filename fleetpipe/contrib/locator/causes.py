"""Describes the first place that differs, and its likely cause, from the kind of difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fleetpipe.contrib.locator.record import Meaning, RankTensors, Record
from fleetpipe.contrib.locator.rows import OTHER


class Location(NamedTuple):
    """A place, and how far the job and its twin differ there.

    Attributes:
        layer: The path of a layer or parameter in the whole model; "" for the whole step.
        phase: That of a ``record.Meaning``.
        axis: The axis of the mesh along which something is wrong; "" if unknown.
        ranks: The ranks of the job whose values are wrong.
        step: The training step, from 0.
        micro_batch: The micro-batch of its replica, from 0; None for a value of the whole step.
        difference: The largest difference over the largest expected number; infinite if there is
            nothing to compare with, or a number is not finite.
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
        """Returns the fields by name, as JSON values: None if nothing can be measured."""
        fields = {**self._asdict(), "ranks": list(self.ranks)}
        return {k: None if v == float("inf") else v for k, v in fields.items()}

    def __str__(self) -> str:
        where = self.layer or "the whole step"
        along = f", along {self.axis}" if self.axis else ""
        ranks = ", ".join(map(str, self.ranks))
        which = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        far = f"{self.difference:.3g} relative; up to {self.tolerance:.2g} is rounding"
        if self.difference == float("inf"):
            far = "it cannot be measured"
        return (
            f"locate: first difference: {self.phase} of {where}{along}\n"
            f"  where: rank {ranks}, step {self.step}{which}\n"
            f"  how far: {far}\n"
            f"  likely cause: {self.cause}"
        )


class Outcome(NamedTuple):
    """The comparison of one tensor of one rank with the twin's.

    Attributes:
        rank: The rank.
        place: The place of the tensor.
        position: The position at which the twin computed it, among the tensors of a micro-batch.
        gap: The difference between the two.
        tolerance: The difference that rounding may cause.
        partial: The axis along which the ranks' tensors sum to the twin's; "" if they do not.
    """

    rank: RankTensors
    place: Meaning
    position: float
    gap: float
    tolerance: float
    partial: str = ""

    @property
    def right(self) -> bool:
        """Whether it agrees with the twin's."""
        return self.gap <= self.tolerance


MISSING = "the model of the job lacks this parameter: a layer that no stage has, or another model"
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
UNCLIPPED = "these ranks do not clip gradients, as the others and the twin do"
CUT = "ranks have the numbers of the whole weight in other places: it is cut in a wrong way"
RATE = "the learning rate is another: set by rank, or its scheduler has stepped more or less often"
UNTRAINED = "no rank's optimizer has this parameter"
UPDATE = (
    "the optimizer makes another step of the same gradient: its state or options differ, or the "
    "new value is not given to all ranks"
)
BUFFER = "the buffer is updated another number of times, or from other values"

_FORWARD = {
    "mp": "a missing all-reduce over mp: each rank's output is its part of the sum",
    "ep": "a missing sum over ep: each rank's output has its own experts' part",
    "sep": "a missing sum over sep: each rank's output is its part of the sum",
    "cp": "a missing sum over cp: each rank's output is its part of the sum",
}


def of_data(what: str, replica: int) -> str:
    """Describes wrong samples."""
    if what == OTHER:
        return (
            f"replica {replica} reads samples that the twin does not read in this step: its "
            "sampler is wrong, or the script needs to know that it runs on one device (--twin)"
        )
    return f"replica {replica} reads {what}: the sampler does not know of the replicas"


def of_flow(
    degrees: Mapping[str, int],
    step: int,
    consumer: Callable[[Meaning], str],
    wrong: Sequence[Outcome],
) -> Location:
    """Describes a wrong output, input or gradient between layers.

    Args:
        degrees: The job's degrees.
        step: The step.
        consumer: Returns the innermost layer that takes a layer's output.
        wrong: The outcomes of one place on all ranks.
    """
    bad = [outcome for outcome in wrong if not outcome.right]
    place = bad[0].place
    rest = [outcome.rank for outcome in wrong if outcome.right]
    partial = next((outcome.partial for outcome in bad if outcome.partial), "")
    axis = partial or axis_between([outcome.rank for outcome in bad], rest, degrees)
    layer, backward = place.name, place.phase == "gradient"
    taken = consumer(place) if backward else ""
    if backward:
        layer = taken or layer
    elif place.part.startswith("input") and "." in layer:
        # No layer has made it: the layer around has.
        layer = layer.rpartition(".")[0]
    if not axis:
        axis = next((a for a in ("mp", "sep", "cp", "ep") if degrees.get(a, 1) > 1), "")
    numbers = sorted({outcome.rank.rank for outcome in bad})
    worst = max(bad, key=lambda outcome: outcome.gap)
    cause = _of_flow(layer, place.part, axis if partial else "", axis, backward)
    if backward and not taken and not partial:
        cause = "what comes back to its output is wrong: see what is made of that between layers"
    return Location(
        *(layer, place.phase, axis, numbers, step, place.micro_batch),
        *(worst.gap, worst.tolerance, cause),
    )


def _of_flow(layer: str, part: str, partial: str, axis: str, backward: bool) -> str:
    if backward and partial:
        return f"a missing all-reduce over {partial} in backward, of what it takes"
    if backward:
        return f"the backward of {layer} gives a wrong gradient to what it takes"
    if partial:
        return _FORWARD[partial]
    if part.startswith("input"):
        return f"what {layer} computes between its layers, or was sent, is another value"
    if axis:
        return f"this layer computes something else: see what it does along {axis}"
    return "this layer computes something else from the same input"


def of_evaluation(job: Record, step: int) -> Location | None:
    """Finds ranks on which nothing of the model was recorded, as in the mode of evaluation."""

    def has_inputs(rank: RankTensors) -> bool:
        return any(place.part.startswith("input") for place in rank.of(step, "data"))

    training = [rank for rank in job.ranks if has_inputs(rank)]
    wrong = [
        rank
        for rank in job.ranks
        if rank not in training and {place.part for place in rank.of(step, "loss")} == {"share"}
    ]
    if not training or not wrong:
        return None
    axis, numbers = axis_between(wrong, training, job.degrees), [rank.rank for rank in wrong]
    return Location("", "forward", axis, numbers, step, None, float("inf"), 0.0, EVALUATING)


def of_loss(
    job: Record,
    step: int,
    shares: Mapping[tuple[int, ...], Mapping[int, float]],
    expected: Mapping[int, float],
    ratio: float,
    off: float,
    tolerance: float,
) -> Location:
    """Describes a loss that differs from the twin's."""
    counts = [len(of_rank) for of_rank in shares.values()]
    micro_batches = counts[0]
    per_place = [sum(of_rank.values()) for of_rank in shares.values()]
    factor = round(ratio) if ratio >= 1 else 1 / round(1 / ratio) if ratio else 0
    exact = bool(factor) and abs(ratio / factor - 1) <= max(tolerance, 1e-6)
    if exact and factor != 1:
        whose = f"{factor:g} times" if factor > 1 else f"1/{1 / factor:g} of"
        cause = f"a wrong scale: backward begins from {whose} the loss"
        if micro_batches > 1 and factor % micro_batches == 0:
            cause += f", as where it is not divided by the {micro_batches} micro-batches"
        elif micro_batches > 1 and round(1 / factor) % micro_batches == 0:
            cause += f", as where it is divided by the {micro_batches} micro-batches twice"
    elif len(per_place) > 1 or micro_batches > 1:
        cause = (
            "losses are not weighted by the tokens, or rows, that they are the mean of; or the "
            "loss function gets other values"
        )
    else:
        cause = "the loss function computes something else from the same output"
    degrees = job.degrees
    axis = next((a for a in ("dp", "sharding", "sep", "cp") if degrees.get(a, 1) > 1), "")
    if axis == "" and degrees.get("mp", 1) > 1:
        axis = "mp"
    ranks = [r.rank for r in job.ranks if r.of(step, "loss")]
    whole = [n for n in expected if all(n in of_rank for of_rank in shares.values())]
    first = min(whole, default=None)
    return Location("", "loss", axis, ranks, step, first, off, tolerance, cause)


def of_reduction(
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
        axes: The axes along which ranks' gradients had to be added up.
        missing: The axes along which ranks still have different gradients.
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
    if ratio is not None and abs(ratio - 1) > 1e-3:
        times = f"{ratio:.4g} times"
        if shared:
            how = "counted twice" if ratio > 1 else "averaged over its stages and not added up"
            return "pp", f"{times} the gradient: that of the tied weight is {how}"
        axis = next(
            (a for a in (*axes, *degrees) if abs(degrees.get(a, 1) - max(ratio, 1 / ratio)) < 1e-2),
            axes[0] if axes else "",
        )
        return axis, f"{times} the gradient: a wrong scale, by {axis or 'some degree'}"
    axis = axes[0] if axes else next(iter(degrees), "")
    if shared:
        return "pp", f"the parts of the tied weight of {layer} do not make the sum of all its uses"
    return axis, f"ranks do not add up their gradients of {layer} along {axis} as they should"


def axis_between(
    wrong: Iterable[RankTensors], right: Iterable[RankTensors], degrees: Mapping[str, int]
) -> str:
    """Returns an axis whose place decides whether a rank is right; "" if there is none."""
    bad, good = list(wrong), list(right)
    for axis in degrees:
        places = {rank.coordinate.get(axis, 0) for rank in bad}
        if bad and good and not places & {rank.coordinate.get(axis, 0) for rank in good}:
            return axis
    return ""


def first_split(degrees: Mapping[str, int], *preferred: str) -> str:
    """Returns the first split axis, among the given ones or all; "" if none is split."""
    return next((axis for axis in (*preferred, *degrees) if degrees.get(axis, 1) > 1), "")
