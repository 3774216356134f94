"""Describes a whole layer to a rank that holds only some of its experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.contrib.experts.expert_layers import ExpertList
from fleetpipe.dygraph.gradients import gradient_of, set_gradient, zero_gradient
from fleetpipe.dygraph.layer_kinds import LayerKind
from fleetpipe.dygraph.tensor_parallel.groups import model_parallel_group
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import MoELayer, NaiveGate
from fleetpipe.paddle_api.meta_parallel import SEQUENCE_PARALLEL

#: The name under which Paddle's layer and the libraries' keep their experts.
LIST = "experts"


def is_expert(name: str) -> bool:
    """Whether the parameter of a fully qualified name belongs to an expert."""
    return LIST in name.split(".")


def _mark_parts(mixture: Any) -> None:
    """Marks the parameters whose gradient each member of ``mp_group`` has a part of."""
    members, expected = mixture.mp_group.ranks, model_parallel_group().ranks
    gate, split = type(mixture.gate), any(p.is_distributed for p in mixture.parameters())
    if gate is not NaiveGate or list(members) != list(expected) or split:
        raise ConfigError(
            "mp_group of a MoELayer has each member route a part of the tokens",
            expected=f"the naive gate, experts that are whole, and ranks {list(expected)} along mp",
            got=f"{gate.__name__}{', experts of tensor-parallel layers' * split}, "
            f"ranks {list(members)}",
            cause="losses and capacity of a gate, and tensor-parallel layers, need all tokens",
            fix="leave mp_group out: the members then compute the same; or "
            "gate={'type': 'naive'}, mp_group=hcg.get_model_parallel_group()",
        )
    for parameter in mixture.parameters():
        SEQUENCE_PARALLEL.mark_as_sequence_parallel_parameter(parameter)


def _spread_lists(layer: Layer) -> Iterator[tuple[str, tuple[list[str], int]]]:
    """Yields each list of experts that are not all here: path, names here, number of all."""
    for path, inner in layer.named_sublayers(include_self=True):
        if isinstance(inner, paddle.nn.LayerList) and path.rpartition(".")[2] == LIST:
            here = [name for name, _ in inner.named_children()]
            # Libraries' lists have None in the place of an expert that is not here.
            total = getattr(inner, "total", len(inner))
            if here and len(here) < total:
                yield path, (here, total)


class Mixtures(LayerKind):
    """The kind of layers with experts, which may be spread over ranks."""

    exchanges = True

    def take_built(self, layer: Layer) -> None:
        """Numbers the experts of Paddle's ``MoELayer`` among those of all ranks of its group.

        Paddle numbers them from 0 on each rank; layers of libraries have the right numbers already.

        Raises:
            ConfigError: The layer splits tokens along ``mp_group`` in a way that changes results.
        """
        for inner in layer.sublayers(include_self=True):
            if isinstance(inner, MoELayer) and inner.mp_group and inner.mp_group.nranks > 1:
                _mark_parts(inner)
            if isinstance(inner, MoELayer) and inner.world_size > 1:
                experts = inner.experts
                if not isinstance(experts, ExpertList):
                    count = len(experts)
                    first, total = inner.group.rank * count, inner.world_size * count
                    inner.experts = ExpertList(experts, first, total)

    def whole_state(self, layer: Layer, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """See :meth:`LayerKind.whole_state`. The first expert here stands for all."""
        lists = {f"{path}.": numbers for path, numbers in _spread_lists(layer)}
        whole: dict[str, Tensor] = {}
        expanded: set[str] = set()
        for name, tensor in state.items():
            prefix = next((path for path in lists if name.startswith(path)), None)
            if prefix is None:
                whole[name] = tensor
            elif prefix not in expanded:
                expanded.add(prefix)
                here, total = lists[prefix]
                first = f"{prefix}{here[0]}."
                one = {n[len(first) :]: t for n, t in state.items() if n.startswith(first)}
                for expert in range(total):
                    whole.update((f"{prefix}{expert}.{rest}", t) for rest, t in one.items())
        return whole

    def spreads(self, layer: Layer) -> bool:
        """Whether the experts of a layer are spread over several ranks."""
        return any(_spread_lists(layer))

    def fill_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Gives a gradient of zeros to experts that got no token in a batch.

        They have none, because a layer does not call them. A dense mixture would have zeros there,
        and an optimizer with momentum steps by zeros too.

        Args:
            parameters: The parameters by fully qualified name; those of no expert stay as they are.
        """
        for name, parameter in parameters.items():
            idle = not parameter.stop_gradient and gradient_of(parameter) is None
            if idle and is_expert(name):
                set_gradient(parameter, zero_gradient(parameter))


MIXTURES = Mixtures()
