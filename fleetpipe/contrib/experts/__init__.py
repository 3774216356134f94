"""Mixtures of experts: layers whose experts may be on other ranks, and the losses of gates.

Start with ``Experts``. ``exchange.py`` routes tokens to experts and sends them there; Paddle's own
layers call it too. ``MIXTURES`` tells other packages about layers of which a rank has some experts.

A gate runs in some stage, and the loss is computed in the last stage. Therefore with
``AuxiliaryLoss`` each layer returns a dict of its output and the sum of the losses of all gates so
far. The dict crosses between stages as any other value, and its gradients come back the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fleetpipe.aliases import Layer, Nest, PaddleGroup, Tensor
from fleetpipe.contrib.experts import exchange
from fleetpipe.contrib.experts.exchange import expert_parallel, members_of
from fleetpipe.dygraph.gradients import gradient_of, set_gradient, zero_gradient
from fleetpipe.dygraph.layer_kinds import LayerKind
from fleetpipe.dygraph.tensor_parallel.groups import model_parallel_group
from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.mesh import groups
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import CAN_GATHER_NOTHING
from fleetpipe.paddle_api.layer import MoELayer, NaiveGate
from fleetpipe.paddle_api.meta_parallel import SEQUENCE_PARALLEL
from fleetpipe.paddle_api.tensor import to_host

__all__ = ["AuxiliaryLoss", "ExpertList", "Experts"]


#: The keys of the dict by which layers pass their output and the losses so far to the next layer.
_VALUE, _LOSS = "value", "auxiliary loss"
#: Removes the loss that a layer has stored in its last forward, and returns it; None for none.
Take = Callable[[Layer], Tensor | None]
#: A layer, or a function in its place.
Function = Callable[..., Nest]

#: The name under which Paddle's layer and the libraries' keep their experts.
LIST = "experts"


def loss_of_gate(layer: Layer) -> Tensor | None:
    """Returns the loss that one of Paddle's gates has stored, and removes it; None for others."""
    take = getattr(layer, "get_loss", None)
    return take() if callable(take) else None


class AuxiliaryLoss(paddle.nn.Layer):
    """The loss of a pipeline some of whose layers have losses too, such as gates of experts.

    As ``loss_fn`` of a ``PipelineLayer``, it is ``criterion(output, label) + weight * auxiliary``
    for each micro-batch. ``auxiliary`` is the sum of the losses of all layers, in their order.
    """

    def __init__(
        self, criterion: Function, weight: float = 0.01, take: Take = loss_of_gate
    ) -> None:
        """Wraps another loss.

        Args:
            criterion: ``criterion(output, label)`` gives a Tensor with one element.
            weight: The factor of the sum of the layers' losses.
            take: Called with every sublayer of a layer that has run; returns its loss, or None.

        Raises:
            ConfigError: ``criterion`` or ``take`` cannot be called.
        """
        super().__init__()
        if not (callable(criterion) and callable(take)):
            raise ConfigError(
                "AuxiliaryLoss(criterion, weight, take) calls criterion and take",
                expected="a loss function, and a function of a layer that returns a Tensor or None",
                got=f"criterion={criterion!r}, take={take!r}",
                fix="AuxiliaryLoss(nn.MSELoss(), take=lambda layer: getattr(layer, 'l_aux', None))",
            )
        self.criterion, self.weight, self.take = criterion, weight, take

    @property
    def declares(self) -> Any:
        """The loss function that tells how many positions of a micro-batch count in its mean."""
        return self.criterion

    def forward(self, output: Nest, label: Nest) -> Tensor:
        """Returns the loss of a micro-batch."""
        loss = self.criterion(self.value_of(output), label)
        return loss + self.weight * output[_LOSS] if _is_carrier(output) else loss

    @staticmethod
    def carrying(functions: Mapping[int, Function], loss_fns: Sequence[Any]) -> dict[int, Function]:
        """Wraps the layers of a list so that each adds its losses to those that it receives.

        Args:
            functions: The layers and functions, by their numbers in the list.
            loss_fns: The loss functions of the model.

        Returns:
            The functions to call in place of them, by number.

        Raises:
            ConfigError: Some loss functions are no ``AuxiliaryLoss``, or have another ``take``.
        """
        auxiliary = [loss_fn for loss_fn in loss_fns if isinstance(loss_fn, AuxiliaryLoss)]
        takes = {loss_fn.take for loss_fn in auxiliary}
        if len(takes) > 1 or len(auxiliary) < len(loss_fns):
            raise ConfigError(
                "all loss functions of a model take the same losses of its layers",
                expected="an AuxiliaryLoss each, with the same take",
                got=", ".join(type(loss_fn).__name__ for loss_fn in loss_fns),
                fix="wrap the others in AuxiliaryLoss too, with weight=0",
            )
        take: Any = takes.pop()
        carrying: dict[int, Function] = {}
        for index, function in functions.items():
            # A partial of the layer itself, so that the layer is found in it.
            call: tuple[Function, ...] = (function,)
            if isinstance(function, functools.partial):
                call = (function.func, *function.args)
            carrying[index] = functools.partial(_run_and_carry, take, *call)
        return carrying

    @staticmethod
    def value_of(output: Nest) -> Nest:
        """Returns the output of a layer without the losses of gates."""
        return output[_VALUE] if _is_carrier(output) else output


