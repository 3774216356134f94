"""What replicas do together: sums of gradients, and the first rank's values on all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from fleetpipe.dygraph.broadcast import broadcast_state
from fleetpipe.dygraph.optimizer.replicas import reduce_all, reduce_gradients
from fleetpipe.dygraph.tensor_parallel.sequence import mark_as_sequence_parallel_parameter, marked
from fleetpipe.mesh import Degrees, SoleGroup
from tests.groups import members, on_all


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_gradients_of_several_dtypes_are_reduced_in_their_own(share: float) -> None:
    """Of four parameters one has a gradient on one replica alone, and one on none."""
    group = members(2)
    shapes = [([3], "float32"), ([2, 2], "bfloat16"), ([], "float64"), ([5], "float32")]

    def run(rank: int) -> list[Any]:
        layer = paddle.nn.Layer()
        parameters = [layer.create_parameter(shape, dtype=dtype) for shape, dtype in shapes]
        for number, (parameter, (shape, dtype)) in enumerate(zip(parameters[:3], shapes)):
            if number != 1 or rank == 1:
                parameter.grad = paddle.full(shape, number + 2.0 * rank + 1.0).astype(dtype)
        member: Any = group[rank]

        def all_reduce(tensors: list[Any]) -> None:
            # On CPU Paddle has no kernel for a sum of bfloat16; Gloo and NCCL add such.
            for tensor in tensors:
                parts = [part.astype("float64") for part in member.all_gather(tensor.clone())]
                tensor.set_value((parts[0] + parts[1]).astype(tensor.dtype))

        member.all_reduce = all_reduce
        reduce_gradients(parameters, member, share)
        return [parameter.grad for parameter in parameters]

    for gradients in on_all(2, run):
        if isinstance(gradients, Exception):
            raise gradients
        assert gradients[3] is None
        for gradient, (shape, dtype), total in zip(gradients, shapes, (4.0, 4.0, 8.0)):
            assert (gradient.shape, str(gradient.dtype)) == (shape, f"paddle.{dtype}")
            assert np.all(gradient.astype("float32").numpy() == total * share)


def test_experts_count_the_tokens_of_members_once_unless_these_are_parts() -> None:
    """Two members have the same tokens, which reach a spread expert twice; or each has half."""
    layer = paddle.nn.Layer()
    parameters = whole, of_parts, _ = [layer.create_parameter([2]) for _ in range(3)]
    whole.no_sync = of_parts.no_sync = True
    mark_as_sequence_parallel_parameter(of_parts)
    for parameter in parameters:
        parameter.grad = paddle.full([2], 8.0)
    job: Any = SimpleNamespace(
        sums_by_tree=False, degrees=Degrees(mp=2, ep=2), copies=SoleGroup, expert_copies=SoleGroup
    )
    reduce_all(parameters, job, 0.5)
    assert [float(p.grad[0]) for p in parameters] == [2.0, 4.0, 4.0]
    # Its members hold different experts.
    assert marked(parameters) == []


def test_all_have_what_the_first_has_and_what_is_sent_is_a_copy() -> None:
    group = members(2)
    sent: list[Any] = []

    def run(rank: int) -> tuple[list[float], float]:
        state = {"whole": paddle.full([2], rank + 1.0), "number": paddle.full([], rank + 5.0)}
        member: Any = group[rank]
        broadcast = member.broadcast

        def noting(value: Any, source: int) -> Any:
            sent.append((rank, value))
            return broadcast(value, source)

        member.broadcast = noting
        broadcast_state(state, member)
        found = state["whole"].tolist(), float(state["number"])
        state["whole"].set_value(paddle.full([2], -1.0))
        return found

    assert on_all(2, run) == [([1.0, 1.0], 5.0)] * 2
    (first,) = [value for rank, value in sent if rank == 0]
    assert [value for rank, value in sent if rank == 1] == [None]
    assert first["whole"].tolist() == [1.0, 1.0]
