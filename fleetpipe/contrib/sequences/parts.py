"""The positions that each rank has of a sequence that is split over ranks.

Along cp a sequence is cut into twice as many equal chunks as there are ranks, and rank r has the
r-th from the front and the r-th from the back: in causal attention, where later positions see more,
this gives every rank the same work (a zig-zag). The positions of a cp rank are split once more
along sep, into consecutive parts::

    chunks, cp 2     0 1 2 3
    cp 0             0     3      sep 2: its first half, its second half
    cp 1               1 2
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.nest import map_tensors, tensors_of
from fleetpipe.dygraph.tensor_parallel.groups import is_alone
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job, current_job
from fleetpipe.mesh.groups import Group, SoleGroup
from fleetpipe.paddle_api import paddle


class SequenceRanks(NamedTuple):
    """The groups of ranks with which this rank shares each sequence of its replica.

    Attributes:
        sep: The ranks that exchange positions for heads in attention.
        cp: The ranks that send each other keys and values in attention.
    """

    sep: Group
    cp: Group

    @classmethod
    def of(cls, job: Job | None) -> SequenceRanks:
        """Returns the ranks that share sequences in a job.

        Without a job, in a job of one process and within ``alone()``, it is this process only.
        """
        if job is None or job.local or is_alone():
            return cls(SoleGroup(), SoleGroup())
        return cls(job.along("sep"), job.along("cp"))

    @property
    def ranks(self) -> int:
        """The number of ranks that share a sequence."""
        return self.sep.ranks * self.cp.ranks

    @property
    def divisor(self) -> int:
        """The number by which the length of a sequence must be divisible, for equal parts."""
        return self.ranks * (2 if self.cp.ranks > 1 else 1)

    def chunks(self, length: int, rank: int | None = None) -> list[tuple[int, int]]:
        """Returns, for each chunk of a cp rank, its first position and the position after its last.

        Args:
            length: The number of positions of the whole sequence.
            rank: The cp rank; None for this one.

        Raises:
            ConfigError: The sequence cannot be split into equal parts.
        """
        self.require(length)
        if self.cp.ranks == 1:
            return [(0, length)]
        number, last = self.cp.rank if rank is None else rank, 2 * self.cp.ranks - 1
        size = length // (last + 1)
        return [(n * size, (n + 1) * size) for n in (number, last - number)]

    def places(self, length: int) -> Tensor:
        """Returns this rank's positions in a sequence: int64 ``[length / ranks]``, in its order.

        These are the position ids of the rank's part of a sequence that is not packed.

        Args:
            length: The number of positions of the whole sequence.

        Raises:
            ConfigError: The sequence cannot be split into equal parts.
        """
        of_cp_rank = np.concatenate([np.arange(*chunk) for chunk in self.chunks(length)])
        of_rank = np.split(of_cp_rank, self.sep.ranks)[self.sep.rank]
        return paddle.to_tensor(of_rank, dtype="int64")

    def own_part(self, value: Nest, axis: int = 1) -> Nest:
        """Cuts whole sequences, which every rank has, to this rank's positions. Not collective.

        Args:
            value: Tensors in tuples, lists and dicts, such as inputs, labels, position ids,
                documents.
            axis: The axis of the positions.

        Raises:
            ConfigError: The sequences cannot be split into equal parts.
        """
        for tensor in tensors_of(value):
            self.require(_length_along(tensor, axis))
        if self.ranks == 1:
            return value

        def select_positions(tensor: Tensor) -> Tensor:
            return paddle.index_select(tensor, self.places(tensor.shape[axis]), axis)

        return map_tensors(select_positions, value)

    def whole(self, part: Tensor, axis: int = 1) -> Tensor:
        """Joins the ranks' parts to whole sequences. Collective, without a gradient.

        Args:
            part: This rank's part; all parts have the same shape.
            axis: The axis of the positions.
        """
        joined = _gather_and_join(_gather_and_join(part.detach(), self.sep, axis), self.cp, axis)
        length = joined.shape[axis]
        chunks = [chunk for rank in range(self.cp.ranks) for chunk in self.chunks(length, rank)]
        order = np.argsort(np.concatenate([np.arange(*chunk) for chunk in chunks]))
        return paddle.index_select(joined, paddle.to_tensor(order, dtype="int64"), axis)

    def require_alike(self, facts: str) -> None:
        """Raises ConfigError if the ranks do not compute the same. Collective over sep, then cp.

        Args:
            facts: A text that must be the same on all ranks: shapes, dtypes and options.
        """
        for group in self:
            everyone = group.all_gather(facts)
            if any(facts_of_rank != facts for facts_of_rank in everyone):
                raise ConfigError(
                    "the ranks that share a sequence do not attend to the same",
                    where=f"member {group.rank} of {group.ranks}",
                    expected="parts of one shape, and the same arguments, on all of them",
                    got="; ".join(f"{rank}: {text}" for rank, text in enumerate(everyone)),
                    fix="cut the same whole sequences by own_part on every rank, and give "
                    "documents to all or to none",
                )

    def whole_batch(self, value: Nest) -> Nest:
        """Returns the whole sequences of a batch of which each rank has a part. Collective.

        A tensor counts as a part if it differs between the ranks, or is as long as such a tensor.
        Other tensors stay as they are.

        Args:
            value: Tensors in tuples, lists and dicts; their second axis may be the axis of the
                positions.
        """
        if self.ranks == 1:
            return value
        lengths: set[int] = set()
        for group in self:
            for rank_value in group.all_gather(value):
                for tensor, of_rank in zip(tensors_of(value), tensors_of(rank_value)):
                    same_shape = list(tensor.shape) == list(of_rank.shape)
                    is_same = same_shape and bool((tensor == of_rank).all())
                    if tensor.ndim > 1 and not is_same:
                        lengths.add(tensor.shape[1])
        for group in self:
            lengths = {length for of_rank in group.all_gather([*lengths]) for length in of_rank}

        def join_part(tensor: Tensor) -> Tensor:
            is_part = tensor.ndim > 1 and tensor.shape[1] in lengths
            return self.whole(tensor) if is_part else tensor

        return map_tensors(join_part, value)

    def require(self, length: int) -> None:
        """Checks that a sequence of ``length`` positions can be split into equal parts.

        Raises:
            ConfigError: :attr:`divisor` does not divide the length, or that is no whole number.
        """
        if not hasattr(length, "__index__"):  # such as the whole shape of a tensor
            raise ConfigError(
                "the length of a sequence is a whole number", got=repr(length), fix="ids.shape[1]"
            )
        if length % self.divisor:
            zigzag = " x 2, for the two chunks of each cp rank" if self.cp.ranks > 1 else ""
            raise ConfigError(
                f"a sequence of {length} places cannot be split over sep_degree="
                f"{self.sep.ranks} x cp_degree={self.cp.ranks} ranks",
                expected=f"a multiple of {self.divisor} places (sep x cp{zigzag})",
                fix=f"pad sequences to {-(-length // self.divisor) * self.divisor} places, with "
                "labels that the loss ignores",
            )


def sequence_ranks() -> SequenceRanks:
    """Returns the ranks that share this process's sequences, by the job's sep and cp degrees.

    Without a job, in a job of one process and within ``alone()``, it is this process only.
    """
    return SequenceRanks.of(current_job())


def own_part(value: Nest, axis: int = 1) -> Nest:
    """Cuts whole sequences to this rank's positions, by :meth:`SequenceRanks.own_part`."""
    return sequence_ranks().own_part(value, axis)


def places(length: int) -> Tensor:
    """Returns the positions in a sequence that this rank has, by :meth:`SequenceRanks.places`."""
    return sequence_ranks().places(length)


def documents_of(position_ids: Tensor) -> Tensor:
    """Returns the number of the document at each position of packed sequences.

    Args:
        position_ids: Integers ``[rows, length]`` of whole sequences, which start again from 0 at
            the beginning of each document.
    """
    return (position_ids == 0).astype("int32").cumsum(axis=-1)


def _length_along(tensor: Tensor, axis: int) -> int:
    """Returns a tensor's length along an axis; raises ConfigError if it has no such axis."""
    if not -tensor.ndim <= axis < tensor.ndim:
        raise ConfigError(
            f"a tensor of shape {list(tensor.shape)} has no axis {axis}, that of the places",
            expected="ids, labels and the like, [rows, length, ..]",
            fix="own_part(value, axis=..), and leave out what is no sequence",
        )
    return int(tensor.shape[axis])


def _gather_and_join(part: Tensor, group: Group, axis: int) -> Tensor:
    """Concatenates the members' parts along an axis, in the order of the group. Collective."""
    return paddle.concat(group.all_gather(part.clone()), axis=axis)
