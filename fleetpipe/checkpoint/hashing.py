"""Computes the hash of a model whose tensors are spread over the ranks of a job: `model_hash`."""

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

#: A phrase for messages that says what the ranks do.
_PHRASE = "hashing the model"


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
        StateError: Replicas have different values of a parameter; every rank raises.
    """
    ranks, local = Ranks.of_job(), dict[TensorName, LocalTensor]()

    def digests_here() -> tuple[str, list[str]]:
        """Returns this rank's inventory as JSON, and the digest of each of its parts."""
        tensors_here = Objects(model, names=names).required_model().local_tensors()
        local.update({name: one for name, one in tensors_here.items() if name.group == MODEL})
        # The digest of a part is computed as if the part were a tensor.
        return Inventory.describe(local).to_json(), [
            tensor_digest(LocalTensor(one.tensor).described, [writer.bytes_of_tensor(one)])
            for one in local.values()
        ]

    everyone = ranks.together(_PHRASE, digests_here)
    inventories = [Inventory.from_json(text) for text, _ in everyone]
    digests_by_rank = [
        dict(zip(inventory.tensors, digests))
        for inventory, (_, digests) in zip(inventories, everyone)
    ]
    _require_equal_replicas(inventories, digests_by_rank)
    plan = plan_files(inventories)
    digests: dict[str, str] = {}
    split: dict[str, tuple[Described, Sequence[Share]]] = {}
    for file, shares_in_file in plan.shares.items():
        for name, shares in shares_in_file.items():
            if len(shares) > 1:
                split[name] = plan.files[file].tensors[name].tensor, shares
            else:
                digests[name] = digests_by_rank[shares[0].writer][TensorName(MODEL, name)]
    if split:
        digests |= ranks.together(_PHRASE, lambda: _digests_of_split(ranks, split, local))[0]
    return hash_of(digests)


def _require_equal_replicas(
    inventories: Sequence[Inventory], digests_by_rank: Sequence[Mapping[TensorName, str]]
) -> None:
    """Raises a ``StateError`` if ranks have different values of the same part of a tensor.

    Args:
        inventories: What each rank has.
        digests_by_rank: For each rank the digest of its part of each tensor.
    """
    first: dict[tuple[TensorName, Region | None], tuple[int, str]] = {}
    for rank, (inventory, digests) in enumerate(zip(inventories, digests_by_rank)):
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


def _digests_of_split(
    ranks: Ranks,
    split: Mapping[str, tuple[Described, Sequence[Share]]],
    local: Mapping[TensorName, LocalTensor],
) -> dict[str, str]:
    """Sends this rank's parts of tensors to rank 0, which joins them and computes the digests.

    Args:
        ranks: The ranks of the job.
        split: By name, the tensors of which several ranks have parts, with the part of each rank.
        local: The tensors of this rank.

    Returns:
        The digest of each tensor by name on rank 0; an empty dict on other ranks.
    """

    def bytes_here(name: str) -> memoryview:
        return writer.bytes_of_tensor(local[TensorName(MODEL, name)])

    if ranks.rank:
        sent = [n for n, (_, shares) in split.items() for s in shares if s.writer == ranks.rank]
        ranks.send_parts(map(bytes_here, sent))
        return {}
    digests = {}
    for name, (tensor, shares) in split.items():
        memory = memoryview(bytearray(tensor.nbytes))
        for region, rank in shares:
            if rank:
                values = writer.bytes_of_tensor(LocalTensor(ranks.receive_part(rank)))
            else:
                values = bytes_here(name)
            for run in tensors.byte_runs(tensor.shape, tensor.itemsize, region):
                block = values[run.part_offset : run.part_offset + run.nbytes]
                memory[run.tensor_offset : run.tensor_offset + run.nbytes] = block
        digests[name] = tensor_digest(tensor, [memory])
    return digests
