"""Parameter groups over ranks: matches the groups of all ranks, and adds those that a rank lacks.

A group is clipped by the norm of all its gradients, on whatever ranks they are. Groups match if
their options are equal and they have the same place among the groups with these options. So a rank
whose stages have no parameter of a group may leave it out, if its options differ from every other
group's; if they do not, the rank must give the group without parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fleetpipe.aliases import Optimizer
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import (
    GLOBAL_NORM_CLIPS,
    dict_groups,
    optimized_parameters,
    put_groups,
)

#: What tells a group apart from others, the same on all ranks: its options as text, which of those
#: with these options it is, and the norm of all its gradients to which it is clipped, if there is.
GroupKey = tuple[str, int, float | None]
#: Where a group that this rank has no part of keeps its key.
_KEY = "key"


def keys_of(optimizer: Optimizer) -> list[GroupKey] | None:
    """Returns the keys of an optimizer's groups; None if its parameters are a plain list."""
    groups = dict_groups(optimizer)
    if not groups:
        return None if optimized_parameters(optimizer) else []
    seen: Counter[str] = Counter()
    keys: list[GroupKey] = []
    for group in groups:
        if _KEY in group:
            keys.append(group[_KEY])
            continue
        options = str(sorted((n, text_of(v)) for n, v in group.items() if n != "params"))
        clip = group["grad_clip"]
        norm = clip.clip_norm if isinstance(clip, GLOBAL_NORM_CLIPS) else None
        keys.append((options, seen[options], norm))
        seen[options] += 1
    return keys


def arrange(optimizer: Optimizer, keys_of_ranks: Sequence[list[GroupKey] | None]) -> None:
    """Gives an optimizer the groups of all ranks in one order; groups that it lacks are empty.

    Nothing happens if some rank has a plain list of parameters.
    """
    if None in keys_of_ranks:
        return
    here = dict(zip(keys_of(optimizer) or [], dict_groups(optimizer)))
    wanted = dict.fromkeys(key for keys in keys_of_ranks for key in keys or [])
    if [*wanted] != [*here]:
        put_groups(optimizer, [here.get(key) or _empty(key) for key in wanted])


def _empty(key: GroupKey) -> dict[str, Any]:
    norm = key[2]
    clip = None if norm is None else paddle.nn.ClipGradByGlobalNorm(norm)
    return {"params": [], "grad_clip": clip, "weight_decay": None, _KEY: key}


def text_of(value: object) -> str:
    """Returns an option or a clip as text: its ``str``, or its class if that says nothing."""
    try:
        text = str(value)
    except NotImplementedError:
        text = ""
    return type(value).__name__ if not text or " at 0x" in text else text
