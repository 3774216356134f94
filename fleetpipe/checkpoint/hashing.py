"""The hash of a model in memory, whose tensors are spread over the ranks of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetpipe.checkpoint.contents.objects import Objects
from fleetpipe.checkpoint.contents.parts import MODEL, Names, SavedModel, TensorName
from fleetpipe.checkpoint.files import tensors, writer
from fleetpipe.checkpoint.files.manifest import hash_of, tensor_digest
from fleetpipe.checkpoint.files.tensors import Inventory, Share, plan_files
from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.errors import StateError
from fleetpipe.mesh.parts import Described, LocalTensor, Region
from fleetpipe.paddle_api.device import dynamic_mode
from fleetpipe.paddle_types import Layer, Program

_WHAT = "hashing the model"


@dynamic_mode()
def model_hash(model: Layer | Program | SavedModel, names: Names = None) -> str:
    """Returns one hash of all parameters and persistent buffers. Collective over the job.

    It is the same for every layout of ranks, and equal to the hash that ``fleetpipe hash`` prints
    for a checkpoint, or for a file of ``full_state_dict()``. The guide to checkpoints defines it.

    Args:
        model: As for :meth:`fleetpipe.CheckpointManager.save`.
        names: For a static program, as for :class:`fleetpipe.CheckpointManager`.

    Returns:
        64 hex digits, the same on every rank.

    Raises:
        CheckpointError: The ranks have different models, or a part is on no rank; every rank
            raises.
        ConfigError: ``model`` is no model.
        PipelineTimeout: A rank did not arrive within the limit.
        StateError: Ranks have different values of a parameter, as replicas; every rank raises.
    """
    ranks, local = Ranks.of_job(), dict[TensorName, LocalTensor]()

    def digests_here() -> tuple[str, list[str]]:
        part = Objects(model, names=names).required_model().local_tensors()
        local.update({name: one for name, one in part.items() if name.group == MODEL})
        # The digest of a part is computed as if the part were a tensor.
        return Inventory.of(local).to_json(), [
            tensor_digest(LocalTensor(one.tensor).described, [writer.bytes_of_tensor(one)])
            for one in local.values()
        ]

    everyone = ranks.together(_WHAT, digests_here)
    inventories = [Inventory.from_json(text) for text, _ in everyone]
    by_rank = [dict(zip(one.tensors, ones)) for one, (_, ones) in zip(inventories, everyone)]
    _require_same(inventories, by_rank)
    plan = plan_files(inventories)
    shares = {
        name: (plan.files[file].tensors[name].tensor, ones)
        for file, of_file in plan.shares.items()
        for name, ones in of_file.items()
    }
    cut = {name: share for name, share in shares.items() if len(share[1]) > 1}
    digests = {
        name: by_rank[ones[0].writer][TensorName(MODEL, name)]
        for name, (_, ones) in shares.items()
        if name not in cut
    }
    if cut:
        digests |= ranks.together(_WHAT, lambda: _digests_of_cut(ranks, cut, local))[0]
    return hash_of(digests)


def _require_same(
    inventories: Sequence[Inventory], by_rank: Sequence[Mapping[TensorName, str]]
) -> None:
    """Raises a ``StateError`` if ranks have different values of the same part of a tensor."""
    first: dict[tuple[TensorName, Region | None], tuple[int, str]] = {}
    for rank, (inventory, digests) in enumerate(zip(inventories, by_rank)):
        for name, part in inventory.tensors.items():
            holder, digest = first.setdefault((name, part.cut), (rank, digests[name]))
            if digests[name] != digest and not part.differs:
                raise StateError(
                    f"the ranks do not have the same values of {name}",
                    expected=f"those of rank {holder} of the job, {digest[:12]}",
                    got=f"{digests[name][:12]} on rank {rank} of the job",
                    cause="a script changed it on some ranks, or stepped an optimizer on some",
                    fix="restore the last checkpoint; fleetpipe locate finds the first difference",
                )


def _digests_of_cut(
    ranks: Ranks,
    cut: Mapping[str, tuple[Described, Sequence[Share]]],
    local: Mapping[TensorName, LocalTensor],
) -> dict[str, str]:
    """Sends parts of tensors to rank 0, one after another, which returns the tensors' digests."""

    def bytes_here(name: str) -> memoryview:
        return writer.bytes_of_tensor(local[TensorName(MODEL, name)])

    if ranks.rank:
        mine = [n for n, (_, ones) in cut.items() for one in ones if one.writer == ranks.rank]
        ranks.give(map(bytes_here, mine))
        return {}
    digests = {}
    for name, (tensor, ones) in cut.items():
        memory = memoryview(bytearray(tensor.nbytes))
        for region, rank in ones:
            values = (
                writer.bytes_of_tensor(LocalTensor(ranks.take(rank))) if rank else bytes_here(name)
            )
            for run in tensors.runs(tensor.shape, tensor.itemsize, region):
                memory[run.whole : run.whole + run.nbytes] = values[
                    run.part : run.part + run.nbytes
                ]
        digests[name] = tensor_digest(tensor, [memory])
    return digests
