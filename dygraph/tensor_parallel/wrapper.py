"""The wrapper of a model that is cut by tensor parallelism alone: Fleet's ``TensorParallel``."""

from __future__ import annotations

from typing import Any

from fleetpipe._paddle import paddle
from fleetpipe.dygraph.tensor_parallel.layer import split_axis
from fleetpipe.errors import ConfigError
from fleetpipe.job import current_job
from fleetpipe.transport import Group


class TensorParallel(paddle.nn.Layer):
    """Calls a model of any class, whose tensor-parallel layers are the same slices everywhere."""

    def __init__(self, layers: Any, hcg: Any = None, strategy: Any = None) -> None:
        """Makes what all members hold alike the same on each. Collective over the job.

        Args:
            layers: The model.
            hcg: Accepted for Fleet's sake; the topology is that of ``fleet.init``.
            strategy: The options; ``mp_configs.need_broadcast_data`` (by default on) decides
                whether every call gives all members the first one's inputs.

        Raises:
            ConfigError: ``fleet.init`` was not called.
            PipelineTimeout: Another rank did not arrive within the limit.
        """
        super().__init__()
        job = current_job()
        if job is None:
            raise ConfigError(
                "a model is wrapped after fleet.init(is_collective=True, strategy=strategy)"
            )
        self._layers = layers
        self._strategy = strategy
        self._job = job
        self._members = job.model_parallel()
        with job.guarded(lambda: "wrapping the model"):
            share_whole_state(layers.state_dict(), self._members)
            _broadcast(list(layers.state_dict().values()), job.replicas())

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Calls the model. Collective over the members.

        Args:
            *inputs: What the model takes. The tensors among it, in tuples, lists and dicts too, get
                the values that the first member has.
            **named: Likewise.
        """
        if self._broadcasts_data():
            _broadcast(_tensors([inputs, named]), self._members)
        return self._layers(*inputs, **named)

    def _broadcasts_data(self) -> bool:
        if self._members.ranks == 1 or self._strategy is None:
            return self._members.ranks > 1
        return bool(getattr(self._strategy.hybrid_configs["mp_configs"], "need_broadcast_data", 1))


def share_whole_state(state: dict[str, Any], members: Group) -> None:
    """Gives every member what the first has of the parameters and buffers that are no slices.

    Collective over the members.

    Args:
        state: Parameters and buffers by name.
        members: The ranks that hold the slices of the others.
    """
    _broadcast([tensor for tensor in state.values() if split_axis(tensor) is None], members)


def _broadcast(tensors: list[Any], group: Group) -> None:
    """Gives each tensor the value that the group's first member has for it. Collective."""
    if group.ranks == 1:
        return
    first = group.broadcast([tensor.detach() for tensor in tensors], 0)
    if group.rank:
        for tensor, value in zip(tensors, first):
            tensor.set_value(value)


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, paddle.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
