"""The three ways in which Fleet cuts a list of layers: evenly, by class name, by a given list.

All of them return *boundaries*: ``parts + 1`` layer numbers, the first 0, the last the number of
layers; stage ``s`` holds the layers ``boundaries[s]`` to ``boundaries[s + 1] - 1``.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Sequence

from fleetpipe.errors import PartitionError


def uniform(count: int, parts: int) -> list[int]:
    """Cuts into stages of equal length; a remainder goes one layer each to the last stages.

    Args:
        count: Number of layers.
        parts: Number of stages: ranks times chunks.

    Returns:
        The boundaries: 10 layers in 4 stages give ``[0, 2, 4, 7, 10]``.

    Raises:
        PartitionError: There are fewer layers than stages.
    """
    require_enough(count, parts, "uniform")
    size, remainder = divmod(count, parts)
    short = parts - remainder
    return [stage * size + max(0, stage - short) for stage in range(parts + 1)]


def by_class(names: Sequence[str], parts: int, regex: str) -> list[int]:
    """Cuts right after every k-th layer whose class name matches, k the same for each stage.

    Layers before the first match belong to stage 0, other layers after a boundary to the stage that
    begins there, and those after the last match to the last stage.

    Args:
        names: Class name of each layer, or ``__name__`` of a function; "" for a layer without a
            name, which never matches.
        parts: Number of stages: ranks times chunks.
        regex: Regular expression, searched anywhere in the name, whatever the case.

    Returns:
        The boundaries: names ``E B B B B H``, 2 stages, ``"B"`` give ``[0, 3, 6]``.

    Raises:
        PartitionError: The expression is not valid, matches nothing, or matches a number of layers
            that the stages do not divide.
    """
    method = f"layer:{regex}"
    require_enough(len(names), parts, method)
    matches = [index for index, name in enumerate(names) if name and _search(regex, name)]
    if not matches:
        raise PartitionError(
            f"seg_method {method!r} matches no layer",
            expected=f"a number of matches that {parts} stages divide",
            got="the names " + ", ".join(sorted({name or "(none)" for name in names})),
            fix="name a class of the layers list, as in 'layer:TransformerBlock'",
        )
    each, remainder = divmod(len(matches), parts)
    if remainder:
        raise PartitionError(
            f"the {len(matches)} layers that seg_method {method!r} matches cannot be shared evenly",
            expected=f"a number of matches divisible by the {parts} stages (ranks times chunks)",
            got=f"{len(matches)} matches, remainder {remainder}",
            fix="choose a number of stages that divides the matches, or seg_method 'balanced'",
        )
    last_of_stage = matches[each - 1 : -1 : each]
    return [0, *(index + 1 for index in last_of_stage), len(names)]


def _search(regex: str, name: str) -> bool:
    try:
        return re.search(regex, name, re.IGNORECASE) is not None
    except re.error as error:
        raise PartitionError(
            f"seg_method 'layer:{regex}' is not a regular expression",
            got=str(error),
            fix="escape the characters that are special, as in 'layer:Block\\('",
        ) from error


def explicit(count: int, parts: int, bounds: Sequence[int]) -> list[int]:
    """Takes the boundaries from the user, after checking them.

    Args:
        count: Number of layers.
        parts: Number of stages: ranks times chunks.
        bounds: First layer of each stage; the number of layers may follow at the end.

    Returns:
        The boundaries: 10 layers, 3 stages, ``[0, 3, 7]`` give ``[0, 3, 7, 10]``.

    Raises:
        PartitionError: The list has the wrong length, does not begin with 0 or end with ``count``,
            is not in order, or leaves a stage empty.
    """
    method = f"list {list(bounds)}"
    require_enough(count, parts, method)
    if len(bounds) not in (parts, parts + 1):
        raise PartitionError(
            f"seg_method {method} has the wrong length",
            expected=f"{parts} numbers (the first layer of each of {parts} stages), or "
            f"{parts + 1} with the number of layers, {count}, at the end",
            got=f"{len(bounds)} numbers",
            fix="give one number per stage; stages are ranks times chunks",
        )
    boundaries = [_layer_number(bound, method) for bound in bounds]
    if len(boundaries) == parts:
        boundaries.append(count)
    require_cover(boundaries, count, method)
    return boundaries


def _layer_number(bound: object, method: str) -> int:
    try:
        if isinstance(bound, bool):
            raise TypeError
        return operator.index(bound)  # type: ignore[arg-type]
    except TypeError:
        raise PartitionError(
            f"seg_method {method} holds something that is not a layer number",
            expected="integers",
            got=f"{bound!r} of type {type(bound).__name__}",
            fix="give the number of the first layer of each stage, as in [0, 3, 7]",
        ) from None


def require_enough(count: int, parts: int, method: str) -> None:
    """Refuses a number of stages that is below one or above the number of layers."""
    if parts < 1:
        raise PartitionError(
            "the number of stages must be at least 1",
            got=f"{parts} stages",
            fix="set pp_degree and num_virtual_pipeline_stages to 1 or more",
        )
    if count < parts:
        empty = 0 if method == "uniform" else count
        raise PartitionError(
            f"stage {empty} would be empty: {count} layers cannot fill {parts} stages",
            where=f"stage {empty}, seg_method {method!r}",
            expected="at least one layer per stage (ranks times chunks)",
            got=f"{count} layers, {parts} stages",
            fix="use fewer ranks or chunks, or list the model's layers more finely",
        )


def require_cover(boundaries: Sequence[int], count: int, method: str) -> None:
    """Refuses boundaries that lose a layer, hold one twice or leave a stage empty.

    Args:
        boundaries: First layer of each stage, then the end of the last stage.
        count: Number of layers that the stages must hold, each once and in order.
        method: How the boundaries were found, for the message.
    """
    expected = f"numbers that begin with 0, rise strictly and end with {count}, all the layers"
    got = f"boundaries {list(boundaries)} for {count} layers"
    if boundaries[0] != 0:
        raise PartitionError(
            f"the layers before layer {boundaries[0]} belong to no stage",
            where=f"stage 0, seg_method {method!r}",
            expected=expected,
            got=got,
            fix="begin the list with 0",
        )
    for stage, (start, end) in enumerate(itertools.pairwise(boundaries)):
        if start >= end:
            fault = "would be empty" if start == end else "would end before it begins"
            raise PartitionError(
                f"stage {stage} {fault}: from layer {start} up to, not including, layer {end}",
                where=f"stage {stage}, seg_method {method!r}",
                expected=expected,
                got=got,
                fix="put the numbers in order, each once, and leave every stage at least one layer",
            )
    if boundaries[-1] != count:
        raise PartitionError(
            f"the stages end at layer {boundaries[-1]}, the model at layer {count}",
            where=f"stage {len(boundaries) - 2}, seg_method {method!r}",
            expected=expected,
            got=got,
            fix=f"end the list with {count}, or leave the end out: one number for each stage",
        )
