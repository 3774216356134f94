"""Placements (the rank of each stage), edges (values between stages), and what an action waits for.

Only this file knows the shapes of a loop, a vee and a wave. ``Dependencies`` has the rule of what
an action waits for; verify, simulate and lower all use it.
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


def _rank_in_vee(position: int, ranks: int) -> int:
    """Returns the rank of stage ``position`` of a vee, which runs 0..p-1 and back p-1..0."""
    return min(position, 2 * ranks - 1 - position)


class PlacementShape(NamedTuple):
    """A rule that places stages on ranks: stages run over the ranks in rounds, all rounds alike.

    Attributes:
        rank_of: ``rank_of(position, ranks)`` returns the rank of the stage at a position, counted
            from 0, in its round.
        chunks: The chunks that one round places on each rank.
        repeats: Whether there may be several rounds.
    """

    rank_of: Callable[[int, int], int]
    chunks: int
    repeats: bool

    def allows(self, chunks: int) -> bool:
        """Whether each rank can have this number of chunks: whether they make whole rounds."""
        return chunks % self.chunks == 0 if self.repeats else chunks == self.chunks

    def round_up(self, chunks: int = 1) -> int:
        """Returns the smallest allowed number of chunks that is at least ``chunks``.

        A shape of a single round allows one number only, which is returned for any ``chunks``.
        """
        return -(-chunks // self.chunks) * self.chunks if self.repeats else self.chunks


#: ``loop``: stage c*p+r on rank r. ``vee``: stages r and 2p-1-r. ``wave``: like a vee, again and
#: again.
SHAPES = {
    "loop": PlacementShape(lambda position, ranks: position, 1, repeats=True),
    "vee": PlacementShape(_rank_in_vee, 2, repeats=False),
    "wave": PlacementShape(_rank_in_vee, 2, repeats=True),
}


@dataclass(frozen=True)
class Placement:
    """The rank of each global stage.

    With p ranks and v chunks on each there are S = p*v stages. The rank of stage s is s % p under
    ``loop`` and min(s, 2p-1-s) under ``vee``, where v is 2 and rank 0 owns both the first and
    the last stage. Under ``wave``, where v is even, a vee of 2p stages is repeated: stage s is on
    the rank that stage s % 2p has under ``vee``.

    With ``+head`` after the name the model has a vocabulary head in p parts, which are stages too:
    stage S+r is the part of rank r, and stage S+p the loss, on the rank of stage S-1.

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
        if not shape.allows(self.chunks):
            number = "two chunks" if shape.chunks == 2 else f"{shape.chunks} chunks"
            rule = f"a whole number of times {number}" if shape.repeats else f"exactly {number}"
            raise ConfigError(
                f"a {self.shape} places {rule} on each rank",
                got=f"chunks={self.chunks}",
                fix=f"give chunks={shape.round_up(self.chunks)}, or the placement 'loop'",
            )

    @property
    def shape(self) -> str:
        """The key in :data:`SHAPES`: the name without ``+head``."""
        return self.name.partition("+")[0]

    @property
    def has_head(self) -> bool:
        """Whether the parts of a vocabulary head, and the loss, are stages of their own."""
        return self.name.endswith(HEAD)

    @property
    def body(self) -> int:
        """Number of stages before the head, S = ranks * chunks; all stages without a head."""
        return self.ranks * self.chunks

    @property
    def stages(self) -> int:
        """Number of all stages: S without a head, S + p + 1 with one."""
        return self.body + (self.ranks + 1 if self.has_head else 0)

    def chain(self) -> tuple[tuple[int, int], ...]:
        """Returns (source stage, target stage) of each edge of a model without skip connections.

        These are 0>1, 1>2, ..; with a head the last stage before it has an edge to each part, and
        each part one to the loss.
        """
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
        return SHAPES[self.shape].rank_of(stage % self._stages_of_round, self.ranks)

    def link_of(self, stage: int) -> int:
        """Returns the number of the link between the ranks of a stage and of the next stage.

        Link r joins rank r and rank r+1; link p-1 joins the last rank and rank 0.

        Args:
            stage: A stage whose next stage is on another rank.
        """
        source, target = self.rank_of(stage), self.rank_of(stage + 1)
        ends_a_round = (stage + 1) % self._stages_of_round == 0
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
    def _stages_of_round(self) -> int:
        """The number of stages of one round over the ranks."""
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
    """Reads an edge such as ``0>1`` or ``0>2:mask``; None if the text is malformed."""
    match = _EDGE.fullmatch(text)
    return None if match is None else Edge(int(match[1]), int(match[2]), match[3] or "")


def chain(stages: int) -> tuple[Edge, ...]:
    """Returns the edges 0>1, 1>2, .. of a model without skip connections."""
    return tuple(Edge(stage, stage + 1) for stage in range(stages - 1))


def checked_edges(edges: Iterable[Edge] | None, placement: Placement) -> tuple[Edge, ...]:
    """Returns the edges of a model, sorted and checked.

    Args:
        edges: The edges; None for those of :meth:`Placement.chain`.
        placement: The placement of the model's stages.

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
    """Returns the edges between ranks: by stage those that leave it, and those that enter it.

    Returns:
        Two lists with an item for each stage, a list of pairs: an edge, and the rank of the stage
        at its other end. Edges whose two stages are on one rank are left out.
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
    """The rule of which actions an action waits for, within one micro-batch.

    - F(s) waits for F(e.source) of every edge e into s;
    - B(s) and I(s) wait for F(s), and for the backward of e.target of every edge e out of s;
    - W(s) waits for I(s).

    An action on a slice of a sequence also waits for another slice: see
    :func:`distance_to_slice_before`. In results "B" stands for the backward that computes input
    gradients: B, or I if the backward is split.

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
        """Returns the (kind, stage) of each action that an action of a kind and stage waits for."""
        if kind == "F":
            return tuple(("F", source) for source in self._sources[stage])
        if kind == "W":
            return (("B", stage),)
        return (("F", stage), *(("B", target) for target in self._targets[stage]))


def distance_to_slice_before(kind: str, index: int, slices: int) -> int:
    """Returns how far away the slice is whose action must run before that of slice ``index``.

    Forwards of a micro-batch's slices run in order: -1, the slice before. B and I run in reverse
    order: +1, the slice after. W waits for no other slice.

    Args:
        kind: The kind of both actions.
        index: The slice, 0..slices-1.
        slices: Slices of each micro-batch.

    Returns:
        -1 or +1; 0 if there is no such slice.
    """
    if kind == "F":
        return -1 if index > 0 else 0
    return 1 if kind != "W" and index + 1 < slices else 0