def _is_carrier(value: Nest) -> bool:
    """Returns whether a value is the dict of an output and of the losses so far."""
    return isinstance(value, dict) and value.keys() == {_VALUE, _LOSS}


def _run_and_carry(take: Take, *call: Any) -> Nest:
    """Calls a layer, and adds the losses that it and its sublayers have stored to its output.

    Args:
        take: Called with a layer that has run; returns the layer's loss, or None.
        call: The layer or function, its leading arguments, and last the input: an output of the
            layer before, perhaps with losses.
    """
    function, *arguments, value = call
    total = value[_LOSS] if _is_carrier(value) else None
    output = function(*arguments, AuxiliaryLoss.value_of(value))
    parts = (part for part in (function, *arguments) if isinstance(part, paddle.nn.Layer))
    for layer in (sub for part in parts for sub in part.sublayers(True)):
        loss = take(layer)
        if loss is not None:
            total = loss if total is None else total + loss
    return output if total is None else {_VALUE: output, _LOSS: total}


class ExpertList(paddle.nn.LayerList):
    """The experts of a layer on this rank, named by their numbers among all experts.

    Thus their parameters have the same names as on one device. Indices count the experts of this
    rank only. If other ranks hold experts too, parameters have Paddle's mark ``no_sync``.

    Attributes:
        total: Number of experts on all ranks.
    """

    def __init__(self, experts: Iterable[Layer], first: int, total: int) -> None:
        """Takes this rank's experts, from number ``first`` on, of ``total`` on all ranks."""
        super().__init__()
        self.total = total
        for number, expert in enumerate(experts, first):
            self.add_sublayer(str(number), expert)
        for parameter in self.parameters() if len(self) < total else ():
            parameter.no_sync = True

    def __getitem__(self, index: int) -> Layer:
        return list(self)[index]


