"""Has one rank hold the whole model and the whole optimizer, whoever has which part of them."""

from __future__ import annotations

from collections.abc import Mapping

from fleetpipe.aliases import Layer, Optimizer, Tensor
from fleetpipe.checkpoint.contents.objects import Objects
from fleetpipe.checkpoint.contents.parts import Held, TensorName
from fleetpipe.checkpoint.files.plan import Inventory, planned
from fleetpipe.checkpoint.files.tensors import Region
from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.job.job import Job
from fleetpipe.paddle_api import paddle

_WHAT = "gathering the model"


def gathered(job: Job, model: Layer, optimizer: Optimizer) -> dict[TensorName, Tensor]:
    """Returns copies of all tensors, whole, on the first rank of the job; nothing elsewhere.

    Collective. The ranks pass their parts in turn, so that none but the first holds more than
    another rank's beside its own.

    Args:
        job: The job.
        model: The wrapped model.
        optimizer: Its optimizer; None where there is none.

    Raises:
        CheckpointError: The ranks do not have the same model.
        PipelineTimeout: Some rank did not come within the limit.
    """
    objects = Objects(model, optimizer)
    part = model.layers.state.checkpoint_part(joined=False)
    states = objects.optimizer_part(part)
    held = {**part.held(), **({} if states is None else states.held())}
    ranks = Ranks.of_job()
    texts = ranks.together(_WHAT, lambda: Inventory.of(held).to_json())
    plan = planned([Inventory.from_json(text) for text in texts])
    whole: dict[TensorName, Tensor] = {}
    with job.guarded(lambda: _WHAT):
        for source in range(ranks.count):
            parts = (
                [(*name, cut, _copy(held[name])) for name, _, cut in plan.parts_of(ranks.rank)]
                if source == ranks.rank
                else None
            )
            for group, name, cut, tensor in job.everyone().broadcast(parts, source):
                if ranks.rank == 0:
                    _put(
                        whole,
                        TensorName(group, name),
                        None if cut is None else Region(*cut),
                        tensor,
                    )
    return whole


def of_group(whole: Mapping[TensorName, Tensor], group: str) -> dict[str, Tensor]:
    """Returns the tensors of one group by name."""
    return {name.name: tensor for name, tensor in whole.items() if name.group == group}


def _copy(held: Held) -> Tensor:
    """Returns what may change before it has left this process as something that does not."""
    return paddle.assign(held.tensor)


def _put(
    whole: dict[TensorName, Tensor], name: TensorName, cut: Region | None, part: Tensor
) -> None:
    if cut is None:
        whole[name] = part
        return
    if name not in whole:
        whole[name] = paddle.empty(cut.whole(tuple(part.shape)), part.dtype)
    place = tuple(
        slice(cut.start, cut.stop) if axis == cut.axis else slice(None) for axis in range(part.ndim)
    )
    whole[name][place] = part
