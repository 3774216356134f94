"""The policies of ColossalAI: how many layers each stage has.

All return boundaries as ``fleetpipe.partition`` has them: the first layer of each stage, then the
number of layers. Stages are ranks times chunks, dealt to the ranks in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Union

from fleetpipe.compat.colossalai.pipeline.sequence import SPLIT_NODE
from fleetpipe.errors import PartitionError, UsageError, nearest
from fleetpipe.partition import balanced, uniform

#: Layers of one rank: ``(start, end)`` for each of its chunks.
Parts = Sequence[tuple[int, int]]
Policy = Union[str, Mapping[int, Parts]]

POLICIES = ("uniform", "balanced", "customized")


def require_policy(policy: object) -> None:
    """Refuses what is no policy."""
    if not isinstance(policy, (str, Mapping)):
        raise UsageError(
            "a policy is a name, or the layers of each rank",
            expected=f"{', '.join(map(repr, POLICIES))} or {{rank: [(start, end)]}}",
            got=repr(policy),
            fix='PipelinableContext(policy="balanced")',
        )
    if isinstance(policy, str) and policy not in POLICIES:
        raise PartitionError(f"there is no policy {policy!r}", fix=nearest(policy, POLICIES))


def boundaries(
    policy: Policy, weights: Sequence[int], splits: Sequence[int], ranks: int, chunks: int
) -> list[int]:
    """Cuts a list of layers.

    Args:
        policy: ``"uniform"``: in each of ``chunks`` equal pieces as many layers for each rank, one
            more for the last ones; ``"balanced"``: the heaviest stage is as light as possible;
            ``"customized"``: at ``splits``; a mapping: what it says.
        weights: Numbers of parameters of the layers.
        splits: How many layers stand before each SPLIT_NODE.
        ranks: Ranks of the pipeline.
        chunks: Chunks of each rank.
    """
    count, stages = len(weights), ranks * chunks
    if splits and policy != "customized":
        raise PartitionError(
            f"exec_seq has {SPLIT_NODE}, and the policy is not 'customized'",
            got=f"policy {policy!r}",
            fix="PipelinableContext(policy='customized'), or leave the marks out",
        )
    if policy == "balanced":
        # A layer without parameters counts a little: it would else cost nothing to pile them up.
        return balanced([max(weight, 1) for weight in weights], stages)
    if policy == "uniform":
        return _uniform(count, ranks, chunks)
    if isinstance(policy, Mapping):
        return _explicit(policy, count, ranks, chunks)
    if len(splits) + 1 != stages:
        raise PartitionError(
            f"exec_seq has {len(splits)} {SPLIT_NODE}, which makes {len(splits) + 1} parts",
            expected=f"{stages} parts: {ranks} ranks with {chunks} chunks each",
            fix=f"write {SPLIT_NODE!r} {stages - 1} times",
        )
    return [0, *splits, count]


def parts_of(bounds: Sequence[int], ranks: int) -> dict[int, list[tuple[int, int]]]:
    """Returns the layers of each rank, ``(start, end)`` for each of its chunks."""
    stages = list(zip(bounds, bounds[1:]))
    return {rank: stages[rank::ranks] for rank in range(ranks)}


def _uniform(count: int, ranks: int, chunks: int) -> list[int]:
    if count % chunks:
        raise PartitionError(
            f"policy 'uniform' cannot cut {count} layers into {chunks} equal chunks",
            expected=f"a number of layers that {chunks} (num_chunks) divides",
            got=f"{count} layers",
            fix="use policy 'balanced', or another number of chunks",
        )
    piece = count // chunks
    starts = uniform(piece, ranks)[:-1]
    return [*(chunk * piece + start for chunk in range(chunks) for start in starts), count]


def _explicit(policy: Mapping[int, Parts], count: int, ranks: int, chunks: int) -> list[int]:
    numbers = {rank: len(parts) for rank, parts in policy.items()}
    if numbers != dict.fromkeys(range(ranks), chunks):
        raise PartitionError(
            "the policy does not give each rank its chunks",
            expected=f"ranks 0 to {ranks - 1} with {chunks} pairs (start, end) each",
            got=str({rank: list(parts) for rank, parts in policy.items()}),
            fix="write {rank: [(start, end), ..]} with one pair for each chunk",
        )
    ranges = [policy[rank][chunk] for chunk in range(chunks) for rank in range(ranks)]
    end_before = 0
    for stage, (start, end) in enumerate(ranges):
        if start != end_before or end <= start:
            raise PartitionError(
                "the parts of the policy leave a gap, overlap or are empty",
                where=f"rank {stage % ranks}, chunk {stage // ranks}",
                expected=f"a part that begins with layer {end_before} and is not empty",
                got=f"({start}, {end})",
                fix="chunk c of rank r goes on where the stage before it ends: rank r - 1, or for "
                "rank 0 the last rank's chunk c - 1",
            )
        end_before = end
    if end_before != count:
        raise PartitionError(
            f"the parts of the policy end at layer {end_before}, the model at layer {count}",
            fix=f"end the last part with {count}",
        )
    return [0, *(end for _, end in ranges)]
