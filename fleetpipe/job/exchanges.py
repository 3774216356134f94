"""Adds to ``paddle.distributed`` the collective operations that Gloo lacks on CPU ranks.

``alltoall``, ``alltoall_single``, ``reduce_scatter`` and ``all_gather`` into one tensor go over the
job's own connections: parts straight from member to member, sums in the members' order.
``use_calc_stream=True`` makes no difference: CPUs have no streams.

If Paddle's wheel has no Gloo (3.3.1 for macOS), and for tensors on a card that ranks share, which
Gloo does not take, ``OwnGroup`` serves as Paddle's process group. Results equal Gloo's except for
the order of a sum: member by member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fleetpipe.aliases import PaddleGroup, PaddleStore, Tensor
from fleetpipe.errors import UsageError
from fleetpipe.job.job import required_job
from fleetpipe.mesh.groups import DirectGroup, Gathering, Group
from fleetpipe.mesh.sums import add
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.distributed import ranks_of
from fleetpipe.transport.sockets import connect

#: Methods that also exist with the suffix ``_on_calc_stream``.
_WITHOUT_STREAM = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "scatter", "scatter_tensor"),
    *("send", "recv", "all_to_all", "all_to_all_tensor", "all_to_all_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_gather_into_tensor"),
)


class Exchange:
    """A collective operation under way, as Paddle's callers expect one; Paddle calls it a task."""

    def __init__(self, gathering: Gathering, fill: Callable[[list[Tensor]], None]) -> None:
        """Begins an operation that has sent this member's values.

        Args:
            gathering: Receives the values of all members.
            fill: Called once with these values, by member, to fill the outputs.
        """
        self._gathering, self._fill, self._done = gathering, fill, False

    def wait(self) -> bool:
        """Waits for the values of all members and fills the outputs; returns True."""
        if not self._done:
            with paddle.no_grad():
                self._fill(self._gathering.values())
            self._done = True
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Returns whether the outputs are filled; fills them if it can without waiting."""
        return self._done or (self._gathering.arrived() and self.wait())


class Exchanges:
    """The methods that Paddle's process groups get; each is collective over the group."""

    def members(self) -> Group:
        """Returns the group of the members; Paddle's group must belong to the current job."""
        job = required_job(
            "the ranks exchange parts over the connections of a job, and there is none",
            cause="Gloo, Paddle's CPU backend, has neither alltoall nor reduce_scatter",
        )
        return job.members(ranks_of(self))

    def all_to_all(
        self, out: Sequence[Tensor], parts: Sequence[Tensor], sync_op: bool = True
    ) -> Exchange:
        """Fills ``out``, by member, with the parts that all members have for this one.

        Args:
            out: The outputs, by member.
            parts: The tensor for each member.
            sync_op: Ignored; the caller waits for the result.
        """
        return Exchange(self.members().begin_all_to_all(parts), lambda values: _fill(out, values))

    def all_to_all_tensor(self, out: Tensor, tensor: Tensor, sync_op: bool = True) -> Exchange:
        """Sends each member an equal part of ``tensor``'s rows; fills ``out`` with their parts."""
        if paddle.version.major == "2":  # 2.6.2 passes them in the other order
            out, tensor = tensor, out
        return self.all_to_all_single(out, tensor, [], [], sync_op)

    def all_to_all_single(
        self,
        out: Tensor,
        tensor: Tensor,
        out_sizes: list[int],
        sizes: list[int],
        sync_op: bool = True,
    ) -> Exchange:
        """Sends each member some rows of ``tensor``; fills ``out`` with the rows received.

        Args:
            out: The output for the rows from all members, in the members' order.
            tensor: The rows for all members, in the members' order.
            out_sizes: Rows that come from each member; empty for equal parts.
            sizes: Rows that go to each member; empty for equal parts.
            sync_op: Ignored.
        """
        group = self.members()
        parts = _split(tensor, sizes, group.ranks)
        outputs = _split(out, out_sizes, group.ranks)

        def fill(values: list[Tensor]) -> None:
            """Fills ``out`` with the members' parts, one after another."""
            _require_same_shapes(outputs, values)
            out.set_value(paddle.concat(values))

        return Exchange(group.begin_all_to_all(parts), fill)

    def reduce_scatter(
        self, out: Tensor, parts: Sequence[Tensor], operation: Any, sync_op: bool = True
    ) -> Exchange:
        """Fills ``out`` with the sum, or another reduction, of all members' parts for this one."""
        return Exchange(
            self.members().begin_all_to_all(parts),
            lambda values: _fill([out], [reduce(values, operation)]),
        )

    def reduce_scatter_tensor(
        self, out: Tensor, tensor: Tensor, operation: Any, sync_op: bool = True
    ) -> Exchange:
        """Fills ``out`` with the reduction of all members' equal parts, by rows, for this one."""
        return self.reduce_scatter(out, _split(tensor, [], self.members().ranks), operation)

    def all_gather_into_tensor(self, out: Tensor, tensor: Tensor, sync_op: bool = True) -> Exchange:
        """Fills ``out`` with the tensors of all members, one after another."""
        gathering = self.members().begin_all_gather(tensor.detach().clone())
        return Exchange(
            gathering, lambda values: _fill([out], [paddle.concat(values).reshape(out.shape)])
        )


def methods() -> dict[str, Callable[..., Any]]:
    """Returns by name the functions to add to Paddle's classes of process groups."""
    by_name = {name: method for name, method in vars(Exchanges).items() if not name.startswith("_")}
    for name in _WITHOUT_STREAM:
        by_name[f"{name}_on_calc_stream"] = _make_stream_method(name)
    return by_name


