"""Layers whose experts are spread over ranks, and to which a router sends tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fleetpipe.aliases import Layer, PaddleGroup, Tensor
from fleetpipe.contrib.experts import exchange, routing
from fleetpipe.contrib.experts.exchange import expert_parallel, members_of
from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.mesh import traffic
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.kernels import CAN_GATHER_NOTHING
from fleetpipe.paddle_api.tensor import to_host


class ExpertList(paddle.nn.LayerList):
    """The experts of a layer that this rank holds, named by their numbers among all experts.

    Thus their parameters have the same names as on one device. An index counts only the experts of
    this rank. Parameters that other ranks do not hold have Paddle's mark ``no_sync``.

    Attributes:
        total: Number of experts on all ranks.
    """

    def __init__(self, experts: Iterable[Layer], first: int, total: int) -> None:
        """Takes the experts from number ``first`` on; there are ``total`` on all ranks."""
        super().__init__()
        self.total = total
        for number, expert in enumerate(experts, first):
            self.add_sublayer(str(number), expert)
        for parameter in self.parameters() if len(self) < total else ():
            parameter.no_sync = True

    def __getitem__(self, place: int) -> Layer:
        return list(self)[place]


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
            make: Builds an expert, a layer of one tensor [tokens, width]. It is called for all of
                them in order, so that each has the weights that it has on one device; a rank keeps
                its own experts, and has one more at a time.
            count: Number of experts on all ranks.
            group: Paddle's group of the ranks that hold them; None for those along ``ep_degree``.

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
        here = range(self._group.rank * count // ranks, (self._group.rank + 1) * count // ranks)
        made = ((number, make()) for number in range(count))
        experts = [expert for number, expert in made if number in here]
        _require_layers(experts)
        self.experts = ExpertList(experts, here.start, count)

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
            # All ranks exchange gradients, or none: also where no token comes to this one.
            tokens = tokens.detach()
            tokens.stop_gradient = False
        counts = routing.number_count(choices, self.experts.total)
        order = routing.by_expert(choices.flatten())[choices.size - int(counts.sum()) :]
        if order.shape[0] == 0 and not CAN_GATHER_NOTHING:
            return tokens.scale(0.0)  # without ep_degree no other rank waits
        rows = paddle.gather(tokens, order // choices.shape[1])
        ranks = self._group.ranks
        counts_in = paddle.concat(self._group.all_to_all(paddle.split(counts, ranks)))
        arrived = exchange.scatter(rows, counts, counts_in, self._group)
        traffic.note_tokens(rows.shape[0], rows.shape[-1] * rows.element_size(), counts)
        made = self._run(arrived, counts_in)
        traffic.note_outputs()
        outputs = exchange.gather(made, counts, counts_in, self._group)
        width = outputs.shape[-1]
        if outputs.shape[0] > 0:
            places = paddle.zeros([choices.size, width], outputs.dtype)
            by_choice = paddle.scatter(places, order, outputs)
        else:
            # Backward comes by both exchanges without a token too: other ranks wait in them.
            by_choice = paddle.zeros([choices.size, width], outputs.dtype) + outputs.sum()
        return (by_choice.reshape([*choices.shape, width]) * weights.unsqueeze(-1)).sum(axis=1)

    def _run(self, arrived: Tensor, counts_in: Tensor) -> Tensor:
        outputs, start = [], 0
        by_expert = to_host(counts_in).reshape([self._group.ranks, -1]).t().tolist()
        for expert, counts in zip(self.experts, by_expert):
            for count in counts:
                if count:
                    outputs.append(expert(arrived[start : start + count]))
                start += count
        return paddle.concat(outputs) if outputs else arrived


def _require_layers(experts: list[Layer]) -> None:
    layers = all(isinstance(expert, paddle.nn.Layer) for expert in experts)
    if not layers or len({id(expert) for expert in experts}) < len(experts):
        raise ConfigError(
            "each call of make builds an expert, a layer of its own",
            got=", ".join(type(expert).__name__ for expert in experts),
            cause="make returns nothing, or the same layer each time",
            fix="Experts(lambda: nn.Linear(16, 16), 8)",
        )


def _require_shapes(tokens: Tensor, choices: Tensor, weights: Tensor) -> None:
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