class Experts(paddle.nn.Layer):
    """Applies experts, which are spread over the ranks along ``ep``, to routed tokens.

    Attributes:
        experts: The :class:`ExpertList` of this rank.
    """

    def __init__(
        self, make: Callable[[], Layer], count: int, group: PaddleGroup | None = None
    ) -> None:
        """Builds this rank's experts; not collective.

        Args:
            make: Builds an expert, a layer of one tensor [tokens, width]. Every rank builds all
                experts in order, so that each has the weights that it has on one device, and keeps
                its own ones.
            count: Number of experts on all ranks.
            group: Paddle's group of the experts' ranks; None for the ranks along ``ep_degree``.

        Raises:
            ConfigError: The ranks do not divide the experts, or ``make`` builds no new layer.
        """
        super().__init__()
        self._group = expert_parallel() if group is None else members_of(group)
        ranks = self._group.ranks
        if not callable(make) or not isinstance(count, int):
            raise ConfigError(
                "Experts(make, count) takes what builds an expert, and how many there are",
                got=f"{type(make).__name__}, {count!r}",
                fix="Experts(lambda: nn.Linear(16, 16), 8)",
            )
        if count < 1 or count % ranks:
            nearest = max(ranks, round(count / ranks) * ranks)
            raise ConfigError(
                f"{count} experts cannot be spread over {ranks} ranks evenly",
                expected=f"a multiple of {ranks}, say {nearest}",
                got=f"{count} experts with ep_degree={ranks}",
                fix=f"build {nearest} experts, or choose an ep_degree that divides {count}",
            )
        rank = self._group.rank
        numbers = range(rank * count // ranks, (rank + 1) * count // ranks)
        every = ((number, make()) for number in range(count))
        experts = [expert for number, expert in every if number in numbers]
        _require_layers(experts)
        self.experts = ExpertList(experts, numbers.start, count)

    def forward(self, tokens: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sum of the outputs of each token's experts. Collective.

        The bits are those of one device: an expert runs on the tokens of one rank at a time.

        Args:
            tokens: [tokens, width].
            choices: The experts of each token, int32 or int64 [tokens, k]; -1 for none.
            weights: The factor of each expert's output, [tokens, k].

        Raises:
            PipelineTimeout: Some rank did not come within the limit.
            UsageError: The choices are no whole numbers or name experts that do not exist, the
                shapes do not fit together, or the weights are whole numbers.
        """
        _require_shapes(tokens, choices, weights)
        if tokens.stop_gradient and paddle.is_grad_enabled():
            # All ranks must exchange gradients, or none; also a rank that gets no token.
            tokens = tokens.detach()
            tokens.stop_gradient = False
        counts = exchange.number_count(choices, self.experts.total)
        order = exchange.by_expert(choices.flatten())[choices.size - int(counts.sum()) :]
        if order.shape[0] == 0 and not CAN_GATHER_NOTHING:
            return tokens.scale(0.0)  # without ep_degree no other rank waits
        rows = paddle.gather(tokens, order // choices.shape[1])
        ranks = self._group.ranks
        counts_in = paddle.concat(self._group.all_to_all(paddle.split(counts, ranks)))
        arrived = exchange.scatter(rows, counts, counts_in, self._group)
        groups.note_tokens(rows.shape[0], rows.shape[-1] * rows.element_size(), counts)
        computed = self._run_experts(arrived, counts_in)
        groups.note_outputs()
        outputs = exchange.gather(computed, counts, counts_in, self._group)
        width = outputs.shape[-1]
        if outputs.shape[0] > 0:
            zeros = paddle.zeros([choices.size, width], outputs.dtype)
            by_choice = paddle.scatter(zeros, order, outputs)
        else:
            # Without a token too, backward must run both exchanges, in which other ranks wait.
            by_choice = paddle.zeros([choices.size, width], outputs.dtype) + outputs.sum()
        return (by_choice.reshape([*choices.shape, width]) * weights.unsqueeze(-1)).sum(axis=1)

    def _run_experts(self, arrived: Tensor, counts_in: Tensor) -> Tensor:
        """Runs each expert on the tokens of one rank after another; returns all outputs.

        Args:
            arrived: [tokens, width], sorted by expert and rank.
            counts_in: The number of tokens that came from each (rank, expert).
        """
        outputs, start = [], 0
        by_expert = to_host(counts_in).reshape([self._group.ranks, -1]).t().tolist()
        for expert, counts in zip(self.experts, by_expert):
            for count in counts:
                if count:
                    outputs.append(expert(arrived[start : start + count]))
                start += count
        return paddle.concat(outputs) if outputs else arrived


def _require_layers(experts: list[Layer]) -> None:
    """Raises ConfigError if an expert is no layer, or the same layer as another one."""
    layers = all(isinstance(expert, paddle.nn.Layer) for expert in experts)
    if not layers or len({id(expert) for expert in experts}) < len(experts):
        raise ConfigError(
            "each call of make builds an expert, a layer of its own",
            got=", ".join(type(expert).__name__ for expert in experts),
            cause="make returns nothing, or the same layer each time",
            fix="Experts(lambda: nn.Linear(16, 16), 8)",
        )


def _require_shapes(tokens: Tensor, choices: Tensor, weights: Tensor) -> None:
    """Raises UsageError if the arguments of :meth:`Experts.forward` do not fit each other."""
    shapes = [list(getattr(tensor, "shape", ())) for tensor in (tokens, choices, weights)]
    two = all(len(shape) == 2 for shape in shapes)
    if not two or shapes[0][0] != shapes[1][0] or shapes[1] != shapes[2]:
        raise UsageError(
            "each token has as many choices of experts as weights",
            expected="tokens [tokens, width], choices and weights [tokens, k]",
            got=", ".join(f"{n} {s}" for n, s in zip(("tokens", "choices", "weights"), shapes)),
            fix="tokens = x.reshape([-1, width]), and weights, choices = paddle.topk(scores, k)",
        )
    if not weights.is_floating_point():
        raise UsageError(
            "the output of an expert is multiplied by a weight",
            expected="weights of a dtype of floats, as tokens have",
            got=f"weights {weights.dtype}",
            fix="pass the values of paddle.topk as weights, and its indices as choices",
        )


def is_expert(name: str) -> bool:
    """Returns whether the parameter with a fully qualified name belongs to an expert."""
    return LIST in name.split(".")


def _mark_partial_gradients(mixture: Any) -> None:
    """Marks the parameters of a ``MoELayer`` whose tokens are split along ``mp_group``.

    Each member has a summand of their gradients; marked gradients are added up later.

    Raises:
        ConfigError: The layer has a gate or experts that need all tokens, or another group.
    """
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


def _lists_with_remote_experts(layer: Layer) -> Iterator[tuple[str, tuple[list[str], int]]]:
    """Finds the lists of experts of which other ranks hold some.

    Yields:
        The path of each list; the names of the list's experts on this rank, and the number of all.
    """
    for path, inner in layer.named_sublayers(include_self=True):
        if isinstance(inner, paddle.nn.LayerList) and path.rpartition(".")[2] == LIST:
            names = [name for name, _ in inner.named_children()]
            # The lists of libraries have None for each expert of another rank.
            total = getattr(inner, "total", len(inner))
            if names and len(names) < total:
                yield path, (names, total)


class Mixtures(LayerKind):
    """Tells a pipeline how to treat layers with experts, which may be spread over ranks."""

    exchanges = True

    def take_built(self, layer: Layer) -> None:
        """Gives the experts of Paddle's ``MoELayer`` their numbers among those of all ranks.

        Paddle numbers them from 0 on each rank; the layers of libraries have these numbers already.

        Raises:
            ConfigError: The layer splits tokens along ``mp_group`` in a way that changes results.
        """
        for inner in layer.sublayers(include_self=True):
            if isinstance(inner, MoELayer) and inner.mp_group and inner.mp_group.nranks > 1:
                _mark_partial_gradients(inner)
            if isinstance(inner, MoELayer) and inner.world_size > 1:
                experts = inner.experts
                if not isinstance(experts, ExpertList):
                    count = len(experts)
                    first, total = inner.group.rank * count, inner.world_size * count
                    inner.experts = ExpertList(experts, first, total)

    def whole_state(self, layer: Layer, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the state that the layer would have with all experts, for names and shapes.

        Experts of other ranks get the tensors of this rank's first expert.
        """
        lists = {f"{path}.": numbers for path, numbers in _lists_with_remote_experts(layer)}
        whole: dict[str, Tensor] = {}
        expanded: set[str] = set()
        for name, tensor in state.items():
            prefix = next((path for path in lists if name.startswith(path)), None)
            if prefix is None:
                whole[name] = tensor
            elif prefix not in expanded:
                expanded.add(prefix)
                names, total = lists[prefix]
                first = f"{prefix}{names[0]}."
                of_first = {n[len(first) :]: t for n, t in state.items() if n.startswith(first)}
                for expert in range(total):
                    whole.update((f"{prefix}{expert}.{rest}", t) for rest, t in of_first.items())
        return whole

    def spreads(self, layer: Layer) -> bool:
        """Returns whether other ranks hold some experts of a layer."""
        return any(_lists_with_remote_experts(layer))

    def fill_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Gives a gradient of zeros to experts that got no token in a batch.

        On one device such an expert has a gradient of zeros, and an optimizer with momentum updates
        it.

        Args:
            parameters: The parameters by fully qualified name; only experts' parameters are
                changed.
        """
        for name, parameter in parameters.items():
            lacks_gradient = not parameter.stop_gradient and gradient_of(parameter) is None
            if lacks_gradient and is_expert(name):
                set_gradient(parameter, zero_gradient(parameter))


MIXTURES = Mixtures()
