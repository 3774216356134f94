"""Maps stages to ranks, and says which values cross between them.

Only this file has the shapes of a loop, a vee and a wave. ``Dependencies`` is the one rule of what
an action waits for: verify, simulate and lower all use it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fleetpipe.errors import ConfigError, nearest, require_whole
from fleetpipe.representation import shows

#: Ends the name of a placement with a vocabulary head: ``loop+head``.
HEAD = "+head"

_EDGE = re.compile(r"(0|[1-9][0-9]{0,17})>(0|[1-9][0-9]{0,17})(?::([A-Za-z_][A-Za-z0-9_-]*))?")


def _there_and_back(position: int, ranks: int) -> int:
    return min(position, 2 * ranks - 1 - position)


class PlacementShape(NamedTuple):
    """A way to place stages: a round over the ranks, which may repeat.

    Attributes:
        rank_of: Returns the rank of a stage of a round, from its position there and the number of
            ranks.
        chunks: The chunks that a round places on each rank.
        repeats: Whether another round may follow.
    """

    rank_of: Callable[[int, int], int]
    chunks: int
    repeats: bool

    def takes(self, chunks: int) -> bool:
        """Whether so many chunks on each rank are whole rounds."""
        return chunks % self.chunks == 0 if self.repeats else chunks == self.chunks

    def least(self, chunks: int = 1) -> int:
        """Returns the least number of chunks from ``chunks`` on that it takes, or its only one."""
        return -(-chunks // self.chunks) * self.chunks if self.repeats else self.chunks


#: ``loop``: stage c*p+r on rank r. ``vee``: stages r and 2p-1-r. ``wave``: like a vee, again and
#: again.
SHAPES = {
    "loop": PlacementShape(lambda position, ranks: position, 1, repeats=True),
    "vee": PlacementShape(_there_and_back, 2, repeats=False),
    "wave": PlacementShape(_there_and_back, 2, repeats=True),
}


@dataclass(frozen=True)
class Placement:
    """A map from global stages to ranks.

    With p ranks and v chunks on each there are S = p*v stages. The rank of stage s is s % p under
    ``loop`` and min(s, 2p-1-s) under ``vee``, where v is 2 and rank 0 owns both the first and
    the last stage. Under ``wave`` it is that of s % 2p under ``vee``: v is even, and every second
    chunk runs back from rank p-1 to rank 0. :data:`SHAPES` has them all.

    With ``+head`` after the name there are p+1 further stages: S+r on rank r, its part of the
    model's head, and last the stage of the loss, on the rank of stage S-1.

    Args:
        name: "loop", "vee" or "wave", or one of them with a head: "loop+head".
        ranks: Ranks of the pipeline, p.
        chunks: Stages that each rank owns, v, without parts of a head.

    Raises:
        ConfigError: An unknown name, a number below 1, a vee with v other than 2, or a wave
            with an odd v.
    """

    name: str
    ranks: int
    chunks: int = 1

    def __post_init__(self) -> None:
        names = [*SHAPES, *(name + HEAD for name in SHAPES)]
        if self.name not in names:
            raise ConfigError(f"there is no placement {self.name!r}", fix=nearest(self.name, names))
        for field in ("ranks", "chunks"):
            object.__setattr__(self, field, require_whole(field, getattr(self, field)))
        shape = SHAPES[self.shape]
        if not shape.takes(self.chunks):
            number = "two chunks" if shape.chunks == 2 else f"{shape.chunks} chunks"
            rule = f"a whole number of times {number}" if shape.repeats else f"exactly {number}"
            raise ConfigError(
                f"a {self.shape} places {rule} on each rank",
                got=f"chunks={self.chunks}",
                fix=f"give chunks={shape.least(self.chunks)}, or the placement 'loop'",
            )

    @property
    def shape(self) -> str:
        """The name without the suffix of a head."""
        return self.name.partition("+")[0]

    @property
    def has_head(self) -> bool:
        """Whether a head's parts and the loss are stages of their own, after the others."""
        return self.name.endswith(HEAD)

    @property
    def body(self) -> int:
        """Number of stages without those of a head, S = ranks * chunks."""
        return self.ranks * self.chunks

    @property
    def stages(self) -> int:
        """Number of all stages: S, and p + 1 more with a head."""
        return self.body + (self.ranks + 1 if self.has_head else 0)

    def chain(self) -> tuple[tuple[int, int], ...]:
        """Returns (source, target) of each edge between stages, without skip connections."""
        last = self.body - 1
        ends = [(stage, stage + 1) for stage in range(last)]
        for part in range(self.body, self.stages - 1):
            ends += [(last, part), (part, self.stages - 1)]
        return tuple(sorted(ends))

    def rank_of(self, stage: int) -> int:
        """Returns the rank that owns ``stage``.

        Raises:
            ConfigError: ``stage`` is not in 0..stages-1.
        """
        if not 0 <= stage < self.stages:
            raise ConfigError(
                f"there is no stage {stage}",
                expected=f"a stage in 0..{self.stages - 1}",
                fix="ask for one of these stages",
            )
        if stage >= self.body:
            return self.rank_of(self.body - 1) if stage == self.stages - 1 else stage - self.body
        return SHAPES[self.shape].rank_of(stage % self._round, self.ranks)

    def link_of(self, stage: int) -> int:
        """Returns the link over which a value leaves ``stage``, whose next stage is elsewhere.

        Link r is the one between rank r and the one after it, which is rank 0 for the last rank.
        """
        source, target = self.rank_of(stage), self.rank_of(stage + 1)
        ends_a_round = (stage + 1) % self._round == 0
        return source if ends_a_round else min(source, target)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages that ``rank`` owns, ascending.

        Raises:
            ConfigError: ``rank`` is not in 0..ranks-1.
        """
        if not 0 <= rank < self.ranks:
            raise ConfigError(
                f"there is no rank {rank}",
                expected=f"a rank in 0..{self.ranks - 1}",
                fix="ask for one of these ranks",
            )
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    @property
    def _round(self) -> int:
        """The number of stages of a round."""
        return SHAPES[self.shape].chunks * self.ranks


class Edge(NamedTuple):
    """A value that leaves one stage and enters a later one: ``0>1`` or, named, ``0>2:mask``.

    The chain s -> s+1 is the usual case; a skip connection is an edge over several stages.

    Attributes:
        source: Stage that computes the value.
        target: Stage that takes it, later than ``source``.
        name: Distinguishes edges between the same two stages; empty for the usual one.
    """

    source: int
    target: int
    name: str = ""

    def __str__(self) -> str:
        label = f":{self.name}" if self.name else ""
        return f"{self.source}>{self.target}{label}"


def parse_edge(text: str) -> Edge | None:
    """Reads ``0>1`` or ``0>2:mask``; None if the text is not an edge."""
    match = _EDGE.fullmatch(text)
    return None if match is None else Edge(int(match[1]), int(match[2]), match[3] or "")


def chain(stages: int) -> tuple[Edge, ...]:
    """Returns the edges 0>1, 1>2, .. of a model without skip connections."""
    return tuple(Edge(stage, stage + 1) for stage in range(stages - 1))


def checked_edges(edges: Iterable[Edge] | None, placement: Placement) -> tuple[Edge, ...]:
    """Returns ``edges`` sorted; for None the chain, with the edges of a head if there is one.

    Raises:
        ConfigError: An edge that runs backwards, leaves the model, occurs twice, or has a name that
            the text form cannot hold.
    """
    stages = placement.stages
    if edges is None:
        return tuple(Edge(*ends) for ends in placement.chain())
    ordered = tuple(sorted(Edge(*edge) for edge in edges))
    for edge, following in zip(ordered, (*ordered[1:], None)):
        if not 0 <= edge.source < edge.target < stages:
            raise ConfigError(
                f"edge {edge} does not lead from a stage to a later one",
                expected=f"0 <= source < target < {stages}",
                fix="name the earlier stage first, and only stages that exist",
            )
        if parse_edge(str(edge)) != edge:
            raise ConfigError(
                f"edge {edge.source}>{edge.target} has the name {edge.name!r}",
                expected="letters, digits, - and _, beginning with a letter or _",
                fix="choose another name",
            )
        if edge == following:
            raise ConfigError(f"edge {edge} stands twice", fix="give each edge its own name")
    return ordered


def crossing_edges(
    placement: Placement, edges: Iterable[Edge]
) -> tuple[list[list[tuple[Edge, int]]], list[list[tuple[Edge, int]]]]:
    """Returns, for each stage, the edges that leave it and those that enter it between ranks.

    Each comes with the rank at its other end. An edge whose stages share a rank is left out.
    """
    leaving: list[list[tuple[Edge, int]]] = [[] for _ in range(placement.stages)]
    entering: list[list[tuple[Edge, int]]] = [[] for _ in range(placement.stages)]
    for edge in edges:
        source, target = placement.rank_of(edge.source), placement.rank_of(edge.target)
        if source != target:
            leaving[edge.source].append((edge, target))
            entering[edge.target].append((edge, source))
    return leaving, entering


@shows(stages="_sources")
class Dependencies:
    """The actions that each action waits for, all of the same micro-batch.

    - F(s) waits for F(e.source) of every edge e into s;
    - B(s) and I(s) wait for F(s), and for the backward of e.target of every edge e out of s;
    - W(s) waits for I(s).

    If sequences are cut into slices, see also :func:`slice_before`.

    In the results "B" means the backward that computes input gradients: B, or I if it is split.

    Args:
        edges: The edges of the model, as :func:`checked_edges` returns them.
        stages: Number of stages.
    """

    def __init__(self, edges: Iterable[Edge], stages: int) -> None:
        sources: list[set[int]] = [set() for _ in range(stages)]
        targets: list[set[int]] = [set() for _ in range(stages)]
        for edge in edges:
            sources[edge.target].add(edge.source)
            targets[edge.source].add(edge.target)
        self._sources = [sorted(numbers) for numbers in sources]
        self._targets = [sorted(numbers) for numbers in targets]

    def of(self, kind: str, stage: int) -> tuple[tuple[str, int], ...]:
        """Returns the (kind, stage) pairs that ``kind`` of ``stage`` waits for."""
        if kind == "F":
            return tuple(("F", source) for source in self._sources[stage])
        if kind == "W":
            return (("B", stage),)
        return (("F", stage), *(("B", target) for target in self._targets[stage]))


def slice_before(kind: str, index: int, slices: int) -> int:
    """Returns the distance to the slice whose ``kind`` has to run before; 0 if there is none.

    A forward needs the results of the slice before it, -1. Backwards run in the other order, +1.
    """
    if kind == "F":
        return -1 if index > 0 else 0
    return 1 if kind != "W" and index + 1 < slices else 0
