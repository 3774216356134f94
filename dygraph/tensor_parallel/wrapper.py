"""``TensorParallel``, Fleet's wrapper of a model with tensor parallelism and no pipeline."""

from __future__ import annotations

from fleetpipe.aliases import Layer, Nest, Strategy, Tensor, Topology
from fleetpipe.dygraph.layer_kinds import broadcast_copies, broadcast_state, is_spread
from fleetpipe.dygraph.nest import tensors_of
from fleetpipe.job.job import Job, required_job
from fleetpipe.mesh.axes import SHARDS
from fleetpipe.mesh.groups import Group
from fleetpipe.mesh.parts import shard_axis
from fleetpipe.paddle_api import paddle


class TensorParallel(paddle.nn.Layer):
    """Wraps a model of any class with tensor-parallel layers; keeps replicas equal at the start."""

    def __init__(self, layers: Layer, hcg: Topology = None, strategy: Strategy = None) -> None:
        """Makes the parameters that are not shards equal on all members, and replicas equal.

        Collective over the job.

        Args:
            layers: The model.
            hcg: Accepted as in Fleet, without effect: the topology is that of ``fleet.init``.
            strategy: The options; ``mp_configs.need_broadcast_data`` (by default on) decides
                whether every call broadcasts the first member's inputs.

        Raises:
            StateError: ``fleet.init`` was not called.
            PipelineTimeout: Another rank did not arrive within the limit.
        """
        super().__init__()
        job = required_job("a tensor-parallel model was wrapped before fleet.init")
        self._layers = layers
        self._strategy = strategy
        self._job = job
        self._members = job.model_parallel()
        self._broadcasts_data = self._members.ranks > 1 and _asks_for_broadcasts(strategy)
        with job.guarded(lambda: "wrapping the model"):
            share_with_shards(layers.state_dict(), job)
            broadcast_copies(layers.state_dict(), job.copies(), job.expert_copies())

    def forward(self, *inputs: Nest, **named: Nest) -> Nest:
        """Calls the model. Collective over the members.

        Args:
            *inputs: The arguments of the model. Tensors in them, also within tuples, lists and
                dicts, get the first member's values.
            **named: The keyword arguments of the model, whose tensors get these values too.
        """
        if self._broadcasts_data:
            tensors = enumerate(tensors_of([inputs, named]))
            broadcast_state({str(index): tensor for index, tensor in tensors}, self._members)
        return self._layers(*inputs, **named)


def share_with_shards(state: dict[str, Tensor], job: Job) -> None:
    """Makes what is not cut into shards equal on all members, along every axis. Collective.

    Args:
        state: This rank's parameters and buffers by name.
        job: The job.
    """
    for axis in SHARDS:
        share_whole_state(state, job.along(axis), axis)


def share_whole_state(state: dict[str, Tensor], members: Group, axis: str = "mp") -> None:
    """Broadcasts the first member's parameters and buffers that are not cut along an axis.

    Collective over the members, the ranks along the axis. Parameters with ``is_distributed`` are
    not broadcast, as in Fleet, nor are experts.
    """
    not_cut = {n: t for n, t in state.items() if shard_axis(t) != axis and not is_spread(t)}
    broadcast_state(not_cut, members)


def _asks_for_broadcasts(strategy: Strategy) -> bool:
    """Whether the option ``mp_configs.need_broadcast_data`` is on, as by default."""
    configs = None if strategy is None else strategy.hybrid_configs["mp_configs"]
    return bool(getattr(configs, "need_broadcast_data", True))