def _make_stream_method(name: str) -> Callable[..., Any]:
    """Returns the method ``name`` for callers that expect the outputs to be filled at once."""

    def call(group: PaddleGroup, *arguments: Any) -> Any:
        """Calls the method, and waits for its result."""
        task = getattr(group, name)(*arguments, True)
        task.wait()
        return task

    return call


def reduce(parts: Sequence[Tensor], operation: Any) -> Tensor:
    """Returns the sum, or another reduction, of the members' tensors, in the members' order.

    Args:
        parts: The members' tensors, of one shape and dtype.
        operation: One of ``paddle.distributed.ReduceOp``, or Paddle's number for it.
    """
    kinds, operation = paddle.distributed.ReduceOp, int(operation)
    stock: dict[Any, Any] = {
        kinds.MAX: paddle.maximum,
        kinds.MIN: paddle.minimum,
        kinds.PROD: paddle.multiply,
    }
    _require_same_shapes([parts[0]] * len(parts), parts)
    total, *rest = parts
    for part in rest:
        total = stock[operation](total, part) if operation in stock else add(total, part)
    # 2.6.2 has no average among its reductions.
    average = hasattr(kinds, "AVG") and operation == kinds.AVG
    return total / len(parts) if average else total


def _split(tensor: Tensor, sizes: Sequence[int], ranks: int) -> list[Tensor]:
    """Splits the first dimension of a tensor into a part for each member.

    Args:
        tensor: The tensor.
        sizes: Rows of each part, some perhaps 0; empty for equal parts.
        ranks: Number of members.

    Raises:
        UsageError: The sizes are not those of all rows.
    """
    rows = int(tensor.shape[0])
    if not sizes and rows % ranks == 0:
        sizes = [rows // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != rows:
        raise UsageError(
            "a tensor is cut along its first dimension into a part for each member of the group",
            expected=f"{ranks} sizes that add up to {rows}, or none and a multiple of {ranks} rows",
            got=str(list(sizes)) if sizes else f"{rows} rows",
            fix="give the sizes of all parts, or pad the tensor",
        )
    stops = [sum(sizes[: index + 1]) for index in range(ranks)]
    return [tensor[stop - size : stop] for stop, size in zip(stops, sizes)]


def _fill(outputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies values into outputs of the same shapes and dtypes."""
    _require_same_shapes(outputs, values)
    for output, value in zip(outputs, values):
        output.set_value(value)


def _require_same_shapes(outputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Refuses values, by member, that differ in shape or dtype from their outputs."""
    for member, (output, value) in enumerate(zip(outputs, values)):
        if (output.shape, output.dtype) != (value.shape, value.dtype):
            raise UsageError(
                "what arrives from a member of a group does not fit where it is to stand",
                where=f"from member {member}",
                expected=f"shape {list(output.shape)}, dtype {output.dtype}",
                got=f"shape {list(value.shape)}, dtype {value.dtype}",
                fix="make the outputs in the sizes that the other members send",
            )


class Done:
    """A collective operation that has ended, as the task that Paddle's callers wait for."""

    def wait(self) -> bool:
        """Returns at once."""
        return True


class OwnGroup(Exchanges):
    """A process group over the ranks' own connections; all members call each method."""

    def __init__(
        self, store: PaddleStore, rank: int, ranks: int, number: int, *, timeout: float
    ) -> None:
        """Connects the members. Collective over the group.

        Args:
            store: The store in which the members find each other.
            rank: This rank's number in the group.
            ranks: Members of the group.
            number: The group's number among Paddle's.
            timeout: Seconds that any wait for another member may last.
        """
        name = f"fleetpipe/group/{number}"
        transport = connect(rank=rank, ranks=ranks, store=store, namespace=name, timeout=timeout)
        self._members = DirectGroup(transport, timeout)

    def members(self) -> Group:
        """Returns the members."""
        return self._members

    def name(self) -> str:
        """Returns the name of the backend that this group replaces."""
        return "GLOO"

    def rank(self) -> int:
        """Returns this rank's number in the group."""
        return self._members.rank

    def size(self) -> int:
        """Returns the number of members."""
        return self._members.ranks

    def all_reduce(self, tensor: Any, operation: Any, sync_op: bool = True) -> Done:
        """Replaces the tensor by the sum, or another reduction, over all members. Collective."""
        self._reduce(tensor, operation)
        return Done()

    def reduce(self, tensor: Any, target: int, operation: Any, sync_op: bool = True) -> Done:
        """Reduces as :meth:`all_reduce`, and replaces the tensor on ``target`` only. Collective."""
        self._reduce(tensor if self.rank() == target else tensor.clone(), operation)
        return Done()

    def broadcast(self, tensor: Any, source: int, sync_op: bool = True) -> Done:
        """Replaces the tensor by that of member ``source``. Collective."""
        self._members.broadcast_each([(tensor, source)])
        return Done()

    def all_gather(self, outputs: Sequence[Any], tensor: Any, sync_op: bool = True) -> Done:
        """Fills ``outputs``, by member, with the tensors of all members. Collective."""
        for output, value in zip(outputs, self._members.all_gather(tensor.detach().clone())):
            output.set_value(value)
        return Done()

    def barrier(self, device: int = 0) -> Done:
        """Waits until all members have called it; returns a finished task. Collective.

        Args:
            device: Ignored; Paddle passes the number of a GPU.
        """
        self._members.all_gather(None)
        return Done()

    def _reduce(self, tensor: Any, operation: Any) -> None:
        """Replaces a tensor by the sum, or another reduction, over all members. Collective."""
        parts = self._members.all_gather(tensor.detach().clone())
        tensor.set_value(reduce(parts, operation))


for _name, _method in methods().items():
    if _name.endswith("_on_calc_stream"):
        setattr(OwnGroup, _name, _method)
