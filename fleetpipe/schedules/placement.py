"""Maps stages to ranks; nothing else in the package knows the shape of a loop or a vee."""

from __future__ import annotations

from dataclasses import dataclass

from fleetpipe.errors import ConfigError, nearest, require_whole

#: The placements that exist. ``loop``: stage c*p+r on rank r. ``vee``: stages r and 2p-1-r.
#: ``wave``: like a vee, again and again.
PLACEMENTS = ("loop", "vee", "wave")

#: Ends the name of a placement with a vocabulary head: ``loop+head``.
HEAD = "+head"


@dataclass(frozen=True)
class Placement:
    """A map from global stages to ranks.

    With p ranks and v chunks on each there are S = p*v stages. The rank of stage s is s % p under
    ``loop`` and min(s, 2p-1-s) under ``vee``, where v is 2 and rank 0 owns both the first and
    the last stage. Under ``wave`` it is that of s % 2p under ``vee``: v is even, and every second
    chunk runs back from rank p-1 to rank 0.

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
        names = [*PLACEMENTS, *(name + HEAD for name in PLACEMENTS)]
        if self.name not in names:
            raise ConfigError(f"there is no placement {self.name!r}", fix=nearest(self.name, names))
        for field in ("ranks", "chunks"):
            object.__setattr__(self, field, require_whole(field, getattr(self, field)))
        if self.shape == "vee" and self.chunks != 2:
            raise ConfigError(
                "a vee places exactly two chunks on each rank",
                expected="chunks=2",
                got=f"chunks={self.chunks}",
                fix="give chunks=2, or the placement 'loop'",
            )
        if self.shape == "wave" and self.chunks % 2:
            raise ConfigError(
                "a wave places two chunks on each rank for each time that it comes and goes",
                expected="an even number of chunks",
                got=f"chunks={self.chunks}",
                fix=f"give chunks={self.chunks + 1}",
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
        if self.shape == "loop":
            return stage % self.ranks
        along = stage % (2 * self.ranks)
        return min(along, 2 * self.ranks - 1 - along)

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
        head = range(self.body, self.stages)
        return (*self._body_of(rank), *(stage for stage in head if self.rank_of(stage) == rank))

    def _body_of(self, rank: int) -> tuple[int, ...]:
        if self.shape == "loop":
            return tuple(range(rank, self.body, self.ranks))
        round_trip = 2 * self.ranks
        turns = range(0, self.body, round_trip)
        return tuple(turn + stage for turn in turns for stage in (rank, round_trip - 1 - rank))
